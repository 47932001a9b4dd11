"""All uses of private parts of transformers, PEFT and torch by ``policy`` and ``rollout``, in one place.

``tests/policy/test_library_internals.py`` fails when one of these libraries changes what is used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_pl.policy.inputs import reading_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def import_models() -> None:
    """Imports ``transformers.models``. The library reads its folders of models at its own import, and again
    at that of ``models`` to name them without a prefix, since its cache holds 128 folders: a fourteenth of the start of
    a command. Here the second list is made of the first."""
    from transformers.utils import import_utils

    read_folders = import_utils.define_import_structure
    folder = Path(str(import_utils.__file__)).parents[1] / "models"

    def from_first(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or str(module_path) != str(folder / "__init__.py"):
            return read_folders(module_path, prefix)
        return without_prefix(read_folders(folder, prefix="models"), "models.")

    import_utils.define_import_structure = from_first
    try:
        import transformers.models  # noqa: F401
    finally:
        import_utils.define_import_structure = read_folders


def without_prefix(structure: dict[Any, dict[str, Any]], prefix: str) -> dict[Any, dict[str, Any]]:
    """The modules of an import structure that have the prefix, by their names without it."""
    return {
        needed: {name.removeprefix(prefix): found for name, found in modules.items() if name.startswith(prefix)}
        for needed, modules in structure.items()
    }


@contextmanager
def attention_by(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Context manager: within it ``model`` uses a registered attention implementation. The public
    ``set_attn_implementation`` refuses some models and names, and cannot be undone exactly."""
    config = model.config if reading_of(model) is None else model.config.get_text_config()
    before = config._attn_implementation_internal
    config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def computing_dtype(model: PreTrainedModel) -> torch.dtype:
    """The type in which ``model`` computes here and now: that of autocast, or the one in which FSDP2 gathers its
    parameters, else that of its weights."""
    device = model.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    gathered = model._get_fsdp_state()._mp_policy.param_dtype if isinstance(model, FSDPModule) else None
    return gathered or model.dtype


def attends_by_interface(model: PreTrainedModel) -> bool:
    """True if the model's attention goes through transformers' ``AttentionInterface``."""
    return bool(getattr(model, "_supports_attention_backend", False))


def checkpoint_contexts(model: nn.Module) -> set[Any]:
    """The ``context_fn`` with which the layers of a model are checkpointed; None stands for one without."""
    layers: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    return {layer._gradient_checkpointing_func.keywords.get("context_fn") for layer in layers}


def persistent_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a checkpoint holds, tied ones once. Not by ``state_dict()``, which drops what FSDP2
    has gathered."""
    yield from model.named_parameters()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def checkpoint_names(model: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of one module in the form that ``save_pretrained`` writes: some models keep fused what their checkpoints
    hold apart, such as all experts of a layer."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, weights))


def has_hooks(module: nn.Module) -> bool:
    """True if hooks are registered that run before or after the module's ``forward``."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def unwrap(model: Any) -> Any:
    """The causal language model without its ``torch.compile`` and PEFT wrappers."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_adapted(module: Any) -> bool:
    """True if a layer has LoRA adapters; checks for attributes, so that PEFT need not be installed."""
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")


def unmerged_adapters(module: Any) -> list[str]:
    """Names of the active adapters that a layer adds at every call because they are not merged into its weight."""
    if not is_adapted(module) or module.merged or module.disable_adapters:
        return []
    return [adapter for adapter in module.active_adapters if adapter in module.lora_A]


def changes_more_than_weights(module: Any) -> bool:
    """True if the active adapters of an adapted layer do more than add B A to its weight: DoRA, or a bias."""
    return any(module.use_dora.get(adapter) or module.lora_bias.get(adapter) for adapter in module.active_adapters)
