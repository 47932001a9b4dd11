"""What ``evaluate`` does with a policy that was trained in an environment: it plays the problems of a file there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from grpo_pl.cli.answering import load_answerer
from grpo_pl.functional.sampling import row_key
from grpo_pl.rewards.base import Reward, needs_of
from grpo_pl.rollout.sampler import Samples, episode_row
from grpo_pl.types import Problem
from serve.score_worker import ScoreItems, score_items

if TYPE_CHECKING:
    from grpo_pl.policy.trained import ServedModel
    from serve.schemas import EvalProblem, Sampling


def evaluate_episodes(
    model: ServedModel, problems: Sequence[EvalProblem], sampling: Sampling, *, seed: int, device: str, max_rows: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (index, result) for each problem, a result as `serve.local.evaluate_locally` gives it; the completion of
    a sample is what the rewards read, ``episode`` has its turns.

    Raises:
        ValueError: a problem that the context has no room for, or an environment that refuses its settings.
    """
    n, training = sampling.n, model.sampling
    drawing = replace(
        training,
        max_completion_length=sampling.length or training.max_completion_length,
        temperature=training.temperature if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
    answerer = load_answerer(model, device, drawing)
    assert answerer.sampler.pool is not None
    together = max(1, max_rows // n)
    with ExitStack() as stack:
        for reward in answerer.rewards:
            stack.enter_context(closing(reward))
        stack.enter_context(answerer.sampler.pool)
        for first in range(0, len(problems), together):
            part = problems[first : first + together]
            asked = [_problem(number, each) for number, each in enumerate(part, start=first)]
            drawn = answerer.sample(asked, samples=n, seed=seed)
            samples = _judged(drawn, answerer.rewards)
            for place, problem in enumerate(part):
                facts = {"problem": problem.problem, "answer": problem.answer, "id": problem.id}
                yield first + place, {**facts, "samples": samples[place * n : (place + 1) * n]}


def _judged(drawn: Samples, rewards: Sequence[Reward]) -> list[dict[str, Any]]:
    """What is told of each episode."""
    assert drawn.episodes is not None
    golds = [problem.answer for problem in drawn.per_row]
    job = ScoreItems(list(drawn.completions), golds, drawn.columns(needs_of(rewards)), drawn.rollout.group_size)
    scored = score_items(rewards, job, slice(None))
    lengths, reasons = drawn.rollout.action_lengths.tolist(), drawn.rollout.finish_reasons
    return [
        {
            "completion": job.completions[row],
            "tokens": lengths[row],
            "finish_reason": reasons[row],
            **score,
            "episode": episode_row(episode),
        }
        for row, (score, episode) in enumerate(zip(scored, drawn.episodes, strict=True))
    ]


def _problem(number: int, given: EvalProblem) -> Problem:
    """One that draws the same episodes wherever it stands in a file, if it has an id."""
    name = number if given.id is None else given.id
    identity = name if isinstance(name, int) else row_key("id", name)
    return Problem(id=identity, question=given.problem, answer=given.answer, columns=given.model_extra or {})
