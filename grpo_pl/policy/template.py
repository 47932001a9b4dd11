"""``PromptTemplate``: turns a question into the text that the policy continues, in training and in serving."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpo_pl.types import Conversation, SamplingParams, ThoughtEnd

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK_TAGS = ("<think>", "</think>")
ANSWER_TAGS = ("<answer>", "</answer>")
READER = "grpo_pl_reader"
"""Attribute of a tokenizer whose prompts hold more than text: see ``inputs``."""
PLACEHOLDER = "<image>"
"""Stands in a prompt's text for an image; transformers' processors of image-text models write it likewise."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question with a model answer, placed before the question that is asked."""

    question: str
    """The question; the template's ``user`` is applied to it."""
    completion: str
    """The whole completion that the policy should imitate, tags and prefill included."""


@dataclass(frozen=True, kw_only=True)
class PromptTemplate:
    """Renders a question with the tokenizer's chat template if it has one, else as plain text."""

    system: str = ""
    """System text; empty sends none. Tell the model here to think between tags and to box its answer."""
    user: str = "{question}"
    """The user's turn; ``{question}`` is replaced, and all other braces stay as they are: ``{{`` is refused."""
    prefill: str = ""
    """Text with which every completion begins, such as ``<think>``. Rewards see it; it is not part of the loss. A
    ``<think>`` at the end of the chat template's own prompts counts as such without being named here."""
    chat: bool | None = None
    """Use the tokenizer's chat template; null uses it if there is one."""

    thought_end: str = THINK_TAGS[1]
    """Text that is fed where ``sampling.thinking_budget`` ends a thought. A thought is over once it holds ``</think>``,
    or, where this text has none, this text."""
    examples: list[Example] = field(default_factory=list)
    """Solved questions before the one that is asked (few-shot), as earlier turns of a chat or as blocks of text."""

    def __post_init__(self) -> None:
        read = [Example(**e) if isinstance(e, dict) else e for e in self.examples]  # as read from JSON
        object.__setattr__(self, "examples", read)
        if not self.thought_end:
            raise ValueError("template.thought_end is empty: give the text that ends a thought, such as </think>.")
        if "{question}" not in self.user:
            raise ValueError(f"template.user must contain '{{question}}', got {self.user!r}.")
        written = {"system": self.system, "user": self.user, "prefill": self.prefill}
        shown = {f"examples[{i}].completion": example.completion for i, example in enumerate(read)}
        for name, text in {**written, **shown}.items():
            doubled = "{{" if name == "user" else r"\boxed{{"  # elsewhere nobody expects Python's format strings
            if doubled in text:
                raise ValueError(
                    f"template.{name} has {doubled!r}, and the policy would read both braces, since this is no format "
                    "string: write each brace once, such as \\boxed{} (or a space between two that are meant)."
                )

    def render(
        self,
        asked: str | Conversation,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        told_tools: str = "",
    ) -> str:
        """The full prompt text, prefill included.

        A conversation's system message replaces ``system``, and ``user`` is applied to its last turn. A chat template
        gets the JSON schemas of ``tools``; ``told_tools`` is for one that has no place for them, see ``telling``.

        Raises:
            ValueError: ``chat`` is true and the tokenizer has no chat template, or a conversation of several turns
                would need one; or the chat template refuses these messages.
        """
        system, *turns = self._turns(asked)
        if self.through_chat(tokenizer):
            messages = [{"role": "system", "content": system}] if system else []
            for example in self.examples:
                messages += [
                    {"role": "user", "content": self._user(example.question)},
                    {"role": "assistant", "content": example.completion},
                ]
            messages += [{"role": role, "content": text} for role, text in turns]
            messages = telling(messages, told_tools, tokenizer) if told_tools else messages
            messages, given = in_parts(messages, tokenizer), [dict(tool) for tool in tools] or None
            try:
                text = tokenizer.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # of jinja, or raised by the template itself
                raise ValueError(_refusal(messages, error, tokenizer)) from error
            return str(text) + self.prefill
        if len(turns) > 1:
            raise ValueError(
                f"a conversation of {len(turns)} turns needs a chat template, which the tokenizer lacks or "
                "template.chat turns off: ask with single turns."
            )
        solved = [self._user(example.question) + example.completion for example in self.examples]
        blocks = [system] if system else []
        return "\n\n".join([*blocks, *solved, _as_text(turns[0][1]) + self.prefill])

    def encode(self, asked: str | Conversation, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Token ids of the rendered prompt; a chat template writes its special tokens itself."""
        text = self.render(asked, tokenizer)
        return list(tokenizer(text, add_special_tokens=not self.through_chat(tokenizer)).input_ids)

    def thought(self, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> ThoughtEnd | None:
        """The end of a thought for ``sampling.thinking_budget``; None without a budget.

        Raises:
            ValueError: the budget and the end leave no token for an answer.
        """
        if sampling.thinking_budget is None:
            return None
        end, budget = self.thought_of(tokenizer), sampling.thinking_budget
        most = budget if isinstance(budget, int) else budget[1]
        if most + len(end.tokens) >= sampling.max_completion_length:
            raise ValueError(
                f"sampling.thinking_budget {most} and the {len(end.tokens)} tokens of template.thought_end leave no "
                f"room for an answer in max_completion_length {sampling.max_completion_length}: change one of them."
            )
        return end

    def thought_of(self, tokenizer: PreTrainedTokenizerBase) -> ThoughtEnd:
        """The end of a thought in the tokenizer's tokens.

        Raises:
            ValueError: the tokenizer knows only a part of its text.
        """
        marker = THINK_TAGS[1] if THINK_TAGS[1] in self.thought_end else self.thought_end
        tokens = tuple(tokenizer(self.thought_end, add_special_tokens=False).input_ids)
        if marker not in str(tokenizer.decode(list(tokens), skip_special_tokens=False)):
            raise ValueError(
                f"template.thought_end is {self.thought_end!r}, of which the tokenizer knows only a part: add its tags "
                "or characters to model.policy, or give another text."
            )
        return ThoughtEnd(marker=marker, tokens=tokens, tokenizer=tokenizer, prefix=self.prefill)

    def completion_text(self, tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
        """The text that rewards get: what `begins` it, and the decoded completion without special tokens."""
        return self.begins(tokenizer) + str(tokenizer.decode(tokens, skip_special_tokens=True))

    def begins(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text with which every completion begins, as rewards see it: a ``<think>`` that the chat template itself
        writes at the end of each prompt, and ``prefill``."""
        return self._opened_thought(tokenizer) + self.prefill

    def without_opened_thought(self, completion: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """A whole completion without the ``<think>`` that stands at the end of its prompt, from ``prefill`` on."""
        opened = self._opened_thought(tokenizer)
        return completion.removeprefix(opened if completion.startswith(opened) else opened.rstrip())

    def _opened_thought(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The ``<think>`` at the end of the chat template's prompts, with the blanks behind it; empty without one."""
        if THINK_TAGS[0] not in str(getattr(tokenizer, "chat_template", None)) or not self.through_chat(tokenizer):
            return ""
        return _prompt_end(tokenizer, str(tokenizer.chat_template), self.system, self.user)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values, as stored in an export; ``PromptTemplate(**d)`` rebuilds the template."""
        return asdict(self)

    def _turns(self, asked: str | Conversation) -> Any:
        """The system text, then (role, text) of each turn."""
        if isinstance(asked, str):
            return self.system, ("user", self._user(asked))
        first = asked[0]
        system, turns = (first["content"], asked[1:]) if first["role"] == "system" else (self.system, asked)
        earlier = [(turn["role"], turn["content"]) for turn in turns[:-1]]
        return system, *earlier, (turns[-1]["role"], self._user(turns[-1]["content"]))

    def _user(self, question: Any) -> Any:
        """A text, or parts of a message, of which the last text is taken for the question."""
        if isinstance(question, str):
            return self.user.replace("{question}", question)
        last = max((i for i, part in enumerate(question) if part["type"] == "text"), default=None)
        if last is None:
            return [*question, {"type": "text", "text": self._user("")}]
        return [{**p, "text": self._user(p["text"])} if i == last else p for i, p in enumerate(question)]

    def through_chat(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """True if prompts go through the tokenizer's chat template.

        Raises:
            ValueError: ``chat`` is true and the tokenizer has none.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if self.chat and not has_template:
            raise ValueError("template.chat is true, but the tokenizer has no chat template. Set it to null or false.")
        return has_template if self.chat is None else self.chat


def in_parts(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The messages as the chat template of an image-text model reads them: many leave out a text that is no part of a
    message."""
    given = [dict(message) for message in messages]
    if hasattr(tokenizer, READER) and not _writes("1+1=", [{"role": "user", "content": "1+1="}], tokenizer):
        for message in given:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    return given


def _as_text(content: Any) -> str:
    """The text of a message without a chat template, a placeholder in the place of each part that is none."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else PLACEHOLDER for part in content)


@lru_cache(maxsize=8)
def _prompt_end(tokenizer: PreTrainedTokenizerBase, chat_template: str, system: str, user: str) -> str:
    """An open ``<think>`` at the end of a prompt, with the blanks behind it.

    Args:
        chat_template: that of the tokenizer, which may be given another.
    """
    prompt = PromptTemplate(system=system, user=user, chat=True).render("1", tokenizer)
    found = re.search(rf"{THINK_TAGS[0]}\s*\Z", prompt)
    return found.group() if found else ""


def _refusal(messages: Sequence[Mapping[str, Any]], error: Exception, tokenizer: PreTrainedTokenizerBase) -> str:
    """What a chat template does not take, in one line."""
    roles = [str(message["role"]) for message in messages]
    name = tokenizer.name_or_path or type(tokenizer).__name__
    advice = "give turns that it takes"
    if "system" in roles:
        advice = "say in template.user what the system message (template.system, or the data set's) says"
    told = " ".join(str(error).split())[:200]
    return (
        f"the chat template of {name!r} refuses messages of {', '.join(roles[:4])}{' …' * (len(roles) > 4)}: {told} "
        f"Change that: {advice}, or set template.chat to false, which writes plain text."
    )


PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "Tries.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "Any."}},
            "required": ["x"],
        },
    },
}
"""Tells what chat templates do with tools."""


def takes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the chat template tells the policy of tools that it is given."""
    return _writes(str(PROBE_TOOL["function"]["name"]), [{"role": "user", "content": "1"}], tokenizer, [PROBE_TOOL])


def telling(messages: Sequence[Mapping[str, Any]], text: str, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The messages with ``text`` at the end of the system message, which is added if there is none; or, where the chat
    template leaves system messages out or refuses them, before the first message of the user."""
    system, others = ([messages[0]], messages[1:]) if messages[0]["role"] == "system" else ([], messages)
    said = "\n\n".join([*(message["content"] for message in system), text])
    with_system = [{"role": "system", "content": said}, *others]
    if _writes(text.strip(), with_system, tokenizer):
        return with_system
    first = next(i for i, message in enumerate(others) if message["role"] == "user")
    asked = {**others[first], "content": f"{text}\n\n{others[first]['content']}"}
    return [*system, *others[:first], asked, *others[first + 1 :]]


def _writes(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,
) -> bool:
    """True if the chat template writes a text of these messages or tools; one that refuses them does not."""
    try:
        given = [dict(message) for message in messages]
        written = tokenizer.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception:  # of jinja, or raised by the template itself
        return False
    return text in str(written)


class Fits:
    """Callable that tells whether a prompt leaves room for a completion; tokenizes only prompts that may be too long.

    Args:
        encode: the tokens of a prompt.
        context: most tokens of a prompt and its completion together.
        length: most tokens of a completion.
        setting: what that length comes from.
        encode_all: the tokens of a problem's prompt by its question and columns, where it may hold more than text.
    """

    def __init__(
        self,
        encode: Callable[[str | Conversation], Sequence[int]],
        *,
        context: int,
        length: int,
        setting: str = "max_completion_length",
        encode_all: Callable[[str | Conversation, Mapping[str, Any]], Sequence[int]] | None = None,
    ) -> None:
        self.encode, self.limit, self.setting, self.encode_all = encode, context - length, setting, encode_all
        self.overhead = len(encode("")) + 8  # tokens may merge differently around the question

    def __call__(self, asked: str | Conversation, columns: Mapping[str, Any]) -> bool:
        if self.encode_all is not None:
            return len(self.encode_all(asked, columns)) <= self.limit
        # a token is at least one byte of text; what a chat template adds to conversations is not known
        if isinstance(asked, str) and len(asked.encode()) + self.overhead <= self.limit:
            return True
        return len(self.encode(asked)) <= self.limit

    def __str__(self) -> str:
        return f"the model's context has {self.limit} tokens beside {self.setting}"
