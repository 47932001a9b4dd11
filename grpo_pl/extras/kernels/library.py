"""The library of kernels in C: finds it, and computes by it attention, norms and gates of a policy's update on CPUs."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import grpo_pl
from grpo_pl.functional.accelerated import SWITCH
from grpo_pl.policy.packing import Spans

log = logging.getLogger(__name__)
WHOLE = 16
"""Numbers in the widest vector: widths of norms, and numbers of a gate, are multiples of it."""
_NORM_ROWS = 64
"""Rows of a norm that one thread takes, as in ``training.h``."""


class Kernels(Structure):
    """The kernels for one instruction set, ``struct kernel`` of ``library.h``."""

    _fields_: ClassVar[Sequence[Any]] = (
        ("name", c_char_p),
        ("panel", c_int32),
        ("lanes", c_int32),
        ("supported", CFUNCTYPE(c_int32)),
        ("pack", CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_int32, c_void_p)),
        ("rollout", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("advance", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("multiply", CFUNCTYPE(None, c_void_p, c_void_p, c_int32, c_void_p)),
        ("attend", CFUNCTYPE(c_int32, c_void_p)),
        ("normalize", CFUNCTYPE(c_int32, c_void_p)),
        ("gate", CFUNCTYPE(c_int32, c_void_p)),
    )


class _Attention(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        *((name, c_int32) for name in ("prompts", "query_heads", "key_heads", "head_size", "threads")),
        ("scale", c_float),
        *(
            (name, c_void_p)
            for name in ("run", "prompt_starts", "prompt_lengths", "first_sequence", "starts", "lengths")
        ),
        *((name, c_void_p) for name in ("query", "key", "value", "cosines", "sines", "out", "logsumexp")),
        *((name, c_void_p) for name in ("grad", "to_query", "to_key", "to_value")),
    )


class _Norm(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        ("rows", c_int64),
        *((name, c_int32) for name in ("width", "threads")),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("run", "x", "weight", "y", "factors", "grad", "to_x", "to_weights")),
    )


class _Gate(Structure):
    _fields_: ClassVar[Sequence[Any]] = (
        ("size", c_int64),
        ("threads", c_int32),
        *((name, c_void_p) for name in ("run", "gate", "up", "y", "grad", "to_gate", "to_up")),
    )


@cache
def built_kernels(file: Path | None = None) -> dict[str, Kernels]:
    """The kernels that were built and that this processor supports, the fastest first; none without a compiler.

    Args:
        file: by default what the installation has built.
    """
    found = [file] if file else sorted(Path(grpo_pl.__file__).parent.glob("_kernels.*"))
    if not found:
        return {}
    try:
        look_up = ctypes.CDLL(str(found[0])).grpo_pl_kernel_3
    except AttributeError:  # an editable installation whose sources are newer
        log.warning("The kernels were built from another version, and torch computes: run `pip install` again.")
        return {}
    except OSError as error:  # built for another processor or system: a home that several machines share
        log.warning("The library of kernels %s does not load, and torch computes: %s", found[0].name, error)
        return {}
    look_up.argtypes, look_up.restype = [c_int32], POINTER(Kernels)
    kernels: dict[str, Kernels] = {}
    n = 0
    while pointer := look_up(n):
        if pointer.contents.supported():
            kernels[pointer.contents.name.decode()] = pointer.contents
        n += 1
    return kernels


def training_kernels() -> Kernels | None:
    """The kernels that compute a policy's update: those that the environment names, or the fastest but for SSE2, which
    is for tests; None where torch computes it."""
    kernels, asked = built_kernels(), os.environ.get(SWITCH)
    name = asked or next(iter(kernels), "")
    if name not in kernels or (name == "sse2" and not asked):
        return None
    return kernels[name] if torch.get_num_threads() == 1 or _openmp() else None


@cache
def _openmp() -> int | None:
    """Address of the function by which torch's OpenMP runs something in several threads; None where it has none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except AttributeError:
        return None


class PackedAttention(torch.autograd.Function):
    """Causal softmax(q kᵀ · scale) v within each sequence, with q and k turned by the rotary embedding (RoFormer,
    arXiv:2104.09864, equation 34), of query (N, heads, D), key and value (N, key heads, D) float32.

    A prompt's keys and values are read once for all of its completions. Nothing of the size of the scores is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosines: Tensor,
        sines: Tensor,
        spans: Spans,
        scale: float,
    ) -> Tensor:
        states = [tensor.contiguous() for tensor in (query, key, value, cosines, sines)]
        tokens, heads, size = query.shape
        _check_spans(spans, tokens)
        assert key.shape == value.shape == (tokens, key.shape[1], size) and heads % key.shape[1] == 0
        assert cosines.shape == sines.shape == (tokens, size) and size % 2 == 0
        out, logsumexp = torch.empty_like(states[0]), query.new_empty(tokens, heads)
        ctx.save_for_backward(*states, out, logsumexp)
        ctx.kernels, ctx.spans, ctx.scale = _chosen(), spans, scale
        _attend(ctx, (*states, out, logsumexp), (None, None, None, None))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: where activations are computed again, each look at them computes
        found = [torch.empty_like(states) for states in saved[:3]]
        _attend(ctx, saved, (grad.contiguous(), *found))
        return *found, None, None, None, None


def _check_spans(spans: Spans, tokens: int) -> None:
    """The kernel checks nothing: each packed token is in one span, and every span inside."""
    assert all(each.dtype == torch.int64 and each.device.type == "cpu" and each.is_contiguous() for each in spans)
    assert len(spans.first_sequence) == len(spans.prompt_starts) + 1 and len(spans.starts) == len(spans.lengths)
    assert spans.first_sequence[0] == 0 and spans.first_sequence[-1] == len(spans.starts)
    assert bool((spans.first_sequence.diff() >= 0).all())
    starts = torch.cat([spans.prompt_starts, spans.starts])
    lengths = torch.cat([spans.prompt_lengths, spans.lengths])
    order = starts.argsort(stable=True)
    assert int(lengths.min()) >= 0 and int(lengths.sum()) == tokens
    ends = (starts + lengths)[order]
    assert bool((ends[:-1] <= starts[order][1:]).all()) and int(starts.min()) >= 0 and int(ends[-1]) <= tokens


def _attend(ctx: Any, states: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    (query, key), spans = states[:2], ctx.spans
    _run(
        ctx.kernels,
        "attend",
        _Attention(
            prompts=len(spans.prompt_starts),
            query_heads=query.shape[1],
            key_heads=key.shape[1],
            head_size=query.shape[2],
            scale=ctx.scale,
        ),
        prompt_starts=spans.prompt_starts,
        prompt_lengths=spans.prompt_lengths,
        first_sequence=spans.first_sequence,
        starts=spans.starts,
        lengths=spans.lengths,
        **dict(zip(("query", "key", "value", "cosines", "sines", "out", "logsumexp"), states, strict=True)),
        **dict(zip(("grad", "to_query", "to_key", "to_value"), gradients, strict=True)),
    )


class RMSNorm(torch.autograd.Function):
    """y = w x / √(mean(x²) + ε) over the last dimension of x (…, H), float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        assert weight.shape == x.shape[-1:] and x.shape[-1] % WHOLE == 0
        x, weight = x.contiguous(), weight.contiguous()
        y, factors = torch.empty_like(x), x.new_empty(x.numel() // x.shape[-1])
        ctx.save_for_backward(x, weight, factors)
        ctx.kernels = _chosen()
        fields = _Norm(rows=len(factors), width=len(weight), epsilon=epsilon)
        _run(ctx.kernels, "normalize", fields, x=x, weight=weight, y=y, factors=factors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        to_x, to_weights = torch.empty_like(x), x.new_empty(-(-len(factors) // _NORM_ROWS), len(weight))
        fields = _Norm(rows=len(factors), width=len(weight))
        tensors = {"x": x, "weight": weight, "factors": factors, "grad": grad.contiguous()}
        _run(ctx.kernels, "normalize", fields, **tensors, to_x=to_x, to_weights=to_weights)
        return to_x, to_weights[0], None


class SiluProduct(torch.autograd.Function):
    """gate · σ(gate) · up of two float32 tensors of one shape; keeps nothing but the two."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        assert gate.shape == up.shape and gate.numel() % WHOLE == 0
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.kernels = _chosen()
        y = torch.empty_like(gate)
        _run(ctx.kernels, "gate", _Gate(size=gate.numel()), gate=gate, up=up, y=y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        to_gate, to_up = torch.empty_like(gate), torch.empty_like(up)
        tensors = {"gate": gate, "up": up, "grad": grad.contiguous()}
        _run(ctx.kernels, "gate", _Gate(size=gate.numel()), **tensors, to_gate=to_gate, to_up=to_up)
        return to_gate, to_up


def _chosen() -> Kernels:
    """The kernels of this pass; the backward pass takes those of its forward pass."""
    kernels = training_kernels()
    assert kernels is not None
    return kernels


def _run(kernels: Kernels, function: str, fields: Any, **tensors: Tensor | None) -> None:
    """Calls one of ``kernels`` with the addresses of contiguous tensors on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None:
            assert (
                tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in (torch.float32, torch.int64)
            )
            setattr(fields, name, tensor.data_ptr())
    fields.threads, fields.run = torch.get_num_threads() if _openmp() else 1, _openmp()
    if getattr(kernels, function)(byref(fields)):
        raise torch.OutOfMemoryError(f"the kernel for {function} has no memory for what it works with.")
