"""Packed forward passes: without padding, and with each prompt only once for all of its completions.

All tokens of a micro-batch form one row of the model's input, so that linear layers, norms and the head compute real
tokens only. Only for attention each completion is placed after its prompt, in rows of similar length and with the usual
causal mask. Autograd sums the gradients of a shared prompt's keys and values over its completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.policy.library_internals import attention_by
from grpo_pl.types import Rollout, RowInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IMPLEMENTATION = "grpo_pl_packed"
_SHORTEST_IN_BUCKET = 0.75  # rows shorter than this share of a bucket's longest go to the next one


class Spans(NamedTuple):
    """Which of the packed tokens form sequences, each of a prompt and what follows it; int64 on the CPU."""

    prompt_starts: Tensor  # (P,) packed index of the first token
    prompt_lengths: Tensor  # (P,)
    first_sequence: Tensor  # (P + 1,) those of a prompt follow one another
    starts: Tensor  # (B,)
    lengths: Tensor  # (B,), 0 where nothing follows


@dataclass(frozen=True)
class Packing:
    """N packed tokens, and the rows of tokens in which they attend to each other.

    Pack order: the tokens of each distinct prompt, then those of each completion but its last token, which predicts
    nothing.
    """

    input_ids: Tensor  # (1, N)
    position_ids: Tensor  # (1, N)
    predicting: Tensor  # (M,) pack index of the token before each scored token, row by row
    buckets: Sequence[Tensor]  # (rows, longest) pack indices of whole sequences, right-padded with 0
    source: Tensor  # (N,) index of each token in the concatenated, flattened buckets
    longest: int  # tokens of the longest row
    first: Tensor  # (P,) the first of the rows that share each prompt
    spans: Spans


class Rows(NamedTuple):
    """Tokens of prompts and completions."""

    prompt_ids: Tensor  # (B, S), left-padded
    prompt_mask: Tensor  # (B, S) bool
    completion_ids: Tensor  # (B, T), right-padded
    completion_mask: Tensor  # (B, T) bool
    action_mask: Tensor | None = None  # (B, T) bool, None: all
    segment_index: Tensor | None = None  # (B, T), see `Rollout`; None: each row is one segment
    inputs: RowInputs | None = None  # B, what is read beside the tokens of the prompts

    @classmethod
    def of(cls, rollout: Rollout, rows: Tensor) -> Rows:
        """Those rows of a rollout."""
        columns: dict[str, Any] = {name: getattr(rollout, name) for name in cls.__annotations__}
        taken: dict[str, Any] = {name: c if c is None else c[rows] for name, c in columns.items()}
        return cls(**taken)

    @property
    def scored(self) -> Tensor:
        """(B, T) bool: the completion tokens that are scored; the others are only attended to."""
        return self.completion_mask if self.action_mask is None else self.action_mask

    def unfolded(self) -> Rows:
        """A row for each segment, row after row; so the scored tokens keep their order."""
        if self.segment_index is None or not self.segment_index.any():
            return self
        assert self.inputs is None, "later segments have prompts of their own, without inputs"
        prompts, completions, scored = list[Tensor](), list[Tensor](), list[Tensor]()
        for row, index in enumerate(self.segment_index):
            ids, written = self.completion_ids[row], self.scored[row]
            for segment in range(int(index.max()) + 1):
                first = self.prompt_ids[row][self.prompt_mask[row]]
                inside = (index == segment) & self.completion_mask[row]
                prompts.append(ids[index == -segment] if segment else first)
                completions.append(ids[inside])
                scored.append(written[inside])

        def padded(values: list[Tensor], side: str) -> Tensor:
            return pad_sequence(values, batch_first=True, padding_side=side)

        return Rows(
            padded(prompts, "left"),
            padded(list(map(_true_like, prompts)), "left"),
            padded(completions, "right"),
            padded(list(map(_true_like, completions)), "right"),
            padded(scored, "right"),
        )


def _true_like(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def pack(rows: Rows, *, share: bool = True) -> Packing:
    """Packs a micro-batch; neighbouring rows with equal prompts share one copy of it.

    Args:
        share: false repeats the prompt for every row.
    """
    prompt_ids, prompt_mask, completion_ids, completion_mask, *_ = rows
    device = prompt_ids.device
    differs = ((prompt_ids != prompt_ids.roll(1, 0)) | (prompt_mask != prompt_mask.roll(1, 0))).any(dim=1)
    differs |= differing_inputs(rows.inputs, device)
    differs[0] = True
    differs |= not share
    owners = differs.long().cumsum(dim=0) - 1  # (B,)
    distinct_ids, distinct_mask = prompt_ids[differs], prompt_mask[differs]  # (U, S)
    fed = completion_mask & (completion_mask.flip(1).cumsum(dim=1).flip(1) > 1)  # (B, T) all but each row's last
    prompt_lengths, fed_lengths = distinct_mask.sum(dim=1), fed.sum(dim=1)
    prompt_starts = prompt_lengths.cumsum(dim=0) - prompt_lengths  # (U,) in the pack
    fed_starts = fed_lengths.cumsum(dim=0) - fed_lengths + prompt_lengths.sum()  # (B,)
    mine, start = prompt_lengths[owners], prompt_starts[owners]  # (B,)

    steps = torch.arange(completion_mask.shape[1], device=device)
    order = completion_mask.long().cumsum(dim=1) - 1  # (B, T) number of a token within its completion
    before = torch.where(order == 0, (start + mine - 1).unsqueeze(1), fed_starts.unsqueeze(1) + order - 1)
    positions = [(distinct_mask.long().cumsum(dim=1) - 1)[distinct_mask], (mine.unsqueeze(1) + order)[fed]]
    lengths = mine + fed_lengths  # (B,)
    spans = Spans(
        prompt_starts=prompt_starts,
        prompt_lengths=prompt_lengths,
        first_sequence=F.pad(owners.bincount().cumsum(dim=0), (1, 0)),
        starts=fed_starts,
        lengths=fed_lengths,
    )
    columns = torch.arange(prompt_ids.shape[1] + len(steps), device=device)
    inside = columns < mine.unsqueeze(1)
    table = torch.where(inside, start.unsqueeze(1) + columns, (fed_starts - mine).unsqueeze(1) + columns)  # (B, S + T)
    table = table.masked_fill(columns >= lengths.unsqueeze(1), 0)
    buckets, source = _buckets(table, lengths, total=int(prompt_lengths.sum() + fed_lengths.sum()))
    return Packing(
        input_ids=torch.cat([distinct_ids[distinct_mask], completion_ids[fed]]).unsqueeze(0),
        position_ids=torch.cat(positions).unsqueeze(0),
        predicting=before[rows.scored],
        buckets=buckets,
        source=source,
        longest=int(lengths.max()),
        spans=spans,
        first=differs.nonzero().flatten(),
    )


def differing_inputs(inputs: RowInputs | None, device: torch.device) -> Tensor:
    """(B,) bool: rows whose prompts have other inputs than those of the row before; (1,) false where none has any."""
    if inputs is None:
        return torch.zeros(1, dtype=torch.bool, device=device)
    keys = inputs.keys
    other = [key != before for key, before in zip(keys, [*keys[-1:], *keys], strict=False)]
    return torch.tensor(other, dtype=torch.bool, device=device)


def _buckets(table: Tensor, lengths: Tensor, *, total: int) -> tuple[list[Tensor], Tensor]:
    """(buckets, source) of `Packing`: rows of similar length together, and where in them each packed token is."""
    ranked = lengths.argsort(descending=True, stable=True)
    sizes = lengths[ranked].tolist()
    buckets: list[Tensor] = []
    source = torch.full((total,), torch.iinfo(torch.int64).max, device=table.device)
    first = offset = 0
    for end in range(1, len(sizes) + 1):
        if end < len(sizes) and sizes[end] >= _SHORTEST_IN_BUCKET * sizes[first]:
            continue
        rows = ranked[first:end]
        bucket = table[rows, : sizes[first]]
        real = torch.arange(sizes[first], device=table.device) < lengths[rows].unsqueeze(1)
        places = offset + torch.arange(bucket.numel(), device=table.device).view_as(bucket)
        # the tokens of a shared prompt are in several rows: take the first
        source = source.scatter_reduce(0, bucket[real], places[real], "amin")
        buckets.append(bucket)
        offset += bucket.numel()
        first = end
    return buckets, source


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: within it ``model(…, packing=…)`` attends within the rows of a `Packing`."""
    from transformers import AttentionInterface

    AttentionInterface.register(_IMPLEMENTATION, _attend)  # models find an implementation by its registered name
    with attention_by(model, _IMPLEMENTATION):
        yield


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with the signature of transformers' interface: query (1, heads, N, D), key, value (1, key heads, N, D).

    Returns:
        (1, N, heads, D), and None in place of attention weights.

    Raises:
        NotImplementedError: an attention mask, or a feature of attention that this does not compute.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if attention_mask is not None or unknown:
        raise NotImplementedError(f"packed attention knows no {unknown or 'attention mask'}")
    heads = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]  # (N, heads, D)
    if widened := query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # torch's gradient of it takes three times as long on a CPU in bfloat16
        heads = [states.float() for states in heads]
    mixed = []
    with torch.autocast("cpu", enabled=False) if widened else nullcontext():
        for bucket in packing.buckets:
            rows_query, rows_key, rows_value = (
                states.index_select(0, bucket.flatten()).unflatten(0, bucket.shape).transpose(1, 2) for states in heads
            )
            out = F.scaled_dot_product_attention(
                rows_query,  # (rows, heads, longest, D)
                rows_key,
                rows_value,
                is_causal=True,
                scale=scaling,
                dropout_p=dropout,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            mixed.append(out.transpose(1, 2).flatten(0, 1))  # (rows · longest, heads, D)
    return torch.cat(mixed).index_select(0, packing.source).unsqueeze(0).to(value.dtype), None
