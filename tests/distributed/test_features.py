"""What a run learns beside or instead of rewards: one process, DDP and FSDP2 on two learn the same from it."""

from pathlib import Path

import pytest
import torch

from tests.distributed.conftest import FEATURES, Calls

pytestmark = pytest.mark.slow
LEARNT = {
    "demonstrated": "demonstration/nll",
    "bounded": "clip_ratio/region_mean",
    "taught": "teacher/divergence",
    "self_taught": "teacher/divergence",
    "renewed": "reward_model/pairs",
}
"""Metric that is above 0 where it took part."""
SHARDED = ("demonstrated", "self_taught")


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, strategy) for name in LEARNT for strategy in ("ddp", "fsdp")), *((name, "sharded") for name in SHARDED)],
)
def test_what_is_learned_is_that_of_one_process(
    like_one_process: Calls, completed: Calls, read_metrics: Calls, feature: Calls, name: str, strategy: str
) -> None:
    config: Path = feature(name)
    last = FEATURES[name]["data"]["steps"]
    single, ours = like_one_process(strategy, config, rollouts=last), completed(strategy, config)
    took_part = [float(row[LEARNT[name]]) > 0 for row in read_metrics(single.metrics) if LEARNT[name] in row]
    assert len(took_part) == last and (any(took_part) if name == "bounded" else all(took_part))
    average, theirs = single.state(last)["self_teacher"], ours.state(last)["self_teacher"]
    assert average.keys() == theirs.keys() and (len(average) > 10) == (name == "self_taught")
    for key, value in average.items():
        torch.testing.assert_close(theirs[key], value, rtol=1e-4, atol=1e-5)
    weights = single.state(last)["state_dict"]
    assert not average or any(not torch.equal(value, weights[f"policy.{key}"]) for key, value in average.items())
