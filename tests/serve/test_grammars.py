"""Grammars that take much time or memory: refused with the reason, in limits, and without harm to others."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.rollout import grammars
from grpo_pl.rollout.grammars import CompiledGrammar, Grammar, Grammars
from serve import PolicyAPI
from serve.errors import ApiError
from serve.schemas import ChatRequest
from tests.serve.bodies import CHAT, COMPLETIONS, HELLO
from tests.serve.hostile_cases import SLOW

ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "seed": 1}
ENDLESS = {"allOf": SLOW}
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def _format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _tools(schema: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


# --- on a server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, ASK | _format(ENDLESS), "response_format"),
        (CHAT, ASK | _format({"type": 5}), "response_format"),
        (CHAT, ASK | _format({"enum": ["x" * 40_000]}), "response_format"),
        (CHAT, ASK | {"structured_outputs": {"json": ENDLESS}}, "structured_outputs"),
        (CHAT, ASK | {"structured_outputs": {"json": "no schema"}}, "structured_outputs"),
        (CHAT, ASK | {"structured_outputs": {"regex": "((("}}, "structured_outputs"),
        (CHAT, ASK | {"structured_outputs": {"regex": "(((", "json": None}, "stream": True}, "structured_outputs"),
        (CHAT, ASK | {"structured_outputs": {"choice": ["x" * 40_000]}}, "structured_outputs"),
        (CHAT, ASK | {"tools": _tools({"allOf": SLOW[:29]}), "tool_choice": "required"}, "tools"),
        (COMPLETIONS, {"prompt": ["1", "2"], **_format(ENDLESS)}, "response_format"),
        (COMPLETIONS, {"prompt": "1", "structured_outputs": {"regex": "[^\\s\\S]"}}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_a_refusal_names_the_field_that_was_sent(server: Any, path: str, fields: dict[str, Any], param: str) -> None:
    error = server.refusal(path, fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_what_passes_quickly_and_then_takes_long_is_refused_while_decoding(server: Any) -> None:
    """The lexer gets a new state, of thousands of parts, with nearly every token."""
    fields = {"structured_outputs": {"regex": "([ab]*a[ab]{50}){20}"}, "n": 16, "max_tokens": 3000, "temperature": 50}
    error = server.refusal(CHAT, ASK | fields)
    assert error["param"] == "structured_outputs" and "too complex to follow" in error["message"]
    server.ask(CHAT, ASK | {"structured_outputs": {"regex": "[ab]{3}"}})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}, "stream": True}, "structured_outputs"),
        ({"tools": _tools({"type": "integer"}), "tool_choice": "required"}, "tool_choice"),
    ],
    ids=str,
)
def test_without_llguidance_they_are_refused_by_what_to_install(
    export: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # as if not installed
    spec, unused = PolicyAPI(export).spec, None  # no worker is there
    with pytest.raises(ApiError, match=r"pip install 'grpo_pl\[structured\]'") as refused:
        asyncio.run(spec.chat(ChatRequest.model_validate(ASK | fields), unused))
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)


# --- without a server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerBase) -> Callable[[str, str], CompiledGrammar | str]:
    made = Grammars(tokenizer, [tokenizer.eos_token_id])

    def compile_(kind: Any, text: str) -> CompiledGrammar | str:
        told: SimpleQueue[CompiledGrammar | str] = SimpleQueue()
        made.compile(Grammar(kind, text, "f"), told.put)
        return told.get(timeout=30)

    return compile_


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json", json.dumps(ENDLESS), "allOf may have at most"),
        ("json", json.dumps({"items": [{"type": "integer", "multipleOf": 999_983}]}), "multipleOf may be at most"),
        ("json", '{"$ref": "#"}', "no text"),
        ("json", "[" * 10_000 + "]" * 10_000, ""),
        ("regex", "(((", "invalid regex"),
        ("lark", "start: start", ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_grammar_that_cannot_be_used_says_why(compiler: Any, kind: str, text: str, reason: str) -> None:
    told = compiler(kind, text)
    assert isinstance(told, str) and told.startswith("the grammar cannot be used: ") and reason in told


def test_compiling_that_takes_too_long_is_given_up(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "COMPILE_S", 0.2)
    monkeypatch.setattr(grammars, "compiled", lambda *_: time.sleep(1))
    for _ in range(2):  # then at once
        assert "takes more than 0.2 s" in compiler("regex", "a")


def test_a_grammar_that_waits_for_slow_ones_is_not_held_to_be_slow(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = Grammars(tokenizer, [tokenizer.eos_token_id]), grammars.compiled
    monkeypatch.setattr(grammars, "COMPILE_S", 0.2)
    monkeypatch.setattr(
        grammars, "compiled", lambda v, k, text: time.sleep(0.6) if text == "slow" else real(v, k, text)
    )
    told: SimpleQueue[Any] = SimpleQueue()
    for text in ("slow", "slow", "b"):
        made.compile(Grammar("regex", text, "f"), told.put)
    answers = [told.get(timeout=30) for _ in range(3)]
    assert [isinstance(answer, CompiledGrammar) for answer in answers] == [False, False, True]


def test_masks_that_take_too_long_end_the_request(compiler: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    grammar = compiler("regex", "a" * 30_000)
    letter = tokenizer.convert_tokens_to_ids("a")
    mask = grammar.mask()
    for _ in range(500):
        allowed = mask.allowed(len(tokenizer))
        if grammar.error:
            break
        assert allowed[letter] and allowed.sum() == 1
        mask.accept(letter)
    assert "takes too long" in grammar.error
    assert not mask.allowed(len(tokenizer)).any() and not grammar.mask().allowed(len(tokenizer)).any()


def test_time_for_masks_grows_with_the_tokens_and_is_saved_up_to_a_point() -> None:
    grammar = CompiledGrammar(None)
    grammar.spend(0.05)
    assert not grammar.error
    grammar.spend(0.001)
    assert "takes too long" in grammar.error
    grammar = CompiledGrammar(None)
    for _ in range(1000):
        grammar.spend(0.0005, tokens=1)
    grammar.spend(0.049)
    assert not grammar.error
    grammar.spend(0.002)
    assert grammar.error
