"""Training, validation, prediction and export of a policy that acts in an environment, on the command line."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.config.objects import build_environment
from grpo_pl.extras.agents.tools import ToolEnvironment
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.tokenizer import character_tokenizer
from grpo_pl.rewards.trust import Untrusted
from tests.process_list import started_processes

PLUGINS = Path(__file__).parents[1] / "plugins"
CONFIG = PLUGINS / "down.yaml"
SHORT = (
    *("--data.steps=2", "--data.val_prompts=2", "--data.prompts_per_step=2", "--trainer.val_check_interval=2"),
    *("--model.cold_start.steps=10", "--model.validation.greedy=false", "--model.validation.samples=1"),
)
IN_PROCESSES = "--model.environment.init_args.isolation=process"


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    command_line.done("fit", f"--config={CONFIG}", *SHORT)
    folder: Path = command_line.runs / "down"
    return folder


@pytest.fixture
def no_process_left() -> Iterator[None]:
    before = started_processes()
    yield
    assert [command for pid, command in started_processes().items() if pid not in before] == []


def test_the_run_folder_tells_of_episodes(run: Path, read_metrics: Callable[..., Any]) -> None:
    rows = [row for row in read_metrics(run / "metrics.csv") if "reward" in row]
    assert len(rows) == 2
    for row in rows:
        assert 1 <= float(row["episodes/mean_turns"]) <= 4
        assert float(row["episodes/return"]) == pytest.approx(float(row["rewards/environment/mean"]))
        assert float(row["loss"]) != 0.0
    config = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert config["environment"]["class_path"] == "countdown_task.Down"
    assert config["episodes"]["max_turns"] == 4 and config["episodes"]["step_timeout_s"] == 30.0
    told = json.loads((run / "export" / "grpo_pl.json").read_text())
    assert told["environment"]["init_args"]["isolation"] == "thread"
    assert told["episodes"]["rewards_see"] == "exchange"


def test_validate_finds_what_fit_found(run: Path, command_line: Any, read_metrics: Callable[..., Any]) -> None:
    last = read_metrics(run / "metrics.csv")[-1]
    checkpoint = run / "checkpoints" / "last.ckpt"
    outcome = command_line.done("validate", f"--config={CONFIG}", *SHORT, f"--ckpt_path={checkpoint}")
    assert f"val/pass@1 {float(last['val/pass@1']):.3f}" in outcome.err + outcome.out


@pytest.mark.parametrize("model", ["export", "checkpoints/last.ckpt"])
def test_predict_plays_episodes(
    run: Path, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, no_process_left: None
) -> None:
    from grpo_pl.cli.main import main

    monkeypatch.syspath_prepend(PLUGINS)
    file = tmp_path / "out.jsonl"
    asked = [
        "predict",
        f"--model={run / model}",
        f"--output={file}",
        "--prompts=2",
        "--samples=2",
        f"--config={CONFIG}",
    ]
    assert main([*asked, "--trust_rewards=true"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 4 and {row["finish_reason"] for row in rows} <= {"environment", "turns", "tokens"}
    assert all(isinstance(row["rewards"]["environment"]["value"], float) for row in rows)


def test_somebody_elses_environment_needs_trust(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from grpo_pl.cli.main import main

    asked = ["predict", f"--model={run}", f"--output={tmp_path / 'out.jsonl'}", f"--config={CONFIG}"]
    with pytest.raises(SystemExit):
        sys.exit(main(asked))
    assert "the environment 'countdown_task.Down' cannot be imported without --trust-rewards" in capsys.readouterr().err


def test_processes_draw_what_threads_do(
    run: Path, command_line: Any, read_metrics: Callable[..., Any], no_process_left: None
) -> None:
    command_line.done("fit", f"--config={CONFIG}", *SHORT, IN_PROCESSES, "--name=processes")
    both = [read_metrics(command_line.runs / name / "metrics.csv") for name in ("processes", run.name)]
    assert both[0] == both[1]


@pytest.mark.parametrize("ending", [pytest.param("ValueError", marks=pytest.mark.slow), "KeyboardInterrupt"])
def test_environments_end_with_whatever_ends_the_run(command_line: Any, no_process_left: None, ending: str) -> None:
    failing = f"--trainer.callbacks+={{class_path: failing_callback.Failing, init_args: {{error: {ending}}}}}"
    outcome = command_line("fit", f"--config={CONFIG}", *SHORT, IN_PROCESSES, failing, f"--name={ending}")
    assert outcome.status != 0


TERMS = "grpo_pl.objective.terms"
BAD = {
    "--model.episodes.max_turns=0": "max_turns must be at least 1, got 0",
    "--model.episodes.max_episode_tokens=48": "max_episode_tokens is 48, but the model's context of 48 must hold a",
    "--model.episodes.max_turns=20": "max_turns=20 takes",
    "--model.episodes.max_turns=20 --model.episodes.max_episode_tokens=0": "exceeds the model's context of 48",
    "--model.max_tokens_per_microbatch=20": "max_tokens_per_microbatch is 20, but an episode may have 32 tokens",
    "--model.episodes.rewards_see=all": "last_action or exchange",
    "--model.episodes.step_timeout_s=0": "step_timeout_s must be positive",
    f"--model.algorithm.terms.steps={TERMS}.process.ProcessSupervision": "would each make the advantages",
    "--model.environment=null": "there is no model.environment",
    "--model.environment.class_path=grpo_pl.extras.agents.gymnasium_ids.GymnasiumEnvironment "
    "--model.environment.init_args.id=FrozenLik-v1": "FrozenLik",
}


@pytest.mark.parametrize("flags", BAD, ids=lambda flags: flags[8:40])
def test_bad_input_is_one_line_before_the_first_rollout(command_line: Any, no_process_left: None, flags: str) -> None:
    outcome = command_line("fit", f"--config={CONFIG}", *flags.split(), "--name=bad")
    assert outcome.status != 0
    lines = [line for line in outcome.err.splitlines() if "error" in line]
    assert len(lines) == 1 and BAD[flags] in lines[0], outcome.err
    assert not (command_line.runs / "bad").exists()


def _asked(folder: Path, *rows: dict[str, Any]) -> list[str]:
    """Flags for prompts from a table; one held-out problem."""
    asked, held_out = folder / "rows.jsonl", folder / "val.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out.write_text(json.dumps({"question": "99", "answer": "1", "start": 3}) + "\n")
    arguments = {"path": str(asked), "val_path": str(held_out), "val_share": 0.0}
    source = {"class_path": "grpo_pl.data.tables.TablePrompts", "init_args": arguments}
    return [f"--data.source={json.dumps(source)}", "--model.cold_start=null", "--trainer.limit_val_batches=0"]


NUMBERS = [{"question": str(number), "answer": "1", "start": number} for number in range(2, 10)]


def test_prompts_without_room_for_an_episode_are_left_out(command_line: Any, tmp_path: Path) -> None:
    # a context of 48 holds an episode of 32 tokens behind 16: those of a completion of 4 would be 44
    flags = _asked(tmp_path, *NUMBERS, {"question": "1" * 17, "answer": "1", "start": 3})
    outcome = command_line.done("fit", f"--config={CONFIG}", *flags, "--data.steps=1", "--name=room")
    assert "1 of 9 train prompts leave no room for a completion and are left out: the model's context has 16" in (
        outcome.err
    )
    outcome = command_line("fit", f"--config={CONFIG}", *flags, "--model.max_tokens_per_microbatch=32", "--name=small")
    assert outcome.status == 1 and "an episode may have 33 tokens: set it to 48 at least" in outcome.err


def test_prompts_that_lack_a_column_are_refused(command_line: Any, tmp_path: Path) -> None:
    lakes = {"id": "FrozenLake-v1", "from_row": ["desc"]}
    spec = {"class_path": "grpo_pl.extras.agents.gymnasium_ids.GymnasiumEnvironment", "init_args": lakes}
    flags = [*_asked(tmp_path, *NUMBERS), f"--model.environment={json.dumps(spec)}", "--name=lakes"]
    outcome = command_line("fit", f"--config={CONFIG}", *flags)
    assert outcome.status == 1 and "the environment needs the column 'desc', and prompt" in outcome.err
    assert not (command_line.runs / "lakes").exists()


def test_a_run_in_which_every_episode_fails_ends(command_line: Any, tmp_path: Path) -> None:
    flags = _asked(tmp_path, *({**row, "fate": "no reset"} for row in NUMBERS))
    fated = "--model.environment={class_path: user_environments.Fated, init_args: {isolation: thread}}"
    outcome = command_line("fit", f"--config={CONFIG}", *flags, fated, "--data.steps=1", "--name=failing")
    assert outcome.status == 1 and "Traceback" not in outcome.err
    assert "of rollout 1 has a value; the first:" in outcome.err


def test_a_template_that_rewrites_earlier_turns_is_refused_before_the_run(
    command_line: Any, tmp_path: Path, no_process_left: None
) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}<{{ m.role }}>{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    policy = yaml.safe_load(CONFIG.read_text())["model"]["policy"]
    load_model(PolicyConfig(**policy), tokenizer).save_pretrained(tmp_path / "forgetful")
    tokenizer.save_pretrained(tmp_path / "forgetful")
    flags = [f"--model.policy.path={tmp_path / 'forgetful'}", "--model.policy.from_scratch=null"]
    outcome = command_line("fit", f"--config={CONFIG}", *flags, "--name=forgetful")
    assert outcome.status == 1
    (line,) = [line for line in outcome.err.splitlines() if "error" in line]
    assert "the chat template of" in line and "writes earlier turns differently" in line
    assert not (command_line.runs / "forgetful").exists()


@pytest.mark.parametrize(
    ("class_path", "arguments"),
    [
        ("gymnasium_ids.GymnasiumEnvironment", {"id": "somebody.module:World-v0"}),
        ("gymnasium_ids.GymnasiumEnvironment", {"id": "FrozenLake-v1", "observe": "somebody.module:show"}),
        ("gymnasium_ids.GymnasiumEnvironment", {"id": "FrozenLake-v1", "observe": "grpo_pl.extras.agents:x.y"}),
        ("gymnasium_ids.GymnasiumEnvironment", {"id": "FrozenLake-v1", "isolation": "thread", "parse": "cProfile.run"}),
        ("gymnasium_ids.GymnasiumEnvironment", {"id": "HalfCheetah-v5", "kwargs": {"xml_file": "/etc/passwd"}}),
        ("gymnasium_ids.GymnasiumEnvironment", {"id": "FrozenLake-v1", "parse": {"class_path": "theirs.Parse"}}),
        ("textarena_games.TextArenaEnvironment", {"id": "GuessTheNumber-v0", "observe": "os.system"}),
        ("textarena_games.TextArenaEnvironment", {"id": "GuessTheNumber-v0", "kwargs": {"a": [["file"]]}}),
        ("tools.ToolEnvironment", {"tools": ["grpo_pl.extras.agents.calculator:calc", "theirs.py:calc"]}),
        ("tools.ToolEnvironment", {"tools": ["os.system"]}),
        ("tools.ToolEnvironment", {"tools": "os.system"}),
        ("tools.ToolEnvironment", {"tools": [], "parser": "theirs.Calls"}),
        ("tools.ToolEnvironment", {"tools": [], "parser.class_path": "theirs.Calls"}),
        ("tools.ToolEnvironment", {"tools": ["a:b"], "parser": {"class_path": "theirs.Calls"}}),
        ("openenv_http.OpenEnvEnvironment", {"urls": ["http://localhost:1"]}),
        ("trl_factory.TRLEnvironment", {"factory": "grpo_pl.extras.agents.calculator:calc"}),
    ],
)
def test_code_of_others_is_not_built_without_trust(class_path: str, arguments: dict[str, Any]) -> None:
    spec = {"class_path": f"grpo_pl.extras.agents.{class_path}", "init_args": arguments}
    with pytest.raises(Untrusted, match="--trust-rewards"):
        build_environment(spec)


def test_our_own_environments_are_built_from_an_export() -> None:
    parser = {"class_path": "grpo_pl.extras.agents.tool_calls.TagCalls", "init_args": {"error": "<no>{text}</no>"}}
    made = ToolEnvironment(tools=["grpo_pl.extras.agents.calculator:calc"])
    spec = made.spec() | {"init_args": {**made.spec()["init_args"], "parser": parser}}
    built = build_environment(spec)
    assert isinstance(built, ToolEnvironment) and built.spec()["init_args"]["tools"] == spec["init_args"]["tools"]
    assert built.step("<calc>6*7</calc>")[0] == "<result>42</result>"
    built.shutdown()
