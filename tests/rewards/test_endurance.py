"""Long runs of the sandbox: memory over many pairs, and a minute of random LaTeX."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grpo_pl.rewards import MathReward

PIECES = [
    *"0123456789xyzn+-*/^_=(){}[]<>|!,.;:%&~$ ",
    *[r"\frac", r"\sqrt", r"\binom", r"\pi", r"\infty", r"\sin", r"\log", r"\sum", r"\int", r"\prod", r"\lim", r"\pm"],
    *[r"\left(", r"\right)", r"\{", r"\}", r"\cdot", r"\times", r"\le", r"\text{", r"\mathrm{", r"\overline{", r"\%"],
    *[r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", r"\in", r"\cup", r"^{", r"_{", r"\boxed{", r"^\circ", "\\", "10^"],
    *["９", "½", "²", "−", "\u200b", "\ud800", "\0", "é", "三", "\n"],
]
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=25).map("".join)
STATUSES = {"ok", "wrong", "no_answer", "bad_gold", "timeout", "killed", "crashed", "too_long"}


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


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
        sizes.append(sum(map(resident_kib, reward.pool.pids)))
        pids.append(reward.pool.pids)
    reward.close()
    assert pids[0] == pids[-1]  # not flat because workers were replaced
    assert max(sizes[5:]) < 1.1 * sizes[4], sizes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_minute_of_random_latex_neither_hangs_nor_crashes_the_parent() -> None:
    reward = MathReward(workers=2, soft_limit_s=0.5, hard_limit_s=1.5)
    reward.pool.start()
    deadline = time.monotonic() + 60.0
    seen = set()

    @settings(
        max_examples=20, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(st.tuples(TEXT, TEXT), min_size=8, max_size=8))
    def judge(pairs: list[tuple[str, str]]) -> None:
        started = time.monotonic()
        texts = [rf"\boxed{{{answer}}}" for answer, _ in pairs]
        scores = reward([*texts, r"\boxed{1+x}"], [*(gold for _, gold in pairs), "x+1"], {})
        assert time.monotonic() - started < 60.0
        assert scores[-1].value == 1.0
        for score in scores:
            assert score.status in STATUSES
            assert (score.value is None) == (score.status == "bad_gold")
            json.dumps(score.detail, ensure_ascii=False).encode("utf-8")
            seen.add(score.status)

    while time.monotonic() < deadline:
        judge()
    reward.close()
    assert {"ok", "wrong", "bad_gold", "no_answer"} <= seen
