"""``RewardWatch``: signs that a policy games its reward, as metrics and in ``suspicious.jsonl``."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from grpo_pl.callbacks.completions import rows_of, shortened
from grpo_pl.extras.watch.skeletons import FirstForms, NewForm, forms_of
from grpo_pl.files.rows import Row, row_writer
from grpo_pl.files.writing import best_effort
from grpo_pl.functional.argument_checks import check_at_least, check_choice
from grpo_pl.rewards.answer_reading import AnswerReward
from grpo_pl.rewards.base import Reward, Score, correctness_index, needs_of
from grpo_pl.rewards.length import repeated_share
from grpo_pl.training.experience import Experience
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.stopwatch import stopwatch

Unit = Literal["word", "character"]

MIN_REWARDED = 8
"""Rewarded completions in a sample that are enough to warn of."""
Sign = Literal["disagreement", "repetition", "length", "form"]
REPETITION_EXCESS = 0.2
"""A completion is suspicious if the repeated share of its n-grams is this much above that of the first rollouts."""
LENGTH_FACTOR = 2.0
"""… or if it is this many times longer or shorter than those of the first rollouts on average."""


class RewardWatch(StepCallback):
    """Looks at a sample of each rollout with judges that training does not use, and for drift. What it finds are
    indications, no proof: a strict judge refuses right answers in another form, a policy that learns to reason writes
    more, and a reward can be gamed in ways that leave no trace here. It tells a person where to look. Training never
    sees it: it takes part in no gradient, draws no random number and exchanges nothing between processes.

    Metrics, over the sample where nothing else is said; "rewarded" means that the correctness reward gave full value:

    - ``watch/agreement``: share of completions on which ``strict`` and ``lenient`` agree.
    - ``watch/rewarded_but_strict_wrong``, ``watch/rewarded_but_lenient_wrong``: share of the rewarded completions that
      the judge refuses. A rise says that the reward pays for answers of another kind than at first.
    - ``watch/length_drift``: mean tokens of a completion, over all processes, divided by those of the first
      rollouts, less 1.
    - ``watch/repetition_drift``: repeated share of n-grams (see ``RepetitionReward``) less that of the first rollouts.
    - ``watch/form_drift``: share of completions whose form is frequent now and was not there in the first rollouts; a
      form is the text, or its end, with numbers and words folded (see ``grpo_pl.extras.watch.skeletons``).

    ``suspicious.jsonl`` in the run's folder holds the most suspicious completions of the run, at most one of each sign
    a rollout: rewarded ones that a judge refuses, repetitive ones, much longer or shorter ones than at first, and ones
    of a new form. With several processes the sample is of the first.

    Args:
        strict: judge that accepts right answers in the plainest form only; null leaves it out. One that reads boxes,
            which is the default of ``answer_in``, reads where the correctness reward of the run does.
        lenient: judge that accepts whatever may pass for a right answer; null leaves it out.
        completions: size of the sample; 0 switches the watch off.
        first_rollouts: rollouts that drift is measured against; there is none while they last.
        ngram: words per n-gram, or characters.
        unit: what an n-gram is made of: word or character.
        keep: completions that ``suspicious.jsonl`` holds of each of the four signs.
        characters: longest prompt or completion in that file; the middle of longer ones is left out.
        warn_above: share of rewarded completions refused by a judge that is worth one warning, and share of
            completions of a new form that is worth another.
    """

    def __init__(
        self,
        strict: Reward | None = None,
        lenient: Reward | None = None,
        completions: int = 32,
        first_rollouts: int = 10,
        ngram: int = 4,
        unit: Unit = "word",
        keep: int = 20,
        characters: int = 8000,
        warn_above: float = 0.5,
    ) -> None:
        super().__init__()
        check_at_least(0, "watch", completions=completions, keep=keep)
        check_at_least(1, "watch", first_rollouts=first_rollouts, ngram=ngram, characters=characters)
        check_choice("watch.unit", unit, Unit)
        judges = {"strict": strict, "lenient": lenient}
        self.judges = {name: judge for name, judge in judges.items() if judge is not None}
        self.completions, self.first_rollouts, self.ngram, self.unit = completions, first_rollouts, ngram, unit
        self.keep, self.characters, self.warn_above = keep, characters, warn_above
        self.path: Path | None = None
        """Set by the command line to a file of the run's folder; None writes nothing."""
        self._first = {"rollouts": 0, "tokens": 0.0, "repeated": 0.0}  # count and sums
        self._forms = FirstForms()
        self._rows: dict[str, list[Row]] = {}
        self._warned = {"judge": False, "form": False}
        self._failed: set[str] = set()

    # --- hooks ------------------------------------------------------------------------------------------------------

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        if self.completions == 0 or not trainer.is_global_zero:
            return {}
        return self.audit(experience, seed=cast(GRPOModule, pl_module).seed)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rewrites the file with the rows of the checkpoint; later ones belong to rollouts that are made again."""
        if trainer.is_global_zero and self.path is not None and (self._rows or self.path.exists()):
            self._write()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for judge in self.judges.values():
            judge.close()

    def state_dict(self) -> dict[str, Any]:
        first = {**self._first, "completions": self._forms.completions, "forms": self._forms.counts}
        return {"first": first, "rows": self._rows, "warned": self._warned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        first = dict(state_dict["first"])
        self._forms = FirstForms(first.pop("completions"), first.pop("forms"))
        self._first, self._rows, self._warned = first, state_dict["rows"], state_dict["warned"]

    # --- the audit of a rollout -------------------------------------------------------------------------------------

    def audit(self, experience: Experience, *, seed: int) -> dict[str, float]:
        """The metrics of one rollout; notes what is suspicious in it."""
        seconds: dict[str, float] = {}
        with stopwatch(seconds, "watch"):
            audits = self._examine(experience, seed)
            metrics = judge_metrics(audits)
            tokens = experience.lengths.double().mean().item()
            now = {"tokens": tokens, "repeated": sum(audit.repeated for audit in audits) / len(audits)}
            if self._first["rollouts"] < self.first_rollouts:
                for name, value in {"rollouts": 1, **now}.items():
                    self._first[name] += value
                self._forms.add(audit.forms for audit in audits)
                found = suspicions(audits)
            else:
                usual = {name: self._first[name] / self._first["rollouts"] for name in now}
                metrics["watch/length_drift"] = tokens / usual["tokens"] - 1.0
                metrics["watch/repetition_drift"] = now["repeated"] - usual["repeated"]
                forms = self._forms.new_forms([audit.forms for audit in audits])
                metrics["watch/form_drift"] = sum(form is not None for form in forms) / len(forms)
                found = suspicions(audits, usual, forms)
            self._note(experience, found)
        self._warn(metrics, audits)
        return {**metrics, "time/watch": seconds["watch"]}

    def _examine(self, experience: Experience, seed: int) -> list[CompletionAudit]:
        samples = experience.samples
        self._read_as(experience.scored.rewards)
        rows = sample_rows(len(samples.completions), self.completions, seed=seed, step=samples.step)
        texts = [samples.completions[row] for row in rows]
        prompts, lengths = samples.per_row, samples.rollout.action_lengths.tolist()
        columns = samples.columns(needs_of(self.judges.values()))
        few = {name: [column[row] for row in rows] for name, column in columns.items()}
        golds = [prompts[row].answer for row in rows]
        told = {name: self._ask(name, texts, golds, few) for name in self.judges}
        correct = experience.scored.correct()
        return [
            CompletionAudit(
                row=row,
                rewarded=correct[row] is True,
                judges={name: scores[number] for name, scores in told.items() if scores},
                repeated=repeated_share(text, n=self.ngram, unit=self.unit),
                tokens=lengths[row],
                forms=forms_of(text),
            )
            for number, (row, text) in enumerate(zip(rows, texts, strict=True))
        ]

    def _read_as(self, rewards: Sequence[Reward]) -> None:
        """Makes a judge of boxes read where the correctness reward does: it would refuse everything else."""
        place = correctness_index(rewards)
        paying = None if place is None else rewards[place]
        if not isinstance(paying, AnswerReward):
            return
        places = {name: getattr(paying, name) for name in ("answer_in", "answer_pattern", "answer_field")}
        for judge in self.judges.values():
            if isinstance(judge, AnswerReward) and judge.answer_in == "box":
                vars(judge).update(places)

    def _ask(
        self, name: str, texts: Sequence[str], golds: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Sequence[Score]:
        """The judge's scores; empty where it fails, because the watch must not end a run."""
        try:
            scores = self.judges[name](texts, golds, columns)
            if len(scores) != len(texts):
                raise ValueError(f"{len(scores)} scores for {len(texts)} completions.")
            return scores
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                rank_zero_warn(
                    f"The {name} judge of the watch failed and is left out of this rollout and of every other one on "
                    f"which it fails: {type(error).__name__}: {error}"
                )
            return []

    def _warn(self, metrics: Mapping[str, float], audits: Sequence[CompletionAudit]) -> None:
        shares = {name: metrics.get(f"watch/rewarded_but_{name}_wrong", 0.0) for name in ("strict", "lenient")}
        name = max(shares, key=lambda name: shares[name])
        if sum(audit.rewarded for audit in audits) >= MIN_REWARDED:
            self._warn_once(
                "judge",
                shares[name],
                f"The {name} judge of the watch refuses {shares[name]:.0%} of the rewarded completions it looked at. "
                "The policy may game the reward, or the judge does not suit these answers",
            )
        drift = metrics.get("watch/form_drift", 0.0)
        self._warn_once(
            "form",
            drift,
            f"{drift:.0%} of the completions that the watch looked at have a form that was not there in the first "
            f"{self._first['rollouts']} rollouts. The policy may have learnt the form that was asked for, or one that "
            "the reward should not pay",
        )

    def _warn_once(self, about: str, share: float, line: str) -> None:
        if share > self.warn_above and not self._warned[about]:
            self._warned[about] = True
            rank_zero_warn(f"{line}: read {self.path or 'some'}.")

    # --- the file ---------------------------------------------------------------------------------------------------

    def _note(self, experience: Experience, found: Sequence[Suspicion]) -> None:
        """Keeps the heaviest suspicion of each sign, if it is among the heaviest of the run; the newest where equal."""
        rewards = [total if total is not None else -math.inf for total in experience.scored.totals()]
        changed = False
        for sign in dict.fromkeys(suspicion.sign for suspicion in found):
            rivals = [suspicion for suspicion in found if suspicion.sign == sign]
            heaviest = max(rivals, key=lambda s: (s.weight, rewards[s.audit.row], -s.audit.row))
            kept = self._rows.setdefault(sign, [])
            if len(kept) < self.keep or (kept and heaviest.weight >= kept[-1]["weight"]):
                kept.append(self._row(experience, heaviest))
                kept.sort(key=lambda row: (row["weight"], row["step"]), reverse=True)
                del kept[self.keep :]
                changed = True
        if changed and self.path is not None:
            self._write()

    def _row(self, experience: Experience, suspicion: Suspicion) -> Row:
        audit = suspicion.audit
        (row,) = rows_of(experience, [audit.row])
        return {
            "sign": suspicion.sign,
            "weight": suspicion.weight,
            "reason": suspicion.reason,
            **row,
            **{key: shortened(row[key], self.characters) for key in ("prompt", "question", "completion")},
            "repeated": audit.repeated,
            "judges": {name: score.to_dict() for name, score in audit.judges.items()},
        }

    def _write(self) -> None:
        assert self.path is not None
        with best_effort(self.path), row_writer(self.path) as write:
            for sign in get_args(Sign):
                for row in self._rows.get(sign, []):
                    write(row)


@dataclass(frozen=True, kw_only=True)
class CompletionAudit:
    """Findings about one completion of the sample."""

    row: int
    """Among this process's completions."""
    rewarded: bool
    judges: Mapping[str, Score]
    """The scores of ``strict`` and ``lenient``; without those of a judge that is left out or failed."""
    repeated: float
    tokens: int
    forms: tuple[str, str]
    """Skeletons of all of it and of its end."""

    @property
    def verdicts(self) -> dict[str, bool]:
        """Judge -> whether it accepts the completion, of those that could say."""
        return {name: score.correct for name, score in self.judges.items() if score.correct is not None}


class Suspicion(NamedTuple):
    """A reason to read a completion; a larger ``weight`` is more suspicious than others of the same sign."""

    audit: CompletionAudit
    sign: Sign
    weight: float
    reason: str


def sample_rows(count: int, size: int, *, seed: int, step: int) -> list[int]:
    """``size`` of ``count`` row numbers, or all, in order: a function of the run's seed and the rollout's number."""
    return sorted(random.Random(f"watch/{seed}/{step}").sample(range(count), min(size, count)))


def judge_metrics(audits: Sequence[CompletionAudit]) -> dict[str, float]:
    """Shares of a sample that the judges accept or refuse; a share of nothing is left out."""
    both = [audit.verdicts for audit in audits if len(audit.verdicts) == 2]
    shares = {"watch/agreement": [verdicts["strict"] == verdicts["lenient"] for verdicts in both]}
    for name in ("strict", "lenient"):
        judged = [audit.verdicts for audit in audits if audit.rewarded and name in audit.verdicts]
        shares[f"watch/rewarded_but_{name}_wrong"] = [not verdicts[name] for verdicts in judged]
    return {name: sum(cases) / len(cases) for name, cases in shares.items() if cases}


def suspicions(
    audits: Sequence[CompletionAudit],
    usual: Mapping[str, float] | None = None,
    new_forms: Sequence[NewForm | None] | None = None,
) -> list[Suspicion]:
    """Every reason to read one of the completions.

    Args:
        usual: mean ``tokens`` and ``repeated`` of the first rollouts; None while they last.
        new_forms: the form of each completion, where it is frequent now and was not there at first.
    """
    found = []
    for audit, form in zip(audits, new_forms or [None] * len(audits), strict=True):
        refusing = [name for name, accepted in audit.verdicts.items() if not accepted]
        if audit.rewarded and refusing:
            reason = f"rewarded, but refused by the {' and the '.join(refusing)} judge"
            found.append(Suspicion(audit, "disagreement", float(len(refusing)), reason))
        if usual and audit.repeated > usual["repeated"] + REPETITION_EXCESS:
            reason = f"{audit.repeated:.0%} of its n-grams are repeated, {usual['repeated']:.0%} at first"
            found.append(Suspicion(audit, "repetition", audit.repeated, reason))
        factor = max(1, audit.tokens) / usual["tokens"] if usual else 1.0
        if usual and not 1.0 / LENGTH_FACTOR < factor < LENGTH_FACTOR:
            reason = f"{audit.tokens} tokens, {usual['tokens']:.0f} at first"
            found.append(Suspicion(audit, "length", abs(math.log2(factor)), reason))
        if form is not None:
            shape = form.skeleton if len(form.skeleton) <= 100 else f"{form.skeleton[:49]} … {form.skeleton[-49:]}"
            reason = f"{form.share:.0%} of the completions have this form, {form.share_at_first:.1%} at first: {shape}"
            found.append(Suspicion(audit, "form", form.share, reason))
    return found
