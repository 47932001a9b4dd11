"""``WorkerAPI`` and ``WorkerLoop``: LitServe's LitAPI and LitLoop for workers that answer many requests at once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from abc import abstractmethod
from collections import defaultdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from litserve import LitAPI
from litserve.loops import LitLoop
from litserve.utils import LitAPIStatus, LoopResponseType

from grpo_pl.files.checkpoints import CheckpointError, broken, facts_of
from grpo_pl.policy.trained import ServedModel, find_model, without_link
from grpo_pl.processes import resource_limits
from serve.messages import drained

MISTAKES = (ValueError, OSError, ImportError, CheckpointError)
"""What a user can put right, and is told in one line."""
_LONGEST = 2000  # bytes of a complaint


class Origin(NamedTuple):
    """Where a request comes from: the HTTP process, and the number that it gave the request."""

    consumer: int
    uid: int


class Mailbox:
    """A worker's end of LitServe's queues: two threads wait for these, and what gathers meanwhile is one message."""

    def __init__(self, name: str, loop: LitLoop, request_queue: Any, transport: Any) -> None:
        self._name, self._loop, self._in, self._out = name, loop, request_queue, transport
        self._received: SimpleQueue[tuple[Origin, Any]] = SimpleQueue()
        self._told: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        for work in (self._receive, self._send):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def _receive(self) -> None:
        while True:
            try:
                consumer, _, _, payloads = self._in.get()
            except (EOFError, OSError):  # the process that holds LitServe's queues has ended
                os._exit(0)
            for uid, payload in payloads:
                self._received.put((Origin(consumer, uid), payload))

    def _send(self) -> None:
        while True:
            told: defaultdict[int, list[Any]] = defaultdict(list)
            for consumer, message in drained(self._told):
                told[consumer].append(message)
            for consumer, messages in told.items():
                kinds = LitAPIStatus.OK, LoopResponseType.STREAMING
                self._loop.put_response(self._out, consumer, self._name, messages, *kinds)

    def wake(self, message: Any) -> None:
        """Hands the worker's loop a message of one of its other threads."""
        self._received.put((Origin(0, -1), message))

    def take(self, *, wait_for_one: bool) -> list[tuple[Origin, Any]]:
        """What has arrived; ``wait_for_one`` waits if there is nothing."""
        return drained(self._received, wait=wait_for_one)

    def tell(self, origin: Origin, message: Any) -> None:
        """Sends a message to the HTTP process of a request, from any thread."""
        self._told.put((origin.consumer, message))


class WorkerLoop(LitLoop):
    """Hands the whole process to the LitAPI, in place of LitServe's loops, which answer one request after the other."""

    def run(self, lit_api: Any, device: str, worker_id: int, request_queue: Any, transport: Any, *_: Any) -> None:
        lit_api.work(Mailbox(lit_api.api_path, self, request_queue, transport))


class WorkerAPI(LitAPI):
    """A LitAPI over a trained model whose one worker answers many requests at once."""

    def __init__(self, model: str | Path | ServedModel, *, trust_rewards: bool) -> None:
        super().__init__(loop=WorkerLoop())
        self.model = served_model(model, trust_rewards=trust_rewards)
        self.complaint: Any = None
        """Shared text in which ``PolicyServer`` reads why a worker did not start."""

    def environment(self) -> dict[str, str]:
        """The environment variables of a worker that ``PolicyServer`` starts."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self, device: str) -> None:
        """Loads what the work needs, in the worker. Raises one of ``MISTAKES`` where a user can put that right."""

    @abstractmethod
    def work(self, mailbox: Mailbox) -> None:
        """Answers requests, in the worker; never returns."""

    def setup(self, device: str) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            resource_limits.end_with_parent(parent.pid)  # LitServe leaves workers behind when its own process is killed
            for number in (signal.SIGINT, signal.SIGHUP):  # reach all processes, and the first one ends this
                signal.signal(number, signal.SIG_IGN)
        try:
            if os.environ.get("LITSERVE_WORKER_ID", "0") != "0" or not isinstance(device, str):
                raise ValueError(f"{type(self).__name__} has one worker on one device: start a server for each device.")
            self.prepare(device)
        except MISTAKES as error:  # LitServe would print a traceback
            if self.complaint is None:
                raise
            line = " ".join(str(error).split()) or type(error).__name__
            self.complaint.value = line.encode()[: _LONGEST - 1]
            sys.stderr.flush()
            os._exit(1)
        gc.collect()
        gc.freeze()  # looking at all that imports have made would interrupt the work for a tenth of a second and more

    def share_complaint(self) -> None:
        """Makes ``complaint``, before the worker is started."""
        self.complaint = multiprocessing.get_context("spawn").Array("c", _LONGEST, lock=False)

    def health(self) -> bool:
        """False once the worker is lost, in the HTTP process."""
        return self.spec.is_alive  # type: ignore[union-attr,no-any-return]


def served_model(model: str | Path | ServedModel, *, trust_rewards: bool) -> ServedModel:
    """The model at a path; a ``ValueError`` if there is none, or its checkpoint has changed since it was written."""
    if isinstance(model, ServedModel):
        return model
    found = without_link(find_model(Path(model), trust_rewards=trust_rewards))
    sealed = found.checkpoint is not None and facts_of(found.checkpoint) is not None
    if sealed and (reason := broken(found.checkpoint)) is not None:  # type: ignore[arg-type]
        raise ValueError(f"{found.checkpoint} cannot be served: {reason}.")
    return found
