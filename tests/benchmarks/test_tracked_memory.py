"""The plan of an update under FSDP2 is within a tenth of what torch's tracker sees for the same modules, of 7B on 8."""

import pytest

from tests.docs.pages import ROOT, loaded


@pytest.mark.parametrize(
    ("completion_tokens", "checkpointing"),
    [(1536, True), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((512, False), (4096, True)))],
)
def test_the_plan_is_within_a_tenth_of_the_tracker(
    completion_tokens: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight blocks, which are all the same; of all 28 the benchmark says."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tracked_memory = loaded(ROOT / "benchmarks/tracked_memory.py")
    found = tracked_memory.compare(
        layers=8, processes=8, completion_tokens=completion_tokens, checkpointing=checkpointing
    )
    assert found["planned_of_tracked"] == pytest.approx(1.0, rel=0.1), found
