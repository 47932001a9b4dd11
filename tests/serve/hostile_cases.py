"""Some hundred requests that hardly any honest client sends, each with the statuses that may answer it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.serve.bodies import CHAT, COMPLETIONS, EVALUATE, HELLO, SCORE, post

FIELDS = {
    CHAT: b"messages",
    COMPLETIONS: b"prompt",
    SCORE: b"items",
    EVALUATE: b"items",
    "/tokenize": b"prompt",
    "/detokenize": b"tokens",
}
"""Routes that take a body, and the field that holds most of it."""
MANY = 8 << 20
"""Bytes of the largest body that is read."""
REFUSED = frozenset({400})
CUT = frozenset({0, 400})
"""Refused; what was sent and not read may cost the client the answer."""


@dataclass(frozen=True)
class Case:
    """Bytes for one connection and how they may be answered; 0 is a closed connection."""

    name: str
    made: bytes | Callable[[], bytes]
    """The bytes, or what makes them where they are megabytes: every worker of the tests collects all cases."""
    statuses: frozenset[int]
    why: str = ""

    @property
    def request(self) -> bytes:
        return self.made if isinstance(self.made, bytes) else self.made()


def _chat(**fields: Any) -> bytes:
    return post(CHAT, json.dumps({**_ASK, **fields}).encode())


def cases() -> list[Case]:
    """All of them."""
    kinds = (_shapes, _numbers, _parameters, _grammars, _tools, _texts, _pages, _connections, _large_answers)
    return [case for kind in kinds for case in kind()]


def _filled(path: str, before: bytes, unit: bytes, after: bytes) -> Callable[[], bytes]:
    """The largest body that is read: ``unit`` as often as there is room for it."""
    return lambda: post(path, before + unit * ((MANY - len(before) - len(after)) // len(unit)) + after)


def _shapes() -> Iterator[Case]:
    """Eight megabytes of JSON in every shape, to every route: one place reads the bodies of all of them."""
    for path, field in FIELDS.items():
        yield Case(f"{path} objects", _filled(path, b'{"' + field + b'":[', b"{},", b"{}]}"), REFUSED)
        yield Case(f"{path} one long string", _filled(path, b'{"' + field + b'":"', b"x", b'"}'), REFUSED)
    start = b'{"messages":['
    for name, unit, last in (
        ("numbers", b"1,", b"1"),
        ("lists", b"[],", b"[]"),
        ("empty strings", b'"",', b'""'),
        ("nulls", b"null,", b"null"),
    ):
        yield Case(name, _filled(CHAT, start, unit, last + b"]}"), REFUSED)
    yield Case("open lists", _filled(CHAT, start, b"[", b""), REFUSED)
    yield Case("keys", lambda: post(CHAT, b"{" + b",".join(b'"k%d":0' % i for i in range(500_000)) + b"}"), REFUSED)
    yield Case("keys of one name", _filled(CHAT, b"{", b'"a":0,', b'"a":0}'), REFUSED)
    yield Case("a number of 8 MB", _filled(CHAT, b'{"n":', b"9", b"}"), REFUSED)
    yield Case("a fraction of 8 MB", _filled(CHAT, b'{"temperature":0.', b"1", b"}"), REFUSED)
    yield Case("an exponent of 8 MB", _filled(CHAT, b'{"temperature":1e', b"9", b"}"), REFUSED)
    yield Case("numbers of 600 digits", _filled(SCORE, b'{"items":[', b"9" * 600 + b",", b"1]}"), REFUSED)
    yield Case("invalid UTF-8", _filled(CHAT, b'{"messages":"', b"\xff", b'"}'), REFUSED)
    wide = '{"items":[{"completion":"\N{GRINNING FACE}'.encode()
    yield Case("four bytes a character", _filled(SCORE, wide, b"x", b'","answer":"1"}]}'), REFUSED)
    yield Case("UTF-16", lambda: post(CHAT, ('{"messages":[' + "1," * 1_000_000 + "1]}").encode("utf-16")), REFUSED)
    yield Case("nothing but blanks", lambda: post(CHAT, b" " * MANY), REFUSED)
    yield Case("nothing but backslashes", lambda: post(CHAT, b"\\" * MANY), REFUSED)
    nested = b'{"messages":[{"role":"user","content":' + b'[{"type":' * 500 + b"1" + b"}]" * 500 + b"}]}"
    yield Case("content in content", post(CHAT, nested), REFUSED)
    columns = [{"completion": "1", "answer": "1", **{f"c{i}-{k}": 0 for k in range(50)}} for i in range(1000)]
    yield Case("50,000 columns", post(SCORE, json.dumps({"items": columns}).encode()), REFUSED)


def _numbers() -> Iterator[Case]:
    """Integers that take long to convert or fit no machine word, in every field of numbers and elsewhere."""
    numbers = ("n", "seed", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
               "frequency_penalty", "min_tokens", "max_tokens", "max_completion_tokens", "max_completion_length",
               "top_logprobs")  # fmt: skip
    hello = b'{"messages":[{"role":"user","content":"1+1="}],'
    for digits in (5000, 640):
        long = b"9" * digits
        for name in numbers:
            request = post(
                CHAT, hello + b'"%s":%s%s}' % (name.encode(), long, b"" if "max" in name else b',"max_tokens":2')
            )
            # a limit beyond all others is none
            statuses = frozenset({200, 400}) if digits == 640 else REFUSED
            yield Case(f"{name} of {digits} digits", request, statuses)
        for name, value in (
            ("logit_bias", b'{"5":%s}'),
            ("logit_bias", b'{"%s":1}'),
            ("stop_token_ids", b"[%s]"),
            ("stop", b"[%s]"),
            ("stop", b"-%s"),
            ("bad_words", b"[%s]"),
            ("model", b"%s"),
            ("response_format", b'{"type":%s}'),
            ("tool_choice", b"%s"),
            ("tools", b'[{"type":"function","function":{"name":"f","parameters":{"minimum":%s,"properties":5}}}]'),
            ("nothing", b"%s"),
        ):
            body = b'{"%s":%s,%s' % (name.encode(), value % long, hello[1:] + b'"max_tokens":2}')
            yield Case(f"{name} {value.decode():.20} of {digits} digits", post(CHAT, body), REFUSED)
        yield Case(f"a prompt of {digits} digits", post(COMPLETIONS, b'{"prompt":[%s],"max_tokens":1}' % long), REFUSED)
        yield Case(f"a token of {digits} digits", post("/detokenize", b'{"tokens":[%s]}' % long), REFUSED)
        yield Case(
            f"an id of {digits} digits",
            post(EVALUATE, b'{"items":[{"problem":"1+1=","answer":"2","id":%s}],"max_tokens":1}' % long),
            REFUSED,
        )
        column = b'{"items":[{"completion":"1","answer":"1","x":[%s,-%s]}]}' % (long, long)
        yield Case(f"a column of {digits} digits", post(SCORE, column), REFUSED if digits == 5000 else frozenset({200}))
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f'{{"x":{"9" * digits}}}'}}
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "tool_calls": [call]}]
        body = json.dumps({"messages": turns}).encode()
        yield Case(f"arguments of {digits} digits", post(CHAT, body), REFUSED)


_ASK: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}


def _parameters() -> Iterator[Case]:
    """Values that other servers fell over; vLLM's issue or pull request is named where there is one."""
    known: list[tuple[dict[str, Any], str]] = [
        ({"n": 10**9}, "memory by n"),
        ({"temperature": 1e-310}, "vLLM #2937: logits over almost nothing"),
        ({"temperature": -1.0}, "llama.cpp #19367"),
        ({"top_p": 1e-46}, "nothing in 32 bits"),
        ({"top_p": -1.0}, "llama.cpp #19367"),
        ({"top_k": -2}, "neither a count nor off"),
        ({"seed": 2**64}, "overflow"),
        ({"seed": -(2**63) - 1}, "overflow"),
        ({"max_tokens": 2**63}, "overflow"),
        ({"max_tokens": -1}, "an unbounded completion"),
        ({"logit_bias": {"99999999": 5}}, "vLLM #16529: a token that does not exist"),
        ({"logit_bias": {"x": 5}}, "no token at all"),
        ({"stop_token_ids": [10**9]}, "vLLM #54195: one request ends the engine"),
        ({"prompt_logprobs": -1}, "vLLM: the whole vocabulary at each position"),
        ({"logprobs": True, "top_logprobs": -1}, "the whole vocabulary at each position"),
        ({"guided_regex": "((a+)+)+$"}, "vLLM #17313: a pattern that ends the server"),
        ({"guided_json": {"$ref": "#"}}, "a schema without an end"),
        ({"response_format": {"type": "regex", "pattern": "("}}, "vLLM #17313"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, "none"),
        ({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, "a template from outside"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "a template from outside"),
        ({"kv_transfer_params": {"tp_size": 10**9}}, "vLLM #51137"),
        ({"stop": [""]}, "a stop at every place"),
        ({"stop": ["x" * 10**6]}, "a long wait at the end of every text"),
        ({"messages": [{"role": "user", "content": None}]}, "no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/"}}]}]},
         "a request in the server's name"),
        ({"messages": [{"role": "user", "content": "x" * 10**6}]}, "longer than any context"),
        ({"messages": [{"role": "user", "content": ""}] * 5000}, "more messages than a conversation has"),
        ({"temprature": 0.5}, "a misspelt name"),
        ({"logprobs": True, "top_logprobs": 20, "n": 64, "max_tokens": 4000}, "gigabytes of log-probabilities"),
        ({"logit_bias": {str(i): "x" for i in range(40_000)}}, "a fault for each of the entries"),
        ({"logit_bias": {"x" * 10**6: 1}}, "an answer as long as the request"),
        ({"model": "x" * 10**6}, "an answer as long as the request"),
    ]  # fmt: skip
    for change, why in known:
        statuses = frozenset({404}) if "model" in change else REFUSED
        yield Case(f"chat {json.dumps(change)[:60]}", _chat(**change), statuses, why)
    for prompt in ([], [[]], [10**9], [-1], [2**63], "", ["1"] * 10_000):
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        yield Case(f"completions {str(prompt)[:30]}", post(COMPLETIONS, body), REFUSED)
    echo = {"prompt": ["1" * 4000] * 64, "echo": True, "logprobs": 20, "max_tokens": 0}
    yield Case("an echo of gigabytes", post(COMPLETIONS, json.dumps(echo).encode()), REFUSED)
    null = json.dumps({"prompt": "1+1=", "max_tokens": None}).encode()
    yield Case("completions max_tokens null", post(COMPLETIONS, null), frozenset({200}), "vLLM #19862")


SLOW = [{"type": "string", "pattern": f"a{{{i},{i + 500}}}"} for i in range(1, 200)]
"""Patterns whose intersection llguidance compiles for many minutes, and with gigabytes."""


def grammars() -> Iterator[tuple[str, dict[str, Any], frozenset[int]]]:
    """Names of grammars that take much time or memory, or none at all, with the field that holds them."""
    either = frozenset({200, 400})
    factors = [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949, 9941)]
    choices = [{"anyOf": [{"properties": {f"{x}{i}": {"type": "integer"}}} for x in "ab"]} for i in range(16)]
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "object"}}
    schemas: list[tuple[str, Any, frozenset[int]]] = [
        ("199 patterns at once", {"allOf": SLOW}, REFUSED),
        ("29 patterns at once", {"allOf": SLOW[:29]}, REFUSED),
        ("a common multiple", {"allOf": factors}, REFUSED),
        ("a multiple of a large prime", {"type": "integer", "multipleOf": 999_983}, REFUSED),
        ("a product of choices", {"allOf": choices}, REFUSED),
        ("a schema without an end", {"$ref": "#"}, REFUSED),
        ("a schema elsewhere", {"$ref": "http://127.0.0.1:1/schema"}, REFUSED),
        ("references that double", {"$defs": doubled, "$ref": "#/$defs/d0"}, either),
        ("a thousand optional fields", {"properties": {f"k{i}": {"type": "integer"} for i in range(1000)}}, either),
        ("a text of a billion", {"type": "string", "minLength": 10**9}, either),
        ("a million items", {"type": "array", "items": {"$ref": "#"}, "minItems": 10**6}, either),
        ("many values", {"enum": [f"{i * i}" for i in range(3500)]}, either),
    ]
    for name, schema, statuses in schemas:
        wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield name, {"response_format": wrapped}, statuses
        yield f"{name}, as vLLM has it", {"structured_outputs": {"json": schema}}, statuses
    for name, regex, statuses in (
        ("a literal of 30,000", "a" * 30_000, REFUSED),
        ("brackets", "(" * 9000 + ")" * 9000, REFUSED),
        ("a look ahead", "(?=a)b", REFUSED),
        ("powers of repetitions", "((a{1,1000}){1,1000}){1,1000}", either),
        ("a million states", "(a|b)*a(a|b){20}", either),
        ("states of many parts", "(a|b)*a(a|b){10000}", either),
        ("states in all directions", "([ab]*a[ab]{50}){20}", either),
        ("letters of all scripts", r"(\p{L}|\p{N})*\p{Lu}(\p{L}|\p{N}){30}", either),
    ):
        yield name, {"structured_outputs": {"regex": regex}}, statuses
    yield "choices of a megabyte", {"structured_outputs": {"choice": [f"{i:01000}" for i in range(1000)]}}, REFUSED


def _grammars() -> Iterator[Case]:
    for name, field, statuses in grammars():
        yield Case(f"grammar {name}", _chat(**{"max_tokens": 64, **field}), statuses)
        body = {"prompt": "1+1=", "max_tokens": 8, **field}
        yield Case(f"grammar {name}, completions", post(COMPLETIONS, json.dumps(body).encode()), statuses)
    stream = _chat(stream=True, structured_outputs={"json": {"allOf": SLOW[:50]}})
    yield Case("grammar 50 patterns, in a stream", stream, REFUSED)


def _tools() -> Iterator[Case]:
    """Tools that no template could write or no answer could call, and calls that no answer ever made."""

    def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, **function}}

    def taking(**parameters: Any) -> list[dict[str, Any]]:
        return [tool(parameters={"type": "object", **parameters})]

    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"x": deep}}
    must = {"tool_choice": "required"}
    odd = ("", "a b", "a\n", "x" * 65, "__import__('os')", "<f>", "../f", "{{ f }}", "\u03c0", '"}', 7, None)
    lists: list[tuple[str, Any, dict[str, Any]]] = [
        ("an object", {"type": "function"}, {}),
        ("a text", "calc", {}),
        ("texts", ["calc"], {}),
        ("of another kind", [{"type": "code_interpreter"}], {}),
        ("without function", [{"type": "function"}], {}),
        *((f"called {name!r:.20}", [tool(name)], {}) for name in odd),
        ("of one name", [tool(), tool()], {}),
        ("in thousands", [tool(f"f{i}") for i in range(5000)], {}),
        ("with an essay", [tool(description="x" * 10**6)], {}),
        ("with half a character", [tool(description="\ud800")], {}),
        ("with characters unknown to the tokenizer", [tool(description="\u03c0")], {}),
        ("with a misspelt field", [tool(parametres={})], {}),
        ("with parameters in a text", [tool(parameters="{}")], {}),
        ("with parameters in a list", [tool(parameters=[])], {}),
        ("that take a text", [tool(parameters={"type": "string"})], {}),
        ("with properties in a list", taking(properties=["x"]), {}),
        ("with a property that is a number", taking(properties={"x": 5}), {}),
        ("with a type that is a number", taking(properties={"x": {"type": 5}}), {}),
        ("with a type that does not exist", taking(properties={"x": {"type": "wizard"}}), {}),
        ("with required as a text", taking(required="x"), {}),
        ("with half a character in a schema", taking(properties={"x": {"default": "\ud800"}}), {}),
        ("with a deep schema", [tool(parameters=deep)], {}),
        ("with a schema beyond reach", taking(properties={"x": {"$ref": "file:///etc/passwd"}}), must),
        ("and a choice of none of them", [tool()], {"tool_choice": {"type": "function", "function": {"name": "g"}}}),
        ("and an unknown choice", [tool()], {"tool_choice": "perhaps"}),
        ("and a choice that is a number", [tool()], {"tool_choice": 1}),
        ("missing, and required", [], {"tool_choice": "required"}),
        ("and a form of answers", [tool()], {"response_format": {"type": "json_object"}}),
        ("and parallel calls of 1", [tool()], {"parallel_tool_calls": 1}),
    ]  # fmt: skip
    for name, tools, further in lists:
        yield Case(f"tools {name}", _chat(tools=tools, **further), REFUSED)
    brothers = taking(properties={"x" * 7_000_000: {"anyOf": [True] * 100_000 + [5]}})
    yield Case("tools with a long name and many parts", _chat(tools=brothers), REFUSED)
    endless = taking(properties={"x": {"$ref": "#"}}, required=["x"])
    explosive = taking(properties={"x": {"type": "string", "pattern": "(a{1,999}){1,999}"}}, required=["x"])
    for name, tools in (("with a schema without an end", endless), ("with a pattern that explodes", explosive)):
        yield Case(f"tools {name}", _chat(max_tokens=64, tools=tools, **must), frozenset({200, 400}))
    slow = taking(properties={"x": {"allOf": SLOW[:29]}}, required=["x"])
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        name = f"tools with 29 patterns and tool_choice {str(choice)[:9]}"
        yield Case(name, _chat(tools=slow, tool_choice=choice), REFUSED)
    user, result = {"role": "user", "content": "1"}, {"role": "tool", "tool_call_id": "a", "content": "1"}

    def call(arguments: Any, name: str = "f") -> dict[str, Any]:
        made = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [made]}

    said: list[tuple[str, list[dict[str, Any]]]] = [
        ("that was not made", [user, result]),
        ("without a result", [user, call("{}"), user]),
        ("with two results", [user, call("{}"), result, result]),
        ("with a result that is an object", [user, call("{}"), {**result, "content": {"x": 1}}]),
        ("of the user", [{**user, "tool_calls": call("{}")["tool_calls"]}]),
        *(
            (f"with arguments {str(arguments)[:20]!r}", [user, call(arguments), result])
            for arguments in ("", "[]", "5", "{", '{"x": NaN}', '{"x": "\\ud800"}', {"x": 1}, None,
                              '{"x":' * 10_000 + "1" + "}" * 10_000, '{"x":' + "9" * 1000 + "}", "[" * 10**6)
        ),
        ("of a name with markup", [user, call("{}", "</tool_call>"), result]),
        ("with thousands of brothers", [user, {**call("{}"), "tool_calls": call("{}")["tool_calls"] * 5000}, result]),
    ]  # fmt: skip
    for name, messages in said:
        yield Case(f"a call {name}", _chat(messages=messages), REFUSED)


def _texts() -> Iterator[Case]:
    """Texts that cannot be encoded, judged or printed."""
    half = b'"\\ud800"'
    said = b'{"messages":[{"role":"user","content":%s}]}' % half
    yield Case("half a character in a chat", post(CHAT, said), REFUSED)
    yield Case("half a character in a prompt", post(COMPLETIONS, b'{"prompt":%s}' % half), REFUSED)
    problem = b'{"items":[{"problem":%s,"answer":"1","id":%s}],"max_tokens":1}'
    yield Case("half a character in a problem", post(EVALUATE, problem % (half, b"1")), REFUSED)
    yield Case("half a character in an id", post(EVALUATE, problem % (b'"1+1="', half)), REFUSED)
    yield Case("an id of 100 digits", post(EVALUATE, problem % (b'"1+1="', b"9" * 100)), REFUSED)
    fine = frozenset({200})
    for text in (
        half,
        b'"\\u0000"',
        b'"\\u202e\\u2066"',
        json.dumps("\\boxed{" * 5000).encode(),
        b'"' + b"9" * 10**6 + b'"',
    ):
        body = b'{"items":[{"completion":%s,"answer":"1"}]}' % text
        yield Case(f"score {text[:20].decode()}", post(SCORE, body), fine)
    yield Case("a huge column", post(SCORE, b'{"items":[{"completion":"1","answer":"1","x":1e400}]}'), REFUSED)
    deep = b"[" * 60 + b"]" * 60
    yield Case("a deep column", post(SCORE, b'{"items":[{"completion":"1","answer":"1","x":%s}]}' % deep), fine)


def _pages() -> Iterator[Case]:
    """What a browser would send for somebody else's page."""
    body = json.dumps(_ASK).encode()
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain; application/json",
    ):
        yield Case(kind, post(CHAT, body, f"Content-Type: {kind}"), frozenset({415}))
    yield Case("a packed body", post(CHAT, body, "Content-Encoding: gzip"), frozenset({415}))
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "169.254.169.254", "[::2]"):
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        yield Case(f"Host: {host}", request, REFUSED)
    for lines in ("", "Host: localhost\r\nHost: evil.example\r\n", "Host: localhost@evil.example\r\n", "Host:\r\n"):
        request = f"GET /v1/models HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode()
        yield Case(f"hosts {lines!r}", request, REFUSED)


def _connections() -> Iterator[Case]:
    """What is no HTTP, or too much of it."""
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for name, request in (
        ("binary", b"\0\1\2\3\r\n\r\n"),
        ("a TLS hello", bytes.fromhex("1603010200010001fc0303") + b"\0" * 200),
        ("no version", b"GET\r\n\r\n"),
        ("a tunnel", b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n"),
        ("two lengths", get + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx"),
        ("a negative length", get + b"Content-Length: -1\r\n\r\n"),
        ("a length and chunks", get + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("a folded header", get + b"X: 1\r\n 2\r\n\r\n"),
        ("a header without a name", get + b": 1\r\n\r\n"),
    ):
        yield Case(name, request, REFUSED)
    yield Case("20,000 headers", get + b"X: 1\r\n" * 20_000 + b"\r\n", frozenset({431}), "CVE-2025-48956")
    long = b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield Case("a path of 70 kB", long, frozenset({400, 431}))
    declared = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    declared += f"Content-Length: {10**15}\r\nExpect: 100-continue\r\n\r\n"
    yield Case("a petabyte", declared.encode(), frozenset({413}))
    for path in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/",
        "/docs/../metrics",
        "//evil.example/",
    ):
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        yield Case(path, request, frozenset({404}))
    chunked = f"POST {SCORE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    chunked += b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    end = b"\r\n\r\n0\r\n\r\n"
    for name, chunk in (
        ("in hexadecimal as in C", b"0x2\r\n{}"),
        ("below nothing", b"-2\r\n{}"),
        ("with a plus", b"+2\r\n{}"),
        ("behind a blank", b" 2\r\n{}"),
        ("before a blank", b"2 \r\n{}"),
        ("that overflows", b"10000000000000002\r\n{}"),
        ("before a bare line feed", b"2\n{}"),
        ("before a bare carriage return", b"2\r{}"),
        ("too small", b"1\r\n{}"),
        ("of nothing", b"\r\n{}"),
        ("with a NUL in its name", b"2;\0\r\n{}"),
        ("with a line feed in its name", b"2;a\nb\r\n{}"),
    ):
        yield Case(f"a chunk size {name}", chunked + chunk + end, REFUSED)
    yield Case("16 exabytes", chunked + b"fffffffffffffff0\r\n" + b" " * (9 << 20), frozenset({0, 413}))


def _large_answers() -> Iterator[Case]:
    """Requests for as much as one may ask for, or for more."""

    def chat(**fields: Any) -> bytes:
        return _chat(n=64, ignore_eos=True, **fields)

    likely = {"logprobs": True, "top_logprobs": 20}
    good = frozenset({200})
    yield Case("64 long completions", chat(max_tokens=300), good)
    yield Case("64 long completions in a stream", chat(max_tokens=300, stream=True), good)
    yield Case("20 likely tokens at each place of 64", chat(max_tokens=100, **likely), good)
    yield Case("20 likely tokens at each place of 64, in a stream", chat(max_tokens=100, stream=True, **likely), good)
    yield Case("a million likely tokens", chat(max_tokens=781, **likely), REFUSED)
    problems = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(1025)]
    for name, items, n, statuses in (
        ("1,024 problems", problems[:1024], 1, good),
        ("64 completions of 16 problems", problems[:16], 64, good),
        ("1,025 problems", problems, 1, REFUSED),
        ("64 completions of 257 problems", problems[:257], 64, REFUSED),
    ):
        body = {"items": items, "n": n, "max_tokens": 2}
        yield Case(name, post(EVALUATE, json.dumps(body).encode()), statuses)
    texts = [{"completion": f"{'x' * 5000} \\boxed{{{i}}}", "answer": str(i)} for i in range(1025)]
    wide = [{**text, **{f"c{j}": j for j in range(60)}} for text in texts[:1024]]
    for name, items, statuses in (
        ("1,024 long texts", texts[:1024], good),
        ("1,024 long texts with 60 columns", wide, good),
        ("1,025 long texts", texts, REFUSED),
    ):
        yield Case(name, post(SCORE, json.dumps({"items": items}).encode()), statuses)
    function = {"parameters": {"type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(100)}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(64)]
    yield Case("64 tools with 100 parameters", _chat(tools=tools), REFUSED)


BOMBS = (r"9^{9^{9^{%d}}}+1", r"((%d!)!)!", r"(x+y+%d)^{2000}", r"\binom{10^9}{5\cdot10^8}+%d")
"""Answers that algebra does not come to an end with."""


def loads() -> Iterator[tuple[str, list[bytes]]]:
    """(name, requests): many at once, whose clients read nothing and leave after a while."""

    def chat(**fields: Any) -> bytes:
        return _chat(**{"max_tokens": 4000, "ignore_eos": True, **fields})

    def score(completion: str, answer: str) -> bytes:
        return post(SCORE, json.dumps({"items": [{"completion": completion, "answer": answer}]}).encode())

    yield "64 completions, whole", [chat(n=64, max_tokens=300)] * 4
    yield "64 completions, in a stream", [chat(n=64, stream=True, max_tokens=300)] * 20
    yield "streams", [chat(stream=True)] * 60
    likely = {"logprobs": True, "top_logprobs": 20, "max_tokens": 780}
    yield "likely tokens, whole", [chat(n=64, **likely)] * 2
    yield "likely tokens, in a stream", [chat(n=64, stream=True, **likely)] * 2
    problems = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(256)]
    yield "evaluations", [post(EVALUATE, json.dumps({"items": problems, "n": 64}).encode())] * 2
    yield "bombs", [score(rf"\boxed{{{BOMBS[i % 4] % (i + 9)}}}", "5") for i in range(30)]
    yield "bombs of gold", [score(r"\boxed{5}", rf"\prod_{{i=1}}^{{10^9}} (i+{i})") for i in range(4)]
    yield "metrics", [b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"] * 50
    yield "pages", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"] * 50
