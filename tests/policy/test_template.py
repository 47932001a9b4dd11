"""What the policy reads and what rewards read, with and without a chat template."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.template import Example, PromptTemplate
from grpo_pl.training.reward_probe import text_samples
from grpo_pl.training.sft import tokenized
from grpo_pl.types import Conversation, Problem, SamplingParams

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALKS = {"system": "Think.", "user": "{question} Box it.", "prefill": "<think>"}
ASKED = {"role": "user", "content": "2+2="}
TALK = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, ASKED)
OWN_SYSTEM = ({"role": "system", "content": "Add."}, ASKED)


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = CHAT
    return chatty


@pytest.mark.parametrize(
    ("fields", "asked", "plain", "chat"),
    [
        ({}, "1+1=", "1+1=", "[user]1+1=[assistant]"),
        (
            {"system": "Think.", "user": "Q: {question}\nA:", "prefill": "<think>"},
            "1+1=",
            "Think.\n\nQ: 1+1=\nA:<think>",
            "[system]Think.[user]Q: 1+1=\nA:[assistant]<think>",
        ),
        ({"chat": False}, "1+1=", "1+1=", "1+1="),
        (TALKS, TALK, None, "[system]Think.[user]Hi[assistant]Yes?[user]2+2= Box it.[assistant]<think>"),
        (TALKS, OWN_SYSTEM, "Add.\n\n2+2= Box it.<think>", "[system]Add.[user]2+2= Box it.[assistant]<think>"),
        ({"user": "{question} Go."}, r"\frac{1}{2} of {question}?", r"\frac{1}{2} of {question}? Go.", None),
    ],
)
def test_the_text_with_and_without_a_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_tokenizer: PreTrainedTokenizerBase,
    fields: dict[str, Any],
    asked: str | Conversation,
    plain: str | None,
    chat: str | None,
) -> None:
    template = PromptTemplate(**fields)
    for each, expected in ((tokenizer, plain), (chat_tokenizer, chat)):
        if expected is not None:
            assert template.render(asked, each) == expected == each.decode(template.encode(asked, each))


def test_a_conversation_of_several_turns_needs_a_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="a conversation of 3 turns needs a chat template"):
        PromptTemplate().render(TALK, tokenizer)


def test_chat_true_without_a_chat_template_is_one_clear_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"template.chat is true, but the tokenizer has no chat template"):
        PromptTemplate(chat=True).render("1+1=", tokenizer)


def test_rewards_read_the_prefill_and_the_completion_without_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = [*tokenizer("7</think>").input_ids, tokenizer.eos_token_id]
    assert PromptTemplate(prefill="<think>").completion_text(tokens, tokenizer) == "<think>7</think>"


def test_user_text_without_the_question_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must contain '\{question\}', got 'Solve it'"):
        PromptTemplate(user="Solve it")


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("user", r"{question} Put the answer into \boxed{{}}."),
        ("user", "{{question}}"),
        ("user", '{question} {{"answer": 1}}'),
        ("system", r"Use \boxed{{}}."),
        ("prefill", r"\boxed{{"),
        ("examples[0].completion", r"\boxed{{3}}"),
    ],
)
def test_braces_written_twice_as_for_a_format_string_are_refused(field: str, text: str) -> None:
    settings = {"examples": [Example(question="1+2", completion=text)]} if "[" in field else {field: text}
    with pytest.raises(ValueError, match=rf"template\.{re.escape(field)} has '.*\{{\{{'.*write each brace once"):
        PromptTemplate(**settings)  # type: ignore[arg-type]


def test_single_braces_and_those_of_code_stay(tokenizer: PreTrainedTokenizerBase) -> None:
    user = r'{question} Reply {"a": {"b": 1}}, with \boxed{} and x^{2}.'
    template = PromptTemplate(user=user, system="int a[2][1] = {{1}, {2}};")
    assert template.render("1+2", tokenizer) == f"{template.system}\n\n{user.replace('{question}', '1+2')}"


SHOTS = PromptTemplate(
    system="Add.",
    user="Q: {question}\nA: ",
    prefill="<think>",
    examples=[Example(question="1+2", completion="<think>easy</think>3"), Example(question="2+2", completion="4")],
)


def test_examples_are_blocks_of_text_before_the_question(tokenizer: PreTrainedTokenizerBase) -> None:
    assert SHOTS.render("5+5", tokenizer) == (
        "Add.\n\nQ: 1+2\nA: <think>easy</think>3\n\nQ: 2+2\nA: 4\n\nQ: 5+5\nA: <think>"
    )


def test_examples_are_earlier_turns_of_a_chat(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    assert SHOTS.render("5+5", chat_tokenizer) == (
        "[system]Add.[user]Q: 1+2\nA: [assistant]<think>easy</think>3[user]Q: 2+2\nA: [assistant]4"
        "[user]Q: 5+5\nA: [assistant]<think>"
    )


def test_plain_values_rebuild_the_template() -> None:
    for template in (SHOTS, PromptTemplate(system="s", user="{question}!", prefill="<think>", chat=False)):
        assert PromptTemplate(**json.loads(json.dumps(template.to_dict()))) == template


def test_qwen3_thinks_within_a_budget_or_not_at_all(tokenizer: PreTrainedTokenizerBase) -> None:
    settings = {"thinking_budget": 5, "max_completion_length": 200}
    ends = {}
    for name in ("qwen3_think", "qwen3_no_think"):
        tree = yaml.safe_load((CONFIGS / "template" / f"{name}.yaml").read_text())["model"]["template"]
        template = PromptTemplate(**tree)
        assert template.render("1+1?", tokenizer) == f"1+1? /{name.removeprefix('qwen3_')}{template.prefill}"
        ends[name] = template.thought(SamplingParams(**settings), tokenizer)
    thinks, answers = ends["qwen3_think"], ends["qwen3_no_think"]
    assert tokenizer.decode(thinks.tokens) == (
        "Considering the limited time by the user, I have to give the solution based on the thinking directly now."
        "\n</think>.\n\n"
    )
    assert thinks.marker == "</think>" and thinks.length(thinks.tokens) == len(thinks.tokens) - 3
    assert answers.length([]) == 0  # the empty thought is over


REFUSALS = {
    "system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no\n system role') }}{% endif %}",
    "one after the other": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
    "too little": "{% for m in messages %}{{ m.tool_calls[0].name }}",
}


@pytest.mark.parametrize(
    ("refuses", "fields", "asked"),
    [
        ("system", {"system": "Think."}, "1+1="),
        ("system", {}, OWN_SYSTEM),
        ("one after the other", {"examples": [Example(question="1", completion="2")]}, OWN_SYSTEM),
        ("one after the other", {}, (ASKED, ASKED)),
        ("too little", {}, "1+1="),
    ],
)
def test_a_chat_template_that_refuses_the_turns_is_one_clear_line(
    tokenizer: PreTrainedTokenizerBase, refuses: str, fields: dict[str, Any], asked: str | Conversation
) -> None:
    picky = copy.deepcopy(tokenizer)
    picky.chat_template = REFUSALS[refuses] + "{{ m.content }}{% endfor %}"
    system = "system" if fields.get("system") or asked is OWN_SYSTEM else "user"
    with pytest.raises(ValueError, match=rf"refuses messages of {system}[^\n]*template\.chat to false[^\n]*\Z"):
        PromptTemplate(**fields).render(asked, picky)


THINKS = CHAT.replace("[assistant]", "[assistant]<think>\n")


@pytest.mark.parametrize(
    ("chat_template", "fields", "begins"),
    [
        (THINKS, {}, "<think>\n"),
        (THINKS.replace("\n", ""), {"system": "Add."}, "<think>"),
        (THINKS, {"prefill": "So "}, "<think>\nSo "),
        (THINKS, {"chat": False}, ""),
        (THINKS, {"chat": False, "prefill": "<think>"}, "<think>"),
        (CHAT, {"prefill": "<think>"}, "<think>"),
        (THINKS + "</think>", {}, ""),  # a thought that is over
        (CHAT + "{# <think> #}", {}, ""),
        (None, {}, ""),
    ],
)
def test_a_thought_that_the_chat_template_opens_counts_as_prefill(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, fields: dict[str, Any], begins: str
) -> None:
    thinking, template = copy.deepcopy(tokenizer), PromptTemplate(**fields)
    thinking.chat_template = chat_template
    assert template.render("1", thinking).endswith(begins)
    written = thinking("7</think>").input_ids
    whole = template.completion_text(written, thinking)
    assert whole == f"{begins}7</think>"
    assert template.without_opened_thought(whole, thinking).removeprefix(template.prefill) == "7</think>"
    thinking.chat_template = CHAT  # as in the prompts from now on
    assert template.completion_text(written, thinking) == f"{template.prefill}7</think>"


def test_demonstrations_and_tried_texts_do_not_open_a_thought_twice(tokenizer: PreTrainedTokenizerBase) -> None:
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = THINKS
    dialogue = Dialogue(template=PromptTemplate(), tokenizer=thinking)
    expected = [*thinking("7</think>").input_ids, thinking.eos_token_id]
    for text in ("<think>7</think>", "<think>\n7</think>", "7</think>"):
        (example,) = tokenized([Demonstration("1", text)], dialogue)
        assert example.completion == expected
        samples = text_samples([Problem(id=0, question="1", answer="7")], [[text]], dialogue.template, thinking)
        assert samples.rollout.completion_ids.tolist() == [expected]
