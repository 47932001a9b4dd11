"""``VerifiersEnvironment``: a taskset of verifiers, played by a harness of verifiers and paid by its rewards."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_pl.environment import Observation
from grpo_pl.extras.agents.agent_session import MODEL, AgentSession
from grpo_pl.extras.agents.openai_agent import AgentEnvironment

_KEY = "GRPO_PL_SESSION_KEY"
"""Variable with the session's key; OPENAI_API_KEY may be that of a judge."""


@dataclass(kw_only=True)
class VerifiersEnvironment(AgentEnvironment):
    """An environment of verifiers 0.4 (``verifiers.v1``), unchanged. Each session is one of its episodes, in a process
    that verifiers makes no difference to: its harness is the agent, whose calls verifiers hands on to the policy, and
    the weighted sum of the task's rewards is the reward.

    The policy plays one seat. A seat with a ``client`` and ``model`` of its own, such as a
    simulated user, is played by that model.
    """

    env: Mapping[str, Any]
    """What verifiers reads as ``[env]``, such as ``{taskset: {id: gsm8k-v1}, agent: {harness: {id: "null"}, runtime:
    {type: subprocess}}}``; ``null`` in quotes, or YAML reads nothing."""
    select: Mapping[str, Any] = field(default_factory=dict)
    """The tasks to take, as verifiers' ``--select`` has it, such as ``{limit: 1000}``; an infinite taskset needs it."""
    agent: str | Callable[..., Any] = field(default="grpo_pl.extras.agents.verifiers_tasksets:play", init=False)
    command: Sequence[str] = field(default=(), init=False)
    rewarded_by: Literal["rewards", "agent"] = field(default="agent", init=False)

    @property
    def columns(self) -> Sequence[str]:
        return ("task",)

    def access(self, session: AgentSession) -> dict[str, str]:
        return {_KEY: session.key}

    def prepare(self) -> None:
        """Imports verifiers and loads the environment.

        Raises:
            ValueError: verifiers is not there, or refuses ``env``, or the policy would play several seats.
        """
        super().prepare()
        _load(json.dumps(self.env))

    def tasks(self) -> Iterator[Mapping[str, Any]]:
        import verifiers.v1 as vf

        try:
            taskset = _load(json.dumps(self.env))[0].taskset.select(vf.SelectConfig.model_validate(self.select))
        except ValueError as error:
            raise ValueError(_told(error, f"select {dict(self.select)}")) from error
        if not taskset.bounded:
            raise ValueError(f"taskset {taskset.config.id!r} never ends: take some, such as select: {{limit: 1000}}.")
        for task in taskset:
            data = task.data
            question = data.prompt_text or data.description or data.name or f"task {data.idx}"
            given = getattr(data, "answer", "")
            answer = given if isinstance(given, str) else ""
            yield {"question": question, "answer": answer, "task": data.model_dump_json()}

    def reset(self, *, seed: int, row: Mapping[str, Any]) -> tuple[Observation, Mapping[str, Any]]:
        return super().reset(seed=seed, row={**row, "env": json.dumps(self.env)})


async def play(task: Mapping[str, Any], base_url: str, api_key: str) -> float | str | None:
    """Plays one episode; its reward, None where the task has none or scoring did not end, or why there is no reward.

    Raises:
        RuntimeError: the episode failed.
    """
    import verifiers.v1 as vf

    env, seat = _load(task["env"])
    kind = type(env.taskset).task_type()
    given = kind(kind.data_type().model_validate_json(task["task"]), env.config.taskset.task)
    client = vf.EvalClientConfig(base_url=base_url, api_key_var=_KEY)  # which holds api_key
    async with env.serving():
        episode = await env.run_episode(given, vf.ModelContext(model=MODEL, client=client))
    if not episode.ok:
        fault = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)][-1]
        raise RuntimeError(f"{fault.type}: {fault.message[-600:]}")
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    if len(traces) != 1:
        return f"the policy's seat was played {len(traces)} times"
    (trace,) = traces
    paid = list(trace.rewards.values())
    return None if not paid or None in paid else trace.reward


@functools.cache
def _load(config: str) -> tuple[Any, str]:
    """The environment of a configuration as JSON, and the policy's seat in it; sessions find both in the process that
    they are forked from.

    Raises:
        ValueError: see `VerifiersEnvironment.prepare`.
    """
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ValueError(
            f"verifiers is not there ({error}): pip install 'grpo_pl[verifiers]', or name by `python` an interpreter "
            "that has it."
        ) from error
    try:
        env = vf.load_environment(vf.resolve_env_config(json.loads(config)))
    except Exception as error:  # a taskset may raise anything while it is imported
        raise ValueError(_told(error, "env")) from error
    seats = [name for name, value in env.config if isinstance(value, vf.AgentConfig) and value.client is None]
    if len(seats) != 1:
        told = f"{len(seats)} seats of env have no client of their own ({', '.join(seats)})"
        raise ValueError(f"the policy plays one seat, and {told}.")
    if env.config.id == "best-of-n":
        raise ValueError(
            "best-of-n plays the policy's seat several times: algorithm.group_size draws several sessions of a task."
        )
    return env, seats[0]


def _told(error: Exception, what: str) -> str:
    return f"verifiers refuses {what}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
