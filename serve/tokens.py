"""``/tokenize`` and ``/detokenize``, in vLLM's format."""

from __future__ import annotations

import asyncio
from typing import Self

from fastapi import Response
from pydantic import Field, model_validator

from grpo_pl.openai_format import fields
from grpo_pl.openai_format.fields import MAX_ITEMS, MAX_TOOLS, Text, at
from grpo_pl.openai_format.messages import FunctionTool, Message
from serve.errors import bad_request, check_model, json_response
from serve.prompts import Prompts
from serve.schemas import BaseRequest, TokenId

_MOST_TOKENS = 1 << 17


class TokenizeRequest(BaseRequest):
    """``POST /tokenize``: a text, or a conversation as the chat route would render it."""

    ignored = fields.TOKENIZE
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    tools: list[FunctionTool] = Field([], max_length=MAX_TOOLS, fail_fast=True)
    """With messages: the tools that the prompt describes."""
    add_special_tokens: bool = True
    """With prompt: add the special tokens that the tokenizer puts around a text."""
    return_token_strs: bool = False
    """Return the tokens' texts as well."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give prompt or messages")
        if self.tools and self.messages is None:
            raise at("tools", "give them with messages")
        return self


class DetokenizeRequest(BaseRequest):
    """``POST /detokenize``."""

    ignored = fields.TOKENIZE
    tokens: list[TokenId] = Field(max_length=_MOST_TOKENS, fail_fast=True)


class TokenRoutes:
    """Both routes; they use the tokenizer only."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    async def tokenize(self, body: TokenizeRequest) -> Response:
        model = self._prompts.model
        check_model(body.model, self._prompts.model.name)
        if body.messages is not None:
            ids = await self._prompts.from_messages(body.messages, body.tools)
        else:
            ids = await asyncio.to_thread(self._text, str(body.prompt), special=body.add_special_tokens)

        def answer() -> Response:
            names = model.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            return json_response(
                {"count": len(ids), "max_model_len": model.context, "tokens": ids, "token_strs": names}
            )

        return await asyncio.to_thread(answer)

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        check_model(body.model, self._prompts.model.name)
        self._prompts.check_ids(body.tokens, "tokens")
        tokenizer = self._prompts.model.tokenizer
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": str(text)})

    def _text(self, text: str, *, special: bool) -> list[int]:
        if len(text) > _MOST_TOKENS:
            raise bad_request("prompt", f"give at most {_MOST_TOKENS:,} characters.")
        self._prompts.check_characters(text, "prompt")
        return list(self._prompts.model.tokenizer(text, add_special_tokens=special).input_ids)
