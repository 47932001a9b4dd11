"""Draws by a race with keyed noise: exact frequencies, independence, and equal draws whatever surrounds them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_pl.functional import sampling
from grpo_pl.functional.sampling import (
    Noise,
    PrecomputedNoise,
    arrival_times,
    draw_tokens,
    row_key,
    sample_key,
    score_gaps,
    small_seed,
    token_keys,
    truncate_logits,
)
from grpo_pl.types import SampleKey
from tests.race import arrival_time


def _noise(*parts: int | str, rows: int, position: int = 0) -> Noise:
    return Noise(token_keys(torch.tensor([row_key(*parts, i) for i in range(rows)]), position))


def test_row_key_tells_every_part_apart_and_is_stable_across_processes():
    assert row_key(0, "train", 1) == row_key(0, "train", 1)
    assert len({row_key(0, "train", 1), row_key(0, "train", 11), row_key(0, "val", 1), row_key("0t", "rain", 1)}) == 4
    assert row_key(7, "val", 3, 0, 12, 5) == -4934428914534442802  # blake2b, not Python's salted hash


def test_turns_have_keys_of_their_own_and_the_first_that_of_a_single_turn():
    key = SampleKey(seed=7, split="val", step=3, attempt=0, prompt_id=12, sample=5)
    assert sample_key(key) == -4934428914534442802  # as before there were turns
    turns = [replace(key, turn=turn) for turn in range(40)] + [replace(key, sample=51), replace(key, sample=53)]
    assert len({sample_key(turn) for turn in turns}) == 42


@pytest.mark.parametrize("drawn", [1, 7, 10**6])
def test_a_completion_that_goes_on_has_the_noise_that_would_have_followed(drawn: int):
    key = SampleKey(seed=7, split="train", step=3, attempt=0, prompt_id=12, sample=5)
    whole, rest = torch.tensor([sample_key(key)]), torch.tensor([sample_key(replace(key, drawn=drawn))])
    assert torch.equal(token_keys(rest, torch.arange(5)), token_keys(whole, torch.arange(drawn, drawn + 5)))


def test_token_keys_follow_splitmix64():
    """Reference outputs of splitmix64 seeded with 0 and 1234567 (Vigna's C code)."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [token_keys(torch.tensor([0]), position).item() % 2**64 for position in range(3)] == expected
    assert token_keys(torch.tensor([1234567]), 0).item() == 6457827717110365317


def test_token_keys_of_many_positions_at_once_equal_one_by_one():
    keys = torch.tensor([row_key("a"), row_key("b")])
    table = token_keys(keys.unsqueeze(1), torch.arange(5))  # (2, 5)
    assert torch.equal(table, torch.stack([token_keys(keys, position) for position in range(5)], dim=1))


def test_arrival_times_are_those_of_the_definition():
    keys = token_keys(torch.tensor([[row_key("a"), row_key("b")]]), torch.arange(3).unsqueeze(1))  # (3, 2)
    times = arrival_times(keys, 50)
    expected = [[[arrival_time(key, token) for token in range(50)] for key in row] for row in keys.tolist()]
    torch.testing.assert_close(times, torch.tensor(expected), rtol=1e-5, atol=0.0)
    in_scratch = arrival_times(keys, 50, torch.empty(2, 3, 2, 50, dtype=torch.int32))
    assert torch.equal(in_scratch, times)
    assert torch.equal(arrival_times(keys[1, 0], 50), times[1, 0])


def test_arrival_times_are_exponential_and_uncorrelated():
    """Over tokens, positions, rows, and keys that differ in one bit: correlations of 1 - exp(-E) within 4.5 errors."""
    keys = torch.tensor([row_key(0, "train", 0, 0, prompt, sample) for prompt in range(20) for sample in range(10)])
    u = 1.0 - (-arrival_times(token_keys(keys.unsqueeze(1), torch.arange(20)), 500).double()).exp()  # (200, 20, 500)
    counts = torch.histc(u.float(), bins=20, min=0.0, max=1.0)
    assert ((counts - 1e5) ** 2 / 1e5).sum().item() < 43.8  # 99.9 % point of chi² with 19 degrees of freedom
    small = u[u < 1e-3] * 1e3  # where winners of large vocabularies are
    assert ((torch.histc(small.float(), bins=20) - len(small) / 20) ** 2 / (len(small) / 20)).sum() < 43.8
    one_bit = [arrival_times(token_keys(keys ^ (1 << bit), 0), 500) for bit in (0, 15, 31, 32, 47, 62)]
    pairs = [(u[:, :, 1:], u[:, :, :-1]), (u[:, 1:], u[:, :-1]), (u[1:], u[:-1])]
    pairs += [(1.0 - (-other.double()).exp(), u[:, 0]) for other in one_bit]
    for one, other in pairs:
        correlation = ((one - 0.5) * (other - 0.5)).mean() * 12.0
        assert abs(correlation) < 4.5 / one.numel() ** 0.5


def _with_a_tail(vocabulary: int) -> Tensor:
    """Logits whose softmax goes down to about 1e-7."""
    if vocabulary == 5:
        return torch.tensor([0.7, 0.2, 0.1, 1e-5, 1e-7]).log()
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    return logits.clamp(min=float(logits.logsumexp(0)) + math.log(1e-7))


LONG = [(5, 10**7, 10**5), (300, 10**7, 10**4), (50_000, 10**6, 50)]


@pytest.mark.parametrize(
    ("vocabulary", "draws", "rows"),
    [(5, 10**6, 10**5), (300, 2 * 10**5, 10**4), *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)],
)
def test_tokens_are_drawn_as_often_as_the_softmax_says(vocabulary: int, draws: int, rows: int) -> None:
    """Chi-square of keyed draws against the softmax; tokens of fewer than 10 expected draws are counted together."""
    logits = _with_a_tail(vocabulary)
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for first in range(0, draws, rows):
        noise = Noise(token_keys(torch.arange(first, first + rows) + row_key("chi"), 3))
        tokens, _ = draw_tokens(logits.expand(rows, -1), noise, temperature=1.0)
        counts += torch.bincount(tokens, minlength=len(logits))
    expected = logits.double().softmax(-1) * draws
    order = expected.argsort()
    ends = (expected[order].cumsum(0) / 10).floor()
    bins = torch.zeros_like(order).scatter(0, order, ends.clamp(max=ends[-1] - 1).long().unique(return_inverse=True)[1])
    size = int(bins.max()) + 1
    want = torch.zeros(size, dtype=torch.float64).scatter_add(0, bins, expected)
    have = torch.zeros(size, dtype=torch.float64).scatter_add(0, bins, counts.double())
    freedom = size - 1
    chi_square = float(((have - want) ** 2 / want).sum())
    cut = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3  # 99.9 % (Wilson and Hilferty)
    assert chi_square < cut, (chi_square, freedom)


def test_draws_of_neighbouring_positions_and_rows_are_independent():
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0]).expand(40_000, -1)
    keys = torch.arange(40_000)
    here, next_position = (draw_tokens(logits, Noise(token_keys(keys, i)), temperature=1.0)[0] for i in (0, 1))
    p = logits[0].double().softmax(-1)
    for other in (next_position, here.roll(1)):
        pairs = torch.bincount(here * 4 + other, minlength=16)
        expected = (p.unsqueeze(1) * p).flatten() * 40_000
        assert ((pairs - expected) ** 2 / expected).sum() < 37.7  # 99.9 % point of chi² with 15 degrees of freedom


def test_noise_computed_ahead_is_that_of_each_position():
    """While rows end; a vocabulary that is too large for it is computed position by position."""
    keys = torch.tensor([row_key("ahead", i) for i in range(9)])
    for vocabulary in (7, 60_000):
        ahead, rows = PrecomputedNoise(keys, 40), torch.arange(9)
        for position in range(40):
            times = ahead.at(rows, position, vocabulary).arrival_times(vocabulary)
            assert torch.equal(times, arrival_times(token_keys(keys[rows], position), vocabulary))
            if position in (3, 20, 21, 35):
                rows = rows[torch.arange(len(rows)) != position % len(rows)]
            if vocabulary > 7 and position == 4:
                break


@pytest.mark.parametrize("vocabulary", [60, 3000, 8192])
def test_tokens_of_zero_probability_are_never_drawn(vocabulary):
    logits = torch.full((2000, vocabulary), -torch.inf)
    logits[:, 17] = 1.0
    logits[:, vocabulary - 20] = 1.0
    tokens, logprobs = draw_tokens(logits, _noise("zero", rows=2000), temperature=1.0)
    counts = torch.bincount(tokens, minlength=vocabulary)
    assert counts[17] + counts[vocabulary - 20] == 2000 and abs(int(counts[17]) - 1000) < 150
    torch.testing.assert_close(logprobs, torch.full((2000,), math.log(0.5)))


@pytest.mark.parametrize("vocabulary", [1, 50, 5000, 8192])
def test_a_single_allowed_token_is_drawn_whatever_the_noise(vocabulary):
    logits = torch.full((500, vocabulary), -torch.inf)
    logits[:, vocabulary // 2] = -3.0
    tokens, logprobs = draw_tokens(logits, _noise("one", rows=500), temperature=1.0)
    assert (tokens == vocabulary // 2).all() and not logprobs.any()


@pytest.mark.parametrize("vocabulary", [4096, 49_152, 5000])
def test_large_vocabularies_are_raced_in_blocks_with_the_same_outcome(vocabulary, monkeypatch):
    """Blocks of rows, and a search in two levels, against argmax of log p + Gumbel in double precision."""
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    noise = _noise("blocks", rows=40)
    scores = logits.double().log_softmax(-1) - noise.arrival_times(vocabulary).double().log()
    assert score_gaps(logits, noise, temperature=1.0).min() > 1e-4  # no near-tie among these
    expected = logits.double().log_softmax(-1).gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
    for block in (1, vocabulary * 7, 1 << 30):
        monkeypatch.setattr(sampling, "_BLOCK", block)
        tokens, logprobs = draw_tokens(logits, noise, temperature=1.0)
        assert torch.equal(tokens, scores.argmax(-1))
        torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=0.0)


@pytest.mark.parametrize("how", [{"top_k": 20}, {"top_p": 0.8}, {"top_k": 200, "top_p": 0.9}])
def test_a_truncated_draw_is_the_untruncated_one_wherever_that_is_allowed(how):
    logits = torch.randn(3000, 500, generator=torch.Generator().manual_seed(9)) * 2
    noise = _noise("cut", rows=3000)
    whole, _ = draw_tokens(logits, noise, temperature=1.0)
    tokens, _ = draw_tokens(logits, noise, temperature=1.0, **how)
    allowed = truncate_logits(logits, **how).isfinite()
    assert allowed.gather(1, tokens.unsqueeze(1)).all()
    still = allowed.gather(1, whole.unsqueeze(1)).squeeze(1)
    assert 500 < int(still.sum()) < 3000 and torch.equal(tokens[still], whole[still])


def test_rounding_of_the_logits_changes_only_near_ties():
    """A vocabulary of 50,000 with 6 % of its mass in a flat tail."""
    logits = torch.randn(120, 50_000, generator=torch.Generator().manual_seed(1))
    logits[torch.arange(120), torch.arange(120)] = 14.0
    noise = _noise("ties", rows=120)
    moved = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) * 1e-5
    (one, _), (other, _) = (draw_tokens(given, noise, temperature=1.0) for given in (logits, moved))
    assert (one != torch.arange(120)).sum() > 3
    gaps = score_gaps(logits, noise, temperature=1.0)
    assert (gaps[one != other] < 1e-4).all() and (one != other).sum() <= 1


def test_score_gaps_by_hand():
    noise = Noise(times=torch.tensor([[0.5, 2.0, 1.0]]))
    logits = torch.tensor([[0.0, 3.0, 1.0]])  # at temperature 2: 0 + log 2, 1.5 - log 2, 0.5
    assert score_gaps(logits, noise, temperature=2.0).item() == pytest.approx(1.5 - 2.0 * math.log(2.0), abs=1e-6)


def test_integer_sums_are_exact_and_stay_where_a_weight_is_zero() -> None:
    weights = torch.tensor([[0.5, 0.0, 0.25, 0.0, 1.0, 2.0**-44]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.5, 0.75, 0.75, 1.75, 1.75 + 2.0**-44]], dtype=torch.float64)
    assert torch.equal(sampling._integer_running_sums(weights), expected)
    many = torch.ones(1, 2**18 + 1)  # more tokens than any vocabulary has
    assert sampling._integer_running_sums(many)[0, -1] == 2**18 + 1


def test_non_finite_logits_show_in_the_logprob_instead_of_crashing():
    for vocabulary in (10, 2000, 8192):
        for value in (torch.nan, -torch.inf):
            logits = torch.full((1, vocabulary), value)
            tokens, logprobs = draw_tokens(logits, _noise("nan", rows=1), temperature=1.0)
            assert 0 <= tokens.item() < vocabulary and logprobs.isnan().all()


def test_greedy_takes_the_most_likely_token_with_its_untempered_logprob():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, logprobs = draw_tokens(logits, Noise(), temperature=0.0, top_k=1, top_p=0.1)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_rows_do_not_depend_on_their_neighbours():
    logits = torch.randn(9, 2100, generator=torch.Generator().manual_seed(4))
    noise = _noise("rows", rows=9)
    together = draw_tokens(logits, noise, temperature=0.9, top_p=0.8)
    for row in range(9):
        alone = draw_tokens(logits[row : row + 1], noise[row : row + 1], temperature=0.9, top_p=0.8)
        assert alone[0].item() == together[0][row].item()
        torch.testing.assert_close(alone[1], together[1][row : row + 1])


def test_top_k_keeps_the_k_most_likely_and_renormalises():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    kept = truncate_logits(logits, top_k=2)
    assert kept.isfinite().tolist() == [[False, True, False, True]]
    tokens, logprobs = draw_tokens(logits.expand(7000, -1), _noise("top-k", rows=7000), temperature=1.0, top_k=2)
    counts = torch.bincount(tokens, minlength=4).tolist()
    assert counts[0] == counts[2] == 0 and abs(counts[1] - 4000) < 165  # four standard errors
    torch.testing.assert_close(logprobs[tokens == 1][0].item(), math.log(4 / 7), rtol=1e-5, atol=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert truncate_logits(logits, top_p=0.65).isfinite().tolist() == [[False, True, False, True]]
    assert truncate_logits(logits, top_p=0.75).isfinite().tolist() == [[False, True, True, True]]
    assert truncate_logits(logits, top_p=0.01).isfinite().tolist() == [[False, True, False, False]]
    assert truncate_logits(logits, top_k=10, top_p=1.0).isfinite().all()


@pytest.mark.parametrize("vocabulary", [5000, 50_000])
@pytest.mark.parametrize("top_k", [0, 50, 3000])
def test_a_wide_vocabulary_is_not_sorted_for_its_nucleus(vocabulary, top_k, monkeypatch):
    """By the definition, to the token: sharp and flat rows, with ties at the edge, one token, and all excluded."""
    scale = torch.linspace(1.0, 8.0, 12).unsqueeze(1)
    logits = torch.randn(12, vocabulary, generator=torch.Generator().manual_seed(3)) * scale
    logits[3] = logits[3].bfloat16().float()
    logits[5] = logits[5].round()
    logits[7, 17] = 100.0
    given = truncate_logits(logits, top_k=top_k)
    ordered, order = given.sort(dim=-1, descending=True)
    shares = ordered.softmax(dim=-1)
    inside = (shares.cumsum(dim=-1) - shares < 0.9).scatter(-1, order, shares.cumsum(dim=-1) - shares < 0.9)
    sort, sorted_rows = torch.Tensor.sort, []
    monkeypatch.setattr(torch.Tensor, "sort", lambda self, **how: sorted_rows.append(len(self)) or sort(self, **how))
    cut = truncate_logits(logits, top_k=top_k, top_p=0.9)
    assert torch.equal(cut, given.masked_fill(~inside, -torch.inf))
    assert sum(sorted_rows) <= 8  # of 12 rows; those with more tokens than are looked at, and those with ties


def test_top_p_looks_at_the_tempered_distribution():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(500, -1)
    noise = _noise("top-p", rows=500)
    cold, _ = draw_tokens(logits, noise, temperature=0.1, top_p=0.9)  # 0.5 ** 10 outweighs the others
    hot, _ = draw_tokens(logits, noise, temperature=1.0, top_p=0.9)
    assert (cold.unique().tolist(), hot.unique().tolist()) == ([0], [0, 1, 2])


def test_bfloat16_logits_are_scored_in_float32():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5)).bfloat16()
    tokens, logprobs = draw_tokens(logits, _noise("bfloat16", rows=3), temperature=1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1))


def test_small_seeds_are_what_numpy_takes() -> None:
    seeds = [small_seed(0, "train", step) for step in range(50)]
    assert len(set(seeds)) == 50 and max(seeds) > 2**31
    for seed in seeds:
        np.random.RandomState(seed)
        np.random.default_rng(seed)
