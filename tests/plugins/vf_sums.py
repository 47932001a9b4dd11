"""A taskset of verifiers: sums, each asked once. Its harness is the chat program of verifiers' ``null``, run in the
process of the session, because ``null`` has uv fetch packages."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

__all__ = ["InProcess", "Sums"]

PROGRAM: dict[str, Any] = {"__name__": "chat"}
exec(compile(CHAT_PROGRAM_SOURCE, "chat", "exec"), PROGRAM)


class InProcess(NullHarness):
    async def setup(self, runtime: vf.Runtime) -> None:
        """Nothing is fetched."""

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):  # type: ignore[no-untyped-def]
        servers = {name: {"url": url, "timeout": 30} for name, url in mcp_urls.items()}
        asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        await runtime.write("asked.json", json.dumps([message_to_wire(message) for message in asked]).encode())
        sys.argv = ["chat", f"--base-url={endpoint}", f"--api-key={secret}", f"--model={ctx.model}"]
        sys.argv += [f"--mcp-config={json.dumps({'mcpServers': servers})}"]
        sys.argv += [f"--initial-messages-file={runtime.info.id}/asked.json"]
        await PROGRAM["main"]()
        return vf.ProgramResult(0, "", "")


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)

    @vf.reward(weight=0.25)
    async def digits(self, trace: vf.Trace) -> float:
        """The share of the answer that is digits."""
        return sum(map(str.isdigit, trace.last_reply)) / max(1, len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    most: int = 9


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        for a in range(1, self.config.most + 1):
            for b in range(1, self.config.most + 1):
                yield Sum(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
