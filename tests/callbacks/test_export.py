"""The report of a run that broke off."""

from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.main import main
from tests.callbacks.conftest import WholeRun
from tests.extras.report.runs import write_run


def test_a_run_that_breaks_off_still_has_a_report(command_line: Any, tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(
        "calls = []\n"
        "def fragile(completions, **kwargs):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 2:\n"
        "        raise ValueError('broke')\n"
        "    return [0.5] * len(completions)\n"
    )
    rewards = [
        {"class_path": "grpo_pl.rewards.MathReward"},
        {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": {"function": f"{tmp_path}/fragile.py:fragile"}},
    ]
    outcome = command_line("fit", "--config", command_line.config("broken", model__rewards=rewards))
    assert outcome.status == 1 and "broke" in outcome.err.splitlines()[-1]
    page = (command_line.runs / "broken" / "report.html").read_text()
    assert '"step":2' in page and '"step":3' not in page


def test_the_report_of_any_run_can_be_written_again(whole: WholeRun) -> None:
    report = whole.folder / "report.html"
    written = report.read_text()
    report.unlink()
    assert main(["report", str(whole.folder)]) == 0
    assert report.read_text() == written
    assert main(["report", str(whole.folder / "export")]) == 1


def test_several_runs_are_put_into_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, seed=seed).path) for seed, name in enumerate(("a", "b"))]
    assert main(["report", *runs]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    assert main(["report", "--output", str(tmp_path / "other.html"), *runs]) == 0
    assert (tmp_path / "other.html").read_text() == (tmp_path / "comparison.html").read_text()
    assert main(["report", runs[0], "--output=x.html"]) == 1
    assert "--output is for several runs" in capsys.readouterr().err
