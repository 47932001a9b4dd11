"""What a run may not change when it goes on, seen before anything is written."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.json_lines import JsonLinesPrompts
from grpo_pl.data.mixture import MixturePrompts
from grpo_pl.data.tables import TablePrompts
from grpo_pl.policy.template import ANSWER_TAGS, THINK_TAGS
from tests.conftest import TINY_POLICY


def _state_of(folder: Path) -> dict[str, bytes | int]:
    return {
        str(path): path.read_bytes() if path.suffix in (".yaml", ".csv", ".jsonl", ".json") else path.stat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def run(command_line: Any) -> Path:
    config = command_line.config("once", data__steps=1)
    assert command_line("fit", "--config", config).status == 0
    return Path(command_line.runs / "once")


def test_an_empty_configuration_beside_the_checkpoint_is_as_none(command_line: Any, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "copied")
    (tmp_path / "copied" / "config.yaml").write_text("")
    checkpoint = tmp_path / "copied" / "checkpoints" / "last.ckpt"
    config = command_line.config("from_empty", data__steps=2)
    command_line.done("fit", "--config", config, f"--ckpt_path={checkpoint}")


@pytest.mark.parametrize(
    ("way", "policy", "change"),
    [
        ("--ckpt_path", {"from_scratch": {**TINY_POLICY, "hidden_size": 64}}, "from_scratch.hidden_size: 32 → 64"),
        ("--resume", {"from_scratch": {**TINY_POLICY, "num_hidden_layers": 2}}, "from_scratch.num_hidden_layers: 1 →"),
        ("--resume", {"from_scratch": {**TINY_POLICY, "rope_theta": 50.0}}, "from_scratch.rope_theta: unset → 50.0"),
        ("--resume", {"from_scratch": TINY_POLICY, "lora": {"rank": 2}}, "lora"),
        ("--resume", {"from_scratch": TINY_POLICY, "tags": [*THINK_TAGS, *ANSWER_TAGS, "<more>"]}, "tags: "),
    ],
)
def test_another_model_is_one_line_that_names_the_field_and_writes_nothing(
    command_line: Any, run: Path, way: str, policy: dict[str, Any], change: str
) -> None:
    before = _state_of(command_line.runs)
    config = command_line.config("once", data__steps=3, model__policy=policy)
    given = [way] if way == "--resume" else [f"{way}={run / 'checkpoints' / 'last.ckpt'}", "--name=new"]
    outcome = command_line("fit", "--config", config, *given)
    assert outcome.status == 1, outcome.err
    last = outcome.err.splitlines()[-1]
    assert "holds another model: " in last and f"model.policy.{change}" in last, last
    assert "Traceback" not in outcome.err
    assert _state_of(command_line.runs) == before


def test_a_checkpoint_without_its_configuration_names_the_weight(command_line: Any, run: Path, tmp_path: Path) -> None:
    path = tmp_path / "alone.ckpt"
    path.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    config = command_line.config("other", model__policy__from_scratch={**TINY_POLICY, "intermediate_size": 40})
    for verb in ("fit", "validate"):
        outcome = command_line(verb, "--config", config, f"--ckpt_path={path}")
        assert outcome.status == 1
        assert "mlp.gate_proj.weight has the shape (48, 32) there and (40, 32) in model.policy" in outcome.err


def test_what_does_not_concern_the_weights_may_change(command_line: Any, run: Path) -> None:
    config = command_line.config("once", data__steps=2, model__policy__attn_implementation="eager")
    command_line.done("fit", "--config", config, "--resume")
    assert "attn_implementation: eager" in (run / "config.yaml").read_text()
    assert (run / "config.1.yaml").exists()


def test_a_state_that_cannot_be_taken_over_leaves_the_configuration(command_line: Any, run: Path) -> None:
    """Whatever fails after the checks, such as an optimiser of another shape."""
    last = (run / "checkpoints" / "last.ckpt").resolve()
    whole = last.read_bytes()
    state = torch.load(last, weights_only=True)
    state["optimizer_states"][0]["param_groups"] = []
    torch.save(state, last)
    before = (run / "config.yaml").read_text()
    outcome = command_line(
        "fit", "--config", command_line.config("once"), f"--ckpt_path={last}", "--data.steps=3", "--name=once"
    )
    assert outcome.status != 0
    assert (run / "config.yaml").read_text() == before
    last.write_bytes(whole)


# --- data -------------------------------------------------------------------------------------------------------------

ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 7) for b in range(3)]


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(str(path))


def _changed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [*rows[:-1], {**rows[-1], "answer": "0"}]


def _data(source: Any, **more: Any) -> RolloutDataModule:
    return RolloutDataModule(source, prompts_per_step=2, **more)


def _kinds(folder: Path) -> Iterator[tuple[Path, Any]]:
    for suffix in ("jsonl", "json", "csv", "parquet"):
        yield folder / f"rows.{suffix}", lambda suffix=suffix: TablePrompts(path=str(folder / f"rows.{suffix}"))
    yield folder / "lines.jsonl", lambda: JsonLinesPrompts(path=str(folder / "lines.jsonl"))
    (folder / "tree").mkdir()
    yield folder / "tree" / "train.csv", lambda: TablePrompts(path=str(folder / "tree"))


def test_every_kind_of_file_is_known_by_what_it_holds(tmp_path: Path) -> None:
    for file, source in _kinds(tmp_path):
        _write(file, ROWS)
        state = _data(source()).state_dict()
        _write(file, ROWS)  # written again, the same
        _data(source()).require_unchanged(state)
        for rows in (_changed(ROWS), ROWS[::-1], ROWS[:-1]):
            _write(file, rows)
            with pytest.raises(ValueError, match=r"data\.source\.train \(.*\) holds other rows than when this run"):
                _data(source()).require_unchanged(state)
            _data(source(), allow_changed=True).require_unchanged(state)


READ_BY_0_3 = [  # with the digests that version 0.3.0 wrote of these files
    (
        "a.jsonl",
        True,
        "5aedc5d4da2730ea4b336beab57b9196",
        '{"question": "a", "answer": "1.50"}\n{"question": "b", "answer": "2", "x": null}\n',
    ),
    (
        "a.jsonl",
        True,
        "a64d3623e8ca8fa4c2c835ddb22284d5",
        '{"question": "a", "answer": 1.5, "x": 1}\n{"question": "b", "answer": 2.25, "x": 2}\n',
    ),
    ("a.csv", True, "8fc9d16985746874ea44c140bc397b23", "question,answer\na,007\nb,1.50\n"),
    (
        "a.jsonl",
        False,
        "23adc50869506e2c96a3cc4fa8293aaf",
        '{"question": "a", "answer": 1}\n{"question": "b", "answer": 2.5}\n',
    ),
    (
        "a.jsonl",
        False,
        "a67adec2dcb2265b8346816dfde49da3",
        '{"question": "a", "answer": true}\n{"question": "b", "answer": false}\n',
    ),
    (
        "a.jsonl",
        False,
        "36f37404d7f1fbe789e681231bde0ad0",
        '{"question": "a", "answer": 123456789012345678901234567890}\n',
    ),
    ("a.csv", False, "0fb992449e832f3dfd6a41bc8f24b913", "question,answer,level\na,007,1\nb,1.50,2\n"),
    ("a/train.csv", False, "5f638275e9c39e05055b6a91922dee69", "question,answer\na,007\nb,12\n"),
]
"""A file's name, whether it is read the same by now, the digest, and its content."""


@pytest.mark.parametrize(("name", "same", "digest", "text"), READ_BY_0_3)
def test_a_run_of_0_3_whose_golds_are_read_otherwise_is_told_so(
    tmp_path: Path, name: str, same: bool, digest: str, text: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)

    def data(**more: Any) -> RolloutDataModule:
        return _data(TablePrompts(path=str(tmp_path / name.split("/")[0]), val_share=0.0), **more)

    state = {"digests": {"data.source.train": digest}}
    if same:
        data().require_unchanged(state)
    else:
        with pytest.raises(ValueError, match=r"data\.source\.train .* version 0\.3.* --data\.allow_changed=true"):
            data().require_unchanged(state)
        data(allow_changed=True).require_unchanged(state)
    now = data().state_dict()
    data().require_unchanged(now)
    (tmp_path / name).write_text(text + text.splitlines()[-1] + "\n")
    with pytest.raises(ValueError, match=r"holds other rows than when this run began: restore"):
        data().require_unchanged(now)


def test_parts_and_validation_sets_are_named(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("a", "b", "val", "set")}
    for number, file in enumerate(files.values()):
        _write(file, [{**row, "question": f"{number} {row['question']}"} for row in ROWS])

    def data() -> RolloutDataModule:
        parts = {
            "a": JsonLinesPrompts(path=str(files["a"]), val_path=str(files["val"])),
            "b": TablePrompts(path=str(files["b"])),
        }
        sets = {"far": JsonLinesPrompts(path=str(files["set"]))}
        return _data(MixturePrompts(parts=parts), validation_sets=sets)

    state = data().state_dict()
    data().require_unchanged(state)
    for name, place in [("b", "source.b.train"), ("val", "source.a.val"), ("set", "validation_sets.far.train")]:
        before = files[name].read_text()
        files[name].write_text(before.replace("8", "9"))
        with pytest.raises(ValueError, match=rf"^data\.{place} "):
            data().require_unchanged(state)
        files[name].write_text(before)


def test_a_run_whose_data_changed_is_refused_and_goes_on_if_told_to(command_line: Any, tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    _write(file, ROWS)
    source = {"class_path": "grpo_pl.data.json_lines.JsonLinesPrompts", "init_args": {"path": str(file)}}
    changes = {"data__source": source, "model__cold_start": None, "data__val_prompts": 1, "data__prompts_per_step": 2}
    config = command_line.config("data", data__steps=1, **changes)
    assert command_line("fit", "--config", config).status == 0
    run = command_line.runs / "data"
    before = _state_of(run)
    _write(file, _changed(ROWS))
    outcome = command_line("fit", "--config", config, "--resume", "--data.steps=2")
    assert outcome.status == 1 and "Traceback" not in outcome.err
    assert f"data.source.train ({file}) holds other rows than when this run began" in outcome.err.splitlines()[-1]
    assert _state_of(run) == before
    command_line.done("validate", "--config", config, f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}")
    command_line.done("fit", "--config", config, "--resume", "--data.steps=2", "--data.allow_changed=true")
