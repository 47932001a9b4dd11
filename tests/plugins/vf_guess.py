"""A taskset of verifiers with an environment of its own: a number is guessed over several turns."""

from collections.abc import Iterator

import verifiers.v1 as vf
from vf_sums import InProcess, SumData

__all__ = ["Guesses", "Guessing", "InProcess"]


class Guess(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Paid by the environment."""


class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Guess]:
        number = 0
        while True:
            number += 1
            yield Guess(SumData(prompt="?", answer=str(number % 9 + 1)), self.config.task)


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guessing(vf.Env[GuessingConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                segment = await interaction.turn("+" if segment.last_reply < task.data.answer else "-")
        interaction.trace.record_reward("found", float(interaction.trace.last_reply == task.data.answer))
