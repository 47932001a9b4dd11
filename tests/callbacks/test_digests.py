"""Digests that a run keeps: of the weights beside each checkpoint, of what it wrote, and in its export."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from grpo_pl.callbacks.digests import Digests
from grpo_pl.files.checkpoints import policy_weights
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.sharded_checkpoints import read_checkpoint
from grpo_pl.policy.weights import weights_digest, weights_in


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]


def _of_checkpoint(run: Path, rollouts: int) -> str:
    state = read_checkpoint(run / "checkpoints" / f"rollout-{rollouts:06d}.ckpt")
    return weights_digest(policy_weights(state).items())


def test_a_digest_is_that_of_names_types_shapes_and_bytes() -> None:
    one, two = torch.tensor([[1.0, 2.0]]), torch.tensor(3, dtype=torch.bfloat16)
    lines = [
        f"a torch.bfloat16 () {hashlib.sha256(bytes.fromhex('4040')).hexdigest()}\n",  # 3 as bfloat16, little-endian
        f"b torch.float32 (1, 2) {hashlib.sha256(bytes.fromhex('0000803f00000040')).hexdigest()}\n",
    ]
    assert weights_digest({"b": one, "a": two}.items()) == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert weights_digest({"b": one.T, "a": two}.items()) != weights_digest({"b": one, "a": two}.items())


def test_tied_weights_and_their_copies_have_one_digest() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    assert weights_digest([("a", weight), ("b", weight)]) == weights_digest([("a", weight), ("b", weight.clone())])
    assert weights_digest([("a", weight)]) != weights_digest([("a", weight.reshape(3, 2))])


def test_a_run_has_a_digest_of_its_start_of_each_checkpoint_and_of_its_completions(command_line: Any) -> None:
    config = command_line.config("digests", checkpoint={"every_n_rollouts": 3, "keep": 1, "keep_best": 0})
    command_line.done("fit", "--config", config, "--data.steps=6", "--trainer.val_check_interval=6")
    run = command_line.runs / "digests"
    assert [row["step"] for row in _rows(run) if "weights" in row] == [0, 1, 3, 4, 6]
    assert [row["step"] for row in _rows(run) if "token_ids" in row] == [1, 2, 3, 4, 5, 6]
    weights = RunFolder(run).weights_digests()
    assert len(set(weights.values())) == len(weights)
    assert weights[6] == _of_checkpoint(run, 6)
    written = hashlib.sha256((run / "completions.jsonl").read_bytes()).hexdigest()
    assert _rows(run)[-1]["completions"] == written
    assert all(0 <= row["seconds"] < 1 for row in _rows(run))


def test_recorded_completions_have_a_digest_of_their_token_ids(command_line: Any) -> None:
    config = command_line.config("tokens", completions={"groups_per_rollout": 2})
    command_line.done("fit", "--config", config)
    run = command_line.runs / "tokens"
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    digests = {
        (row["step"] - 1, prompt, sample): digest
        for row in _rows(run)
        for prompt, each in row.get("token_ids", [])
        for sample, digest in enumerate(each)
    }
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt_id"], row["sample"]) for row in rows] == list(digests)
    compared = 0
    for row in rows:
        ids = tokenizer.encode(row["completion"], add_special_tokens=False)
        ids += [tokenizer.eos_token_id] * (row["finish_reason"] == "stop")
        if len(ids) == row["tokens"]:  # a text has other tokens as well, and any of these may have been drawn
            digest = hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()[:12]
            assert digests[row["step"], row["prompt_id"], row["sample"]] == digest
            compared += 1
    assert compared > len(rows) / 2


def test_an_export_names_its_run_and_the_digest_of_its_weights(command_line: Any, tmp_path: Path) -> None:
    command_line.done("fit", "--config", command_line.config("named", checkpoint={"every_n_rollouts": 2}))
    run = command_line.runs / "named"
    told = json.loads((run / "export" / "grpo_pl.json").read_text())["run"]
    assert (told["name"], told["step"]) == ("named", 4)
    assert told["weights"] == RunFolder(run).weights_digests()[4]
    assert told["files"] == weights_digest(weights_in(run / "export"))
    assert told["weights"] in (run / "export" / "README.md").read_text()
    command_line.done("export", run / "checkpoints" / "rollout-000002.ckpt", tmp_path / "second")
    second = json.loads((tmp_path / "second" / "grpo_pl.json").read_text())["run"]
    assert (second["name"], second["step"]) == ("named", 2)
    assert second["weights"] == RunFolder(run).weights_digests()[2] and second["files"] != told["files"]
    command_line.done("export", tmp_path / "second", tmp_path / "third")  # of an export
    assert json.loads((tmp_path / "third" / "grpo_pl.json").read_text())["run"] == second


def test_a_resumed_run_keeps_what_came_before_and_writes_each_rollout_where_asked(command_line: Any) -> None:
    config = command_line.config("again", checkpoint={"every_n_rollouts": 2})
    command_line.done("fit", "--config", config, "--data.steps=2")
    run = command_line.runs / "again"
    before = RunFolder(run).weights_digests()
    command_line.done("fit", "--config", config, "--data.steps=4", "--resume", "--digests.every_n_rollouts=1")
    assert [row["step"] for row in _rows(run) if "weights" in row] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in _rows(run) if "token_ids" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in _rows(run) if "completions" in row] == [4]
    assert before.items() <= RunFolder(run).weights_digests().items()
    assert RunFolder(run).weights_digests()[4] == _of_checkpoint(run, 4)


def test_senseless_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="every_n_rollouts"):
        Digests(every_n_rollouts=-1)
