"""Every completion and every group of a tiny language is enumerated, so expected gradients are exact, not sampled.

The language: tokens 0 and 1, token 2 ends; at most three tokens; two prompts. The policy is a table of logits.
"""

import itertools

import pytest
import torch

from grpo_pl.functional.divergence import divergence
from grpo_pl.functional.losses import LossOutput
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.distillation import Distillation
from tests.losses import loss_of_tokens

V, T, END = 3, 3, 2
MAX_LENGTH = 7  # the constant divisor: neither the padded width nor any length
TRAJECTORIES = [
    *([END],),
    *([a, END] for a in range(END)),
    *([a, b, c] for a in range(END) for b in range(END) for c in range(V)),
]
PREFIXES = [(), *((a,) for a in range(END)), *((a, b) for a in range(END) for b in range(END))]
IDS = torch.tensor([t + [0] * (T - len(t)) for t in TRAJECTORIES])  # (n, T)
MASK = torch.tensor([[i < len(t) for i in range(T)] for t in TRAJECTORIES])
STATE = torch.tensor([[PREFIXES.index(tuple(t[:i])) if i < len(t) else 0 for i in range(T)] for t in TRAJECTORIES])
REWARD = torch.stack(
    [
        torch.tensor([float(t == [0, END]) for t in TRAJECTORIES]),  # rare
        torch.tensor([float(t[0] == 1 or len(t) == 3) for t in TRAJECTORIES]),  # common
    ]
).double()  # (prompt, n)


def table(seed: int) -> torch.Tensor:
    """Logits (prompt, prefix, token)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, len(PREFIXES), V, generator=generator, dtype=torch.float64)


def trajectory_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """(n, T) for one prompt's logits (prefix, token)."""
    return logits.log_softmax(-1)[STATE, IDS]


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    return trajectory_logprobs(logits).masked_fill(~MASK, 0.0).sum(1).exp()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def expected_gradient(logits: torch.Tensor, *, prompts=(0, 1), group_size=3, **choices) -> torch.Tensor:
    """E[−∇loss] over all groups, computed by the code under test: one long batch weighted by probability."""
    algorithm = GRPOAlgorithm(group_size=group_size, surrogate="unclipped", beta=0.0, std_eps=0.0, **choices)
    groups = torch.tensor(list(itertools.product(range(len(TRAJECTORIES)), repeat=group_size)))  # (P, G)
    leaf = logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for prompt in prompts:
        rows = groups.flatten()
        result = algorithm.advantages(
            values=REWARD[prompt][groups].unsqueeze(0),
            reward_weights=torch.ones(1),
            lengths=MASK.sum(1)[groups],
            truncated=torch.zeros_like(groups, dtype=torch.bool),
        )
        chance = probabilities(logits[prompt])[groups].prod(1).repeat_interleave(group_size)
        weights = algorithm.token_weights(
            MASK[rows],
            num_sequences=group_size * len(prompts),
            num_tokens=1,
            max_completion_length=MAX_LENGTH,
            dtype=torch.float64,
        )
        total = (
            total
            + loss_of_tokens(
                algorithm,
                logprobs=trajectory_logprobs(leaf[prompt])[rows],
                old_logprobs=None,
                advantages=result.advantages.view(-1, 1),
                mask=MASK[rows],
                weights=weights * chance.unsqueeze(1),
            ).loss
        )
    return -torch.autograd.grad(total, leaf)[0]


def true_policy_gradient(logits: torch.Tensor, prompts=(0, 1)) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    value = sum((probabilities(leaf[p]) * REWARD[p]).sum() for p in prompts) / len(prompts)
    return torch.autograd.grad(value / MAX_LENGTH, leaf)[0]


def test_all_completions_are_enumerated():
    logits = table(0)
    assert len(TRAJECTORIES) == 15
    for prompt in range(2):
        assert probabilities(logits[prompt]).sum().item() == pytest.approx(1)
    rates = [(probabilities(logits[p]) * REWARD[p]).sum().item() for p in range(2)]
    assert abs(rates[0] - rates[1]) > 0.2  # two prompts of different pass rate


@pytest.mark.parametrize("baseline", ["leave_one_out", "none"])
def test_leave_one_out_and_no_baseline_are_the_policy_gradient(baseline):
    gradient = expected_gradient(table(0), baseline=baseline, scale="none", aggregation="constant")
    torch.testing.assert_close(gradient, true_policy_gradient(table(0)), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("group_size", [2, 3])
def test_group_mean_shortens_the_policy_gradient_by_one_sample(group_size):
    choices = {"baseline": "group_mean", "scale": "none", "aggregation": "constant"}
    gradient = expected_gradient(table(0), group_size=group_size, **choices)
    expected = (group_size - 1) / group_size * true_policy_gradient(table(0))
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def test_dividing_by_the_group_std_turns_the_gradient():
    # of fewer than four binary rewards every informative group has the same std, which only changes length
    choices = {"baseline": "group_mean", "scale": "group_std", "aggregation": "constant", "group_size": 4}
    assert cosine(expected_gradient(table(1), **choices), true_policy_gradient(table(1))) < 0.99995  # exact sums


def test_with_one_prompt_and_binary_rewards_the_scaled_gradient_is_parallel():
    # it reweighs prompts against each other: one prompt alone only changes length
    choices = {"baseline": "group_mean", "scale": "group_std", "aggregation": "constant", "group_size": 4}
    gradient = expected_gradient(table(1), prompts=(1,), **choices)
    assert cosine(gradient, true_policy_gradient(table(1), prompts=(1,))) == pytest.approx(1, abs=1e-12)


def test_the_mean_over_each_completion_turns_the_gradient_even_with_leave_one_out():
    choices = {"baseline": "leave_one_out", "scale": "none", "aggregation": "sequence_mean"}
    assert cosine(expected_gradient(table(0), **choices), true_policy_gradient(table(0))) < 0.999


@pytest.mark.parametrize(("baseline", "group_size", "order"), [("none", 3, 3), ("group_mean", 3, 2), ("none", 1, 1)])
def test_dividing_by_the_success_rate_climbs_the_truncated_log_likelihood(baseline, group_size, order):
    """MaxRL: log p = -Σ_k (1 - p)^k / k, cut off after as many terms as there are completions, less one for the
    baseline; one term is the policy gradient."""
    leaf = table(0).requires_grad_()
    rates = [(probabilities(leaf[p]) * REWARD[p]).sum() for p in range(2)]
    value = sum(-((1 - rate) ** k) / k for rate in rates for k in range(1, order + 1)) / 2
    expected = torch.autograd.grad(value / MAX_LENGTH, leaf)[0]
    choices = {"baseline": baseline, "scale": "group_mean", "aggregation": "constant", "group_size": group_size}
    torch.testing.assert_close(expected_gradient(table(0), **choices), expected, rtol=1e-10, atol=1e-14)


# --- KL: what each estimator's gradient descends ------------------------------------------------------------


def sequence_kl(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """KL(π‖ref) between the distributions of whole completions."""
    log_pi = trajectory_logprobs(logits).masked_fill(~MASK, 0.0).sum(1)
    log_ref = trajectory_logprobs(ref).masked_fill(~MASK, 0.0).sum(1)
    return (log_pi.exp() * (log_pi - log_ref)).sum()


def prefix_kl(
    logits: torch.Tensor, ref: torch.Tensor, *, reverse: bool, drawn_by: torch.Tensor | None = None
) -> torch.Tensor:
    """Σ over prefixes of their (frozen) probability × KL of the next-token distributions."""
    log_pi, log_ref = logits.log_softmax(-1), ref.log_softmax(-1)
    first, second = (log_ref, log_pi) if reverse else (log_pi, log_ref)
    per_prefix = (first.exp() * (first - second)).sum(-1)  # (prefix,)
    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    chance = probabilities(logits.detach() if drawn_by is None else drawn_by)
    visits.index_add_(0, STATE[MASK], chance.unsqueeze(1).expand_as(MASK)[MASK])
    return (visits * per_prefix).sum()


def loss_of(algorithm: GRPOAlgorithm, leaf: torch.Tensor, drawn_by: torch.Tensor, **given) -> LossOutput:
    """The loss without any reward over all completions, as often as they are drawn, without any division by length."""
    weights = algorithm.token_weights(MASK, num_sequences=1, num_tokens=1, max_completion_length=1, dtype=torch.float64)
    return loss_of_tokens(
        algorithm,
        logprobs=trajectory_logprobs(leaf),
        advantages=torch.zeros(len(IDS), 1),
        mask=MASK,
        weights=weights * probabilities(drawn_by).unsqueeze(1),
        **{"old_logprobs": None, **given},
    )


def loss_gradient(estimator: str, logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """E[∇loss] of the KL term alone."""
    algorithm = GRPOAlgorithm(beta=1.0, kl_estimator=estimator, aggregation="constant")
    leaf = logits.clone().requires_grad_()
    output = loss_of(algorithm, leaf, logits, ref_logprobs=trajectory_logprobs(ref))
    return torch.autograd.grad(output.loss, leaf)[0]


def gradient_of(function, logits: torch.Tensor, ref: torch.Tensor, **choices) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    return torch.autograd.grad(function(leaf, ref, **choices), leaf)[0]


def test_k1_in_the_reward_descends_the_kl_of_the_sequence():
    logits, ref = table(0)[0], table(1)[0]
    algorithm = GRPOAlgorithm(
        group_size=2, baseline="leave_one_out", scale="none", surrogate="reinforce", aggregation="constant",
        beta=1.0, kl_estimator="k1", kl_placement="reward",
    )  # fmt: skip
    groups = torch.tensor(list(itertools.product(range(len(IDS)), repeat=2)))
    log_pi, log_ref = trajectory_logprobs(logits), trajectory_logprobs(ref)
    result = algorithm.advantages(
        values=torch.zeros(1, *groups.shape, dtype=torch.float64),
        reward_weights=torch.ones(1),
        lengths=MASK.sum(1)[groups],
        truncated=torch.zeros_like(groups, dtype=torch.bool),
        sequence_kl=(log_pi - log_ref).masked_fill(~MASK, 0.0).sum(1)[groups],
    )
    leaf, rows = logits.clone().requires_grad_(), groups.flatten()
    chance = probabilities(logits)[groups].prod(1).repeat_interleave(2)
    weights = algorithm.token_weights(
        MASK[rows], num_sequences=2, num_tokens=1, max_completion_length=1, dtype=torch.float64
    )
    loss = loss_of_tokens(
        algorithm,
        logprobs=trajectory_logprobs(leaf)[rows], old_logprobs=None, advantages=result.advantages.view(-1, 1),
        mask=MASK[rows], weights=weights * chance.unsqueeze(1), ref_logprobs=log_ref[rows],
    ).loss  # fmt: skip
    gradient = torch.autograd.grad(loss, leaf)[0]
    torch.testing.assert_close(gradient, gradient_of(sequence_kl, logits, ref), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("estimator", ["k2", "k3_weighted"])
def test_k2_and_weighted_k3_descend_the_kl_of_each_prefix(estimator):
    logits, ref = table(0)[0], table(1)[0]
    expected = gradient_of(prefix_kl, logits, ref, reverse=False)
    torch.testing.assert_close(loss_gradient(estimator, logits, ref), expected, rtol=1e-10, atol=1e-13)


def test_plain_k3_descends_the_reversed_kl_of_each_prefix():
    logits, ref = table(0)[0], table(1)[0]
    gradient = loss_gradient("k3", logits, ref)
    torch.testing.assert_close(gradient, gradient_of(prefix_kl, logits, ref, reverse=True), rtol=1e-10, atol=1e-13)
    assert cosine(gradient, gradient_of(prefix_kl, logits, ref, reverse=False)) < 0.999


def test_k1_in_the_loss_has_no_expected_gradient():
    logits, ref = table(0)[0], table(1)[0]
    assert loss_gradient("k1", logits, ref).abs().max().item() < 1e-14


# --- a teacher ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_a_teacher_of_tokens_descends_the_kl_to_the_teacher_of_each_prefix(earlier, coef):
    """Also where an earlier policy drew the tokens: then over the prefixes that this one visits."""
    now, teacher = table(0)[0], table(1)[0]
    old = table(2)[0] if earlier else now
    algorithm = GRPOAlgorithm(
        group_size=1, terms={"teacher": Distillation(alone=True, coef=coef)}, baseline="none",
        scale="none", surrogate="unclipped", aggregation="constant", beta=0.0,
    )  # fmt: skip
    leaf, taught = now.clone().requires_grad_(), trajectory_logprobs(teacher)
    found = loss_of(algorithm, leaf, old, old_logprobs=trajectory_logprobs(old), teacher_logprobs=taught)
    gradient = torch.autograd.grad(found.loss, leaf)[0]
    expected = coef * gradient_of(prefix_kl, now, teacher, reverse=False, drawn_by=old)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)
    assert expected.abs().max() > 1e-3
    if not earlier:  # and what is logged is its estimate, token by token
        value, count = found.stats["teacher/kl"]
        gaps = trajectory_logprobs(now) - trajectory_logprobs(teacher)
        assert (value.item(), count.item()) == (pytest.approx(gaps[MASK].sum().item()), MASK.sum().item())


@pytest.mark.parametrize(("distillation", "mix"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jensen_shannon", 0.2)])
def test_distillation_descends_the_divergence_of_each_prefix_without_a_reward(distillation, mix):
    now, teacher = table(0)[0], table(1)[0]
    term = Distillation(divergence=distillation, mix=0.2, alone=True, coef=2.0)
    algorithm = GRPOAlgorithm(
        group_size=1, terms={"teacher": term}, baseline="none", scale="none", aggregation="constant", beta=0.0,
    )  # fmt: skip
    assert term.needs.teacher is not None and term.needs.teacher.mix == mix
    leaf = now.clone().requires_grad_()
    per_state = divergence(leaf.log_softmax(-1), teacher.log_softmax(-1), mix=mix)
    found = loss_of(algorithm, leaf, now, divergence=per_state[STATE])
    gradient = torch.autograd.grad(found.loss, leaf)[0]
    if distillation == "jensen_shannon":
        visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
        visits.index_add_(0, STATE[MASK], probabilities(now).unsqueeze(1).expand_as(MASK)[MASK])
        other = now.clone().requires_grad_()
        s, t = other.softmax(-1), teacher.softmax(-1)
        m = 0.2 * t + 0.8 * s
        written_out = 0.2 * (t * (t / m).log()).sum(-1) + 0.8 * (s * (s / m).log()).sum(-1)
        expected = torch.autograd.grad((visits * written_out).sum(), other)[0]
    else:
        expected = gradient_of(prefix_kl, now, teacher, reverse=distillation == "forward_kl")
    torch.testing.assert_close(gradient, 2 * expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("mismatch", "tokens"), [("truncate_sequence", T), ("truncate_token", 1)])
def test_weighted_samples_of_earlier_weights_have_the_gradient_of_new_ones(mismatch, tokens):
    """Per sequence for all lengths, per token for completions of one: there the two are the same. Nothing is scored
    twice: the update's own log-probabilities are the old ones."""
    now, earlier = table(0)[0], table(1)[0]
    mask = MASK & (torch.arange(T) < tokens)
    rewards = REWARD[0] if tokens == T else (IDS[:, 0] == 1).double()

    def gradient(drawn_from, **choices):
        leaf = now.clone().requires_grad_()
        found = loss_of_tokens(
            GRPOAlgorithm(group_size=2, beta=0.0, **choices),
            logprobs=trajectory_logprobs(leaf),
            old_logprobs=None,
            advantages=rewards.unsqueeze(1),
            mask=mask,
            weights=probabilities(drawn_from).unsqueeze(1) * mask,
            sampling_logprobs=trajectory_logprobs(drawn_from),
        )
        return torch.autograd.grad(found.loss, leaf)[0]

    wanted = gradient(now)
    torch.testing.assert_close(gradient(earlier, mismatch=mismatch, mismatch_max=1e9), wanted)
    assert (gradient(earlier) - wanted).norm() > 0.1 * wanted.norm()
    assert (gradient(earlier, mismatch=mismatch) - wanted).norm() < (gradient(earlier) - wanted).norm()
