"""Calls the hooks of terms, and names the term that fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_pl.functional.losses import LossOutput
from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.base import CollectedTokens, Term

Terms = Mapping[str, Term]
Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> sum and count."""
_TOKENS = (
    *("logprobs", "mask", "entropy", "old_logprobs", "ref_logprobs", "sampling_logprobs", "observation_weights"),
    *("top_ids", "top_logprobs", "sampling_top_logprobs", "top_is_drawn", "teacher_logprobs", "divergence", "taught"),
)
"""Names of tokens that the pipeline gives, in one run or another."""
_METRICS = ("entropy", "reward", "loss", "lr")
"""Names of metrics that the module logs itself, after those of terms."""


def needed(terms: Terms) -> list[Needs]:
    """What each term needs.

    Raises:
        ValueError: a term raises, or says something else.
    """
    found = []
    for name, term in terms.items():
        try:
            needs = term.needs
        except Exception as error:  # a user's term may raise anything
            raise fault(name, f"needs raises {type(error).__name__}: {error}") from error
        if not isinstance(needs, Needs):
            raise fault(name, f"needs is {needs!r:.60}: give grpo_pl.objective.needs.Needs(...)")
        found.append(needs)
    return found


def credited(terms: Terms, collected: CollectedTokens) -> CollectedTokens:
    """``collected`` with the advantages of tokens in the place of those of completions, where a term makes them.

    Raises:
        ValueError: a term raises, or returns another shape, or advantages that are not finite.
    """
    for name, term in terms.items():
        found = call(name, term, "credit", collected)
        if found is None:
            continue
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        if shape != tuple(collected.kept.shape) or not found.isfinite().all():
            raise fault(name, f"credit returns {shape}: give finite advantages {tuple(collected.kept.shape)}")
        collected = replace(collected, tokens={**collected.tokens, "advantages": found})
    return collected


def prepared(terms: Terms, collected: CollectedTokens) -> dict[str, Tensor]:
    """What all terms prepare of a rollout, by name.

    Raises:
        ValueError: a term raises, or returns no tensor of a row for each completion, or one that there is already.
    """
    found: dict[str, Tensor] = {}
    rows, width = collected.kept.shape
    for name, term in terms.items():
        for key, tensor in (call(name, term, "prepare", collected) or {}).items():
            if key in (*found, *collected.tokens, *_TOKENS):
                raise fault(name, f"prepare returns {key!r}, which there is already")
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            if not isinstance(tensor, Tensor) or shape[:2] not in ((rows, width), (rows, 1)):
                raise fault(name, f"prepare returns {key!r} as {shape}: give a tensor {(rows, width)} or {(rows, 1)}")
            found[key] = tensor
    return found


def with_advantages(terms: Terms, advantages: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
    """The advantages (B, T) or (B, 1) of a micro-batch after every term."""
    for name, term in terms.items():
        found = call(name, term, "advantages", advantages, tokens)
        if found is advantages:
            continue
        if not isinstance(found, Tensor) or found.shape not in (advantages.shape, tokens["logprobs"].shape):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise fault(name, f"advantages returns {shape}: give one for each token, {tuple(tokens['logprobs'].shape)}")
        wrong = tokens["mask"] & ~found.isfinite()
        if wrong.any() and _all_finite(tokens):
            first = found.expand_as(wrong)[wrong][0].item()
            raise fault(name, f"advantages returns {first} for {int(wrong.sum())} token(s)")
        advantages = found
    return advantages


def with_policy_losses(terms: Terms, policy: Tensor, tokens: TokenBatch) -> Tensor:
    """The policy term (B, T) with what terms add to it."""
    for name, term in terms.items():
        more = call(name, term, "policy_loss", tokens)
        if more is not None:
            policy = policy + _finite(name, "policy_loss", _shaped(name, "policy_loss", more, tokens), tokens)
    return policy


def with_masks(terms: Terms, policy: Tensor, tokens: TokenBatch) -> Tensor:
    """The policy term (B, T), 0 where the mask of a term leaves a token out."""
    for name, term in terms.items():
        mask = call(name, term, "policy_mask", tokens)
        if mask is not None:
            policy = policy.masked_fill(~_shaped(name, "policy_mask", mask, tokens).bool(), 0.0)
    return policy


def with_losses(
    terms: Terms, total: Tensor, tokens: TokenBatch, stats: dict[str, Tensor], *, behind_entropy: bool
) -> Tensor:
    """The loss (B, T) of each token with those of the terms whose place is before, or behind, the entropy bonus; their
    metrics go into ``stats``."""
    for name, term in terms.items():
        if term.behind_entropy != behind_entropy:
            continue
        loss = call(name, term, "loss", tokens)
        if loss is not None:
            total = total + _finite(name, "loss", _shaped(name, "loss", loss, tokens), tokens)
        for key, values in (call(name, term, "metrics", tokens) or {}).items():
            if key in stats or key in _METRICS:
                raise fault(name, f"metrics returns {key!r}, which is logged already")
            stats[key] = _shaped(name, f"metrics ({key})", values, tokens)
    return total


def with_extras(terms: Terms, loss: Tensor, tokens: Mapping[str, Tensor], sums: Sums) -> Tensor:
    """The loss with the scalars of all terms, whose metrics go into ``sums``."""
    for name, term in terms.items():
        extra = call(name, term, "extra", tokens)
        if extra is None:
            continue
        if not isinstance(extra, LossOutput) or extra.loss.dim() > 0:
            raise fault(name, "extra returns no LossOutput with a scalar loss")
        if not extra.loss.isfinite() and _all_finite(tokens):
            raise fault(name, f"extra returns a loss of {extra.loss.item()}")
        for key, pair in extra.stats.items():
            if not isinstance(pair, tuple) or [getattr(each, "shape", None) for each in pair] != [(), ()]:
                raise fault(name, f"extra returns the metric {key!r} as {pair}: give its sum and count, two scalars")
            if key in (*sums, *_METRICS):
                raise fault(name, f"extra returns the metric {key!r}, which is logged already")
        loss = loss + extra.loss
        sums |= extra.stats
    return loss


def call(name: str, term: Term, hook: str, *arguments: object, **more: object) -> Any:
    """What a hook returns.

    Raises:
        ValueError: whatever it raises, in one line that names the term; what a check refuses as it says it.
    """
    try:
        return getattr(term, hook)(*arguments, **more)
    except torch.OutOfMemoryError:  # smaller micro-batches may do
        raise
    except Exception as error:  # a user's term may raise anything
        if hook in ("check", "check_run") and isinstance(error, ValueError):
            raise
        raise fault(name, f"{hook} raises {type(error).__name__}: {error}") from error


def _shaped(name: str, hook: str, found: Tensor, tokens: TokenBatch) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != tokens.logprobs.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise fault(name, f"{hook} returns {shape}: give one number for each token, {tuple(tokens.logprobs.shape)}")
    return found


def _finite(name: str, hook: str, found: Tensor, tokens: TokenBatch) -> Tensor:
    """``found``, unless it is not finite where all that the term was given is."""
    wrong = tokens.mask & ~found.isfinite()
    if wrong.any() and _all_finite(tokens.more):
        raise fault(name, f"{hook} returns {found[wrong][0].item()} for {int(wrong.sum())} token(s)")
    return found


def _all_finite(tokens: Mapping[str, Tensor]) -> bool:
    """True if the policy's tokens are finite in every tensor; else a step that is not finite is skipped on all ranks,
    and no term is at fault."""
    mask = tokens["mask"]
    given = [t for t in tokens.values() if t.is_floating_point() and t.shape[:2] in (mask.shape, (len(mask), 1))]
    return all(bool(t.expand(*mask.shape, *t.shape[2:])[mask].isfinite().all()) for t in given)


def fault(name: str, told: str) -> ValueError:
    """The error of the term of that name."""
    return ValueError(f"model.algorithm.terms.{name}: {told}.")
