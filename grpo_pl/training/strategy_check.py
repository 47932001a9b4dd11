"""``StrategyCheck``: holds the first rollout and update under a strategy that nobody has tested to a single process."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.weights import load_whole
from grpo_pl.rewards.batch import join_scores
from grpo_pl.rollout.groups import join_samples, samples_to
from grpo_pl.training.collect import Collected, Collector
from grpo_pl.training.experience import Experience, ExperienceMaker
from grpo_pl.training.frozen_models import Reference
from grpo_pl.training.sync_proof import FIRST_AT_MOST, FIRST_AT_MOST_FLOAT32, compare
from grpo_pl.training.update import PolicyUpdate, UpdateResult
from grpo_pl.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORM_WITHIN = 0.01
"""Largest relative difference of gradient norms that rounding explains."""
NEAR_TIES = 0.05
"""Largest share of completions that may differ by near-ties."""


@dataclass(kw_only=True)
class StrategyCheck:
    """Copies of policy and reference that no strategy touches, and what one process makes of them."""

    policy: PreTrainedModel
    reference: Reference | None
    strategy: str

    @classmethod
    def of(cls, policy: PreTrainedModel, strategy: object, algorithm: GRPOAlgorithm) -> StrategyCheck:
        """Copies the policy as it is before the strategy wraps it and a checkpoint is loaded."""
        copied = copy.deepcopy(policy)
        reference = Reference(copied, algorithm.ref_update_every) if algorithm.needs_reference else None
        return cls(policy=copied, reference=reference, strategy=type(strategy).__name__)

    def load_state_dict(self, weights: Mapping[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
        """Takes the weights of policy and reference of the checkpoint that a run goes on from."""
        load_whole(self.policy, weights)
        if self.reference is not None:
            self.reference.load_state_dict(reference)

    def hold(
        self,
        experience: Experience,
        result: UpdateResult,
        *,
        problems: Sequence[Problem],
        collector: Collector,
        maker: ExperienceMaker,
        update: PolicyUpdate,
    ) -> bool:
        """Draws, scores and takes the same step in this process alone. Every process must call it,
        for every rollout until it returns true: of the first that has a gradient.

        Args:
            experience: of this process, and what came of it in ``result``.
            problems: those of the whole rollout.
            collector: as the run's, like ``maker`` and ``update``; ``update`` as it was before that of the run.

        Raises:
            ValueError: the problems, log-probabilities, completions or gradient norms differ in any process.
        """
        together = collector.collective
        parts = together.gather_objects(
            (samples_to(experience.samples, torch.device("cpu")), replace(experience.scored, rewards=[], metrics={}))
        )
        samples = join_samples([part for part, _ in parts], int(collector.sampler.tokenizer.pad_token_id))
        scored = join_scores(collector.rewards, [part for _, part in parts], {})
        whole = Collected(samples=samples_to(samples, experience.keep.device), scored=scored, attempts=0)
        alone = Collective()
        collector, maker = replace(collector, collective=alone), replace(maker, collective=alone)
        fault = self._fault(whole, result, problems, collector, maker, replace(update, collective=alone))
        faults = together.gather_objects(fault)
        if told := next(filter(None, faults), None):
            raise ValueError(
                f"trainer.strategy is {self.strategy}, under which the first rollout was not that of one process: "
                f"{told}. Leave it out, or set ddp or grpo_pl.distributed.strategy.FSDP2Strategy."
            )
        return bool(result.grad_norms)  # the rewards of a rollout may all be equal: it teaches nothing, and proves less

    def _fault(
        self,
        whole: Collected,
        result: UpdateResult,
        problems: Sequence[Problem],
        collector: Collector,
        maker: ExperienceMaker,
        update: PolicyUpdate,
    ) -> str:
        """The first difference of the whole rollout and its update from those of this process alone."""
        samples, device = whole.samples, whole.samples.rollout.completion_ids.device
        self.policy.to(device)
        asked, had = ([problem.id for problem in some] for some in (problems, samples.prompts))
        if asked != had:
            return f"its processes had the problems {_shortened(had)}, not {_shortened(asked)}"
        error = compare(self.policy, samples, 0, collector.sampling.temperature, Collective()).error
        exact = self.policy.dtype == torch.float32 and not torch.is_autocast_enabled(self.policy.device.type)
        most = FIRST_AT_MOST_FLOAT32 if exact else FIRST_AT_MOST
        if not error <= most:
            return f"log-probabilities differ by {error:.1e} on average, and rounding explains {most:.0e}"
        drawn = collector.draw(self.policy, collector.request(problems, samples.step))
        differing = sum(a != b for a, b in zip(drawn.completions, samples.completions, strict=True))
        if differing > max(1.0, NEAR_TIES * len(samples.completions)):
            return f"{differing} of {len(samples.completions)} completions differ"
        reference = None
        if self.reference is not None:
            self.reference.renew(self.policy, samples.step)
            reference = self.reference.model.to(device)
        alone = maker.make(self.policy, reference, whole)
        optimizer = update.optimization.build(self.policy.parameters())
        found = update.run(self.policy, optimizer, alone, lambda loss, last: loss.backward())
        norms = [(norms[:1] or [0.0])[0] for norms in (result.grad_norms, found.grad_norms)]
        if not abs(norms[0] - norms[1]) <= NORM_WITHIN * norms[1]:
            return f"the gradient's norm is {norms[0]:.4g}, and {norms[1]:.4g} in one process"
        return ""


def _shortened(ids: Sequence[Any]) -> str:
    return ", ".join(map(str, ids[:4])) + (" …" if len(ids) > 4 else "")
