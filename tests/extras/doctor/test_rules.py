"""Every rule by figures made by hand: what it finds, just below and above its threshold, and what explains what."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import grpo_pl
from grpo_pl.extras.doctor.callback import course
from grpo_pl.extras.doctor.rules import RULES, findings
from grpo_pl.extras.doctor.run_statistics import (
    AnswerStatistics,
    ProblemStatistics,
    RewardStatistics,
    RolloutStatistics,
    RunSettings,
    RunStatistics,
)
from grpo_pl.functional.estimates import Estimate

EXACT = RewardStatistics(name="exact", weight=1.0, correctness=True, least=0.0, most=1.0)
FORM = RewardStatistics(name="format", weight=0.1, correctness=False, least=0.0, most=1.0, earned=True, form=True)
ROLLOUT = RolloutStatistics(
    groups=8,
    completions=64,
    mixed=5,
    mixed_answers=5,
    right=20,
    cut=2,
    cut_unpaid=2,
    cut_right=0,
    no_answer=4,
    identical=0,
    questions=8,
    prompts=8,
    gap=1.0,
    rewards=(EXACT, FORM),
    rate=0.5,
    weight_change=1e-3,
    moved=1.0,
    logprob_change=0.02,
    kl=1e-3,
    entropy=0.5,
)
SETTINGS = RunSettings(group_size=8, prompts_per_update=8, rollouts=100, temperature=1.0, length=32)
PROBLEMS = ProblemStatistics(train=100, held_out=100, texts=400, prompts=200)
ANSWERS = AnswerStatistics(
    golds=32, refused=0, accepted_form=True, empty_right=0.0, empty_total=0.0, best_total=1.1, scored_again=64
)
HEALTHY = RunStatistics(settings=SETTINGS, problems=PROBLEMS, answers=ANSWERS, rollouts=[ROLLOUT] * 4)
EQUAL: dict[str, Any] = {"mixed": 0, "mixed_answers": 0, "gap": None, "logprob_change": None, "moved": 0.0}


def _codes(statistics: RunStatistics) -> list[str]:
    return [finding.code for finding in findings(statistics)]


def _right(share: float, held_out: float) -> RunStatistics:
    right = round(64 * share)
    found = Estimate(value=held_out, low=held_out - 0.05, high=held_out + 0.05, problems=200, method="bootstrap")
    shown = replace(SETTINGS, cold_start=True)
    return replace(HEALTHY, settings=shown, rollouts=[replace(ROLLOUT, right=right)] * 4, held_out=found)


def test_right_in_training_and_wrong_elsewhere_is_memorised() -> None:
    (found,) = findings(_right(1.0, 0.145))
    assert found.code == "D02" and "demonstrated_share" in found.field
    assert "100.0% of 256 training completions are right, but 14.5% of the held-out" in str(found)
    assert _codes(_right(0.75, 0.5)) == ["D02"] and _codes(_right(0.75, 0.56)) == []
    assert _codes(replace(_right(1.0, 0.145), held_out=None)) == []


def test_the_course_goes_by_the_interval_of_the_change() -> None:
    first = {str(i): float(i % 2) for i in range(100)}
    better = {name: 1.0 if int(name) < 40 else share for name, share in first.items()}
    assert course(first, better, []).startswith("learning, held-out pass@1 0.500 → 0.700 (change +0.117 … +0.275).")
    worse = "getting worse, held-out pass@1 0.700 → 0.500 (change -0.275 … -0.117)."
    assert course(better, first, []).startswith(worse)
    reasons = findings(_right(1.0, 0.145))
    assert course(first, first, reasons).endswith(f"(change -0.019 … +0.019). {reasons[0]}")
    solved = dict.fromkeys(first, 1.0)
    said = course(solved, solved, reasons)
    assert said.startswith("solved, ") and said.endswith("+0.019).")
    assert course(first, first, None).endswith("+0.019).")  # no rollout was seen since a resume
    few = {"0": 0.0, "1": 0.5}
    assert course(few, dict.fromkeys(few, 1.0), []).startswith("2 held-out problems were answered in both validations")


def _rollouts(statistics: RunStatistics = HEALTHY, **changed: Any) -> RunStatistics:
    return replace(statistics, rollouts=[replace(ROLLOUT, **changed)] * 4)


def _measured(rollouts: Sequence[RolloutStatistics]) -> RunStatistics:
    return replace(HEALTHY, rollouts=rollouts)


def _settings(**changed: Any) -> RunStatistics:
    return replace(HEALTHY, settings=replace(SETTINGS, **changed))


def _problems(**changed: Any) -> RunStatistics:
    return replace(HEALTHY, problems=replace(PROBLEMS, **changed))


def _answers(**changed: Any) -> RunStatistics:
    return replace(HEALTHY, answers=replace(ANSWERS, **changed))


def test_nothing_is_found_in_a_healthy_run_and_where_nothing_was_measured() -> None:
    assert findings(HEALTHY) == findings(RunStatistics(settings=SETTINGS)) == []


PLAYS, HALVES = _settings(plays=True), _settings(half_precision=True)
ALWAYS_HALF = (replace(EXACT, least=0.5, most=0.5), FORM)
NO_FORM = (EXACT, replace(FORM, most=0.0))
EQUAL_TEXTS = replace(EXACT, equal_texts=20)
PENALTY = RewardStatistics(name="repetition", weight=1.0, correctness=False, least=0.0, most=0.0, earned=False)
KEPT_FORM = (EXACT, replace(FORM, least=1.0))
OWN_FORM = _answers(refused=32, accepted_form=False)


def _falling(right: Sequence[int] = (20, 20, 20, 20)) -> list[RolloutStatistics]:
    """The entropy of a token falls to less than a fifth."""
    course = zip((0.5, 0.3, 0.1, 0.09), right, strict=True)
    return [replace(ROLLOUT, entropy=entropy, right=many) for entropy, many in course]


@pytest.mark.parametrize(
    ("code", "ill", "well"),
    [
        ("D01", _rollouts(**EQUAL, right=0), _rollouts(right=0)),
        ("D01", _rollouts(**EQUAL, right=3), _rollouts(**EQUAL | {"mixed": 1}, right=3)),
        ("D02", _rollouts(**EQUAL, right=64), _rollouts(right=62)),
        ("D03", _rollouts(**EQUAL, right=32), _rollouts(right=32)),
        ("D04", _rollouts(**EQUAL, right=0, rewards=ALWAYS_HALF), _rollouts(rewards=(EXACT, FORM))),
        ("D04", _rollouts(rewards=(EXACT, replace(FORM, form=False, most=0.0))), _rollouts()),
        ("D04", _rollouts(_answers(empties={"format": 1.0}), rewards=KEPT_FORM), _rollouts(rewards=KEPT_FORM)),
        ("D04", _rollouts(_answers(empties={"format": 1.0}), rewards=KEPT_FORM), _rollouts(rewards=(EXACT, PENALTY))),
        ("D05", _rollouts(**EQUAL | {"mixed_answers": 4}), _rollouts(mixed_answers=4)),
        ("D06", _rollouts(gap=-0.1), _rollouts(gap=0.1)),
        ("D07", _rollouts(identical=7), _rollouts(identical=6)),
        ("D09", _settings(prompts_per_update=1, group_size=64), _settings(prompts_per_update=2)),
        ("D09", _settings(prompts_per_update=3, group_size=5), _settings(prompts_per_update=4, group_size=4)),
        ("D10", _rollouts(cut=40, cut_unpaid=40), _rollouts(cut=40, cut_unpaid=25)),
        ("D10", _rollouts(cut=60, cut_unpaid=60, right=0), _rollouts(cut=40, cut_unpaid=40, right=0)),
        ("D10", _rollouts(PLAYS, **EQUAL, cut=64, cut_unpaid=64, right=0), _rollouts(PLAYS, cut=44, cut_unpaid=44)),
        ("D11", _rollouts(no_answer=60), _rollouts(no_answer=50)),
        ("D11", _rollouts(rewards=NO_FORM), _rollouts()),
        ("D12", _rollouts(_answers(end_chance=0.0), cut=64), _rollouts(_answers(end_chance=1e-3), cut=64)),
        ("D13", _rollouts(left_out=4, left_out_by="rewritten: a call ends earlier"), _rollouts(left_out=3)),
        ("D14", _rollouts(failed=33, failed_by="raised: KeyError"), _rollouts(failed=32)),
        ("D15", _rollouts(swapped=16, unmoved=15), _rollouts(swapped=16, unmoved=14)),
        ("D15", _measured([replace(ROLLOUT, swapped=12, unmoved=12), *[ROLLOUT] * 3]), _rollouts(swapped=2, unmoved=2)),
        ("D20", _problems(unwritable=1, characters="'é' (U+00E9)"), _problems()),
        ("D21", _problems(leaked=1), _problems()),
        ("D22", _problems(repeated=5), _problems(repeated=4)),
        ("D22", _problems(repeated=50), replace(PLAYS, problems=replace(PROBLEMS, repeated=50))),
        ("D23", _problems(too_long=1), _problems()),
        ("D24", _rollouts(prompts=4), _rollouts(prompts=5)),
        ("D25", _problems(held_out=42), _problems(held_out=43)),
        ("D30", _answers(refused=2), _answers(refused=1)),
        ("D30", _rollouts(OWN_FORM, right=0), OWN_FORM),  # some are right: the reward reads a form that was not tried
        ("D31", _answers(demonstrations=32, demonstrations_paid=1), _answers(demonstrations=32, demonstrations_paid=2)),
        ("D32", _answers(empty_right=0.2), _answers(empty_right=0.1)),
        ("D32", _answers(empty_total=2.0), _answers(empty_total=1.0)),
        ("D33", _answers(differed=2, differing="judge"), _answers(differed=1, differing="judge")),
        ("D33", _rollouts(rewards=(replace(EXACT, equal_texts=20, differed=1),)), _rollouts(rewards=(EQUAL_TEXTS,))),
        ("D40", _rollouts(logprob_change=2e-4), _rollouts(logprob_change=3e-4)),
        ("D40", _rollouts(logprob_change=4e-4, entropy=1.0), _rollouts(logprob_change=4e-4, entropy=0.75)),
        ("D40", _rollouts(logprob_change=1e-5, entropy=0.1), HEALTHY),
        ("D41", _rollouts(kl=0.4), _rollouts(kl=0.2)),
        ("D41", _rollouts(clipped=0.6), _rollouts(clipped=0.4)),
        ("D41", _measured(_falling()), _measured(_falling()[:2] * 2)),
        ("D41", _measured(_falling()), _measured(_falling((64, 64, 64, 64)))),  # always right: it may be sure of itself
        ("D41", _measured(_falling((16, 16, 19, 19))), _measured(_falling((16, 16, 20, 20)))),  # guesses give way
        ("D42", _rollouts(HALVES, moved=0.1), _rollouts(HALVES, moved=0.6)),
        ("D43", _rollouts(moved=0.0, logprob_change=0.0), _rollouts(moved=1e-3)),
        ("D43", _rollouts(skipped=1), _rollouts()),
        ("D44", _rollouts(bfloat16_gain=1.3), _rollouts(bfloat16_gain=1.29)),
        ("D45", replace(HEALTHY, settings=replace(SETTINGS, float32_on_gpu=True)), HEALTHY),
        # what explains equal groups takes the place of their difficulty
        ("D07", _rollouts(**EQUAL, right=0, identical=8), HEALTHY),
        ("D10", _rollouts(**EQUAL, right=0, cut=64, cut_unpaid=64), HEALTHY),
        ("D11", _rollouts(**EQUAL, right=0, no_answer=64), HEALTHY),
        ("D24", _rollouts(**EQUAL, right=0, prompts=1), HEALTHY),
        ("D30", _rollouts(OWN_FORM, **EQUAL, right=0), HEALTHY),
        ("D31", _rollouts(_answers(demonstrations=32), **EQUAL, right=0), HEALTHY),
        ("D32", _rollouts(_answers(empty_right=1.0), **EQUAL, right=64), HEALTHY),
    ],
)
def test_a_rule_finds_what_it_is_for_and_no_less(code: str, ill: RunStatistics, well: RunStatistics) -> None:
    assert _codes(ill) == [code]
    assert code not in _codes(well)


def test_too_little_evidence_is_no_finding() -> None:
    hopeless = replace(ROLLOUT, **EQUAL, right=0)
    assert _codes(replace(HEALTHY, rollouts=[hopeless] * 2)) == []
    assert _codes(replace(HEALTHY, rollouts=[replace(hopeless, groups=3, completions=8)] * 3)) == []


def test_without_a_look_at_known_answers_hard_and_broken_are_named_together() -> None:
    (finding,) = findings(_rollouts(replace(HEALTHY, answers=None), **EQUAL, right=0))
    assert finding.code == "D01" and "grpo-pl doctor" in finding.sentence


def test_the_rate_is_judged_at_its_peak() -> None:
    (finding,) = findings(_rollouts(logprob_change=1e-5, rate=0.1))
    assert finding.figure == pytest.approx(1e-5 / 0.1 * 100)  # over the 100 rollouts of the run


def test_every_code_is_in_the_table_of_the_page() -> None:
    page = (Path(grpo_pl.__file__).parents[1] / "docs" / "doctor.md").read_text()
    table = page[page.index("| code |") :].partition("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| D")]
    assert [(code.strip(), name.strip()) for code, name in rows] == [
        ("D00", "refused"),
        *((rule.code, rule.name) for rule in RULES),
    ]
