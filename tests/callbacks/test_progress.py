"""Signs of life: lines in a log file, and moving bars on a terminal."""

import re
from typing import Any

import pytest

from tests.conftest import CommandLine

SHORT: dict[str, Any] = {"model__cold_start": {"steps": 2, "batch_size": 4}}


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """One for which nobody else has made the cold start."""
    return CommandLine(tmp_path_factory.mktemp("command_line"))


def _err(command_line: Any, name: str, **changes: Any) -> str:
    outcome = command_line("fit", "--config", command_line.config(name, **SHORT, **changes))
    assert outcome.status == 0, outcome.err
    return str(outcome.err)


def test_a_log_file_gets_lines_without_control_characters(command_line: Any) -> None:
    err = _err(command_line, "lines")
    assert "\x1b" not in err
    assert "cold start: 2/2 loss" in err
    assert re.findall(r"^rollout (\d): .*val/pass@1 \d\.\d{3}", err, re.MULTILINE) == list("024")
    assert re.search(
        r"^rollout 4/4: reward -?\d\.\d{3}  right \d\.\d{3}  held-out pass@1 \d\.\d{3}  length ", err, re.MULTILINE
    )
    (line,) = re.findall(r"^chosen: .*", err, re.MULTILINE)
    assert "NativeEngine; rollouts of Qwen2ForCausalLM run on the own forward pass of the Llama family;" in line
    assert (
        "in the packed way; micro-batch of 150 tokens (configured); weights float32 on cpu, precision 32-true" in line
    )


def test_a_terminal_gets_a_bar_for_the_run_and_one_for_the_stage(
    command_line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    err = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", _err(command_line, "bars"))
    assert "rollouts" in err
    assert "4/4" in err
    assert re.search(r"\d+ tokens", err)  # life inside a long rollout
    assert re.search(r"reward -?\d\.\d{3}", err)


def test_the_bar_can_be_turned_off(command_line: Any) -> None:
    trainer = {"accelerator": "cpu", "val_check_interval": 2, "enable_progress_bar": False}
    assert "rollout 4/4" not in _err(command_line, "silent", trainer=trainer)
