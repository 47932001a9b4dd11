"""Whole runs on vLLM: the native engine's, from any start and on any number of processes, and nothing left behind."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.extras.engines.vllm.conftest import MARKS

pytestmark = MARKS
ReadMetrics = Callable[..., list[dict[str, str]]]
ENGINE = {"class_path": "grpo_pl.extras.engines.vllm.VLLMEngine", "init_args": {"kv_cache_gib": 0.0625}}
STRATEGIES = Path(__file__).parents[4] / "configs/strategy"
SHORT: dict[str, Any] = {
    "model__policy__from_scratch__hidden_size": 64,  # vLLM has kernels for heads of 32, not of 16
    "data__steps": 3,
    "data__val_prompts": 2,
    "trainer__val_check_interval": 3,
}


def _fit(command_line: Any, name: str, *options: str, **changes: Any) -> Any:
    command_line.done("fit", "--config", command_line.config(name, **SHORT, **changes), *options)
    return command_line.runs / name


def _without_proof(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if key != "sampling/sync_error"} for row in rows]


def _errors(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["sampling/sync_error"]) for row in csv.DictReader(file) if row["reward"]]


def _assert_alike(ours: list[dict[str, str]], reference: list[dict[str, str]]) -> None:
    """Equal samples, and weights that rounding alone tells apart."""
    assert [row.keys() for row in ours] == [row.keys() for row in reference]
    for one, other in zip(ours, reference, strict=True):
        for key, value in one.items():
            assert float(value) == pytest.approx(float(other[key]), rel=1e-3, abs=1e-5), key


@pytest.fixture(scope="module")
def native(command_line: Any) -> Path:
    return _fit(command_line, "native")


@pytest.fixture(scope="module")
def on_vllm(command_line: Any) -> Path:
    return _fit(command_line, "vllm", model__engine=ENGINE)


def test_a_run_on_vllm_is_the_native_run(native: Path, on_vllm: Path, read_metrics: ReadMetrics) -> None:
    _assert_alike(_without_proof(read_metrics(on_vllm / "metrics.csv")), read_metrics(native / "metrics.csv"))
    errors = _errors(on_vllm)
    assert len(errors) == 3 and max(errors) < 1e-5


@pytest.mark.slow
def test_a_resumed_run_pushes_the_weights_of_its_checkpoint(
    command_line: Any, on_vllm: Path, read_metrics: ReadMetrics
) -> None:
    checkpoint = on_vllm / "checkpoints/rollout-000002.ckpt"
    resumed = command_line("fit", f"--config={on_vllm / 'config.yaml'}", f"--ckpt_path={checkpoint}", "--name=resumed")
    assert resumed.status == 0, resumed.err
    whole, again = (
        [row for row in read_metrics(run / "metrics.csv") if row["step"] == "3"]
        for run in (on_vllm, command_line.runs / "resumed")
    )
    assert again == whole


@pytest.mark.slow
def test_rollouts_ahead_are_the_native_ones_and_go_on_from_a_checkpoint(
    command_line: Any, read_metrics: ReadMetrics
) -> None:
    native = _fit(command_line, "native_ahead", data__staleness=1)
    ours = _fit(command_line, "vllm_ahead", data__staleness=1, model__engine=ENGINE)
    rows = [_without_proof(read_metrics(run / "metrics.csv")) for run in (ours, native)]
    differences = [row.pop("sampling/sampling_logp_difference/mean", "0") for run in rows for row in run]
    assert max(map(float, differences)) > 1e-3  # between two updates, so rounding is a larger share of it
    _assert_alike(*rows)
    assert [row["sampling/staleness"] for row in rows[0] if "reward" in row] == ["0.0", "1.0", "1.0"]
    assert max(_errors(ours)) < 1e-5
    checkpoint = ours / "checkpoints/rollout-000001.ckpt"
    command_line.done("fit", f"--config={ours / 'config.yaml'}", f"--ckpt_path={checkpoint}", "--name=go_on")
    whole, again = (
        [row for row in read_metrics(run / "metrics.csv") if row["step"] in ("2", "3")]
        for run in (ours, command_line.runs / "go_on")
    )
    assert again == whole


@pytest.mark.slow
def test_adapters_train_on_vllm_as_they_do_natively(command_line: Any, read_metrics: ReadMetrics) -> None:
    runs = [
        _fit(command_line, name, **changes, model__policy__lora={"rank": 4})
        for name, changes in (("native_lora", {}), ("vllm_lora", {"model__engine": ENGINE}))
    ]
    native, ours = (read_metrics(run / "metrics.csv") for run in runs)
    _assert_alike(_without_proof(ours), native)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_with_an_engine_each_make_the_run_of_one(
    command_line: Any, native: Path, read_metrics: ReadMetrics, tmp_path: Path, strategy: str
) -> None:
    config = command_line.config("two", **SHORT, model__engine=ENGINE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "grpo_pl"]
    done = subprocess.run(
        [*torchrun, "fit", f"--config={config}", f"--config={STRATEGIES / strategy}.yaml", f"--runs_dir={tmp_path}"],
        env={**os.environ, "GRPO_PL_CACHE": str(command_line.cache)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _assert_alike(_without_proof(read_metrics(tmp_path / "two/metrics.csv")), read_metrics(native / "metrics.csv"))


def _children(pid: int) -> list[int]:
    """Engines' processes below ``pid``."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == pid and "grpo_pl.extras.engines.child.main" in command:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=str)
def test_a_run_that_ends_by_a_signal_takes_its_engine_along(
    command_line: Any, tmp_path: Path, number: signal.Signals
) -> None:
    config = command_line.config("long", **{**SHORT, "data__steps": 2000}, model__engine=ENGINE)
    run = subprocess.Popen(
        [sys.executable, "-m", "grpo_pl", "fit", f"--config={config}", f"--runs_dir={tmp_path}"],
        env={**os.environ, "GRPO_PL_CACHE": str(command_line.cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "long/metrics.csv"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3) and time.monotonic() < deadline:
        time.sleep(0.2)
    (engine,) = _children(run.pid)
    run.send_signal(number)
    assert run.wait(timeout=60) == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    deadline = time.monotonic() + 10
    while Path(f"/proc/{engine}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_episodes_on_vllm_are_those_of_the_native_engine(command_line: Any, read_metrics: ReadMetrics) -> None:
    config = Path(__file__).parents[3] / "plugins/down.yaml"
    short = ["--data.steps=2", "--model.policy.from_scratch.hidden_size=64"]
    for name, engine in (("episodes", []), ("episodes_vllm", [f"--model.engine={json.dumps(ENGINE)}"])):
        command_line.done("fit", f"--config={config}", f"--name={name}", *short, *engine)
    native, ours = (read_metrics(command_line.runs / f"{n}/metrics.csv") for n in ("episodes", "episodes_vllm"))
    _assert_alike(_without_proof(ours), native)
