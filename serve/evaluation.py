"""``/v1/evaluate``: draws completions, scores them and sums up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from grpo_pl.evaluation.metrics import summarise
from grpo_pl.evaluation.problems import EvalProblem
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rewards.base import correctness_index
from grpo_pl.rewards.score_items import ScoreItems
from serve.answers import Chunk
from serve.bodies import in_thread, large_json_response
from serve.calls import Deadline
from serve.completions import PolicySpec
from serve.errors import ApiError, bad_request, check_model
from serve.messages import Draw, Part
from serve.rewards import RewardSpec
from serve.schemas import EvaluateRequest
from serve.streaming import while_connected

_MOST_COMPLETIONS = 16_384
_NO_JUDGE = "the model's rewards do not say what a right answer is: score completions with /v1/score."
_JUDGED_AT_ONCE = 4  # problems; in the reward worker each takes turns with all other requests


class EvaluateRoute:
    """Evaluates problems: one request draws the completions of all, and each problem is judged when it has all of its
    own."""

    def __init__(self, policy: PolicySpec, rewards: RewardSpec) -> None:
        self._policy, self._rewards, self._model = policy, rewards, policy.model
        self._judging = asyncio.Semaphore(_JUDGED_AT_ONCE)
        self._judged = correctness_index(rewards.built) is not None

    async def evaluate(self, body: EvaluateRequest, request: Request) -> Response:
        if len(body.items) * body.n > _MOST_COMPLETIONS:
            problems = f"{len(body.items)} problems with n={body.n}"
            raise bad_request("items", f"{problems} are more than {_MOST_COMPLETIONS} completions.")
        check_model(body.model, self._model.name)
        if not self._judged:
            raise ApiError(400, _NO_JUDGE, code="no_correctness")
        parts = await self._policy.prompts.evaluations(
            body.items, body, seed=body.seed_or_random(), name=lambda i: f"items.{i}.problem"
        )
        results, version = await while_connected(request, self._all(body.items, parts))
        return await large_json_response(
            lambda: {"items": results, "summary": summarise(results, n=body.n), "system_fingerprint": version}
        )

    async def _all(self, problems: Sequence[EvalProblem], parts: list[Part]) -> tuple[list[dict[str, Any]], str]:
        """The results in the order of the problems, and the name of the weights that drew them."""
        deadline, n = Deadline(self._policy.deadline), len(parts[0].keys)
        finished: list[list[Chunk]] = [[] for _ in problems]
        judging: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._policy.metrics.prompt_tokens.inc(sum(len(part.prompt_ids) for part in parts))
        try:
            async with asyncio.TaskGroup() as tasks:
                with self._policy.draw(Draw(parts), deadline=deadline, live=False) as call:
                    async for chunk in (chunk async for chunks in call for chunk in chunks):
                        self._policy.metrics.generated_tokens.inc(len(chunk.drawn))
                        place = chunk.index // n
                        finished[place].append(chunk)
                        if len(finished[place]) == n:
                            judging[place] = tasks.create_task(self._judge(problems[place], finished[place], deadline))
        except BaseExceptionGroup as failed:  # the first failure has cancelled all else
            raise failed.exceptions[0] from None
        return [judging[i].result() for i in range(len(problems))], call.version

    async def _judge(self, problem: EvalProblem, finished: list[Chunk], deadline: Deadline) -> dict[str, Any]:
        finished.sort(key=lambda chunk: chunk.index)
        async with self._judging:
            # there may be many long texts: in a thread, so that other requests are answered meanwhile
            items = await in_thread(items_of, problem, finished, self._model)
            scored = await self._rewards.ask(items, deadline=deadline)
        self._policy.metrics.count_scores(scored)
        return result_of(problem, items, finished, scored)


def items_of(problem: EvalProblem, finished: Sequence[Chunk], model: ServedModel) -> ScoreItems:
    """The job for the reward worker: a problem's completions as a group, with the columns of training."""
    n, tokens = len(finished), [chunk.tokens for chunk in finished]
    columns: dict[str, list[Any]] = {name: [value] * n for name, value in (problem.model_extra or {}).items()}
    columns["question"] = [problem.question] * n
    if not isinstance(problem.asked, str):
        columns["prompt_messages"] = [list(problem.asked)] * n
    columns["prompt"] = [model.template.render(problem.asked, model.tokenizer)] * n
    columns["completion_length"] = list(map(len, tokens))
    columns["completion_ids"] = tokens
    texts = [model.template.completion_text(ids, model.tokenizer) for ids in tokens]
    return ScoreItems(texts, [problem.gold] * n, columns, group_size=n)


def result_of(
    problem: EvalProblem, items: ScoreItems, finished: Sequence[Chunk], scored: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The entry of one problem in the answer of an evaluation."""
    samples = [
        {"completion": text, "tokens": len(chunk.drawn), "finish_reason": chunk.finish, **score}
        for text, chunk, score in zip(items.completions, finished, scored, strict=True)
    ]
    return {"problem": problem.problem, "answer": problem.answer, "id": problem.id, "samples": samples}
