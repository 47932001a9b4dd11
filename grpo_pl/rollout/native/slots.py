"""Decoders for continuous batching: rows join and leave between tokens, each at its own length."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_pl.policy.inputs import model_arguments
from grpo_pl.rollout.native.llama_family import LlamaFamilyDecoder
from grpo_pl.rollout.native.weights import refuse_llama_family
from grpo_pl.types import PromptInputs

_PREFILL_TOKENS = 4096  # of prompts or observations in one forward pass
_POSITIONS = 128  # of a prompt whose logits are computed at once: all of them may be more than memory holds


def slot_decoder(model: Any, *, rows: int) -> LlamaFamilySlots | ForwardSlots:
    """The own forward pass for the Llama family, ``transformers``' for every other model; the methods are the same.

    Rows are numbered 0 … n-1; new ones are appended, and dropping some renumbers the rest.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    with torch.no_grad():
        if refuse_llama_family(model, length=longest) is None:
            return LlamaFamilySlots(model, rows=rows)
    return ForwardSlots(model)


def alike(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of sequences whose lengths differ by less than a factor of two: padding them together wastes little."""
    ordered = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    while ordered:
        shortest = len(sequences[ordered[0]])
        fitting = sum(len(sequences[i]) < 2 * shortest for i in ordered)
        part = ordered[: max(1, min(fitting, _PREFILL_TOKENS // (2 * shortest)))]
        yield part
        del ordered[: len(part)]


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
        self._grow(1)

    def join(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """Appends ``copies[i]`` rows that continue ``prompts[i]``; the logits (rows, V) of their first tokens."""
        first, owners = len(self._lengths), [i for i, count in enumerate(copies) for _ in range(count)]
        assert first + len(owners) <= self._slots, "more rows than slots"
        lengths = [len(prompts[i]) for i in owners]
        self._grow(max(lengths) + 1)
        x = self._read_ragged(prompts, first, owners)
        self._lengths += lengths
        ends = self._show(first)
        return self._logits(x[torch.tensor(owners, device=x.device), ends - 1])

    def read_from(self, table: Tensor) -> None:
        """Reads tokens as rows of this table of embeddings from now on."""
        self._embedding = table

    def extend(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Feeds one token or more to every row; the logits (rows, V) behind the last of each."""
        parts = [(part, self._extend(part, [tokens[i] for i in part])) for part in alike(tokens)]
        self._lengths = [length + len(new) for length, new in zip(self._lengths, tokens, strict=True)]
        self._show(0)
        order = torch.tensor([row for part, _ in parts for row in part], device=self._embedding.device)
        return self._logits(torch.cat([x for _, x in parts])[order.argsort()])

    def _extend(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Last hidden states (rows, H) behind further tokens of some rows; what pads them is written where nothing
        counts yet."""
        counts, device = torch.tensor([len(new) for new in tokens]), self._embedding.device
        width, before = int(counts.max()), torch.tensor([self._lengths[row] for row in rows])
        self._grow(int(before.max()) + width)
        columns = int((before + counts).max())
        ids = torch.tensor([[*new, *[0] * (width - len(new))] for new in tokens], device=device)  # (rows, S)
        at = (before.unsqueeze(1) + torch.arange(width)).to(device)  # (rows, S) columns that are written
        mine = torch.tensor(rows, device=device)
        visible = torch.arange(columns, device=device) <= at[:, None, :, None]  # (rows, 1, S, columns)
        visible = visible.repeat(1, 1, self._query_heads // self._key_heads, 1)  # a group shares its key head

        def mix(cache: Tensor, queries: Tensor, stored: Tensor) -> Tensor:
            cache[:, mine.unsqueeze(1), :, at] = stored.permute(1, 3, 0, 2, 4)
            keys, values = cache[:, mine, :, :columns]
            grouped = queries.unflatten(1, (self._key_heads, -1)).flatten(2, 3)  # (rows, key heads, group · S, D)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=self._scale)
            return mixed.unflatten(2, (-1, width)).flatten(1, 2)

        x = self._through(ids, self._rotary[at.flatten()].unsqueeze(1), mix)
        return x[torch.arange(len(x), device=device), counts.to(device) - 1]

    def _show(self, first: int) -> Tensor:
        """Lets the rows from ``first`` on see what they hold, and no more; how much that is, (rows,)."""
        ends = torch.tensor(self._lengths[first:], device=self._embedding.device)
        hidden = torch.arange(self._columns, device=ends.device) >= ends.unsqueeze(1)  # (rows, columns)
        self._attention_bias[first : len(self._lengths)].zero_().masked_fill_(hidden, -torch.inf)
        return ends

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
        rows, lengths = len(tokens), self._lengths[: len(tokens)]
        shortest, width = min(lengths), max(lengths) + 1
        self._grow(width)
        at = torch.tensor(lengths, device=tokens.device)  # (rows,) the column that each row writes
        row = torch.arange(rows, device=tokens.device)
        self._attention_bias[row, at] = 0.0
        bias = None if shortest + 1 == width else self._attention_bias[:rows, None, None, :width]
        written = (self._starts[:, :rows] + at.unsqueeze(1)).flatten()  # of the cache as a list of vectors
        rotary = self._rotary[at].unsqueeze(1)

        def store(cache: Tensor, stored: Tensor) -> None:
            cache.view(-1, self._head_size).index_copy_(0, written, stored.flatten(0, 2))

        logits = self._feed(tokens, rotary, bias, width, store)
        self._lengths[:rows] = [length + 1 for length in lengths]
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


class TurnSlots(LlamaFamilySlots):
    """Slots whose rows rest when their turn ends, behind those that are alive, until another turn goes on from them.

    Attributes:
        numbers: of each row the context that it continues, which goes with it.
    """

    def __init__(self, model: Any, *, rows: int) -> None:
        super().__init__(model, rows=rows)
        self.numbers: list[int] = []

    def resume(self, wanted: Sequence[bool]) -> list[int]:
        """Removes the rows that are not wanted in the next turn and returns, for each that is left, the number it had
        before."""
        return super().keep(wanted) if wanted else []

    def held(self, row: int) -> int:
        """Tokens of a row whose keys and values are kept."""
        return self._lengths[row]

    def keep(self, alive: Sequence[bool]) -> list[int]:
        columns = max(self._lengths[: len(alive)])
        order = self._compact(alive, self._attention_bias, columns, exchange=True)
        self._lengths[: len(order)] = [self._lengths[i] for i in order]
        self.numbers[: len(order)] = [self.numbers[i] for i in order]
        return order[: sum(alive)]


def continued(
    held: Sequence[Sequence[int]], numbers: Sequence[int], contexts: Sequence[Sequence[int]]
) -> tuple[dict[int, int], dict[tuple[int, ...], list[int]]]:
    """Row -> the number of the context that continues what the row holds, for contexts in the order of the last time;
    and any other context, equal ones once, with their numbers.

    Args:
        held: by row, the tokens whose keys and values it keeps.
        numbers: by row, the number of the context that it continued last.
    """
    rows, found = sorted(range(len(held)), key=numbers.__getitem__), dict[int, int]()
    fresh, begin = dict[tuple[int, ...], list[int]](), 0
    for number, context in enumerate(contexts):
        for place in range(begin, len(rows)):
            tokens = held[rows[place]]
            if len(context) > len(tokens) and list(context[: len(tokens)]) == tokens:
                found[rows[place]], begin = number, place + 1
                break
        else:
            fresh.setdefault(tuple(context), []).append(number)
    return found, fresh


class ForwardSlots:
    """Any causal LM through its own forward pass, one sequence at a time with a cache of its own: slow and general."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._caches: list[Any] = []

    def join(
        self,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[int],
        inputs: Sequence[PromptInputs | None] | None = None,
    ) -> Tensor:
        logits = []
        for prompt, count, read in zip(prompts, copies, inputs or [None] * len(prompts), strict=True):
            ids = torch.tensor([list(prompt)], device=self._model.device)
            given = {"input_ids": ids} if read is None else model_arguments(self._model, ids, [read])
            out = self._model(**given, past_key_values=None, use_cache=True)
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
