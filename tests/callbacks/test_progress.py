"""Signs of life: lines in a log file, and moving bars on a terminal."""

import csv
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_pl.callbacks import progress
from grpo_pl.policy.loading import PolicyConfig
from tests.conftest import CommandLine

SHORT: dict[str, Any] = {"model__cold_start": {"steps": 2, "batch_size": 4}}


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """One for which nobody else has made the cold start."""
    return CommandLine(tmp_path_factory.mktemp("command_line"))


def _err(command_line: Any, name: str, *options: str, **changes: Any) -> str:
    outcome = command_line.done("fit", "--config", command_line.config(name, **{**SHORT, **changes}), *options)
    return str(outcome.err)


def test_a_log_file_gets_lines_without_control_characters(command_line: Any) -> None:
    err = _err(command_line, "lines")
    assert "\x1b" not in err
    assert "cold start: 2/2 loss" in err
    assert re.search(r"^policy: Qwen2ForCausalLM of 12,192 parameters; loaded in \d+ s$", err, re.MULTILINE)
    phases = [
        "loading the policy",
        "\ncold start: 2/2",
        "\npolicy: ",
        "\nvalidation of ",
        "\nrollout 0: ",
        "\nrollout 1",
    ]
    places = [err.index(phase) for phase in phases]
    assert places == sorted(places)
    assert re.findall(r"^rollout (\d): .*val/pass@1 \d\.\d{3}", err, re.MULTILINE) == list("024")
    assert re.search(
        r"^rollout 4/4: reward -?\d\.\d{3}  right \d\.\d{3}  held-out pass@1 \d\.\d{3}  length ", err, re.MULTILINE
    )
    (line,) = re.findall(r"^chosen: .*", err, re.MULTILINE)
    assert "NativeEngine; rollouts of Qwen2ForCausalLM run on the " in line  # decode kernel, or own forward pass
    assert (
        "in the packed way; micro-batch of 150 tokens (configured); weights float32 on cpu, precision 32-true" in line
    )


def test_a_log_file_is_never_silent_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.02)
    trainer: Any = SimpleNamespace(
        is_global_zero=True, datamodule=SimpleNamespace(completed_rollouts=2, steps=60), callback_metrics={}
    )
    module: Any = SimpleNamespace(policy_config=PolicyConfig(path="owner/model"))
    bars = progress.StageProgress()

    def hears(line: str) -> None:
        deadline = time.monotonic() + 20
        while line not in capsys.readouterr().err:
            assert time.monotonic() < deadline, f"never said: {line}"
            time.sleep(0.01)

    bars.setup(trainer, module, "fit")
    try:
        hears("loading the policy owner/model")
        hears("starting, engine included: 0:0")
        bars.on_train_batch_start(trainer, module, None, 0)
        hears("rollout 3/60: in 0:0")  # an engine starts
        bars.on_stage_progress("rollout", 12, 64, "480 tokens")
        hears("rollout 3/60: 12/64 completions drawn, 480 tokens in 0:0")
        bars.on_stage_progress("reward", 0, 64)
        hears("rollout 3/60: 0/64 completions scored in 0:0")
        bars.on_stage_progress("update", 0, 1, "micro-batch 2/5")
        hears("rollout 3/60: 0/1 optimiser steps taken, micro-batch 2/5 in 0:0")
        bars.on_train_end(trainer, module)
        hears("writing checkpoint, export and report: 0:0")
    finally:
        bars.teardown(trainer, module, "fit")


def test_the_time_that_is_left_follows_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = progress.StageProgress()
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    bars.on_stage_progress("validate", 0, 1200)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1030.0)
    bars.on_stage_progress("validate", 300, 1200, "64 tokens")
    trainer: Any = SimpleNamespace(datamodule=SimpleNamespace(completed_rollouts=0, steps=60))
    line = "validation: 300/1200 held-out completions drawn, 64 tokens in 0:30, about 1:30 left"
    assert bars._state(trainer) == line


def test_a_terminal_gets_a_bar_for_the_run_and_one_for_the_stage(
    command_line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    another = {"steps": 3, "batch_size": 4}
    err = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", _err(command_line, "bars", model__cold_start=another))
    assert re.search(r"cold start .* 3/3 .* loss \d\.\d{3}", err)
    assert "rollouts" in err
    assert "4/4" in err
    assert re.search(r"\d+ tokens", err)  # life inside a long rollout
    assert re.search(r"reward -?\d\.\d{3}", err)


def test_loggers_get_the_curve_of_a_cold_start_before_the_first_rollout(command_line: Any) -> None:
    logger = f"--trainer.logger=CSVLogger --trainer.logger.save_dir={command_line.folder}".split()
    bar = "--trainer.callbacks+=TQDMProgressBar"
    err = _err(command_line, "logged", *logger, bar, data__steps=1, model__cold_start={"steps": 4, "batch_size": 4})
    assert "cold start: 4/4 loss" in err  # Lightning's own bar shows batches alone
    with next(command_line.folder.glob("lightning_logs/*/metrics.csv")).open(newline="") as file:
        rows = [(int(row["step"]), row["cold_start/loss"]) for row in csv.DictReader(file)]
    assert [step for step, loss in rows if loss] == [-4, -3, -2, -1]
    assert "cold_start" not in (command_line.runs / "logged/metrics.csv").read_text()  # which holds rollouts alone


def test_the_bar_can_be_turned_off(command_line: Any) -> None:
    trainer = {"accelerator": "cpu", "val_check_interval": 2, "enable_progress_bar": False}
    err = _err(command_line, "silent", trainer=trainer, data__steps=1, model__cold_start={"steps": 5, "batch_size": 4})
    assert "rollout 1/1" not in err and "cold start" not in err
