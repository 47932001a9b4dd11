"""Mistakes that are found before a run costs anything: one line, status 1, no run folder."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from grpo_pl.policy.loading import PolicyConfig, load_model
from tests.conftest import TINY_POLICY

TABLE = "grpo_pl.data.tables.TablePrompts"
TWO_DIGITS = {
    "class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts",
    "init_args": {"digits": 2, "min_digits": 2},
}
MATH = {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True, "workers": 1}}


def _source(folder: Path, rows: Sequence[Mapping[str, Any]], **arguments: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"class_path": TABLE, "init_args": {"path": str(file), "val_share": 0.3, **arguments}}


def _sums(count: int) -> list[dict[str, str]]:
    return [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(count)]


def _refused(command_line: Any, **changes: Any) -> str:
    runs_before = sorted(command_line.runs.glob("*"))
    outcome = command_line("fit", "--config", command_line.config("refused", **changes))
    assert outcome.status == 1
    assert sorted(command_line.runs.glob("*")) == runs_before
    (line,) = outcome.err.splitlines()
    assert line.startswith("grpo-pl fit: error: ")
    return str(line)


@pytest.mark.parametrize("option", ["model", "data set"])
def test_without_a_network_an_unknown_name_is_refused_at_once(
    command_line: Any, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    unknown = {"class_path": TABLE, "init_args": {"path": "nobody/no-such-thing"}}
    changes = {"model__policy": {"path": "nobody/no-such-thing"}} if option == "model" else {"data__source": unknown}
    line = _refused(command_line, **changes)
    assert "'nobody/no-such-thing'" in line and "cannot load the" in line


def test_columns_rows_and_lengths_are_looked_at(command_line: Any, tmp_path: Path) -> None:
    def refused(rows: list[dict[str, str]], **arguments: Any) -> str:
        return _refused(command_line, model__cold_start=None, data__source=_source(tmp_path, rows, **arguments))

    assert "has no column 'problem'; its columns are question, answer" in refused(_sums(9), question="problem")
    assert "lower data.prompts_per_step" in refused(_sums(4))
    assert "no held-out problems" in refused(_sums(9), val_share=0.0)
    assert "is empty" in refused([])
    long = [{"question": "1" * 40 + str(i), "answer": "1"} for i in range(9)]
    assert "prompts leave no room for a completion: the model's context has 16 tokens" in refused(long)


def test_prompts_too_long_for_the_context_are_left_out_and_counted(command_line: Any, tmp_path: Path) -> None:
    long = [{"question": "1" * 17, "answer": "1"}, {"question": "1" * 16, "answer": "1"}]
    source = _source(tmp_path, [*_sums(12), *long], val_share=0.0, val_path=str(tmp_path / "val.jsonl"))
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": "x", "answer": "1"}))
    config = command_line.config("long", model__cold_start=None, data__source=source, data__steps=1)
    outcome = command_line.done("fit", "--config", config)
    assert outcome.err.startswith(
        "1 of 14 train prompts leave no room for a completion and are left out: "
        "the model's context has 16 tokens beside max_completion_length."
    )


def test_gold_answers_that_cannot_be_judged_against_are_refused_or_left_out(command_line: Any, tmp_path: Path) -> None:
    rows = [*_sums(24), {"question": "a", "answer": r"\frac{1}{0}"}, {"question": "b", "answer": "nan"}]
    line = _refused(command_line, model__cold_start=None, model__rewards=[MATH], data__source=_source(tmp_path, rows))
    assert "gold answers cannot be judged against: row " in line and "bad_rows to drop" in line
    source = _source(tmp_path, rows, bad_rows="drop")
    changes = {"model__cold_start": None, "model__rewards": [MATH], "data__source": source, "data__steps": 1}
    outcome = command_line.done("fit", "--config", command_line.config("dropped", **changes))
    assert sum("; left out." in line for line in outcome.err.splitlines()) >= 1


CONFUSED = """
from dataclasses import dataclass, replace
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts

@dataclass(kw_only=True)
class Confused(ArithmeticPrompts):
    def prompts(self, step, attempt=0, *, count):
        return [replace(prompt, id=7) for prompt in super().prompts(step, attempt, count=count)]
"""


def test_two_training_problems_of_one_id_are_refused(
    command_line: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "confused_source.py").write_text(CONFUSED)
    monkeypatch.syspath_prepend(tmp_path)
    source = {"class_path": "confused_source.Confused", "init_args": {"digits": 2}}
    line = _refused(command_line, data__source=source, model__cold_start=None)
    assert "two problems of the first rollout have the id 7: '" in line


def test_every_part_of_a_mixture_is_looked_at_by_its_own_rules(command_line: Any, tmp_path: Path) -> None:
    rows = [*_sums(24), {"question": "a", "answer": "nan"}, {"question": "1" * 17, "answer": "1"}]
    table = _source(tmp_path, rows, val_share=0.0, val_path=str(tmp_path / "val.jsonl"), bad_rows="drop")
    (tmp_path / "val.jsonl").write_text(json.dumps({"question": "x", "answer": "1"}))
    parts = {"read": table, "made_up": TWO_DIGITS}
    mixture = {"class_path": "grpo_pl.data.mixture.MixturePrompts", "init_args": {"parts": parts}}
    changes = {"model__cold_start": None, "model__rewards": [MATH], "data__source": mixture}
    config = command_line.config("mixed", **changes)
    outcome = command_line.done("validate", "--config", config)
    assert "read: 1 of 26 train prompts leave no room for a completion" in outcome.err
    assert "read: train: 1 of 25 gold answers cannot be judged against: row 24: 'nan'" in outcome.err
    assert "val/made_up/pass@1" in outcome.out


def test_the_best_checkpoint_is_chosen_by_a_metric_that_there_is(command_line: Any) -> None:
    config = command_line.config("monitored", data__validation_sets={"more": TWO_DIGITS}, data__steps=1)
    outcome = command_line("fit", "--config", config, "--checkpoint.monitor=val/moer/pass@1")
    assert outcome.status == 1
    assert "no validation measures 'val/moer/pass@1'; did you mean val/more/pass@1?" in outcome.err
    assert not (command_line.runs / "monitored").exists()
    command_line.done("fit", "--config", config, "--checkpoint.monitor=val/more/mean_length")
    assert (command_line.runs / "monitored" / "checkpoints" / "best.ckpt").exists()


NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
CHAT = NO_SYSTEM + "{{ m.content }}<|e|>{% endfor %}"


@pytest.fixture(scope="module")
def chatty(command_line: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Settings for a model whose chat template takes no system message and ends turns with a token of its own."""
    speech: Any = copy.deepcopy(tokenizer)
    speech.add_tokens([AddedToken("<|e|>", special=True, normalized=False)])
    speech.chat_template = CHAT
    folder = command_line.folder / "chatty"
    load_model(PolicyConfig(from_scratch=TINY_POLICY), speech).save_pretrained(folder)
    speech.save_pretrained(folder)
    return {"model__policy": {"path": str(folder)}, "model__cold_start": None, "data__steps": 1}


SYSTEM = {"role": "system", "content": "Add."}


def test_turns_that_the_chat_template_refuses_are_one_line_of_fit_and_a_finding_of_the_doctor(
    command_line: Any, tmp_path: Path, chatty: dict[str, Any]
) -> None:
    line = _refused(command_line, **chatty, model__template={"system": "Add."})
    assert "refuses messages of system, user: no system role" in line
    rows: list[dict[str, Any]] = [
        {"question": [*([SYSTEM] if i == 7 else []), {"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)}
        for i in range(12)
    ]
    line = _refused(command_line, **chatty, data__source=_source(tmp_path, rows, val_share=0.2))
    assert " prompt 7: the chat template of " in line and "refuses messages of system, user" in line
    some = _source(tmp_path, rows, val_share=0.2, bad_rows="drop")
    config = command_line.config("some", **chatty, data__source=some)
    assert (
        "1 of 9 train prompts are refused and left out; the first: prompt 7: the chat"
        in command_line.done("fit", "--config", config).err
    )
    assert "refused and left out" in command_line("doctor", "--config", config, "--rollouts=3").err
    all_of_them = _source(tmp_path, [{**row, "question": [SYSTEM, row["question"][-1]]} for row in rows],
                          val_share=0.2, bad_rows="drop")  # fmt: skip
    assert "refuses messages of system" in _refused(command_line, **chatty, data__source=all_of_them)
    changes = {"model__template": {"system": "Add."}}
    outcome = command_line("doctor", "--config", command_line.config("ill", **chatty, **changes), "--json")
    assert outcome.status == 1, outcome.err
    (finding,) = json.loads(outcome.out)["findings"]
    assert finding["code"] == "D00" and "refuses messages of system" in finding["sentence"]


def test_what_a_chat_template_does_is_told_by_fit_the_doctor_and_evaluate(
    command_line: Any, tmp_path: Path, chatty: dict[str, Any]
) -> None:
    told = "ends a turn with '<|e|>'"
    config = command_line.config("told", **chatty)
    assert told in command_line.done("fit", "--config", config).err
    assert told in command_line("doctor", "--config", config, "--rollouts=3").err
    problems, export = tmp_path / "problems.jsonl", command_line.runs / "told" / "export"
    problems.write_text('{"problem": "1+1=", "answer": "2"}\n')
    asked = ["evaluate", "--data", problems, "--model", export, "--n=1", "--output", tmp_path / "answers.jsonl"]
    assert told in command_line.done(*asked).err
    (export / "chat_template.jinja").write_text("{{ messages[0].text + 'the question' }}")
    outcome = command_line(*asked)
    assert outcome.status == 1
    (line,) = outcome.err.splitlines()
    assert "refuses messages of user" in line


def test_a_token_beyond_the_embedding_is_refused_with_both_sizes(
    command_line: Any, tmp_path: Path, chatty: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    larger, size = copy.deepcopy(tokenizer), len(tokenizer)
    load_model(PolicyConfig(from_scratch=TINY_POLICY), larger).save_pretrained(tmp_path / "small")
    larger.add_tokens(["<x>"])
    larger.save_pretrained(tmp_path / "small")
    changes = {**chatty, "model__policy": {"path": str(tmp_path / "small")}}
    rows = [*_sums(12), {"question": "<x>+1=", "answer": "2"}]
    line = _refused(command_line, **changes, data__source=_source(tmp_path, rows))
    assert f"has {size + 1} tokens and the model's embedding {size}: token {size}, '<x>' in " in line
    command_line.done("fit", "--config", command_line.config("larger", **changes))  # where nobody writes it
    larger.pad_token = "<x>"
    larger.save_pretrained(tmp_path / "small")
    assert "'<x>' in pad_token" in _refused(command_line, **changes)
