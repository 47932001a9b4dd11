"""Checks conversations and encodes them as prompt tokens, with the turns as the policy's training wrote them; what
cannot be served is an ``ApiError`` (400)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from grpo_pl.environment import Observation, listed, text_of
from grpo_pl.extras.agents.tool_calls import Call, Result
from grpo_pl.openai_format.messages import Message
from grpo_pl.policy.dialogue import Dialogue, messages_of
from grpo_pl.policy.template import PROBE_TOOL, Example, PromptTemplate, in_parts, takes_tools, telling
from grpo_pl.policy.trained import ServedModel
from grpo_pl.processes.time_limit import TooSlow, time_limit
from serve.errors import ApiError, bad_request

_TEMPLATE_S = 2.0
"""Most seconds of a chat template, which may be a stranger's."""
_PROBE = Call(PROBE_TOOL["function"]["name"], {"x": "1"})


@dataclass
class Action:
    """A message of the assistant: its text, the calls of tools in it, and their results."""

    text: str
    calls: list[Call] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)


@dataclass
class Exchange:
    """A question of the user, and the assistant's actions after it."""

    question: str
    actions: list[Action] = field(default_factory=list)


@dataclass(frozen=True)
class Conversation:
    """A checked conversation: the system text, and the exchanges in order."""

    system: str | None
    exchanges: list[Exchange]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Conversation:
        """Reads messages; consecutive ones of the user, and of an assistant without calls, are joined."""
        first, *others = messages
        system = first.text if first.role in ("system", "developer") else None
        turns = messages if system is None else others
        if any(turn.role in ("system", "developer") for turn in turns):
            raise _bad("give at most one system message, as the first.")
        if not turns or turns[-1].role not in ("user", "tool"):
            raise _bad("the last message must be the user's, or a tool's.")
        if turns[0].role != "user":
            raise _bad("the first message after the system's must be the user's.")
        exchanges: list[Exchange] = []
        due: dict[str, int] = {}  # id of each call that lacks its result -> its index among the action's calls
        for place, turn in enumerate(turns, start=len(messages) - len(turns)):
            if turn.role == "tool":
                if turn.tool_call_id not in due:
                    raise _bad(f"no call before it waits for the result of {turn.tool_call_id!r:.80}.", place)
                action = exchanges[-1].actions[-1]
                at = due.pop(turn.tool_call_id)
                action.results[at] = Result(action.calls[at].name, turn.text)
                continue
            if due:
                raise _bad(f"the call {next(iter(due))!r:.80} has no result before it.", place)
            if turn.role != "user":
                due = _answer(exchanges[-1], turn, place)
            elif exchanges and not exchanges[-1].actions:
                exchanges[-1].question += f"\n\n{turn.text}"
            else:
                exchanges.append(Exchange(turn.text))
        if due:
            raise _bad(f"the call {next(iter(due))!r:.80} has no result.")
        return cls(system, exchanges)


def _answer(exchange: Exchange, turn: Message, place: int) -> dict[str, int]:
    """Adds a message of the assistant; returns id -> index of its calls."""
    if exchange.actions and not exchange.actions[-1].calls:
        exchange.actions[-1].text += f"\n\n{turn.text}"
    else:
        exchange.actions.append(Action(turn.text))
    action = exchange.actions[-1]
    action.calls = [Call(called.function.name, called.arguments) for called in turn.tool_calls]
    action.results = [Result(call.name, "") for call in action.calls]
    ids = {called.id: i for i, called in enumerate(turn.tool_calls)}
    if len(ids) < len(turn.tool_calls):
        raise _bad("its tool_calls have an id twice.", place)
    return ids


def _bad(message: str, place: int | None = None) -> ApiError:
    return bad_request("messages" if place is None else f"messages.{place}", message)


@dataclass(frozen=True)
class Renderer:
    """Encodes conversations for one model."""

    model: ServedModel

    def tokens(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] = (), *, prefill: bool = True
    ) -> list[int]:
        """The tokens of the prompt up to the assistant's next turn.

        ``template.user`` is applied to questions. With a chat template, it renders all turns, and calls in its own form
        if the policy's parser reads that. Without one, a policy that was trained in episodes reads all turns as it did
        there; for others the turns after the last question are encoded so, and earlier exchanges come before it like
        the template's examples.

        Args:
            tools: the tools that the assistant may call, as chat templates take them.
            prefill: begin the next turn with the template's prefill.
        """
        template = self.model.template
        if conversation.system is not None:
            template = replace(template, system=conversation.system)
        try:
            if tools:
                self.model.tools.parser.check({tool["function"]["name"]: tool for tool in tools})
        except ValueError as error:
            raise bad_request("tools", str(error)) from None
        if self.runs_template:
            text = self._through_chat_template(self._messages(template, conversation.exchanges), tools)
            text += template.prefill if prefill else ""
            return list(self.model.tokenizer(text, add_special_tokens=False).input_ids)
        return self._as_text(template, conversation.exchanges, tools, prefill=prefill)

    @property
    def runs_template(self) -> bool:
        """True if a chat template writes prompts."""
        return self.model.template.through_chat(self.model.tokenizer)

    @contextmanager
    def time_limit(self) -> Iterator[None]:
        """Context manager that ends a chat template which loops, in the thread that renders it."""
        try:
            with time_limit(_TEMPLATE_S) if self.runs_template else nullcontext():
                yield
        except TooSlow:
            raise _bad(f"the model's chat template takes more than {_TEMPLATE_S:g} s to write them.") from None

    def call_text(self, call: Call) -> str:
        """The text of a call in the prompt: of one that the chat template writes, the name and the arguments."""
        if self.runs_template and self._writes_calls:
            return call.name + json.dumps(call.arguments, ensure_ascii=False)
        return self._written(call)

    def _written(self, call: Call) -> str:
        """The call in the form of the policy's parser."""
        try:
            return self.model.tools.parser.written(call)
        except ValueError as error:
            raise _bad(str(error)) from None

    def tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The text about tools in the prompt; of tools that a chat template describes, their schemas."""
        if not tools:
            return ""
        if self.runs_template:
            return json.dumps(tools, ensure_ascii=False) if self._takes_tools else self.model.tools.told(tools)
        return self.model.tools.plain.tools.replace("{tools}", listed(tools))

    @cached_property
    def _takes_tools(self) -> bool:
        """True if the chat template describes tools; otherwise the system message does."""
        return takes_tools(self.model.tokenizer)

    @cached_property
    def _writes_calls(self) -> bool:
        """True if the chat template renders calls in a form that the policy's parser reads."""
        said = {"role": "assistant", "content": "", "tool_calls": [_as_message(_PROBE)]}
        try:
            text = self._through_chat_template([{"role": "user", "content": "1"}, said], [])
        except ApiError:
            return False
        found = self.model.tools.parser.calls(text, {_PROBE.name: PROBE_TOOL})
        return any(not call.fault and call[:2] == _PROBE[:2] for call in found)

    def _messages(self, template: PromptTemplate, exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": template.system}] if template.system else []
        earlier = [Exchange(e.question, [Action(e.completion)]) for e in template.examples]
        for exchange in [*earlier, *exchanges]:
            messages.append({"role": "user", "content": template.user.replace("{question}", exchange.question)})
            for action in exchange.actions:
                if action.calls and self._writes_calls:
                    calls = [_as_message(call) for call in action.calls]
                    messages.append({"role": "assistant", "content": action.text, "tool_calls": calls})
                else:
                    messages.append({"role": "assistant", "content": self._action_text(action)})
                if action.calls:
                    messages += map(dict, messages_of(self.model.tools.parser.observation(action.results)))
        return messages

    def _action_text(self, action: Action) -> str:
        """The text of an action, with its calls in the form of the policy's parser."""
        return action.text + "\n".join(map(self._written, action.calls))

    def _through_chat_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        given = [dict(tool) for tool in tools] or None
        try:
            if given and not self._takes_tools:
                messages, given = telling(messages, self.model.tools.told(tools), self.model.tokenizer), None
            apply, said = self.model.tokenizer.apply_chat_template, in_parts(messages, self.model.tokenizer)
            return str(apply(said, tools=given, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # raised by jinja or by the template itself
            told = " ".join(str(error).split())[:200]
            raise _bad(f"the model's chat template cannot write them: {told}") from error

    def _as_text(
        self,
        template: PromptTemplate,
        exchanges: Sequence[Exchange],
        tools: Sequence[Mapping[str, Any]],
        *,
        prefill: bool,
    ) -> list[int]:
        form, tokenizer = self.model.tools, self.model.tokenizer
        if self.model.environment is None:
            *done, last = exchanges
            exchanges = [last]
            solved = [Example(question=e.question, completion="".join(map(self._with_result, e.actions))) for e in done]
            template = replace(template, examples=[*template.examples, *solved])
        # what follows each action: results, or what the user says next
        said: list[tuple[Action, Observation]] = []
        for number, exchange in enumerate(exchanges):
            said += [(action, form.parser.observation(action.results)) for action in exchange.actions]
            if number + 1 < len(exchanges):
                (action, told), question = said[-1], exchanges[number + 1].question
                asked = [*messages_of(told), {"role": "user", "content": question}] if action.calls else question
                said[-1] = (action, asked)
        bare = Dialogue(template=replace(template, prefill=""), tokenizer=tokenizer, tools=tools, plain=form.plain)
        begun = replace(bare, template=template)
        # a prefill at the beginning of an action belongs to the prompt, as in training
        whole = [action.text.startswith(template.prefill) for action, _ in said] + [prefill]
        ids = (begun if whole[0] else bare).prompt_ids(exchanges[0].question)
        for (action, observed), had, has in zip(said, whole, whole[1:], strict=False):
            text = self._action_text(action)[len(template.prefill) if had else 0 :]
            ids += tokenizer(text, add_special_tokens=False).input_ids
            if tokenizer.eos_token_id is not None and not text.endswith(tuple(self.model.sampling.stop)):
                ids.append(tokenizer.eos_token_id)
            ids += (begun if has else bare).observation_ids(observed, ids[-1])
        return ids

    def _with_result(self, action: Action) -> str:
        if not action.calls:
            return action.text
        observed = text_of(self.model.tools.parser.observation(action.results))
        return self._action_text(action) + self.model.tools.plain.observation.replace("{observation}", observed)


def _as_message(call: Call) -> dict[str, Any]:
    """The call in the form that chat templates take."""
    return {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
