"""Tensors go through shared memory unchanged, whatever their type and however many fit at a time."""

import os

import pytest
import torch

from grpo_pl.extras.engines.child.tensors import SharedMemory
from grpo_pl.policy.weights import bucketed


@pytest.mark.parametrize("size", [1, 100, 1 << 20])
def test_every_tensor_arrives_as_it_was(size: int) -> None:
    torch.manual_seed(0)
    sent = {
        "float32": torch.randn(7, 5),
        "bfloat16": torch.randn(33).bfloat16(),
        "float16": torch.randn(2, 3, 4).half(),
        "int64": torch.arange(5),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "not contiguous": torch.randn(6, 8).t(),
        "large": torch.randn(1000).requires_grad_(),
    }
    ours = SharedMemory()
    theirs, received = SharedMemory(os.dup(ours.descriptor)), {}
    for bucket in bucketed(sent.items(), size):
        received |= theirs.read(ours.write(bucket))  # in the place of those before, which keep their values
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)
    ours.close()
    theirs.close()


def test_a_bucket_holds_what_fits_and_a_larger_tensor_comes_alone() -> None:
    weights = [(str(n), torch.zeros(count)) for n, count in enumerate([16, 16, 100, 16, 0])]
    assert [list(bucket) for bucket in bucketed(weights, 128)] == [["0", "1"], ["2"], ["3", "4"]]
