"""Whole runs on a server: those of the native engine, on any number of processes, and held to the policy's weights."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ReadMetrics = Callable[..., list[dict[str, str]]]
ROOT = Path(__file__).parents[3]
SHORT: dict[str, Any] = {"data__steps": 2, "data__val_prompts": 2, "trainer__val_check_interval": 2}


def _engine(*urls: str, **fields: Any) -> dict[str, Any]:
    return {"class_path": "grpo_pl.rollout.remote.RemoteEngine", "init_args": {"urls": list(urls), **fields}}


@pytest.fixture(scope="module")
def server(serve: Any) -> Any:
    return serve()


@pytest.fixture(scope="module")
def native(command_line: Any, read_metrics: ReadMetrics) -> list[dict[str, str]]:
    outcome = command_line("fit", "--config", command_line.config("native", **SHORT))
    assert outcome.status == 0, outcome.err
    return read_metrics(command_line.runs / "native/metrics.csv")


def _assert_alike(ours: list[dict[str, str]], native: list[dict[str, str]], *, rel: float) -> None:
    errors = [float(row.pop("sampling/sync_error")) for row in ours if "reward" in row]
    assert len(errors) == 2 and max(errors) < 1e-5
    assert [row.keys() for row in ours] == [row.keys() for row in native]
    for one, other in zip(ours, native, strict=True):
        for key, value in other.items():
            assert float(one[key]) == pytest.approx(float(value), rel=rel, abs=1e-5), key


def test_a_run_on_a_server_is_the_native_run(
    server: Any, command_line: Any, native: Any, read_metrics: ReadMetrics, token_file: str
) -> None:
    overlay = ROOT / "configs/engine/vllm_server.yaml"
    named = [f"--model.engine.init_args.urls={json.dumps([server.url])}"]
    named += [f"--model.engine.init_args.token_file={token_file}", "--name=remote"]
    outcome = command_line("fit", "--config", command_line.config(**SHORT), f"--config={overlay}", *named)
    assert outcome.status == 0, outcome.err
    _assert_alike(read_metrics(command_line.runs / "remote/metrics.csv"), native, rel=1e-3)
    assert token_file in (command_line.runs / "remote/config.yaml").read_text()
    assert Path(token_file).read_text().strip() not in (command_line.runs / "remote/config.yaml").read_text()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_that_share_a_server_make_the_run_of_one(
    server: Any,
    command_line: Any,
    native: Any,
    read_metrics: ReadMetrics,
    token_file: str,
    tmp_path: Path,
    strategy: str,
) -> None:
    config = command_line.config("two", **SHORT, model__engine=_engine(server.url, token_file=token_file))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "grpo_pl"]
    overlay = ROOT / f"configs/strategy/{strategy}.yaml"
    done = subprocess.run(
        [*torchrun, "fit", f"--config={config}", f"--config={overlay}", f"--runs_dir={tmp_path}"],
        env={**os.environ, "GRPO_PL_CACHE": str(command_line.cache)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _assert_alike(read_metrics(tmp_path / "two/metrics.csv"), native, rel=1e-3)


def test_rollouts_are_drawn_ahead_on_a_server_as_in_a_child_process(
    server: Any, command_line: Any, read_metrics: ReadMetrics, token_file: str
) -> None:
    engines = {"child": None, "ahead": _engine(server.url, token_file=token_file)}
    for name, engine in engines.items():
        changes = {**SHORT, "data__steps": 3, "data__staleness": 1, "model__engine": engine}
        outcome = command_line("fit", "--config", command_line.config(name, **changes))
        assert outcome.status == 0, outcome.err
    child, ours = (read_metrics(command_line.runs / f"{name}/metrics.csv") for name in engines)
    assert any(float(row.get("sampling/staleness", 0)) == 1 for row in ours)
    for one, other in zip(ours, child, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert float(one[key]) == pytest.approx(float(value), rel=1e-3, abs=1e-5), key


def test_a_server_that_drops_a_push_ends_the_run(serve: Any, config: Any, command_line: Any, token_file: str) -> None:
    keeping = serve(config("child_engines.KeepingEngine"))
    engine = _engine(keeping.url, token_file=token_file)
    outcome = command_line("fit", "--config", command_line.config("kept", **SHORT, model__engine=engine))
    assert outcome.status == 1
    assert "rollout 2 was not drawn from the policy's weights" in outcome.err and "Traceback" not in outcome.err
    assert (
        len((command_line.runs / "kept/metrics.csv").read_text().splitlines()) <= 3
    )  # head, first validation and step


def test_a_run_without_its_server_ends_in_one_line_before_it_leaves_a_folder(
    command_line: Any, token_file: str
) -> None:
    engine = _engine("http://127.0.0.1:9", token_file=token_file, reconnect_s=0)
    outcome = command_line("fit", "--config", command_line.config("alone", **SHORT, model__engine=engine))
    assert outcome.status == 1
    assert "the engine at http://127.0.0.1:9 cannot be reached" in outcome.err.splitlines()[-1]
    assert "Traceback" not in outcome.err and not (command_line.runs / "alone").exists()
