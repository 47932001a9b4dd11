"""Learning rates worked out by hand, clipping, and what is optimised."""

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from grpo_pl.training.optimization import Optimization


def _rates(total: int, **arguments: Any) -> list[float]:
    optimization = Optimization(**arguments)
    return [optimization.lr_at(rollout, total) for rollout in range(total)]


def test_constant_rate_after_a_linear_warm_up() -> None:
    assert _rates(5, lr=4.0, warmup_rollouts=3) == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.0])


def test_linear_decay_to_a_fraction() -> None:
    # x = 0, 1/4, 1/2, 3/4 of the way from 1 to 0.2
    assert _rates(4, lr=1.0, schedule="linear", final_lr_fraction=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_decay_begins_where_the_warm_up_ends() -> None:
    half = math.sqrt(0.5)
    assert _rates(6, lr=1.0, warmup_rollouts=2, schedule="cosine") == pytest.approx(
        [1 / 3, 2 / 3, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    )
    assert Optimization(lr=1.0, schedule="cosine", final_lr_fraction=0.1).lr_at(5, 10) == pytest.approx(0.55)


def test_at_and_behind_the_end_the_rate_stays_at_its_floor() -> None:
    optimization = Optimization(lr=2.0, schedule="cosine", final_lr_fraction=0.25)
    assert [optimization.lr_at(rollout, 4) for rollout in (4, 9)] == pytest.approx([0.5, 0.5])


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    assert _rates(3, lr=1.0, warmup_rollouts=9, schedule="cosine") == pytest.approx([0.1, 0.2, 0.3])


def test_a_constant_rate_ignores_the_final_fraction() -> None:
    assert _rates(3, lr=1.0, final_lr_fraction=0.5) == [1.0, 1.0, 1.0]


def test_gradients_are_scaled_to_the_global_norm_and_the_norm_before_is_returned() -> None:
    a, b = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert Optimization(max_grad_norm=1.0).clip_gradients([a, b]).item() == pytest.approx(5.0)
    assert [a.grad.item(), b.grad.item()] == pytest.approx([0.6, 0.8], rel=1e-5)


@pytest.mark.parametrize("limit", [0.0, 10.0])
def test_small_gradients_and_a_limit_of_zero_change_nothing(limit: float) -> None:
    a = Parameter(torch.zeros(2))
    a.grad = torch.tensor([3.0, 4.0])
    assert Optimization(max_grad_norm=limit).clip_gradients([a]).item() == pytest.approx(5.0)
    assert a.grad.tolist() == [3.0, 4.0]


def test_frozen_parameters_are_not_optimised_and_arguments_arrive() -> None:
    free, frozen = Parameter(torch.zeros(1)), Parameter(torch.zeros(1), requires_grad=False)
    settings = Optimization(lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    (group,) = settings.build([free, frozen]).param_groups
    assert group["params"] == [free]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.9), 1e-6, 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "must be positive, got 0.0"),
        ({"lr": math.nan}, "must be positive, got nan"),
        ({"warmup_rollouts": -1}, "got -1 and 0.0"),
        ({"final_lr_fraction": 1.5}, "got None and 1.5"),
        ({"max_grad_norm": -1.0}, "got -1.0 and 5"),
        ({"max_skipped_updates": 0}, "got 1.0 and 0"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimization(**arguments)
