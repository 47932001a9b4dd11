"""The shapes of OpenAI's answers: choices, log-probabilities, usage and stream chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_pl.rollout.texts import TextStream
from serve.dispatch import Chunk
from serve.errors import to_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Token:
    """One token with its log-probability and the likeliest alternatives."""

    id: int
    logprob: float | None
    """None for the first token of an echoed prompt."""
    top: tuple[tuple[int, float], ...]


@dataclass
class Choice:
    """One completion while it grows."""

    index: int
    stream: TextStream
    prompt: Sequence[int]
    stop_token_ids: Sequence[int] = ()
    """Tokens that end it without being part of its text."""
    echoed: list[Token] = field(default_factory=list)
    """The prompt's tokens, where they are to be reported."""
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None

    def push(self, chunk: Chunk) -> tuple[str, list[Token]]:
        """Takes a chunk and returns the text and the tokens that are new with it."""
        before = len(self.stream.tokens)
        silent = chunk.finish == "stop" and chunk.tokens[-1] in self.stop_token_ids
        text = self.stream.push(chunk.tokens[:-1] if silent else chunk.tokens)
        if chunk.finish is not None:
            text += self.stream.finish()
        if silent and not self.stream.stopped:
            self.stream.tokens.append(chunk.tokens[-1])
        kept = len(self.stream.tokens) - before
        tops = chunk.top or [()] * len(chunk.tokens)
        new = [Token(*t) for t in zip(chunk.tokens[:kept], chunk.logprobs[:kept], tops[:kept], strict=True)]
        self.tokens += new
        if self.finish is None:
            self.finish = "stop" if self.stream.stopped else chunk.finish
        return text, new


class Shape:
    """How one route writes its answers."""

    object_name: str
    chunk_name: str
    id_prefix: str
    prompt_in_choice = False

    def __init__(
        self, model: str, tokenizer: PreTrainedTokenizerBase, *, logprobs: bool, token_ids: bool = False
    ) -> None:
        self._model, self._tokenizer, self._logprobs, self._token_ids = model, tokenizer, logprobs, token_ids
        self._id, self._created = f"{self.id_prefix}-{uuid.uuid4().hex}", int(time.time())

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The answer to a request without streaming."""
        answer = {**self._head(self.object_name), "choices": [self._choice(c) for c in choices], "usage": usage}
        return answer | self._prompt_ids(choices[0], of_choice=False)

    def chunk(
        self,
        choice: Choice,
        text: str,
        tokens: Sequence[Token],
        finish: str | None,
        *,
        offset: int = 0,
        usage: dict[str, int] | None = None,
    ) -> str:
        """One event of a stream."""
        part = {"index": choice.index, **self._delta(text), "logprobs": None, "finish_reason": finish}
        if self._logprobs and tokens:
            part["logprobs"] = self._log_probabilities(tokens, offset)
        if self._token_ids:
            part["token_ids"] = [token.id for token in tokens]
        return self._event(part, {} if usage is None else {"usage": usage})

    def opening(self, choice: Choice) -> str | None:
        """The first event of a choice."""
        raise NotImplementedError

    def usage_chunk(self, usage: dict[str, int]) -> str:
        return event({**self._head(self.chunk_name), "choices": [], "usage": usage})

    def _event(self, choice: dict[str, Any], further: dict[str, Any]) -> str:
        return event({**self._head(self.chunk_name), "choices": [choice], **further})

    def _prompt_ids(self, choice: Choice, *, of_choice: bool) -> dict[str, Any]:
        """The prompt's tokens, which chat has beside the choices and completions in each."""
        here = self._token_ids and of_choice == self.prompt_in_choice
        return {"prompt_token_ids": list(choice.prompt)} if here else {}

    def token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self._id, "object": name, "created": self._created, "model": self._model}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._log_probabilities(choice.echoed + choice.tokens, 0) if self._logprobs else None
        answer = {"index": choice.index, **self._content(choice.stream.text)}
        answer |= {"logprobs": logprobs, "finish_reason": choice.finish}
        if self._token_ids:
            answer |= {"token_ids": list(choice.stream.tokens), **self._prompt_ids(choice, of_choice=True)}
        return answer

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _log_probabilities(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        raise NotImplementedError


class ChatShape(Shape):
    """``/v1/chat/completions``."""

    object_name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, choice: Choice) -> str | None:
        delta = {"role": "assistant", "content": choice.stream.prefix}
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(part, self._prompt_ids(choice, of_choice=False))

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _log_probabilities(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        return {
            "content": [
                {**self._entry(t.id, t.logprob), "top_logprobs": [self._entry(*pair) for pair in t.top]} for t in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "surrogatepass"))}


class CompletionShape(Shape):
    """``/v1/completions``."""

    object_name, chunk_name, id_prefix = "text_completion", "text_completion", "cmpl"
    prompt_in_choice = True

    def opening(self, choice: Choice) -> str | None:
        if not choice.stream.prefix and not self._token_ids:
            return None
        part = {"index": choice.index, "text": choice.stream.prefix, "logprobs": None, "finish_reason": None}
        if self._logprobs and choice.echoed:
            part["logprobs"] = self._log_probabilities(choice.echoed, 0)
        return self._event(part | self._prompt_ids(choice, of_choice=True), {})

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _content

    def _log_probabilities(self, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
        texts = [self.token_text(t.id) for t in tokens]
        offsets = [offset]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [
                None if t.logprob is None else {self.token_text(i): logprob for i, logprob in t.top} for t in tokens
            ],
            "text_offset": offsets,
        }


def event(value: Any) -> str:
    """One server-sent event."""
    return f"data: {to_json(value)}\n\n"


def usage_of(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, int]:
    """Prompt tokens once per prompt, completion tokens of all choices, the end token included."""
    prompt, completion = sum(map(len, prompts)), sum(len(choice.stream.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
