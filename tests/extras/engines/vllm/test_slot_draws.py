"""The draws for vLLM's second model runner: rows that are reordered, slots that are used again, rows without a key."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_pl.functional.sampling import Noise, draw_tokens, row_key, token_keys

pytestmark = pytest.mark.vllm
HOW = {"temperature": 0.7, "top_k": 0, "top_p": 1.0}
KEYS = [row_key("slots", row) for row in range(4)]
PROMPTS = [3, 5, 1, 4]
"""Tokens of each request's prompt."""


def _logits(row: int, position: int) -> Tensor:
    """(1, V) of a request's token at that position of its completion."""
    return torch.randn(1, 300, generator=torch.Generator().manual_seed(100 * row + position))


def _expected(row: int, position: int) -> tuple[int, float]:
    keys = token_keys(torch.tensor([KEYS[row]]), position)
    token, logprob = draw_tokens(_logits(row, position), Noise(keys), **HOW)
    return token.item(), logprob.item()


@pytest.fixture
def state() -> Any:
    return SimpleNamespace(device=torch.device("cpu"), max_num_reqs=6, prompt_len=SimpleNamespace(gpu=torch.zeros(6)))


def _enter(processor: Any, state: Any, row: int, slot: int, **extra: Any) -> bool:
    from grpo_pl.extras.engines.vllm.keyed_draws import DRAW, KEY, TOP

    state.prompt_len.gpu[slot] = PROMPTS[row]
    return processor.add_request(slot, SimpleNamespace(extra_args={KEY: KEYS[row], DRAW: HOW, TOP: 0} | extra or None))


def _step(processor: Any, slots: dict[int, int], rows: list[tuple[int, int]]) -> list[tuple[int, float]]:
    """Token and log-probability of each (request, position of its completion), in this order of rows."""
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

    processor.apply_staged_writes()
    context: Any = {name: None for name in LogitsContext.__dataclass_fields__}
    context["expanded_idx_mapping"] = torch.tensor([slots[row] for row, _ in rows], dtype=torch.int32)
    context["pos"] = torch.tensor([PROMPTS[row] + position - 1 for row, position in rows])
    told = processor.apply(torch.cat([_logits(*each) for each in rows]), LogitsContext(**context))
    tokens = told.argmax(dim=1)  # greedy, as the engine asks for
    return [(token, -told[place, token].item()) for place, token in enumerate(tokens.tolist())]


def test_rows_are_drawn_by_key_and_position_in_any_order(state: Any) -> None:
    from grpo_pl.extras.engines.vllm.keyed_draws import SlotDraws

    processor, slots = SlotDraws(None, state), {0: 4, 1: 0, 2: 2}
    assert all(_enter(processor, state, row, slot) for row, slot in slots.items())
    orders = [[(0, 0), (1, 0), (2, 0)], [(2, 1), (0, 1), (1, 1)], [(1, 2), (2, 2)], [(0, 2), (1, 3), (2, 3)]]
    for rows in orders:  # request 0 rests for a step, as after a preemption
        for found, each in zip(_step(processor, slots, rows), rows, strict=True):
            token, logprob = _expected(*each)
            assert found == (token, pytest.approx(logprob, abs=1e-5)), each


def test_a_slot_that_is_used_again_has_the_key_of_its_new_request(state: Any) -> None:
    from grpo_pl.extras.engines.vllm.keyed_draws import SlotDraws

    processor = SlotDraws(None, state)
    _enter(processor, state, 0, 1)
    _step(processor, {0: 1}, [(0, 0)])
    _enter(processor, state, 3, 1)
    assert _step(processor, {3: 1}, [(3, 0)])[0][0] == _expected(3, 0)[0]


def test_rows_without_a_key_or_a_request_are_left_as_they_are(state: Any) -> None:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

    from grpo_pl.extras.engines.vllm.keyed_draws import SlotDraws

    processor, logits = SlotDraws(None, state), torch.cat([_logits(row, 0) for row in range(3)])
    context: Any = {name: None for name in LogitsContext.__dataclass_fields__}
    context |= {"expanded_idx_mapping": torch.tensor([3, 1, -1], dtype=torch.int32), "pos": torch.tensor([2, 2, 0])}
    assert not processor.add_request(3, SimpleNamespace(extra_args=None))
    processor.apply_staged_writes()
    assert torch.equal(processor.apply(logits, LogitsContext(**context)), logits)  # before any key is known
    _enter(processor, state, 0, 1)
    processor.apply_staged_writes()
    before = logits.clone()
    told = processor.apply(logits, LogitsContext(**context))
    assert told.data_ptr() == logits.data_ptr()  # no second copy of (rows, vocabulary)
    assert torch.equal(told[[0, 2]], before[[0, 2]]) and told[1].isfinite().sum() == 1
