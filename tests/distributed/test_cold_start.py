"""A cold start on two processes: each learns from its share of every batch, and one cached result serves any number."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from safetensors.torch import load_file

from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.strategy import FSDP2Strategy
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.training import cold_start_fit
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.cold_start_fit import SaveNowAndThen, make_start
from grpo_pl.training.stage import Stage
from tests.distributed.conftest import STRATEGIES, Calls, Ended, fork, grpo_pl, join
from tests.training.test_cold_start import POLICY
from tests.training.test_cold_start_episodes import Doors, Words

Parts = tuple[ColdStart, PromptTemplate, PromptSource, Stage | None]
SUMS: Parts = (ColdStart(steps=12, batch_size=5, lr=1e-2), PromptTemplate(), ArithmeticPrompts(digits=2), None)
PLAYED: Parts = (
    ColdStart(steps=4, batch_size=4, lr=1e-2),
    PromptTemplate(user="\n{question}\n"),
    Words(),
    Stage(environment=Doors(isolation="thread")),
)
CASES: dict[str, Parts] = {
    "unequal shares": SUMS,
    "no share": (replace(SUMS[0], batch_size=1), *SUMS[1:]),
    "muon": (replace(SUMS[0], optimizer="muon"), *SUMS[1:]),
    "played": PLAYED,
}


def assert_close(ours: Path, theirs: Path, within: float = 1e-5) -> None:
    """Within a share of the weights' norm."""
    after, before = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    difference = sum((after[key] - value).double().square().sum() for key, value in before.items()) ** 0.5
    relative = float(difference / sum(value.double().square().sum() for value in before.values()) ** 0.5)
    print(f"difference of the weights, of their norm: {relative:.1e}")  # for docs/scaling.md
    assert relative <= within


def _made(parts: Parts, cache: Path, name: str = "ddp") -> Callable[[Collective], tuple[Path, list[int]]]:
    """The folder, and the steps that were reported."""

    def work(collective: Collective) -> tuple[Path, list[int]]:
        start, template, source, stage = parts
        os.environ["GRPO_PL_CACHE"] = str(cache)
        done: list[int] = []

        def report(step: int, total: int, *, loss: float, lr: float) -> None:
            done.append(step)

        strategy = {"auto": "auto", "ddp": "ddp", "fsdp": FSDP2Strategy()}[name if collective.world > 1 else "auto"]
        trainer = Trainer(accelerator="cpu", devices=collective.world, strategy=strategy, logger=False)
        return make_start(start, POLICY, template, source, stage, trainer=trainer, bar=False, report=report), done

    return work


@pytest.mark.parametrize(
    ("case", "name"),
    [*((case, "ddp") for case in CASES), *(pytest.param(case, "fsdp", marks=pytest.mark.slow) for case in CASES)],
)
def test_two_processes_make_the_start_of_one(
    on_two_ranks: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, name: str
) -> None:
    monkeypatch.setenv("GRPO_PL_CACHE", "")
    alone, _ = _made(CASES[case], tmp_path / "one")(Collective())
    together = on_two_ranks(_made(CASES[case], tmp_path / "two", name))
    folder, steps = tmp_path / "two" / "cold_start" / alone.name, CASES[case][0].size[0]
    assert together == [(folder, list(range(1, steps + 1))), (folder, [])]
    # Muon rounds to bfloat16: on some processors the last bit of a gradient changes a hundredth of an update
    assert_close(folder, alone, within=1e-2 if case == "muon" else 1e-5)
    assert list(folder.parent.iterdir()) == [folder]


@dataclass(kw_only=True)
class Failing(ArithmeticPrompts):
    def demonstration(self, prompt: Any, rng: Any) -> str:
        raise RuntimeError("no more")


def test_what_fails_in_the_first_process_ends_both(on_two_ranks: Calls, tmp_path: Path) -> None:
    def work(collective: Collective) -> str:
        with pytest.raises((RuntimeError, ValueError)) as error:
            _made((*SUMS[:2], Failing(digits=2), None), tmp_path)(collective)
        return str(error.value)

    assert ["no more" in told for told in on_two_ranks(work)] == [True, True]


def _killed(folder: Path, cache: Path, visit: int, *args: object) -> int:
    """A fit whose processes kill themselves behind a step of the cold start, before its checkpoint."""
    cold_start_fit.SAVE_EVERY_SECONDS, cold_start_fit.LARGEST_SHARE = 0.0, float("inf")
    save, visits = SaveNowAndThen.on_train_batch_end, []

    def save_or_die(self: SaveNowAndThen, *given: Any, **more: Any) -> None:
        visits.append(0)
        if len(visits) == visit:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, *given, **more)

    SaveNowAndThen.on_train_batch_end = save_or_die  # type: ignore[method-assign]
    return grpo_pl(folder, cache, *args)


SHORT = ("--data.steps=1", "--model.cold_start.steps=30", "--trainer.limit_val_batches=0")


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_fit_that_is_killed_in_its_start_ends_bit_for_bit(
    in_processes: Callable[..., Ended], five_rollouts: Path, tmp_path: Path, read_metrics: Calls, name: str
) -> None:
    args = ("fit", f"--config={five_rollouts}", *STRATEGIES[name], *SHORT, "--resume")
    in_processes(grpo_pl, tmp_path / "whole", tmp_path / "a", *args)
    for visit in (10, 8):
        logs = tmp_path / f"killed{visit}"
        ended = join(fork(_killed, tmp_path / "rest", tmp_path / "b", visit, *args, folder=logs), logs)
        assert -signal.SIGKILL in ended.status and 0 not in ended.status, ended.log(0)
    in_processes(grpo_pl, tmp_path / "rest", tmp_path / "b", *args)
    (whole,), (rest,) = (list((tmp_path / cache / "cold_start").iterdir()) for cache in "ab")
    assert whole.name == rest.name
    assert (whole / "model.safetensors").read_bytes() == (rest / "model.safetensors").read_bytes()
    rows = [read_metrics(tmp_path / run / "five" / "metrics.csv") for run in ("whole", "rest")]
    assert rows[0] == rows[1]
    in_processes(grpo_pl, tmp_path / "one", tmp_path / "c", *args[:2], *SHORT, world=1)
    (alone,) = (tmp_path / "c" / "cold_start").iterdir()
    assert alone.name == whole.name
    assert_close(whole, alone)
