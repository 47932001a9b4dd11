"""ECHO: what an environment wrote between the policy's turns is learned from, beside the objective of the actions."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests import gradient_step

sys.path.append(str(Path(__file__).parents[1] / "plugins"))

from countdown_task import Down

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.echo import ECHO
from grpo_pl.rewards import EnvironmentReward
from grpo_pl.rollout.episode_settings import EpisodeSettings
from grpo_pl.training.experience import Experience
from grpo_pl.types import Problem, PromptBatch

BATCH = PromptBatch(
    step=0, prompts=[Problem(id=i, question="", answer="", columns={"start": 3}) for i in (1, 2)], valid=[True] * 2
)
TEXTS = {1: [["1", "2"], ["1", "9"], ["x", "3"]], 2: [["1", "2"]] * 3}
"""The second group has equal rewards, so that GRPO alone learns nothing from it."""
PLAIN = GRPOAlgorithm(group_size=3, beta=0.0)
LEARNING = replace(PLAIN, terms={"echo": ECHO(coef=0.1)})


@pytest.fixture
def experience(make_experience: Callable[..., Experience]) -> Experience:
    return make_experience(
        TEXTS,
        batch=BATCH,
        rewards=[EnvironmentReward(correctness=True)],
        algorithm=LEARNING,
        max_completion_length=4,
        environment=Down(isolation="thread"),
        episodes=EpisodeSettings(max_turns=3),
    )


@pytest.mark.parametrize("max_tokens", [40, 1000])
def test_the_step_adds_the_mean_cross_entropy_of_all_observations(
    experience: Experience, tiny_policy: PreTrainedModel, max_tokens: int
) -> None:
    """By a loop over the tokens of each episode; two micro-batches or many, the gradient is the same."""
    rollout, total, count = experience.rollout, torch.zeros(()), 0
    for row in range(6):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]
        ids = rollout.completion_ids[row][rollout.completion_mask[row]]
        logits = tiny_policy(input_ids=torch.cat([prompt, ids]).unsqueeze(0)).logits[0]
        for place, token in enumerate(ids.tolist()):
            if not rollout.action_mask[row, place]:
                total = total - logits[len(prompt) - 1 + place].log_softmax(-1)[token]
                count += 1
    gradient = gradient_step.gradient(total / count, tiny_policy)
    experience = replace(experience, active=torch.ones_like(experience.active))
    with_echo, result = gradient_step.moved(tiny_policy, experience, LEARNING, longest=12, max_tokens=max_tokens)
    without, _ = gradient_step.moved(tiny_policy, experience, PLAIN, longest=12, max_tokens=max_tokens)
    assert count >= 6
    assert gradient_step.relative(without - with_echo, 0.1 * gradient) < 1e-4
    summed, tokens = result.sums["observation/nll"]
    assert (float(summed), int(tokens)) == (pytest.approx(total.item(), rel=1e-5), count)


def test_episodes_of_equal_rewards_are_forwarded_for_their_observations(experience: Experience) -> None:
    assert experience.active.all()
    assert not experience.advantages[3:].any()
