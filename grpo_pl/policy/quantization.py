"""Frozen weights in 4 bits (QLoRA, Dettmers et al., arXiv:2305.14314), by ``bitsandbytes``, under trained adapters."""

from __future__ import annotations

import copy
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

BITS_PER_WEIGHT = 4.127
"""Of NF4 with double quantization, constants included (QLoRA, section 3)."""


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Quantization for ``from_pretrained``: NF4, its constants quantized as well; products are computed in ``dtype``.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("policy.quantization nf4 needs bitsandbytes: pip install 'grpo_pl[qlora]', or set it to null.")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def is_quantized(weight: Any) -> bool:
    """True if a parameter holds packed numbers of 4 bits."""
    return getattr(weight, "quant_state", None) is not None


def plain(weight: Any) -> Tensor:
    """A weight as the numbers that it stands for; one that is not quantized as it is."""
    if not is_quantized(weight):
        return weight  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit

    found: Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return found


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the same model without quantization."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def keep_form(model: PreTrainedModel) -> None:
    """Has bitsandbytes leave packed weights as they are. Where a CPU has AVX512-BF16, a layer in eval mode turns its
    weight into a form for inference alone, in place, and cannot be trained on from then on."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def keep_out_of_checkpoints(model: PreTrainedModel) -> None:
    """Leaves quantized weights out of ``state_dict``, and as they are in ``load_state_dict``: they are frozen, and come
    from the model's own folder."""
    names = [name for name, weight in model.named_parameters() if is_quantized(weight)]

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in names:
            for key in [key for key in state if key.startswith(prefix + name)]:  # with the constants of their blocks
                del state[key]

    def leave_alone(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.update({prefix + name: module.get_parameter(name).data for name in names})

    model.register_state_dict_post_hook(leave_out)
    model.register_load_state_dict_pre_hook(leave_alone)
