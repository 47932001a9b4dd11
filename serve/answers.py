"""Answers in OpenAI's formats: choices, log-probabilities, usage and stream chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, repeat, starmap
from typing import TYPE_CHECKING, Any

from grpo_pl.extras.agents.call_reader import CallReader
from grpo_pl.openai_format import answers
from grpo_pl.openai_format.answers import DONE, MadeCall
from grpo_pl.rollout.native.continuous import ScoredToken
from grpo_pl.rollout.texts import TextStream
from serve.errors import to_json
from serve.schemas import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_pl.types import FinishReason

_TEXTS = 1 << 16  # tokens whose texts are remembered


@dataclass
class Chunk:
    """New tokens of one completion of a request."""

    index: int
    drawn: list[ScoredToken] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def tokens(self) -> list[int]:
        return [drawn.token for drawn in self.drawn]

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any], finish: FinishReason | None
    ) -> None:
        """Adds what one step drew; ``tops`` is empty where nobody asked for them."""
        self.drawn += starmap(ScoredToken, zip(tokens, logprobs, tops or repeat(()), strict=False))
        self.finish = finish


class TokenTexts:
    """The text of each token, and its bytes; both are made once, as answers may hold a million."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(_TEXTS)(self._text)
        self._bytes = lru_cache(_TEXTS)(lambda token: list(self.text(token).encode("utf-8", "surrogatepass")))

    def entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """OpenAI's object for a token."""
        return {"token": self.text(token), "bytes": self._bytes(token), "logprob": logprob}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


@dataclass
class Choice:
    """One completion while its tokens arrive."""

    index: int
    stream: TextStream
    prompt: Sequence[int]
    stop_token_ids: Sequence[int]
    """Tokens that end the completion without being part of its text."""
    echoed: list[ScoredToken] = field(default_factory=list)
    """The prompt's tokens with their log-probabilities, if the client asked for them."""
    tokens: list[ScoredToken] = field(default_factory=list)
    """Those of a whole answer; what a stream has sent is not kept."""
    streams: bool = False
    finish: str | None = None
    offset: int = 0
    """Characters of the tokens whose log-probabilities have been sent."""
    reader: CallReader | None = None
    """Finds the calls of tools; None if the answer may not call any."""
    calls_sent: int = 0
    """Number of calls that have been sent."""
    opening: str = field(init=False)
    """The text with which the server itself begins the completion."""

    def __post_init__(self) -> None:
        self.opening = self.stream.prefix if self.reader is None else self.reader.push(self.stream.prefix)

    @property
    def text(self) -> str:
        """The text so far, without calls of tools."""
        return self.stream.text if self.reader is None else self.reader.text

    @property
    def ends_early(self) -> bool:
        """True if the completion ends with its first call."""
        return self.reader is not None and not self.reader.several

    @property
    def calls(self) -> Sequence[MadeCall]:
        return () if self.reader is None else self.reader.calls

    def new_calls(self) -> list[tuple[int, MadeCall]]:
        """(index, call) of the calls that have not been sent; they count as sent from now on."""
        before, self.calls_sent = self.calls_sent, len(self.calls)
        return list(enumerate(self.calls))[before:]

    def push(self, chunk: Chunk) -> tuple[str, list[ScoredToken]]:
        """Adds a chunk; returns the new text and the new tokens."""
        before, tokens = len(self.stream.tokens), chunk.tokens
        silent = chunk.finish == "stop" and tokens[-1] in self.stop_token_ids
        text = self._read(tokens[:-1] if silent else tokens)
        if chunk.finish is not None or self.stream.stopped:
            rest = self.stream.finish()
            text += rest if self.reader is None else self.reader.push(rest, final=True)
        if silent and not self.stream.stopped:
            self.stream.tokens.append(tokens[-1])
        new = chunk.drawn[: len(self.stream.tokens) - before]
        if not self.streams:
            self.tokens += new
        self.finish = "stop" if self.stream.stopped else chunk.finish
        if self.calls and self.finish == "stop":
            self.finish = "tool_calls"
        return text, new

    def _read(self, tokens: Sequence[int]) -> str:
        if self.reader is None:
            return self.stream.push(tokens)
        text = ""
        for token in tokens:  # one by one, so that the end of a call does not depend on which tokens arrive together
            text += self.reader.push(self.stream.push([token]))
            if self.reader.full:
                self.stream.stopped = True
            if self.stream.stopped:
                break
        return text


class ChoicesFormat:
    """What the answers of chat and completions have in common, whole or as the events of a stream; an event may be
    empty. The n choices of a prompt are neighbours."""

    object_name: str
    chunk_name: str
    id_prefix: str
    prompt_in_choice = False

    def __init__(self, model_name: str, request: ChatRequest | CompletionRequest, texts: TokenTexts) -> None:
        self._model_name, self.request, self._texts = model_name, request, texts
        self.choices: list[Choice] = []
        self.system_fingerprint = ""
        self._id, self._created = f"{self.id_prefix}-{uuid.uuid4().hex}", int(time.time())

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in self.choices]
        answer = {**self._head(self.object_name), "choices": choices, "usage": self._usage()}
        return answer | self._prompt_ids(self.choices[0], of_choice=False)

    def opening(self, choice: Choice) -> str:
        """The event before the first token of a choice, with the text that the server prefilled or echoes."""
        raise NotImplementedError

    def chunk(self, choice: Choice, text: str, tokens: Sequence[ScoredToken]) -> str:
        if not text and not tokens and choice.finish is None:
            return ""
        told = {"logprobs": self._logprobs(choice, tokens), "finish_reason": choice.finish}
        part = {"index": choice.index, **self._delta(choice, text), **told}
        if self.request.return_token_ids:
            part["token_ids"] = [token.token for token in tokens]
        continuous = self.request.stream_options.continuous_usage_stats
        return self._event(part, {"usage": self._usage()} if continuous else {})

    def closing(self) -> str:
        if not self.request.stream_options.include_usage:
            return DONE
        return event({**self._head(self.chunk_name), "choices": [], "usage": self._usage()}) + DONE

    def _event(self, choice: dict[str, Any], further: dict[str, Any]) -> str:
        return event({**self._head(self.chunk_name), "choices": [choice], **further})

    def _usage(self) -> dict[str, int]:
        """OpenAI's ``usage``: tokens of each prompt once, and of all completions, end tokens included."""
        prompt = sum(len(choice.prompt) for choice in self.choices[:: self.request.n])
        return answers.usage(prompt, sum(len(choice.stream.tokens) for choice in self.choices))

    def _prompt_ids(self, choice: Choice, *, of_choice: bool) -> dict[str, Any]:
        """The prompt's tokens, which chat answers have beside ``choices`` and completions in each choice."""
        here = self.request.return_token_ids and of_choice == self.prompt_in_choice
        return {"prompt_token_ids": list(choice.prompt)} if here else {}

    def _head(self, name: str) -> dict[str, Any]:
        return answers.head(
            name, id=self._id, created=self._created, model=self._model_name, fingerprint=self.system_fingerprint
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        told = {"logprobs": self._logprobs(choice, choice.echoed + choice.tokens), "finish_reason": choice.finish}
        answer = {"index": choice.index, **self._content(choice), **told}
        choice.tokens.clear()  # here, in a thread: to free a million log-probabilities takes long
        if self.request.return_token_ids:
            answer |= {"token_ids": list(choice.stream.tokens), **self._prompt_ids(choice, of_choice=True)}
        return answer

    def _logprobs(self, choice: Choice, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        """The log-probabilities of a choice's next tokens; None if the client did not ask for them."""
        if self.request.alternatives is None or not tokens:
            return None
        texts = [self._texts.text(token.token) for token in tokens]
        told = self._log_probabilities(tokens, texts, choice.offset)
        choice.offset += sum(map(len, texts))
        return told

    def _content(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, choice.text)

    def _delta(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _log_probabilities(self, tokens: Sequence[ScoredToken], texts: Sequence[str], offset: int) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormat(ChoicesFormat):
    """``/v1/chat/completions``."""

    object_name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, choice: Choice) -> str:
        delta = {"role": "assistant", "content": choice.opening}
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(part, self._prompt_ids(choice, of_choice=False))

    def _content(self, choice: Choice) -> dict[str, Any]:
        return {"message": answers.assistant_message(choice.text, choice.calls)}

    def _delta(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"delta": answers.delta(text, choice.new_calls())}

    def _log_probabilities(self, tokens: Sequence[ScoredToken], texts: Sequence[str], offset: int) -> dict[str, Any]:
        entry = self._texts.entry
        content = [
            {**entry(token.token, token.logprob), "top_logprobs": [entry(i, logprob) for i, logprob in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionFormat(ChoicesFormat):
    """``/v1/completions``."""

    object_name, chunk_name, id_prefix = "text_completion", "text_completion", "cmpl"
    prompt_in_choice = True

    def opening(self, choice: Choice) -> str:
        if not choice.stream.prefix and not self.request.return_token_ids:
            return ""
        told = {"logprobs": self._logprobs(choice, choice.echoed), "finish_reason": None}
        part = {"index": choice.index, "text": choice.stream.prefix, **told}
        return self._event(part | self._prompt_ids(choice, of_choice=True), {})

    def _delta(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": text}

    def _log_probabilities(self, tokens: Sequence[ScoredToken], texts: Sequence[str], offset: int) -> dict[str, Any]:
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else {self._texts.text(i): logprob for i, logprob in token.top}
                for token in tokens
            ],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)),
        }


def event(value: Any) -> str:
    """One server-sent event."""
    return answers.event(to_json(value))
