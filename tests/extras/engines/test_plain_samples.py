"""What a checkpoint holds of samples is all of them."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_pl.environment import Transition
from grpo_pl.extras.agents.episode_rows import Episode, Turn
from grpo_pl.extras.engines.plain_samples import from_plain, to_plain, trimmed
from grpo_pl.rollout.decoding import rollout_tensors
from grpo_pl.rollout.groups import join_samples, select_groups
from grpo_pl.rollout.sampler import Samples
from grpo_pl.types import Problem, Rollout

EPISODE = Episode(
    start=Transition(observation=[{"role": "user", "content": "go"}], state="a", invalid_action=True),
    turns=(
        Turn(action="up", finish_reason="stop", transition=Transition(reward=0.1 + 0.2, terminated=True), segment=1),
    ),
    finish_reason="environment",
)
MESSAGES = ({"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"})


def _samples(width: int) -> Samples:
    ids = torch.arange(2 * width).view(2, width)
    rollout = Rollout(
        group_size=2,
        prompt_ids=ids,
        prompt_mask=ids >= 0,
        completion_ids=ids,
        completion_mask=torch.ones_like(ids, dtype=torch.bool),
        sampling_logprobs=torch.randn(2, width),
        finish_reasons=["stop", "length"],
        policy_version=torch.full_like(ids, 3),
        segment_index=ids % 2 - 1,
        support=ids.unsqueeze(2).int(),
        thoughts=torch.tensor([[[i, 9]] for i in range(len(ids))], dtype=torch.int32),
        top_ids=torch.stack([ids, ids + 1], dim=2).int(),
        top_logprobs=torch.randn(2, width, 2),
    )
    problem = Problem(
        id=2**62 + width, question="?", answer="!", messages=MESSAGES, columns={"level": 2, "tags": ["a"]}
    )
    return Samples(
        prompts=[problem], prompt_texts=["?"], rollout=rollout, completions=["x", "y"], step=7, episodes=[EPISODE] * 2
    )


def _assert_equal(ours: Samples, theirs: Samples) -> None:
    for name, tensor in rollout_tensors(theirs.rollout).items():
        assert torch.equal(getattr(ours.rollout, name), tensor), name
    assert ours.rollout.group_size == theirs.rollout.group_size
    assert list(ours.rollout.finish_reasons) == list(theirs.rollout.finish_reasons)
    assert list(ours.prompts) == list(theirs.prompts) and list(ours.episodes or ()) == list(theirs.episodes or ())
    assert (list(ours.prompt_texts), list(ours.completions)) == (list(theirs.prompt_texts), list(theirs.completions))
    assert ours.step == theirs.step


def test_samples_come_back_from_a_file_of_tensors_and_plain_values(tmp_path: Path) -> None:
    samples = _samples(3)
    torch.save(to_plain(samples), tmp_path / "samples.pt")
    _assert_equal(from_plain(torch.load(tmp_path / "samples.pt", weights_only=True)), samples)


def test_a_part_of_joined_samples_is_as_wide_as_it_was() -> None:
    narrow, wide = _samples(2), _samples(5)
    joined = join_samples([narrow, wide], pad_token_id=9)
    _assert_equal(trimmed(select_groups(joined, [0])), narrow)
    _assert_equal(trimmed(select_groups(joined, [1])), wide)


def test_fields_of_numpy_become_plain(tmp_path: Path) -> None:
    """As sources make them that read rows with NumPy, and environments that compute with it."""
    samples, noted = _samples(2), {"depth": np.int64(1), "map": np.zeros((2, 2)), "agent": object()}
    problem = replace(
        samples.prompts[0],
        id=np.int64(3),  # type: ignore[arg-type]
        answer=np.str_("!"),
        columns={"level": np.int32(2), "easy": np.bool_(True), "share": np.float64(0.5), "0-d": np.array(7)},
    )
    start = replace(EPISODE.start, reward=np.float32(0.25), info=noted)  # type: ignore[arg-type]
    given = replace(samples, prompts=[problem], episodes=[replace(EPISODE, start=start)] * 2)
    torch.save(to_plain(given), tmp_path / "samples.pt")
    back = from_plain(torch.load(tmp_path / "samples.pt", weights_only=True))
    (problem,) = back.prompts
    assert (problem.id, problem.answer, type(problem.id), type(problem.answer)) == (3, "!", int, str)
    assert problem.columns == {"level": 2, "easy": True, "share": 0.5, "0-d": 7}
    assert {type(value) for value in problem.columns.values()} == {int, bool, float}
    assert back.episodes is not None and back.episodes[0] == replace(EPISODE, start=replace(start, info={}))


@pytest.mark.parametrize(("name", "field"), [("column 'when'", "columns"), ("answer", "answer")])
def test_what_no_checkpoint_may_hold_is_named(name: str, field: str) -> None:
    samples, day = _samples(2), datetime.date(2026, 1, 1)
    value: Any = {"when": day} if field == "columns" else day
    with pytest.raises(ValueError, match=rf"{name} of problem \d+ is a date, which no checkpoint may hold"):
        to_plain(replace(samples, prompts=[replace(samples.prompts[0], **{field: value})]))
