"""A cold start goes on from the checkpoint of a process that was killed in its middle."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.training import sft
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.sft import SFTCheckpoint
from tests.conftest import TINY_POLICY

POLICY = PolicyConfig(from_scratch=TINY_POLICY)
START = ColdStart(steps=8, batch_size=4, lr=1e-2)


class Killed(BaseException):
    """In the place of a signal."""


@pytest.fixture(autouse=True)
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "SAVE_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(sft, "LARGEST_SHARE", float("inf"))


def _weights(start: ColdStart, cache: Path, *, killed_at: tuple[int, ...] = ()) -> tuple[bytes, list[int]]:
    """The result, and the steps that were done for it."""
    done: list[int] = []
    source: PromptSource = ArithmeticPrompts(digits=1)
    for last in (*killed_at, start.steps):

        def report(step: int, total: int, *, loss: float, lr: float, last: int | None = last) -> None:
            done.append(step)
            if step == last != total:
                raise Killed  # the checkpoint of this step is not written

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRPO_PL_CACHE", str(cache))
            try:
                folder = start.ensure(
                    POLICY, PromptTemplate(), source, device=torch.device("cpu"), bar=False, report=report
                )
            except Killed:
                continue
    return (folder / "model.safetensors").read_bytes(), done


def _demonstrations(folder: Path) -> str:
    file = folder / "demonstrations.jsonl"
    rows = ({"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(9))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize("kind", ["source", "muon", "count", "file"])
def test_what_is_killed_twice_ends_bit_for_bit_like_what_is_not(tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"muon": {"optimizer": "muon"}, "count": {"count": 6}}.get(kind, {})
    start = replace(START, **changes, demonstrations=_demonstrations(tmp_path) if kind == "file" else None)
    whole, once = _weights(start, tmp_path / "a")
    resumed, steps = _weights(start, tmp_path / "b", killed_at=(3, 6))
    assert once == list(range(1, 9))
    assert steps == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8]  # a step whose checkpoint was not written is done again
    assert resumed == whole
    assert [file.suffix for file in (tmp_path / "b/cold_start").iterdir()] == [""]


def test_a_checkpoint_that_cannot_be_read_begins_again(tmp_path: Path) -> None:
    file = tmp_path / "broken.ckpt"
    file.write_bytes(b"not a checkpoint")
    assert SFTCheckpoint(file).steps_done == 0
    assert not file.exists()


def test_checkpoints_are_written_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(sft, "SAVE_EVERY_SECONDS", 60.0)
    monkeypatch.setattr(sft.time, "monotonic", lambda: now[0])
    model: Any = torch.nn.Linear(1, 1)
    checkpoint, written = SFTCheckpoint(tmp_path / "c.ckpt"), []
    for second in range(0, 200, 20):
        now[0] = float(second)
        checkpoint.save_if_due(model, [], steps_done=second)
        written.append(SFTCheckpoint(tmp_path / "c.ckpt").steps_done)
    assert written == [0, 0, 0, 60, 60, 60, 120, 120, 120, 180]
    later = SFTCheckpoint(tmp_path / "c.ckpt")
    later.restore(model, [])
    assert later._state is None and later.steps_done == 180  # the state of a large model is not kept
