"""Thinking budgets: closes a thought that has reached its budget, and lets the policy go on behind the close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import gt
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from grpo_pl.functional.sampling import small_seed
from grpo_pl.rollout.decoding import join_rollouts
from grpo_pl.rollout.engine import RolloutEngine, Watching, counting_on
from grpo_pl.rollout.texts import TextStream
from grpo_pl.types import NO_TOKEN, FinishReason, GenerateRequest, Rollout, SampleKey, SamplingParams, ThoughtEnd

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RECORDED = {"sampling_logprobs": 0.0, "support": NO_TOKEN, "top_ids": NO_TOKEN, "top_logprobs": -torch.inf}


def drawn_budget(sampling: SamplingParams, key: SampleKey) -> int:
    """Most tokens of a completion's thought: ``sampling.thinking_budget``, or a number of its range that follows from
    the key, all of them equally likely."""
    budget = sampling.thinking_budget
    assert budget is not None, "there is no budget"
    low, high = budget if isinstance(budget, tuple) else (budget, budget)
    parts = (key.seed, key.split, key.step, key.attempt, key.prompt_id, key.sample, key.turn)
    return low + small_seed("thinking budget", *parts) % (high - low + 1)


def draw_completions(
    engine: RolloutEngine, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]
) -> Rollout:
    """The engine's completions within ``sampling.thinking_budget``, where the request has one.

    Each completion is drawn up to its budget. One whose thought is not over by then gets the tokens of
    ``request.thought``, which ``action_mask`` leaves out; then all that have not ended go on, with the noise of their
    positions in the whole completion. So any engine can do it, and a sample stays a function of weights and key. The
    fed tokens count in ``max_completion_length``.

    Raises:
        RolloutInterrupted: ``should_stop`` turned true.
        ValueError: the engine does not keep to ``request.limits``.
    """
    if request.thought is None:
        return engine.generate(model, request, **watching)
    keys = [key for group in request.keys for key in group]
    longest, budgets = request.row_limits, [drawn_budget(request.sampling, key) for key in keys]
    begun = _limited(request, list(map(min, budgets, longest)), request.group_size)
    first = _generate(engine, model, begun, **counting_on(watching, 0, 0, ends=False))
    rows = [_Row.begun(request, first, i, limit=longest[i], budget=budgets[i]) for i in range(len(keys))]
    going, drawn = [i for i, row in enumerate(rows) if row.finish is None], first
    if going:
        prompts = [[*request.prompt_ids[i // request.group_size], *rows[i].tokens] for i in going]
        names = [[replace(keys[i], drawn=len(rows[i].tokens))] for i in going]
        left = [longest[i] - len(rows[i].tokens) for i in going]
        inputs = None if request.inputs is None else [request.inputs[i // request.group_size] for i in going]
        rest = _limited(replace(request, prompt_ids=prompts, keys=names, inputs=inputs), left, 1)
        counted = counting_on(watching, int(first.lengths.sum()), len(rows) - len(going))
        later = _generate(engine, model, rest, **counted)
        drawn = join_rollouts([first, later], request.pad_token_id)
        for number, i in enumerate(going, start=len(rows)):
            rows[i].go_on(request, drawn, number)
    return _as_one(request, rows, first, drawn)


def _generate(
    engine: RolloutEngine, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]
) -> Rollout:
    rollout = engine.generate(model, request, **watching)
    if any(map(gt, rollout.lengths.tolist(), request.row_limits)):
        raise ValueError(
            f"{type(engine).__name__} drew more tokens than request.limits allows a completion: let it keep to them, "
            "or set model.sampling.thinking_budget null."
        )
    return rollout


def _limited(request: GenerateRequest, limits: Sequence[int], group_size: int) -> GenerateRequest:
    """The request without a budget, with most tokens of each row."""
    sampling = replace(request.sampling, thinking_budget=None, max_completion_length=max(limits))
    groups = [limits[i : i + group_size] for i in range(0, len(limits), group_size)]
    return replace(request, thought=None, sampling=sampling, limits=groups)


@dataclass
class _Row:
    """A completion: tokens of the first draw, tokens that were fed, tokens of the second draw."""

    tokens: list[int]
    kept: int
    """Tokens of the first draw."""
    fed: int
    thought: tuple[int, int]
    """Tokens of the thought, and its budget."""
    finish: FinishReason | None
    """None while it goes on."""
    later: int = 0
    """Number of its second draw among the rows of both draws."""

    @classmethod
    def begun(cls, request: GenerateRequest, first: Rollout, row: int, *, limit: int, budget: int) -> _Row:
        assert request.thought is not None
        tokens = first.completion_ids[row, : int(first.lengths[row])].tolist()
        stopped = first.finish_reasons[row] == "stop"
        over = request.thought.length(tokens)
        short = not stopped and len(tokens) < min(budget, limit)  # by an engine that draws less than it was asked for
        cut = over is None and not (stopped or short)
        fed = request.thought.tokens[: limit - len(tokens)] if cut else ()
        full = short or len(tokens) + len(fed) >= limit
        return cls(
            tokens=[*tokens, *fed],
            kept=len(tokens),
            fed=len(fed),
            thought=(len(tokens) if over is None else over, budget),
            finish="stop" if stopped else "length" if full else None,
        )

    def go_on(self, request: GenerateRequest, drawn: Rollout, row: int) -> None:
        new = drawn.completion_ids[row, : int(drawn.lengths[row])].tolist()
        self.finish, self.later = drawn.finish_reasons[row], row
        if (stops := request.stops) is not None:  # a stop string may begin before what was drawn now
            text = TextStream(stops.tokenizer, stops.texts, prefix=stops.prefix)
            text.push([*self.tokens, *new])
            if text.stopped:
                new, self.finish = new[: max(1, len(text.tokens) - len(self.tokens))], "stop"
        self.tokens += new


def _as_one(request: GenerateRequest, rows: Sequence[_Row], first: Rollout, drawn: Rollout) -> Rollout:
    """``drawn`` has the rows of the first draw, and behind them those of the second."""
    device, width = first.completion_ids.device, max(len(row.tokens) for row in rows)
    numbers = [(i, row.later, row.kept, row.kept + row.fed, len(row.tokens)) for i, row in enumerate(rows)]
    own, later, begin, end, lengths = torch.tensor(numbers, device=device).T.unsqueeze(2)  # (B, 1) each
    places = torch.arange(width, device=device)
    mask, again = places < lengths, places >= end  # (B, T)
    written = mask & ((places < begin) | again)
    source = torch.where(again, later, own)
    place = torch.where(again, places - end, places).clamp(max=drawn.completion_ids.shape[1] - 1)
    recorded: dict[str, Any] = {}  # (B, T, …) of the tokens that the policy wrote
    for name, fill in _RECORDED.items():
        if (tensor := getattr(drawn, name)) is not None:
            there = written.view(*written.shape, *[1] * (tensor.dim() - 2))
            recorded[name] = torch.where(there, tensor[source, place], fill)
    return Rollout(
        group_size=request.group_size,
        prompt_ids=first.prompt_ids,
        prompt_mask=first.prompt_mask,
        completion_ids=torch.tensor(
            [row.tokens + [request.pad_token_id] * (width - len(row.tokens)) for row in rows], device=device
        ),
        completion_mask=mask,
        action_mask=written,
        finish_reasons=[row.finish or "length" for row in rows],
        thoughts=torch.tensor([[row.thought] for row in rows], dtype=torch.int32, device=device),
        inputs=first.inputs,
        **recorded,
    )


class ThoughtMask:
    """A `TokenMask` that lets anything follow but for the end of a thought behind its budget: what `draw_completions`
    does, a token at a time.

    Args:
        budget: most tokens of the thought.
    """

    def __init__(self, end: ThoughtEnd, budget: int) -> None:
        self._end, self._budget = end, budget
        self._drawn: list[int] = []
        self._fed: Sequence[int] | None = None  # known once the budget is reached

    def allowed(self, vocabulary: int) -> Tensor:
        """(V,) bool."""
        place = len(self._drawn) - self._budget
        if place == 0:
            self._fed = self._end.tokens if self._end.length(self._drawn) is None else ()
        if self._fed is None or not 0 <= place < len(self._fed):
            return torch.ones(vocabulary, dtype=torch.bool)
        return torch.arange(vocabulary) == self._fed[place]

    def accept(self, token: int) -> None:
        """Takes the token that was drawn."""
        self._drawn.append(token)
