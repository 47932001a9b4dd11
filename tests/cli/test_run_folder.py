"""What a Trainer gets so that it fills a run folder, and who may write there."""

import errno
import os
import re
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.loggers import CSVLogger

from grpo_pl.callbacks.checkpoint import RolloutCheckpoint
from grpo_pl.callbacks.completions import CompletionsLog
from grpo_pl.callbacks.export import ExportPolicy
from grpo_pl.callbacks.metrics_csv import EventFiles, MetricsCSV
from grpo_pl.cli.run_folder import TRAINER_DEFAULTS, open_run, trainer_arguments
from grpo_pl.distributed.strategy import CheckpointFiles, FSDP2Strategy
from grpo_pl.extras.report.callback import WriteReport
from grpo_pl.extras.watch.callback import RewardWatch
from grpo_pl.files.runs import RunFolder


def test_everything_is_written_into_the_run_folder(tmp_path: Path) -> None:
    arguments = trainer_arguments(RunFolder(tmp_path))
    callbacks = {type(callback): callback for callback in arguments["callbacks"]}
    assert callbacks[RolloutCheckpoint].folder == tmp_path / "checkpoints"
    assert callbacks[CompletionsLog].path == tmp_path / "completions.jsonl"
    assert callbacks[RewardWatch].path == tmp_path / "suspicious.jsonl"
    assert callbacks[ExportPolicy].folder == tmp_path / "export"
    assert callbacks[WriteReport].folder.path == tmp_path
    assert [type(logger) for logger in arguments["logger"]] == [MetricsCSV, EventFiles]
    assert [type(plugin) for plugin in arguments["plugins"]] == [CheckpointFiles]
    assert arguments.items() >= TRAINER_DEFAULTS.items()


def test_own_callbacks_loggers_and_settings_join_or_win(tmp_path: Path) -> None:
    mine, logger = RolloutCheckpoint(every_n_rollouts=3), CSVLogger(tmp_path)
    arguments = trainer_arguments(RunFolder(tmp_path), callbacks=mine, logger=logger, val_check_interval=7, devices=2)
    checkpoints = [callback for callback in arguments["callbacks"] if isinstance(callback, RolloutCheckpoint)]
    assert checkpoints == [mine] and mine.folder == tmp_path / "checkpoints"
    assert arguments["logger"][-1] is logger
    assert (arguments["val_check_interval"], arguments["devices"]) == (7, 2)


def test_a_callback_that_extends_one_of_the_runs_takes_its_place(tmp_path: Path) -> None:
    class MyCheckpoint(RolloutCheckpoint):
        pass

    arguments = trainer_arguments(RunFolder(tmp_path), callbacks=[MyCheckpoint(), RichProgressBar()])
    kinds = [type(callback) for callback in arguments["callbacks"]]
    assert RolloutCheckpoint not in kinds and MyCheckpoint in kinds
    assert [kind for kind in kinds if issubclass(kind, ProgressBar)] == [RichProgressBar]


def test_a_strategy_with_checkpoints_of_its_own_keeps_them(tmp_path: Path) -> None:
    assert "plugins" not in trainer_arguments(RunFolder(tmp_path), strategy=FSDP2Strategy())


def test_a_run_is_free_again_at_the_end_of_its_block(tmp_path: Path) -> None:
    with open_run(tmp_path, "sums") as run:
        run.folder.metrics.write_text("step\n")
        with pytest.raises(ValueError, match="is in use by"):
            open_run(tmp_path, "sums", resume=True)
    with open_run(tmp_path, "sums", resume=True) as again:
        assert again.folder.path == run.folder.path
    with open_run(tmp_path, "sums") as other:
        assert other.folder.path == tmp_path / "sums-2"


def test_a_run_that_fails_before_it_measured_anything_leaves_no_folder(tmp_path: Path) -> None:
    for measured in (False, True):
        with pytest.raises(KeyError), open_run(tmp_path, "sums") as run:
            if measured:
                run.folder.metrics.write_text("step\n")
            raise KeyError
        assert run.folder.path.exists() == measured


def test_a_name_that_is_no_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without slashes"):
        open_run(tmp_path, "../sums")


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_cannot_be_written_is_said_in_one_line(resume: bool) -> None:
    with pytest.raises(ValueError, match=r"^--runs_dir is '/proc/runs', and .* cannot be written there [^\n]*$"):
        open_run("/proc/runs", "one", resume=resume)


@pytest.mark.parametrize("fault", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENOTDIR])
def test_another_folder_is_advised_where_this_one_is_forbidden(monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(fault, os.strerror(fault), "runs")

    monkeypatch.setattr("grpo_pl.cli.run_folder.start_run", fail)  # root, who may write anywhere, can cause none
    with pytest.raises(ValueError, match=re.escape(os.strerror(fault))) as caught:
        open_run("runs", "one")
    assert ("you may write" in str(caught.value)) == (fault in (errno.EACCES, errno.EPERM, errno.EROFS))
