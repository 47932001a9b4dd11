"""A name of the hub without a network."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from grpo_pl.rewards.hub import offline_without_network

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
def test_a_name_of_the_hub_is_refused_within_seconds() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "https://hub.invalid", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
    command = [
        sys.executable,
        "-m",
        "grpo_pl",
        "plan",
        "--config",
        CONFIGS / "gsm8k.yaml",
        "--model.policy.path=no/such",
    ]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and time.monotonic() - begun < 40  # by themselves the libraries try for 50 seconds
    assert "'no/such' (no such folder here, and the hub cannot be reached)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_behind_a_proxy_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    offline_without_network.cache_clear()
    assert not offline_without_network() and not constants.HF_HUB_OFFLINE
    offline_without_network.cache_clear()
