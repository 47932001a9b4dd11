"""JSON is refused before anything is built from it, and strings never count as structure."""

import json
import tracemalloc
from typing import Any

import pytest

from grpo_pl.openai_format.json_text import MAX_DEPTH, MAX_ELEMENTS, MalformedJson, parse_object

MANY = MAX_ELEMENTS


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"1," * MANY + b"1]}",
        b'{"a":[' + b"[]," * MANY + b"1]}",
        b'{"a":[' + b"{}," * MANY + b"1]}",
        b"{" + b'"a":0,' * MANY + b'"a":0}',
        b'{"a":[' + b'"",' * MANY + b'""]}',
        b'{"a":[' + b'"\\\\",' * MANY + b'""]}',
        b'{"a":' + b"[" * MANY,
        b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}",
        b'{"a":' + b'[{"b":' * 500 + b"1" + b"}]" * 500 + b"}",
        ('{"a":[' + "1," * MANY + "1]}").encode("utf-16"),
    ],
    ids=["numbers", "lists", "objects", "keys", "strings", "escapes", "open", "deep", "mixed", "utf-16"],
)
def test_what_would_be_costly_is_refused_before_it_is_built(body: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedJson) as caught:
        parse_object(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code in ("body_too_complex", "invalid_json")
    assert peak < 4 * len(body) + (1 << 20)


@pytest.mark.parametrize(
    "value",
    [
        {"a": ",:[{]}" * MANY},
        {"a": '\\"[' * 1000, "[" * 200: '\\\\"'},
        {"a": [[1] * 1000] * 100},
        {"a": "\ud800"},
        {"a": 1e308, "b": -5, "c": 10**600},
    ],
)
def test_honest_bodies_are_read_whatever_their_strings_hold(value: Any) -> None:
    assert parse_object(json.dumps(value).encode()) == value


def test_nesting_has_one_limit_in_every_mixture() -> None:
    levels = MAX_DEPTH - 1  # and the object around them
    for left, right in (("[", "]"), ('{"b":', "}")):
        body = f'{{"a":{left * levels}1{right * levels}}}'
        parse_object(body.encode())
        with pytest.raises(MalformedJson, match="levels"):
            parse_object(body.replace("1", f"{left}1{right}").encode())


@pytest.mark.parametrize(
    "body", [b'{"a": 1e400}', b'{"a": -1e999}', b'{"a": Infinity}', b'{"a": "\xff"}', b"\xef\xbb\xbf{}"]
)
def test_what_json_cannot_say_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedJson) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize("number", [b"9" * 641, b"-" + b"9" * 641, b"9" * 100_000, b"0." + b"9" * 9 + b"e999999"])
@pytest.mark.parametrize("body", [b'{"n":%s}', b'{"a":[{"b":[1,%s]}]}', b"[%s]", b"%s"])
def test_a_number_that_is_too_long_is_named_in_the_words_of_json(body: bytes, number: bytes) -> None:
    with pytest.raises(MalformedJson, match=r"an integer has more than 640 digits|no finite 64-bit number") as caught:
        parse_object(body % number)
    assert caught.value.code == "invalid_json"
    assert "sys." not in caught.value.message
    assert parse_object(b'{"n":-%s}' % (b"9" * 640)) == {"n": 1 - 10**640}


def test_bytes_that_are_no_text_are_named() -> None:
    with pytest.raises(MalformedJson, match="the body is not in UTF-8, see byte 6"):
        parse_object(b'{"a":"\xff"}')
