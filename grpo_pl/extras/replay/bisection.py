"""``bisect``: the step of a run that taught it the right answer to a question, and the groups of that step that did."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_pl.extras.replay import cache
from grpo_pl.extras.replay.asked import Asked, Curve, Scores
from grpo_pl.extras.replay.comparison import Held, compare
from grpo_pl.extras.replay.forward import ALONE, NAME, run_forward, run_forward_in_children
from grpo_pl.extras.replay.left_out import Group, LeaveOneOut
from grpo_pl.extras.replay.moment import (
    RecordedFit,
    Say,
    checkpoint_at,
    cost,
    nearest,
    tell_surroundings,
    to_stderr,
    unlike_the_record,
)
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun
from grpo_pl.files.runs import RunFolder

NATS = 2.0
"""Least rise of a log-probability that counts as learned, and least effect of a step that is named."""
SHARE = 0.5
"""Least part of the rise that a step's effect must be to be named, and of that effect a group's."""
MOST_GROUPS = 10
"""Groups that are told, those that moved the answer most."""


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """When a run learned an answer, and from what."""

    run: str
    question: str
    answer: str
    """The gold answer; empty where it is not known."""
    prompt: str
    """What the policy read."""
    scored: str
    """The completion whose log-probability is measured, special tokens included."""
    origin: str
    """Where it is from."""
    tokens: int
    """Of ``scored``."""
    curve: Sequence[tuple[int, float]]
    """Completed rollouts, and the log-probability of the completion under the weights after them, in nats."""
    lowest: int
    """Completed rollouts at the foot of the largest rise, and ``highest`` at its top."""
    highest: int
    steepest: int | None
    """The step (from 0) with the largest gain of that rise; None where there is no rise."""
    looked_at: int | None
    """The step whose update was made again: ``steepest``, if the answer was learned."""
    at_once: float
    """By how much that step's own gradient moved the answer at once; 0 where none was looked at."""
    lasting: float
    """By how much in all, what the optimiser's momentum went on to make of it included."""
    coasted: float
    """By how much the momentum of earlier steps moved the answer in that step."""
    step: int | None
    """The step that was looked at if it taught the answer: an effect of `NATS` or more, and of `SHARE` of the rise."""
    groups: Sequence[Group]
    """Of the step that was looked at, those that moved the completion most, and the one that raised it most."""
    all_groups: int
    """How many were left out in turn."""
    states: int
    """How many states of the run were kept on the way, one every ``every`` rollouts."""
    every: int
    held_to: str
    """What of the replay was compared with the run's record."""
    exact: bool
    """False where the replay is equal up to rounding only."""
    other_here: Sequence[str]
    """What is other here than in the run, and makes a replay equal up to rounding only."""

    @property
    def rise(self) -> float:
        """The largest rise of the log-probability between two moments of the run."""
        at = dict(self.curve)
        return at[self.highest] - at[self.lowest]

    @property
    def learned(self) -> bool:
        """Whether that is `NATS` or more."""
        return self.rise >= NATS

    @property
    def effect(self) -> float:
        """Of the step that was looked at: what it did at once, or in all where that is more, up to what the curve rose
        behind it; 0 where none was looked at."""
        return 0.0 if self.looked_at is None else effect_of(self.curve, self.looked_at, self.at_once, self.lasting)

    @property
    def culprit(self) -> Group | None:
        """The group that raised the answer most at once, if the step is named and owes it at least `SHARE` of that."""
        first = raised_most(self.groups)
        named = self.step is not None and first is not None and 0 < SHARE * self.at_once <= first.moved
        return first if named else None

    @property
    def gain(self) -> float:
        """Of the steepest step, at once; 0 where there is none."""
        at = dict(self.curve)
        return 0.0 if self.steepest is None else at[self.steepest + 1] - at[self.steepest]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        culprit = None if self.culprit is None else asdict(self.culprit)
        more = {"rise": self.rise, "learned": self.learned, "gain": self.gain, "effect": self.effect}
        return {**asdict(self), **more, "culprit": culprit}


def bisect(
    run: str | Path | RecordedRun,
    question: str,
    *,
    answer: str | None = None,
    disk: float | None = None,
    run_rewards: bool = False,
    say: Say = to_stderr,
) -> Bisection:
    """Finds the step of a run that taught it the right answer to a question, and the groups that did.

    The run is played forward once, and the right completion's log-probability is measured after every rollout. If it
    rose by `NATS` or more, the update of the steepest step is made again without each of its groups in turn. Nothing is
    written into the run folder.

    Args:
        run: the run's folder, or its name under ``runs``.
        question: as it stands in the data, before the template.
        answer: what the demonstration or the recorded right completion of that question answers, or the completion word
            by word; None takes the demonstration of the run's files, or the last right completion that it recorded.
        disk: gigabytes of states that are kept in the cache on the way, one every √N rollouts or fewer; None is the
            limit of the cache.
        run_rewards: also run rewards and judges of the user's own again, which may cost money.
        say: is told what it will cost, and what is other here than there.

    Raises:
        CannotReplay: one line that says what to do.
    """
    recorded = run if isinstance(run, RecordedRun) else RecordedRun.open(run)
    asked = Asked.of(recorded, question, answer)
    every = spacing(recorded, disk)
    recorded.check_trusted(run_rewards)
    recorded.check_completions()
    other_here = tell_surroundings(recorded, say)
    scores, held = _played(recorded, asked, every, exact=not other_here, say=say)
    curve = list(enumerate(scores.values, start=recorded.start))
    lowest, highest = largest_rise(curve)
    steepest = steepest_step(curve, lowest, highest)
    rise = dict(curve)[highest] - dict(curve)[lowest]
    look, named = None, False
    if rise >= NATS and steepest is not None:
        say(f"making the update of step {steepest} again without each of its groups.")
        look = _left_out(recorded, asked, steepest, exact=not other_here, run_rewards=run_rewards, say=say)
        named = effect_of(curve, steepest, look.at_once, look.lasting) >= max(NATS, SHARE * rise)
        other_here += [f"{recorded.processes} processes there, one here"] * (recorded.processes > 1)
    groups = [] if look is None else look.groups
    return Bisection(
        run=str(recorded.path),
        question=question,
        answer=asked.answer,
        prompt=scores.prompt,
        scored=scores.scored,
        origin=asked.origin,
        tokens=scores.tokens,
        curve=curve,
        lowest=lowest,
        highest=highest,
        steepest=steepest,
        looked_at=None if look is None else look.step,
        at_once=0.0 if look is None else look.at_once,
        lasting=0.0 if look is None else look.lasting,
        coasted=0.0 if look is None else look.coasted,
        step=steepest if named else None,
        groups=[each for place, each in enumerate(groups) if place < MOST_GROUPS or each is raised_most(groups)],
        all_groups=len(groups),
        states=len(_kept(recorded, every)),
        every=every,
        held_to=f"{held.completions} completions and {held.weights} digest{'s' * (held.weights != 1)} of weights",
        exact=not other_here and held.first is None,
        other_here=other_here,
    )


def spacing(run: RecordedRun, disk: float | None) -> int:
    """Rollouts between two states that are kept: √N of N, or as many more as ``disk`` gigabytes ask for.

    Raises:
        CannotReplay: the run has made no rollout, or not one state fits.
    """
    count, size = run.completed - run.start, cache.size_of_state(run)
    if count < 1:
        raise CannotReplay(f"{run.path} has made no rollout from which it could have learned.")
    if disk is not None and not disk > 0:
        raise CannotReplay(f"--disk is {disk:g}: give gigabytes, such as 2.")
    limit = min(cache.limit_gb() if disk is None else disk, cache.limit_gb()) * 1e9
    if size > limit:
        raise CannotReplay(
            f"--disk {limit / 1e9:g}: one state of {run.path} takes {size / 1e9:.3g} GB: give more, and "
            "GRPO_PL_REPLAY_GB no less."
        )
    fitting = int(limit // size) if size else count
    every = max(math.isqrt(count - 1) + 1, math.ceil(count / (fitting + 1)))
    while len(_kept(run, every)) > fitting:
        every += 1
    return every


def largest_rise(curve: Sequence[tuple[int, float]]) -> tuple[int, int]:
    """Foot and top of the largest rise between two points of a curve; twice the first where it never rises."""
    foot, (low, high) = curve[0], (curve[0], curve[0])
    for point in curve:
        foot = min(foot, point, key=lambda one: one[1])
        if point[1] - foot[1] > high[1] - low[1]:
            low, high = foot, point
    return low[0], high[0]


def steepest_step(curve: Sequence[tuple[int, float]], lowest: int, highest: int) -> int | None:
    """The step with the largest gain between two numbers of completed rollouts; None if they are the same."""
    gains = {step: after - before for (step, before), (_, after) in pairwise(curve) if lowest <= step < highest}
    return max(gains, key=gains.__getitem__, default=None)


def effect_of(curve: Sequence[tuple[int, float]], step: int, at_once: float, lasting: float) -> float:
    """What a step did at once, or in all where that is more, up to what the curve rose behind it."""
    before = dict(curve)[step]
    return max(at_once, min(lasting, max(value for rollouts, value in curve if rollouts > step) - before))


def _kept(run: RecordedRun, every: int) -> range:
    """Completed rollouts of the states that are kept: between start and end, multiples of ``every`` from 0 as the
    checkpoint of a fit counts."""
    return range((run.start // every + 1) * every, run.completed, every)


def _played(run: RecordedRun, asked: Asked, every: int, *, exact: bool, say: Say) -> tuple[Scores, Held]:
    """Plays the whole run forward, and keeps states of it in the cache."""
    start, checkpoint = nearest(run, run.start, say)
    say(cost(run, start, checkpoint, run.completed, states=len(_kept(run, every))))
    changes = {"checkpoint.every_n_rollouts": str(every), "checkpoint.keep": str(run.completed)}
    with cache.workplace() as folder:
        if run.processes == 1:
            run_forward(run, checkpoint, run.completed, folder, changes, [Curve(asked, folder)])
        else:
            run_forward_in_children(run, checkpoint, run.completed, folder, changes, asdict(asked))
        written = RecordedFit(RunFolder(folder / NAME))
        held = compare(run, written, start, run.completed)
        if held.first is not None and exact:
            raise CannotReplay(unlike_the_record(run, held))
        if held.first is not None:
            say(f"the replay is not bit-equal, as the surroundings let expect: {held.first}.")
        for rollouts, path in written.checkpoints().items():
            if rollouts < run.completed:
                cache.keep(run, path, rollouts)
        return Scores.read(folder), held


def _left_out(run: RecordedRun, asked: Asked, step: int, *, exact: bool, run_rewards: bool, say: Say) -> LeaveOneOut:
    """Makes a step again without each of its groups, in one process."""
    checkpoint = checkpoint_at(run, step, run_rewards=run_rewards, say=say)
    alone, watch = run.processes == 1, LeaveOneOut(asked, step, run.completed)
    with cache.workplace() as folder:
        run_forward(run, checkpoint, step + 1, folder, None if alone else ALONE, [watch])
        held = compare(run, RecordedFit(RunFolder(folder / NAME)), step, step + 1)
    if held.first is not None and exact and alone:
        raise CannotReplay(unlike_the_record(run, held))
    return watch


def conclusions(found: Bisection) -> list[str]:
    """What can be said in sentences."""
    at, lines = dict(found.curve), list[str]()
    between = f"between {found.lowest} and {found.highest} rollouts"
    if not found.learned:
        lines.append(
            f"it was not learned in this run: its log-probability rose by {max(found.rise, 0.0):.2f} nats at most, and "
            f"{NATS:g} count as learned."
        )
    elif found.step is None:
        lines.append(
            f"no single step did it: of {found.rise:.2f} nats {between}, step {found.looked_at} made "
            f"{found.effect:.2f}; {NATS:g} and {SHARE:.0%} of the rise would name it."
        )
        if found.coasted >= SHARE * found.gain:
            lines.append(
                f"momentum of the steps before made {found.coasted:.2f} of the {found.gain:.2f} that it gained."
            )
    else:
        before, after = at[found.step], at[found.step + 1]
        lines.append(
            f"step {found.step} (rollout {found.step + 1}) taught it: its update moved the answer by "
            f"{found.at_once:+.2f} nats at once ({before:.2f} → {after:.2f}) and by {found.lasting:+.2f} in all; "
            f"{between} it rose by {found.rise:.2f}."
        )
        first = raised_most(found.groups)
        assert first is not None, "a step has groups"
        rest, them = found.at_once - first.moved, "it" if named(first) == "demonstration" else "them"
        if found.culprit is not None:
            lines.append(f"its {named(first)} did: without {them} the update moves the answer by {rest:+.2f} at once.")
        else:
            lines.append(
                f"no single group of it did: without {named(first)}, which raised the answer most, the update still "
                f"moves it by {rest:+.2f} at once."
            )
    reason = f" ({'; '.join(found.other_here)})" if found.other_here else ""
    equal = "bit for bit" if found.exact else f"equal up to rounding only{reason}"
    lines.append(f"held to the record: {found.held_to}, {equal}.")
    return lines


def raised_most(groups: Sequence[Group]) -> Group | None:
    """The group that raised the answer most at once, whatever others did against it; None of none."""
    return max(groups, key=lambda group: group.moved, default=None)


def named(group: Group) -> str:
    """A group in two words or three."""
    if group.kind == "completions":
        return f"completions of {group.prompt_id}"
    return f"demonstration{'s' * (group.size != 1)}"


def why_of(found: Bisection) -> str:
    """The command that explains the completion of the culprit which weighed most; empty where no group of completions
    is named."""
    group = found.culprit
    if group is None or group.prompt_id is None:
        return ""
    key = f"--step {found.step} --prompt {group.prompt_id} --sample {group.sample}"
    return f"grpo-pl why {shlex.quote(found.run)} {key}"
