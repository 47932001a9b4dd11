"""``why``: one completion of a recorded run explained: its tokens, rewards, group and advantage, what the update made
of it, and what later weights answer by the same key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_pl.extras.replay import cache
from grpo_pl.extras.replay.arithmetic import Line, advantage_lines
from grpo_pl.extras.replay.comparison import compare
from grpo_pl.extras.replay.forward import ALONE, NAME, run_forward
from grpo_pl.extras.replay.moment import RecordedFit, Say, checkpoint_at, to_stderr, unlike_the_record
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun
from grpo_pl.extras.replay.watched import Drawn, Watch
from grpo_pl.files.checkpoints import broken, policy_weights
from grpo_pl.files.rows import read_lines
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.policy.weights import weights_digest


@dataclass(frozen=True, kw_only=True)
class Other:
    """A token that might have been drawn instead."""

    text: str
    id: int
    probability: float


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token of the completion. Of what an environment wrote only text and id are known; of one that is not in an
    optimiser step, no ratio and no weight."""

    text: str
    id: int
    written: bool
    """By the policy."""
    logprob: float | None = None
    """Before the update, in nats, at the temperature of the run; ``after`` it likewise."""
    after: float | None = None
    probability: float | None = None
    entropy: float | None = None
    """Of the distribution that it was drawn from, in nats."""
    others: Sequence[Other] = ()
    """The likeliest besides it."""
    advantage: float | None = None
    ratio: float | None = None
    """Importance ratio in the first optimiser step that has the completion; ``clipped``, ``weight`` (in the sum of the
    loss) and ``pull`` (−∂L/∂ log π, above 0 the token becomes likelier) likewise."""
    clipped: bool | None = None
    weight: float | None = None
    pull: float | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimiser step that has the completion: means over its tokens."""

    number: int
    """In the rollout, from 0."""
    ratio: float
    clipped: float | None
    """Share of its tokens."""
    pull: float
    """The sum over its tokens."""


@dataclass(frozen=True, kw_only=True)
class Rewarded:
    """What a reward gave the completion."""

    name: str
    weight: float
    value: float | None
    status: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Member:
    """A completion of the group."""

    sample: int
    completion: str
    correct: bool | None
    tokens: int
    finish_reason: str
    reward: float | None
    advantage: float
    in_loss: bool
    before: float
    """Log-probability of the whole completion before the update of the step, and ``after`` it."""
    after: float


@dataclass(frozen=True, kw_only=True)
class Later:
    """What the same key draws from other weights."""

    rollouts: int
    """That the weights had had."""
    completion: str
    correct: bool | None
    tokens: int
    finish_reason: str
    reward: float | None
    parts_at: int | None
    """The first token that is another one, from 0; None where all are the same."""
    here: str
    """The token there, and ``there`` in the completion of the run."""
    there: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything that is known of a completion."""

    run: str
    step: int
    """From 0; the report's rollout is one more."""
    prompt_id: int
    sample: int
    question: str
    answer: str
    prompt: str
    completion: str
    finish_reason: str
    correct: bool | None
    reward: float | None
    advantage: float
    drawn_again: bool | None
    """Whether the key alone draws the same tokens from the weights of that moment; None where it was drawn from earlier
    weights."""
    held_to: str
    """What of the replayed step was compared with the run's record."""
    exact: bool
    """False where the replay is equal up to rounding only."""
    other_here: Sequence[str]
    """What is other here than in the run, and makes a replay equal up to rounding only."""
    rewards: Sequence[Rewarded]
    arithmetic: Sequence[Line]
    """From the rewards to the advantage, line by line."""
    group: Sequence[Member]
    steps: Sequence[Step]
    tokens: Sequence[Token]
    later: Sequence[Later]

    @property
    def right_from(self) -> int | None:
        """Rollouts after which the key's answer is right, as far as weights are still there; None: at no time, or from
        the beginning."""
        right = [each.correct for each in self.later]
        if self.correct or True not in right:
            return None
        return self.later[right.index(True)].rollouts

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "right_from": self.right_from}


def why(
    run: str | Path | RecordedRun,
    *,
    step: int | None = None,
    prompt: int | None = None,
    sample: int | None = None,
    completion: int | None = None,
    run_rewards: bool = False,
    say: Say = to_stderr,
) -> Explanation:
    """Explains one completion of a run: its step is made again as `replay` does, and looked at before and behind the
    update. Nothing is written into the run folder.

    Args:
        run: the run's folder, or its name under ``runs``.
        step: from 0, as in ``completions.jsonl``, with ``prompt`` (``prompt_id``) and ``sample``; or else
        prompt: see there.
        sample: see there.
        completion: a line of ``completions.jsonl``, from 1.
        run_rewards: also run rewards, judges, agents and environments of the user's own again, which may cost money.
        say: is told what it will cost, and what is other here than there.

    Raises:
        CannotReplay: one line that says what to do.
    """
    recorded = run if isinstance(run, RecordedRun) else RecordedRun.open(run)
    step, prompt, sample = _key(recorded, step, prompt, sample, completion)
    recorded.check_trusted(run_rewards)
    recorded.check_completions()
    checkpoint = checkpoint_at(recorded, step, run_rewards=run_rewards, say=say)
    watch = Watch(step, prompt, sample, _later_weights(recorded, step))
    alone = recorded.processes == 1
    with cache.workplace() as folder:
        run_forward(recorded, checkpoint, step + 1, folder, None if alone else ALONE, [watch])
        held = compare(recorded, RecordedFit(RunFolder(folder / NAME)), step, step + 1)
    other_here = recorded.surroundings_changed()
    if not alone:
        other_here.append(f"{recorded.processes} processes there, one here")
    exact = not other_here
    if held.first is not None and exact:
        raise CannotReplay(unlike_the_record(recorded, held))
    if held.first is not None:
        say(f"equal up to rounding only: {held.first}.")
    told = f"{held.completions} completions and {held.weights} digest{'s' * (held.weights != 1)} of weights"
    return _explanation(recorded, watch, exact and held.first is None, other_here, told)


def conclusions(found: Explanation) -> list[str]:
    """What can be said in sentences."""
    told = {
        True: "drawn again alone, by its key: the same tokens.",
        False: "drawn again alone, by its key: other tokens, as alone logits round otherwise than among others.",
        None: "it was drawn from earlier weights, or in an environment that plays ahead: not drawn alone.",
    }
    lines = [told[found.drawn_again]]
    reason = f" ({'; '.join(found.other_here)})" if found.other_here else ""
    equal = "bit for bit" if found.exact else f"equal up to rounding only{reason}"
    lines.append(f"held to the record: {found.held_to}, {equal}.")
    if found.right_from is not None:
        lines.append(f"the answer is right first under the weights after {found.right_from} rollouts.")
    elif found.later and not found.correct and all(each.correct is False for each in found.later):
        lines.append("no later weights that the run still has answer right by this key.")
    return lines


def _key(
    run: RecordedRun, step: int | None, prompt: int | None, sample: int | None, completion: int | None
) -> tuple[int, int, int]:
    """Step, prompt and sample that are asked for.

    Raises:
        CannotReplay: there is no such completion.
    """
    given = (step, prompt, sample)
    if completion is not None and given == (None, None, None):
        count = 0
        lines = read_lines(run.folder.completions, may_be_cut_short=True) if run.folder.completions.is_file() else ()
        for line in lines:
            count = line.number
            if count == completion:
                return line.row["step"], line.row["prompt_id"], line.row["sample"]
        there = f"it has {count}, so give 1 … {count}" if count else "it has none: give --step, --prompt and --sample"
        raise CannotReplay(f"completion {completion}: a line of {run.folder.completions}, and {there}.")
    if step is None or prompt is None or sample is None or completion is not None:
        raise CannotReplay(
            "name one completion: --step S --prompt P --sample I, as completions.jsonl has them, or --completion N, "
            "line N of that file."
        )
    if not run.start <= step < run.completed:
        raise CannotReplay(
            f"step {step} of {run.path}: it made {run.completed - run.start} rollouts, so give {run.start} … "
            f"{run.completed - 1}."
        )
    size = (run.settings["model"].get("algorithm") or {}).get("group_size")
    if isinstance(size, int) and not 0 <= sample < size:
        raise CannotReplay(f"sample {sample}: a group has {size} completions, so give 0 … {size - 1}.")
    return step, prompt, sample


def _later_weights(run: RecordedRun, step: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The weights of the run's own checkpoints behind a step that are whole and hold those that it recorded, each read
    when it is asked for."""
    for rollouts, path in sorted(run.checkpoints().items()):
        if rollouts > step + 1 and broken(path) is None:
            weights = policy_weights(read_checkpoint(path))
            if run.digests.get(rollouts) in (None, weights_digest(weights.items())):
                yield rollouts, weights


def _explanation(run: RecordedRun, watch: Watch, exact: bool, other_here: Sequence[str], held_to: str) -> Explanation:
    experience, row = watch.experience, watch.row
    samples, rollout, scored = experience.samples, experience.rollout, experience.scored
    problem = samples.per_row[row]
    statistics = experience.statistics
    described = scored.described(row)
    at_once = watch.drawn[0] if watch.drawn and watch.drawn[0].rollouts == watch.step else None
    ids = _ids(rollout.completion_ids[row], rollout.completion_mask[row])
    return Explanation(
        run=str(run.path),
        step=watch.step,
        prompt_id=watch.prompt_id,
        sample=watch.sample,
        question=problem.question,
        answer=problem.answer,
        prompt=samples.prompt_texts[row // rollout.group_size],
        completion=samples.completions[row],
        finish_reason=rollout.finish_reasons[row],
        correct=scored.correct()[row],
        reward=float(statistics.rewards.flatten()[row]) if bool(statistics.valid.flatten()[row]) else None,
        advantage=_mean(experience.advantages[row].expand_as(rollout.action_mask[row]), rollout.action_mask[row]),
        drawn_again=None if at_once is None else _ids_of(at_once) == ids,
        held_to=held_to,
        exact=exact,
        other_here=other_here,
        rewards=[
            Rewarded(name=reward.name, weight=float(reward.weight), **_described(described[reward.name]))
            for reward in scored.rewards
        ],
        arithmetic=advantage_lines(
            watch.update.algorithm, experience, row, max_completion_length=watch.update.max_completion_length
        ),
        group=_members(watch),
        steps=_steps(watch),
        tokens=_tokens(watch),
        later=[_later(watch, ids, drawn) for drawn in watch.drawn if drawn.rollouts > watch.step],
    )


def _described(score: Mapping[str, Any]) -> dict[str, Any]:
    return {"value": score["value"], "status": score["status"], "detail": score.get("detail") or ""}


def _members(watch: Watch) -> list[Member]:
    experience = watch.experience
    statistics, rollout, found = experience.statistics, experience.rollout, []
    correct = experience.scored.correct()
    for sample, row in enumerate(watch.group.tolist()):
        mask = rollout.action_mask[row]
        found.append(
            Member(
                sample=sample,
                completion=experience.samples.completions[row],
                correct=correct[row],
                tokens=int(mask.sum()),
                finish_reason=rollout.finish_reasons[row],
                reward=float(statistics.rewards.flatten()[row]) if bool(statistics.valid.flatten()[row]) else None,
                advantage=_mean(experience.advantages[row].expand_as(mask), mask),
                in_loss=bool(experience.keep[row]),
                before=float(watch.before[row][mask].double().sum()),
                after=float(watch.after[row][mask].double().sum()),
            )
        )
    return found


def _steps(watch: Watch) -> list[Step]:
    mask = watch.experience.rollout.action_mask[watch.row]
    found = []
    for look in watch.looks:
        mine = mask[: len(look.ratio)]
        clipped = None if look.clipped is None else _mean(look.clipped.double(), mine)
        ratio, pull = _mean(look.ratio, mine), float(look.pull[mine].double().sum())
        found.append(Step(number=look.number, ratio=ratio, clipped=clipped, pull=pull))
    return found


def _tokens(watch: Watch) -> list[Token]:
    experience, row, tokenizer = watch.experience, watch.row, watch.module.tokenizer
    rollout, known = experience.rollout, watch.distributions
    look = watch.looks[0] if watch.looks else None
    advantages = experience.advantages[row].expand_as(rollout.action_mask[row])

    def text(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    found = []
    for t, token in enumerate(_ids(rollout.completion_ids[row], rollout.completion_mask[row])):
        if not bool(rollout.action_mask[row, t]):
            found.append(Token(text=text(token), id=token, written=False))
            continue
        others: list[Other] = []
        if known.other_ids is not None and known.other_logprobs is not None:
            pairs = zip(known.other_ids[t].tolist(), known.other_logprobs[t].exp().tolist(), strict=True)
            others = [Other(text=text(id_), id=id_, probability=chance) for id_, chance in pairs if chance > 0]
        logprob = float(watch.before[row, t])
        found.append(
            Token(
                text=text(token),
                id=token,
                written=True,
                logprob=logprob,
                after=float(watch.after[row, t]),
                probability=math.exp(logprob),
                entropy=float(known.entropy[t]),
                others=others,
                advantage=float(advantages[t]),
                ratio=None if look is None else float(look.ratio[t]),
                clipped=None if look is None or look.clipped is None else bool(look.clipped[t]),
                weight=None if look is None else float(look.weights[t]),
                pull=None if look is None else float(look.pull[t]),
            )
        )
    return found


def _later(watch: Watch, ids: list[int], drawn: Drawn) -> Later:
    theirs, tokenizer = _ids_of(drawn), watch.module.tokenizer
    longest = max(len(ids), len(theirs))
    at = next((t for t in range(longest) if ids[t : t + 1] != theirs[t : t + 1]), None)

    def text(tokens: list[int]) -> str:
        return "" if at is None else str(tokenizer.decode(tokens[at : at + 1], skip_special_tokens=False))

    return Later(
        rollouts=drawn.rollouts,
        completion=drawn.samples.completions[0],
        correct=drawn.scored.correct()[0],
        tokens=int(drawn.samples.rollout.action_lengths[0]),
        finish_reason=drawn.samples.rollout.finish_reasons[0],
        reward=drawn.scored.totals()[0],
        parts_at=at,
        here=text(theirs),
        there=text(ids),
    )


def _ids(ids: Tensor, mask: Tensor) -> list[int]:
    return [int(each) for each in ids[mask]]


def _ids_of(drawn: Drawn) -> list[int]:
    rollout = drawn.samples.rollout
    return _ids(rollout.completion_ids[0], rollout.completion_mask[0])


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].double().mean()) if bool(mask.any()) else 0.0
