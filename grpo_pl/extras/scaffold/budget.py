"""The minutes of a run: measures this machine for a second or two, and shares them between cold start and rollouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from statistics import median

import torch
from lightning.pytorch import Trainer

from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.distributed.second_trainer import fit_beside
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.cold_start_fit import ReportSteps, StartData, StartModule
from grpo_pl.training.defaults import COMPLETIONS, SCRATCH_BATCH, SCRATCH_PASSES
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.sft import tokenized
from grpo_pl.types import Problem, SamplingParams

START = 15.0
"""Seconds of imports, reading and the first compilation."""
VALIDATIONS = 4
"""Before the first rollout, after each third of them."""
COLD_START, COLD_START_PLAYED = 0.4, 0.2
"""Share of the time for the cold start: without steps that are mostly right GRPO has nothing to select. Random episodes
of an environment show little more than the form of an action."""
GROUP = 8
MINIBATCH = 8
"""Prompts of an optimiser step."""
FEWEST_ROLLOUTS, MOST_ROLLOUTS = 40, 40
"""At least, by smaller rollouts; and at most of each minute."""
MOST_STEPS = 2000
"""Of a cold start; a longer one leaves little to GRPO."""
USED, USED_PLAYED = 0.85, 0.7
"""Share of the minutes that is planned, since a machine is not always as fast as when it was measured; and what
environments take between the turns of an episode was not: a fifth of CartPole's time."""
STEPS, DRAWN, SHORTEST = 6, 64, 4
"""Steps that are made and completions that are drawn to measure the speed, the first ones of few tokens."""
BUSY = 1.3
"""From so many times the seconds on, the command says that others use the machine."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds on this machine if nobody else uses it."""

    step: float
    """Of a step of the cold start with its 32 demonstrations."""
    draw: float
    """Of drawing one completion among many."""
    busy: float = 1.0
    """Seconds that passed for each of these, more than 1 while others use the processors."""

    def rollout(self, prompts: int, *, minibatches: int) -> float:
        """Of a rollout with its update, whose forward and backward pass is that of so many demonstrations; with several
        optimiser steps a forward pass, a third of that, comes before them."""
        passes = 1.0 if minibatches == 1 else 4 / 3
        return GROUP * prompts * (self.draw + passes * self.step / SCRATCH_BATCH)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does in its minutes."""

    steps: int
    """Of the cold start."""
    rollouts: int
    prompts: int
    """Of a rollout, each with a group of completions."""
    minibatches: int
    """Optimiser steps of a rollout."""
    seconds: Mapping[str, float]
    """What takes how long."""
    busy: float

    def table(self) -> str:
        """One line a part, and one for all."""
        threads, whole = torch.get_num_threads(), sum(self.seconds.values())
        told = {**self.seconds, f"in all, with {threads} thread{'s' * (threads > 1)} of this machine": whole}
        lines = [f"  {int(s) // 60:3d}:{int(s) % 60:02d}  {what}" for what, s in told.items()]
        if self.busy >= BUSY:
            lines.append(f"Others use this machine now: as it is, all this takes {self.busy:.1f} times as long.")
        return "\n".join(lines)


def plan(
    speed: Speed,
    *,
    minutes: float,
    held_out: int,
    samples: int,
    shown: int | None = None,
    asked: int | None = None,
    played: bool = False,
) -> Plan:
    """Shares the minutes: a part of what start and validations leave for the cold start, the rest for rollouts.

    Args:
        shown: demonstrations that there are; a cold start makes no more than ``SCRATCH_PASSES`` passes over them. None
            for problems without end.
        asked: problems that rollouts may ask.
        played: episodes are; a rollout of theirs has one optimiser step, not one for each ``MINIBATCH`` prompts.
    """
    validations = VALIDATIONS * held_out * samples * speed.draw
    used, cold_start = (USED_PLAYED, COLD_START_PLAYED) if played else (USED, COLD_START)
    left = 60.0 * used * minutes - START - validations
    steps = max(1, min(MOST_STEPS, int(cold_start * left / speed.step)))
    if shown is not None:
        steps = min(steps, max(1, round(SCRATCH_PASSES * shown / SCRATCH_BATCH)))
    left -= steps * speed.step
    prompts = COMPLETIONS // GROUP
    most = prompts if asked is None else asked // 2

    def steps_of(prompts: int) -> int:
        return 1 if played else max(1, prompts // MINIBATCH)

    def seconds(prompts: int) -> float:
        return speed.rollout(prompts, minibatches=steps_of(prompts))

    while prompts > 4 and (prompts > most or left < FEWEST_ROLLOUTS * seconds(prompts)):
        prompts //= 2  # rather smaller rollouts than too few
    rollouts = int(left / seconds(prompts))
    if rollouts < 3:
        raise ValueError(
            f"--minutes {minutes:g} are too few: start and validations take {START + validations:.0f} s on this "
            f"machine, {steps} steps of the cold start {steps * speed.step:.0f} s, a rollout {seconds(prompts):.0f} s."
        )
    rollouts = min(round(MOST_ROLLOUTS * minutes), rollouts)
    parts = {
        "start": START,
        f"cold start: {steps} steps of {SCRATCH_BATCH} demonstrations": steps * speed.step,
        f"{rollouts} rollouts of {GROUP * prompts} completions": rollouts * seconds(prompts),
        f"{VALIDATIONS} validations on {held_out} problems": validations,
    }
    return Plan(
        steps=steps,
        rollouts=rollouts,
        prompts=prompts,
        minibatches=steps_of(prompts),
        seconds=parts,
        busy=speed.busy,
    )


def measure_speed(policy: PolicyConfig, shown: Sequence[Demonstration], *, written: int) -> Speed:
    """Makes some steps and draws some completions with a policy that has learned nothing.

    Args:
        shown: demonstrations, as they are in the cold start.
        written: tokens of a completion in the mean; a policy without any skill writes to the limit.
    """
    tokenizer = load_tokenizer(policy)
    model = load_model(policy, tokenizer)
    dialogue = Dialogue(template=PromptTemplate(), tokenizer=tokenizer)
    repeated = cycle(shown)
    batches = [tokenized(list(islice(repeated, SCRATCH_BATCH)), dialogue) for _ in range(STEPS)]
    times = list[tuple[float, float]]()
    fit_beside(
        Trainer(accelerator="cpu", devices=1, logger=False),
        StartModule(policy, PromptTemplate(), Optimization(lr=1e-3), optimizer="muon"),
        StartData(STEPS, SCRATCH_BATCH, lambda step: iter(batches[step:])),
        [ReportSteps(lambda done, total, **_: times.append(_now()))],
    )
    steps = [_between(before, after) for before, after in pairwise(times)]
    sampler = CompletionSampler(engine=NativeEngine(), template=PromptTemplate(), tokenizer=tokenizer)
    problems = [Problem(id=n, question=str(each.question), answer="") for n, each in enumerate(shown[: DRAWN // GROUP])]

    for length in (SHORTEST, written):  # once to get ready
        before = _now()
        sampling = SamplingParams(max_completion_length=length)
        sampler.sample(model, problems, group_size=GROUP, sampling=sampling, seed=0, split="val")
    draw, passed = _between(before, _now())
    alone, all_passed = draw + sum(own for own, _ in steps), passed + sum(passed for _, passed in steps)
    return Speed(
        step=median(own for own, _ in steps), draw=draw / (GROUP * len(problems)), busy=max(1.0, all_passed / alone)
    )


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _between(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    """Seconds that the work between takes by itself, and that have passed. The processor's time of all threads together
    is more than what passes if they have a processor each, and less if others use the processors."""
    passed, worked = after[0] - before[0], after[1] - before[1]
    return min(passed, worked), passed
