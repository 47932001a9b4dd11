"""``Watch``: looks at one completion and its group while a step of a replay is made, before and behind its update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from grpo_pl.extras.replay.recorded import CannotReplay
from grpo_pl.functional.logprobs import restricted
from grpo_pl.objective.policy_term import clip_stats
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.weights import load_whole
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.experience import Experience
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.microbatches import Scorer, rollout_rows
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.update import PolicyUpdate, totals_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OTHERS = 5
"""Likeliest tokens besides the one that was drawn."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What an optimiser step made of the tokens of the completion: (T,) each."""

    number: int
    """Of the optimiser step in its rollout, from 0."""
    logprobs: Tensor
    ratio: Tensor
    clipped: Tensor | None
    """None where the objective does not clip."""
    weights: Tensor
    """Of each token in the sum of the loss."""
    pull: Tensor
    """−∂L/∂ log π of each token: above 0 the step makes it likelier."""


@dataclass(frozen=True, kw_only=True)
class Distributions:
    """What the policy would have drawn at each place before the update."""

    logprobs: Tensor  # (T,)
    entropy: Tensor  # (T,)
    other_ids: Tensor | None  # (T, K), the likeliest but for the drawn one; None of episodes with several prompts
    other_logprobs: Tensor | None  # (T, K)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The same key under some weights, alone, and what the rewards give it."""

    rollouts: int
    """Completed rollouts of the weights."""
    samples: Samples
    scored: ScoredBatch


class Watch(StepCallback):
    """Collects what can be known of one completion while its step is made.

    Args:
        step: the rollout.
        prompt_id: its problem.
        sample: the number of the completion in its group.
        later: completed rollouts and weights, from which the same key is drawn as well.
    """

    module: GRPOModule
    update: PolicyUpdate
    row: int
    """Of the completion in the rollout."""
    group: Tensor
    """The rows of its group."""
    distributions: Distributions
    before: Tensor
    """(B, T) log-probabilities of the group before the update, 0 of other rows; ``after`` likewise."""
    after: Tensor

    def __init__(
        self, step: int, prompt_id: int, sample: int, later: Iterable[tuple[int, dict[str, Tensor]]] = ()
    ) -> None:
        self.step, self.prompt_id, self.sample, self.later = step, prompt_id, sample, later
        self.looks: list[Look] = []
        self.drawn: list[Drawn] = []
        """The same key drawn alone, before the update and under later weights; empty where that cannot be done."""
        self._experience: Experience | None = None
        self._minibatches: list[Tensor] = []
        self._attempt = 0

    def before_update(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> None:
        module = cast(GRPOModule, pl_module)
        prompts, size = experience.samples.prompts, experience.rollout.group_size
        number = next((n for n, problem in enumerate(prompts) if problem.id == self.prompt_id), None)
        if number is None:
            some = ", ".join(str(problem.id) for problem in prompts[:6]) + (" …" if len(prompts) > 6 else "")
            raise CannotReplay(f"step {self.step} has no prompt {self.prompt_id}: give one of its own, {some}.")
        if not 0 <= self.sample < size:
            raise CannotReplay(f"sample {self.sample}: a group has {size} completions, so give 0 … {size - 1}.")
        self.group = torch.arange(number * size, (number + 1) * size)
        self.row, self.module = number * size + self.sample, module
        self.update = module.policy_update(self.step)
        self._minibatches = list(self.update.minibatches(experience))
        taught = experience.teacher.heads_on(experience.keep.device)
        self._experience = replace(experience, teacher=taught)
        policy = module.require_policy()
        self.distributions = distributions(policy, experience, self.row, self.update.temperature)
        if self._can_draw_alone:
            attempts = [self._sampled(attempt) for attempt in range(experience.attempts + 1)]
            rollout = experience.rollout
            ids = rollout.completion_ids[self.row][rollout.completion_mask[self.row]]
            same = [torch.equal(one.rollout.completion_ids[0][one.rollout.completion_mask[0]], ids) for one in attempts]
            self._attempt = same.index(True) if any(same) else 0
            self._keep(self.step, attempts[self._attempt])

    @property
    def experience(self) -> Experience:
        assert self._experience is not None, "the step was not made"
        return self._experience

    def on_stage_progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Looks before each optimiser step, and behind the last."""
        if stage != "update" or note or self._experience is None:
            return
        policy = self.module.require_policy()
        scorer = Scorer(
            budget=self.update.budget, collective=self.update.collective, temperature=self.update.temperature
        )
        group = self.group.to(self.experience.keep.device)
        if done == 0:
            self.before, _ = scorer.logprobs(policy, self.experience.rollout, group)
        if done == total:
            self.after, _ = scorer.logprobs(policy, self.experience.rollout, group)
        elif self.row in self._minibatches[done].tolist():
            share = 0.0 if self.module.demonstrations is None else self.update.beside(done).share
            totals = totals_of(self.experience, self._minibatches[done].to(group.device))
            self.looks.append(look(self.update, policy, self.experience, self.row, totals, done, 1.0 - share))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draws the same key from the weights behind the update and from later ones; leaves the policy as it was."""
        if not self._can_draw:
            return
        policy = self.module.require_policy()
        with trainer.precision_plugin.forward_context(), restored(policy):
            self._keep(self.step + 1, self._sampled(self._attempt))
            for rollouts, weights in self.later:
                load_whole(policy, weights)
                self._keep(rollouts, self._sampled(self._attempt))

    @property
    def _can_draw(self) -> bool:
        """Nobody else plays in the environment."""
        return self.module.pool is None or not self.module.source.stale

    @property
    def _can_draw_alone(self) -> bool:
        """The completion was drawn from the weights before the update."""
        return self._can_draw and not self.module.source.stale

    def _keep(self, rollouts: int, samples: Samples) -> None:
        scored = self.module.collector.score(samples)
        self.drawn.append(Drawn(rollouts=rollouts, samples=samples, scored=scored))

    @torch.no_grad()
    def _sampled(self, attempt: int) -> Samples:
        """The sample of the key, alone, from the policy as it is.

        Args:
            attempt: of dynamic sampling.
        """
        module, engine = self.module, NativeEngine()
        engine.decoder = module.decoder
        return replace(module.sampler, engine=engine).sample(
            module.require_policy(),
            [self.experience.samples.per_row[self.row]],
            group_size=1,
            sampling=module.sampling,
            seed=module.seed,
            split="train",
            step=self.step,
            attempt=attempt,
            first=self.sample,
        )


@contextmanager
def restored(policy: PreTrainedModel) -> Iterator[None]:
    """Puts the policy's weights back at the end of the block."""
    before = {name: weight.detach().clone() for name, weight in policy.state_dict().items()}
    try:
        yield
    finally:
        policy.load_state_dict(before)


def look(
    update: PolicyUpdate,
    policy: PreTrainedModel,
    experience: Experience,
    row: int,
    totals: tuple[int, int, int],
    number: int,
    share: float,
) -> Look:
    """What the loss of an optimiser step is made of at the tokens of one completion.

    Args:
        totals: of the optimiser step.
        share: of the rollout in the loss, where demonstrations have another.
    """
    rows = torch.tensor([row], device=experience.keep.device)
    with torch.no_grad():
        tokens, weights = update.loss_inputs(policy, experience, rows, totals)
    weights = share * weights * experience.keep[row]
    with torch.enable_grad():
        tokens["logprobs"] = tokens["logprobs"].detach().requires_grad_()
        batch = update.algorithm.token_batch(tokens)
        loss = update.algorithm.loss(tokens, weights).loss
        pull = torch.zeros_like(weights)
        if loss.requires_grad and bool(experience.active[row]):
            pull = -torch.autograd.grad(loss, tokens["logprobs"])[0]
    stats = clip_stats(update.algorithm, batch)
    clipped = stats.get("clip_ratio/region_mean", stats.get("cispo_clip_ratio"))
    return Look(
        number=number,
        logprobs=tokens["logprobs"].detach()[0],
        ratio=batch.ratio.detach()[0],
        clipped=None if clipped is None else clipped[0].bool(),
        weights=weights[0],
        pull=pull[0],
    )


@torch.no_grad()
def distributions(policy: PreTrainedModel, experience: Experience, row: int, temperature: float) -> Distributions:
    """Log-probabilities, entropies and the likeliest other tokens of one completion, under the policy as it is."""
    part = rollout_rows(experience.rollout, torch.tensor([row], device=experience.keep.device))
    logprobs, entropy = completion_logprobs(policy, **part, temperature=temperature, with_entropy=True)
    assert entropy is not None
    if bool((part["segment_index"] != 0).any()):
        return Distributions(logprobs=logprobs[0], entropy=entropy[0], other_ids=None, other_logprobs=None)
    prompt, drawn = part["prompt_ids"][0][part["prompt_mask"][0]], part["completion_ids"][0]
    ids = torch.cat([prompt, drawn]).unsqueeze(0)
    logits = policy(input_ids=ids, logits_to_keep=len(drawn) + 1, use_cache=False).logits[0, :-1]  # (T, V)
    support = part.get("support")
    scaled = restricted(logits.float() / temperature, None if support is None else support[0])
    likeliest = scaled.log_softmax(dim=-1).scatter(-1, drawn.unsqueeze(-1), -torch.inf)
    others = likeliest.topk(min(OTHERS, likeliest.shape[-1] - 1), dim=-1)
    return Distributions(
        logprobs=logprobs[0],
        entropy=entropy[0],
        other_ids=others.indices,
        other_logprobs=others.values,
    )
