"""From messages and texts to prompt tokens, through the template that the policy was trained with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from grpo_pl.functional.sampling import row_key
from grpo_pl.rollout.continuous import SequenceOptions
from grpo_pl.rollout.engine import SamplingParams
from grpo_pl.types import SampleKey
from serve.errors import ApiError, bad_request
from serve.schemas import Message, Sampling
from serve.served import ServedModel

_LONG = 2000  # characters from which encoding would hold up other requests noticeably
_CHARS_PER_TOKEN = 64  # no text with more characters than this per token of context can fit


@dataclass
class Prompts:
    """Encodes prompts of one model and refuses what it cannot read or hold."""

    model: ServedModel
    _known: dict[str, bool] = field(default_factory=dict, init=False, repr=False)  # at most as large as Unicode

    async def from_messages(self, messages: Sequence[Message]) -> list[int]:
        """Prompt tokens of a conversation that ends with the user's turn."""
        system = [m for m in messages if m.role in ("system", "developer")]
        turns = [m for m in messages if m.role in ("user", "assistant")]
        if len(system) > 1 or (system and messages[0] is not system[0]):
            raise bad_request("messages: give at most one system message, as the first.", param="messages")
        if not turns or turns[-1].role != "user":
            raise bad_request("messages: the last message must be the user's.", param="messages")
        template = replace(self.model.template, system=system[0].text) if system else self.model.template
        if len(turns) == 1:
            question = turns[0].text
            return await self._encode(question, lambda: template.encode(question, self.model.tokenizer), "messages")
        if not self._has_chat_template:
            raise bad_request(
                "messages: this model was trained on single questions; send one user message.", param="messages"
            )
        turns[-1] = Message(role="user", content=template.user.replace("{question}", turns[-1].text))
        chat = [{"role": m.role, "content": m.text} for m in turns]
        if template.system:
            chat.insert(0, {"role": "system", "content": template.system})

        def encode() -> list[int]:
            text = self.model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            return list(self.model.tokenizer(str(text) + template.prefill, add_special_tokens=False).input_ids)

        return await self._encode("".join(m.text for m in turns), encode, "messages")

    async def from_problem(self, problem: str, param: str) -> list[int]:
        """Prompt tokens of a question, as in training."""
        return await self._encode(problem, lambda: self.model.template.encode(problem, self.model.tokenizer), param)

    async def from_raw(self, prompt: str | Sequence[int]) -> list[int]:
        """Tokens of a prompt that is continued as it is: no template."""
        if isinstance(prompt, str):
            return await self._encode(prompt, lambda: list(self.model.tokenizer(prompt).input_ids), "prompt")
        size = len(self.model.tokenizer)
        bad = next((token for token in prompt if not 0 <= token < size), None)
        if bad is not None:
            raise bad_request(f"prompt: there is no token {bad}, only 0 … {size - 1}.", param="prompt")
        return self._check_tokens(list(prompt), "prompt")

    def options(self, prompt_ids: Sequence[int], request: Sampling, *, ignore_eos: bool, top: int) -> SequenceOptions:
        """How to draw, with the model's own defaults where the client left them.

        Raises:
            ApiError: the completion would not fit the model's context behind the prompt.
        """
        context, wanted = self.model.context, request.length
        room = (context or 1 << 30) - len(prompt_ids)
        if wanted is not None and wanted > room:
            raise bad_request(
                f"max_tokens: {wanted} after a prompt of {len(prompt_ids)} tokens exceeds the context of {context}.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        length = wanted or min(self.model.max_completion_length, room)
        temperature = self.model.temperature if request.temperature is None else request.temperature
        return SequenceOptions(
            sampling=SamplingParams(
                max_completion_length=length, temperature=temperature, top_k=request.top_k, top_p=request.top_p
            ),
            ignore_eos=ignore_eos,
            top_logprobs=top,
        )

    async def _encode(self, text: str, encode: Callable[[], list[int]], param: str) -> list[int]:
        context = self.model.context
        if context is not None and len(text) > context * _CHARS_PER_TOKEN:
            raise self._too_long(f"{len(text)} characters", param)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise bad_request(f"{param}: the text holds a lone surrogate.", param=param)
        unknown = next((character for character in dict.fromkeys(text) if not self.knows(character)), None)
        if unknown is not None:
            raise bad_request(
                f"{param}: the model's tokenizer does not know the character {unknown!r}.",
                param=param,
                code="unknown_character",
            )
        ids = await asyncio.to_thread(encode) if len(text) > _LONG else encode()
        return self._check_tokens(ids, param)

    def knows(self, character: str) -> bool:
        """Whether the character leaves a trace in the tokens: tokenizers drop what they do not know, or write <unk>."""
        if character not in self._known:
            tokenizer = self.model.tokenizer
            without, within = (tokenizer(text, add_special_tokens=False).input_ids for text in ("aa", f"a{character}a"))
            self._known[character] = within != without and tokenizer.unk_token_id not in within
        return self._known[character]

    def _check_tokens(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise bad_request(f"{param}: an empty prompt leaves nothing to continue.", param=param)
        context = self.model.context
        if context is not None and len(ids) >= context:
            raise self._too_long(f"{len(ids)} tokens", param)
        return ids

    def _too_long(self, size: str, param: str) -> ApiError:
        return bad_request(
            f"{param}: the prompt has {size}, and the model's context is {self.model.context} tokens.",
            param=param,
            code="context_length_exceeded",
        )

    @cached_property
    def _has_chat_template(self) -> bool:
        return self.model.template.chat is not False and bool(getattr(self.model.tokenizer, "chat_template", None))


def sample_keys(prompt_ids: Sequence[int], *, seed: int, n: int, prompt_id: int | str | None = None) -> list[SampleKey]:
    """Names of ``n`` samples outside training: split ``predict``, step 0; the prompt is named by its tokens.

    With the weights they determine the completions, so any engine reproduces what the server drew.
    """
    if prompt_id is None:
        name = row_key("prompt", *prompt_ids)
    else:
        name = prompt_id if isinstance(prompt_id, int) else row_key("id", prompt_id)
    return [SampleKey(seed=seed, split="predict", step=0, attempt=0, prompt_id=name, sample=i) for i in range(n)]
