"""``/v1/evaluate`` without a server: the same batch, keys and rewards in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_pl.config.rewards import build_rewards
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rollout.engine import row_keys
from grpo_pl.rollout.native.continuous import batch_of
from serve.dispatch import Chunk
from serve.errors import ApiError
from serve.evaluation import items_of, result_of
from serve.prompts import Prompts, sample_keys
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
    """Yields (index, result) as problems are finished; the results are those of the route.

    Raises:
        ValueError: a problem that the model cannot read or hold.
    """
    prompts, n = Prompts(model), sampling.n
    try:
        ids = [asyncio.run(prompts.from_problem(p.problem, f"line {i + 1}")) for i, p in enumerate(problems)]
        logits = prompts.logits(sampling)
        options = [prompts.options(tokens, sampling, logits=logits) for tokens in ids]
    except ApiError as error:
        raise ValueError(error.message) from error
    policy = model.load_policy(device)
    batch = batch_of(model, policy, max(max_rows, n))
    rewards = build_rewards(model.rewards, trust_rewards=model.trust_rewards)
    waiting = list(range(len(problems)))
    owner: dict[int, tuple[int, Chunk]] = {}  # by sequence: problem and completion
    groups: dict[int, list[Chunk]] = {}
    try:
        while waiting or len(batch):
            while waiting and len(batch) + n <= batch.max_rows:
                i = waiting.pop(0)
                keys = row_keys([sample_keys(ids[i], seed=seed, n=n, prompt_id=problems[i].id)])
                groups[i] = [Chunk(sample) for sample in range(n)]
                sequences = batch.add(ids[i], keys, options[i])
                owner |= {s: (i, chunk) for s, chunk in zip(sequences, groups[i], strict=True)}
            for drawn in batch.step():
                i, chunk = owner[drawn.sequence]
                chunk.add(drawn.token, drawn.logprob, finish=drawn.finish)
                if drawn.finish is not None:
                    del owner[drawn.sequence]
                    if all(c.finish is not None for c in groups[i]):
                        finished = groups.pop(i)
                        texts, job = items_of(problems[i], finished, model)
                        yield i, result_of(problems[i], texts, finished, score_items(rewards, job, slice(None)))
    finally:
        for reward in rewards:
            reward.close()
