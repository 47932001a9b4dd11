"""``/v1/score``: the rewards of the checkpoint over given completions; nothing is generated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fastapi import Request, Response

from grpo_pl.functional.advantages import masked_mean_std, rescale, subtract_baseline
from serve.connection import while_connected
from serve.dispatch import Deadline, Scorer
from serve.errors import json_response
from serve.metrics import ServerMetrics
from serve.schemas import ScoreRequest, parse_object
from serve.score_worker import ScoreItems
from serve.served import ServedModel

_EPS = 1e-5  # the objective's default


class ScoreRoute:
    """Hands items to the reward worker."""

    def __init__(self, *, model: ServedModel, scorer: Scorer, metrics: ServerMetrics, deadline_s: float) -> None:
        self._model, self._scorer, self._metrics, self._deadline_s = model, scorer, metrics, deadline_s

    async def score(self, request: Request) -> Response:
        body = ScoreRequest(parse_object(await request.body()))
        columns = await asyncio.to_thread(self._columns, body.items)
        job = ScoreItems(
            completions=[item["completion"] for item in body.items],
            answers=[item["answer"] for item in body.items],
            columns=columns,
        )
        scored = await while_connected(request, self._scorer.score(job, deadline=Deadline(self._deadline_s)))
        self._metrics.count_scores(scored)
        return json_response(_as_group(scored) if body.group else {"items": scored})

    def _columns(self, items: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """Every further field of the items, and what training puts beside them unless the client gives it."""
        names = sorted({name for item in items for name in item} - {"completion", "answer"})
        columns: dict[str, list[Any]] = {name: [item.get(name) for item in items] for name in names}
        questions = [item.get("question", item.get("problem", "")) for item in items]
        columns.setdefault("question", questions)
        columns.setdefault("prompt", [self._prompt(question) for question in questions])
        if "completion_length" not in columns:
            columns["completion_length"] = [self._length(item["completion"]) for item in items]
        return columns

    def _prompt(self, question: Any) -> str:
        rendered = isinstance(question, str) and question
        return self._model.template.render(question, self._model.tokenizer) if rendered else ""

    def _length(self, completion: str) -> int:
        """Tokens that the policy would have written, the end token included."""
        text = completion.removeprefix(self._model.template.prefill)
        clean = text.encode("utf-8", "replace").decode()
        return len(self._model.tokenizer(clean, add_special_tokens=False).input_ids) + 1


def _as_group(scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The items as one group of samples: with the advantage that GRPO would give each (group mean and std)."""
    values = torch.tensor([[math.nan if item["value"] is None else item["value"] for item in scored]]).double()
    valid = ~values.isnan()
    rewards = values.nan_to_num(0.0)
    mean, std = masked_mean_std(rewards, valid, dim=1, ddof=1)
    advantages = rescale(
        subtract_baseline(rewards, valid, baseline="group_mean"),
        rewards,
        valid,
        torch.ones_like(valid),
        scale="group_std",
        ddof=1,
        eps=_EPS,
    )
    items = [
        {**item, "advantage": advantage if known else None}
        for item, advantage, known in zip(scored, advantages[0].tolist(), valid[0].tolist(), strict=True)
    ]
    return {"items": items, "group": {"mean": mean.item(), "std": std.item(), "scored": int(valid.sum())}}
