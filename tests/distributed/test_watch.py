"""The watch among several processes: the first one looks, none waits for another, and a resume is exact."""

from pathlib import Path

import pytest

from grpo_pl.files.rows import read_rows
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from tests.distributed.conftest import Calls, Run

WATCHED = """
trainer: {limit_val_batches: 0}
model:
  rewards:  # takes good form for a right answer
    - {class_path: grpo_pl.rewards.FormatReward, init_args: {correctness: true, partial: true}}
watch:
  strict: grpo_pl.rewards.ExactReward
  lenient: grpo_pl.rewards.LenientAnswerReward
  first_rollouts: 2
  completions: 5
  keep: 2
"""


@pytest.mark.slow
def test_one_of_two_processes_watches_and_a_resume_goes_on(
    command: Calls, five_rollouts: Path, read_metrics: Calls, tmp_path: Path
) -> None:
    (tmp_path / "watch.yaml").write_text(WATCHED)
    flags = [f"--config={five_rollouts}", "--config=configs/strategy/ddp.yaml", f"--config={tmp_path / 'watch.yaml'}"]
    command(tmp_path / "whole", "fit", *flags)
    whole = tmp_path / "whole" / "five"
    rows = read_metrics(whole / "metrics.csv")
    assert ["watch/length_drift" in row for row in rows] == [False, False, True, True, True]
    assert all("watch/agreement" in row for row in rows)
    # the mean over both processes, against that of the first two rollouts
    lengths = [float(row["completions/mean_length"]) for row in rows]
    drift = float(rows[-1]["watch/length_drift"])
    assert abs(drift - (lengths[-1] / (sum(lengths[:2]) / 2) - 1)) < 1e-9

    resumed = Run(whole).copy_until(1, tmp_path / "resumed").path
    (resumed / "suspicious.jsonl").write_text("{}\n")  # as if something had come after the checkpoint
    command(tmp_path / "resumed", "fit", *flags, "--resume")
    assert read_metrics(resumed / "metrics.csv") == rows
    written = [list(read_rows(run / "suspicious.jsonl")) for run in (resumed, whole)]
    assert written[0] == written[1] != []
    states = [
        read_checkpoint(run / "checkpoints" / "last.ckpt")["callbacks"]["RewardWatch"] for run in (resumed, whole)
    ]
    assert states[0] == states[1]
