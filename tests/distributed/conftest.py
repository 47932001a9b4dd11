"""Two processes in a test: forked, joined by gloo, each running the command line as torchrun would start it."""

import json
import multiprocessing
import os
import pickle
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from grpo_pl.distributed.collective import Collective
from grpo_pl.extras.preferences.reward_model import RewardModelModule, load_classifier, save_classifier
from grpo_pl.files.checkpoints import remove, rollouts_of
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.policy.loading import PolicyConfig
from tests.extras.preferences.test_renewal import JUDGE
from tests.extras.preferences.test_reward_model import SHAPE
from tests.images import on_images

JOIN_SECONDS = 280
Calls = Callable[..., Any]
"""A fixture that is called."""


@dataclass(frozen=True)
class Ended:
    """Exit status of every process, and the folder with what each printed, ``rank0.log`` …"""

    status: list[int | None]
    folder: Path

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()


def assert_nearly_equal(ours: list[dict[str, str]], theirs: list[dict[str, str]], rel: float = 1e-4) -> None:
    """Of the rows of two ``metrics.csv``, but for the error of the engine, which is of other completions."""
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            if key != "sampling/sync_error":
                assert float(mine[key]) == pytest.approx(float(value), rel=rel, abs=rel / 100), (key, other.get("step"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(target: Callable[..., Any], rank: int, world: int, port: int, folder: Path, args: tuple[Any, ...]) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    launcher = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": 1,
    }
    os.environ.update({name: str(value) for name, value in launcher.items()})
    status = 1
    try:
        status = target(*args) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the exit handlers belong to the process that was forked


def fork(target: Callable[..., Any], *args: Any, folder: Path, world: int = 2) -> list[Any]:
    """Starts ``target(*args)`` in ``world`` processes; its return value is the exit status."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    port = _free_port()
    processes = [context.Process(target=_run, args=(target, rank, world, port, folder, args)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes


def join(processes: list[Any], folder: Path, seconds: float = JOIN_SECONDS) -> Ended:
    """Waits for them; those that do not end are killed and have status None."""
    for process in processes:
        process.join(seconds)
    status = [None if process.is_alive() else process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return Ended(status, folder)


@pytest.fixture
def in_processes(tmp_path: Path) -> Callable[..., Ended]:
    """``in_processes(target, *args, world=2)`` runs ``target`` in every process and fails if one of them does."""

    def run(target: Callable[..., Any], *args: Any, world: int = 2) -> Ended:
        folder = tmp_path / f"logs{len(list(tmp_path.glob('logs*')))}"
        ended = join(fork(target, *args, folder=folder, world=world), folder)
        logs = "\n".join(f"--- rank {rank}\n{ended.log(rank)[-4000:]}" for rank in range(world))
        assert ended.status == [0] * world, f"{ended.status}\n{logs}"
        return ended

    return run


# --- the runs that several tests look at ------------------------------------------------------------------------------

STRATEGIES: dict[str, list[str]] = {
    "single": [],
    "in threes": ["--model.engine=grpo_pl.rollout.plain.PlainEngine", "--model.engine.init_args.max_batch_rows=3"],
    "ddp": ["--config=configs/strategy/ddp.yaml"],
    "four": ["--config=configs/strategy/ddp.yaml"],
    "fsdp": ["--config=configs/strategy/fsdp.yaml"],
    "sharded": [
        "--config=configs/strategy/fsdp.yaml",
        "--trainer.strategy.init_args.sharded_checkpoints=true",
        "--trainer.strategy.init_args.defer_gradient_sync=true",
    ],
    "bfloat16": [
        "--config=configs/strategy/fsdp.yaml",
        "--trainer.strategy.init_args.param_dtype=bfloat16",
    ],
}
WORLDS = {"single": 1, "in threes": 1, "four": 4}
"""Processes; two of any other."""


def grpo_pl(folder: Path, cache: Path, *args: object) -> int:
    """``grpo-pl`` with its runs under ``folder``, where a ``fit`` also leaves its ``samples<rank>.jsonl``."""
    from grpo_pl.cli.main import main

    os.environ["GRPO_PL_CACHE"] = str(cache)
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parents[1] / "plugins"))
    verb, *rest = map(str, args)
    recording = ["--trainer.callbacks+=user_parts.KeepSamples"] if verb == "fit" else []
    return main([verb, *rest, f"--runs_dir={folder}", *recording])


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.csv"

    def checkpoint(self, rollouts: int) -> Path:
        return self.path / "checkpoints" / f"rollout-{rollouts:06d}.ckpt"

    def state(self, rollouts: int) -> dict[str, Any]:
        return read_checkpoint(self.checkpoint(rollouts))

    def samples(self) -> list[Any]:
        files = sorted(self.path.parent.glob("samples*.jsonl"))
        return sorted(map(json.loads, {line for file in files for line in file.read_text().splitlines()}))

    def copy_until(self, rollouts: int, folder: Path) -> "Run":
        """The same run as if it had been killed at some moment after its checkpoint at ``rollouts``."""
        shutil.copytree(self.path, folder / self.path.name, symlinks=True)
        copy = Run(folder / self.path.name)
        for path in copy.path.glob("checkpoints/rollout-*.ckpt"):
            if rollouts_of(path) > rollouts:
                remove(path)
        return copy


@pytest.fixture(scope="session")
def five_rollouts() -> Path:
    """The configuration of all these runs."""
    return Path(__file__).with_name("five.yaml")


@pytest.fixture(scope="session")
def seeing(five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on images, with micro-batches without one among them."""
    return on_images(five_rollouts, tmp_path_factory.mktemp("seeing") / "seeing.yaml")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the one cold start."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def completed(cache: Path, five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """``completed("single" | "ddp" | "fsdp" | "sharded" …)``: that run of five rollouts, or of another configuration,
    made at most once."""
    made: dict[tuple[str, Path], Run] = {}

    def run(name: str, config: Path = five_rollouts) -> Run:
        if (name, config) not in made:
            if name != "single":  # whose cold start serves any number of processes, and is made soonest in one
                run("single", config)
            folder = tmp_path_factory.mktemp(name)
            world = WORLDS.get(name, 2)
            flags = STRATEGIES[name]
            args = (folder / "runs", cache, "fit", f"--config={config}", *flags)
            ended = join(fork(grpo_pl, *args, folder=folder, world=world), folder)
            assert ended.status == [0] * world, "\n".join(ended.log(rank)[-4000:] for rank in range(world))
            made[name, config] = Run(folder / "runs" / config.stem)
        return made[name, config]

    return run


@pytest.fixture
def like_one_process(completed: Callable[..., Run], read_metrics: Calls) -> Callable[..., Run]:
    """``like_one_process("ddp", config, rollouts=2)``: fails unless two processes drew and learned what one does, whose
    run it returns."""

    def compare(name: str, config: Path, *, rollouts: int) -> Run:
        single, ours = completed("single", config), completed(name, config)
        assert ours.samples() == single.samples()
        assert_nearly_equal(read_metrics(ours.metrics), read_metrics(single.metrics))
        before, after = single.state(rollouts)["state_dict"], ours.state(rollouts)["state_dict"]
        difference = sum((after[key] - value).double().square().sum() for key, value in before.items()) ** 0.5
        assert difference / sum(value.double().square().sum() for value in before.values()) ** 0.5 <= 1e-5
        return single

    return compare


@pytest.fixture
def command(cache: Path, in_processes: Callable[..., Ended]) -> Callable[..., Ended]:
    """``command(folder, "fit", …, world=2)``: ``grpo-pl`` in that many processes."""

    def run(folder: Path, *args: object, world: int = 2) -> Ended:
        return in_processes(grpo_pl, folder, cache, *args, world=world)

    return run


@pytest.fixture
def start(cache: Path, tmp_path: Path) -> Callable[..., Any]:
    """``start(target, folder, "fit", …)``: two running processes, and a function that waits for their end."""

    def begin(target: Callable[..., int], folder: Path, *args: object) -> tuple[list[Any], Callable[..., Ended]]:
        processes = fork(target, folder, cache, *args, folder=tmp_path / "started")
        return processes, lambda seconds=JOIN_SECONDS: join(processes, tmp_path / "started", seconds)

    return begin


def _rank(work: Callable[[Collective], Any], folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"found{rank}").write_bytes(pickle.dumps(work(Collective(rank=rank, world=2))))
    dist.destroy_process_group()


@pytest.fixture
def on_two_ranks(in_processes: Calls, tmp_path: Path) -> Callable[[Callable[[Collective], Any]], list[Any]]:
    """``on_two_ranks(work)``: what ``work(collective)`` comes to on each of two processes."""

    def run(work: Callable[[Collective], Any]) -> list[Any]:
        in_processes(_rank, work, tmp_path)
        return [pickle.loads((tmp_path / f"found{rank}").read_bytes()) for rank in range(2)]

    return run


# --- what a run may learn beside or instead of rewards --------------------------------------------------------------


def _term(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"terms": {"own": {"class_path": f"grpo_pl.objective.terms.{kind}", "init_args": arguments}}}


PARTS = {
    name: {
        "class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts",
        "init_args": {"digits": 1, "scratchpad_share": 0.0, "seed": seed},
    }
    for seed, name in enumerate(("odd", "even"))
}
FEATURES: dict[str, dict[str, Any]] = {
    "demonstrated": {  # two rollouts of four optimiser steps, each of which shows five demonstrations, an odd number
        "model.algorithm": {"beta": 0.0, **_term("chord.CHORD", coef=0.5, weighting="uncertain")},
        "model": {"demonstrations": {"batch_size": 5}},
        "data": {"steps": 2},
    },
    "bounded": {  # the second half of each rollout learned from after an update, within a narrow trust region
        "model.algorithm": {"beta": 0.0, "surrogate": "dppo_tv", "epsilon_low": 0.01, "epsilon_high": 0.01}
        | _term("top_k_trust_region.TopKTrustRegion", top_k=5),
        "data": {"steps": 2},
    },
    "taught": {  # two parts, each with a teacher
        "model.algorithm": {
            "beta": 0.0,
            **_term("distillation.Distillation", divergence="jensen_shannon", mix=0.3),
        },
        "data.source": {"class_path": "grpo_pl.data.mixture.MixturePrompts", "init_args": {"parts": PARTS}},
        "data": {"allow_overlap": True, "steps": 2},
    },
    "self_taught": {  # the teacher is a moving average that reads a better sibling or the answer
        "model.algorithm": {"beta": 0.0}
        | _term("self_distillation.SelfDistillation", divergence="jensen_shannon", weights="average", rate=0.5),
        "model.policy.from_scratch": {"max_position_embeddings": 96},
        "model": {"privileged": {"user": "{question}{privileged}", "texts": ["{best} ", "{answer} "]}}
        | {"max_tokens_per_microbatch": 96},
        "data": {"steps": 3},
    },
    "renewed": {"data": {"steps": 3}},  # a reward model that learns on
    "ahead": {"data": {"staleness": 2}},
    "in_parts": {"model": {"partial_rollouts": {"part_length": 3, "steps_in_flight": 2}}},
}
"""By the part of the configuration: the fields that are others."""


@pytest.fixture(scope="session")
def feature(completed: Calls, five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``feature("taught")``: the configuration of these runs with what `FEATURES` changes in it."""
    folder = tmp_path_factory.mktemp("features")

    def written(name: str) -> Path:
        file = folder / f"{name}.yaml"
        if file.exists():
            return file
        tree = yaml.safe_load(five_rollouts.read_text())
        for place, fields in FEATURES[name].items():
            reduce(getitem, place.split("."), tree).update(fields)
        if name == "taught":  # by the policy of another run
            teacher = {"path": str(completed("single").path / "export")}
            tree["model"]["teachers"] = {"odd": teacher, "even": teacher | {"attn_implementation": "eager"}}
        if name == "renewed":
            tree["model"]["rewards"].append(_classifier(folder / "model"))
            settings = {"every": 1, "steps": 2, "pairs_per_step": 4, "lr": 0.01, "judge": JUDGE}
            callback = {"class_path": "grpo_pl.extras.preferences.renewal.RenewRewardModel", "init_args": settings}
            tree["trainer"]["callbacks"] = [callback]
        file.write_text(yaml.safe_dump(tree))
        return file

    return written


def _classifier(folder: Path) -> dict[str, Any]:
    """A reward whose model has not been trained."""
    config = PolicyConfig(from_scratch=SHAPE)
    model = load_classifier(config, tokenizer := RewardModelModule(config).tokenizer)
    save_classifier(model.config, model.state_dict(), tokenizer, folder, True)
    return {"class_path": "grpo_pl.rewards.ModelReward", "init_args": {"model": str(folder), "max_length": 64}}
