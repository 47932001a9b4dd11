"""The examples of docs/training.md run as they stand there, on a tiny run."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandLine
from tests.docs.pages import page, run

BLOCKS = dict(re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```", page("training"), re.DOTALL | re.MULTILINE))


@pytest.fixture
def fit(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny run with some of the page's files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, block in BLOCKS.items():
        (tmp_path / name).write_text(block)

    def with_(overlay: str, *options: object, **changed: Any) -> Path:
        config = command_line.config(Path(overlay).stem, **changed)
        command_line.done("fit", "--config", config, "--config", tmp_path / overlay, *options)
        return command_line.runs / Path(overlay).stem

    return with_


def test_a_run_that_gets_no_better_stops_early(fit: Any, read_metrics: Any) -> None:
    folder = fit("early.yaml", "--trainer.val_check_interval=1", "--data.steps=12", model__optimization={"lr": 1e-12})
    rows = [row for row in read_metrics(folder / "metrics.csv") if "reward" in row]
    assert len(rows) == 3 or len(rows) == 4  # the first validation is before the first rollout
    assert (folder / "export" / "model.safetensors").is_file()


def test_a_callback_and_a_logger_of_the_page(fit: Any, tmp_path: Path) -> None:
    assert fit("solved.yaml", "--data.steps=2").is_dir()
    assert fit("loggers.yaml", "--data.steps=2").is_dir()
    assert list((tmp_path / "logs").rglob("metrics.csv"))


@pytest.mark.slow
def test_the_sweep_runs(command_line: CommandLine, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install 'grpo_pl[dev]'")
    config = command_line.config("swept")
    script = BLOCKS["sweep.py"].replace("configs/quickstart.yaml", str(config)).replace("n_trials=8", "n_trials=2")
    (tmp_path / "sweep.py").write_text(script.replace("steps=30", "steps=2"))
    said = run("sweep.py", folder=tmp_path, cache=command_line.cache)
    assert "'lr'" in said.splitlines()[-1]
    assert (tmp_path / "runs" / "sweep-1" / "report.html").is_file()
