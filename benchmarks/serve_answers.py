"""Records what a server answers to a fixed list of requests, or compares two records, for a change of the server.

``python benchmarks/serve_answers.py record http://127.0.0.1:8000 before.json``, the same for ``after.json`` with the
other server over the same export, and ``… compare before.json after.json``. Ids, times and the borders of a stream's
chunks may differ, log-probabilities by 1e-6; everything else must be equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS, SCORE, EVALUATE = "/v1/chat/completions", "/v1/completions", "/v1/score", "/v1/evaluate"
_TOLERANCE = 1e-6
_LEFT_OUT = {"id", "created", "ms", "system_fingerprint"}
"""Fields that differ from call to call, or from server to server."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def _asked(text: str = "12+34=", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "seed": 7, **fields}


def requests() -> dict[str, tuple[str, str, Any]]:
    """Name -> method, path and body."""
    talk = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "<think>1+1</think>2"},
        {"role": "user", "content": "2+2="},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 3}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "9"}
    called = [talk[0], {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    chats: dict[str, dict[str, Any]] = {
        "plain": _asked(),
        "default length": {"messages": [{"role": "user", "content": "5*6="}], "seed": 3},
        "n": _asked(n=8),
        "n 64": _asked(n=64, max_tokens=8),
        "greedy": _asked(temperature=0),
        "hot": _asked(temperature=3.0),
        "top_p": _asked(top_p=0.7),
        "top_k": _asked(top_k=5),
        "min_p": _asked(min_p=0.05),
        "penalties": _asked(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2),
        "logit_bias": _asked(logit_bias={"10": 5.0, "11": -100}),
        "bad_words": _asked(bad_words=["a", "e"]),
        "min_tokens": _asked(min_tokens=20),
        "ignore_eos": _asked(ignore_eos=True),
        "stop": _asked(stop=["1", "e"], n=4),
        "stop_token_ids": _asked(stop_token_ids=[10, 11, 12, 13], n=4),
        "logprobs": _asked(logprobs=True, n=2),
        "top_logprobs": _asked(logprobs=True, top_logprobs=5),
        "token ids": _asked(return_token_ids=True, n=2),
        "conversation": _asked(messages=talk),
        "system": _asked(messages=[{"role": "system", "content": "Be short."}, *talk]),
        "two questions": _asked(messages=[talk[0], talk[2]]),
        "parts": _asked(messages=[{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]),
        "max_completion_tokens": {**_asked(), "max_tokens": None, "max_completion_tokens": 5},
        "nulls": _asked(n=None, stop=None, tools=None, stream=None),
        "ignored": _asked(user="me", metadata={}, store=False, best_of=1),
        "tools": _asked(tools=[_TOOL]),
        "tools none": _asked(tools=[_TOOL], tool_choice="none"),
        "tool result": _asked(messages=called, tools=[_TOOL]),
        "tool required": _asked(tools=[_TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=64),
        "choice": _asked(structured_outputs={"choice": ["yes", "no"]}, n=4),
        "regex": _asked(structured_outputs={"regex": "[0-9]{3,5}"}, n=4),
        "json": _asked(
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
                },
            },
            max_tokens=64,
        ),
        "json object": _asked(response_format={"type": "json_object"}, max_tokens=64),
        "bad role": _asked(messages=[{"role": "robot", "content": "1"}]),
        "no messages": {"seed": 1},
        "bad temperature": _asked(temperature=-1),
        "unknown field": _asked(max_token=1),
        "unsupported": _asked(functions=[{"name": "f"}]),
        "other model": _asked(model="other"),
        "too long": _asked("1+" * 4000),
        "too many tokens": _asked(max_tokens=10**6),
        "unknown character": _asked("ж"),
        "bad bias": _asked(logit_bias={"99999": 1}),
        "bad grammar": _asked(structured_outputs={"regex": "("}),
        "top_logprobs alone": _asked(top_logprobs=3),
        "empty": {},
    }
    completions: dict[str, dict[str, Any]] = {
        "text": {"prompt": "12+34="},
        "several": {"prompt": ["1+1=", "22+3=", "4"], "n": 2},
        "tokens": {"prompt": [10, 11, 12], "return_token_ids": True},
        "lists of tokens": {"prompt": [[10, 11], [12, 13, 14]]},
        "echo": {"prompt": "12+34=", "echo": True},
        "echo logprobs": {"prompt": ["12+34=", "1"], "echo": True, "logprobs": 3, "n": 2},
        "echo nothing": {"prompt": "12+34=", "echo": True, "logprobs": 1, "max_tokens": 0},
        "logprobs": {"prompt": "1", "logprobs": 2},
        "stop": {"prompt": "1", "stop": "1", "n": 3},
        "empty prompt": {"prompt": ""},
        "no prompt": {},
        "nothing to draw": {"prompt": "1", "max_tokens": 0},
    }
    answers = [
        {"completion": "<think>…</think><answer>\\boxed{46}</answer>", "answer": "46"},
        {"completion": "\\boxed{45}", "answer": "46"},
        {"completion": "no idea", "answer": "46"},
        {"completion": "\\boxed{1/2}", "answer": "0.5"},
    ]
    problems = [{"problem": "12+34=", "answer": "46"}, {"problem": "1+1=", "answer": "2", "id": "two"}]
    asked = {f"chat: {name}": ("POST", CHAT, body) for name, body in chats.items()}
    streamed = (
        "plain",
        "n",
        "greedy",
        "stop",
        "logprobs",
        "top_logprobs",
        "token ids",
        "tools",
        "tool required",
        "regex",
    )
    for name in (*streamed, "too long", "bad grammar"):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        asked[f"stream: {name}"] = ("POST", CHAT, chats[name] | options)
    for name, body in completions.items():
        asked[f"completion: {name}"] = ("POST", COMPLETIONS, {"max_tokens": 16, "seed": 5, **body})
    for name in ("several", "echo logprobs", "stop"):
        body = {"max_tokens": 16, "seed": 5, "stream": True, **completions[name]}
        asked[f"completion stream: {name}"] = ("POST", COMPLETIONS, body)
    return asked | {
        "score": ("POST", SCORE, {"items": answers}),
        "score group": ("POST", SCORE, {"items": answers, "group": True}),
        "score without answer": ("POST", SCORE, {"items": [{"completion": "1"}]}),
        "score nothing": ("POST", SCORE, {"items": []}),
        "evaluate": ("POST", EVALUATE, {"items": problems, "n": 4, "seed": 1, "max_tokens": 24}),
        "evaluate too much": ("POST", EVALUATE, {"items": problems * 300, "n": 64}),
        "tokenize": ("POST", "/tokenize", {"prompt": "12+34=", "return_token_strs": True}),
        "tokenize chat": ("POST", "/tokenize", {"messages": talk}),
        "detokenize": ("POST", "/detokenize", {"tokens": [10, 11, 12]}),
        "models": ("GET", "/v1/models", None),
        "no model": ("GET", "/v1/models/other", None),
        "no route": ("GET", "/v1/nothing", None),
        "wrong method": ("GET", CHAT, None),
        "not JSON": ("POST", CHAT, "{"),
        "no object": ("POST", CHAT, "[1]"),
    }


def record(url: str, key: str | None) -> dict[str, Any]:
    """The server's answer to each request, without what differs from call to call."""
    return {name: _answer(url, key, *asked) for name, asked in requests().items()}


def _answer(url: str, key: str | None, method: str, path: str, body: Any) -> dict[str, Any]:
    data = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers, method=method)) as reply:
            status, kind, text = reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        status, kind, text = error.code, error.headers["Content-Type"], error.read().decode()
    told = _joined(text) if kind.startswith("text/event-stream") else json.loads(text)
    return {"status": status, "content_type": kind, "answer": _without(told)}


def _joined(text: str) -> dict[str, Any]:
    """A stream as one answer: what came for each choice, put together."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    joined: dict[str, Any] = {"done": events[-1] == "[DONE]", "choices": {}}
    for event in events[: -1 if joined["done"] else None]:
        told = json.loads(event)
        for choice in told.pop("choices", []):
            _merge(joined["choices"].setdefault(str(choice["index"]), {}), choice)
        joined |= told
    return joined


def _merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            _merge(whole[name], value)
        elif isinstance(value, str) and name in ("content", "text"):
            whole[name] = (whole.get(name) or "") + value
        elif isinstance(value, list):
            whole[name] = (whole.get(name) or []) + value
        elif value is not None or name not in whole:
            whole[name] = value


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(each) for name, each in value.items() if name not in _LEFT_OUT}
    return [_without(each) for each in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """A line for each place at which two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after:
                yield f"{where}/{name}: only {'before' if name in before else 'after'}"
            else:
                yield from differences(before[name], after[name], f"{where}/{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}/{i}")
    elif isinstance(before, float) and isinstance(after, float):
        if abs(before - after) > _TOLERANCE:
            yield f"{where}: {before} before, {after} after"
    elif before != after:
        yield f"{where}: {before!r:.300} before, {after!r:.300} after"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="ask a server")
    recording.add_argument("url")
    recording.add_argument("file", type=Path)
    recording.add_argument("--api-key")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args()
    if args.command == "record":
        told = record(args.url.rstrip("/"), args.api_key)
        args.file.write_text(json.dumps(told, indent=1) + "\n")
        print(f"{len(told)} answers in {args.file}")
        return 0
    before, after = (json.loads(file.read_text()) for file in (args.before, args.after))
    found = list(differences(before, after))
    print("\n".join(found) or f"{len(before)} answers are equal.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
