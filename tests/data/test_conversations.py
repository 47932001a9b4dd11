"""Data sets that ask with conversations, and data sets without gold answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.rows import RowPrompts
from grpo_pl.data.tables import TablePrompts


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("kind", [JsonLinesPrompts, TablePrompts])
def test_a_column_of_messages_is_read_as_a_conversation(kind: type[RowPrompts], jsonl: Callable[..., str]) -> None:
    one, two = said(("system", "Add."), ("user", "1+1=")), said(("user", "Hi"), ("assistant", "Yes?"), ("user", "2+2="))
    file = jsonl([{"prompt": one, "answer": "2"}, {"prompt": two, "answer": "4"}])
    first, second = kind(path=file, question="prompt", val_share=0.0).problems("train")
    assert (first.question, first.messages) == ("1+1=", tuple(one))
    assert (second.question, second.messages) == ("user: Hi\n\nassistant: Yes?\n\nuser: 2+2=", tuple(two))
    assert "prompt" not in first.columns and first.asked == tuple(one)


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        (said(("user", "1+1="), ("assistant", "2")), "the last message must be the user's"),
        (said(("user", "a"), ("system", "b"), ("user", "c")), "found 'system'"),
        (said(("user", "a"), ("tool", "b"), ("user", "c")), "found 'tool'"),
        (said(("user", "  ")), "must be a text"),
        ([{"role": "user", "content": 7}], "must be a text"),
        (said(("system", "only")), "the last message must be the user's"),
    ],
)
def test_a_conversation_that_cannot_be_asked_names_its_row(turns: Any, why: str, jsonl: Callable[..., str]) -> None:
    file = jsonl([{"prompt": turns, "answer": "2"}])
    with pytest.raises(ValueError, match=rf"line 1: .*{why}"):
        JsonLinesPrompts(path=file, question="prompt", val_share=0.0).problems("train")


def test_conversations_with_one_question_are_held_out_together(jsonl: Callable[..., str]) -> None:
    rows = [
        {"prompt": said(("system", f"You are {who}."), ("user", f"{n}+1=")), "answer": str(n + 1)}
        for who in "AB"
        for n in range(30)
    ]
    source = JsonLinesPrompts(path=jsonl(rows), question="prompt", val_share=0.3)
    train, val = ({prompt.question for prompt in source.problems(split)} for split in ("train", "val"))
    assert val and train and not train & val


def test_a_missing_answer_column_says_how_to_do_without(jsonl: Callable[..., str]) -> None:
    file = jsonl([{"question": "Say hello."}])
    for kind in (JsonLinesPrompts, TablePrompts):
        with pytest.raises(ValueError, match=r"no column 'answer'.*set data.source.answer to null"):
            kind(path=file, val_share=0.0).problems("train")
        (prompt,) = kind(path=file, val_share=0.0, answer=None).problems("train")
        assert prompt.answer == ""
    with pytest.raises(ValueError, match="answer is null, so answer_pattern"):
        JsonLinesPrompts(path=file, answer=None, answer_pattern="(x)")


REWARD = """
def brief(prompts, completions, **columns):
    assert all(turns[-1]["role"] == "user" for turns in columns["prompt_messages"]), columns["prompt_messages"]
    return [1.0 if len(text) % 2 else 0.0 for text in completions]
"""


def test_conversations_without_answers_train(command_line: Any, tmp_path: Path, jsonl: Callable[..., str]) -> None:
    (tmp_path / "brief.py").write_text(REWARD)
    rows = [{"prompt": said(("system", "Add."), ("user", f"{a}+{b}="))} for a in range(5) for b in range(5)]
    data = {
        "source": {
            "class_path": "grpo_pl.data.json_lines.JsonLinesPrompts",
            "init_args": {"path": jsonl(rows), "question": "prompt", "answer": None, "val_share": 0.3},
        },
        "steps": 2,
        "prompts_per_step": 2,
    }
    function = {"function": f"{tmp_path / 'brief.py'}:brief", "correctness": True}
    config = command_line.config(
        "talk",
        data=data,
        model__cold_start=None,
        model__rewards=[
            {"class_path": "grpo_pl.rewards.FunctionReward", "init_args": function},
            {"class_path": "grpo_pl.rewards.FormatReward"},
        ],
        model__sampling={"max_completion_length": 8},
    )
    command_line.done("fit", f"--config={config}")
    (row, *_) = map(json.loads, (command_line.runs / "talk" / "completions.jsonl").read_text().splitlines())
    assert row["prompt"].startswith("Add.\n\n") and row["answer"] == ""
    needy = yaml.safe_load(config.read_text())
    needy["model"]["rewards"].append({"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": False}})
    config.write_text(yaml.safe_dump(needy))
    refused = command_line("fit", f"--config={config}", "--name=needy")
    assert refused.status == 1 and "reward 'math' needs gold answers, and data.source.answer is null" in refused.err
