"""The digests of a run's weights do not depend on how they are sharded."""

import pytest

from grpo_pl.files.checkpoints import policy_weights
from grpo_pl.files.runs import RunFolder
from grpo_pl.policy.weights import weights_digest
from tests.distributed.conftest import Calls


@pytest.mark.parametrize(
    "name", ["sharded", pytest.param("fsdp", marks=pytest.mark.slow), pytest.param("ddp", marks=pytest.mark.slow)]
)
def test_a_sharded_policy_has_the_digest_of_its_whole_checkpoint(completed: Calls, name: str) -> None:
    run = completed(name)
    digests = RunFolder(run.path).weights_digests()
    assert list(digests) == [0, 1, 2, 3, 4, 5]
    for rollouts in (1, 5):
        weights = policy_weights(run.state(rollouts))
        assert digests[rollouts] == weights_digest(weights.items())
