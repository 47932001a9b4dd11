"""What ``serve.litserve_adapter`` uses of LitServe's inside: a version that moved it fails here, by name."""

import gc
import inspect
import multiprocessing.util
import socket
import time
from typing import Any

import pytest
from litserve.loops import LitLoop, inference_worker

from serve import litserve_adapter
from serve.litserve_adapter import WorkerProcess, launch
from serve.score_worker import ScoreItems, ScoreWorker
from serve.worker_channel import Answer, Cancel, Failure, Frames, FrontChannel, WorkerTask, packed
from tests.forked import with_forked_workers

MATH = {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True}}
START_S = 150.0


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of ``spawn`` are forked, which is quick; `server` starts them as users do."""
    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", multiprocessing.util.spawnv_passfds)
    with_forked_workers(lambda: 0)


def _answer(end: socket.socket) -> Any:
    frames, answers = Frames(), []
    while not answers:
        data = end.recv(1 << 16)
        assert data, "the worker closed the line"
        answers += frames.feed(data)
    return answers[0]


def _launched(specs: list[dict[str, Any]]) -> tuple[Any, socket.socket]:
    worker = WorkerProcess("score", ScoreWorker(specs))
    process, end = launch(worker)
    began = time.monotonic()
    while not worker.ready:
        assert time.monotonic() - began < START_S
        time.sleep(0.05)
    return process, end


def test_the_hooks_are_where_they_were() -> None:
    taken = ["lit_api", "device", "worker_id", "request_queue", "transport", "workers_setup_status", "callback_runner"]
    assert list(inspect.signature(LitLoop.run).parameters) == ["self", *taken]
    assert list(inspect.signature(inference_worker).parameters) == [*taken, "restart_workers"]


def test_the_garbage_collector_leaves_out_what_was_there_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(WorkerTask):
        def environment(self) -> dict[str, str]:
            return {}

        def prepare(self) -> None:
            pass

        def work(self, front: FrontChannel) -> None:
            pass

    monkeypatch.setattr(litserve_adapter, "end_with_parent", lambda: None)  # this process has none that it could watch

    made = [[] for _ in range(1000)]
    before = gc.get_freeze_count()
    WorkerProcess("idle", Idle()).setup("cpu")
    assert gc.get_freeze_count() >= before + len(made)
    gc.unfreeze()


def test_a_launched_worker_answers_and_leaves_when_its_line_is_closed() -> None:
    process, end = _launched([MATH])
    job = ScoreItems([r"\boxed{5}", r"\boxed{6}"], ["5", "5"], {})
    end.sendall(packed((7, job))[:20])  # messages may come in pieces
    time.sleep(0.1)
    end.sendall(packed((7, job))[20:] + packed((8, Cancel())))
    answer = _answer(end)
    assert isinstance(answer, Answer)
    assert answer.uid == 7
    assert [item["correct"] for item in answer.data] == [True, False]
    end.sendall(packed((9, job._replace(answers=["5"]))))
    assert isinstance(_answer(end), Failure)
    end.close()
    process.join(30)
    assert process.exitcode == 0


def test_a_worker_that_cannot_be_set_up_says_so_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    worker = WorkerProcess("score", ScoreWorker([{"class_path": "grpo_pl.rewards.NoSuchReward"}]))
    process, end = launch(worker)
    process.join(START_S)
    end.close()
    assert "NoSuchReward" in worker.complaint and "\n" not in worker.complaint
    assert "Traceback" not in "".join(capfd.readouterr())  # the front process tells
