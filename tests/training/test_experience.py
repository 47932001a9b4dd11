"""From scripted completions to advantages and the log-probabilities that the loss compares to."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from grpo_pl.functional.covariance import covariances
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.covariance import Covariance
from grpo_pl.objective.terms.top_entropy import TopEntropyTokens
from grpo_pl.policy.logprobs import completion_logprobs
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.training.experience import Experience
from grpo_pl.training.microbatches import rollout_rows
from grpo_pl.types import Problem, PromptBatch

Make = Callable[..., Experience]

LIMIT = 6
PLAIN = GRPOAlgorithm(group_size=3, beta=0.0)
TEXTS = {1: ["7", "77", "712345678"], 2: ["55", "555", "5"], 3: ["6", "?", "x6"]}


@dataclass(kw_only=True)
class CountDigit(Reward):
    """How often the answer, a digit, occurs; unknown where the text asks back."""

    name: str = "count"
    correctness: bool = True

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [
            Score(None, "unavailable") if "?" in text else Score(float(text.count(answer)), "ok")
            for text, answer in zip(completions, answers, strict=True)
        ]


def _prompt(identity: int, answer: str) -> Problem:
    return Problem(id=identity, question="?" * identity, answer=answer)


BATCH = PromptBatch(step=2, prompts=[_prompt(1, "7"), _prompt(2, "5"), _prompt(3, "6")], valid=[True] * 3)


@pytest.fixture
def make(make_experience: Make) -> Make:
    given = {"batch": BATCH, "rewards": [CountDigit()], "max_completion_length": LIMIT, "max_tokens": 30}
    return lambda algorithm=PLAIN, *, texts=TEXTS, **more: make_experience(
        texts, algorithm=algorithm, **{**given, **more}
    )


def test_rewards_lengths_and_ends_stand_in_their_groups(make: Make) -> None:
    experience = make()
    rewards, valid = experience.statistics.rewards, experience.statistics.valid
    assert rewards.tolist() == [[1, 2, 1], [2, 3, 1], [1, 0, 1]]
    assert valid.tolist() == [[True] * 3, [True] * 3, [True, False, True]]
    assert experience.values[0].isnan().tolist() == (~valid).tolist()
    assert experience.lengths.tolist() == [[2, 3, 6], [3, 4, 2], [2, 2, 3]]  # EOS counts
    assert experience.truncated.tolist() == [[False, False, True], [False] * 3, [False] * 3]


def test_advantages_by_hand(make: Make) -> None:
    experience = make(replace(PLAIN, std_eps=0.0))
    # means 4/3, 2, 1; standard deviations 0.57735, 1, 0
    expected = [-0.57735, 1.15470, -0.57735, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0]
    assert experience.advantages.squeeze(1).tolist() == pytest.approx(expected, abs=1e-5)
    assert experience.keep.tolist() == [True] * 7 + [False, True]
    assert experience.active.tolist() == [True, True, True, False, True, True, False, False, False]


def test_a_single_update_compares_to_nothing_stored(make: Make) -> None:
    experience = make()
    assert experience.old_logprobs is None
    assert experience.ref_logprobs is None
    assert "entropy_mask" not in experience.tokens


def test_several_updates_keep_the_log_probabilities_of_collection(make: Make) -> None:
    experience = make(replace(PLAIN, num_iterations=2))
    mask = experience.rollout.completion_mask
    assert experience.old_logprobs is not None
    torch.testing.assert_close(experience.old_logprobs[mask], experience.rollout.sampling_logprobs[mask])
    assert not experience.old_logprobs.requires_grad


def test_the_reference_scores_the_same_tokens(make: Make, tiny_policy: PreTrainedModel) -> None:
    algorithm = replace(PLAIN, beta=0.1)
    same = make(algorithm, reference=tiny_policy)
    mask = same.rollout.completion_mask
    assert same.ref_logprobs is not None
    torch.testing.assert_close(same.ref_logprobs[mask], same.rollout.sampling_logprobs[mask])
    assert not same.ref_logprobs.requires_grad
    whole = make(algorithm, reference=tiny_policy, max_tokens=1000)
    torch.testing.assert_close(same.ref_logprobs[mask], whole.ref_logprobs[mask])


def test_kl_in_the_reward_lowers_what_has_drifted_from_the_reference(make: Make, tiny_policy: PreTrainedModel) -> None:
    algorithm = replace(PLAIN, beta=0.5, kl_placement="reward", kl_estimator="k1", scale="none", baseline="none")
    free = make(replace(algorithm, beta=0.0, kl_placement="loss"))
    same = make(algorithm, reference=tiny_policy)
    torch.testing.assert_close(same.advantages, free.advantages, atol=1e-5, rtol=0)
    other = _shifted(tiny_policy)
    drifted = make(algorithm, reference=other)
    assert drifted.ref_logprobs is not None  # the loss has no use for it, the logged KL has
    mask, rollout = drifted.rollout.completion_mask, drifted.rollout
    scores = make(replace(PLAIN, beta=0.1), reference=other).ref_logprobs
    kl = ((rollout.sampling_logprobs - scores) * mask).sum(1)
    keep = drifted.keep
    torch.testing.assert_close(
        drifted.advantages.squeeze(1)[keep], (free.advantages.squeeze(1) - 0.5 * kl)[keep], atol=1e-4, rtol=0
    )
    assert kl.abs().max() > 0.1


def _shifted(model: PreTrainedModel) -> PreTrainedModel:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.3)
    return other


def test_the_entropy_mask_holds_the_tokens_of_highest_entropy(make: Make, tiny_policy: PreTrainedModel) -> None:
    experience = make(replace(PLAIN, terms={"top": TopEntropyTokens(quantile=0.25)}))
    rollout = experience.rollout
    kept = rollout.completion_mask & experience.keep.unsqueeze(1)
    with torch.no_grad():
        _, entropy = completion_logprobs(
            tiny_policy, **rollout_rows(rollout, torch.arange(9)), temperature=1.0, with_entropy=True
        )
    chosen = experience.tokens["entropy_mask"] & kept
    rest = kept & ~chosen
    assert entropy[chosen].min() > entropy[rest].max()
    # the first tokens of a group share one entropy: ties come in together
    assert round(0.25 * int(kept.sum())) <= int(chosen.sum()) <= round(0.25 * int(kept.sum())) + 2


def test_the_tokens_of_highest_covariance_are_chosen_over_the_batch(make: Make) -> None:
    experience = make(replace(PLAIN, terms={"covariance": Covariance(kind="kl", share=0.2)}))
    kept = experience.rollout.action_mask & experience.keep.unsqueeze(1)
    assert experience.old_logprobs is not None and experience.tokens["covariance_mask"] is not None
    found = covariances(experience.old_logprobs[kept], experience.advantages.expand_as(kept)[kept])
    chosen = experience.tokens["covariance_mask"][kept]
    assert chosen.sum() == int(0.2 * int(kept.sum())) > 1
    assert found[chosen].min() >= found[~chosen].max()
    assert not (experience.tokens["covariance_mask"] & ~kept).any()


def test_a_greedy_baseline_is_the_reward_of_one_greedy_completion(
    make: Make, scripted_engine: Callable[..., Any]
) -> None:
    engine = scripted_engine(TEXTS)
    experience = make(replace(PLAIN, baseline="greedy", scale="none"), engine=engine)
    # the first text of each prompt is the greedy one: rewards 1, 2, 1
    assert experience.advantages.squeeze(1).tolist() == [0, 1, 0, 0, 1, -1, 0, 0, 0]
    train, greedy = engine.requests
    assert [(key.split, key.draw) for group in greedy for key in group] == [("train", "greedy")] * 3
    assert {key.draw for group in train for key in group} == {"sampled"}
    assert [len(group) for group in train] == [3, 3, 3]


def _other_prompts(step: int, attempt: int) -> PromptBatch:
    assert step == 2
    answers = {1: [(11, "1"), (12, "2"), (13, "3")], 2: [(21, "1"), (22, "2"), (23, "3")]}[attempt]
    return PromptBatch(step=2, prompts=[_prompt(i, answer) for i, answer in answers], valid=[True] * 3)


DULL = {1: ["7", "7", "7"], 2: ["5", "55", "5"], 3: ["6", "6", "6"]}
OTHERS = {11: ["a", "b", "c"], 12: ["2", "b", "22"], 13: ["3", "3", "3"], 21: ["1", "b", "1"], 22: ["2", "b", "c"]}


def test_dynamic_sampling_replaces_groups_of_equal_rewards(make: Make) -> None:
    texts = {**DULL, **OTHERS, 23: ["3", "b", "c"]}
    experience = make(replace(PLAIN, dynamic_sampling=True), texts=texts, fetch=_other_prompts)
    # informative groups in the order of attempt and prompt: 2, then 12, then 21
    assert [prompt.id for prompt in experience.samples.prompts] == [2, 12, 21]
    assert list(experience.samples.completions) == ["5", "55", "5", "2", "b", "22", "1", "b", "1"]
    assert experience.statistics.rewards.tolist() == [[1, 2, 1], [1, 0, 2], [1, 0, 1]]
    assert experience.attempts == 2
    # a source that chooses by what was solved hears of the groups that were left out as well
    right = {1: 1.0, 2: 1.0, 3: 1.0, 11: 0.0, 12: 2 / 3, 13: 1.0, 21: 2 / 3, 22: 1 / 3, 23: 1 / 3}
    assert experience.rates == pytest.approx(right)


def test_dynamic_sampling_fills_up_with_the_first_attempt_when_its_tries_are_over(make: Make) -> None:
    algorithm = replace(PLAIN, dynamic_sampling=True, max_resample_attempts=1)
    experience = make(algorithm, texts={**DULL, **OTHERS}, fetch=_other_prompts)
    assert sorted(prompt.id for prompt in experience.samples.prompts) == [1, 2, 12]
    assert experience.attempts == 1


def test_rows_are_cut_to_their_longest_prompt_and_completion(make: Make) -> None:
    rollout = make().rollout
    part = rollout_rows(rollout, torch.tensor([3, 5]))
    assert part["prompt_ids"].shape == (2, 2)  # the second question is two characters long
    assert part["completion_ids"].shape == (2, 3)
    assert part["completion_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert part["prompt_mask"].all()
