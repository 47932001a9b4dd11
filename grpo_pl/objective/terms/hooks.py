"""Calls the hooks of terms over the tokens of a micro-batch, and names the term that fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.terms.base import CollectedTokens, Term

Terms = Mapping[str, Term]
_TOKENS = ("logprobs", "mask", "entropy", "divergence", "top_logprobs", "observation_weights")
"""Names of tokens that the forward pass brings."""
_METRICS = ("entropy", "teacher/kl", "teacher/divergence", "teacher/taught", "observation/nll", "reward", "loss", "lr")
"""Names of metrics that are logged behind those of terms."""


def prepared(terms: Terms, collected: CollectedTokens) -> dict[str, Tensor]:
    """What all terms prepare of a rollout, by name.

    Raises:
        ValueError: a term raises, or returns no tensor of a row for each completion, or one that there is already.
    """
    found: dict[str, Tensor] = {}
    rows, width = collected.kept.shape
    for name, term in terms.items():
        for key, tensor in (_call(name, term, "prepare", collected) or {}).items():
            if key in (*found, *collected.tokens, *_TOKENS):
                raise _fault(name, f"prepare returns {key!r}, which there is already")
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            if not isinstance(tensor, Tensor) or shape[:2] not in ((rows, width), (rows, 1)):
                raise _fault(name, f"prepare returns {key!r} as {shape}: give a tensor {(rows, width)} or {(rows, 1)}")
            found[key] = tensor
    return found


def with_masks(terms: Terms, policy: Tensor, tokens: TokenBatch) -> Tensor:
    """The policy term (B, T), 0 where the mask of a term leaves a token out."""
    for name, term in terms.items():
        mask = _call(name, term, "policy_mask", tokens)
        if mask is not None:
            policy = policy.masked_fill(~_shaped(name, "policy_mask", mask, tokens).bool(), 0.0)
    return policy


def with_losses(terms: Terms, total: Tensor, tokens: TokenBatch, stats: dict[str, Tensor]) -> Tensor:
    """The loss (B, T) of each token with those of all terms, whose metrics go into ``stats``."""
    for name, term in terms.items():
        loss = _call(name, term, "loss", tokens)
        if loss is not None:
            total = total + _finite(name, "loss", _shaped(name, "loss", loss, tokens), tokens)
        for key, values in (_call(name, term, "metrics", tokens) or {}).items():
            if key in (*stats, *_METRICS):
                raise _fault(name, f"metrics returns {key!r}, which is logged already")
            stats[key] = _shaped(name, f"metrics ({key})", values, tokens)
    return total


def _call(name: str, term: Term, hook: str, argument: object) -> Any:
    try:
        return getattr(term, hook)(argument)
    except torch.OutOfMemoryError:  # smaller micro-batches may do
        raise
    except Exception as error:  # a user's term may raise anything
        raise _fault(name, f"{hook} raises {type(error).__name__}: {error}") from error


def _shaped(name: str, hook: str, found: Tensor, tokens: TokenBatch) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != tokens.logprobs.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise _fault(name, f"{hook} returns {shape}: give one number for each token, {tuple(tokens.logprobs.shape)}")
    return found


def _finite(name: str, hook: str, found: Tensor, tokens: TokenBatch) -> Tensor:
    """``found``, unless it is not finite where the policy itself is."""
    wrong = tokens.mask & ~found.isfinite()
    if wrong.any() and tokens.logprobs.isfinite().all():
        raise _fault(name, f"{hook} returns {float(found[wrong][0])} for {int(wrong.sum())} token(s)")
    return found


def _fault(name: str, told: str) -> ValueError:
    return ValueError(f"model.algorithm.terms.{name}: {told}.")
