"""Measures ``ProblemStatistics``: repeats, leaks, characters that cannot be written, prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from grpo_pl.data.cells import asked_key
from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.overlap import find_overlaps
from grpo_pl.extras.doctor.run_statistics import ProblemStatistics
from grpo_pl.policy.template import Fits
from grpo_pl.policy.tokenizer import known_characters, lacking_characters, shown_characters
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.vocabulary import demonstrated_problems, first_prompts, texts_of_run
from grpo_pl.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SeenProblems:
    """The problems of the rollouts so far, each counted once however often it is asked."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], str] = {}
        self._held_out: set[str] | None = None

    def add(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self._asked[problem.source, problem.id] = asked_key(problem)

    def statistics(self, data: RolloutDataModule) -> ProblemStatistics:
        """Repeats among them, and held-out problems that were trained on."""
        asked = set(self._asked.values())
        held_out = data.held_out()
        if self._held_out is None:
            self._held_out = {asked_key(p) for problems in held_out.values() for p in problems if p.question}
        return ProblemStatistics(
            train=len(self._asked),
            repeated=len(self._asked) - len(asked),
            held_out=min(map(len, held_out.values())),
            leaked=len(self._held_out & asked),
        )


def training_problems(data: RolloutDataModule) -> Iterable[Problem]:
    """All that are listed, or else the first prompts of a run."""
    lists = [leaf.problems("train") for leaf in data.source.leaves().values()]
    known = [rows for rows in lists if rows is not None]
    return chain(*known) if len(known) == len(lists) else first_prompts(data)


def _too_long(problem: Problem, fits: Fits) -> bool:
    try:
        return not fits(problem.asked, problem.columns)
    except ValueError:  # the chat template refuses it: the check before the start says so, or leaves it out
        return False


def measure_problems(module: GRPOModule, data: RolloutDataModule, fits: Fits) -> ProblemStatistics:
    """Statistics of all problems before the first rollout; of a source without a list, of its first prompts."""
    seen, held_out = SeenProblems(), data.held_out()
    problems = list(training_problems(data))
    seen.add(problems)
    demonstrated = [] if module.cold_start is None else demonstrated_problems(module.cold_start, data.source)
    overlaps = find_overlaps(chain(problems, demonstrated), held_out)
    everyone = list(chain(problems, *held_out.values()))
    texts, unwritable, characters = _unwritable(module, data)
    return replace(
        seen.statistics(data),
        leaked=sum(len(overlap.repeated) for overlap in overlaps.values()),
        texts=texts,
        unwritable=unwritable,
        characters=characters,
        prompts=len(everyone),
        too_long=sum(_too_long(problem, fits) for problem in everyone),
    )


def _unwritable(module: GRPOModule, data: RolloutDataModule) -> tuple[int, int, str]:
    """Number of texts, number of those that the tokenizer cannot write, and the characters that it lacks."""
    tokenizer = module.tokenizer
    lacks = lacking_by(tokenizer)
    if lacks is None:
        return 0, 0, ""
    texts = unwritable = 0
    characters: dict[str, None] = {}
    for text in texts_of_run(module.template, tokenizer, data, module.cold_start, module.demonstrations):
        texts += 1
        if lacking := lacks(text.text):
            unwritable += 1
            characters |= dict.fromkeys(sorted(lacking))
    return texts, unwritable, shown_characters(characters)


def lacking_by(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], set[str]] | None:
    """The characters of a text that a tokenizer cannot write; None for one that writes every text."""
    known = known_characters(tokenizer)
    if known is not None:
        tags = tokenizer.get_added_vocab()
        return lambda text: lacking_characters(text, known, tags)
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return None

    def lacking(text: str) -> set[str]:
        if unknown not in tokenizer(text, add_special_tokens=False).input_ids:
            return set()
        alone = {c for c in set(text) if unknown in tokenizer(c, add_special_tokens=False).input_ids}
        return alone or {str(tokenizer.unk_token)}

    return lacking
