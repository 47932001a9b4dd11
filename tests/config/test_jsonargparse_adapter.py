"""What an overlay keeps of the configuration before it: the fields of the same class, nothing of another."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.cli.trainer import GRPOCLI

ARITHMETIC = "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"
SORTING = "grpo_pl.data.tasks.sorting.SortingPrompts"


def part(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


class Parsed(GRPOCLI):
    """Stops after parsing."""

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    """``settings(tree, overlay, …, options)``: what ``fit`` with these configurations amounts to."""

    def parse(*trees: dict[str, Any], options: tuple[str, ...] = (), verb: str = "fit") -> Any:
        base = {
            "model": {
                "policy": {"from_scratch": {"model_type": "qwen2"}},
                "rewards": [
                    part("grpo_pl.rewards.MathReward", correctness=True, percent="unit"),
                    part("grpo_pl.rewards.FormatReward", weight=0.1, partial=True),
                ],
            },
            "data": {"source": part(ARITHMETIC, digits=3, seed=5)},
        }
        files = [tmp_path / f"{number}.yaml" for number in range(len(trees) + 1)]
        for file, tree in zip(files, [base, *trees], strict=True):
            file.write_text(yaml.safe_dump(tree))
        with contextlib.redirect_stderr(io.StringIO()):
            return Parsed([verb, *(f"--config={file}" for file in files), *options]).config[verb]

    return parse


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_a_reward_in_the_place_of_another_gets_none_of_its_fields(settings: Any, verb: str) -> None:
    rewards = [part("grpo_pl.rewards.ExactReward"), part("grpo_pl.rewards.RepetitionReward")]
    by_file = settings({"model": {"rewards": rewards}}, verb=verb).model.rewards
    by_option = settings(options=(f"--model.rewards={yaml.safe_dump(rewards, default_flow_style=True)}",)).model.rewards
    for exact, repetition in (by_file, by_option):
        assert (exact.init_args.correctness, exact.init_args.weight) == (False, 1.0)
        assert repetition.init_args.weight == 1.0


@pytest.mark.parametrize(
    "path", ["FormatReward", "grpo_pl.rewards.FormatReward", "grpo_pl.rewards.format.FormatReward"]
)
def test_entries_of_the_same_class_are_merged_by_field(settings: Any, path: str) -> None:
    overlay = {"model": {"rewards": [part("MathReward"), part(path, weight=0.3)]}}
    math, form = settings(overlay).model.rewards
    assert (math.init_args.correctness, math.init_args.percent) == (True, "unit")
    assert (form.init_args.weight, form.init_args.partial) == (0.3, True)


def test_a_list_of_another_length_takes_the_place_of_the_list(settings: Any) -> None:
    (only,) = settings({"model": {"rewards": [part("MathReward", correctness=True)]}}).model.rewards
    assert only.init_args.percent != "unit"


def test_a_source_in_the_place_of_another_gets_none_of_its_fields(settings: Any) -> None:
    for found in (settings({"data": {"source": part(SORTING)}}), settings(options=("--data.source=SortingPrompts",))):
        assert (found.data.source.class_path, found.data.source.init_args.seed) == (SORTING, 0)
    kept = settings({"data": {"source": {"init_args": {"digits": 2}}}}).data.source.init_args
    assert (kept.digits, kept.seed) == (2, 5)


def test_what_is_inside_another_part_is_reset_as_well(settings: Any) -> None:
    sets = {"data": {"validation_sets": {"x": part(ARITHMETIC, seed=5)}}}
    found = settings(sets, {"data": {"validation_sets": {"x": part(SORTING)}}}).data.validation_sets["x"]
    assert found.init_args.seed == 0
    mixture, curriculum = "grpo_pl.data.mixture.MixturePrompts", "grpo_pl.data.curriculum.CurriculumPrompts"
    before, after = part(ARITHMETIC, seed=5), part(SORTING)
    mixed = settings(*({"data": {"source": part(mixture, parts={"a": p}, seed=3)}} for p in (before, after)))
    assert mixed.data.source.init_args.parts["a"].init_args.seed == 0
    chosen = settings(*({"data": {"source": part(curriculum, source=p)}} for p in (before, after)))
    assert chosen.data.source.init_args.source.init_args.seed == 0

    def per_source(reward: dict[str, Any]) -> dict[str, Any]:
        return {"model": {"rewards": [part("grpo_pl.rewards.PerSource", correctness=True, rewards={"a": reward})]}}

    judged = settings(per_source(part("MathReward", weight=0.5)), per_source(part("ExactReward")))
    assert judged.model.rewards[0].init_args.rewards["a"].init_args.weight == 1.0


def test_engines_loggers_callbacks_and_judges_are_reset(settings: Any) -> None:
    first = {
        "model": {"engine": part("grpo_pl.rollout.native.engine.NativeEngine", max_batch_rows=7)},
        "trainer": {
            "logger": [part("lightning.pytorch.loggers.CSVLogger", save_dir="a", name="mine")],
            "callbacks": [part("lightning.pytorch.callbacks.EarlyStopping", monitor="x", verbose=True, mode="max")],
        },
        "watch": {"strict": part("grpo_pl.rewards.StrictAnswerReward", weight=3)},
    }
    second = {
        "model": {"engine": part("grpo_pl.rollout.plain.PlainEngine")},
        "trainer": {
            "logger": [part("lightning.pytorch.loggers.TensorBoardLogger", save_dir="b")],
            "callbacks": [part("lightning.pytorch.callbacks.ModelCheckpoint")],
        },
        "watch": {"strict": part("grpo_pl.rewards.LenientAnswerReward")},
    }
    found = settings(first, second)
    assert found.model.engine.init_args.max_batch_rows == 0
    assert found.trainer.logger[0].init_args.name == "lightning_logs"
    assert found.trainer.callbacks[0].init_args.verbose is False
    assert found.trainer.callbacks[0].init_args.mode == "min"
    assert found.watch.strict.init_args.weight == 1.0


def test_fields_of_a_group_without_a_class_are_merged(settings: Any) -> None:
    found = settings(
        {"model": {"sampling": {"temperature": 0.5}}}, {"model": {"sampling": {"max_completion_length": 9}}}
    )
    assert (found.model.sampling.temperature, found.model.sampling.max_completion_length) == (0.5, 9)
