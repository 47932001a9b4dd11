"""A term of somebody's own: its hooks act in their order, and one that fails is named in one line."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_pl.functional.losses import LossOutput
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.custom import TokenBatch
from grpo_pl.objective.needs import Needs, Teaching
from grpo_pl.objective.terms import Term
from grpo_pl.objective.terms.base import AdaptiveTerm, CollectedTokens, State
from grpo_pl.objective.terms.chord import CHORD
from grpo_pl.objective.terms.hooks import credited, prepared
from grpo_pl.objective.terms.states import TermStates
from tests.losses import loss_of_tokens
from tests.objective.terms.one_completion import collected, learned

MASK = torch.tensor([[True, True, False]])


@dataclass(frozen=True, kw_only=True)
class Own(Term):
    """coef · log π for the tokens whose advantage is above its mean, which keep no policy term."""

    coef: float = 1.0

    def prepare(self, collected: CollectedTokens) -> Mapping[str, Tensor]:
        return {"high": collected.own(collected.gather("advantages") > collected.gather("advantages").mean())}

    def policy_mask(self, tokens: TokenBatch) -> Tensor:
        return ~tokens.more["high"]

    def loss(self, tokens: TokenBatch) -> Tensor:
        return self.coef * tokens.logprobs * tokens.more["high"]

    def metrics(self, tokens: TokenBatch) -> Mapping[str, Tensor]:
        return {"own/high": tokens.more["high"].to(tokens.logprobs.dtype)}


@dataclass(frozen=True, kw_only=True)
class Credit(Term):
    """1, 2, 3 … times the advantage of the completion."""

    def credit(self, collected: CollectedTokens) -> Tensor:
        return collected.tokens["advantages"] * torch.arange(1.0, 1 + collected.kept.shape[1])


@dataclass(frozen=True, kw_only=True)
class Shifted(Term):
    """A + by · (its place in the completion)."""

    by: float = 1.0

    def advantages(self, advantages: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
        return advantages + self.by * torch.arange(tokens["logprobs"].shape[1])


@dataclass(frozen=True, kw_only=True)
class Doubled(Term):
    def advantages(self, advantages: Tensor, tokens: Mapping[str, Tensor]) -> Tensor:
        return 2 * advantages


@dataclass(frozen=True, kw_only=True)
class Beside(Term):
    """The mean of log π over all tokens, the policy's and others."""

    def extra(self, tokens: Mapping[str, Tensor]) -> LossOutput:
        found = tokens["logprobs"].mean()
        return LossOutput(loss=found, stats={"own/mean": (found.detach(), torch.tensor(1))})


def objective(**terms: Term) -> GRPOAlgorithm:
    return GRPOAlgorithm(beta=0.0, surrogate="unclipped", terms=dict(terms))


def of_rollout(advantages: Any, **terms: Term) -> CollectedTokens:
    return collected(objective(**terms), MASK, advantages=advantages)


def test_its_hooks_act_in_their_order() -> None:
    """Log-probabilities −1 and −2 with advantages 1 and 3, the second above the mean: −(1 · 1) + 0.5 · (−2)."""
    algorithm = objective(own=Own(coef=0.5))
    advantages = [1.0, 3.0, 9.0]
    more = prepared(algorithm.active_terms, of_rollout([advantages]))
    assert more["high"].tolist() == [[False, True, False]]
    found = learned(
        algorithm, [-1.0, -2.0, 0.0], advantages=advantages, mask=MASK[0].tolist(), high=more["high"][0].tolist()
    )
    assert found.loss == pytest.approx(-1.0 - 1.0)
    assert found.slopes == [-1.0, 0.5, 0.0]
    assert found.sums["own/high"] == (1.0, 2)


def test_credit_takes_the_place_of_advantages_before_any_term_prepares() -> None:
    """1, 2 of the kept tokens: the second is above their mean, where one advantage for both had none above."""
    for terms in ({"own": Own(), "credit": Credit()}, {"credit": Credit(), "own": Own()}):
        of_completions = of_rollout([[2.0]], **terms)
        of_tokens = credited(terms, of_completions)
        assert of_tokens.tokens["advantages"].tolist() == [[2.0, 4.0, 6.0]]
        assert prepared(terms, of_tokens)["high"].tolist() == [[False, True, False]]
        assert not prepared(terms, of_completions)["high"].any()
        assert of_completions.tokens["advantages"].tolist() == [[2.0]]


def test_two_terms_that_credit_are_refused_for_only_one_could_act() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Other(Credit):
        pass

    with pytest.raises(ValueError, match="Credit and Other"):
        objective(one=Credit(), other=Other())


def test_without_credit_advantages_stay_as_they_are() -> None:
    before = of_rollout([[2.0]], own=Own())
    assert credited({"own": Own()}, before) is before


def test_advantages_go_from_term_to_term_in_the_order_of_the_configuration() -> None:
    terms = {"shifted": Shifted(), "doubled": Doubled()}
    turned = dict(reversed(terms.items()))
    found = [learned(objective(**each), [-1.0] * 3, advantage=1.0).slopes for each in (terms, turned)]
    assert found == [[-2.0, -4.0, -6.0], [-2.0, -3.0, -4.0]]


def test_an_extra_has_its_own_normaliser_and_sees_what_is_masked() -> None:
    found = learned(objective(own=Beside()), [-1.0, -2.0, -6.0], advantage=1.0, weight=0.1, mask=[True, True, False])
    assert found.loss == pytest.approx(-0.2 - 3.0)
    assert found.slopes == pytest.approx([-0.1 + 1 / 3, -0.1 + 1 / 3, 1 / 3])
    assert found.sums["own/mean"] == (-3.0, 1)


@pytest.mark.parametrize(("behind", "loss"), [(False, 0.0), (True, 1.0)])
def test_a_loss_stands_before_the_entropy_bonus_or_behind_it(
    monkeypatch: pytest.MonkeyPatch, behind: bool, loss: float
) -> None:
    """In float32, (1e8 + 1) − 1e8 is 0, and (1e8 − 1e8) + 1 is 1."""
    monkeypatch.setattr(Own, "behind_entropy", behind)
    monkeypatch.setattr(Own, "policy_mask", lambda self, tokens: None)
    algorithm = replace(objective(own=Own(coef=-1.0)), entropy_coef=1.0)
    one = torch.ones(1, 1)
    tokens = {"logprobs": -one, "mask": one > 0, "advantages": -1e8 * one, "entropy": 1e8 * one, "high": one > 0}
    output = algorithm.loss(tokens, one)
    assert output.loss.item() == loss
    assert [*output.stats].index("own/high") - [*output.stats].index("entropy") == (1 if behind else -1)


@pytest.mark.parametrize(
    ("term", "skips"), [(Own(), False), (Shifted(), False), (Beside(), False), (Credit(), True), (Term(), True)]
)
def test_a_completion_of_advantage_0_is_skipped_where_no_hook_could_give_it_a_gradient(term: Term, skips: bool) -> None:
    if type(term) is not Term:  # which stands for an entry without class_path, and is refused
        assert objective(own=term).skips_zeros == skips
    assert term.acts_at_zero != skips


def test_what_it_needs_is_what_all_terms_need() -> None:
    found = Needs(entropy=True) | Needs(old_entropy=True)
    assert (found.entropy, found.old_entropy, found.ref_logprobs) == (True, True, False)


def test_of_numbers_the_largest_is_needed_and_of_a_teacher_the_first() -> None:
    assert (Needs(top_logprobs=3) | Needs(top_logprobs=5) | Needs()).top_logprobs == 5
    teaching, chord = Teaching(weights="start"), CHORD(coef=0.5)
    found = Needs(teacher=teaching) | Needs(demonstrations=chord)
    assert (found.teacher, found.demonstrations, found.start_weights) == (teaching, chord, True)


@pytest.mark.parametrize(
    ("needs", "missing"),
    [
        (Needs(), None),
        (Needs(old_logprobs=True), None),  # `loss` takes those of now
        (Needs(old_entropy=True, turns=True, correct=True), None),  # which are no tensors of `loss`
        (Needs(ref_logprobs=True), "ref_logprobs"),
        (Needs(entropy=True), "entropy"),
        (Needs(sampling_logprobs=True), "sampling_logprobs"),
        (Needs(top_logprobs=2), "top_logprobs"),
        (Needs(observations=True), "observation_weights"),
        (Needs(teacher=Teaching()), "teacher_logprobs"),
        (Needs(teacher=Teaching(whole=True)), "divergence"),
    ],
)
def test_what_is_missing_in_the_loss_is_named(
    monkeypatch: pytest.MonkeyPatch, needs: Needs, missing: str | None
) -> None:
    assert needs.missing(()) == missing
    monkeypatch.setattr(Beside, "needs", needs)
    if missing is not None:
        with pytest.raises(ValueError, match=rf"\b{missing}\b"):
            learned(objective(own=Beside()), [-1.0])


def _raising(*arguments: Any) -> Any:
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("hook", "does", "told"),
    [
        ("loss", _raising, "loss raises KeyError"),
        ("policy_mask", _raising, "policy_mask raises KeyError"),
        ("metrics", _raising, "metrics raises KeyError"),
        ("extra", _raising, "extra raises KeyError"),
        ("loss", lambda tokens: tokens.logprobs.sum(), r"loss returns \(\): give one number for each token, \(1, 3\)"),
        ("loss", lambda tokens: 0.5, "loss returns float: give one number for each token"),
        ("loss", lambda tokens: tokens.logprobs * math.nan, r"loss returns nan for 2 token\(s\)"),
        ("policy_mask", lambda tokens: tokens.mask[0], r"policy_mask returns \(3,\)"),
        ("metrics", lambda tokens: {"own/x": tokens.logprobs.mean()}, r"own/x.*\(\)"),
        ("metrics", lambda tokens: {"ratio/mean": tokens.logprobs}, "'ratio/mean', which is logged already"),
        ("metrics", lambda tokens: {"entropy": tokens.logprobs}, "'entropy', which is logged already"),
        ("extra", lambda tokens: tokens["logprobs"].sum(), "extra.*LossOutput"),
        ("extra", lambda tokens: LossOutput(loss=tokens["logprobs"], stats={}), "extra.*LossOutput"),
        ("extra", lambda tokens: LossOutput(loss=tokens["logprobs"].sum() * math.inf, stats={}), "extra.*-inf"),
        ("extra", lambda tokens: _stats(tokens, "loss"), "extra.*'loss'"),
        ("extra", lambda tokens: _stats(tokens, "own/high"), "extra.*'own/high'"),  # its own of `metrics`
        ("extra", lambda tokens: LossOutput(loss=tokens["logprobs"].sum(), stats={"own/x": torch.ones(2)}), "own/x"),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_one_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, hook: str, does: Any, told: str) -> None:
    monkeypatch.setattr(Own, hook, lambda self, tokens: does(tokens))
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: .*{told}"):
        learned(objective(mine=Own()), [-1.0] * 3, mask=MASK[0].tolist(), high=[False, False, True])


@pytest.mark.parametrize(
    ("needs", "told"),
    [(property(_raising), "needs raises KeyError: 'nothing'"), (None, "needs is None: give")],
    ids=["raises", "none"],
)
def test_one_that_cannot_say_what_it_needs_is_named(monkeypatch: pytest.MonkeyPatch, needs: Any, told: str) -> None:
    monkeypatch.setattr(Own, "needs", needs)
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: {told}"):
        _ = objective(mine=Own()).needs


def _stats(tokens: Mapping[str, Tensor], name: str) -> LossOutput:
    return LossOutput(loss=tokens["logprobs"].sum(), stats={name: (torch.ones(()), torch.ones(()))})


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (_raising, "advantages raises KeyError"),
        (lambda advantages, tokens: advantages[0], r"advantages returns \(1,\)"),
        (lambda advantages, tokens: None, "advantages returns NoneType"),
        (lambda advantages, tokens: advantages * math.nan, "advantages returns nan"),
        (lambda advantages, tokens: torch.full((1, 3), math.inf), "advantages returns inf"),
    ],
)
def test_one_that_makes_advantages_of_nothing_is_named(monkeypatch: pytest.MonkeyPatch, does: Any, told: str) -> None:
    monkeypatch.setattr(Shifted, "advantages", lambda self, advantages, tokens: does(advantages, tokens))
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: .*{told}"):
        learned(objective(mine=Shifted()), [-1.0] * 3, advantage=1.0)


def test_advantages_of_masked_tokens_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    dirt = torch.tensor([[1.0, 1.0, math.nan]])
    monkeypatch.setattr(Shifted, "advantages", lambda self, advantages, tokens: advantages * dirt)
    found = learned(objective(mine=Shifted()), [-1.0, -1.0, math.nan], advantage=1.0, mask=MASK[0].tolist())
    assert found.slopes == [-1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (_raising, "credit raises KeyError"),
        (lambda of_rollout: of_rollout.tokens["advantages"], r"credit returns \(1, 1\)"),
        (lambda of_rollout: 0.5, "credit returns float"),
        (lambda of_rollout: torch.full((1, 3), math.nan), "credit.*finite"),
        (lambda of_rollout: torch.tensor([[0.0, math.inf, 0.0]]), "credit.*finite"),
    ],
)
def test_one_whose_credit_is_no_advantage_is_named(monkeypatch: pytest.MonkeyPatch, does: Any, told: str) -> None:
    monkeypatch.setattr(Credit, "credit", lambda self, of_rollout: does(of_rollout))
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: .*{told}"):
        credited({"mine": Credit()}, of_rollout([[2.0]]))


RESERVED = (
    *("logprobs", "mask", "advantages", "old_logprobs", "ref_logprobs", "sampling_logprobs", "entropy", "top_ids"),
    *("top_logprobs", "sampling_top_logprobs", "top_is_drawn", "teacher_logprobs", "divergence", "taught"),
    "observation_weights",
)
"""Names of tokens that the pipeline gives, whether this run has them or not."""


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ({"high": torch.ones(2, 3)}, r"as \(2, 3\): give a tensor \(1, 3\)"),
        ({"high": 0.5}, "as float"),
        *(({name: MASK}, f"'{name}'.*already") for name in RESERVED),
    ],
)
def test_one_that_prepares_something_else_is_named(
    monkeypatch: pytest.MonkeyPatch, returns: dict[str, Tensor], told: str
) -> None:
    monkeypatch.setattr(Own, "prepare", lambda self, tokens: returns)
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: prepare returns .*{told}"):
        prepared({"mine": Own()}, of_rollout([[1.0] * 3]))


def test_two_that_prepare_tokens_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.algorithm\.terms\.second: prepare returns 'high'"):
        prepared({"first": Own(), "second": Own()}, of_rollout([[1.0] * 3]))


def test_out_of_memory_inside_a_term_is_left_to_the_budget_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(self: Own, tokens: TokenBatch) -> Tensor:
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(Own, "loss", exhausted)
    tokens = {"logprobs": torch.full((1, 3), -1.0), "advantages": torch.ones(1, 1), "high": ~MASK}
    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        loss_of_tokens(objective(own=Own()), mask=MASK, weights=torch.ones(1, 3), **tokens)


@dataclass(frozen=True, kw_only=True)
class Narrowing(AdaptiveTerm):
    """epsilon_high shrinks by ``factor`` after each rollout whose ratio has left 1."""

    factor: float = 0.5

    def adapted(self, algorithm: Any, state: State) -> Any:
        return replace(algorithm, epsilon_high=algorithm.epsilon_high * self.factor ** state.get("times", 0))

    def observed(self, algorithm: Any, means: Mapping[str, float], state: State) -> State:
        return {"times": state.get("times", 0) + (means["ratio/mean"] != 1.0)}

    def logged(self, state: State) -> Mapping[str, float]:
        return {"narrowing/times": float(state.get("times", 0))}


def test_a_term_that_adapts_changes_the_objective_from_rollout_to_rollout_by_what_it_has_observed() -> None:
    algorithm, states = replace(objective(narrow=Narrowing()), epsilon_high=0.4), TermStates()
    assert states.adapted(algorithm) == algorithm and states.metrics(algorithm) == {"narrowing/times": 0.0}
    for ratio, expected in ((1.5, 0.2), (1.0, 0.2), (0.5, 0.1)):
        states.observe(algorithm, lambda ratio=ratio: {"ratio/mean": ratio})  # type: ignore[misc]
        assert states.adapted(algorithm).epsilon_high == pytest.approx(expected)
    assert states.metrics(algorithm) == {"narrowing/times": 2.0}
    assert algorithm.epsilon_high == 0.4


def test_the_state_of_a_term_goes_through_a_checkpoint_under_its_name() -> None:
    algorithm, states, twin = objective(narrow=Narrowing()), TermStates(), TermStates()
    states.observe(algorithm, lambda: {"ratio/mean": 2.0})
    assert states.state_dict() == {"narrow": {"times": 1}}
    twin.load_state_dict({"terms": states.state_dict()})
    assert twin.adapted(algorithm).epsilon_high == pytest.approx(0.1)
    assert twin.adapted(objective(other=Narrowing())).epsilon_high == pytest.approx(0.2)


def test_a_checkpoint_from_before_terms_begins_anew() -> None:
    algorithm, states = objective(narrow=Narrowing()), TermStates()
    states.observe(algorithm, lambda: {"ratio/mean": 2.0})
    states.load_state_dict({})
    assert states.adapted(algorithm) == algorithm and states.state_dict() == {}


def test_nobody_computes_means_that_no_term_asks_for() -> None:
    """They are exchanged between ranks."""
    TermStates().observe(objective(own=Own()), _raising)


@pytest.mark.parametrize(
    ("hook", "does", "told"),
    [
        ("adapted", _raising, "adapted raises KeyError"),
        ("observed", _raising, "observed raises KeyError"),
        ("logged", _raising, "logged raises KeyError"),
        ("adapted", lambda *arguments: None, "adapted returns NoneType"),
        ("observed", lambda *arguments: None, "observed returns NoneType"),
        ("logged", lambda *arguments: 0.5, "logged returns float"),
    ],
)
def test_one_that_adapts_and_fails_is_named(monkeypatch: pytest.MonkeyPatch, hook: str, does: Any, told: str) -> None:
    monkeypatch.setattr(Narrowing, hook, lambda self, *arguments: does(*arguments))
    algorithm, states = objective(mine=Narrowing()), TermStates()
    with pytest.raises(ValueError, match=rf"^model\.algorithm\.terms\.mine: {told}"):
        states.adapted(algorithm)
        states.observe(algorithm, lambda: {"ratio/mean": 1.0})
        states.metrics(algorithm)
