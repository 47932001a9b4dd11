"""A strategy that nobody has tested is taken if its first rollout is that of one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import Strategy

from grpo_pl.data.curriculum import CurriculumPrompts
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.sources import PromptSource
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rewards import ExactReward, Reward, Score
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization
from grpo_pl.types import SamplingParams
from tests.conftest import TINY_POLICY
from tests.training.test_lightning_module import QUIET


@dataclass(kw_only=True)
class Letters(Reward):
    """The same for all completions of the first rollout, which teaches nothing; later their different letters."""

    name: str = "letters"
    weight: float = 1.0
    correctness: bool = False
    calls: int = field(default=0, init=False)

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Any) -> list[Score]:
        self.calls += 1
        return [Score(0.0 if self.calls == 1 else len(set(text)) / 10, "ok") for text in completions]


class Own(Strategy):
    """A user's own, of one process, that extends none of those that are tested."""

    global_rank, local_rank, world_size = 0, 0, 1

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def is_global_zero(self) -> bool:
        return True

    def model_to_device(self) -> None: ...
    def barrier(self, name: str | None = None) -> None: ...
    def reduce(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Any, *arguments: Any, **options: Any) -> Any:
        return tensor

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


class OtherWeights(Own):
    """Its copies of the weights are not those of the policy."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        assert self.model is not None
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.mul_(1.5)


class Doubled(Own):
    """Adds up gradients that should be averaged."""

    def backward(self, closure_loss: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return super().backward(2.0 * closure_loss, *arguments, **options)


def _fit(
    strategy: Any,
    *,
    lr: float = 1e-3,
    steps: int = 3,
    checkpoint: Path | None = None,
    source: PromptSource | None = None,
    **fields: Any,
) -> GRPOModule:
    """A run; it goes on from ``checkpoint``, or, where there is none, writes it after its second rollout."""
    module = GRPOModule(
        policy=PolicyConfig(from_scratch=TINY_POLICY),
        rewards=[ExactReward(correctness=True), Letters()],
        sampling=SamplingParams(max_completion_length=8),
        optimization=Optimization(lr=lr),
        max_tokens_per_microbatch=150,
        **{"strategy_checked": True, "algorithm": GRPOAlgorithm(group_size=4, beta=0.0), **fields},
    )
    data = RolloutDataModule(source or ArithmeticPrompts(digits=1), steps=steps, prompts_per_step=4)
    resumed = checkpoint if checkpoint is not None and checkpoint.exists() else None

    def save(trainer: Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if checkpoint is not None and index == 1:
            trainer.save_checkpoint(checkpoint)

    callbacks = [] if resumed else [LambdaCallback(on_train_batch_end=save)]
    trainer = Trainer(**QUIET, strategy=strategy, limit_val_batches=0, max_epochs=1, callbacks=callbacks)
    trainer.fit(module, data, ckpt_path=resumed)
    return module


def test_one_that_trains_as_one_process_is_taken_and_changes_nothing() -> None:
    ours, plain = _fit(Own()).state_dict(), _fit("auto").state_dict()
    assert all(torch.equal(ours[name], weight) for name, weight in plain.items())


def test_one_is_taken_beside_an_entropy_target() -> None:
    _fit(Own(), algorithm=GRPOAlgorithm(group_size=4, beta=0.0, entropy_target=9.0, entropy_coef_step=1.0))


def test_one_is_taken_with_a_curriculum_that_follows_what_is_solved() -> None:
    _fit(Own(), source=CurriculumPrompts(source=ArithmeticPrompts(digits=1)))


def test_a_resumed_run_is_held_with_its_own_reference(tmp_path: Path) -> None:
    algorithm, file = GRPOAlgorithm(group_size=4, beta=10.0), tmp_path / "second.ckpt"
    _fit(Own(), algorithm=algorithm, lr=0.03, checkpoint=file)
    assert file.exists()
    module = _fit(Own(), algorithm=algorithm, lr=0.03, checkpoint=file, steps=5)
    assert module._strategy_check is None


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        (OtherWeights, r"log-probabilities differ by \d\.\de[-+]\d+ on average, and rounding explains 1e-02"),
        (Doubled, r"the gradient's norm is [\d.]+, and [\d.]+ in one process"),
    ],
)
def test_one_that_trains_something_else_ends_in_one_line(strategy: type[Own], fault: str) -> None:
    told = rf"^trainer\.strategy is {strategy.__name__}, under which the first rollout was not that of one process: "
    with pytest.raises(ValueError, match=f"{told}{fault}\\. Leave it out, or set ddp"):
        _fit(strategy())


def test_one_that_is_not_to_be_checked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^trainer\.strategy is Own, .*model\.strategy_checked: true holds"):
        _fit(Own(), strategy_checked=False)


def test_a_run_that_one_process_cannot_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.strategy_checked does not go with model\.algorithm\.dynamic"):
        _fit(Own(), algorithm=GRPOAlgorithm(group_size=4, dynamic_sampling=True))
