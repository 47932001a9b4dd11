"""Ratio, surrogate and token weights: numbers worked out by hand."""

import math

import pytest
import torch

from grpo_pl.functional import losses


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        ("sequence_mean", 1 / 20, 1 / 200),  # 10 : 1
        ("token_mean", 1 / 110, 1 / 110),  # 1 : 1
        ("constant", 1 / 400, 1 / 400),  # 1 : 1, and never the padded width of 100
        ("sequence_sum", 1 / 2, 1 / 2),
    ],
)
def test_weight_of_a_token_in_a_10_and_a_100_token_completion(aggregation, short, long):
    mask = torch.arange(100) < torch.tensor([[10], [100]])
    totals = {"num_sequences": 2, "num_tokens": 110, "max_completion_length": 200, "dtype": torch.float64}
    weights = losses.token_weights(mask, aggregation=aggregation, **totals)
    assert (weights[~mask] == 0).all()
    assert weights[:, 0].tolist() == pytest.approx([short, long])


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant", "sequence_sum"])
def test_empty_completions_have_no_weight_and_no_nan(aggregation):
    mask = torch.tensor([[False, False], [True, False]])
    weights = losses.token_weights(
        mask, aggregation=aggregation, num_sequences=2, num_tokens=1, max_completion_length=2
    )
    assert (weights[0] == 0).all()
    assert weights[1, 0] > 0
    nothing = losses.token_weights(
        mask[:1], aggregation=aggregation, num_sequences=0, num_tokens=0, max_completion_length=2
    )
    assert (nothing == 0).all()


# --- ratio --------------------------------------------------------------------------------------------------


def test_log_ratio_ignores_what_is_masked():
    mask = torch.tensor([[True, False]])
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    log_ratio = losses.masked_log_ratio(logprobs, torch.tensor([[-1.5, math.nan]]), mask)
    log_ratio.exp().sum().backward()
    assert log_ratio.tolist() == [[0.5, 0.0]]
    assert logprobs.grad.tolist() == [[pytest.approx(math.exp(0.5)), 0.0]]


def test_sequence_ratio_is_the_geometric_mean_over_real_tokens():
    mask = torch.tensor([[True, True, False]])
    log_ratio = row(0.2, 0.4, 0.0).requires_grad_()
    ratio = losses.sequence_ratio(log_ratio, mask)
    assert ratio[0].tolist() == pytest.approx([math.exp(0.3)] * 3)
    ratio[0, 0].backward()
    assert log_ratio.grad[0].tolist() == pytest.approx([math.exp(0.3), 0, 0])  # its own token alone


def test_geometric_ratio_clips_logs_on_the_side_that_the_advantage_pushes_to():
    mask = torch.ones(1, 2, dtype=torch.bool)
    log_ratio = row(1.0, -1.0)
    bounds = {"epsilon_low": 0.4, "epsilon_high": 0.4}
    up = losses.geometric_ratio(log_ratio, mask, row(1.0, 1.0), **bounds)
    down = losses.geometric_ratio(log_ratio, mask, row(-1.0, -1.0), **bounds)
    assert up[0, 0].item() == pytest.approx(math.exp((0.4 - 1.0) / 2))
    assert down[0, 0].item() == pytest.approx(math.exp((1.0 - 0.4) / 2))


# --- surrogate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.5, 2.0, 2.4, 0.0),  # gained enough: clipped at 1.2
        (0.5, 2.0, 1.0, 2.0),  # lost: never clipped
        (0.5, -2.0, -1.6, 0.0),  # lost enough: clipped at 0.8
        (1.5, -2.0, -3.0, -2.0),  # gained: never clipped ...
        (4.0, -2.0, -6.0, 0.0),  # ... but by the dual clip at 3
    ],
)
def test_clip(ratio, advantage, value, slope):
    r = row(ratio).requires_grad_()
    result = losses.clip_surrogate(r, row(advantage), epsilon_low=0.2, epsilon_high=0.2, dual_clip=3.0)
    result.sum().backward()
    assert result.item() == pytest.approx(value)
    assert r.grad.item() == pytest.approx(slope)


def test_clip_bounds_are_independent():
    result = losses.clip_surrogate(row(2.0, 0.1), row(1.0, -1.0), epsilon_low=0.3, epsilon_high=0.28)
    assert result[0].tolist() == pytest.approx([1.28, -0.7])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logprobs = row(-1.0, -1.0, -1.0).requires_grad_()
    ratio = torch.exp(logprobs - row(-3.0, -1.0, 1.0))  # e^2, 1, e^-2
    capped = losses.cispo_surrogate(ratio, row(1.0, 1.0, 1.0), logprobs, low=None, high=5.0)
    capped.sum().backward()
    assert logprobs.grad[0].tolist() == pytest.approx([5.0, 1.0, math.exp(-2)])
    clamped = losses.cispo_surrogate(ratio, row(1.0, 1.0, 1.0), logprobs, low=0.8, high=1.2)
    assert clamped[0].tolist() == pytest.approx([-1.2, -1.0, -0.8])


def test_sapo_gate():
    ratio = row(1.0, 1.0, 1.5).requires_grad_()
    temperatures = {"temperature_positive": 1.0, "temperature_negative": 2.0}
    result = losses.sapo_surrogate(ratio, row(3.0, -3.0, 1.0), **temperatures)
    result.sum().backward()
    assert result[0].tolist() == pytest.approx([6.0, -3.0, 4 / (1 + math.exp(-0.5))])
    gate = 1 / (1 + math.exp(-0.5))
    assert ratio.grad[0].tolist() == pytest.approx([3.0, -3.0, 4 * gate * (1 - gate)])  # gradient A at ratio 1


def test_vespo_weighs_by_the_ratio_of_the_whole_completion():
    """Two rows, W = 2 · 1/2 · 3 and 1/2, the second of one token; by the formula, number by number."""
    ratio = torch.tensor([[2.0, 0.5, 3.0], [0.5, 1.0, 1.0]], dtype=torch.float64)
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]], dtype=torch.float64).requires_grad_()
    settings = {"positive": (2.0, 3.0), "negative": (3.0, 2.0)}
    for advantage, (k, decay) in ((0.7, (2.0, 3.0)), (0.0, (2.0, 3.0)), (-1.3, (3.0, 2.0))):
        advantages = torch.full((2, 1), advantage, dtype=torch.float64)
        result = losses.vespo_surrogate(ratio, advantages, logprobs, **settings)
        for row_number, w in enumerate((3.0, 0.5)):
            weight = w**k * math.exp(decay * (1 - w))
            expected = [weight * advantage * lp for lp in logprobs[row_number].tolist()]
            assert result[row_number].tolist() == pytest.approx(expected, rel=1e-12)
            (slope,) = torch.autograd.grad(result[row_number].sum(), logprobs, retain_graph=True)
            assert slope[row_number].tolist() == pytest.approx([weight * advantage] * 3, rel=1e-12)


def test_ratio_of_a_detached_copy_is_one_with_a_live_gradient():
    logprobs = row(-0.3, -2.0).requires_grad_()
    ratio = torch.exp(losses.masked_log_ratio(logprobs, logprobs.detach(), torch.ones(1, 2, dtype=torch.bool)))
    advantages = row(0.7, -1.3)
    result = losses.clip_surrogate(ratio, advantages, epsilon_low=0.2, epsilon_high=0.2)
    (row(0.5, 0.25) * result).sum().backward()
    assert ratio.tolist() == [[1.0, 1.0]]
    assert logprobs.grad[0].tolist() == pytest.approx([0.5 * 0.7, 0.25 * -1.3])


# --- samples of another engine ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [1, 1, 1]),
        ("truncate_token", [2.0, 0.25, 1.0]),
        ("mask_token", [0.0, 0.0, 1.0]),
        ("truncate_sequence", [1.0, 1.0, 1.0]),  # 4 · 1/4 · 1
        ("mask_sequence", [1.0, 1.0, 1.0]),
        ("reject_geometric", [1.0, 1.0, 1.0]),
        ("seq_mask_tis", [4.0, 0.25, 1.0]),
    ],
)
def test_mismatch_weights(mode, expected):
    old, drawn = row(math.log(0.4), math.log(0.1), -1.0, 7.0), row(math.log(0.1), math.log(0.4), -1.0, -7.0)
    mask = torch.tensor([[True, True, True, False]])
    weights = losses.mismatch_weights(old, drawn, mask, mode=mode, low=0.5, high=2.0)
    assert weights[0, :3].tolist() == pytest.approx(expected)


def test_sequences_outside_the_bounds_are_masked_or_truncated():
    old, drawn = row(-1.0, -1.0), row(-1.5, -1.5)  # product e^1
    mask = torch.ones(1, 2, dtype=torch.bool)
    masked = losses.mismatch_weights(old, drawn, mask, mode="mask_sequence", low=0.5, high=2.0)
    truncated = losses.mismatch_weights(old, drawn, mask, mode="truncate_sequence", low=0.5, high=2.0)
    assert masked.tolist() == [[0, 0]]
    assert truncated.tolist() == [[2, 2]]


def test_the_geometric_mean_rejects_by_the_ratio_of_a_token_whatever_the_length():
    """Rows of 2, 4 and 3 tokens, masked beyond: means 1.01, 1.01 and 0.98 where products are 1.02, 1.04 and 0.94."""
    log_rho = torch.tensor([[1.02, 1.0, 9.0, 9.0], [1.01, 1.0, 1.03, 1.0], [0.98, 0.97, 0.99, 9.0]]).double().log()
    log_rho[0, 0] = 2 * math.log(1.01)
    log_rho[1, 1] = 4 * math.log(1.01) - log_rho[1].sum()
    mask = torch.tensor([[True, True, False, False], [True] * 4, [True, True, True, False]])

    def kept(low: float, high: float) -> list[float]:
        weights = losses.mismatch_weights(
            log_rho, torch.zeros_like(log_rho), mask, mode="reject_geometric", low=low, high=high
        )
        assert (weights == weights[:, :1]).all()
        return weights[:, 0].tolist()

    assert kept(0.99, 1.011) == [1, 1, 0]
    assert kept(0.97, 1.009) == [0, 0, 1]


def test_a_sequence_is_masked_by_its_geometric_mean_and_its_tokens_keep_their_own_weights():
    """By a loop over rows and tokens; means 1.2, 0.4 and 2.1 of rows of 3, 2 and 1 tokens."""
    rho = torch.tensor([[4.0, 0.6, 0.72], [0.8, 0.2, 99.0], [2.1, 99.0, 99.0]], dtype=torch.float64)
    mask = torch.tensor([[True] * 3, [True, True, False], [True, False, False]])
    weights = losses.mismatch_weights(rho.log(), torch.zeros_like(rho), mask, mode="seq_mask_tis", low=0.5, high=2.0)
    for found, ratios, here in zip(weights.tolist(), rho.tolist(), mask.tolist(), strict=True):
        own = [r for r, there in zip(ratios, here, strict=True) if there]
        kept = 0.5 <= math.prod(own) ** (1 / len(own)) <= 2.0
        assert found[: len(own)] == pytest.approx([r * kept for r in own], rel=1e-12)
    assert weights[0, 0] == pytest.approx(4.0) and (weights[1:][mask[1:]] == 0).all()


# --- demonstrations -----------------------------------------------------------------------------------------


def test_an_uncertain_token_of_a_demonstration_counts_most():
    """CHORD-phi, number by number, and its gradient, which the weight has no part in."""
    probabilities = [0.5, 0.99, 0.01, 0.3]
    logprobs = torch.tensor(probabilities, dtype=torch.float64).log().requires_grad_()
    for weighting in ("equal", "uncertain"):
        found = losses.demonstration_losses(logprobs, weighting=weighting)
        weights = [1.0 if weighting == "equal" else p * (1 - p) for p in probabilities]
        pairs = zip(weights, probabilities, strict=True)
        assert found.tolist() == pytest.approx([-w * math.log(p) for w, p in pairs], rel=1e-12)
        (slope,) = torch.autograd.grad(found.sum(), logprobs)
        assert slope.tolist() == pytest.approx([-w for w in weights], rel=1e-12)
    with pytest.raises(ValueError, match=r"weighting is .*equal, uncertain"):
        losses.demonstration_losses(logprobs, weighting="phi")


def test_the_share_of_demonstrations_falls_by_half_a_cosine():
    given = {"first": 0.9, "last": 0.1, "decay_rollouts": 4}
    expected = [0.9, 0.1 + 0.8 * (0.5 + math.sqrt(0.125)), 0.5, 0.1 + 0.8 * (0.5 - math.sqrt(0.125)), 0.1, 0.1]
    assert [losses.demonstration_share(n, **given) for n in range(6)] == pytest.approx(expected)


# --- names and far ratios -----------------------------------------------------------------------------------

EPSILONS = {"epsilon_low": 0.2, "epsilon_high": 0.2}
SETTINGS = EPSILONS | {
    "dual_clip": None,
    "cispo_cap": 5.0,
    "sapo_temperatures": (1, 1.05),
    "vespo": ((2.0, 3.0), (3.0, 2.0)),
}


@pytest.mark.parametrize("typo", ["typo", "Clip", "", None, "token mean"])
def test_names_that_do_not_exist_are_refused_with_the_choices(typo):
    one, mask = row(1.0), torch.ones(1, 1, dtype=torch.bool)
    totals = {"num_sequences": 1, "num_tokens": 1, "max_completion_length": 1}
    with pytest.raises(ValueError, match=r"surrogate is .*clip, unclipped, reinforce"):
        losses.surrogate(typo, one, one, one, **SETTINGS)
    with pytest.raises(ValueError, match=r"level is .*token, sequence, geometric"):
        losses.surrogate("clip", one, one, one, **SETTINGS, level=typo)
    with pytest.raises(ValueError, match=r"aggregation is .*sequence_mean, token_mean, constant"):
        losses.token_weights(mask, aggregation=typo, **totals)
    with pytest.raises(ValueError, match=r"level is .*token, sequence, geometric"):
        losses.importance_ratio(one, mask, one, level=typo, **EPSILONS)
    with pytest.raises(ValueError, match=r"mode is .*none, truncate_token"):
        losses.mismatch_weights(one, one, mask, mode=typo, low=0.0, high=2.0)


def test_a_geometric_ratio_is_clipped_once_whatever_the_caller_knows():
    mask, advantages, logprobs = torch.ones(1, 1, dtype=torch.bool), row(1.0), row(-1.0)
    ratio = losses.importance_ratio(
        row(1.0), mask, advantages, level="geometric", epsilon_low=0.4, epsilon_high=0.4
    )  # e^0.4 = 1.49, which clip at 1 + 0.4 would cut a second time
    bounds = SETTINGS | {"epsilon_low": 0.4, "epsilon_high": 0.4}
    objective = losses.surrogate("clip", ratio, advantages, logprobs, **bounds, level="geometric")
    assert objective.item() == pytest.approx(math.exp(0.4))
    with pytest.raises(ValueError, match="own clipping"):
        losses.surrogate("sapo", ratio, advantages, logprobs, **bounds, level="geometric")


@pytest.mark.parametrize("gap", [19.9, 20.1, 25.0, 1e3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_far_ratio_is_still_pushed_where_its_advantage_points(gap, dtype):
    """Where the policy writes a bad token e^20 times as often as before, the clamp must not let it be."""
    for sign, advantage in ((1.0, -1.0), (-1.0, 1.0)):
        logprobs = torch.tensor([[sign * gap]], dtype=dtype, requires_grad=True)
        mask, advantages = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[advantage]], dtype=dtype)
        log_ratio = losses.masked_log_ratio(logprobs, torch.zeros_like(logprobs), mask)
        for level in ("token", "sequence"):
            logprobs.grad = None
            ratio = losses.importance_ratio(log_ratio, mask, advantages, level=level, epsilon_low=0.2, epsilon_high=0.2)
            objective = losses.surrogate("clip", ratio, advantages, logprobs, **SETTINGS, level=level)
            objective.sum().backward(retain_graph=True)
            assert torch.isfinite(objective).all()
            slope = logprobs.grad.item()
            assert math.isfinite(slope)
            assert slope * advantage > 0, (level, slope)
