"""Servers and runs that end: nothing hangs, nothing is lost, nobody is mixed up, and nothing is left running."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from grpo_pl.rollout.engine import EngineDied
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.types import GenerateRequest, Rollout, SamplingParams


def _draw(engine: Any, model: Any, prompts: Any, keys: Any, *, length: int = 30, **options: Any) -> Rollout:
    return engine.generate(
        model,
        GenerateRequest(
            prompt_ids=prompts,
            keys=keys,
            sampling=SamplingParams(max_completion_length=length),
            eos_token_ids=[6],
            pad_token_id=0,
        ),
        **options,
    )


def _assert_equal(ours: Rollout, reference: Rollout) -> None:
    assert torch.equal(ours.completion_ids, reference.completion_ids)
    assert torch.equal(ours.sampling_logprobs, reference.sampling_logprobs)


def _wait(done: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert done()


@pytest.fixture(scope="module")
def slow(config: Any) -> str:
    return config("child_engines.NativeInChild", pause_s=0.1)


@pytest.fixture(scope="module")
def server(serve: Any, slow: str) -> Any:
    return serve(slow, in_fork=False)


def test_a_worker_that_is_killed_costs_no_sample(
    server: Any, connect: Any, build_model: Any, make_keys: Any, prompts: Any, caplog: Any
) -> None:
    engine, model, keys = connect(server.url), build_model("qwen2"), make_keys(3, 2)
    reference = _draw(NativeEngine(), model, prompts, keys)
    _assert_equal(_draw(engine, model, prompts, keys), reference)
    (worker,) = server.workers()
    victims = [worker]

    def kill(tokens: int, finished: int) -> None:
        while tokens and victims:
            victims.pop().kill()

    _assert_equal(_draw(engine, model, prompts, keys, progress=kill), reference)
    assert "ended by SIGKILL" in caplog.text and engine.pushes == 2
    assert [process.pid for process in server.workers()] != [worker.pid]


def test_a_second_run_is_refused_until_the_first_is_gone(
    server: Any, connect: Any, build_model: Any, make_keys: Any, prompts: Any
) -> None:
    model, keys = build_model("qwen2"), make_keys(3, 2)
    first, second = connect(server.url), connect(server.url)
    reference = _draw(first, model, prompts, keys, length=2)
    with pytest.raises(ValueError, match=r"answers 409: another run has the engine"):
        _draw(second, build_model("qwen2", seed=1), prompts, keys, length=2)
    _assert_equal(_draw(first, model, prompts, keys, length=2), reference)
    assert first.pushes == 1
    first.close()
    other = build_model("qwen2", seed=1)
    _assert_equal(_draw(second, other, prompts, keys, length=2), _draw(NativeEngine(), other, prompts, keys, length=2))


CLIENT = """
import sys, torch
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM
from grpo_pl.rollout.remote import RemoteEngine
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams

shape = dict(vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
model = Qwen2ForCausalLM(Qwen2Config(**shape, num_key_value_heads=2, max_position_embeddings=4096))
key = SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=0, sample=0)
sampling = SamplingParams(max_completion_length=4000)
RemoteEngine(urls=[sys.argv[1]], token_file=sys.argv[2]).generate(
    model, GenerateRequest(prompt_ids=[[1]], keys=[[key]], sampling=sampling, eos_token_ids=[], pad_token_id=0),
    progress=lambda tokens, finished: tokens and Path(sys.argv[3]).write_text(str(tokens)),
)
"""


@pytest.mark.slow
def test_the_place_of_a_run_that_was_killed_is_free_after_its_lease(
    server: Any, connect: Any, build_model: Any, make_keys: Any, prompts: Any, token_file: str, tmp_path: Path
) -> None:
    drawing = tmp_path / "drawing"
    client = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLIENT), server.url, token_file, str(drawing)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    _wait(drawing.exists, 200)  # of 400 s
    client.kill()
    client.wait()
    model, keys = build_model("qwen2"), make_keys(3, 2)
    ours = _draw(connect(server.url), model, prompts, keys, length=2)  # waits for the end of the lease
    _assert_equal(ours, _draw(NativeEngine(), model, prompts, keys, length=2))
    assert any("has not been heard from for 12 s" in line for line in server.lines)


def test_a_server_that_ends_in_the_middle_and_comes_back_costs_no_sample(
    serve: Any, slow: str, connect: Any, build_model: Any, make_keys: Any, prompts: Any, caplog: Any
) -> None:
    first = serve(slow)
    engine, model, keys = connect(first.url, reconnect_s=120.0), build_model("qwen2"), make_keys(3, 2)
    reference = _draw(NativeEngine(), model, prompts, keys)
    _assert_equal(_draw(engine, model, prompts, keys), reference)
    drawn: list[Rollout] = []
    run = threading.Thread(target=lambda: drawn.append(_draw(engine, model, prompts, keys)))
    run.start()
    time.sleep(0.5)
    (worker,) = first.workers()
    first.stop(signal.SIGKILL)
    again = serve(slow, port=first.port)
    run.join(timeout=120)
    _assert_equal(drawn[0], reference)
    assert "It gets the weights again, and the rollout is drawn again." in caplog.text and engine.pushes == 2
    _wait(lambda: not psutil.pid_exists(worker.pid))

    engine.reconnect_s = 0.5
    _ends_in_the_middle(again, signal.SIGTERM, engine, model, prompts, keys)


def _ends_in_the_middle(server: Any, number: signal.Signals, engine: Any, model: Any, prompts: Any, keys: Any) -> None:
    failed: list[str] = []

    def run() -> None:
        try:
            _draw(engine, model, prompts, keys, length=100)
        except EngineDied as error:
            failed.append(str(error))

    drawing = threading.Thread(target=run)
    drawing.start()
    time.sleep(0.5)
    (worker,) = server.workers()
    assert server.stop(number) == 0
    assert not psutil.pid_exists(worker.pid)
    drawing.join(timeout=60)
    assert len(failed) == 1
    # a second try may still meet the server on its way out, or its worker
    ends = r"was told to stop\.$|ended by SIG\w+; it printed nothing$|refused.* It was tried for 0\.5 s\.$"
    assert re.search(ends, failed[0])


def test_ctrl_c_ends_the_server_and_its_worker_in_the_middle_of_a_rollout(
    server: Any, connect: Any, build_model: Any, make_keys: Any, prompts: Any
) -> None:
    engine, model, keys = connect(server.url, reconnect_s=0.5), build_model("qwen2"), make_keys(3, 2)
    _draw(engine, model, prompts, keys, length=1)
    _ends_in_the_middle(server, signal.SIGINT, engine, model, prompts, keys)
