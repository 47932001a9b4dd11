"""Reading ``metrics.csv``."""

from pathlib import Path

import pytest

from grpo_pl.evaluation.curves import read_curves


def test_each_column_has_the_rows_with_a_finite_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss,val/pass@1\n0,,0.5\n1,0.25,\n2,nan,\n")
    assert read_curves(tmp_path / "metrics.csv") == {"loss": [(1, 0.25)], "val/pass@1": [(0, 0.5)]}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"step,loss\n0,0.5\n1,abc\n", "line 3 of .*metrics.csv' .* could not convert string to float: 'abc'"),
        (b"step,loss\n\xff\xfe\n", "metrics.csv' is not of a run's metrics: 'utf-8' codec"),
        (b"", "metrics.csv' is not of a run's metrics: there is no column `step`"),
        (b"loss\n1\n", "there is no column `step`"),
    ],
)
def test_what_is_no_file_of_a_run_is_named_with_its_line(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        read_curves(tmp_path / "metrics.csv")
