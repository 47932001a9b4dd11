"""What bfloat16 gains is measured on the run's own problems, where there is a choice, and changes no weight."""

from collections.abc import Iterator
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from grpo_pl.data.tasks.shapes import ShapePrompts
from grpo_pl.extras.doctor import probe
from grpo_pl.extras.doctor.probe import bfloat16_gain, unmoved_answers
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.images.picture import Picture
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.logprobs import forward_mode
from grpo_pl.rewards import ExactReward
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import Problem, SamplingParams
from tests.conftest import TINY_POLICY
from tests.images import image_policy

POLICY = {**TINY_POLICY, "num_hidden_layers": 2, "max_position_embeddings": 64}
PROBLEMS = [Problem(id=i, question=f"{i}+{i + 1}=", answer=str(2 * i + 1)) for i in range(4)]


@pytest.fixture(autouse=True)
def _any_policy_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(probe, "LEAST_PARAMETERS", 0)


def _module(dtype: Any = "float32", policy: PolicyConfig | None = None, **parts: Any) -> GRPOModule:
    module = GRPOModule(
        policy or PolicyConfig(from_scratch=POLICY, dtype=dtype),
        [ExactReward(correctness=True)],
        algorithm=GRPOAlgorithm(group_size=4),
        sampling=SamplingParams(max_completion_length=32),
        **parts,
    )
    module.tokenizer = load_tokenizer(module.policy_config)
    module.policy = load_model(module.policy_config, module.tokenizer)
    return module


def _gain(module: GRPOModule, *, stop: bool = False, **options: Any) -> float | None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options)
    return bfloat16_gain(trainer, module, PROBLEMS, lambda: stop)


def test_seconds_in_float32_over_seconds_in_bfloat16_at_the_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that gives drawing 1 s and training 2 s in float32, and 0.5 s and 0.5 s in bfloat16."""
    module = _module()
    forward_mode(module.require_policy())
    before = {name: weight.clone() for name, weight in module.require_policy().named_parameters()}
    clock: Iterator[float] = chain.from_iterable(repeat((0.0, 1.0, 3.0, 0.0, 0.5, 1.0)))
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    prompt = len(module.sampler.encode(PROBLEMS[0]).ids)
    longer = (prompt + 32) / (prompt + 16)  # of the sequences; of the completions it is 32 / 16
    assert _gain(module) == pytest.approx((1.0 * 2 + 2.0 * longer) / (0.5 * 2 + 0.5 * longer))
    for name, weight in module.require_policy().named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None
    assert not torch.is_autocast_enabled("cpu")


def test_both_types_draw_and_train(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    own = probe.completion_logprobs

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return own(*args, **kwargs)

    monkeypatch.setattr(probe, "completion_logprobs", noted)
    gain = _gain(_module())
    assert gain is not None and gain > 0.0
    assert seen == [False, True] * probe.ROUNDS


def test_there_is_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _gain(_module(dtype="bfloat16")) is None
    assert _gain(_module(), precision="bf16-mixed") is None
    assert _gain(_module(engine=NativeChildEngine())) is None
    monkeypatch.setattr(probe, "LEAST_PARAMETERS", 10**9)
    assert _gain(_module()) is None
    monkeypatch.setattr(probe, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(probe, "multiplies_bfloat16", lambda: False)
    assert _gain(_module()) is None


def test_a_stop_ends_the_measurement() -> None:
    with pytest.raises(RolloutInterrupted):
        _gain(_module(), stop=True)


class _LooksAway:
    """A sampler that answers by the question alone."""

    def sample(self, model: Any, prompts: list[Problem], **_: Any) -> Any:
        return SimpleNamespace(completions=[f"<answer>{prompt.question}</answer>" for prompt in prompts])


def test_a_policy_that_looks_at_no_image_gives_the_same_answers_with_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one that looks away all stay; one that copies from its image has others, wherever these differ in it."""
    problems = ShapePrompts(questions=("color",)).validation(20)
    module = _module(policy=image_policy())
    with pytest.raises(RolloutInterrupted):
        unmoved_answers(module, problems, lambda: True)
    monkeypatch.setattr(GRPOModule, "sampler", _LooksAway())
    assert unmoved_answers(module, [*PROBLEMS, *problems], lambda: False) == (20, 20)
    assert unmoved_answers(module, PROBLEMS, lambda: False) == (0, 0)
    assert unmoved_answers(module, problems[:1], lambda: False) == (0, 0)  # there is no other image


class _CopiesAPixel:
    """A sampler whose answers are the colour of a pixel of the problem's image."""

    def sample(self, model: Any, prompts: list[Problem], **_: Any) -> Any:
        pixels = [prompt.columns["images"][0].pixels()[:3] for prompt in prompts]
        return SimpleNamespace(completions=[f"{pixel!r} <answer>{pixel[0] // 128}</answer>" for pixel in pixels])


def test_answers_that_go_by_the_image_change(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module()
    monkeypatch.setattr(GRPOModule, "sampler", _CopiesAPixel())
    pictures = [Picture.of(bytes([shade, 0, 0]), 1, 1) for shade in (0, 1, 2, 254)]
    problems = [Problem(id=i, question="?", answer="", columns={"images": (one,)}) for i, one in enumerate(pictures)]
    assert unmoved_answers(module, problems, lambda: False) == (4, 2)  # the light one is given and taken once
