"""``ImageReading``: pixels as what the language part of an image-text model reads in the places of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_pl.policy.inputs import EncodedPrompt, use_reading
from grpo_pl.types import PromptInputs

_NEVER = -1e4
"""Logit that is added to placeholders: e to its power is 0 in float32, and float16 can hold it."""


@dataclass(frozen=True, kw_only=True)
class ImageReading:
    """For models whose images stand in the places of tokens, with ordinary positions and a causal mask."""

    probe: EncodedPrompt
    token_id: int
    never_written: Sequence[int]
    """Tokens that stand for images and around them, which the policy does not write."""

    def prepare(self, model: Any) -> None:
        """Gives the model this reading, and its head a bias of which no checkpoint knows, so that sampling and every
        log-probability leave out what is never written."""
        head = model.get_output_embeddings()
        assert head.bias is None, "no head of these families has a bias"
        bias = torch.zeros(len(head.weight), dtype=head.weight.dtype, device=head.weight.device)
        bias[list(self.never_written)] = _NEVER
        del head.bias
        head.register_buffer("bias", bias, persistent=False)
        use_reading(model, self)

    def arguments(self, model: Any, ids: Tensor, inputs: Sequence[PromptInputs]) -> dict[str, Any]:
        """The embeddings (rows, width, H) of the tokens, those of images in their places.

        Where gradients are computed and no prompt has an image, one that counts for nothing is read: so every weight
        that is trained has a gradient in each micro-batch, for which data-parallel processes wait.

        Raises:
            ValueError: there are more or fewer places than images take.
        """
        embedded = model.get_input_embeddings()(ids)
        places = ids == self.token_id
        if inputs:
            read = torch.cat(self.embeddings(model, inputs)).to(embedded.dtype)  # (places, H)
            if len(read) != int(places.sum()):
                raise ValueError(
                    f"{int(places.sum())} tokens of images stand in prompts and completions, and the images of the "
                    f"prompts take {len(read)}: the text of a completion may not hold the token of an image."
                )
            embedded = embedded.masked_scatter(places.unsqueeze(-1), read)
        elif torch.is_grad_enabled() and self.probe.inputs is not None and _learns_to_see(model):
            (unseen,) = self.embeddings(model, [self.probe.inputs])
            embedded = embedded + 0.0 * unseen.sum()
        return {"inputs_embeds": embedded}

    def embeddings(self, model: Any, inputs: Sequence[PromptInputs]) -> list[Tensor]:
        """(n, H) of the images of each prompt; equal ones are encoded once, those of one shape together."""
        by_shape: dict[tuple[Any, ...], dict[str, PromptInputs]] = {}
        for each in inputs:
            shape = tuple((name, tensor.shape) for name, tensor in sorted(each.tensors.items()))
            by_shape.setdefault(shape, {})[each.key] = each
        found: dict[str, Tensor] = {}
        for prompts in by_shape.values():
            names = next(iter(prompts.values())).tensors
            joined = {name: torch.cat([each.tensors[name] for each in prompts.values()]) for name in names}
            moved = {name: tensor.to(model.device) for name, tensor in joined.items()}
            read = model.get_image_features(**moved, return_dict=True).pooler_output
            flat = torch.cat([part.reshape(-1, part.shape[-1]) for part in read])
            found |= zip(prompts, flat.split(len(flat) // len(prompts)), strict=True)
        return [found[each.key] for each in inputs]


def _learns_to_see(model: Any) -> bool:
    language = {id(weight) for weight in model.get_decoder().parameters()}
    language |= {id(weight) for weight in model.get_output_embeddings().parameters()}
    return any(weight.requires_grad and id(weight) not in language for weight in model.parameters())
