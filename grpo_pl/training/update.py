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
from grpo_pl.training.demonstrated import Demonstrated
from grpo_pl.training.experience import Experience
from grpo_pl.training.microbatches import TokenBudget, rollout_rows
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.progress import ProgressCallback, stopwatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count), both to be added over micro-batches and ranks."""


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
    demonstrated: Callable[[int], Demonstrated] | None = None
    """The demonstrations of an optimiser step of the rollout, by its number."""
    pad_token_id: int = 0
    after_step: Callable[[], None] | None = None
    """Called after each optimiser step that was taken."""

    def run(
        self,
        policy: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        experience: Experience,
        backward: Backward,
    ) -> UpdateResult:
        """Takes the optimiser steps in place. A step whose loss or gradient is not finite is skipped and counted."""
        if experience.teacher is not None:
            experience = replace(experience, teacher=experience.teacher.heads_on(experience.keep.device))
        sums: Sums = {}
        seconds: dict[str, float] = {}
        losses, norms, taken = [], [], []
        steps = self.algorithm.num_iterations * self.algorithm.num_minibatches
        for number, rows in enumerate(self._minibatches(experience)):
            self.report("update", number, steps)
            report = partial(self.report, "update", number, steps)
            shown = None if self.demonstrated is None else self.demonstrated(number)
            if shown is not None:
                share = torch.tensor([shown.share, 1.0], dtype=torch.float64, device=experience.keep.device)
                sums = _added(sums, {"demonstration/share": (share[0], share[1])})
                shown = shown if shown.share > 0.0 else None
            accumulate = partial(self._accumulate, policy, experience, rows, backward, report, shown)
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
                    if self.after_step is not None:
                        self.after_step()
        policy.zero_grad(set_to_none=True)
        self.report("update", steps, steps)
        return UpdateResult(sums=sums, losses=losses, grad_norms=norms, taken=taken, seconds=seconds)

    def _minibatches(self, experience: Experience) -> Iterator[Tensor]:
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
        shown: Demonstrated | None = None,
    ) -> tuple[Tensor, Sums] | None:
        """Gradients of one optimiser step, from the start; its loss over all ranks and the metrics of this rank, or
        None if nothing carries a gradient."""
        policy.zero_grad(set_to_none=True)  # also of weights that an optimiser leaves out
        device = experience.keep.device
        rows = rows.to(device)
        sequences, tokens = experience.statistics.totals(experience.lengths, rows)
        observed = 0
        if experience.observed is not None:
            _, observed = experience.statistics.totals(experience.observed, rows)
        local = rows - experience.first_row
        local = local[(local >= 0) & (local < len(experience.keep))]
        local = local[experience.active[local]].sort().values  # rows of one prompt lie side by side, and share it
        taught = experience.teacher if self.algorithm.needs_divergence else None
        shares = [local] if taught is None else taught.split(local)  # a micro-batch has one teacher's head
        parts = [part for share in shares for part in self.budget.cut(experience.rollout, share, policy)]
        # every rank makes equally many forwards and backwards, or collectives inside them would hang
        rounds = self.collective.max(len(parts), device)
        examples = [] if shown is None else shown.parts(self.budget.tokens or 1, self.collective)
        further = 0 if shown is None else self.collective.max(len(examples), device)
        if rounds + further == 0:
            return None

        def losses() -> Iterator[tuple[Tensor, Sums]]:
            own = 1.0 if shown is None else 1.0 - shown.share
            for number in range(rounds):
                report(f"micro-batch {number + 1}/{rounds}")
                part = parts[number] if number < len(parts) else torch.zeros(1, dtype=torch.int64, device=device)
                weight = float(number < len(parts))
                loss, stats = self._loss(policy, experience, part, weight, (sequences, tokens, observed))
                yield own * loss, stats
            for number in range(further):
                assert shown is not None
                report(f"demonstrations {number + 1}/{further}")
                some = examples[number] if number < len(examples) else shown.examples[:1]
                weight = number < len(examples)
                loss, stats = shown.loss(policy, some, self.algorithm, pad_token_id=self.pad_token_id)
                counted = {name: (weight * value, weight * count) for name, (value, count) in stats.items()}
                yield shown.share * weight * loss, counted

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
        """One micro-batch's share of the loss, which is a sum over ranks, and its metrics; both times ``weight``.

        Args:
            totals: completions, tokens of the policy and tokens of observations in the optimiser step.
        """
        algorithm, rollout = self.algorithm, experience.rollout
        part = rollout_rows(rollout, rows)
        mask = part["action_mask"]  # (b, t)
        width = mask.shape[1]
        given = {**experience.tokens, "advantages": experience.advantages}
        tokens = {name: tensor[rows][:, :width] for name, tensor in given.items()} | {"mask": mask}
        if algorithm.needs_observations:
            observed = rollout.observation_mask[rows][:, :width]
            part["action_mask"] = mask | observed  # they are scored as well
        taught = None
        if experience.teacher is not None and algorithm.needs_divergence:
            taught = experience.teacher.tokens(rows, algorithm.divergence_mix, algorithm.distillation_top_k)
        top_ids = tokens.pop("top_ids", None)
        scores = update_scores(policy, **part, top_ids=top_ids, teacher=taught, temperature=self.temperature)
        tokens["logprobs"] = scores.logprobs
        tokens["entropy"] = scores.entropy if algorithm.needs_entropy else scores.entropy.detach()
        if scores.divergence is not None:
            tokens["divergence"] = scores.divergence
        if scores.top_logprobs is not None:
            tokens["top_logprobs"] = scores.top_logprobs
        if algorithm.needs_observations:
            tokens["observation_weights"] = weight * observed.to(scores.logprobs.dtype) / max(totals[2], 1)
        weights = algorithm.token_weights(
            mask,
            num_sequences=totals[0],
            num_tokens=totals[1],
            max_completion_length=self.max_completion_length,
            dtype=scores.logprobs.dtype,
        )
        output = algorithm.loss(tokens, weight * weights)
        stats = {name: (weight * value, int(weight) * count) for name, (value, count) in output.stats.items()}
        return output.loss, stats


def _added(sums: Sums, more: Sums) -> Sums:
    """The sums of both, also of a metric that only one of them has."""
    joined = dict(sums)
    for name, (value, count) in more.items():
        joined[name] = (sums[name][0] + value, sums[name][1] + count) if name in sums else (value, count)
    return joined
