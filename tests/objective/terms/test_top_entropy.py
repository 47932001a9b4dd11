"""Top-entropy tokens: which tokens carry the policy term, and what the others keep, by hand."""

import math

import pytest
import torch

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import Needs
from grpo_pl.objective.terms.top_entropy import TopEntropyTokens
from tests.objective.terms.one_completion import collected, learned


def objective(quantile: float, **fields: float) -> GRPOAlgorithm:
    chosen = {"beta": 0.0, **fields}
    return GRPOAlgorithm(**chosen, surrogate="unclipped", terms={"top": TopEntropyTokens(quantile=quantile)})  # type: ignore[arg-type]


KEPT = torch.tensor([[True, True, True, False], [True, True, False, False]])
ENTROPY = [[0.1, 0.9, 0.5, math.nan], [0.3, 0.7, 7.0, math.nan]]


@pytest.mark.parametrize(
    ("quantile", "chosen"),
    [
        (0.01, [0.9]),  # one at least
        (0.2, [0.9]),
        (0.4, [0.9, 0.7]),
        (0.6, [0.9, 0.5, 0.7]),
        (0.8, [0.9, 0.5, 0.3, 0.7]),
        (0.99, [0.1, 0.9, 0.5, 0.3, 0.7]),
    ],
)
def test_the_asked_share_of_the_kept_tokens_is_chosen(quantile: float, chosen: list[float]) -> None:
    algorithm = objective(quantile)
    found = TopEntropyTokens(quantile=quantile).prepare(collected(algorithm, KEPT, entropy=ENTROPY))
    assert found.keys() == {"entropy_mask"}
    assert torch.tensor(ENTROPY)[KEPT & found["entropy_mask"]].tolist() == pytest.approx(chosen)


def test_equals_of_the_last_one_are_chosen_as_well() -> None:
    found = TopEntropyTokens(quantile=0.4).prepare(
        collected(objective(0.4), torch.ones(1, 5, dtype=torch.bool), entropy=[[0.9, 0.5, 0.5, 0.5, 0.1]])
    )
    assert found["entropy_mask"].tolist() == [[True, True, True, True, False]]


def test_a_rollout_that_nothing_of_is_kept_chooses_nothing() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    found = TopEntropyTokens(quantile=0.4).prepare(collected(objective(0.4), nothing, entropy=[[0.9, 0.5]]))
    assert not found["entropy_mask"].any()


def test_the_others_lose_the_policy_term_but_not_kl_or_bonus_and_still_count_in_the_normaliser() -> None:
    algorithm = objective(0.5, beta=1.0, entropy_coef=0.1)
    entropy = [3.0, 2.0]
    given = {"entropy_mask": [True, False], "ref_logprobs": [-1.0, -2.0], "entropy": entropy}
    found = learned(algorithm, [-1.0, -1.0], advantage=2.0, weight=0.5, **given)
    k3 = math.exp(-1.0) - 1 + 1  # of log π_ref − log π = −1
    assert found.loss == pytest.approx(0.5 * (-2.0 + k3 - 0.1 * 5.0))
    assert found.slopes == pytest.approx([0.5 * -2.0, 0.5 * (1 - math.exp(-1.0))])
    assert found.sums["ratio/mean"] == (2.0, 2)


def test_it_needs_entropies_at_collection_and_no_completion_of_advantage_0() -> None:
    algorithm = objective(0.2)
    assert algorithm.needs == Needs(old_entropy=True)
    assert algorithm.skips_zeros
    with pytest.raises(ValueError, match="entropy_mask"):  # that nobody has prepared
        learned(algorithm, [-1.0])


@pytest.mark.parametrize("quantile", [0.0, 1.0, 1.5, -0.2, math.nan])
def test_a_share_outside_its_range_is_refused_by_name(quantile: float) -> None:
    with pytest.raises(ValueError, match=f"quantile.*{quantile}"):
        TopEntropyTokens(quantile=quantile)
