"""Reads a policy's weights for decoding: checks the model, fuses layers, and merges adapters or keeps them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo_pl.policy.inputs import reading_of
from grpo_pl.policy.library_internals import (
    changes_more_than_weights,
    has_hooks,
    is_adapted,
    unmerged_adapters,
    unwrap,
)
from grpo_pl.policy.quantization import is_quantized
from grpo_pl.policy.weights import whole
from grpo_pl.types import PromptInputs

_KEPT_ROWS = 4096
"""Rows of inputs that a running batch keeps for further prompts."""
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")  # the others change with the length that was seen


class LanguagePart(nn.Module):
    """What continues a prompt in a model that reads more than text: its language model and its head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.lm_head = model.get_decoder(), model.get_output_embeddings()
        self.config = model.config.get_text_config()


def decoded_part(model: Any) -> Any:
    """The causal language model that decodes: ``model`` without wrappers, or the `LanguagePart` of one that reads more
    than text."""
    model = unwrap(model)
    return model if reading_of(model) is None else LanguagePart(model)


def read_prompts(
    model: Any, prompts: Sequence[Sequence[int]], inputs: Sequence[PromptInputs | None]
) -> tuple[list[list[int]], Tensor]:
    """Prompts in which each place of an input has a number of its own, and the table of embeddings (V + n, H) in which
    the rows of these numbers are what the language model reads there: so a decoder needs to know nothing of inputs."""
    reading, table = reading_of(model), whole(model.get_input_embeddings().weight)
    assert reading is not None, "prompts with inputs were read for another model"
    shown = {each.key: each for each in inputs if each is not None}
    parts = dict(zip(shown, reading.embeddings(model, list(shown.values())), strict=True))
    numbers, end = dict[str, range](), len(table)
    for key, part in parts.items():
        numbers[key] = range(end, end + len(part))
        end += len(part)
    numbered = [
        _numbered(ids, reading.token_id, () if each is None else numbers[each.key])
        for ids, each in zip(prompts, inputs, strict=True)
    ]
    return numbered, torch.cat([table, *(part.to(table.dtype) for part in parts.values())])


def _numbered(ids: Sequence[int], token_id: int, numbers: Sequence[int]) -> list[int]:
    rest = iter(numbers)
    numbered = [next(rest) if token == token_id else token for token in ids]
    assert next(rest, None) is None, "a prompt has fewer places than its inputs take"
    return numbered


class InputTable:
    """The table of embeddings of a running batch. Behind the model's own rows are those of the inputs of prompts, as in
    `read_prompts`; they stay for prompts with equal inputs, until they are many and none waits to be read.

    Attributes:
        rows: (V + n, H), of which the last may be unused.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._reading = model, reading_of(model)
        self.rows = whole(model.get_input_embeddings().weight)
        self._own = self._end = len(self.rows)
        self._numbers: dict[str, range] = {}

    def numbered(self, prompt: Sequence[int], inputs: PromptInputs, *, unread: bool) -> list[int]:
        """A prompt in which each place of its inputs has the number of a row.

        Args:
            unread: some of the prompts that were numbered before have not been read to their ends.
        """
        assert self._reading is not None, "a prompt with inputs was given to a model of text"
        if inputs.key not in self._numbers:
            (part,) = self._reading.embeddings(self._model, [inputs])
            if not unread and self._end + len(part) > self._own + _KEPT_ROWS:
                self._numbers, self._end = {}, self._own
            begin, self._end = self._end, self._end + len(part)
            if self._end > len(self.rows):
                more = max(self._end, self._own + 2 * (len(self.rows) - self._own)) - begin
                self.rows = torch.cat([self.rows[:begin], self.rows.new_zeros(more, self.rows.shape[1])])
            self.rows[begin : self._end] = part
            self._numbers[inputs.key] = range(begin, self._end)
        return _numbered(prompt, self._reading.token_id, self._numbers[inputs.key])


def base_of(module: Any) -> Any:
    """A linear layer without its adapters."""
    return module.base_layer if is_adapted(module) else module


def linear_parts(modules: Sequence[Any], *, merge: bool = True) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weight (out, in) and bias of each linear layer.

    Args:
        merge: adds active LoRA adapters to a copy of the weight; false leaves them to `low_rank_parts`.
    """
    weights, biases = list[Tensor](), list[Tensor | None]()
    for module in modules:
        base = base_of(module)
        weight = whole(base.weight)
        biases.append(None if base.bias is None else whole(base.bias))
        for adapter in unmerged_adapters(module) if merge else ():
            weight = weight + module.get_delta_weight(adapter).detach()
        weights.append(weight)
    return weights, biases


def low_rank_parts(modules: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """A (ranks, in) and (alpha / rank) · B (out, ranks) of the active adapters of layers with one input, all of them as
    one pair; None if there are none. B has a block for each layer, and zeros beside it."""
    downs, ups = list[Tensor](), list[Tensor]()
    for module in modules:
        adapters = unmerged_adapters(module)
        downs += [whole(module.lora_A[adapter].weight) for adapter in adapters]
        blocks = [whole(module.lora_B[adapter].weight) * module.scaling[adapter] for adapter in adapters]
        ups.append(torch.cat(blocks, dim=1) if blocks else torch.zeros(module.out_features, 0))
    if not downs:
        return None
    return torch.cat(downs), torch.block_diag(*(up.to(downs[0]) for up in ups))


def fused_linear(modules: Sequence[Any], *, merge: bool) -> tuple[Tensor, Tensor | None]:
    """`linear_parts` of layers with one input as one product, weight (out, in) and bias."""
    weights, biases = linear_parts(modules, merge=merge)
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(bias is None for bias in biases):
        return weight, None
    filled = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]
    return weight, torch.cat(filled)


def refuse_llama_family(model: Any, *, length: int) -> str | None:
    """The reason why the own forward pass of the Llama family would not compute what ``model`` does; None if it does.

    Args:
        length: tokens of the longest prompt and its completion.
    """
    from transformers import (
        LlamaForCausalLM,
        LlamaModel,
        MistralForCausalLM,
        MistralModel,
        Qwen2ForCausalLM,
        Qwen2Model,
        Qwen3ForCausalLM,
        Qwen3Model,
    )

    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt-learning adapters change the input"
    model = decoded_part(model)
    families: list[type[nn.Module]] = [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
    computing = model
    if isinstance(model, LanguagePart):
        families, computing = [LlamaModel, MistralModel, Qwen2Model, Qwen3Model], model.model
    if not any(_computes_like(computing, family) for family in families):
        return f"its architecture {type(computing).__name__} has no own forward pass here"
    config, rope = model.config, model.config.rope_parameters
    if rope.get("rope_type", "default") not in _STATIC_ROTARY:
        return f"its rotary embedding of type {rope['rope_type']!r} depends on the length seen"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its rotary embedding turns only a part of each head"
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    windows.append(getattr(config, "sliding_window", None) if config.model_type == "mistral" else None)
    if any(window is not None and window < length for window in windows):
        return f"{length} tokens exceed its sliding attention window"
    return _refuse_parts(model)


def _refuse_parts(model: Any) -> str | None:
    """Checks every weight that the own forward pass reads, and hooks that could change a module from outside."""
    linears = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    for linear in linears:
        if is_adapted(linear):
            if changes_more_than_weights(linear):
                return "its LoRA adapters use DoRA or a bias"
            linear = linear.base_layer
        if not _computes_like(linear, nn.Linear) and not is_quantized(getattr(linear, "weight", None)):
            return f"its linear layers are wrapped as {type(linear).__name__}"
    if not _computes_like(model.model.embed_tokens, nn.Embedding):
        return f"its embedding is wrapped as {type(model.model.embed_tokens).__name__}"
    for module in model.modules():
        gathers = hasattr(module, "unshard")  # FSDP's own hooks do nothing else, and ours only reads inputs
        if "forward" in vars(module) or (has_hooks(module) and not gathers):
            return f"hooks or patches may change its {type(module).__name__}"
    return None


def _computes_like(model: Any, family: type[nn.Module]) -> bool:
    """An instance whose class, FSDP's generated ones included, kept the family's forward."""
    return isinstance(model, family) and type(model).forward is family.forward
