"""Advantages of turns from the rewards of turns (B, K): GiGPO, and returns minus a baseline per state.

Axes: B = P·G episodes, those of one prompt next to each other; K turns, right-padded; T completion tokens. Sums are
computed on the CPU in a fixed order, so that equal rewards give equal advantages on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from fractions import Fraction
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.exact_sums import as_written, from_float32
from grpo_pl.types import NO_TURN

TurnNorm = Literal["mean", "mean_std"]
EpisodeStatistics = Literal["episodes", "steps"]
TurnBaseline = Literal["leave_one_out", "group_mean"]


def returns_to_go(rewards: Tensor, present: Tensor, *, gamma: float = 1.0) -> Tensor:
    """R_t = r_t + γ · R_{t+1} with R = 0 after the last turn; computed with the numbers `as_written` and rounded once.

    Args:
        rewards: (B, K), finite where ``present``.
        present: (B, K) bool, true for the turns that an episode has, which come first in its row.
        gamma: discount per turn, in [0, 1].

    Returns:
        (B, K) float64, 0 where there is no turn.

    Raises:
        ValueError: γ outside [0, 1], a turn after a missing one, or a reward that is not finite.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma must lie in [0, 1], got {gamma}.")
    if (present[:, 1:] & ~present[:, :-1]).any():
        raise ValueError("present must be true for the first turns of each episode, and false behind them.")
    if not torch.isfinite(rewards[present]).all():
        raise ValueError("a turn's reward is not finite: leave an episode whose reward is unknown out by `valid`.")
    short, discount = rewards.dtype == torch.float32, as_written(gamma)
    returns = torch.zeros(rewards.shape, dtype=torch.float64)
    for row, (values, turns) in enumerate(zip(rewards.tolist(), present.sum(1).tolist(), strict=True)):
        total = Fraction(0)
        for turn in reversed(range(turns)):
            total = as_written(from_float32(values[turn]) if short else values[turn]) + discount * total
            returns[row, turn] = float(total)
    return returns.to(rewards.device)


def anchor_groups(states: Sequence[Sequence[Hashable]], *, group_size: int, similarity: float | None = None) -> Tensor:
    """Numbers the states in which turns were taken: equal numbers are equal states within a group of episodes.

    Args:
        states: one sequence per episode with one state per turn, as it was before the turn's action.
        group_size: G; episodes ``p·G … p·G + G − 1`` belong to prompt ``p``.
        similarity: None asks for equality. Otherwise states are texts, and a text belongs to the first state whose
            first text it resembles with a ratio of ``difflib`` of at least this number (GiGPO's code: 0.95).

    Returns:
        (B, K) int64, ``NO_TURN`` after the last turn of an episode.

    Raises:
        ValueError: a state that is not hashable, or not a text although ``similarity`` is given; a number of episodes
            that is not a multiple of the group size; a similarity outside (0, 1].
    """
    if len(states) % group_size:
        raise ValueError(f"{len(states)} episodes are no multiple of the group size {group_size}.")
    if similarity is not None and not 0.0 < similarity <= 1.0:
        raise ValueError(f"similarity must lie in (0, 1] or be null, got {similarity}.")
    anchors = torch.full((len(states), max(map(len, states), default=0)), NO_TURN, dtype=torch.int64)
    numbered = 0
    for start in range(0, len(states), group_size):
        known: dict[Any, int] = {}  # state -> its number; of similar texts the first
        for row in range(start, start + group_size):
            for turn, state in enumerate(states[row]):
                key = _first_alike(state, known, similarity)
                anchors[row, turn] = known.setdefault(key, numbered + len(known))
        numbered += len(known)
    return anchors


def _first_alike(state: Any, known: dict[Any, int], similarity: float | None) -> Any:
    """The key in ``known`` under which a state is numbered: a state that is equal or similar to it, else itself."""
    try:
        if state in known or similarity is None:
            return state
    except TypeError:
        raise ValueError(f"state {state!r} cannot be hashed: name a state with text, a number or a tuple.") from None
    if not isinstance(state, str):
        raise ValueError(f"state {state!r} is no text, so similarity cannot be measured: leave similarity out.")
    for other in known:
        matcher = SequenceMatcher(None, state, other)
        if matcher.real_quick_ratio() >= similarity and matcher.ratio() >= similarity:
            return other
    return state


def gigpo_advantages(
    rewards: Tensor,
    present: Tensor,
    anchors: Tensor,
    *,
    group_size: int,
    valid: Tensor | None = None,
    step_weight: float = 1.0,
    gamma: float = 1.0,
    norm: TurnNorm = "mean",
    statistics: EpisodeStatistics = "episodes",
    invalid_actions: Tensor | None = None,
    invalid_action_penalty: float = 0.1,
    eps: float = 1e-6,
) -> Tensor:
    """A_t = A_E + w · A_S (GiGPO, arXiv:2505.10978, eq. 8): compares a group's episodes, and turns in equal states.

    A_E = E − mean(E) over the group, E = Σ_t r_t without discount (eq. 3); A_S = R_t − mean(R) over all turns of the
    group that were taken in the same state (eq. 7), R_t the discounted return-to-go. Norm ``mean_std`` divides both
    by their std (ddof 1) + ``eps``. An episode that is alone in its group has A_E = 0, a turn that is alone in its
    state has A_S = 0; without invalid actions each part is also exactly 0 if all values compared are equal. An invalid
    action subtracts ``invalid_action_penalty`` from its turn's R_t and E *after* discounting, so that earlier turns do
    not pay for it: mean and std of E are those before the penalty (after it with ``statistics: steps``), those of R_t
    are after it.

    The authors' code takes mean and std of E over turns, so that long episodes count more (``statistics: steps``); by
    default each episode counts once here. Their code also gives a lone episode its raw score; here A_E is 0.

    Args:
        rewards: (B, K), one per turn.
        present: (B, K) bool, the turns that exist.
        anchors: (B, K) int64, from :func:`anchor_groups`.
        group_size: G; the episodes of one prompt are next to each other.
        valid: (B,) bool, false for episodes whose reward is unknown: they get 0 and are in no mean.
        step_weight: w.
        gamma: discount per turn, in [0, 1].
        norm: ``mean`` subtracts means only; ``mean_std`` also divides by standard deviations.
        statistics: whether mean and std of E are over episodes or over turns.
        invalid_actions: (B, K) bool, turns whose action was invalid.

    Returns:
        (B, K) float64, 0 where there is no turn.

    Raises:
        ValueError: as :func:`returns_to_go`, or a choice that does not exist.
    """
    check_choice("norm", norm, TurnNorm)
    check_choice("statistics", statistics, EpisodeStatistics)
    here = _counted(present, valid).cpu()
    returns = returns_to_go(rewards.cpu(), here, gamma=gamma)
    penalty = torch.zeros_like(returns)
    if invalid_actions is not None:
        penalty = invalid_action_penalty * (invalid_actions.cpu() & here).double()
    step = _relative(returns - penalty, returns - penalty, here, anchors.cpu(), here, norm=norm, eps=eps)
    episode_returns = returns_to_go(rewards.cpu(), here)[:, :1]  # undiscounted
    groups = _group_numbers(here, group_size)
    sample = here.clone()
    if statistics == "episodes":
        sample[:, 1:] = False
    scores = episode_returns.expand_as(returns) - penalty
    compared = scores if statistics == "steps" else episode_returns.expand_as(returns)
    episode = _relative(scores, compared, here, groups, sample, norm=norm, eps=eps)
    return (episode + step_weight * step).to(rewards.device)


def turn_returns(
    rewards: Tensor,
    present: Tensor,
    anchors: Tensor,
    *,
    group_size: int,
    valid: Tensor | None = None,
    gamma: float = 1.0,
    baseline: TurnBaseline = "leave_one_out",
) -> Tensor:
    """A_t = R_t − b(s_t): the return-to-go of a turn minus the mean return of other episodes from the same state.

    b(s) = mean of R over all turns that *other* episodes of the group took in state s; if there are none, the mean of
    the other episodes' returns R_1. It depends only on s_t and on other episodes, not on the action or on the number of
    turns of the own episode, so for γ = 1 the expectation of Σ_t ∇log π(a_t|s_t) · A_t is the policy gradient (for
    γ < 1 that of R_t without the factor γ^t, as usual). ``group_mean`` includes the own episode in both means: less
    variance, but each state's gradient is scaled by a factor that depends on how often the state occurs, which changes
    the direction of the sum.

    Args: as :func:`gigpo_advantages`.

    Returns:
        (B, K) float64, 0 where there is no turn, and for an episode that is alone in its group.

    Raises:
        ValueError: as :func:`returns_to_go`, or a baseline that does not exist.
    """
    check_choice("baseline", baseline, TurnBaseline)
    here = _counted(present, valid).cpu()
    returns = returns_to_go(rewards.cpu(), here, gamma=gamma)
    first = here.clone()
    first[:, 1:] = False
    own = baseline == "group_mean"
    by_state = _mean_of_others(returns, here, anchors.cpu(), here, count_own=own)
    by_episode = _mean_of_others(returns, here, _group_numbers(here, group_size), first, count_own=own)
    expected = torch.where(by_state.isnan(), by_episode, by_state)
    return torch.where(here & ~expected.isnan(), returns - expected, 0.0).to(rewards.device)


def spread_over_tokens(advantages: Tensor, turn_index: Tensor) -> Tensor:
    """The advantage of the turn to which each token belongs.

    Args:
        advantages: (B, K).
        turn_index: (B, T) int64, the turn of each token, ``NO_TURN`` for all other tokens.

    Returns:
        (B, T), 0 at ``NO_TURN``.
    """
    spread = advantages.gather(1, turn_index.clamp(min=0))
    return spread.masked_fill(turn_index == NO_TURN, 0.0)


def _relative(
    values: Tensor, compared: Tensor, here: Tensor, groups: Tensor, sample: Tensor, *, norm: TurnNorm, eps: float
) -> Tensor:
    """(value − mean) / (std + eps) within groups, mean and std (ddof 1) of ``compared`` where ``sample`` is true.

    0 where the group's sample has a single member. If all values of the sample are equal, nothing is divided and the
    mean is that value exactly, without a rounding error. All tensors are (B, K).
    """
    size = int(groups.max()) + 1 if groups.numel() else 0
    members, inside = groups[sample], groups.clamp(min=0)
    low, high = (
        torch.zeros(size, dtype=torch.float64).scatter_reduce(0, members, compared[sample], end, include_self=False)
        for end in ("amin", "amax")
    )
    count = torch.bincount(members, minlength=size)
    mean = torch.bincount(members, weights=compared[sample], minlength=size) / count.clamp(min=1)
    mean = torch.where(low == high, low, mean)
    centred = values - mean[inside]
    if norm == "mean_std":
        squares = (compared - mean[inside])[sample].square()
        variance = torch.bincount(members, weights=squares, minlength=size) / (count - 1).clamp(min=1)
        centred = centred / torch.where(low == high, 1.0, variance.sqrt() + eps)[inside]
    return torch.where(here & (count[inside] > 1), centred, 0.0)


def _mean_of_others(values: Tensor, here: Tensor, groups: Tensor, sample: Tensor, *, count_own: bool) -> Tensor:
    """(B, K): mean of ``values`` over the sampled entries of the same group in other rows; NaN if there are none.

    With ``count_own`` the row's own entries are in the mean as well. The mean of equal values is exactly that value.
    """
    mean = torch.full_like(values, math.nan)
    members: dict[int, list[tuple[int, float]]] = {}
    for row, turn in sample.nonzero().tolist():
        members.setdefault(int(groups[row, turn]), []).append((row, float(values[row, turn])))

    @cache
    def expected(group: int, row: int) -> float:
        others = [value for other, value in members.get(group, ()) if other != row]
        if not others:
            return math.nan
        counted = [value for _, value in members[group]] if count_own else others
        return counted[0] if min(counted) == max(counted) else math.fsum(counted) / len(counted)

    for row, turn in here.nonzero().tolist():
        mean[row, turn] = expected(int(groups[row, turn]), row)
    return mean


def _counted(present: Tensor, valid: Tensor | None) -> Tensor:
    return present if valid is None else present & valid.to(present.device).unsqueeze(1)


def _group_numbers(present: Tensor, group_size: int) -> Tensor:
    """(B, K): the index of the group (prompt) of each episode."""
    if len(present) % group_size:
        raise ValueError(f"{len(present)} episodes are no multiple of the group size {group_size}.")
    return (torch.arange(len(present)) // group_size).unsqueeze(1).expand(present.shape)
