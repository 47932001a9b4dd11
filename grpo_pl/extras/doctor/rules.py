"""The rules: which statistics of a run are a finding, its sentence, and the field to change.

Each rule is a pure function of `RunStatistics`. ``docs/doctor.md`` has the figures that its threshold lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from grpo_pl.extras.doctor.run_statistics import (
    MIN_GROUPS,
    MIN_ROLLOUTS,
    Finding,
    RewardStatistics,
    RolloutStatistics,
    RunStatistics,
)

MIN_COMPLETIONS = 32
"""Fewer say nothing about shares."""
MOSTLY, RARELY = 0.95, 0.05
FEW_MIXED = 0.1
"""Rewards count as equal where this share of the groups, or less, has completions of different rewards."""
IDENTICAL = 0.8
CUT, CUT_UNPAID, ENDED = 0.4, 0.9, 0.1
NO_ANSWER = 0.9
NO_END = 1e-9
MIN_COMPLETIONS_PER_UPDATE = 16
SMALLEST_EFFECT = 0.15
REPEATED = 0.05
REFUSED = 0.05
PAID_AT_LEAST = 0.05  # demonstrations may mean to fail: of a search mostly what it looks like
EMPTY = 0.1
DIFFERED = 0.02
LEFT_OUT, FAILED = 0.05, 0.5
UNMOVED = 0.9
LEAST_DRIFT = 0.1
"""Of a policy with an entropy of 1 nat a token or more; of one that is surer, in proportion less."""
MOST_KL, MOST_CLIPPED = 0.3, 0.5
FALL = 0.2
LEARNS = 0.05
"""By so much more must be right."""
MOVED = 0.5
BFLOAT16_GAIN = 1.3
"""bfloat16 must be so many times as fast, for what it rounds away."""

Found = Iterator[tuple[float, str] | tuple[float, str, str]]
"""Figure and sentence of a finding, and the field to change if it is not the one of the rule; nothing of a healthy
run."""


@dataclass(frozen=True)
class Rule:
    """What a code stands for."""

    code: str
    name: str
    field: str
    """The setting to change; empty where it depends on what is found."""
    look: Callable[[RunStatistics], Found]

    def __call__(self, statistics: RunStatistics) -> Finding | None:
        for figure, sentence, *field in self.look(statistics):
            return Finding(self.code, self.name, figure, sentence, *(field or [self.field]))
        return None


RULES: list[Rule] = []
"""In the order of their codes."""


def rule(code: str, name: str, field: str) -> Callable[[Callable[[RunStatistics], Found]], Rule]:
    """Adds a function to the rules."""

    def add(look: Callable[[RunStatistics], Found]) -> Rule:
        RULES.append(Rule(code, name, field, look))
        return RULES[-1]

    return add


def findings(statistics: RunStatistics) -> list[Finding]:
    """Everything that the rules find, in the order of the codes."""
    return [found for rule in RULES if (found := rule(statistics)) is not None]


# --- groups without a difference ------------------------------------------------------------------------------------


def _all_equal(s: RunStatistics) -> bool:
    return s.enough and s.share("mixed", "groups") <= FEW_MIXED


def _equal_groups(s: RunStatistics, *, applies: bool, told: str) -> Found:
    """A finding if rewards are equal in the groups, the share of right completions ``applies`` to the rule, and no
    other rule explains equal rewards better than the difficulty of the problems does."""
    others = (constant_reward, weights_cancel, identical, cut_off, no_form, no_end, no_question, refused, unpaid)
    right, groups = s.share("right"), s.total("groups")
    if not (_all_equal(s) and applies) or any(other(s) for other in others) or (empty_paid(s) and right > MOSTLY):
        return
    equal = f"in {groups - s.total('mixed')} of {groups} groups all rewards are equal"
    yield right, f"{right:.1%} of {s.total('completions')} completions are right, {told.format(equal=equal)}"


@rule("D01", "too hard", "model.cold_start, the difficulty in data.source (grpo-pl filter), or model.policy")
def too_hard(s: RunStatistics) -> Found:
    unsure = "" if s.answers else " Or the reward is broken: grpo-pl doctor tells these apart."
    told = f"and {{equal}}: the problems are too hard for the policy.{unsure}"
    return _equal_groups(s, applies=s.share("right") <= RARELY, told=told)


def memorised(s: RunStatistics) -> Found:
    """Right in training and wrong elsewhere."""
    right, held_out = s.share("right"), s.held_out
    if s.enough and held_out and right - held_out.high > SMALLEST_EFFECT:
        fewer = (
            ", model.cold_start.steps (fewer), or data.source.demonstrated_share (0.5 keeps half of the problems for "
            "rollouts, where the source has it)"
        )
        yield (
            right - held_out.value,
            f"{right:.1%} of {s.total('completions')} training completions are right, but {held_out.value:.1%} of the "
            f"held-out ones ({held_out.low:.1%} … {held_out.high:.1%}): training problems are known by heart.",
            f"data.source (more problems, or a generator){fewer if s.settings.cold_start else ''}",
        )


@rule("D02", "too easy or memorised", "the difficulty in data.source (grpo-pl filter)")
def too_easy(s: RunStatistics) -> Found:
    yield from memorised(s)
    told = "and {equal}: there is nothing left to learn."
    yield from _equal_groups(s, applies=s.share("right") >= MOSTLY, told=told)


@rule("D03", "always or never solved", "the difficulty in data.source (grpo-pl filter), or model.sampling.temperature")
def split(s: RunStatistics) -> Found:
    told = "but {equal}: each problem is solved always or never."
    return _equal_groups(s, applies=RARELY < s.share("right") < MOSTLY, told=told)


@rule("D04", "constant reward", "")
def constant_reward(s: RunStatistics) -> Found:
    for reward in s.rewards if s.total("completions") >= MIN_COMPLETIONS else ():
        if reward.most is not None and _is_constant(reward, s):
            yield (
                reward.most,
                f"the reward {reward.name!r} gave {reward.most:g} to all {s.total('completions')} completions, "
                "whatever they say.",
                f"the reward {reward.name!r} in model.rewards",
            )


def _is_constant(reward: RewardStatistics, s: RunStatistics) -> bool:
    value = reward.most
    if value != reward.least:
        return False
    if reward.correctness:
        return value not in (0.0, 1.0)
    if not reward.weight or not reward.earned or (reward.form and value == 0.0):
        return False
    return value != 1.0 or (s.answers is not None and s.answers.empties.get(reward.name) == 1.0)


@rule("D05", "advantages of zero", "the weights in model.rewards")
def weights_cancel(s: RunStatistics) -> Found:
    differ = s.share("mixed_answers", "groups")
    if _all_equal(s) and differ > 2 * FEW_MIXED:
        yield (
            differ,
            f"right and wrong answers meet in {differ:.0%} of the groups, but the weighted sum of the rewards is equal "
            "in them: every advantage is 0.",
        )


@rule("D06", "wrong answers earn more", "the weights in model.rewards")
def wrong_pays(s: RunStatistics) -> Found:
    gap = s.mean(lambda rollout: rollout.gap)
    if gap is not None and gap < 0.0 and s.enough and s.share("mixed_answers", "groups") > FEW_MIXED:
        yield gap, f"inside a group right answers earn {-gap:.3g} less than wrong ones: training leads away from them."


@rule("D07", "identical completions", "")
def identical(s: RunStatistics) -> Found:
    share = s.share("identical", "groups")
    if s.enough and s.settings.group_size > 1 and share >= IDENTICAL and s.share("right") <= MOSTLY:
        field = "model.sampling.temperature (1.0 draws what the policy is)"
        if s.settings.temperature >= 0.9 and s.settings.cold_start:
            field = "model.cold_start.steps (fewer), or model.sampling.temperature"
        yield share, f"in {share:.0%} of the groups all completions are the same text, so none is better.", field


@rule("D09", "small batch", "data.prompts_per_step, model.algorithm.group_size or num_minibatches")
def small_batch(s: RunStatistics) -> Found:
    prompts = s.settings.prompts_per_update
    completions = prompts * s.settings.group_size
    if prompts < 2 or completions < MIN_COMPLETIONS_PER_UPDATE:
        told = f"an update averages over {prompts:g} prompts with {completions:g} completions: mostly noise."
        yield completions, told


# --- completions ----------------------------------------------------------------------------------------------------


@rule("D10", "cut off", "")
def cut_off(s: RunStatistics) -> Found:
    share, plays = s.share("cut_unpaid"), s.settings.plays
    if s.total("completions") < MIN_COMPLETIONS or share < CUT or no_end(s):
        return
    if s.share("cut_unpaid", "cut") < CUT_UNPAID or (plays and not _all_equal(s)):
        return  # answers fit into the limit; to lose a game is to run out of turns
    if s.settings.untaught and s.share("no_answer") >= NO_ANSWER:
        return  # nor would it end by itself
    ended = s.total("completions") - s.total("cut")
    ended_right = (s.total("right") - s.total("cut_right")) / max(1, ended)
    if ended >= ENDED * s.total("completions") and ended_right < ENDED:
        return  # those that end by themselves are no better
    field = f"model.sampling.max_completion_length (now {s.settings.length})"
    field = "model.episodes.max_turns or max_episode_tokens" if plays else field
    yield share, f"{share:.0%} of the completions are cut off at the limit and earn nothing.", field


@rule(
    "D11",
    "form never reached",
    "model.template (ask for the form), model.cold_start, or the form that model.rewards read",
)
def no_form(s: RunStatistics) -> Found:
    if s.total("completions") < MIN_COMPLETIONS or cut_off(s) or no_end(s):
        return
    share = s.share("no_answer")
    formless = [reward.name for reward in s.rewards if reward.form and reward.weight and reward.most == 0.0]
    if share >= NO_ANSWER or formless:
        told = (
            f"in {share:.0%} of the completions the reward finds no answer"
            if share >= NO_ANSWER
            else f"no completion earns anything from {formless[0]!r}"
        )
        yield share, f"{told}: the policy does not know the form."


@rule("D12", "no end", "the end token of the tokenizer in model.policy.path, or model.sampling.stop")
def no_end(s: RunStatistics) -> Found:
    chance, completions = s.answers.end_chance if s.answers else None, s.total("completions")
    if chance is not None and chance < NO_END and completions == s.total("cut") >= MIN_COMPLETIONS:
        told = f"no completion ends by itself, and the likeliest end token has a probability of {chance:.1g}."
        yield chance, told


@rule("D13", "episodes left out", "model.environment: mend what fails; for an agent see on_agent_error and on_rewrite")
def left_out(s: RunStatistics) -> Found:
    """Sessions of an agent, or episodes, that have no value."""
    return _episodes(s, "left_out", LEFT_OUT, "have no value and leave the loss")


@rule(
    "D14",
    "episodes that fail",
    "model.environment: if the policy cannot help it, mend what fails (grpo-pl agent --try shows a session)",
)
def failing(s: RunStatistics) -> Found:
    """Sessions of an agent, or episodes, that fail and are held against the policy."""
    return _episodes(s, "failed", FAILED, "fail and count against the policy")


def _episodes(s: RunStatistics, name: str, most: float, told: str) -> Found:
    """A finding if more than this share of the episodes are counted under ``name``; with the first reason."""
    share, completions = s.share(name), s.total("completions")
    if completions >= MIN_COMPLETIONS and share > most:
        why = next((reason for rollout in s.rollouts if (reason := getattr(rollout, f"{name}_by"))), "")
        yield share, f"{share:.1%} of {completions} episodes {told}. The first: {why}"[:300]


@rule("D15", "images ignored", "model.policy (images, train_vision), or model.cold_start.steps (more)")
def images_ignored(s: RunStatistics) -> Found:
    swapped, unmoved = s.total("swapped"), s.total("unmoved")
    if swapped >= MIN_GROUPS and unmoved >= UNMOVED * swapped:
        yield (
            unmoved / swapped,
            f"with the images of other problems {unmoved} of {swapped} answers stay as they are: the policy does not "
            "look at its images.",
        )


# --- problems -------------------------------------------------------------------------------------------------------


@rule("D20", "vocabulary gap", "model.policy.characters (from_data), or model.policy.path")
def unwritable(s: RunStatistics) -> Found:
    if (p := s.problems) and p.unwritable:
        yield (
            p.unwritable / p.texts,
            f"{p.unwritable} of {p.texts} prompts, answers and demonstrations have characters that the tokenizer "
            f"cannot write: {p.characters}.",
        )


@rule("D21", "leaked problems", "data.source (val_path, val_share), or the file in model.cold_start.demonstrations")
def leaked(s: RunStatistics) -> Found:
    if (p := s.problems) and p.leaked:
        yield (
            float(p.leaked),
            f"{p.leaked} held-out problems are trained on or demonstrated as well: held-out numbers will flatter.",
        )


@rule("D22", "repeated problems", "the rows of data.source")
def repeated(s: RunStatistics) -> Found:
    p = s.problems
    if p and not s.settings.plays and p.train >= MIN_GROUPS and p.repeated >= REPEATED * p.train:
        share = p.repeated / p.train
        yield share, f"{p.repeated} of {p.train} training problems ask what an earlier one asks ({share:.0%})."


@rule(
    "D23",
    "prompts too long",
    "model.sampling.max_completion_length (smaller), max_position_embeddings in model.policy.from_scratch, or the rows "
    "of data.source",
)
def too_long(s: RunStatistics) -> Found:
    if (p := s.problems) and p.too_long:
        told = f"{p.too_long} of {p.prompts} prompts leave no room for a completion in the model's context."
        yield p.too_long / p.prompts, told


@rule(
    "D24",
    "prompt without the question",
    "model.template (user must hold {question}; a chat template must show the user's turn)",
)
def no_question(s: RunStatistics) -> Found:
    questions, prompts = s.total("questions"), s.total("prompts")
    if questions >= MIN_GROUPS and prompts <= questions / 2:
        yield (
            prompts / questions,
            f"{questions} questions make only {prompts} different prompts: the policy does not see what is asked.",
        )


@rule("D25", "few held-out problems", "data.val_prompts, or data.source (val_share)")
def few_held_out(s: RunStatistics) -> Found:
    count = s.problems.held_out if s.problems else 0
    if not count or (s.rewards and not any(reward.correctness for reward in s.rewards)):
        return
    margin = 1.96 * 0.5 / math.sqrt(count)
    if margin > SMALLEST_EFFECT:
        yield (
            float(count),
            f"{count} held-out problems tell a share of right answers to ±{margin:.2f} only: learning will not show.",
        )


# --- rewards of known answers ---------------------------------------------------------------------------------------


@rule(
    "D30",
    "gold answers refused",
    "the correctness reward in model.rewards, or the answers of data.source (answer, answer_pattern)",
)
def refused(s: RunStatistics) -> Found:
    a = s.answers
    if a is None or a.refused <= REFUSED * a.golds:
        return
    if a.accepted_form or not (s.total("right") or a.demonstrations_paid):  # else the reward reads a form not tried
        told = f"the correctness reward refuses {a.refused} of {a.golds} gold answers, in every form tried."
        yield a.refused / a.golds, told


@rule("D31", "demonstrations unpaid", "model.cold_start.demonstrations (or the source's own), or model.rewards")
def unpaid(s: RunStatistics) -> Found:
    if (a := s.answers) and a.demonstrations_paid < PAID_AT_LEAST * a.demonstrations:
        yield (
            a.demonstrations_paid / a.demonstrations,
            f"the correctness reward pays {a.demonstrations_paid} of {a.demonstrations} demonstrations: the cold start "
            "teaches what earns nothing.",
        )


@rule("D32", "empty completions paid", "model.rewards")
def empty_paid(s: RunStatistics) -> Found:
    if (a := s.answers) is None:
        return
    if a.empty_right > EMPTY:
        yield a.empty_right, f"an empty completion counts as right for {a.empty_right:.0%} of the problems."
    elif a.empty_total is not None and a.best_total is not None and a.empty_total > max(0.0, a.best_total):
        yield a.empty_total, f"an empty completion earns {a.empty_total:.3g}, a gold answer at best {a.best_total:.3g}."


@rule("D33", "noisy reward", "")
def noise(s: RunStatistics) -> Found:
    if (a := s.answers) and a.differed > DIFFERED * a.scored_again:
        yield (
            a.differed / a.scored_again,
            f"the reward {a.differing!r} gave {a.differed} of {a.scored_again} completions another value the second "
            "time.",
            f"the reward {a.differing!r} in model.rewards",
        )
    for reward in s.rewards:
        if reward.equal_texts >= 2 and reward.differed > DIFFERED * reward.equal_texts and not s.settings.plays:
            yield (
                reward.differed / reward.equal_texts,
                f"the reward {reward.name!r} gave different values to {reward.differed} of {reward.equal_texts} "
                "completions that another of their group repeats word for word.",
                f"the reward {reward.name!r} in model.rewards",
            )


# --- updates: they should move the policy, and not too far ----------------------------------------------------------


@rule("D40", "rate too small", "model.optimization.lr (higher), or data.steps")
def slow(s: RunStatistics) -> Found:
    drift = s.mean(lambda rollout: _at_peak(rollout, rollout.logprob_change))
    if drift is None or not s.enough or _all_equal(s) or half_precision(s) or no_update(s):
        return
    total, unsure = drift * s.settings.rollouts, s.mean(lambda rollout: rollout.entropy)
    if total < LEAST_DRIFT * (1.0 if unsure is None else min(1.0, unsure)):
        weights = s.mean(lambda rollout: _at_peak(rollout, rollout.weight_change)) or 0.0
        yield (
            total,
            f"the updates of a rollout change the weights by {weights:.1e} of themselves and the log-probability of a "
            f"token by {drift:.1e}: over all {s.settings.rollouts} rollouts by {total:.2g} at most.",
        )


def _at_peak(rollout: RolloutStatistics, change: float | None) -> float | None:
    return None if change is None or not rollout.mixed else change / rollout.rate


@rule("D41", "rate too large", "model.optimization.lr (lower), or warmup_rollouts (more)")
def fast(s: RunStatistics) -> Found:
    if len(s.rollouts) < MIN_ROLLOUTS:
        return
    kl, clipped = s.mean(lambda rollout: rollout.kl), s.mean(lambda rollout: rollout.clipped)
    if kl is not None and kl > MOST_KL:
        yield kl, f"the updates of one rollout move the policy by a KL divergence of {kl:.2g} a token."
    if clipped is not None and clipped > MOST_CLIPPED:
        yield clipped, f"{clipped:.0%} of the tokens are outside the clip range."
    # a policy may grow sure of what is right: nearly all is, or more than in the first half of the rollouts
    half = len(s.rollouts) // 2
    first, last = replace(s, rollouts=s.rollouts[:half]), replace(s, rollouts=s.rollouts[half:])
    learns = s.share("right") >= MOSTLY or last.share("right") >= first.share("right") + LEARNS
    entropies = [rollout.entropy for rollout in s.rollouts if rollout.entropy is not None]
    if len(entropies) >= MIN_ROLLOUTS and entropies[-1] < FALL * entropies[0] and not learns:
        yield (
            entropies[-1] / entropies[0],
            f"the entropy of a token fell from {entropies[0]:.2g} to {entropies[-1]:.2g} in {len(entropies)} rollouts.",
        )


@rule(
    "D42",
    "updates lost in rounding",
    "model.policy.dtype (float32; trainer.precision: bf16-mixed computes in 16 bits)",
)
def half_precision(s: RunStatistics) -> Found:
    moved = _moved(s)
    if s.settings.half_precision and moved is not None and moved < MOVED and not no_update(s):
        yield moved, f"{moved:.0%} of the weights change in an update: the others round back to what they were."


def _moved(s: RunStatistics) -> float | None:
    return s.mean(lambda rollout: rollout.moved if rollout.mixed else None)


@rule("D43", "no update", "model.optimization.lr, or model.algorithm")
def no_update(s: RunStatistics) -> Found:
    if skipped := s.total("skipped"):
        yield float(skipped), f"{skipped} updates had a loss or gradient that is not finite and were skipped."
    if _moved(s) == 0.0 and s.enough:
        yield 0.0, f"no weight changed in {len(s.rollouts)} rollouts, although rewards differ."


@rule("D44", "faster in bfloat16", "trainer.precision (bf16-mixed)")
def faster_in_bfloat16(s: RunStatistics) -> Found:
    gain = s.mean(lambda rollout: rollout.bfloat16_gain)
    if gain is not None and gain >= BFLOAT16_GAIN:
        yield gain, f"this CPU computes a step {gain:.2f} times as fast in bfloat16."


@rule("D45", "float32 on a GPU", "trainer.precision (bf16-mixed), or param_dtype of FSDP2Strategy (auto)")
def float32_on_gpu(s: RunStatistics) -> Found:
    if s.settings.float32_on_gpu:
        yield 32.0, "the GPU computes in float32, several times slower than in bfloat16."
