"""``grpo-pl score``: right, wrong, hostile and unparseable rows, expectations, files of many rows."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_pl.cli.commands.score import load_rewards, meets, score, score_file
from grpo_pl.cli.main import main
from grpo_pl.extras.images.picture import Picture
from grpo_pl.rewards import ExactReward, FormatReward, FunctionReward, MathReward, Score
from grpo_pl.rewards.golds import check_golds, describe_bad_golds
from tests.forked import forked

CONFIG = """
rewards:
  - class_path: grpo_pl.rewards.MathReward
  - class_path: grpo_pl.rewards.FormatReward
    init_args:
      weight: 0.5
"""
GOOD = "<think>x</think><answer>\\boxed{%s}</answer>"
ROWS: list[dict[str, Any]] = [
    {"completion": GOOD % "0.5", "answer": "1/2", "expected": 1},
    {"completion": "\\boxed{6}", "answer": 5, "expected": False},
    {"completion": "\\boxed{9^{9^{9^9}}}", "answer": "5", "expected": "timeout"},
    {"completion": "5", "answer": "5", "expected": "no_answer", "source": "made up"},
    {"completion": "\\boxed{5}", "answer": "\\frac{", "expected": None},
]


@pytest.fixture
def math_reward() -> Iterator[MathReward]:
    reward = MathReward()
    yield reward
    reward.close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.yaml"
    path.write_text(CONFIG)
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def function(folder: Path, *lines: str, arguments: str = "completions, prompts, **columns") -> str:
    """A reward function with these lines, as a configuration names it."""
    (folder / "mine.py").write_text("\n    ".join([f"def f({arguments}):", *lines]) + "\n")
    return f"{folder}/mine.py:f"


def test_rows_that_all_agree_pass(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    assert score(str(file), config=str(config)) == 0
    written = read(tmp_path / "rows.scores.jsonl")
    assert [row["agrees"] for row in written] == [True] * 5
    assert [row["correct"] for row in written] == [True, False, False, False, None]
    assert [row["reward"] for row in written] == [1.5, 0.0, 0.0, 0.0, None]  # nobody could judge the last
    assert written[0]["scores"]["math"] == {"value": 1.0, "status": "ok", "detail": "0.5"}
    assert written[2]["scores"]["math"]["status"] == "timeout"
    assert written[3]["source"] == "made up"
    assert written[4]["scores"]["math"]["value"] is None
    shown = capsys.readouterr().out
    for text in ("5 completions", "timeout", "bad_gold", "1 of 4 = 25.00%", "5 of 5 agree"):
        assert text in shown


def test_a_disagreement_fails_and_is_shown(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "rows.jsonl", [{**ROWS[0], "expected": 0}, ROWS[1]])
    output = tmp_path / "out.jsonl"
    assert score(str(file), config=str(config), output=str(output)) == 1
    assert [row["agrees"] for row in read(output)] == [False, True]
    shown = capsys.readouterr().out
    assert "1 of 2 agree" in shown
    assert "row 1: expected 0, got 1.0 (ok)" in shown


def test_an_unexpected_bad_gold_fails(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {key: value for key, value in ROWS[4].items() if key != "expected"}
    assert score(str(write(tmp_path / "rows.jsonl", [row])), config=str(config)) == 1
    assert r"row 1: bad gold answer '\\frac{': unbalanced braces" in capsys.readouterr().out


def test_parquet_and_jsonl_give_the_same(tmp_path: Path, math_reward: MathReward) -> None:
    rows = [{k: str(v) for k, v in row.items() if k != "expected"} for row in (*ROWS[:2], *ROWS[3:])]
    outputs = []
    for name in ("rows.parquet", "rows.jsonl"):
        output = tmp_path / f"{name}.out"
        summary = score_file(write(tmp_path / name, rows), [math_reward], output=output, batch_size=2)
        assert summary.rows == 4
        outputs.append([row["scores"] for row in read(output)])
    assert outputs[0] == outputs[1]


def test_columns_have_other_names_on_demand_and_reach_the_rewards(tmp_path: Path) -> None:
    line = "return [float(c == p + s) for c, p, s in zip(completions, prompts, columns['solution'])]"
    arguments = f"{{function: '{function(tmp_path, line)}', correctness: true}}"
    (tmp_path / "c.yaml").write_text(f"model: {{rewards: [{{class_path: FunctionReward, init_args: {arguments}}}]}}")
    rows = [{"text": "ab", "prompt": "a", "solution": "b", "gold": 1}, {"text": "b", "solution": "b", "gold": 1}]
    options = {"completion_column": "text", "answer_column": "gold"}
    rewards, _ = load_rewards(tmp_path / "c.yaml")
    summary = score_file(write(tmp_path / "rows.jsonl", rows), rewards, **options)  # type: ignore[arg-type]
    assert (summary.rows, summary.correct) == (2, 2)


@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        (1, Score(1.0, "ok"), True),
        (True, Score(1.0, "ok"), True),
        (0.25, Score(0.25, "wrong"), True),
        (0, Score(1.0, "ok"), False),
        (None, Score(None, "bad_gold"), True),
        (None, Score(0.0, "wrong"), False),
        (0, Score(None, "bad_gold"), False),
        ("killed", Score(0.0, "killed"), True),
        ("killed", Score(0.0, "timeout"), False),
    ],
)
def test_what_meets_an_expectation(expected: Any, given: Score, same: bool) -> None:
    assert meets(expected, given) is same


def test_a_typo_in_an_expectation_is_no_disagreement(tmp_path: Path, math_reward: MathReward) -> None:
    row = {"completion": "\\boxed{5}", "answer": "5"}
    for typo, hint in [("timout", "did you mean timeout"), ("yes", "neither a value nor a status"), ([1], "neither")]:
        with pytest.raises(ValueError, match=f"row 2: .*{hint}"):
            score_file(write(tmp_path / "rows.jsonl", [row, {**row, "expected": typo}]), [math_reward])


def test_expectations_may_be_text_as_a_column_of_a_table_has_one_type(tmp_path: Path, math_reward: MathReward) -> None:
    right, wrong = ({"completion": f"\\boxed{{{x}}}", "answer": "5"} for x in (5, 6))
    rows = [{**right, "expected": e} for e in ("1", "1.0", "true", "ok")]
    rows += [{**wrong, "expected": e} for e in ("0", "False", "wrong")]
    rows += [{**right, "expected": "0"}]
    summary = score_file(write(tmp_path / "rows.parquet", rows), [math_reward])
    assert (summary.expectations, summary.disagreements) == (8, 1)
    assert summary.examples == ["row 8: expected '0', got 1.0 (ok): 5"]


def test_chats_are_scored_by_their_last_message(tmp_path: Path) -> None:
    line = "return [float((c, p) == ('5', '2+3=')) for c, p in zip(completions, prompts)]"
    rewards = [FunctionReward(function=function(tmp_path, line), correctness=True)]
    row = {"prompt": [{"role": "user", "content": "2+3="}], "completion": [{"role": "assistant", "content": "5"}]}
    plain = {"prompt": "2+3=", "completion": "5"}
    file = write(tmp_path / "rows.jsonl", [{**row, "answer": "5"}, {**plain, "answer": "5"}])
    assert score_file(file, rewards).correct == 2


def test_rewards_that_read_messages_get_the_conversation_of_the_file(tmp_path: Path) -> None:
    told = "[(c[0]['content'], p[0]['role'], p[-1]['content']) for c, p in zip(completions, prompts)]"
    lines = (f"told = {told}", "return [float(each == ('5', 'system', '2+3=')) for each in told]")
    rewards = [FunctionReward(function=function(tmp_path, *lines), correctness=True)]
    prompt = [{"role": "system", "content": "add"}, {"role": "user", "content": "2+3="}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "5"}], "answer": "5"}
    for name in ("rows.jsonl", "rows.parquet"):
        assert score_file(write(tmp_path / name, [row, row]), rewards).correct == 2


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    lines = ("import pathlib, time", f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()", "time.sleep(600)")
    arguments = f"{{function: '{function(tmp_path, *lines)}', correctness: true}}"
    (tmp_path / "c.yaml").write_text(f"rewards: [{{class_path: FunctionReward, init_args: {arguments}}}]")
    write(tmp_path / "rows.jsonl", ROWS)
    process, printed = forked(partial(main, ["score", "rows.jsonl", "--config=c.yaml"]), cwd=tmp_path)
    deadline = time.monotonic() + 200
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    with printed:
        assert "Traceback" not in printed.read()
    assert process.wait() == 130
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"begun", "c.yaml", "mine.py", "rows.jsonl"}


def test_a_second_run_replaces_the_first(tmp_path: Path, config: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS[:2] + ROWS[3:])
    assert score(str(file), config=str(config)) == 0
    first = (tmp_path / "rows.scores.jsonl").read_text()
    write(file, ROWS[:2])
    assert score(str(file), config=str(config)) == 0
    assert (tmp_path / "rows.scores.jsonl").read_text() == "".join(first.splitlines(keepends=True)[:2])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"completion": "x"}', "row 1 has no 'answer'"),
        ('{"completion": "x", "answer": "x"}\n{"answer": "x"}', "row 2 has no 'completion'"),
        ('{"completion": ["x"], "answer": "x"}', "must be text"),
        ('{"completion": "x", "answer": "x"}\n\nnot json', r"line 3 of '.*rows\.jsonl' is not JSON"),
        ("[1]", r"line 1 of '.*rows\.jsonl' is not a JSON object"),
    ],
)
def test_broken_rows_are_named_and_leave_no_output(tmp_path: Path, content: str, match: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=match):
        score_file(file, [ExactReward(correctness=True)], output=tmp_path / "out.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_files_that_cannot_be_used_are_refused(tmp_path: Path, config: Path) -> None:
    rewards = [ExactReward(correctness=True)]
    with pytest.raises(ValueError, match="no such file"):
        score_file(tmp_path / "none.jsonl", rewards)
    with pytest.raises(ValueError, match="holds no rows"):
        score_file(write(tmp_path / "empty.jsonl", []), rewards)
    with pytest.raises(ValueError, match=r"neither \.jsonl"):
        score_file(config, rewards)
    file = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match="is the input file"):
        score_file(file, rewards, output=file)
    with pytest.raises(ValueError, match="batch_size"):
        score_file(file, rewards, batch_size=0)
    with pytest.raises(ValueError, match="--config is missing"):
        score(str(file))


def test_without_a_correctness_reward_rows_are_summed_and_expectations_refused(tmp_path: Path) -> None:
    file, scored = write(tmp_path / "rows.jsonl", [{"answer": "1", "completion": "x"}]), tmp_path / "scored.jsonl"
    summary = score_file(file, [FormatReward(weight=2.0)], output=scored)
    (row,) = read(scored)
    assert (row["reward"], row["correct"], summary.judged) == (0.0, None, 0)
    expecting = write(tmp_path / "expecting.jsonl", [{"answer": "1", "completion": "x", "expected": 0}])

    class Unasked(FormatReward):
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("a row was scored")

    with pytest.raises(ValueError, match="the column `expected` needs a reward with `correctness: true`"):
        score_file(expecting, [Unasked()], output=scored)


def test_configs_without_usable_rewards_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for content, match in [
        ("rewards: [{class_path: grpo_pl.rewards.FormatReward, init_args: {weight: 0}}]", "weight 0"),
        ("rewards: [{class_path: grpo_pl.rewards.MathReward, init_args: {soft_limit_s: -1}}]", "soft_limit_s"),
    ]:
        path.write_text(content)
        with pytest.raises(ValueError, match=match):
            load_rewards(path)


def test_the_configuration_of_a_training_run_will_do() -> None:
    rewards, _ = load_rewards(Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml")
    assert isinstance(rewards[0], MathReward)
    assert isinstance(rewards[1], FormatReward)
    assert rewards[1].weight == 0.1


MEASURE = """
import resource, sys
from pathlib import Path
from grpo_pl.cli.commands.score import score_file
from grpo_pl.rewards import FormatReward, MathReward
score_file(Path(sys.argv[1]), [MathReward(), FormatReward()], output=Path(sys.argv[1] + ".out"))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    """100k rows of 100 MB in all take no more than 5k rows, give or take what the allocator keeps."""
    peaks = []
    for count in (5_000, 100_000):
        file = tmp_path / f"{count}.jsonl"
        with file.open("w") as lines:
            for i in range(count):
                text = "<think>" + "x" * 900 + f"</think><answer>\\boxed{{{i % 977}}}</answer>"
                lines.write(json.dumps({"completion": text, "answer": str(i % 7)}) + "\n")
        command = [sys.executable, "-c", MEASURE, str(file)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        file.unlink()
    assert resource.getpagesize()
    assert peaks[1] < peaks[0] + 20_000  # KiB; holding the rows would take 100,000 more


def test_golds_are_checked_against_themselves(math_reward: MathReward, tmp_path: Path) -> None:
    golds = ["5", "x^2+1", "\\frac{", "\\text{Monday}", "NaN", "5", "\\frac{", "2\\pi"]
    bad = check_golds(math_reward, golds, cache_folder=tmp_path)
    assert [(b.row, b.gold) for b in bad] == [(2, "\\frac{"), (4, "NaN"), (6, "\\frac{")]
    assert bad[0].fault == "unbalanced braces"
    line = describe_bad_golds(bad, len(golds))
    assert line.startswith("3 of 8 gold answers")
    assert "row 2" in line


def test_the_check_of_golds_is_cached_by_reward_and_golds(tmp_path: Path) -> None:
    class Counting(ExactReward):
        calls = 0

        def gold_faults(self, golds: Any) -> list[str]:
            type(self).calls += 1
            return super().gold_faults(golds)

    reward = Counting()
    assert [b.row for b in check_golds(reward, ["a", " "], cache_folder=tmp_path)] == [1]
    assert [b.row for b in check_golds(reward, ["a", " "], cache_folder=tmp_path)] == [1]
    assert reward.calls == 1
    check_golds(reward, ["a", "b"], cache_folder=tmp_path)
    check_golds(Counting(name="other"), ["a", "b"], cache_folder=tmp_path)
    check_golds(reward, ["a", "b"])
    assert reward.calls == 4


def test_what_a_reward_function_notes_stands_in_the_rows(tmp_path: Path) -> None:
    lines = ("assert trainer_state is None", "log_extra('loud', [text.upper() for text in completions])")
    named = function(
        tmp_path, *lines, "return [1.0] * len(completions)", arguments="completions, log_extra, trainer_state"
    )
    reward = FunctionReward(function=named, correctness=True)
    file = write(tmp_path / "rows.jsonl", [{"completion": text, "answer": ""} for text in ("a", "b", "c")])
    score_file(file, [reward], output=tmp_path / "out.jsonl", batch_size=2)
    assert [row["extra"] for row in read(tmp_path / "out.jsonl")] == [{"loud": "A"}, {"loud": "B"}, {"loud": "C"}]


EXCHANGE = [
    {"role": "user", "content": "12*7?"},
    {"role": "assistant", "content": "<calc>12*7</calc> is \\boxed{1}"},
    {"role": "tool", "name": "calc", "content": "84"},
    {"role": "assistant", "content": "\\boxed{84}"},
]


@pytest.mark.parametrize("sees", ["last_action", "exchange"])
@pytest.mark.parametrize("form", ["messages", "completion"])
def test_an_exchange_is_scored_as_the_run_would_have(tmp_path: Path, sees: str, form: str) -> None:
    config = tmp_path / "run.yaml"
    seen = function(tmp_path, "return [float('[84]' in text) for text in completions]")
    config.write_text(
        "model:\n"
        f"  episodes: {{rewards_see: {sees}, plain_turns: {{observation: '[{{observation}}]'}}}}\n"
        "  rewards:\n"
        "    - {class_path: grpo_pl.rewards.MathReward, init_args: {correctness: true}}\n"
        f"    - {{class_path: grpo_pl.rewards.FunctionReward, init_args: {{function: '{seen}'}}}}\n"
    )
    row = {"messages": EXCHANGE} if form == "messages" else {"prompt": EXCHANGE[:1], "completion": EXCHANGE[1:]}
    rows = [{**row, "answer": "84"}, {"completion": "\\boxed{84}", "answer": "84"}]
    out = tmp_path / "out.jsonl"
    assert score(str(write(tmp_path / "rows.jsonl", rows)), str(config), str(out)) == 0
    exchange, single = read(out)
    assert exchange["correct"] is single["correct"] is True
    assert exchange["scores"]["function"]["value"] == float(sees == "exchange")


def test_exchanges_without_their_episodes_cannot_pay_what_an_environment_paid(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("rewards:\n  - {class_path: grpo_pl.rewards.EnvironmentReward, init_args: {correctness: true}}\n")
    rows = [{"messages": EXCHANGE, "answer": ""}]
    with pytest.raises(ValueError, match="needs the column 'episode'"):
        score(str(write(tmp_path / "rows.jsonl", rows)), str(config))
    row = {"return": 2.0, "status": "ok", "turns": [{"reward": 0.5}, {"reward": 1.5}]}
    out = tmp_path / "out.jsonl"
    given = [{"messages": EXCHANGE, "answer": "", "episode": row}, {"completion": "", "answer": "", "episode": row}]
    assert score(str(write(tmp_path / "rows.jsonl", given)), str(config), str(out)) == 0
    assert [row["reward"] for row in read(out)] == [2.0, 2.0]


def test_rows_are_read_as_training_reads_them(tmp_path: Path) -> None:
    golds = ["1.50", "007", ["1.50", "7"], 7, 123456789012345678901234567890, {"x": 1}, True, ""]
    told = ["1.50", "007", None, "7", "123456789012345678901234567890", None, "true", ""]
    lines = [json.dumps({"completion": "x", "answer": gold}) for gold in golds]
    lines.append('{"completion": "x", "answer": 1.50}')
    (tmp_path / "rows.JSONL.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    line = "return [float(c == 'x') for c in completions]"
    right = FunctionReward(function=function(tmp_path, line), name="right", correctness=True)
    summary = score_file(tmp_path / "rows.JSONL.gz", [right, FormatReward()], output=tmp_path / "out.jsonl")
    rows = read(tmp_path / "out.jsonl")
    for row, gold in zip(rows, [*told, "1.50"], strict=True):
        expected = (None, "bad_gold") if gold is None else (1.0, "ok")
        assert (row["scores"]["right"]["value"], row["scores"]["right"]["status"]) == expected
        assert (row["reward"] is None, row["correct"] is None) == (gold is None, gold is None)
    assert [row["answer"] for row in rows] == [*golds[:6], "true", "", "1.50"]
    assert (summary.bad_golds, summary.passed) == (2, False)


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.json"])
def test_golds_are_those_of_the_file_whatever_it_is(tmp_path: Path, name: str) -> None:
    file, said = tmp_path / name, [f"<answer>{text}</answer>" for text in ("1.50", "1e5", "NA")]
    if name == "rows.csv":
        file.write_text(f"completion,answer\n{said[0]},1.50\n{said[1]},1e5\n{said[2]},NA\n")
    elif name == "rows.json":
        file.write_text(
            f'[{{"completion": "{said[0]}", "answer": 1.50}}, {{"completion": "{said[1]}", "answer": 1e5}}]'
        )
    else:
        decimals = pa.array([Decimal("1.50")], pa.decimal128(5, 2))
        parquet.write_table(pa.table({"completion": said[:1], "answer": decimals}), file)
    summary = score_file(
        file, [ExactReward(correctness=True, answer_in="pattern", answer_pattern="<answer>(.*)</answer>")]
    )
    assert summary.correct == summary.rows


def test_rewards_see_the_images_of_rows(tmp_path: Path) -> None:
    """In a column, and in the places of a prompt; the rows that are written stay as they were."""
    for name, shade in (("dark", 0), ("light", 255)):
        (tmp_path / f"{name}.png").write_bytes(Picture.of(bytes([shade] * 3), 1, 1).png)
    asked = [{"role": "user", "content": [{"type": "image", "image": "light.png"}, {"type": "text", "text": "Is it?"}]}]
    rows = [
        {"prompt": "light?", "image": "dark.png", "completion": "no", "answer": "no"},
        {"prompt": "light?", "image": "dark.png", "completion": "yes", "answer": "no"},
        {"messages": [*asked, {"role": "assistant", "content": "yes"}], "answer": "yes"},
        {"prompt": "light?", "completion": "no", "answer": "no"},
    ]
    seen: list[Any] = []

    def looks(completions: list[Any], prompts: list[Any], images: list[tuple[Picture, ...]], **_: Any) -> list[float]:
        seen.extend(prompts)
        lights = [any(pixel for each in pictures for pixel in each.pixels()) for pictures in images]
        return [float((text == "yes") == light) for text, light in zip(completions, lights, strict=True)]

    file, output = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    score_file(file, [FunctionReward(function=looks, conversational=False)], output=output, images=True)
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["reward"] for row in written] == [1.0, 0.0, 1.0, 1.0]
    assert [{key: row[key] for key in given} for row, given in zip(written, rows, strict=True)] == rows
    assert seen == ["light?", "light?", "Is it?", "light?"]
    for image in ("../gone.png", "data:image/png;base64," + 14_000_000 * "A", [rows[0]["image"]] * 9):
        file.write_text(json.dumps({**rows[0], "image": image}))
        with pytest.raises(ValueError, match=r"row 1 of .*rows\.jsonl") as refused:
            score_file(file, [FunctionReward(function=looks)], images=True)
        assert "data.source" not in str(refused.value)
        assert ("--images" in str(refused.value)) == (image != "../gone.png")
    file.write_text(json.dumps({**rows[0], "image": "gone.png"}))
    with pytest.raises(ValueError, match=r"row 1 of .*rows\.jsonl.*gone\.png"):
        score_file(file, [FunctionReward(function=looks)], images=True)


def test_the_option_of_the_command_reads_images(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.png").write_bytes(Picture.of(bytes([255] * 3), 1, 1).png)
    (tmp_path / "sees.py").write_text("def sees(completions, images, **_): return [float(i[0].width) for i in images]")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"completion": "x", "answer": "y", "image": "a.png"}))
    spec = {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": {"function": f"{tmp_path / 'sees.py'}:sees"}}
    (tmp_path / "rewards.yaml").write_text(json.dumps({"rewards": [spec]}))
    asked = ["score", str(rows), "--config", str(tmp_path / "rewards.yaml")]
    assert main([*asked, "--images"]) == 0
    assert json.loads((tmp_path / "rows.scores.jsonl").read_text())["reward"] == 1.0
    assert main(asked) != 0
    assert "images" in capsys.readouterr().err
