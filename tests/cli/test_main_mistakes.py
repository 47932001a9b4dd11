"""Every mistake on the command line is one line, with the nearest right spelling."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from grpo_pl.cli.commands import TRAINER_VERBS, VERBS
from grpo_pl.cli.main import overview
from grpo_pl.config.presets import presets
from grpo_pl.moved import CLASSES

ADDITION = "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"
MATH = "grpo_pl.rewards.MathReward"
NO_PRESET = f"model.algorithm.preset: no preset 'drgrpo'; did you mean dr_grpo? There are: {', '.join(presets())}."


class Refused(NamedTuple):
    """A mistake, as options, as the text of an overlay, or as entries of the configuration."""

    said: str
    options: Sequence[str] = ()
    text: str = ""
    changes: Mapping[str, Any] = {}
    status: int = 1


USAGE = [
    Refused("unknown option --data.stepps; did you mean --data.steps?", ["--data.stepps=0"]),
    Refused(f"data.source: {ADDITION} has no argument 'digit'; did you mean digits?", ["--data.source.digit", "3"]),
    Refused("no such file: /none.yaml", ["--config", "/none.yaml"]),
    Refused("model.cold_start.steps must be int or null, got 'x'", ["--model.cold_start.steps", "x"]),
    Refused(NO_PRESET, ["--model.algorithm.preset", "drgrpo"]),
    Refused("unexpected argument 'overlay.yaml'; did you mean --config overlay.yaml?", ["overlay.yaml"]),
    Refused("unexpected argument 'data.steps'; did you mean --data.steps?", ["data.steps=3"]),
    Refused("unexpected argument 'data.stps'; did you mean --data.steps?", ["data.stps=3"]),
    Refused("seed_everything must be bool or int, got 'x'", ["--seed_everything", "x"]),
    Refused("unknown key 'data.stps'; did you mean data.steps?", text="data: {stps: 3}"),
    Refused("model.algorithm must be a mapping of fields, got null.", text="model: {algorithm: null}"),
    Refused(NO_PRESET, text="model: {algorithm: {preset: drgrpo}}"),
    Refused("unknown key 'model.preset'; did you mean model.algorithm.preset?", text="model: {preset: dapo}"),
    Refused("model must be a mapping of fields, got [1].", text="model: [1]"),
    Refused("unknown key 'modle.engine'; did you mean model.engine?", text="modle: {engine: null}"),
    Refused(
        f"model.rewards: {MATH} has no argument 'worker'; did you mean workers?",
        text=f"model: {{rewards: [{{class_path: {MATH}, init_args: {{worker: 3}}}}]}}",
    ),
    Refused(
        "model.rewards: an entry has no class_path that says which Reward is meant",
        text=f"model: {{rewards: [{{class_pth: {MATH}}}]}}",
    ),
    Refused(
        f"data.source: {ADDITION} has no argument 'init_arg.digits'; did you mean init_args?",
        text=f"data: {{source: {{class_path: {ADDITION}, init_arg: {{digits: 2}}}}}}",
    ),
    Refused(
        "trainer.logger: lightning.pytorch.loggers.CSVLogger has no argument 'save_dirr'; did you mean save_dir?",
        ["--trainer.logger=[{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dirr: x}}]"],
    ),
    Refused(
        "trainer.logger.version must be int, str or null, got '[3]'",
        ["--trainer.logger=[{class_path: CSVLogger, init_args: {save_dir: x, version: [3]}}]"],
    ),
    # names of TRL, of other trainers and of earlier versions
    Refused("unknown option --model.algorithm.num_generations; here that is model.algorithm.group_size",
            ["--model.algorithm.num_generations=1"]),
    Refused("unknown key 'trainer.max_completion_length'; here that is model.sampling.max_completion_length",
            text="trainer: {max_completion_length: 1}"),
    Refused("unknown key 'data.per_device_train_batch_size'; here that is data.prompts_per_step",
            text="data: {per_device_train_batch_size: 1}"),
    Refused("unknown key 'learning_rate'; here that is model.optimization.lr", text="learning_rate: 1.0e-6"),
    Refused("unknown key 'model.compute'; here that is trainer.precision (32-true for exact; bf16-mixed for",
            text="model: {compute: auto}"),
    *(
        Refused(f"; it is {CLASSES[old]} now", [f"--trainer.callbacks+={{class_path: {old}}}"])
        for old in ("grpo_pl.callbacks.doctor.callback.Doctor", "grpo_pl.callbacks.choices.TellChoices")
    ),
]  # fmt: skip
"""What cannot be understood."""
VALUES = [
    Refused("top_k=5", ["--model.sampling.top_k=5"]),
    Refused("the model's context has 1 tokens beside", ["--model.sampling.max_completion_length=47"]),
    Refused("lr must be positive, got -1", ["--model.optimization.lr=-1"]),
    Refused("max_tokens_per_microbatch is 0, but must hold a prompt", ["--model.max_tokens_per_microbatch=0"]),
    Refused("with a completion of 32 tokens has 36: set it to 36", ["--model.max_tokens_per_microbatch=33"]),
    Refused("cold_start.steps must be at least 1", ["--model.cold_start.steps=0"]),
    Refused("exactly one of `path`", ["--model.policy.path=nowhere"]),
    Refused("{question}", ["--model.template.user=Solve."]),
    Refused("data needs prompts_per_step >= 1, got 0", ["--data.prompts_per_step=0"]),
    Refused("data.val_prompts must be at least 1, or null for all, got 0", ["--data.val_prompts=0"]),
    Refused("different train problems found where 95", ["--data.prompts_per_step=95"]),
    Refused("keep >= 1", ["--checkpoint.keep=0"]),
    Refused("no rewards", ["--model.rewards=[]"]),
    Refused("temperature is 0", ["--model.sampling.temperature=0"]),
    Refused("set group_size to 2 or more", ["--model.algorithm.group_size=1"]),
    Refused("--name must be the name of a folder, without slashes, got 'a/b'", ["--name=a/b"]),
    Refused("--name must be the name of a folder, without slashes, got '..'", ["--name=.."]),
    Refused("there is no checkpoint none.ckpt", ["--ckpt_path=none.ckpt"]),
    Refused("--ckpt_path is 'last', a word of Lightning's: give the file", ["--ckpt_path", "last"]),
    Refused("--ckpt_path is 'best', a word of Lightning's: give the file", ["--ckpt_path=best"]),
    Refused("trainer: `devices` selected with `CPUAccelerator`", ["--trainer.devices=x"]),
    Refused("invalid accelerator name", ["--trainer.accelerator=tpuu"]),
    Refused("data.prompts_per_step=4 does not divide among 3 processes: set a multiple", ["--trainer.devices=3"]),
    Refused("there is no folder '/no/such/folder'", changes={"model__policy": {"path": "/no/such/folder"}}),
    Refused("there is no file 'none.csv'.", ["--data.source=TablePrompts", "--data.source.path=none.csv"]),
    Refused("got 1 and 10", changes={"data__source__init_args": {"digits": 10}}),
    Refused(
        "qwen2 has no setting 'hidden'",
        changes={"model__policy": {"from_scratch": {"model_type": "qwen2", "hidden": 8}}},
    ),
    Refused(
        "function 'no.x' cannot be loaded",
        text="model: {rewards: [{class_path: grpo_pl.rewards.FunctionReward, init_args: {function: no.x}}]}",
    ),
]
"""What a run cannot work with."""


@pytest.mark.parametrize(
    "mistake", [*(one._replace(status=2) for one in USAGE), *VALUES], ids=lambda one: one.said[:60]
)
def test_a_mistake_is_one_line_before_anything_is_made(command_line: Any, mistake: Refused) -> None:
    given = ["--config", command_line.config("wrong", **mistake.changes)]
    if mistake.text:
        overlay = command_line.folder / "overlay.yaml"
        overlay.write_text(mistake.text)
        given += ["--config", overlay]
    (command_line.runs / "wrong").mkdir(parents=True, exist_ok=True)  # or there could be no note on the name
    places = (command_line.folder, command_line.cache / "cold_start")
    before = [set(place.rglob("*")) for place in places]
    outcome = command_line("fit", *given, *mistake.options)
    line, *hint = outcome.err.splitlines()
    assert line.startswith("grpo-pl fit: error: ") and mistake.said in line
    assert hint == (["(all options: grpo-pl fit --help)"] if hint and mistake.status == 2 else [])
    assert (outcome.status, outcome.out) == (mistake.status, "")
    assert [set(place.rglob("*")) for place in places] == before


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


COMET = "lightning.pytorch.loggers.CometLogger"


@pytest.mark.parametrize("given", [COMET, f"[{{class_path: CSVLogger, init_args: {{save_dir: x}}}}, {COMET}]"])
def test_a_part_that_lacks_its_package_says_what_to_install(command_line: Any, given: str) -> None:
    if importlib.util.find_spec("comet_ml") is not None:
        pytest.skip("comet_ml is installed")
    logger = f"--trainer.logger={given}"
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


def test_help_on_several_paths_shows_them_as_they_are_written(command_line: Any) -> None:
    assert "[--output OUTPUT] PATH ...\n" in command_line("report", "--help").out


def test_the_terms_of_the_objective_have_a_page(command_line: Any) -> None:
    outcome = command_line("fit", "--help", "terms")
    assert "grpo_pl.objective.terms.anchor.Anchor: " in outcome.out
    assert "coef COEF  Weight of the squared distance. (required, type: float)" in outcome.out


def test_windows_is_told_of_wsl_before_anything_that_it_does_not_have_is_imported() -> None:
    code = (
        "import sys; sys.platform = 'win32'; sys.modules['fcntl'] = None\n"
        "import grpo_pl.__main__ as started; sys.exit(started.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1
    assert "inside WSL" in done.stderr
