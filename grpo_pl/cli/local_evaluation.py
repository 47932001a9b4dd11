"""Evaluates a model in this process, with the results of ``/v1/evaluate``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from grpo_pl.cli.answering import load_answerer
from grpo_pl.config.objects import build_rewards, closed_rewards
from grpo_pl.evaluation.problems import EvalProblem
from grpo_pl.functional.sampling import row_key
from grpo_pl.policy.trained import ServedModel
from grpo_pl.rewards.base import needs_of, require_correctness
from grpo_pl.rewards.score_items import ScoreItems, score_items
from grpo_pl.rollout.native.continuous import batch_of
from grpo_pl.rollout.sampler import episode_row
from grpo_pl.types import Problem
from serve.answers import Chunk
from serve.errors import ApiError
from serve.evaluation import items_of, result_of
from serve.prompts import Prompts
from serve.schemas import Sampling

_TOKENS = 16  # of a completion that are drawn at once, where the decoder can


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


def evaluate_whole(
    model: ServedModel, problems: Sequence[EvalProblem], sampling: Sampling, *, seed: int, device: str, max_rows: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Plays each problem in the environment of the policy's training, or answers it with its images; yields (index,
    result), a result as `evaluate_locally` gives it. The completion of a sample is the text that the rewards read,
    ``episode`` has its turns.

    Raises:
        ValueError: no reward says what a right answer is.
    """

    closed = closed_rewards(model.rewards, trust_rewards=model.trust_rewards)
    require_correctness(closed, "an evaluation")  # before the policy is loaded
    drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    answerer = load_answerer(model, device, max_completion_length=sampling.length, **drawing)
    n = sampling.n
    together = max(1, max_rows // n)
    with answerer.closed():
        for first in range(0, len(problems), together):
            part = problems[first : first + together]
            asked = []
            for number, each in enumerate(part, start=first):
                name = number if each.id is None else each.id  # which draws the same episodes anywhere in a file
                key = name if isinstance(name, int) else row_key("id", name)
                columns = each.model_extra or {}
                messages = None if isinstance(each.asked, str) else each.asked
                answer = each.gold or ""
                asked.append(Problem(id=key, question=each.question, answer=answer, columns=columns, messages=messages))
            drawn = answerer.sample(asked, samples=n, seed=seed)
            golds = [each.gold for each in part for _ in range(n)]
            needed = drawn.columns(needs_of(answerer.rewards))
            job = ScoreItems(list(drawn.completions), golds, needed, drawn.rollout.group_size)
            scored = score_items(answerer.rewards, job, slice(None))
            lengths, reasons = drawn.rollout.action_lengths.tolist(), drawn.rollout.finish_reasons
            samples = [
                {
                    "completion": job.completions[row],
                    "tokens": lengths[row],
                    "finish_reason": reasons[row],
                    **score,
                    **({} if drawn.episodes is None else {"episode": episode_row(drawn.episodes[row])}),
                }
                for row, score in enumerate(scored)
            ]
            for place, problem in enumerate(part):
                facts = {"problem": problem.problem, "answer": problem.answer, "id": problem.id}
                yield first + place, {**facts, "samples": samples[place * n : (place + 1) * n]}
