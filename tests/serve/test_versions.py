"""Versions of the weights in the model's process: each decodes as its own training did."""

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.native.continuous import SequenceOptions
from grpo_pl.types import SamplingParams
from serve.versions import LoadWeights, Versions


def _logprobs(versions: Versions, number: int) -> torch.Tensor:
    """Of the likeliest token after each of eight prompts."""
    batch = versions[number].batch
    for token in range(5, 13):
        batch.add(
            [token, 6, 7], [0], SequenceOptions(sampling=SamplingParams(max_completion_length=1, temperature=0.0))
        )
    return torch.tensor([drawn.logprobs[0] for drawn in batch.step()])


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor has no products in bfloat16")
def test_weights_that_were_trained_in_bfloat16_are_served_in_it(export: Path) -> None:
    model = find_model(export)
    versions = Versions(model, device="cpu", size=8)
    versions.load(1, LoadWeights(1, replace(model, precision="bf16-mixed")))
    while not list(versions.answers()):
        time.sleep(0.01)
    exact, rounded = _logprobs(versions, 0), _logprobs(versions, 1)
    torch.testing.assert_close(rounded, exact, atol=0.1, rtol=0.0)
    assert not torch.allclose(rounded, exact, atol=1e-5)
    versions.empty(1)
    assert torch.equal(_logprobs(versions, 1), rounded)


def test_the_first_weights_are_freed_though_the_worker_froze_what_it_had(export: Path) -> None:
    model = find_model(export)
    versions = Versions(model, device="cpu", size=8)
    gc.collect()
    gc.freeze()  # as the worker does when it is ready
    try:
        first = weakref.ref(versions[0].policy)
        versions.drop(0)
        assert first() is None
    finally:
        gc.unfreeze()
