"""Whole runs on a cluster: those of the native engine on any number of processes, whatever ends them."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from grpo_pl.files.checkpoints import newest_whole, rollouts_of
from tests.extras.engines.ray.conftest import MARKS, PLUGINS, ROOT, wait
from tests.faults.conftest import differences

pytestmark = MARKS
ReadMetrics = Callable[..., list[dict[str, str]]]
Fit = Callable[..., Path]
SHORT: dict[str, Any] = {"data__steps": 3, "data__val_prompts": 2, "trainer__val_check_interval": 3}
GONE_WITHIN_S = 10.0


def _engine(cluster: Any, *, actors: int = 1, cpus: float = 2.0, pause_s: float = 0.0) -> dict[str, Any]:
    worker = {"class_path": "child_engines.NativeInChild", "init_args": {"threads": 1, "pause_s": pause_s}}
    settings = {"engine": worker, "actors": actors, "cpus": cpus, "address": cluster.address}
    return {"class_path": "grpo_pl.extras.engines.ray.RayEngine", "init_args": settings}


@pytest.fixture(scope="module")
def fit(cluster: Any, command_line: Any) -> Fit:
    """``fit("name", "--option", runs=folder, data__steps=2)``: the folder of a run in this process."""

    def run(name: str, *options: str, runs: Path | None = None, **changes: Any) -> Path:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        config = command_line.config(name, **{**SHORT, **changes})
        outcome = command_line("fit", "--config", config, *options, runs=runs)
        torch.set_num_threads(before)
        assert outcome.status == 0, outcome.err
        return Path((runs or command_line.runs) / name)

    return run


@pytest.fixture(scope="module")
def native(fit: Fit) -> Path:
    return fit("native")


def _digest(run: Path) -> str:
    weights = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _assert_alike(ours: list[dict[str, str]], reference: list[dict[str, str]]) -> None:
    """Equal samples, and weights that rounding alone tells apart."""
    errors = [float(row.pop("sampling/sync_error")) for row in ours if "sampling/sync_error" in row]
    assert errors and max(errors) < 1e-5
    assert [row.keys() for row in ours] == [row.keys() for row in reference]
    for one, other in zip(ours, reference, strict=True):
        for key, value in other.items():
            assert float(one[key]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), key


def test_a_run_over_two_nodes_ends_with_the_weights_of_the_native_run(
    cluster: Any, fit: Fit, native: Path, read_metrics: ReadMetrics
) -> None:
    ours = fit("two_nodes", model__engine=_engine(cluster, actors=2))
    _assert_alike(read_metrics(ours / "metrics.csv"), read_metrics(native / "metrics.csv"))
    assert _digest(ours) == _digest(native)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_make_the_run_of_one(
    cluster: Any, command_line: Any, native: Path, read_metrics: ReadMetrics, tmp_path: Path, strategy: str
) -> None:
    config = command_line.config("two", **SHORT, model__engine=_engine(cluster))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "grpo_pl"]
    overlay = ROOT / f"configs/strategy/{strategy}.yaml"
    done = subprocess.run(
        [*torchrun, "fit", f"--config={config}", f"--config={overlay}", f"--runs_dir={tmp_path}"],
        env={**cluster.environment, "GRPO_PL_CACHE": str(command_line.cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _assert_alike(read_metrics(tmp_path / "two/metrics.csv"), read_metrics(native / "metrics.csv"))


def test_parts_of_long_completions_and_adapters_are_those_of_the_native_run(
    cluster: Any, fit: Fit, read_metrics: ReadMetrics
) -> None:
    changes = {"model__partial_rollouts": {"part_length": 4, "steps_in_flight": 2}, "model__policy__lora": {"rank": 4}}
    ours = fit("parts", **changes, model__engine=_engine(cluster, actors=2))
    _assert_alike(read_metrics(ours / "metrics.csv"), read_metrics(fit("native_parts", **changes) / "metrics.csv"))


def test_episodes_are_played_in_the_actors(cluster: Any, command_line: Any, read_metrics: ReadMetrics) -> None:
    config = PLUGINS / "down.yaml"
    for name, engine in (("episodes", None), ("episodes_ray", _engine(cluster, actors=2))):
        given = [] if engine is None else [f"--model.engine={json.dumps(engine)}"]
        command_line.done("fit", f"--config={config}", f"--name={name}", "--data.steps=2", *given)
    native, ours = (read_metrics(command_line.runs / f"{name}/metrics.csv") for name in ("episodes", "episodes_ray"))
    assert all("sampling/sync_error" not in row for row in native)
    _assert_alike(ours, native)


# --- ends -------------------------------------------------------------------------------------------------------------


class Driver:
    """A run in a process of its own."""

    def __init__(self, cluster: Any, command_line: Any, name: str, *options: str, **changes: Any) -> None:
        self.cluster, self.run = cluster, Path(command_line.runs / name)
        config = command_line.config(name, **changes)
        command = [sys.executable, "-m", "grpo_pl", "fit", f"--config={config}", f"--runs_dir={command_line.runs}"]
        self.log = command_line.folder / f"{name}.log"
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # children inherit that it is ignored
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                env={**cluster.environment, "GRPO_PL_CACHE": str(command_line.cache), "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        signal.signal(signal.SIGINT, before)

    def end(self, number: signal.Signals, *, steps: int) -> None:
        """Sends a signal once so many steps are done, and waits until nothing of the run is alive."""
        metrics = self.run / "metrics.csv"

        def done() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return metrics.exists() and metrics.read_text().count("\n") >= steps + 2  # names and first validation

        wait(done, 120)
        drawing = self.cluster.actors()
        assert len(drawing) == 2
        ours = [*psutil.Process(self.process.pid).children(recursive=True), *drawing]
        ours += [child for actor in drawing for child in actor.children(recursive=True)]
        self.process.send_signal(number)
        status = self.process.wait(60)
        assert status == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number], self.log.read_text()
        wait(lambda: not any(process.is_running() and process.status() != "zombie" for process in ours), GONE_WITHIN_S)
        assert self.cluster.actors() == []


@pytest.mark.parametrize("staleness", [1, 4])
def test_a_run_goes_on_to_the_bit_after_sigkill(
    cluster: Any, command_line: Any, fit: Fit, read_metrics: ReadMetrics, tmp_path: Path, staleness: int
) -> None:
    """On the cluster as it is."""
    saved = ["--checkpoint.every_n_rollouts=1", "--checkpoint.keep=10"]
    changes = {**SHORT, "data__steps": 6, "data__staleness": staleness}
    changes["model__engine"] = _engine(cluster, actors=2, pause_s=0.01)
    name = f"ahead{staleness}"
    whole = fit(name, *saved, runs=tmp_path, **changes)
    stored = cluster.stored_objects()
    Driver(cluster, command_line, name, *saved, **changes).end(signal.SIGKILL, steps=2)
    wait(lambda: cluster.stored_objects() <= stored, GONE_WITHIN_S)
    assert newest_whole(command_line.runs / name / "checkpoints", warn=pytest.fail) is not None
    again = fit(name, *saved, "--resume", **changes)
    ours, theirs = (torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (again, whole))
    assert differences(ours, theirs) == []
    assert read_metrics(again / "metrics.csv") == read_metrics(whole / "metrics.csv")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_saves_its_last_rollout_and_leaves_nothing(
    cluster: Any, command_line: Any, number: signal.Signals
) -> None:
    changes = {**SHORT, "data__steps": 2000, "model__engine": _engine(cluster, actors=2, pause_s=0.05)}
    never = ("--checkpoint.every_n_rollouts=5000", "--checkpoint.keep_best=0")
    stored, name = cluster.stored_objects(), f"told{number.value}"
    driver = Driver(cluster, command_line, name, *never, **changes)
    driver.end(number, steps=2)
    wait(lambda: cluster.stored_objects() <= stored, GONE_WITHIN_S)
    checkpoint = newest_whole(driver.run / "checkpoints", warn=pytest.fail)
    assert checkpoint is not None and rollouts_of(checkpoint) >= 2
    assert "Traceback" not in driver.log.read_text()


def test_a_run_without_its_cluster_ends_in_one_line_before_it_leaves_a_folder(cluster: Any, command_line: Any) -> None:
    asks = _engine(cluster, actors=9)
    outcome = command_line("fit", "--config", command_line.config("alone", **SHORT, model__engine=asks))
    assert outcome.status == 1
    assert "9 actors of 2 CPUs and 0 GPUs are to draw" in outcome.err.splitlines()[-1]
    assert "Traceback" not in outcome.err and not (command_line.runs / "alone").exists()
