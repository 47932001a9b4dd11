"""What the worker processes have in common: how they take requests, stop, and end when their parent is gone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import threading
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from litserve import LitAPI
from litserve.callbacks import CallbackRunner
from litserve.loops import LitLoop
from litserve.transport.base import MessageTransport
from litserve.transport.process_transport import MPQueueTransport
from litserve.utils import LitAPIStatus, LoopResponseType

log = logging.getLogger(__name__)

_IDLE_S = 0.5  # how long an idle worker waits for a request at a time


class Refusal(NamedTuple):
    """What a worker answers to a request that the client has to mend."""

    message: str
    param: str | None = "items"
    code: str = "missing_column"


class Stop(NamedTuple):
    """The parent's word that nobody waits for anything any more."""


class Mailbox:
    """A worker's end of LitServe's queues: requests in, answers out."""

    def __init__(self, requests: Any, transport: MPQueueTransport) -> None:
        self._requests, self._transport = requests, transport
        self._consumers: dict[str, int] = {}

    def take(self, *, wait_for_one: bool) -> tuple[str, Any] | None:
        """The next (uid, payload).

        Raises:
            SystemExit: told to stop.
        """
        if not wait_for_one and self._requests.empty():
            return None
        try:
            consumer, uid, _, payload = self._requests.get(timeout=_IDLE_S if wait_for_one else 0.0)
        except queue.Empty:
            return None
        if isinstance(payload, Stop):
            raise SystemExit(0)
        self._consumers[uid] = consumer
        return uid, payload

    def answer(self, uid: str, data: Any, *, last: bool) -> None:
        self._send(uid, data, LitAPIStatus.FINISH_STREAMING if last else LitAPIStatus.OK, last)

    def fail(self, uid: str, message: str | Refusal) -> None:
        self._send(uid, message, LitAPIStatus.ERROR, True)

    def forget(self, uid: str) -> None:
        self._consumers.pop(uid, None)

    def flush(self) -> None:
        """Waits until every answer has left this process."""
        for answers in self._transport._queues:
            answers.close()
            answers.join_thread()

    def _send(self, uid: str, data: Any, status: str, last: bool) -> None:
        consumer = self._consumers.pop(uid) if last else self._consumers[uid]
        self._transport.send((uid, (data, status, LoopResponseType.STREAMING, None)), consumer_id=consumer)


class WorkerLoop(LitLoop):
    """A LitServe loop that hands the whole of its process to ``lit_api.work(mailbox)``, which never returns."""

    def run(
        self,
        lit_api: LitAPI,
        device: str,
        worker_id: int,
        request_queue: Any,
        transport: MessageTransport,
        workers_setup_status: Any,
        callback_runner: CallbackRunner,
    ) -> None:
        assert isinstance(transport, MPQueueTransport)
        mailbox = Mailbox(request_queue, transport)
        try:
            lit_api.work(mailbox)
        except SystemExit:
            mailbox.flush()
            os._exit(0)  # taking an interpreter with torch apart takes seconds and nothing depends on it


def end_with_parent() -> None:
    """Ends this process when the one that started it is gone, however that ended, and not by signals.

    SIGTERM, Ctrl-C and the end of a terminal reach the whole process group: the parent, which knows what is in flight,
    decides. Processes that this one starts inherit that.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
