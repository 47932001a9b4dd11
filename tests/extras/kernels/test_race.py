"""The race of GPUs, on one where there is one, else interpreted on the CPU: the draws of torch."""

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.extras.kernels import race
from grpo_pl.functional import sampling
from grpo_pl.functional.sampling import Noise, draw_tokens, row_key, score_gaps, token_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocabulary", [5, 300, 10_001])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_race_is_that_of_torch(vocabulary, temperature, dtype):
    rows = 6
    logits = (3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))).to(dtype)
    logits[0, 1:] = -torch.inf  # one token is left
    noise = Noise(token_keys(torch.tensor([row_key("race", i) for i in range(rows)]), 3))
    tokens, logprobs = draw_tokens(logits, noise, temperature=temperature)
    assert noise.keys is not None
    ours = race.race(logits.to(DEVICE), noise.keys.to(DEVICE), temperature=temperature, noise=sampling.NOISE)
    assert ours[0].tolist() == tokens.tolist()
    torch.testing.assert_close(ours[1].cpu(), logprobs, atol=1e-5, rtol=0.0)
    if temperature:
        assert score_gaps(logits, noise, temperature=temperature)[1:].min() > 1e-4  # so equal tokens are no luck


def test_the_times_of_the_race_are_those_of_torch():
    """With equal logits the earliest wins: in 200 rows of 2,000 entries, and in 4 of 100,000, where it is early."""
    for rows, vocabulary in ((200, 2000), (4, 100_000)):
        keys = token_keys(torch.tensor([row_key("times", i) for i in range(rows)]), 0)
        equal = torch.zeros(rows, vocabulary, device=DEVICE)
        tokens, _ = race.race(equal, keys.to(DEVICE), temperature=1.0, noise=sampling.NOISE)
        assert tokens.tolist() == sampling.arrival_times(keys, vocabulary).argmin(dim=1).tolist()


def test_logits_that_are_not_finite_show():
    logits = torch.zeros(2, 50, device=DEVICE)
    logits[1, 7] = torch.nan
    _, logprobs = race.race(logits, torch.arange(2, device=DEVICE), temperature=1.0, noise=sampling.NOISE)
    assert logprobs.isfinite().tolist() == [True, False]
