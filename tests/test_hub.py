"""Where there is no network, the hub's libraries take what they have cached."""

import datasets.config
import pytest
from huggingface_hub import constants

from grpo_pl.hub import prefer_cache_without_network


@pytest.mark.parametrize(("host", "offline"), [("no-such-host.invalid", True), ("localhost", False)])
def test_one_look_up_decides_whether_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch, host: str, offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"https://{host}")
    prefer_cache_without_network.cache_clear()
    assert prefer_cache_without_network() is offline
    assert constants.is_offline_mode() is offline
    assert datasets.config.HF_HUB_OFFLINE is offline
    prefer_cache_without_network.cache_clear()
