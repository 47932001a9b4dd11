"""One tool loop in frameworks of others, unchanged but for the address; each answers the question of its task."""

from __future__ import annotations

from typing import Any

from agent_tools import calc


def pydantic_ai(task: Any, base_url: str, api_key: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    Agent(model, tools=[calc]).run_sync(task["question"])


def openai_agents(task: Any, base_url: str, api_key: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agents.Runner.run_sync(agents.Agent(name="a", model=model, tools=[agents.function_tool(calc)]), task["question"])


async def inspect_ai(task: Any, base_url: str, api_key: str) -> None:
    from inspect_ai.model import ChatMessageUser, get_model
    from inspect_ai.tool import tool

    @tool(name="calc")
    def calculator() -> Any:
        async def execute(expression: str) -> str:
            """Works an arithmetic expression out.

            Args:
                expression: Numbers with + - * /.
            """
            return calc(expression)

        return execute

    model = get_model("openai-api/local/policy", base_url=base_url, api_key=api_key)
    await model.generate_loop([ChatMessageUser(content=task["question"])], tools=[calculator()])


FRAMEWORKS = {"pydantic_ai": "pydantic_ai", "openai_agents": "agents", "inspect_ai": "inspect_ai"}
"""Function -> the module that it needs; imported here once, since sessions are forked from a process that has."""
for _module in FRAMEWORKS.values():
    try:
        __import__(_module)
    except ImportError:
        continue
