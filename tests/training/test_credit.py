"""Steps of a completion's text find their tokens, and their values the right advantages; scripted episodes through a
real environment give every token its advantage, by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_pl.distributed.collective import Collective
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.gigpo import GiGPO
from grpo_pl.objective.terms.turn_returns import TurnReturns
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards import EnvironmentReward, FunctionReward, MathReward
from grpo_pl.rewards.base import Score, StepScores
from grpo_pl.rewards.batch import ScoredBatch, check_rewards
from grpo_pl.rewards.format import FormatReward
from grpo_pl.rewards.per_source import PerSource
from grpo_pl.rewards.process import ColumnArithmeticReward
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.checks import check_episodes
from grpo_pl.training.credit import step_tensors, tokens_at
from grpo_pl.training.experience import Experience
from grpo_pl.training.metrics import experience_metrics, without_value
from grpo_pl.types import NO_TURN, Problem, PromptBatch, SamplingParams
from tests.gradient_step import rollout_of

sys.path.append(str(Path(__file__).parents[1] / "plugins"))

from countdown_task import Down

TOKENIZER = character_tokenizer(["<think>", "</think>"])


def samples_of(texts: list[str]) -> Samples:
    rows = [[*TOKENIZER(text).input_ids, TOKENIZER.eos_token_id] for text in texts]
    prompt = Problem(id=0, question="1+1=", answer="2")
    return Samples(
        prompts=[prompt], prompt_texts=["1+1="], rollout=rollout_of([[1]] * len(rows), rows), completions=texts, step=0
    )


def test_a_step_ends_at_the_token_that_holds_its_last_character() -> None:
    text = "<think>ab\ncd"  # tokens: <think> a b \n c d
    ids = TOKENIZER(text).input_ids
    assert tokens_at([7, 9, 12], ids, PromptTemplate(), TOKENIZER) == [0, 2, 5]


def test_offsets_inside_the_prefill_belong_to_the_first_token() -> None:
    template = PromptTemplate(prefill="<think>")
    ids = TOKENIZER("ab").input_ids
    assert tokens_at([3, 8, 9], ids, template, TOKENIZER) == [0, 0, 1]


def test_step_values_are_weighted_and_rewards_without_steps_end_with_the_completion() -> None:
    process, outcome = ColumnArithmeticReward(weight=2.0), FormatReward(weight=0.5)
    scored = ScoredBatch(
        rewards=[process, outcome],
        scores=[
            [Score(0.5, "wrong", steps=StepScores((1.0, 0.0), (1, 3))), Score(None, "bad_gold")],
            [Score(1.0, "ok"), Score(1.0, "ok")],
        ],
    )
    values, ends = step_tensors(scored, samples_of(["abc", "x"]), PromptTemplate(), TOKENIZER)
    expected = torch.tensor([[2.0, 0.0, 0.5], [0.5, torch.nan, torch.nan]], dtype=torch.float64)
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert ends.tolist() == [[0, 2, 3], [1, 0, 0]]  # the outcome's step ends at the EOS token


def test_a_reward_of_weight_0_is_no_step_and_weighted_values_are_those_on_paper() -> None:
    process, logged = ColumnArithmeticReward(weight=0.1), FormatReward(weight=0.0)
    steps = StepScores((3.0,), (1,))
    scored = ScoredBatch(rewards=[process, logged], scores=[[Score(3.0, "ok", steps=steps)], [Score(1.0, "ok")]])
    values, _ = step_tensors(scored, samples_of(["abc"]), PromptTemplate(), TOKENIZER)
    assert values.tolist() == [[0.3]]  # 0.1 * 3.0 is 0.30000000000000004


def test_process_supervision_without_a_reward_for_steps_is_refused() -> None:
    rewards = [FormatReward(correctness=True)]
    check_rewards(rewards)
    with pytest.raises(ValueError, match="no reward scores steps"):
        check_rewards(rewards, steps_needed=True)


Make = Callable[..., Experience]

BATCH = PromptBatch(step=2, prompts=[Problem(id=1, question="", answer="", columns={"start": 3})], valid=[True])
TEXTS = {1: [["1", "2"], ["1", "9"], ["x", "3"]]}
"""From 3 to 2 and 0, earning 0.1 and 0.2; from 3 to 2 and below 0, earning 0.1 and -0.5; nothing, then from 3 to 0."""
WHOLE = GRPOAlgorithm(group_size=3, beta=0.0, baseline="leave_one_out", scale="none")
TURN = replace(WHOLE, terms={"turns": TurnReturns()})
REWARDS = [EnvironmentReward(correctness=True)]


@pytest.fixture
def make(make_experience: Make) -> Make:
    given = {
        "batch": BATCH,
        "rewards": REWARDS,
        "max_completion_length": 4,
        "environment": Down(isolation="thread"),
        "episodes": EpisodeSettings(max_turns=3),
    }
    return lambda algorithm=TURN, *, texts=TEXTS, **more: make_experience(
        texts, algorithm=algorithm, **{**given, **more}
    )


def by_turn(experience: Experience) -> list[list[float]]:
    """The advantage that all tokens of each turn have, once it is checked that they do and no other token has any."""
    rows = []
    for advantages, turns in zip(experience.advantages, experience.rollout.turn_index, strict=True):
        assert not advantages[turns == NO_TURN].any()
        found = [advantages[turns == turn].unique().tolist() for turn in range(int(turns.max()) + 1)]
        rows.append([value for (value,) in found])
    return rows


def test_returns_to_go_less_what_others_got_from_the_same_state(make: Make) -> None:
    experience = make()
    # to go: 0.3, 0.2; -0.4, -0.5; 0.3, 0.3. All first turns and the last one of all began at 3, the others at 2
    first = 0.3 - (-0.4 + 0.3 + 0.3) / 3
    expected = [[first, 0.2 + 0.5], [-0.4 - 0.3, -0.5 - 0.2], [0.35, 0.35]]
    for ours, theirs in zip(by_turn(experience), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert experience.turn_advantages.tolist()[1] == pytest.approx(expected[1], abs=1e-6)
    assert experience.statistics.rewards[0].tolist() == pytest.approx([0.3, -0.4, 0.3])
    assert experience.active.all() and experience.lengths.tolist() == [[4, 4, 4]]  # each action and its end


def test_gigpo_adds_the_turn_among_its_equals_to_the_episode(make: Make) -> None:
    gigpo = GiGPO(step_weight=0.5, invalid_action_penalty=0.1)
    algorithm = replace(WHOLE, baseline="group_mean", terms={"turns": gigpo})
    mean = 0.2 / 3  # of 0.3, -0.4 and 0.3
    # at 3 came 0.3, -0.4, 0.3 less the penalty, 0.3: on average 0.1; at 2 came 0.2 and -0.5
    expected = [
        [0.3 - mean + 0.1, 0.3 - mean + 0.175],
        [-0.4 - mean - 0.25, -0.4 - mean - 0.175],
        [0.3 - mean - 0.1 + 0.05, 0.3 - mean + 0.1],
    ]
    for ours, theirs in zip(by_turn(make(algorithm)), expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_without_turn_supervision_all_turns_have_the_advantage_of_their_episode(make: Make) -> None:
    experience = make(replace(WHOLE, baseline="group_mean"))
    assert experience.advantages.squeeze(1).tolist() == pytest.approx([0.7 / 3, -1.4 / 3, 0.7 / 3], abs=1e-6)
    assert experience.turn_advantages is None


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_with_one_turn_the_returns_of_turns_are_those_of_episodes(make: Make, baseline: Any) -> None:
    texts = {1: [["3"], ["9"], ["4"]]}
    turn = make(replace(TURN, baseline=baseline), texts=texts)
    whole = make(replace(WHOLE, baseline=baseline), texts=texts)
    spread = whole.advantages * turn.rollout.action_mask
    torch.testing.assert_close(turn.advantages, spread, atol=1e-7, rtol=0)
    assert turn.advantages.any() and torch.equal(turn.active, whole.active)


def test_an_episode_that_its_environment_failed_is_compared_with_nothing(make: Make) -> None:
    experience = make(texts={1: [["1", "2"], ["1", "!"], ["9"]]})
    assert experience.statistics.valid.tolist() == [[True, False, True]]
    assert experience.keep.tolist() == experience.active.tolist() == [True, False, True]
    ours = by_turn(experience)
    # 0.3 and -0.5 from 3; at 2 there was nobody else, so the other's return counts
    assert ours[0] == pytest.approx([0.8, 0.2 + 0.5]) and ours[2] == pytest.approx([-0.8])
    assert not experience.advantages[1].any()
    metrics = experience_metrics(experience, REWARDS, Collective(), ())
    assert metrics["episodes/status/raised"] == 1.0 and metrics["samples/dropped"] == 1.0
    assert metrics["episodes/return"] == pytest.approx((0.3 - 0.5) / 2)


def test_episodes_without_a_value_are_counted_and_refused_where_there_are_no_others(make: Make) -> None:
    part = make(texts={1: [["1", "2"], ["1", "!"], ["9"]]}).samples
    assert without_value(part, Collective()) == (
        pytest.approx(1 / 3),
        "step raised RuntimeError: this environment is broken",
    )
    every = make(texts={1: [["!"], ["!"], ["1", "!"]]}).samples
    with pytest.raises(ValueError, match=r"none of the 3 episodes of rollout 3 has a value; .* is broken"):
        without_value(every, Collective())


PAID = PerSource(rewards={"a": EnvironmentReward()}, name="mixed")


@pytest.mark.parametrize(
    ("environment", "fields", "rewards", "told"),
    [
        (Down(), {"baseline": "greedy", "scale": "none", "dynamic_sampling": True}, REWARDS, "greedy .* another world"),
        (Down(), {"baseline": "greedy", "scale": "none"}, REWARDS, ""),
        (None, {"baseline": "greedy", "scale": "none", "dynamic_sampling": True}, [MathReward(correctness=True)], ""),
        (None, {}, [PAID], r"pays what an environment gave, but there is no model\.environment"),
    ],
)
def test_what_needs_an_environment_or_goes_with_none(environment: Any, fields: Any, rewards: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) if told else nullcontext():
        check_episodes(environment, GRPOAlgorithm(**fields), rewards)


def test_the_context_limits_what_an_episode_may_write() -> None:
    sampling = SamplingParams(max_completion_length=100)
    written = [
        EpisodeSettings(max_turns=5, max_episode_tokens=most).most_actions(sampling, context)
        for most, context in ((0, None), (0, 64), (0, 600), (300, 350))
    ]
    assert written == [500, 64, 500, 300]


def test_a_group_of_equal_turns_is_not_forwarded(make: Make) -> None:
    experience = make(texts={1: [["1", "2"]] * 3})
    assert experience.keep.all() and not experience.active.any() and not experience.advantages.any()


def test_metrics_tell_what_happened(make: Make) -> None:
    experience = make(texts={1: [["1", "2"], ["x", "x", "x"], ["9"]]})
    metrics = experience_metrics(experience, REWARDS, Collective(), ())
    assert metrics["episodes/mean_turns"] == 2.0
    assert metrics["episodes/invalid_actions"] == 0.5
    assert metrics["episodes/return"] == pytest.approx((0.3 + 0.0 - 0.5) / 3)
    assert metrics["episodes/finish/environment"] == pytest.approx(2 / 3)
    assert metrics["episodes/finish/turns"] == metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert metrics["episodes/finish/tokens"] == 0.0
    assert not any(name.startswith("episodes/status") for name in metrics)
    assert metrics["completions/mean_length"] == 4.0  # 4, 6 and 2 tokens of actions and their ends
    assert "episodes/mean_segments" not in metrics
    episodes = list(experience.samples.episodes or ())
    episodes[0] = replace(episodes[0], turns=[replace(turn, segment=k) for k, turn in enumerate(episodes[0].turns)])
    several = replace(experience, samples=replace(experience.samples, episodes=episodes))
    assert experience_metrics(several, REWARDS, Collective(), ())["episodes/mean_segments"] == pytest.approx(4 / 3)


def test_dynamic_sampling_takes_episodes_along(make: Make) -> None:
    problems = [Problem(id=i, question="", answer="", columns={"start": 3}) for i in (1, 2, 3)]
    texts = {1: [["1", "2"]] * 3, 2: [["3"], ["x", "9"], ["x", "x", "3"]], 3: [["9"], ["1", "1", "1"], ["3"]]}
    experience = make(
        replace(TURN, dynamic_sampling=True),
        texts=texts,
        batch=PromptBatch(step=2, prompts=problems[:2], valid=[True] * 2),
        fetch=lambda step, attempt: PromptBatch(step=step, prompts=problems[2:] + problems[:1], valid=[True] * 2),
    )
    samples = experience.samples
    assert [prompt.id for prompt in samples.prompts] == [2, 3]
    assert [episode.actions for episode in samples.episodes] == [*texts[2], *texts[3]]
    assert [
        list(map(int, ids[mask].tolist()))
        for ids, mask in zip(samples.rollout.turn_index, samples.rollout.action_mask, strict=True)
    ] == [[turn for turn in range(len(told)) for _ in range(2)] for told in [*texts[2], *texts[3]]]


HEARD: list[tuple[Sequence[str], Any]] = []


def listen(completions: Sequence[str], episode: Any, completion_ids: Any) -> list[float]:
    HEARD.append((completions, episode))
    assert [len(ids) for ids in completion_ids] == [4, 4, 4]  # observations are none of the policy's tokens
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize(
    ("sees", "expected"), [("last_action", ["2", "9", "3"]), ("exchange", ["1\n2:\n2", "1\n2:\n9", "x\n3?\n3"])]
)
def test_rewards_of_texts_see_the_last_action_or_all_of_it(make: Make, sees: Any, expected: list[str]) -> None:
    HEARD.clear()
    rewards = [*REWARDS, FunctionReward(function=listen, name="listen", weight=0.5)]
    experience = make(rewards=rewards, episodes=EpisodeSettings(max_turns=3, rewards_see=sees))
    ((completions, episodes),) = HEARD
    assert list(completions) == expected == list(experience.samples.completions)
    assert episodes[2]["return"] == pytest.approx(0.3)
    assert [turn["action"] for turn in episodes[2]["turns"]] == ["x", "3"]
    assert [turn["invalid_action"] for turn in episodes[2]["turns"]] == [True, False]
    # what a text is worth is credited to the last turn: 0.1 and 0.2 more for half of each text's characters
    assert experience.turns.rewards[0].tolist() == pytest.approx([0.1, 0.2 + 0.5 * len(expected[0])])
    assert experience.samples.prompt_texts == ["3:"]
