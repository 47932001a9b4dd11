"""Estimators and surrogates that a user brings: what they get, what is computed for them, and how they are named."""

import csv
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.custom import AdvantageEstimator, RewardedGroups, SurrogateObjective, TokenBatch
from grpo_pl.rewards.base import Reward, Score
from grpo_pl.training.experience import Experience
from grpo_pl.types import Problem, PromptBatch
from tests.losses import loss_of_tokens
from tests.objective.test_algorithm import call

Make = Callable[..., Experience]

FILE = Path(__file__).parents[1] / "plugins" / "loo_median.py"
NAN = torch.nan


@pytest.fixture(scope="module")
def median() -> Any:
    """The class of a file of twenty lines."""
    spec = importlib.util.spec_from_file_location("loo_median_alone", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LeaveOneOutMedian


def _advantages(algorithm: GRPOAlgorithm, values: list[list[float]], **more: Any) -> Any:
    return call(algorithm, [values], **more)


def test_the_leave_one_out_median_by_hand(median: Any) -> None:
    algorithm = GRPOAlgorithm(group_size=4, beta=0.0, baseline=median(), scale="none")
    found = _advantages(algorithm, [[1, 0, 0, 3], [2, NAN, 4, 0], [1, 1, 1, 1]])
    # medians of the others: 0, 1, 1, 0; then of two others each: 2, –, 1, 3; then 1
    assert found.advantages.tolist() == [[1, -1, -1, 3], [0, 0, 3, -3], [0, 0, 0, 0]]
    assert found.keep.tolist() == [[True] * 4, [True, False, True, True], [True] * 4]
    assert found.active.tolist() == [[True] * 4, [False, False, True, True], [False] * 4]
    twice = replace(algorithm, baseline=median(factor=2.0))
    assert _advantages(twice, [[1, 0, 0, 3]]).advantages.tolist() == [[2, -2, -2, 6]]


def test_the_scale_divides_what_an_estimator_returns(median: Any) -> None:
    algorithm = GRPOAlgorithm(group_size=4, beta=0.0, baseline=median(), scale="token_whitening", std_eps=0.0)
    found = _advantages(algorithm, [[1, 0, 0, 3]]).advantages
    centred = torch.tensor([1.0, -1, -1, 3], dtype=torch.float64)
    std = ((centred - 0.5).square().sum() * 3 / 11).sqrt()  # every completion counts three times, once a token
    torch.testing.assert_close(found[0], (centred - 0.5) / std)


class Declaring(AdvantageEstimator):
    """Remembers what it got."""

    needs_old_logprobs = needs_ref_logprobs = needs_entropy = needs_correct = needs_greedy_baseline = True

    def __init__(self) -> None:
        self.seen: list[RewardedGroups] = []

    def __call__(self, groups: RewardedGroups) -> Tensor:
        self.seen.append(groups)
        return groups.rewards


@dataclass(kw_only=True)
class Length(Reward):
    """Characters of the text."""

    name: str = "length"
    correctness: bool = True

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Score]:
        return [Score(float(len(text)), "ok") for text in completions]


@pytest.fixture
def rollout(make_experience: Make, tiny_policy: Any) -> Make:
    prompts = [Problem(id=i, question="?", answer="7") for i in (1, 2)]
    return lambda algorithm: make_experience(
        {1: ["", "aa"], 2: ["b", "bbb"]},
        batch=PromptBatch(step=0, prompts=prompts, valid=[True, True]),
        rewards=[Length()],
        algorithm=algorithm,
        max_completion_length=3,
        reference=tiny_policy if algorithm.needs.loads_reference else None,
    )


def test_an_estimator_gets_what_it_declares(rollout: Make) -> None:
    estimator = Declaring()
    algorithm = GRPOAlgorithm(group_size=2, beta=0.0, baseline=estimator, scale="none")
    assert algorithm.needs.reference and algorithm.needs.old_entropy and not algorithm.needs.entropy
    experience = rollout(algorithm)
    assert experience.advantages.flatten().tolist() == [0, 2, 1, 3]
    assert "entropy_mask" not in experience.tokens
    (seen,) = estimator.seen
    assert seen.rewards.tolist() == [[0, 2], [1, 3]]
    assert seen.lengths.tolist() == [[1, 3], [2, 3]] and seen.truncated.tolist() == [[False, False], [False, True]]
    assert seen.correct is not None and seen.correct.tolist() == [[False, True], [True, True]]
    assert seen.greedy is not None and seen.greedy.tolist() == [0, 1]  # the first text of each prompt
    sums = (experience.rollout.sampling_logprobs * experience.rollout.completion_mask).sum(1).view(2, 2)
    for given in (seen.old_logprobs, seen.ref_logprobs):  # the reference is the policy here
        assert given is not None
        torch.testing.assert_close(given, sums)
    assert seen.entropy is not None and seen.entropy.shape == (2, 2) and bool((seen.entropy > 0).all())


def test_what_nobody_declares_is_not_computed(rollout: Make) -> None:
    class Silent(Declaring):
        needs_old_logprobs = needs_ref_logprobs = needs_entropy = needs_correct = needs_greedy_baseline = False

    estimator = Silent()
    experience = rollout(GRPOAlgorithm(group_size=2, beta=0.0, baseline=estimator, scale="none"))
    assert experience.old_logprobs is None and experience.ref_logprobs is None
    (seen,) = estimator.seen
    assert (seen.correct, seen.greedy, seen.old_logprobs, seen.ref_logprobs, seen.entropy) == (None,) * 5


@pytest.mark.parametrize("returned", [torch.zeros(4), torch.full((1, 2), torch.inf)])
def test_an_estimator_that_returns_something_else_is_refused(returned: Tensor) -> None:
    class Wrong(AdvantageEstimator):
        def __call__(self, groups: RewardedGroups) -> Tensor:
            return returned

    with pytest.raises(ValueError, match=r"Wrong returned .* give finite advantages of shape \(1, 2\)"):
        _advantages(GRPOAlgorithm(group_size=2, beta=0.0, baseline=Wrong(), scale="none"), [[1, 0]])


def test_an_estimator_is_told_what_is_missing() -> None:
    algorithm = GRPOAlgorithm(group_size=2, beta=0.0, baseline=Declaring(), scale="none")
    greedy = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="Declaring declares needs_old_logprobs: pass old_logprobs"):
        _advantages(algorithm, [[1, 0]], greedy_values=greedy)


class Reinforce(SurrogateObjective):
    """What ``surrogate: reinforce`` is."""

    def __call__(self, tokens: TokenBatch) -> Tensor:
        assert tokens.ref_logprobs is None or self.needs_ref_logprobs
        return tokens.advantages * tokens.logprobs


class Anchored(SurrogateObjective):
    """A log π + H − (log π − log π_ref)², of everything that can be declared."""

    needs_old_logprobs = needs_ref_logprobs = needs_entropy = needs_sampling_logprobs = True

    def __call__(self, tokens: TokenBatch) -> Tensor:
        assert tokens.ref_logprobs is not None and tokens.entropy is not None and tokens.sampling_logprobs is not None
        gap = (tokens.logprobs - tokens.ref_logprobs).square()
        return tokens.advantages * tokens.logprobs + tokens.entropy - gap


MASK = torch.tensor([[True, True], [True, False]])
TOKENS = {
    "logprobs": torch.tensor([[-1.0, -2.0], [-0.5, -9.0]], dtype=torch.float64),
    "old_logprobs": torch.tensor([[-1.1, -1.9], [-0.6, -9.0]], dtype=torch.float64),
    "advantages": torch.tensor([[1.0], [-2.0]], dtype=torch.float64),
    "weights": torch.ones(2, 2, dtype=torch.float64),
}


def _loss(algorithm: GRPOAlgorithm, **more: Tensor) -> tuple[float, Tensor]:
    leaf = TOKENS["logprobs"].clone().requires_grad_()
    loss = loss_of_tokens(algorithm, **{**TOKENS, "logprobs": leaf}, mask=MASK, **more).loss
    return loss.item(), torch.autograd.grad(loss, leaf)[0]


def test_an_own_surrogate_takes_the_place_of_a_named_one() -> None:
    named = _loss(GRPOAlgorithm(beta=0.0, surrogate="reinforce"))
    own = _loss(GRPOAlgorithm(beta=0.0, surrogate=Reinforce()))
    assert own[0] == named[0] == pytest.approx(-(-1 - 2 + 2 * 0.5))
    assert torch.equal(own[1], named[1])


def test_an_own_surrogate_gets_what_it_declares() -> None:
    algorithm = GRPOAlgorithm(beta=0.0, surrogate=Anchored())
    needs = algorithm.needs
    assert needs.old_logprobs and needs.ref_logprobs and needs.entropy and needs.sampling_logprobs
    assert not algorithm.kl_in_loss
    given = {
        "ref_logprobs": torch.tensor([[-1.5, -2.0], [-1.5, NAN]], dtype=torch.float64),
        "entropy": torch.tensor([[0.5, 0.25], [1.0, NAN]], dtype=torch.float64),
        "sampling_logprobs": TOKENS["old_logprobs"],
    }
    loss, gradient = _loss(algorithm, **given)
    assert loss == pytest.approx(-(-1 - 2 + 1 + 0.5 + 0.25 + 1 - 0.25 - 0 - 1))
    expected = torch.tensor([[-(1 - 2 * 0.5), -1.0], [-(-2 - 2 * 1.0), 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    for name in given:
        with pytest.raises(ValueError, match=f"this objective needs {name}"):
            _loss(algorithm, **{other: value for other, value in given.items() if other != name})


def test_completions_without_advantage_are_forwarded_for_an_own_surrogate() -> None:
    """Nobody knows what it does with an advantage of 0."""
    found = _advantages(GRPOAlgorithm(group_size=2, beta=0.0, surrogate=Reinforce()), [[1, 1]])
    assert found.active.all()


def test_a_surrogate_that_returns_something_else_is_refused() -> None:
    class Sum(SurrogateObjective):
        def __call__(self, tokens: TokenBatch) -> Tensor:
            return tokens.logprobs.sum()

    with pytest.raises(ValueError, match=r"Sum returned \(\): give one number per token, \(2, 2\)"):
        _loss(GRPOAlgorithm(beta=0.0, surrogate=Sum()))


@pytest.mark.parametrize(("field", "kind"), [("baseline", "AdvantageEstimator"), ("surrogate", "SurrogateObjective")])
def test_unknown_names_are_refused_with_the_choices(field: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 'median': choose one of .*, or an object of a class of {kind}"):
        GRPOAlgorithm(**{field: "median"})
    with pytest.raises(ValueError, match=f"{field} is <object .*: choose one of"):
        GRPOAlgorithm(**{field: object()})


def test_contradictions_name_the_class(median: Any) -> None:
    with pytest.raises(ValueError, match=r"scale group_std would divide by 0 .* baseline LeaveOneOutMedian is not"):
        GRPOAlgorithm(baseline=median())
    with pytest.raises(ValueError, match=r"set surrogate clip, not Reinforce"):
        GRPOAlgorithm(ratio_level="geometric", surrogate=Reinforce())


def test_a_run_learns_with_a_users_estimator_and_surrogate(command_line: Any) -> None:
    algorithm = {
        "group_size": 4,
        "beta": 0.0,
        "scale": "none",
        "baseline": {"class_path": "loo_median.LeaveOneOutMedian", "init_args": {"factor": 0.5}},
        "surrogate": {"class_path": "user_parts.PulledBack", "init_args": {"strength": 0.1}},
    }
    config = command_line.config("own_parts", model__algorithm=algorithm, trainer__limit_val_batches=0, data__steps=2)
    command_line.done("fit", "--config", config)
    run = command_line.runs / "own_parts"
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert all(row["kl"] for row in rows)  # the reference is there because the surrogate declares it
    assert any(float(row["grad_norm"]) > 0 for row in rows if row["grad_norm"])
    assert "loo_median.LeaveOneOutMedian" in (run / "config.yaml").read_text()
    again = command_line("fit", "--config", run / "config.yaml", "--name=again")  # as its own configuration says
    assert again.status == 0, again.err


def test_the_command_line_takes_a_class_and_lists_the_choices(command_line: Any) -> None:
    config = command_line.config("named")
    line = command_line("fit", "--config", config, "--model.algorithm.baseline=median").err.splitlines()[0]
    for name in ("group_mean", "leave_one_out", "greedy", "none", "AdvantageEstimator", "median"):
        assert name in line
    line = command_line("fit", "--config", config, "--model.algorithm.baseline=loo_median.Nothing").err.splitlines()[0]
    assert "loo_median" in line
