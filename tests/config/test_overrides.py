"""Several configurations and options of the configuration on the command line of a verb without a Trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.cli.main import main
from grpo_pl.config.objects import ConfigError, gather, settings
from grpo_pl.types import SamplingParams
from tests.conftest import exit_status


@pytest.mark.parametrize(
    ("args", "gathered"),
    [
        (["rows.jsonl", "--batch-size", "3"], (["rows.jsonl", "--batch-size", "3"], [])),
        (
            ["--config=a.yaml", "-n", "2", "--config", "b.yaml", "--data.source.seed", "4", "--model.rewards+=X"],
            (["-n", "2"], ["a.yaml", "b.yaml", "--data.source.seed=4", "--model.rewards+=X"]),
        ),
        (["--config"], (["--config"], [])),  # the parser says that a value is missing
    ],
)
def test_configurations_and_their_options_are_gathered(args: list[str], gathered: tuple[list[str], list[str]]) -> None:
    assert gather(args) == gathered


def test_options_win_over_files_whatever_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {sampling: {temperature: 0.5, stop: [x]}}")
    found = settings(["--model.sampling.temperature=2", str(tmp_path / "a.yaml")], "model.sampling")
    assert found.build("model.sampling", SamplingParams) == SamplingParams(temperature=2.0, stop=("x",))


def test_an_option_that_the_verb_does_not_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^unknown option --data\.sorce; did you mean data\.source\?$"):
        settings(["--data.sorce=X"], "data.source")
    with pytest.raises(
        ConfigError, match=r"^unknown option --trainer\.devices: of a configuration, this command reads m"
    ):
        settings(["--trainer.devices=2"], "model.rewards")


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """``score(*arguments)``: exit status of ``grpo-pl score`` on one row, the names of its scores, lines of errors."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"completion": "\\boxed{1}", "answer": "1"}))
    rewards = [{"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True}}]
    Path("c.yaml").write_text(yaml.safe_dump({"model": {"rewards": rewards}}))

    def run(*arguments: str) -> tuple[int, list[str], list[str]]:
        Path("rows.scores.jsonl").unlink(missing_ok=True)
        status = exit_status(lambda: main(["score", "rows.jsonl", *arguments]))
        written = Path("rows.scores.jsonl").read_text() if Path("rows.scores.jsonl").exists() else "{}"
        return status, list(json.loads(written).get("scores", {})), capsys.readouterr().err.splitlines()

    return run


def test_a_verb_lays_configurations_over_each_other_and_takes_options(score: Any) -> None:
    Path("more.yaml").write_text("model: {rewards+: [{class_path: grpo_pl.rewards.FormatReward}]}")
    assert score("--config=c.yaml")[:2] == (0, ["math"])
    assert score("--config", "c.yaml", "--config", "more.yaml")[:2] == (0, ["math", "format"])
    assert score("--config=c.yaml", "--model.rewards+=RepetitionReward")[:2] == (0, ["math", "repetition"])
    only = "[{class_path: ExactReward, init_args: {correctness: true}}]"
    assert score("--config=c.yaml", f"--model.rewards={only}")[:2] == (0, ["exact"])
    assert score("--model.rewards", only)[:2] == (0, ["exact"])  # without any file


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["--config=none.yaml"], 1, "no such file: none.yaml"),
        (["--config=other.yaml"], 1, "other.yaml has neither `rewards` nor `model.rewards`."),
        (["--config=dict.yaml"], 2, "rewards must be of type list, got \"{'a': 1}\""),
        (["--config=c.yaml", "--model.rewards+=MathRewar"], 2, "model.rewards: there is no MathRewar; did you mean"),
        (["--config=c.yaml", "--model.reward+=X"], 2, "unknown option --model.reward+; did you mean model.rewards?"),
        (["--config=c.yaml", "--batch-sise=3"], 2, "unknown option --batch_sise; did you mean --batch_size?"),
        ([], 1, "--config is missing: give a YAML file with `rewards`"),
    ],
)
def test_a_mistake_is_one_line(score: Any, arguments: list[str], status: int, line: str) -> None:
    for name, text in {"other": "data: {}", "dict": "rewards: {a: 1}"}.items():
        Path(f"{name}.yaml").write_text(text)
    found, _, errors = score(*arguments)
    assert found == status
    assert errors[0].startswith(f"grpo-pl score: error: {line}")
    assert errors[1:] in ([], ["(all options: grpo-pl score --help)"])
