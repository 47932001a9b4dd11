"""The supervisor of what a GPU is asked: no part costs another its turn; and the cheap parts, rehearsed on this CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, loaded

gpu_proof = loaded(ROOT / "benchmarks/gpu_proof.py")

WORKER = """
import json, os, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"begins": name}), flush=True)
    if name == "hangs": time.sleep(600)
    if name == "dies": os._exit(7)
    entry = {"failed": "it cannot", "seconds": 0.0} if name in ("fails", "breaks") else {"record": 1, "seconds": 0.0}
    print(json.dumps({**entry, "process": os.getpid(), "unusable": name == "breaks"}), flush=True)
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the supervisor with parts of these names, whose process is `WORKER`; the entries of its record."""
    (tmp_path / "gpu_parts.py").write_text(WORKER)
    monkeypatch.setattr(gpu_proof, "HERE", tmp_path)

    def run(*names: str, alone: tuple[str, ...] = (), arguments: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        parts = [gpu_proof.Part(name, 1.0 if name == "hangs" else 30.0, alone=name in alone) for name in names]
        monkeypatch.setattr(gpu_proof, "PARTS", parts)
        monkeypatch.setattr(sys, "argv", ["gpu_proof.py", str(tmp_path / "records"), *arguments])
        status = gpu_proof.main()
        return status, json.loads((tmp_path / "records/gpu_proof.json").read_text())["parts"]

    return run


def test_a_part_that_fails_hangs_or_dies_costs_no_other_its_turn(call: Any) -> None:
    status, parts = call("first", "fails", "second", "hangs", "dies", "breaks", "third")
    assert status == 1
    assert {name: part.get("record") for name, part in parts.items()} == {
        **dict.fromkeys(("first", "second", "third"), 1),
        **dict.fromkeys(("fails", "hangs", "dies", "breaks")),
    }
    assert parts["hangs"]["failed"] == "stopped at its limit of 1 s"
    assert "status 7" in parts["dies"]["failed"] and parts["fails"]["failed"] == "it cannot"
    assert parts["first"]["process"] == parts["second"]["process"]  # imports once
    assert parts["third"]["process"] != parts["breaks"]["process"]  # in which nothing more runs


def test_a_part_alone_has_a_process_of_its_own(call: Any) -> None:
    status, parts = call("first", "second", "apart", "third", alone=("apart",))
    processes = [part["process"] for part in parts.values()]
    assert status == 0 and processes[0] == processes[1] and len(set(processes)) == 3


def test_a_further_call_goes_on_with_what_has_no_record(call: Any) -> None:
    _, before = call("first", "fails", "second", arguments=("--parts", "first", "fails"))
    assert "second" not in before
    _, after = call("first", "fails", "second")
    assert after["first"] == before["first"] and after["second"]["record"] == 1
    assert list(after) == ["first", "fails", "second"] and after["fails"]["process"] == after["second"]["process"]


def test_the_end_of_the_time_is_no_failure_of_the_part_that_it_meets(call: Any) -> None:
    status, parts = call("first", "hangs", arguments=("--minutes", "0.012"))
    assert status == 1 and "hangs" not in parts


def test_what_cannot_run_here_is_left_out_by_name(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = gpu_proof.Part("graphs", 30.0, gpu="CUDA graphs")
    assert graphs.left_out(rehearse=True) == "needs a GPU: CUDA graphs" and graphs.left_out(rehearse=False) is None
    lacking = gpu_proof.Part("peers", 30.0, needs=("json", "no_such_module"))
    assert lacking.left_out(rehearse=False) == "needs no_such_module, which is not installed"


def test_each_part_is_a_function_and_all_fit_into_two_calls() -> None:
    text = (ROOT / "benchmarks/gpu_parts.py").read_text()
    assert all(f"\ndef {part.name}(here: Here)" in text for part in gpu_proof.PARTS)
    assert len({part.name for part in gpu_proof.PARTS}) == len(gpu_proof.PARTS)
    assert sum(part.seconds for part in gpu_proof.PARTS) < 2 * 9.5 * 60


def test_the_cheap_parts_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["machine", "decode", "gap", "memory", "lora", "slow_paths"]
    monkeypatch.setattr(sys, "argv", ["gpu_proof.py", str(tmp_path), "--rehearse", "--parts", *parts])
    assert gpu_proof.main() == 0, (tmp_path / "gpu_proof.log").read_text()[-3000:]
    found = json.loads((tmp_path / "gpu_proof.json").read_text())
    assert found["rehearsal"] is True
    assert found["parts"].pop("memory")["left_out"] == "needs a GPU: memory that the allocator reserves"
    records = {name: part["record"] for name, part in found["parts"].items()}
    assert records["machine"]["matmul_tflop_s"] > 0
    assert {entry["lengths"] for entry in records["decode"]} == {"fixed", "scripted"}
    assert records["gap"]["float32"]["largest"] < 1e-4 < records["gap"]["bfloat16"]["largest"]  # rounding shows
    assert set(records["slow_paths"]) == {"plain", "top_p", "top_k"}
