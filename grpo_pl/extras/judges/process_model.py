"""``ProcessModelReward``: a model's value for every step of a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_pl.extras.judges.model import LoadsModel
from grpo_pl.rewards.base import Columns, StepScores
from grpo_pl.rewards.process import ProcessReward, line_steps


@dataclass(kw_only=True)
class ProcessModelReward(LoadsModel, ProcessReward):
    """A model with a token-classification head scores each line of a completion; range [0, 1].

    The value of a step is the probability of ``label`` at the last token of the step, as process reward models in the
    manner of Math-Shepherd (arXiv 2312.08935) and PRM800K are trained. Steps are the lines that are not blank. The
    model reads ``prompt + completion``, and its tokenizer must be a fast one; a completion with a step beyond
    ``max_length`` tokens gets no score. Its folder cannot run code: see `LoadsModel`.
    """

    model_class: ClassVar[str] = "AutoModelForTokenClassification"
    tokenizer_options: ClassVar[Mapping[str, Any]] = {"padding_side": "right", "truncation_side": "right"}
    name: str = "process"
    label: int = 1
    """Index of the label which means that a step is good."""
    batch_size: int = 8
    max_length: int = 2048

    def steps(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[StepScores | None]:
        prompts = [str(p) for p in columns.get("prompt", [""] * len(completions))]
        rows = list(zip(prompts, completions, strict=True))
        scored: list[StepScores | None] = []
        for start in range(0, len(rows), self.batch_size):
            scored += self._forward(rows[start : start + self.batch_size])
        return scored

    def _forward(self, rows: list[tuple[str, str]]) -> list[StepScores | None]:
        texts = [prompt + completion for prompt, completion in rows]
        batch, logits = self._logits(texts, return_offsets_mapping=True)  # (rows, tokens, labels)
        good: list[list[float]] = [[]] * len(rows)
        if logits is not None:
            good = logits.softmax(dim=2)[:, :, self.label].tolist()  # (rows, tokens)
        return [
            _at_step_ends(values, spans, completion, shift=len(prompt))
            for values, spans, (prompt, completion) in zip(good, batch["offset_mapping"].tolist(), rows, strict=True)
        ]

    def _from_folder(self) -> tuple[Any, Any]:
        model, tokenizer = super()._from_folder()
        if not tokenizer.is_fast:
            raise ValueError(f"{self.model!r} has no fast tokenizer, which is needed to find the ends of steps.")
        return model, tokenizer


def _at_step_ends(
    values: Sequence[float], spans: Sequence[Sequence[int]], completion: str, *, shift: int
) -> StepScores | None:
    """The value of the token that holds the last character of each step; ``None`` if truncation cut off such a token.

    Args:
        values: one per token.
        spans: (start, end) in characters of each token in prompt + completion.
        completion: the text whose lines are the steps.
        shift: characters of the prompt.
    """
    ends = [end for _, end in line_steps(completion)]
    picked = []
    token = 0
    for end in ends:  # in order, as the tokens are
        last = shift + end - 1
        while token < len(spans) and not spans[token][0] <= last < spans[token][1]:
            token += 1
        if token == len(spans):
            return None
        picked.append(values[token])
    return StepScores(tuple(picked), tuple(ends))
