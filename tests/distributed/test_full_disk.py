"""Processes that save together agree on what a full disk kept them from, and go on together."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from grpo_pl.files.checkpoints import broken
from tests.distributed.conftest import Calls


@pytest.mark.slow  # one process by default: tests/faults/test_full_disk.py
@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_costs_one_checkpoint(
    small_disk: Callable[[int], Path],
    command: Calls,
    five_rollouts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sharded: bool,
) -> None:
    disk = small_disk(4000)
    full = {"class_path": "user_parts.FillDisk", "init_args": {"folder": str(disk), "first": 2, "last": 3}}
    overlay = tmp_path / "full.yaml"
    overlay.write_text(yaml.safe_dump({"trainer": {"callbacks": [full]}}))
    flags = [
        f"--trainer.strategy.init_args.sharded_checkpoints={str(sharded).lower()}",
        "--checkpoint.keep_best=0",
        "--data.steps=4",
    ]
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "plugins")
    configs = [f"--config={path}" for path in (five_rollouts, "configs/strategy/fsdp.yaml", overlay)]
    command(disk, "fit", *configs, *flags)
    kept = sorted((disk / "five").glob("checkpoints/rollout-*.ckpt"))
    assert [int(path.stem.split("-")[1]) for path in kept] == [1, 3, 4]
    assert all(path.is_dir() == sharded and broken(path) is None for path in kept)
    assert not list((disk / "five").rglob("*.partial"))
