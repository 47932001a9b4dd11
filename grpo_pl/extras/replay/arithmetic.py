"""The advantage of one completion worked out line by line, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_pl.functional import advantages as adv
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.custom import AdvantageEstimator
from grpo_pl.training.experience import Experience

MOST_TERMS = 16
"""Longest sum that is written out."""


@dataclass(frozen=True)
class Line:
    """One line of a calculation."""

    what: str
    sum: str
    """The calculation in numbers; empty where the value is taken from elsewhere."""
    value: float | None


def advantage_lines(
    algorithm: GRPOAlgorithm, experience: Experience, row: int, *, max_completion_length: int
) -> list[Line]:
    """How the objective comes from the rewards of a rollout to the advantage of its completion ``row``, the last
    line."""
    given = float(experience.statistics.advantages.flatten()[experience.first_row + row])
    lines = _lines(algorithm, experience, row, max_completion_length)
    if reason := _left_out(algorithm, experience, row):
        lines.append(Line(f"left out of the loss: {reason}", "", 0.0))
    found = next((line.value for line in reversed(lines) if line.value is not None), None)
    if found is None or not math.isclose(found, given, rel_tol=1e-4, abs_tol=1e-6):
        lines.append(Line("advantage, as the objective's own code gives it", "", given))
    by_token = experience.advantages[row].expand(experience.rollout.action_mask.shape[1])
    by_token = by_token[experience.rollout.action_mask[row]]
    if len(by_token) and not torch.allclose(by_token, torch.full_like(by_token, given)):
        terms = ", ".join(algorithm.active_terms)
        spread = f"{_short(float(by_token.min()))} … {_short(float(by_token.max()))} by token"
        lines.append(Line(f"mean over its tokens, behind the terms {terms}", spread, float(by_token.mean())))
    return lines


def _lines(a: GRPOAlgorithm, experience: Experience, row: int, longest: int) -> list[Line]:
    statistics, size = experience.statistics, experience.rollout.group_size
    p, g = divmod(experience.first_row + row, size)
    if any(term.replaces_rewards for term in a.active_terms.values()):
        return [Line("rewards are replaced by a term of the objective", "", 0.0)]
    values, rewards = experience.values[:, p, g].tolist(), experience.scored.rewards
    if not bool(statistics.valid[p, g]):
        return [Line("no reward has a value: it leaves its group and the loss", "", 0.0)]
    named = [(one.name, value, one.weight) for one, value in zip(rewards, values, strict=True) if value == value]
    lines = [
        Line(
            "reward",
            " + ".join(f"{name} {_short(value)} × {_short(weight)}" for name, value, weight in named),
            float(statistics.rewards[p, g]),
        )
    ]
    shaped, valid = statistics.rewards.double().clone(), statistics.valid
    if a.overlong_buffer > 0:
        length = experience.lengths.double()
        late = adv.overlong_penalty(length, max_completion_length=longest, buffer=a.overlong_buffer)
        shaped = shaped + late
        lines.append(
            Line(f"with the penalty for {int(length[p, g])} tokens", _added(lines, late[p, g]), _at(shaped, p, g))
        )
    if a.kl_in_reward:
        gap = (experience.tokens["old_logprobs"] - experience.tokens["ref_logprobs"]) * experience.rollout.action_mask
        cost = -a.beta * gap.double().sum(dim=1).view(-1, size)
        shaped = shaped + cost
        lines.append(Line(f"with −beta · KL, beta {_short(a.beta)}", _added(lines, cost[p, g]), _at(shaped, p, g)))
    if a.reward_aggregation == "normalize_then_sum":
        return lines + _each_normalized(a, experience, p, g)
    if (greedy := _greedy(experience)) is not None:
        valid = valid & ~greedy.isnan().unsqueeze(1)
    if a.max_rewards:
        shaped = adv.keep_best(shaped, valid)
        lines.append(Line("only the best of the group keep theirs", "", _at(shaped, p, g)))
    if isinstance(a.baseline, AdvantageEstimator) or not bool(valid[p, g]):
        return lines
    lines += _baseline(a.baseline, shaped, valid, greedy, p, g)
    centred = adv.subtract_baseline(shaped, valid, baseline=a.baseline, greedy=greedy)
    return lines + _scaled(a, centred, shaped, valid, experience.lengths, p, g)


def _greedy(experience: Experience) -> Tensor | None:
    """(P,) rewards of the greedy completions, NaN where there is none; None where none was drawn."""
    if experience.greedy is None:
        return None
    values = torch.tensor(experience.greedy.values(), dtype=torch.float64, device=experience.values.device)
    weights = values.new_tensor([reward.weight for reward in experience.scored.rewards])
    rewards, valid = adv.combine_rewards(values, weights)
    return rewards.masked_fill(~valid, math.nan)


def _left_out(a: GRPOAlgorithm, experience: Experience, row: int) -> str:
    """Why a completion that has a reward is not in the loss; empty for one that is."""
    statistics = experience.statistics
    p, g = divmod(experience.first_row + row, experience.rollout.group_size)
    if bool(statistics.keep[p, g]) or not bool(statistics.valid[p, g]):
        return ""
    if a.mask_truncated and bool(experience.truncated[p, g]):
        return "it was cut off"
    greedy = _greedy(experience)
    if greedy is not None and bool(greedy[p].isnan()):
        return "the greedy completion of its prompt has no reward"
    return "it is not right (samples: correct)"


def _baseline(name: str, shaped: Tensor, valid: Tensor, greedy: Tensor | None, p: int, g: int) -> list[Line]:
    """The baseline, and what is left of the reward."""
    mine, group = _at(shaped, p, g), shaped[p][valid[p]].tolist()
    if name == "none":
        return []
    if name == "group_mean":
        what, terms = "mean of the group", group
    elif name == "leave_one_out":
        others = valid[p].clone()
        others[g] = False
        what, terms = "mean of the others", shaped[p][others].tolist()
    elif name == "batch_mean":
        what, terms = "mean of the rollout", shaped[valid].tolist()
    else:
        assert greedy is not None
        what, terms = "reward of the greedy completion", [float(greedy[p])]
    if not terms:
        return [Line("nobody else is in its group", "", 0.0)]
    mean = math.fsum(terms) / len(terms)
    written = f"{_sum(terms)} / {len(terms)}" if len(terms) > 1 else _short(terms[0])
    return [
        Line(what, written, mean),
        Line("reward − baseline", f"{_short(mine)} − {_short(mean)}", mine - mean),
    ]


def _scaled(
    a: GRPOAlgorithm, centred: Tensor, shaped: Tensor, valid: Tensor, lengths: Tensor, p: int, g: int
) -> list[Line]:
    """What the centred reward is divided by, and the quotient."""
    mine, eps = _at(centred, p, g), a.std_eps
    if a.scale == "none":
        return []
    whole = a.scale != "group_std" and a.scale != "group_mean"
    terms = shaped[valid] if whole else shaped[p][valid[p]]
    where = "rollout" if whole else "group"
    if a.scale == "group_mean":
        mean = float(terms.mean())
        quotient = f"{_short(mine)} / {_short(mean)}" if mean > 0 else ""
        return [Line("divided by the mean of the group", quotient, mine / mean if mean > 0 else 0.0)]
    if a.scale != "token_whitening" and bool(adv.all_equal(terms, torch.ones_like(terms).bool(), dim=None)):
        return [Line(f"all rewards of the {where} are equal: nothing tells its completions apart", "", 0.0)]
    if a.scale == "token_whitening":
        counts = (lengths * valid).double()
        mean, std = (float(each) for each in adv.masked_mean_std(centred.double(), counts, dim=None, ddof=a.std_ddof))
        quotient = f"({_short(mine)} − {_short(mean)}) / ({_short(std)} + {_short(eps)})"
        return [
            Line("mean over all tokens of the rollout", "", mean),
            Line("standard deviation over them", "", std),
            Line("whitened", quotient, (mine - mean) / (std + eps)),
        ]
    mean, std = float(terms.mean()), float(terms.std(unbiased=bool(a.std_ddof)))
    squares = " + ".join(f"({_short(one)} − {_short(mean)})²" for one in terms.tolist()[:MOST_TERMS])
    more = " + …" if len(terms) > MOST_TERMS else ""
    divisor = len(terms) - a.std_ddof
    return [
        Line(f"standard deviation of the {where}", f"√(({squares}{more}) / {divisor})", std),
        Line("divided by it", f"{_short(mine)} / ({_short(std)} + {_short(eps)})", mine / (std + eps)),
    ]


def _each_normalized(a: GRPOAlgorithm, experience: Experience, p: int, g: int) -> list[Line]:
    """GDPO: each reward normalised in its group, added, and divided by the standard deviation of the rollout."""
    lines, parts = list[Line](), list[str]()
    valid, rewards = experience.statistics.valid, experience.scored.rewards
    total = torch.zeros_like(experience.values[0])
    for reward, value in zip(rewards, experience.values, strict=True):
        present = ~value.isnan()
        filled = value.nan_to_num(0.0)
        centred = adv.subtract_baseline(filled, present, baseline="group_mean")
        scaled = adv.rescale(
            centred, filled, present, experience.lengths, scale="group_std", ddof=a.std_ddof, eps=a.std_eps
        )
        total = total + reward.weight * scaled
        if bool(present[p, g]):
            terms = filled[p][present[p]]
            mean = float(terms.mean())
            std = float(terms.std(unbiased=bool(a.std_ddof))) if len(terms) > 1 else 0.0
            quotient = f"({_short(_at(filled, p, g))} − {_short(mean)}) / ({_short(std)} + {_short(a.std_eps)})"
            lines.append(Line(f"{reward.name}, normalised in its group", quotient, _at(scaled, p, g)))
            parts.append(f"{_short(_at(scaled, p, g))} × {_short(float(reward.weight))}")
    std = float(total[valid].std(unbiased=bool(a.std_ddof)))
    summed = _at(total, p, g)
    scaled = adv.rescale(total, total, valid, experience.lengths, scale="batch_std", ddof=a.std_ddof, eps=a.std_eps)
    return [
        *lines,
        Line("their sum", " + ".join(parts), summed),
        Line("divided by its standard deviation over the rollout",
             f"{_short(summed)} / ({_short(std)} + {_short(a.std_eps)})", _at(scaled, p, g)),
    ]  # fmt: skip


def _at(values: Tensor, p: int, g: int) -> float:
    return float(values[p, g])


def _added(lines: Sequence[Line], more: Tensor) -> str:
    return f"{_short(lines[-1].value or 0.0)} + {_short(float(more))}"


def _sum(terms: Sequence[float]) -> str:
    shown = " + ".join(map(_short, terms[:MOST_TERMS]))
    return f"({shown}{' + …' if len(terms) > MOST_TERMS else ''})"


def _short(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")
