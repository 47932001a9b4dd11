"""A rollout for which memory is short is drawn in parts, and the run remembers of how many completions."""

import logging
from typing import Any

import pytest
import torch

from grpo_pl.functional.device_memory import OutOfMemory
from grpo_pl.rollout.native import engine as native
from grpo_pl.rollout.native import llama_family
from grpo_pl.rollout.native.engine import NativeEngine
from tests.rollout.drawn import UNEVEN, assert_same, build_model, generate, make_keys

KEYS = make_keys(3, 4)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory ends at the third token where more than five rows are decoded; the rows of each start."""
    monkeypatch.setenv("GRPO_PL_NATIVE", "torch")
    started: list[int] = []

    class Short(llama_family.LlamaFamilyDecoder):
        def start(self, prompt_ids: Any, prompt_mask: Any, owners: Any, *, room: int) -> Any:
            started.append(len(owners))
            self._steps = 0
            return super().start(prompt_ids, prompt_mask, owners, room=room)

        def step(self, tokens: Any) -> Any:
            self._steps += 1
            if self._steps == 3 and started[-1] > 5:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().step(tokens)

    monkeypatch.setattr(llama_family, "LlamaFamilyDecoder", Short)
    return started


def test_the_rows_are_halved_and_the_same_completions_drawn(full: list[int], caplog: pytest.LogCaptureFixture) -> None:
    model, engine = build_model("qwen2"), NativeEngine()
    expected = generate(NativeEngine(max_batch_rows=3), model, UNEVEN, KEYS, length=8)
    full.clear()
    with caplog.at_level(logging.WARNING):
        assert_same(generate(engine, model, UNEVEN, KEYS, length=8), expected, atol=0.0)
    assert full == [12, 6, 3, 3, 3, 3]
    (first, second) = (record.message for record in caplog.records)
    assert "6" in first and "12" in first and "3" in second
    generate(engine, model, UNEVEN, KEYS, length=8)
    assert full[6:] == [3] * 4  # from then on
    state = engine.state_dict()
    resumed = NativeEngine()
    resumed.load_state_dict(state)
    assert_same(generate(resumed, model, UNEVEN, KEYS, length=8), expected, atol=0.0)
    assert full[10:] == [3] * 4


def test_what_the_configuration_says_goes_before_what_a_checkpoint_remembers(full: list[int]) -> None:
    engine = NativeEngine(max_batch_rows=2)
    engine.load_state_dict({"configured": 0, "rows": 3})
    generate(engine, build_model("qwen2"), UNEVEN, KEYS, length=8)
    assert full == [2] * 6


def test_one_row_without_memory_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setenv("GRPO_PL_NATIVE", "torch")
    monkeypatch.setattr(llama_family.LlamaFamilyDecoder, "start", fails)
    with pytest.raises(OutOfMemory, match=r"one completion .*model\.sampling\.max_completion_length"):
        generate(NativeEngine(), build_model("qwen2"), UNEVEN, KEYS, length=8)


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setenv("GRPO_PL_NATIVE", "torch")
    monkeypatch.setattr(llama_family.LlamaFamilyDecoder, "start", fails)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        generate(NativeEngine(), build_model("qwen2"), UNEVEN, KEYS, length=8)


@pytest.mark.parametrize(("rows_free", "rows"), [(1000.0, None), (5.0, 4), (0.1, 1)])
def test_on_a_gpu_as_many_rows_as_fit_are_decoded_at_once(rows_free: float, rows: int | None, monkeypatch: Any) -> None:
    """With a fifth of the free memory to spare."""
    model, engine = build_model("qwen2"), NativeEngine()
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    numbers = 20 * 2 * config.num_hidden_layers * config.num_key_value_heads * size + 3 * config.vocab_size
    monkeypatch.setenv("GRPO_PL_NATIVE", "torch")
    monkeypatch.setattr(native, "free_gpu_memory", lambda device: rows_free * numbers * 4 + 1)
    generate(engine, model, UNEVEN, KEYS, length=20 - max(map(len, UNEVEN)))
    assert engine.state_dict()["rows"] == rows
