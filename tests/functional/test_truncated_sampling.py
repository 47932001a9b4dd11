"""Sampling from what top-k and top-p leave, enumerated: with the recorded support the loss's gradient is exact."""

import itertools

import pytest
import torch

from grpo_pl.functional.logprobs import token_logprobs
from grpo_pl.functional.sampling import Noise, draw_tokens, kept_tokens, token_keys, truncate_logits
from grpo_pl.objective.algorithm import GRPOAlgorithm
from tests.losses import loss_of_tokens

V, T = 4, 2
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=T)))  # (n, T)
STATE = torch.stack([torch.zeros(len(TEXTS), dtype=torch.int64), TEXTS[:, 0] + 1], dim=1)  # (n, T): what came before
REWARD = (TEXTS[:, 0] + TEXTS[:, 1] == 3).double() + 0.5 * (TEXTS[:, 1] == 0)
TRUNCATIONS = [{"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.8}]


def _table() -> torch.Tensor:
    """Logits (state, token)."""
    return torch.randn(1 + V, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _supports(table: torch.Tensor, **truncation: float) -> torch.Tensor:
    """(state, K)."""
    return kept_tokens(truncate_logits(table, **truncation))


def _probabilities(table: torch.Tensor, supports: torch.Tensor) -> torch.Tensor:
    """(n,) of every text under the policy that draws from the supports; differentiable in the table alone."""
    inside = torch.zeros(1 + V, V + 1, dtype=torch.bool)
    inside = inside.scatter(1, supports.long().masked_fill(supports < 0, V), True)[:, :V]
    weights = table.exp() * inside
    return (weights / weights.sum(dim=1, keepdim=True))[STATE, TEXTS].prod(dim=1)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_kept_tokens_are_those_that_truncation_left(truncation):
    table = _table()
    cut = truncate_logits(table, **truncation)
    for row, ids in zip(cut, kept_tokens(cut).tolist(), strict=True):
        assert [i for i in ids if i >= 0] == row.isfinite().nonzero().flatten().tolist()
        assert -1 not in ids[: int(row.isfinite().sum())]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_the_expected_gradient_is_that_of_the_policy_that_draws(truncation):
    """Σ over all texts of their probability times the loss's gradient is ∇ of the expected reward."""
    leaf = _table().requires_grad_()
    supports = _supports(leaf.detach(), **truncation)
    drawn = _probabilities(leaf, supports)
    assert drawn.sum().item() == pytest.approx(1.0, abs=1e-12)
    (exact,) = torch.autograd.grad((drawn * REWARD).sum(), leaf)
    possible = drawn.detach() > 0
    algorithm = GRPOAlgorithm(surrogate="unclipped", beta=0.0)

    def gradient(support: torch.Tensor | None) -> torch.Tensor:
        logprobs = token_logprobs(leaf[STATE], TEXTS, support=support)[possible]
        output = loss_of_tokens(
            algorithm,
            logprobs=logprobs,
            old_logprobs=None,
            advantages=REWARD[possible].unsqueeze(1),
            mask=torch.ones_like(logprobs, dtype=torch.bool),
            weights=drawn.detach()[possible].unsqueeze(1).expand_as(logprobs),
        )
        return -torch.autograd.grad(output.loss, leaf)[0]

    torch.testing.assert_close(gradient(supports[STATE]), exact, rtol=0, atol=1e-10)
    biased = gradient(None)
    assert (biased - exact).abs().max() > 0.01


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_the_probabilities_drawn_with_are_those_over_the_support(truncation):
    table = _table().float()
    noise = Noise(token_keys(torch.arange(200), 0))
    for state, support in enumerate(_supports(table, **truncation)):
        tokens, logprobs = draw_tokens(table[state].expand(200, V), noise, temperature=1.0, **truncation)
        want = token_logprobs(table[state].expand(200, V), tokens, support=support.expand(200, -1))
        torch.testing.assert_close(logprobs, want)
