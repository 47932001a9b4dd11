"""A replay held to the record of its run: metrics, completions and weights of each step that was made again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grpo_pl.extras.replay.recorded import RecordedRun
from grpo_pl.files.rows import Row

OF_A_COMPLETION = ("prompt", "completion", "tokens", "finish_reason", "rewards", "reward", "advantage")
OF_EARLIER = ("reward", "grad_norm")
"""Metrics that a run of version 0.3 is held to."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first thing in which two runs of the same steps differ."""

    step: int
    what: str
    """A metric, ``weights``, or a completion: ``completion``, its token ids, or another field."""
    there: str
    """The value of the record, and ``here`` of the replay."""
    here: str
    prompt_id: int | None = None
    sample: int | None = None

    def __str__(self) -> str:
        of = "" if self.prompt_id is None else f" of prompt {self.prompt_id}, sample {self.sample}"
        return f"step {self.step}: {self.what}{of} is {_short(self.there)} there and {_short(self.here)} here"


@dataclass(frozen=True, kw_only=True)
class Held:
    """How far a replay is the recorded run."""

    first: Difference | None
    """None where nothing differs."""
    steps: int
    """Compared by their metrics, and how many ``completions``, of these by their ``token_ids``, and digests of
    ``weights``."""
    completions: int
    token_ids: int
    weights: int


def compare(there: RecordedRun, here: RecordedRun, first: int, end: int) -> Held:
    """Holds the steps ``first`` … ``end`` − 1 of a replay, and the weights before, between and behind them, to the
    record. Of two differences in one step that of a completion comes first, as it may be the cause of the others."""
    found: list[tuple[int, int, Difference]] = []
    rows = {key_of(row): row for row in there.completions(first, end)}
    made = {key_of(row): row for row in here.completions(first, end)}
    both = [key for key in rows if key in made]
    found += [(each.step, 0, each) for each in completion_differences(rows, made)]
    tokens = [key for key in there.token_digests if first <= key[0] < end and key in here.token_digests]
    for key in tokens:
        if there.token_digests[key] != here.token_digests[key]:
            told = {"there": there.token_digests[key], "here": here.token_digests[key]}
            each = Difference(step=key[0], what="token ids of a completion", prompt_id=key[1], sample=key[2], **told)
            found.append((each.step, 0, each))
    steps = [step for step in range(first, end) if step in there.metrics and step in here.metrics]
    for step in steps:
        ours, theirs = here.metrics[step], there.metrics[step]
        names = [name for name in theirs if name in ours and (not there.earlier or name in OF_EARLIER)]
        different = next((name for name in names if ours[name] != theirs[name]), None)
        if different is not None:
            each = Difference(step=step, what=different, there=theirs[different], here=ours[different])
            found.append((step, 1, each))
    digests = [done for done in there.digests if first <= done <= end and done in here.digests]
    for done in digests:
        if there.digests[done] != here.digests[done]:
            each = Difference(step=done, what="weights", there=there.digests[done], here=here.digests[done])
            # weights before the first step are a cause, those behind a step an effect of it
            found.append((done, -1, each) if done == first else (done - 1, 2, each))
    nearest = min(found, key=lambda one: one[:2], default=None)
    return Held(
        first=None if nearest is None else nearest[2],
        steps=len(steps),
        completions=len(both),
        token_ids=len(tokens),
        weights=len(digests),
    )


def key_of(row: Row) -> tuple[int, int, int]:
    """Step, prompt and sample of a recorded completion."""
    return row["step"], row["prompt_id"], row["sample"]


def completion_differences(
    there: Mapping[tuple[int, int, int], Row], here: Mapping[tuple[int, int, int], Row]
) -> Iterable[Difference]:
    """The first field of each completion of both that differs."""
    for key, theirs in there.items():
        ours = here.get(key)
        name = next((name for name in OF_A_COMPLETION if ours and theirs.get(name) != ours.get(name)), None)
        if name is not None and ours is not None:
            what = name if name == "completion" else f"{name} of a completion"
            told = {"there": str(theirs.get(name)), "here": str(ours.get(name))}
            yield Difference(step=key[0], what=what, prompt_id=key[1], sample=key[2], **told)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
