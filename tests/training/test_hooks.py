"""Callbacks inside a step: they are heard while their trainer runs, and leave nothing behind in the module."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from lightning.pytorch import LightningModule, Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.evaluation.held_out import Validation
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.weights import weights_digest
from grpo_pl.rewards import ExactReward
from grpo_pl.rollout.engine import RolloutInterrupted
from grpo_pl.training.experience import Experience
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import SamplingParams
from tests.gradient_step import SHAPE
from tests.training.test_lightning_module import QUIET


class Listener(StepCallback):
    """Notes all it is told, and stops the run in the middle of a stage if it is to."""

    def __init__(self, stop_in: str = "") -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.stop_in, self.stopped = stop_in, False
        self.experiences: list[Experience] = []
        self.before: list[tuple[Experience, str]] = []
        self.after: list[str] = []

    def on_stage_progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        self.stages.append((stage, done, total))
        self.stopped |= stage == self.stop_in

    def before_update(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> None:
        self.before.append((experience, weights_digest(pl_module.state_dict().items())))

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        self.experiences.append(experience)
        self.after.append(weights_digest(pl_module.state_dict().items()))
        return {"listener/steps": float(len(self.experiences))}

    def should_stop(self) -> bool:
        return self.stopped


@pytest.fixture
def module() -> GRPOModule:
    return GRPOModule(
        policy=PolicyConfig(from_scratch={"model_type": "qwen2", **SHAPE}),
        rewards=[ExactReward(correctness=True)],
        algorithm=GRPOAlgorithm(group_size=2, beta=0.0, skip_zero_advantage=False),
        sampling=SamplingParams(max_completion_length=4),
        max_tokens_per_microbatch=100,
    )


def _run(verb: str, module: GRPOModule, *callbacks: StepCallback, steps: int = 2, held_out: int = 2) -> Trainer:
    data = RolloutDataModule(
        ArithmeticPrompts(digits=1), steps=steps, prompts_per_step=2, val_prompts=held_out, val_batch_size=2
    )
    trainer = Trainer(
        **QUIET,
        max_epochs=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if verb == "fit" else 1.0,
        callbacks=list(callbacks),
    )
    getattr(trainer, verb)(module, datamodule=data)
    return trainer


def test_every_callback_of_the_trainer_is_asked(module: GRPOModule) -> None:
    one, two = Listener(), Listener()
    trainer = _run("fit", module, one, two)
    assert one.stages == two.stages
    assert {stage for stage, *_ in one.stages} == {"rollout", "reward", "update"}
    assert one.stages.count(("update", 1, 1)) == 2 and ("reward", 4, 4) in one.stages
    assert [experience.samples.step for experience in one.experiences] == [0, 1]
    assert trainer.callback_metrics["listener/steps"] == 2.0


def test_a_callback_sees_the_experience_before_the_update_and_after_it(module: GRPOModule) -> None:
    listener = Listener()
    module.configured_algorithm = replace(module.algorithm, entropy_coef=0.1)  # a gradient whatever the rewards are
    _run("fit", module, listener)
    assert [experience for experience, _ in listener.before] == listener.experiences
    (_, first), (_, second) = listener.before
    assert first != second == listener.after[0] != listener.after[1]


def test_a_callback_is_heard_no_more_once_its_trainer_is_done(module: GRPOModule) -> None:
    first, second = Listener(stop_in="validate"), Listener()
    _run("fit", module, first)
    heard = len(first.stages)
    _run("validate", module, second)
    assert len(first.stages) == heard and not first.stopped
    assert {stage for stage, *_ in second.stages} == {"validate"}
    assert not any(isinstance(value, Listener) for value in vars(module).values())


def test_a_validation_is_counted_over_all_of_its_batches(module: GRPOModule) -> None:
    listener = Listener()
    module.validation = Validation(samples=3)  # and a greedy one
    _run("validate", module, listener, held_out=5)
    assert {total for _, _, total in listener.stages} == {5 * (3 + 1)}
    done = [done for _, done, _ in listener.stages]
    assert done == sorted(done) and 2 * 4 < done[-1] <= 20


def test_a_callback_can_stop_a_rollout(module: GRPOModule) -> None:
    listener = Listener(stop_in="reward")  # of the first step: the second rollout is interrupted
    with pytest.raises(RolloutInterrupted):
        _run("fit", module, listener, steps=5)
    assert len(listener.experiences) == 1
