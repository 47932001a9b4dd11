"""Rollouts that are drawn ahead of their updates: which weights they are from, that nothing else matters, how the
thread that draws them is stopped, and what it leaves as it was."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.distributed.collective import Collective
from grpo_pl.extras.engines import prefetched as prefetch
from grpo_pl.extras.engines.copy_engine import CopyEngine
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.engines.prefetched import PrefetchedRollouts, earlier_weights
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ExactReward
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.sampler import CompletionSampler
from grpo_pl.training.collect import Collector
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.source import SourceRun
from grpo_pl.training.weight_sync import OutOfSync, WeightSyncCheck
from grpo_pl.types import GenerateRequest, SampleKey, SamplingParams
from tests.training.runs import ReadMetrics, assert_same_end, resumed, steps_of

pytestmark = pytest.mark.usefixtures("forked")
STEPS = 5
PLAYED = Path(__file__).parents[2] / "plugins/down.yaml"
OVERLAY = Path(__file__).parents[3] / "configs/engine/pipelined.yaml"
SHORT = {"data__steps": STEPS, "data__val_prompts": 2, "trainer__val_check_interval": 3}


def _fit(command_line: Any, name: str, *options: str, staleness: int = 2, engine: str | None = None) -> Any:
    changes = {} if engine is None else {"model__engine": {"class_path": engine}}
    config = command_line.config(name, **SHORT, data__staleness=staleness, **changes)
    return command_line("fit", "--config", config, *options)


@pytest.fixture(scope="module")
def whole(command_line: Any) -> Path:
    """A run of five steps on rollouts that are two updates old, with a checkpoint after each."""
    outcome = _fit(command_line, "whole")
    assert outcome.status == 0, outcome.err
    return Path(command_line.runs / "whole")


@pytest.mark.parametrize("staleness", [1, 2])
def test_each_rollout_is_from_the_weights_of_its_launch(
    command_line: Any, whole: Path, read_metrics: ReadMetrics, staleness: int
) -> None:
    run = whole
    if staleness == 1:
        assert _fit(command_line, "one", f"--config={OVERLAY}", staleness=0).status == 0
        run = command_line.runs / "one"
    steps = steps_of(read_metrics(run / "metrics.csv"))
    assert [float(row["sampling/staleness"]) for row in steps] == [min(k, staleness) for k in range(STEPS)]
    assert max(float(row["sampling/sync_error"]) for row in steps) < 1e-5
    ratios = [float(row["sampling/importance_sampling_ratio/mean"]) for row in steps]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6) and any(abs(ratio - 1.0) > 1e-4 for ratio in ratios)


def test_a_resumed_run_trains_on_the_rollouts_of_its_checkpoint(
    command_line: Any, whole: Path, read_metrics: ReadMetrics
) -> None:
    checkpoint = whole / "checkpoints/rollout-000002.ckpt"
    stored = torch.load(checkpoint, weights_only=True)["rollouts"]
    assert [(state["step"], state["version"]) for state in stored] == [(2, 0), (3, 1)]
    again, _ = resumed(command_line, read_metrics, whole)
    assert_same_end(again, whole)


def test_a_run_without_staleness_draws_the_rollouts_of_its_checkpoint_again(
    command_line: Any, whole: Path, read_metrics: ReadMetrics
) -> None:
    checkpoint = whole / "checkpoints/rollout-000002.ckpt"
    flags = [f"--config={whole / 'config.yaml'}", f"--ckpt_path={checkpoint}", "--name=fresh", "--data.staleness=0"]
    with pytest.warns(UserWarning, match=r"staleness is 0: rollouts that the checkpoint holds are drawn again"):
        assert command_line("fit", *flags).status == 0
    run = command_line.runs / "fresh"
    steps = steps_of(read_metrics(run / "metrics.csv"))
    assert [row["step"] for row in steps[-3:]] == ["3", "4", "5"]
    assert all("sampling/staleness" not in row for row in steps[-3:])
    assert "rollouts" not in torch.load(run / "checkpoints/rollout-000003.ckpt", weights_only=True)


def test_an_engine_that_dies_in_the_middle_draws_again_from_the_weights_of_the_launch(
    command_line: Any, whole: Path, read_metrics: ReadMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it matter how often checkpoints wait for rollouts: here none does."""
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.setenv("DIES_AT", "2")
    outcome = _fit(command_line, "dying", "--checkpoint.every_n_rollouts=0", engine="child_engines.DyingOnceEngine")
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "2").exists()
    assert read_metrics(command_line.runs / "dying/metrics.csv") == read_metrics(whole / "metrics.csv")
    assert_same_end(command_line.runs / "dying", whole)


def test_weights_that_were_not_pushed_end_the_run_and_no_checkpoint_holds_what_was_drawn(command_line: Any) -> None:
    never, engine = "--checkpoint.every_n_rollouts=0", "child_engines.ForgettingEngine"
    with pytest.warns(UserWarning, match=r"checkpoint not saved: what was drawn ahead is lost \(rollout 4: it was not"):
        outcome = _fit(command_line, "forgetting", never, engine=engine)
    assert outcome.status == 1
    assert "rollout 4 was not drawn from" in outcome.err
    assert "has had 1 updates, and the engine's copy is that after 0;" in outcome.err
    assert not list((command_line.runs / "forgetting/checkpoints").glob("*.ckpt"))
    assert "Traceback" not in outcome.err


CURRICULUM = {
    "class_path": "grpo_pl.data.curriculum.CurriculumPrompts",
    "init_args": {
        "source": {
            "class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts",
            "init_args": {"digits": 1, "scratchpad_share": 0.0},
        }
    },
}


MIXTURE = {
    "class_path": "grpo_pl.data.mixture.MixturePrompts",
    "init_args": {
        "parts": {
            name: {
                "class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts",
                "init_args": {"digits": 1, "scratchpad_share": 0.0, "seed": seed},
            }
            for seed, name in enumerate(("one", "two"))
        }
    },
}
FEW = ("--data.val_prompts=2", "--trainer.val_check_interval=5", "--model.cold_start.steps=5")
RENEWED = {"beta": 0.05, "reference": "refreshed", "ref_update_every": 2, "num_minibatches": 2}


@pytest.mark.parametrize(
    "kind",
    ["episodes", "bf16", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dynamic", "greedy", "renewed"))],
)
def test_whatever_is_drawn_a_resumed_run_ends_like_the_whole(
    command_line: Any, read_metrics: ReadMetrics, kind: str
) -> None:
    """Further attempts and a curriculum, a greedy baseline, episodes in an environment; a reference that is renewed and
    several optimiser steps on a mixture; and bfloat16, in which checkpoints compare rollouts as steps do."""
    changes: dict[str, dict[str, Any]] = {
        "dynamic": {"model__algorithm": {"group_size": 4, "beta": 0.0, "dynamic_sampling": True}}
        | {"data__source": CURRICULUM, "data__staleness": 2},
        "greedy": {"model__algorithm": {"group_size": 2, "beta": 0.0, "baseline": "greedy", "scale": "none"}},
        "episodes": {},
        "renewed": {"model__algorithm": {"group_size": 4, **RENEWED}, "data__source": MIXTURE}
        | {"data__allow_overlap": True},
        "bf16": {"trainer__precision": "bf16-mixed", "data__staleness": 2},
    }
    config = command_line.config(kind, **{**SHORT, "data__staleness": 1, **changes[kind]})
    played = [f"--config={PLAYED}", "--data.staleness=1", "--data.steps=5", *FEW]
    flags = played if kind == "episodes" else ["--config", config]
    command_line.done("fit", *flags, f"--name={kind}")
    run = command_line.runs / kind
    never = ("--checkpoint.every_n_rollouts=0", "--checkpoint.keep_best=0")  # so that only steps compare rollouts
    again, rows = resumed(command_line, read_metrics, run, *never)
    assert_same_end(again, run)
    if kind == "dynamic":
        assert any(float(row["samples/resample_attempts"]) for row in rows[2:])
        assert any(0.0 < float(row["sampling/staleness"]) < 2.0 for row in rows[2:])


def test_an_engine_that_reads_the_live_weights_is_refused_before_the_run_costs_anything(command_line: Any) -> None:
    outcome = _fit(command_line, "live", engine="grpo_pl.rollout.native.NativeEngine")
    assert outcome.status == 1 and not (command_line.runs / "live").exists()
    assert outcome.err.count("\n") == 1
    assert "data.staleness is 2, and NativeEngine reads the policy's weights while they change" in outcome.err


def _assert_told(outcome: Any) -> None:
    assert outcome.status == 1
    assert "the prompt of 99 tokens leaves no room" in outcome.err and "SIGTERM" not in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_a_rollout_that_fails_while_nobody_waits_for_it_is_told_by_the_validation_that_meets_it(
    command_line: Any,
) -> None:
    _assert_told(_fit(command_line, "late", engine="child_engines.FailingLateEngine"))


def test_a_checkpoint_that_cannot_hold_a_rollout_says_why(command_line: Any) -> None:
    engine = "child_engines.FailingLateEngine"
    with pytest.warns(UserWarning, match=r"checkpoint not saved: .* \(rollout 5: ValueError: the prompt of 99 tokens"):
        _assert_told(_fit(command_line, "later", "--trainer.val_check_interval=5", engine=engine))


UNSTORABLE = """
import datetime
from dataclasses import replace

from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts


class DatedPrompts(ArithmeticPrompts):
    def prompts(self, *args, **options):
        return [replace(p, columns={"day": datetime.date(2026, 1, 1)}) for p in super().prompts(*args, **options)]
"""


def test_problems_that_no_checkpoint_may_hold_are_refused_before_the_run(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dated_prompts.py").write_text(UNSTORABLE)
    monkeypatch.syspath_prepend(tmp_path)
    source = {"class_path": "dated_prompts.DatedPrompts", "init_args": {"digits": 1, "scratchpad_share": 0.0}}
    config = command_line.config("dated", **SHORT, data__staleness=1, data__source=source)
    outcome = command_line("fit", "--config", config)
    assert outcome.status == 1 and not (command_line.runs / "dated").exists()
    assert "column 'day' of problem" in outcome.err and "Traceback" not in outcome.err


def test_a_second_fit_of_a_module_has_the_engine_and_the_correction_of_its_own_staleness() -> None:
    module = GRPOModule(
        policy=PolicyConfig(from_scratch={"model_type": "qwen2"}),
        rewards=[ExactReward(correctness=True)],
        template=PromptTemplate(),
        algorithm=GRPOAlgorithm(beta=0.0),
    )
    found = []
    for staleness in (0, 2, 0):
        module.choose_source(RolloutDataModule(ArithmeticPrompts(), staleness=staleness))
        found.append((type(module.engine), module.algorithm.mismatch))
    assert found == [(NativeEngine, "none"), (NativeChildEngine, "in_ratio"), (NativeEngine, "none")]


class Ahead:
    """Rollouts of four steps, two of them ahead, of a policy that the test updates."""

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        engine: CopyEngine | None = None,
        stopped: bool = False,
        **algorithm: Any,
    ) -> None:
        self.policy, self.engine = policy, engine or NativeChildEngine()
        source = ArithmeticPrompts(digits=1, scratchpad_share=0.0)
        self.data = RolloutDataModule(source, steps=4, prompts_per_step=2, staleness=2)
        self.collector = collector = Collector(
            sampler=CompletionSampler(engine=self.engine, template=PromptTemplate(), tokenizer=tokenizer),
            rewards=[ExactReward(correctness=True)],
            algorithm=GRPOAlgorithm(**{"group_size": 2, "beta": 0.0, **algorithm}),
            sampling=SamplingParams(max_completion_length=4),
            seed=0,
            collective=Collective(),
            report=lambda *_: None,
            should_stop=lambda: stopped,
            before_draw=lambda: self.rollouts.wait(),
        )
        self.rollouts = PrefetchedRollouts(staleness=2)
        self.sync = WeightSyncCheck()
        self.rollouts.start(
            SourceRun(collector=collector, policy=policy, data=self.data, sync=self.sync, precision=nullcontext)
        )

    def take(self) -> list[int]:
        """Takes the next step's rollout, updates the policy, and returns from which versions the rollout is."""
        self.sync.begin(self.data.completed_rollouts)
        samples = self.rollouts.take(self.data.prompts(self.data.completed_rollouts), self.collector).samples
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        self.rollouts.commit(self.data.completed_rollouts)
        self.data.completed_rollouts += 1
        self.engine.updates = self.data.completed_rollouts
        self.engine.update_weights(self.policy)
        return sorted(set(samples.rollout.policy_version[samples.rollout.action_mask].tolist()))

    def stored(self) -> list[tuple[int, int]]:
        return [(state["step"], state["version"]) for state in self.rollouts.state_dict()["rollouts"]]


@pytest.fixture
def ahead(tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Any:
    made: list[Ahead] = []

    def make(**options: Any) -> Ahead:
        made.append(Ahead(tiny_policy, tokenizer, **options))
        return made[-1]

    yield make
    for one in made:
        one.rollouts.close()
        one.engine.close()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_checkpoint_holds_what_older_weights_drew_and_no_more(ahead: Callable[..., Ahead], dynamic: bool) -> None:
    run = ahead(dynamic_sampling=dynamic)
    assert run.stored() == []
    assert run.take() == [0]
    assert run.stored() == [(1, 0), (2, 0)]
    assert run.take() == [0]
    assert run.stored() == [(2, 0), (3, 1)]
    assert run.take() == [0]
    assert run.stored() == [(3, 1)]
    assert run.take() == [1]  # the last
    assert run.stored() == []


def test_what_was_not_drawn_from_the_policy_of_its_launch_is_in_no_checkpoint_and_no_update(
    ahead: Callable[..., Ahead],
) -> None:
    run = ahead()
    run.take()
    run.rollouts.wait()
    for one in run.rollouts.pending:  # as if the engine had drawn from other weights
        one.weights = [torch.randn_like(weight) for weight in one.weights or []]
    told = "it was not drawn from the policy's weights"
    assert run.rollouts.finish() == {1: told, 2: told}
    with pytest.raises(CheckpointError, match=r'lost, by step: \{1: "it was not drawn'):
        run.rollouts.state_dict()
    with pytest.raises(OutOfSync, match="rollout 2 was not drawn from the policy's weights"):
        run.take()


@pytest.mark.parametrize(
    "kind",
    ["DeafEngine", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("StartingEngine", "LoadingEngine"))],
)
def test_a_run_that_is_told_to_stop_waits_for_no_engine(
    ahead: Callable[..., Ahead], tiny_policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The engine is starting, loading weights, or drawing without a look at anything, for 300 s each. A rollout that
    nobody needs any more is at work, and another waits behind it."""
    monkeypatch.syspath_prepend(PLAYED.parent)
    monkeypatch.setattr(prefetch, "FINISH_WITHIN_S", 0.3)
    monkeypatch.setattr("grpo_pl.extras.engines.child.engine_process.STOP_LIMIT_S", 0.2)
    import child_engines

    engine = getattr(child_engines, kind)()
    run = ahead(engine=engine, stopped=True)
    keys = [[SampleKey(seed=0, split="train", step=0, attempt=0, prompt_id=0, sample=0)]]
    request = GenerateRequest(prompt_ids=[[1]], keys=keys, sampling=SamplingParams(), eos_token_ids=[], pad_token_id=0)

    def draw(progress: Any, should_stop: Any) -> Any:
        return engine.generate(tiny_policy, request, should_stop=should_stop), None

    for step, version in enumerate((1, 0)):
        engine.updates = run.data.completed_rollouts = version
        engine.update_weights(tiny_policy)
        run.rollouts.begin(step, draw)
    run.data.completed_rollouts = 1
    for _ in range(2):  # for a checkpoint, and for another at the end
        assert run.rollouts.finish() == {1: "it was not done in time"}
    run.rollouts.close()
    engine.close()
    deadline = time.monotonic() + 60.0
    while any(thread.name.startswith("grpo_pl-rollouts") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread is still at work"
        time.sleep(0.05)


@pytest.mark.parametrize("field", ["model.algorithm.group_size", "data.prompts_per_step"])
def test_a_resume_with_rollouts_of_another_shape_is_refused(ahead: Callable[..., Ahead], field: str) -> None:
    run = ahead()
    run.take()
    states = run.rollouts.state_dict()
    other = ahead(group_size=4) if "group_size" in field else ahead()
    if "prompts" in field:
        other.data.prompts_per_step = 4
    with pytest.raises(ValueError, match=rf"{field} is 4, .* for which it was 2: resume with the former value"):
        other.rollouts.load_state_dict(states)


def test_a_source_that_never_began_or_is_closed_waits_for_nothing(ahead: Callable[..., Ahead]) -> None:
    begun = ahead()
    begun.rollouts.close()
    for source in (PrefetchedRollouts(staleness=1), begun.rollouts):
        source.wait()
        assert source.finish() == {} and source.state_dict() == {"rollouts": []}


def test_threads_are_given_back(ahead: Callable[..., Ahead]) -> None:
    before = torch.get_num_threads()
    run = ahead()
    assert run.engine.threads == max(1, before // 2)
    run.rollouts.close()
    assert (run.engine.threads, torch.get_num_threads()) == (None, before)


def test_earlier_weights_show_under_an_autocast_that_keeps_casts() -> None:
    layer, ones = torch.nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    torch.nn.init.ones_(layer.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        found = [layer(ones).item()]
        with earlier_weights(layer, [torch.full((1, 2), 3.0)]):
            found.append(layer(ones).item())
        found.append(layer(ones).item())
    assert found == [2.0, 6.0, 2.0]
