"""The torchmetrics of held-out problems: batches, ranks and samples without a verdict; their formulas are those of
``grpo_pl.functional.estimates``."""

import math
import multiprocessing
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.evaluation.metrics import (
    AverageAtK,
    GroupMetric,
    MajorityAtK,
    PassAtK,
    correctness_metrics,
    ks_of,
    pass_rates,
    summarise,
)
from grpo_pl.functional.estimates import estimate_mean, pass_at_k

CORRECT = [[True, False, False, False], [False] * 4, [True] * 4]


def _mean(metric: GroupMetric, *samples: Any, **told: Any) -> float:
    metric.update(*map(torch.tensor, samples), **told)
    return metric.compute().item()


@pytest.mark.parametrize(
    ("metric", "samples", "expected"),
    [
        (PassAtK(1), [CORRECT], (0.25 + 0 + 1) / 3),
        (PassAtK(2), [CORRECT], (0.5 + 0 + 1) / 3),
        (PassAtK(4), [CORRECT], 2 / 3),
        (PassAtK(500), [[[True] + [False] * 999]], 0.5),  # no overflow
        (PassAtK(1), [[[True, False], [True, True]], [True, False]], 0.5),  # the second only fills up the batch
        (MajorityAtK(3), [[[0, 0, 1], [1, 1, 0], [-1, -1, 0], [0, 1, -1]]], (1 + 0 + 1 + 0.5) / 4),
        (AverageAtK(2), [[[10, 20], [40, 50]], [True, True]], 30.0),
        (AverageAtK(2), [[[True, False], [False, False]]], 0.25),
    ],
)
def test_figures_by_hand(metric: GroupMetric, samples: list[Any], expected: float) -> None:
    assert _mean(metric, *samples) == pytest.approx(expected)


def test_batches_of_any_size_and_number_of_samples_add_up_until_a_reset() -> None:
    metric = PassAtK(1)
    metric.update(torch.tensor([[True, False], [True, True]]))
    assert _mean(metric, [[False, False, False]]) == pytest.approx(0.5)
    assert metric.estimate() == estimate_mean(torch.tensor([0.5, 1.0, 0.0]))
    metric.reset()
    assert _mean(metric, [[True, True]], [False]) == 0.0  # no problem at all


def test_samples_that_could_not_be_judged_count_neither_as_right_nor_as_wrong() -> None:
    correct = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    judged = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    one, two, three = PassAtK(1), PassAtK(2), PassAtK(3)
    for metric in (one, two, three):
        metric.update(correct, ids=torch.tensor([7, 8, 9]), judged=judged)
    assert one.results() == {7: 0.5, 8: 1.0}  # nothing is known of the third problem
    assert two.results() == {7: 1.0, 8: 1.0}
    assert three.results() == {8: 1.0}  # two judged samples say nothing about three draws
    assert one.compute().item() == 0.75


def test_every_share_of_judged_samples_is_the_share_of_their_subsets() -> None:
    for correct, judged in product(product([False, True], repeat=4), repeat=2):
        known = [c for c, j in zip(correct, judged, strict=True) if j]
        for k in (1, 2, 3):
            subsets = [any(subset) for subset in combinations(known, k)]
            value = pass_at_k(torch.tensor([correct]), k, torch.tensor([judged])).item()
            assert value == pytest.approx(sum(subsets) / len(subsets)) if subsets else math.isnan(value)


def test_samples_that_could_not_be_judged_have_no_vote() -> None:
    classes = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]])
    judged = torch.tensor([[False, True, True, True, False], [True, True, False, False, False]])
    metric = MajorityAtK(3)
    metric.update(classes, judged=judged)
    assert metric.results() == {0: 1.0}
    plain = MajorityAtK(3)
    plain.update(classes)
    assert plain.results() == {0: 0.0, 1: 0.0}


def test_too_few_samples_and_k_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples a problem, got 2"):
        PassAtK(3).update(torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="got 0"):
        PassAtK(0)


def _update_on_a_rank(rank: int, meeting: Path, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    metric = PassAtK(1)
    metric.update(torch.tensor([[True, False], [True, True]][: rank + 1]))  # one problem here, two there
    results.put((metric.compute().item(), metric.estimate()))
    torch.distributed.destroy_process_group()


def test_mean_and_interval_are_those_of_all_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = [(rank, tmp_path / "meeting", results) for rank in range(2)]
    processes = [context.Process(target=_update_on_a_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=10)
    expected = estimate_mean(torch.tensor([0.5, 0.5, 1.0]))
    assert found == [(pytest.approx(2 / 3), expected)] * 2


def test_pass_rates_count_full_values_among_those_that_could_be_computed() -> None:
    values = torch.tensor([[1.0, 0.9, math.nan, 2.0], [0.0, 0.0, 0.0, 0.0], [math.nan] * 4])
    assert pass_rates(values) == [pytest.approx(2 / 3), 0.0, None]


def test_ks_are_powers_of_two_and_n_and_name_the_metrics_of_correctness() -> None:
    assert [ks_of(n) for n in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert list(correctness_metrics([1, 4], 4)) == ["pass@1", "pass@4", "maj@4"]
    assert list(correctness_metrics([1], 1)) == ["pass@1"]


def _result(correct: list[bool | None], classes: list[int]) -> dict[str, Any]:
    return {
        "samples": [
            {"correct": c, "answer_class": a, "tokens": 10, "finish_reason": "stop"}
            for c, a in zip(correct, classes, strict=True)
        ]
    }


def test_the_summary_is_that_of_the_metrics() -> None:
    results = [
        _result([True, True, False, False], [0, 0, 1, 2]),
        _result([False, False, False, False], [1, 1, 2, -1]),
        _result([True, True, True, True], [0, 0, 0, 0]),
        _result([None, None, None, None], [-1, -1, -1, -1]),
    ]
    summary = summarise(results, n=4)
    correct = [[True, True, False, False], [False] * 4, [True] * 4]
    for k in (1, 2, 4):
        assert summary["metrics"][f"pass@{k}"]["value"] == pytest.approx(_mean(PassAtK(k), correct))
    majority = _mean(MajorityAtK(4), [[0, 0, 1, 2], [1, 1, 2, -1], [0] * 4])
    assert summary["metrics"]["maj@4"]["value"] == pytest.approx(majority)
    assert summary["metrics"]["pass@1"]["low"] == estimate_mean(torch.tensor([0.5, 0.0, 1.0])).low
    assert (summary["problems"], summary["unscored"], summary["unjudged"]) == (4, 1, 4)


def test_completions_that_could_not_be_judged_count_neither_as_right_nor_as_wrong() -> None:
    results = [_result([True, None, False, True], [0, 1, 2, 0]), _result([None, None, None, True], [1, 2, 3, 0])]
    summary = summarise(results, n=4)
    assert summary["metrics"]["pass@1"]["value"] == pytest.approx((2 / 3 + 1) / 2)
    assert (summary["metrics"]["pass@2"]["value"], summary["metrics"]["pass@2"]["problems"]) == (1.0, 1)
    assert "maj@4" not in summary["metrics"]  # no problem has four votes
    assert (summary["unscored"], summary["unjudged"]) == (0, 4)
