"""``Stage``: the environment that a source's demonstrations are played in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.environment import Environment, Player, PolicyFault, PoolLimits, Transition, play
from grpo_pl.policy.dialogue import PlainTurns, opening
from grpo_pl.training.progress import Heartbeat
from grpo_pl.types import Conversation, Problem

if TYPE_CHECKING:
    from grpo_pl.extras.agents.pool import EnvironmentPool


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The environment that a source's demonstrations are played in."""

    environment: Environment
    plain: PlainTurns = PlainTurns()  # noqa: RUF009 - frozen
    limits: PoolLimits = PoolLimits()  # noqa: RUF009 - frozen
    """Of agents, whose sessions have processes of their own."""
    _pool: list[tuple[EnvironmentPool, Heartbeat]] = field(default_factory=list, init=False, repr=False)

    @contextmanager
    def open(self) -> Iterator[None]:
        """The environment, prepared; agents have processes of their own."""
        from grpo_pl.extras.agents.pool import EnvironmentPool

        with ExitStack() as around:
            if self.environment.writes_prompt:
                pool = around.enter_context(EnvironmentPool(self.environment, self.limits))
                pool.start()
                self._pool[:] = [(pool, Heartbeat("cold start, turns played of agents' sessions"))]
                around.callback(self._pool.clear)
            else:
                self.environment.prepare()
                around.callback(self.environment.shutdown)
            yield

    def demonstrations(self, played: Sequence[tuple[Problem, Sequence[str] | Player, int]]) -> list[Demonstration]:
        """Plays episodes: problem, actions, seed."""
        if not self._pool:
            return [self.demonstration(prompt, actions, seed=seed) for prompt, actions, seed in played]
        ((pool, heartbeat),) = self._pool
        for number, (prompt, _, seed) in enumerate(played):
            pool.reset(number, seed=seed, row={"question": prompt.question, "answer": prompt.answer, **prompt.columns})
        turns = {number: [start] for number, start in pool.collect_all().items()}
        said: dict[int, list[str]] = {number: [] for number in turns}
        while True:
            for number, (_, actions, _) in enumerate(played):
                if not turns[number][-1].done:
                    action = _next_action(actions, turns[number], said[number])
                    if action is None:
                        pool.release(number)
                    else:
                        said[number].append(action)
                        pool.step(number, action)
            answered = pool.collect_all()
            heartbeat.add(len(answered))
            if not answered:
                break
            for number, transition in answered.items():
                turns[number].append(transition)
        shown = []
        for number, (prompt, _, _) in enumerate(played):
            fault = next((turn for turn in turns[number] if turn.status != "ok"), None)
            branched = any(turn.info.get("segment") for turn in turns[number])
            if fault is not None or branched or not said[number]:
                told = f"{fault.status}: {fault.detail}" if fault is not None else "it has no action"
                told = "the agent begins a second conversation, which no demonstration can show" if branched else told
                raise ValueError(f"the demonstration of prompt {prompt.id} cannot be played: {told}.")
            offered = {name: turns[number][0].info[name] for name in ("tools", "told_tools")}
            shown.append(_worked("", turns[number], said[number], **offered))
        return shown

    def demonstration(self, prompt: Problem, actions: Sequence[str] | Player, *, seed: int) -> Demonstration:
        """Plays an episode."""
        said: list[str] = []

        def next_action(turns: Sequence[Transition]) -> str | None:
            action = _next_action(actions, turns, said)
            said.extend([] if action is None else [action])
            return action

        row = {"question": prompt.question, "answer": prompt.answer, **prompt.columns}
        try:
            turns = play(self.environment, next_action, seed=seed, row=row)
        except PolicyFault as fault:
            raise ValueError(
                f"the demonstration of prompt {prompt.id} breaks a rule of the environment: {fault}"
            ) from fault
        if not said:
            raise ValueError(f"the demonstration of prompt {prompt.id} has no action.")
        return _worked(prompt.asked, turns, said)


def _worked(
    asked: str | Conversation, turns: Sequence[Transition], said: Sequence[str], **offered: Any
) -> Demonstration:
    """An episode: its question, what was observed in its turns, and the actions, with the tools on offer."""
    seen = [turn.observation for turn in turns]
    return Demonstration(opening(asked, seen[0]), said[0], tuple(zip(seen[1:], said[1:], strict=False)), **offered)


def _next_action(actions: Sequence[str] | Player, turns: Sequence[Transition], said: Sequence[str]) -> str | None:
    if callable(actions):
        return actions(turns)
    return actions[len(said)] if len(said) < len(actions) else None
