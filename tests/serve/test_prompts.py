"""What a text must not lose on its way to tokens, and what looking costs."""

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_pl.openai_format.messages import FunctionTool
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.policy.tool_form import ToolForm
from serve.errors import ApiError
from serve.prompts import Prompts


class Counting:
    """A tokenizer that counts how often it is called."""

    def __init__(self) -> None:
        self.own, self.calls = character_tokenizer("abc123"), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.own(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def test_too_many_tools_to_hold_answers_to_are_named_as_such() -> None:
    prompts = Prompts(SimpleNamespace(tools=ToolForm()))  # type: ignore[arg-type]
    tools = [FunctionTool.model_validate({"type": "function", "function": {"name": f"f{i}"}}) for i in range(128)]
    few = prompts.call_grammar(tools[:8], several=True)
    assert few.kind == "lark" and few.text.count("<tool_call>") == 8
    long = {"type": "object", "properties": {"x": {"description": "x" * 300}}}
    for tool in tools:
        tool.function.parameters = long
    with pytest.raises(ApiError, match=r"^400: tools: .* 128 tools .*fewer tools") as caught:
        prompts.call_grammar(tools, several=True)
    assert caught.value.param == "tools"


def test_very_many_new_characters_cost_few_calls() -> None:
    tokenizer = Counting()
    prompts = Prompts(SimpleNamespace(tokenizer=tokenizer, context=None))  # type: ignore[arg-type]
    assert prompts.known("".join(map(chr, range(0x4E00, 0x9FFF))) + "ab3") == {"a", "b", "3"}
    assert tokenizer.calls <= 32  # each a while in which nobody else is answered
    prompts.check_characters("abba" * 1000, "prompt")
    with pytest.raises(ApiError, match="does not know the character '一'"):
        prompts.check_characters("ab一丁", "prompt")
    assert tokenizer.calls <= 32  # each a while in which nobody else is answered
