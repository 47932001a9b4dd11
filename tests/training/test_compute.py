"""Whether a run computes in bfloat16 is measured once, bounded by what it rounds away, and kept over a resume."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import PreTrainedModel

from grpo_pl.cli.main import main
from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.environments.calculator import calc
from grpo_pl.environments.tools import ToolEnvironment
from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.logprobs import use_forward_mode, was_tried
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.rollout.native.child import NativeChildEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.compute import DRAWN, ChosenPrecision, Measured, check_compute, check_measurable, measure
from grpo_pl.training.update import PolicyUpdate
from grpo_pl.types import Problem, SamplingParams

GOOD = Measured(gain=1.5, mean_error=1e-3, p99_error=1e-2, equal_rows=0.9)
SLOW = dataclasses.replace(GOOD, gain=1.0)
POLICY = PolicyConfig(
    from_scratch={
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
)
SAMPLING = SamplingParams(max_completion_length=32)
PROBLEMS = [Problem(id=i, question=f"{i}+{i + 1}=", answer=str(2 * i + 1)) for i in range(4)]


@pytest.fixture(scope="module")
def sampler() -> CompletionSampler:
    return CompletionSampler(engine=NativeEngine(), template=PromptTemplate(), tokenizer=load_tokenizer(POLICY))


@pytest.fixture
def policy(sampler: CompletionSampler) -> PreTrainedModel:
    return load_model(POLICY, sampler.tokenizer)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"gain": 1.3}, True),
        ({"gain": 1.29}, False),
        ({"mean_error": 1e-2}, True),
        ({"mean_error": 1.1e-2}, False),
        ({"p99_error": 5.1e-2}, False),
        ({"equal_rows": 0.0}, True),
        ({"mean_error": math.nan}, False),
        ({"gain": math.nan}, False),
    ],
)
def test_bfloat16_is_taken_where_it_is_fast_and_close(change: dict[str, float], taken: bool) -> None:
    assert dataclasses.replace(GOOD, **change).takes_bfloat16 is taken


def test_what_is_measured_is_the_difference_between_the_types_and_leaves_the_policy_alone(
    policy: PreTrainedModel, sampler: CompletionSampler
) -> None:
    before = {name: weight.clone() for name, weight in policy.named_parameters()}
    found = measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING)
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None
    assert policy.training and not torch.is_autocast_enabled("cpu")
    assert found.gain > 0
    # products of 8 bits in both passes, each in its own order: apart, but by little
    assert 1e-5 < found.mean_error < 2e-2 and found.mean_error < found.p99_error < 0.2
    again = measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING)
    assert dataclasses.replace(again, gain=0.0) == dataclasses.replace(found, gain=0.0)


def test_a_policy_whose_log_probabilities_are_far_apart_stays_in_float32(
    policy: PreTrainedModel, sampler: CompletionSampler
) -> None:
    with torch.no_grad():
        policy.lm_head.weight.mul_(8.0)  # logits of tens, of which 8 bits leave a tenth
    found = measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING)
    assert found.mean_error > 1e-2 and found.equal_rows < 1.0
    assert not dataclasses.replace(found, gain=9.0).takes_bfloat16


def test_the_completions_of_a_large_policy_are_few(
    policy: PreTrainedModel, sampler: CompletionSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = len(sampler.dialogue.prompt_ids(PROBLEMS[0].asked))
    work = 6 * sum(weight.numel() for weight in policy.parameters()) * (prompt + DRAWN)
    seen: list[tuple[int, int]] = []
    draw = CompletionSampler.sample

    def noted(self: CompletionSampler, model: Any, problems: Any, *, group_size: int, **options: Any) -> Any:
        seen.append((len(problems), group_size))
        return draw(self, model, problems, group_size=group_size, **options)

    monkeypatch.setattr(CompletionSampler, "sample", noted)
    for rows, expected in [(0.1, (1, 1)), (3.5, (1, 3)), (8.5, (2, 4)), (1e9, (4, 4))]:
        monkeypatch.setattr("grpo_pl.training.compute.MOST_WORK", rows * work)
        measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING)
        assert seen[-1] == expected
    measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING, most_tokens=2 * (prompt + DRAWN))
    assert seen[-1] == (1, 2)


def test_what_truncation_left_to_draw_from_is_scored_alike(policy: PreTrainedModel, sampler: CompletionSampler) -> None:
    masked = dataclasses.replace(SAMPLING, top_k=3, sampling_mask=True)
    assert measure(policy, sampler, PROBLEMS, group_size=4, sampling=masked).mean_error < 2e-2


@pytest.mark.parametrize(
    ("options", "changes", "line"),
    [
        ({"precision": "bf16-mixed"}, {}, r"trainer\.precision itself, which is bf16-mixed: leave it out"),
        ({"strategy": FSDP2Strategy()}, {}, r"trainer\.strategy\.init_args\.param_dtype bfloat16"),
        ({}, {"dtype": "bfloat16"}, r"these are in bfloat16: set model\.policy\.dtype float32"),
        ({}, {"engine": NativeChildEngine()}, "NativeChildEngine has a process of its own"),
    ],
    ids=["precision", "fsdp", "weights", "engine"],
)
def test_where_there_is_no_choice_auto_is_refused(
    sampler: CompletionSampler, options: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options)
    policy = load_model(dataclasses.replace(POLICY, dtype=changes.get("dtype", "float32")), sampler.tokenizer)
    sampler = dataclasses.replace(sampler, engine=changes.get("engine", sampler.engine))
    with pytest.raises(ValueError, match=rf"model\.compute: auto .*{line}.*, or model\.compute exact\."):
        check_measurable(trainer, policy, sampler)


def test_what_a_run_cannot_measure_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match=r"a single turn, and model\.environment has many"):
        check_compute("auto", POLICY, ToolEnvironment(tools=[calc]))
    with pytest.raises(ValueError, match=r"these are in bfloat16: set model\.policy\.dtype float32"):
        check_compute("auto", dataclasses.replace(POLICY, dtype="bfloat16"), None)
    check_compute("exact", dataclasses.replace(POLICY, dtype="bfloat16"), ToolEnvironment(tools=[calc]))


def test_the_trainer_gets_its_precision_back() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    chosen = ChosenPrecision("auto")
    for measured, precision in ((None, "32-true"), (GOOD, "bf16-mixed"), (SLOW, "32-true")):
        chosen.measured = measured
        chosen.apply(trainer)
        assert trainer.precision == precision
        chosen.apply(trainer)  # before every validation
        chosen.restore(trainer)
        assert trainer.precision == "32-true"
    double = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, precision="64-true")
    chosen.measured = GOOD
    chosen.apply(double)
    assert double.precision == "64-true"


def test_a_restored_choice_is_no_leave_for_what_auto_refuses(
    policy: PreTrainedModel, sampler: CompletionSampler
) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    chosen = ChosenPrecision("auto")
    chosen.load_state_dict(dataclasses.asdict(GOOD))
    with pytest.raises(ValueError, match="NativeChildEngine has a process of its own"):
        chosen.choose(
            trainer,
            policy,
            dataclasses.replace(sampler, engine=NativeChildEngine()),
            PROBLEMS,
            group_size=4,
            sampling=SAMPLING,
            most_tokens=None,
            collective=Collective(rank=0, world=1),
            should_stop=lambda: False,
        )


def test_a_stop_ends_the_measurement(policy: PreTrainedModel, sampler: CompletionSampler) -> None:
    with pytest.raises(RolloutInterrupted):
        measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING, should_stop=lambda: True)


def test_how_a_policy_is_scored_is_tried_anew_in_the_precision_of_the_run(
    policy: PreTrainedModel, sampler: CompletionSampler
) -> None:
    measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING)
    assert not was_tried(policy)
    use_forward_mode(policy, "chunked")
    measure(policy, sampler, PROBLEMS, group_size=4, sampling=SAMPLING)
    assert was_tried(policy)


def test_a_run_keeps_what_it_measured_in_its_checkpoints_and_record(command_line: Any) -> None:
    config = command_line.config(model__compute="auto")
    outcome = command_line("fit", f"--config={config}", "--name=auto")
    assert outcome.status == 0, outcome.err
    run = command_line.runs / "auto"
    kept = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["compute"]
    taken = "bf16-mixed" if Measured(**kept).takes_bfloat16 else "32-true"
    assert f"precision {taken}" in outcome.err and "times as fast" in outcome.err
    assert json.loads((run / "run.json").read_text())["compute"] == {"precision": taken, **kept}


@pytest.mark.parametrize("gain", [9.0, 0.1])
def test_a_resumed_run_goes_on_in_what_was_measured(
    command_line: Any, monkeypatch: pytest.MonkeyPatch, gain: float
) -> None:
    """The first process measures what no machine here would; the second one must not measure at all."""
    found, calls = dataclasses.replace(GOOD, gain=gain), list[int]()

    def once(*_: Any, **__: Any) -> Measured:
        calls.append(1)
        return found

    monkeypatch.setattr("grpo_pl.training.compute.measure", once)
    name, precision = f"kept_{gain}", "bf16-mixed" if gain > 1 else "32-true"
    config = command_line.config(model__compute="auto")
    for steps, resume in (1, []), (3, ["--resume"]):
        outcome = command_line("fit", f"--config={config}", f"--name={name}", f"--data.steps={steps}", *resume)
        assert outcome.status == 0, outcome.err
        assert f"precision {precision} (measured: bfloat16 is {gain:.2f} times as fast" in outcome.err
    assert len(calls) == 1
    last = command_line.runs / name / "checkpoints" / "last.ckpt"
    state = torch.load(last, weights_only=True)
    assert state["compute"] == dataclasses.asdict(found)
    moments = [value for moment in state["optimizer_states"][0]["state"].values() for value in moment.values()]
    assert {value.dtype for value in [*state["state_dict"].values(), *moments]} == {torch.float32}


def test_a_run_in_bfloat16_draws_trains_and_validates_in_it(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_pl.training.compute.measure", lambda *_, **__: GOOD)
    seen: dict[str, set[bool]] = {"rollout": set(), "update": set()}
    draw, score = NativeEngine.generate, PolicyUpdate.run

    def drawn(self: Any, *arguments: Any, **options: Any) -> Any:
        seen["rollout"].add(torch.is_autocast_enabled("cpu"))
        return draw(self, *arguments, **options)

    def updated(self: Any, *arguments: Any, **options: Any) -> Any:
        seen["update"].add(torch.is_autocast_enabled("cpu"))
        return score(self, *arguments, **options)

    monkeypatch.setattr(NativeEngine, "generate", drawn)
    monkeypatch.setattr(PolicyUpdate, "run", updated)
    for compute, on in (("auto", True), ("exact", False)):
        config = command_line.config(f"seen_{compute}", model__compute=compute)
        outcome = command_line("fit", f"--config={config}", f"--name=seen_{compute}", "--data.steps=2")
        assert outcome.status == 0, outcome.err
        assert seen == {"rollout": {on}, "update": {on}}
        last = command_line.runs / f"seen_{compute}" / "checkpoints" / "last.ckpt"
        seen = {name: set() for name in seen}
        outcome = command_line("validate", f"--config={config}", f"--ckpt_path={last}")
        assert outcome.status == 0, outcome.err
        assert seen == {"rollout": {on}, "update": set()}
        seen = {name: set() for name in seen}
        run, output = command_line.runs / f"seen_{compute}", command_line.runs / f"seen_{compute}.jsonl"
        assert main(["predict", f"--model={run}", "--prompts=2", "--samples=2", f"--output={output}"]) == 0
        assert seen == {"rollout": {on and multiplies_bfloat16()}, "update": set()}
        seen = {name: set() for name in seen}
        for model in (run / "export", last):
            trained = find_model(model)
            with trained.computing(trained.load_policy("cpu")):
                assert torch.is_autocast_enabled("cpu") is (on and multiplies_bfloat16())
    bf16 = command_line.runs / "seen_auto"
    changed = ["--model.compute=exact", "--data.steps=3", "--resume"]
    outcome = command_line("fit", "--config", bf16 / "config.yaml", "--name=seen_auto", *changed)
    assert outcome.status == 0, outcome.err
    assert seen == {"rollout": {False}, "update": {False}}
    assert "precision 32-true, processes 1" in outcome.err
    assert find_model(bf16 / "checkpoints" / "last.ckpt").precision == "32-true"
    assert torch.load(bf16 / "checkpoints" / "last.ckpt", weights_only=True)["compute"] == {}
