"""Fields of OpenAI's and vLLM's APIs that this server does not act on: values that are accepted, and refusals."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

ANY = object()
"""Any value is accepted, because the field has no effect on the text."""


@dataclass(frozen=True)
class Passing:
    """Fields that a body may hold besides those that it declares, with their accepted values: ``ANY``, or those that
    change nothing. Null, which clients send for fields they do not use, is always accepted."""

    values: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    """Unknown field -> the field of this server to use instead."""

    def check(self, extra: Mapping[str, Any], declared: Iterable[str]) -> None:
        """Refuses fields and values that would otherwise be ignored without notice.

        Raises:
            PydanticCustomError: a field that is not known, or a value that this server does not support.
        """
        for name, value in extra.items():
            if name not in self.values:
                raise _refused("unknown_parameter", name, self._advice(name, declared))
            passing = self.values[name]
            if not (passing is ANY or value is None or any(_same(value, each) for each in passing)):
                raise _refused("unsupported_parameter", name, f"this server does not support {_short(value)}")

    def _advice(self, name: str, declared: Iterable[str]) -> str:
        if name in self.instead:
            return f"there is no such field here; use {self.instead[name]}"
        near = difflib.get_close_matches(name[:64].lower(), [*declared, *self.values], n=1, cutoff=0.7)
        return "there is no such field" + (f"; did you mean {near[0]}?" if near else "")


def _refused(code: str, name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(code, "{message}", {"message": message, "field": name[:64]})  # type: ignore[arg-type]


def _same(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1.0 equals 1, but true does not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, str | int | float) else f"this {type(value).__name__}"


_FOR_WHOM = {  # who sends the request, and how the answer is stored or billed
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "priority"), ANY),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "cache_salt"), ANY),
}
_VLLM: dict[str, Any] = {
    **dict.fromkeys(("add_special_tokens", "kv_transfer_params", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("early_stopping", "include_stop_str_in_output", "use_beam_search"), (False,)),
    **dict.fromkeys(("include_reasoning", "skip_special_tokens"), (True,)),
    "spaces_between_special_tokens": (True, False),
    "vllm_xargs": ({},),
}
_TEMPLATE: dict[str, Any] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
}
_INSTEAD = {
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.regex or .json",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "do_sample": "temperature, which is 0 for greedy",
}

CHAT = Passing(
    {
        **_FOR_WHOM,
        **_VLLM,
        **_TEMPLATE,
        **dict.fromkeys(
            ("audio", "moderation", "prediction", "reasoning", "reasoning_effort", "thinking", "web_search_options"), ()
        ),
        **dict.fromkeys(("documents", "functions"), ([],)),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "verbosity": ("medium",),
    },
    _INSTEAD,
)
COMPLETION = Passing(_FOR_WHOM | _VLLM | {"add_special_tokens": (True,), "suffix": ("",)}, _INSTEAD)
RESPONSES = Passing(
    {
        **_FOR_WHOM,
        **dict.fromkeys(("conversation", "max_tool_calls", "moderation", "previous_response_id", "prompt"), ()),
        "background": (False,),
        "context_management": ([],),
        "include": ([], ["reasoning.encrypted_content"]),  # a part that a text answer never has
        "reasoning": ({},),
        "truncation": ("disabled", "auto"),  # a conversation that is too long is refused
    },
    {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"},
)
STREAM_OPTIONS = Passing({"include_obfuscation": ANY})
MESSAGE = Passing(
    {
        **dict.fromkeys(("id", "name", "status"), ANY),
        **dict.fromkeys(("audio", "function_call", "phase", "refusal"), ()),
        "annotations": ([],),
        **dict.fromkeys(("reasoning", "reasoning_content"), ("",)),
        "type": ("text", "message"),
    }
)
TOOL_CALL = Passing({"index": ANY})
RESPONSE_ITEM = Passing(
    {
        **dict.fromkeys(("created_by", "id", "status"), ANY),
        **dict.fromkeys(
            ("async", "async_", "caller", "name", "namespace"), ()
        ),  # OpenAI's client writes its own name, too
    }
)
CONTENT_PART = Passing({"annotations": ([],), "cache_control": ANY, "logprobs": ([],)})
JSON_SCHEMA = Passing(dict.fromkeys(("description", "name", "strict"), ANY))
EVALUATION = Passing(_FOR_WHOM, _INSTEAD)
TOKENIZE = Passing(_TEMPLATE | {"user": ANY})
