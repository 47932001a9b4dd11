"""The policy with more in its prompt scores its own samples; it is its start, itself as it is, or an average."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_pl.functional.divergence import divergence
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.self_distillation import SelfDistillation
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ExactReward
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.training.experience import Experience
from grpo_pl.training.frozen_models import Reference
from grpo_pl.training.self_teacher import SelfTeacher, siblings
from grpo_pl.types import Problem, PromptBatch
from tests import gradient_step

Make, Teach = Callable[..., Experience], Callable[..., SelfTeacher]
TEXTS = {1: ["7", "77", "712345"], 2: ["55", "5", "555"]}
BATCH = PromptBatch(
    step=0,
    prompts=[
        Problem(id=1, question="?", answer="7", columns={"solution": "seven: 7"}),
        Problem(id=2, question="??", answer="5", columns={"solution": None}),
    ],
    valid=[True] * 2,
)
ALONE: dict[str, Any] = {
    "group_size": 3,
    "beta": 0.0,
    "baseline": "none",
    "scale": "none",
    "aggregation": "token_mean",
}
TOKEN = GRPOAlgorithm(
    **ALONE, surrogate="unclipped", terms={"distillation": SelfDistillation(weights="live", alone=True)}
)
WHOLE = GRPOAlgorithm(
    **ALONE,
    terms={"distillation": SelfDistillation(weights="live", divergence="jensen_shannon", mix=0.3, alone=True)},
)


@dataclass(kw_only=True)
class Telling(Reward):
    """1 for the answer itself; says what is wrong with any other completion, and nothing of a right one."""

    name: str = "telling"

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Any) -> list[Score]:
        pairs = zip(completions, answers, strict=True)
        return [Score.of(1.0) if text == answer else Score.of(0.0, f"not {text}") for text, answer in pairs]


@pytest.fixture
def teach(tokenizer: PreTrainedTokenizerBase, tiny_policy: PreTrainedModel) -> Teach:
    def made(*texts: str, weights: Any = "live", rate: float = 0.25) -> SelfTeacher:
        dialogue = Dialogue(template=PromptTemplate(), tokenizer=tokenizer)
        text = PrivilegedText(user="{question}|{privileged}|", texts=list(texts))
        return SelfTeacher(tiny_policy, weights=weights, rate=rate, text=text, dialogue=dialogue)

    return made


@pytest.fixture
def make(make_experience: Make) -> Make:
    given = {"batch": BATCH, "rewards": [Telling(correctness=True)], "max_completion_length": 6}
    return lambda algorithm, **more: make_experience(TEXTS, algorithm=algorithm, **{**given, **more})


ASKED: dict[str, list[str | None]] = {
    "{solution}": ["?|seven: 7|"] * 3 + [None] * 3,
    "{right}": [None, "?|7|", "?|7|", "??|5|", None, "??|5|"],
    "{best}": [None, "?|7|", "?|7|", "??|5|", None, "??|5|"],
    "{feedback}": [None, "?|not 77|", "?|not 712345|", "??|not 55|", None, "??|not 555|"],
}
"""The teacher's prompt of each row."""


def _logits(model: PreTrainedModel, prompt: Sequence[int], completion: torch.Tensor) -> torch.Tensor:
    ids = torch.cat([torch.tensor(prompt), completion]).unsqueeze(0)
    logits: torch.Tensor = model(input_ids=ids).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.parametrize("text", ASKED)
def test_each_row_is_scored_behind_its_own_privileged_prompt(
    make: Make, teach: Teach, tokenizer: PreTrainedTokenizerBase, tiny_policy: PreTrainedModel, text: str
) -> None:
    experience = make(TOKEN, teachers=teach(text), max_tokens=40)
    scores = experience.teacher
    assert scores is not None and scores.logprobs is not None and scores.taught is not None
    assert scores.taught.tolist() == [each is not None for each in ASKED[text]]
    for row, asked in enumerate(ASKED[text]):
        if asked is None:
            continue
        ids = experience.rollout.completion_ids[row][experience.rollout.completion_mask[row]]
        with torch.no_grad():
            table = _logits(tiny_policy, tokenizer(asked).input_ids, ids).log_softmax(-1)
        expected = table.gather(1, ids.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(scores.logprobs[row, : len(ids)], expected, atol=2e-5, rtol=0)


def test_a_step_is_one_on_the_whole_distributions_of_both_prompts(
    make: Make, teach: Teach, tokenizer: PreTrainedTokenizerBase, tiny_policy: PreTrainedModel
) -> None:
    experience = make(WHOLE, teachers=teach("{right}"))
    rollout = experience.rollout
    total, tokens = torch.zeros(()), int(rollout.completion_mask.sum())
    for row, asked in enumerate(ASKED["{right}"]):
        ids = rollout.completion_ids[row][rollout.completion_mask[row]]
        if asked is not None:
            with torch.no_grad():
                target = _logits(tiny_policy, tokenizer(asked).input_ids, ids).log_softmax(-1)
            prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist()
            own = _logits(tiny_policy, prompt, ids).log_softmax(-1)
            total = total + divergence(own, target, mix=0.3).sum()
    gradient = gradient_step.gradient(total / tokens, tiny_policy)
    moved, result = gradient_step.moved(tiny_policy, experience, WHOLE, longest=6, max_tokens=30)
    assert gradient_step.relative(-moved, gradient) < 1e-5
    assert result.losses == pytest.approx([(total / tokens).item()], rel=1e-5)
    rows = rollout.completion_mask[[each is not None for each in ASKED["{right}"]]]
    assert [float(x) for x in result.sums["teacher/taught"]] == [float(rows.sum()), tokens]


def test_the_average_follows_the_policy_and_the_start_does_not(teach: Teach, tiny_policy: PreTrainedModel) -> None:
    average, start, live = (teach("{answer}", weights=weights) for weights in ("average", "start", "live"))
    before = [p.detach().clone() for p in tiny_policy.parameters()]
    with torch.no_grad():
        for p in tiny_policy.parameters():
            p.add_(1.0)
    assert average.copy is not None and start.copy is not None and live.copy is None
    for rollout in (0, 1, 2):  # before the first one there is nothing to average
        for teacher in (average.copy, start.copy):
            teacher.renew(tiny_policy, rollout)
    share = 1 - 0.75**2
    for mine, old in zip(average.copy.model.parameters(), before, strict=True):
        torch.testing.assert_close(mine.detach(), old + share)
    assert all(torch.equal(a, b) for a, b in zip(start.copy.model.parameters(), before, strict=True))
    assert start.copy.state_dict() == {}
    again = Reference(tiny_policy, 1, 0.25)
    again.load_state_dict(average.copy.state_dict())
    weights = zip(again.model.parameters(), average.copy.model.parameters(), strict=True)
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in weights)
    start.copy.load_state_dict({})
    with pytest.raises(ValueError, match=r"no average of the policy .*: resume with the teacher\'s weights of its run"):
        again.load_state_dict({})
    copied = Reference(tiny_policy, 2)
    for rollout, renewed in ((1, False), (2, True)):
        with torch.no_grad():
            for p in tiny_policy.parameters():
                p.add_(0.1)
        copied.renew(tiny_policy, rollout)
        same = [torch.equal(a, b) for a, b in zip(copied.model.parameters(), tiny_policy.parameters(), strict=True)]
        assert all(same) if renewed else not any(same)


def test_siblings_are_the_first_other_right_one_and_a_better_one() -> None:
    values: list[float | None] = [0.0, 1.0, 1.0, None, 0.5, 0.5, 0.2, 0.5]
    scores = [Score(v, "unavailable" if v is None else "ok") for v in values]
    scored = ScoredBatch(rewards=[ExactReward(correctness=True)], scores=[scores])
    expected = [(1, 1), (2, None), (1, None), (1, 1), (None, None), (None, None), (None, 4), (None, None)]
    assert siblings(scored, 4) == expected


def test_a_prompt_with_its_text_that_is_longer_than_the_context_is_refused(make: Make, teach: Teach) -> None:
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model's context 48: shorten model.privileged.texts"):
        make(TOKEN, teachers=teach("{answer}" + "x" * 50))
