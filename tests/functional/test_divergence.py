"""Divergences from a teacher, against sums written out, and by the chunked head against whole logits."""

import math

import pytest
import torch

from grpo_pl.functional import logprobs as module
from grpo_pl.functional.divergence import divergence, divergence_slope
from grpo_pl.functional.logprobs import TaughtTokens, head_scores

MIXES = (0.0, 0.1, 0.5, 0.9, 1.0)


def _logprobs(seed, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator, dtype=torch.float64)).log_softmax(-1).to(dtype)


def _scalar(student, teacher, mix):
    """One pair of distributions, number by number."""
    total = 0.0
    for log_s, log_t in zip(student.tolist(), teacher.tolist(), strict=True):
        s, t = math.exp(log_s), math.exp(log_t)
        m = mix * t + (1 - mix) * s
        if mix == 0:
            total += t * (log_t - log_s)
        elif mix == 1:
            total += s * (log_s - log_t)
        else:
            total += mix * t * (log_t - math.log(m)) + (1 - mix) * s * (log_s - math.log(m))
    return total


def test_two_tokens_by_hand():
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    middle = 0.5 * (0.75 * math.log(1.2) + 0.25 * math.log(2 / 3)) + 0.25 * (math.log(0.8) + math.log(4 / 3))
    for mix, expected in ((0.0, forward), (1.0, reverse), (0.5, middle)):
        assert divergence(student, teacher, mix=mix).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_value_and_slope_are_those_of_the_scalar_reference(mix):
    logits, teacher = _logprobs(0, 6, 11).requires_grad_(), _logprobs(1, 6, 11)
    student = logits.log_softmax(-1)
    values = divergence(student, teacher, mix=mix)
    for i in range(6):
        assert values[i].item() == pytest.approx(_scalar(student[i], teacher[i], mix), rel=1e-12)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    slope = divergence_slope(student.detach(), teacher, mix=mix)
    torch.testing.assert_close(slope, gradient, rtol=1e-10, atol=1e-13)
    step = 1e-6  # and autograd's is the quotient of differences
    moved = logits.detach().clone()
    moved[2, 3] += step
    risen = _scalar(moved[2].log_softmax(-1), teacher[2], mix) - _scalar(student[2].detach(), teacher[2], mix)
    assert slope[2, 3].item() == pytest.approx(risen / step, abs=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_it_is_0_where_both_agree_and_positive_elsewhere(mix):
    same, other = _logprobs(0, 4, 9), _logprobs(1, 4, 9)
    assert divergence(same, same, mix=mix).abs().max() < 1e-15
    assert divergence_slope(same, same, mix=mix).abs().max() < 1e-15
    assert divergence(same, other, mix=mix).min() > 0.01


def test_the_middle_tends_to_the_ends():
    """Divided by its share; GKD's paper shows it for mix towards 0."""
    student, teacher = _logprobs(0, 5, 9), _logprobs(1, 5, 9)
    near = divergence(student, teacher, mix=1e-6) / 1e-6
    torch.testing.assert_close(near, divergence(student, teacher, mix=0.0), rtol=1e-3, atol=0)
    near = divergence(student, teacher, mix=1 - 1e-6) / 1e-6
    torch.testing.assert_close(near, divergence(student, teacher, mix=1.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("mix", [-0.1, 1.5, math.nan])
def test_a_mix_that_is_no_share_is_refused(mix):
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        divergence(_logprobs(0, 1, 3), _logprobs(1, 1, 3), mix=mix)


# --- the chunked head -----------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 7, 1000])
def small_chunks(request, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_TOKENS", request.param)


def _inputs(dtype=torch.float64, tokens=23, vocabulary=13, theirs=13):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    leaves = [normal(tokens, 4), normal(vocabulary, 4), normal(vocabulary)]
    ids = torch.randint(min(vocabulary, theirs), (tokens,), generator=generator)
    return [leaf.requires_grad_() for leaf in leaves], ids, (normal(tokens, 6), normal(theirs, 6), normal(theirs))


@pytest.mark.parametrize("theirs", [13, 10, 16])
@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_chunks_give_what_whole_logits_give(small_chunks, mix, theirs):
    """Also where one of both vocabularies is padded: distributions are then over what they share."""
    (hidden, weight, bias), ids, teacher = _inputs(theirs=theirs)
    tau, shared = 0.8, min(13, theirs)
    ours = head_scores(hidden, weight, ids, teacher=TaughtTokens(*teacher, mix), bias=bias, temperature=tau)[:3]
    logits = (hidden @ weight.t() + bias) / tau
    target = ((teacher[0] @ teacher[1].t() + teacher[2]) / tau)[:, :shared].log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    chosen, entropy = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)
    whole = (chosen, entropy, divergence(logits[:, :shared].log_softmax(-1), target, mix=mix))
    for mine, expected in zip(ours, whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-13)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, len(ids), generator=generator, dtype=torch.float64)
    leaves = [hidden, weight, bias]
    gradients = [
        torch.autograd.grad(sum((w * v).sum() for w, v in zip(weights, values, strict=True)), leaves)
        for values in (ours, whole)
    ]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_gradients_beside_a_support_pass_a_numerical_check(small_chunks):
    leaves, ids, teacher = _inputs(tokens=5, vocabulary=6, theirs=6)
    taught, support = TaughtTokens(*teacher, 0.4), torch.stack([ids, (ids + 2) % 6, torch.full_like(ids, -1)], dim=1)
    how = {"teacher": taught, "temperature": 1.3, "support": support}
    assert torch.autograd.gradcheck(lambda h, w, b: head_scores(h, w, ids, bias=b, **how)[:3], leaves)


def test_the_divergence_alone_has_a_gradient(small_chunks):
    (hidden, weight, bias), ids, teacher = _inputs()
    _, _, distance = head_scores(hidden, weight, ids, teacher=TaughtTokens(*teacher, 1.0), bias=bias)[:3]
    distance.sum().backward()
    other = torch.autograd.grad(
        divergence(
            (hidden @ weight.t() + bias).log_softmax(-1),
            (teacher[0] @ teacher[1].t() + teacher[2]).log_softmax(-1),
            mix=1.0,
        ).sum(),
        [hidden, weight],
    )
    torch.testing.assert_close(hidden.grad, other[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(weight.grad, other[1], rtol=1e-10, atol=1e-12)


def test_beside_a_teacher_log_probabilities_are_the_same_bit_for_bit():
    (hidden, weight, bias), ids, teacher = _inputs(dtype=torch.float32)
    with torch.no_grad():
        plain = head_scores(hidden, weight, ids, bias=bias, with_entropy=True)[:2]
        taught = head_scores(hidden, weight, ids, teacher=TaughtTokens(*teacher, 0.5), bias=bias)[:3]
    assert torch.equal(plain[0], taught[0]) and torch.equal(plain[1], taught[1])


def test_a_teacher_of_another_type_computes_in_its_own(small_chunks):
    (hidden, weight, bias), ids, teacher = _inputs(dtype=torch.float32)
    low = TaughtTokens(*(tensor.bfloat16() for tensor in teacher), 0.5)
    _, _, distance = head_scores(hidden, weight, ids, teacher=low, bias=bias)[:3]
    target = torch.nn.functional.linear(low.hidden, low.weight, low.bias).float().log_softmax(-1)
    expected = divergence((hidden @ weight.t() + bias).log_softmax(-1), target, mix=0.5)
    torch.testing.assert_close(distance, expected, rtol=0.02, atol=0.01)
    assert distance.dtype == torch.float32
