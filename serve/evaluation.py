"""``/v1/evaluate``: draws completions, scores them and sums up; the route, and the same without a server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from fastapi import Request, Response

from grpo_pl.config.objects import build_rewards
from grpo_pl.evaluation.metrics import summarise
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rewards.base import correctness_index, require_correctness
from grpo_pl.rollout.native.continuous import batch_of
from serve.answers import Chunk
from serve.bodies import in_thread, large_json_response
from serve.calls import Deadline
from serve.completions import PolicySpec
from serve.errors import ApiError, bad_request, check_model
from serve.messages import Draw, Part
from serve.prompts import Prompts
from serve.rewards import RewardSpec
from serve.schemas import EvalProblem, EvaluateRequest, Sampling
from serve.score_items import ScoreItems, score_items
from serve.scoring import closed_rewards
from serve.streaming import while_connected

_MOST_COMPLETIONS = 16_384
_TOKENS = 16  # of a completion that are drawn at once, where the decoder can
_NO_JUDGE = "the model's rewards do not say what a right answer is: score completions with /v1/score."
_JUDGED_AT_ONCE = 4  # problems; in the reward worker each takes turns with all other requests


class EvaluateRoute:
    """Evaluates problems; a few of each request at a time wait for slots of the batch, within evaluations' share."""

    def __init__(self, policy: PolicySpec, rewards: RewardSpec) -> None:
        self._policy, self._rewards, self._model = policy, rewards, policy.model
        self._judging = asyncio.Semaphore(_JUDGED_AT_ONCE)
        self._judged = correctness_index(closed_rewards(policy.model)) is not None

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
        results = await while_connected(request, self._all(body.items, parts))
        version = self._policy.version
        return await large_json_response(
            lambda: {"items": results, "summary": summarise(results, n=body.n), "system_fingerprint": version}
        )

    async def _all(self, problems: Sequence[EvalProblem], parts: Sequence[Part]) -> list[dict[str, Any]]:
        """The results in the order of the problems; the first failure cancels all others and is raised."""
        deadline = Deadline(self._policy.deadline)
        at_once = asyncio.Semaphore(max(2, self._policy.size // 2 // len(parts[0].keys)))

        async def one(i: int) -> dict[str, Any]:
            async with at_once:
                return await self._one(problems[i], parts[i], deadline, bounded=i == 0)

        tasks = [asyncio.ensure_future(one(i)) for i in range(len(parts))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:  # after a failure, or when the client disconnects, the other tasks must not continue
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, problem: EvalProblem, part: Part, deadline: Deadline, *, bounded: bool) -> dict[str, Any]:
        metrics = self._policy.metrics
        metrics.prompt_tokens.inc(len(part.prompt_ids))
        finished: list[Chunk] = []
        with self._policy.draw(Draw([part], evaluation=True), deadline=deadline, live=False, bounded=bounded) as call:
            async for chunks in call:
                finished += chunks
        finished.sort(key=lambda chunk: chunk.index)
        metrics.count_tokens(sum(len(chunk.drawn) for chunk in finished))
        # there may be many long texts: in a thread, so that other requests are answered meanwhile
        items = await in_thread(items_of, problem, finished, self._model)
        async with self._judging:
            scored = await self._rewards.score(items, deadline=deadline)
        metrics.count_scores(scored)
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


def evaluate_locally(
    model: ServedModel,
    problems: Sequence[EvalProblem],
    sampling: Sampling,
    *,
    seed: int,
    device: str,
    max_rows: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Evaluates a model; yields (index, result) as problems are finished, with the same results as the route.

    Raises:
        ValueError: a problem with a character that the tokenizer does not know, or that exceeds the context.
    """
    evaluations = Prompts(model).evaluations(problems, sampling, seed=seed, name=lambda i: f"line {i + 1}")
    try:
        waiting = deque(enumerate(asyncio.run(evaluations)))
    except ApiError as error:
        raise ValueError(error.message) from error
    owner: dict[int, tuple[int, list[Chunk], Chunk]] = {}  # by sequence: problem, its completions, the sequence's own
    with ExitStack() as stack:
        rewards = build_rewards(model.rewards, trust_rewards=model.trust_rewards)
        for reward in rewards:
            stack.enter_context(closing(reward))
        require_correctness(rewards, "an evaluation")
        for reward in rewards:
            reward.check()
        batch = batch_of(model, model.load_policy(device), max(max_rows, sampling.n))
        while waiting or len(batch):
            while waiting and len(batch) + sampling.n <= batch.max_rows:
                i, job = waiting.popleft()
                group = [Chunk(sample) for sample in range(sampling.n)]
                sequences = batch.add(job.prompt_ids, job.keys, job.options)
                owner |= {s: (i, group, chunk) for s, chunk in zip(sequences, group, strict=True)}
            for drawn in batch.step(_TOKENS):
                i, group, chunk = owner[drawn.sequence] if drawn.finish is None else owner.pop(drawn.sequence)
                chunk.add(drawn.tokens, drawn.logprobs, drawn.tops, drawn.finish)
                if all(chunk.finish is not None for chunk in group):
                    items = items_of(problems[i], group, model)
                    yield i, result_of(problems[i], items, group, score_items(rewards, items, slice(None)))
