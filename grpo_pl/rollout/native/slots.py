"""Decoders whose rows join and leave between tokens, each at its own length: what continuous batching runs on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_pl.rollout.native.llama_family import LlamaFamilyDecoder
from grpo_pl.rollout.native.weights import refuse_llama_family

_COLUMNS = 256  # tokens that the cache has room for at first; doubled whenever a row outgrows it
_POSITIONS = 128  # of a prompt whose logits are computed at once: all of them may be more than memory holds


def slot_decoder(model: Any, *, rows: int) -> LlamaFamilySlots | ForwardSlots:
    """The own forward pass for the Llama family, ``transformers``' for every other model; the methods are the same.

    Rows are numbered 0 … n-1; new ones are appended, and dropping some renumbers the rest.
    """
    longest = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    with torch.no_grad():
        if refuse_llama_family(model, length=longest) is None:
            return LlamaFamilySlots(model, rows=rows)
    return ForwardSlots(model)


class LlamaFamilySlots(LlamaFamilyDecoder):
    """The decoding forward pass with a cache column per row instead of a common one.

    Row ``i`` holds its keys and values in columns 0 … length_i - 1 and hides the others, so nothing has to be moved
    when a long sequence and a short one meet in a batch.
    """

    def __init__(self, model: Any, *, rows: int) -> None:
        super().__init__(model, rows=rows)
        self._slots, self._columns = rows, 0
        self._lengths: list[int] = []
        self._attention_bias: Tensor  # (slots, columns): 0 where a row holds a token, else -inf
        self._grow(_COLUMNS)

    def join(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """Appends ``copies[i]`` rows that continue ``prompts[i]``; the logits (rows, V) of their first tokens."""
        first, owners = len(self._lengths), [i for i, count in enumerate(copies) for _ in range(count)]
        assert first + len(owners) <= self._slots, "more rows than slots"
        lengths = [len(prompts[i]) for i in owners]
        self._grow(max(lengths) + 1)
        x = self._read_ragged(prompts, first, owners)
        self._lengths += lengths
        ends = torch.tensor(lengths, device=x.device)
        hidden = torch.arange(self._columns, device=x.device) >= ends.unsqueeze(1)  # (rows, columns)
        mine = self._attention_bias[first : first + len(owners)]
        mine.zero_().masked_fill_(hidden, -torch.inf)
        return self._logits(x[torch.tensor(owners, device=x.device), ends - 1])

    def prompt_logits(self, prompt: Sequence[int]) -> Iterator[Tensor]:
        """The logits behind every token of ``prompt``, (some positions, V) at a time; no row is made."""
        self._grow(len(prompt))
        for part in self._read_ragged([prompt], 0, [])[0].split(_POSITIONS):
            yield self._logits(part)

    def _read_ragged(self, prompts: Sequence[Sequence[int]], first: int, owners: Sequence[int]) -> Tensor:
        """Last hidden states (P, S, H) of prompts, padded at the end, where nothing that counts attends to it.

        Args:
            first, owners: row ``first + i`` gets the keys and values of prompt ``owners[i]``.
        """
        width, device = max(map(len, prompts)), self._embedding.device
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)  # (P, S)
        rotary = self._rotary[:width].repeat(len(prompts), 1).unsqueeze(1)
        mine = torch.tensor(owners, dtype=torch.int64, device=device)
        return self._read(ids, rotary, slice(first, first + len(owners)), mine)

    def step(self, tokens: Tensor) -> Tensor:
        rows, shortest, width = len(tokens), min(self._lengths), max(self._lengths) + 1
        self._grow(width)
        at = torch.tensor(self._lengths, device=tokens.device)  # (rows,) the column that each row writes
        row = torch.arange(rows, device=tokens.device)
        self._attention_bias[row, at] = 0.0
        bias = None if shortest + 1 == width else self._attention_bias[:rows, None, None, :width]
        written = (self._starts[:, :rows] + at.unsqueeze(1)).flatten()  # of the cache as a list of vectors
        rotary = self._rotary[at].unsqueeze(1)

        def store(cache: Tensor, stored: Tensor) -> None:
            cache.view(-1, self._head_size).index_copy_(0, written, stored.flatten(0, 2))

        logits = self._feed(tokens, rotary, bias, width, store)
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def keep(self, alive: Sequence[bool]) -> list[int]:
        order = self._compact(alive, self._attention_bias, max(self._lengths))
        self._lengths = [self._lengths[i] for i in order]
        return order

    def _grow(self, columns: int) -> None:
        """Makes room for ``columns`` tokens a row; doubling keeps the copies rare."""
        if columns <= self._columns:
            return
        old, self._columns = self._columns, max(columns, 2 * self._columns)
        shape = (2, self._slots, self._key_heads, self._columns, self._head_size)  # keys, values
        device = self._embedding.device
        # zeros: a hidden column weighs 0, and 0 times garbage may be NaN
        caches = [torch.zeros(shape, dtype=self._dtype, device=device) for _ in self._layers]
        bias = torch.full((self._slots, self._columns), -torch.inf, dtype=self._dtype, device=device)
        if old:
            for new, cache in zip(caches, self._cache, strict=True):
                new[:, :, :, :old] = cache
            bias[:, :old] = self._attention_bias
        self._cache, self._attention_bias = caches, bias
        vectors = torch.arange(2 * self._slots * self._key_heads, device=device) * self._columns
        self._starts = vectors.view(2, self._slots, self._key_heads)
        self._rotary = self._rotations(self._columns)  # (columns, D/2)


class ForwardSlots:
    """Any causal LM through its own forward pass, one sequence at a time with a cache of its own: slow and general."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._caches: list[Any] = []

    def join(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        logits = []
        for prompt, count in zip(prompts, copies, strict=True):
            out = self._forward(torch.tensor([list(prompt)], device=self._model.device), None)
            self._caches += [out.past_key_values, *(copy.deepcopy(out.past_key_values) for _ in range(count - 1))]
            logits.append(out.logits[:, -1].expand(count, -1))
        return torch.cat(logits)

    def prompt_logits(self, prompt: Sequence[int]) -> Iterator[Tensor]:
        yield self._forward(torch.tensor([list(prompt)], device=self._model.device), None).logits[0]

    def step(self, tokens: Tensor) -> Tensor:
        logits = []
        for i, token in enumerate(tokens.view(-1, 1, 1)):
            out = self._forward(token, self._caches[i])
            self._caches[i] = out.past_key_values
            logits.append(out.logits[:, -1])
        return torch.cat(logits)

    def keep(self, alive: Sequence[bool]) -> list[int]:
        order = [i for i, lives in enumerate(alive) if lives]
        self._caches = [self._caches[i] for i in order]
        return order

    def _forward(self, ids: Tensor, cache: Any) -> Any:
        return self._model(ids, past_key_values=cache, use_cache=True)
