"""Tensors go through shared memory unchanged, whatever their type and however many fit at a time."""

import os

import pytest
import torch

from grpo_pl.rollout.child.tensors import SharedMemory, buckets, unpacked


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 20])
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
        "large": torch.randn(1000),
    }
    ours = SharedMemory()
    theirs = SharedMemory(os.dup(ours.descriptor))
    received = {}
    for placed in buckets(sent.items(), ours, size):
        received |= dict(unpacked(placed, theirs))
    assert list(received) == list(sent)
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)
    ours.close()
    theirs.close()


def test_a_bucket_holds_what_fits_and_a_larger_tensor_comes_alone() -> None:
    memory = SharedMemory()
    weights = [(str(n), torch.zeros(count)) for n, count in enumerate([16, 16, 100, 16, 0])]
    names = [[part.name for part in placed] for placed in buckets(weights, memory, 128)]
    assert names == [["0", "1"], ["2"], ["3", "4"]]
    memory.close()


def test_a_tensor_that_arrived_keeps_its_values_when_the_memory_is_used_again() -> None:
    memory = SharedMemory()
    ((_, first),) = unpacked(next(buckets([("a", torch.ones(4))], memory, 64)), memory)
    next(buckets([("b", torch.zeros(4))], memory, 64))
    assert torch.equal(first, torch.ones(4))
    memory.close()
