"""``SelfTeacher``: the policy with more in its prompt scores what it has drawn without it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.needs import TeacherWeights, Teaching
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.loading import context_length
from grpo_pl.policy.lora import adapters_off
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.rewards.base import require_correctness
from grpo_pl.rewards.batch import ScoredBatch
from grpo_pl.rollout.decoding import pad_left
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.collect import Collected
from grpo_pl.training.frozen_models import EVERY_SOURCE, Reference, TeacherScores
from grpo_pl.training.microbatches import Scorer, longest_row
from grpo_pl.types import Conversation, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SelfTeacher:
    """The policy as a teacher of itself.

    Args:
        policy: copied as it is now, where its start or a moving average is the teacher.
        weights: ``start``, ``live`` or ``average``.
        rate: share of the policy in the average after each rollout.
        text: what the teacher reads besides the question.
        dialogue: encodes the teacher's prompts.
    """

    def __init__(
        self, policy: PreTrainedModel, *, weights: TeacherWeights, rate: float, text: PrivilegedText, dialogue: Dialogue
    ) -> None:
        self.text, self.dialogue = text, dialogue
        self.copy: Reference | None = None
        """The teacher's weights; None for those of the policy as it is."""
        if weights != "live":
            self.copy = Reference(policy, None) if weights == "start" else Reference(policy, 1, rate)

    def score(
        self, policy: PreTrainedModel, collected: Collected, algorithm: GRPOAlgorithm, scorer: Scorer
    ) -> TeacherScores:
        """This rank's samples as the teacher sees them; all ranks call it."""
        samples, asked = collected.samples, algorithm.needs.teacher or Teaching()
        questions = [
            self.text.asked(p, found) for p, found in zip(samples.per_row, self._found(collected), strict=True)
        ]
        rollout = self._with_prompts(samples, questions)
        device = rollout.completion_ids.device
        longest, context = scorer.collective.max(longest_row(rollout), device), context_length(policy.config)
        if context is not None and longest > context:
            raise ValueError(
                f"the teacher's prompt with its privileged text and a completion has {longest} tokens, and the model's "
                f"context {context}: shorten model.privileged.texts, or lower model.sampling.max_completion_length."
            )
        scorer.budget.check(rollout, scorer.collective)
        rows, owners = torch.arange(len(questions), device=device), [EVERY_SOURCE] * len(questions)
        taught = torch.tensor([each is not None for each in questions], device=device)
        model = policy if self.copy is None else self.copy.model
        with nullcontext() if self.copy is None else adapters_off(model):
            if asked.whole:
                states, head = scorer.head_states(model, rollout, rows)
                listed = [states[row] for row in range(len(questions))]
                heads = {EVERY_SOURCE: head}
                return TeacherScores(owners=owners, states=listed, heads=heads, taught=taught, asked=asked)
            logprobs, _ = scorer.logprobs(model, rollout, rows, of_teacher=True)
        logprobs = logprobs.to(rollout.sampling_logprobs.dtype)
        return TeacherScores(owners=owners, logprobs=logprobs, taught=taught)

    def _found(self, collected: Collected) -> list[dict[str, str]]:
        """The texts of the rollout for each row, by their names; none for what the privileged text does not name."""
        samples, scored = collected.samples, collected.scored
        found = [dict[str, str]() for _ in samples.completions]
        if "feedback" in self.text.names:
            names = [reward.name for reward in scored.rewards]
            judge = self.text.feedback_of
            number = require_correctness(scored.rewards, "feedback") if judge is None else names.index(judge)
            for row, score in enumerate(scored.scores[number]):
                found[row]["feedback"] = score.detail.strip()
        if self.text.names & {"right", "best"}:
            for row, (right, best) in enumerate(siblings(scored, samples.rollout.group_size)):
                for name, other in (("right", right), ("best", best)):
                    if other is not None:
                        found[row][name] = samples.completions[other]
        return found

    def _with_prompts(self, samples: Samples, asked: list[str | Conversation | None]) -> Rollout:
        """The rollout with the teacher's prompts; rows without privileged text keep their own."""
        rollout, prompts = samples.rollout, list[list[int]]()
        for row, question in enumerate(asked):
            if question is None:
                prompts.append(rollout.prompt_ids[row][rollout.prompt_mask[row]].tolist())
            elif samples.episodes is not None:
                prompts.append(self.dialogue.prompt_ids(question, samples.episodes[row].start.observation))
            else:
                prompts.append(self.dialogue.template.encode(question, self.dialogue.tokenizer))
        ids, mask = pad_left(prompts, int(self.dialogue.tokenizer.pad_token_id))  # (B, S')
        device = rollout.prompt_ids.device
        return replace(rollout, prompt_ids=ids.to(device), prompt_mask=mask.to(device))


def siblings(scored: ScoredBatch, group_size: int) -> list[tuple[int | None, int | None]]:
    """For each completion two rows of its group: the first other right one, and the one with the highest reward, if
    that is higher than its own."""
    correct, totals = scored.correct(), scored.totals()
    found: list[tuple[int | None, int | None]] = []
    for row, total in enumerate(totals):
        first = row - row % group_size
        others = [other for other in range(first, first + group_size) if other != row]
        right = next((other for other in others if correct[other]), None)
        judged = [(value, -other) for other in others if (value := totals[other]) is not None]
        highest, place = max(judged, default=(None, 0))
        better = highest is not None and (total is None or highest > total)
        found.append((right, -place if better else None))
    return found
