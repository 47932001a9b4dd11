"""``LeaveOneOut``: the update of a step made again without each of its groups in turn, and what an answer loses."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.extras.replay.asked import Asked, answer_logprob
from grpo_pl.extras.replay.watched import restored
from grpo_pl.training.beside import Beside, Sums
from grpo_pl.training.demonstrated import Demonstrated
from grpo_pl.training.experience import Experience
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.sft import Example
from grpo_pl.training.update import PolicyUpdate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORGOTTEN = 0.1
"""Part of a gradient's momentum that no longer counts."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """What a step learned of one question: the completions of a problem, or its demonstrations beside the rollout."""

    kind: Literal["completions", "demonstrations"]
    question: str
    """Of demonstrations as the policy reads it, with the template."""
    answer: str
    """The gold answer, or the demonstration; the first of several."""
    size: int
    without: float
    """Log-probability of the right completion behind the update without this group."""
    moved: float
    """By how much the group moved it at once: with all groups less without this one."""
    lasting: float
    """By how much it moved it in all, what the optimiser's momentum went on to do included."""
    right: int | None = None
    """How many completions are right; None of demonstrations, or where nobody judges."""
    prompt_id: int | None = None
    """Of the problem; None of demonstrations, as ``sample``."""
    sample: int | None = None
    """The completion with the largest advantage, above or below 0."""


@dataclass(frozen=True, kw_only=True)
class Behind:
    """Log-probability of the right completion behind an update."""

    at_once: float
    settled: float
    """Behind the steps without a gradient that follow, until the momentum has gone or the run ends."""


class LeaveOneOut(StepCallback):
    """Makes the update of a step without each of its groups in turn, from the same weights and state of the optimiser,
    before it is made as it was.

    A group of completions that is left out is not in the loss and not in its normaliser; the advantages of the others
    stay. Demonstrations that are left out are not in theirs; the share of demonstrations in the loss stays. A minibatch
    that holds nothing else has a gradient of zero and takes its step all the same: what the momentum does in it is not
    the group's.

    AdamW makes 1 − β₁ of a gradient's step at once and the rest in the steps that follow. So each update is followed by
    steps with a gradient of zero, as many as the run had left, until β₁ to their number is below `FORGOTTEN`; what is
    found there is `Behind.settled`.
    """

    before: float
    """Log-probability of the right completion before the step."""
    whole: Behind
    """Behind the update with all groups, and ``none`` behind one with none, whose gradient is zero."""
    none: Behind
    groups: list[Group]
    """Those of the step, the one that moved the right completion most at once first."""

    def __init__(self, asked: Asked, step: int, completed: int) -> None:
        self.asked, self.step, self.completed = asked, step, completed

    @property
    def at_once(self) -> float:
        """By how much the step moved the right completion at once, without the momentum of earlier steps."""
        return self.whole.at_once - self.none.at_once

    @property
    def lasting(self) -> float:
        """By how much it moved it in all, likewise."""
        return self.whole.settled - self.none.settled

    @property
    def coasted(self) -> float:
        """By how much the momentum of earlier steps moved it in this step."""
        return self.none.at_once - self.before

    def before_update(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> None:
        module = cast(GRPOModule, pl_module)
        if experience.samples.step != self.step:
            return
        self._module, self._example = module, self.asked.example(module)
        self._optimizer, self._total = trainer.optimizers[0], trainer.datamodule.steps  # type: ignore[attr-defined]
        update = replace(module.policy_update(self.step), report=lambda *_: None, after_step=lambda: None)
        self.before = self._score()
        self._taken = _taken(update, experience)
        self.whole = self._behind(update, experience)
        everything = replace(experience, active=torch.zeros_like(experience.active))
        self.none = self._without(replace(update, beside=lambda number: Beside()), everything)
        self.groups = []
        for number in range(len(experience.samples.prompts)):
            without = self._without(update, _without_group(experience, number))
            self.groups.append(_completions(experience, number, **self._moved(without)))
        for prompt, shown in _demonstrated(update).items():
            without = self._without(_without_demonstrations(update, prompt), experience)
            texts = (shown[0].prompt, shown[0].completion)
            question, answer = (str(module.tokenizer.decode(each, skip_special_tokens=True)) for each in texts)
            told = {"kind": "demonstrations", "question": question, "answer": answer, "size": len(shown)}
            self.groups.append(Group(**told, **self._moved(without)))  # type: ignore[arg-type]
        self.groups.sort(key=lambda group: -abs(group.moved))

    def _without(self, update: PolicyUpdate, experience: Experience) -> Behind:
        """What is found behind an update from which something is left out. A step with nothing left to learn from would
        not be taken, and what the momentum does in it would count as the group's; so it has a gradient of zero."""
        left = _taken(update, experience)
        still = {number for number, taken in enumerate(self._taken) if taken and not left[number]}
        held = replace(update, beside=lambda number: _Still() if number in still else update.beside(number))
        return self._behind(held, experience)

    def _moved(self, without: Behind) -> dict[str, float]:
        return {
            "without": without.at_once,
            "moved": self.whole.at_once - without.at_once,
            "lasting": self.whole.settled - without.settled,
        }

    def _score(self) -> float:
        return answer_logprob(self._module.require_policy(), self._example, int(self._module.tokenizer.pad_token_id))

    def _behind(self, update: PolicyUpdate, experience: Experience) -> Behind:
        """What is found behind an update, which is taken back."""
        policy, optimizer = self._module.require_policy(), self._optimizer
        per_rollout = _optimizer_steps(update)
        with restored(policy), _restored(optimizer):
            self._configure(0)
            update.run(policy, optimizer, experience, lambda loss, last: self._module.manual_backward(loss))
            at_once, beta = self._score(), self._module.optimization.betas[0]
            forgotten = math.ceil(math.log(FORGOTTEN) / math.log(beta)) if beta > 0 else 0
            left = (self.completed - self.step - 1) * per_rollout
            self._coast(per_rollout, per_rollout + min(forgotten, left), per_rollout)
            return Behind(at_once=at_once, settled=self._score())

    def _configure(self, further: int) -> None:
        """The rate so many rollouts behind the step."""
        self._module.optimization.configure(self._optimizer, rollout=self.step + further, total=self._total)

    def _coast(self, first: int, end: int, per_rollout: int) -> None:
        """Takes optimiser steps with a gradient of zero, counted from the first of the rollout."""
        for number in range(first, end):
            self._configure(number // per_rollout)
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def _completions(experience: Experience, number: int, **moved: float) -> Group:
    """The group of a problem of the rollout."""
    size, problem = experience.rollout.group_size, experience.samples.prompts[number]
    rows = range(number * size, (number + 1) * size)
    correct = [experience.scored.correct()[row] for row in rows]
    weights = experience.advantages[rows.start : rows.stop].abs().amax(dim=1)
    return Group(
        kind="completions",
        question=problem.question,
        answer=problem.answer,
        size=size,
        right=None if None in correct else sum(map(bool, correct)),
        prompt_id=problem.id,
        sample=int(weights.argmax()),
        **moved,
    )


def _without_group(experience: Experience, number: int) -> Experience:
    """The same with the completions of a problem outside of the loss."""
    size, statistics = experience.rollout.group_size, experience.statistics
    keep, active = statistics.keep.clone(), statistics.active.clone()
    keep[number] = active[number] = False
    rows = torch.zeros_like(experience.keep)
    rows[number * size : (number + 1) * size] = True
    return replace(
        experience,
        statistics=replace(statistics, keep=keep, active=active),
        keep=experience.keep & ~rows,
        active=experience.active & ~rows,
    )


def _taken(update: PolicyUpdate, experience: Experience) -> list[bool]:
    """Of each optimiser step, whether anything carries a gradient: a completion, or a demonstration whose share is not
    0."""
    taken = []
    for number, rows in enumerate(update.minibatches(experience)):
        beside = update.beside(number)
        shown = isinstance(beside, Demonstrated) and beside.share > 0 and bool(beside.examples)
        taken.append(shown or bool(experience.active[rows.to(experience.active.device)].any()))
    return taken


class _Still(Beside):
    """An optimiser step with a gradient of zero."""

    share = 1.0

    def parts(self, budget: int, collective: Collective) -> list[Any]:
        return [None]

    def loss(self, model: PreTrainedModel, part: Any, *, pad_token_id: int) -> tuple[Tensor, Sums]:
        return sum(0.0 * parameter.sum() for parameter in model.parameters() if parameter.requires_grad), {}


def _optimizer_steps(update: PolicyUpdate) -> int:
    """Of one rollout."""
    return update.algorithm.num_iterations * update.algorithm.num_minibatches


def _demonstrated(update: PolicyUpdate) -> dict[tuple[int, ...], list[Example]]:
    """Tokens of a question -> its demonstrations in all optimiser steps of the rollout."""
    found: dict[tuple[int, ...], list[Example]] = {}
    for number in range(_optimizer_steps(update)):
        beside = update.beside(number)
        for example in beside.examples if isinstance(beside, Demonstrated) else ():
            found.setdefault(tuple(example.prompt), []).append(example)
    return found


def _without_demonstrations(update: PolicyUpdate, prompt: tuple[int, ...]) -> PolicyUpdate:
    """The same without the demonstrations of a question."""

    def beside(number: int) -> Beside:
        found = update.beside(number)
        assert isinstance(found, Demonstrated)
        return replace(found, examples=[example for example in found.examples if tuple(example.prompt) != prompt])

    return replace(update, beside=beside)


@contextmanager
def _restored(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Puts the state of an optimiser back at the end of the block."""
    before = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(before)
