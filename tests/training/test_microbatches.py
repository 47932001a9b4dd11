"""Micro-batches under a token budget: how rows are cut, how the budget is found, and what happens when memory ends."""

import logging
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.distributed.collective import Collective
from grpo_pl.extras.kernels.library import SWITCH
from grpo_pl.functional.device_memory import is_out_of_memory
from grpo_pl.training.microbatches import (
    MOST_TOKENS,
    OutOfMemory,
    TokenBudget,
    free_memory,
    micro_batches,
    saved_bytes_per_token,
)
from grpo_pl.types import Rollout
from tests.gradient_step import qwen, rollout_of
from tests.kernels import in_c


def _rollout(prompts: list[int], lengths: list[int]) -> Rollout:
    """Prompts and completions of these lengths; equal neighbours in ``prompts`` are the same prompt."""
    return rollout_of([[n] * n for n in prompts], [[1] * n for n in lengths])


ROLLOUT = _rollout([3, 3, 3, 5, 5, 5], [4, 1, 6, 2, 2, 8])


def _cut(budget: int, *, share: bool, rows: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> list[list[int]]:
    parts = micro_batches(ROLLOUT, torch.tensor(rows, dtype=torch.int64), budget, share_prompts=share)
    return [part.tolist() for part in parts]


def test_a_shared_prompt_counts_once_and_groups_stay_together() -> None:
    assert _cut(31, share=True) == [[0, 1, 2, 3, 4, 5]]  # 3 + 4 + 1 + 6 and 5 + 2 + 2 + 8
    assert _cut(30, share=True) == [[0, 1, 2, 3, 4], [5]]
    assert _cut(14, share=True) == [[0, 1, 2], [3, 4], [5]]
    assert _cut(13, share=True) == [[0, 1], [2], [3, 4], [5]]  # 3 + 6, 5 + 2 + 2, 5 + 8


def test_without_sharing_padding_counts_and_the_longest_come_first() -> None:
    assert _cut(13, share=False) == [[5], [2], [0], [3], [4], [1]]
    assert _cut(20, share=False) == [[5], [2, 0], [3, 4], [1]]  # 2 · (3 + 6), 2 · (5 + 2)
    assert _cut(26, share=False) == [[5, 2], [0, 3], [4, 1]]  # 2 · (5 + 8), 2 · (5 + 4), 2 · (5 + 2)
    assert _cut(78, share=False) == [[5, 2, 0, 3, 4, 1]]  # 6 · (5 + 8)


def test_a_segment_costs_its_own_prompt_and_none_is_shared_behind_it() -> None:
    rollout = _rollout([3, 3, 3], [6, 2, 2])  # the first row: 3 + 2, and a segment of 3 + 1
    rollout = replace(rollout, segment_index=torch.tensor([[0, 0, -1, -1, -1, 1], [0] * 6, [0] * 6]))
    rows = torch.arange(3)

    def cut(budget: int, share: bool) -> list[list[int]]:
        return [part.tolist() for part in micro_batches(rollout, rows, budget, share_prompts=share)]

    assert cut(16, True) == [[0, 1, 2]]  # 3 + 6, 3 + 2, 2
    assert cut(15, True) == [[0, 1], [2]]
    assert cut(20, False) == [[0, 1, 2]]  # 4 · (3 + 2), since the first row is read as two
    assert cut(19, False) == [[0, 1], [2]]


def test_only_the_rows_asked_for_are_cut() -> None:
    assert _cut(14, share=True, rows=(4, 1)) == [[4, 1]]  # 5 + 2 and 3 + 1
    assert _cut(10, share=True, rows=(4, 1)) == [[4], [1]]
    assert _cut(14, share=True, rows=()) == _cut(14, share=False, rows=()) == []


@pytest.mark.parametrize("share", [True, False])
def test_a_budget_below_the_longest_row_is_refused_with_the_number_needed(share: bool) -> None:
    with pytest.raises(ValueError, match="max_tokens_per_microbatch is 12, but a prompt with its completion has 13"):
        _cut(12, share=share)


# --- finding it -----------------------------------------------------------------------------------------------------


WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def _policy(layers: int = 3) -> PreTrainedModel:
    return qwen(vocab_size=20, num_hidden_layers=layers, tie_word_embeddings=True, **WIDE)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("", marks=in_c)])
def test_a_dry_forward_counts_what_a_layer_keeps_for_each_token(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv(SWITCH, kernels)
    layer = saved_bytes_per_token(_policy(4)) - saved_bytes_per_token(_policy(3))
    # inputs of both norms and their normalised values, of the products, and what attention and SwiGLU keep
    by_hand = 4 * (6 * 64 + 4 * 64 + 2 * 32 + 4 * 128)
    with_kernels = 4 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * 128)
    assert layer == pytest.approx(by_hand if kernels else with_kernels, rel=0.25 if kernels else 0.05)


def test_recomputed_activations_count_once_for_one_layer() -> None:
    policy = _policy(4).train()
    whole = saved_bytes_per_token(policy)
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = saved_bytes_per_token(policy)
    assert whole / 4 < again < whole / 2
    assert any(getattr(module, "gradient_checkpointing", False) for module in policy.modules())


def test_a_dry_forward_leaves_no_gradient_and_no_trace_in_the_random_numbers() -> None:
    policy, before = _policy(), torch.random.get_rng_state()
    saved_bytes_per_token(policy)
    assert all(p.grad is None for p in policy.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_budget_is_found_once_and_a_checkpoint_keeps_it() -> None:
    budget = TokenBudget()
    budget.resolve(_policy(), trained_before=False, collective=Collective())
    assert budget.tokens is not None and 1 <= budget.tokens <= MOST_TOKENS
    assert budget.tokens.bit_count() == 1
    resumed = TokenBudget()
    resumed.load_state_dict({**budget.state_dict(), "tokens": 48})
    resumed.resolve(_policy(), trained_before=True, collective=Collective())
    assert resumed.tokens == 48
    resumed.load_state_dict({**budget.state_dict(), "tokens": 48, "found_for": "a larger GPU, 1 processes"})
    resumed.resolve(_policy(), trained_before=True, collective=Collective())
    assert resumed.tokens == budget.tokens  # found anew
    told_otherwise = TokenBudget(configured=100)
    told_otherwise.load_state_dict({"configured": 200, "tokens": 50, "found_for": ""})
    assert told_otherwise.tokens == 100


def test_a_budget_that_was_found_gives_way_to_a_longer_row_and_a_given_one_does_not() -> None:
    rows = torch.arange(6)
    assert [len(part) for part in TokenBudget(tokens=2).cut(ROLLOUT, rows, _policy())] == [2, 1, 2, 1]
    with pytest.raises(ValueError, match="set it to 13 at least"):
        TokenBudget(configured=2).cut(ROLLOUT, rows, _policy())


def test_a_row_of_another_rank_that_is_too_long_is_refused_here_as_well() -> None:
    class OfTwo(Collective):
        def max(self, value: int, device: torch.device) -> int:
            return max(value, 40)  # of the other one

    TokenBudget(configured=40).check(ROLLOUT, OfTwo())
    TokenBudget(tokens=2).check(ROLLOUT, OfTwo())  # one that was found gives way
    with pytest.raises(ValueError, match="is 39, but a prompt with its completion has 40 tokens"):
        TokenBudget(configured=39).check(ROLLOUT, OfTwo())


def test_free_memory_is_shared_by_the_processes_of_a_machine() -> None:
    alone, of_four = (free_memory(torch.device("cpu"), processes=n) for n in (1, 4))
    assert of_four == pytest.approx(alone / 4, rel=0.2)


# --- running out ----------------------------------------------------------------------------------------------------


def _exhausted() -> None:
    torch.empty(2**60, dtype=torch.uint8)


def test_halving_ends_at_one_completion(caplog: pytest.LogCaptureFixture) -> None:
    budget, asked = TokenBudget(configured=1000), []

    def twice() -> str:
        asked.append(budget.tokens)
        if len(asked) < 3:
            _exhausted()
        return "done"

    with caplog.at_level(logging.WARNING):
        assert budget.within_memory(twice, ROLLOUT, Collective()) == "done"
    assert asked == [1000, 23, 13]  # half of the 47 tokens that there are, then the longest row
    assert "up to 23 tokens from now on" in caplog.text
    with pytest.raises(OutOfMemory, match="one completion already"):
        budget.within_memory(_exhausted, ROLLOUT, Collective())


def test_a_halved_budget_gives_way_to_a_longer_row_up_to_the_configured_one() -> None:
    budget = TokenBudget(configured=20, tokens=5)
    assert [len(part) for part in budget.cut(ROLLOUT, torch.arange(6), _policy())] == [2, 1, 2, 1]  # 13 at most
    with pytest.raises(ValueError, match="is 20, but a prompt with its completion has 21"):
        budget.cut(_rollout([3], [18]), torch.arange(1), _policy())


def test_a_found_budget_below_the_longest_row_is_not_raised_by_halving() -> None:
    with pytest.raises(OutOfMemory, match="a micro-batch of up to 13 tokens: it is one completion already"):
        TokenBudget(tokens=2).within_memory(_exhausted, ROLLOUT, Collective())


def test_among_several_processes_running_out_ends_the_run_with_the_value_to_set() -> None:
    with pytest.raises(OutOfMemory, match=r"set model.max_tokens_per_microbatch to 23 or less"):
        TokenBudget(configured=1000).within_memory(_exhausted, ROLLOUT, Collective(world=2))


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="must match"):
        TokenBudget(tokens=99).within_memory(lambda: torch.zeros(2) + torch.zeros(3), ROLLOUT, Collective())


def test_errors_of_the_allocator_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2) + torch.zeros(3)
    assert not is_out_of_memory(other.value)


def test_a_budget_leaves_room_for_an_engine_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, found = _policy(), []
    monkeypatch.setattr("grpo_pl.training.microbatches.saved_bytes_per_token", lambda policy: 1024.0)
    monkeypatch.setattr("grpo_pl.training.microbatches.free_memory", lambda device, processes: 8.0 * 2**20)
    for reserved in (0, 6 * 2**20):
        budget = TokenBudget()
        budget.resolve(policy, trained_before=True, collective=Collective(), reserved=reserved)
        found.append(budget.tokens)
    assert found == [4096, 1024]  # half of 8 MiB, and of 2
