"""Shared-prefix attention on a CPU: all completions of a group read one copy of their prompt's keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SHORTEST = 96
"""Tokens of a prompt below which a copy for every row is about as fast: whole rollouts with prompts of 24 to 64 tokens
took as long either way, those with 128 and 160 a seventh to a third less."""


def worth_sharing(dtype: torch.dtype, prompt_ids: Tensor, *, rows: int) -> bool:
    """True if the ``rows`` that continue prompts (P, S) gain by `SharedPrompts`; elsewhere than on a CPU and in float32
    torch's own attention is taken."""
    prompts, width = prompt_ids.shape
    return prompt_ids.device.type == "cpu" and dtype == torch.float32 and rows > prompts and width >= SHORTEST


class SharedPrompts:
    """Keys and values of P prompts, each read once for all rows that continue it.

    softmax over the columns of a row's prompt and its own: the queries of a group meet their prompt in one product, and
    those of every row its own columns in another; the weights are normalised over both. Juravsky et al. 2024
    ("Hydragen", arXiv:2402.05099, section 3) do the same with two softmaxes.

    Attributes:
        cache: by layer the keys and values (2, P, key heads, S, D).
    """

    def __init__(self, cache: Sequence[Tensor], mask: Tensor, owners: Tensor) -> None:
        """
        Args:
            cache: filled later.
            mask: (P, S), the tokens of the left-padded prompts.
            owners: (B,) index of each row's prompt, ascending."""
        self.cache = list(cache)
        self._bias: Tensor | None = None  # (P, 1, S)
        if not mask.all():
            self._bias = torch.zeros(mask.shape, dtype=cache[0].dtype).masked_fill_(~mask, -torch.inf).unsqueeze(1)
        self._place(owners)

    def _place(self, owners: Tensor) -> None:
        """Gives each row, of the prompt ``owners`` (rows,), a place among P · G, G being the most rows of a prompt."""
        counts = owners.bincount(minlength=self.cache[0].shape[1])
        by_prompt = owners.argsort(stable=True)
        within = torch.empty_like(owners)
        within[by_prompt] = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners[by_prompt]]
        self._owners, self._within, self._group = owners, within, int(counts.max())
        self._places = owners * self._group + within

    def keep(self, order: Sequence[int]) -> None:
        """Goes on with these rows, in this order; prompts without rows are dropped where they are half of all."""
        owners = self._owners[torch.tensor(order, dtype=torch.int64)]
        prompts = owners.unique()  # ascending
        if len(prompts) <= self.cache[0].shape[1] // 2:
            self.cache = [each[:, prompts] for each in self.cache]
            self._bias = None if self._bias is None else self._bias[prompts]
            owners = torch.searchsorted(prompts, owners)
        self._place(owners)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
        """softmax(scale · q [prompt, own]ᵀ) [prompt, own] for one new token a row, without gradients.

        Args:
            queries: (rows, key heads, heads of a group of query heads, D).
            keys: (rows, key heads, columns, D), the row's own.
            values: Likewise.

        Returns:
            (rows, query heads · D).
        """
        rows, key_heads, shared, size = queries.shape
        prompt_keys, prompt_values = (part.flatten(0, 1) for part in self.cache[layer])  # (P · key heads, S, D)
        queries = queries * scale
        there = torch.bmm(self._grouped(queries), prompt_keys.transpose(1, 2))  # (P · key heads, G · shared, S)
        if self._bias is not None:
            there.view(len(self._bias), -1, there.shape[2]).add_(self._bias)
        here = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))  # (rows · key heads, shared, C)
        found = self._by_row(there, key_heads, shared)  # (rows, key heads, shared, S)
        weights = torch.cat([found, here.view(rows, key_heads, shared, -1)], dim=-1).softmax(dim=-1)
        to_prompt, to_own = weights.split([found.shape[3], here.shape[2]], dim=-1)
        mixed = torch.bmm(to_own.flatten(0, 1), values.flatten(0, 1)).view(rows, key_heads, shared, size)
        mixed += self._by_row(torch.bmm(self._grouped(to_prompt), prompt_values), key_heads, shared)
        return mixed.view(rows, -1)

    def _grouped(self, by_row: Tensor) -> Tensor:
        """(rows, key heads, shared, N) to (P · key heads, G · shared, N), zeros where a row has ended."""
        prompts = self.cache[0].shape[1]
        wide = by_row.new_zeros(prompts * self._group, *by_row.shape[1:]).index_copy_(0, self._places, by_row)
        _, key_heads, shared, width = by_row.shape
        placed = wide.view(prompts, self._group, key_heads, shared, width).transpose(1, 2)
        return placed.reshape(prompts * key_heads, self._group * shared, width)

    def _by_row(self, grouped: Tensor, key_heads: int, shared: int) -> Tensor:
        """(P · key heads, G · shared, N) to (rows, key heads, shared, N)."""
        parts = grouped.view(-1, key_heads, self._group, shared, grouped.shape[2])
        return parts[self._owners, :, self._within]
