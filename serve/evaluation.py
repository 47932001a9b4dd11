"""``/v1/evaluate``: generate, score and sum up, through the same batch and the same rewards as everyone else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response

from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout.engine import row_keys
from grpo_pl.rollout.native.continuous import SequenceOptions
from serve.connection import while_connected
from serve.dispatch import Chunk, Deadline, Generator, Scorer
from serve.errors import bad_request, json_response
from serve.metrics import ServerMetrics
from serve.prompts import Prompts, sample_keys
from serve.schemas import EvalProblem, EvaluateRequest
from serve.score_worker import ScoreItems
from serve.summary import summarise

_MOST_COMPLETIONS = 16_384
_JUDGED_AT_ONCE = 4  # problems; the reward worker judges eight requests at once, and half of that is for others
_PER_TURN = 16  # prompts encoded before others get a turn of the event loop


class EvaluateRoute:
    """Problems wait for places in the batch, a few of each evaluation at a time, within the share of evaluations."""

    def __init__(
        self, *, generator: Generator, scorer: Scorer, prompts: Prompts, metrics: ServerMetrics, deadline_s: float
    ) -> None:
        self._generator, self._scorer, self._prompts = generator, scorer, prompts
        self._metrics, self._deadline_s = metrics, deadline_s
        self._judging = asyncio.Semaphore(_JUDGED_AT_ONCE)

    async def evaluate(self, body: EvaluateRequest, request: Request) -> Response:
        if len(body.items) * body.n > _MOST_COMPLETIONS:
            raise bad_request(
                f"items: {len(body.items)} problems with n={body.n} are more than {_MOST_COMPLETIONS} completions.",
                param="items",
            )
        self._prompts.check_model(body.model)
        logits, prompts = self._prompts.logits(body), []
        for i, problem in enumerate(body.items):
            prompts.append(await self._prompts.from_problem(problem.problem, f"items.{i}.problem"))
            if i % _PER_TURN == 0:
                await asyncio.sleep(0)
        options = [self._prompts.options(ids, body, logits=logits) for ids in prompts]
        results = await while_connected(request, self._all(body, prompts, options))
        # thousands of samples: in a thread, so that other requests are answered meanwhile
        return await asyncio.to_thread(
            lambda: json_response({"items": results, "summary": summarise(results, n=body.n)})
        )

    async def _all(
        self, body: EvaluateRequest, prompts: Sequence[list[int]], options: Sequence[SequenceOptions]
    ) -> list[dict[str, Any]]:
        """The results in the order of the items; the first failure ends them all."""
        deadline, seed = Deadline(self._deadline_s), body.seed_or_random()
        at_once = asyncio.Semaphore(max(2, 2 * self._generator.places.share // body.n))

        async def one(i: int) -> dict[str, Any]:
            async with at_once:
                keys = row_keys([sample_keys(prompts[i], seed=seed, n=body.n, prompt_id=body.items[i].id)])
                return await self._one(body.items[i], prompts[i], keys, options[i], deadline, bounded=i == 0)

        tasks = [asyncio.ensure_future(one(i)) for i in range(len(prompts))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # after a failure, or when the client hangs up, the others must not go on
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(
        self,
        problem: EvalProblem,
        ids: Sequence[int],
        keys: Sequence[int],
        options: SequenceOptions,
        deadline: Deadline,
        *,
        bounded: bool,
    ) -> dict[str, Any]:
        self._metrics.count_prompt(len(ids))
        done: dict[int, Chunk] = {}
        chunks: AsyncGenerator[list[Chunk], None] = self._generator.generate(
            ids, keys, options, live=False, deadline=deadline, bounded=bounded, evaluation=True
        )
        async with aclosing(chunks):
            async for part in chunks:
                done.update({chunk.index: chunk for chunk in part})
        finished = [done[i] for i in range(len(keys))]
        self._metrics.count_tokens(sum(len(chunk.tokens) for chunk in finished))
        return await self._judge(problem, finished, deadline)

    async def _judge(self, problem: EvalProblem, finished: Sequence[Chunk], deadline: Deadline) -> dict[str, Any]:
        texts, job = items_of(problem, finished, self._prompts.model)
        async with self._judging:
            scored = await self._scorer.score(job, deadline=deadline, bounded=False)
        self._metrics.count_scores(scored)
        return result_of(problem, texts, finished, scored)


def items_of(problem: EvalProblem, finished: Sequence[Chunk], model: ServedModel) -> tuple[list[str], ScoreItems]:
    """The texts of a problem's completions, and the job of scoring them as a group."""
    n = len(finished)
    texts = [model.template.completion_text(chunk.tokens, model.tokenizer) for chunk in finished]
    columns: dict[str, list[Any]] = {name: [value] * n for name, value in (problem.model_extra or {}).items()}
    columns["question"] = [problem.problem] * n
    columns["prompt"] = [model.template.render(problem.problem, model.tokenizer)] * n
    columns["completion_length"] = [len(chunk.tokens) for chunk in finished]
    columns["completion_ids"] = [chunk.tokens for chunk in finished]
    return texts, ScoreItems(texts, [problem.answer] * n, columns, group_size=n)


def result_of(
    problem: EvalProblem, texts: Sequence[str], finished: Sequence[Chunk], scored: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What an evaluation reports about one problem."""
    samples = [
        {"completion": text, "tokens": len(chunk.tokens), "finish_reason": chunk.finish, **score}
        for text, chunk, score in zip(texts, finished, scored, strict=True)
    ]
    return {"problem": problem.problem, "answer": problem.answer, "id": problem.id, "samples": samples}
