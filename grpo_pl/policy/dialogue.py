"""``Dialogue``: encodes the prompt and the observations of an episode; tokens of actions are never encoded again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from grpo_pl.environment import Environment, Observation, listed, text_of
from grpo_pl.policy.inputs import encode_prompt, reader_of
from grpo_pl.policy.template import PromptTemplate, takes_tools
from grpo_pl.types import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "GRPO-PL"
_PROBES = (_ANSWER, f"<think>\n1\n</think>\n\n{_ANSWER}")
"""Messages of the assistant in the conversations on which templates are tried; all end with ``_ANSWER``."""
_QUESTION: Conversation = ({"role": "user", "content": "1"},)


@dataclass(frozen=True, kw_only=True)
class PlainTurns:
    """How turns are written for a tokenizer without chat template."""

    observation: str = "\n{observation}\n"
    """Text between two actions; ``{observation}`` is replaced."""
    tools: str = ""
    """Text before the question; ``{tools}`` is replaced by one JSON schema per line. Empty: tools are not mentioned.
    With a chat template that has no place for tools it stands in the system message, and empty means the description
    that the parser of the calls gives."""

    def __post_init__(self) -> None:
        if "{observation}" not in self.observation:
            raise ValueError(f"observation must contain '{{observation}}', got {self.observation!r}.")
        if self.tools and "{tools}" not in self.tools:
            raise ValueError(f"tools must contain '{{tools}}' or be empty, got {self.tools!r}.")


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """The token sequence of an episode: prompt, action, observation, action, …

    The text of an observation is what the chat template writes between two turns of the assistant: the difference of
    the renderings with and without the new messages. The tokens of actions are kept as the policy drew them.
    """

    template: PromptTemplate
    tokenizer: PreTrainedTokenizerBase
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the tools that the prompt describes."""
    told_tools: str = ""
    """Description of the tools in the system message, for a chat template that has no place for them."""
    plain: PlainTurns = field(default_factory=PlainTurns)
    _known_heads: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict, init=False, repr=False)

    def within(self, environment: Environment) -> Dialogue:
        """The same with the tools of an environment."""
        return replace(self, tools=environment.tool_schemas, told_tools=environment.told_tools)

    @cached_property
    def tells_tools(self) -> bool:
        """True if the system message describes the tools, since the chat template has no place for them."""
        return bool(self.tools) and self.template.through_chat(self.tokenizer) and not takes_tools(self.tokenizer)

    def prompt_ids(self, asked: str | Conversation, observation: Observation = "") -> list[int]:
        """Tokens up to the first action: the question, followed by the observation of the environment's reset."""
        return self.prompts_ids([opening(asked, observation)])[0]

    def prompts_ids(self, asked: Sequence[str | Conversation]) -> list[list[int]]:
        """`prompt_ids` of several questions, for which the tokenizer is called once."""
        chat, described = self.template.through_chat(self.tokenizer), ""
        options: dict[str, Any] = {"tools": self.tools}
        if self.tools:
            described = self.plain.tools.replace("{tools}", listed(self.tools))
        if self.tells_tools:
            options = {"told_tools": described.strip() or self.told_tools}
        if chat:
            texts = [self.template.render(each, self.tokenizer, **options) for each in asked]
        else:
            texts = [described + self._without_chat(each) for each in asked]
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=not chat).input_ids]

    def _without_chat(self, asked: str | Conversation) -> str:
        """A prompt for a tokenizer without chat template. What follows the first turn of a conversation is written as
        in an episode: the assistant's turns like actions, the others like observations."""
        first = 0 if isinstance(asked, str) or asked[0]["role"] != "system" else 1
        if isinstance(asked, str) or len(asked) == first + 1:
            return self.template.render(asked, self.tokenizer)
        text = replace(self.template, prefill="").render(asked[: first + 1], self.tokenizer)
        for own, turns in groupby(asked[first + 1 :], key=lambda turn: turn["role"] == "assistant"):
            told = text_of(list(turns))
            ended = told + (self.tokenizer.eos_token or "")
            text += ended if own else self.plain.observation.replace("{observation}", told)
        return text + self.template.prefill

    def observation_ids(self, observation: Observation, last: int | None) -> list[int]:
        """Tokens between two actions: the end of the turn, the observation, and the beginning of the next turn.

        Args:
            observation: what the environment returned for the action.
            last: the last token of the action; if the turn ends with the same special token, it is not repeated.

        Raises:
            ValueError: the template renders earlier turns differently once another message follows.
        """
        if self.template.through_chat(self.tokenizer):
            text = self._suffix(_PROBES[0], messages_of(observation))
        else:
            text = self.plain.observation.replace("{observation}", text_of(observation))
        ids = list(self.tokenizer(text + self.template.prefill, add_special_tokens=False).input_ids)
        return ids[1:] if ids and ids[0] == last and last in self.tokenizer.all_special_ids else ids

    def check(self, role: str = "user") -> None:
        """Checks that the template only appends text for a message of ``role``, and the same text in later turns and
        whether or not the assistant wrote thoughts before its answer."""
        if self.template.through_chat(self.tokenizer):
            messages = ({"role": role, "content": "1"},)
            once_more = (_assistant(_PROBES[0]), *messages)
            found = {self._suffix(probe, messages, earlier) for probe in _PROBES for earlier in ((), once_more)}
            if len(found) > 1:
                raise ValueError(f"{self._name()} writes a message of {role} differently in places: {self._advice()}")

    def _suffix(self, answer: str, messages: Conversation, earlier: Conversation = ()) -> str:
        """The text that the template writes between ``answer`` of the assistant and its next turn."""
        key = (answer, repr(earlier))
        try:
            if key not in self._known_heads:  # the text up to the end of the answer: as rendered, and as it was read
                ended = self._rendered([*_QUESTION, *earlier, _assistant(answer)], more=False)
                read = self._rendered([*_QUESTION, *earlier], more=True) + answer
                self._known_heads[key] = ended[: ended.rfind(_ANSWER) + len(_ANSWER)], read
            after = self._rendered([*_QUESTION, *earlier, _assistant(answer), *messages], more=True)
        except Exception as error:  # raised by jinja or by the template itself
            roles = ", ".join(sorted({str(message["role"]) for message in messages}))
            raise ValueError(f"{self._name()} refuses messages of {roles} after the assistant's: {error}") from error
        for head in self._known_heads[key]:
            if head.endswith(_ANSWER) and after.startswith(head):
                return after[len(head) :]
        raise ValueError(
            f"{self._name()} writes earlier turns differently once there is another message, so that what the policy "
            f"read would not be what it is trained on: {self._advice()}"
        )

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, more: bool) -> str:
        tools = None if self.tells_tools else [dict(tool) for tool in self.tools] or None
        plain = [dict(message) for message in messages]
        return str(self.tokenizer.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=more))

    def _name(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path or type(self.tokenizer).__name__!r}"

    def _advice(self) -> str:
        return (
            "use one that leaves them as they are (some do for messages of the role tool), or template.chat: false, "
            "which writes plain text."
        )


def reading_prompts(dialogue: Dialogue) -> Callable[[str | Conversation, Mapping[str, Any]], list[int]] | None:
    """Encodes a problem by its question and columns, where the policy reads more than text; None where it does not."""
    if reader_of(dialogue.tokenizer) is None:
        return None
    return lambda asked, columns: encode_prompt(asked, columns, dialogue.template, dialogue.tokenizer).ids


def opening(asked: str | Conversation, observation: Observation) -> str | Conversation:
    """The question followed by the first observation of an environment; a text is appended to the last message.

    Raises:
        ValueError: the observation is a list of messages that does not end with one of the user.
    """
    if not observation:
        return asked
    if isinstance(observation, str):
        if isinstance(asked, str):
            return f"{asked}\n{observation}" if asked else observation
        last = asked[-1]
        return (*asked[:-1], {**last, "content": opening(str(last["content"]), observation)})
    before: Conversation = ({"role": "user", "content": asked},) if isinstance(asked, str) and asked else tuple(asked)  # type: ignore[arg-type]
    messages = (*before, *observation)
    if messages[-1]["role"] != "user" and (asked or messages[-1]["role"] != "tool"):  # with which an agent may begin
        raise ValueError(f"the first observation must end with a message of the user, got {messages[-1]['role']!r}.")
    return messages


def messages_of(observation: Observation) -> Conversation:
    """A text as a message of the user; messages as they are."""
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    return tuple(observation)


def _assistant(text: str) -> Mapping[str, Any]:
    return {"role": "assistant", "content": text}
