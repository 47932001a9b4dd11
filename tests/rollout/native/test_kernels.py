"""Tests of the decoder's products: torch's results, whichever kernel the processor's maker calls for."""

import pytest
import torch
from torch.nn import functional as F

from grpo_pl.functional.gemm import has_onednn
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


@pytest.mark.parametrize(("inner", "columns"), [(24, 40), (264, 96), (256, 1024)])
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_torchs_to_the_bit(maker, dtype):
    x, weight = _random(9, 24).to(dtype), _random(40, 24).to(dtype)
    assert torch.equal(Matrix(weight, rows=9)(x), x @ weight.t())
