"""What docs/rewards.md says about MathReward and about writing a reward holds."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from grpo_pl.cli.commands.score import score
from grpo_pl.rewards import MathReward, Reward, Status
from tests.rewards.shipped import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "rewards.md").read_text()


def test_every_row_of_the_table_of_rules_holds(reward: MathReward) -> None:
    table = PAGE.split("| gold | answer | value | why |\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    cases = []
    for golds, answers, values, _ in rows:
        texts, figures = re.findall("`([^`]+)`", answers), [float(value) for value in values.split(",")]
        figures *= len(texts) if len(figures) == 1 else 1  # one for all answers, or one each
        for gold in re.findall("`([^`]+)`", golds):
            cases += [(gold, text, figure) for text, figure in zip(texts, figures, strict=True)]
    assert len(cases) >= 15
    scores = reward([f"\\boxed{{{answer}}}" for _, answer, _ in cases], [gold for gold, *_ in cases], {})
    assert [s.value for s in scores] == [value for *_, value in cases], list(zip(cases, scores, strict=True))


def test_the_example_of_a_reward_works() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "ContainsReward" in block)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code.replace("from __future__", "#"), "docs", "exec", dont_inherit=True), names)
    reward: Reward = names["ContainsReward"](text="so")
    assert [score.value for score in reward(["and so on", "no"], ["", ""], {})] == [1.0, 0.0]
    assert reward.init_args() == {"name": "contains", "weight": 1.0, "correctness": False, "text": "so"}


def test_the_worked_example_prints_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = next(block for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) if "cat rows.jsonl" in block)
    rows, shown = re.fullmatch(
        r"\$ cat rows\.jsonl\n(.*)\$ grpo-pl score rows\.jsonl --config rewards\.yaml\n(.*)\$ echo.*",
        example,
        re.DOTALL,
    ).groups()
    rewards = next(block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if block.startswith("model:"))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "rewards.yaml").write_text(rewards)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert score("rows.jsonl", config="rewards.yaml") == 1
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_every_reward_and_status_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)
    assert {*SHIPPED, *get_args(Status)} - set(rows) == set()
    assert "`ProcessReward`" in PAGE


def test_the_reference_takes_the_rewards_from_the_package() -> None:
    assert "\n::: grpo_pl.rewards\n" in (ROOT / "docs" / "reference" / "rewards.md").read_text()
