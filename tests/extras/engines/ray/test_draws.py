"""Actors draw what the native engine draws here, from the weights of the moment."""

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from grpo_pl.policy.lora import Lora, add_adapters
from grpo_pl.rollout.engine import PolicyDiverged, RolloutInterrupted
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import StopStrings
from tests.extras.engines.ray.conftest import MARKS, draw
from tests.rollout.drawn import assert_same, build_model

pytestmark = MARKS


_assert_equal = partial(assert_same, atol=1e-5)  # the rounding of products of fewer rows


def _disturb(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.parametrize("actors", [1, 2])
def test_all_rows_are_those_of_the_native_engine(cluster: Any, connect: Any, actors: int) -> None:
    engine, model = connect(actors=actors), build_model("qwen2")
    ways: list[dict[str, Any]] = [{"temperature": t} for t in (0.7, 1.0, 1.3, 0.0)] + [{"top_k": 5}, {"top_p": 0.8}]
    ways += [{"top_logprobs": 4}, {"prompts": 5}, {"prompts": 1}]
    for how in ways:
        seen: list[tuple[int, int]] = []
        ours = draw(engine, model, progress=lambda *now, seen=seen: seen.append(now), **how)
        _assert_equal(ours, draw(NativeEngine(), model, **how))
        assert seen == sorted(seen) and seen[-1] == (int(ours.lengths.sum()), len(ours.finish_reasons))
    assert engine.pushes == 1
    nodes = {process.ppid() for process in cluster.actors()}
    assert nodes <= {cluster.raylet(node).pid for node in cluster.nodes[1:]} and len(nodes) == actors


def test_weights_of_an_update_are_drawn_from(connect: Any) -> None:
    engine, model = connect(actors=2), build_model("qwen2", seed=2)
    before = draw(engine, model)
    _disturb(model)
    _assert_equal(draw(engine, model), before)  # it has not heard of them
    engine.update_weights(model)
    engine.updates = 7  # as the pipeline counts them
    after = draw(engine, model)
    _assert_equal(after, draw(NativeEngine(), model))
    assert not torch.equal(before.completion_ids, after.completion_ids)
    assert engine.pushes == 2 and engine.weights_version == 7


def test_adapters_are_merged_and_other_types_and_families_read(connect: Any) -> None:
    adapted = build_model("qwen2", seed=2)
    add_adapters(adapted, Lora(rank=4), seed=0)
    _disturb(adapted)
    half = build_model("qwen3")
    for parameter in half.parameters():  # and no buffer
        parameter.data = parameter.data.bfloat16()
    for model in (adapted, build_model("gpt2"), half):
        engine = connect()
        assert torch.equal(draw(engine, model).completion_ids, draw(NativeEngine(), model).completion_ids)
        engine.close()


def test_stop_strings_end_rows(connect: Any, tiny_policy: Any, tokenizer: Any) -> None:
    engine, stops = connect(), StopStrings(texts=("7", "ab"), tokenizer=tokenizer, prefix="a")
    ours = draw(engine, tiny_policy, stops=stops, length=40)
    _assert_equal(ours, draw(NativeEngine(), tiny_policy, stops=stops, length=40))
    assert "stop" in ours.finish_reasons


def test_a_rollout_that_is_told_to_stop_ends_at_once_and_the_next_one_is_whole(connect: Any) -> None:
    engine, model, told, stop = connect(actors=2, pause_s=0.05), build_model("qwen2"), [], threading.Event()

    def progress(tokens: int, finished: int) -> None:
        if tokens and not stop.is_set():
            told.append(time.monotonic())
            stop.set()

    with pytest.raises(RolloutInterrupted):
        draw(engine, model, length=400, progress=progress, should_stop=stop.is_set)
    assert time.monotonic() - told[0] < 0.5
    begun = time.monotonic()
    ours = draw(engine, model, length=1)
    assert time.monotonic() - begun < 10.0  # the actors have stopped as well, where 20 s were to be drawn
    _assert_equal(ours, draw(NativeEngine(), model, length=1))
    assert engine.pushes == 1


def test_what_goes_wrong_in_an_actor_is_what_would_go_wrong_here(connect: Any) -> None:
    engine, model = connect(), build_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(PolicyDiverged):
        draw(engine, model)
    with pytest.raises(ValueError, match="there is no kernel for heads of 16"):
        draw(connect("RefusingEngine"), model)


def test_other_ranks_are_told_of_the_newest_weights_in_whatever_order_an_actor_hears_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from grpo_pl.extras.engines.ray import pool

    monkeypatch.setattr(pool, "forget_secrets", lambda: None)  # of this process
    actor = pool.EngineActor("child_engines:SlowNativeWorker", {}, {})
    assert actor.newest_weights() == ((-1, -1), [])
    assert actor.newest_weights((0, 1), ["newest"]) == ((0, 1), ["newest"])
    assert actor.newest_weights((-1, -1), []) == ((0, 1), ["newest"]) == actor.newest_weights()
