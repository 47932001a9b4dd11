"""The characters of a from-scratch model's vocabulary: collected from a run's data, or checked against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.demonstrations import Demonstration, read_demonstrations
from grpo_pl.data.sources import PromptSource
from grpo_pl.environment import text_of
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.text_check import check_embedding
from grpo_pl.policy.tokenizer import (
    CHARACTERS,
    FROM_DATA,
    character_tokenizer,
    known_characters,
    lacking_characters,
    shown_characters,
)
from grpo_pl.training.cold_start import MADE_UP, ColdStart
from grpo_pl.training.demonstrated import DemonstrationBatches
from grpo_pl.training.stage import Stage
from grpo_pl.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True, kw_only=True)
class RunText:
    """A text that the policy reads or should write."""

    place: str
    text: str
    source: PromptSource | None = None
    """The list that could do without it."""
    split: Split = "train"
    prompt: int = 0


_Lacking = tuple[RunText, set[str]]
"""A text and its characters that are lacking."""


def with_collected_characters(
    policy: PolicyConfig,
    template: PromptTemplate,
    data: RolloutDataModule,
    cold_start: ColdStart | None,
    stage: Stage | None = None,
    demonstrations: DemonstrationBatches | None = None,
) -> PolicyConfig:
    """``policy`` with the characters that ``from_data`` stands for; itself where they are given.

    Printable ASCII is always among them: an answer is written with it. The order depends on the characters alone.
    """
    if policy.characters != FROM_DATA or policy.from_scratch is None:
        return policy
    texts: Iterator[str] = (
        text.text for text in texts_of_run(template, character_tokenizer(policy.tags), data, cold_start, demonstrations)
    )
    made: Iterable[Demonstration] = ()
    if cold_start is not None and cold_start.demonstrations is None:
        made = chain.from_iterable(cold_start.made(data.source, stage))
    if demonstrations is not None and demonstrations.file is None:
        made = chain(made, demonstrations.made(data.source))
    texts = chain(texts, (text for shown in made for text in (text_of(shown.question), shown.text)))
    found = set[str]()
    with nullcontext() if stage is None else stage.open():
        for text in texts:
            found |= lacking_characters(text, found.union(CHARACTERS), policy.tags)
    further = sorted(c for c in found if not "\ud800" <= c <= "\udfff")  # JSON can write half a character, no text can
    return replace(policy, characters=CHARACTERS + "".join(further))


def check_vocabulary(
    policy: PolicyConfig,
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
    data: RolloutDataModule,
    cold_start: ColdStart | None,
    say: Callable[[str], None],
    demonstrations: DemonstrationBatches | None = None,
) -> None:
    """Refuses texts with characters that a vocabulary of single characters lacks, for they would be dropped, and with
    tokens that the model has no embedding for.

    Problems of a list whose ``bad_rows`` is ``drop`` are left out and counted instead.
    """
    texts = texts_of_run(template, tokenizer, data, cold_start, demonstrations)
    check_embedding(policy, tokenizer, ((text.place, text.text) for text in texts))
    known = known_characters(tokenizer)
    if known is None:
        return
    tags = tokenizer.get_added_vocab()
    totals: Counter[str] = Counter()
    refused: list[_Lacking] = []
    dropped: list[_Lacking] = []
    unwanted: dict[int, tuple[PromptSource, dict[Split, set[int]]]] = {}
    for text in texts_of_run(template, tokenizer, data, cold_start, demonstrations):
        totals[text.place] += 1
        lacking = lacking_characters(text.text, known, tags)
        if not lacking:
            continue
        if text.source is None or getattr(text.source, "bad_rows", "refuse") == "refuse":
            refused.append((text, lacking))
            continue
        dropped.append((text, lacking))
        _, ids = unwanted.setdefault(id(text.source), (text.source, {"train": set(), "val": set()}))
        ids[text.split].add(text.prompt)
    if refused:
        fix = "add them to model.policy.characters, or set that to from_data"
        if policy.from_scratch is None:
            fix = "a trained model's vocabulary is fixed"
        drop = ", or set data.source.bad_rows to drop" if any(text.source is not None for text, _ in refused) else ""
        raise ValueError(f"{_described(refused, totals)}: {fix}{drop}.")
    for source, ids in unwanted.values():
        source.leave_out(ids)
    if dropped:
        say(f"{_described(dropped, totals)}; left out.")


def _described(found: Sequence[_Lacking], totals: Counter[str]) -> str:
    characters = Counter(character for _, lacking in found for character in lacking)
    often = sorted(characters, key=lambda character: (-characters[character], character))
    places = Counter(text.place for text, _ in found)
    where = ", ".join(f"{count} of {totals[place]} {place}" for place, count in places.items())
    return f"the vocabulary lacks {shown_characters(often)}, in {where}, such as {found[0][0].text[-80:]!r}"


def texts_of_run(
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
    data: RolloutDataModule,
    cold_start: ColdStart | None,
    demonstrations: DemonstrationBatches | None = None,
) -> Iterator[RunText]:
    """All that the policy reads or should write; of a source without a list, the first prompts."""
    for number, source in enumerate((data.source, *data.validation_sets.values())):
        splits = SPLITS if number == 0 else ("val",)
        leaves = list(source.leaves().values())
        read: list[tuple[Split, Iterable[Problem], PromptSource | None]]
        read = [(split, leaf.problems(split) or (), leaf) for leaf, split in product(leaves, splits)]
        if any(leaf.problems("train") is None for leaf in leaves):
            read.append(("train", first_prompts(data) if number == 0 else (), None))
            read.append(("val", source.validation(data.val_prompts), None))
        for split, prompts, leaf in read:
            for prompt in prompts:
                try:
                    rendered = template.render(prompt.asked, tokenizer)
                except ValueError:  # the chat template refuses it: said, or left out, where lengths are looked at
                    continue
                gold = "".join(prompt.answer.split())  # its white space need not be written to answer right
                for kind, text in (("prompts", rendered), ("gold answers", gold)):
                    yield RunText(place=f"{split} {kind}", text=text, source=leaf, split=split, prompt=prompt.id)
    files = (cold_start and cold_start.demonstrations, demonstrations and demonstrations.file)
    for file in files:
        if not file or not Path(file).is_file():  # a run that goes on does without that of a cold start
            continue
        for shown in read_demonstrations(file):
            prompt_text = template.render(shown.question, tokenizer)
            yield RunText(place="demonstrations", text=f"{prompt_text}{shown.text}")


def first_prompts(data: RolloutDataModule) -> Iterator[Problem]:
    """The first prompts that a source without a list trains on."""
    for step in range(min(data.steps, -(-MADE_UP // data.prompt_count))):
        yield from data.source.prompts(step, count=data.prompt_count)


def demonstrated_problems(cold_start: ColdStart, source: PromptSource) -> list[Problem]:
    """The questions that a cold start shows; none where its file is gone, for a resumed run makes no cold start."""
    if cold_start.demonstrations is not None and not Path(cold_start.demonstrations).is_file():
        return []
    questions = enumerate(cold_start.asked(source, MADE_UP))
    return [Problem(id=number, question=question, answer="") for number, question in questions]
