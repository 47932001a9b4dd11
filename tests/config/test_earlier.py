"""Configurations of version 0.3 are read, and what is gone ends in one line."""

from pathlib import Path
from typing import Any

import pytest

from grpo_pl.config.earlier import without_removed_fields
from grpo_pl.config.objects import build
from grpo_pl.data.sources import PromptSource

FSDP2 = "grpo_pl.distributed.strategy.FSDP2Strategy"


def test_removed_fields_without_effect_are_left_out_wherever_the_tree_begins() -> None:
    strategy = {"class_path": FSDP2, "init_args": {"cpu_offload": True, "tensor_parallel_size": 1}}
    tree = {"model": {"strategy_checked": False, "seed": 3}, "trainer": {"strategy": strategy, "devices": 2}}
    left = {"class_path": FSDP2, "init_args": {"cpu_offload": True}}
    assert without_removed_fields(tree) == {"model": {"seed": 3}, "trainer": {"strategy": left, "devices": 2}}
    assert without_removed_fields(tree["model"], "model") == {"seed": 3}
    assert without_removed_fields({"tensor_parallel_size": 1}, "trainer.strategy") == {}


GYM = "grpo_pl.data.tasks.reasoning_gym.ReasoningGymPrompts"


@pytest.mark.parametrize("kind", [GYM, "ReasoningGymPrompts"])
def test_a_field_that_does_nothing_now_is_left_out_with_one_line_at_any_depth(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    part = {"class_path": kind, "init_args": {"task": "chain_sum", "worked_share": 0.25}}
    mixture = {"class_path": "grpo_pl.data.mixture.MixturePrompts", "init_args": {"parts": {kind: part}}}
    left = without_removed_fields({"data": {"source": mixture}})
    sums = left["data"]["source"]["init_args"]["parts"][kind]
    assert sums == {"class_path": kind, "init_args": {"task": "chain_sum"}}
    without_removed_fields({"data": {"source": mixture}})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"data.source.parts.{kind}.worked_share ")
    other = {"class_path": "mine.Prompts", "init_args": {"worked_share": 0.25}}
    assert without_removed_fields({"data": {"source": other}}) == {"data": {"source": other}}


def test_a_source_of_version_0_3_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    source = {"class_path": GYM, "init_args": {"task": "chain_sum", "worked_share": 0.5}}
    built = build(PromptSource, source, "data.source")  # type: ignore[type-abstract]
    assert vars(built)["task"] == "chain_sum" and "worked_share" not in vars(built)
    assert "data.source.worked_share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tree", "field"),
    [
        ({"model": {"strategy_checked": True}}, "model.strategy_checked"),
        (
            {"trainer": {"strategy": {"class_path": FSDP2, "init_args": {"tensor_parallel_size": 2}}}},
            "trainer.strategy.tensor_parallel_size",
        ),
    ],
)
def test_a_removed_field_that_meant_something_ends_the_command_in_one_line(
    fresh_command_line: Any, tmp_path: Path, tree: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field} is gone"):
        without_removed_fields(tree)
    overlay = tmp_path / "overlay.json"
    overlay.write_text(str(tree).replace("'", '"').replace("True", "true"))
    outcome = fresh_command_line("fit", "--config", fresh_command_line.config(), "--config", overlay)
    assert outcome.status == 2 and f"{field} is gone" in outcome.err and "Traceback" not in outcome.err
