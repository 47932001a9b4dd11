"""What a tokenizer and a chat template do to prompts and completions is told, or refused, before a run."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.template import Example, PromptTemplate
from grpo_pl.policy.text_check import check_embedding, check_texts
from grpo_pl.rewards import FormatReward, LengthReward, PerSource
from grpo_pl.rewards.base import Reward
from grpo_pl.types import SamplingParams
from tests.conftest import TINY_POLICY

SCRATCH = PolicyConfig(from_scratch=TINY_POLICY)
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ end }}\n{% endfor %}".replace("{{ end }}", "<|end|>")
HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT = TURNS + HEADER
FORMAT = [FormatReward(partial=True)]
DATED = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'a day' }}"


def _tokenizer(
    base: PreTrainedTokenizerBase, chat_template: str | None = None, *, special: Sequence[str] = (), eos: str = ""
) -> Any:
    changed: Any = copy.deepcopy(base)
    changed.chat_template = chat_template
    if special:
        changed.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if eos:
        changed.eos_token = eos
    return changed


def _found(
    tokenizer: Any,
    rewards: Sequence[Reward] = (),
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
    **fields: Any,
) -> list[str]:
    policy = PolicyConfig(from_scratch={**TINY_POLICY, "vocab_size": len(tokenizer)})
    return check_texts(policy, PromptTemplate(**fields), tokenizer, "1+1=", rewards, sampling)


END = ("<|end|>", "<|user|>", "<|assistant|>")


@pytest.mark.parametrize(
    ("chat_template", "special", "eos", "settings", "told"),
    [
        (CHAT, END, "<|end|>", {}, []),
        (CHAT, (), "", {}, []),  # ends of turns that are no tokens
        (CHAT, END, "", {}, ["ends a turn with '<|end|>'"]),
        (CHAT, END, "", {"sampling": SamplingParams(stop_token_ids=(103,))}, []),
        (CHAT, END, "", {"chat": False}, []),
        (TURNS, END, "<|end|>", {}, ["no generation prompt: the policy has to write '<|assistant|>'"]),
        (TURNS, END, "<|end|>", {"prefill": "<|assistant|>"}, []),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", (), "", {}, ["write 'assistant:'"]),
        (TURNS + "<|assistant|>", END, "<|end|>", {}, []),  # one that is always there
        ("{% for m in messages %}{{ m.content }}{% endfor %}", (), "", {}, []),  # nothing stands between turns
        (CHAT + "<think>\n", END, "<|end|>", {}, []),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}", (), "", {}, ["ends with '<eos>'"]),
        (DATED + CHAT, END, "<|end|>", {}, ["today's date"]),
        ("{% set day = strftime_now('%A') %}" + CHAT, END, "<|end|>", {}, []),  # which nobody reads
    ],
)
def test_what_a_chat_template_does_is_told(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str,
    special: Sequence[str],
    eos: str,
    settings: dict[str, Any],
    told: list[str],
) -> None:
    found = _found(_tokenizer(tokenizer, chat_template, special=special, eos=eos), **settings)
    assert [part in line for part, line in zip(told, found, strict=True)] == [True] * len(told)


@pytest.mark.parametrize("appended", ["<eos>", "[SEP]"])
def test_a_token_that_the_tokenizer_appends_to_prompts_is_told(
    tokenizer: PreTrainedTokenizerBase, appended: str
) -> None:
    changed = _tokenizer(tokenizer, CHAT, special=["[SEP]", "[CLS]"])
    ids = [(name, changed.convert_tokens_to_ids(name)) for name in ("[CLS]", appended)]
    changed._tokenizer.post_processor = TemplateProcessing(single=f"[CLS] $A {appended}", special_tokens=ids)
    (line,) = _found(changed, chat=False)
    assert repr(appended) in line and "add_eos_token" in line
    assert _found(changed) == []  # behind a chat template the tokenizer adds nothing
    changed._tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=ids[:1])
    assert _found(changed, chat=False) == []


TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@pytest.mark.parametrize(
    ("special", "rewards", "fields", "lost"),
    [
        (TAGS, FORMAT, {}, TAGS),
        (TAGS[2:], [PerSource(rewards={"a": FormatReward()})], {}, TAGS[2:]),
        (TAGS, [LengthReward()], {}, ()),  # which no reward looks for
        (TAGS, FORMAT, {"prefill": "<think>"}, TAGS[1:]),  # prefilled text is read as it is
        (["<calc>", "</calc>"], [], {"system": "Compute with <calc>."}, ("<calc>", "</calc>")),
        (["</plan>"], [], {"examples": [Example(question="1", completion="<plan>1</plan>")]}, ("</plan>",)),
        (["<calc>"], FORMAT, {}, ()),
    ],
)
def test_tags_that_rewards_would_not_see_are_told(
    special: Sequence[str], rewards: Sequence[Reward], fields: dict[str, Any], lost: Sequence[str]
) -> None:
    from grpo_pl.policy.tokenizer import character_tokenizer

    found = _found(_tokenizer(character_tokenizer(), special=special), rewards, **fields)
    assert len(found) == bool(lost)
    for line in found:
        assert line.startswith(f"Rewards will not see {', '.join(map(repr, lost))}:")


@pytest.mark.parametrize(
    ("prefill", "value"),
    [
        *(("", None), ("<think>", None), ("<think>\n\n</think>\n\n", None), ("<think>1</think><answer>", None)),
        *(("Let me see. <think>", "0"), ("</think>", "0"), ("<think><think>", "0")),
    ],
)
def test_a_prefill_behind_which_no_completion_can_be_perfect_is_told(
    tokenizer: PreTrainedTokenizerBase, prefill: str, value: str | None
) -> None:
    found = _found(tokenizer, [FormatReward()], prefill=prefill)
    assert len(found) == (value is not None)
    assert all(f"reward 'format': one that is perfect gets {value} (" in line for line in found)


def test_a_thought_that_the_chat_template_opens_earns_the_whole_format_reward(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    thinking, template = _tokenizer(tokenizer, CHAT + "<think>\n"), PromptTemplate()
    assert _found(thinking, [FormatReward()]) == []
    written = thinking(r"1+1=2</think><answer>\boxed{2}</answer>").input_ids
    assert FormatReward().score(template.completion_text(written, thinking), "2").value == 1.0


def test_no_end_token_is_told(tokenizer: PreTrainedTokenizerBase) -> None:
    endless = _tokenizer(tokenizer)
    endless.eos_token = None
    (line,) = _found(endless)
    assert line.startswith("No end token")
    assert _found(endless, sampling=SamplingParams(stop=("\n",))) == []
    assert _found(endless, sampling=SamplingParams(stop_token_ids=(5,))) == []


def test_end_tokens_of_the_generation_settings_count(
    tiny_policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    chatty = _tokenizer(tokenizer, CHAT, special=END)
    tiny_policy.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        changed = {"vocab_size": len(chatty), "eos_token_id": [1, chatty.convert_tokens_to_ids("<|end|>")]}
        (tmp_path / name).write_text(json.dumps({**settings, **changed}))
    policy = PolicyConfig(path=str(tmp_path))
    assert check_texts(policy, PromptTemplate(), chatty, "1", [], SamplingParams()) == []


@pytest.mark.parametrize("kind", ["pad_token", "eos_token", "a prompt"])
def test_a_token_beyond_the_embedding_is_refused_where_it_is_needed(
    tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    larger, size = _tokenizer(tokenizer, special=["<more>"]), len(tokenizer)
    policy = PolicyConfig(from_scratch={**TINY_POLICY, "vocab_size": size})
    check_embedding(policy, larger, [("a prompt", "1+1=")])  # some models have such tokens in vain
    if kind != "a prompt":
        setattr(larger, kind, "<more>")
    with pytest.raises(
        ValueError, match=rf"has {size + 1} tokens and the model's embedding {size}: token {size}, .*{kind}"
    ):
        check_texts(policy, PromptTemplate(), larger, "1<more>", [], SamplingParams())
