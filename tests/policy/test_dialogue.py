"""The tokens of many turns, with and without a chat template; real ones are those that come with TRL."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from grpo_pl.policy.dialogue import Dialogue, PlainTurns, opening
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer

if (TRL := find_spec("trl")) is None:  # whose import takes long
    pytest.skip("TRL is a development dependency: pip install 'grpo_pl[dev]'", allow_module_level=True)
TEMPLATES = Path(str(TRL.origin)).parent / "chat_templates"
CHATML_EOS = "<|im_end|>"
TOOL = {"type": "function", "function": {"name": "calc", "description": "Adds.", "parameters": {"type": "object"}}}


def chatty(name: str) -> PreTrainedTokenizerBase:
    """Characters, with the end of a turn as its one special token, and the template of a model family."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [CHATML_EOS, "<|im_start|>"]})
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer.name_or_path = name
    return tokenizer


def dialogue(tokenizer: PreTrainedTokenizerBase, **template: object) -> Dialogue:
    return Dialogue(template=PromptTemplate(**template), tokenizer=tokenizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "qwen3_training", "llama3_1", "lfm2"])
def test_the_whole_episode_is_what_the_template_renders(name: str) -> None:
    tokenizer = chatty(name)
    talk = dialogue(tokenizer)
    talk.check("user")
    end = "<|im_end|>" if "llama" not in name else "<|eot_id|>"
    thought = "<think>\nwell\n</think>\n\n" if name == "qwen3_training" else ""  # which it always writes
    actions, observations = [f"{thought}look", f"{thought}go"], ["a door", "a room"]
    ids = talk.prompt_ids("Find the key.")
    for action, observation in zip(actions, observations, strict=True):
        written = tokenizer(action + end, add_special_tokens=False).input_ids
        ids = [*ids, *written, *talk.observation_ids(observation, written[-1])]
    messages = [{"role": "user", "content": "Find the key."}]
    for action, observation in zip(actions, observations, strict=True):
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
    whole = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    expected = tokenizer(whole, add_special_tokens=False).input_ids
    if end == CHATML_EOS:
        assert ids == expected  # one token ends a turn, and stands there once
    else:  # there it is no token of this tokenizer: what the policy wrote is taken for text, the turn is ended anyway
        assert len(ids) == len(expected) + 2 * len(end)


def test_a_turn_that_was_cut_off_is_ended_by_the_template() -> None:
    talk = dialogue(chatty("qwen2_5"))
    (end,) = talk.tokenizer(CHATML_EOS, add_special_tokens=False).input_ids
    letter = talk.tokenizer("o", add_special_tokens=False).input_ids[0]
    cut = talk.observation_ids("more", letter)
    assert cut == [end, *talk.observation_ids("more", end)]
    assert talk.tokenizer.decode(cut) == "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert talk.observation_ids("more", None) == cut


def test_messages_of_tools_are_written_as_the_template_has_them() -> None:
    for name in ("qwen2_5", "qwen3"):
        talk = dialogue(chatty(name))
        talk.check("tool")
        text = talk.tokenizer.decode(talk.observation_ids([{"role": "tool", "name": "calc", "content": "84"}], None))
        assert "<tool_response>\n84\n</tool_response>" in text and text.endswith("assistant\n")


@pytest.mark.parametrize(
    ("name", "role", "told"),
    [
        *((name, "user", "writes earlier turns differently") for name in ("qwen3", "qwen3_5_think", "glm4moe")),
        *((name, "tool", "refuses messages of tool") for name in ("gemma3", "gptoss")),
    ],
)
def test_a_template_that_cannot_write_episodes_is_refused_by_its_name(name: str, role: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^the chat template of '{name}' {told}"):
        dialogue(chatty(name)).check(role)


def test_a_template_that_counts_its_messages_is_refused() -> None:
    tokenizer = chatty("qwen2_5")
    tokenizer.chat_template = "{% for m in messages %}[{{ loop.index }} {{ m.role }}]{{ m.content }}{% endfor %}[a]"
    with pytest.raises(ValueError, match="differently in places"):
        dialogue(tokenizer).check("user")


def test_plain_turns_need_no_template(tokenizer: PreTrainedTokenizerBase) -> None:
    talk = dialogue(tokenizer, prefill=">")
    talk.check("user")
    eos = tokenizer.eos_token_id
    assert tokenizer.decode(talk.prompt_ids("12*7=", "Use calc.")) == "12*7=\nUse calc.>"
    assert tokenizer.decode(talk.observation_ids("84", eos)) == "\n84\n>"
    assert talk.observation_ids([{"role": "tool", "content": "84"}], eos) == talk.observation_ids("84", None)
    other = Dialogue(template=PromptTemplate(), tokenizer=tokenizer, plain=PlainTurns(observation="[{observation}]"))
    assert tokenizer.decode(other.observation_ids("{observation}", None)) == "[{observation}]"


def test_an_observation_that_begins_like_the_action_ends_keeps_its_beginning(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    (newline,) = tokenizer("\n", add_special_tokens=False).input_ids
    assert tokenizer.decode(dialogue(tokenizer).observation_ids("x", newline)) == "\nx\n"


_TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
_REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
_DROPS = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"
_NO_TOOLS = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"


@pytest.mark.parametrize(
    ("chat_template", "system", "expected"),
    [
        (_TURNS, "", "[system]Call calc.[user]12*7=[a]"),
        (_TURNS, "Be brief.", "[system]Be brief.\n\nCall calc.[user]12*7=[a]"),
        (_NO_TOOLS + _TURNS, "", "[system]Call calc.[user]12*7=[a]"),
        ("{% if tools %}Tools follow.{% endif %}" + _TURNS, "", "[system]Call calc.[user]12*7=[a]"),
        (_REFUSES + _TURNS, "", "[user]Call calc.\n\n12*7=[a]"),
        (_DROPS, "Be brief.", "[user]Call calc.\n\n12*7=[a]"),
    ],
)
def test_tools_for_which_the_chat_template_has_no_place_are_told_all_the_same(
    chat_template: str, system: str, expected: str
) -> None:
    tokenizer = chatty("qwen2_5")
    tokenizer.chat_template = chat_template
    template = PromptTemplate(system=system)
    talk = Dialogue(template=template, tokenizer=tokenizer, tools=[TOOL], told_tools="Call calc.")
    talk.check("user")
    assert tokenizer.decode(talk.prompt_ids("12*7=")) == expected
    own = replace(talk, plain=PlainTurns(tools="{tools}, all of them.\n"))
    assert "Adds" in tokenizer.decode(own.prompt_ids("12*7=")) and "Call calc." not in own.plain.tools


def test_tools_are_told_by_the_chat_template_or_in_plain_text(tokenizer: PreTrainedTokenizerBase) -> None:
    through_chat = Dialogue(template=PromptTemplate(), tokenizer=chatty("qwen2_5"), tools=[TOOL])
    assert '"name": "calc"' in through_chat.tokenizer.decode(through_chat.prompt_ids("12*7="))
    silent = Dialogue(template=PromptTemplate(), tokenizer=tokenizer, tools=[TOOL])
    assert tokenizer.decode(silent.prompt_ids("12*7=")) == "12*7="
    plain = Dialogue(
        template=PromptTemplate(), tokenizer=tokenizer, tools=[TOOL], plain=PlainTurns(tools="Tools: {tools}\n")
    )
    text = tokenizer.decode(plain.prompt_ids("12*7="))
    assert text.startswith('Tools: {"type": "function"') and text.endswith("\n12*7=")


def test_the_first_observation_follows_the_question() -> None:
    user = {"role": "user", "content": "Play."}
    assert opening("Play.", "") == "Play." and opening("", "@F") == "@F" and opening("Play.", "@F") == "Play.\n@F"
    assert opening((user,), "@F") == ({"role": "user", "content": "Play.\n@F"},)
    shown = {"role": "user", "content": "@F"}
    assert opening("Play.", [shown]) == (user, shown) and opening((user,), [shown]) == (user, shown)
    assert opening("", [shown]) == (shown,)
    with pytest.raises(ValueError, match="must end with a message of the user, got 'tool'"):
        opening("Play.", [{"role": "tool", "content": "@F"}])


def test_a_prompt_of_several_turns_is_written_without_a_chat_template_like_an_episode(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    told = [("system", "Walk."), ("user", "Where?"), ("assistant", "up"), ("tool", "@F"), ("user", "And?")]
    shown = [{"role": role, "content": text} for role, text in told]
    talk = dialogue(tokenizer, prefill="I ")
    assert tokenizer.decode(talk.prompt_ids("", shown)) == "Walk.\n\nWhere?up<eos>\n@F\nAnd?\nI "
    assert tokenizer.decode(talk.prompt_ids("", shown[:-1])).endswith("up<eos>\n@F\nI ")
    chat = dialogue(chatty("qwen2_5"))  # the result of a tool may come last
    ended = "<tool_response>\n@F\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert chat.tokenizer.decode(chat.prompt_ids("", shown[:-1])).endswith(ended)


def test_the_question_goes_through_the_users_template_with_its_observation(tokenizer: PreTrainedTokenizerBase) -> None:
    talk = dialogue(tokenizer, system="Walk.", user="Map:\n{question}\nMove:")
    assert tokenizer.decode(talk.prompt_ids("", "@F")) == "Walk.\n\nMap:\n@F\nMove:"


@pytest.mark.parametrize(("field", "text"), [("observation", "nothing"), ("tools", "none")])
def test_plain_turns_name_what_they_show(field: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must contain"):
        PlainTurns(**{field: text})
