"""``grpo-pl doctor`` on real runs: silence on a healthy one, and each planted fault by its code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.tokenizer import character_tokenizer
from tests.conftest import TINY_POLICY, CommandLine, Outcome

SOURCE = "doctor_tasks.FirstLetters"
EXACT = {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}
FORM = {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"weight": 0.1, "partial": True}}
UNPAID = {**EXACT, "init_args": {"correctness": True, "weight": 0.0}}
COLD_START = {"steps": 100, "batch_size": 16, "lr": 0.01}
HEALTHY: dict[str, Any] = {
    "data__source": {"class_path": SOURCE},
    "data__val_prompts": 50,
    "data__prompts_per_step": 8,
    "data__steps": 100,
    "model__optimization": {"lr": 3e-3, "warmup_rollouts": 0, "schedule": "constant"},
    "model__sampling": {"max_completion_length": 20},
    "model__cold_start": COLD_START,
}


def _doctor(command_line: CommandLine, *options: object, **changed: Any) -> tuple[Outcome, dict[str, Any]]:
    config = command_line.config("ill", **{**HEALTHY, **changed})
    outcome = command_line("doctor", "--config", config, "--json", *options)
    assert outcome.out.startswith("{"), outcome.err
    return outcome, json.loads(outcome.out)


def _codes(report: dict[str, Any]) -> list[str]:
    return [finding["code"] for finding in report["findings"]]


def _function(name: str, **arguments: Any) -> dict[str, Any]:
    arguments = {"function": f"doctor_tasks:{name}", "name": name, **arguments}
    return {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": arguments}


def _source(fault: str) -> dict[str, Any]:
    return {"data__source": {"class_path": SOURCE, "init_args": {"fault": fault}}}


def test_a_healthy_run_is_silent_shows_its_prompts_as_they_are_read_and_leaves_nothing_behind(
    command_line: CommandLine,
) -> None:
    before = set(command_line.folder.rglob("*")) | {command_line.folder / "ill.yaml"}
    outcome, report = _doctor(command_line, "--model.template.system=Take the first.")
    assert (outcome.status, report["findings"]) == (0, [])
    assert len(report["signs"]["rollouts"]) == 4
    left = set(command_line.folder.rglob("*")) - before
    assert [path for path in left if not path.is_relative_to(command_line.cache)] == []
    assert [len(one["answers"]) for one in report["shown"]] == [3, 3, 3]
    for one in report["shown"]:
        assert one["prompt"].startswith("Take the first.\n\n") and one["gold"] in one["prompt"]
        for answer in one["answers"]:
            assert (answer["reward"] >= 1.0) == (answer["status"] == "ok")
            assert (f"\\boxed{{{one['gold']}}}" in answer["text"]) == (answer["status"] == "ok")


FAULTS: list[Any] = [
    ("D02", _source("always a") | {"model__rewards": [EXACT], "model__cold_start": {**COLD_START, "steps": 150}}),
    ("D04", {"model__rewards": [_function("half", correctness=True)]}),
    ("D30", {"model__rewards": [_function("nothing", correctness=True)]}),
    ("D30", _source("wrong golds")),
    ("D30", {**_source("few wrong golds, own form"), "model__rewards": [_function("said", correctness=True)]}),
    ("D05", {"model__rewards": [UNPAID, _function("everything")]}),
    ("D06", {"model__rewards": [EXACT, _function("wrong_way", weight=3.0)]}),
    ("D07", {"model__sampling": {"max_completion_length": 20, "temperature": 0.02}}),
    ("D09", {"data__prompts_per_step": 1}),
    ("D10", {"model__sampling": {"max_completion_length": 6}}),
    ("D11", {"model__cold_start": None}),
    ("D20", {"model__policy__characters": "abcdefghijklmnopqrstuvwx{}\\"}),
    ("D21", _source("leaked")),
    ("D22", _source("repeated")),
    ("D25", {"data__val_prompts": 12}),
    ("D31", _source("unpaid demonstrations")),
    ("D32", {"model__rewards": [_function("everything", correctness=True)]}),
    ("D32", {"model__rewards": [EXACT, _function("shortest")]}),
    ("D33", {"model__rewards": [EXACT, _function("noisy", weight=0.5)]}),
    ("D40", {"model__optimization": {"lr": 1e-6}}),
    ("D41", {"model__optimization": {"lr": 0.3}}),
    ("D42", {"model__optimization": {"lr": 1e-5}, "model__policy__dtype": "bfloat16"}),
]
QUICK = {"D06", "D10", "D40"}


@pytest.mark.parametrize(
    ("code", "changed"),
    [pytest.param(*fault, marks=[] if fault[0] in QUICK else pytest.mark.slow) for fault in FAULTS],
)
def test_a_planted_fault_is_found(command_line: CommandLine, code: str, changed: dict[str, Any]) -> None:
    outcome, report = _doctor(command_line, **changed)
    assert code in _codes(report)
    assert outcome.status == 1
    if code == "D10":  # of a policy from scratch, which no example helps
        assert [one["fix"] for one in report["findings"] if one["code"] == code] == [""]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--model.template.user=Answer:", "template.user must contain '{question}'"),
        ("--model.sampling.temperature=0", "temperature is 0"),
    ],
)
def test_a_value_that_fit_refuses_is_a_finding(command_line: CommandLine, option: str, said: str) -> None:
    outcome, report = _doctor(command_line, option)
    (finding,) = report["findings"]
    assert (outcome.status, finding["code"]) == (1, "D00")
    assert said in finding["sentence"]


def test_a_metric_that_no_validation_measures_is_a_finding(command_line: CommandLine) -> None:
    outcome, report = _doctor(command_line, "--checkpoint.keep_best=1", "--checkpoint.monitor=val/typo")
    assert outcome.status == 1
    (finding,) = [one for one in report["findings"] if one["code"] == "D00"]
    assert "no validation measures 'val/typo'" in finding["sentence"]


@pytest.mark.parametrize("option", ["--model.optimization.rl=1", "--rollouts=2", "--seconds=0.001", "--resume"])
def test_where_nothing_can_be_looked_at_the_status_is_2(command_line: CommandLine, option: str) -> None:
    outcome = command_line("doctor", "--config", command_line.config("ill", **HEALTHY), option)
    assert outcome.status == 2
    assert "Traceback" not in outcome.err and outcome.err


def test_findings_are_lines_for_people(command_line: CommandLine) -> None:
    config = command_line.config("ill", **{**HEALTHY, "data__val_prompts": 12})
    outcome = command_line("doctor", "--config", config)
    *shown, line, summary = outcome.out.splitlines()
    assert line.startswith("D25 few held-out problems: 12 ")
    assert line.endswith("Change data.val_prompts, or data.source (val_share).")
    assert summary.startswith("1 finding: 4 rollouts with 128 completions in ")
    heads = [re.sub(r"'\w'|[\d.]+", "0", text) for text in shown if not text.startswith("  |")]
    answer = re.compile("answer 0, reward 0, (ok|wrong|no_answer)(, cut off)?:")
    assert [text for text in heads if not answer.fullmatch(text)] == ["prompt 0 of 0, gold answer 0:"] * 3
    assert len(heads) == 3 + 9


def _pretrained(command_line: CommandLine, folder: Path, **changed: Any) -> dict[str, Any]:
    """A policy that is in a folder, and knows nothing."""
    tokenizer = character_tokenizer(["<think>", "</think>", "<answer>", "</answer>"])
    tokenizer.save_pretrained(folder)
    policy = PolicyConfig(from_scratch={**TINY_POLICY, "max_position_embeddings": 256})
    load_model(policy, tokenizer).save_pretrained(folder)
    return {"model__policy": {"path": str(folder)}, "model__cold_start": None, **changed}


@pytest.mark.slow
def test_a_pretrained_policy_without_the_form_gets_yaml_to_paste(command_line: CommandLine, tmp_path: Path) -> None:
    changed = _pretrained(command_line, tmp_path / "model")
    _, report = _doctor(command_line, **changed)
    (finding,) = [one for one in report["findings"] if one["code"] == "D11"]
    fix, comment = finding["fix"].partition("# Or, instead")[::2]
    assert "a cold start on 400 demonstrations of the data set" in comment
    (command_line.folder / "fix.yaml").write_text(fix)
    tree = yaml.safe_load(fix)["model"]
    assert [len(example["completion"]) > 0 for example in tree["template"]["examples"]] == [True, True]
    cold = yaml.safe_load("\n".join(line.removeprefix("# ") for line in comment.splitlines()[1:]))
    assert cold == {"model": {"cold_start": {"steps": 50, "batch_size": 8}}}
    _, again = _doctor(command_line, "--config", command_line.folder / "fix.yaml", **changed)
    (shown, *_) = again["shown"]
    assert all(example["completion"] in shown["prompt"] for example in tree["template"]["examples"])
    text = command_line("doctor", "--config", command_line.config("ill", **{**HEALTHY, **changed})).out
    assert "\n    model:\n      template:\n        examples:\n" in text


SHIPPED = ["quickstart", "countdown_search", "code_tiny", "sorting"]
SHIPPED += ["guess_number", "frozen_lake", "calculator"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_configuration_is_silent(command_line: CommandLine, name: str) -> None:
    outcome = command_line("doctor", "--config", f"configs/{name}.yaml")
    said = [line for line in outcome.out.splitlines() if line.startswith("D")]
    assert (outcome.status, said) == (0, []), outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["countdown", "reasoning_gym_mixture"])
def test_problems_and_rewards_of_a_shipped_configuration_are_sound(command_line: CommandLine, name: str) -> None:
    """With a new policy in the place of the one to download, which knows no form and few characters."""
    config = command_line.config("stand_in")
    stand_in = {"trainer": {"accelerator": "cpu", "precision": "32-true"}}
    policy = {"path": None, "from_scratch": {**TINY_POLICY, "max_position_embeddings": 2048}, "characters": "from_data"}
    stand_in["model"] = {"policy": policy, "sampling": {"max_completion_length": 48}}
    config.write_text(yaml.safe_dump(stand_in))
    outcome = command_line("doctor", "--config", f"configs/{name}.yaml", "--config", config, "--json")
    assert set(_codes(json.loads(outcome.out))) <= {"D01", "D11"}, outcome.out


@pytest.mark.slow
def test_problems_that_are_too_hard(command_line: CommandLine) -> None:
    task = "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"
    changed = {
        "data__source": {"class_path": task, "init_args": {"digits": 6, "min_digits": 6, "scratchpad_share": 0.0}},
        "model__rewards": [EXACT],
        "model__sampling": {"max_completion_length": 32},
    }
    _, report = _doctor(command_line, **changed)
    assert _codes(report) == ["D01"]


def _table(folder: Path, rows: list[dict[str, str]], name: str) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.slow
def test_prompts_longer_than_the_context(command_line: CommandLine, tmp_path: Path) -> None:
    rows = [{"question": f"{a}{b}xyz", "answer": a} for a in "abcdefgh" for b in "ijklmnop"]
    long = [{"question": "a" * 40, "answer": "a"}]
    arguments = {"path": _table(tmp_path, rows + long, "all"), "val_share": 0.2}
    source = {"class_path": "grpo_pl.data.tables.TablePrompts", "init_args": arguments}
    _, report = _doctor(command_line, data__source=source, model__cold_start=None)
    assert "D23" in _codes(report)


@pytest.fixture(scope="module")
def trained(command_line: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The healthy policy after its cold start."""
    _doctor(command_line)
    config = command_line.config("trained", **HEALTHY)
    command_line.done("fit", "--config", config, "--data.steps=1")
    return Path(command_line.runs / "trained" / "export")


def _changed(trained: Path, folder: Path, **changed: Any) -> dict[str, Any]:
    """A configuration that starts from ``trained`` with another tokenizer and no end token of its own."""
    tokenizer, model = AutoTokenizer.from_pretrained(trained), AutoModelForCausalLM.from_pretrained(trained)
    if "eos_token" in changed:
        tokenizer.eos_token = changed["eos_token"]
    tokenizer.chat_template = changed.get("chat_template")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return {"model__policy": {"path": str(folder)}, "model__cold_start": None}


@pytest.mark.slow
def test_an_end_token_that_the_model_cannot_draw(command_line: CommandLine, trained: Path, tmp_path: Path) -> None:
    _, report = _doctor(command_line, **_changed(trained, tmp_path / "endless", eos_token="<end>"))
    assert _codes(report) == ["D00"] and "'<end>' in eos_token, has none" in report["findings"][0]["sentence"]


@pytest.mark.slow
def test_a_model_and_a_tokenizer_without_an_end_token(command_line: CommandLine, trained: Path, tmp_path: Path) -> None:
    outcome, report = _doctor(command_line, **_changed(trained, tmp_path / "endless", eos_token=None))
    assert "D12" in _codes(report) and "No end token" in outcome.err


@pytest.mark.slow
def test_a_chat_template_that_leaves_the_question_out(command_line: CommandLine, trained: Path, tmp_path: Path) -> None:
    _, report = _doctor(command_line, **_changed(trained, tmp_path / "deaf", chat_template="Answer this:"))
    assert "D24" in _codes(report)
