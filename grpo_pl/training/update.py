"""From ``Experience`` to new weights: minibatches, micro-batches, one normaliser, clipping, a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.functional.sampling import row_key
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.logprobs import update_scores
from grpo_pl.training.beside import Beside, Sums
from grpo_pl.training.experience import Experience
from grpo_pl.training.microbatches import TokenBudget, rollout_rows
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.progress import ProgressCallback
from grpo_pl.training.stopwatch import stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Backward = Callable[[Tensor, bool], None]
"""Adds the gradient of a micro-batch; true for the last of a step, when those of other processes have to join."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Result of the optimiser steps of one rollout."""

    sums: Sums
    """Token-weighted metrics of this rank."""
    losses: list[float]
    """Loss of each optimiser step, over all ranks."""
    grad_norms: list[float]
    """Gradient norm of each optimiser step before clipping."""
    taken: list[bool]
    """For each optimiser step, whether it was taken: its loss and gradient were finite."""
    seconds: dict[str, float]
    """Wall time of forward and backward passes, and of optimiser steps."""

    @property
    def skipped(self) -> int:
        """Steps that were not taken."""
        return self.taken.count(False)


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """The update stage: ``num_iterations`` passes over a rollout, ``num_minibatches`` optimiser steps each."""

    algorithm: GRPOAlgorithm
    optimization: Optimization
    temperature: float
    max_completion_length: int
    budget: TokenBudget
    seed: int
    collective: Collective
    report: ProgressCallback
    beside: Callable[[int], Beside] = lambda number: Beside()
    """What an optimiser step of the rollout learns from besides, by its number."""
    pad_token_id: int = 0
    after_step: Callable[[], None] = lambda: None
    """Called after each optimiser step that was taken."""

    def run(
        self,
        policy: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        experience: Experience,
        backward: Backward,
    ) -> UpdateResult:
        """Takes the optimiser steps in place. A step whose loss or gradient is not finite is skipped and counted."""
        experience = replace(experience, teacher=experience.teacher.heads_on(experience.keep.device))
        sums: Sums = {}
        seconds: dict[str, float] = {}
        losses, norms, taken = [], [], []
        steps = self.algorithm.num_iterations * self.algorithm.num_minibatches
        for number, rows in enumerate(self.minibatches(experience)):
            self.report("update", number, steps)
            report = partial(self.report, "update", number, steps)
            beside = self.beside(number)
            sums = _added(sums, beside.metrics(experience.keep))
            accumulate = partial(self._accumulate, policy, experience, rows, backward, report, beside)
            with stopwatch(seconds, "backward"):
                found = self.budget.within_memory(accumulate, experience.rollout, self.collective)
            if found is None:
                continue  # no completion of the minibatch carries a gradient, on any rank
            loss, more = found
            sums = _added(sums, more)
            with stopwatch(seconds, "optimizer"):
                updated = chain.from_iterable(group["params"] for group in optimizer.param_groups)
                norm = self.optimization.clip_gradients(updated)
                losses.append(float(loss))
                norms.append(float(norm))
                taken.append(bool(torch.isfinite(norm) and torch.isfinite(loss)))
                if taken[-1]:
                    optimizer.step()
                    self.after_step()
        policy.zero_grad(set_to_none=True)
        self.report("update", steps, steps)
        return UpdateResult(sums=sums, losses=losses, grad_norms=norms, taken=taken, seconds=seconds)

    def minibatches(self, experience: Experience) -> Iterator[Tensor]:
        """Row indices of the global batch, one tensor per optimiser step; the same on every rank."""
        total = experience.lengths.numel()
        for iteration in range(self.algorithm.num_iterations):
            order = torch.arange(total)
            if self.algorithm.num_minibatches > 1:
                generator = torch.Generator().manual_seed(
                    row_key(self.seed, "minibatches", experience.samples.step, iteration)
                )
                order = torch.randperm(total, generator=generator)
            yield from order.tensor_split(self.algorithm.num_minibatches)

    def _accumulate(
        self,
        policy: PreTrainedModel,
        experience: Experience,
        rows: Tensor,
        backward: Backward,
        report: Callable[[str], None],
        beside: Beside,
    ) -> tuple[Tensor, Sums] | None:
        """Gradients of one optimiser step, from the start; its loss over all ranks and the metrics of this rank, or
        None if nothing carries a gradient."""
        policy.zero_grad(set_to_none=True)  # also of weights that an optimiser leaves out
        device = experience.keep.device
        rows = rows.to(device)
        totals = totals_of(experience, rows)
        local = rows - experience.first_row
        local = local[(local >= 0) & (local < len(experience.keep))]
        local = local[experience.active[local]].sort().values  # rows of one prompt lie side by side, and share it
        shares = experience.teacher.split(local)
        parts = [part for share in shares for part in self.budget.cut(experience.rollout, share, policy)]
        # every rank makes equally many forwards and backwards, or collectives inside them would hang
        rounds = self.collective.max(len(parts), device)
        examples = beside.parts(self.budget.tokens or 1, self.collective)
        further = self.collective.max(len(examples), device) if beside.share > 0 else 0
        if rounds + further == 0:
            return None

        def losses() -> Iterator[tuple[Tensor, Sums]]:
            for number in range(rounds):
                report(f"micro-batch {number + 1}/{rounds}")
                part = parts[number] if number < len(parts) else torch.zeros(1, dtype=torch.int64, device=device)
                weight = float(number < len(parts))
                loss, stats = self._loss(policy, experience, part, weight, totals)
                yield (1.0 - beside.share) * loss, stats
            for number in range(further):
                report(f"demonstrations {number + 1}/{further}")
                some = examples[number] if number < len(examples) else beside.filler
                weight = float(number < len(examples))
                loss, stats = beside.loss(policy, some, pad_token_id=self.pad_token_id)
                yield beside.share * weight * loss, _weighted(stats, weight)

        total, sums = torch.zeros((), device=device, dtype=torch.float64), Sums()
        for number, (loss, stats) in enumerate(losses(), start=1):
            backward(loss * self.collective.world, number == rounds + further)  # gradients are averaged over ranks
            total += loss.detach().double()
            sums = _added(sums, stats)
        return self.collective.sum(total), sums

    def _loss(
        self,
        policy: PreTrainedModel,
        experience: Experience,
        rows: Tensor,
        weight: float,
        totals: tuple[int, int, int],
    ) -> tuple[Tensor, Sums]:
        """One micro-batch's share of the loss, which is a sum over ranks, and its metrics; both times ``weight``."""
        tokens, weights = self.loss_inputs(policy, experience, rows, totals, weight)
        output = self.algorithm.loss(tokens, weights)
        return output.loss, _weighted(output.stats, weight)

    def loss_inputs(
        self,
        policy: PreTrainedModel,
        experience: Experience,
        rows: Tensor,
        totals: tuple[int, int, int],
        weight: float = 1.0,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """What `GRPOAlgorithm.loss` gets of some rows: tensors of tokens under the policy as it is, and their weights.

        Args:
            totals: those of `totals_of` for the optimiser step.
            weight: of the micro-batch, 0 for one that only fills up.
        """
        algorithm, rollout, needs = self.algorithm, experience.rollout, self.algorithm.needs
        part = rollout_rows(rollout, rows)
        mask = part["action_mask"]  # (b, t)
        width = mask.shape[1]
        given = {**experience.tokens, "advantages": experience.advantages}
        tokens = {name: tensor[rows][:, :width] for name, tensor in given.items()} | {"mask": mask}
        if needs.observations:
            observed = rollout.observation_mask[rows][:, :width]
            part["action_mask"] = mask | observed  # they are scored as well
        taught, top_ids = experience.teacher.distributions(rows), tokens.pop("top_ids", None)
        scores = update_scores(policy, **part, top_ids=top_ids, teacher=taught, temperature=self.temperature)
        tokens |= {"logprobs": scores.logprobs, **scores.further}
        tokens["entropy"] = scores.entropy if needs.entropy else scores.entropy.detach()
        if needs.observations:
            tokens["observation_weights"] = weight * observed.to(scores.logprobs.dtype) / max(totals[2], 1)
        weights = algorithm.token_weights(
            mask,
            num_sequences=totals[0],
            num_tokens=totals[1],
            max_completion_length=self.max_completion_length,
            dtype=scores.logprobs.dtype,
        )
        return tokens, weight * weights


def totals_of(experience: Experience, rows: Tensor) -> tuple[int, int, int]:
    """Completions, tokens of the policy and tokens of observations in an optimiser step, of all ranks.

    Args:
        rows: indices into the flattened global batch.
    """
    sequences, tokens = experience.statistics.totals(experience.lengths, rows)
    observed = experience.observed
    return sequences, tokens, 0 if observed is None else experience.statistics.totals(observed, rows)[1]


def _weighted(sums: Sums, weight: float) -> Sums:
    """The sums of a micro-batch, or zeros where the weight is 0."""
    return {name: (weight * value, int(weight) * count) for name, (value, count) in sums.items()}


def _added(sums: Sums, more: Sums) -> Sums:
    """The sums of both, also of a metric that only one of them has."""
    joined = dict(sums)
    for name, (value, count) in more.items():
        joined[name] = (sums[name][0] + value, sums[name][1] + count) if name in sums else (value, count)
    return joined
