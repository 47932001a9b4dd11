"""The table at the end of a run, and the line about one in which the rewards of every group are equal: said once, also
over a resume, and shown in its report."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_pl.callbacks.summary import ClosingTable, SignalWatch
from grpo_pl.evaluation.curves import no_signal
from grpo_pl.extras.report.page import build_page
from grpo_pl.files.runs import RunFolder
from grpo_pl.functional.accelerated import SWITCH


def _trainer(**metrics: float) -> Any:
    named = {name.replace("__", "/").replace("pass1", "pass@1"): torch.tensor(v) for name, v in metrics.items()}
    device = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(callback_metrics=named, is_global_zero=True, strategy=device)


def test_every_set_of_held_out_problems_has_its_row_and_only_files_that_are_there_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    table = ClosingTable(folder, "grpo-pl serve")
    table.on_validation_end(_trainer(val__pass1=0.25, val__two_step__pass1=0.0, val__mean_length=9.0, lr=0.1), Any)  # type: ignore[arg-type]
    table.on_validation_end(_trainer(val__pass1=0.5, val__two_step__pass1=0.125, val__mean_length=7.0), Any)  # type: ignore[arg-type]
    table.on_fit_end(_trainer(), Any)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert rows == [["pass@1 (sampled)", "0.250", "0.500"], ["two_step: pass@1 (sampled)", "0.000", "0.125"]]
    table.load_state_dict({"first": {}})  # of a version that kept fewer
    table.on_fit_end(_trainer(), Any)  # type: ignore[arg-type]
    assert "│      – │ 0.500 │" in capsys.readouterr().out
    assert f"metrics     {folder.metrics}\n" in out
    assert not {"report", "checkpoint", "model"} & {line.split(" ")[0] for line in out.splitlines()}


def test_a_run_on_a_gpu_without_kernels_says_so_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, table = _trainer(), ClosingTable(RunFolder(tmp_path), "grpo-pl serve")
    monkeypatch.setenv(SWITCH, "torch")
    for device, told in (("cpu", False), ("cuda", True)):
        trainer.strategy.root_device = torch.device(device)
        table.on_fit_end(trainer, Any)  # type: ignore[arg-type]
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kernels ")]
        assert len(lines) == told and all(SWITCH in line for line in lines)


def _step(watch: SignalWatch, *informative: bool, step: int = 0) -> None:
    statistics = SimpleNamespace(informative=torch.tensor(informative))
    outputs = {"experience": SimpleNamespace(statistics=statistics)}
    watch.on_train_batch_end(None, None, outputs, SimpleNamespace(step=step), 0)  # type: ignore[arg-type]


def test_the_count_begins_anew_and_survives_a_resume(recwarn: pytest.WarningsRecorder) -> None:
    watch = SignalWatch()
    for _ in range(9):
        _step(watch, False, False)
    _step(watch, False, True)
    for _ in range(9):
        _step(watch, False)
    assert not len(recwarn)
    resumed = SignalWatch()
    resumed.load_state_dict(watch.state_dict())
    _step(resumed, False)
    assert len(recwarn) == 1 and "No learning signal" in str(recwarn[0].message)
    again = SignalWatch()
    again.load_state_dict(resumed.state_dict())
    for step in range(7, 27):
        _step(again, False, step=step)
    assert len(recwarn) == 1
    late = SignalWatch()
    _step(late, False, step=7)  # whose batch is the first one since a resume
    assert late._silent.first == 8


def test_the_report_names_the_first_such_stretch(tmp_path: Path) -> None:
    shares = [1.0] * 9 + [0.5] + [1.0] * 10
    assert "from rollout 11 to 20" in no_signal({"frac_reward_zero_std": list(enumerate(shares, start=1))})
    assert no_signal({"frac_reward_zero_std": list(enumerate(shares[:-1], start=1))}) == ""
    rows = "".join(f"{step},{share}\n" for step, share in enumerate(shares, start=1))
    (tmp_path / "metrics.csv").write_text(f"step,frac_reward_zero_std\n{rows}")
    assert "No learning signal" in build_page(RunFolder(tmp_path))


def test_a_run_without_a_signal_warns_once(command_line: Any, recwarn: pytest.WarningsRecorder) -> None:
    config = command_line.config(
        "silent",
        model__cold_start=None,
        model__sampling={"max_completion_length": 2},
        model__rewards=[{"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}],
        data__steps=10,
    )
    outcome = command_line.done("fit", f"--config={config}", "--trainer.limit_val_batches=0")
    said = [str(w.message) for w in recwarn if "No learning signal" in str(w.message)]
    assert len(said) + outcome.err.count("No learning signal") == 1
    assert "No learning signal" in (command_line.runs / "silent" / "report.html").read_text()
