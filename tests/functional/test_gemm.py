"""Tests of the faster float32 products: torch's results and gradients, taken only where they pay."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_pl.functional import gemm
from grpo_pl.functional.gemm import FastLinear, gram, product

pytestmark = pytest.mark.skipif(not gemm.has_onednn(), reason="torch was built without oneDNN for this processor")


class _Watch(TorchDispatchMode):
    """What oneDNN is given inside this context, product by product."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.given.append(args[:2])
        return func(*args, **(kwargs or {}))

    def __len__(self) -> int:
        return len(self.given)


@pytest.fixture
def onednn(monkeypatch) -> Iterator[_Watch]:
    monkeypatch.setattr(gemm, "_maker", lambda: "vendor_id: AuthenticAMD")
    monkeypatch.setattr(gemm, "_SMALL_SUM", 0)
    gemm.prefers_onednn.cache_clear()
    with _Watch() as watch:
        yield watch
    gemm.prefers_onednn.cache_clear()


@pytest.mark.parametrize(
    ("described", "prefers"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)", False),
        ("Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", False),  # Windows
        ("processor\t: 0\nvendor_id\t: AuthenticAMD", True),
        ("AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD", True),
    ],
)
def test_intels_processors_keep_torchs_products(onednn, monkeypatch, described, prefers):
    monkeypatch.setattr(gemm, "_maker", lambda: described)
    gemm.prefers_onednn.cache_clear()
    product(_random(330, 60), _random(60, 96))
    assert len(onednn) == prefers


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def _close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert (ours - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize(("rows", "inner", "columns"), [(330, 60, 96), (330, 96, 60), (1, 1030, 1030)])
def test_products_equal_torchs(onednn, rows, inner, columns):
    left, right = _random(rows, inner), _random(inner, columns)
    _close(product(left, right), left @ right)
    _close(gram(left, _random(rows, columns)), left.t() @ _random(rows, columns))
    assert len(onednn) == 2


def test_small_sums_over_rows_are_torchs(onednn, monkeypatch):
    monkeypatch.setattr(gemm, "_SMALL_SUM", 60 * 96 + 1)
    left, right = _random(330, 60), _random(330, 96)
    assert torch.equal(gram(left, right), left.t() @ right) and len(onednn) == 0
    gram(left, _random(330, 97))
    assert len(onednn) == 1


@pytest.mark.parametrize("shape", [(400, 60), (40, 10, 60), (2, 40, 5, 60)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_layers_inside_equal_those_outside(onednn, shape, with_bias):
    x, layer = _random(*shape).requires_grad_(), torch.nn.Linear(60, 96, bias=with_bias)
    leaves, slope = [x, *layer.parameters()], _random(*shape[:-1], 96)
    reference = layer(x)
    with FastLinear():
        ours = layer(x)
    assert len(onednn) == 1 and ours.shape == reference.shape
    _close(ours, reference)
    for mine, theirs in zip(
        torch.autograd.grad((ours * slope).sum(), leaves),
        torch.autograd.grad((reference * slope).sum(), leaves),
        strict=True,
    ):
        _close(mine, theirs)
    assert len(onednn) == 3  # forward, gradient of the input, gradient of the weight


def test_frozen_weight_costs_no_gradient_product(onednn):
    x, weight = _random(400, 60).requires_grad_(), _random(96, 60)
    with FastLinear():
        F.linear(x, weight).sum().backward()
    assert len(onednn) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(onednn, dtype):
    x, weight = _random(400, 60, dtype=dtype), _random(96, 60, dtype=dtype)
    with FastLinear():
        assert torch.equal(F.linear(x, weight), F.linear(x, weight))
    product(x, weight.t())
    gram(x, x)
    assert not onednn


def test_torchs_own_switch_turns_onednn_off(onednn):
    x, weight = _random(400, 60), _random(96, 60)
    with torch.backends.mkldnn.flags(enabled=False), FastLinear():
        F.linear(x, weight)
        product(x, weight.t())
    assert not onednn


def test_small_products_and_autocast_are_left_to_torch(onednn):
    x, weight = _random(400, 60), _random(96, 60)
    with FastLinear(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16
    with FastLinear():
        F.linear(x[:40], weight)
    assert not onednn


def test_empty_inputs_pass(onednn):
    x, weight = torch.zeros(0, 16, requires_grad=True), _random(24, 16).requires_grad_()
    with FastLinear():
        F.linear(x, weight).sum().backward()
    assert not weight.grad.any()


def test_views_with_gaps_reach_onednn_as_copies(onednn):
    wide, other = _random(128, 512), _random(128, 256)
    part = wide[:, :300]  # its transpose has gaps, too
    _close(gram(part, other), part.t() @ other)
    _close(product(part, wide[:, 200:500].t()[:, :128].contiguous()), part @ wide[:, 200:500].t())
    expanded = torch.ones(()).expand(128, 256)
    _close(gram(wide, expanded), wide.t() @ expanded)
    assert len(onednn) == 3
    assert all(x.is_contiguous() or x.mT.is_contiguous() for pair in onednn.given for x in pair)
