"""The figures and pictures of docs/algorithms.md, data.md, environments.md and replay.md come out of their scripts."""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.data.tasks.shapes import ShapePrompts
from grpo_pl.files.runs import RunFolder
from tests.docs.pages import ROOT, loaded
from tests.images import training

PLOTS = ROOT / "docs" / "plots"
biases = loaded(PLOTS / "biases.py")


def test_a_token_of_10_weighs_ten_times_one_of_100_under_the_sequence_mean() -> None:
    table, ten, hundred = biases.token_weights_by_length(), biases.LENGTHS.index(10), biases.LENGTHS.index(100)
    ratios = {name: weights[ten] / weights[hundred] for name, weights in table.items()}
    assert ratios == pytest.approx({"sequence_mean": 10, "token_mean": 1, "constant": 1})


def test_only_the_group_std_weighs_questions_by_difficulty() -> None:
    table = biases.question_weights_by_pass_rate(samples=16_000, seed=1)
    hard, middle = biases.PASS_RATES.index(0.05), biases.PASS_RATES.index(0.5)
    assert table["grpo, group of 64"][hard] / table["grpo, group of 64"][middle] > 2
    assert table["grpo, group of 8"][hard] / table["grpo, group of 8"][middle] > 1.2
    for name, level in (("rloo, group of 8", 1.0), ("dr_grpo, group of 8", 7 / 8)):
        assert table[name] == pytest.approx([level] * len(biases.PASS_RATES), rel=0.08)


@pytest.mark.slow
def test_the_biases_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setattr(sys, "argv", ["biases.py", "--out", str(tmp_path), "--samples", "640"])
    biases.main()
    for name in ("length_bias", "difficulty_bias"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (tmp_path / f"{name}.csv").open() as file:
            assert len(list(csv.reader(file))) > 5


@pytest.fixture
def turn_credit() -> Any:
    pytest.importorskip("gymnasium")
    return loaded(PLOTS / "turn_credit.py")


def test_the_credit_of_turns_is_that_of_the_page(turn_credit: Any) -> None:
    group = turn_credit.played()
    assert group.rewards.sum(1).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert group.fields[3] == ["a1", "b1"] and group.fields[1][:3] == ["a1", "a2", "a1"]
    table = turn_credit.advantages(group)
    assert table["turn_returns"][0, 4:].tolist() == [0.0, 0.0, 0.0, 0.0]  # whoever stood there arrived
    assert table["turn_returns"][2, 3] == -1.0 and table["turn_returns"][0, 0] == 0.5
    assert table["gigpo"][0, 0].item() == pytest.approx(0.5 + 1 - 3 / 5)  # of five turns in a1 three led to the goal


def test_that_credit_is_drawn_and_the_files_beside_the_script_are_its_own(
    turn_credit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setattr(sys, "argv", ["turn_credit.py", "--out", str(tmp_path)])
    turn_credit.main()
    assert (tmp_path / "turn_credit.png").read_bytes().startswith(b"\x89PNG")
    written, kept = (list(csv.reader((f / "turn_credit.csv").open())) for f in (tmp_path, PLOTS))
    assert written == kept and len(written) == 21


branches = loaded(PLOTS / "branches.py")


def _branch_points(file: Path) -> dict[tuple[str, str], tuple[list[str], list[str]]]:
    """Seed and branch -> its first row, and that of its run at the same rollout, without the name of the curve."""
    with file.open(newline="") as lines:
        rows = list(csv.reader(lines))[1:]
    runs = {(seed, rollout): rest for seed, curve, rollout, *rest in rows if curve == "the run"}
    first: dict[tuple[str, str], list[str]] = {}
    for seed, curve, *rest in rows:
        first.setdefault((seed, curve), rest)
    return {(s, c): (rest, runs[s, n]) for (s, c), (n, *rest) in first.items() if c != "the run"}


def test_a_drawn_branch_begins_with_the_samples_of_its_run() -> None:
    found = _branch_points(PLOTS / "branches.csv")
    assert len(found) == 3 * len(branches.BRANCHES)
    assert all(ours == theirs for ours, theirs in found.values())


@pytest.mark.slow
def test_a_run_is_branched_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setattr(branches, "BRANCHES", (1, 2))
    monkeypatch.setenv("GRPO_PL_CACHE", str(tmp_path / "cache"))
    small = ["--data.steps=3", "--data.prompts_per_step=2", "--data.val_prompts=2", "--model.cold_start.steps=20"]
    options = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs"), "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["branches.py", *options, *small])
    branches.main()
    assert (tmp_path / "branches.png").read_bytes().startswith(b"\x89PNG")
    found = _branch_points(tmp_path / "branches.csv")
    assert list(found) == [("0", f"short answers pay from rollout {step} on") for step in (1, 2)]
    assert all(ours == theirs for ours, theirs in found.values())


def test_findings_of_the_doctor_are_drawn_without_a_font_from_elsewhere() -> None:
    doctor = loaded(PLOTS / "doctor.py")
    said = "a prompt\nD10 cut off: 98% are cut off. Change model.sampling.\n1 finding: 4 rollouts in 1 s.\n"
    picture = doctor.drawn(said)
    shown = re.sub(r"<[^>]*>", "", picture).replace("&#160;", " ")
    assert "D10 cut off: 98% are cut off." in shown and "1 finding: 4 rollouts" in shown and "a prompt" not in shown
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "") and "@font-face" not in picture
    kept = (PLOTS.parent / "images" / "doctor.svg").read_text()
    assert "http" not in kept.replace("http://www.w3.org/2000/svg", "") and "D10" in kept


def test_eight_held_out_images_are_drawn_with_the_answers_of_both_ends_of_a_run(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    shapes = loaded(PLOTS / "shapes.py")
    source = training()["data__source"]["init_args"]["parts"]["shapes"]
    changes = {**training(), "data__source": source, "data__steps": 1, "data__val_prompts": 9}
    config = command_line.config("drawn", **changes, model__sampling={"max_completion_length": 24})
    command_line.done("fit", "--config", config)
    run = RunFolder(command_line.runs / "drawn")
    found = shapes.both_ends(run)
    problems = ShapePrompts(questions=("count",)).validation(9)[:8]
    assert [(before["question"], after["answer"]) for before, after in found] == [
        (problem.question, problem.answer) for problem in problems
    ]
    lines = [json.loads(line) for line in run.held_out.read_text().splitlines()]
    assert [pair[0] for pair in found] == lines[0]["answers"][:8] and lines[-1]["step"] == 1
    monkeypatch.setattr(sys, "argv", ["shapes.py", str(run.path), "--output", str(tmp_path / "shapes.png")])
    shapes.main()
    written = (tmp_path / "shapes.png").read_bytes()
    assert written.startswith(b"\x89PNG") and len(written) < 60_000
    run.held_out.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match="finish the run"):
        shapes.both_ends(run)


@pytest.mark.parametrize(
    ("completion", "value", "drawn"),
    [
        (r"<think>1+0=1</think><answer>\boxed{1}</answer>", 1.0, ("1", True)),
        (r"\boxed{3} or \boxed{blue square}", 0.0, ("blue square", False)),
        ("<think>0+0+0+0+0+0+0+0", None, ("<think>0+0+0+0+…", False)),
        ("", 0.0, ("nothing", False)),
    ],
)
def test_a_drawn_answer_is_the_last_box_or_what_was_written(completion: str, value: Any, drawn: Any) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    row = {"greedy": {"completion": completion, "value": value}, "completions": [{}]}
    assert loaded(PLOTS / "shapes.py").answer_of(row) == drawn


def test_runs_of_gsm_symbolic_are_drawn_by_stage_and_trials_by_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    gsm_symbolic = loaded(PLOTS / "gsm_symbolic.py")
    shares = [{name: [value, 0.0, 0.5] for name in gsm_symbolic.SETS} for value in (0.0, 0.1, 0.2, 0.3)]
    runs = [
        {"seed": 0, "before": shares[0], "rollouts": shares[1:3]},
        {"seed": 1, "before": shares[0], "rollouts": shares[1:]},
        {"trial": "longer_start", "rollouts": shares[1:]},
    ]
    drawn = {place: [run["numbers"][0] for _, run in points] for place, points in gsm_symbolic.places(runs).items()}
    assert drawn == {"untrained": [0.0, 0.0], "cold start": [0.1, 0.1], "GRPO": [0.2, 0.3], "longer\nstart": [0.3]}
    _, axis = gsm_symbolic.plt.subplots()
    gsm_symbolic.draw(axis, "numbers", gsm_symbolic.places(runs[2:]))
    (interval,) = axis.collections[0].get_segments()
    assert interval[:, 1].tolist() == pytest.approx([0.0, 0.5])  # around 0.3
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(sys, "argv", ["gsm_symbolic.py", str(record), "--output", str(tmp_path / "drawn.png")])
    gsm_symbolic.main()
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
