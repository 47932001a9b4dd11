"""The memory that vLLM is given beside a trainer: for its keys and values, and its share of the GPU."""

from __future__ import annotations

GIB = 2**30
SPARE = 2 * GIB
"""For vLLM's activations, graphs and libraries; a guess, not measured."""
BLOCK = 16
"""Tokens of a row that vLLM makes room for at once."""
MOST_OF_FREE = 0.5
"""Share of what is free beside the weights that the cache takes unasked; the update needs the rest."""


def cache_memory(
    *,
    asked: int | None,
    token_bytes: int,
    weight_bytes: int,
    rows: int,
    row_tokens: int,
    longest: int,
    free: int | None,
    total: int | None,
) -> tuple[int, float | None]:
    """Bytes for keys and values, and vLLM's ``gpu_memory_utilization``, which is None on a CPU.

    vLLM does not start where less than that share of the GPU is free, whatever size its cache has; its default, 0.92,
    leaves nothing to a trainer. The share here is (weights + cache + `SPARE`) / total.

    Args:
        asked: bytes for keys and values that the configuration names; None makes room for ``rows`` of ``row_tokens``,
            within half of what is free, and for one row of the longest at least.
        token_bytes: keys and values of a token.
        rows: most completions decoded at once.
        row_tokens: most tokens of a prompt and its completion.
        longest: most tokens that vLLM accepts in one row, for which the cache must have room.
        free: bytes free on the GPU; None on a CPU, where 1 GiB holds all that is not asked for.
        total: bytes of the GPU.

    Raises:
        ValueError: they are not free.
    """
    one = _blocks(longest) * token_bytes
    if free is None or total is None:
        return asked or max(GIB, one), None
    room = free - weight_bytes - SPARE
    cache = asked or max(one, min(rows * _blocks(row_tokens) * token_bytes, int(MOST_OF_FREE * room)))
    if cache > room:
        raise ValueError(
            f"vLLM would take {weight_bytes / GIB:.1f} GiB for weights, {cache / GIB:.1f} for keys and values "
            f"({longest} tokens of one row at least) and {SPARE / GIB:.1f} besides, and {free / GIB:.1f} of "
            f"{total / GIB:.1f} GiB are free: lower model.engine.init_args.max_tokens or kv_cache_gib."
        )
    return cache, (weight_bytes + cache + SPARE) / total


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK
