"""An agent as anybody would write it with OpenAI's client: it lends the model a calculator."""

from __future__ import annotations

import json
from typing import Any

from grpo_pl.extras.agents.calculator import calc

try:
    from openai import OpenAI
except ImportError as error:
    raise ImportError("this agent uses OpenAI's client: pip install 'grpo_pl[judge]'") from error


def run(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Answers ``task["question"]``, with up to two calls of the tool ``calc``."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message: Any = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            try:
                result = calc(**json.loads(call.function.arguments))
            except Exception as error:  # the model reads what was wrong
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return


CLIENT = OpenAI(base_url="http://127.0.0.1:9", api_key="-")  # once: its TLS context takes 20 ms to make
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Works an arithmetic expression out.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
