"""What docs/rewards.md says about MathReward and about writing a reward holds."""

import re
from pathlib import Path
from typing import Any

from grpo_pl.rewards import MathReward, Reward

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()


def test_every_row_of_the_table_of_rules_holds() -> None:
    table = PAGE.split("| gold | answer | value | why |\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    cases = [
        (gold, answer, float(value))
        for golds, answers, value, _ in rows
        for gold in re.findall("`([^`]+)`", golds)
        for answer in re.findall("`([^`]+)`", answers)
    ]
    assert len(cases) >= 15
    reward = MathReward()
    scores = reward([f"\\boxed{{{answer}}}" for _, answer, _ in cases], [gold for gold, *_ in cases], {})
    assert [s.value for s in scores] == [value for *_, value in cases], list(zip(cases, scores, strict=True))
    reward.close()


def test_the_example_of_a_reward_works() -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "ContainsReward" in block)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code.replace("from __future__", "#"), "docs", "exec", dont_inherit=True), names)
    reward: Reward = names["ContainsReward"](text="so")
    assert [score.value for score in reward(["and so on", "no"], ["", ""], {})] == [1.0, 0.0]
    assert reward.init_args() == {"name": "contains", "weight": 1.0, "correctness": False, "text": "so"}


def test_the_page_names_every_reward_and_status() -> None:
    import typing

    import grpo_pl.rewards as rewards

    for name in [*rewards.__all__, *typing.get_args(rewards.Status)]:
        assert f"`{name}" in PAGE or name in ("Reward", "Score", "Status", "StepScores"), name
