"""``Prompts``: encodes messages and texts as prompt tokens, with the template of the policy's training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from grpo_pl.evaluation.problems import EvalProblem
from grpo_pl.extras.agents.tool_calls import Call
from grpo_pl.openai_format.messages import FunctionTool, Message
from grpo_pl.policy.inputs import EncodedPrompt, encode_prompt, inputs_as_bytes, reader_of
from grpo_pl.policy.template import PLACEHOLDER
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout.decoding import row_keys, sample_keys
from grpo_pl.rollout.grammars import MAX_GRAMMAR, Grammar, Unusable, check_schema
from grpo_pl.rollout.native.continuous import SequenceOptions
from grpo_pl.rollout.processors import LogitOptions
from grpo_pl.types import SamplingParams
from serve.bodies import in_thread
from serve.conversations import Conversation, Renderer
from serve.errors import ApiError, bad_request
from serve.messages import Part
from serve.schemas import Sampling
from serve.settings import MAX_TOKENS

_SCALARS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p", "min_tokens")
_LONG = 2000  # characters from which encoding would delay other requests noticeably
_SLICE = 1 << 14  # characters scanned, and …
_PER_CALL = 1 << 10  # … new ones tokenised, before other threads can run
_PER_CUT = 8  # tokens that cutting a text in two may add
_CHARS_PER_TOKEN = 64  # no text with more characters than this per token of context can fit
_Encode = Callable[[], EncodedPrompt]
_one_with_images = asyncio.Semaphore(1)  # decoding them takes memory, and seconds of a thread


class Prompts:
    """Encodes prompts for one model. What it cannot encode is an ``ApiError`` (400): unknown characters and tokens, and
    prompts that exceed the context."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self._renderer = model, Renderer(model)
        self._known: dict[str, bool] = {}  # at most as large as Unicode

    async def from_messages(
        self, messages: Sequence[Message], tools: Sequence[FunctionTool] = (), *, prefill: bool = True
    ) -> EncodedPrompt:
        """The prompt of a conversation that ends with the user's turn, or a tool's.

        Args:
            tools: the tools that the answer may call.
            prefill: begin the answer with the template's prefill.
        """
        conversation, schemas = Conversation.of(messages), [tool.for_template for tool in tools]
        said = "".join(message.text for message in messages)
        has_images = any(message.images for message in messages)

        def encode() -> EncodedPrompt:
            if has_images:
                from grpo_pl.extras.images.chat import encode_chat  # servers of text do without

                limit = self._renderer.time_limit
                return encode_chat(messages, schemas, self.model, prefill=prefill, limit=limit, fault=bad_request)
            with self._renderer.time_limit():
                for message in messages:
                    for called in message.tool_calls:
                        call = Call(called.function.name, called.arguments)
                        self.check_characters(self._renderer.call_text(call), "messages")
                self.check_characters(self._renderer.tools_text(schemas), "tools")
                return EncodedPrompt(self._renderer.tokens(conversation, schemas, prefill=prefill))

        slow = has_images or bool(schemas) or self._renderer.runs_template
        async with _one_with_images if has_images else nullcontext():
            return await self._encode(said, encode, "messages", slow=slow)

    def call_grammar(self, tools: Sequence[FunctionTool], *, several: bool) -> Grammar:
        """The grammar of an answer that must call one of these tools and holds nothing else."""
        rules = [f"call{i}" for i in range(len(tools))]
        try:
            for tool in tools:
                check_schema(tool.for_template)
        except Unusable as error:
            raise bad_request("tools", f"an answer cannot be held to them: {error}.") from None
        try:
            parts = [
                self.model.tools.parser.grammar(rule, tool.name, tool.for_template)
                for rule, tool in zip(rules, tools, strict=True)
            ]
        except ValueError as error:
            raise bad_request("tool_choice", str(error), code="unsupported_parameter") from None
        start = f'start: call{" (NEWLINE? call)*" if several else ""}\nNEWLINE: "\\n"\ncall: {" | ".join(rules)}\n'
        text = start + "\n".join(parts)
        if len(text) > MAX_GRAMMAR:
            raise bad_request(
                "tools",
                f"an answer that has to call one of {len(tools)} tools follows a grammar, which has {len(text)} "
                f"characters and may have {MAX_GRAMMAR}: give fewer tools or shorter parameters.",
            )
        return Grammar("lark", text, "tools")

    async def evaluations(
        self, problems: Sequence[EvalProblem], sampling: Sampling, *, seed: int, name: Callable[[int], str]
    ) -> list[Part]:
        """The prompt of each problem, whose question is written as in training.

        Args:
            name: index of a problem -> its name in error messages.
        """
        logits, parts, tokenizer = self.logits(sampling), [], self.model.tokenizer
        for i, problem in enumerate(problems):
            if reader_of(tokenizer) is not None and {"image", "images"} & (problem.model_extra or {}).keys():
                raise bad_request(name(i), "its images are not read here: ask by chat, or `grpo-pl evaluate --model`.")
            asked = problem.asked
            text = asked if isinstance(asked, str) else "\n".join(str(message["content"]) for message in asked)
            try:
                encode = partial(encode_prompt, asked, {}, self.model.template, tokenizer)
                prompt = await self._encode(text, encode, name(i))
            except ValueError as error:  # a conversation that the template has no form for
                raise bad_request(name(i), str(error)) from error
            parts.append(self.part(prompt, sampling, logits, seed=seed, templated=True, prompt_id=problem.id))
            await asyncio.sleep(0)  # lets the event loop serve other requests
        return parts

    async def from_raw(self, prompt: str | Sequence[int]) -> EncodedPrompt:
        """Tokens of a prompt that is used without the template."""
        if isinstance(prompt, str):
            encode = self.model.tokenizer
            return await self._encode(prompt, lambda: EncodedPrompt(list(encode(prompt).input_ids)), "prompt")
        given = self._check_tokens(EncodedPrompt(list(prompt)), "prompt")
        self.check_ids(given.ids, "prompt")
        return given

    def logits(self, request: Sampling) -> LogitOptions | None:
        """The changes to logits that a request asks for; None if it asks for none."""
        bias = tuple((int(token), value) for token, value in request.logit_bias.items())
        self.check_ids([token for token, _ in bias], "logit_bias")
        words = tuple(ids for word in request.bad_words for ids in self._spellings(word))
        options = LogitOptions(logit_bias=bias, bad_words=words, **{n: getattr(request, n) for n in _SCALARS})
        return None if options == LogitOptions() else options

    def part(
        self,
        prompt: EncodedPrompt,
        request: Sampling,
        logits: LogitOptions | None,
        *,
        seed: int,
        templated: bool,
        prompt_id: int | str | None = None,
    ) -> Part:
        """A prompt with its keys and options; where the client gives no value, it uses those of training.

        Args:
            logits: from ``logits``, which is the same for all prompts of a request.
            seed: identifies the samples together with ``prompt_id``; see ``sample_keys``.
            templated: the completion begins as in training, so that the thinking budget of training applies.
        """
        (prompt_ids, inputs), tokenizer = prompt, self.model.tokenizer
        if inputs is None and reader_of(tokenizer) and tokenizer.convert_tokens_to_ids(PLACEHOLDER) in prompt_ids:
            raise bad_request("prompt", f"{PLACEHOLDER} stands for an image: send images in the messages of a chat.")
        context, wanted, trained = self.model.context, request.length, self.model.sampling
        most = (context or 1 << 30) - len(prompt_ids)
        if wanted is not None and wanted > most:
            message = f"{wanted} after a prompt of {len(prompt_ids)} tokens exceeds the context of {context}."
            raise bad_request("max_tokens", message, code="context_length_exceeded")
        length = min(trained.max_completion_length, most) if wanted is None else max(1, wanted)
        if request.min_tokens > length:
            raise bad_request("min_tokens", f"{request.min_tokens} are more than a completion may have, {length}.")
        sampling = SamplingParams(
            max_completion_length=length,
            temperature=trained.temperature if request.temperature is None else request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            thinking_budget=request.max_thinking_tokens,
        )
        try:
            self.model.template.thought(sampling, self.model.tokenizer)
        except ValueError as error:
            raise bad_request("max_thinking_tokens", str(error)) from error
        if request.max_thinking_tokens is None and templated and isinstance(trained.thinking_budget, int):
            sampling = replace(sampling, thinking_budget=trained.thinking_budget)
        keys = row_keys([sample_keys(prompt_ids, seed=seed, n=request.n, prompt_id=prompt_id)])
        options = SequenceOptions(sampling=sampling, logits=logits)
        return Part(prompt_ids, keys, options, None if inputs is None else inputs_as_bytes(inputs))

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Refuses token ids that the model does not have."""
        size = len(self.model.tokenizer)
        bad = next((token for token in tokens if not 0 <= token < size), None)
        if bad is not None:
            raise bad_request(param, f"there is no token {bad}, only 0 … {size - 1}.")

    def _spellings(self, word: str) -> list[tuple[int, ...]]:
        """The tokens of a word at the beginning of a text, and after a blank if only its first token differs there."""
        tokenizer = self.model.tokenizer
        plain, spaced = (tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in (word, f" {word}"))
        if not plain or tokenizer.unk_token_id in plain:
            return []  # it cannot be written, so there is nothing to exclude
        differs = len(spaced) == len(plain) and spaced[0] != plain[0]
        return [plain, spaced] if differs else [plain]

    async def _encode(self, text: str, encode: _Encode, param: str, *, slow: bool = False) -> EncodedPrompt:
        """Checks a text and encodes it; what may take long is done in a thread."""
        context = self.model.context
        if context is not None and len(text) > context * _CHARS_PER_TOKEN:
            raise self._too_long(f"{len(text)} characters", param)

        def work() -> EncodedPrompt:
            self.check_characters(text, param)
            self._check_size(text, param)
            return self._check_tokens(encode(), param)

        return await in_thread(work) if slow or len(text) > _LONG else work()

    def _check_size(self, text: str, param: str) -> None:
        """Refuses a long text once its first pieces have more tokens than the context: to encode all of it at once
        would take half a kilobyte per character."""
        context, tokens = self.model.context, 0
        if context is None or len(text) < 2 * _SLICE:
            return
        for first in range(0, len(text), _SLICE):
            piece = text[first : first + _SLICE]
            tokens += len(self.model.tokenizer(piece, add_special_tokens=False).input_ids) - _PER_CUT
            if tokens > context:
                raise self._too_long(f"more than {context} tokens", param)

    def of_text(self, text: str, special: bool) -> list[int]:
        """The tokens of a text for ``/tokenize``."""
        if len(text) > MAX_TOKENS:
            raise bad_request("prompt", f"give at most {MAX_TOKENS:,} characters.")
        self.check_characters(text, "prompt")
        return list(self.model.tokenizer(text, add_special_tokens=special).input_ids)

    def check_characters(self, text: str, param: str) -> None:
        """Refuses a text with a character that the tokenizer would drop or replace, and names the first one."""
        parts = (text[first : first + _SLICE] for first in range(0, len(text), _SLICE))  # other threads run in between
        asked = set[str]().union(*map(set, parts))
        if unknown := asked - self.known(asked):
            message = f"the model's tokenizer does not know the character {min(unknown, key=text.index)!r}."
            raise bad_request(param, message, code="unknown_character")

    def known(self, characters: Iterable[str]) -> set[str]:
        """The characters that the tokenizer knows, so that it neither drops them nor replaces them by <unk>. New ones
        are tokenised many per call, because a text may hold very many."""
        asked, tokenizer = set(characters), self.model.tokenizer
        new = list(asked - self._known.keys())
        for first in range(0, len(new), _PER_CALL):
            some = new[first : first + _PER_CALL]
            without, *rows = tokenizer(["aa", *(f"a{c}a" for c in some)], add_special_tokens=False).input_ids
            for character, within in zip(some, rows, strict=True):
                self._known[character] = within != without and tokenizer.unk_token_id not in within
        return {character for character in asked if self._known[character]}

    def _check_tokens(self, prompt: EncodedPrompt, param: str) -> EncodedPrompt:
        if not (ids := prompt.ids):
            raise bad_request(param, "an empty prompt leaves nothing to continue.")
        context = self.model.context
        if context is not None and len(ids) >= context:
            raise self._too_long(f"{len(ids)} tokens", param)
        return prompt

    def _too_long(self, size: str, param: str) -> ApiError:
        message = f"the prompt has {size}, and the model's context is {self.model.context} tokens."
        return bad_request(param, message, code="context_length_exceeded")
