"""Inputs made to hang, crash or fool a verifier: each costs at most the hard limit and leaves the pool alive."""

import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_pl.rewards import MathReward, Score

HAS_GMPY2 = importlib.util.find_spec("gmpy2") is not None
SOFT, HARD = 1.0, 2.5
COSTLY = {"timeout", "killed", "crashed"}


@pytest.fixture(scope="module", params=["python", pytest.param("gmpy2", marks=pytest.mark.slow)])
def reward(request: pytest.FixtureRequest) -> Iterator[MathReward]:
    if request.param == "gmpy2" and not HAS_GMPY2:
        pytest.skip("gmpy2 is not installed")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "python":  # what SymPy and mpmath do where gmpy2 cannot be imported
            patch.setenv("SYMPY_GROUND_TYPES", "python")
            patch.setenv("MPMATH_NOGMPY", "1")
        reward = MathReward(soft_limit_s=SOFT, hard_limit_s=HARD, name=request.param, workers=1)
        reward.pool.start()
        yield reward
        reward.close()


def judge(reward: MathReward, answer: str, gold: str) -> Score:
    """The score of a boxed answer, after checking all that holds for every hostile input."""
    return judge_text(reward, f"thus \\boxed{{{answer}}}", gold)


def judge_text(reward: MathReward, completion: str, gold: str) -> Score:
    score, after = reward([completion, r"\boxed{1+x}"], [gold, "x+1"], {})
    assert after.value == 1.0
    json.dumps([score.value, score.status, score.detail], ensure_ascii=False).encode("utf-8")
    return score


def test_a_tower_of_powers_times_out_and_can_be_logged(reward: MathReward) -> None:
    for answer in ("9^{9^{9^9}}", "9^{9^{9^9}}+1"):
        score = judge(reward, answer, "5")
        assert (score.value, score.status) == (0.0, "timeout")
        assert answer in f"{score}"


def test_iterated_factorial(reward: MathReward) -> None:
    score = judge(reward, "((20!)!)!", "5")
    assert score.value == 0.0
    # without gmpy2 the time is over first, or else the memory
    assert score.status in (["crashed"] if reward.name == "gmpy2" else ["timeout", "crashed"])


def test_large_factorial(reward: MathReward) -> None:
    kills = reward.pool.kills
    score = judge(reward, "100000000!", "5")
    assert (score.value, score.status) == (0.0, "killed" if reward.name == "gmpy2" else "timeout")
    assert reward.pool.kills == kills + (reward.name == "gmpy2")


def test_large_binomial(reward: MathReward) -> None:
    score = judge(reward, r"\binom{10^9}{5\cdot10^8}", "5")
    assert (score.value, score.status) == (0.0, "timeout")  # no worker is lost, with gmpy2 or without
    assert judge(reward, r"\binom{40}{20}+x", "x+137846528820").value == 0.0  # work, not a result
    assert judge(reward, r"x+137846528820", r"\binom{40}{20}+x").value == 1.0


def test_large_expansion_stays_within_the_memory_limit(reward: MathReward) -> None:
    score = judge(reward, "(x+y+2)^{2000}", "x^2+1")
    assert score.value == 0.0
    assert score.status in COSTLY
    assert all(_status(pid, "VmPeak") <= reward.memory_limit_mb * 1024 for pid in reward.pool.pids)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("7" * 10**6, id="07-million-digits"),
        pytest.param("(" * 50_000 + "5" + ")" * 50_000, id="08-parentheses"),
        pytest.param("\\frac{1}{" * 2_000 + "5" + "}" * 2_000, id="09-nested-fractions"),
        pytest.param(
            "\\begin{pmatrix}" + "\\\\".join(["&".join(["1"] * 200)] * 200) + "\\end{pmatrix}", id="10-matrix"
        ),
        pytest.param("1 " * 50_000, id="11-repeated-digit"),
        pytest.param("(" * 45 + "5" + ")" * 45, id="nested-within-the-length"),
        pytest.param("7" * 450, id="digits-within-the-length"),
    ],
)
def test_too_large_to_judge(reward: MathReward, answer: str) -> None:
    score = judge(reward, answer, "5")
    assert (score.value, score.status) == (0.0, "too_long")
    assert len(score.detail) < 200


def test_the_last_of_a_thousand_boxes_counts(reward: MathReward) -> None:
    assert judge_text(reward, r"\boxed{5}" * 999 + r"\boxed{6}", "5") == Score(0.0, "wrong", "6")
    assert judge_text(reward, r"\boxed{6}" * 999 + r"\boxed{5}", "5") == Score(1.0, "ok", "5")


@pytest.mark.parametrize("mark", ["\0", "\ud800", "\u200f", "\u202e", "\u200b"])
def test_invisible_characters_are_wrong_and_safe_to_store(reward: MathReward, mark: str) -> None:
    score = judge(reward, f"5{mark}", "5")
    assert (score.value, score.status) == (0.0, "wrong")


def test_code_is_not_run(reward: MathReward, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for code in (f"__import__('os').system('touch {trace}')", f"eval(\"open('{trace}','w')\")"):
        assert judge(reward, code, "5").value == 0.0
        assert judge(reward, code, "x").value == 0.0
    assert not trace.exists()


@pytest.mark.parametrize("undefined", ["NaN", r"\text{nan}", r"\frac10", r"\frac{0}{0}"])
def test_undefined_values_are_never_right(reward: MathReward, undefined: str) -> None:
    assert judge(reward, undefined, "5").value == 0.0
    assert not judge(reward, undefined, undefined).correct


@pytest.mark.parametrize(
    "answer",
    [
        "x" + "'" * 26 + "+=5",
        "x_{" + r"\alpha" * 10 + "!}=5",
        r"\frac{d}{" + r"d\ddd" * 22 + "!}=5",
        r"\text{C}" + "(C)" * 25 + "!",
    ],
)
def test_no_regular_expression_takes_exponential_time(answer: str) -> None:
    """Each of these could be read in two ways or more at every step, and took 3 seconds or more when all failed."""
    rules = MathReward(workers=1).rules
    started = time.process_time()
    rules.plan("5", answer)
    rules.plan(answer, "5")
    assert time.process_time() - started < 1.0


HOSTILE = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "hostile_pairs.jsonl").read_text().splitlines()
]
"""Answer, completion, value, and the status where it is one of several: what costs too much ends in one of three."""


@pytest.mark.slow
def test_every_hostile_pair_ends_as_it_must() -> None:
    reward = MathReward(soft_limit_s=SOFT, hard_limit_s=HARD)
    scores = reward([row["completion"] for row in HOSTILE], [row["answer"] for row in HOSTILE], {})
    reward.close()
    ends = [(score.value, row.get("status", score.status)) for row, score in zip(HOSTILE, scores, strict=True)]
    expected = [(row["expected"], score.status) for row, score in zip(HOSTILE, scores, strict=True)]
    assert [(row, end) for row, end, right in zip(HOSTILE, ends, expected, strict=True) if end != right] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_batch_with_hostile_pairs_loses_nothing_and_pays_none_of_them() -> None:
    """A thousand pairs, one in twenty hostile; of the others, which need algebra, every third is wrong."""
    hostile = [row for row in HOSTILE if row["expected"] == 0]
    rows = [
        (str(row["answer"]), row["completion"], 0.0)
        if i % 20 == 0 and (row := hostile[i // 20 % len(hostile)])
        else (f"{i}x+{i % 89 + 1}", rf"\boxed{{{i % 89 + 1}+{i + (i % 3 == 0)}x}}", float(i % 3 != 0))
        for i in range(1, 1001)
    ]
    reward = MathReward(workers=2, soft_limit_s=SOFT, hard_limit_s=HARD)
    scores = reward([completion for _, completion, _ in rows], [gold for gold, _, _ in rows], {})
    reward.close()
    assert [(row, s) for row, s in zip(rows, scores, strict=True) if s.value != row[2]] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_of_the_pool_is_flat_over_20k_pairs() -> None:
    reward = MathReward(workers=2, soft_limit_s=5.0, hard_limit_s=20.0)
    sizes, pids = [], []
    for block in range(10):
        rows = range(2000 * block, 2000 * (block + 1))
        golds = [f"{i % 97}x+{i % 89}" for i in rows]
        scores = reward([rf"\boxed{{{i % 89}+{i}x}}" for i in rows], golds, {})
        assert {score.status for score in scores} == ({"ok", "wrong"} if block == 0 else {"wrong"})
        sizes.append(sum(_status(pid, "VmRSS") for pid in reward.pool.pids))
        pids.append(reward.pool.pids)
    reward.close()
    assert pids[0] == pids[-1]  # not flat because workers were replaced
    assert max(sizes[5:]) < 1.1 * sizes[4], sizes


def _status(pid: int, name: str) -> int:
    """A size of a process in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
