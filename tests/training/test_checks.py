"""What of a run's parts cannot go together, before anything is computed."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.distributed.strategy import FSDP2Strategy, check_strategy
from grpo_pl.extras.agents.openai_agent import AgentEnvironment
from grpo_pl.extras.agents.tool_calls import TagCalls
from grpo_pl.functional.sampling import DRAW_RULE
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.chord import CHORD
from grpo_pl.objective.terms.echo import ECHO
from grpo_pl.objective.terms.self_distillation import SelfDistillation
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.policy.teacher import TeacherConfig
from grpo_pl.rewards import ExactReward
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training.checks import check_engine, check_trainer, warn_of_earlier_rules
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.demonstrated import DemonstrationBatches
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import Rollout, SamplingParams
from tests.gradient_step import SHAPE
from tests.training.test_lightning_module import QUIET

IMAGES = PolicyConfig(path="none", images=True)


class OneByOne(RolloutEngine):
    """Takes what a request holds one by one, as engines did."""

    def generate(self, model: Any, *, prompt_ids: Any, keys: Any, sampling: Any, **others: Any) -> Rollout:  # type: ignore[override]
        raise NotImplementedError


class Incurious(NativeEngine):
    """Cannot be stopped."""

    def generate(self, model: Any, request: Any, *, progress: Any = None) -> Rollout:  # type: ignore[override]
        raise NotImplementedError


class Passing(NativeEngine):
    def generate(self, *arguments: Any, **options: Any) -> Rollout:
        return super().generate(*arguments, **options)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [(OneByOne(), "too many positional arguments"), (Incurious(), "unexpected keyword argument 'should_stop'")],
)
def test_an_engine_that_takes_no_request_is_refused_in_one_line(engine: RolloutEngine, reason: str) -> None:
    name = type(engine).__name__
    with pytest.raises(
        ValueError, match=rf"^model\.engine: generate of {name} does not take .*{reason}.*engines\.md\.$"
    ):
        check_engine(engine, GRPOAlgorithm(), SamplingParams())


def test_an_engine_that_passes_its_arguments_on_is_taken() -> None:
    check_engine(Passing(), GRPOAlgorithm(), SamplingParams())


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {
                "algorithm": GRPOAlgorithm(terms={"chord": CHORD(coef=0.5)}),
                "demonstrations": DemonstrationBatches(),
                "environment": AgentEnvironment(agent="agents.py:agent", parser=TagCalls()),
            },
            r"^model\.demonstrations\.file is null, but in model\.environment .* name a file of episodes",
        ),
        (
            {
                "algorithm": GRPOAlgorithm(terms={"own": SelfDistillation(divergence="reverse_kl", weights="live")}),
                "privileged": PrivilegedText(texts=["{answer}"]),
                "environment": AgentEnvironment(agent="agents.py:agent", parser=TagCalls()),
            },
            r"^model\.privileged does not go with AgentEnvironment, which writes the prompts of its episodes itself",
        ),
        (
            {
                "algorithm": GRPOAlgorithm(terms={"echo": ECHO(coef=0.1)}),
                "sampling": SamplingParams(thinking_budget=4),
                "environment": AgentEnvironment(agent="agents.py:agent", parser=TagCalls()),
            },
            r"^ECHO would learn the fed end of a thought .*thinking_budget null",
        ),
        (
            {"policy": IMAGES, "environment": AgentEnvironment(agent="agents.py:agent", parser=TagCalls())},
            r"^policy\.images does not go with model\.environment",
        ),
        (
            {"policy": IMAGES, "privileged": PrivilegedText(texts=["{answer}"])},
            r"^policy\.images does not go with model\.privileged",
        ),
        (
            {"policy": IMAGES, "teacher": TeacherConfig(path="none", url="http://127.0.0.1:1/v1")},
            r"^policy\.images does not go with model\.teacher",
        ),
        (
            {"policy": IMAGES, "teachers": {"a": TeacherConfig(path="none"), "b": TeacherConfig(path="other")}},
            r"^policy\.images does not go with .*model\.teachers",
        ),
    ],
)
def test_parts_that_would_learn_something_else_are_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        GRPOModule(**{"policy": PolicyConfig(path="none"), "rewards": [ExactReward(correctness=True)], **fields})


@pytest.mark.parametrize("column", [{"image": "a.png"}, {"images": ["a.png", "b.png"]}])
@pytest.mark.parametrize("part", ["cold_start", "demonstrations"])
def test_files_of_demonstrations_with_images_are_refused_where_the_policy_reads_images(
    tmp_path: Path, part: str, column: dict[str, Any]
) -> None:
    file = tmp_path / "shown.jsonl"
    row = {"prompt": "1+1=", "completion": "2"}
    fields: dict[str, Any] = {"cold_start": ColdStart(steps=1, demonstrations=str(file))}
    if part == "demonstrations":
        chord = GRPOAlgorithm(terms={"chord": CHORD(coef=0.5)})
        fields = {"demonstrations": DemonstrationBatches(file=str(file)), "algorithm": chord}
    for lines, refused in (([row, {**row, "image": None}], False), ([row, {**row, **column}], True)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for policy in (IMAGES, PolicyConfig(path="none")):
            told = pytest.raises(ValueError, match=r"^line 2 of '.*shown\.jsonl' has a column 'image")
            with told if refused and policy is IMAGES else nullcontext():
                GRPOModule(policy=policy, rewards=[ExactReward(correctness=True)], **fields)


class _Own(SingleDeviceStrategy):
    """A user's own."""


def test_strategies_that_are_tested_and_their_subclasses_are_taken() -> None:
    for strategy in (SingleDeviceStrategy(), DDPStrategy(), FSDP2Strategy(), _Own()):
        check_strategy(strategy)


def test_processes_that_end_with_what_they_trained_are_refused() -> None:
    spawned = [DDPStrategy(start_method="spawn"), DDPStrategy(start_method="forkserver")]
    for strategy in ("ddp_spawn", "ddp_spawn_find_unused_parameters_true", *spawned):
        with pytest.raises(ValueError, match=r"^trainer\.strategy is .* and end with what they trained: set ddp "):
            check_strategy(strategy)
    for name in ("ddp_notebook", "ddp_notebook_find_unused_parameters_false"):  # names come from the command line
        with pytest.raises(ValueError, match=rf"^trainer\.strategy is {name}, which is for notebooks: set ddp"):
            check_strategy(name)
    check_strategy(DDPStrategy(start_method="fork"))
    check_strategy("ddp_find_unused_parameters_true")


def test_another_strategy_is_refused_in_one_line_before_the_cold_start(fresh_command_line: Any) -> None:
    line = r"trainer\.strategy is ModelParallelStrategy, which is not supported.*fsdp\.yaml"
    with pytest.raises(ValueError, match=f"^{line}"):
        check_strategy(ModelParallelStrategy())
    overlay = fresh_command_line.folder / "tensor_parallel.yaml"
    strategy = "{class_path: lightning.pytorch.strategies.ModelParallelStrategy}"
    overlay.write_text(f"trainer: {{devices: 1, strategy: {strategy}}}")
    outcome = fresh_command_line("fit", "--config", fresh_command_line.config(), "--config", overlay)
    assert outcome.status == 1 and re.search(f"{line}[^\n]*\n$", outcome.err) and "Traceback" not in outcome.err
    assert not list(fresh_command_line.cache.glob("cold_start*"))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, r"^trainer\.max_epochs is 1000: the length of a run is data\.steps, in rollouts; set it to 1"),
        ({"max_epochs": 1, "max_steps": 3}, r"^trainer\.max_steps is 3: .*; set it to -1"),
        ({"max_epochs": 1, "precision": "bf16-true"}, r"^trainer\.precision is bf16-true: set bf16-mixed"),
    ],
)
def test_a_trainer_made_by_hand_that_would_train_otherwise_is_refused(options: dict[str, Any], line: str) -> None:
    policy = PolicyConfig(from_scratch={"model_type": "qwen2", **SHAPE})
    module = GRPOModule(policy=policy, rewards=[ExactReward(correctness=True)])
    data = RolloutDataModule(ArithmeticPrompts(digits=1), steps=1, prompts_per_step=2)
    with pytest.raises(ValueError, match=line):
        Trainer(**QUIET, **options).fit(module, data)
    assert module.policy is None


def test_a_sampler_that_would_cut_shares_again_is_refused() -> None:
    for devices, distributed, refused in ((2, True, True), (2, False, False), (1, True, False)):
        trainer = Trainer(**QUIET, devices=devices, strategy="ddp", use_distributed_sampler=distributed)
        with pytest.raises(ValueError, match=r"use_distributed_sampler would cut") if refused else nullcontext():
            check_trainer(trainer)


def test_weights_alone_are_no_sharded_checkpoint_and_are_refused_before_the_training() -> None:
    keeper = ModelCheckpoint(save_weights_only=True)
    for sharded in (True, False):
        strategy = FSDP2Strategy(sharded_checkpoints=sharded)
        options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "use_distributed_sampler": False}
        trainer = Trainer(strategy=strategy, callbacks=[keeper], **options)
        if sharded:
            with pytest.raises(ValueError, match="sharded_checkpoints writes whole checkpoints only"):
                check_trainer(trainer)
        else:
            check_trainer(trainer)


AUTO = {"gain": 1.5, "mean_error": 1e-3, "p99_error": 1e-2}
"""What ``model.compute: auto`` of an earlier version noted where it took bfloat16."""


@pytest.mark.parametrize(
    ("noted", "precision", "told"),
    [
        ({"draw_rule": DRAW_RULE}, "32-true", []),
        ({}, "32-true", ["samples differ from here on"]),
        ({"draw_rule": DRAW_RULE, "compute": AUTO}, "32-true", ["bf16-mixed goes on as before"]),
        ({"draw_rule": DRAW_RULE, "compute": AUTO}, "bf16-mixed", []),
        ({"draw_rule": DRAW_RULE, "compute": AUTO | {"gain": 1.29}}, "32-true", []),
        ({"draw_rule": DRAW_RULE, "compute": AUTO | {"mean_error": float("nan")}}, "32-true", []),
        ({"draw_rule": DRAW_RULE, "compute": {}}, "32-true", []),
    ],
)
def test_a_checkpoint_of_an_earlier_version_tells_what_goes_on_otherwise(
    noted: dict[str, Any], precision: str, told: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    warn_of_earlier_rules(noted, precision)
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == len(told) and all(part in line for part, line in zip(told, said, strict=True))
