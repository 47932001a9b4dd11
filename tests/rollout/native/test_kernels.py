"""Tests of the decoder's products: torch's results, whichever kernel the processor's maker calls for."""

import pytest
import torch
from torch.nn import functional as F

from grpo_pl.functional.gemm import has_onednn, multiplies_bfloat16
from grpo_pl.rollout.native import kernels
from grpo_pl.rollout.native.kernels import Matrix

MAKERS = [
    "intel",
    pytest.param("amd", marks=pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")),
]


@pytest.fixture(params=MAKERS)
def maker(request, monkeypatch):
    monkeypatch.setattr(kernels, "prefers_onednn", lambda: request.param == "amd")
    return request.param


def _random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("inner", "columns"), [(24, 40), (264, 96), (256, 1024), (1024, 1024)])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_a_linear_layer(maker, rows, inner, columns, with_bias):
    x, weight, bias = _random(rows, inner), _random(columns, inner), _random(columns) if with_bias else None
    matrix, reference = Matrix(weight, bias, rows=64), F.linear(x, weight, bias)
    torch.testing.assert_close(matrix(x), reference, atol=1e-4, rtol=1e-5)
    residual = _random(rows, columns)
    expected = residual + reference
    matrix.add_to(residual, x)
    torch.testing.assert_close(residual, expected, atol=1e-4, rtol=1e-5)


def test_float64_is_torchs_to_the_bit(maker):
    x, weight = _random(9, 24).double(), _random(40, 24).double()
    assert torch.equal(Matrix(weight, rows=9)(x), x @ weight.t())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_products_in_bfloat16_are_rounded_once(rows, with_bias):
    """Within a step of 8 bits of the product of the same numbers in float64."""
    x, weight = _random(rows, 264).bfloat16(), _random(96, 264).bfloat16()
    bias = _random(96).bfloat16() if with_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    matrix = Matrix(weight, bias, rows=64)
    assert matrix(x).dtype == torch.bfloat16
    torch.testing.assert_close(matrix(x).double(), exact, atol=1e-3, rtol=2**-8)
    residual = torch.zeros(rows, 96, dtype=torch.float32)
    matrix.add_to(residual, x)
    torch.testing.assert_close(residual.double(), exact, atol=1e-3, rtol=2**-8)


@pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")
@pytest.mark.parametrize(
    ("size", "dtype", "by_onednn"),
    [
        (1023, torch.float32, False),
        (1024, torch.float32, True),
        pytest.param(24, torch.bfloat16, True, marks=pytest.mark.skipif(not multiplies_bfloat16(), reason="has none")),
    ],
)
def test_on_intel_large_weights_and_bfloat16_are_onednns(monkeypatch, size, dtype, by_onednn):
    monkeypatch.setattr(kernels, "prefers_onednn", lambda: False)
    matrix, x = Matrix(_random(1024, size).to(dtype), rows=4), _random(4, size).to(dtype)
    with torch.profiler.profile() as profiler:
        matrix(x)
    assert any("_linear_pointwise" in event.key for event in profiler.key_averages()) is by_onednn
