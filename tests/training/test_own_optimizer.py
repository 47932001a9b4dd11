"""A subclass's own ``configure_optimizers``: its rates, groups and schedulers are those that train, and are resumed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from grpo_pl.callbacks.checkpoint import RolloutCheckpoint
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.files.checkpoints import checkpoint_path
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.rewards import Reward, Score
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.optimization import Optimization
from grpo_pl.types import SamplingParams
from tests.gradient_step import SHAPE
from tests.training.test_lightning_module import QUIET

ARGUMENTS: dict[str, Any] = {"max_epochs": 1, "enable_model_summary": False, "limit_val_batches": 0}


class Digits(Reward):
    """The share of digits, which is seldom equal in a group."""

    name, weight, correctness = "digits", 1.0, False

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(sum(map(str.isdigit, text)) / max(1, len(text)), "ok") for text in completions]


class Groups(GRPOModule):
    """SGD with the embeddings in a group of their own, the norms in none, and the first rate halved at each rollout."""

    rates = (1.0, 0.25)

    def configure_optimizers(self) -> Any:
        weights = dict(self.require_policy().named_parameters())
        first = [weight for name, weight in weights.items() if "embed" in name]
        second = [weight for name, weight in weights.items() if "embed" not in name and "norm" not in name]
        groups = [{"params": some, "lr": rate} for some, rate in zip((first, second), self.rates, strict=True)]
        optimizer = torch.optim.SGD(groups, lr=9.0, momentum=0.5)
        return [optimizer], [LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0])]


def tiny_module(kind: type[GRPOModule] = GRPOModule, **optimization: Any) -> GRPOModule:
    return kind(
        policy=PolicyConfig(from_scratch={"model_type": "qwen2", **SHAPE}),
        rewards=[Digits()],
        algorithm=GRPOAlgorithm(group_size=4, beta=0.0),
        sampling=SamplingParams(max_completion_length=8),
        optimization=Optimization(**{"max_grad_norm": 0.0, **optimization}),
        max_tokens_per_microbatch=100,
    )


def _fit(module: GRPOModule, steps: int, *, from_file: Path | None = None, **more: Any) -> Trainer:
    data = RolloutDataModule(ArithmeticPrompts(digits=1), steps=3, prompts_per_step=4, val_prompts=2)
    trainer = Trainer(**{**QUIET, **ARGUMENTS, **more}, limit_train_batches=steps)
    trainer.fit(module, datamodule=data, ckpt_path=from_file, weights_only=True)
    return trainer


def _weights(module: GRPOModule) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.require_policy().named_parameters()}


def test_each_group_moves_at_its_own_rate_and_the_scheduler_sets_it() -> None:
    halved = type("Halved", (Groups,), {"rates": (0.5, 0.25)})
    module, other = tiny_module(Groups), tiny_module(halved)
    trainer = _fit(module, 1)
    _fit(other, 1)
    before = tiny_module()
    before.trainer = trainer
    before.configure_model()
    start, ours, theirs = _weights(before), _weights(module), _weights(other)
    for name, weight in ours.items():
        moved, half = weight - start[name], theirs[name] - start[name]
        assert bool(moved.any()) == ("norm" not in name), name
        torch.testing.assert_close(moved, 2 * half if "embed" in name else half, rtol=1e-3, atol=1e-6)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.5, 0.25]
    assert trainer.callback_metrics["lr"] == 1.0  # of the first group, in this rollout


def test_the_norm_is_that_of_the_weights_which_are_updated() -> None:
    """The gradients of other weights neither pile up nor count when gradients are clipped."""
    first = type("Still", (Groups,), {"rates": (0.0, 0.0)})  # so the gradients are of the same weights each time
    trainer = _fit(tiny_module(first, max_grad_norm=1e-3), 3)
    module: Any = trainer.lightning_module
    updated = [weight for group in trainer.optimizers[0].param_groups for weight in group["params"]]
    assert all(weight.grad is None for weight in module.policy.parameters())
    norms = torch.stack([trainer.optimizers[0].state[weight]["momentum_buffer"].norm() for weight in updated]).norm()
    assert 1e-3 / 2 < norms < 1.75e-3  # three gradients of norm 1e-3, summed with 1, ½, ¼


def test_a_resumed_run_goes_on_with_the_state_of_optimiser_and_scheduler(tmp_path: Path) -> None:
    whole, rest, saved = tiny_module(Groups), tiny_module(Groups), RolloutCheckpoint(every_n_rollouts=1, keep=9)
    saved.folder = tmp_path
    _fit(whole, 3, callbacks=[saved], enable_checkpointing=True)
    trainer = _fit(rest, 3, from_file=checkpoint_path(tmp_path, 1))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.125
    assert all(torch.equal(weight, _weights(rest)[name]) for name, weight in _weights(whole).items())


def test_one_scheduler_may_step_every_other_rollout() -> None:
    class Slow(GRPOModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adagrad(self.require_policy().parameters(), lr=1e-3)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": StepLR(optimizer, 1, gamma=0.1), "frequency": 2},
            }

    (optimizer,) = _fit(tiny_module(Slow), 3).optimizers
    assert type(optimizer) is torch.optim.Adagrad and optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("interval", "frequency", "rates"),
    [
        ("epoch", 1, [1e-3, 1e-3, 1e-4, 1e-4, 1e-5, 1e-5]),
        ("epoch", 2, [1e-3, 1e-3, 1e-3, 1e-3, 1e-4, 1e-4]),
        ("step", 1, [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8]),
        ("step", 3, [1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 1e-4]),
    ],
)
def test_a_scheduler_may_step_after_each_update_instead(
    tmp_path: Path, interval: str, frequency: int, rates: list[float]
) -> None:
    seen: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(self.param_groups[0]["lr"])
            super().step(closure)

    class Own(GRPOModule):
        def configure_optimizers(self) -> Any:
            optimizer = Noting(self.require_policy().parameters(), lr=1e-3)
            scheduler = StepLR(optimizer, 1, gamma=0.1)
            return [optimizer], [{"scheduler": scheduler, "interval": interval, "frequency": frequency}]

    def module() -> GRPOModule:
        ours = tiny_module(Own)
        ours.algorithm = ours.configured_algorithm = replace(ours.algorithm, num_minibatches=2)
        return ours

    saved = RolloutCheckpoint(every_n_rollouts=1, keep=9)
    saved.folder = tmp_path
    _fit(module(), 3, callbacks=[saved], enable_checkpointing=True)
    assert seen == pytest.approx(rates)
    seen.clear()
    _fit(module(), 3, from_file=checkpoint_path(tmp_path, 1))
    assert seen == pytest.approx(rates[2:])


def test_an_optimiser_that_is_set_on_the_module_itself_is_used() -> None:
    """As Lightning's own command line does with ``--optimizer``."""
    module = tiny_module()
    module.configure_optimizers = MethodType(  # type: ignore[method-assign]
        lambda self: torch.optim.SGD(self.policy.parameters(), lr=0.125), module
    )
    (optimizer,) = _fit(module, 1).optimizers
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["lr"] == 0.125


def _sgd(module: GRPOModule) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.require_policy().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("returned", "optimization", "line"),
    [
        (_sgd, {"lr": 1e-3, "warmup_rollouts": 2}, r"^model\.optimization has lr, warmup_rollouts, and Own its own"),
        (_sgd, {"weight_decay": 0.1}, r"^model\.optimization has weight_decay, and Own its own"),
        (lambda module: [_sgd(module), _sgd(module)], {}, r"^configure_optimizers of Own returns 2 optimisers"),
        (lambda module: None, {}, r"^configure_optimizers of Own returns no optimiser that updates"),
        (lambda module: torch.optim.SGD([torch.ones(1)]), {}, r"^configure_optimizers of Own returns no optimiser"),
        (
            lambda module: {"optimizer": (own := _sgd(module)), "lr_scheduler": ReduceLROnPlateau(own)},
            {},
            r"^configure_optimizers of Own returns ReduceLROnPlateau",
        ),
        (
            lambda module: ([own := _sgd(module)], [{"scheduler": StepLR(own, 1), "interval": "batch"}]),
            {},
            r"^configure_optimizers of Own returns a scheduler with interval 'batch'",
        ),
        (lambda module: GRPOModule.configure_optimizers(module), {}, r"^configure_optimizers of Own asks GRPOModule's"),
    ],
    ids=["rate", "decay", "two", "none", "others", "plateau", "interval", "ours"],
)
def test_what_would_train_otherwise_is_refused_in_one_line(
    returned: Callable[[GRPOModule], Any], optimization: dict[str, Any], line: str
) -> None:
    own = type("Own", (GRPOModule,), {"configure_optimizers": returned})
    with pytest.raises(ValueError, match=f"{line}[^\n]*$"):
        _fit(tiny_module(own, **optimization), 1)
