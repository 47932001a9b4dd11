"""Decoding on GPUs: one token of all rows is a CUDA graph, launched at once; the host looks every few tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from grpo_pl.rollout.native.llama_family import LlamaFamilyDecoder
from grpo_pl.rollout.native.weights import decoded_part

log = logging.getLogger(__name__)
_SPARE = 1 << 28
"""Bytes that a graph may take beside its logits."""


class GraphDecoder(LlamaFamilyDecoder):
    """A `LlamaFamilyDecoder` whose `step` is captured once for a number of rows and then replayed.

    What changes from token to token lies in tensors that the graph itself advances: the tokens, the column of the cache
    that is written, the positions. So attention needs to know no length when it is captured. The first step after
    `start` or `keep` runs without a graph, which loads every kernel, the second is captured. Rows that have ended go on
    beside the others until half of all have: another graph costs more than they do.
    """

    lookahead = 16  # tokens between two looks at which rows have ended: a look waits for the GPU, which then waits

    def __init__(self, model: Any, *, rows: int, embedding: Tensor | None = None) -> None:
        super().__init__(model, rows=rows, embedding=embedding)
        self._captures = True
        self._silu = decoded_part(model).config.hidden_act in ("silu", "swish")

    def start(self, prompt_ids: Tensor, prompt_mask: Tensor, owners: Tensor, *, room: int) -> Tensor:
        self._graph: torch.cuda.CUDAGraph | None = None
        logits = super().start(prompt_ids, prompt_mask, owners, room=room)
        self._starts = (~prompt_mask).sum(dim=1)[owners]  # (B,) the first column of each row
        self._place(self._positions)
        return logits

    def _place(self, positions: Tensor) -> None:
        """New tensors for the state of the rows at these positions, and so no graph yet."""
        self._graph = None
        self._steps = 0
        self._positions = positions.clone()
        self._tokens = torch.zeros_like(positions)
        self._written = torch.tensor(self._column, device=positions.device)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (rows, V) after feeding one token to each of the rows; the next step overwrites them."""
        self._tokens.copy_(tokens)
        if not tokens.is_cuda:
            self._found = self._advance()  # as tests do, with interpreted kernels
        elif self._graph is None and self._steps == 1 and self._captures:
            self._capture()
        elif self._graph is None:
            self._found = self._beside(self._advance)
        if self._graph is not None:
            self._graph.replay()
        self._column += 1
        self._steps += 1
        return self._found

    def _beside(self, work: Callable[[], Tensor]) -> Tensor:
        """``work`` on the stream of captures, behind all before and before all that follows. What libraries keep for
        a stream they take there at a first step, outside of a graph, and once for all graphs."""
        device = self._tokens.device
        with torch.cuda.device(device):
            here, stream = torch.cuda.current_stream(), _stream(device)
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                found = work()
            here.wait_stream(stream)
        return found

    def _capture(self) -> None:
        """Captures a step; where that fails, steps go on without graphs."""
        graph = torch.cuda.CUDAGraph()

        def record() -> Tensor:
            # not torch.cuda.graph, which gives all free memory back each time; only this thread's work, since others
            # may look at events of theirs
            pool: Any = _pool(self._tokens.device).id  # its type is a private one of torch's
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                found = self._advance()
            except BaseException:
                with suppress(RuntimeError):  # that the capture is invalid, which it is
                    graph.capture_end()
                raise
            graph.capture_end()
            return found

        if torch.cuda.mem_get_info(self._tokens.device)[0] < 2 * self._found.nbytes + _SPARE:
            torch.cuda.empty_cache()  # a graph takes memory of its own, and none that lies unused in the cache
        try:
            self._found = self._beside(record)
            self._graph = graph
        except RuntimeError as problem:
            log.warning("rollouts go on without CUDA graphs: %s", problem)
            self._captures = False
            self._found = self._beside(self._advance)

    def _advance(self) -> Tensor:
        from grpo_pl.extras.kernels.decoding import attend_to_columns, gated, rotate_and_store

        x = F.embedding(self._tokens, self._embedding)  # (rows, H)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            heads = layer.qkv(layer.attention_norm(x).to(self._dtype))  # (rows, heads · D)
            rotate_and_store(heads, cache, self._rotary, self._positions, self._written, layer.head_norms)
            layer.output.add_to(x, attend_to_columns(heads, cache, self._starts, self._written, scale=self._scale))
            if self._silu:
                layer.down.add_to(x, gated(layer.gate_up(layer.mlp_norm(x).to(self._dtype))))
            else:
                self._feed_forward(layer, x)
        self._written += 1
        self._positions += 1
        return self._logits(x)

    def keep(self, alive: Sequence[bool]) -> list[int]:
        """As that of the base; where more than half of the rows are alive it keeps all, the ended ones too."""
        if 2 * sum(alive) > len(alive):
            return list(range(len(alive)))
        order = self._compact(alive, None, self._column)
        self._starts = self._starts[order]
        self._place(self._positions[order])
        return order


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream(device)


@functools.cache
def _pool(device: torch.device) -> torch.cuda.MemPool:
    """The memory of all graphs, of which one is alive at a time. Else each left its own behind, in the allocator's
    cache, where no other process finds it. Kept, since a pool whose last graph is gone cannot be captured into."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()
