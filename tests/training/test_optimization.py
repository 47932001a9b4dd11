"""Learning rates worked out by hand, clipping, and what is optimised; the weight of the entropy bonus by hand against
TRL's rule, and inside of runs: it follows the target, is logged, and goes on where a checkpoint left it."""

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from grpo_pl.training.optimization import Optimization
from tests.training.runs import resumed

HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("total", "settings", "rates"),
    [
        (5, {"lr": 4.0, "warmup_rollouts": 3}, [1.0, 2.0, 3.0, 4.0, 4.0]),
        # x = 0, 1/4, 1/2, 3/4 of the way from 1 to 0.2
        (4, {"schedule": "linear", "final_lr_fraction": 0.2}, [1.0, 0.8, 0.6, 0.4]),
        # the decay begins where the warm-up ends
        (6, {"warmup_rollouts": 2, "schedule": "cosine"}, [1 / 3, 2 / 3, 1, (1 + HALF) / 2, 0.5, (1 - HALF) / 2]),
        (2, {"schedule": "cosine", "final_lr_fraction": 0.1}, [1.0, 0.55, 0.1, 0.1]),  # at and behind the end its floor
        (3, {"warmup_rollouts": 9, "schedule": "cosine"}, [0.1, 0.2, 0.3]),
        (3, {"final_lr_fraction": 0.5}, [1.0, 1.0, 1.0]),  # which a constant rate ignores
    ],
)
def test_rates_by_hand(total: int, settings: dict[str, Any], rates: list[float]) -> None:
    optimization = Optimization(**{"lr": 1.0, **settings})
    assert [optimization.lr_at(rollout, total) for rollout in range(len(rates))] == pytest.approx(rates)


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


RULE = {"target": 0.3, "step": 0.01, "most": 0.025}


def test_a_run_follows_its_target_and_a_resumed_one_goes_on(command_line: Any, read_metrics: Any) -> None:
    objective = {
        "group_size": 4,
        "beta": 0.0,
        "terms": {
            "entropy": {
                "class_path": "grpo_pl.objective.terms.entropy_target.EntropyTarget",
                "init_args": {"target": 50.0, "coef_step": 0.01},
            }
        },
    }
    config = command_line.config("held", model__algorithm=objective)
    command_line.done("fit", "--config", config)
    _, whole = resumed(command_line, read_metrics, command_line.runs / "held")
    assert [float(row["entropy_coef"]) for row in whole] == pytest.approx([0.01, 0.02, 0.03, 0.04])  # far below it
