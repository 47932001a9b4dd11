"""Fused norms and feed-forward blocks, on a GPU where there is one, else interpreted: the values of before."""

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.policy import fused_modules as module
from grpo_pl.policy.logprobs import completion_logprobs
from tests.kernels import small_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("qwen3", [False, True], ids=["llama", "qwen3"])
def test_a_policy_scores_and_learns_as_before(monkeypatch, qwen3):
    """Log-probabilities, and the gradient of every weight."""
    model = small_model(qwen3=qwen3).to(DEVICE)
    ids = torch.randint(1, 37, (4, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mask = torch.ones_like(ids, dtype=torch.bool)
    rows = {"prompt_ids": ids[:, :4], "prompt_mask": mask[:, :4], "completion_ids": ids[:, 4:]}

    def scored():
        logprobs, _ = completion_logprobs(model, **rows, completion_mask=mask[:, 4:], temperature=1.0)
        return logprobs, torch.autograd.grad(logprobs.mean(), list(model.parameters()))

    monkeypatch.setattr(module, "has_triton", lambda device: False)
    before, gradients = scored()
    calls, norms = [], []
    monkeypatch.setattr(module, "has_triton", lambda device: True)
    monkeypatch.setattr(module, "_feed_forward", lambda *a, run=module._feed_forward: (calls.append(1), run(*a))[1])
    monkeypatch.setattr(module, "_norm", lambda *a, run=module._norm: (norms.append(1), run(*a))[1])
    after, fused = scored()
    assert len(calls) == (layers := model.config.num_hidden_layers)
    assert len(norms) == (4 if qwen3 else 2) * layers + 1
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(fused, gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert not any("forward" in vars(each) for each in model.modules())
