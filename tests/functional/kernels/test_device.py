"""Where kernels in Triton run, and how they are switched off."""

import pytest
import torch

from grpo_pl.functional.kernels import device
from grpo_pl.functional.kernels.device import SWITCH, has_triton


@pytest.mark.parametrize(
    ("kind", "runs", "switch", "expected"),
    [
        ("cuda", True, None, True),
        ("cuda", True, "avx2", True),  # a decode kernel of CPUs is asked for
        ("cuda", True, "torch", False),
        ("cuda", False, None, False),
        ("cpu", True, None, False),
    ],
)
def test_they_run_on_a_gpu_unless_torch_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, runs: bool, switch: str | None, expected: bool
) -> None:
    monkeypatch.setattr(device, "_failure", lambda _: None if runs else "no compiler")
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    assert has_triton(torch.device(kind)) is expected
