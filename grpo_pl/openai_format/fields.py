"""``Body``, the base class of all objects in requests, what is wrong with one, and the fields that it accepts without
acting on them.

Fields of OpenAI's and vLLM's APIs that this server does not support are accepted with values that change nothing, and
refused by name with all others.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

Text = Annotated[str, Field(min_length=0)]  # a string with a constraint is checked for lone surrogates
MAX_SHORT = 256
Short = Annotated[str, Field(min_length=1, max_length=MAX_SHORT)]


def _as_list(value: Any) -> Any:
    """Checked before the list is, so that errors about one text have the name of the field."""
    if isinstance(value, str):
        if not 1 <= len(value) <= MAX_SHORT:
            raise ValueError(f"give a text of 1 to {MAX_SHORT} characters")
        return [value]
    if not isinstance(value, list):
        raise ValueError("give a text or a list of texts")
    return value


StopTexts = Annotated[
    list[Short],
    Field(max_length=16, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
"""Texts at which an answer ends; one may be given alone."""

MAX_ITEMS = 1024
"""Most items of a list in a request, such as the messages of a chat."""
MAX_TOOLS = 128
"""Most tools in a request, and calls of tools in a message."""

ANY = object()
"""Any value is accepted, because the field has no effect on the text."""
_WITHOUT_CLASSES = {
    **dict.fromkeys(("model_type", "dict_type"), "Input should be a JSON object"),
    "is_instance_of": "Input should be a valid string",  # of `str`, the only class that is asked for
}
"""pydantic's error types whose messages name classes or types of Python."""


@dataclass(frozen=True)
class IgnoredFields:
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
            if name in self.values:
                accepted = self.values[name]
                if not (accepted is ANY or value is None or any(_same(value, each) for each in accepted)):
                    shown = f"{value!r:.40}" if isinstance(value, str | int | float) else f"this {type(value).__name__}"
                    raise at(name[:64], f"this server does not support {shown}", code="unsupported_parameter")
            elif name in self.instead:
                message = f"there is no such field here; use {self.instead[name]}"
                raise at(name[:64], message, code="unknown_parameter")
            else:
                near = difflib.get_close_matches(name[:64].lower(), [*declared, *self.values], n=1, cutoff=0.7)
                message = "there is no such field" + (f"; did you mean {near[0]}?" if near else "")
                raise at(name[:64], message, code="unknown_parameter")


def _same(value: Any, other: Any) -> bool:
    """Compares two JSON values: 1.0 equals 1, but true does not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def at(field: str, message: str, *, code: str = "value_error") -> PydanticCustomError:
    """An error about ``field``, for checks that need the whole object."""
    return PydanticCustomError(code, "{message}", {"message": message, "field": field})  # type: ignore[arg-type]


class FieldFault(NamedTuple):
    """What is wrong with a field of a request."""

    message: str
    param: str | None
    code: str


def field_fault(fault: Mapping[str, Any]) -> FieldFault:
    """One of pydantic's ``errors()``, with the path of the field as ``param``."""
    path = [part for part in map(str, fault["loc"]) if part.isidentifier() or part.isdigit()]  # no names of union types
    if named := fault.get("ctx", {}).get("field"):  # a rule for the whole object may still be about one field
        path.append(named)
    param = ".".join(path) or None
    codes = {"missing": "missing_field"} | {kind: kind for kind in ("unknown_parameter", "unsupported_parameter")}
    code = codes.get(fault["type"], "invalid_value")
    message = _WITHOUT_CLASSES.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
    return FieldFault(f"{param}: {message}" if param else message, param, code)


class Body(BaseModel):
    """An object with the declared fields, and further ones that ``ignored`` accepts. Null counts as left out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
    ignored: ClassVar[IgnoredFields | None] = IgnoredFields()
    """Rules for fields that are not declared; None accepts them all."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None or name not in cls.model_fields}

    @model_validator(mode="after")
    def _only_known_fields(self) -> Self:
        if self.ignored is not None and self.model_extra:
            self.ignored.check(self.model_extra, type(self).model_fields)
        return self


def by_type(must_be: str, kinds: dict[type, str]) -> Discriminator:
    """Reads a value of several types as the member of the union that its own type names, so that errors are those of
    what the client meant. Tags are no identifiers, which errors would take for fields."""
    return chosen(must_be, lambda value: next((tag for kind, tag in kinds.items() if isinstance(value, kind)), None))


def chosen(must_be: str, tag: Callable[[Any], str | None]) -> Discriminator:
    """Reads a value as the member of the union that ``tag`` names; None refuses it."""
    return Discriminator(tag, custom_error_type="wrong_type", custom_error_message=f"must be {must_be}")


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

CHAT = IgnoredFields(
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
SAMPLING_OF_THE_RUN = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("reasoning_effort", "reasoning", "thinking", "verbosity"),
)
"""Fields of a request that an agent in training sends in vain: how its policy draws is for the run to say."""
AGENT = IgnoredFields(
    {
        **CHAT.values,
        **dict.fromkeys(SAMPLING_OF_THE_RUN, ANY),
        **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs", "min_tokens"), (0,)),
        **dict.fromkeys(("logprobs", "ignore_eos", "return_token_ids"), (False,)),
        **dict.fromkeys(("n", "repetition_penalty"), (1,)),
        **dict.fromkeys(("stop_token_ids", "bad_words"), ([],)),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
    },
    {**_INSTEAD, "guided_json": "no grammar", "guided_regex": "no grammar", "guided_choice": "no grammar"},
)
"""What else an agent in training may send: text that a grammar or a penalty shaped would not be the policy's own."""
COMPLETION = IgnoredFields(_FOR_WHOM | _VLLM | {"add_special_tokens": (True,), "suffix": ("",)}, _INSTEAD)
STREAM_OPTIONS = IgnoredFields({"include_obfuscation": ANY})
MESSAGE = IgnoredFields(
    {
        **dict.fromkeys(("id", "name", "status"), ANY),
        **dict.fromkeys(("audio", "function_call", "phase", "refusal"), ()),
        "annotations": ([],),
        **dict.fromkeys(("reasoning", "reasoning_content"), ("",)),
        "type": ("text", "message"),
    }
)
TOOL_CALL = IgnoredFields({"index": ANY})
CONTENT_PART = IgnoredFields({"annotations": ([],), "cache_control": ANY, "logprobs": ([],)})
IMAGE_URL = IgnoredFields({"detail": ("auto",)})
JSON_SCHEMA = IgnoredFields(dict.fromkeys(("description", "name", "strict"), ANY))
EVALUATION = IgnoredFields(_FOR_WHOM, _INSTEAD)
TOKENIZE = IgnoredFields(_TEMPLATE | {"user": ANY})
