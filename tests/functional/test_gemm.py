"""Tests of the faster float32 products: torch's results and gradients, taken only where they pay."""

import pytest
import torch
from torch.nn import functional as F

from grpo_pl.functional import gemm
from grpo_pl.functional.gemm import FastLinear, gram, product

pytestmark = pytest.mark.skipif(not gemm.has_onednn(), reason="torch was built without oneDNN for this processor")


@pytest.fixture(autouse=True)
def count_products(monkeypatch):
    """How often oneDNN was asked; small products count as worth it."""
    calls: list[int] = []
    monkeypatch.setattr(gemm, "_WORTH_IT", 8)
    monkeypatch.setattr(gemm, "_linear", lambda *args, real=gemm._linear: calls.append(1) or real(*args))
    return calls


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def _close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert (ours - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize(("rows", "inner", "columns"), [(33, 16, 48), (33, 48, 16), (1, 5, 3)])
def test_products_equal_torchs(count_products, rows, inner, columns):
    left, right = _random(rows, inner), _random(inner, columns)
    _close(product(left, right), left @ right)
    _close(gram(left, _random(rows, columns)), left.t() @ _random(rows, columns))
    assert len(count_products) == 2


@pytest.mark.parametrize("shape", [(40, 16), (4, 10, 16), (2, 4, 5, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_layers_inside_equal_those_outside(count_products, shape, with_bias):
    x, layer = _random(*shape).requires_grad_(), torch.nn.Linear(16, 24, bias=with_bias)
    leaves, slope = [x, *layer.parameters()], _random(*shape[:-1], 24)
    reference = layer(x)
    with FastLinear():
        ours = layer(x)
    assert len(count_products) == 1 and ours.shape == reference.shape
    _close(ours, reference)
    for mine, theirs in zip(
        torch.autograd.grad((ours * slope).sum(), leaves),
        torch.autograd.grad((reference * slope).sum(), leaves),
        strict=True,
    ):
        _close(mine, theirs)
    assert len(count_products) == 3  # forward, gradient of the input, gradient of the weight


def test_frozen_weight_costs_no_gradient_product(count_products):
    x, weight = _random(40, 16).requires_grad_(), _random(24, 16)
    with FastLinear():
        F.linear(x, weight).sum().backward()
    assert len(count_products) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(count_products, dtype):
    x, weight = _random(40, 16, dtype=dtype), _random(24, 16, dtype=dtype)
    with FastLinear():
        assert torch.equal(F.linear(x, weight), F.linear(x, weight))
    product(x, weight.t())
    gram(x, x)
    assert not count_products


def test_small_products_and_autocast_are_left_to_torch(count_products, monkeypatch):
    x, weight = _random(40, 16), _random(24, 16)
    with FastLinear(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16
    monkeypatch.setattr(gemm, "_WORTH_IT", 1 << 20)
    with FastLinear():
        F.linear(x, weight)
    assert not count_products


def test_empty_inputs_pass(count_products):
    x, weight = torch.zeros(0, 16, requires_grad=True), _random(24, 16).requires_grad_()
    with FastLinear():
        F.linear(x, weight).sum().backward()
    assert not weight.grad.any()


def test_views_with_gaps_reach_onednn_as_copies(monkeypatch):
    handed = []

    def watched(x, weight, bias, *rest):
        handed.extend([x, weight])
        return F.linear(x, weight, bias)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    wide, other = torch.randn(128, 512), torch.randn(128, 256)
    part = wide[:, :300]  # its transpose has gaps, too
    torch.testing.assert_close(gram(part, other), part.t() @ other)
    torch.testing.assert_close(product(part, wide[:, 200:500].t()[:, :128].contiguous()), part @ wide[:, 200:500].t())
    expanded = torch.ones(()).expand(128, 256)
    torch.testing.assert_close(gram(wide, expanded), wide.t() @ expanded)
    assert len(handed) == 6
    assert all(x.is_contiguous() or x.mT.is_contiguous() for x in handed)
