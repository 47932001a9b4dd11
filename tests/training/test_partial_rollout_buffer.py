"""Which groups a step trains on while long completions go on, and what a checkpoint holds of them."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.rollout.partial import PartialCompletion, PartialGroup, RowIndex
from grpo_pl.training.partial_rollouts import PartialRolloutBuffer, PartialRollouts
from grpo_pl.types import Problem

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
                "group_size": 2,
                "grow": grow,
                "collective": Collective(),
                **changes,
            },
        )
        assert all(group.whole for group in mine)
        carried.commit()
        found.append([group.prompt.id for group in mine])
    return found


def carried_over(in_flight: int = 2) -> PartialRolloutBuffer:
    return PartialRolloutBuffer(settings=PartialRollouts(part_length=4, steps_in_flight=in_flight))


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
    resumed.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True), group_size=2, longest=20)
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
        carried_over().load_state_dict(begun.state_dict(), group_size=4, longest=20)
    resumed = carried_over()
    resumed.load_state_dict(begun.state_dict(), group_size=2, longest=3)
    rows = {group.prompt.id: group.completions for group in resumed.groups}
    assert [(len(row.tokens), row.finish_reason) for row in rows[0]] == [(2, "stop"), (3, "length")]


@pytest.mark.parametrize("field", ["part_length", "steps_in_flight"])
def test_settings_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"partial_rollouts.{field} must be at least 1, got 0"):
        PartialRollouts(**{"part_length": 4, field: 0})
