"""Computes the log-probabilities of given completions under a policy (teacher forcing)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_pl.functional import accelerated
from grpo_pl.functional.divergence import divergence
from grpo_pl.functional.gemm import FastLinear
from grpo_pl.functional.logprobs import (
    TaughtTokens,
    compared_logprobs,
    head_scores,
    token_entropy,
    token_logprobs,
    top_logprobs,
)
from grpo_pl.policy.checkpointing import recomputes_as_it_stands, repeated
from grpo_pl.policy.inputs import model_arguments, reading_of
from grpo_pl.policy.library_internals import attends_by_interface, has_hooks
from grpo_pl.policy.packing import Rows, pack, packed_attention
from grpo_pl.types import RowInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

ForwardMode = Literal["packed", "chunked", "materialised"]
"""Ways to compute log-probabilities: ``packed`` runs on packed tokens, ``chunked`` on padded rows with the head in
chunks, ``materialised`` from the logits that the model itself returns."""
Scores = tuple[Tensor, Tensor | None]
"""Log-probabilities (B, T) of the policy's tokens, and if asked for the entropy (B, T) of the distributions that
predict them."""


class UpdateScores(NamedTuple):
    """Scores of the policy's tokens for an update, 0 where there is none; None if not asked for."""

    logprobs: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    divergence: Tensor | None  # (B, T), from a teacher's distribution to that which predicts the token
    top_logprobs: Tensor | None  # (B, T, K), without a gradient

    @property
    def further(self) -> dict[str, Tensor]:
        """What was asked for besides the first two, by name."""
        found = {"divergence": self.divergence, "top_logprobs": self.top_logprobs}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


class Head(NamedTuple):
    """A linear LM head."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)


@dataclass(frozen=True)
class _Options:
    """The scores that are asked for."""

    temperature: float
    with_entropy: bool = False
    teacher: TaughtTokens | None = None
    support: Tensor | None = None  # (B, T, K)
    top_ids: Tensor | None = None  # (B, T, K)


_MODE = "_grpo_pl_forward_mode"
"""Attribute of a model that stores its mode, so that it is tried only once."""


def completion_logprobs(
    model: PreTrainedModel,
    *,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    action_mask: Tensor | None = None,
    segment_index: Tensor | None = None,
    inputs: RowInputs | None = None,
    support: Tensor | None = None,
    temperature: float,
    with_entropy: bool = False,
) -> Scores:
    """log softmax(logits / temperature)[token] (and entropy) of every completion token that the policy wrote.

    Differentiable. Positions count unmasked tokens, so the result does not depend on the amount of padding. If the
    model allows it, neighbouring rows share equal prompts, padding is left out, and the LM head runs in chunks and on
    scored tokens only; what a model allows is tried once, on a few tokens.

    Args:
        prompt_ids: (B, S), left-padded.
        prompt_mask: Likewise.
        completion_ids: (B, T), right-padded.
        completion_mask: Likewise.
        action_mask: (B, T) bool: the tokens that are scored, the others are only attended to; None: all.
        segment_index: (B, T), see ``types.Rollout``: the model reads each segment as a row of its own; None: one a row.
        inputs: B, what the model reads beside the tokens of the prompts, see ``types.RowInputs``.
        support: (B, T, K) tokens that each softmax is over, see ``functional.logprobs.restricted``; None: all.
        temperature: divides the logits, as in sampling.
        with_entropy: also return the entropy in nats.

    Returns:
        logprobs (B, T) float32 (float64 for a float64 model), and entropy (B, T) or None; 0 where masked.
    """
    rows = Rows(prompt_ids, prompt_mask, completion_ids, completion_mask, action_mask, segment_index, inputs)
    columns = _score(model, rows, _Options(temperature, with_entropy, support=support))
    return columns[0], columns[1] if with_entropy else None


def update_scores(
    model: PreTrainedModel,
    *,
    temperature: float,
    support: Tensor | None = None,
    top_ids: Tensor | None = None,
    teacher: TaughtTokens | None = None,
    **rows: Any,
) -> UpdateScores:
    """`completion_logprobs` with entropies, and at each token that the policy wrote the divergence from a teacher's
    whole distribution, differentiable likewise, and the log-probabilities of further tokens; a model whose head runs in
    chunks never stores all logits, nor the teacher's.

    Args:
        rows: the fields of `packing.Rows`, as there.
        support: likewise; the divergence is that of the whole distributions.
        top_ids: (B, T, K), see ``functional.logprobs.top_logprobs``.
        teacher: its N tokens are those that the policy wrote, row after row, as `completion_states` gives them.
    """
    columns = _score(model, Rows(**rows), _Options(temperature, True, teacher, support, top_ids))
    scored = columns if top_ids is None else columns[: -top_ids.shape[2]]
    return UpdateScores(
        logprobs=scored[0],
        entropy=scored[1],
        divergence=None if teacher is None else scored[2],
        top_logprobs=None if top_ids is None else torch.stack(columns[len(scored) :], dim=-1),
    )


@torch.no_grad()
def completion_states(model: PreTrainedModel, **rows: Any) -> tuple[Tensor, Head]:
    """The inputs (N, H) of the LM head at the N tokens that the policy wrote, row after row, and a copy of that head,
    which is whole where the model is sharded; ``rows`` are the fields of `packing.Rows`.

    Raises:
        ValueError: the model's logits are more than a linear head's.
    """
    mode = forward_mode(model)
    if mode == "materialised":
        raise ValueError(
            f"{type(model).__name__} makes more of its head's output than logits, so that its whole distribution "
            "cannot be taken in chunks: set divergence: none in its term of model.algorithm.terms."
        )
    head, copies = model.get_output_embeddings(), list[Head]()

    def states(hidden: Tensor) -> Tensor:
        copies.append(Head(head.weight.clone(), None if head.bias is None else head.bias.clone()))
        return hidden

    with FastLinear():
        found = _with_head(model, Rows(**rows), states, packed=mode == "packed")
    return found, copies[0]


def _score(model: PreTrainedModel, rows: Rows, options: _Options) -> tuple[Tensor, ...]:
    mode = forward_mode(model)
    with ExitStack() as stack:
        if not recomputes_as_it_stands(model):
            stack.enter_context(repeated(FastLinear, partial(accelerated.patched, accelerated.fused_forwards(model))))
        if mode == "materialised":
            return _materialised(model, rows, options)
        return _through_head(model, rows, options, packed=mode == "packed")


def _materialised(model: PreTrainedModel, rows: Rows, options: _Options) -> tuple[Tensor, ...]:
    whole, rows = rows.scored, rows.unfolded()
    mask, ids, temperature = rows.scored, rows.completion_ids, options.temperature
    logits = model(**_padded(model, rows)).logits[:, -ids.shape[1] - 1 : -1]  # (B, T, V)
    columns = [token_logprobs(logits, ids, temperature=temperature, support=options.support).masked_fill(~mask, 0.0)]
    if options.with_entropy:
        entropy = token_entropy(logits, temperature=temperature, support=options.support)
        columns.append(entropy.masked_fill(~mask, 0.0))
    if (teacher := options.teacher) is not None:
        theirs = nn.functional.linear(teacher.hidden, teacher.weight, teacher.bias)  # (N, V')
        wide = torch.promote_types(logits.dtype, torch.float32)
        pair = [z.to(wide) / temperature for z in (logits[mask], theirs)]
        own, target, _ = compared_logprobs(*pair, top_k=teacher.top_k)
        columns.append(_scatter(divergence(own, target, mix=teacher.mix), mask))
    if options.top_ids is not None:
        top = top_logprobs(logits.detach(), options.top_ids, temperature=temperature, support=options.support)
        columns += top.masked_fill(~mask.unsqueeze(-1), 0.0).unbind(dim=-1)
    return tuple(columns if mask.shape == whole.shape else [_scatter(column[mask], whole) for column in columns])


def _padded(model: PreTrainedModel, rows: Rows) -> dict[str, Any]:
    """The inputs of a model for padded rows: prompt and completion concatenated, (B, S + T)."""
    mask = torch.cat([rows.prompt_mask, rows.completion_mask], dim=1).long()  # (B, S + T)
    ids = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1)
    return {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "logits_to_keep": rows.completion_ids.shape[1] + 1,  # the last prompt token predicts the first of these
        **model_arguments(model, ids, None if rows.inputs is None else rows.inputs.of),
    }


def _through_head(model: PreTrainedModel, rows: Rows, options: _Options, *, packed: bool) -> tuple[Tensor, ...]:
    """Runs the model with a head that returns log-probabilities (and entropies …) instead of logits; (B, T) each."""
    head, mask = model.get_output_embeddings(), rows.scored

    def score(hidden: Tensor) -> Tensor:
        """(N, columns) of the scored tokens."""
        found = head_scores(
            hidden,
            head.weight,
            rows.completion_ids[mask],
            bias=head.bias,
            temperature=options.temperature,
            with_entropy=options.with_entropy,
            support=None if options.support is None else options.support[mask],
            top_ids=None if options.top_ids is None else options.top_ids[mask],
            teacher=options.teacher,
        )
        columns = [column for column in found if column is not None]
        return torch.cat([column if column.dim() == 2 else column.unsqueeze(-1) for column in columns], dim=-1)

    scores = _with_head(model, rows, score, packed=packed)
    return tuple(_scatter(column, mask) for column in scores.unbind(dim=-1))


def _with_head(model: PreTrainedModel, rows: Rows, head: Callable[[Tensor], Tensor], *, packed: bool) -> Tensor:
    """The model's output with ``head`` in place of its own, which gets the hidden states (N, H) that predict the N
    scored tokens; it runs inside the model's forward, where FSDP has gathered the head's weight."""
    rows = rows.unfolded()
    mask = rows.scored
    attention: AbstractContextManager[None] = nullcontext()
    # transformers' norms compute in float32, where the sum over a shared prompt's rows would be rounded; float64 models
    # are used in checks that must not depend on how rows are combined
    packing = pack(rows, share=model.dtype != torch.float64) if packed else None
    if packing is None or _window(model) < packing.longest:
        inputs = _padded(model, rows)

        def predicting(hidden: Tensor) -> Tensor:
            return hidden[:, -mask.shape[1] - 1 : -1][mask]

    else:
        own = None if rows.inputs is None else rows.inputs[packing.first].of
        arguments = model_arguments(model, packing.input_ids, own)
        inputs = {"position_ids": packing.position_ids, "packing": packing, **arguments}
        attention, chosen = repeated(partial(packed_attention, model)), packing.predicting

        def predicting(hidden: Tensor) -> Tensor:
            return hidden.squeeze(0).index_select(0, chosen)

    module: Any = model.get_output_embeddings()
    module.forward = lambda hidden: head(predicting(hidden))
    try:
        with attention:
            output: Tensor = model(**inputs, use_cache=False).logits
    finally:
        del module.forward  # the method of the class is in effect again
    return output


def shares_prompts(model: PreTrainedModel, longest: int) -> bool:
    """True if neighbouring rows of up to ``longest`` tokens share equal prompts, and padding is left out."""
    return forward_mode(model) == "packed" and longest <= _window(model)


def forward_mode(model: PreTrainedModel) -> ForwardMode:
    """The mode in which ``model`` is scored; tried at the first call, on all processes of a sharded model at once."""
    if tried_mode(model) is None:
        use_forward_mode(model, _try_modes(model))
        log.info("%s is scored in the %s way.", type(model).__name__, getattr(model, _MODE))
    mode: ForwardMode = getattr(model, _MODE)
    return "chunked" if mode == "packed" and recomputes_as_it_stands(model) else mode


def tried_mode(model: PreTrainedModel | None) -> ForwardMode | None:
    """The mode that was found for ``model``, which a checkpoint keeps: other weights may come out otherwise, and modes
    differ by rounding. None before the first call."""
    found: ForwardMode | None = getattr(model, _MODE, None)
    return found


def use_forward_mode(model: PreTrainedModel | None, mode: ForwardMode | None) -> None:
    """Sets the mode of ``model`` without trying any, as that of a checkpoint; None leaves it to the first call."""
    if model is not None and mode is not None:
        setattr(model, _MODE, mode)


def _try_modes(model: PreTrainedModel) -> ForwardMode:
    """The fastest mode that gives the model's own result, tried on two prompts with two completions each; one of them
    has inputs if the model reads any."""
    device, reading = model.device, reading_of(model)
    prompt_mask = torch.tensor([[True] * 3, [True] * 3, [False, True, True], [False, True, True]], device=device)
    ids = torch.arange(4, device=device).unsqueeze(1)
    completion_mask = torch.tensor([[True] * 3, [True, True, False]] * 2, device=device)
    rows = Rows(
        prompt_ids=(ids // 2 + torch.arange(3, device=device)).masked_fill(~prompt_mask, 0),
        prompt_mask=prompt_mask,
        completion_ids=ids + torch.arange(3, device=device),
        completion_mask=completion_mask,
    )
    if reading is not None:
        tokens, shown = reading.probe
        prompts = [torch.tensor(ids, device=device) for ids in (tokens, tokens, [0, 1], [0, 1])]
        prompt_ids = pad_sequence(prompts, batch_first=True, padding_side="left")
        real = pad_sequence([torch.ones_like(ids).bool() for ids in prompts], batch_first=True, padding_side="left")
        rows = rows._replace(prompt_ids=prompt_ids, prompt_mask=real, inputs=RowInputs([shown, shown, None, None]))
    # packed tokens may interact in causal attention only, and it must go through transformers' interface
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    may_pack = attends_by_interface(model) and kinds <= {"full_attention", "sliding_attention"}
    # the answer is the same in any precision, and rounding hides less of it in the weights' own
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if not _has_plain_head(model, rows):
            return "materialised"
        if not may_pack:
            return "chunked"
        (reference,) = _through_head(model, rows, _Options(1.0), packed=False)
        try:
            (packed,) = _through_head(model, rows, _Options(1.0), packed=True)
        except (NotImplementedError, TypeError, ValueError) as reason:  # the model's own code may refuse packed inputs
            log.debug("%s cannot be packed: %s", type(model).__name__, reason)
            return "chunked"
    # log-probabilities are of some nats where a model knows nothing, and of 25 at the unlikely tokens of a trained one
    tolerance = 2e-5 * reference.abs().max() if model.dtype in (torch.float32, torch.float64) else 0.05
    return "packed" if (packed - reference).abs().max() <= tolerance else "chunked"


def _has_plain_head(model: PreTrainedModel, rows: Rows) -> bool:
    """True if the model's logits are the output of a plain linear head, bit for bit."""
    head = model.get_output_embeddings()
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head) or has_hooks(head):
        return False
    outputs: list[Tensor] = []
    watch = head.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        logits = model(**_padded(model, rows), use_cache=False).logits
    finally:
        watch.remove()
    return len(outputs) == 1 and torch.equal(outputs[0], logits)


def _window(model: PreTrainedModel) -> float:
    """The size of the model's sliding window in tokens; infinite without one."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    uses_it = getattr(config, "use_sliding_window", True)
    return window if window is not None and uses_it else float("inf")


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) with ``values`` (N,) where ``mask``, in order, and zeros elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
