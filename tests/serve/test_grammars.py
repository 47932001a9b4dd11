"""Grammars that take much time or memory: refused with the reason, in limits, and without harm to others."""

import asyncio
import faulthandler
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.policy.trained import find_model
from serve import grammar_judge, grammars
from serve.completions import CompletionRoutes
from serve.errors import ApiError
from serve.grammar_judge import Budget, Unusable
from serve.grammars import Compiled, Grammar, GrammarChecker, GrammarMask, Grammars, SizedCache
from serve.prompts import Prompts
from serve.schemas import ChatRequest
from tests.serve.bodies import CHAT, COMPLETIONS, HELLO
from tests.serve.conftest import wait_until
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
        (
            "/v1/responses",
            {"input": "1", "text": {"format": {"type": "json_schema", "name": "x", "schema": ENDLESS}}},
            "text.format",
        ),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_a_refusal_names_the_field_that_was_sent(server: Any, path: str, fields: dict[str, Any], param: str) -> None:
    error = server.refusal(path, fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_a_hostile_grammar_holds_nobody_up_and_leaves_no_memory(server: Any) -> None:
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    server.ask(CHAT, ASK | _format(NUMBER))

    def resident() -> int:
        return sum(process.memory_info().rss for process in family if process.is_running())

    before, answers = resident(), []

    def attack(i: int) -> None:
        schema = {"allOf": [*SLOW, {"type": "string", "pattern": f"a{{{i},999}}"}]}
        answers.append(server.post(CHAT, ASK | _format(schema))[0])

    attackers = [threading.Thread(target=attack, args=(i,)) for i in range(6)]
    for attacker in attackers:
        attacker.start()
    for i in range(4):  # each one new, so that none is known already
        schema = {"type": "object", "properties": {f"k{i}": {"type": "boolean"}}, "required": [f"k{i}"]}
        answer = server.ask(CHAT, ASK | _format(schema) | {"max_tokens": 40})
        assert answer["choices"][0]["message"]["content"].startswith("{")
    assert len(answers) < len(attackers), "the honest ones waited for all hostile ones"
    for attacker in attackers:
        attacker.join()
    assert set(answers) <= {400, 429}
    assert 400 in answers
    wait_until(lambda: resident() < before + (100 << 20))


def test_a_check_ends_when_its_client_leaves(server: Any) -> None:
    checked = [
        p for p in psutil.Process(server.process.pid).children() if "rewards.sandbox.worker" in " ".join(p.cmdline())
    ]
    assert len(checked) == 2
    for i in range(4):
        schema = {"allOf": [*SLOW, {"type": "string", "pattern": f"b{{{i},999}}"}]}
        with server.send(CHAT, ASK | _format(schema)):
            time.sleep(0.05)
    wait_until(lambda: server.is_idle() and not any(process.children() for process in checked))
    server.ask(CHAT, ASK | _format(NUMBER))
    assert [process.is_running() for process in checked] == [True, True]


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
    model = find_model(export)
    made = GrammarChecker(model.tokenizer, max_queue=1)
    asyncio.run(made.start())
    made.close()
    none: dict[str, Any] = dict.fromkeys(("generator", "weights", "metrics"))  # no worker is there
    routes = CompletionRoutes(prompts=Prompts(model), grammars=made, deadline_s=1.0, **none)
    with pytest.raises(ApiError, match=r"pip install 'grpo_pl\[structured\]'") as refused:
        asyncio.run(routes.chat_job(ChatRequest.model_validate(ASK | fields)))
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checker(tokenizer: PreTrainedTokenizerBase) -> Iterator[Callable[[Grammar], Grammar]]:
    made = GrammarChecker(tokenizer, max_queue=8)
    with asyncio.Runner() as runner:
        runner.run(made.start())
        yield lambda grammar: runner.run(made.check(grammar))
        made.close()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json", json.dumps(ENDLESS), "f"), "takes more than 0.5 s"),
        (Grammar("json", json.dumps({"type": "integer", "multipleOf": 999_983}), "f"), "takes more than 0.5 s"),
        (Grammar("regex", "a" * 30_000, "f"), "with which a text may go on takes too long"),
        (Grammar("json", '{"$ref": "#"}', "f"), "no text"),
        (Grammar("regex", "(((", "f"), "invalid regex"),
        (Grammar("lark", "start: start", "f"), ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_check_says_why(checker: Callable[[Grammar], Grammar], grammar: Grammar, reason: str) -> None:
    for _ in range(2):  # then from the cache
        with pytest.raises(ApiError) as refused:
            checker(grammar)
        assert refused.value.status == 400
        assert refused.value.message.startswith("f: the grammar cannot be used: ")
        assert reason in refused.value.message


def test_the_check_tells_the_size(checker: Callable[[Grammar], Grammar]) -> None:
    small = checker(Grammar("regex", "[a-f]{2,4}-(0|1)+", "f"))
    fields = {f"k{i}": {"type": "integer"} for i in range(300)}
    large = checker(Grammar("json", json.dumps({"properties": fields}), "f"))
    assert 0 < small.bytes < 1 << 20
    assert small.bytes < large.bytes < grammar_judge.MOST_BYTES


def test_a_grammar_that_exhausts_memory_is_refused(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less memory than is allowed, so that the limit on time is not what ends it."""
    grammar_judge.prepare(grammars.vocabulary_data(tokenizer, [tokenizer.eos_token_id]))
    monkeypatch.setattr(grammar_judge, "MEMORY", 8 << 20)
    faulthandler.disable()  # its fork would report its end
    try:
        status, detail = grammar_judge.judge("20", json.dumps(["json", json.dumps(ENDLESS)]), 0.0)
    finally:
        faulthandler.enable()
    assert status == "wrong"
    assert "more than 8 MiB" in detail


# --- in the model's process -------------------------------------------------------------------------------------------


def _grammar(text: str, size: int = 1000) -> Grammar:
    return Grammar("regex", text, "structured_outputs", size)


@pytest.fixture
def compiler(tokenizer: PreTrainedTokenizerBase) -> Grammars:
    return Grammars(tokenizer, [tokenizer.eos_token_id])


def _follow(mask: GrammarMask, size: int, tokens: list[int], most: int, rng: random.Random) -> str:
    for _ in range(most):
        allowed = mask.allowed(size)
        if mask.error:
            assert not allowed.any()
            return mask.error
        mask.accept(rng.choice([token for token in tokens if allowed[token]]))
    return ""


def test_the_cache_is_bounded_in_bytes(compiler: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.cache.most_bytes = 10_000
    kept = [compiler.compile(_grammar(f"a{i}", 4000)) for i in range(5)]
    assert None not in kept
    assert len(compiler.cache) == 2
    assert compiler.cache.bytes == 8000
    assert compiler.compile(_grammar("a4", 4000)) is kept[4]
    assert compiler.compile(_grammar("a0", 4000)) is not kept[0]
    assert compiler.compile(_grammar("large", 20_000)) is not None
    assert compiler.cache.bytes <= 10_000


def test_grammars_wait_while_others_hold_all_the_memory(compiler: Grammars) -> None:
    large = grammars.HELD_BYTES // 2
    held = [compiler.compile(_grammar(text, large)) for text in "ab"]
    assert compiler.compile(_grammar("c", large)) is None
    held.clear()
    compiled = compiler.compile(_grammar("c", large))
    assert compiled is not None
    assert compiled.matcher.result() is not None


def test_a_lexer_that_has_grown_is_replaced(
    compiler: Grammars, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of one request stay in the lexer that all share, and one that is full allows nothing any more."""
    regex = "(a|b)*a(a|b){2000}"
    monkeypatch.setattr(grammars, "_RETIRED_BYTES", 1 << 20)
    compiled = compiler.compile(_grammar(regex))
    assert compiled is not None
    tokens = [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]
    masks, rng = iter(compiler.masks(compiled, 64)), random.Random(0)
    while compiled.grown <= 1 << 20:
        _follow(next(masks), len(tokenizer), tokens, 500, rng)
    later = compiler.compile(_grammar(regex))
    assert later is not None
    assert later is not compiled
    assert later.grown == 0
    assert _follow(compiler.masks(later, 1)[0], len(tokenizer), tokens, 50, rng) == ""


@pytest.mark.parametrize(
    ("regex", "letters", "reason"),
    [("(a|b)*a(a|b){2000}", "ab", "takes too much memory"), ("a" * 30_000, "a", "takes too long")],
)
def test_masks_that_take_too_much_end_the_request(
    compiler: Grammars,
    tokenizer: PreTrainedTokenizerBase,
    regex: str,
    letters: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "memory" in reason:
        monkeypatch.setattr(grammars, "MOST_BYTES", 1 << 20)
    compiled = compiler.compile(_grammar(regex))
    assert compiled is not None
    tokens, rng = [tokenizer.convert_tokens_to_ids(letter) for letter in letters], random.Random(0)
    said = next(filter(None, (_follow(m, len(tokenizer), tokens, 500, rng) for m in compiler.masks(compiled, 64))))
    assert reason in said
    assert compiler.compile(_grammar(regex)) is not compiled, "a broken lexer must not be used again"


def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler: Grammars) -> None:
    busy = threading.Event()
    for _ in range(grammars._THREADS):
        compiler._threads.submit(busy.wait)
    grammar = _grammar("abc")
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    assert isinstance(first, Compiled)
    assert first is second
    compiler.give_up(grammar, first)
    assert not first.matcher.cancelled()
    compiler.give_up(grammar, first)
    assert first.matcher.cancelled()
    assert len(compiler.cache) == 0
    busy.set()
    again = compiler.compile(grammar)
    assert isinstance(again, Compiled)
    assert again.matcher.result() is not None


def test_time_for_masks_grows_with_the_tokens_and_is_saved_up_to_a_point() -> None:
    budget = Budget()
    budget.spend(0.05)
    with pytest.raises(Unusable, match="takes too long"):
        budget.spend(0.001)
    budget = Budget()
    for _ in range(1000):
        budget.spend(0.0005, tokens=1)
    budget.spend(0.049)
    with pytest.raises(Unusable):
        budget.spend(0.002)


def test_a_sized_cache_keeps_what_was_used_last() -> None:
    cache: SizedCache[str, int] = SizedCache(10)
    for name, size in (("a", 4), ("b", 4)):
        cache.put(name, ord(name), size)
    assert cache.get("a") == 97
    cache.put("c", 99, 4)
    assert (cache.get("a"), cache.get("b"), cache.get("c"), cache.bytes) == (97, None, 99, 8)
    cache.put("a", 0, 9)  # grown
    assert (cache.get("a"), cache.get("c"), cache.bytes) == (0, None, 9)
    cache.put("d", 1, 11)
    assert (cache.get("d"), cache.bytes, len(cache)) == (None, 0, 0)
    cache.discard("x")
