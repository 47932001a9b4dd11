"""Agents of users, honest and hostile, over plain HTTP; each is played by ``AgentEnvironment``."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Works an arithmetic expression out.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Numbers with + - * /."}},
            "required": ["expression"],
        },
        "return": {"type": "string"},
    },
}


def post(base_url: str, path: str, key: str, body: Any, *, timeout: float = 60.0, **headers: str) -> Any:
    """The response as JSON; that of an error as well."""
    request = urllib.request.Request(
        base_url + path,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())


def ask(base_url: str, key: str, messages: Any, **more: Any) -> Any:
    """The message that the policy answers; None where the call is refused."""
    headers = more.pop("headers", {})
    answer = post(base_url, "/chat/completions", key, {"messages": messages, **more}, **headers)
    return answer["choices"][0]["message"] if "choices" in answer else None


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def at_once(calls: Sequence[Callable[[], Any]]) -> None:
    """Makes all calls, each in a thread."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tool_loop(task: Any, base_url: str, key: str) -> float:
    """The loop of ``ToolEnvironment`` with a calculator, over HTTP, and a reward that nobody asked for."""
    messages = [user(task["question"])]
    while True:
        message = ask(base_url, key, messages, tools=[TOOL])
        messages.append(message)
        for call in message.get("tool_calls") or []:
            expression = json.loads(call["function"]["arguments"])["expression"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"got {expression}"})
        if not message.get("tool_calls"):
            return 1.0


def chat(task: Any, base_url: str, key: str) -> float:
    """Says ``go on`` after some time; the reward is the number of answers."""
    messages, more = [user(task["question"])], {"max_tokens": task["max_tokens"]} if "max_tokens" in task else {}
    for number in range(task.get("calls", 3)):
        time.sleep(random.SystemRandom().random() * task.get("sleep", 0))
        message = ask(base_url, key, messages, **more)
        if message is None:
            return float(number)
        messages += [message, user("go on")]
    return float(len(messages) // 2)


def stopping(task: Any, base_url: str, key: str) -> None:
    """Calls twice with its own ``stop``, as smolagents does with each call, and repeats what it got to answer."""
    messages = [user(task["question"])]
    for _ in range(2):
        message = ask(base_url, key, messages, stop=task["stop"])
        messages += [message, user(f"you say {message['content']!r}")]


def digits(task: Any, base_url: str, key: str) -> float:
    """The share of digits in the answers of three conversations, two of them at once, and to a summary of the first;
    each call comes after some time."""
    said: list[str] = []

    def talk(opening: Any, calls: int) -> None:
        messages = [opening]
        for _ in range(calls):
            time.sleep(0.02 * random.SystemRandom().random())
            messages += [ask(base_url, key, messages), user("!")]
            said.append(messages[-2]["content"])

    talk(user("?"), 2)
    at_once([partial(talk, user("a"), 2), partial(talk, user("b"), 1)])
    talk(user(f"so {said[0]}?"), 1)
    text = "".join(said)
    return sum(map(str.isdigit, text)) / max(1, len(text))


def branching(task: Any, base_url: str, key: str) -> float:
    """Asks, has two sub-agents asked at once, one of them twice, goes on, then asks with a summary, and with another
    beginning of the conversation; the reward is the number of answers."""
    answers: dict[str, list[Any]] = {"A": [], "B": []}

    def delegate(name: str, calls: int) -> None:
        messages = [{"role": "system", "content": f"You are {name}."}, user("go")]
        for _ in range(calls):
            time.sleep(random.SystemRandom().random() * task.get("sleep", 0))
            answers[name].append(ask(base_url, key, messages))
            messages += [answers[name][-1], user("go on")]

    history = [user(task["question"])]
    history.append(ask(base_url, key, history))
    at_once([partial(delegate, "A", 2), partial(delegate, "B", 1)])
    history.append(user("and then?"))
    for messages in (history, [user("in short: 3")], [user("another"), history[1], user("so?")]):
        answers["A"].append(ask(base_url, key, messages))
    return float(sum(answer is not None for answer in [history[1], *answers["A"], *answers["B"]]))


def says_nothing(task: Any, base_url: str, key: str) -> None:
    for text in ("", "go on", ""):
        ask(base_url, key, [user(text)])


def equal_calls(task: Any, base_url: str, key: str) -> None:
    at_once([partial(ask, base_url, key, [user("?")])] * 4)


def wayward(task: Any, base_url: str, key: str, reward_key: str) -> float | None:
    """Asks once, and then does what the task says."""
    deed = task["deed"]
    if deed == "raise at once":
        raise RuntimeError("no model today")
    if deed == "no call":
        return 1.0
    if deed == "refused":
        ask(base_url, key, [user("a")], n=2)
        return 1.0
    return Deeds(task, base_url, key, reward_key).do(deed)


def returns_text(task: Any, base_url: str, key: str) -> Any:
    return ask(base_url, key, [user("first")])["content"]


FORGERY = """
import glob, json, os, sys, urllib.request
url, key, found = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], []
def attempt(bearer):
    request = urllib.request.Request(url + "/reward", b'{"reward": 1.0}', {"Authorization": "Bearer " + bearer})
    try:
        urllib.request.urlopen(request); found.append("paid")
    except urllib.error.HTTPError as error:
        found.append(error.code)
attempt(key); attempt(""); attempt(sys.argv[1])
secrets = [value for name, value in os.environ.items() if "REWARD" in name or "TOKEN" in name]
print(json.dumps([found, secrets, [os.readlink(f) for f in glob.glob("/proc/self/fd/*") if os.path.exists(f)]]))
"""


class Deeds:
    """What an agent does after the policy's first answer, and the reward that it returns."""

    def __init__(self, task: Any, base_url: str, key: str, reward_key: str) -> None:
        self.task, self.base_url, self.key, self.reward_key = task, base_url, key, reward_key
        self.history = [user("first")]
        answer = self._ask(self.history)
        self.history.append({"role": "assistant", "content": answer["content"]})

    def do(self, deed: str) -> float | None:
        """By the name of a method."""
        return getattr(self, "do_" + deed.replace(",", "").replace(" ", "_"))()

    def _ask(self, messages: Any, **more: Any) -> Any:
        return ask(self.base_url, self.key, messages, **more)

    def _pay(self, reward: float) -> Any:
        return post(self.base_url, "/reward", self.reward_key, {"reward": reward})

    def do_well(self) -> float:
        return 1.0

    def do_raise(self) -> float:
        raise KeyError("malformed")

    def do_hang(self) -> None:
        time.sleep(1000)

    def do_exit(self) -> None:
        sys.exit(3)

    def do_leave(self) -> None:
        os._exit(7)

    def do_die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_nan(self) -> float:
        return float("nan")

    def do_no_reward(self) -> None:
        return None

    def do_child(self) -> float:
        for new_session in (False, True):
            subprocess.Popen(["sleep", "1000.25"], start_new_session=new_session)
        return 1.0

    def do_two_rewards(self) -> float:
        self._pay(0.25)
        assert "has its reward" in self._pay(1.0)["error"]["message"]
        return 1.0

    def do_retry(self) -> float:
        body, path = {"messages": [*self.history, user("second")]}, "/chat/completions"
        for attempt in range(2):
            with suppress(TimeoutError):
                headers = {"x-stainless-retry-count": str(attempt)}
                post(self.base_url, path, self.key, body, timeout=0.05, **headers)
        answer = post(self.base_url, path, self.key, body, **{"x-stainless-retry-count": "2"})
        return float(answer["choices"][0]["message"]["content"] == "turn 1")

    def do_edited(self) -> float:
        self._ask([user("another"), *self.history[1:], user("second")])
        return 1.0

    def do_compacted(self) -> float:
        self._ask([user("in short: first")])
        return 1.0

    def do_equal_at_once(self, *texts: str) -> float:
        at_once([lambda text=text: self._ask([*self.history, user(text)]) for text in texts or ("second", "second")])
        return 1.0

    def do_different_at_once(self) -> float:
        return self.do_equal_at_once("second", "third")

    def do_ten_megabytes(self) -> float:
        self._ask([*self.history, user("x" * 10_000_000)])
        return 1.0

    def do_a_hundred_calls_and_more(self) -> float:
        for number in range(150):
            message = self._ask([*self.history, user(str(number))])
            if message is not None:
                self.history += [user(str(number)), {"role": "assistant", "content": message["content"]}]
        return 0.5

    def do_forge(self) -> float:
        """Runs a text in a shell, as coding agents do with what the policy writes."""
        ran = subprocess.run([sys.executable, "-c", FORGERY, "0" * 43], capture_output=True, text=True, check=True)
        codes, secrets, open_files = json.loads(ran.stdout)
        folder = str(Path(self.task["folder"]))
        ours = [name for name in open_files if "socket" in name or name.startswith(folder)]
        return 0.0 if (codes, secrets, ours) == ([401, 401, 401], [], []) else 1.0

    def do_trespass(self) -> float:
        answer = post(self.base_url, "/chat/completions", self.key.swapcase(), {"messages": self.history})
        return float(answer["error"]["code"] == "invalid_api_key")

    def do_pays_then_raises(self) -> float:
        self._pay(0.5)
        raise KeyError("after the reward")

    def do_unsupported(self) -> float:
        return len(self._ask([*self.history, user("second")], logit_bias={"5": 1})["content"])

    def do_image(self) -> float:
        shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://localhost/a.png"}}]}
        return len(self._ask([*self.history, shown])["content"])

    def do_image_in_the_message(self) -> float:
        shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
        return len(self._ask([*self.history, shown])["content"])
