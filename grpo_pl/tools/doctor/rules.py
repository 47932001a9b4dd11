"""The rules: which statistics of a run are a finding, its sentence, and the field to change.

Each rule is a pure function of `RunStatistics`. ``docs/doctor.md`` has the figures that its threshold lies between.
"""

from __future__ import annotations

import math

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.sources import PromptSource
from grpo_pl.functional.estimates import Estimate
from grpo_pl.tools.doctor.rules_of_updates import Found, fast, faster_in_bfloat16, half_precision, no_update, slow
from grpo_pl.tools.doctor.run_statistics import (
    FEW_MIXED,
    MIN_GROUPS,
    MOSTLY,
    Finding,
    RewardStatistics,
    RunStatistics,
)
from grpo_pl.training.module import GRPOModule

MIN_COMPLETIONS = 32
"""Fewer say nothing about shares."""
RARELY = 0.05
IDENTICAL = 0.8
CUT = 0.4
CUT_UNPAID = 0.9
ENDED = 0.1
NO_ANSWER = 0.9
NO_END = 1e-9
MIN_COMPLETIONS_PER_UPDATE = 16
SMALLEST_EFFECT = 0.15
REPEATED = 0.05
REFUSED = 0.05
PAID_AT_LEAST = 0.05  # demonstrations may mean to fail: of a search mostly what it looks like
EMPTY = 0.1
DIFFERED = 0.02
LEFT_OUT = 0.05
FAILED = 0.5


def findings(statistics: RunStatistics) -> list[Finding]:
    """Everything that the rules find, in the order of the codes."""
    return [
        Finding(code=code, name=name, figure=found[0], sentence=found[1], field=found[2])
        for code, (name, rule) in RULES.items()
        if (found := rule(statistics)) is not None
    ]


# --- groups without a difference ------------------------------------------------------------------------------------


def _all_equal(s: RunStatistics) -> bool:
    return s.enough and s.share("mixed", "groups") <= FEW_MIXED


def _has_another_cause(s: RunStatistics) -> bool:
    """True if another rule explains equal rewards better than the difficulty of the problems does."""
    others = (constant_reward, weights_cancel, identical, cut_off, no_form, no_end, no_question, refused, unpaid)
    return any(rule(s) is not None for rule in others) or (empty_paid(s) is not None and s.share("right") > MOSTLY)


def _equal_groups(s: RunStatistics, applies: bool, told: str, field: str) -> Found:
    """A finding if rewards are equal in the groups, the share of right completions ``applies`` to the rule, and no
    other rule explains it."""
    if not _all_equal(s) or not applies or _has_another_cause(s):
        return None
    return s.share("right"), f"{s.share('right'):.1%} of {s.total('completions')} completions are right, {told}", field


def too_hard(s: RunStatistics) -> Found:
    unsure = "" if s.answers else " Or the reward is broken: grpo-pl doctor tells these apart."
    told = f"and {_equal(s)}: the problems are too hard for the policy.{unsure}"
    field = "model.cold_start, the difficulty in data.source (grpo-pl filter), or model.policy"
    return _equal_groups(s, s.share("right") <= RARELY, told, field)


def held_out_share(module: GRPOModule, data: RolloutDataModule) -> Estimate | None:
    """pass@1 of the source's own held-out problems; None where training asks others than these: a file of its own, kept
    or chosen problems, groups that are drawn until they differ."""
    source, found = data.source, module.held_out.get("val/pass@1")
    chosen = module.algorithm.dynamic_sampling or type(source).observe is not PromptSource.observe
    leaves = source.leaves().values()
    other = any(getattr(leaf, "kept", None) or getattr(leaf, "val_path", None) for leaf in leaves)
    return None if found is None or chosen or other else found.estimate()


def memorised(s: RunStatistics) -> Found:
    """Right in training and wrong elsewhere."""
    right, held_out = s.share("right"), s.held_out
    if held_out is None or not s.total("completions") or right - held_out.high <= SMALLEST_EFFECT:
        return None
    return (
        right - held_out.value,
        f"{right:.1%} of {s.total('completions')} training completions are right, but {held_out.value:.1%} of the "
        f"held-out ones ({held_out.low:.1%} … {held_out.high:.1%}): training problems are known by heart.",
        "data.source (more problems, or a generator)"
        + ", model.cold_start.steps (fewer), or data.source.demonstrated_share (0.5 keeps half of the problems for "
        "rollouts, where the source has it)" * s.settings.cold_start,
    )


def too_easy(s: RunStatistics) -> Found:
    if (found := memorised(s)) is not None and s.enough:
        return found
    told = f"and {_equal(s)}: there is nothing left to learn."
    return _equal_groups(s, s.share("right") >= MOSTLY, told, "the difficulty in data.source (grpo-pl filter)")


def split(s: RunStatistics) -> Found:
    told = f"but {_equal(s)}: each problem is solved always or never."
    field = "the difficulty in data.source (grpo-pl filter), or model.sampling.temperature"
    return _equal_groups(s, RARELY < s.share("right") < MOSTLY, told, field)


def _equal(s: RunStatistics) -> str:
    groups = s.total("groups")
    return f"in {groups - s.total('mixed')} of {groups} groups all rewards are equal"


def constant_reward(s: RunStatistics) -> Found:
    if s.total("completions") < MIN_COMPLETIONS:
        return None
    for reward in s.rewards:
        if _is_constant(reward, s):
            return (
                reward.most or 0.0,
                f"the reward {reward.name!r} gave {reward.most:g} to all {s.total('completions')} completions, "
                "whatever they say.",
                f"the reward {reward.name!r} in model.rewards",
            )
    return None


def left_out(s: RunStatistics) -> Found:
    """Sessions of an agent, or episodes, that have no value."""
    field = "model.environment: mend what fails; for an agent see on_agent_error and on_rewrite"
    return _episodes(s, "left_out", LEFT_OUT, "have no value and leave the loss", field)


def failing(s: RunStatistics) -> Found:
    """Sessions of an agent, or episodes, that fail and are held against the policy."""
    field = "model.environment: if the policy cannot help it, mend what fails (grpo-pl agent --try shows a session)"
    return _episodes(s, "failed", FAILED, "fail and count against the policy", field)


def _episodes(s: RunStatistics, name: str, most: float, told: str, field: str) -> Found:
    """A finding if more than this share of the episodes are counted under ``name``; with the first reason."""
    share, completions = s.share(name), s.total("completions")
    if completions < MIN_COMPLETIONS or share <= most:
        return None
    why = next((reason for rollout in s.rollouts if (reason := getattr(rollout, f"{name}_by"))), "")
    return share, f"{share:.1%} of {completions} episodes {told}. The first: {why}"[:300], field


def _is_constant(reward: RewardStatistics, s: RunStatistics) -> bool:
    value = reward.most
    if value is None or value != reward.least:
        return False
    if reward.correctness:
        return value not in (0.0, 1.0)
    if not reward.weight or not reward.earned or (reward.form and value == 0.0):
        return False
    empty = s.answers.empties.get(reward.name) if s.answers else None
    return value != 1.0 or empty == 1.0


def weights_cancel(s: RunStatistics) -> Found:
    differ = s.share("mixed_answers", "groups")
    if not _all_equal(s) or differ <= 2 * FEW_MIXED:
        return None
    return (
        differ,
        f"right and wrong answers meet in {differ:.0%} of the groups, but the weighted sum of the rewards is equal in "
        "them: every advantage is 0.",
        "the weights in model.rewards",
    )


def wrong_pays(s: RunStatistics) -> Found:
    gap = s.mean(lambda rollout: rollout.gap)
    if gap is None or gap >= 0.0 or not s.enough or s.share("mixed_answers", "groups") <= FEW_MIXED:
        return None
    return (
        gap,
        f"inside a group right answers earn {-gap:.3g} less than wrong ones: training leads away from them.",
        "the weights in model.rewards",
    )


def identical(s: RunStatistics) -> Found:
    share = s.share("identical", "groups")
    if not s.enough or s.settings.group_size < 2 or share < IDENTICAL or s.share("right") > MOSTLY:
        return None
    field = "model.sampling.temperature (1.0 draws what the policy is)"
    if s.settings.temperature >= 0.9 and s.settings.cold_start:
        field = "model.cold_start.steps (fewer), or model.sampling.temperature"
    return share, f"in {share:.0%} of the groups all completions are the same text, so none is better.", field


def small_batch(s: RunStatistics) -> Found:
    prompts = s.settings.prompts_per_update
    completions = prompts * s.settings.group_size
    if prompts >= 2 and completions >= MIN_COMPLETIONS_PER_UPDATE:
        return None
    return (
        completions,
        f"an update averages over {prompts:g} prompts with {completions:g} completions: mostly noise.",
        "data.prompts_per_step, model.algorithm.group_size or num_minibatches",
    )


# --- completions ----------------------------------------------------------------------------------------------------


def cut_off(s: RunStatistics) -> Found:
    share = s.share("cut_unpaid")
    if s.total("completions") < MIN_COMPLETIONS or share < CUT or no_end(s):
        return None
    if s.share("cut_unpaid", "cut") < CUT_UNPAID or (s.settings.plays and not _all_equal(s)):
        return None  # answers fit into the limit; to lose a game is to run out of turns
    if s.settings.untaught and s.share("no_answer") >= NO_ANSWER:
        return None  # nor would it end by itself
    ended = s.total("completions") - s.total("cut")
    ended_right = (s.total("right") - s.total("cut_right")) / max(1, ended)
    if ended >= ENDED * s.total("completions") and ended_right < ENDED:
        return None  # those that end by themselves are no better
    where = "model.episodes.max_turns or max_episode_tokens" if s.settings.plays else ""
    return (
        share,
        f"{share:.0%} of the completions are cut off at the limit and earn nothing.",
        where or f"model.sampling.max_completion_length (now {s.settings.length})",
    )


def no_form(s: RunStatistics) -> Found:
    if s.total("completions") < MIN_COMPLETIONS or cut_off(s) or no_end(s):
        return None
    share = s.share("no_answer")
    formless = [r.name for r in s.rewards if r.form and r.weight and r.most == 0.0]
    if share < NO_ANSWER and not formless:
        return None
    said = f"no completion earns anything from {formless[0]!r}" if formless else ""
    return (
        share,
        (said if share < NO_ANSWER else f"in {share:.0%} of the completions the reward finds no answer")
        + ": the policy does not know the form.",
        "model.template (ask for the form), model.cold_start, or the form that model.rewards read",
    )


def no_end(s: RunStatistics) -> Found:
    chance = s.answers.end_chance if s.answers else None
    all_cut = s.total("completions") >= MIN_COMPLETIONS and s.total("cut") == s.total("completions")
    if chance is None or chance >= NO_END or not all_cut:
        return None
    return (
        chance,
        f"no completion ends by itself, and the likeliest end token has a probability of {chance:.1g}.",
        "the end token of the tokenizer in model.policy.path, or model.sampling.stop",
    )


# --- problems -------------------------------------------------------------------------------------------------------


def unwritable(s: RunStatistics) -> Found:
    p = s.problems
    if p is None or not p.unwritable:
        return None
    return (
        p.unwritable / p.texts,
        f"{p.unwritable} of {p.texts} prompts, answers and demonstrations have characters that the tokenizer cannot "
        f"write: {p.characters}.",
        "model.policy.characters (from_data), or model.policy.path",
    )


def leaked(s: RunStatistics) -> Found:
    p = s.problems
    if p is None or not p.leaked:
        return None
    return (
        float(p.leaked),
        f"{p.leaked} held-out problems are trained on or demonstrated as well: held-out numbers will flatter.",
        "data.source (val_path, val_share), or the file in model.cold_start.demonstrations",
    )


def repeated(s: RunStatistics) -> Found:
    p = s.problems
    if p is None or s.settings.plays or p.train < MIN_GROUPS or p.repeated < REPEATED * p.train:
        return None
    share = p.repeated / p.train
    return (
        share,
        f"{p.repeated} of {p.train} training problems ask what an earlier one asks ({share:.0%}).",
        "the rows of data.source",
    )


def too_long(s: RunStatistics) -> Found:
    p = s.problems
    if p is None or not p.too_long:
        return None
    return (
        p.too_long / p.prompts,
        f"{p.too_long} of {p.prompts} prompts leave no room for a completion in the model's context.",
        "model.sampling.max_completion_length (smaller), max_position_embeddings in model.policy.from_scratch, or the "
        "rows of data.source",
    )


def no_question(s: RunStatistics) -> Found:
    questions, prompts = s.total("questions"), s.total("prompts")
    if questions < MIN_GROUPS or prompts > questions / 2:
        return None
    return (
        prompts / questions,
        f"{questions} questions make only {prompts} different prompts: the policy does not see what is asked.",
        "model.template (user must hold {question}; a chat template must show the user's turn)",
    )


def few_held_out(s: RunStatistics) -> Found:
    p = s.problems
    if p is None or not p.held_out or (s.rewards and not any(reward.correctness for reward in s.rewards)):
        return None
    margin = 1.96 * 0.5 / math.sqrt(p.held_out)
    if margin <= SMALLEST_EFFECT:
        return None
    return (
        float(p.held_out),
        f"{p.held_out} held-out problems tell a share of right answers to ±{margin:.2f} only: learning will not show.",
        "data.val_prompts, or data.source (val_share)",
    )


# --- rewards of known answers ---------------------------------------------------------------------------------------


def refused(s: RunStatistics) -> Found:
    a = s.answers
    if a is None or not a.golds or a.refused <= REFUSED * a.golds:
        return None
    if not a.accepted_form and (s.total("right") or a.demonstrations_paid):
        return None  # the reward reads a form that was not tried
    return (
        a.refused / a.golds,
        f"the correctness reward refuses {a.refused} of {a.golds} gold answers, in every form tried.",
        "the correctness reward in model.rewards, or the answers of data.source (answer, answer_pattern)",
    )


def unpaid(s: RunStatistics) -> Found:
    a = s.answers
    if a is None or not a.demonstrations or a.demonstrations_paid >= PAID_AT_LEAST * a.demonstrations:
        return None
    return (
        a.demonstrations_paid / a.demonstrations,
        f"the correctness reward pays {a.demonstrations_paid} of {a.demonstrations} demonstrations: the cold start "
        "teaches what earns nothing.",
        "model.cold_start.demonstrations (or the source's own), or model.rewards",
    )


def empty_paid(s: RunStatistics) -> Found:
    a = s.answers
    if a is None:
        return None
    if a.empty_right > EMPTY:
        return a.empty_right, f"an empty completion counts as right for {a.empty_right:.0%} of the problems.", _REWARDS
    if a.empty_total is not None and a.best_total is not None and a.empty_total > max(0.0, a.best_total):
        return (
            a.empty_total,
            f"an empty completion earns {a.empty_total:.3g}, a gold answer at best {a.best_total:.3g}.",
            _REWARDS,
        )
    return None


_REWARDS = "model.rewards"


def noise(s: RunStatistics) -> Found:
    if s.answers is not None and s.answers.differed > DIFFERED * s.answers.scored_again:
        again = s.answers
        return (
            again.differed / again.scored_again,
            f"the reward {again.differing!r} gave {again.differed} of {again.scored_again} completions another value "
            "the second time.",
            f"the reward {again.differing!r} in model.rewards",
        )
    for reward in s.rewards:
        if reward.equal_texts >= 2 and reward.differed > DIFFERED * reward.equal_texts and not s.settings.plays:
            return (
                reward.differed / reward.equal_texts,
                f"the reward {reward.name!r} gave different values to {reward.differed} of {reward.equal_texts} "
                "completions that another of their group repeats word for word.",
                f"the reward {reward.name!r} in model.rewards",
            )
    return None


RULES = {
    "D01": ("too hard", too_hard),
    "D02": ("too easy or memorised", too_easy),
    "D03": ("always or never solved", split),
    "D04": ("constant reward", constant_reward),
    "D05": ("advantages of zero", weights_cancel),
    "D06": ("wrong answers earn more", wrong_pays),
    "D07": ("identical completions", identical),
    "D09": ("small batch", small_batch),
    "D10": ("cut off", cut_off),
    "D11": ("form never reached", no_form),
    "D12": ("no end", no_end),
    "D13": ("episodes left out", left_out),
    "D14": ("episodes that fail", failing),
    "D20": ("vocabulary gap", unwritable),
    "D21": ("leaked problems", leaked),
    "D22": ("repeated problems", repeated),
    "D23": ("prompts too long", too_long),
    "D24": ("prompt without the question", no_question),
    "D25": ("few held-out problems", few_held_out),
    "D30": ("gold answers refused", refused),
    "D31": ("demonstrations unpaid", unpaid),
    "D32": ("empty completions paid", empty_paid),
    "D33": ("noisy reward", noise),
    "D40": ("rate too small", slow),
    "D41": ("rate too large", fast),
    "D42": ("updates lost in rounding", half_precision),
    "D43": ("no update", no_update),
    "D44": ("faster in bfloat16", faster_in_bfloat16),
}
"""Code -> name and function of each rule."""
