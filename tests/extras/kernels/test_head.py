"""The LM head of GPUs, on one where there is one, else interpreted on the CPU: values and gradients of torch's."""

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.extras.kernels import head
from grpo_pl.functional import logprobs
from grpo_pl.functional.logprobs import head_scores, token_entropy, token_logprobs, top_logprobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head as on a GPU, in chunks of three tokens and blocks of eight entries."""
    monkeypatch.setattr(logprobs, "has_triton", lambda device: True)
    monkeypatch.setattr(head, "CHUNK_TOKENS", 3)
    monkeypatch.setattr(head, "_BLOCK", 8)


def _inputs(tokens=10, size=5, vocabulary=21):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_()
        for shape in ((tokens, size), (vocabulary, size), (vocabulary,))
    )
    ids = torch.randint(vocabulary, (tokens,), generator=generator).to(DEVICE)
    slopes = torch.randn(2, tokens, generator=generator).to(DEVICE)
    return hidden, weight, bias, ids, slopes


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("parts", [(1.0, 0.0), (1.0, 1.0), (0.0, 1.0)], ids=["logprobs", "both", "entropy"])
def test_values_and_gradients_are_those_of_materialised_logits(fused, temperature, with_bias, parts):
    hidden, weight, bias, ids, slopes = _inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    found = head_scores(
        hidden, weight, ids, bias=bias if with_bias else None, temperature=temperature, with_entropy=True
    )
    assert found.entropy is not None
    logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None)
    expected = token_logprobs(logits, ids, temperature=temperature), token_entropy(logits, temperature=temperature)
    torch.testing.assert_close((found.logprobs, found.entropy), expected, atol=2e-6, rtol=1e-5)

    def gradients(pair):
        loss = sum(part * (value * slope).sum() for part, value, slope in zip(parts, pair, slopes, strict=True) if part)
        return torch.autograd.grad(loss, leaves)

    for ours, theirs in zip(gradients((found.logprobs, found.entropy)), gradients(expected), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_further_tokens_and_entries_without_mass(fused):
    hidden, weight, bias, ids, _ = _inputs()
    with torch.no_grad():
        bias[3:9] = -torch.inf  # the whole second block, and more
        ids[:] = 12
        top_ids = torch.tensor([[1, 20, -1]] * 10, device=DEVICE)
        found = head_scores(hidden, weight, ids, bias=bias, with_entropy=True, top_ids=top_ids)
        logits = torch.nn.functional.linear(hidden, weight, bias)
        assert found.top_logprobs is not None and found.entropy is not None
        torch.testing.assert_close(found.top_logprobs, top_logprobs(logits, top_ids), atol=2e-6, rtol=1e-5)
        p = logits.softmax(dim=-1)
        torch.testing.assert_close(found.entropy, -torch.special.xlogy(p, p).sum(dim=-1), atol=2e-6, rtol=1e-5)


def test_bfloat16_rounds_logits_and_their_gradient_alone(fused):
    hidden, weight, _, ids, slopes = _inputs()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = head_scores(hidden, weight, ids, with_entropy=True)
    exact = torch.nn.functional.linear(hidden, weight)
    torch.testing.assert_close(found.logprobs, token_logprobs(exact, ids), atol=0.05, rtol=0.0)
    (ours,), (theirs,) = (
        torch.autograd.grad((value * slopes[0]).sum(), [weight], retain_graph=True)
        for value in (found.logprobs, token_logprobs(exact, ids))
    )
    assert ours.dtype == torch.float32 and (ours - theirs).norm() / theirs.norm() < 0.02
