"""A term of somebody's own: its hooks act in their order, and one that fails is named in one line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms import Term
from grpo_pl.objective.terms.base import CollectedTokens
from grpo_pl.objective.terms.hooks import prepared
from tests.losses import loss_of_tokens

MASK = torch.tensor([[True, True, False]])


@dataclass(frozen=True, kw_only=True)
class Own(Term):
    """coef · log π for the tokens whose advantage is above its mean, which keep no policy term."""

    coef: float = 1.0

    def prepare(self, collected: CollectedTokens) -> Mapping[str, Tensor]:
        return {"high": collected.own(collected.gather("advantages") > collected.gather("advantages").mean())}

    def policy_mask(self, tokens: TokenBatch) -> Tensor:
        return ~tokens.more["high"]

    def loss(self, tokens: TokenBatch) -> Tensor:
        return self.coef * tokens.logprobs * tokens.more["high"]

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        return {"own/high": tokens.more["high"].to(tokens.logprobs.dtype)}


def collected(advantages: Tensor) -> CollectedTokens:
    return CollectedTokens(tokens={"advantages": advantages}, kept=MASK, step=0, ranks=Collective())


def test_its_hooks_act_in_their_order() -> None:
    """Log-probabilities −1 and −2 with advantages 1 and 3, the second above the mean: −(1 · 1) + 0.5 · (−2)."""
    algorithm = GRPOAlgorithm(beta=0.0, surrogate="unclipped", terms={"own": Own(coef=0.5)})
    advantages = torch.tensor([[1.0, 3.0, 9.0]])
    more = prepared(algorithm.active_terms, collected(advantages))
    assert more["high"].tolist() == [[False, True, False]]
    logprobs = torch.tensor([[-1.0, -2.0, 0.0]], requires_grad=True)
    output = loss_of_tokens(
        algorithm, logprobs=logprobs, advantages=advantages, mask=MASK, weights=torch.ones(1, 3), **more
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.0 - 1.0)
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-1.0, 0.5, 0.0]]
    assert [value.item() for value in output.stats["own/high"]] == [1.0, 2]


def test_what_it_needs_is_what_all_terms_need() -> None:
    found = Needs(entropy=True) | Needs(old_entropy=True)
    assert (found.entropy, found.old_entropy, found.ref_logprobs) == (True, True, False)


def _raising(tokens: Any) -> Any:
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("hook", "does", "told"),
    [
        ("loss", _raising, "loss raises KeyError"),
        ("policy_mask", _raising, "policy_mask raises KeyError"),
        ("loss", lambda tokens: tokens.logprobs.sum(), r"loss returns \(\): give one number for each token, \(1, 3\)"),
        ("loss", lambda tokens: 0.5, "loss returns float: give one number for each token"),
        ("loss", lambda tokens: tokens.logprobs * math.nan, r"loss returns nan for 2 token\(s\)"),
        ("policy_mask", lambda tokens: tokens.mask[0], r"policy_mask returns \(3,\)"),
        ("metrics", lambda tokens: {"ratio/mean": tokens.logprobs}, "'ratio/mean', which is logged already"),
        ("metrics", lambda tokens: {"entropy": tokens.logprobs}, "'entropy', which is logged already"),
    ],
)
def test_one_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, hook: str, does: Any, told: str) -> None:
    monkeypatch.setattr(Own, hook, lambda self, tokens: does(tokens))
    algorithm = GRPOAlgorithm(beta=0.0, terms={"mine": Own()})
    tokens = {"logprobs": torch.full((1, 3), -1.0), "advantages": torch.ones(1, 1), "high": ~MASK}
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: .*{told}"):
        loss_of_tokens(algorithm, mask=MASK, weights=torch.ones(1, 3), **tokens)


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ({"high": torch.ones(2, 3)}, r"as \(2, 3\): give a tensor \(1, 3\)"),
        ({"advantages": MASK}, "already"),
    ],
)
def test_one_that_prepares_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, returns: dict[str, Tensor], told: str
) -> None:
    monkeypatch.setattr(Own, "prepare", lambda self, tokens: returns)
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: prepare returns .*{told}"):
        prepared({"mine": Own()}, collected(torch.ones(1, 3)))


def test_out_of_memory_inside_a_term_is_left_to_the_budget_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(self: Own, tokens: TokenBatch) -> Tensor:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(Own, "loss", exhausted)
    tokens = {"logprobs": torch.full((1, 3), -1.0), "advantages": torch.ones(1, 1), "high": ~MASK}
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        loss_of_tokens(GRPOAlgorithm(terms={"own": Own()}, beta=0.0), mask=MASK, weights=torch.ones(1, 3), **tokens)
