"""Checks before a run: what the policy reads of a prompt, and what rewards see of a perfect completion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from grpo_pl.policy.loading import PolicyConfig, declared_eos_ids, model_config
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.base import Reward, with_inner
from grpo_pl.rewards.format import FormatReward
from grpo_pl.types import Conversation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKED, _ANSWERED = "GRPO-PL asks", "GRPO-PL answers"
"""Texts of the messages on which chat templates are tried."""
_TODAY = "GRPO-PL today"
_ANOTHER_DAY = f"{{% macro strftime_now(form) %}}{_TODAY}{{% endmacro %}}"
"""Before a chat template, in place of the function of that name."""
_TAG = re.compile(r"</?([A-Za-z_]+)>")
_PERFECT = ("<think>", "1", "</think>", "<answer>", r"\boxed{1}", "</answer>")


def check_texts(
    policy: PolicyConfig,
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
    asked: str | Conversation,
    rewards: Sequence[Reward],
    sampling: SamplingParams,
) -> list[str]:
    """Renders one prompt, and passes one perfect completion through the tokenizer and back to the format rewards.

    Args:
        asked: any question of the run.

    Returns:
        A line for each habit of the tokenizer or the chat template that a run of it would suffer from.

    Raises:
        ValueError: the chat template refuses the prompt, or a token is needed for which the model has no embedding.
    """
    chat, text = template.through_chat(tokenizer), template.render(asked, tokenizer)
    check_embedding(policy, tokenizer, [("a prompt", text)])
    ends = {*sampling.stop_token_ids, *([] if policy.source is None else declared_eos_ids(policy.source))}
    ends |= set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    found = [*_prompt_ends(text, tokenizer, ends, chat=chat)]
    if not ends and not sampling.stop:
        found.append(
            "No end token: neither the tokenizer nor the model's generation settings name one, so every completion has "
            "max_completion_length tokens. Set eos_token in tokenizer_config.json, or sampling.stop_token_ids."
        )
    if chat:
        found += _chat_habits(template, tokenizer, ends, sampling.stop)
    return [*found, *_seen(template, tokenizer, rewards)]


def check_embedding(
    policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[str, str]] = ()
) -> None:
    """Refuses a tokenizer with tokens beyond the model's embedding that are needed; some models have such in vain.

    Args:
        texts: places and texts that the policy reads or should write; they are looked at if there are such tokens.

    Raises:
        ValueError: a text holds one of them, or the padding or the end token is one.
    """
    size = model_config(policy, tokenizer).get_text_config().vocab_size
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= size}
    if not beyond:
        return
    named = (("pad_token", tokenizer.pad_token or ""), ("eos_token", tokenizer.eos_token or ""))
    for place, text in chain(named, texts):
        for token, number in beyond.items():
            if token in text:
                name = tokenizer.name_or_path or type(tokenizer).__name__
                raise ValueError(
                    f"the tokenizer of {name!r} has {len(tokenizer)} tokens and the model's embedding {size}: token "
                    f"{number}, {token!r} in {place}, has none. Resize the embedding (model.resize_token_embeddings) "
                    "and save the model, or name another token."
                )


def _prompt_ends(text: str, tokenizer: PreTrainedTokenizerBase, ends: set[int], *, chat: bool) -> Iterator[str]:
    """A token at the end of a prompt that a completion cannot follow."""
    bare = tokenizer(text, add_special_tokens=False).input_ids
    ids = bare if chat else tokenizer(text).input_ids
    appended = not chat and len(ids) > len(bare) > 0 and ids[-1:] != bare[-1:]
    if ids and (appended or ids[-1] in ends):
        advice = "set template.chat to false, or change the template"
        if appended:
            advice = "set add_eos_token to false in tokenizer_config.json, or change post_processor in tokenizer.json"
        yield (
            f"Each prompt ends with {tokenizer.convert_ids_to_tokens(ids[-1])!r}, so the policy has to go on behind an "
            f"end: {advice}."
        )


def _chat_habits(
    template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, ends: set[int], stop: Sequence[str]
) -> Iterator[str]:
    """What a chat template does that a run would suffer from."""

    def written(*texts: str, more: bool = True, **options: Any) -> str:
        """Of turns of the user and the assistant by turns."""
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=more, **options))
        except Exception:  # it refuses these turns, which need not be those of the run
            return ""

    asks, answered = written(_ASKED), written(_ASKED, _ANSWERED, more=False)
    between = answered.partition(_ASKED)[2].partition(_ANSWERED)[0].strip()
    behind, begun = asks.partition(_ASKED)[2].strip(), (asks.partition(_ASKED)[2] + template.prefill).strip()
    if asks == written(_ASKED, more=False) and between.startswith(behind) and between not in (behind, begun):
        yield (
            f"The chat template has no generation prompt: the policy has to write {between[len(behind) :].strip()!r} "
            "itself before each answer. Write it behind {% if add_generation_prompt %}, or as template.prefill."
        )
    end = tokenizer(answered.partition(_ANSWERED)[2].lstrip(), add_special_tokens=False).input_ids[:1]
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if end and end[0] in marks - ends and not any(text in str(tokenizer.decode(end)) for text in stop):
        yield (
            f"The chat template ends a turn with {tokenizer.convert_ids_to_tokens(end[0])!r}, which is no end token "
            f"({', '.join(map(str, sorted(ends))) or 'none'}), so completions may run on behind it: set "
            f"sampling.stop_token_ids: [{end[0]}]."
        )
    if _TODAY in written(_ASKED, chat_template=_ANOTHER_DAY + str(tokenizer.get_chat_template())):
        yield (
            "The chat template writes today's date into each prompt, so a run that is resumed on another day reads "
            "other prompts: write a fixed date into the template in place of strftime_now."
        )


def _seen(template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, rewards: Sequence[Reward]) -> Iterator[str]:
    """What rewards do not see as it was written."""
    begins = template.begins(tokenizer)
    first = 1 + max((i for i, part in enumerate(_PERFECT) if part.startswith("<") and part in begins), default=-1)
    perfect = "".join(_PERFECT[first:])
    formats = [part for part in with_inner(rewards) if isinstance(part, FormatReward)]
    shown = "".join([template.system, template.user, begins, *(example.completion for example in template.examples)])
    named = dict.fromkeys(name for text in (shown, perfect if formats else "") for name in _TAG.findall(text))
    tags = [tag for name in named for tag in (f"<{name}>", f"</{name}>") if tag not in begins]
    lost = [tag for tag in tags if tag not in _back(tag, tokenizer)]
    if lost:
        yield (
            f"Rewards will not see {', '.join(map(repr, lost))}: the tokenizer has them as special tokens, which are "
            "left out of texts, or lacks them. Set special to false for them in tokenizer.json, or take other tags."
        )
        return
    ids = tokenizer(perfect, add_special_tokens=False).input_ids
    for reward in formats:
        score = reward.score(template.completion_text(list(ids), tokenizer), "1")
        if score.value != 1.0:
            yield (
                f"No completion can earn all of reward {reward.name!r}: one that is perfect gets {score.value:g} "
                f"({score.detail}), since rewards see it as {begins + _back(perfect, tokenizer)!r}."
            )


def _back(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text as rewards see it once it was drawn."""
    return str(tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids, skip_special_tokens=True))
