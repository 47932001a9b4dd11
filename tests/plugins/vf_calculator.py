"""A taskset of verifiers with a tool: sums, and a calculator that verifiers serves to each session."""

from collections.abc import Iterator

import verifiers.v1 as vf
from vf_sums import InProcess, SumData

__all__ = ["Calculations", "InProcess"]


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def calc(self, expression: str) -> str:
        """Works a sum out."""
        return str(sum(map(int, expression.split("+"))))


class Calculation(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.5)
    async def calls(self, trace: vf.Trace) -> float:
        return float(any(message.tool_calls for message in trace.assistant_messages))


class Calculations(vf.Taskset[Calculation, vf.TasksetConfig]):
    def load(self) -> Iterator[Calculation]:
        for a in range(10, 30):
            yield Calculation(SumData(prompt=f"{a}+{a}=", answer=str(2 * a)), self.config.task)


if __name__ == "__main__":
    Calculator.run()
