"""Names of TRL, transformers and Lightning: one line that says which field it is here, wherever they are put."""

import importlib
import inspect
from pathlib import Path

import pytest
import yaml

from grpo_pl.config.jsonargparse_adapter import option_names
from grpo_pl.config.suggestions import NAMES, nearest, nearest_class, our_name
from grpo_pl.files.runs import config_changes
from grpo_pl.moved import CLASSES

OPTIONS = ["model.algorithm.beta", "model.algorithm.group_size", "data.steps", "trainer.max_epochs", "name"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.algorithm.betta", "; did you mean --model.algorithm.beta?"),
        ("algorithm.group_size", "; did you mean --model.algorithm.group_size?"),  # the right leaf, too short a path
        ("steps", "; did you mean --data.steps?"),
        ("model.algorithm.group", "; did you mean --model.algorithm.group_size?"),  # the beginning of a name
        ("model.algorithm.loss_type", ""),
        ("zzzzzz", ""),
    ],
)
def test_the_nearest_option_is_named_and_none_where_none_is_near(name: str, expected: str) -> None:
    assert nearest(name, OPTIONS, prefix="--") == expected


def test_the_nearest_class_is_looked_for_in_the_module_that_was_named() -> None:
    assert nearest_class("grpo_pl.rewards.MatReward") == "; did you mean MathReward?"
    assert nearest_class("no_such_package.Thing") == ": No module named 'no_such_package'"
    assert nearest_class("EarlyStoping") == "; did you mean EarlyStopping?"  # Lightning's, too
    assert nearest_class("grpo_pl.rewards.Rewar") == "; did you mean MathReward?"  # not the abstract Reward


@pytest.mark.parametrize("old", CLASSES)
def test_an_earlier_class_path_is_known_with_the_class_now(old: str) -> None:
    module, _, name = CLASSES[old].rpartition(".")
    assert inspect.isclass(getattr(importlib.import_module(module), name))
    assert nearest_class(old) == f"; it is {CLASSES[old]} now"
    assert not _is_importable(old)


def _is_importable(path: str) -> bool:
    module, _, name = path.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


def test_a_file_with_earlier_class_paths_is_read_with_the_classes_now(tmp_path: Path) -> None:
    from tests.config.test_jsonargparse_adapter import Parsed

    file = tmp_path / "earlier.yaml"
    callbacks = [{"class_path": f"grpo_pl.callbacks.{name}"} for name in ("live.LiveView", "doctor.callback.Doctor")]
    rewards = [{"class_path": "grpo_pl.rewards.countdown.CountdownReward", "init_args": {"correctness": True}}]
    file.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}, "model": {"rewards": rewards}}))
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    fit = Parsed(["fit", f"--config={quickstart}", f"--config={file}"]).config.fit
    assert fit.model.rewards[0].class_path.endswith("CountdownReward")
    assert [one.class_path.rpartition(".")[2] for one in fit.trainer.callbacks] == ["LiveView", "Doctor"]
    assert (
        config_changes({"a": rewards}, {"a": [{**rewards[0], "class_path": CLASSES[rewards[0]["class_path"]]}]}) == []
    )


def test_fields_that_are_named_exist() -> None:
    from tests.config.test_jsonargparse_adapter import Parsed

    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    options = set(option_names(Parsed(["fit", f"--config={quickstart}"])._parser("fit")))
    groups = {parent for option in options for parent in (option, option.rpartition(".")[0])}
    for name, ours in NAMES.items():
        for word in ours.replace(",", " ").replace(";", " ").replace(":", " ").split():
            if word.startswith(("model.", "data.", "trainer.", "checkpoint.", "samples.")) and "init_args" not in word:
                assert word in groups, f"{name}: {word}"


def test_every_field_of_grpo_config_that_has_a_counterpart_is_known() -> None:
    from trl import GRPOConfig  # not in every worker: its import looks through all packages

    counterparts = {
        *("num_generations", "max_completion_length", "temperature", "top_p", "top_k", "beta", "epsilon"),
        *(
            "epsilon_high",
            "delta",
            "num_iterations",
            "steps_per_generation",
            "generation_batch_size",
            "loss_type",
            "scale_rewards",
        ),
        *("importance_sampling_level", "reward_weights", "mask_truncated_completions", "top_entropy_quantile"),
        "off_policy_mask_threshold",
        *("sync_ref_model", "ref_model_sync_steps", "learning_rate", "per_device_train_batch_size", "max_grad_norm"),
    }
    assert counterparts <= set(NAMES) and counterparts <= set(GRPOConfig.__dataclass_fields__)
    assert our_name("model.sampling.temperature") == ""  # it is in its place
