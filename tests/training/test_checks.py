"""What of a run's parts cannot go together, before anything is computed."""

from typing import Any

import pytest

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training.checks import check_engine
from grpo_pl.types import Rollout, SamplingParams


class OneByOne(RolloutEngine):
    """Takes what a request holds one by one, as engines did."""

    def generate(self, model: Any, *, prompt_ids: Any, keys: Any, sampling: Any, **others: Any) -> Rollout:  # type: ignore[override]
        raise NotImplementedError


class Incurious(NativeEngine):
    """Cannot be stopped."""

    def generate(self, model: Any, request: Any, *, progress: Any = None) -> Rollout:  # type: ignore[override]
        raise NotImplementedError


class Passing(NativeEngine):
    def generate(self, *arguments: Any, **options: Any) -> Rollout:
        return super().generate(*arguments, **options)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [(OneByOne(), "too many positional arguments"), (Incurious(), "unexpected keyword argument 'should_stop'")],
)
def test_an_engine_that_takes_no_request_is_refused_in_one_line(engine: RolloutEngine, reason: str) -> None:
    name = type(engine).__name__
    with pytest.raises(
        ValueError, match=rf"^model\.engine: generate of {name} does not take .*{reason}.*engines\.md\.$"
    ):
        check_engine(engine, GRPOAlgorithm(), SamplingParams(), staleness=0)


def test_an_engine_that_passes_its_arguments_on_is_taken() -> None:
    check_engine(Passing(), GRPOAlgorithm(), SamplingParams(), staleness=0)
