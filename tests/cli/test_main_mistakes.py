"""Every mistake on the command line is one line, with the nearest right spelling."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.cli.commands import TRAINER_VERBS, VERBS
from grpo_pl.cli.main import overview
from grpo_pl.config.presets import presets

NO_PRESET = f"model.algorithm.preset: no preset 'drgrpo'; did you mean dr_grpo? There are: {', '.join(presets())}."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model.algorithm.betta=0"], "unknown option --model.algorithm.betta; did you mean --model.algorithm.beta?"),
        (
            ["--data.source.digit", "3"],
            "data.source: grpo_pl.data.tasks.arithmetic.ArithmeticPrompts has no argument 'digit'; "
            "did you mean digits?",
        ),
        (["--config", "{folder}/none.yaml"], "no such file: {folder}/none.yaml"),
        (["--model.cold_start.steps", "x"], "model.cold_start.steps must be int or null, got 'x'"),
        (["--model.rewards+=7"], "model.rewards must be a class or class_path, got '7'"),
        (
            ["--model.optimization.schedule", "cosin"],
            "model.optimization.schedule must be constant, linear, cosine or null, got 'cosin'",
        ),
        (
            ["--model.algorithm", "dr_grpo"],
            "model.algorithm: there is no file 'dr_grpo'; overlays are given as --config FILE",
        ),
        (["--model.algorithm.preset", "drgrpo"], NO_PRESET),
        (["overlay.yaml"], "unexpected argument 'overlay.yaml'; did you mean --config overlay.yaml?"),
        (["--seed_everything", "x"], "seed_everything must be bool or int, got 'x'"),
    ],
)
def test_a_mistake_in_an_option_is_one_line_and_status_2(
    command_line: Any, arguments: list[str], expected: str
) -> None:
    folder = str(command_line.folder)
    before = set(command_line.folder.rglob("*"))
    config = command_line.config("usage")
    outcome = command_line("fit", "--config", config, *(a.replace("{folder}", folder) for a in arguments))
    assert outcome.status == 2
    assert outcome.err.splitlines()[0] == f"grpo-pl fit: error: {expected.replace('{folder}', folder)}"
    assert not outcome.out
    assert set(command_line.folder.rglob("*")) - before <= {config}  # no run folder


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {stps: 3}", "unknown key 'data.stps'; did you mean data.steps?"),
        ("model: {algorithm: null}", "model.algorithm must be a mapping of fields, got null."),
        ("model: {algorithm: {preset: drgrpo}}", NO_PRESET),
        ("model: {preset: dapo}", "unknown key 'model.preset'; did you mean model.algorithm.preset?"),
        ("model: [1]", "model must be a mapping of fields, got [1]."),
        ("modle: {engine: null}", "unknown key 'modle.engine'; did you mean model.engine?"),
        (
            "model: {rewards: [{class_path: grpo_pl.rewards.MathReward, init_args: {worker: 3}}]}",
            "model.rewards: grpo_pl.rewards.MathReward has no argument 'worker'; did you mean workers?",
        ),
        (
            "model: {rewards: [{class_pth: grpo_pl.rewards.MathReward}]}",
            "model.rewards: an entry has no class_path that says which Reward is meant",
        ),
        (
            "data: {source: {class_path: grpo_pl.data.tasks.arithmetic.ArithmeticPrompts, init_arg: {digits: 2}}}",
            "data.source: grpo_pl.data.tasks.arithmetic.ArithmeticPrompts has no argument 'init_arg.digits'; "
            "did you mean init_args?",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line_and_status_2(
    command_line: Any, tmp_path: Path, text: str, expected: str
) -> None:
    typo = tmp_path / "typo.yaml"
    typo.write_text(text)
    outcome = command_line("fit", "--config", command_line.config("usage"), "--config", typo)
    assert (outcome.status, outcome.err.splitlines()[0]) == (2, f"grpo-pl fit: error: {expected}")


def test_a_file_that_is_no_configuration_is_named(command_line: Any, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("model:\n\tseed: 0\n")
    outcome = command_line("fit", "--config", command_line.config("usage"), "--config", file)
    said = f"grpo-pl fit: error: {file}, line 2, column 1: found character that cannot start any token.\n"
    assert (outcome.status, outcome.err) == (1, said)


def test_without_a_configuration_fit_says_how_to_give_one(command_line: Any) -> None:
    assert command_line("fit").err.splitlines()[0] == (
        "grpo-pl fit: error: model.rewards and data.source are missing: "
        "give a configuration, such as --config configs/quickstart.yaml"
    )


def test_a_part_that_lacks_its_package_says_what_to_install(command_line: Any) -> None:
    if importlib.util.find_spec("comet_ml") is not None:
        pytest.skip("comet_ml is installed")
    logger = "--trainer.logger=lightning.pytorch.loggers.CometLogger"
    outcome = command_line("fit", "--config", command_line.config("usage"), logger)
    assert outcome.status == 1
    assert "lightning.pytorch.loggers.CometLogger: Requirement 'comet-ml" in outcome.err
    assert "pip install" in outcome.err and "Union" not in outcome.err


def test_a_value_that_begins_with_a_hash_is_no_comment(command_line: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    table = ["--data.source=grpo_pl.data.tables.TablePrompts", f"--data.source.path={tmp_path / 'rows.jsonl'}"]
    config = command_line.config("usage", model__cold_start=None)
    for pattern in (["--data.source.answer_pattern", "#### (.+)"], ["--data.source.answer_pattern=#### (.+)"]):
        outcome = command_line("fit", "--config", config, *table, *pattern)
        assert outcome.status == 1
        assert "with answer_pattern '#### (.+)'" in outcome.err


def test_an_error_in_a_reward_function_names_its_line(command_line: Any, tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("def broken(completions, **columns):\n    return 1 / 0\n")
    arguments = {"function": f"{file}:broken", "correctness": True}
    reward = {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": arguments}
    config = command_line.config("usage", model__cold_start=None, model__rewards=[reward])
    outcome = command_line("fit", "--config", config, "--trainer.limit_val_batches=0")
    line = f"ZeroDivisionError: division by zero, raised by the reward function '{file}:broken' ({file}, line 2)"
    tried = "reward 'function' failed before the start, on 8 texts that try it"
    assert outcome.status == 1 and outcome.err.endswith(f"grpo-pl fit: error: {tried}: {line}\n")


def test_an_unknown_command_names_the_nearest(command_line: Any) -> None:
    outcome = command_line("validat")
    assert outcome.status == 2
    assert outcome.err.splitlines()[0] == "grpo-pl: error: unknown command 'validat'; did you mean validate?"


# --- help -----------------------------------------------------------------------------------------------------------


def test_the_overview_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = overview().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if re.match(r"  \w", line)] == [*TRAINER_VERBS, *VERBS]


def test_help_says_what_a_run_is_about_before_what_the_trainer_can(command_line: Any) -> None:
    outcome = command_line("fit", "--help", "all")
    first, *_ = outcome.out.splitlines()
    assert first == "usage: grpo-pl fit --config FILE [--config OVERLAY …] [--OPTION VALUE …]"
    places = [
        outcome.out.index(f"\n  --{option} ") for option in ("name", "model.rewards", "data.steps", "trainer.devices")
    ]
    assert places == sorted(places)
    assert "<class '" not in outcome.out and ":class:" not in outcome.out and "``" not in outcome.out
    known = re.findall(r"known subclasses:([^)]*)", outcome.out)  # before any is named
    assert any("grpo_pl.data.tasks.arithmetic.ArithmeticPrompts" in names for names in known)


@pytest.mark.parametrize("verb", ["fit", "validate", "doctor"])
def test_help_is_one_screen_that_says_how_to_see_more(command_line: Any, verb: str) -> None:
    lines = command_line(verb, "-h").out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    shown = [line.split()[0][2:] for line in lines if line.startswith("  --")]
    assert {"config", "model.optimization.lr", "data.steps"} <= set(shown)
    assert f"grpo-pl {verb} --help all" in "\n".join(lines)


def test_the_short_page_needs_no_library_of_training() -> None:
    code = "import sys; from grpo_pl.cli.main import main; main(['fit', '--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("verb", TRAINER_VERBS)
def test_the_short_page_has_options_and_defaults_of_the_long_one(command_line: Any, verb: str) -> None:
    page = command_line(verb, "--help").out
    assert page == command_line(verb, "--seed_everything=0", "--help").out
    assert page.startswith(f"usage: grpo-pl {verb} --config") and " ".join(page.split()).count(TRAINER_VERBS[verb]) == 1
    long = "".join(command_line(verb, "--help=all").out.split())
    for name, about in re.findall(r"^  --(\S+) +(.*)", page, re.MULTILINE):
        (default,) = re.findall(r"\(([\d.]+)\)$", about) or [""]
        assert re.search(rf"--{re.escape(name)}(?!\.).*?{re.escape(f'default:{default}')}", long), name


def test_help_on_a_part_shows_its_options_alone(command_line: Any) -> None:
    outcome = command_line("fit", "--help", "model.sampling")
    assert "--model.sampling.temperature" in outcome.out and "--data.steps" not in outcome.out
    wrong = command_line("fit", "--help", "model.samplng")
    assert wrong.status == 1 and "did you mean model.sampling?" in wrong.err
    assert command_line("plan", "--help", "all").out == command_line("plan", "--help").out


def test_a_source_needs_no_module_in_its_name(command_line: Any) -> None:
    config = command_line.config("usage", model__cold_start=None)
    outcome = command_line("fit", "--config", config, "--data.source=TablePrompts", "--data.source.path=none.csv")
    assert outcome.err == "grpo-pl fit: error: there is no file 'none.csv'.\n"


def test_windows_is_told_of_wsl_before_anything_that_it_does_not_have_is_imported() -> None:
    code = (
        "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None\n"
        "import grpo_pl.__main__ as started; sys.exit(started.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1
    assert "inside WSL" in done.stderr
