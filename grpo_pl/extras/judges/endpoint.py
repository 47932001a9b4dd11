"""``AsksModel``: what rewards have in common that ask a language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
import threading
import unicodedata
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.openai_format.retry_after import retry_after
from grpo_pl.rewards.background import run_coroutine
from grpo_pl.rewards.base import Reward

K = TypeVar("K")

_NAMED = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_LOOKALIKES = frozenset("‹›«»≪≫≺≻⋖⋗〈〉⟨⟩《》⟪⟫❬❭❮❯❰❱⦑⦒⧼⧽⪡⪢⩹⩺˂˃˱˲ᐸᐳ")
"""Characters that look like angle brackets and that NFKC does not normalise to them."""


def tagged(parts: Mapping[str, str]) -> str:
    """The texts between tags of their names, which no text can close or open itself."""
    return "\n".join(f"<{tag}>\n{''.join(map(_escaped, text))}\n</{tag}>" for tag, text in parts.items())


def _escaped(character: str) -> str:
    """``character`` as an entity if text could use it to close its tag or to open another: angle brackets and their
    look-alikes, ``&``, and invisible characters; else as it is."""
    if character in _NAMED:
        return _NAMED[character]
    if " " <= character <= "~" or character in "\n\t":
        return character
    unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    looks_like = character in _LOOKALIKES or not _NAMED.keys().isdisjoint(unicodedata.normalize("NFKC", character))
    return f"&#x{ord(character):X};" if unseen or looks_like else character


class Reply(NamedTuple):
    """The outcome of a question."""

    verdict: bool | None
    """The decision of the model; None if there is none."""
    problem: str = ""
    """The reason why there is none."""
    replied: bool = False
    """True if the last attempt brought a reply with a text, which then was no verdict."""


@dataclass(kw_only=True)
class AsksModel(Reward):
    """A reward that asks a language model; needs the ``judge`` extra (the ``openai`` client)."""

    model: str
    """Name of the model at the endpoint."""
    base_url: str | None = None
    """Address of the endpoint, such as ``http://localhost:8000/v1``; OpenAI's own by default."""
    api_key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; need not be set if ``base_url`` is."""
    time_limit_s: float = 30.0
    """Seconds that one request may take, from the connection to the last byte of the reply."""
    retries: int = 2
    """Further requests after one that failed or whose reply is no verdict."""
    concurrency: int = 8
    """Requests in flight at a time."""
    max_tokens: int
    """Most tokens of a reply."""
    check_remote: bool = False
    """Ask once before a run starts, so that an endpoint that does not answer as it should shows at once."""

    def __post_init__(self) -> None:
        try:
            import openai  # noqa: F401
        except ImportError as error:
            kind = type(self).__name__
            raise ValueError(f"{kind} needs the openai client: pip install 'grpo_pl[judge]'.") from error
        if self.time_limit_s <= 0 or self.time_limit_s == float("inf"):
            raise ValueError(f"time_limit_s must be positive and finite, got {self.time_limit_s}.")
        check_at_least(0, f"reward {self.name!r}", retries=self.retries)
        check_at_least(1, f"reward {self.name!r}", concurrency=self.concurrency)
        if self.base_url is None and not os.environ.get(self.api_key_variable):
            raise ValueError(f"set base_url, or put a key into the environment variable {self.api_key_variable}.")

    @property
    def asynchronous(self) -> bool:
        return True

    def ask(
        self,
        system: str,
        questions: Mapping[K, Mapping[str, str]],
        read: Callable[[str], bool | None],
        *,
        before: Callable[[], str] = lambda: "",
        **further: Any,
    ) -> dict[K, Reply]:
        """The reply to each question, at most ``concurrency`` at a time.

        Args:
            system: the instructions.
            questions: the parts of each question, see `tagged`.
            read: the verdict in a reply; None if it is none.
            before: called before each request; a text is the reason not to send it.
            further: more fields of the request.
        """
        if not questions:
            return {}
        return run_coroutine(self._ask_all(system, questions, read, before, further))

    async def _ask_all(
        self,
        system: str,
        questions: Mapping[K, Mapping[str, str]],
        read: Callable[[str], bool | None],
        before: Callable[[], str],
        further: Mapping[str, Any],
    ) -> dict[K, Reply]:
        from openai import AsyncOpenAI

        key = os.environ.get(self.api_key_variable) or "none"
        fields = {"model": self.model, "temperature": 0.0, "max_tokens": self.max_tokens, **further}
        places = asyncio.Semaphore(self.concurrency)
        async with AsyncOpenAI(api_key=key, base_url=self.base_url, timeout=self.time_limit_s, max_retries=0) as client:

            async def ask_one(parts: Mapping[str, str]) -> Reply:
                messages = [{"role": "system", "content": system}, {"role": "user", "content": tagged(parts)}]
                send = partial(client.chat.completions.create, messages=messages, **fields)
                async with places:
                    return await self._decide(send, read, before)

            replies = await asyncio.gather(*map(ask_one, questions.values()))
        return dict(zip(questions, replies, strict=True))

    async def _decide(
        self, send: Callable[[], Awaitable[Any]], read: Callable[[str], bool | None], before: Callable[[], str]
    ) -> Reply:
        """Sends until a reply is a verdict, ``retries`` times again at most, each as long after a refusal as its
        ``Retry-After`` says."""
        from openai import APIStatusError, OpenAIError

        problem, replied, wait = "", False, 0.0
        for _ in range(self.retries + 1):
            await asyncio.sleep(wait)
            wait = 0.0
            if reason := before():
                return Reply(None, reason)
            try:
                # the client's own limit is for each read: a server that sends byte after byte would never reach it
                response = await asyncio.wait_for(send(), self.time_limit_s)
                reply = response.choices[0].message.content or ""
                if not isinstance(reply, str):
                    raise TypeError(f"content is a {type(reply).__name__}")
            except APIStatusError as error:
                problem, replied = f"{type(error).__name__} {error.status_code}", False
                if error.status_code in (400, 401, 403, 404, 422):
                    break  # asking again will not help
                wait = retry_after(error.response.headers.get("Retry-After"), 0.0)
            except (
                OpenAIError, TimeoutError, ValueError, AttributeError, TypeError, LookupError, RecursionError,
            ) as error:  # fmt: skip
                problem, replied = type(error).__name__, False  # unreachable, too slow, or no chat completion
            else:
                if (verdict := read(reply)) is not None:
                    return Reply(verdict)
                replied = reply.strip() != ""
                problem = (
                    f"the judge's reply is no verdict: {reply[:40]!r}" if replied else "the judge's reply is empty"
                )
        return Reply(None, problem, replied)


LOCK = threading.Lock()
"""Guards what such rewards keep, as a server scores in several threads; no field, as a lock cannot be pickled."""
