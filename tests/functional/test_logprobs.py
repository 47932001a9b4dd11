"""Tests of token log-probabilities and of the chunked LM head."""

import math

import pytest
import torch

from grpo_pl.functional import logprobs as module
from grpo_pl.functional.logprobs import head_scores, token_entropy, token_logprobs, top_logprobs


@pytest.fixture(params=["kept", "recomputed", "mixed"])
def small_chunks(request, monkeypatch):
    """Chunks of three tokens; their probabilities all kept for the backward pass, none, or those of two chunks."""
    monkeypatch.setattr(module, "_CHUNK_TOKENS", 3)
    monkeypatch.setattr(
        module, "_KEPT_ELEMENTS", {"kept": 1 << 26, "recomputed": 0, "mixed": 2 * 3 * 11}[request.param]
    )


def _inputs(tokens=10, size=5, vocabulary=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    token_ids = torch.randint(vocabulary, (tokens,), generator=generator)
    slopes = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return hidden, weight, bias, token_ids, slopes


def _relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def test_token_logprobs_and_entropy_by_hand():
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25]]]))
    torch.testing.assert_close(token_logprobs(logits, torch.tensor([[1]])), torch.tensor([[math.log(0.25)]]))
    torch.testing.assert_close(token_entropy(logits), torch.tensor([[1.5 * math.log(2)]]))
    # temperature 1/2 squares the odds: 4 : 1 : 1
    torch.testing.assert_close(
        token_logprobs(logits, torch.tensor([[0]]), temperature=0.5), torch.tensor([[math.log(4 / 6)]])
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_head_equals_materialised_logits(small_chunks, temperature, with_bias):
    hidden, weight, bias, token_ids, slopes = _inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    ours = head_scores(
        hidden, weight, token_ids, bias=bias if with_bias else None, temperature=temperature, with_entropy=True
    )[:2]
    logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None)
    reference = (
        token_logprobs(logits, token_ids, temperature=temperature),
        token_entropy(logits, temperature=temperature),
    )
    for mine, theirs in zip(ours, reference, strict=True):
        assert _relative(mine, theirs) < 1e-6
    ours_loss = sum((value * slope).sum() for value, slope in zip(ours, slopes, strict=True))
    reference_loss = sum((value * slope).sum() for value, slope in zip(reference, slopes, strict=True))
    for mine, theirs in zip(
        torch.autograd.grad(ours_loss, leaves), torch.autograd.grad(reference_loss, leaves), strict=True
    ):
        assert _relative(mine, theirs) < 1e-5


def test_backward_twice_gives_the_same_gradient(small_chunks):
    hidden, weight, _, token_ids, slopes = _inputs()
    loss = (head_scores(hidden, weight, token_ids).logprobs * slopes[0]).sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_frozen_head_gets_no_gradient(small_chunks):
    hidden, weight, _, token_ids, _ = _inputs()
    head_scores(hidden, weight.detach(), token_ids).logprobs.sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_without_gradients_nothing_is_kept(small_chunks):
    hidden, weight, _, token_ids, _ = _inputs()
    with torch.no_grad():
        logprobs, entropy = head_scores(hidden, weight, token_ids, with_entropy=True)[:2]
    assert not logprobs.requires_grad and entropy is not None
    torch.testing.assert_close(logprobs, token_logprobs(hidden @ weight.t(), token_ids).detach())


def test_bfloat16_head_is_as_good_as_materialised_bfloat16_logits(small_chunks):
    """Both round logits to bfloat16; softmax is float32 in both; against exact arithmetic neither may be worse."""
    hidden, weight, _, token_ids, slopes = _inputs(tokens=200, size=64, vocabulary=11, dtype=torch.bfloat16)
    ours, _ = head_scores(hidden, weight, token_ids)[:2]
    materialised = token_logprobs(hidden @ weight.t(), token_ids)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, materialised, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad((ours * slopes[0]).sum(), [hidden, weight])
    wide = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    exact = torch.autograd.grad((token_logprobs(wide[0] @ wide[1].t(), token_ids) * slopes[0]).sum(), wide)
    theirs = torch.autograd.grad((materialised * slopes[0]).sum(), [hidden, weight])
    for mine, other, true in zip(grads, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert _relative(mine, true) <= 1.1 * _relative(other, true) + 1e-3


def test_autocast_decides_the_type_of_the_products(small_chunks):
    hidden, weight, _, token_ids, _ = _inputs(tokens=50)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = head_scores(hidden, weight, token_ids)[:2]
        reference = token_logprobs(torch.nn.functional.linear(hidden, weight), token_ids)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, reference, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_no_tokens_give_no_logprobs_and_zero_gradient():
    hidden, weight, _, _, _ = _inputs(tokens=0)
    logprobs, entropy = head_scores(hidden, weight, torch.zeros(0, dtype=torch.int64), with_entropy=True)[:2]
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not weight.grad.any()


def test_chunks_shrink_as_the_vocabulary_grows():
    assert module._chunks(5000, 512)[0] == slice(0, 1024)
    assert module._chunks(5000, 151_936)[0] == slice(0, 220)
    assert module._chunks(3, 1 << 30) == [slice(0, 1), slice(1, 2), slice(2, 3)]


# --- truncated distributions ------------------------------------------------------------------------------------------

SUPPORT = [[0, 3, 4, -1], [10, 2, -1, -1], [5, -1, -1, -1], [-1] * 4, [7, 8, 9, 1]]


def _truncated(tokens=5, **options):
    """Inputs whose tokens lie in their support, and logits of every token."""
    hidden, weight, bias, _, slopes = _inputs(tokens, dtype=torch.float64, **options)
    token_ids = torch.tensor([3, 2, 5, 6, 9])
    return hidden, weight, bias, token_ids, torch.tensor(SUPPORT), slopes


def _scalar(logits: list[float], token: int, support: list[int], temperature: float) -> tuple[float, float]:
    """Log-probability and entropy of one position, number by number."""
    kept = [v for v in support if v >= 0] or range(len(logits))
    total = math.fsum(math.exp(logits[v] / temperature) for v in kept)
    logprobs = {v: logits[v] / temperature - math.log(total) for v in kept}
    return logprobs[token], -math.fsum(math.exp(p) * p for p in logprobs.values())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_truncated_softmax_is_that_over_its_support_alone(small_chunks, temperature):
    hidden, weight, bias, ids, support, _ = _truncated()
    logits = (hidden @ weight.t() + bias).detach()
    want = [_scalar(z, i, s, temperature) for z, i, s in zip(logits.tolist(), ids.tolist(), SUPPORT, strict=True)]
    options = {"temperature": temperature, "support": support}
    by_head = head_scores(hidden, weight, ids, bias=bias, with_entropy=True, **options)[:2]
    of_logits = token_logprobs(logits, ids, **options), token_entropy(logits, **options)
    for found in (by_head, of_logits):
        for ours, reference in zip(found, zip(*want, strict=True), strict=True):
            assert ours is not None
            torch.testing.assert_close(ours.detach(), torch.tensor(reference, dtype=torch.float64), rtol=0, atol=1e-10)


def test_the_gradient_of_a_truncated_softmax_is_checked_and_nothing_else_moves(small_chunks):
    hidden, weight, bias, ids, support, slopes = _truncated()

    def by_head(*leaves):
        h, w, b = leaves
        return head_scores(h, w, ids, bias=b, temperature=0.7, with_entropy=True, support=support)[:2]

    assert torch.autograd.gradcheck(by_head, (hidden, weight, bias))

    def by_logits(logits):
        return token_logprobs(logits, ids, support=support), token_entropy(logits, support=support)

    logits = (hidden @ weight.t() + bias).detach().requires_grad_()
    assert torch.autograd.gradcheck(by_logits, (logits,))
    logprobs, entropy = by_logits(logits)
    (slopes[0, :5] @ logprobs + slopes[1, :5] @ entropy).backward()
    inside = torch.zeros(5, 12, dtype=torch.bool).scatter(1, support.masked_fill(support < 0, 11), True)[:, :11]
    inside[3] = True  # the row without a support
    assert logits.grad is not None
    assert (logits.grad[~inside] == 0).all() and (logits.grad[inside].view(-1) != 0).sum() > 10


# --- further tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_further_tokens_have_the_log_probabilities_of_a_softmax_over_all(small_chunks, temperature, truncated):
    hidden, weight, bias, ids, support, _ = _truncated()
    further = torch.tensor([[0, 3, 10], [2, -1, 1], [9, 9, 4], [0, 5, -1], [-1, -1, -1]], dtype=torch.int32)
    options = {"temperature": temperature, "support": support if truncated else None}
    found = head_scores(hidden, weight, ids, bias=bias, top_ids=further, **options).top_logprobs
    logits = (hidden @ weight.t() + bias).detach()
    of_logits = top_logprobs(logits, further, **options)
    kept = SUPPORT if truncated else [[-1]] * 5
    for place, (z, tokens, allowed) in enumerate(zip(logits.tolist(), further.tolist(), kept, strict=True)):
        inside = [v for v in allowed if v >= 0] or range(11)
        for number, token in enumerate(tokens):
            expected = _scalar(z, token, allowed, temperature)[0] if token in inside else -math.inf
            assert found[place, number].item() == pytest.approx(expected, abs=1e-10)
            assert of_logits[place, number].item() == pytest.approx(expected, abs=1e-10)


def test_further_tokens_have_no_gradient_and_change_none(small_chunks):
    hidden, weight, bias, ids, _ = _inputs(tokens=9, size=3, vocabulary=6, dtype=torch.float64)
    further = torch.stack([ids, (ids + 1) % 6], dim=1)

    def scores(hidden, weight, bias):
        found = head_scores(hidden, weight, ids, bias=bias, temperature=1.3, with_entropy=True, top_ids=further)
        assert found.top_logprobs is not None and not found.top_logprobs.requires_grad
        return found.logprobs, found.entropy

    assert torch.autograd.gradcheck(scores, (hidden, weight, bias))
    with_them, alone = (
        scores(hidden, weight, bias),
        head_scores(hidden, weight, ids, bias=bias, temperature=1.3, with_entropy=True)[:2],
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(with_them, alone, strict=True))
