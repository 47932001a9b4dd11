"""The thread that draws ahead: how it is stopped, and what it leaves as it was."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.distributed.collective import Collective
from grpo_pl.rollout.native.child import NativeChildEngine
from grpo_pl.training import pipeline
from grpo_pl.training.pipeline import RolloutPipeline, earlier_weights
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams

pytestmark = pytest.mark.usefixtures("forked")
PLUGINS = Path(__file__).parents[1] / "plugins"


@pytest.mark.parametrize(
    "kind",
    ["DeafEngine", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("StartingEngine", "LoadingEngine"))],
)
def test_a_run_that_is_told_to_stop_waits_for_no_engine(
    tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The engine is starting, loading weights, or drawing without a look at anything, for 300 s each. A rollout that
    nobody needs any more is at work, and another waits behind it."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setattr(pipeline, "FINISH_WITHIN_S", 1.0)
    monkeypatch.setattr("grpo_pl.rollout.child.engine_process.STOP_LIMIT_S", 0.5)
    import child_engines

    engine, device = getattr(child_engines, kind)(), torch.device("cpu")
    ahead = RolloutPipeline(
        engine, collective=Collective(), device=device, should_stop=lambda: True, share_threads=False
    )
    keys = [[SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=0, sample=0)]]
    request = GenerateRequest(prompt_ids=[[1]], keys=keys, sampling=SamplingParams(), eos_token_ids=[], pad_token_id=0)

    def draw(progress: Any, should_stop: Any) -> Any:
        return engine.generate(tiny_policy, request, should_stop=should_stop), None

    for step, version in enumerate((1, 0)):
        engine.updates = version
        engine.update_weights(tiny_policy)
        ahead.launch(step, tiny_policy, draw)
    for _ in range(2):  # for a checkpoint, and for another at the end
        assert ahead.finish(1) == {1: "it was not done in time"}
    ahead.close()
    engine.close()
    deadline = time.monotonic() + 60.0
    while any(thread.name.startswith("grpo_pl-rollouts") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread is still at work"
        time.sleep(0.05)


def test_threads_are_given_back() -> None:
    engine, before = NativeChildEngine(), torch.get_num_threads()
    ahead = RolloutPipeline(
        engine, collective=Collective(), device=torch.device("cpu"), should_stop=lambda: False, share_threads=True
    )
    assert engine.threads == max(1, before // 2)
    ahead.close()
    assert (engine.threads, torch.get_num_threads()) == (None, before)


def test_earlier_weights_show_under_an_autocast_that_keeps_casts() -> None:
    layer, ones = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    torch.nn.init.ones_(layer.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        found = [layer(ones).item()]
        with earlier_weights(layer, [torch.full((1, 2), 3.0)]):
            found.append(layer(ones).item())
        found.append(layer(ones).item())
    assert found == [2.0, 6.0, 2.0]
