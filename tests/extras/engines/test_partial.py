"""Runs whose long completions are drawn over several steps: schedule, age of tokens, resume, and what is refused; which
groups a step trains on meanwhile, and what a checkpoint holds of them."""

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.extras.engines.partial import PartialRolloutBuffer, PartialRollouts
from grpo_pl.extras.engines.partial_completions import PartialCompletion, PartialGroup, RowIndex
from grpo_pl.types import Problem
from tests.training.runs import ReadMetrics, assert_same_end

pytestmark = pytest.mark.usefixtures("forked")
SHORT: dict[str, Any] = {
    "data__steps": 4,
    "data__val_prompts": 2,
    "trainer__val_check_interval": 4,
}


def fit(command_line: Any, name: str, *options: str, part: int = 4, in_flight: int = 2, **changes: Any) -> Any:
    parts = {"part_length": part, "steps_in_flight": in_flight}
    settings = SHORT | {"model__partial_rollouts": parts} | changes
    return command_line("fit", "--config", command_line.config(name, **settings), *options)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["reward"]]


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    outcome = fit(command_line, "parts")
    assert outcome.status == 0, outcome.err
    return Path(command_line.runs / "parts")


def test_completions_go_on_under_newer_weights_and_none_is_left_at_the_end(run: Path) -> None:
    found = rows(run)
    assert len(found) == 4
    ages = [float(row["sampling/staleness"]) for row in found]
    carried = [float(row["rollout/carried_completions"]) for row in found]
    assert ages[0] == 0.0 and max(ages) > 0.0
    assert carried[-1] == 0.0 and max(carried) > 0.0
    ratios = [float(row["sampling/importance_sampling_ratio/mean"]) for row in found]
    assert ratios[0] == pytest.approx(1.0, abs=1e-6) and any(abs(ratio - 1.0) > 1e-4 for ratio in ratios)


def test_one_step_in_flight_is_the_run_without_parts(command_line: Any, read_metrics: ReadMetrics) -> None:
    plain: dict[str, Any] = {"model__algorithm": {"group_size": 4, "beta": 0.0, "mismatch": "none"}}
    assert fit(command_line, "in_parts", in_flight=1, **plain).status == 0
    assert fit(command_line, "whole", model__partial_rollouts=None, **plain).status == 0
    more = {"sampling/staleness", "rollout/carried_completions"}
    in_parts = [
        {name: value for name, value in row.items() if name not in more}
        for row in read_metrics(command_line.runs / "in_parts/metrics.csv")
    ]
    whole = read_metrics(command_line.runs / "whole/metrics.csv")
    assert len(whole) == len(in_parts)
    for one, other in zip(in_parts, whole, strict=True):
        assert one.keys() == other.keys()
        assert {n: float(v) for n, v in one.items() if v} == pytest.approx(
            {n: float(v) for n, v in other.items() if v}, rel=1e-4, abs=1e-6
        )


@pytest.mark.parametrize("stopped_after", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_resumed_run_is_the_undisturbed_one(
    command_line: Any, run: Path, read_metrics: ReadMetrics, stopped_after: int
) -> None:
    name = f"resumed_{stopped_after}"
    first = fit(command_line, name, "--checkpoint.every_n_rollouts=1", f"--trainer.limit_train_batches={stopped_after}")
    assert first.status == 0, first.err
    outcome = fit(command_line, name, "--checkpoint.every_n_rollouts=1", "--resume")
    assert outcome.status == 0, outcome.err
    assert_same_end(command_line.runs / name, run)
    ages = [row["sampling/staleness"] for row in rows(command_line.runs / name)]
    assert ages == [row["sampling/staleness"] for row in rows(run)]


def test_an_engine_with_a_copy_is_held_to_its_newest_tokens(command_line: Any, run: Path) -> None:
    outcome = fit(command_line, "child", model__engine={"class_path": "NativeChildEngine"})
    assert outcome.status == 0, outcome.err
    found = rows(command_line.runs / "child")
    errors = [float(row["sampling/sync_error"]) for row in found if row["sampling/sync_error"]]
    assert len(errors) >= 3 and max(errors) < 1e-5
    assert [row["sampling/staleness"] for row in found] == [row["sampling/staleness"] for row in rows(run)]


def test_weights_that_are_dropped_are_noticed_although_what_is_trained_on_is_older(command_line: Any) -> None:
    """Everything fits one part, so that each update takes what the step before has drawn."""
    keeping = {"class_path": "child_engines.KeepingEngine"}
    outcome = fit(command_line, "keeping", part=64, model__engine=keeping, model__optimization={"lr": 0.01})
    assert outcome.status == 1
    assert "rollout 2 was not drawn from the policy's weights" in outcome.err


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data__staleness": 1}, "data.staleness"),
        ({"model__algorithm": {"group_size": 4, "dynamic_sampling": True}}, "model.algorithm.dynamic_sampling"),
    ],
)
def test_what_it_does_not_go_with_is_refused_in_one_line(
    command_line: Any, changes: dict[str, Any], field: str
) -> None:
    outcome = fit(command_line, "refused", **changes)
    assert outcome.status == 1
    assert f"model.partial_rollouts does not go with {field}: leave out one of the two." in outcome.err


LENGTHS = {0: (2, 9), 1: (3, 3), 2: (4, 1), 3: (2, 2), 4: (1, 1), 5: (8, 8)}
"""Tokens that the two completions of each prompt will have; prompts 2s and 2s + 1 belong to step s."""


def prompts_of(step: int) -> list[Problem]:
    return [Problem(id=i, question=f"{i}?", answer="") for i in (2 * step, 2 * step + 1)]


def grow(groups: list[PartialGroup]) -> dict[RowIndex, PartialCompletion]:
    """Four tokens more for each completion that has not ended."""
    found = {}
    for g, group in enumerate(groups):
        for i, (row, length) in enumerate(zip(group.completions, LENGTHS[group.prompt.id], strict=True)):
            if row.finish_reason is None:
                more = min(4, length - len(row.tokens))
                found[g, i] = PartialCompletion(
                    tokens=torch.full((more,), 5, dtype=torch.int32),
                    logprobs=torch.full((more,), -0.1),
                    versions=torch.zeros(more, dtype=torch.int32),
                    finish_reason="stop" if len(row.tokens) + more == length else None,
                )
    return found


def steps_of(carried: PartialRolloutBuffer, steps: range, total: int, **changes: Any) -> list[list[int]]:
    """The prompts that each step trains on."""
    found = []
    for step in steps:
        mine, _ = carried.advance(
            step,
            total,
            **{
                "wanted": 2,
                "prompts_of": prompts_of,
                "grow": grow,
                "collective": Collective(),
                **changes,
            },
        )
        assert all(group.whole for group in mine)
        carried.commit(step)
        found.append([group.prompt.id for group in mine])
    return found


def carried_over(in_flight: int = 2, group_size: int = 2, longest: int = 20) -> PartialRolloutBuffer:
    settings = PartialRollouts(part_length=4, steps_in_flight=in_flight)
    return PartialRolloutBuffer(settings=settings, group_size=group_size, longest=longest)


def test_groups_that_are_whole_go_first_and_the_others_wait() -> None:
    # after 4 tokens 1, 2 and 3 are whole, so that step 1 takes 3 and 4; 0 and 5 have 12 and 8 tokens by the end
    assert steps_of(carried_over(), range(3), 3) == [[1, 2], [3, 4], [0, 5]]


def test_one_step_in_flight_waits_for_all_its_groups() -> None:
    assert steps_of(carried_over(1), range(3), 3) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_checkpoint_holds_what_waits(stopped_after: int) -> None:
    begun = carried_over()
    first = steps_of(begun, range(stopped_after), 3)
    stored = io.BytesIO()
    torch.save(begun.state_dict(), stored)
    resumed = carried_over()
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    assert str(resumed.groups) == str(begun.groups)
    assert first + steps_of(resumed, range(stopped_after, 3), 3) == [[1, 2], [3, 4], [0, 5]]


def test_a_step_that_was_given_up_leaves_everything_as_it_was() -> None:
    carried = carried_over()
    steps_of(carried, range(1), 3)
    before = carried.state_dict()

    def interrupted(groups: list[PartialGroup]) -> list[PartialGroup]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        steps_of(carried, range(1, 2), 3, grow=interrupted)
    assert str(carried.state_dict()) == str(before)
    assert steps_of(carried, range(1, 3), 3) == [[3, 4], [0, 5]]


def test_a_run_that_begins_to_cut_completions_later_asks_for_no_earlier_prompts() -> None:
    assert steps_of(carried_over(), range(1, 3), 3) == [[2, 3], [4, 5]]


def test_more_prompts_a_step_after_a_resume_open_further_steps() -> None:
    carried = carried_over(1)
    assert steps_of(carried, range(1), 1, wanted=4) == [[0, 1, 2, 3]]


def test_columns_that_a_checkpoint_cannot_hold_are_named_before_anything_is_drawn() -> None:
    def with_a_set(step: int) -> list[Problem]:
        return [replace(problem, columns={"tags": {"a"}}) for problem in prompts_of(step)]

    with pytest.raises(ValueError, match="column 'tags' of problem 0 is a set, which no checkpoint may hold"):
        steps_of(carried_over(), range(1), 3, prompts_of=with_a_set, grow=None)


def test_another_group_size_is_refused_and_a_lower_limit_ends_what_is_too_long() -> None:
    begun = carried_over()
    steps_of(begun, range(1), 3)
    with pytest.raises(ValueError, match=r"carries groups of 2 completions .*group_size is 4: resume"):
        carried_over(group_size=4).load_state_dict(begun.state_dict())
    resumed = carried_over(longest=3)
    resumed.load_state_dict(begun.state_dict())
    rows = {group.prompt.id: group.completions for group in resumed.groups}
    assert [(len(row.tokens), row.finish_reason) for row in rows[0]] == [(2, "stop"), (3, "length")]


@pytest.mark.parametrize("field", ["part_length", "steps_in_flight"])
def test_settings_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"partial_rollouts.{field} must be at least 1, got 0"):
        PartialRollouts(**{"part_length": 4, field: 0})
