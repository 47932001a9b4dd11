"""Every preset against a reference written out loop by loop, and what must not change the gradient."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from grpo_pl.config.presets import preset_fields, presets
from grpo_pl.distributed.collective import Collective
from grpo_pl.functional.sampling import row_key
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.base import CollectedTokens, Turns
from grpo_pl.objective.terms.distillation import Distillation
from grpo_pl.objective.terms.hooks import credited, prepared
from tests.losses import loss_of_tokens

P, G, T, MAX_LENGTH = 4, 4, 6, 9


def preset(name: str, **changes) -> GRPOAlgorithm:
    return GRPOAlgorithm(group_size=G, **(preset_fields(name) | changes))


@dataclass(frozen=True)
class Batch:
    """P·G completions with off-policy log-probabilities; one group of equal rewards, one empty completion."""

    rewards: Tensor  # (P, G) of the one reward
    lengths: Tensor  # (P, G)
    logprobs: Tensor  # (B, T)
    old: Tensor  # (B, T)
    ref: Tensor  # (B, T)
    greedy: Tensor  # (P,)
    steps: Tensor  # (B, 3)
    ends: Tensor  # (B, 3)

    @property
    def mask(self) -> Tensor:
        return torch.arange(T) < self.lengths.flatten().unsqueeze(1)

    @property
    def turns(self) -> Tensor:
        """(B, 2) rewards of episodes of two turns."""
        return torch.stack([self.steps[:, 0].nan_to_num(0.0), self.rewards.flatten()], 1)

    @property
    def turn_index(self) -> Tensor:
        """(B, T); the second turn begins at the third token, behind one of an observation."""
        return torch.tensor([0, 0, -1, 1, 1, 1]).expand(P * G, T).masked_fill(~self.mask, -1)


STATES = [("start", "left" if i % 3 else "right") for i in range(P * G)]
"""Where the two actions of each episode are taken."""
INVALID = [(i == 5, i in (6, 14)) for i in range(P * G)]


def make_batch(seed: int = 0, drift: float = 0.3) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 0.25, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0.5]], dtype=torch.float64)
    lengths = torch.randint(1, T + 1, (P, G), generator=generator)
    lengths[0, 1], lengths[1, 0] = 0, T
    old = -normal(P * G, T).abs() - 0.1
    ends = torch.stack([lengths.flatten() // 3, lengths.flatten() // 2, lengths.flatten() - 1], 1)
    steps = normal(P * G, 3).masked_fill(lengths.flatten().unsqueeze(1) == 0, math.nan)
    return Batch(
        rewards=rewards,
        lengths=lengths,
        logprobs=old + drift * normal(P * G, T),
        old=old,
        ref=old + 0.3 * normal(P * G, T),
        greedy=torch.tensor([0.0, 1.0, 0.0, 0.5], dtype=torch.float64),
        steps=steps,
        ends=ends.clamp(min=0),
    )


def token_advantages(algorithm: GRPOAlgorithm, batch: Batch):
    """(Advantages, (B, T) or (B, 1)) as the pipeline would compute them."""
    kl = ((batch.old - batch.ref) * batch.mask).sum(1).view(P, G)
    rewards = (batch.rewards == 1).double() if algorithm.scale == "group_mean" else batch.rewards
    result = algorithm.advantages(
        values=rewards.unsqueeze(0),
        reward_weights=torch.ones(1),
        lengths=batch.lengths,
        truncated=torch.zeros(P, G, dtype=torch.bool),
        correct=batch.rewards == 1 if algorithm.needs.correct else None,
        greedy_values=batch.greedy.unsqueeze(0) if algorithm.needs.greedy_values else None,
        sequence_kl=kl if algorithm.kl_in_reward else None,
        max_completion_length=MAX_LENGTH,
    )
    return result, credited(algorithm.active_terms, collected(algorithm, batch, result)).tokens["advantages"]


def collected(algorithm: GRPOAlgorithm, batch: Batch, result) -> CollectedTokens:
    """What the pipeline has before the first update."""
    turns = Turns(
        rewards=batch.turns,
        present=torch.ones(P * G, 2, dtype=torch.bool),
        states=STATES,
        invalid_actions=torch.tensor(INVALID),
        index=batch.turn_index,
    )
    return CollectedTokens(
        tokens={"advantages": result.advantages.view(-1, 1), "old_logprobs": batch.old},
        kept=batch.mask & result.keep.view(-1, 1),
        step=0,
        ranks=Collective(),
        grouping=algorithm.grouping,
        valid=result.valid.flatten(),
        steps=(batch.steps, batch.ends),
        turns=turns,
    )


def chosen_tokens(algorithm: GRPOAlgorithm, batch: Batch, result) -> Tensor | None:
    """(B, T), as the pipeline would choose them over all kept tokens."""
    return prepared(algorithm.active_terms, collected(algorithm, batch, result)).get("covariance_mask")


def stand_in(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """(B, T), for a divergence: the real one needs distributions, which `tests/functional` have."""
    return (logprobs - teacher).square()


def loss_of(algorithm: GRPOAlgorithm, *, ref: Tensor, **given):
    """The loss of a batch whose teacher is its reference, with all that any preset asks for."""
    nothing = torch.zeros_like(given["logprobs"])  # these completions have one turn
    return loss_of_tokens(algorithm, ref_logprobs=ref, teacher_logprobs=ref, observation_weights=nothing, **given)


def our_gradient(algorithm: GRPOAlgorithm, batch: Batch, parts=None, dtype=torch.float64, skip=True):
    """(loss, gradient), the batch cut into ``parts`` (lists of rows) as micro-batches."""
    result, advantages = token_advantages(algorithm, batch)
    sequences, tokens = result.totals(batch.lengths)
    chosen = chosen_tokens(algorithm, batch, result)
    rows = (result.active if skip else result.keep).flatten()
    leaf = batch.logprobs.to(dtype).requires_grad_()
    total = torch.zeros((), dtype=dtype)
    for part in parts if parts is not None else [list(range(P * G))]:
        index = torch.tensor([i for i in part if rows[i]], dtype=torch.int64)
        width = max(1, int(batch.mask[index].sum(1).max())) if len(index) else 1
        mask = batch.mask[index, :width]
        weights = algorithm.token_weights(
            mask, num_sequences=sequences, num_tokens=tokens, max_completion_length=MAX_LENGTH, dtype=dtype
        )
        old, ref = (tensor.to(dtype)[index, :width] for tensor in (batch.old, batch.ref))
        total = (
            total
            + loss_of(
                algorithm,
                logprobs=leaf[index, :width],
                old_logprobs=old,
                advantages=advantages.to(dtype)[index][:, :width],
                mask=mask,
                weights=weights,
                ref=ref,
                sampling_logprobs=old if algorithm.needs.sampling_logprobs else None,
                covariance_mask=None if chosen is None else chosen[index, :width],
                divergence=stand_in(leaf, batch.ref.to(dtype))[index, :width] if distils_whole(algorithm) else None,
            ).loss
        )
    return total.detach(), torch.autograd.grad(total, leaf)[0]


def distils_whole(algorithm: GRPOAlgorithm) -> bool:
    return algorithm.needs.teacher is not None and algorithm.needs.teacher.whole


WHOLE = ("gkd", "sdft", "opsd", "sdpo")
"""Presets of the divergence to whole distributions, of whichever teacher."""


# --- the reference: one preset after the other, scalar by scalar ------------------------------------------------


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    centre = mean(values)
    return math.sqrt(sum((v - centre) ** 2 for v in values) / (len(values) - 1))


def naive_outcome(name: str, batch: Batch) -> list[list[float]]:
    rewards, lengths = batch.rewards.tolist(), batch.lengths.tolist()
    if name in ("rloo", "remax", "reinforce_plus_plus"):
        beta = {"rloo": 0.05, "remax": 0.05, "reinforce_plus_plus": 0.01}[name]
        for p in range(P):
            for g in range(G):
                i = p * G + g
                rewards[p][g] -= beta * sum((batch.old[i, t] - batch.ref[i, t]).item() for t in range(lengths[p][g]))
    if name == "dapo":  # the last fifth of 9 tokens is above every length here but 6 … 9
        for p in range(P):
            for g in range(G):
                rewards[p][g] -= max(0.0, (lengths[p][g] - 0.8 * MAX_LENGTH) / (0.2 * MAX_LENGTH))
    if name == "rloo":
        return [
            [r - mean([o for j, o in enumerate(group) if j != i]) for i, r in enumerate(group)] for group in rewards
        ]
    if name == "remax":
        return [[r - batch.greedy[p].item() for r in group] for p, group in enumerate(rewards)]
    if name == "reinforce_plus_plus":
        tokens = [
            r
            for group, ns in zip(rewards, lengths, strict=True)
            for r, n in zip(group, ns, strict=True)
            for _ in range(n)
        ]
        return [[(r - mean(tokens)) / (deviation(tokens) + 1e-5) for r in group] for group in rewards]
    if name == "maxrl":
        right = [[float(r == 1) for r in group] for group in rewards]
        return [[(r - mean(group)) / mean(group) for r in group] for group in right]
    scaled = name not in ("dr_grpo", "dppo")
    if name in ("distill", *WHOLE):
        return [[0.0] * G] * P
    return [[(r - mean(g)) / (deviation(g) + 1e-5 if scaled else 1.0) for r in g] for g in rewards]


def naive_process(batch: Batch) -> list[list[float]]:
    table = []
    for p in range(P):
        rows = range(p * G, (p + 1) * G)
        values = [v for i in rows for v in batch.steps[i].tolist() if not math.isnan(v)]
        for i in rows:
            table.append([0.0] * T)
            for v, end in zip(batch.steps[i].tolist(), batch.ends[i].tolist(), strict=True):
                for t in range(T):
                    if not math.isnan(v) and end >= t:
                        table[i][t] += (v - mean(values)) / (deviation(values) + 1e-5)
    return table


def naive_turns(name: str, batch: Batch) -> list[list[float]]:
    """Each token's advantage, one turn after the other."""
    turns, table = batch.turns.tolist(), []
    gamma = 0.95 if name == "gigpo" else 1.0
    returns = [[first + gamma * second, second] for first, second in turns]
    for i, (first, second) in enumerate(turns):
        group = [j for j in range(P * G) if j // G == i // G]
        advantages = []
        for t in range(2):
            alike = [(j, k) for j in group for k in range(2) if STATES[j][k] == STATES[i][t]]
            if name == "gigpo":
                fine = 0.1 * INVALID[i][t]
                episode = first + second - mean([sum(turns[j]) for j in group]) - fine
                step = returns[i][t] - fine - mean([returns[j][k] - 0.1 * INVALID[j][k] for j, k in alike])
                advantages.append(episode + (step if len(alike) > 1 else 0.0))
            else:
                others = [returns[j][k] for j, k in alike if j != i] or [returns[j][0] for j in group if j != i]
                advantages.append(returns[i][t] - mean(others))
        table.append([0.0 if k < 0 else advantages[k] for k in batch.turn_index[i].tolist()])
    return table


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def naive_choice(name: str, batch: Batch, advantage) -> set[tuple[int, int]]:
    """The tokens that Clip-Cov or KL-Cov choose: one, of so few."""
    tokens = [(i, t) for i, n in enumerate(batch.lengths.flatten().tolist()) for t in range(n)]
    lp, a = [batch.old[i, t].item() for i, t in tokens], [advantage[i][t] for i, t in tokens]
    product = [(x - mean(lp)) * (y - mean(a)) for x, y in zip(lp, a, strict=True)]
    if name == "kl_cov":
        return {tokens[max(range(len(tokens)), key=lambda k: product[k])]}
    between = [token for token, c in zip(tokens, product, strict=True) if 1 < c < 5]
    drawn = torch.randperm(len(between), generator=torch.Generator().manual_seed(row_key("covariance", 0)))
    return {between[int(drawn[0])]}


def naive_completion(name: str, advantage, lp: Tensor, old: Tensor, ref: Tensor, chosen=()) -> Tensor:
    """Sum over the tokens of one completion of what its preset minimises; ``advantage`` per token."""
    n = len(lp)
    if name in ("gspo", "luspo"):  # its own gradient: through the whole completion
        ratio = torch.exp((lp - old).mean())
        return -n * clipped(ratio, advantage[0], *((3e-4, 4e-4) if name == "gspo" else (2e-3, 2.5e-3)))
    if name == "vespo":
        k, decay = (2.0, 3.0) if advantage[0] >= 0 else (3.0, 2.0)
        w = math.exp(sum((a - b).item() for a, b in zip(lp, old, strict=True)))
        return -(w**k) * math.exp(decay * (1 - w)) * advantage[0] * lp.sum()
    if name == "gmpo":
        logs = lp - old
        sign = 1.0 if advantage[0] >= 0 else -1.0
        logs = sign * torch.minimum(sign * logs, sign * logs.clamp(-0.4, 0.4))
        return -n * advantage[0] * torch.exp(logs.mean())
    total = torch.zeros((), dtype=torch.float64)
    for t in range(n):
        ratio, a = torch.exp(lp[t] - old[t]), advantage[t]
        if name == "rlsd":
            evidence = math.exp((a > 0) * 1 * (gap := (ref[t] - lp[t]).item()) - (a < 0) * 1 * gap)
            a = a * (0.5 + 0.5 * min(max(evidence, 0.8), 1.2))
        if name in ("distill", "distill_and_reward"):  # the teacher's log-probabilities are those of the reference
            a = a + (ref[t] - lp[t]).item()
        if name == "distill":
            total = total - ratio * a
        elif name in WHOLE:
            total = total + (lp[t] - ref[t]) ** 2
        elif name in ("rloo", "remax"):
            total = total - a * lp[t]
        elif name == "expert_iteration":
            total = total - lp[t]
        elif name == "cispo":
            total = total - min(ratio.item(), 5.0) * a * lp[t]
        elif name in ("clip_cov", "kl_cov"):
            total = total - ratio * a * (name == "kl_cov" or t not in chosen)
            total = total + abs(lp[t] - old[t]) * (name == "kl_cov" and t in chosen)
        elif name == "dppo":
            moved = (torch.exp(lp[t]) - torch.exp(old[t])).item()
            total = total - (0.0 if a * moved > 0 and abs(moved) > 0.15 else ratio * a)
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            total = total - 4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
        else:
            total = total - clipped(ratio, a, 0.2, 0.28 if name == "dapo" else 0.2)
        if name in ("grpo", "grpo_process"):
            total = total + 0.04 * (torch.exp(ref[t] - lp[t]) - 1 - (ref[t] - lp[t]))
        if name == "gigpo":
            total = total + 0.01 * (torch.exp(ref[t] - lp[t]) - 1 - (ref[t] - lp[t]))
    return total


TOKEN_MEAN = (
    *("dapo", "cispo", "reinforce_plus_plus", "expert_iteration", "gigpo", "clip_cov", "kl_cov"),
    *("distill", "gkd", "sdft", "opsd", "vespo"),
)


def naive_gradient(name: str, batch: Batch):
    leaf = batch.logprobs.clone().requires_grad_()
    lengths = batch.lengths.flatten().tolist()
    kept = [i for i in range(P * G) if name != "expert_iteration" or batch.rewards.flatten()[i] == 1]
    if name == "grpo_process":
        advantage = naive_process(batch)
    elif name in ("gigpo", "turn_returns"):
        advantage = naive_turns(name, batch)
    elif name == "expert_iteration":
        advantage = [[0.0] * T] * (P * G)
    else:
        advantage = [[a] * T for group in naive_outcome(name, batch) for a in group]
    chosen = naive_choice(name, batch, advantage) if name in ("clip_cov", "kl_cov") else set()
    total = torch.zeros((), dtype=torch.float64)
    for i in kept:
        n = lengths[i]
        if n == 0:
            continue
        own = [t for row, t in chosen if row == i]
        value = naive_completion(name, advantage[i], leaf[i, :n], batch.old[i, :n], batch.ref[i, :n], own)
        if name in TOKEN_MEAN:
            total = total + value / sum(lengths[j] for j in kept)
        elif name in ("dr_grpo", "rloo", "remax", "turn_returns", "dppo", "maxrl"):
            total = total + value / (len(kept) * MAX_LENGTH)
        elif name == "luspo":
            total = total + value / len(kept)
        else:
            total = total + value / (len(kept) * n)
    return total.detach(), torch.autograd.grad(total, leaf)[0]


@pytest.mark.parametrize("name", presets())
def test_preset_has_the_loss_and_gradient_of_the_reference(name):
    # GSPO's bounds are a thousand times tighter: a smaller drift leaves some completions clipped and others not
    batch = make_batch(drift={"gspo": 6e-4, "luspo": 4e-3}.get(name, 0.3))
    algorithm = preset(name)
    loss, gradient = our_gradient(algorithm, batch)
    expected_loss, expected_gradient = naive_gradient(name, batch)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-13)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-10, abs=1e-13)
    assert gradient.abs().max() > 1e-4
    if algorithm.surrogate in ("clip", "dppo_tv") and not (algorithm.kl_in_loss or algorithm.needs.teacher):
        # both branches were taken
        pushed = batch.mask & (token_advantages(algorithm, batch)[1] != 0)
        assert (gradient[pushed] == 0).any() and (gradient[pushed] != 0).any()


def test_defaults_are_the_preset_grpo():
    assert preset("grpo") == GRPOAlgorithm(group_size=G)


# --- what must not change the gradient --------------------------------------------------------------------------


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


SPLITS = [
    [[i] for i in range(P * G)],
    [[0, 1, 2], list(range(3, 14)), [14], [15]],
    [[15, 2, 9, 4], [8, 0, 13, 6, 11], [10, 3, 12, 5, 14, 7, 1]],
]


@pytest.mark.parametrize("name", presets())
def test_micro_batches_and_their_order_do_not_change_the_gradient(name):
    algorithm, batch = preset(name), make_batch()
    loss, whole = our_gradient(algorithm, batch)
    for split in SPLITS:
        split_loss, parts = our_gradient(algorithm, batch, split)
        assert relative(parts, whole) <= 1e-10
        assert split_loss.item() == pytest.approx(loss.item(), rel=1e-10, abs=1e-12)
    single = our_gradient(algorithm, batch, SPLITS[-1], dtype=torch.float32)[1]
    assert relative(single.double(), whole) <= 1e-5


@pytest.mark.parametrize("name", presets())
def test_skipping_rows_without_advantage_does_not_change_the_gradient(name):
    algorithm, batch = preset(name), make_batch()
    result, _ = token_advantages(algorithm, batch)
    torch.testing.assert_close(our_gradient(algorithm, batch)[1], our_gradient(algorithm, batch, skip=False)[1])
    all_equal = result.active[2]  # the group whose rewards are all 1
    needs_its_rows = (
        algorithm.beta > 0
        or (algorithm.needs.teacher and name != "rlsd")
        or name in ("echo", "kl_cov", "expert_iteration", "grpo_process", "turn_returns")
    )
    # the overlong penalty tells DAPO's completions apart, the greedy completion was worse for ReMax
    if needs_its_rows or name in ("remax",):
        assert all_equal.all()
    elif name != "dapo":
        assert not all_equal.any()


MASKED_CASES = [(name, {}) for name in presets()] + [
    ("grpo", {"kl_estimator": "k2"}),
    ("grpo", {"kl_estimator": "k3_weighted"}),
    ("grpo", {"mismatch": "truncate_sequence", "entropy_coef": 0.1}),
]


@pytest.mark.parametrize(("name", "changes"), MASKED_CASES, ids=str)
def test_what_is_masked_does_not_matter(name, changes):
    algorithm, batch = preset(name, **changes), make_batch()
    result, advantages = token_advantages(algorithm, batch)
    sequences, tokens = result.totals(batch.lengths)
    noise = torch.full((P * G, T), math.nan, dtype=torch.float64)
    noise[::2] = 1e30
    gradients = []
    for dirt in (torch.zeros_like(noise), noise):
        logprobs, old, ref, entropy, drawn, advantage = (
            torch.where(batch.mask, tensor, dirt)
            for tensor in (batch.logprobs, batch.old, batch.ref, -batch.logprobs, 0.9 * batch.old, advantages)
        )
        leaf = logprobs.requires_grad_()
        weights = algorithm.token_weights(
            batch.mask, num_sequences=sequences, num_tokens=tokens, max_completion_length=9, dtype=torch.float64
        )
        output = loss_of(
            algorithm, logprobs=leaf, old_logprobs=old, advantages=advantage, mask=batch.mask, weights=weights, ref=ref,
            entropy=entropy, sampling_logprobs=drawn,
            covariance_mask=chosen_tokens(algorithm, batch, result),
            divergence=torch.where(batch.mask, stand_in(leaf.masked_fill(~batch.mask, 0.0), batch.ref), dirt),
        )  # fmt: skip
        gradients.append(torch.autograd.grad(output.loss, leaf)[0])
        assert all(torch.isfinite(value) for value, _ in output.stats.values())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["grpo_no_kl", "gspo", "gmpo", "dapo"])
def test_order_of_completions_inside_groups_does_not_matter(name):
    algorithm, batch, order = preset(name), make_batch(), [2, 0, 3, 1]
    rows = torch.arange(P * G).view(P, G)[:, order].flatten()
    moved = replace(
        batch,
        rewards=batch.rewards[:, order],
        lengths=batch.lengths[:, order],
        **{name: getattr(batch, name)[rows] for name in ("logprobs", "old", "ref", "steps", "ends")},
    )
    torch.testing.assert_close(our_gradient(algorithm, moved)[1], our_gradient(algorithm, batch)[1][rows])


# --- single choices -----------------------------------------------------------------------------------------------


def call(algorithm: GRPOAlgorithm, values, *, lengths=None, truncated=None, weights=None, **arguments):
    values = torch.as_tensor(values, dtype=torch.float64)
    shape = values.shape[1:]
    return algorithm.advantages(
        values=values,
        reward_weights=torch.ones(len(values)) if weights is None else weights,
        lengths=torch.full(shape, 3) if lengths is None else torch.as_tensor(lengths),
        truncated=torch.zeros(shape, dtype=torch.bool) if truncated is None else torch.as_tensor(truncated),
        **arguments,
    )


def test_a_sample_without_reward_leaves_baseline_loss_and_normaliser():
    nan = math.nan
    algorithm = GRPOAlgorithm(group_size=3, scale="none", beta=0.0)
    result = call(algorithm, [[[1, 0, nan], [nan, nan, nan]]], lengths=[[2, 3, 4], [5, 6, 7]])
    assert result.advantages.tolist() == [[0.5, -0.5, 0], [0, 0, 0]]
    assert result.keep.tolist() == [[True, True, False], [False] * 3]
    assert not result.active[1].any()
    assert result.totals(torch.tensor([[2, 3, 4], [5, 6, 7]])) == (2, 5)
    assert result.totals(torch.tensor([[2, 3, 4], [5, 6, 7]]), rows=torch.tensor([1, 2, 3])) == (1, 3)
    assert result.informative.tolist() == [True, False]


def test_a_group_whose_sums_are_equal_teaches_where_each_reward_is_normalised():
    values = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]]])  # (R, P, G)
    weights = torch.tensor([1.0, 0.5])
    for aggregation, informative in (("sum_then_normalize", [False, True]), ("normalize_then_sum", [True, True])):
        algorithm = GRPOAlgorithm(group_size=2, reward_aggregation=aggregation, beta=0.0)
        assert algorithm.informative_groups(values=values, reward_weights=weights).tolist() == informative
        result = call(algorithm, values, weights=weights)
        assert result.informative.tolist() == (result.advantages != 0).any(dim=1).tolist() == informative


def test_a_prompt_without_greedy_reward_leaves_the_loss():
    algorithm = preset("remax", beta=0.0)
    result = call(algorithm, [[[1.0, 0, 1, 0], [1, 0, 1, 0]]], greedy_values=torch.tensor([[0.0, math.nan]]))
    assert result.advantages.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]
    assert result.keep.tolist() == [[True] * 4, [False] * 4]
    assert result.valid.all()


def test_truncated_completions_leave_the_loss_but_not_the_baseline():
    algorithm = GRPOAlgorithm(group_size=2, scale="none", beta=0.0, mask_truncated=True)
    result = call(algorithm, [[[1, 0]]], truncated=[[False, True]])
    assert result.advantages.tolist() == [[0.5, 0]]
    assert result.keep.tolist() == [[True, False]]


def test_only_correct_completions_are_kept():
    result = call(preset("expert_iteration"), [[[1, 0.5, 1, 0]]], correct=torch.tensor([[True, False, True, False]]))
    assert result.keep.tolist() == [[True, False, True, False]]
    assert torch.equal(result.active, result.keep)


def test_with_the_teacher_alone_every_completion_is_learned_from_whatever_its_reward():
    algorithm = preset("distill", mask_truncated=True)
    values = [[[1.0, math.nan, 0.0, math.nan], [math.nan] * 4]]
    cut = torch.tensor([[False] * 4, [False, False, False, True]])
    result = call(algorithm, values, lengths=[[3, 2, 0, 1], [1, 1, 1, 9]], truncated=cut)
    assert not result.advantages.any()
    assert result.keep.tolist() == [[True] * 4, [True, True, True, False]]
    assert result.active.tolist() == [[True, True, False, True], [True, True, True, False]]
    assert result.valid.tolist() == [[True, False, True, False], [False] * 4]
    assert result.informative.all()
    assert result.rewards[0, 0] == 1


def test_max_rewards():
    algorithm = GRPOAlgorithm(group_size=3, max_rewards=True, baseline="none", scale="none", beta=0.0)
    assert call(algorithm, [[[1, 3, 3], [0, 0, 2]]]).advantages.tolist() == [[0, 3, 3], [0, 0, 2]]


def test_empty_completions_count_as_sequences_but_are_not_forwarded():
    algorithm = GRPOAlgorithm(group_size=2, beta=0.0)
    result = call(algorithm, [[[1, 0]]], lengths=[[0, 3]])
    assert result.keep.all()
    assert result.active.tolist() == [[False, True]]
    assert result.totals(torch.tensor([[0, 3]])) == (2, 3)


def test_rewards_are_reported_without_penalties():
    algorithm = GRPOAlgorithm(group_size=2, overlong_buffer=0.5, scale="none", beta=0.0)
    result = call(algorithm, [[[1, 1]]], lengths=[[4, 8]], max_completion_length=8)
    assert result.rewards.tolist() == [[1, 1]]
    assert result.advantages.tolist() == [[0.5, -0.5]]
    assert result.informative.tolist() == [False]


def test_zero_advantage_is_forwarded_when_another_term_needs_it():
    for changes in ({"beta": 0.1}, {"entropy_coef": 0.1}, {"skip_zero_advantage": False}):
        algorithm = GRPOAlgorithm(**({"group_size": 2, "beta": 0.0} | changes))
        assert call(algorithm, [[[1, 1]]]).active.all(), changes
    assert not call(GRPOAlgorithm(group_size=2, beta=0.0), [[[1, 1]]]).active.any()


def test_needs():
    grpo = preset("grpo")
    assert grpo.needs.ref_logprobs and grpo.kl_in_loss and not grpo.kl_in_reward
    assert grpo.single_update and not grpo.needs.old_logprobs
    assert not preset("grpo_no_kl").needs.ref_logprobs
    assert not replace(grpo, num_iterations=2).single_update
    assert replace(grpo, num_minibatches=2).needs.old_logprobs
    rloo = preset("rloo")
    assert (
        rloo.needs.reference
        and not rloo.needs.ref_logprobs
        and rloo.kl_in_reward
        and rloo.needs.old_logprobs
        and not rloo.kl_in_loss
    )
    assert preset("remax").needs.greedy_values
    assert preset("expert_iteration").needs.correct
    assert replace(grpo, entropy_coef=0.1).needs.entropy
    assert replace(grpo, mismatch="mask_token").needs.sampling_logprobs
    dppo = replace(preset("dppo"), num_iterations=4)
    assert dppo.needs.sampling_logprobs and not dppo.needs.old_logprobs  # nothing is scored before the first update


def test_token_level_losses_may_be_computed_from_a_flat_list_of_tokens():
    for name in presets():
        algorithm, batch = preset(name), make_batch()
        if algorithm.ratio_level != "token" or name == "vespo":
            continue
        result, advantages = token_advantages(algorithm, batch)
        sequences, tokens = result.totals(batch.lengths)
        weights = algorithm.token_weights(
            batch.mask,
            num_sequences=sequences,
            num_tokens=tokens,
            max_completion_length=MAX_LENGTH,
            dtype=torch.float64,
        )
        keep = batch.mask & result.keep.view(-1, 1)
        chosen = chosen_tokens(algorithm, batch, result)
        given = (batch.logprobs, batch.old, advantages, weights, batch.ref)
        logprobs, old, advantages, weights, ref = (x.expand(P * G, T)[keep].unsqueeze(0) for x in given)
        loss = loss_of(
            algorithm, logprobs=logprobs, old_logprobs=old, advantages=advantages, ref=ref, weights=weights,
            mask=torch.ones_like(old, dtype=torch.bool), sampling_logprobs=old, divergence=stand_in(logprobs, ref),
            covariance_mask=None if chosen is None else chosen[keep].unsqueeze(0),
        ).loss  # fmt: skip
        assert loss.item() == pytest.approx(our_gradient(algorithm, batch)[0].item(), rel=1e-10), name


def one_token(algorithm: GRPOAlgorithm, **arguments):
    given = {
        "logprobs": torch.tensor([[-1.0]], requires_grad=True),
        "old_logprobs": None,
        "advantages": torch.tensor([[2.0]]),
        "mask": torch.tensor([[True]]),
        "weights": torch.tensor([[0.5]]),
    }
    return loss_of_tokens(algorithm, **(given | arguments))


def test_entropy_bonus_is_part_of_the_loss():
    entropy = torch.tensor([[3.0]], requires_grad=True)
    output = one_token(GRPOAlgorithm(beta=0.0, entropy_coef=0.1), entropy=entropy)
    assert output.loss.item() == pytest.approx(0.5 * (-2.0 - 0.1 * 3.0))
    output.loss.backward()
    assert entropy.grad.item() == pytest.approx(-0.05)


def test_mismatch_weighs_the_policy_term():
    algorithm = GRPOAlgorithm(beta=0.0, mismatch="truncate_token", mismatch_max=1.5)
    output = one_token(algorithm, sampling_logprobs=torch.tensor([[-2.0]]))  # pi_old / pi_sampling = e, cut to 1.5
    assert output.loss.item() == pytest.approx(0.5 * 1.5 * -2.0)
    assert output.stats["sampling/importance_sampling_ratio/mean"][0].item() == pytest.approx(1.5)
    assert output.stats["sampling/sampling_logp_difference/mean"][0].item() == pytest.approx(1.0)


def test_only_samples_of_earlier_weights_are_weighted_by_default():
    chosen = {mode: GRPOAlgorithm(mismatch=mode, beta=0.0) for mode in ("auto", "none", "mask_token")}
    assert {mode: a.for_stale_samples(True).mismatch for mode, a in chosen.items()} == {
        "auto": "in_ratio",
        "none": "none",
        "mask_token": "mask_token",
    }
    assert chosen["auto"].for_stale_samples(False).mismatch == "none"
    assert not chosen["auto"].needs.sampling_logprobs  # also where nobody says how old they are
    output = one_token(chosen["auto"], sampling_logprobs=torch.tensor([[-2.0]]))
    assert output.loss == one_token(chosen["none"]).loss
    no_ratio = GRPOAlgorithm(surrogate="reinforce", beta=0.0).for_stale_samples(True)
    assert no_ratio.mismatch == "truncate_token"


@pytest.mark.parametrize(("drawn", "ratio"), [(-1.1, math.exp(0.1)), (-2.0, 1.2), (-0.5, math.exp(-0.5))])
def test_a_ratio_to_the_policy_that_drew_the_token_is_clipped_like_any_other(drawn, ratio):
    algorithm = GRPOAlgorithm(beta=0.0, mismatch="in_ratio", num_iterations=2)
    assert algorithm.needs.sampling_logprobs and not algorithm.needs.old_logprobs
    output = one_token(algorithm, old_logprobs=torch.tensor([[-7.0]]), sampling_logprobs=torch.tensor([[drawn]]))
    assert output.loss.item() == pytest.approx(0.5 * ratio * -2.0)
    assert output.stats["clip_ratio/high_mean"][0].item() == float(drawn == -2.0)
    assert output.stats["sampling/sampling_logp_difference/mean"][0].item() == pytest.approx(abs(-1.0 - drawn))


def test_dppo_takes_its_ratio_to_the_policy_that_drew_the_token():
    dppo = preset("dppo").for_stale_samples(True)
    assert (dppo.mismatch, dppo.correction) == ("none", "dppo_tv")  # the ratio has corrected for it
    assert preset("grpo").for_stale_samples(True).correction == "clip"
    output = one_token(dppo, old_logprobs=torch.tensor([[-1.0]]), sampling_logprobs=torch.tensor([[-1.2]]))
    assert output.loss.item() == pytest.approx(0.5 * -2.0 * math.exp(0.2))
    assert output.stats["ratio/mean"][0].item() == pytest.approx(math.exp(0.2))
    assert "sampling/importance_sampling_ratio/mean" not in output.stats


def test_dppo_counts_the_tokens_that_it_masks():
    drawn, now = torch.tensor([[0.5, 0.5, 0.1, 0.5]]), torch.tensor([[0.7, 0.3, 0.2, 0.7]])
    output = one_token(
        preset("dppo"),
        logprobs=now.log(),
        sampling_logprobs=drawn.log(),
        advantages=torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
        mask=torch.ones(1, 4, dtype=torch.bool),
        weights=torch.ones(1, 4),
    )
    sums = {name: value.item() for name, (value, _) in output.stats.items()}
    assert sums["clip_ratio/high_mean"] == sums["clip_ratio/low_mean"] == 1
    assert sums["clip_ratio/region_mean"] == 2
    assert output.loss.item() == pytest.approx(
        -(0.2 / 0.1) + 0.7 / 0.5
    )  # what stays: a rare token, and one called back


def expected_gradient(algorithm, drawn_from, tokens: int):
    """Gradient of the expected loss at a table of logits, over all completions of so many tokens out of 3, where they
    are drawn from another table (contexts, 3), or from the same one where that is None."""
    torch.manual_seed(1)
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)  # after nothing, and after each token
    completions = torch.tensor(list(itertools.product(range(3), repeat=tokens)))  # (N, T)
    contexts = torch.cat([torch.zeros(len(completions), 1, dtype=torch.int64), completions[:, :-1] + 1], dim=1)

    def logprobs(table):
        return table.log_softmax(-1)[contexts, completions]

    drawn = logprobs(logits.detach() if drawn_from is None else drawn_from)
    rewards = torch.linspace(-1.0, 2.0, len(completions), dtype=torch.float64) ** 3
    output = loss_of_tokens(
        algorithm,
        logprobs=logprobs(logits),
        old_logprobs=None,
        advantages=rewards.unsqueeze(1),
        mask=torch.ones_like(completions, dtype=torch.bool),
        weights=drawn.sum(1, keepdim=True).exp().expand_as(drawn),  # how often each completion is drawn
        sampling_logprobs=drawn,
    )
    return torch.autograd.grad(output.loss, logits)[0]


@pytest.mark.parametrize(
    ("mode", "tokens"), [("truncate_token", 1), ("truncate_sequence", 1), ("truncate_sequence", 2)]
)
def test_samples_of_earlier_weights_have_the_gradient_of_fresh_ones_where_nothing_is_cut(mode, tokens):
    torch.manual_seed(0)
    earlier = torch.randn(4, 3, dtype=torch.float64)
    fresh = expected_gradient(GRPOAlgorithm(beta=0.0, mismatch="none"), None, tokens)
    stale = expected_gradient(GRPOAlgorithm(beta=0.0, mismatch=mode, mismatch_max=1e9), earlier, tokens)
    uncorrected = expected_gradient(GRPOAlgorithm(beta=0.0, mismatch="none"), earlier, tokens)
    in_ratio = GRPOAlgorithm(beta=0.0, mismatch="in_ratio", ratio_level="token", surrogate="unclipped")
    assert torch.allclose(stale, fresh, rtol=1e-9, atol=1e-12)
    assert tokens > 1 or torch.allclose(expected_gradient(in_ratio, earlier, tokens), fresh, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(uncorrected, fresh, rtol=1e-2)


@pytest.mark.parametrize(
    ("mode", "cut"), [("truncate_token", 1), ("mask_token", 2), ("reject_geometric", 0), ("seq_mask_tis", 0)]
)
def test_the_share_of_tokens_whose_weight_is_cut_is_measured(mode, cut):
    algorithm = GRPOAlgorithm(beta=0.0, mismatch=mode, mismatch_min=0.5, mismatch_max=2.0)
    output = one_token(
        algorithm,
        logprobs=torch.full((1, 3), -1.0),
        sampling_logprobs=-1.0 - torch.tensor([[1.5, 3.0, 0.1]]).log(),
        mask=torch.ones(1, 3, dtype=torch.bool),
        weights=torch.ones(1, 3),
    )
    total, count = output.stats["sampling/importance_sampling_ratio/cut_ratio"]
    assert (total.item(), count.item()) == (cut, 3)


def test_no_ratio_without_update_means_policy_gradient():
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    output = one_token(GRPOAlgorithm(beta=0.0), logprobs=logprobs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-1.0)
    assert logprobs.grad.item() == pytest.approx(-1.0)  # w · A


def test_metrics_are_sums_over_tokens():
    algorithm = GRPOAlgorithm(beta=1.0, kl_estimator="k2")
    logprobs = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    old = torch.tensor([[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]])
    mask = torch.tensor([[True] * 3, [True, True, False]])
    output = loss_of_tokens(
        algorithm,
        logprobs=logprobs, old_logprobs=old, advantages=torch.tensor([[1.0], [-1.0]]), mask=mask,
        weights=mask.float(), ref_logprobs=torch.full((2, 3), -2.0), entropy=torch.ones(2, 3),
    )  # fmt: skip
    sums = {name: (value.item(), count.item()) for name, (value, count) in output.stats.items()}
    assert sums["kl"] == (pytest.approx(5 * 2.0), 5)
    assert sums["entropy"] == (5, 5)
    assert sums["clip_ratio/high_mean"] == (1, 5)  # row 0: A > 0, ratio e
    assert sums["clip_ratio/low_mean"] == (1, 5)  # row 1: A < 0, ratio 1/e
    assert sums["clip_ratio/region_mean"] == (2, 5)
    assert sums["ratio/mean"] == (pytest.approx(2 * math.e + 2 / math.e + 1), 5)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "values", "arguments", "match"),
    [
        (GRPOAlgorithm(group_size=2), [[[1, math.inf]]], {}, "infinite"),
        (GRPOAlgorithm(group_size=4), [[[1, 0]]], {}, "group_size = 4"),
        (GRPOAlgorithm(group_size=2), [[[1, 0]]], {"lengths": [[1, 2], [3, 4]]}, "lengths"),
        (preset("remax", beta=0.0), [[[1, 0, 0, 1]]], {}, "greedy_values"),
        (preset("expert_iteration"), [[[1, 0, 0, 1]]], {}, "correct"),
        (preset("rloo"), [[[1, 0, 0, 1]]], {}, "sequence_kl"),
        (preset("rloo"), [[[1, 0, 0, 1]]], {"sequence_kl": torch.tensor([[0.0, math.nan, 0, 0]])}, "finite"),
        (preset("dapo"), [[[1, 0, 0, 1]]], {}, "max_completion"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_advantages_cannot_be_made_of_is_named(algorithm, values, arguments, match):
    with pytest.raises(ValueError, match=match):
        call(algorithm, values, **arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"beta": 0.1}, "ref_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
        ({"mismatch": "mask_token"}, "sampling_logprobs"),
        ({"off_policy_mask": 0.5}, "sampling_logprobs"),
        ({"surrogate": "dppo_tv"}, "sampling_logprobs"),
        ({"terms": {"distillation": Distillation()}}, "teacher_logprobs"),
        ({"terms": {"distillation": Distillation(divergence="forward_kl")}}, "divergence"),
    ],
)
def test_missing_arguments_of_the_loss_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        one_token(GRPOAlgorithm(**({"beta": 0.0} | changes)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probabilities_are_refused(dtype):
    with pytest.raises(ValueError, match="float32"):
        one_token(GRPOAlgorithm(beta=0.0), logprobs=torch.tensor([[-1.0]], dtype=dtype))


def test_a_micro_batch_without_any_token_has_a_zero_loss_with_a_gradient():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    output = one_token(GRPOAlgorithm(beta=0.0), logprobs=logprobs, mask=nothing, weights=torch.zeros(1, 2))
    output.loss.backward()
    assert output.loss == 0
    assert (logprobs.grad == 0).all()
