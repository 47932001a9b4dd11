"""``grpo-pl filter``: what is kept, that it goes on after an interruption, and what is refused."""

import json
import os
import random
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.cli.commands.filter import filter, read_range
from grpo_pl.cli.main import main
from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.data.tables import TablePrompts
from grpo_pl.extras.images.picture import Picture
from tests.forked import forked

TABLE = "grpo_pl.data.tables.TablePrompts"


@pytest.fixture
def config(command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny policy after its cold start, on sums of digits and two problems that nobody can work out."""
    monkeypatch.setenv("GRPO_PL_CACHE", str(command_line.cache))
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b), "level": a} for a in range(3) for b in range(3)]
    rows += [{"question": "8+8=", "answer": "-3", "level": 9}, {"question": "is 1+1=2?", "answer": "true", "level": 9}]
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"class_path": TABLE, "init_args": {"path": str(file), "val_share": 0.0}}
    changed = {"data__source": source, "model__cold_start": None, "model__policy__path": str(_policy(command_line))}
    return Path(command_line.config(f"filter-{tmp_path.name}", **changed, model__policy__from_scratch=None))


def _policy(command_line: Any) -> Path:
    """An exported tiny policy."""
    run = Path(command_line.runs / "filtering")
    if not run.exists():
        math = {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True, "workers": 1}}
        config = command_line.config("filtering", model__rewards=[math], data__steps=1)
        command_line.done("fit", "--config", config)
    return run / "export"


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_problems_within_the_range_are_kept_with_their_rate(config: Path, tmp_path: Path, capsys: Any) -> None:
    everything, some = tmp_path / "all.jsonl", tmp_path / "some.jsonl"
    filter(config=str(config), output=str(everything), keep="0..1", samples=4)
    rows = {row["question"]: row for row in _rows(everything)}
    assert len(rows) == 11
    assert rows["8+8="]["pass_rate"] == 0.0
    assert rows["1+2="] == {"question": "1+2=", "answer": "3", "level": 1, "pass_rate": rows["1+2="]["pass_rate"]}
    filter(config=str(config), output=str(some), keep="0.0..0.1", samples=4, batch_size=5)  # batches change no sample
    assert {row["question"] for row in _rows(some)} == {q for q, row in rows.items() if row["pass_rate"] <= 0.1}
    assert "11 problems kept (mean pass rate" in capsys.readouterr().out
    first, *_ = TablePrompts(path=str(everything), val_share=0.0).problems("train")
    assert first.columns["pass_rate"] in (0, 0.25, 0.5, 0.75, 1)


def test_problems_with_images_are_kept_with_them(tmp_path: Path) -> None:
    """By its pixels: the question is that of every row."""
    rows = [
        {"question": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"{gold}?"}]}]}
        | {"answer": gold, "image": Picture.of(bytes([shade] * 3), 1, 1).data_url()}
        for shade, gold in enumerate(["yes", "blue", "yes", "red"])
    ]
    rows += [{**row, "question": "Which?"} for row in rows]
    file, kept = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"class_path": TABLE, "init_args": {"path": str(file), "val_share": 0.0, "images": True}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"data": {"source": source}}))
    filter(config=str(config), output=str(kept), samples=0, drop_true_false=True)
    again = TablePrompts(path=str(kept), images=True, val_share=0.0).problems("train")
    chosen = TablePrompts(path=str(file), images=True, val_share=0.0, kept=str(kept)).problems("train")
    for problems in (again, chosen):
        assert [(p.question, p.answer, p.columns["images"][0].pixels()[0]) for p in problems] == [
            ("blue?", "blue", 1),
            ("red?", "red", 3),
            ("Which?", "blue", 1),
            ("Which?", "red", 3),
        ]
        assert problems[0].messages is not None and problems[2].messages is None


def test_it_is_told_which_limit_the_written_images_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A JPEG within the limit is a PNG beyond it."""
    photo = Picture.of(random.Random(0).randbytes(3 * 1900 * 1900), 1900, 1900)
    photo.pil().save(tmp_path / "a.jpg", quality=70)
    file, kept, config = (tmp_path / name for name in ("rows.jsonl", "kept.jsonl", "config.yaml"))
    file.write_text(json.dumps({"question": "?", "answer": "1", "image": "a.jpg"}) + "\n")
    source = {"class_path": TABLE, "init_args": {"path": str(file), "val_share": 0.0, "images": True}}
    config.write_text(yaml.safe_dump({"data": {"source": source}}))
    filter(config=str(config), output=str(kept), samples=0)
    told = re.search(r"data\.source\.images\.megabytes: (\d+)", capsys.readouterr().out)
    assert told is not None and (tmp_path / "a.jpg").stat().st_size < 10e6
    with pytest.raises(ValueError, match="more than 10 megabytes"):
        TablePrompts(path=str(kept), images=True, val_share=0.0).problems("train")
    limits = ImageLimits(megabytes=int(told[1]))
    assert len(TablePrompts(path=str(kept), images=limits, val_share=0.0).problems("train")) == 1


SLOW = """
import pathlib, time
HERE = pathlib.Path(__file__).parent
def judge(completions, answer, question, **columns):
    if "0+1=" not in question and not (HERE / "go").exists():  # any batch but the first
        (HERE / "begun").touch()
        time.sleep(600)
    return [float(text.strip().endswith(str(gold))) for text, gold in zip(completions, answer)]
"""


def test_an_interrupted_filter_goes_on(command_line: Any, config: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    function = {"function": f"{tmp_path / 'slow.py'}:judge", "correctness": True}
    tree = yaml.safe_load(config.read_text())
    tree["model"]["rewards"] = [{"class_path": "grpo_pl.rewards.FunctionReward", "init_args": function}]
    config.write_text(yaml.safe_dump(tree))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "kept.jsonl"
    given = [f"--config={config}", "--keep=0..1", "--samples=2", "--batch_size=8"]
    process, printed = forked(
        partial(main, ["filter", *given, f"--output={output}"]),
        env={**os.environ, "GRPO_PL_CACHE": str(command_line.cache)},
        cwd=tmp_path,
    )
    deadline = time.monotonic() + 200
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    with printed:
        said = printed.read()
    assert (process.wait(), said.splitlines()[-1]) == (130, "grpo-pl filter: stopped by Ctrl-C.")
    assert "Traceback" not in said
    assert not output.exists()
    notes = tmp_path / "kept.jsonl.measured"
    notes.write_text(notes.read_text() + '{"id": 12')  # cut short
    (tmp_path / "go").touch()
    with pytest.raises(ValueError, match="holds rates of another"):
        filter(config=str(config), output=str(output), keep="0..1", samples=3)
    filter(config=str(config), output=str(output), keep="0..1", samples=2)
    assert "4 problems were measured before" in capsys.readouterr().out
    filter(config=str(config), output=str(whole), keep="0..1", samples=2)
    assert _rows(output) == _rows(whole)
    assert not notes.exists()


def test_rates_of_other_problems_or_weights_are_not_taken(command_line: Any, config: Path, tmp_path: Path) -> None:
    model, output, sums = tmp_path / "model", tmp_path / "out.jsonl", tmp_path / "sums.jsonl"
    shutil.copytree(_policy(command_line), model)
    given: dict[str, Any] = {"config": str(config), "output": str(output), "samples": 1, "model": str(model)}
    with pytest.raises(ValueError, match=r"Widen --keep"):  # what was measured stays beside the output
        filter(**given, keep="0.5..0.6")
    was = sums.read_text()
    sums.write_text(was.replace('"-3"', '"16"'))
    with pytest.raises(ValueError, match="holds rates of another configuration, data, model"):
        filter(**given, keep="0..1")
    sums.write_text(was)
    os.utime(model / "model.safetensors", (1.0, 1.0))
    with pytest.raises(ValueError, match="holds rates of another configuration, data, model"):
        filter(**given, keep="0..1")


def test_the_problems_are_not_written_over_and_counts_are_counts(config: Path, tmp_path: Path) -> None:
    sums = tmp_path / "sums.jsonl"
    was = sums.read_text()
    with pytest.raises(ValueError, match="is the input file"):
        filter(config=str(config), output=str(sums), samples=0)
    assert sums.read_text() == was
    for prompts in (0, -3):
        with pytest.raises(ValueError, match=f"--prompts must be at least 1, got {prompts}"):
            filter(config=str(config), output=str(tmp_path / "out.jsonl"), samples=0, prompts=prompts)


def test_rules_leave_out_what_can_be_guessed_without_measuring(config: Path, tmp_path: Path) -> None:
    filter(config=str(config), output=str(tmp_path / "out.jsonl"), samples=0, drop_true_false=True)
    rows = _rows(tmp_path / "out.jsonl")
    assert len(rows) == 10
    assert all(row["answer"] != "true" and "pass_rate" not in row for row in rows)


def test_nothing_left_is_one_clear_error(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no problem is left of 11: mean pass rate .*Widen --keep 0\.99\.\.0\.995"):
        filter(config=str(config), output=str(tmp_path / "out.jsonl"), keep="0.99..0.995", samples=2)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("text", ["0.5", "0.9..0.1", "0..2", "a..b"])
def test_ranges_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a range such as"):
        read_range(text)


def test_ranges_by_hand() -> None:
    assert read_range("0.1..0.9") == (0.1, 0.9)
    assert read_range("0..1") == (0.0, 1.0)
    assert read_range(".25 .. .75") == (0.25, 0.75)


def test_a_run_takes_what_was_kept_by_the_command_that_is_printed(
    command_line: Any, config: Path, tmp_path: Path, capsys: Any
) -> None:
    output = tmp_path / "kept.jsonl"
    filter(config=str(config), output=str(output), samples=2, keep="0..1", drop_true_false=True, prompts=6)
    told = capsys.readouterr().out.splitlines()[-1].split()
    assert told[:3] == ["next", "grpo-pl", "fit"]
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": "4+4=", "answer": "8"}))
    done = command_line("fit", *told[3:], "--data.steps=1", f"--data.source.init_args.val_path={tmp_path}/val.jsonl")
    assert done.status == 0, done.err
    assert f"6 of 11 training rows taken: those in '{output}'." in done.err.splitlines()


def test_problems_that_cannot_be_asked_or_judged_are_left_out_and_counted(
    command_line: Any, config: Path, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "hard.jsonl"
    rows = [{"question": "1+1=", "answer": "2"}, {"question": "2+2=", "answer": "nan"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"question": "1" * 17, "answer": "1"}]))
    source = {"class_path": TABLE, "init_args": {"path": str(file), "val_share": 0.0}}
    hard = command_line.config("hard", data__source=source, model__cold_start=None)
    filter(
        config=str(hard), output=str(tmp_path / "out.jsonl"), samples=2, keep="0..1", model=str(_policy(command_line))
    )
    assert [row["question"] for row in _rows(tmp_path / "out.jsonl")] == ["1+1="]
    printed = capsys.readouterr().out
    assert "1 of 3 prompts leave no room for a completion and are left out" in printed
    assert "2 completions could not be judged: they count neither as right nor as wrong" in printed
    assert "2 could not be judged" in printed


def test_a_filter_that_cannot_begin_leaves_nothing_behind(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such model"):
        filter(config=str(config), output=str(tmp_path / "out.jsonl"), model="nothing")
    assert not list(tmp_path.glob("out.jsonl*"))
