"""What an answer costs before it gets to a worker, where nothing could interrupt it."""

import time

import pytest

from grpo_pl.rewards import MathReward


@pytest.mark.parametrize(
    "answer",
    [
        "x" + "'" * 26 + "+=5",
        "x_{" + r"\alpha" * 10 + "!}=5",
        r"\frac{d}{" + r"d\ddd" * 22 + "!}=5",
        r"\text{C}" + "(C)" * 25 + "!",
    ],
)
def test_no_regular_expression_takes_exponential_time(answer: str) -> None:
    """Each of these could be read in two ways or more at every step, and took 3 seconds or more when all failed."""
    rules = MathReward(workers=1).rules
    started = time.process_time()
    rules.plan("5", answer)
    rules.plan(answer, "5")
    assert time.process_time() - started < 1.0
