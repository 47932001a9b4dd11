"""``grpo-pl compare``: two runs of the tiny task on the same problems with the same keys, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.extras.compare import compare
from grpo_pl.files.rows import read_lines
from tests.conftest import CommandLine, Outcome

SAMPLES = 2


@pytest.fixture(scope="module")
def folder(command_line: CommandLine) -> Path:
    """Two runs that differ in their rate."""
    config = command_line.config()
    command_line.done("fit", f"--config={config}", "--name=one")
    command_line.done("fit", f"--config={config}", "--name=two", "--model.optimization.lr=1e-2")
    return command_line.runs


@pytest.fixture
def asked(command_line: CommandLine, folder: Path) -> Callable[..., Outcome]:
    """``asked(a, b, …)``: the command on two of the runs' folders, or files below them."""
    return lambda a, b, *more: command_line("compare", folder / a, folder / b, *more)


@pytest.fixture(scope="module")
def told(command_line: CommandLine, folder: Path) -> dict[str, Any]:
    outcome = command_line.done("compare", folder / "one", folder / "two", f"--samples={SAMPLES}", "--json")
    return dict(json.loads(outcome.out))


def _verdicts(file: Path) -> dict[int, list[tuple[str, bool]]]:
    found: dict[int, list[tuple[str, bool]]] = {}
    for line in read_lines(file):
        said = line.row["completion"][-1]["content"], line.row["correct"]
        found.setdefault(line.row["prompt_id"], []).append(said)
    return found


def test_every_number_is_that_of_the_completions_that_predict_draws(
    command_line: CommandLine, folder: Path, told: dict[str, Any], tmp_path: Path
) -> None:
    drawn = []
    for name in ("one", "two"):
        output = tmp_path / f"{name}.jsonl"
        command_line.done(
            "predict", f"--model={folder / name}", f"--samples={SAMPLES}", "--prompts=6", f"--output={output}"
        )
        drawn.append(_verdicts(output))
    (found,) = told["sets"].values()
    assert found["problems"] == len(drawn[0]) == 6
    right = [{i: sum(correct for _, correct in each) for i, each in side.items()} for side in drawn]
    assert found["pass@1"]["a"] == pytest.approx(sum(right[0].values()) / 12)
    assert found["pass@1"]["b"] == pytest.approx(sum(right[1].values()) / 12)
    only_b = [i for i in drawn[0] if right[0][i] < SAMPLES and right[1][i] == SAMPLES]
    assert found["only_b"] == len(only_b)
    for each in found["flipped"]:
        sides = [[(one["text"], one["correct"]) for one in each[name]] for name in "ab"]
        assert sides == [side[each["id"]] for side in drawn]
    assert told["shared_keys"] and all("too few" in note for note in told["notes"])
    assert any(line.startswith("model.optimization.lr: 0.003 → 0.01") for line in told["settings"])


def test_the_same_weights_elsewhere_answer_alike_and_give_their_problems(
    command_line: CommandLine, folder: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(folder / "one" / "export", moved)
    lines: list[str] = []
    found = compare(folder / "one", moved, samples=3, say=lines.append)
    assert found.notes == lines and [line for line in lines if "only 0 problems differ" in line]
    (each,) = found.sets.values()
    assert each.cells["only_a"] == each.cells["only_b"] == 0 and len(each.pairs) == 6
    assert all(pair.a == pair.b for pair in each.pairs)
    assert found.settings == [] and (found.a.name, found.b.name) == ("one", "moved")


def test_the_tables_say_what_the_json_says(command_line: CommandLine, folder: Path, told: dict[str, Any]) -> None:
    outcome = command_line.done("compare", "one", "two", f"--samples={SAMPLES}", "--problems=200")
    page = command_line.runs / "compare-one-two.html"
    assert outcome.out.splitlines()[-1] == f"page  {page}" and page.is_file()
    assert not (folder / "one" / page.name).exists()
    (found,) = told["sets"].values()
    for label, name in (("both", "both"), ("one only", "only_a"), ("two only", "only_b"), ("neither", "neither")):
        (line,) = (line for line in outcome.out.splitlines() if f"solved by {label}" in line)
        assert line.split()[-3:-1] == [str(found[name]), "│"]
    for text in (f"p = {found['mcnemar_p']:.3g}", f"{found['pass@1']['difference']:+.3f}", "time, s"):
        assert text in outcome.out  # the last of the curves' ends
    assert "model.optimization.lr: 0.003 → 0.01" in outcome.out


def test_checkpoints_of_one_run_are_compared_and_the_problems_limited(asked: Callable[..., Outcome]) -> None:
    first, last = (f"one/checkpoints/rollout-00000{n}.ckpt" for n in (1, 4))
    outcome = asked(first, last, "--problems=4", "--json")
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert [found[side]["name"] for side in "ab"] == ["one rollout-000001", "one rollout-000004"]
    assert found["sets"]["val"]["problems"] == 4 and found["settings"] == []


def test_another_tokenizer_is_compared_by_problem_and_the_keys_are_said_to_be_unshared(
    command_line: CommandLine, asked: Callable[..., Outcome]
) -> None:
    config = command_line.config("others", model__policy__characters="0123456789+-=/\\{}abcdefghijklmnopqrstuvwxyz\n ")
    command_line.done("fit", f"--config={config}", "--name=others", "--data.steps=1")
    outcome = asked("one", "others", "--json")
    assert outcome.status == 0, outcome.err
    found = json.loads(outcome.out)
    assert not found["shared_keys"] and found["sets"]["val"]["problems"] == 6
    assert "keys unshared" in outcome.err and any("keys unshared" in note for note in found["notes"])


def test_some_common_problems_are_enough_and_it_is_told(
    command_line: CommandLine, folder: Path, asked: Callable[..., Outcome]
) -> None:
    shutil.copytree(folder / "two", folder / "fewer")
    config = yaml.safe_load((folder / "fewer" / "config.yaml").read_text())
    config["data"]["val_prompts"] = 4
    (folder / "fewer" / "config.yaml").write_text(yaml.safe_dump(config))
    outcome = asked("one", "fewer", "--json")
    assert outcome.status == 0, outcome.err
    assert "4 of 6 held-out problems are those of both" in outcome.err


def _other_problems(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["source"]["init_args"]["digits"] = 2
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def _of_version(version: str | None) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        manifest = json.loads((run / "export" / "grpo_pl.json").read_text())
        (run / "export" / "grpo_pl.json").write_text(json.dumps({**manifest, "grpo_pl_version": version}))

    return change


def _without_correctness(run: Path) -> None:
    file = run / "export" / "grpo_pl.json"
    file.write_text(file.read_text().replace('"correctness": true', '"correctness": false'))


def _foreign_source(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["source"] = {"class_path": "user_parts.Own", "init_args": {}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def _alone(run: Path) -> None:
    for path in [*run.iterdir()]:
        if path.name != "export":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("change", "a", "b", "complaint"),
    [
        (None, "mine", "nowhere", "there is no run or export"),
        (None, "mine", "mine/export", "the same weights"),
        (None, "mine", "mine/checkpoints", "holds neither grpo_pl.json nor a run"),
        (_alone, "mine/export", "mine/export/../export2", "neither mine nor export2 lies in the folder of a run"),
        (_other_problems, "mine", "two", "different held-out problems"),
        (_of_version("0.1.0"), "mine", "two", "made by grpo_pl 0.1.0, and this is"),
        (_of_version(None), "two", "mine", "made by grpo_pl of an unknown version"),
        (_without_correctness, "mine", "two", "needs a reward with `correctness: true`"),
        (_foreign_source, "mine", "two", "--trust-rewards"),
    ],
    ids=["missing", "twice", "no run", "no problems", "other problems", "old", "no version", "no correctness", "trust"],
)
def test_a_mistake_is_one_line_and_exit_status_2(
    command_line: CommandLine,
    folder: Path,
    tmp_path: Path,
    change: Callable[[Path], None] | None,
    a: str,
    b: str,
    complaint: str,
) -> None:
    shutil.copytree(folder / "two", tmp_path / "two")
    shutil.copytree(folder / "one", tmp_path / "mine", symlinks=True)
    shutil.copytree(folder / "two" / "export", tmp_path / "mine" / "export2")
    if change is not None:
        change(tmp_path / "mine")
        shutil.copytree(folder / "two" / "export", tmp_path / "mine" / "export2", dirs_exist_ok=True)
    outcome = command_line("compare", tmp_path / a, tmp_path / b)
    assert outcome.status == 2 and outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("grpo-pl compare: error: ") and complaint in line


@pytest.mark.parametrize("option", ["--samples=0", "--problems=0", "--batch-size=0", "--temperature=-1"])
def test_numbers_without_sense_are_refused(asked: Callable[..., Outcome], option: str) -> None:
    outcome = asked("one", "two", option)
    assert outcome.status == 2 and option.partition("=")[0].replace("-size", "_size") in outcome.err


def test_a_page_that_has_no_place_is_told_before_anything_is_drawn(
    asked: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "page.html", tmp_path / "file" / "new" / "page.html"):
        outcome = asked("one", "two", f"--output={place}")
        assert outcome.status == 2 and outcome.out == "" and "--output" in outcome.err.splitlines()[0]


def test_problems_may_be_named_by_a_configuration(
    command_line: CommandLine, asked: Callable[..., Outcome], folder: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        shutil.copytree(folder / name / "export", tmp_path / name)
    config = command_line.config("named", data__val_prompts=3)
    options = [f"--config={config}", "--json", f"--output={tmp_path / 'page.html'}"]
    outcome = command_line("compare", tmp_path / "one", tmp_path / "two", *options)
    assert outcome.status == 0, outcome.err
    told = json.loads(outcome.out)
    assert told["sets"]["val"]["problems"] == 3
    assert told["page"] == str(tmp_path / "page.html") and (tmp_path / "page.html").is_file()
