"""The exchanges between ranks: nothing alone, exact on two processes over gloo."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.rollout.engine import EngineDied, RolloutInterrupted

OnTwoRanks = Callable[[Callable[[Collective], Any]], list[Any]]


def _exchanges(collective: Collective) -> dict[str, Any]:
    mine = collective.rank + 1
    values = torch.arange(3.0 * mine) if mine == 2 else torch.tensor([7.0])
    own = torch.tensor([float(mine), 10.0 * mine])
    summed = collective.sum(own)
    return {
        "rows": collective.gather_rows(torch.full((2, 1), mine)).tolist(),
        "values": collective.gather_values(values).tolist(),
        "own values": collective.own_values(torch.arange(7.0), len(values), torch.device("cpu")).tolist(),
        "none": collective.gather_values(torch.tensor([4.0])[: collective.rank]).tolist(),
        "objects": collective.gather_objects({"rank": collective.rank}),
        "sum": summed.tolist(),
        "own": own.tolist(),
        "max": collective.max(5 - collective.rank, torch.device("cpu")),
        "ratios": collective.ratios(
            {
                "kl": (torch.tensor(3.0 * mine), torch.tensor(mine)),
                "nothing": (torch.tensor(0.0), torch.tensor(0)),
                "here": (torch.tensor(float(collective.rank)), torch.tensor(4 * collective.rank)),
            }
        ),
    }


def test_two_ranks_see_the_same_totals(on_two_ranks: OnTwoRanks) -> None:
    first, second = on_two_ranks(_exchanges)
    assert first.pop("own") == [1.0, 10.0]  # what was summed stays as it was
    assert second.pop("own") == [2.0, 20.0]
    assert first.pop("own values") == [0.0]
    assert second.pop("own values") == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert first == second
    assert first == {
        "rows": [[1], [1], [2], [2]],
        "values": [7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "none": [4.0],
        "objects": [{"rank": 0}, {"rank": 1}],
        "sum": [3.0, 30.0],
        "max": 5,
        "ratios": {"kl": 3.0, "here": 0.25},
    }


def _raising(*kinds: type[Exception] | None) -> Callable[[Collective], tuple[str, str]]:
    """What each rank raises when rank r raises ``kinds[r]`` in a rollout."""

    def work(collective: Collective) -> tuple[str, str]:
        kind = kinds[collective.rank]

        def draw() -> int:
            if kind is not None:
                raise kind(f"here, on rank {collective.rank}")
            return 7

        try:
            return "drawn", str(collective.interruptible(draw, torch.device("cpu")))
        except Exception as error:
            return type(error).__name__, str(error)

    return work


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ((None, None), ("drawn", "drawn")),
        ((None, EngineDied), ("EngineDied", "EngineDied")),
        ((None, ValueError), ("ValueError", "ValueError")),
        ((OSError, None), ("OSError", "ValueError")),
        ((EngineDied, KeyError), ("ValueError", "KeyError")),
        ((KeyError, RolloutInterrupted), ("RolloutInterrupted", "RolloutInterrupted")),
    ],
)
def test_a_rollout_that_fails_on_one_rank_ends_on_all(
    on_two_ranks: OnTwoRanks, kinds: tuple[type[Exception] | None, ...], names: tuple[str, str]
) -> None:
    results = on_two_ranks(_raising(*kinds))
    assert tuple(name for name, _ in results) == names
    if names[0] == "ValueError":
        assert "process failed" in results[0][1] and "here, on rank 1" in results[0][1]


def test_alone_every_exchange_is_the_identity() -> None:
    alone, rows = Collective(), torch.tensor([[1.0, 2.0]])
    assert alone.gather_rows(rows) is rows
    assert alone.sum(rows) is rows
    assert torch.equal(alone.gather_values(rows[0]), rows[0])
    assert alone.gather_objects("x") == ["x"]
    assert alone.max(3, torch.device("cpu")) == 3


def test_a_ratio_of_totals_is_no_mean_of_ratios_and_nothing_is_left_out() -> None:
    sums = {"kl": (torch.tensor(6.0), torch.tensor(4)), "empty": (torch.tensor(0.0), torch.tensor(0))}
    assert Collective().ratios(sums) == {"kl": 1.5}
    assert Collective().ratios({}) == {}
