"""Samples as tensors and plain values, the form in which checkpoints hold rollouts that were drawn ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo_pl.environment import Transition
from grpo_pl.extras.agents.episode_rows import Episode, Turn
from grpo_pl.rollout.decoding import LEFT, rollout_tensors
from grpo_pl.rollout.groups import samples_to
from grpo_pl.rollout.sampler import Samples
from grpo_pl.types import Problem, PromptInputs, Rollout, RowInputs

_PICTURE = "picture of png, sha256, width and height"
"""Key of a picture's fields in a column."""


def to_plain(samples: Samples) -> dict[str, Any]:
    """Everything about the samples but the ``info`` of transitions, for `from_plain`."""
    rollout = samples_to(samples, torch.device("cpu")).rollout
    episodes = samples.episodes
    return {
        "problems": [plain_problem(prompt) for prompt in samples.prompts],
        "prompt_texts": list(samples.prompt_texts),
        "completions": list(samples.completions),
        "step": samples.step,
        "group_size": rollout.group_size,
        "finish_reasons": list(rollout.finish_reasons),
        "tensors": rollout_tensors(rollout),
        "inputs": _plain_inputs(rollout),
        "episodes": None
        if episodes is None
        else [
            {
                "start": _plain_transition(episode.start),
                "turns": [{**vars(turn), "transition": _plain_transition(turn.transition)} for turn in episode.turns],
                "finish_reason": episode.finish_reason,
            }
            for episode in episodes
        ],
    }


def from_plain(state: Mapping[str, Any]) -> Samples:
    """The samples that `to_plain` took."""
    episodes: list[Episode] | None = None
    if state["episodes"] is not None:
        episodes = []
        for each in state["episodes"]:
            turns = [Turn(**{**turn, "transition": Transition(**turn["transition"])}) for turn in each["turns"]]
            start = Transition(**each["start"])
            episodes.append(Episode(start=start, turns=tuple(turns), finish_reason=each["finish_reason"]))
    return Samples(
        prompts=[problem_of(problem) for problem in state["problems"]],
        prompt_texts=state["prompt_texts"],
        completions=state["completions"],
        step=state["step"],
        rollout=Rollout(
            group_size=state["group_size"],
            finish_reasons=state["finish_reasons"],
            inputs=_inputs(state.get("inputs"), state["group_size"]),
            **dict(state["tensors"]),
        ),
        episodes=episodes,
    )


def _plain_inputs(rollout: Rollout) -> list[dict[str, Any] | None] | None:
    """What the model reads of each prompt beside its tokens; None where that is nothing."""
    if rollout.inputs is None:
        return None
    prompts = rollout.inputs.of[:: rollout.group_size]
    return [None if each is None else {"key": each.key, "tensors": dict(each.tensors)} for each in prompts]


def _inputs(state: Sequence[Mapping[str, Any] | None] | None, group_size: int) -> RowInputs | None:
    if state is None:
        return None
    prompts = [None if each is None else PromptInputs(**each) for each in state]
    return RowInputs([each for each in prompts for _ in range(group_size)])


def problem_of(fields: Mapping[str, Any]) -> Problem:
    """The problem that `plain_problem` took."""
    columns = {name: _with_pictures(value) for name, value in fields["columns"].items()}
    return Problem(**{**fields, "columns": columns})


def _with_pictures(value: Any) -> Any:
    """A column as the data had it: its images are pictures again."""
    if isinstance(value, Mapping) and _PICTURE in value:
        from grpo_pl.extras.images.picture import Picture

        return Picture(**value[_PICTURE])
    return tuple(map(_with_pictures, value)) if isinstance(value, tuple) else value


def trimmed(samples: Samples) -> Samples:
    """Without the columns that are padding in every row."""
    rollout = samples.rollout
    prompt = int(rollout.prompt_mask.sum(dim=1).max())
    completion = int(rollout.lengths.max())
    tensors: dict[str, Any] = {
        name: tensor[:, -prompt:] if name in LEFT else tensor[:, :completion]
        for name, tensor in rollout_tensors(rollout).items()
    }
    return replace(samples, rollout=replace(rollout, **tensors))


def plain_problem(problem: Problem) -> dict[str, Any]:
    """A problem's fields."""
    where = f"problem {problem.id}"
    fields = {name: _plain(value, f"{name} of {where}") for name, value in vars(problem).items() if name != "columns"}
    columns = {name: _plain(value, f"column {name!r} of {where}") for name, value in problem.columns.items()}
    return {**fields, "columns": columns}


def check_plain(problems: Sequence[Problem]) -> None:
    """Refuses what no checkpoint may hold before there are samples to lose."""
    for problem in problems:
        plain_problem(problem)


def _plain_transition(transition: Transition) -> dict[str, Any]:
    told = replace(transition, info={})  # may hold anything, and nothing after the rollout reads it
    return {name: _plain(value, f"{name} of a transition") for name, value in vars(told).items()}


def _plain(value: Any, where: str) -> Any:
    """The value in built-in types, which a checkpoint may hold."""
    if value is None or type(value) in (str, int, float, bool) or torch.is_tensor(value):
        return value
    if hasattr(value, "png"):
        return {_PICTURE: dict(vars(value))}
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(inner, where) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        inner = [_plain(one, where) for one in value]
        return tuple(inner) if isinstance(value, tuple) else inner
    for kind in (str, bool, int, float):  # enumerations, and NumPy's float64 and str_
        if isinstance(value, kind):
            return kind(value)
    item = value.item() if getattr(value, "ndim", None) == 0 else None  # NumPy's other numbers
    if type(item) in (int, float, bool, str):
        return item
    raise ValueError(
        f"{where} is a {type(value).__name__}, which no checkpoint may hold, and rollouts that wait for their update "
        "are stored there: leave it out of the data, or make it a text or a number."
    )
