"""Whole runs of ``grpo-pl`` on a task of seconds: what they leave behind, and that they can be repeated and resumed."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from docstring_parser import parse_from_object
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_pl.config.objects import build, read
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.evaluation.held_out import Validation
from grpo_pl.extras.preferences.reward_model import PreferenceData, RewardModelModule
from grpo_pl.objective.fields import Objective
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.teacher import TeacherConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ExactReward, FormatReward
from grpo_pl.rewards.base import Reward
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.sft_module import SFTData, SFTModule
from grpo_pl.types import SamplingParams
from tests.conftest import CommandLine

ReadMetrics = Callable[[Path], list[dict[str, str]]]


@dataclass(frozen=True)
class Fitted:
    config: Path
    folder: Path
    outcome: Any

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "export" / "model.safetensors")


def _fit(command_line: Any, config: Path, *arguments: object) -> Fitted:
    outcome = command_line.done("fit", "--config", config, *arguments)
    metrics = re.search(r"^metrics +(.+)$", outcome.out, re.MULTILINE)
    assert metrics, outcome.out
    return Fitted(config, Path(metrics[1]).parent, outcome)


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """One for which nobody else has made the cold start."""
    return CommandLine(tmp_path_factory.mktemp("command_line"))


@pytest.fixture(scope="module")
def first(command_line: Any) -> Fitted:
    return _fit(command_line, command_line.config())


@pytest.fixture(scope="module")
def second(command_line: Any, first: Fitted) -> Fitted:
    return _fit(command_line, first.config)


def _held_out(rows: list[dict[str, str]]) -> list[tuple[float, float]]:
    return [(float(row["val/pass@1"]), float(row["val/greedy"])) for row in rows if "val/pass@1" in row]


# --- what a run leaves behind ---------------------------------------------------------------------------------------


def test_a_run_is_named_after_its_configuration_and_keeps_everything_in_its_folder(
    command_line: Any, first: Fitted
) -> None:
    assert first.folder == command_line.runs / "tiny"
    kept = {"config.yaml", "metrics.csv", "completions.jsonl", "report.html", "tensorboard", "checkpoints", "export"}
    kept |= {".name", "run.json", "held_out.jsonl", "digests.jsonl"}
    assert {path.name for path in first.folder.iterdir()} == kept
    assert first.last.resolve().name == "rollout-000004.ckpt"


def test_held_out_numbers_come_first_and_last_and_at_the_interval(first: Fitted, read_metrics: ReadMetrics) -> None:
    rows = read_metrics(first.folder / "metrics.csv")
    training = ["reward" in row for row in rows]
    assert training == [False, True, True, False, True, True, False]  # every second of four rollouts
    steps = [int(row["step"]) for row in rows if "reward" in row]
    assert steps == list(range(steps[0], steps[0] + 4))
    assert all(0 <= value <= 1 for pair in _held_out(rows) for value in pair)


def test_the_closing_table_shows_both_ends_and_what_to_type_next(first: Fitted, read_metrics: ReadMetrics) -> None:
    before, *_, after = _held_out(read_metrics(first.folder / "metrics.csv"))
    for name, i in (("pass@1 (sampled)", 0), ("greedy", 1)):
        row = next(line for line in first.outcome.out.splitlines() if name in line)
        assert re.findall(r"\d\.\d{3}", row) == [f"{before[i]:.3f}", f"{after[i]:.3f}"]
    assert f"grpo-pl validate --config {first.config} --ckpt_path {first.last}" in first.outcome.out


def test_every_rollout_logs_the_metrics_of_the_glossary(first: Fitted, read_metrics: ReadMetrics) -> None:
    header = (first.folder / "metrics.csv").read_text().splitlines()[0].split(",")
    always = {"reward", "reward_std", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio"}
    always |= {"rewards/exact/mean", "rewards/format/mean", "num_tokens", "lr", "updates/skipped"}
    assert {"step_time", "time/rollout", "time/reward", "time/backward", "time/optimizer"} <= set(header)
    rows = [row for row in read_metrics(first.folder / "metrics.csv") if "reward" in row]
    for row in rows:
        assert always <= set(row)
        assert float(row["reward"]) == pytest.approx(
            float(row["rewards/exact/mean"]) + 0.1 * float(row["rewards/format/mean"]), abs=1e-6
        )
    assert {"loss", "grad_norm", "entropy"} <= set(header)  # of the rollouts whose rewards differed
    assert "kl" not in header  # beta is 0: there is no reference
    # warm-up of one rollout, then linearly down over the other three
    assert [float(row["lr"]) for row in rows] == pytest.approx([1.5e-3, 3e-3, 2e-3, 1e-3])


def test_training_moved_the_weights(command_line: Any, first: Fitted) -> None:
    (cached,) = (command_line.cache / "cold_start").iterdir()
    start = load_file(cached / "model.safetensors")
    assert start.keys() == first.weights.keys()
    assert any(not torch.equal(start[name], weight) for name, weight in first.weights.items())


def test_the_export_is_a_hugging_face_folder_with_template_and_rewards(first: Fitted) -> None:
    export = first.folder / "export"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert model.generation_config.max_new_tokens == 32
    drawn = model.generate(**tokenizer("3+4=", return_tensors="pt"), do_sample=False)
    assert drawn.shape[1] > 4
    trained = torch.load(first.last, weights_only=True)["state_dict"]
    assert torch.equal(trained["policy.model.embed_tokens.weight"], model.get_input_embeddings().weight)


def test_the_manifest_rebuilds_template_and_rewards(first: Fitted) -> None:
    manifest = json.loads((first.folder / "export" / "grpo_pl.json").read_text())
    assert PromptTemplate(**manifest["template"]) == PromptTemplate()
    rewards = build(list[Reward], manifest["rewards"], "rewards")
    assert rewards == [ExactReward(correctness=True), FormatReward(weight=0.1, partial=True)]


def test_nothing_that_libraries_chatter_about_is_printed(first: Fitted) -> None:
    for word in ("Warning", "warn", "TPU", "deprecated", "weights_only", "litlogger"):
        assert word not in first.outcome.out + first.outcome.err


# --- again ----------------------------------------------------------------------------------------------------------


def test_a_second_run_takes_the_next_name_and_says_so(command_line: Any, first: Fitted, second: Fitted) -> None:
    assert second.folder == command_line.runs / "tiny-2"
    assert f"{first.folder} exists; this run is {second.folder}" in second.outcome.err
    assert "exists" not in first.outcome.err


def test_a_second_run_takes_the_cold_start_from_the_cache(command_line: Any, first: Fitted, second: Fitted) -> None:
    assert "cold start: 60/60" in first.outcome.err
    assert "cold start" not in second.outcome.err
    assert len(list((command_line.cache / "cold_start").iterdir())) == 1


def test_the_same_seed_gives_the_same_metrics_and_weights(
    first: Fitted, second: Fitted, read_metrics: ReadMetrics
) -> None:
    assert read_metrics(first.folder / "metrics.csv") == read_metrics(second.folder / "metrics.csv")
    assert all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())


def test_another_seed_gives_other_samples(command_line: Any, first: Fitted, read_metrics: ReadMetrics) -> None:
    other = _fit(command_line, first.config, "--seed_everything=1", "--data.steps=1", "--name=seed")
    wanted, got = (read_metrics(run.folder / "metrics.csv")[1] for run in (first, other))
    assert wanted["completions/mean_length"] != got["completions/mean_length"]


def test_the_configuration_that_a_run_wrote_runs_again(
    command_line: Any, first: Fitted, read_metrics: ReadMetrics
) -> None:
    again = _fit(command_line, first.folder / "config.yaml", "--name=again")
    assert read_metrics(again.folder / "metrics.csv") == read_metrics(first.folder / "metrics.csv")


def test_validate_prints_what_fit_ended_with_and_leaves_nothing_behind(
    fresh_command_line: Any, first: Fitted, read_metrics: ReadMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    outcome = fresh_command_line.done("validate", "--config", first.config, "--ckpt_path", first.last)
    sampled, greedy = _held_out(read_metrics(first.folder / "metrics.csv"))[-1]
    printed = dict(re.findall(r"(val/pass@1|val/greedy) (\d\.\d{3})", outcome.err))  # in a line of progress
    assert printed == {"val/pass@1": f"{sampled:.3f}", "val/greedy": f"{greedy:.3f}"}
    assert "rollout 4: " in outcome.err and f"{sampled:.3f}" in outcome.out
    assert not list(Path().iterdir())
    assert not (fresh_command_line.cache / "cold_start").exists()  # the checkpoint makes it superfluous


# --- resuming -------------------------------------------------------------------------------------------------------

VARIANTS = {
    "plain": {},
    "several_updates_and_kl": {
        "model__algorithm": {"group_size": 4, "num_iterations": 2, "num_minibatches": 2, "beta": 0.1}
    },
    "renewed_reference": {
        "model__algorithm": {"group_size": 4, "beta": 0.1, "reference": "refreshed", "ref_update_every": 3}
    },
    "taught": {
        "model__algorithm": {
            "group_size": 4,
            "beta": 0.0,
            "num_iterations": 2,
            "terms": {
                "distillation": {
                    "class_path": "grpo_pl.objective.terms.distillation.Distillation",
                    "init_args": {"divergence": "forward_kl", "coef": 0.5},
                }
            },
        }
    },
}


@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        "several_updates_and_kl",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("renewed_reference", "taught")),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    command_line: Any, fresh_command_line: Any, variant: str, read_metrics: ReadMetrics, first: Fitted
) -> None:
    """Without another cold start, where there is no reference."""
    more = {"model__teacher": {"path": str(first.folder / "export")}} if variant == "taught" else {}
    config = command_line.config(variant, **VARIANTS[variant], **more)
    whole = first if variant == "plain" else _fit(command_line, config)
    checkpoint = whole.folder / "checkpoints" / "rollout-000002.ckpt"
    rest = _fit(fresh_command_line, config, "--ckpt_path", checkpoint)
    assert not (variant == "plain" and (fresh_command_line.cache / "cold_start").exists())
    assert all(torch.equal(weight, rest.weights[name]) for name, weight in whole.weights.items())
    wanted, got = (read_metrics(run.folder / "metrics.csv") for run in (whole, rest))
    third = [i for i, row in enumerate(wanted) if "reward" in row][2]
    assert got[-len(wanted[third:]) :] == wanted[third:]
    assert sum("reward" in row for row in got) in (2, 4)  # nothing twice
    if variant == "taught":
        assert float(wanted[third]["teacher/divergence"]) > 0
        kept = torch.load(checkpoint, weights_only=True)
        assert not kept["self_teacher"] and not any("teacher" in key for key in kept["state_dict"])


# --- faults ---------------------------------------------------------------------------------------------------------


def _poisoned(command_line: Any, name: str, **arguments: int) -> Path:
    callback = {"class_path": "user_parts.PoisonGradients", "init_args": arguments}
    return command_line.config(
        name,
        trainer={"accelerator": "cpu", "val_check_interval": 4, "callbacks": [callback]},
        model__optimization={"lr": 1e-3, "max_skipped_updates": 2},
        model__algorithm={"group_size": 4, "beta": 0.0, "skip_zero_advantage": False},  # an update in every rollout
    )


def test_an_update_that_is_not_finite_is_skipped_counted_and_the_run_goes_on(
    command_line: Any, read_metrics: ReadMetrics
) -> None:
    run = _fit(command_line, _poisoned(command_line, "one_bad", begin=2, end=3))
    skipped = [float(row["updates/skipped"]) for row in read_metrics(run.folder / "metrics.csv") if "reward" in row]
    assert skipped == [0, 0, 1, 0]
    states = [torch.load(run.folder / "checkpoints" / f"rollout-00000{n}.ckpt", weights_only=True) for n in (2, 3, 4)]
    before, during, after = (torch.cat([w.flatten() for w in state["state_dict"].values()]) for state in states)
    assert torch.equal(before, during)
    assert not torch.equal(during, after)


def test_several_in_a_row_end_the_run_with_one_line_that_names_the_last_checkpoint(command_line: Any) -> None:
    outcome = command_line("fit", "--config", _poisoned(command_line, "all_bad", begin=1))
    assert outcome.status == 1
    (line,) = [line for line in outcome.err.splitlines() if re.match(r"grpo-pl.*: error: ", line)]
    assert "2 updates in a row had a loss or gradient that is not finite" in line
    last = command_line.runs / "all_bad" / "checkpoints" / "rollout-000002.ckpt"
    assert str(last) in line
    assert "Traceback" not in outcome.err
    weights = torch.load(last, weights_only=True)["state_dict"].values()
    assert all(weight.isfinite().all() for weight in weights)


# --- shipped configurations -----------------------------------------------------------------------------------------

CONFIGS = Path(__file__).parents[2] / "configs"
OVERLAYS = sorted(path for path in CONFIGS.glob("*/*.yaml") if path.stem != "4_sft")  # of `grpo-pl sft`


def _built(*files: Path, options: Sequence[str] = ()) -> tuple[Any, Any]:
    """The model and data objects of configurations laid over each other, as ``fit`` would build them."""
    config = read(files, options)
    parts = {"seed_everything", "trainer", "checkpoint", "watch", "model", "data"}
    assert all(tree.keys() <= parts for tree in config.trees)
    others = {"reward_model": (RewardModelModule, PreferenceData), "sft": (SFTModule, SFTData)}
    model, data = others.get(files[0].stem, (GRPOModule, RolloutDataModule))
    return config.build("model", model), config.build("data", data)


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.gsm) if file.stem == "gsm_symbolic" else file
        for file in sorted(CONFIGS.glob("*.yaml"))
    ],
    ids=lambda path: path.stem,
)
def test_every_shipped_configuration_can_be_built(file: Path) -> None:
    base = file.stem.removesuffix("_lora")
    on_top_of = CONFIGS / f"{base.removesuffix('_box') if base.startswith('smollm2') else base}.yaml"
    model, data = _built(on_top_of, *([file] if file != on_top_of else []))
    assert {"reward_model": "classifier_config", "sft": "policy_config"}.get(file.stem, "rewards") in vars(model)
    assert data.steps > 0


@pytest.mark.parametrize(
    "overlay",  # those of algorithm/ by tests/config/test_presets.py
    [pytest.param(file, marks=pytest.mark.slow) if file.parent.name == "algorithm" else file for file in OVERLAYS],
    ids=[f"{file.parent.name}/{file.stem}" for file in OVERLAYS],
)
def test_every_shipped_overlay_can_be_built_on_the_quickstart(overlay: Path) -> None:
    given = yaml.safe_load(overlay.read_text()).get("model", {}).get("algorithm", {})
    terms = given.get("terms", {})
    base = "frozen_lake" if terms.keys() & {"gigpo", "turn_returns", "observations"} else "quickstart"
    options = ["--model.teacher.path=teacher"] if "distillation" in terms else []
    model, _ = _built(CONFIGS / f"{base}.yaml", overlay, options=options)
    for name, value in given.items():
        if name not in ("preset", "terms"):  # no field
            assert getattr(model.algorithm, name) == value
    assert model.algorithm.terms.keys() == terms.keys()


# --- help -----------------------------------------------------------------------------------------------------------


DOCUMENTED = (
    *(Objective, SamplingParams, Optimization, Validation, ColdStart, PolicyConfig, TeacherConfig, PromptTemplate),
)


def test_help_shows_the_docstring_of_every_field(command_line: Any) -> None:
    outcome = command_line("fit", "--help", "all")
    assert outcome.status == 0
    # what may be null has a page of its own, which the first page names
    shown = {"": _plain_words(outcome.out)}
    for kind, flag in ((ColdStart, "--model.cold_start.help"), (TeacherConfig, "--model.teacher.help")):
        assert flag in outcome.out
        shown[kind.__name__] = _plain_words(command_line("fit", flag).out)
    for kind in DOCUMENTED:
        about = {param.arg_name: str(param.description) for param in parse_from_object(kind).params}
        assert about.keys() == {field.name for field in fields(kind)}
        for name, text in about.items():
            words = _plain_words(" ".join(text.split()[:6]))
            assert words in shown.get(kind.__name__, shown[""]), f"{kind.__name__}.{name}"


def _plain_words(text: str) -> str:
    """Without what help pages render: quotes of code, and spaces, which line breaks add even inside words."""
    return "".join(text.replace("`", "").split())
