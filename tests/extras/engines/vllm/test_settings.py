"""What can be said about a vLLM engine without vLLM."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from grpo_pl.extras.engines.copy_engine import ModelSpec
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.engines.prefetched import PrefetchedRollouts
from grpo_pl.extras.engines.ray import RayEngine
from grpo_pl.extras.engines.vllm import VLLMEngine
from grpo_pl.extras.engines.vllm.engine import SECOND_RUNNER
from grpo_pl.extras.engines.vllm.memory import GIB, SPARE, cache_memory

OVERLAY = Path(__file__).parents[4] / "configs/engine/vllm.yaml"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_run_without_vllm_says_how_to_install_it_before_it_leaves_a_folder(command_line: Any) -> None:
    outcome = command_line("fit", "--config", command_line.config(), "--config", OVERLAY)
    assert outcome.status == 1
    assert "error: VLLMEngine needs vLLM: pip install 'grpo_pl[vllm]'" in outcome.err
    assert "Traceback" not in outcome.err and len(outcome.err.strip().splitlines()) == 1
    assert not command_line.runs.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_rows": 0}, "max_batch_rows"),
        ({"max_tokens": 1}, "max_tokens"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib must be positive, got 0.0"),
        ({"engine_args": {"logprobs_mode": "raw_logprobs"}}, "engine_args.logprobs_mode is set by the engine itself"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMEngine(**fields)


def _spec(shape: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda:0") -> ModelSpec:
    """A Qwen2.5 of the hub: parameters, layers, width, heads, key heads, and 32,768 tokens of context."""
    parameters, layers, hidden, heads, key_heads = QWEN[shape]
    config = Qwen2Config(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=key_heads,
        max_position_embeddings=32_768,
    )  # fmt: skip
    return ModelSpec(config=config, dtype=dtype, device=torch.device(device), parameters=int(parameters * 1e9))


QWEN = {
    "0.5B": (0.494, 24, 896, 14, 2),
    "1.5B": (1.54, 28, 1536, 12, 2),
    "3B": (3.09, 36, 2048, 16, 2),
    "7B": (7.62, 28, 3584, 28, 4),
    "14B": (14.8, 48, 5120, 40, 8),
    "32B": (32.8, 64, 5120, 40, 8),
}
TOTAL = 80 * GIB


def test_sleep_is_for_gpus_that_a_trainer_shares() -> None:
    engine = VLLMEngine(sleep=True)
    engine.check_device(torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"this run is on cpu: set sleep: false"):
        engine.check_device(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"set engine\.sleep false"):
        RayEngine(engine=VLLMEngine(sleep=True))
    with pytest.raises(ValueError, match=r"data\.staleness 1 leaves nothing between them"):
        PrefetchedRollouts(1).check(engine, None, None, None)  # type: ignore[arg-type]
    assert engine.settings(_spec("0.5B"))["sleep"]


def test_an_engine_that_sleeps_during_updates_leaves_them_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSpec, "of", lambda model: model)
    assert VLLMEngine(sleep=True).unclaimed_bytes(_spec("7B")) == GIB  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", QWEN)
@pytest.mark.parametrize("free", [30, 50, 70])
def test_vllm_starts_beside_a_trainer_or_says_what_it_lacks(shape: str, free: int) -> None:
    """By vLLM 0.32's own condition, ``request_memory``: free memory is at least the share that it was told; and one
    sequence of the model's context fits into the cache, or it refuses the model."""
    engine = VLLMEngine()
    memory = engine.settings(_spec(shape))["memory"]
    _, layers, hidden, heads, key_heads = QWEN[shape]
    one = 32_768 * layers * 2 * key_heads * (hidden // heads) * 2
    needed = QWEN[shape][0] * 2e9 + one + SPARE
    if needed > free * GIB:
        with pytest.raises(ValueError, match=r"GiB are free: lower model\.engine\.init_args\.max_tokens"):
            cache_memory(**memory, free=free * GIB, total=TOTAL)
        return
    cache, share = cache_memory(**memory, free=free * GIB, total=TOTAL)
    assert share is not None and 0 < share * TOTAL <= free * GIB
    assert one <= cache


def test_the_cache_has_room_for_the_rows_of_a_rollout_and_not_more() -> None:
    engine = VLLMEngine(max_batch_rows=256)
    engine._row_tokens = 640
    memory = engine.settings(_spec("0.5B"))["memory"]
    each = 24 * 2 * 2 * 64 * 2  # 12,288 bytes a token
    assert cache_memory(**memory, free=60 * GIB, total=TOTAL)[0] == 256 * 640 * each
    assert cache_memory(**memory, free=4 * GIB, total=TOTAL)[0] == int(0.5 * (4 * GIB - 0.494e9 * 2 - SPARE))
    asked = VLLMEngine(kv_cache_gib=3.0).settings(_spec("0.5B"))["memory"]
    assert cache_memory(**asked, free=60 * GIB, total=TOTAL)[0] == 3 * GIB
    assert cache_memory(**memory, free=None, total=None) == (GIB, None)


def test_on_a_gpu_vllm_has_its_own_default_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECOND_RUNNER, raising=False)
    runner = {
        device: VLLMEngine().environment(_spec("0.5B", device=device))[SECOND_RUNNER] for device in ("cpu", "cuda:0")
    }
    assert runner == {"cpu": "0", "cuda:0": "1"}
    monkeypatch.setenv(SECOND_RUNNER, "0")
    assert VLLMEngine().environment(_spec("0.5B"))[SECOND_RUNNER] == "0"


@pytest.mark.parametrize("kind", [VLLMEngine, NativeChildEngine])
def test_the_trainer_gives_unused_memory_back_before_a_process_starts(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Process:
        closed = False

        def __init__(self, *arguments: Any, **options: Any) -> None:
            order.append("start")

        def load(self, *arguments: Any, **options: Any) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr("grpo_pl.extras.engines.child.engine.EngineProcess", Process)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty"))
    monkeypatch.setattr(kind, "check", lambda self: None)
    kind()._push_weights(_spec("0.5B"), (0, 0), iter(()), collective=False)
    kind()._push_weights(_spec("0.5B", device="cpu"), (0, 0), iter(()), collective=False)
    assert order == ["empty", "start", "start"]


def test_what_a_process_will_take_of_the_gpu_is_known_until_it_has_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSpec, "of", lambda model: model)
    engine = VLLMEngine(kv_cache_gib=3.0)
    assert engine.unclaimed_bytes(_spec("7B")) == 4 * GIB + 2 * 7_620_000_000  # type: ignore[arg-type]
    assert NativeChildEngine(dtype="float32").unclaimed_bytes(_spec("7B")) == GIB // 2 + 4 * 7_620_000_000  # type: ignore[arg-type]
    assert engine.unclaimed_bytes(_spec("7B", device="cpu")) == 0  # type: ignore[arg-type]
    monkeypatch.setattr(VLLMEngine, "pid", 1)
    assert engine.unclaimed_bytes(_spec("7B")) == 0  # type: ignore[arg-type]
