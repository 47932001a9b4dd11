"""The commands and the code of docs/evaluation.md do what the page says, on a task of seconds."""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.main import main
from grpo_pl.evaluation.report import EvaluationReport
from tests.docs.pages import blocks, page

PAGE = page("evaluation")


def test_a_policy_is_compared_with_its_beginning(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = command_line.config("quickstart", data__steps=1)
    command_line.done("fit", f"--config={config}")
    desk: Path = command_line.folder / "desk"
    (desk / "configs").mkdir(parents=True)
    shutil.copy(config, desk / "configs")
    shutil.copytree(command_line.runs / "quickstart", desk / "runs" / "quickstart", symlinks=True)
    monkeypatch.setenv("GRPO_PL_CACHE", str(command_line.cache))
    monkeypatch.chdir(desk)
    measure, compare = blocks(PAGE, "bash")
    before, after = (shlex.split(line) for line in compare.splitlines())
    assert after[: len(shlex.split(measure))] == shlex.split(measure)
    printed = io.StringIO()
    for program, *arguments in (before, after):
        with contextlib.redirect_stdout(printed):
            assert (program, main(arguments)) == ("grpo-pl", 0)
    assert "difference to the baseline" in printed.getvalue()
    first, second = (EvaluationReport.read(Path(f"{name}.json")) for name in ("before", "after"))
    assert (first.facts["rollouts"], second.facts["rollouts"]) == (0, 1)
    table = PAGE.partition("## Without right answers")[0]
    keys = set(re.findall(r"^\| `(val/[\w@]+)` \|", table, re.MULTILINE))
    measured = {*first.measured, "val/unjudged"}  # a metric of the run: without an interval, so not in the report
    assert {key.replace("@n", "@2") for key in keys} == measured


def test_the_metrics_in_python() -> None:
    (code,) = blocks(PAGE, "python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    first, second = printed.getvalue().splitlines()
    assert first == "tensor(0.3333)"
    assert second.startswith("Estimate(value=0.333")
