"""One tool loop by OpenAI's own clients: synchronous, streamed and asynchronous; the reward is their tokens' number."""

from __future__ import annotations

import json
from typing import Any

import openai

from grpo_pl.extras.agents.calculator import calc
from grpo_pl.extras.agents.calculator_agent import TOOL


def _results(message: dict[str, Any]) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": c["id"], "content": calc(**json.loads(c["function"]["arguments"]))}
        for c in message.get("tool_calls") or []
    ]


async def asynchronous(task: Any, base_url: str, api_key: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": task["question"]}]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            if answer.choices[0].finish_reason == "stop":
                return answer.usage.total_tokens
            messages += _results(messages[-1])


def whole(client: openai.OpenAI, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    answer = client.chat.completions.create(**asked, temperature=0.2)
    return answer, answer.choices[0].message.model_dump(exclude_none=True)


def streamed(client: openai.OpenAI, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        answer = stream.get_final_completion()
    message = answer.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", []):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    message.pop("parsed", None)
    return answer, message


def run(task: Any, base_url: str, api_key: str) -> Any:
    if task["way"] == "asynchronous":
        return asynchronous(task, base_url, api_key)
    ask = {"whole": whole, "streamed": streamed}[task["way"]]
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    while True:
        answer, message = ask(client, {"model": "policy", "messages": messages, "tools": [TOOL]})
        if answer.choices[0].finish_reason == "stop":
            return answer.usage.total_tokens
        messages += [message, *_results(message)]
