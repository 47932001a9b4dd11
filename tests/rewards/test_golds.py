"""Checks of gold answers are made once."""

from pathlib import Path

from grpo_pl.rewards import MathReward
from grpo_pl.rewards.golds import check_golds


def test_what_an_earlier_version_kept_is_not_in_the_way(tmp_path: Path) -> None:
    reward = MathReward(correctness=True)
    bad = check_golds(reward, ["1", "\\frac{"], cache_folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    (tmp_path / kept.name.replace("faults-", "golds-")).write_text("[]")  # a list, until the files became objects
    assert [gold.row for gold in bad] == [1]
    assert check_golds(reward, ["1", "\\frac{"], cache_folder=tmp_path) == bad
    kept.unlink()
    assert check_golds(reward, ["1", "\\frac{"], cache_folder=tmp_path) == bad
    reward.close()
