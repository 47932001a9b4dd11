"""An engine in a child process draws what it would here, hears of new weights, and neither hangs nor outlives us."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grpo_pl.extras.engines.child.engine_process import EngineProcess
from grpo_pl.extras.engines.copy_engine import ModelSpec
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.engines.vllm import VLLMEngine
from grpo_pl.policy.lora import Lora, add_adapters
from grpo_pl.rollout.engine import EngineDied, RolloutInterrupted
from grpo_pl.rollout.native.engine import NativeEngine
from tests.forked import Forked
from tests.process_list import gone, lives
from tests.rollout.drawn import UNEVEN, assert_same, build_model, generate, make_keys

pytestmark = pytest.mark.usefixtures("forked")
_assert_equal = partial(assert_same, atol=0.0)


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Any:
    return make_engine()


@pytest.fixture(scope="module")
def slow_engine(make_engine: Any) -> Any:
    return make_engine(pause_s=0.04)


def test_draws_what_the_native_engine_draws_here(engine: Any) -> None:
    model, keys = build_model("qwen2"), make_keys(3, 4)
    seen: list[tuple[int, int]] = []
    ours = generate(engine, model, UNEVEN, keys, progress=lambda *now: seen.append(now))
    _assert_equal(ours, generate(NativeEngine(), model, UNEVEN, keys))
    assert seen == sorted(seen) and seen[-1] == (int(ours.lengths.sum()), 12)


def test_new_weights_are_drawn_from_once_the_engine_has_heard_of_them(engine: Any) -> None:
    model, keys = build_model("qwen2"), make_keys(3, 4)
    engine.update_weights(model)
    before = generate(engine, model, UNEVEN, keys)
    pushes = engine.pushes
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    _assert_equal(generate(engine, model, UNEVEN, keys), before)
    engine.update_weights(model)
    after = generate(engine, model, UNEVEN, keys)
    _assert_equal(after, generate(NativeEngine(), model, UNEVEN, keys))
    assert not torch.equal(before.completion_ids, after.completion_ids)
    assert engine.pushes == pushes + 1  # none where nothing is new


def test_leaves_the_random_states_and_threads_of_this_process_alone(engine: Any) -> None:
    model = build_model("qwen2")
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    generate(engine, model, UNEVEN, make_keys(3, 2))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_a_rollout_that_is_told_to_stop_ends_and_the_next_one_is_whole(slow_engine: Any) -> None:
    model, keys = build_model("qwen2"), make_keys(3, 4)
    slow_engine.update_weights(model)
    asked: list[int] = []
    with pytest.raises(RolloutInterrupted):
        generate(slow_engine, model, UNEVEN, keys, should_stop=lambda: asked.append(1) or len(asked) > 3)
    _assert_equal(generate(slow_engine, model, UNEVEN, keys), generate(NativeEngine(), model, UNEVEN, keys))


def test_an_exception_in_the_middle_of_an_answer_does_not_mix_up_the_next(slow_engine: Any) -> None:
    model, keys = build_model("qwen2"), make_keys(3, 4)

    def interrupt(tokens: int, finished: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(slow_engine, model, UNEVEN, keys, progress=interrupt)
    _assert_equal(generate(slow_engine, model, UNEVEN, keys), generate(NativeEngine(), model, UNEVEN, keys))


def test_a_rollout_whose_process_is_killed_is_drawn_again(slow_engine: Any, caplog: Any) -> None:
    model, keys = build_model("qwen2"), make_keys(3, 4)
    slow_engine.update_weights(model)
    reference = generate(NativeEngine(), model, UNEVEN, keys)
    generate(slow_engine, model, UNEVEN, keys)
    victim = slow_engine.pid

    def kill(tokens: int, finished: int) -> None:
        if slow_engine.pid == victim:
            os.kill(victim, signal.SIGKILL)

    _assert_equal(generate(slow_engine, model, UNEVEN, keys, progress=kill), reference)
    assert gone(victim)
    if slow_engine.pid == victim:  # on a busy machine it had drawn all before: the next rollout finds it dead
        _assert_equal(generate(slow_engine, model, UNEVEN, keys), reference)
    assert slow_engine.pid != victim and "ended by SIGKILL" in caplog.text


def test_a_process_that_dies_twice_in_a_rollout_is_reported_with_its_last_lines(make_engine: Any) -> None:
    engine = make_engine("DyingEngine")
    with pytest.raises(EngineDied, match=r"ended by exit status 134; its last lines:\n(.*\n)*.*std::bad_alloc"):
        generate(engine, build_model("qwen2"), UNEVEN, make_keys(3, 4))
    assert engine.pushes == 2


def test_what_the_worker_refuses_is_one_clear_line(make_engine: Any) -> None:
    with pytest.raises(ValueError, match=r"^there is no kernel for heads of 16$"):
        generate(make_engine("RefusingEngine"), build_model("qwen2"), UNEVEN, make_keys(3, 4))


def test_a_mistake_of_the_worker_comes_with_its_traceback(make_engine: Any) -> None:
    engine = make_engine("FailingEngine")
    with pytest.raises(RuntimeError, match=r"(?s)light_workers.py.*IndexError: list index out of range"):
        generate(engine, build_model("qwen2"), UNEVEN, make_keys(3, 4))
    assert lives(engine.pid)


def test_weights_that_the_process_cannot_read_end_the_push_with_its_own_error(make_engine: Any) -> None:
    engine = make_engine("CutEngine")
    with pytest.raises(RuntimeError, match="Bad file descriptor"):
        generate(engine, build_model("qwen2"), UNEVEN, make_keys(3, 4))
    assert engine.pushes == 0 and engine.pid is None


def test_a_death_is_noticed_while_others_hold_the_pipe_open(make_engine: Any) -> None:
    with pytest.raises(EngineDied, match=r"ended by SIGKILL; its last lines:\n  helper \d+") as death:
        generate(make_engine("SurvivedEngine"), build_model("qwen2"), UNEVEN, make_keys(3, 4))
    helper = int(str(death.value).split()[-1])
    assert lives(helper)
    os.kill(helper, signal.SIGKILL)


@pytest.mark.parametrize("name", ["RefusingEngine", "CutEngine"])
def test_a_push_that_fails_reads_the_weights_that_other_ranks_gather(
    make_engine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []

    def weights(model: Any, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            gathered.append(number)
            yield str(number), torch.zeros(4)

    monkeypatch.setattr("grpo_pl.extras.engines.child.engine_process.BUCKET_BYTES", 16)
    monkeypatch.setattr("grpo_pl.extras.engines.copy_engine.checkpoint_weights", weights)
    monkeypatch.setattr("grpo_pl.extras.engines.copy_engine.is_sharded", lambda model: True)
    with pytest.raises((ValueError, RuntimeError)):
        make_engine(name).prepare(build_model("qwen2"))
    assert gathered == [0, 1, 2, 3, 4]


def _parent(file: Path, way: str) -> int:
    child = EngineProcess("light_workers:Sleeper", {}, {})

    def tell(*_: int) -> None:
        file.write_text(f"{os.getpid()} {child.pid}")

    if way == "draws":
        child.ask("generate", {}, progress=tell)
    tell()
    if way == "rests":
        time.sleep(300)
    if way == "fails":
        raise ValueError
    os._exit(3)


@pytest.mark.parametrize(
    ("way", "number", "group"),
    [
        ("draws", signal.SIGKILL, False),
        ("draws", signal.SIGINT, True),
        ("draws", signal.SIGTERM, False),
        ("rests", signal.SIGKILL, False),
        ("fails", None, False),
        ("exits", None, False),
    ],
)
def test_the_process_does_not_outlive_the_one_that_started_it(
    tmp_path: Path, way: str, number: signal.Signals | None, group: bool
) -> None:
    file, deadline = tmp_path / "pids", time.monotonic() + 120
    with open(os.devnull, "w") as nowhere:
        process = Forked(lambda: _parent(file, way), env=os.environ, output=nowhere.fileno())
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    parent, child = map(int, file.read_text().split())
    if number is not None:
        assert lives(child)
        (os.killpg if group else os.kill)(parent, number)
    process.wait(timeout=120)
    assert gone(child)


def test_a_sharded_policy_is_pushed_before_ranks_draw(make_engine: Any, tmp_path: Path) -> None:
    """Ranks then make different numbers of calls, some none; only all together can push."""
    engine, model, keys = make_engine(), build_model("qwen2"), make_keys(3, 2)
    drawn = generate(NativeEngine(), model, UNEVEN, keys)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert engine.pushes == 0
        for _ in range(2):
            engine.prepare(model)
        assert engine.pushes == 1
        _assert_equal(generate(engine, model, UNEVEN, keys), drawn)
        assert engine.pushes == 1
        engine.update_weights(model)
        engine.prepare(model)
        assert engine.pushes == 2
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [NativeChildEngine, VLLMEngine])
def test_a_copy_computes_in_the_type_in_which_the_policy_does(kind: Any, tmp_path: Path) -> None:
    """And not in that of its weights, which the optimiser may keep in float32."""
    model = build_model("qwen2")

    def types() -> list[str]:
        return [kind(dtype=asked).settings(ModelSpec.of(model))["dtype"] for asked in (None, "float16")]

    assert types() == ["float32", "float16"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert types() == ["bfloat16", "float16"]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        assert model.dtype == torch.float32
        assert types() == ["bfloat16", "float16"]
    finally:
        torch.distributed.destroy_process_group()
    assert kind().settings(ModelSpec.of(build_model("qwen2").bfloat16()))["dtype"] == "bfloat16"


@pytest.mark.parametrize(("family", "architecture"), [("qwen2", "Qwen2ForCausalLM"), ("gpt2", "GPT2LMHeadModel")])
def test_a_specification_names_type_and_architecture(family: str, architecture: str) -> None:
    spec = ModelSpec.of(build_model(family).bfloat16())
    assert spec.dtype == torch.bfloat16
    assert spec.config.architectures == [architecture]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_has_the_adapters_of_the_policy_beside_its_weights(dtype: torch.dtype) -> None:
    """It draws what the native engine draws here, bit for bit, with a change for which bfloat16 has no room in W."""
    model, keys = build_model("qwen2"), make_keys(3, 4)
    add_adapters(model, Lora(rank=4), seed=0)
    bare = generate(NativeEngine(), model, UNEVEN, keys)
    for name, parameter in model.named_parameters():  # not the buffers, whose float32 the copy has as well
        parameter.data = parameter.data.to(dtype)
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.003, generator=torch.Generator().manual_seed(1))
    ours = NativeChildEngine()
    try:
        found = generate(ours, model, UNEVEN, keys)
    finally:
        ours.close()
    _assert_equal(found, generate(NativeEngine(), model, UNEVEN, keys))
    assert not torch.equal(found.sampling_logprobs, bare.sampling_logprobs)


def test_the_architecture_is_that_of_the_model_inside() -> None:
    model = build_model("llama")
    plain = ModelSpec.of(model).config.to_dict()
    add_adapters(model, Lora(rank=4), seed=0)
    assert ModelSpec.of(model).config.to_dict() == plain
    assert plain["architectures"] == ["LlamaForCausalLM"]
    assert model.config.architectures is None  # the policy's own config stays as it is
