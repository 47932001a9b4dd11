"""SiLU(gate) · up of GPUs, on one where there is one, else interpreted on the CPU: values and gradients of torch."""

import pytest
import torch

pytest.importorskip("triton")
from grpo_pl.extras.kernels.gated import SiluProduct

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_and_its_gradients_are_those_of_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    gate, up, slope = (torch.randn(5, 700, generator=generator).to(DEVICE, dtype) for _ in range(3))
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    expected = torch.nn.functional.silu(gate.float()) * up.float()
    found = SiluProduct.apply(gate, up)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(found, expected.to(dtype), **tolerance)
    ours, theirs = torch.autograd.grad(found, leaves, slope), torch.autograd.grad(expected, leaves, slope.float())
    torch.testing.assert_close(ours, theirs, **tolerance)
