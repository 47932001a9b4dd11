"""An engine on a server draws what the native engine draws here, from the weights of the moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from grpo_pl.policy.lora import Lora, add_adapters
from grpo_pl.rollout.engine import PolicyDiverged, RolloutInterrupted
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.remote import wire
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams, StopStrings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which the server may read."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def server(serve: Any, config: Any, folder: Path) -> Any:
    slow = config("child_engines.NativeInChild", pause_s=0.005)
    return serve(slow, f"--weights-folder={folder}")


@pytest.fixture
def draw(build_model: Any, make_keys: Any) -> Callable[..., Rollout]:
    """``draw(engine, model, temperature=0.7, …)``: 8 × 8 rows."""

    def generate(
        engine: Any, model: Any, *, length: int = 24, prompts: int = 8, stops: Any = None, **options: Any
    ) -> Rollout:
        told = {name: options.pop(name) for name in ("progress", "should_stop") if name in options}
        return engine.generate(
            model,
            GenerateRequest(
                prompt_ids=[[(7 * p + 3 * t) % 36 + 1 for t in range(9 - p % 4)] for p in range(prompts)],
                keys=make_keys(prompts, 8),
                sampling=SamplingParams(max_completion_length=length, **options),
                eos_token_ids=[6],
                pad_token_id=0,
                stops=stops,
            ),
            **told,
        )

    return generate


def _assert_equal(ours: Rollout, reference: Rollout, rounding: float = 0.0) -> None:
    for name, value in vars(reference).items():
        own = getattr(ours, name)
        if torch.is_tensor(value) and value.is_floating_point():
            assert own.shape == value.shape and torch.allclose(own, value, atol=rounding, rtol=0.0), name
        else:
            assert torch.equal(own, value) if torch.is_tensor(value) else own == value, name


def _disturb(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def test_all_rows_are_those_of_the_native_engine(server: Any, connect: Any, draw: Any, build_model: Any) -> None:
    engine, model = connect(server.url), build_model("qwen2")
    ways: list[dict[str, Any]] = [{"temperature": t} for t in (0.7, 1.0, 1.3, 0.0)] + [{"top_k": 5}, {"top_p": 0.8}]
    ways += [{"top_logprobs": 4}, {"top_logprobs": 100, "top_p": 0.8}]
    for how in ways:
        seen: list[tuple[int, int]] = []
        ours = draw(engine, model, progress=lambda *now, seen=seen: seen.append(now), **how)
        assert ours.completion_ids.shape[0] == 64
        _assert_equal(ours, draw(NativeEngine(), model, **how))
        assert seen == sorted(seen) and seen[-1] == (int(ours.lengths.sum()), 64)
    assert engine.pushes == 1


def test_weights_of_an_update_are_drawn_from_and_their_version_comes_back(
    server: Any, connect: Any, draw: Any, build_model: Any
) -> None:
    engine, model = connect(server.url), build_model("qwen2", seed=2)
    before = draw(engine, model)
    _disturb(model)
    _assert_equal(draw(engine, model), before)  # it has not heard of them
    engine.update_weights(model)
    after = draw(engine, model)
    _assert_equal(after, draw(NativeEngine(), model))
    assert not torch.equal(before.completion_ids, after.completion_ids)
    assert engine.pushes == 2 and engine.weights_version == 0
    engine.update_weights(model)
    engine.updates = 7  # as the pipeline counts them
    _assert_equal(draw(engine, model), after)
    assert engine.pushes == 3 and engine.weights_version == 7


def test_adapters_are_merged_into_what_is_pushed(server: Any, connect: Any, draw: Any, build_model: Any) -> None:
    model = build_model("qwen2", seed=2)
    add_adapters(model, Lora(rank=4), seed=0)
    _disturb(model)
    ours, reference = draw(connect(server.url), model), draw(NativeEngine(), model)
    assert torch.equal(ours.completion_ids, reference.completion_ids)


def test_weights_go_through_a_shared_folder_and_leave_nothing_there(
    server: Any, connect: Any, draw: Any, build_model: Any, folder: Path
) -> None:
    engine, model = connect(server.url, weights_folder=str(folder)), build_model("qwen2", seed=3)
    for updates in range(2):
        _assert_equal(draw(engine, model), draw(NativeEngine(), model))
        assert list(folder.iterdir()) == []
        _disturb(model)
        engine.updates = updates + 1
        engine.update_weights(model)


def test_prompts_are_spread_over_servers_in_their_order(
    server: Any, serve: Any, connect: Any, draw: Any, build_model: Any
) -> None:
    engine, model = connect(server.url, serve().url), build_model("qwen2")
    for prompts in (5, 1):
        ours, reference = (draw(each, model, prompts=prompts) for each in (engine, NativeEngine()))
        _assert_equal(ours, reference, rounding=1e-5)  # a product of few rows may round differently, as MKL's does
    assert engine.pushes == 1


def test_a_rollout_that_is_told_to_stop_ends_and_the_next_one_is_whole(
    server: Any, connect: Any, draw: Any, build_model: Any
) -> None:
    engine, model = connect(server.url), build_model("qwen2")
    asked: list[int] = []
    with pytest.raises(RolloutInterrupted):
        draw(engine, model, length=100, should_stop=lambda: asked.append(1) or len(asked) > 8)
    _assert_equal(draw(engine, model), draw(NativeEngine(), model))
    assert engine.pushes == 1  # the server has kept its weights


def test_a_policy_that_is_not_finite_is_told(server: Any, connect: Any, draw: Any, build_model: Any) -> None:
    engine, model = connect(server.url), build_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(PolicyDiverged):
        draw(engine, model)


def test_nothing_is_drawn_from_half_a_push(
    server: Any, connect: Any, draw: Any, build_model: Any, make_keys: Any, token_file: str
) -> None:
    engine, model = connect(server.url), build_model("qwen2")
    whole = draw(engine, model)
    other = build_model("qwen2", seed=1)
    session = f"{server.url}/v1/sessions/{engine._session}"
    headers = {"Authorization": f"Bearer {Path(token_file).read_text().strip()}"}

    def half() -> Any:
        first = dict(list(other.state_dict().items())[:3])
        yield wire.framed(wire.packed(first))

    push = httpx2.put(f"{session}/weights/1", content=half(), headers=headers, timeout=60)
    assert (push.status_code, push.json()["error"]["code"]) == (400, "broke_off")
    request = GenerateRequest(
        prompt_ids=[[1]],
        keys=make_keys(1, 1),
        sampling=SamplingParams(max_completion_length=1),
        eos_token_ids=[],
        pad_token_id=0,
    )
    for mark in ("0.0", "1"):
        body = wire.Request.of(request, mark=mark, stops=None).encoded()
        asked = httpx2.post(
            f"{session}/generate", content=body, headers={**headers, "Content-Type": "application/json"}, timeout=60
        )
        (*_, (last, _)) = wire.events([asked.content])
        assert (last["kind"], last["error"]) == ("error", "lost") and "no whole weights" in last["message"]
    _assert_equal(draw(engine, model), whole)  # pushed again
    assert engine.pushes == 2


def test_stop_strings_end_rows_on_the_server(
    server: Any, connect: Any, draw: Any, tiny_policy: Any, tokenizer: Any, token_file: str
) -> None:
    """Of a policy of another kind, for which the server starts another worker."""
    engine = connect(server.url)
    for texts in (("7", "ab"), ("*",)):
        stops = StopStrings(texts=texts, tokenizer=tokenizer, prefix="a")
        ours = draw(engine, tiny_policy, stops=stops, length=40)
        _assert_equal(ours, draw(NativeEngine(), tiny_policy, stops=stops, length=40))
        assert "stop" in ours.finish_reasons
    headers = {"Authorization": f"Bearer {Path(token_file).read_text().strip()}"}
    httpx2.delete(f"{server.url}/v1/sessions/{engine._session}", headers=headers)  # as after a restart
    _assert_equal(draw(engine, tiny_policy, stops=stops, length=40), ours)
