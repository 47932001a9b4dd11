"""``grpo-pl verify``: an export is proved by its run, and whatever was changed is named."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from grpo_pl.files.checkpoints import seal
from tests.conftest import CommandLine, Outcome, exit_status
from tests.extras.replay.test_moment import QUICKSTART

GROUPS = 4
"""Logged of each rollout, of eight completions each."""


@pytest.fixture(scope="module", autouse=True)
def _cache(command_line: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_PL_CACHE", str(command_line.cache))
        yield


@pytest.fixture(scope="module")
def proved(command_line: Any) -> Path:
    """A run of seven rollouts with checkpoints at 6 and 7."""
    command_line.done("fit", *QUICKSTART, "--checkpoint.keep=2", "--checkpoint.keep_best=0", "--name=proved")
    return Path(command_line.runs / "proved")


@pytest.fixture
def run(proved: Path, tmp_path: Path) -> Path:
    shutil.copytree(proved, tmp_path / "proved", symlinks=True)
    return tmp_path / "proved"


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """``verify(RUN)``, ``verify(EXPORT, "--run", RUN)``: the command, whose result is JSON."""

    def call(*arguments: object) -> Outcome:
        from grpo_pl.cli.main import main

        capsys.readouterr()
        status = exit_status(lambda: main(["verify", *map(str, arguments), "--json"]))
        printed = capsys.readouterr()
        return Outcome(status, printed.out, printed.err)

    return call


def _failed(outcome: Outcome) -> dict[str, str]:
    return {check["what"]: check["told"] for check in json.loads(outcome.out)["checks"] if check["held"] is False}


def test_the_export_of_a_run_is_proved_and_its_card_says_so(
    verify: Any, run: Path, command_line: CommandLine, tmp_path: Path
) -> None:
    outcome = verify(run)
    assert outcome.status == 0, outcome.out + outcome.err
    told = json.loads(outcome.out)
    assert told["proved"] and told["step"] == 7
    held = {check["what"]: check["held"] for check in told["checks"]}
    names = ["rollout-000006.ckpt", "rollout-000007.ckpt"]
    assert held == dict.fromkeys(
        [
            "completions.jsonl",
            *(f"checkpoint {name}" for name in names),
            "files of weights",
            "manifest",
            "weights",
            "rollout 7 again",
        ],
        True,
    )
    (again,) = (check["told"] for check in told["checks"] if check["what"] == "rollout 7 again")
    assert again.startswith(f"{GROUPS * 8} completions") and "before and after" in again
    assert f"token ids of {GROUPS * 8}" in again
    assert json.loads((run / "export" / "verified.json").read_text())["proved"]
    command_line.done("export", run, tmp_path / "second")
    assert "## Proof" in (tmp_path / "second" / "README.md").read_text()
    assert verify(tmp_path / "second", "--run", run).status == 0


def test_an_export_without_its_run_is_not_proved(verify: Any, run: Path) -> None:
    outcome = verify(run / "export")
    assert outcome.status == 1
    told = {check["what"]: (check["held"], check["told"]) for check in json.loads(outcome.out)["checks"]}
    assert told["files of weights"][0] and told["drawn twice"][0]
    assert told["run"][0] is None and "not proved: no run" in told["run"][1]


def _change_weight(run: Path) -> None:
    file = run / "export" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})


def _change_weight_and_its_digest(run: Path) -> None:
    from grpo_pl.policy.weights import weights_digest, weights_in

    _change_weight(run)
    manifest = json.loads((run / "export" / "grpo_pl.json").read_text())
    manifest["run"]["files"] = weights_digest(weights_in(run / "export"))
    (run / "export" / "grpo_pl.json").write_text(json.dumps(manifest))


def _change_row(run: Path, change: Callable[[dict[str, Any]], None], *, also_digest: bool = False) -> None:
    file = run / "completions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    change(next(row for row in rows if row["step"] == 6 and row["sample"] == 2))
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if also_digest:
        import hashlib

        digests = (run / "digests.jsonl").read_text().splitlines()
        last = {**json.loads(digests[-1]), "completions": hashlib.sha256(file.read_bytes()).hexdigest()}
        (run / "digests.jsonl").write_text("\n".join([*digests[:-1], json.dumps(last)]) + "\n")


def _other_text(row: dict[str, Any]) -> None:
    row["completion"] += "0"


def _other_reward(row: dict[str, Any]) -> None:
    row["reward"] += 0.5


def _other_token_ids(run: Path) -> None:
    file = run / "digests.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    row = next(row for row in rows if row["step"] == 7 and "token_ids" in row)
    row["token_ids"][-1][1][2] = "0123456789ab"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _other_manifest(run: Path) -> None:
    manifest = json.loads((run / "export" / "grpo_pl.json").read_text())
    manifest["run"] |= {"name": "another", "weights": "0" * 64}
    (run / "export" / "grpo_pl.json").write_text(json.dumps(manifest))


def _other_checkpoint(run: Path) -> None:
    six, seven = (run / "checkpoints" / f"rollout-00000{number}.ckpt" for number in (6, 7))
    shutil.copyfile(six, seven)
    seal(seven, {"rollouts": 7, "world_size": 1})


@pytest.mark.parametrize(
    ("spoil", "what", "told"),
    [
        (_change_weight, "files of weights", "not as grpo_pl.json says"),
        (_change_weight_and_its_digest, "weights", "model.norm.weight differs by up to 0.001"),
        (lambda run: _change_row(run, _other_text), "completions.jsonl", "is not as the run closed it"),
        (lambda run: _change_row(run, _other_text, also_digest=True), "rollout 7 again", "sample 2 is"),
        (lambda run: _change_row(run, _other_reward), "completions.jsonl", "is not as the run closed it"),
        (lambda run: _change_row(run, _other_reward, also_digest=True), "rollout 7 again", "step 6: reward of a"),
        (_other_token_ids, "rollout 7 again", "sample 2 is 0123456789ab there"),
        (_other_manifest, "manifest", "names other weights than those of rollout 7"),
        (_other_checkpoint, "checkpoint rollout-000007.ckpt", "its weights are those after rollout 6"),
    ],
)
def test_what_was_changed_is_named(verify: Any, run: Path, spoil: Callable[[Path], None], what: str, told: str) -> None:
    spoil(run)
    before = {str(file): file.lstat().st_mtime_ns for file in run.rglob("*") if file.name != "export"}
    outcome = verify(run)
    assert outcome.status == 1
    assert told in _failed(outcome)[what], outcome.out
    after = {str(file): file.lstat().st_mtime_ns for file in run.rglob("*") if file.name != "export"}
    assert set(after) - set(before) == {str(run / "export" / "verified.json")}
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "there is no run 'nothing'"),
        (["{run}/export", "--run={run}x"], "there is no run"),
        (["{run}", "--run={run}"], "is no export"),
        (["{run}/checkpoints"], "has no config.yaml"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(verify: Any, run: Path, arguments: list[str], told: str) -> None:
    outcome = verify(*(argument.format(run=run) for argument in arguments))
    assert (outcome.status, outcome.out) == (2, "")
    assert told in outcome.err and outcome.err.count("\n") == 1
