"""Makes all records of one GPU, part after part; what is done is kept, and a further call goes on with what is missing.

    python benchmarks/gpu.py FOLDER --minutes 9

FOLDER/gpu.json has the record or the failure of every part, and is written after each; FOLDER/gpu.log has what they
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_MINUTES = 9.0
"""Of any part."""


@dataclass(frozen=True)
class Part:
    """One record: a benchmark and its arguments; ``tiny`` ones replace them where there is no GPU."""

    name: str
    script: str
    arguments: str
    tiny: str
    minutes: float
    """That it may take on a GPU like an H100, with room."""

    def command(self, output: Path, *, rehearse: bool) -> list[str]:
        arguments = (self.tiny if rehearse else self.arguments).split()
        device = "cpu" if rehearse else "cuda"
        if self.script == "pytest":
            return [sys.executable, "-m", "pytest", *arguments, f"--device={device}", f"--junit-xml={output}"]
        script = str(HERE / self.script)
        return [sys.executable, script, *arguments, f"--device={device}", f"--output={output}"]


PYTEST = (
    "-m gpu -n 3 -q -p no:cacheprovider -o junit_family=xunit1 tests/test_on_gpu.py tests/extras/plan/test_command.py"
)
TINY = "--cells L2-h64-V512 --rows 16 --tokens 24"
TINY_STEP = f"{TINY} --steps 1"
RUN = "--parts update --ways mixed"


def rollout_part(rows: int, minutes: float) -> Part:
    arguments, tiny = (
        f"--rows {rows} --lengths fixed --repetitions 2",
        f"--cells L2-h64-V512 --rows {rows // 4} --tokens 8",
    )
    return Part(f"rollout-{rows}", "rollout.py", arguments, f"{tiny} --repetitions 1", minutes)


def trl_part(peer: str, law: str, minutes: float) -> Part:
    arguments = f"--parts cells --peers {peer} --lengths {law}"
    return Part(f"step-{peer}-{law}", "step.py", f"{arguments} --steps 3", f"{arguments} {TINY_STEP}", minutes)


def update_part(name: str, ways: str, minutes: float) -> Part:
    arguments = f"--parts update --ways {ways}"
    tiny = f"{arguments} {TINY_STEP} --micro-batch 512"
    return Part(f"update-{name}", "step.py", f"{arguments} --steps 3 --micro-batch 16384", tiny, minutes)


def memory_part(dtype: str) -> Part:
    arguments = f"--hidden 896 --dtype {dtype} --materialised-limit-gib 16"
    return Part(f"memory-{dtype}", "memory.py", arguments, f"--hidden 32 --dtype {dtype} --grid 64x500 128x500", 4.0)


PARTS = [
    trl_part("default", "fixed", 3.5),
    Part("tests", "pytest", PYTEST, PYTEST, 3.0),
    rollout_part(256, 2.0),
    update_part("plain", "bf16 mixed", 1.5),
    Part("alone", "rollout.py", "--rows 32 256 1024 --alone --repetitions 3", f"{TINY} --alone --repetitions 1", 1.0),
    Part("rollout-profile", "rollout.py", "--rows 256 --profile", f"{TINY} --profile", 1.0),
    trl_part("default", "scripted", 3.5),
    trl_part("tuned", "fixed", 8.5),
    rollout_part(32, 2.0),
    rollout_part(1024, 3.0),
    memory_part("float32"),
    memory_part("bfloat16"),
    update_part("fsdp", "fsdp", 1.5),
    update_part("deterministic", "deterministic", 2.0),
    Part("run", "step.py", RUN + " --micro-batch 0 --steps 20", f"{RUN} {TINY} --micro-batch 0 --steps 2", 4.0),
    trl_part("tuned", "scripted", 8.5),
]
"""Those first that say most."""


def run(part: Part, folder: Path, seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """The entry of a part: its record, or why there is none."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, (folder / "gpu.log").open("a") as log:
        output = Path(temporary) / "record"
        command = part.command(output, rehearse=rehearse)
        log.write(f"\n=== {part.name}: {' '.join(command[1:])}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command, cwd=HERE.parent, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment()
        )
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        entry: dict[str, Any] = {"command": " ".join(map(str, command[1:-1]))}
        entry |= {"date": time.strftime("%Y-%m-%d"), "seconds": round(time.monotonic() - began, 1)}
        tests = part.script == "pytest"
        if status == 0 or (tests and status == 1):  # a test that failed is a finding, too
            record = read_tests(output) if tests else json.loads(output.read_text())
            return {**entry, "record": record}
        printed = (folder / "gpu.log").read_text()[start:].splitlines()
        why = f"stopped after {seconds:.0f} s" if status is None else f"exit status {status}"
        return {**entry, "failed": why, "printed": printed[-30:]}


def _end(process: subprocess.Popen[Any]) -> None:
    """Ends what is left of a part: it and the processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def read_tests(file: Path) -> dict[str, Any]:
    """Test -> how it ended, its seconds, and what it recorded."""
    found: dict[str, Any] = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        ended = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        values = {entry.get("name", ""): entry.get("value") for entry in case.iter("property")}
        message = {} if ended == "passed" else {"message": case.find(ended).get("message")}  # type: ignore[union-attr]
        found[str(case.get("name"))] = {"ended": ended, "seconds": float(case.get("time", 0)), **values, **message}
    return found


def read_done(folder: Path) -> dict[str, Any]:
    """Part -> its record or failure, of all calls with this folder."""
    file = folder / "gpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def waiting_parts(done: Mapping[str, Any], only: Sequence[str]) -> list[Part]:
    """What has no record yet; what failed before comes last."""
    missing = [p for p in PARTS if "record" not in done.get(p.name, {}) and (not only or p.name in only)]
    return sorted(missing, key=lambda part: part.name in done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where gpu.json and gpu.log are; made if needed")
    parser.add_argument("--minutes", type=float, help="begin no part that may take longer than what is left of them")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], default=[], metavar="PART")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU, to see that every part runs")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * (arguments.minutes or 1e6)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file, done = arguments.folder / "gpu.json", read_done(arguments.folder)
    for part in waiting_parts(done, arguments.only):
        left = end - time.monotonic()
        if left < 60 * part.minutes:
            print(f"{part.name}: left for the next call, it may take {part.minutes:g} minutes", flush=True)
            continue
        done[part.name] = run(part, arguments.folder, min(left, 60 * LIMIT_MINUTES), rehearse=arguments.rehearse)
        entry = done[part.name]
        written = file.with_suffix(".partial")
        written.write_text(json.dumps(done, indent=1) + "\n")
        written.replace(file)
        said = "done" if "record" in entry else "\n  ".join([entry["failed"], *entry["printed"][-5:]])
        print(f"{part.name}: {said} ({entry['seconds']:.0f} s)", flush=True)
    missing = [part.name for part in waiting_parts(done, [])]
    print(f"missing: {', '.join(missing)}" if missing else f"all {len(PARTS)} parts are in {file}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
