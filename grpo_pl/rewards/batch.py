"""Scores one batch of completions with several rewards, for training, validation, ``score`` and the server."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_pl.functional.exact_sums import total_reward
from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score, correctness_index


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The scores of R rewards for B completions, in the order of the rewards and completions."""

    rewards: Sequence[Reward]
    scores: Sequence[Sequence[Score]]  # (R, B)
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns that reward functions logged with ``log_extra``: one value per completion, None where none was logged."""
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Values that reward functions logged with ``log_metric``, by metric."""

    def values(self) -> list[list[float]]:
        """(R, B) numbers, NaN where a score has none."""
        return [[math.nan if score.value is None else score.value for score in row] for row in self.scores]

    def totals(self) -> list[float | None]:
        """Per completion Σ_r weight_r · value_r over the scores with a value; None where the correctness reward has
        none, because the sum of the others would look like a low reward, or where none has one."""
        weights, judge = [reward.weight for reward in self.rewards], correctness_index(self.rewards)
        return [
            None
            if judge is not None and row[judge].value is None
            else total_reward([score.value for score in row], weights)
            for row in zip(*self.scores, strict=True)
        ]

    def correct(self) -> list[bool | None]:
        """Per completion, whether the correctness reward gave 1 or more; None where it gave no value, or there is
        none."""
        judge = correctness_index(self.rewards)
        return [None] * len(self.scores[0]) if judge is None else [score.correct for score in self.scores[judge]]

    def judged(self) -> Sequence[Score]:
        """The scores of the correctness reward; without one the weighted sums, with the first status that is neither
        ``ok`` nor ``wrong``, else ``ok``, and the values by name as detail."""
        judge = correctness_index(self.rewards)
        if judge is not None:
            return self.scores[judge]
        summed = []
        for total, row in zip(self.totals(), zip(*self.scores, strict=True), strict=True):
            odd = [score.status for score in row if score.status not in ("ok", "wrong")]
            named = zip(self.rewards, row, strict=True)
            values = ", ".join(f"{reward.name} {score.value:.4g}" for reward, score in named if score.value is not None)
            summed.append(Score(total, odd[0] if odd else "ok", values))
        return summed

    def described(self, row: int) -> dict[str, dict[str, Any]]:
        """The scores of one completion by the name of their reward, as tables and files write them."""
        return {r.name: scores[row].to_dict() for r, scores in zip(self.rewards, self.scores, strict=True)}

    def select(self, rows: Sequence[int]) -> ScoredBatch:
        """The scores of some completions, in the order of ``rows``."""
        return ScoredBatch(
            rewards=self.rewards,
            scores=[[row[i] for i in rows] for row in self.scores],
            extra={name: [cells[i] for i in rows] for name, cells in self.extra.items()},
            metrics=self.metrics,
        )

    def extra_of(self, row: int) -> dict[str, dict[str, Any]]:
        """``{"extra": …}`` with what reward functions logged for one completion, for its row of a table; ``{}`` if no
        function logged anything."""
        return {"extra": {name: cells[row] for name, cells in self.extra.items()}} if self.extra else {}

    def status_counts(self) -> dict[str, Counter[str]]:
        """Number of scores with each status, per reward name."""
        return {r.name: Counter(s.status for s in row) for r, row in zip(self.rewards, self.scores, strict=True)}


def join_scores(
    rewards: Sequence[Reward], parts: Sequence[ScoredBatch], metrics: Mapping[str, Sequence[float]]
) -> ScoredBatch:
    """The scores of several batches by the same rewards, concatenated; ``metrics`` becomes those of the result."""
    scores = [[score for part in parts for score in part.scores[i]] for i in range(len(rewards))]
    names = dict.fromkeys(name for part in parts for name in part.extra)
    extra = {
        name: [cell for part in parts for cell in part.extra.get(name, [None] * len(part.scores[0]))] for name in names
    }
    return ScoredBatch(rewards=rewards, scores=scores, extra=extra, metrics=metrics)


def score_completions(
    rewards: Sequence[Reward],
    *,
    completions: Sequence[str],
    answers: Sequence[str | None],
    columns: Columns,
    trainer_state: Callable[[], Any] | None = None,
) -> ScoredBatch:
    """Calls every reward once on the whole batch; asynchronous ones run at the same time as the others.

    An episode without a return, because its environment failed, gets None from all rewards: otherwise its text would be
    judged as if the policy had stopped there.

    Args:
        rewards: the rewards, see `check_rewards`.
        completions: B texts.
        answers: B gold answers; None is one that cannot be read, such as a list of several: ``bad_gold`` from every
            reward, as no reward could know what it is compared with.
        columns: further columns, B values each; see `Reward.__call__`.
        trainer_state: returns what reward functions get as ``trainer_state``; None outside training.

    Raises:
        MissingColumn: the rows lack a column that a reward needs.
        ValueError: a reward returned more or fewer than B scores, or a value that is not finite.
        TypeError: a reward returned something other than a sequence of scores.
        Exception: whatever a reward raises, with a note that names the reward. All but ``MissingColumn`` only where
            the reward's ``on_error`` is ``raise``; where it is ``none``, its scores are None.
    """
    from grpo_pl.rewards.background import call_together
    from grpo_pl.rewards.logged_extras import LoggedExtras

    extras = LoggedExtras(len(completions), trainer_state)
    with extras.collect():
        golds = [answer or "" for answer in answers]
        calls = [(reward.asynchronous, partial(score_one, reward, completions, golds, columns)) for reward in rewards]
        scores = list(map(list, call_together(calls)))
    for i, answer in enumerate(answers):
        if answer is None:
            for row in scores:
                row[i] = Score(None, "bad_gold", "neither a text nor a number")
    for i, episode in enumerate(columns.get("episode", ())):
        if isinstance(episode, Mapping) and "return" in episode and episode["return"] is None:
            for row in scores:
                row[i] = Score(None, "unavailable", str(episode.get("detail", "")))
    return ScoredBatch(rewards=rewards, scores=scores, extra=extras.columns(), metrics=extras.metrics)


def score_one(reward: Reward, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
    """One reward's scores; see `score_completions`."""
    try:
        try:
            # copies, for a reward may change what it gets in place, and others read the same
            copies = {name: list(map(_copied, cells)) for name, cells in columns.items()}
            row = reward(list(completions), list(answers), copies)
        except SystemExit as error:  # else the run would end as if it were done
            exited = RuntimeError(f"sys.exit({error.code!r}) was called")
            for note in getattr(error, "__notes__", ()):
                exited.add_note(note)
            raise exited from error
        _check_scores(reward, row, len(completions))
    except MissingColumn:  # the fault is in the rows, not in the reward
        raise
    except Exception as error:  # a user's reward may raise anything
        if not getattr(error, "__notes__", None):
            error.add_note(f"raised by the reward {reward.name!r}")
        if reward.on_error == "raise":
            raise
        problem = " ".join(f"{type(error).__name__}: {_text_of(error)}".split())[:200]
        told = f"{problem}, {'; '.join(error.__notes__)}"
        warnings.warn(f"reward {reward.name!r} failed and scores None (on_error: none): {told}", stacklevel=2)
        return [Score(None, "unavailable", problem)] * len(completions)
    return row


def _copied(cell: Any) -> Any:
    """A value of its own: plain ones of JSON, such as ids of tokens, go without the cost of ``deepcopy``."""
    if type(cell) in (str, int, float, bool, type(None)):
        return cell
    if type(cell) is list:
        return [_copied(item) for item in cell]
    if type(cell) is dict:
        return {key: _copied(item) for key, item in cell.items()}
    try:
        return deepcopy(cell)
    except Exception:  # an object of the user's own that cannot be copied, such as a lock, is shared
        return cell


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as of_its_own:
        return f"its __str__ raises {type(of_its_own).__name__}"


def _check_scores(reward: Reward, row: list[Score], count: int) -> None:
    if not isinstance(row, Sequence) or not all(isinstance(score, Score) for score in row):
        odd = row if not isinstance(row, Sequence) else next(s for s in row if not isinstance(s, Score))
        raise TypeError(f"reward {reward.name!r} returned {odd!r:.80}: return one Score for each completion.")
    if len(row) != count:
        raise ValueError(f"reward {reward.name!r} returned {len(row)} scores for {count} completions.")
    bad = next((s for s in row if s.value is not None and not math.isfinite(s.value)), None)
    if bad is not None:
        raise ValueError(f"reward {reward.name!r} returned {bad.value}: rewards must be finite numbers or None.")


def check_rewards(rewards: Sequence[Reward], *, steps_needed: bool = False) -> None:
    """Refuses a list of rewards that training or evaluation could not use.

    Args:
        steps_needed: the objective supervises steps, so some reward must score them.

    Raises:
        ValueError: no rewards; two rewards of one name; an unknown ``on_error``; a weight that is not finite, or only
            weights of 0; several correctness rewards; no reward that scores steps where that is needed.
    """
    from grpo_pl.rewards.process import ProcessReward

    if not rewards:
        raise ValueError("no rewards: give at least one under model.rewards, such as grpo_pl.rewards.MathReward.")
    names = Counter(reward.name for reward in rewards)
    for reward in rewards:
        if names[reward.name] > 1:
            raise ValueError(f"two rewards are named {reward.name!r}: give each its own `name`.")
        if reward.on_error not in ("raise", "none"):
            raise ValueError(f"reward {reward.name!r} has on_error {reward.on_error!r}: give raise or none.")
        if not math.isfinite(reward.weight):
            raise ValueError(f"reward {reward.name!r} has weight {reward.weight}: weights must be finite.")
    if not any(reward.weight for reward in rewards):
        raise ValueError("every reward has weight 0: give one of them another, or there is nothing to learn from.")
    judges = [reward.name for reward in rewards if reward.correctness]
    if len(judges) > 1:
        raise ValueError(
            f"{len(judges)} rewards have `correctness: true` ({', '.join(judges)}): at most one may say what a right "
            "answer is."
        )
    if steps_needed and not any(isinstance(reward, ProcessReward) for reward in rewards):
        raise ValueError(
            "a term credits steps (ProcessSupervision), but no reward scores steps: add one under model.rewards, such "
            "as grpo_pl.rewards.ColumnArithmeticReward, or leave out the term."
        )
