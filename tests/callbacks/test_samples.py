"""The table of sample groups in the terminal, and completions for loggers with tables."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_pl.callbacks.completions import flat_row
from grpo_pl.callbacks.metrics_csv import EventFiles
from grpo_pl.callbacks.samples import SampleTable, log_table, sample_table
from tests.callbacks.conftest import WholeRun


def _row(prompt: int, text: str, reward: float | None) -> dict[str, Any]:
    return {
        "prompt_id": prompt,
        "question": f"[bold]q{prompt}",
        "answer": "1",
        "completion": text,
        "reward": reward,
        "advantage": -0.5,
        "correct": None if reward is None else reward > 0,
    }


def _printed(table: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_the_best_and_the_worst_completions_come_first_and_markup_is_text() -> None:
    rows = [_row(1, f"[red]c{i}", r) for i, r in enumerate([0.2, 1.0, None, 0.5])] + [_row(2, "other", 0.0)]
    text = _printed(sample_table(rows, 7, completions=3, characters=50))
    places = [text.find(f"[red]c{i}") for i in (1, 2, 3)]
    assert -1 not in places and places == sorted(places)  # best, worst (no reward), second best
    assert "[red]c0" not in text
    assert "[bold]q1" in text and "[bold]q2" in text and "rollout 7" in text
    assert "–" in text and "-0.50" in text


def test_equal_completions_are_shown_once() -> None:
    rows = [_row(1, text, r) for text, r in (("same", 1.0), ("same", 1.0), ("other", 0.0), ("same", 1.0))]
    text = _printed(sample_table(rows, 1, completions=3, characters=50))
    assert text.count("same") == 1 and text.count("other") == 1


def test_the_middle_of_a_long_completion_is_left_out() -> None:
    text = _printed(sample_table([_row(1, "a" * 30 + "b" * 500 + "c" * 30, 1.0)], 1, completions=1, characters=60))
    assert "a" * 30 + " […] " + "c" * 30 in text.replace("\n", "") and "b" not in text.replace("[bold]", "")


def test_an_episode_is_shown_turn_by_turn() -> None:
    turns = [
        {"action": "[b]left", "observation": "a wall", "reward": 0.0, "invalid_action": True, "advantage": -0.25},
        {"action": "up", "observation": [{"role": "user", "content": "out"}], "reward": 1.0, "advantage": 0.75},
    ]
    episode = {"observation": "a cell", "return": 1.0, "status": "ok", "detail": "", "turns": turns}
    row = {**_row(1, "up", 1.0), "answer": "", "episode": episode}
    cut = {**_row(1, "up", None), "episode": {**episode, "turns": turns[:1], "status": "timeout", "detail": "30 s"}}
    text = _printed(sample_table([row, cut], 1, completions=3, characters=500))
    lines = [cells for cells in (line.split("│") for line in text.splitlines()) if len(cells) == 6]
    written = [cells[2].strip() for cells in lines]
    assert written == [
        *("1. [b]left  advantage -0.25", "a wall", "2. up  reward +1  advantage +0.75", "out"),
        *("1. [b]left  advantage -0.25", "a wall", "timeout: 30 s"),
    ]
    assert [cells[1].strip() for cells in lines][:2] == ["[bold]q1", "a cell"]
    flat = flat_row({**row, "rewards": {}})
    assert (flat["turns"], flat["return"]) == (2, 1.0) and flat["exchange"].startswith("1. [b]left")
    assert "episode" not in flat


def test_a_run_prints_tables_and_hands_them_to_loggers_that_have_tables(whole: WholeRun) -> None:
    assert re.findall(r"samples of rollout (\d)", whole.outcome.err) == ["2", "4"]
    key, columns, data, step = next(table for table in whole.tables if table[0] == "completions")
    assert (key, step, len(data)) == ("completions", 2, 4)
    assert {"step", "completion", "reward/exact", "status/format", "advantage"} <= set(columns)
    assert all(len(row) == len(columns) for row in data)


def test_zero_switches_the_table_off(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {"experience": SimpleNamespace(samples=SimpleNamespace(step=0))}
    SampleTable(every_n_rollouts=0).on_train_batch_end(None, None, outputs, None, 0)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""


def test_numbers_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="samples needs"):
        SampleTable(completions=0)


def test_tensorboard_has_the_tables_as_text(tmp_path: Path) -> None:
    """As markup it would be shown as what it says."""
    logger = EventFiles(tmp_path)
    log_table(
        logger, "completions", [{"prompt": "a|b", "completion": "<b>x</b>\ny", "reward": None, "advantage": 0.5}], 3
    )
    logger.save()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert event.step == 3
    (text,) = event.tensor_proto.string_val
    assert text.decode().splitlines()[2] == "| a&#124;b | &lt;b&gt;x&lt;/b&gt;<br>y | – | 0.5 |"
