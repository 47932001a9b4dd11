"""Where kernels run, and how they are found."""

import ast
from pathlib import Path

import pytest
import torch

from grpo_pl.functional import accelerated
from grpo_pl.functional.accelerated import SWITCH, has_triton


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
    monkeypatch.setattr(accelerated, "_failure", lambda _: None if runs else "no compiler")
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    assert has_triton(torch.device(kind)) is expected


def test_type_checkers_see_the_names_of_the_registry() -> None:
    imported = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(Path(accelerated.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("grpo_pl.extras.kernels.")
        for alias in node.names
        if alias.asname
    }
    named = {(f"grpo_pl.extras.kernels.{module}", name) for name, module in accelerated._MODULE_OF.items()}
    assert imported == named


def test_the_registry_imports_a_kernel_when_it_is_asked_for() -> None:
    from grpo_pl.extras.kernels import decode_kernel, fused_modules, kernel_slots

    assert accelerated.built_kernels is decode_kernel.built_kernels
    assert accelerated.fused_forwards is fused_modules.fused_forwards
    assert accelerated.KernelSlots is kernel_slots.KernelSlots
    with pytest.raises(AttributeError, match="no_kernel"):
        accelerated.no_kernel  # noqa: B018
