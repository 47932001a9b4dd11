"""Characters of data, template and demonstrations that a from-scratch vocabulary holds, lacks or collects."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.tasks.arithmetic import ArithmeticPrompts
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import CHARACTERS, known_characters
from grpo_pl.policy.trained import find_model
from grpo_pl.training.cold_start import ColdStart
from grpo_pl.training.demonstrated import DemonstrationBatches
from grpo_pl.training.vocabulary import with_collected_characters
from grpo_pl.types import Problem
from tests.conftest import TINY_POLICY

LINES = "grpo_pl.data.json_lines.JsonLinesPrompts"


class Accented(ArithmeticPrompts):
    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        return "é"


def _rows(count: int = 12) -> list[dict[str, str]]:
    return [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(count)]


def _source(folder: Path, rows: list[dict[str, str]], **arguments: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"class_path": LINES, "init_args": {"path": str(file), "val_share": 0.3, **arguments}}


def _shown(folder: Path, *completions: str) -> dict[str, Any]:
    file = folder / "shown.jsonl"
    lines = [{"prompt": f"{100 + i}+1=", "completion": text} for i, text in enumerate(completions)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"steps": 2, "batch_size": 2, "demonstrations": str(file)}


def _fit(command_line: Any, name: str, *arguments: str, **changes: Any) -> Any:
    small = {"model__sampling": {"max_completion_length": 12}, "model__validation": {"samples": 2}, "data__steps": 1}
    return command_line("fit", "--config", command_line.config(name, **{**small, **changes}), *arguments)


def test_characters_that_are_lacking_are_counted_and_named(command_line: Any, tmp_path: Path) -> None:
    rows = [*_rows(), {"question": "5×5=", "answer": "25"}, {"question": "½+½=", "answer": "1¹"}]
    refused = _fit(
        command_line,
        "lacking",
        data__source=_source(tmp_path, rows, val_share=0.0),
        data__validation_sets={"x": {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"}},
        model__cold_start=_shown(tmp_path, "fine", "naïve"),
        model__rewards=[{"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}],
    )
    assert refused.status == 1
    (line,) = refused.err.splitlines()
    for part in (
        "'×' (U+00D7)",
        "'½' (U+00BD)",
        "'ï' (U+00EF)",
        "2 of 14 train prompts",
        "1 of 14 train gold answers",
        "1 of 2 demonstrations",
        "from_data",
    ):
        assert part in line
    assert not (command_line.runs / "lacking").exists()


def test_characters_of_the_template_count(command_line: Any) -> None:
    refused = _fit(command_line, "template", model__template={"user": "«{question}»"})
    assert refused.status == 1 and "'«' (U+00AB), '»' (U+00BB), in " in refused.err and "bad_rows" not in refused.err


def test_rows_with_lacking_characters_are_left_out_where_they_may(command_line: Any, tmp_path: Path) -> None:
    rows = [*_rows(), {"question": "5×5=", "answer": "25"}]
    source = _source(tmp_path, rows, bad_rows="drop", val_share=0.0)
    sets = {"x": {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts"}}
    changes = {"data__source": source, "data__validation_sets": sets, "model__cold_start": None}
    outcome = _fit(command_line, "drop", "--checkpoint.monitor=val/x/pass@1", **changes)
    assert outcome.status == 0, outcome.err
    assert "'×' (U+00D7), in 1 of 13 train prompts" in outcome.err and "left out" in outcome.err


def test_a_tag_may_hold_characters_of_its_own() -> None:
    policy = PolicyConfig(from_scratch=TINY_POLICY, characters="0123456789+=", tags=["<think>"])
    assert known_characters(load_tokenizer(policy)) == set("0123456789+=")


def test_characters_are_collected_from_everything_that_is_read_or_written(tmp_path: Path) -> None:
    source = JsonLinesPrompts(**_source(tmp_path, [*_rows(), {"question": "é?", "answer": "ß"}])["init_args"])
    shown = ColdStart(**_shown(tmp_path, "ü\t"))
    policy = PolicyConfig(from_scratch=TINY_POLICY, characters="from_data")
    template = PromptTemplate(system="→", user="{question} 😀")
    found = with_collected_characters(policy, template, RolloutDataModule(source), shown)
    assert found.characters == CHARACTERS + "".join(sorted("éßü\t→😀"))
    assert with_collected_characters(found, template, RolloutDataModule(source), None) is found
    batches = DemonstrationBatches(file=shown.demonstrations)
    also = with_collected_characters(policy, template, RolloutDataModule(source), None, demonstrations=batches)
    assert also.characters == found.characters
    own = with_collected_characters(
        policy,
        template,
        RolloutDataModule(Accented(), steps=1, prompts_per_step=2),
        None,
        demonstrations=DemonstrationBatches(),
    )
    assert own.characters == CHARACTERS + "".join(sorted("é→😀"))


def test_collected_characters_stay_those_of_the_run(command_line: Any, tmp_path: Path) -> None:
    rows = [*_rows(), {"question": "é\u2028\x85+1=", "answer": "2"}]
    changes: dict[str, Any] = {
        "data__source": _source(tmp_path, rows),
        "model__policy": {"from_scratch": TINY_POLICY, "characters": "from_data"},
        "model__cold_start": None,
    }
    first = _fit(command_line, "frozen", **changes)
    assert first.status == 0, first.err
    run = command_line.runs / "frozen"
    wanted = CHARACTERS + "".join(sorted("é\u2028\x85"))
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["policy"]["characters"] == wanted
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["characters"] == wanted
    for place in (run / "export", run / "checkpoints" / "last.ckpt"):
        tokenizer = find_model(place).tokenizer
        assert tokenizer.get_vocab()["é"] == 3 + wanted.index("é") and known_characters(tokenizer) == set(wanted)
    _source(tmp_path, [*rows, {"question": "ñ+1=", "answer": "2"}])  # the data change; the run's characters do not
    resumed = _fit(command_line, "frozen", "--resume", "--data.steps=2", **changes)
    assert resumed.status == 1 and "'ñ' (U+00F1)" in resumed.err
    _source(tmp_path, rows[:-1])
    resumed = _fit(command_line, "frozen", "--resume", "--data.steps=2", "--data.allow_changed=true", **changes)
    assert resumed.status == 0, resumed.err
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["policy"]["characters"] == wanted
    validated = command_line(
        "validate", "--config", command_line.folder / "frozen.yaml", "--ckpt_path", run / "checkpoints" / "last.ckpt"
    )
    assert validated.status == 0, validated.err


@pytest.mark.parametrize("allowed", [False, True])
def test_demonstrations_of_held_out_problems_are_refused(command_line: Any, tmp_path: Path, allowed: bool) -> None:
    source = _source(tmp_path, _rows(20))
    leaked = JsonLinesPrompts(**source["init_args"]).validation()[0].question
    file = tmp_path / "leak.jsonl"
    lines = [{"prompt": "100+1=", "completion": "101"}, {"prompt": f"  {leaked}\n", "completion": "0"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcome = _fit(
        command_line,
        f"leak-{allowed}",
        data__source=source,
        data__allow_overlap=allowed,
        model__cold_start={"steps": 1, "batch_size": 2, "demonstrations": str(file)},
    )
    if allowed:
        assert outcome.status == 0, outcome.err
        return
    assert outcome.status == 1 and not (command_line.runs / "leak-False").exists()
    assert f"1 of {len(JsonLinesPrompts(**source['init_args']).validation())} problems of val are shown" in outcome.err
    assert repr(leaked) in outcome.err and "set data.allow_overlap to true" in outcome.err


@pytest.mark.slow
def test_demonstrations_that_predict_wrote_of_held_out_problems_are_refused(command_line: Any, tmp_path: Path) -> None:
    from grpo_pl.cli.commands.predict import predict

    source = _source(tmp_path, _rows(20))
    first = _fit(command_line, "teacher", data__source=source, model__cold_start=None)
    assert first.status == 0, first.err
    file = tmp_path / "predicted.jsonl"
    predict(model=str(command_line.runs / "teacher"), output=str(file), split="val", samples=1, device="cpu")
    shown = {"steps": 1, "batch_size": 2, "demonstrations": str(file)}
    refused = _fit(command_line, "student", data__source=source, model__cold_start=shown)
    assert refused.status == 1 and "shown by the cold start's demonstrations" in refused.err
