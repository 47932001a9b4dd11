"""Checkpoints that are incomplete, damaged or hostile: seen, passed over, never executed."""

import copyreg
import io
import os
import pickle
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from grpo_pl.distributed.strategy import CheckpointFiles
from grpo_pl.files.checkpoints import CheckpointError, annotate, broken, checkpoint_path, facts_of, newest_whole, seal
from grpo_pl.files.sharded_checkpoints import read_checkpoint, read_sharded, write_sharded

STATE = {"state_dict": {"policy.weight": torch.arange(1000.0)}, "epoch": 0}


class Bomb:
    """Runs a command when unpickled without restraint."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def _sealed(folder: Path, rollouts: int) -> Path:
    path = checkpoint_path(folder, rollouts)
    CheckpointFiles().save_checkpoint(STATE, path)
    seal(path, {"rollouts": rollouts})
    return path


def _sharded(folder: Path) -> Path:
    path = checkpoint_path(folder, 3)
    path.mkdir(parents=True)
    tensors = {"state_dict": dict(STATE["state_dict"]), "optimizer": {"policy.weight": {"step": torch.tensor(1.0)}}}
    write_sharded(path, tensors, {"optimizer_param_groups": [{"lr": 1e-3, "params": ["policy.weight"]}], "epoch": 0})
    seal(path, {"rollouts": 3})
    return path


def test_a_sealed_checkpoint_is_whole_and_reads_back(tmp_path: Path) -> None:
    path = _sealed(tmp_path, 7)
    assert path.name == "rollout-000007.ckpt"
    assert broken(path) is None
    assert torch.equal(read_checkpoint(path)["state_dict"]["policy.weight"], STATE["state_dict"]["policy.weight"])
    annotate(path, {"val/pass@1": 0.5})
    facts = facts_of(path)
    assert facts is not None
    assert (facts["rollouts"], facts["val/pass@1"]) == (7, 0.5)
    assert broken(path) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9] + b"123456789"), "has changed since it was written"),
        (lambda path: path.with_suffix(".json").unlink(), "never completed"),
        (lambda path: path.with_suffix(".json").write_text('{"rollouts": '), "never completed"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_damage_is_found_and_the_checkpoint_before_is_taken(tmp_path: Path, damage: Any, reason: str) -> None:
    whole, newest = _sealed(tmp_path, 1), _sealed(tmp_path, 2)
    damage(newest)
    warnings: list[str] = []
    assert reason in (broken(newest) or "")
    assert newest_whole(tmp_path, warnings.append) == whole
    if newest.exists():
        assert len(warnings) == 1
        assert str(newest) in warnings[0]


def test_a_sharded_checkpoint_with_a_file_cut_short_is_passed_over(tmp_path: Path) -> None:
    whole, sharded = _sealed(tmp_path, 1), _sharded(tmp_path)
    assert newest_whole(tmp_path, pytest.fail) == sharded
    (part,) = sharded.glob("*.distcp")
    os.truncate(part, part.stat().st_size - 1)
    assert newest_whole(tmp_path, lambda _: None) == whole


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "nothing", pytest.fail) is None


def test_a_sharded_checkpoint_reads_back_like_a_file(tmp_path: Path) -> None:
    state = read_checkpoint(_sharded(tmp_path))
    assert torch.equal(state["state_dict"]["policy.weight"], STATE["state_dict"]["policy.weight"])
    assert state["optimizer_states"] == [
        {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    ]


def _saved(folder: Path, bomb: Bomb) -> Path:
    torch.save({**STATE, "callbacks": bomb}, folder / "evil.ckpt")
    return folder / "evil.ckpt"


def _pickled(folder: Path, bomb: Bomb) -> Path:
    (folder / "evil.ckpt").write_bytes(pickle.dumps(bomb))
    return folder / "evil.ckpt"


def _index(folder: Path, bomb: Bomb) -> Path:
    (_sharded(folder) / ".metadata").write_bytes(pickle.dumps(bomb))
    return checkpoint_path(folder, 3)


def _listed(folder: Path, bomb: Bomb) -> Path:
    save({"state_dict": bomb}, storage_writer=FileSystemWriter(str(_sharded(folder))), no_dist=True)
    return checkpoint_path(folder, 3)


@pytest.mark.parametrize("planted", [_saved, _pickled, _index, _listed])
def test_what_could_run_code_is_refused_and_not_executed(tmp_path: Path, planted: Callable[[Path, Bomb], Path]) -> None:
    path = planted(tmp_path, Bomb(tmp_path / "trace"))
    with pytest.raises(CheckpointError, match=r"is refused: .*could\s+run code"):
        read_checkpoint(path)
    assert not (tmp_path / "trace").exists()


class Attribute:
    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def test_of_attributes_an_index_may_name_the_members_of_enumerations_alone(tmp_path: Path) -> None:
    """Python 3.11.2 writes these as ``getattr(kind, name)``."""
    path = _sharded(tmp_path)
    index, text = pickle.loads((path / ".metadata").read_bytes()), io.BytesIO()
    pickler = pickle.Pickler(text)
    by_name = {_MEM_FORMAT_ENCODING: lambda one: (getattr, (type(one), one.name))}
    pickler.dispatch_table = ChainMap(by_name, copyreg.dispatch_table)  # type: ignore[attr-defined]
    pickler.dump(index)
    assert b"getattr" in text.getvalue()
    (path / ".metadata").write_bytes(text.getvalue())
    assert torch.equal(read_checkpoint(path)["state_dict"]["policy.weight"], STATE["state_dict"]["policy.weight"])
    (path / ".metadata").write_bytes(pickle.dumps(Attribute(Metadata, "__init__")))
    with pytest.raises(CheckpointError, match="refused: reading it could run code"):
        read_sharded(path)


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a checkpoint", b"PK\x03\x04" + bytes(100)])
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        read_checkpoint(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_truncation_at_any_point_is_an_error_and_never_a_wrong_tensor(tmp_path: Path) -> None:
    path = _sealed(tmp_path, 1)
    content = path.read_bytes()
    for size in range(0, len(content) - 1, 97):
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_checkpoint(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere\.ckpt"):
        read_checkpoint(tmp_path / "nowhere.ckpt")


def test_a_run_folder_in_place_of_a_checkpoint_is_told_so(tmp_path: Path) -> None:
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"run is a folder and no checkpoint\.$"):
        read_checkpoint(tmp_path / "run")
    last.touch()
    with pytest.raises(
        CheckpointError, match=r"run is a folder and no checkpoint\. Give .*/run/checkpoints/last\.ckpt\."
    ):
        read_checkpoint(tmp_path / "run")
