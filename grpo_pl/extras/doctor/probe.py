"""``Probe``: the doctor of a short run that is thrown away. It also measures what would cost a real run time, such as
how many times as fast this machine's CPU computes a step in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from grpo_pl.data.cells import image_digests
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.extras.doctor.answers import end_chance, scored_again
from grpo_pl.extras.doctor.callback import Doctor
from grpo_pl.extras.doctor.run_statistics import Finding, ProblemStatistics, RunStatistics
from grpo_pl.extras.engines.copy_engine import CopyEngine
from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.weights import is_sharded
from grpo_pl.rewards.completion_text import stated_answer
from grpo_pl.training.experience import Experience
from grpo_pl.training.lightning_loops import data_of
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import CUT_OFF, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3
"""Prompts, and answers to each."""
LEAST_PARAMETERS = 10_000_000
"""Smaller policies hardly gain: one of 3 million was 1.08 times as fast."""
DRAWN = 16
"""Tokens of a completion of the measurement."""
MOST_TOKENS, MOST_WORK = 4096, 1.5e12
"""Of one measurement; work in floating-point operations, 6 for a parameter and token."""
HELD_OUT = 64
"""Held-out problems that are answered with other images."""
ROUNDS = 2
"""The first one warms up."""
Shown = Mapping[str, Any]
"""``prompt``, with special tokens, its ``gold`` answer, and its first ``answers``: ``text`` as rewards see it,
``reward``, ``status`` of the correctness reward, and ``cut`` where a limit ended it."""


class ProbeTrainer(Trainer):
    """A Trainer with the verb ``doctor``."""

    def doctor(self, model: LightningModule, datamodule: LightningDataModule, weights_only: bool | None = None) -> None:
        """Looks at the first rollouts."""
        self.fit(model, datamodule=datamodule, weights_only=weights_only)


class Probe(Doctor):
    """The doctor of a probe: it has looked at problems and answers before, ends in time, and says nothing itself."""

    drift_every, most_rows, rows_share = 1, 32, 1.0

    def __init__(self, rollouts: int, seconds: float) -> None:
        super().__init__(rollouts)
        self.seconds = seconds
        self.found: ProblemStatistics | None = None
        self.result: RunStatistics | None = None
        self.shown: list[Shown] = []
        self.timed_out = False
        self._began: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the first rollout began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    def should_stop(self) -> bool:
        self.timed_out = self.timed_out or self.elapsed > self.seconds
        return self.timed_out

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        super().step_metrics(trainer, pl_module, experience)
        assert isinstance(pl_module, GRPOModule)
        if not self.shown:
            self.shown = shown_prompts(experience, pl_module.tokenizer)
            gain = bfloat16_gain(trainer, pl_module, experience.samples.prompts, self.should_stop)
            self.measured[-1] = replace(self.measured[-1], bfloat16_gain=gain)
            if trainer.world_size == 1 and pl_module.environment is None:
                held_out = list(islice(chain.from_iterable(data_of(trainer).held_out().values()), HELD_OUT))
                swapped, unmoved = unmoved_answers(pl_module, held_out, self.should_stop)
                self.measured[-1] = replace(self.measured[-1], swapped=swapped, unmoved=unmoved)
        if len(self.measured) == 1 and self.known is not None:
            again = scored_again(self.known, experience, pl_module.rewards)
            self.known = replace(again, end_chance=end_chance(pl_module, experience))
        return {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        assert isinstance(pl_module, GRPOModule)
        self.result = self.statistics(trainer, pl_module)
        trainer.should_stop = trainer.should_stop or self.should_stop()

    def problems(self, data: RolloutDataModule) -> ProblemStatistics | None:
        return self.found

    def say(self, finding: Finding) -> None:
        """Nothing: all findings are printed together."""


def unmoved_answers(
    module: GRPOModule, problems: Sequence[Problem], should_stop: Callable[[], bool]
) -> tuple[int, int]:
    """Number of problems that were answered with their own images and with those of another one, and of those that got
    the same answer. Both are drawn with the same noise, so a policy that does not look at its images writes the same.

    Raises:
        RolloutInterrupted: ``should_stop`` turned true.
    """
    if not any(map(image_digests, problems)):
        return 0, 0
    from grpo_pl.extras.images.permuted import with_images_of_others

    others = with_images_of_others(problems)
    swapped = {(problem.source, problem.id) for problem in others}
    own = [problem for problem in problems if (problem.source, problem.id) in swapped]
    if not own:
        return 0, 0
    answers = [
        module.sampler.sample(
            module.require_policy(),
            asked,
            group_size=1,
            sampling=module.sampling,
            seed=0,
            split="val",
            should_stop=should_stop,
        ).completions
        for asked in (own, others)
    ]
    return len(own), sum(stated_answer(one) == stated_answer(other) for one, other in zip(*answers, strict=True))


def bfloat16_gain(
    trainer: Trainer, module: GRPOModule, problems: Sequence[Problem], should_stop: Callable[[], bool]
) -> float | None:
    """Seconds of a step in float32 / seconds in bfloat16: completions are drawn and trained on in both, and the times
    scaled to the full length; None where the run or the CPU leaves no choice, or nothing can be gained.

    Raises:
        RolloutInterrupted: ``should_stop`` turned true.
    """
    policy, sampler, sampling = module.require_policy(), module.sampler, module.sampling
    parameters = sum(weight.numel() for weight in policy.parameters())
    if (
        policy.device.type != "cpu"
        or not multiplies_bfloat16()
        or parameters < LEAST_PARAMETERS
        or policy.dtype != torch.float32
        or trainer.precision != "32-true"
        or trainer.world_size > 1
        or is_sharded(policy)
        or module.environment is not None
        or isinstance(sampler.engine, CopyEngine)  # draws in a process of its own
    ):
        return None
    full, drawn = sampling.max_completion_length, min(DRAWN, sampling.max_completion_length)
    prompt = max(len(prompt.ids) for prompt in sampler.encoded(policy, problems, drawn))
    rows = max(1, int(min(MOST_TOKENS, MOST_WORK / (6 * parameters)) / (prompt + drawn)))
    group = min(rows, module.algorithm.group_size)
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "float32": nullcontext,
        "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    }
    seconds = dict.fromkeys(contexts, float("inf"))
    for _ in range(ROUNDS):
        for name, context in contexts.items():
            with context():
                start = time.perf_counter()
                rollout = sampler.sample(
                    policy,
                    problems[: max(1, rows // group)],
                    group_size=group,
                    sampling=replace(sampling, max_completion_length=drawn),
                    seed=0,
                    split="train",
                    should_stop=should_stop,
                ).rollout
                between = time.perf_counter()
                parts = rollout_rows(rollout, torch.arange(len(rollout.completion_ids)))
                temperature = sampling.temperature
                completion_logprobs(policy, **parts, temperature=temperature, with_entropy=False)[0].sum().backward()
                trained = time.perf_counter() - between
            step = (between - start) * full / drawn + trained * (prompt + full) / (prompt + drawn)
            seconds[name] = min(seconds[name], step)
            policy.zero_grad(set_to_none=True)
    return seconds["float32"] / seconds["bfloat16"]


def shown_prompts(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> list[Shown]:
    """The first prompts of a rollout, with the first answers to each."""
    samples, rollout, scored = experience.samples, experience.rollout, experience.scored
    judged, totals = scored.judged(), scored.totals()
    shown: list[Shown] = []
    for index, problem in enumerate(samples.prompts[:SHOWN]):
        first = index * rollout.group_size
        ids = rollout.prompt_ids[first][rollout.prompt_mask[first]].tolist()
        answers = [
            {
                "text": samples.completions[row],
                "reward": totals[row],
                "status": judged[row].status,
                "cut": rollout.finish_reasons[row] in CUT_OFF,
            }
            for row in range(first, first + min(SHOWN, rollout.group_size))
        ]
        prompt = str(tokenizer.decode(ids, skip_special_tokens=False))
        shown.append({"prompt": prompt, "gold": problem.answer, "answers": answers})
    return shown


def lines_of(shown: Sequence[Shown]) -> Iterator[str]:
    """For a terminal: texts begin with a bar, so that their own lines and spaces can be seen."""
    for number, one in enumerate(shown, 1):
        yield f"prompt {number} of {len(shown)}, gold answer {one['gold']!r}:"
        yield from _barred(one["prompt"])
        for which, answer in enumerate(one["answers"], 1):
            reward = "no reward" if answer["reward"] is None else f"reward {answer['reward']:.3g}"
            yield f"answer {which}, {reward}, {answer['status']}{', cut off' if answer['cut'] else ''}:"
            yield from _barred(answer["text"])


def _barred(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield "  |" + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
