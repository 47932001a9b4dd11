"""``grpo-pl fit --branch RUN@S``: equal without other settings, and otherwise only in what follows from them."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.files.checkpoints import remove, rollouts_of
from grpo_pl.files.runs import RunFolder
from tests.extras.replay.test_moment import QUICKSTART

FORMAT_COUNTS = (
    '[{"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": true}},'
    ' {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"weight": 3.0, "partial": true}}]'
)


@pytest.fixture(scope="module", autouse=True)
def _cache(command_line: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PL_CACHE", str(command_line.cache))
        yield


@pytest.fixture(scope="module")
def trunk(command_line: Any) -> Path:
    """A run of seven rollouts with checkpoints at 2 and 7, which was resumed once."""
    command_line.done("fit", *QUICKSTART, "--checkpoint.keep_best=0", "--name=trunk", "--trainer.max_epochs=1")
    run = Path(command_line.runs / "trunk")
    command_line.done("fit", *QUICKSTART, "--checkpoint.keep_best=0", "--name=trunk", "--resume")
    for path in run.glob("checkpoints/rollout-*.ckpt"):
        if rollouts_of(path) not in (2, 7):
            remove(path)
    return run


def _told(run: Path) -> dict[str, Any]:
    return json.loads((run / "branch.json").read_text())  # type: ignore[no-any-return]


def _rows(run: Path) -> dict[tuple[int, int, int], dict[str, Any]]:
    rows = map(json.loads, (run / "completions.jsonl").read_text().splitlines())
    return {(row["step"], row["prompt_id"], row["sample"]): row for row in rows}


def test_a_branch_without_other_settings_is_the_rest_of_the_run(
    command_line: Any, trunk: Path, read_metrics: Callable[..., Any]
) -> None:
    before = {str(file): file.lstat().st_mtime_ns for file in trunk.rglob("*")}
    outcome = command_line.done("fit", f"--branch={trunk}@3", "--name=same")
    assert "replaying 1 rollouts" in outcome.err and "4 rollouts are bit for bit those of trunk" in outcome.err
    same = command_line.runs / "same"
    ours, theirs = RunFolder(same).weights_digests(), RunFolder(trunk).weights_digests()
    assert ours[7] == theirs[7] and ours.items() & theirs.items() >= {(step, theirs[step]) for step in (3, 4, 7)}
    after = [row for row in read_metrics(trunk / "metrics.csv") if int(row["step"]) > 3]
    assert [row for row in read_metrics(same / "metrics.csv") if int(row["step"]) > 3] == after
    assert _rows(same) == {key: row for key, row in _rows(trunk).items() if key[0] >= 3}
    assert (_told(same)["first"], _told(same)["completion"], _told(same)["changes"]) == (None, None, [])
    assert {str(file): file.lstat().st_mtime_ns for file in trunk.rglob("*")} == before


def test_another_reward_changes_what_follows_from_it_alone(command_line: Any, trunk: Path) -> None:
    given = [f"--model.rewards={FORMAT_COUNTS}", "--model.optimization.lr=0.02"]
    outcome = command_line.done("fit", "--branch", f"{trunk}@2", "--name=other", *given)
    other = command_line.runs / "other"
    ours, theirs = _rows(other), _rows(trunk)
    first = [key for key in ours if key[0] == 2]
    assert first and all(ours[key]["completion"] == theirs[key]["completion"] for key in first)
    assert all(ours[key]["rewards"]["math"] == theirs[key]["rewards"]["math"] for key in first)
    assert any(ours[key]["reward"] != theirs[key]["reward"] for key in first)
    told = _told(other)
    assert told["first"]["step"] == 2 and "reward" in told["first"]["what"]
    assert any(change.startswith("model.rewards.1.init_args.weight: 0.1 → 3.0") for change in told["changes"])
    texts = [key for key in theirs if key[0] > 2 and ours[key]["completion"] != theirs[key]["completion"]]
    found = told["completion"]
    assert (found["step"], found["prompt_id"], found["sample"]) == texts[0]
    assert (found["there"], found["here"]) == (theirs[texts[0]]["completion"], ours[texts[0]]["completion"])
    assert "rollout 3 is the first that differs from trunk" in outcome.err
    page = (other / "report.html").read_text()
    assert '["branch of","trunk, before rollout 3"]' in page and '"first difference"' in page
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
    drawn = {chart["title"]: chart["series"] for chart in reversed(data["charts"]) if "series" in chart}
    assert [line["label"] for line in drawn["Reward"]] == ["trunk", "other (branch)"]
    assert [min(at for at, _ in line["points"]) for line in drawn["Reward"]] == [3, 3]


def test_a_branch_of_the_start_begins_without_a_checkpoint(command_line: Any, trunk: Path) -> None:
    command_line.done("fit", f"--branch={trunk}@0", "--name=again", "--data.steps=2", "--trainer.limit_val_batches=0")
    ours, theirs = (RunFolder(run).weights_digests() for run in (command_line.runs / "again", trunk))
    assert ours[0] == theirs[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--branch={trunk}@3"], "--name NEW"),
        (["--branch={trunk}", "--name=new"], "write RUN@S"),
        (["--branch={trunk}@9", "--name=new"], "it made 7 rollouts"),
        (["--branch={trunk}x@3", "--name=new"], "there is no run"),
        (["--branch={trunk}@2", "--name=new", "--resume"], "leave out --resume"),
        (["--branch={trunk}@2", "--name=new", "--model.template.user=Q: {{question}}"], "model.template.user"),
        (["--branch={trunk}@2", "--name=new", "--model.policy.tags=[<a>]"], "model.policy.tags"),
        (["--branch={trunk}@2", "--name=new", "--model.policy.from_scratch.num_hidden_layers=2"], "num_hidden_layers"),
    ],
)
def test_what_no_branch_can_be_is_one_line_and_leaves_nothing(
    command_line: Any, trunk: Path, options: list[str], told: str
) -> None:
    before = {path.name for path in command_line.runs.iterdir()}
    outcome = command_line("fit", *(option.format(trunk=trunk) for option in options))
    assert outcome.status == 2, outcome.err
    assert told in outcome.err.splitlines()[-1] and "Traceback" not in outcome.err
    assert {path.name for path in command_line.runs.iterdir()} == before


def test_a_checkpoint_that_is_missing_is_made_again(command_line: Any, trunk: Path, tmp_path: Path) -> None:
    shutil.copytree(trunk, tmp_path / "bare", symlinks=True)
    for path in (tmp_path / "bare").glob("checkpoints/rollout-*.ckpt"):
        remove(path)
    command_line.done("fit", f"--branch={tmp_path / 'bare'}@2", "--name=made", "--data.steps=3")
    assert RunFolder(command_line.runs / "made").weights_digests()[2] == RunFolder(trunk).weights_digests()[2]
