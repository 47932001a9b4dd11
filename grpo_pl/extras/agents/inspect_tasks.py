"""``InspectEnvironment``: a task of inspect-ai, played by its solver and paid by one of its scorers."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_pl.environment import EpisodeEnded, Observation, resolved
from grpo_pl.extras.agents.agent_session import MODEL, AgentSession
from grpo_pl.extras.agents.openai_agent import AgentEnvironment

_POLICY = f"openai-api/policy/{MODEL}"
_TRUTHS = ("yes", "no", "true", "false")


@dataclass(kw_only=True)
class InspectEnvironment(AgentEnvironment):
    """A task of inspect-ai, unchanged. Each session is an ``eval`` of one of its samples: the solver is the agent, with
    its tools, limits and sandbox, and the value of a scorer is the reward (C 1, P 0.5, I and N 0)."""

    task: str
    """``my_tasks.py:arithmetic`` or ``inspect_evals.gsm8k:gsm8k``: the function that makes the ``Task``."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments."""
    scorer: str = ""
    """Name of the scorer that pays, where the task has several."""
    agent: str | Callable[..., Any] = field(default="grpo_pl.extras.agents.inspect_tasks:play", init=False)
    command: Sequence[str] = field(default=(), init=False)
    rewarded_by: Literal["rewards", "agent"] = field(default="agent", init=False)

    @property
    def columns(self) -> Sequence[str]:
        return ("sample",)

    def access(self, session: AgentSession) -> dict[str, str]:
        return {}  # or a grader that the task names by "openai/…" would be the policy

    def prepare(self) -> None:
        """Imports inspect-ai, makes the task, and begins an evaluation of it, so that sessions find imported and built
        what they need.

        Raises:
            ValueError: inspect-ai is not there, or the function makes no task.
        """
        super().prepare()
        made = _load(self.task, json.dumps(self.task_args))
        _evaluate(made, "http://127.0.0.1:9/v1", "-", limit=1, run_samples=False)  # nobody answers there
        _rows(self.task, json.dumps(self.task_args))

    def tasks(self) -> Iterator[Mapping[str, Any]]:
        yield from _rows(self.task, json.dumps(self.task_args)).values()

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        listed = _rows(self.task, json.dumps(self.task_args)).get(str(row["sample"]))
        if listed is None or listed["question"] != row["question"]:
            told = (
                f"sample {row['sample']} asks something else here: if the task lists its samples in another order each "
                "time, give its dataset a seed or ids."
            )
            raise EpisodeEnded("malformed", told, "environment")
        made = {"task": self.task, "task_args": json.dumps(self.task_args), "scorer": self.scorer}
        return super().reset(seed=seed, row={**row, "inspect": made})


def play(task: Mapping[str, Any], base_url: str, api_key: str) -> float | str | None:
    """Evaluates one sample; the value of the scorer, None where nothing was scored, or why the score is no reward.

    Raises:
        RuntimeError: the evaluation failed.
    """
    from inspect_ai.scorer import value_to_float

    made = task["inspect"]
    log, samples = _evaluate(
        _load(made["task"], made["task_args"]), base_url, api_key, sample_id=[task["sample"]], epochs=1
    )
    if any(_is_graded_by_the_policy(sample) for sample in samples):
        return "a scorer asks the policy itself: bind model_roles or name a model in it"
    if log.error is not None or not samples:
        raise RuntimeError(log.error.message if log.error else "no sample was played")
    scores = samples[0].scores or {}
    if samples[0].error is not None and not scores:  # fail_on_error=False keeps it from the log
        raise RuntimeError(samples[0].error.message)
    name = made["scorer"] or (next(iter(scores)) if len(scores) == 1 else "")
    if name not in scores:
        return f"scorer={name or '?'} is none of {', '.join(scores)}" if scores else None
    value = scores[name].value
    if isinstance(value, Mapping | list):
        return f"{name} gives a {type(value).__name__}"
    if isinstance(value, str) and value not in ("C", "P", "I", "N") and value.lower() not in _TRUTHS:
        try:
            return float(value)
        except ValueError:  # which inspect-ai would take for 0
            return f"{name} gives {value!r:.50}"
    return value_to_float()(value)


def _is_graded_by_the_policy(sample: Any) -> bool:
    """A role that the task does not bind falls back to the model that is evaluated."""
    scoring = False
    for event in sample.events:
        scoring = scoring or (event.event == "span_begin" and event.type == "scorers")
        if scoring and event.event == "model" and event.model == _POLICY:
            return True
    return False


def _evaluate(task: Any, base_url: str, api_key: str, **further: Any) -> tuple[Any, Any]:
    """The log of an evaluation, and its samples, which are read before its folder is gone."""
    from inspect_ai import eval
    from inspect_ai.model import get_model

    model = get_model(_POLICY, base_url=base_url, api_key=api_key, memoize=False)
    quiet = {"display": "none", "log_realtime": False, "score_display": False, "ctl_server": False}
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(task, model=model, log_dir=folder, **quiet, **further)
        return log, list(log.samples or ())


@functools.cache
def _rows(reference: str, arguments: str) -> dict[str, dict[str, Any]]:
    """The rows of a task's samples by their ids, or their positions where they have none."""
    rows = {}
    for number, sample in enumerate(_load(reference, arguments).dataset, 1):
        question = sample.input if isinstance(sample.input, str) else "\n".join(m.text for m in sample.input)
        answer = sample.target if isinstance(sample.target, str) else " | ".join(sample.target)
        name = number if sample.id is None else sample.id
        rows[str(name)] = {"question": question, "answer": answer, "sample": name}
    return rows


@functools.cache
def _load(reference: str, arguments: str) -> Any:
    """The task; sessions find it made in the process that they are forked from.

    Raises:
        ValueError: see `InspectEnvironment.prepare`.
    """
    try:
        from inspect_ai import Task
    except ImportError as error:
        raise ValueError(
            f"inspect-ai is not there ({error}): pip install 'grpo_pl[inspect]', or name by `python` an interpreter "
            "that has it."
        ) from error
    try:
        made = resolved(reference)(**json.loads(arguments))
    except ValueError:
        raise
    except Exception as error:  # somebody else's code may raise anything
        raise ValueError(
            f"task {reference!r} raised {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        ) from error
    if not isinstance(made, Task):
        raise ValueError(f"task {reference!r} makes a {type(made).__name__}, not a Task of inspect-ai.")
    return made
