"""What can be said about a vLLM engine without vLLM."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.rollout.vllm import VLLMEngine

OVERLAY = Path(__file__).parents[3] / "configs/engine/vllm.yaml"


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
