"""``/v1/evaluate`` without a server, with the same batch, keys and rewards in this process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_pl.config.objects import build_rewards
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout.native.continuous import batch_of
from serve.dispatch import Chunk
from serve.errors import ApiError
from serve.evaluation import items_of, result_of
from serve.prompts import Prompts
from serve.schemas import EvalProblem, Sampling
from serve.score_worker import score_items


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
    rewards = build_rewards(model.rewards, trust_rewards=model.trust_rewards)
    for reward in rewards:
        reward.check()
    batch = batch_of(model, model.load_policy(device), max(max_rows, sampling.n))
    owner: dict[int, tuple[int, list[Chunk], Chunk]] = {}  # by sequence: problem, its completions, the sequence's own
    try:
        while waiting or len(batch):
            while waiting and len(batch) + sampling.n <= batch.max_rows:
                i, job = waiting.popleft()
                group = [Chunk(sample) for sample in range(sampling.n)]
                sequences = batch.add(job.prompt_ids, job.keys, job.options)
                owner |= {s: (i, group, chunk) for s, chunk in zip(sequences, group, strict=True)}
            for drawn in batch.step():
                i, group, chunk = owner[drawn.sequence]
                chunk.add(drawn.token, drawn.logprob, drawn.top, drawn.finish)
                if all(chunk.finish is not None for chunk in group):
                    items = items_of(problems[i], group, model)
                    yield i, result_of(problems[i], items, group, score_items(rewards, items, slice(None)))
    finally:
        for reward in rewards:
            reward.close()
