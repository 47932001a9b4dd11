"""What flows through a real run: what rewards are told, what is logged, and when the engine hears of new weights; runs
with thinking budgets, without a correctness reward, and in bfloat16."""

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.cli.main import main
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.evaluation.curves import read_curves
from grpo_pl.extras.kernels.decode_kernel import built_kernels
from grpo_pl.files.checkpoints import facts_of
from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.native.decoder_choice import SWITCH
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.update import PolicyUpdate
from tests.conftest import TINY_POLICY
from tests.training.runs import ReadMetrics, resumed, steps_of

SHORT: dict[str, Any] = {"model__cold_start": None, "model__sampling": {"max_completion_length": 8}}


def _run(command_line: Any, name: str, **changes: Any) -> Path:
    command_line.done("fit", "--config", command_line.config(name, **changes))
    folder: Path = command_line.runs / name
    return folder / "metrics.csv"


def _held_out(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if "val/pass@1" in row]


TRIED = 2
"""Demonstrations that the trial of the rewards takes before the cold start; what a reward hears then, it forgets."""


@pytest.fixture(scope="module")
def heard(command_line: Any) -> Any:
    """What a reward was told in a run whose demonstrations can be recognised."""
    if "user_parts" in sys.modules:  # other tests of this process may have run it
        sys.modules["user_parts"].HEARD.clear()
        sys.modules["user_parts"].SHOWN.clear()
    _run(
        command_line,
        "listening",
        model__cold_start={"steps": 2, "batch_size": 4},
        model__rewards=[{"class_path": "user_parts.Listening", "init_args": {"correctness": True}}],
        data__source={"class_path": "user_parts.Whispering", "init_args": {"digits": 1}},
    )
    return sys.modules["user_parts"]


def _scored(heard: Any) -> list[tuple[list[str], list[str], dict[str, list[Any]]]]:
    """The calls that judge against gold answers, all numbers here; others compare completions with each other."""
    return [call for call in heard.HEARD if all(answer.isdigit() for answer in call[1])]


def test_rewards_never_see_a_demonstration(heard: Any) -> None:
    assert len(heard.SHOWN) == TRIED + 8
    assert all(heard.SECRET in text for text in heard.SHOWN)
    assert len(_scored(heard)) >= 3 * 2 + 4  # three validations of sampled and greedy answers, and four rollouts
    assert heard.SECRET not in repr(heard.HEARD)
    for completions, answers, columns in heard.HEARD:
        assert {"prompt", "question", "completion_length"} <= set(columns)
        assert not any("demo" in name for name in columns)
        assert {len(column) for column in columns.values()} == {len(completions)} == {len(answers)}
        assert columns["prompt"] == columns["question"]  # nothing is put before or behind the question


def test_answers_belong_to_the_questions(heard: Any) -> None:
    for _, answers, columns in _scored(heard):
        for question, answer in zip(columns["question"], answers, strict=True):
            a, b = question.rstrip("=").split("+")
            assert int(a) + int(b) == int(answer)


def test_training_and_validation_ask_different_questions(heard: Any) -> None:
    held_out = {prompt.question for prompt in ArithmeticPrompts(digits=1).validation(6)}
    asked = [set(columns["question"]) for _, _, columns in _scored(heard)]
    assert sum(questions == held_out for questions in asked) == 6
    assert sum(not questions & held_out for questions in asked) >= 4


def test_the_cold_start_shows_training_questions_only(heard: Any) -> None:
    source = ArithmeticPrompts(digits=1)
    answers = {prompt.answer for step in (-1, -2) for prompt in source.prompts(step, count=4)}
    assert {text.split("{")[1].split("}")[0] for text in heard.SHOWN[TRIED:]} == answers


def test_the_engine_hears_of_new_weights_once_after_each_rollout(command_line: Any, read_metrics: ReadMetrics) -> None:
    metrics = _run(
        command_line,
        "telling",
        **SHORT,
        model__engine={"class_path": "user_parts.Telling"},
        model__validation={"samples": 1, "greedy": False},
    )
    # validations before, in the middle and at the end; one draw each
    assert [
        "draw",
        *["draw", "update"] * 2,
        "draw",
        *["draw", "update"] * 2,
        "draw",
    ] == sys.modules["user_parts"].EVENTS
    rows = _held_out(read_metrics(metrics))
    assert len(rows) == 3 and all("val/greedy" not in row for row in rows)


def test_a_policy_that_is_noisy_in_training_mode_alone_is_refused(command_line: Any) -> None:
    scratch = {**TINY_POLICY, "model_type": "phimoe", "num_local_experts": 4, "router_jitter_noise": 0.1}
    outcome = command_line(
        "fit", "--config", command_line.config("noisy", model__policy={"from_scratch": scratch}, **SHORT)
    )
    assert outcome.status == 1 and "mlp.router (PhimoeTopKRouter)" in outcome.err.splitlines()[-1]


def test_a_policy_with_a_config_of_several_models_is_trained_within_its_context(command_line: Any) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    scratch = {
        "model_type": "gemma3",
        "text_config": {**sizes, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64},
        "vision_config": {**sizes, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    }
    changes = {"model__policy": {"from_scratch": scratch}, "model__max_tokens_per_microbatch": None, **SHORT}
    few = {"trainer": {"accelerator": "cpu", "limit_val_batches": 0}, "data__steps": 1}
    command_line.done("fit", "--config", command_line.config("composite", **changes, **few))
    long = {**changes, "model__sampling": {"max_completion_length": 63}}
    refused = command_line("fit", "--config", command_line.config("composite_long", **long, **few))
    assert refused.status == 1 and "context has 1 token" in refused.err.splitlines()[-1], refused.err


def test_what_has_no_value_in_a_step_is_left_empty(command_line: Any, read_metrics: ReadMetrics) -> None:
    rewards = [
        {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}},
        {"class_path": "user_parts.Flickering"},
    ]
    rows = steps_of(read_metrics(_run(command_line, "flickering", **SHORT, model__rewards=rewards)))
    assert [float(row["frac_reward_zero_std"]) for row in rows] == [0, 1, 0, 1]
    for name in ("loss", "grad_norm", "entropy", "ratio/mean"):
        assert [name in row for row in rows] == [True, False, True, False]
    assert not any("completions/mean_length_correct" in row for row in rows)


def test_kl_is_logged_where_there_is_a_reference_and_begins_at_zero(
    command_line: Any, read_metrics: ReadMetrics
) -> None:
    metrics = _run(command_line, "kl", model__algorithm={"group_size": 4, "beta": 0.1})
    kl = [float(row["kl"]) for row in steps_of(read_metrics(metrics))]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert all(value > 1e-6 for value in kl[2:])


def test_validations_of_equal_weights_are_equal(command_line: Any, read_metrics: ReadMetrics) -> None:
    rows = _held_out(
        read_metrics(_run(command_line, "still", model__optimization={"lr": 1e-12}, model__validation={"samples": 8}))
    )
    values = {(row["val/pass@1"], row["val/greedy"]) for row in rows}
    assert len(rows) == 3
    assert len(values) == 1  # held-out samples are drawn with the same noise every time


def test_a_run_of_an_earlier_version_goes_on_with_lines_that_say_what_differs(
    command_line: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Its checkpoint does not say how tokens were drawn, its settings that ``model.compute: auto`` chose bfloat16."""
    save = GRPOModule.on_save_checkpoint

    def saved(self: GRPOModule, checkpoint: dict[str, Any]) -> None:
        save(self, checkpoint)
        assert checkpoint.pop("draw_rule") == "keyed race"
        checkpoint["compute"] = {"gain": 1.5, "mean_error": 1e-3, "p99_error": 1e-2, "equal_rows": 0.9}

    with monkeypatch.context() as patch:
        patch.setattr(GRPOModule, "on_save_checkpoint", saved)
        run = _run(command_line, "former", data__steps=1, **SHORT).parent
    earlier = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(earlier.replace("\nmodel:\n", "\nmodel:\n  compute: auto\n"))
    assert "compute: auto" in (run / "config.yaml").read_text()
    recwarn.clear()
    outcome = command_line.done(
        "fit", f"--config={command_line.config('former', data__steps=1, **SHORT)}", "--resume", "--data.steps=2"
    )
    lines = [*map(str, (w.message for w in recwarn)), *outcome.err.splitlines()]
    for told in ("samples differ from here on", "bf16-mixed goes on as before"):
        assert len([line for line in lines if told in line]) == 1
    assert "model.compute: " not in "".join(line for line in lines if line.startswith("changed"))


def test_a_resumed_run_draws_with_what_it_drew_with_or_says_so(command_line: Any, monkeypatch: Any) -> None:
    if not built_kernels():
        pytest.skip("no C compiler has built the decode kernel")
    monkeypatch.setenv(SWITCH, fastest := next(iter(built_kernels())))
    run = _run(command_line, "drawn", data__steps=1, **SHORT).parent
    assert torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["decoder"] == fastest
    assert json.loads((run / "export" / "grpo_pl.json").read_text())["decoder"] == fastest
    assert json.loads((run / "run.json").read_text())["compute"]["decoder"] == fastest
    assert find_model(run / "checkpoints" / "last.ckpt").decoder == fastest  # which evaluate and export read
    for name, switch, lines in (("kept", "", 0), ("switched", "torch", 1)):
        monkeypatch.setenv(SWITCH, switch)
        config = command_line.config(name, data__steps=2, **SHORT)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = command_line("fit", "--config", config, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
        assert outcome.status == 0, outcome.err
        assert sum("and goes on with torch" in str(warning.message) for warning in caught) == lines
        assert ("the decode kernel" in outcome.err) == (not lines)
    monkeypatch.setenv(SWITCH, "torch")
    config = command_line.config("switched", data__steps=2, **SHORT)
    with pytest.warns(UserWarning, match="and goes on with torch"):
        outcome = command_line("validate", "--config", config, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
    assert outcome.status == 0, outcome.err


def test_a_run_reports_its_budgets_and_a_resumed_one_goes_on(command_line: Any, read_metrics: Any) -> None:
    config = command_line.config("budgeted", model__sampling__thinking_budget=[1, 4])
    command_line.done("fit", "--config", config)
    run = command_line.runs / "budgeted"
    _, whole = resumed(command_line, read_metrics, run)
    assert all(1.0 <= float(row["thinking/mean_budget"]) <= 4.0 for row in whole)
    assert all(float(row["thinking/mean_length"]) <= float(row["thinking/mean_budget"]) for row in whole)
    assert all(0.0 < float(row["thinking/closed_ratio"]) <= 1.0 for row in whole)
    export, checkpoint = run / "export", run / "checkpoints" / "rollout-000002.ckpt"
    assert json.loads((export / "grpo_pl.json").read_text())["thinking_budget"] == [1, 4]
    assert find_model(export).sampling.thinking_budget == find_model(checkpoint).sampling.thinking_budget == (1, 4)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model__sampling__thinking_budget": 500}, "leave no room for an answer in max_completion_length"),
        ({"model__sampling__thinking_budget": 0}, "thinking_budget must be at least 1"),
        (
            {"model__sampling__thinking_budget": 3, "model__partial_rollouts": {"part_length": 4}},
            "model.partial_rollouts does not go with model.sampling.thinking_budget",
        ),
        (
            {"model__sampling__thinking_budget": 3, "model__template": {"thought_end": ""}},
            "template.thought_end is empty: give the text",
        ),
        (
            {"model__sampling__thinking_budget": 3, "model__template": {"thought_end": "\N{GREEK SMALL LETTER PI}"}},
            "of which the tokenizer knows only a part",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_ends_in_one_line(command_line: Any, settings: Any, told: str) -> None:
    run = command_line("fit", "--config", command_line.config("refused", **settings))
    assert run.status in (1, 2) and told in run.err and len(run.err.splitlines()) == 1, run.err


FORM = {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"partial": True}}
LENGTH = {
    "class_path": "grpo_pl.rewards.LengthReward",
    "init_args": {"shape": "budget", "max_length": 2, "weight": 0.5},
}
STOPPING = {
    "class_path": "lightning.pytorch.callbacks.EarlyStopping",
    "init_args": {
        "monitor": "val/reward",
        "mode": "max",
        "min_delta": 5.0,
        "patience": 1,
    },  # after the second validation
}


def test_a_run_is_measured_stopped_and_kept_by_its_held_out_reward(command_line: Any) -> None:
    short: dict[str, Any] = {"model__cold_start": None, "model__sampling": {"max_completion_length": 8}}
    trainer = {"accelerator": "cpu", "val_check_interval": 1, "callbacks": [STOPPING]}
    config = command_line.config("form", model__rewards=[FORM, LENGTH], data__steps=3, trainer=trainer, **short)
    outcome = command_line.done("fit", "--config", config)
    assert "No reward has `correctness: true`: val/reward" in outcome.err
    assert re.search(r"│ reward +│ .*│ reward format +│", outcome.out, re.DOTALL)
    run = command_line.runs / "form"
    columns = read_curves(run / "metrics.csv")
    assert {"val/reward", "val/rewards/format", "val/rewards/length"} <= columns.keys()
    assert not any(word in name for name in columns for word in ("pass@", "maj@", "greedy", "correct"))
    sums = zip(columns["val/reward"], columns["val/rewards/format"], columns["val/rewards/length"], strict=True)
    assert all(total == pytest.approx(form + 0.5 * length, abs=1e-6) for (_, total), (_, form), (_, length) in sums)
    assert columns["reward"][-1][0] == 1  # stopped after the first rollout
    facts = facts_of((run / "checkpoints" / "best.ckpt").resolve())
    assert facts is not None and facts["val/reward"] == pytest.approx(columns["val/reward"][-1][1])
    page = (run / "report.html").read_text()
    data = json.loads(page.split('type="application/json" id="data">')[1].split("</script>")[0])
    assert data["tiles"][0]["label"] == "reward, held out"
    assert [chart["title"] for chart in data["held_out"]["charts"]] == ["Held-out reward"]
    assert all(
        "correct" not in one for rollout in data["samples"] for g in rollout["groups"] for one in g["completions"]
    )
    assert not re.search("pass@|maj@", json.dumps([data["held_out"], data["charts"], data["tiles"]]))


def test_what_needs_a_right_answer_is_refused_without_one(command_line: Any) -> None:
    source = {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": {"digits": 1}}
    curriculum = {"class_path": "grpo_pl.data.curriculum.CurriculumPrompts", "init_args": {"source": source}}
    config = command_line.config("form2", model__rewards=[FORM], model__cold_start=None)
    for told, *options in (
        ("model.algorithm", "--model.algorithm.samples=correct"),
        ("no validation measures 'val/pass@1'", "--checkpoint.monitor=val/pass@1"),
        ("CurriculumPrompts, which follows what is solved,", f"--data.source={json.dumps(curriculum)}"),
    ):
        outcome = command_line("fit", "--config", config, *options)
        assert outcome.status == 1 and told in outcome.err, outcome.err


def test_a_run_in_bfloat16_draws_trains_and_validates_in_it(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[bool]] = {"rollout": set(), "update": set()}
    draw, score = NativeEngine.generate, PolicyUpdate.run

    def drawn(self: Any, *arguments: Any, **options: Any) -> Any:
        seen["rollout"].add(torch.is_autocast_enabled("cpu"))
        return draw(self, *arguments, **options)

    def updated(self: Any, *arguments: Any, **options: Any) -> Any:
        seen["update"].add(torch.is_autocast_enabled("cpu"))
        return score(self, *arguments, **options)

    def newly_seen() -> dict[str, set[bool]]:
        found = {name: set(values) for name, values in seen.items()}
        for values in seen.values():
            values.clear()
        return found

    monkeypatch.setattr(NativeEngine, "generate", drawn)
    monkeypatch.setattr(PolicyUpdate, "run", updated)
    config = command_line.config("bf16", trainer__precision="bf16-mixed")
    run, last = command_line.runs / "bf16", command_line.runs / "bf16" / "checkpoints" / "last.ckpt"
    command_line.done("fit", f"--config={config}", "--data.steps=2")
    assert newly_seen() == {"rollout": {True}, "update": {True}}
    assert json.loads((run / "run.json").read_text())["compute"]["precision"] == "bf16-mixed"
    state = torch.load(last, weights_only=True)
    moments = [value for moment in state["optimizer_states"][0]["state"].values() for value in moment.values()]
    assert {value.dtype for value in [*state["state_dict"].values(), *moments]} == {torch.float32}
    command_line.done("validate", f"--config={config}", f"--ckpt_path={last}")
    assert newly_seen() == {"rollout": {True}, "update": set()}
    output = command_line.runs / "bf16.jsonl"
    assert main(["predict", f"--model={run}", "--prompts=2", "--samples=2", f"--output={output}"]) == 0
    assert newly_seen() == {"rollout": {multiplies_bfloat16()}, "update": set()}
    for model in (run / "export", last):
        trained = find_model(model)
        with trained.computing(trained.load_policy("cpu")):
            assert torch.is_autocast_enabled("cpu") is multiplies_bfloat16()
    newly_seen()
    changed = ["--trainer.precision=32-true", "--data.steps=3", "--resume"]
    outcome = command_line.done("fit", "--config", run / "config.yaml", "--name=bf16", *changed)
    assert newly_seen() == {"rollout": {False}, "update": {False}}
    assert "precision 32-true, processes 1" in outcome.err
    assert find_model(last).precision == "32-true"
    with find_model(last).computing(find_model(last).load_policy("cpu")):
        assert not torch.is_autocast_enabled("cpu")
