"""Measures ``AnswerStatistics``: how gold answers, demonstrations and empty completions are rewarded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from grpo_pl.data.cells import normal_question
from grpo_pl.data.demonstrations import read_demonstrations
from grpo_pl.data.sources import PromptSource
from grpo_pl.extras.doctor.run_statistics import AnswerStatistics
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.loading import end_token_ids
from grpo_pl.rewards.base import Reward, correctness_index, needs_of
from grpo_pl.rewards.batch import ScoredBatch, score_completions
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.experience import Experience
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.reward_probe import text_samples
from grpo_pl.types import Problem

PROBLEMS, EXPENSIVE_PROBLEMS = 32, 2
"""Problems whose answers are tried; the second where a reward asks a model or a service."""
FORMS = (
    "{gold}",
    "\\boxed{{{gold}}}",
    "<answer>{gold}</answer>",
    "<think>\n</think><answer>\\boxed{{{gold}}}</answer>",
    "<think>\n</think>\n<answer>{gold}</answer>",
    "#### {gold}",
    "The answer is {gold}.",
)
"""The forms in which a gold answer is tried."""
JUDGED = frozenset({"ok", "wrong", "no_answer"})
"""Statuses of scores that depend on the text alone, not on a clock."""
MEANT_TO_BE_RIGHT = 0.75
"""Demonstrations count as right answers where more than this share of problems has one that is paid; others are wrong
on purpose."""
EOS_POSITIONS = 64
"""Last positions of each completion at which the probability of an end token is computed."""


def measure_answers(module: GRPOModule, problems: Sequence[Problem], source: PromptSource) -> AnswerStatistics:
    """Scores gold answers in every form of ``FORMS``, demonstrations, and empty completions."""
    known_answers = [p for p in problems if p.answer] or list(problems)
    count = _problem_count(module.rewards)
    few = known_answers[:: max(1, len(known_answers) // count)][:count]  # evenly spaced
    prefill = module.template.prefill
    texts = [[prefill, *(prefill + form.format(gold=problem.answer) for form in FORMS)] for problem in few]
    scored = scored_texts(module, few, texts)
    width = 1 + len(FORMS)
    judged, rewards = scored.judged(), scored.totals()
    starts = range(0, len(judged), width)
    paid = [[score.correct is True for score in judged[i : i + width]] for i in starts]
    totals = [[total or 0.0 for total in rewards[i : i + width]] for i in starts]
    shown = _demonstrations(module, source, problems, few)
    checked = scored_texts(module, [p for p, _ in shown], [[text] for _, text in shown]).judged() if shown else []
    shown_right = {p.id for (p, _), score in zip(shown, checked, strict=True) if score.correct}
    judges = correctness_index(module.rewards) is not None  # otherwise no answer is right or wrong
    known = [i for i, problem in enumerate(few) if problem.answer and judges]
    accepted = [any(paid[i][1:]) or few[i].id in shown_right for i in known]
    empties = {
        reward.name: fmean(values)
        for reward, scores in zip(module.rewards, scored.scores, strict=True)
        if (values := [value for score in scores[::width] if (value := score.value) is not None])
    }
    return AnswerStatistics(
        golds=len(known),
        refused=len(known) - sum(accepted),
        accepted_form=any(any(paid[i][1:]) for i in known)
        or len(shown_right) > MEANT_TO_BE_RIGHT * len({p.id for p, _ in shown}),
        empty_right=fmean(row[0] for row in paid) if judges else 0.0,
        empty_total=fmean(row[0] for row in totals),
        best_total=fmean(max(totals[i][1:]) for i in known) if any(accepted) else None,
        demonstrations=len(shown) if module.cold_start is not None and judges else 0,
        demonstrations_paid=sum(score.correct is True for score in checked),
        empties=empties,
    )


def _problem_count(rewards: Sequence[Reward]) -> int:
    """Problems whose answers are tried."""
    from grpo_pl.extras.judges.model import LoadsModel

    expensive = any(reward.asynchronous or isinstance(reward, LoadsModel) for reward in rewards)
    return EXPENSIVE_PROBLEMS if expensive else PROBLEMS


def _demonstrations(
    module: GRPOModule, source: PromptSource, problems: Sequence[Problem], few: Sequence[Problem]
) -> list[tuple[Problem, str]]:
    """Demonstrations in the cold start's file for some of the problems, or by the source for a ``few``."""
    file = None if module.cold_start is None else module.cold_start.demonstrations
    if file is not None:
        asked = {normal_question(problem.question): problem for problem in problems}
        texts = read_demonstrations(file)
        known = [(asked[q], each.text) for each in texts if (q := normal_question(str(each.question))) in asked]
        return known[: len(few)]
    rng = random.Random(row_key(module.seed, "doctor"))
    return [(problem, text) for problem in few if (text := source.demonstration(problem, rng)) is not None]


def scored_texts(module: GRPOModule, problems: Sequence[Problem], rows: Sequence[Sequence[str]]) -> ScoredBatch:
    """Equally many texts for each problem, scored as completions of it are."""
    return _score(module.rewards, text_samples(problems, rows, module.template, module.tokenizer))


def _score(rewards: Sequence[Reward], samples: Samples) -> ScoredBatch:
    return score_completions(
        rewards,
        completions=samples.completions,
        answers=[problem.answer for problem in samples.per_row],
        columns=samples.columns(needs_of(rewards)),
    )


def scored_again(statistics: AnswerStatistics, experience: Experience, rewards: Sequence[Reward]) -> AnswerStatistics:
    """``statistics`` with the completions that get another value in a second call of the rewards; rewards that ask a
    model or a service are not called again."""
    if _problem_count(rewards) != PROBLEMS:
        return statistics
    second = _score(rewards, experience.samples)
    changed = {
        reward.name: sum(a.value != b.value and {a.status, b.status} <= JUDGED for a, b in zip(*pair, strict=True))
        for reward, *pair in zip(rewards, experience.scored.scores, second.scores, strict=True)
    }
    name = max(changed, key=lambda reward: changed[reward])
    return replace(statistics, scored_again=len(experience.samples.completions), differed=changed[name], differing=name)


@torch.no_grad()
def end_chance(module: GRPOModule, experience: Experience) -> float:
    """The largest probability of an end token in the first two completions of different prompts."""
    policy, rollout = module.require_policy(), experience.rollout
    ends = end_token_ids(policy, module.tokenizer, module.sampling)
    largest = 0.0
    for row in {0, len(rollout.finish_reasons) - 1}:
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        drawn = rollout.completion_mask[row] & (rollout.segment_index[row] == 0)
        ids = torch.cat([prompt, rollout.completion_ids[row][drawn]]).unsqueeze(0)
        keep = min(EOS_POSITIONS, int(drawn.sum()) + 1)
        chances = policy(input_ids=ids, logits_to_keep=keep).logits[0].float().softmax(dim=-1)  # (keep, V)
        if known := [end for end in ends if end < chances.shape[1]]:
            largest = max(largest, float(chances[:, known].sum(dim=1).max()))
    return largest
