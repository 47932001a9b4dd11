"""Trust regions of tokens and completions: numbers worked out by hand, scalar references, enumerated distributions."""

import itertools
import math

import pytest
import torch

from grpo_pl.functional.trust_region import LikelyTokens, binary_divergence, off_policy, outside, top_divergence
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.top_k_trust_region import TopKTrustRegion
from tests.losses import loss_of_tokens


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_divergences_worked_out_by_hand():
    drawn, now = row(0.5, 0.25, 0.2).log(), row(0.25, 0.5, 0.2).log()
    assert binary_divergence(now, drawn, kind="tv")[0].tolist() == pytest.approx([0.25, 0.25, 0.0])
    # 0.5 ln 2 + 0.5 ln(2/3) = 0.5 ln(4/3); 0.25 ln(1/2) + 0.75 ln(3/2)
    expected = [0.5 * math.log(4 / 3), 0.75 * math.log(1.5) - 0.25 * math.log(2), 0.0]
    assert binary_divergence(now, drawn, kind="kl")[0].tolist() == pytest.approx(expected, abs=1e-15)


def naive_divergence(pi: float, mu: float, kind: str) -> float:
    if kind == "tv":
        return 0.5 * (abs(pi - mu) + abs((1 - pi) - (1 - mu)))
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_masks_are_those_of_the_reference(kind):
    generator = torch.Generator().manual_seed(0)
    mu, pi = torch.rand(2, 400, generator=generator, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
    advantages = torch.randn(400, generator=generator, dtype=torch.float64)
    advantages[::9] = 0.0
    low, high = (0.1, 0.2) if kind == "tv" else (0.02, 0.05)
    divergence = binary_divergence(pi.log(), mu.log(), kind=kind)
    found = torch.stack(outside(pi.log(), mu.log(), advantages, kind=kind, low=low, high=high))
    for i, (p, m, a) in enumerate(zip(pi.tolist(), mu.tolist(), advantages.tolist(), strict=True)):
        expected = naive_divergence(p, m, kind)
        assert divergence[i].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
        assert found[:, i].tolist() == [a < 0 and p < m and expected > low, a > 0 and p > m and expected > high]
    assert found.sum(1).min() > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_tokens_have_no_nan(dtype):
    drawn, now = torch.tensor([0.0, 0.0, -0.5, -1e-8, -60.0], dtype=dtype), torch.tensor([0.0, -0.5, 0.0, 0, 0])
    divergence = binary_divergence(now.to(dtype), drawn, kind="kl")
    assert divergence[:2].tolist() == pytest.approx([0.0, 0.5])  # KL of a certain token is -log π
    assert divergence[2] == math.inf  # nothing is left for what the other policy may draw
    assert not divergence.isnan().any()


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_binary_divergence_is_a_lower_bound_of_the_whole_one(kind):
    torch.manual_seed(0)
    mu, pi = torch.randn(2, 50, 6, dtype=torch.float64).softmax(-1)  # 50 distributions over six tokens
    whole = 0.5 * (mu - pi).abs().sum(-1) if kind == "tv" else (mu * (mu / pi).log()).sum(-1)
    binary = binary_divergence(pi.log(), mu.log(), kind=kind)  # whichever token is drawn
    assert (binary <= whole.unsqueeze(-1) + 1e-12).all()
    torch.testing.assert_close(
        binary_divergence(pi[:, :2].log().log_softmax(-1), mu[:, :2].log().log_softmax(-1), kind=kind).diff(dim=-1),
        torch.zeros(50, 1, dtype=torch.float64),
    )  # of two tokens, either says it all


# --- over the likeliest tokens ----------------------------------------------------------------------------------------


def distributions(count: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (count, vocabulary) of the policy now and of the one that drew."""
    generator = torch.Generator().manual_seed(0)
    now, before = 1.5 * torch.randn(2, count, vocabulary, generator=generator, dtype=torch.float64)
    return now.log_softmax(-1), (0.6 * now + before).log_softmax(-1)


def over_the_likeliest(now: torch.Tensor, before: torch.Tensor, drawn: torch.Tensor, k: int, kind: str) -> torch.Tensor:
    """`top_divergence` of one token a row, from whole distributions (N, V); ``drawn`` (N,)."""
    ids = before.topk(k, dim=-1).indices
    likely = LikelyTokens(now.gather(1, ids), before.gather(1, ids), ids == drawn.unsqueeze(1))
    chosen = (table.gather(1, drawn.unsqueeze(1)).squeeze(1) for table in (now, before))
    return top_divergence(*chosen, likely, kind=kind)


def naive_top_divergence(pi: list[float], mu: list[float], drawn: int, k: int, kind: str) -> float:
    """Number by number: the k likeliest tokens under mu, the drawn one, and all others as one."""
    events = set(sorted(range(len(mu)), key=lambda v: -mu[v])[:k]) | {drawn}
    pairs = [(pi[v], mu[v]) for v in events]
    others = [v for v in range(len(mu)) if v not in events]
    if others:
        pairs.append((math.fsum(pi[v] for v in others), math.fsum(mu[v] for v in others)))
    if kind == "tv":
        return 0.5 * math.fsum(abs(p - m) for p, m in pairs)
    return math.fsum(m * math.log(m / p) for p, m in pairs)


def test_the_divergence_over_two_likely_tokens_by_hand():
    """Drawn by (0.4, 0.3, 0.2, 0.1), now (0.5, 0.1, 0.1, 0.3)."""
    now, before = (torch.tensor([p], dtype=torch.float64).log() for p in ((0.5, 0.1, 0.1, 0.3), (0.4, 0.3, 0.2, 0.1)))

    def found(token: int, kind: str) -> float:
        return over_the_likeliest(now, before, torch.tensor([token]), 2, kind).item()

    # events 0, 1 and the other two: ½ (0.1 + 0.2 + 0.1)
    assert found(1, "tv") == pytest.approx(0.2)
    assert found(1, "kl") == pytest.approx(0.4 * math.log(0.8) + 0.3 * math.log(3) + 0.3 * math.log(0.75))
    # token 3 is not among the two likeliest, and is an event of its own: ½ (0.1 + 0.2 + 0.2 + 0.1)
    assert found(3, "tv") == pytest.approx(0.3)
    expected = 0.4 * math.log(0.8) + 0.3 * math.log(3) + 0.1 * math.log(1 / 3) + 0.2 * math.log(2)
    assert found(3, "kl") == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("k", [1, 3, 8, 9])
def test_the_divergence_over_likely_tokens_is_that_of_the_reference(kind, k):
    now, before = distributions(200, 9)
    drawn = torch.randint(9, (200,), generator=torch.Generator().manual_seed(1))
    found = over_the_likeliest(now, before, drawn, k, kind)
    rows = zip(now.exp().tolist(), before.exp().tolist(), drawn.tolist(), strict=True)
    expected = [naive_top_divergence(pi, mu, token, k, kind) for pi, mu, token in rows]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_more_likely_tokens_see_more_of_the_divergence_and_all_of_them_see_it_whole(kind):
    now, before = distributions(300, 12)
    pi, mu = now.exp(), before.exp()
    whole = 0.5 * (mu - pi).abs().sum(-1) if kind == "tv" else (mu * (before - now)).sum(-1)
    for token in range(12):  # whichever is drawn
        drawn = torch.full((300,), token)
        seen = [binary_divergence(now[:, token], before[:, token], kind=kind)]
        seen += [over_the_likeliest(now, before, drawn, k, kind) for k in range(1, 13)]
        for less, more in itertools.pairwise(seen):
            assert (less <= more + 1e-12).all()
        torch.testing.assert_close(seen[-1], whole, rtol=0, atol=1e-10)
    assert (seen[4] - seen[0]).max() > 0.1


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_no_likely_tokens_leave_the_binary_divergence(kind):
    """As where truncation left a single token, or none is recorded: −inf has no mass."""
    now, before = distributions(50, 5)
    nothing = torch.full((50, 3), -torch.inf, dtype=torch.float64)
    likely = LikelyTokens(nothing, nothing, torch.zeros(50, 3, dtype=torch.bool))
    found = top_divergence(now[:, 0], before[:, 0], likely, kind=kind)
    torch.testing.assert_close(found, binary_divergence(now[:, 0], before[:, 0], kind=kind), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_in_float32_a_certain_policy_has_a_finite_divergence_and_an_equal_one_next_to_none(kind):
    logits = torch.tensor([[40.0, 0.0, -1.0, -2.0], [3.0, 2.9, -30.0, -40.0], [0.0, 0.0, 0.0, 0.0]])
    before, drawn = logits.log_softmax(-1), torch.tensor([0, 1, 3])
    equal = over_the_likeliest(before, before, drawn, 2, kind)
    assert equal.abs().max() < 1e-6 and equal.dtype == torch.float32
    certain = torch.tensor([[0.0, 90.0, 0.0, 0.0]] * 3).log_softmax(-1)
    assert over_the_likeliest(certain, before, drawn, 2, kind).isfinite().all()


@pytest.mark.parametrize("top_k", [0, 2, 5])
@pytest.mark.parametrize("surrogate", ["dppo_tv", "dppo_kl"])
def test_expected_gradient_is_the_policy_gradient_of_the_tokens_inside(surrogate, top_k):
    """All five tokens of a one-token language, drawn by an older policy: without a bound that is the policy gradient
    itself, with one the same sum without the masked tokens."""
    torch.manual_seed(3)
    mu = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(5, dtype=torch.float64)
    rewards = torch.tensor([1.0, -1.0, 0.5, -2.0, 3.0], dtype=torch.float64)

    ids = mu.topk(top_k).indices.expand(5, 1, top_k)

    def gradient(bound: float) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        terms = {"region": TopKTrustRegion(top_k=top_k)} if top_k else {}
        now = leaf.log_softmax(-1)
        found = loss_of_tokens(
            GRPOAlgorithm(surrogate=surrogate, beta=0.0, epsilon_low=bound, epsilon_high=bound, terms=terms),
            logprobs=now.unsqueeze(1),
            likely=LikelyTokens(now[ids], mu[ids], ids == torch.arange(5).view(5, 1, 1)) if top_k else None,
            old_logprobs=None,
            advantages=rewards.unsqueeze(1),
            mask=torch.ones(5, 1, dtype=torch.bool),
            weights=mu.exp().unsqueeze(1),  # how often each token is drawn
            sampling_logprobs=mu.unsqueeze(1),
        )
        return -torch.autograd.grad(found.loss, leaf)[0]

    def policy_gradient(kept: torch.Tensor) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        return torch.autograd.grad((leaf.softmax(-1) * rewards * kept).sum(), leaf)[0]

    everything = 1.0 if surrogate == "dppo_tv" else 1e9
    torch.testing.assert_close(gradient(everything), policy_gradient(torch.ones(5)), rtol=1e-10, atol=1e-14)
    pi, drawn_by = logits.softmax(-1).tolist(), mu.exp().tolist()
    moved = [naive_divergence(p, m, surrogate[-2:]) for p, m in zip(pi, drawn_by, strict=True)]
    if top_k:
        moved = [naive_top_divergence(pi, drawn_by, token, top_k, surrogate[-2:]) for token in range(5)]
    bound = {0: 0.05, 2: sorted(moved)[2] + 1e-9, 5: 0.05}[top_k]
    terms = zip(pi, drawn_by, rewards.tolist(), moved, strict=True)
    kept = [not (a * (p - m) > 0 and divergence > bound) for p, m, a, divergence in terms]
    assert 1 <= sum(kept) <= 4
    torch.testing.assert_close(gradient(bound), policy_gradient(torch.tensor(kept)), rtol=1e-10, atol=1e-14)


def test_mistakes_of_completions_that_the_policy_has_left_are_masked():
    generator = torch.Generator().manual_seed(1)
    shape = (40, 6)
    drawn, now = -torch.rand(2, *shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.randint(0, 7, (40, 1), generator=generator)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    now[~mask] = math.nan
    found = off_policy(now, drawn, advantages, mask, limit=0.1)
    for i, length in enumerate(mask.sum(1).tolist()):
        gaps = [drawn[i, t].item() - now[i, t].item() for t in range(length)]
        left = length > 0 and sum(gaps) / length > 0.1
        expected = [bool(left and t < length and advantages[i, t] < 0) for t in range(6)]
        assert found[i].tolist() == expected
    assert 10 < found.sum() < mask.sum() / 2


def test_a_mask_takes_the_policy_term_and_leaves_the_kl():
    """Means of log(drawn/now): 0.3, 0.3 and 0.1 nats a token against a limit of 0.2."""
    leaf = row(-1.0, -1.0).expand(3, 2).clone().requires_grad_()
    drawn = torch.tensor([[-0.6, -0.8], [-0.7, -0.7], [-0.9, -0.9]], dtype=torch.float64)
    output = loss_of_tokens(
        GRPOAlgorithm(beta=1.0, kl_estimator="k2", off_policy_mask=0.2),
        logprobs=leaf,
        old_logprobs=None,
        advantages=torch.tensor([[-1.0], [1.0], [-1.0]], dtype=torch.float64),
        mask=torch.ones(3, 2, dtype=torch.bool),
        weights=torch.ones(3, 2, dtype=torch.float64),
        ref_logprobs=torch.full((3, 2), -1.5, dtype=torch.float64),
        sampling_logprobs=drawn,
    )
    output.loss.backward()
    kl = 0.5  # the slope of d²/2 at d = 0.5, in every row
    assert leaf.grad[:, 0].tolist() == pytest.approx([kl, kl - 1.0, kl + 1.0])
    assert output.stats["sampling/off_policy_masked"][0].item() == 2
