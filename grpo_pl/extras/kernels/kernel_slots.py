"""Sequences that the decode kernel draws some tokens at a time: they join, rest and leave between two calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p, cast
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_pl.extras.kernels.decode_kernel import Ask, DecodeKernel, PackedPolicy, asking

_POSITIONS = 128  # of a prompt whose logits are computed at once: all of them may be more than memory holds


class _Prompt(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_void_p) for name in ("cache", "tokens", "hidden", "logits")),
        *((name, c_int32) for name in ("columns", "length", "begin")),
    )


class _Sequence(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_void_p) for name in ("prompt", "own", "hidden", "pending", "stops", "logits")),
        ("key", c_int64),
        *((name, c_int32) for name in ("seen", "columns", "fed", "waiting", "stop_count", "drawn", "limit", "last")),
        ("temperature", c_float),
    )


class _Batch(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_int32) for name in ("prompts", "sequences", "steps", "threads")),
        ("prompt", POINTER(_Prompt)),
        ("sequence", POINTER(_Sequence)),
        ("ask", Ask),
        *((name, c_void_p) for name in ("tokens", "logprobs", "lengths")),
    )


@dataclass(kw_only=True)
class Draw:
    """The way in which a sequence is drawn."""

    key: int
    """Sampling key, from ``functional.sampling.row_key``."""
    temperature: float
    limit: int
    """Most tokens, those in ``drawn`` included."""
    ends: frozenset[int]
    """Tokens that end it."""
    drawn: Sequence[int] = ()
    """Tokens that it has drawn already."""
    by_torch: bool = False
    """Its logits are handed out, and somebody else draws from them."""


@dataclass(eq=False)
class _Read:
    """A prompt, and the memory of its keys and values."""

    tokens: Tensor  # (S,) int32
    cache: Tensor
    hidden: Tensor  # (H,) behind the last token
    done: int = 0  # tokens that have been read


@dataclass
class _Row:
    """The memory that a sequence's structure points to."""

    prompt: _Read
    own: Tensor = field(default_factory=lambda: torch.empty(0))
    stops: Tensor = field(default_factory=lambda: torch.empty(0))
    pending: Tensor | None = None
    by_torch: bool = False


@dataclass(frozen=True)
class Advanced:
    """What the sequences have got in one call, in their order."""

    tokens: Tensor  # (rows, steps) int64
    logprobs: Tensor  # (rows, steps)
    lengths: Tensor  # (rows,) how many of them
    logits: Tensor  # (some rows, V), of those that are not drawn
    undrawn: Sequence[int]  # the numbers of these rows


class KernelSlots:
    """Sequences of one policy, numbered 0 … n-1; new ones are appended, and dropping some renumbers the rest.

    No bit of a sequence depends on the others, on the number of threads or on how many tokens are read or drawn at a
    time, and each is that of a whole rollout by the same kernel. The weights are read once, here.

    Args:
        rows: most sequences at once.
    """

    def __init__(self, kernel: DecodeKernel, model: Any, *, rows: int) -> None:
        self._kernel, self._policy = kernel, PackedPolicy(kernel, model, columns=kernel.panel)
        self._sequences, self._rows = (_Sequence * rows)(), list[_Row]()
        self._unread: list[_Read] = []

    def __len__(self) -> int:
        return len(self._rows)

    def read_from(self, table: Tensor) -> None:
        """Reads tokens as rows of this table of embeddings from now on."""
        self._policy.read_from(table)

    def join(self, prompt: Sequence[int], draws: Sequence[Draw]) -> None:
        """Appends a sequence for each of ``draws``, which continues the prompt from the next call on.

        Raises:
            ValueError: the prompt has a token that the policy does not know.
        """
        assert prompt and len(self._rows) + len(draws) <= len(self._sequences), "more rows than slots"
        read = self._room(prompt)
        self._unread.append(read)
        for draw in draws:
            row = _Row(read, by_torch=draw.by_torch)
            number = len(self._rows)
            self._rows.append(row)
            self._sequences[number] = _Sequence(
                prompt=read.cache.data_ptr(), hidden=read.hidden.data_ptr(), seen=len(prompt)
            )
            self.prepare(number, draw, feed=draw.drawn)

    def prepare(self, number: int, draw: Draw, *, feed: Sequence[int]) -> None:
        """Lets a sequence be drawn as ``draw`` says, behind the tokens ``feed``, which it has not seen yet."""
        sequence, row = self._sequences[number], self._rows[number]
        row.stops, row.pending = torch.tensor(sorted(draw.ends), dtype=torch.int32), None
        if feed:
            row.pending = torch.tensor(feed, dtype=torch.int32)
            self._policy.check_tokens(row.pending)
        sequence.pending = None if row.pending is None else row.pending.data_ptr()
        sequence.waiting, sequence.stops, sequence.stop_count = len(feed), row.stops.data_ptr(), len(row.stops)
        sequence.key, sequence.temperature = draw.key, draw.temperature
        sequence.drawn, sequence.limit = len(draw.drawn), draw.limit
        assert sequence.drawn < sequence.limit

    def feed(self, number: int, token: int) -> None:
        """The token that somebody drew from a sequence's logits."""
        sequence = self._sequences[number]
        assert 0 <= token < self._policy.vocabulary and not sequence.waiting
        sequence.last, sequence.waiting, sequence.drawn = token, 1, sequence.drawn + 1

    def held(self, number: int) -> int:
        """Tokens of a sequence, its prompt included, whose keys and values are kept."""
        return int(self._sequences[number].seen + self._sequences[number].fed)

    @property
    def reading(self) -> bool:
        """True while the prompts of some sequences have not been read to their ends."""
        return bool(self._unread)

    def advance(
        self, steps: int, ask: Callable[[int, int], None] = lambda drawn, finished: None, *, read: int | None = None
    ) -> Advanced:
        """Draws up to ``steps`` tokens of every sequence, as many as end it at most; logits for those drawn by torch.

        Args:
            read: most tokens of each prompt that are read, where other sequences wait to be drawn; those of a prompt
                that has more get nothing before a later call has read its end. None reads all of it.
            ask: called now and then as ``ask(tokens_drawn, completions_finished)``; what it raises ends the call, and
                then the sequences cannot go on.
        """
        rows = len(self._rows)
        if read is None or all(row.prompt in self._unread for row in self._rows):
            read = max((len(each.tokens) for each in self._unread), default=0)
        prompts = (_Prompt * len(self._unread))(*(self._prompt(each, most=read) for each in self._unread))
        for each, part in zip(self._unread, prompts, strict=True):
            each.done = part.length
        self._unread = [each for each in self._unread if each.done < len(each.tokens)]
        ready = [number for number, row in enumerate(self._rows) if row.prompt not in self._unread]
        undrawn = [number for number in ready if self._rows[number].by_torch]
        tokens = torch.empty(len(ready), steps, dtype=torch.int64)
        logprobs = torch.empty(len(ready), steps, dtype=torch.float32)
        lengths = torch.zeros(len(ready), dtype=torch.int32)
        logits = torch.empty(len(undrawn), self._policy.vocabulary, dtype=torch.float32)
        for number in ready:
            self._make_room(number, steps)
        for number, each in zip(undrawn, logits, strict=True):
            self._sequences[number].logits = each.data_ptr()
        sequences = self._sequences
        if len(ready) < rows:
            sequences = (_Sequence * len(ready))(*(self._sequences[number] for number in ready))
        with asking(ask) as asked:
            batch = _Batch(
                prompts=len(prompts),
                sequences=len(ready),
                steps=steps,
                threads=torch.get_num_threads(),
                prompt=prompts,
                sequence=cast(sequences, POINTER(_Sequence)),
                ask=asked,
                tokens=tokens.data_ptr(),
                logprobs=logprobs.data_ptr(),
                lengths=lengths.data_ptr(),
            )
            self._kernel.advance(self._policy, batch)
        if len(ready) < rows:
            for number, sequence in zip(ready, sequences, strict=True):
                self._sequences[number] = sequence
            index = torch.tensor(ready, dtype=torch.int64)
            tokens, logprobs, lengths = (
                each.new_zeros(rows, *each.shape[1:]).index_copy_(0, index, each)
                for each in (tokens, logprobs, lengths)
            )
        return Advanced(tokens, logprobs, lengths, logits, undrawn)

    def keep(self, alive: Sequence[bool]) -> list[int]:
        """Removes the rows that are not alive and returns, for each that is left, the number it had before."""
        order = [number for number, lives in enumerate(alive) if lives]
        for to, number in enumerate(order):
            if to != number:
                self._sequences[to] = self._sequences[number]
        self._rows = [self._rows[number] for number in order]
        wanted = {row.prompt for row in self._rows}
        self._unread = [read for read in self._unread if read in wanted]
        return order

    def prompt_logits(self, prompt: Sequence[int]) -> Iterator[Tensor]:
        """The logits behind every token of ``prompt``, (some positions, V) at a time; no row is made."""
        read = self._room(prompt)
        while read.done < len(prompt):
            part = self._prompt(read, most=_POSITIONS)
            logits = torch.empty(part.length - part.begin, self._policy.vocabulary, dtype=torch.float32)
            part.logits, read.done = logits.data_ptr(), part.length
            prompts = (_Prompt * 1)(part)
            self._kernel.advance(self._policy, _Batch(prompts=1, threads=1, prompt=prompts))
            yield logits

    def _room(self, prompt: Sequence[int]) -> _Read:
        """Memory for a prompt that is to be read."""
        tokens = torch.tensor(prompt, dtype=torch.int32)
        self._policy.check_tokens(tokens)
        self._policy.reach(len(prompt))
        size = self._policy.cache_size(self._kernel.whole_panels(len(prompt)))
        hidden = torch.empty(self._policy.fields.width, dtype=torch.float32)
        return _Read(tokens, torch.empty(size, dtype=torch.float32), hidden)

    def _prompt(self, read: _Read, *, most: int) -> _Prompt:
        """Up to ``most`` further tokens of a prompt."""
        return _Prompt(
            cache=read.cache.data_ptr(),
            tokens=read.tokens.data_ptr(),
            hidden=read.hidden.data_ptr(),
            columns=self._kernel.whole_panels(len(read.tokens)),
            length=min(read.done + most, len(read.tokens)),
            begin=read.done,
        )

    def _make_room(self, number: int, steps: int) -> None:
        """Makes room for further tokens behind a prompt, up to the limit of its sequence; doubling keeps the copies
        rare."""
        sequence, row = self._sequences[number], self._rows[number]
        seen, left, old = sequence.fed + sequence.waiting, sequence.limit - sequence.drawn, int(sequence.columns)
        if seen + min(steps, left) <= old:
            return
        columns = self._kernel.whole_panels(seen + min(max(steps, 2 * old - seen), left))
        panel = self._policy.value_panel
        heads, size = self._policy.fields.layers * self._policy.fields.key_heads, self._policy.fields.head_size
        grown = torch.empty(heads, self._policy.cache_size(columns) // heads, dtype=torch.float32)
        if old:  # keys are panels of columns, and values of components
            grown[:, : old * size] = row.own[:, : old * size]
            values = grown[:, columns * size :].unflatten(1, (-1, columns, panel))
            values[:, :, :old] = row.own[:, old * size :].unflatten(1, (-1, old, panel))
        self._policy.reach(sequence.seen + columns)
        row.own, sequence.own, sequence.columns = grown, grown.data_ptr(), columns
