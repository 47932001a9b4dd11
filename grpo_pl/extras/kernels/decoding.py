"""What decoding one token a row needs beside matrix products, as Triton kernels for GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 64  # most of the cache that a program reads at once …
_READ = 16_384  # … and most bytes of their keys: a part of the shared memory of a processor, 99 KiB on small ones
_GATED = 1024  # entries of a row that a program of `gated` takes
_LEAST = 16  # rows and columns of a product in `tl.dot`


def rotate_and_store(
    heads: Tensor,
    cache: Tensor,
    rotations: Tensor,
    positions: Tensor,
    column: Tensor,
    head_norms: tuple[Tensor, float] | None,
) -> None:
    """Norms (where the family does) and rotates queries and keys; keys and values go to the cache, queries stay.

    Args:
        heads: (rows, (query heads + 2 · key heads) · D), rotated pairs adjacent; the queries are changed in place.
        cache: (2, capacity, key heads, columns, D); the first rows of it are these.
        rotations: (positions, D/2) complex, cos + i sin.
        positions: (rows,) int64.
        column: () int64, that is written.
        head_norms: weight (query and key heads, D) and eps.
    """
    _, capacity, key_heads, columns, size = cache.shape
    all_heads = heads.shape[1] // size
    weight, eps = head_norms if head_norms is not None else (heads, 0.0)
    _rotate_and_store[len(heads), all_heads](
        heads,
        cache,
        torch.view_as_real(rotations),
        positions,
        column,
        weight,
        eps,
        capacity,
        columns,
        QUERIES=all_heads - 2 * key_heads,
        KEYS=key_heads,
        SIZE=size,
        PAIRS=triton.next_power_of_2(size // 2),
        NORMED=head_norms is not None,
        num_warps=1,
    )


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads,
    cache,
    rotations,
    positions,
    column,
    weight,
    eps,
    capacity,
    columns,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    NORMED: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    inside = pair < SIZE // 2
    source = heads + (row * (QUERIES + 2 * KEYS) + head) * SIZE + 2 * pair
    a = tl.load(source, mask=inside, other=0.0)
    b = tl.load(source + 1, mask=inside, other=0.0)
    if head < QUERIES + KEYS:
        x, y = a.to(tl.float32), b.to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(x * x + y * y, 0) / SIZE + eps)
            gain = weight + head * SIZE + 2 * pair
            x = ((x * scale).to(a.dtype) * tl.load(gain, mask=inside, other=0.0)).to(tl.float32)
            y = ((y * scale).to(a.dtype) * tl.load(gain + 1, mask=inside, other=0.0)).to(tl.float32)
        turn = rotations + (tl.load(positions + row) * (SIZE // 2) + pair) * 2
        cos, sin = tl.load(turn, mask=inside, other=0.0), tl.load(turn + 1, mask=inside, other=0.0)
        a = (x * cos - y * sin).to(a.dtype)
        b = (x * sin + y * cos).to(b.dtype)
    if head < QUERIES:
        tl.store(source, a, mask=inside)
        tl.store(source + 1, b, mask=inside)
    else:
        which, key_head = (head - QUERIES) // KEYS, (head - QUERIES) % KEYS
        line = ((which * capacity + row) * KEYS + key_head) * columns + tl.load(column)
        target = cache + line * SIZE + 2 * pair
        tl.store(target, a, mask=inside)
        tl.store(target + 1, b, mask=inside)


def attend_to_columns(heads: Tensor, cache: Tensor, starts: Tensor, column: Tensor, *, scale: float) -> Tensor:
    """softmax(scale · q Kᵀ) V over the columns from ``starts`` to ``column``, for one token a row.

    Args:
        heads: (rows, (query heads + 2 · key heads) · D), of which the queries are read.
        cache: (2, capacity, key heads, columns, D).
        starts: (rows,) int64, the first column of each row.
        column: () int64, the last one.

    Returns:
        (rows, query heads · D).
    """
    _, _, key_heads, columns, size = cache.shape
    queries = heads.shape[1] // size - 2 * key_heads
    group = queries // key_heads
    mixed = heads.new_empty(len(heads), queries * size)
    columns_at_once, stages = tile(size, heads.element_size())
    _attend[len(heads), key_heads](
        heads,
        *cache,
        mixed,
        starts,
        column,
        scale,
        columns,
        KEYS=key_heads,
        GROUP=group,
        SIZE=size,
        GROUP_BLOCK=max(_LEAST, triton.next_power_of_2(group)),
        SIZE_BLOCK=max(_LEAST, triton.next_power_of_2(size)),
        COLUMNS=columns_at_once,
        num_warps=4,
        num_stages=stages,
    )
    return mixed


def tile(size: int, bytes_each: int) -> tuple[int, int]:
    """Columns that a program of attention reads at once, and how many such reads are under way."""
    read = max(_LEAST, triton.next_power_of_2(size)) * bytes_each
    return max(_LEAST, min(_COLUMNS, _READ // read)), 3 if read < 256 else 2


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    heads,
    keys,
    values,
    mixed,
    starts,
    column,
    scale,
    columns,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The queries of a row that share a key head, over its columns in blocks with a running softmax.

    Source: Dao et al. 2022 ("FlashAttention", arXiv:2205.14135), algorithm 1.
    """
    row, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member, place = tl.arange(0, GROUP_BLOCK)[:, None], tl.arange(0, SIZE_BLOCK)[None, :]
    real, inside = (member < GROUP) & (place < SIZE), place < SIZE
    query_head = key_head * GROUP + member
    query = tl.load(heads + (row * (GROUP + 2) * KEYS + query_head) * SIZE + place, mask=real, other=0.0)
    mine = (row * KEYS + key_head) * columns * SIZE
    end = tl.load(column) + 1
    top = tl.full([GROUP_BLOCK], -1e38, tl.float32)
    mass = tl.zeros([GROUP_BLOCK], tl.float32)
    total = tl.zeros([GROUP_BLOCK, SIZE_BLOCK], tl.float32)
    for first in range(tl.load(starts + row), end, COLUMNS):
        at = first + tl.arange(0, COLUMNS)
        here = (at[:, None] < end) & inside
        key = tl.load(keys + mine + at[:, None] * SIZE + place, mask=here, other=0.0)  # (COLUMNS, SIZE_BLOCK)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((at < end)[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        mass = mass * shrink + tl.sum(weights, 1)
        value = tl.load(values + mine + at[:, None] * SIZE + place, mask=here, other=0.0)
        total = total * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = higher
    target = mixed + (row * GROUP * KEYS + query_head) * SIZE + place
    tl.store(target, (total / mass[:, None]).to(query.dtype), mask=real)


def gated(gate_up: Tensor) -> Tensor:
    """SiLU(gate) · up, (rows, I), of both side by side, (rows, 2 · I)."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    mixed = gate_up.new_empty(rows, width)
    _gated[rows, triton.cdiv(width, _GATED)](gate_up, mixed, width, BLOCK=_GATED, num_warps=4)
    return mixed


@triton.jit
def _gated(gate_up, mixed, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, entry = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < width
    gate = tl.load(gate_up + row * 2 * width + entry, mask=inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * width + entry, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    turned = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded as torch's SiLU is
    tl.store(mixed + row * width + entry, turned * up, mask=inside)
