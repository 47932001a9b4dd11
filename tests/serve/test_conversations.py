"""Messages with tools become the tokens that the policy read in training; what a text must not lose on its way."""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.extras.agents.tool_calls import CallParser, HermesCalls, Result, TagCalls
from grpo_pl.extras.agents.tool_form import ToolForm
from grpo_pl.openai_format.messages import FunctionTool, Message
from grpo_pl.policy.dialogue import Dialogue, PlainTurns
from grpo_pl.policy.template import Example, PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.types import SamplingParams
from serve.conversations import Conversation, Renderer
from serve.errors import ApiError
from serve.prompts import Prompts

if (TRL := find_spec("trl")) is None:  # whose import takes long
    pytest.skip("TRL is a development dependency: pip install 'grpo_pl[dev]'", allow_module_level=True)
TEMPLATES = Path(str(TRL.origin)).parent / "chat_templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Works it out.",
        "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
    },
}


def called(*expressions: str, text: str = "") -> dict[str, Any]:
    calls = [
        {"id": f"c{e}", "type": "function", "function": {"name": "calc", "arguments": json.dumps({"e": e})}}
        for e in expressions
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(expression: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{expression}", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def conversation(*messages: dict[str, Any]) -> Conversation:
    return Conversation.of([Message.model_validate(message) for message in messages])


def renderer(tokenizer: PreTrainedTokenizerBase, form: ToolForm | None = None, **template: Any) -> Renderer:
    sampling = SamplingParams(max_completion_length=8, stop=template.pop("stop", ()))
    model = SimpleNamespace(
        tokenizer=tokenizer,
        environment=template.pop("environment", None),
        template=PromptTemplate(**template),
        tools=form or ToolForm(),
        sampling=sampling,
    )
    return Renderer(model)  # type: ignore[arg-type]


def chatty(name: str) -> PreTrainedTokenizerBase:
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


TAGS = ToolForm(parser=TagCalls(), plain=PlainTurns())


@pytest.mark.parametrize("prefill", ["", ">"])
@pytest.mark.parametrize("stop", [(), ("</calc>",)])
def test_without_a_chat_template_turns_are_those_of_training(
    tokenizer: PreTrainedTokenizerBase, prefill: str, stop: tuple[str, ...]
) -> None:
    template = {"system": "Compute.", "user": "{question}=", "prefill": prefill}
    talk = Dialogue(template=PromptTemplate(**template), tokenizer=tokenizer)  # type: ignore[arg-type]
    ids, eos = talk.prompt_ids("12*7+1"), [] if stop else [tokenizer.eos_token_id]
    for expression, value in (("12*7", "84"), ("84+1", "85")):
        ids += tokenizer(f"<calc>{expression}</calc>", add_special_tokens=False).input_ids + eos
        ids += talk.observation_ids(TagCalls().observation([Result("calc", value)]), ids[-1])
    asked = conversation(
        user("12*7+1"),
        called("12*7", text=prefill), result("12*7", "84"), called("84+1", text=prefill), result("84+1", "85"),
    )  # fmt: skip
    assert renderer(tokenizer, TAGS, **template, stop=stop).tokens(asked, [TOOL]) == ids


def test_a_chat_template_writes_tools_calls_and_results_itself() -> None:
    tokenizer = chatty("qwen2_5")
    messages = [user("12*7?"), called("12*7", "1+1", text="Let me see."), result("1+1", "2"), result("12*7", "84")]
    ids = renderer(tokenizer, system="Compute.").tokens(conversation(*messages), [TOOL])
    calls = [{"type": "function", "function": {"name": "calc", "arguments": {"e": e}}} for e in ("12*7", "1+1")]
    whole = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Compute."},
            user("12*7?"),
            {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
            {"role": "tool", "name": "calc", "content": "84"},  # in the order of the calls
            {"role": "tool", "name": "calc", "content": "2"},
        ],
        tools=[TOOL],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(ids) == whole
    assert '<tool_call>\n{"name": "calc", "arguments": {"e": "12*7"}}\n</tool_call>' in whole


def test_what_a_chat_model_wrote_comes_back_as_it_stood() -> None:
    """The tokens of training, where each turn is kept: Qwen's own way to write calls is also its template's."""
    tokenizer = chatty("qwen2_5")
    talk = Dialogue(template=PromptTemplate(), tokenizer=tokenizer, tools=[TOOL])
    action = '<tool_call>\n{"name": "calc", "arguments": {"e": "12*7"}}\n</tool_call><|im_end|>'
    ids = talk.prompt_ids("12*7?") + tokenizer(action, add_special_tokens=False).input_ids
    ids += talk.observation_ids(HermesCalls().observation([Result("calc", "84")]), ids[-1])
    asked = conversation(user("12*7?"), called("12*7"), result("12*7", "84"))
    assert renderer(tokenizer).tokens(asked, [TOOL]) == ids


def test_calls_in_a_form_that_the_chat_template_has_not_are_written_by_the_parser() -> None:
    tokenizer = chatty("qwen2_5")
    asked = conversation(user("12*7?"), called("12*7", text="So "), result("12*7", "84"))
    text = tokenizer.decode(renderer(tokenizer, TAGS).tokens(asked))
    assert "assistant\nSo <calc>12*7</calc><|im_end|>\n<|im_start|>user\n<result>84</result><|im_end|>" in text
    assert '"name"' not in text


def test_earlier_exchanges_are_examples(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = conversation(
        user("1+1"), called("1+1"), result("1+1", "2"), {"role": "assistant", "content": "2"}, user("3+3")
    )
    text = tokenizer.decode(renderer(tokenizer, TAGS, user="{question}=").tokens(asked))
    assert text == "1+1=<calc>1+1</calc>\n<result>2</result>\n2\n\n3+3="
    chat = chatty("qwen2_5")
    text = chat.decode(renderer(chat, user="{question}=").tokens(asked, [TOOL]))
    assert text.endswith("assistant\n2<|im_end|>\n<|im_start|>user\n3+3=<|im_end|>\n<|im_start|>assistant\n")


def test_what_the_user_says_later_is_an_observation_for_a_policy_of_episodes(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    asked = conversation(
        user("1+1"), called("1+1"), result("1+1", "2"), {"role": "assistant", "content": "2"}, user("sure?")
    )
    talk = renderer(tokenizer, TAGS, environment={"class_path": "any"})
    text = tokenizer.decode(talk.tokens(asked))
    assert text == "1+1<calc>1+1</calc><eos>\n<result>2</result>\n2<eos>\nsure?\n"


def test_a_conversation_without_tools_is_what_it_was(tokenizer: PreTrainedTokenizerBase) -> None:
    asked = conversation(user("1+1"), user("now"), {"role": "assistant", "content": "2"}, user("3+3"))
    examples = [Example(question="1+1\n\nnow", completion="2")]
    for kind in (tokenizer, chatty("qwen2_5")):
        before = PromptTemplate(user="{question}=", prefill="<", examples=examples).encode("3+3", kind)
        assert renderer(kind, user="{question}=", prefill="<").tokens(asked) == before
        assert renderer(kind, user="{question}=", prefill="<").tokens(asked, prefill=False) == before[:-1]


def test_a_model_that_was_not_trained_with_tools_is_told_of_them(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.decode(renderer(tokenizer).tokens(conversation(user("1+1")), [TOOL]))
    assert text.startswith(f"Tools:\n{json.dumps(TOOL)}\n") and text.endswith("\n\n1+1")


@pytest.mark.parametrize("system", ["", "Compute."])
@pytest.mark.parametrize("form", [ToolForm(), ToolForm(plain=PlainTurns()), TAGS])
def test_tools_for_which_the_chat_template_has_no_place_are_in_the_system_message(form: ToolForm, system: str) -> None:
    tokenizer = chatty("qwen2_5")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    text = tokenizer.decode(renderer(tokenizer, form, system=system).tokens(conversation(user("1+1")), [TOOL]))
    described = form.parser.told([TOOL])
    assert ("<calc>e</calc> Works it out." if form is TAGS else json.dumps(TOOL)) in described
    assert text == f"[system]{system and f'{system}{2 * chr(10)}'}{described}[user]1+1[assistant]"
    template = PromptTemplate(system=system)
    talk = Dialogue(template=template, tokenizer=tokenizer, tools=[TOOL], told_tools=described)
    assert tokenizer.decode(talk.prompt_ids("1+1")) == text  # as in training


def test_a_refusal_of_the_chat_template_is_the_clients() -> None:
    tokenizer = chatty("qwen2_5")
    tokenizer.chat_template = "{{ raise_exception('no such\nroles') }}"
    with pytest.raises(ApiError, match="cannot write them: no such roles") as caught:
        renderer(tokenizer).tokens(conversation(user("1+1")))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([user("1"), result("1", "2")], r"messages.1: no call before it waits for the result of 'c1'"),
        ([user("1"), called("1"), user("2")], r"messages.2: the call 'c1' has no result"),
        ([user("1"), called("1", "2"), result("1", "2")], "the call 'c2' has no result"),
        ([user("1"), called("1"), result("1", "2"), result("1", "2")], r"messages.3: no call"),
        ([user("1"), called("1", "1"), result("1", "2")], "an id twice"),
        ([user("1"), called("1")], "last message must be the user's, or a tool's"),
        ([called("1"), result("1", "2")], "first message after the system's must be the user's"),
        ([user("1"), {"role": "system", "content": "x"}], "at most one system message"),
        ([{"role": "system", "content": "x"}], "last message must be the user's"),
    ],
)
def test_messages_in_an_order_that_makes_no_sense(messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        conversation(*messages)


def test_characters_that_stand_in_no_turn_need_not_be_known() -> None:
    tokenizer = character_tokenizer(["<calc>", "</calc>"], characters="0123456789+*=<>/calresut\n")
    talk = renderer(tokenizer, TAGS, user="{question}=").model
    talk.context = None  # type: ignore[misc]
    messages = [Message.model_validate(m) for m in (user("1+1"), called("1+1"), result("1+1", "2"))]
    ids = asyncio.run(Prompts(talk).from_messages(messages)).ids
    assert tokenizer.decode(ids) == "1+1=<calc>1+1</calc><eos>\n<result>2</result>\n"
    messages[1:] = [Message.model_validate(m) for m in (called("1-1"), result("1-1", "0"))]
    with pytest.raises(ApiError, match="does not know the character '-'"):
        asyncio.run(Prompts(talk).from_messages(messages))


class Unwritten(HermesCalls):
    """Reads calls as Hermes wrote them, and does not say how to write one."""

    written = CallParser.written


def test_a_parser_need_not_write_what_the_chat_template_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [Message.model_validate(m) for m in (user("1+1"), called("1+1"), result("1+1", "2"))]
    chat, plain = (renderer(kind, ToolForm(parser=Unwritten())).model for kind in (chatty("qwen2_5"), tokenizer))
    chat.context = plain.context = None  # type: ignore[misc]
    text = chat.tokenizer.decode(asyncio.run(Prompts(chat).from_messages(messages)).ids)
    assert '<tool_call>\n{"name": "calc", "arguments": {"e": "1+1"}}\n</tool_call>' in text
    with pytest.raises(ApiError, match="Unwritten does not say how calls are written"):
        asyncio.run(Prompts(plain).from_messages(messages))
    messages[1] = Message.model_validate(called("\N{GREEK SMALL LETTER PI}"))
    messages[2] = Message.model_validate(result("\N{GREEK SMALL LETTER PI}", "2"))
    with pytest.raises(ApiError, match="does not know the character"):
        asyncio.run(Prompts(chat).from_messages(messages))


def test_a_call_that_tags_cannot_write_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1, "b": 2}'}}]
    asked = conversation(user("1"), {"role": "assistant", "tool_calls": calls}, result("1", "2"))
    with pytest.raises(ApiError, match="gives one argument, and that of 'calc' has 2"):
        renderer(tokenizer, TAGS).tokens(asked)


class Counting:
    """A tokenizer that counts how often it is called."""

    def __init__(self) -> None:
        self.own, self.calls = character_tokenizer("abc123"), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.own(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def test_too_many_tools_to_hold_answers_to_are_named_as_such() -> None:
    prompts = Prompts(SimpleNamespace(tools=ToolForm()))  # type: ignore[arg-type]
    tools = [FunctionTool.model_validate({"type": "function", "function": {"name": f"f{i}"}}) for i in range(128)]
    few = prompts.call_grammar(tools[:8], several=True)
    assert few.kind == "lark" and few.text.count("<tool_call>") == 8
    long = {"type": "object", "properties": {"x": {"description": "x" * 300}}}
    for tool in tools:
        tool.function.parameters = long
    with pytest.raises(ApiError, match=r"^400: tools: .* 128 tools .*fewer tools") as caught:
        prompts.call_grammar(tools, several=True)
    assert caught.value.param == "tools"


def test_very_many_new_characters_cost_few_calls() -> None:
    tokenizer = Counting()
    prompts = Prompts(SimpleNamespace(tokenizer=tokenizer, context=None))  # type: ignore[arg-type]
    assert prompts.known("".join(map(chr, range(0x4E00, 0x5E00))) + "ab3") == {"a", "b", "3"}
    assert tokenizer.calls <= 8  # each a while in which nobody else is answered
    prompts.check_characters("abba" * 1000, "prompt")
    with pytest.raises(ApiError, match="does not know the character '一'"):
        prompts.check_characters("ab一丁", "prompt")
    assert tokenizer.calls <= 8  # each a while in which nobody else is answered
