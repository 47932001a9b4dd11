"""A run before any of its steps again, bit for bit, and what is refused."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.extras.replay import CannotReplay, RecordedRun, cache, replay
from grpo_pl.files.checkpoints import remove
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.sharded_checkpoints import read_checkpoint

QUICKSTART = [
    "--config=configs/quickstart.yaml",
    "--data.steps=7",
    "--data.prompts_per_step=4",
    "--data.val_prompts=4",
    "--trainer.val_check_interval=3",
    "--model.policy.from_scratch.hidden_size=32",
    "--model.policy.from_scratch.intermediate_size=48",
    "--model.policy.from_scratch.num_hidden_layers=1",
    "--model.policy.from_scratch.num_attention_heads=2",
    "--model.policy.from_scratch.num_key_value_heads=2",
    "--model.cold_start.steps=60",
    "--model.cold_start.batch_size=16",
    "--model.cold_start.lr=0.01",
    "--model.max_tokens_per_microbatch=1024",
    "--checkpoint.every_n_rollouts=1",
    "--checkpoint.keep=10",
]
"""The quickstart with a smaller policy, fewer problems and demonstrations, and a checkpoint after each of its seven
rollouts."""


@pytest.fixture(scope="module", autouse=True)
def _cache(command_line: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PL_CACHE", str(command_line.cache))
        yield


@pytest.fixture(scope="module")
def quickstart(command_line: Any) -> Path:
    command_line.done("fit", *QUICKSTART, "--name=quickstart")
    return Path(command_line.runs / "quickstart")


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.lstat().st_mtime_ns, file.lstat().st_size) for file in sorted(folder.rglob("*"))}


def _only(run: Path, folder: Path, *rollouts: int) -> Path:
    """A copy of a run with these checkpoints alone."""
    shutil.copytree(run, folder / run.name, symlinks=True)
    for path in (folder / run.name).glob("checkpoints/rollout-*.ckpt"):
        if int(path.stem[-6:]) not in rollouts:
            remove(path)
    return folder / run.name


def _assert_same_state(moment: Any, checkpoint: Path) -> None:
    theirs = read_checkpoint(checkpoint)
    ours = {name.removeprefix("policy."): weight for name, weight in theirs["state_dict"].items()}
    for name, weight in moment.module.require_policy().state_dict().items():
        assert torch.equal(weight, ours[name]), name
    (optimizer,) = theirs["optimizer_states"]
    for number, entry in moment.optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, optimizer["state"][number][name]), (number, name)
    assert moment.data.state_dict() == theirs["RolloutDataModule"]


def test_weights_optimiser_and_data_at_three_steps_are_those_of_the_run(quickstart: Path, tmp_path: Path) -> None:
    run = _only(quickstart, tmp_path, 2)
    before, told = _files(run), list[str]()
    for step, start in ((1, 0), (2, 2), (5, 2)):
        moment = replay(run, step, say=told.append)
        assert moment.weights == RunFolder(quickstart).weights_digests()[step] and moment.exact
        assert (moment.held.first, moment.held.steps) == (None, step - start)
        _assert_same_state(moment, quickstart / "checkpoints" / f"rollout-{step:06d}.ckpt")
        made = {1, 5} & set(range(step + 1))
        assert set(cache.made(RecordedRun.open(run))) == made
    assert len(told) == 2 and "replaying 3 rollouts" in told[1] and "from rollout-000002.ckpt" in told[1]
    assert replay(run, 5, say=told.append).held.steps == 0  # from the cache
    assert len(told) == 2
    assert _files(run) == before
    assert not list(cache.replay_root().glob("making-*"))


def test_the_start_of_a_run_is_its_cold_start_which_is_made_again_where_it_is_gone(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _only(quickstart, tmp_path)
    monkeypatch.setenv("GRPO_PL_CACHE", str(tmp_path / "empty"))
    assert replay(run, 0).weights == RunFolder(quickstart).weights_digests()[0]
    assert list((tmp_path / "empty" / "cold_start").iterdir())


def _edited(run: Path, name: str, edit: Any) -> None:
    (run / name).write_text(edit((run / name).read_text()))


def _edit_completion(text: str) -> str:
    first, *others = text.splitlines(keepends=True)
    row = json.loads(first)
    return "".join([json.dumps({**row, "completion": row["completion"] + "!"}) + "\n", *others])


@pytest.mark.parametrize(
    ("named", "spoil", "step", "told"),
    [
        ("nothing", lambda run: None, 0, "there is no run"),
        ("quickstart", lambda run: None, 8, "it made 7 rollouts, so give 0 (its start) … 7 (its end)"),
        ("quickstart", lambda run: (run / "config.yaml").unlink(), 1, "has no config.yaml"),
        ("quickstart", lambda run: _edited(run, "completions.jsonl", _edit_completion), 1, "as the run closed it"),
        (
            "quickstart",
            lambda run: _edited(run, "run.json", lambda text: text.replace('"grpo_pl": "0.4', '"grpo_pl": "9.4')),
            1,
            "was made by grpo_pl 9.4",
        ),
        (
            "quickstart",
            lambda run: _edited(run, "config.yaml", lambda text: text.replace("MathReward", "MyReward")),
            1,
            "--run-rewards",
        ),
        (
            "quickstart",
            lambda run: _edited(run, "run.json", lambda text: text.replace('"digest": "', '"digest": "0')),
            1,
            "the data hold other problems",
        ),
        (
            "quickstart",
            lambda run: _edited(run, "digests.jsonl", _edit_token_ids),
            4,
            "step 3: token ids of a",
        ),
        ("quickstart", lambda run: _exchange(run), 3, "does not hold the weights that the run recorded"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_one_line_and_writes_nothing(
    quickstart: Path, tmp_path: Path, named: str, spoil: Any, step: int, told: str
) -> None:
    run = _only(quickstart, tmp_path, 2, 3)
    spoil(run)
    before = _files(tmp_path)
    with pytest.raises(CannotReplay) as raised:
        replay(tmp_path / named, step)
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert _files(tmp_path) == before


def _edit_token_ids(text: str) -> str:
    """Those of a completion of the fourth rollout."""
    lines = text.splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if line.startswith('{"step": 4, "token_ids": '))
    row = json.loads(lines[place])
    row["token_ids"][1][1][2] = "0" * 12
    return "".join([*lines[:place], json.dumps(row) + "\n", *lines[place + 1 :]])


def _exchange(run: Path) -> None:
    """The checkpoint of another step, sealed as if it were this one's."""
    from grpo_pl.files.checkpoints import seal

    shutil.copyfile(run / "checkpoints" / "rollout-000002.ckpt", run / "checkpoints" / "rollout-000003.ckpt")
    seal(run / "checkpoints" / "rollout-000003.ckpt", {"rollouts": 3, "world_size": 1})


def test_ctrl_c_leaves_nothing_and_what_a_killed_replay_left_is_cleared(quickstart: Path, tmp_path: Path) -> None:
    run = _only(quickstart, tmp_path, 2)
    _edited(run, "run.json", lambda text: text.replace('"started": "2', '"started": "0'))  # nothing of it is cached
    before, root, handler = _files(run), cache.replay_root(), signal.getsignal(signal.SIGINT)
    left = root / "making-killed"
    left.mkdir(parents=True)

    def interrupt() -> None:
        while not any(root.glob("making-*/made/metrics.csv")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        replay(run, 7, say=lambda line: None)
    thread.join()
    assert signal.getsignal(signal.SIGINT) is handler
    assert not list(root.glob("making-*")) and not cache.made(RecordedRun.open(run))
    assert _files(run) == before


def test_two_runs_of_one_name_ask_for_the_folder(quickstart: Path, tmp_path: Path) -> None:
    for name in ("quickstart", "quickstart-2"):
        shutil.copytree(quickstart, tmp_path / name, symlinks=True)
    with pytest.raises(CannotReplay, match=r"quickstart-2 and .*quickstart are runs of the name 'quickstart'"):
        RecordedRun.open("quickstart", tmp_path)
    assert RecordedRun.open(tmp_path / "quickstart-2").completed == 7


def test_a_record_that_the_replay_does_not_meet_names_step_and_value(quickstart: Path, tmp_path: Path) -> None:
    run = _only(quickstart, tmp_path, 2)
    lines = (run / "metrics.csv").read_text().splitlines()
    column, number = lines[0].split(",").index("grad_norm"), next(i for i, line in enumerate(lines) if line[:2] == "4,")
    cells = lines[number].split(",")
    cells[column] = "0.5"
    lines[number] = ",".join(cells)
    (run / "metrics.csv").write_text("\n".join(lines) + "\n")
    _edited(run, "run.json", lambda text: text.replace('"started": "2', '"started": "1'))  # nothing of it is cached
    with pytest.raises(CannotReplay, match=r"step 3: grad_norm is 0\.5 there and "):
        replay(run, 5, say=lambda line: None)


def test_a_run_without_digests_is_held_to_its_rewards_and_gradients(quickstart: Path, tmp_path: Path) -> None:
    run, told = _only(quickstart, tmp_path, 2), list[str]()
    (run / "digests.jsonl").unlink()
    moment = replay(run, 4, say=told.append)
    assert moment.weights == RunFolder(quickstart).weights_digests()[4]
    assert (moment.held.first, moment.held.steps, moment.held.weights) == (None, 2, 0)
    assert any("kept no digests" in line for line in told)


def test_a_run_without_digests_of_token_ids_is_held_to_texts(quickstart: Path, tmp_path: Path) -> None:
    run, told = _only(quickstart, tmp_path, 3), list[str]()
    _edited(run, "run.json", lambda text: text.replace('"started": "2', '"started": "3'))  # nothing of it is cached
    held = replay(run, 4, say=told.append).held
    assert held.token_ids == held.completions == 4 * 8 and not any("token ids" in line for line in told)
    _edited(run, "run.json", lambda text: text.replace('"started": "3', '"started": "4'))
    lines = (run / "digests.jsonl").read_text().splitlines(keepends=True)
    (run / "digests.jsonl").write_text("".join(line for line in lines if "token_ids" not in line))
    held = replay(run, 4, say=told.append).held
    assert (held.token_ids, held.completions, held.first) == (0, 4 * 8, None)
    assert any("no digests of token ids" in line for line in told)


def test_a_run_of_version_0_3_is_replayed_and_held_to_what_it_kept(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "migration" / "trained", tmp_path / "trained", symlinks=True)
    told = list[str]()
    moment = replay(tmp_path / "trained", 1, say=told.append)
    assert any("kept no digests, as runs of version 0.3" in line for line in told)
    assert (moment.held.steps, moment.held.weights, moment.data.completed_rollouts) == (1, 0, 1)


def test_other_surroundings_are_told_and_compared_with_the_record(quickstart: Path, tmp_path: Path) -> None:
    run, told = _only(quickstart, tmp_path, 2), list[str]()
    _edited(run, "run.json", lambda text: text.replace('"torch": "', '"torch": "0.'))
    moment = replay(run, 3, say=told.append)
    assert not moment.exact and moment.held.first is None
    assert any(line.startswith("equal up to rounding only") and "torch 0." in line for line in told)


def test_the_cache_keeps_to_its_limit_and_drops_what_was_used_longest_ago(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _only(quickstart, tmp_path, 2)
    monkeypatch.setenv("GRPO_PL_CACHE", str(tmp_path / "cache"))
    size = (run / "checkpoints" / "rollout-000002.ckpt").stat().st_size
    monkeypatch.setenv("GRPO_PL_REPLAY_GB", str(1.5 * size / 1e9))
    for step in (3, 4):
        replay(run, step, say=lambda line: None)
        assert list(cache.made(RecordedRun.open(run))) == [step]
