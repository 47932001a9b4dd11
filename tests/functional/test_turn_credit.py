"""Credit for single turns, against a reference that loops over plain numbers, and in expectation over a whole MDP."""

import itertools
import math
import random
from collections.abc import Sequence
from difflib import SequenceMatcher
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from grpo_pl.functional.turn_credit import (
    NO_TURN,
    anchor_groups,
    gigpo_advantages,
    returns_to_go,
    spread_over_tokens,
    turn_returns,
)

Episode = list[tuple[str, float, bool]]
"""(state, reward, whether the action was invalid) of each turn."""


def tensors(episodes: Sequence[Episode], group_size: int) -> dict[str, Any]:
    width = max(map(len, episodes))
    rewards = torch.full((len(episodes), width), torch.nan, dtype=torch.float64)
    present = torch.zeros(len(episodes), width, dtype=torch.bool)
    for row, episode in enumerate(episodes):
        for turn, (_, reward, _) in enumerate(episode):
            rewards[row, turn], present[row, turn] = reward, True
    anchors = anchor_groups([[state for state, *_ in episode] for episode in episodes], group_size=group_size)
    return {"rewards": rewards, "present": present, "anchors": anchors, "group_size": group_size}


def invalid_actions(episodes: Sequence[Episode]) -> torch.Tensor:
    width = max(map(len, episodes))
    return torch.tensor([[bad for *_, bad in e] + [False] * (width - len(e)) for e in episodes])


def discounted(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (j - t) * rewards[j] for j in range(t, len(rewards))) for t in range(len(rewards))]


def normalized(value: float, sample: list[float], norm: str) -> float:
    if len(sample) < 2:
        return 0.0
    centred = value - mean(sample)
    if norm == "mean":
        return centred
    spread = stdev(sample) if max(sample) > min(sample) else 0.0
    return centred / (spread + 1e-6) if spread else centred


def reference_gigpo(
    group: list[Episode], *, w: float, gamma: float, norm: str, statistics: str, penalty: float
) -> list[list[float]]:
    """GiGPO of one group, turn by turn."""
    returns = [discounted([reward for _, reward, _ in episode], gamma) for episode in group]
    paid = [[r - penalty * bad for r, (*_, bad) in zip(R, e, strict=True)] for R, e in zip(returns, group, strict=True)]
    totals = [sum(reward for _, reward, _ in episode) for episode in group]
    scores = [[total - penalty * bad for *_, bad in e] for total, e in zip(totals, group, strict=True)]
    sample = [s for row in scores for s in row] if statistics == "steps" else totals
    by_state: dict[str, list[float]] = {}
    for episode, values in zip(group, paid, strict=True):
        for (state, *_), value in zip(episode, values, strict=True):
            by_state.setdefault(state, []).append(value)
    return [
        [
            normalized(score, sample, norm) + w * normalized(value, by_state[state], norm)
            for (state, *_), score, value in zip(*rows, strict=True)
        ]
        for rows in zip(group, scores, paid, strict=True)
    ]


def reference_turn_returns(group: list[Episode], *, gamma: float, own: bool) -> list[list[float]]:
    returns = [discounted([reward for _, reward, _ in episode], gamma) for episode in group]
    advantages = []
    for i, episode in enumerate(group):
        row = []
        for t, (state, *_) in enumerate(episode):
            visits = [
                (j, returns[j][k]) for j, other in enumerate(group) for k, (s, *_) in enumerate(other) if s == state
            ]
            if all(j == i for j, _ in visits):
                visits = [(j, returns[j][0]) for j in range(len(group))]
            sample = [value for j, value in visits if own or j != i]
            row.append(returns[i][t] - mean(sample) if len(group) > 1 else 0.0)
        advantages.append(row)
    return advantages


def episodes_at_random(seed: int, count: int) -> list[Episode]:
    rng = random.Random(seed)
    return [
        [(rng.choice("abc"), rng.choice([0.0, 0.0, 1.0, 0.25]), rng.random() < 0.3) for _ in range(rng.randint(1, 5))]
        for _ in range(count)
    ]


def padded(rows: list[list[float]], width: int) -> torch.Tensor:
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("w", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("gamma", [1.0, 0.95])
@pytest.mark.parametrize("norm", ["mean", "mean_std"])
@pytest.mark.parametrize("statistics", ["episodes", "steps"])
@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_gigpo_is_the_scalar_reference(w: float, gamma: float, norm: str, statistics: str, penalty: float) -> None:
    for seed in range(4):
        episodes = episodes_at_random(seed, 8)
        choices: dict[str, Any] = {"gamma": gamma, "norm": norm, "statistics": statistics}
        found = gigpo_advantages(
            **tensors(episodes, 4),
            **choices,
            step_weight=w,
            invalid_actions=invalid_actions(episodes),
            invalid_action_penalty=penalty,
        )
        expected = [
            row
            for start in (0, 4)
            for row in reference_gigpo(episodes[start : start + 4], w=w, penalty=penalty, **choices)
        ]
        torch.testing.assert_close(found, padded(expected, found.shape[1]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("baseline", ["leave_one_out", "group_mean"])
def test_turn_returns_are_the_scalar_reference(gamma: float, baseline: Any) -> None:
    for seed in range(6):
        episodes = episodes_at_random(seed, 8)
        found = turn_returns(**tensors(episodes, 4), gamma=gamma, baseline=baseline)
        expected = [
            row
            for start in (0, 4)
            for row in reference_turn_returns(episodes[start : start + 4], gamma=gamma, own=baseline == "group_mean")
        ]
        torch.testing.assert_close(found, padded(expected, found.shape[1]), rtol=1e-12, atol=1e-12)


def test_returns_to_go_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 2.0], [3.0, torch.nan, torch.nan]])
    present = torch.tensor([[True, True, True], [True, False, False]])
    assert returns_to_go(rewards, present, gamma=0.5).tolist() == [[1.5, 1.0, 2.0], [3.0, 0.0, 0.0]]
    assert returns_to_go(rewards, present).tolist() == [[3.0, 2.0, 2.0], [3.0, 0.0, 0.0]]


def test_rewards_that_add_up_to_the_same_give_no_advantage() -> None:
    # in binary 0.1 + 0.2 is not 0.3
    episodes: list[Episode] = [[("a", 0.1, False), ("b", 0.2, False)], [("a", 0.3, False)], [("a", 0.3, False)]]
    for dtype in (torch.float64, torch.float32):
        given = tensors(episodes, 3)
        given["rewards"] = given["rewards"].to(dtype)
        found = gigpo_advantages(**given, norm="mean_std")
        assert (found == 0).all()
        assert turn_returns(**given)[:, 0].tolist() == [0.0, 0.0, 0.0]


def test_a_lone_episode_and_a_lone_step_get_nothing() -> None:
    lone: list[Episode] = [[("a", 1.0, False), ("b", 1.0, False)]]
    assert (gigpo_advantages(**tensors(lone, 1)) == 0).all()
    assert (turn_returns(**tensors(lone, 1)) == 0).all()
    two: list[Episode] = [[("a", 0.0, False), ("b", 1.0, False)], [("a", 0.0, False), ("c", 0.0, False)]]
    steps = gigpo_advantages(**tensors(two, 2)) - gigpo_advantages(**tensors(two, 2), step_weight=0.0)
    assert steps.tolist() == [[0.5, 0.0], [-0.5, 0.0]]


def test_long_episodes_count_as_often_as_they_have_turns_only_where_that_is_asked_for() -> None:
    episodes: list[Episode] = [[("a", 0.0, False)] * 3, [("a", 1.0, False)]]
    once = gigpo_advantages(**tensors(episodes, 2), step_weight=0.0)
    often = gigpo_advantages(**tensors(episodes, 2), step_weight=0.0, statistics="steps")
    assert once[:, 0].tolist() == [-0.5, 0.5]
    assert often[:, 0].tolist() == [-0.25, 0.75]


def test_an_invalid_action_costs_its_own_turn_alone() -> None:
    turns: Episode = [("a", 0.0, False), ("b", 0.0, True), ("c", 1.0, False)]
    episodes: list[Episode] = [turns, [(state, reward, False) for state, reward, _ in turns]]
    found = gigpo_advantages(**tensors(episodes, 2), norm="mean", invalid_actions=invalid_actions(episodes))
    # at b the step is 0.05 below the mean of 0.9 and 1, the episode's score 0.1 below the mean of 1 and 1
    torch.testing.assert_close(found, torch.tensor([[0.0, -0.15, 0.0], [0.0, 0.05, 0.0]], dtype=torch.float64))


def test_an_invalid_action_where_all_episodes_earn_the_same_is_not_divided_by_nothing() -> None:
    episodes: list[Episode] = [[("a", 1.0, True)], [("b", 1.0, False)]]
    found = gigpo_advantages(**tensors(episodes, 2), norm="mean_std", invalid_actions=invalid_actions(episodes))
    torch.testing.assert_close(found, torch.tensor([[-0.1], [0.0]], dtype=torch.float64))


@pytest.mark.parametrize("credit", [gigpo_advantages, turn_returns])
def test_an_episode_of_unknown_reward_is_compared_with_nothing(credit: Any) -> None:
    episodes = episodes_at_random(3, 4)
    unknown: list[Episode] = [*episodes[:3], [(state, math.nan, bad) for state, _, bad in episodes[3]]]
    found = credit(**tensors(unknown, 4), valid=torch.tensor([True, True, True, False]))
    assert (found[3] == 0).all()
    width = max(map(len, episodes[:3]))
    torch.testing.assert_close(found[:3, :width], credit(**tensors(episodes[:3], 3)))


def test_states_are_equal_within_their_group_only() -> None:
    anchors = anchor_groups([["x", "y", "x"], ["y"], [("x", 1)], ["x", ("x", 1)]], group_size=2)
    assert anchors.tolist() == [[0, 1, 0], [1, NO_TURN, NO_TURN], [2, NO_TURN, NO_TURN], [3, 2, NO_TURN]]


def test_similar_texts_are_one_state_from_the_threshold_on() -> None:
    text, near, far = "the door is open and red", "the door is open and red!", "a window"
    ratio = SequenceMatcher(None, near, text).ratio()
    at = anchor_groups([[text, far], [near]], group_size=2, similarity=ratio)
    above = anchor_groups([[text, far], [near]], group_size=2, similarity=math.nextafter(ratio, 1.0))
    assert at.tolist() == [[0, 1], [0, NO_TURN]] and above.tolist() == [[0, 1], [2, NO_TURN]]


def test_the_advantage_of_a_turn_reaches_its_tokens() -> None:
    index = torch.tensor([[0, 0, NO_TURN, 1, NO_TURN]])
    assert spread_over_tokens(torch.tensor([[2.0, -1.0]]), index).tolist() == [[2.0, 2.0, 0.0, -1.0, 0.0]]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: returns_to_go(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), gamma=1.5), "gamma .* 1.5"),
        (lambda: returns_to_go(torch.zeros(1, 2), torch.tensor([[False, True]])), "first turns"),
        (lambda: returns_to_go(torch.tensor([[math.nan]]), torch.tensor([[True]])), "not finite"),
        (lambda: anchor_groups([["a"]], group_size=2), "1 episodes are no multiple"),
        (lambda: anchor_groups([[["a"]]], group_size=1), "cannot be hashed"),
        (lambda: anchor_groups([["a"], [1]], group_size=2, similarity=0.9), "no text"),
        (lambda: anchor_groups([["a"]], group_size=1, similarity=2.0), "similarity .* 2.0"),
        (lambda: gigpo_advantages(**tensors([[("a", 0.0, False)]], 1), norm="median"), "mean_std"),
        (lambda: gigpo_advantages(**tensors([[("a", 0.0, False)]], 1), statistics="tokens"), "episodes, steps"),
        (lambda: turn_returns(**tensors([[("a", 0.0, False)]], 1), baseline="turn_index"), "leave_one_out"),
    ],
)
def test_what_makes_no_sense_is_refused(mistake: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mistake()


# --- In expectation: two turns, of which the policy may decline the second -----------------------------------------
#
# State 0: action 0 ends with reward 0.5; action 1 leads to state 1; action 2 stays, at a cost of 0.1.
# The second turn ends whatever is done: in state 0 with rewards 0, 0.2, 0.8; in state 1 with 1, 0, 0.3.

SECOND = {0: (0.0, 0.2, 0.8), 1: (1.0, 0.0, 0.3)}
PATHS: list[list[tuple[int, int, float]]] = [
    [(0, 0, 0.5)],
    *([(0, 1, 0.0), (1, action, reward)] for action, reward in enumerate(SECOND[1])),
    *([(0, 2, -0.1), (0, action, reward)] for action, reward in enumerate(SECOND[0])),
]
"""Every episode there is, as (state, action, reward) a turn."""
G = 3
POLICY = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.9, -0.4]], dtype=torch.float64)
"""Logits (state, action)."""


def path_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """(path, turn), 0 where a path has no second turn."""
    table = logits.log_softmax(-1)
    zero = table.new_zeros(())
    return torch.stack([torch.stack([*(table[s, a] for s, a, _ in path), *[zero] * (2 - len(path))]) for path in PATHS])


def true_gradient() -> torch.Tensor:
    leaf = POLICY.clone().requires_grad_()
    earned = torch.tensor([sum(r for *_, r in path) for path in PATHS], dtype=torch.float64)
    return torch.autograd.grad((path_logprobs(leaf).sum(1).exp() * earned).sum(), leaf)[0]


def expected_gradient(credit: Any) -> torch.Tensor:
    """E[Σ_t ∇log π(a_t|s_t) · A_t / G] over all groups of G episodes, weighted by their probability."""
    groups = torch.tensor(list(itertools.product(range(len(PATHS)), repeat=G)))  # (P, G)
    rows = groups.flatten()
    episodes: list[Episode] = [[(str(s), r, False) for s, _, r in PATHS[i]] for i in rows.tolist()]
    advantages = credit(**tensors(episodes, G))  # (P·G, 2)
    leaf = POLICY.clone().requires_grad_()
    logprobs = path_logprobs(leaf)
    chance = logprobs.detach().sum(1).exp()[groups].prod(1).repeat_interleave(G)
    return torch.autograd.grad((chance.unsqueeze(1) * logprobs[rows] * advantages).sum() / G, leaf)[0]


def minus_mean_of_the_turn_index(rewards: torch.Tensor, present: torch.Tensor, **_: Any) -> torch.Tensor:
    """What peers do: R_t minus the mean of R_t over the episodes of the group that reach turn t."""
    returns = returns_to_go(rewards, present).unflatten(0, (-1, G))
    there = present.unflatten(0, (-1, G))
    average = returns.sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)
    return ((returns - average) * there).flatten(0, 1)


def minus_mean_of_the_episodes(rewards: torch.Tensor, present: torch.Tensor, **_: Any) -> torch.Tensor:
    returns = returns_to_go(rewards, present).unflatten(0, (-1, G))
    return ((returns - returns[:, :, :1].mean(1, keepdim=True)) * present.unflatten(0, (-1, G))).flatten(0, 1)


def turned(gradient: torch.Tensor) -> float:
    """1 − cosine with the policy gradient."""
    return 1 - torch.nn.functional.cosine_similarity(gradient.flatten(), true_gradient().flatten(), dim=0).item()


def test_all_episodes_are_enumerated() -> None:
    assert path_logprobs(POLICY).sum(1).exp().sum().item() == pytest.approx(1)
    assert {len(path) for path in PATHS} == {1, 2}  # the policy picks the number of turns


def test_turn_returns_are_the_policy_gradient() -> None:
    torch.testing.assert_close(expected_gradient(turn_returns), true_gradient(), rtol=1e-12, atol=1e-14)


def test_a_mean_over_the_groups_episodes_shortens_the_gradient_by_one_sample() -> None:
    expected = (G - 1) / G * true_gradient()
    torch.testing.assert_close(expected_gradient(minus_mean_of_the_episodes), expected, rtol=1e-12, atol=1e-14)


def test_gigpos_episode_part_shortens_the_gradient_by_one_sample() -> None:
    gradient = expected_gradient(lambda **given: gigpo_advantages(**given, step_weight=0.0))
    torch.testing.assert_close(gradient, (G - 1) / G * true_gradient(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("credit", "cosine"),  # as docs/environments.md has them
    [
        pytest.param(minus_mean_of_the_turn_index, 0.970, id="a baseline per turn index"),
        pytest.param(lambda **given: turn_returns(**given, baseline="group_mean"), 0.970, id="group mean over states"),
        pytest.param(gigpo_advantages, 0.986, id="GiGPO"),
        pytest.param(lambda **given: gigpo_advantages(**given, norm="mean_std"), 0.948, id="GiGPO with std"),
        pytest.param(
            lambda **given: gigpo_advantages(**given, step_weight=0.0, statistics="steps"),
            0.992,
            id="episodes by turns",
        ),
    ],
)
def test_forms_that_turn_the_gradient(credit: Any, cosine: float) -> None:
    assert 1 - turned(expected_gradient(credit)) == pytest.approx(cosine, abs=0.0006)


def test_discounted_turn_returns_leave_out_the_outer_discount() -> None:
    gamma = 0.7
    leaf = POLICY.clone().requires_grad_()
    logprobs = path_logprobs(leaf)
    chance = logprobs.detach().sum(1).exp()
    to_go = torch.tensor(
        [discounted([r for *_, r in path], gamma) + [0.0] * (2 - len(path)) for path in PATHS], dtype=torch.float64
    )
    surrogate = torch.autograd.grad((chance.unsqueeze(1) * logprobs * to_go).sum(), leaf)[0]
    found = expected_gradient(lambda **given: turn_returns(**given, gamma=gamma))
    torch.testing.assert_close(found, surrogate, rtol=1e-12, atol=1e-14)
