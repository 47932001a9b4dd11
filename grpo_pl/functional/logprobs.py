"""Log-probabilities of given tokens, and the entropy of the distributions that predict them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_pl.functional import accelerated
from grpo_pl.functional.accelerated import has_triton
from grpo_pl.functional.divergence import check_mix, divergence, divergence_slope
from grpo_pl.functional.gemm import gram, product

_CHUNK_TOKENS = 1024  # most tokens whose logits are in memory at a time …
_CHUNK_ELEMENTS = 1 << 25  # … and most logits: 128 MiB in float32
_BLOCK_ELEMENTS = 1 << 24  # of the weight's gradient, 64 MiB, computed at a time
_KEPT_ELEMENTS = 1 << 26  # probabilities kept for the backward pass; those of further chunks are computed again
_TAUGHT_ELEMENTS = 1 << 24  # logits in memory at a time beside a teacher's, which need several tensors of that size


def restricted(logits: Tensor, support: Tensor | None) -> Tensor:
    """The logits with −inf everywhere outside of ``support``, so that a softmax is renormalised over it.

    Args:
        logits: (…, V).
        support: (…, K) token ids, any negative number where there are fewer than K; a row without any is left as it
            is. None leaves all.
    """
    if support is None:
        return logits
    vocabulary = logits.shape[-1]
    ids = support.long()
    allowed = torch.zeros(*logits.shape[:-1], vocabulary + 1, dtype=torch.bool, device=logits.device)
    allowed.scatter_(-1, ids.masked_fill(ids < 0, vocabulary), True)
    outside = ~allowed[..., :vocabulary] & (ids >= 0).any(dim=-1, keepdim=True)
    return logits.masked_fill(outside, -torch.inf)


def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, support: Tensor | None = None
) -> Tensor:
    """log softmax(logits / temperature)[token], in float32 (float64 for float64 logits), differentiable.

    Args:
        logits: (B, T, V).
        token_ids: (B, T) int64.
        support: (B, T, K) tokens that the softmax is over, see `restricted`; None: all.

    Returns:
        (B, T).
    """
    scaled = restricted(logits.to(_wide(logits.dtype)) / temperature, support)
    chosen = scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)  # (B, T)
    return chosen - scaled.logsumexp(dim=-1)


def top_logprobs(logits: Tensor, top_ids: Tensor, *, temperature: float = 1.0, support: Tensor | None = None) -> Tensor:
    """log softmax(logits / temperature) of several tokens at each place, (B, T, K), in the type of `token_logprobs`.

    Args:
        logits: (B, T, V).
        top_ids: (B, T, K) token ids; −inf stands where one is negative.
        support: as in `token_logprobs`.
    """
    scaled = restricted(logits.to(_wide(logits.dtype)) / temperature, support)
    return _gathered(scaled, top_ids) - scaled.logsumexp(dim=-1, keepdim=True)


def _gathered(scaled: Tensor, ids: Tensor) -> Tensor:
    """(…, K) logits of ``ids`` (…, K), −inf where an id is negative."""
    return scaled.gather(-1, ids.long().clamp(min=0)).masked_fill(ids < 0, -torch.inf)


def token_entropy(logits: Tensor, *, temperature: float = 1.0, support: Tensor | None = None) -> Tensor:
    """−Σ_v p_v log p_v with p = softmax(logits / temperature), in nats, shape (B, T), differentiable.

    Args:
        support: (B, T, K) tokens that the softmax is over, see `restricted`; None: all.
    """
    logprobs = restricted(logits.to(_wide(logits.dtype)) / temperature, support).log_softmax(dim=-1)  # (B, T, V)
    if support is not None:
        logprobs = logprobs.masked_fill(logprobs == -torch.inf, 0.0)  # whose part of the sum is then 0, and not NaN
    return -(logprobs.exp() * logprobs).sum(dim=-1)


class TaughtTokens(NamedTuple):
    """Last hidden states of a frozen teacher at N tokens, and its LM head."""

    hidden: Tensor  # (N, H')
    weight: Tensor  # (V', H')
    bias: Tensor | None  # (V',)
    mix: float
    """The divergence that is asked for, see ``grpo_pl.functional.divergence``."""
    top_k: int = 0
    """Compare only this many tokens, those that are likeliest for the student, both distributions renormalised over
    them; 0: all."""


class HeadScores(NamedTuple):
    """Result of `head_scores` for N tokens; None if not asked for."""

    logprobs: Tensor  # (N,)
    entropy: Tensor | None  # (N,)
    divergence: Tensor | None  # (N,)
    top_logprobs: Tensor | None  # (N, K), without a gradient


def head_scores(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    support: Tensor | None = None,
    top_ids: Tensor | None = None,
    teacher: TaughtTokens | None = None,
) -> HeadScores:
    """``token_logprobs``, ``token_entropy`` and ``top_logprobs`` of logits z = hidden Wᵀ + b, and the ``divergence``
    from a teacher's distribution, without ever storing all logits.

    The LM head runs over chunks of tokens, so memory does not grow with N · V. Per chunk, with p = softmax(z / τ):

        ∂ log p_k / ∂z_v = ([v = k] − p_v) / τ          ∂ H / ∂z_v = −p_v (log p_v + H) / τ

    The probabilities of the first chunks are kept for the backward pass, up to a fixed budget of memory; those of
    further chunks are computed again there, and beside a teacher both logits of every chunk. Products are computed in
    the type of ``hidden`` (or autocast's), everything else and the sum of the weight's gradient over chunks in float32,
    or float64 for float64 inputs.

    Args:
        hidden: (N, H), inputs of the head at the positions that predict ``token_ids``.
        weight: (V, H); ``bias`` (V,).
        token_ids: (N,) int64.
        temperature: τ, by which logits are divided, a teacher's as well.
        with_entropy: also the entropies; beside a teacher they come anyway.
        support: (N, K) tokens that log-probabilities and entropies are over, see `restricted`; p_v is 0 for all others.
            The divergence is that of the whole distributions.
        top_ids: (N, K) further tokens, see `top_logprobs`.
        teacher: where vocabularies have different sizes, which padding of the embedding makes them, both distributions
            are those over the tokens that they share, the first min(V, V').

    Returns:
        Differentiable once in hidden, weight and bias, except for ``top_logprobs``.

    Raises:
        ValueError: the teacher's mix is no share.
    """
    if teacher is not None:
        check_mix(teacher.mix)
        with_entropy = True
    if teacher is None and support is None and has_triton(hidden.device) and _wide(hidden.dtype) == torch.float32:
        inputs = hidden, weight, bias, token_ids, temperature, top_ids
        fused = accelerated.FusedHead.apply(*inputs)  # type: ignore[no-untyped-call]
        return HeadScores(fused[0], fused[1] if with_entropy else None, None, None if top_ids is None else fused[2])
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias))
    arguments = (hidden, weight, bias, token_ids, temperature, with_entropy, trained and teacher is None, teacher)
    found = _HeadScores.apply(*arguments, support, top_ids)  # type: ignore[no-untyped-call]
    return HeadScores(
        logprobs=found[0],
        entropy=found[1] if with_entropy else None,
        divergence=None if teacher is None else found[2],
        top_logprobs=None if top_ids is None else found[3],
    )


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        with_entropy: bool,
        keep: bool,
        teacher: TaughtTokens | None,
        support: Tensor | None,
        top_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.dtype, ctx.temperature, ctx.teacher = dtype, temperature, teacher
        ctx.set_materialize_grads(False)
        logprobs = torch.empty(len(hidden), dtype=_wide(dtype), device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        distance = logprobs.new_empty(0) if teacher is None else torch.empty_like(logprobs)
        top = logprobs.new_empty(0 if top_ids is None else top_ids.shape)
        kept: list[Tensor] = []
        budget = _KEPT_ELEMENTS if keep else 0
        with torch.autocast(device, enabled=False):
            narrow = weight.to(dtype)
            for rows in _chunks(len(hidden), weight.shape[0], taught=teacher is not None):
                scaled = _logits(hidden[rows].to(dtype), narrow, bias, temperature)  # (C, V)
                if teacher is not None:
                    student, theirs, _ = _taught(scaled, teacher, rows, temperature)
                    distance[rows] = divergence(student, theirs, mix=teacher.mix)
                    del student, theirs
                scaled = restricted(scaled, None if support is None else support[rows])
                scaled -= scaled.amax(dim=-1, keepdim=True)
                chosen = scaled.gather(-1, token_ids[rows].unsqueeze(-1)).squeeze(-1)
                probabilities = scaled.exp()
                total = probabilities.sum(dim=-1)
                logprobs[rows] = chosen - total.log()
                if top_ids is not None:
                    top[rows] = _gathered(scaled, top_ids[rows]) - total.log().unsqueeze(-1)
                if with_entropy:
                    if support is not None:
                        scaled.masked_fill_(probabilities == 0, 0.0)  # not −inf, of which 0 times is NaN
                    mean = torch.bmm(probabilities.unsqueeze(1), scaled.unsqueeze(2)).flatten() / total
                    entropy[rows] = total.log() - mean
                if probabilities.numel() <= budget:
                    budget -= probabilities.numel()
                    kept.append(probabilities.div_(total.unsqueeze(-1)))
                else:
                    budget = 0
        ctx.save_for_backward(hidden, weight, bias, token_ids, support, entropy, *kept)
        ctx.mark_non_differentiable(top)
        return logprobs, entropy, distance, top

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_distance: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, support, entropy, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        wide = _wide(ctx.dtype)
        if grad_entropy is not None and not grad_entropy.any():
            grad_entropy = None  # the entropy is only logged: saves a product per chunk
        to_hidden = torch.empty_like(hidden) if needs_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        to_bias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            narrow = weight.to(ctx.dtype)
            for number, rows in enumerate(_chunks(len(hidden), weight.shape[0], taught=ctx.teacher is not None)):
                inputs = hidden[rows].to(ctx.dtype)
                taught = compared = None
                if number < len(kept):
                    probabilities = kept[number]
                else:
                    scaled = _logits(inputs, narrow, bias, ctx.temperature)
                    if grad_distance is not None and ctx.teacher is not None:
                        student, theirs, compared = _taught(scaled, ctx.teacher, rows, ctx.temperature)
                        taught = divergence_slope(student, theirs, mix=ctx.teacher.mix)  # (C, K or min(V, V'))
                        taught *= grad_distance[rows].unsqueeze(-1) / ctx.temperature
                        del student, theirs
                    probabilities = restricted(scaled, None if support is None else support[rows]).softmax(dim=-1)
                    del scaled
                slope = _slope(
                    probabilities,
                    token_ids[rows],
                    None if grad_logprobs is None else grad_logprobs[rows] / ctx.temperature,
                    None if grad_entropy is None else grad_entropy[rows] / ctx.temperature,
                    entropy[rows] if grad_entropy is not None else None,
                )
                del probabilities
                if taught is not None and compared is not None:
                    slope.scatter_add_(-1, compared, taught)
                elif taught is not None:
                    slope[:, : taught.shape[-1]] += taught
                if to_bias is not None:
                    to_bias += slope.sum(dim=0)
                slope = slope.to(ctx.dtype)
                if to_hidden is not None:
                    to_hidden[rows] = product(slope, narrow).to(hidden.dtype)
                if to_weight is not None:
                    block = max(
                        1, _BLOCK_ELEMENTS // inputs.shape[-1]
                    )  # of the vocabulary: no second tensor that large
                    for start in range(0, len(to_weight), block):
                        to_weight[start : start + block] += gram(slope[:, start : start + block], inputs)
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, *([None] * 7)


def _taught(
    scaled: Tensor, teacher: TaughtTokens, rows: slice, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`compared_logprobs` of a chunk of the student's, whose logits are ``scaled``, and its teacher's."""
    logits = _logits(teacher.hidden[rows].to(teacher.weight.dtype), teacher.weight, teacher.bias, temperature)
    return compared_logprobs(scaled, logits, top_k=teacher.top_k)


def compared_logprobs(student: Tensor, teacher: Tensor, *, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities (…, K) of two distributions over the compared tokens, and the ids of these; None: the first K.

    Those are the tokens that both vocabularies have, the first min(V, V'), or with ``top_k`` as many of them as that,
    the student's likeliest, over which both are renormalised (TRL's ``compute_topk_self_distillation_loss`` without a
    tail).

    Args:
        student: logits (…, V), divided by the temperature; ``teacher`` likewise, (…, V').
    """
    shared = min(student.shape[-1], teacher.shape[-1])
    dtype = torch.promote_types(student.dtype, teacher.dtype)
    pair, ids = [each[..., :shared].to(dtype) for each in (student, teacher)], None
    if 0 < top_k < shared:
        ids = pair[0].topk(top_k, dim=-1).indices
        pair = [each.gather(-1, ids) for each in pair]
    return pair[0].log_softmax(dim=-1), pair[1].log_softmax(dim=-1), ids


def _slope(
    probabilities: Tensor,
    token_ids: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
) -> Tensor:
    """Gradient of the logits (C, V) of one chunk; both incoming gradients (C,) are already divided by temperature."""
    if grad_logprobs is None:
        slope = torch.zeros_like(probabilities)
    else:
        slope = probabilities * -grad_logprobs.unsqueeze(-1)
        slope.scatter_add_(-1, token_ids.unsqueeze(-1), grad_logprobs.unsqueeze(-1))
    if grad_entropy is not None and entropy is not None:
        surprise = torch.special.xlogy(probabilities, probabilities) + probabilities * entropy.unsqueeze(-1)
        slope -= surprise * grad_entropy.unsqueeze(-1)
    return slope


def _logits(inputs: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(C, V) logits divided by the temperature, in at least float32; a new tensor that callers may overwrite."""
    logits = product(inputs, weight.t())
    if bias is not None:
        logits += bias.to(logits.dtype)
    logits = logits.to(_wide(logits.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(tokens: int, vocabulary: int, *, taught: bool = False) -> list[slice]:
    size = max(1, min(_CHUNK_TOKENS, (_TAUGHT_ELEMENTS if taught else _CHUNK_ELEMENTS) // vocabulary))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
