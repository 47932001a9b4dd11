"""``/v1/score``: scores given completions with the rewards of the checkpoint, over HTTP or in a ``RewardAPI``.

A group gets its advantages by the objective that the policy was trained with, where rewards alone give them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

import torch
from fastapi import Request, Response

from grpo_pl.config.objects import build, build_rewards
from grpo_pl.config.presets import preset_name
from grpo_pl.config.terms import OBJECTIVE
from grpo_pl.functional.advantages import masked_mean_std
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.tokenizer import end_of_text
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rewards.base import Reward, needs_of
from grpo_pl.rewards.trust import refuse_own_classes
from serve.admission import AdmissionQueue, QueueFull
from serve.errors import bad_request, check_model
from serve.large_json import large_json_response
from serve.metrics import ServerMetrics
from serve.schemas import ScoreRequest
from serve.score_worker import ScoreItems
from serve.streaming import while_connected
from serve.worker_client import Deadline, WorkerClient

_BASELINES = {"group_mean": "reward − mean", "leave_one_out": "reward − mean of the others", "none": "reward"}
_SCALES = {"group_std": "({}) / (std + {:g})", "group_mean": "({}) / mean", "none": "{}"}
_OWN = "an objective of its own"
_LONGEST, _TOGETHER = 1 << 17, 1 << 20  # characters to tokenise, per text and in all: each takes 500 bytes of memory


def needed_columns(model: ServedModel) -> Collection[str]:
    """The columns that a model's rewards read, see ``Reward.needs``.

    Raises:
        ValueError: a reward cannot be built.
    """
    return needs_of(closed_rewards(model))


def closed_rewards(model: ServedModel) -> list[Reward]:
    """A model's rewards, closed at once: what they say of themselves can be read.

    Raises:
        ValueError: a reward cannot be built.
    """
    rewards = build_rewards(model.rewards, trust_rewards=model.trust_rewards)
    for reward in rewards:
        reward.close()
    return rewards


class Scorer(WorkerClient):
    """The client of the worker that holds the rewards."""

    def __init__(self, *, max_queue: int) -> None:
        super().__init__()
        self._max_queue, self._asking = max_queue, 0

    async def score(self, items: ScoreItems, *, deadline: Deadline, bounded: bool) -> list[Any]:
        """The worker's result for each item, in order.

        Raises:
            QueueFull: ``bounded``, and too many such requests are in progress.
            ApiError: see `ask`.
        """
        if bounded and self._asking >= self._max_queue:
            raise QueueFull(self._asking)
        self._asking += bounded
        try:
            return list(await self.ask(items, deadline=deadline))
        finally:
            self._asking -= bounded


@dataclass(kw_only=True)
class ScoreRoute:
    """Sends items to the reward worker."""

    model: ServedModel
    needs: Collection[str]
    """Columns that the rewards read and that are filled with the tokenizer, see ``Reward.needs``."""
    scorer: Scorer
    metrics: ServerMetrics
    deadline_s: float
    max_queue: InitVar[int]

    def __post_init__(self, max_queue: int) -> None:
        self._objective = group_objective(self.model.algorithm)
        self._preparing = AdmissionQueue(
            1, max_waiting=max_queue
        )  # one request at a time, to bound the memory that this takes

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        return await while_connected(request, self.answer(body))

    async def answer(self, body: ScoreRequest) -> Response:
        check_model(body.model, self.model.name)
        scored = await self._scored(body)
        self.metrics.count_scores(scored)
        return await large_json_response(lambda: self._objective.group(scored) if body.group else {"items": scored})

    async def _scored(self, body: ScoreRequest) -> list[Any]:
        deadline = Deadline(self.deadline_s)
        async with deadline.limit():
            claim = await self._preparing.acquire(bounded=True)
        items = [{**item.__dict__, **(item.model_extra or {})} for item in body.items]
        preparing = asyncio.ensure_future(asyncio.to_thread(self._columns, items))
        preparing.add_done_callback(lambda _: self._preparing.leave(claim))
        columns = await asyncio.shield(preparing)  # if the client disconnects, the thread goes on and keeps its slot
        completions, answers = ([item[name] for item in items] for name in ("completion", "answer"))
        return await self.scorer.score(ScoreItems(completions, answers, columns), deadline=deadline, bounded=True)

    def _columns(self, items: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """All further fields of the items as columns, and those of training that the client does not give."""
        names = sorted({name for item in items for name in item} - {"completion", "answer"})
        columns: dict[str, list[Any]] = {name: [item.get(name) for item in items] for name in names}
        questions = [item.get("question", item.get("problem", "")) for item in items]
        columns.setdefault("question", questions)
        columns.setdefault("prompt", [self._prompt(question) for question in questions])
        if missing := set(self.needs) - columns.keys():
            tokens = self._tokens([item["completion"] for item in items], missing)
            filled: dict[str, list[Any]] = {"completion_ids": tokens, "completion_length": [len(ids) for ids in tokens]}
            columns |= {name: filled[name] for name in missing & filled.keys()}
        return columns

    def _prompt(self, question: Any) -> str:
        rendered = isinstance(question, str) and question
        return self.model.template.render(question, self.model.tokenizer) if rendered else ""

    def _tokens(self, completions: Sequence[str], missing: Collection[str]) -> list[list[int]]:
        """The tokens that the policy would have written, the end token included.

        Raises:
            ApiError: the texts are longer than this server tokenises in one request (400).
        """
        longest, total = max(map(len, completions)), sum(map(len, completions))
        if longest > _LONGEST or total > _TOGETHER:
            message = (
                f"a reward reads {' and '.join(sorted(missing))}, for which completions may have {_LONGEST:,} "
                f"characters, {_TOGETHER:,} together: send less at once, or give these fields with the items."
            )
            raise bad_request("items", message, code="too_long")
        tokenizer, template = self.model.tokenizer, self.model.template
        drawn = (
            template.without_opened_thought(text, tokenizer).removeprefix(template.prefill) for text in completions
        )
        texts = (text.encode("utf-8", "replace").decode() for text in drawn)
        return [[*tokenizer(text, add_special_tokens=False).input_ids, *end_of_text(tokenizer)] for text in texts]


@dataclass(frozen=True, kw_only=True)
class GroupObjective:
    """The objective by which the rewards of one group become advantages.

    Args:
        trained: name of the objective of the training; "" where an export does not say.
        algorithm: that objective, or GRPO where it needs more than the rewards of one group.
    """

    trained: str
    algorithm: GRPOAlgorithm

    @property
    def name(self) -> str:
        return preset_name(self.algorithm.values()) or _OWN

    @property
    def formula(self) -> str:
        """The advantage in words; says where it is not that of the training."""
        a = self.algorithm
        formula = _SCALES[str(a.scale)].format(_BASELINES[str(a.baseline)], a.std_eps)
        formula += ", of right samples only" if a.samples == "correct" else ""
        other = self.trained not in ("", self.name)
        return formula + (
            f"; trained with {self.trained}, whose advantages cannot be shown for one group" if other else ""
        )

    def advantages(self, rewards: Sequence[float | None], correct: Sequence[bool | None]) -> list[float | None]:
        """The advantage of each sample; None where the reward is None."""
        padded = [*rewards, *([None] if len(rewards) == 1 else [])]  # a group is two or more
        values = torch.tensor([[[math.nan if reward is None else reward for reward in padded]]], dtype=torch.float64)
        right = torch.tensor([[verdict is True for verdict in (*correct, False)][: len(padded)]])
        found = replace(self.algorithm, group_size=len(padded)).advantages(
            values=values,
            reward_weights=torch.ones(1, dtype=torch.float64),
            lengths=torch.ones(1, len(padded), dtype=torch.long),
            truncated=torch.zeros(1, len(padded), dtype=torch.bool),
            correct=right,
        )
        known = zip(rewards, found.advantages[0].tolist(), strict=False)
        return [None if reward is None else advantage for reward, advantage in known]

    def group(self, scored: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Scored items with their advantages, and statistics of the group."""
        rewards = [item["value"] for item in scored]
        values = torch.tensor([[math.nan if reward is None else reward for reward in rewards]], dtype=torch.float64)
        valid = ~values.isnan()
        mean, std = masked_mean_std(values.nan_to_num(0.0), valid, dim=1, ddof=self.algorithm.std_ddof)
        advantages = self.advantages(rewards, [item["correct"] for item in scored])
        return {
            "items": [{**item, "advantage": each} for item, each in zip(scored, advantages, strict=True)],
            "group": {
                "mean": mean.item(),
                "std": std.item(),
                "scored": int(valid.sum()),
                "objective": self.name,
                "formula": self.formula,
            },
        }


def group_objective(given: Mapping[str, Any]) -> GroupObjective:
    """The objective of an export or a run.

    Args:
        given: its fields; nothing, or parts that only the training could build, mean GRPO.
    """
    try:
        refuse_own_classes({"algorithm": given})
        trained = build(GRPOAlgorithm, given, OBJECTIVE) if given else None
    except ValueError:  # of another version, or with parts that only the training could build
        trained = None
    if trained is None:
        return GroupObjective(trained=_OWN if given else "", algorithm=GRPOAlgorithm())
    needs = trained.needs
    enough = (
        trained.baseline in _BASELINES
        and trained.scale in _SCALES
        and not (needs.step_rewards or needs.turns or (needs.teacher and not needs.teacher.whole))
        and trained.overlong_buffer == 0
        and not trained.kl_in_reward
        and trained.reward_aggregation == "sum_then_normalize"
    )
    name = preset_name(trained.values()) or _OWN
    return GroupObjective(trained=name, algorithm=trained if enough else GRPOAlgorithm())
