"""``--follow``: each newer checkpoint of a run is taken between two requests, or passed over with the reason."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import yaml

from grpo_pl.files.checkpoints import newest_sealed, seal
from grpo_pl.policy.trained import find_model
from serve import follow
from serve.follow import Follower, NewWeights, first_checkpoint, successor
from serve.messages import Followed
from serve.settings import ServeSettings
from tests.serve.bodies import CHAT, HELLO
from tests.serve.conftest import altered, wait_until, write_checkpoint

LONG = {"messages": HELLO, "max_tokens": 3000, "ignore_eos": True, "seed": 7}


@pytest.fixture
def following(run: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[Any]:
    monkeypatch.setattr(follow, "_POLL_S", 0.02)
    told: SimpleQueue[Any] = SimpleQueue()
    Follower(find_model(run / "checkpoints" / "rollout-000010.ckpt"), "cpu", told.put).start()
    return told


def _edited(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = torch.load(path, weights_only=True)
    edit(state["state_dict"])
    torch.save(state, path)
    seal(path, {"rollouts": 12})


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
    "changed": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"), "has changed"),
    "without a tensor": (lambda path: _edited(path, dict.popitem), "is missing"),
    "not a number": (lambda path: _edited(path, lambda s: next(iter(s.values())).fill_(torch.nan)), "not finite"),
    "infinite": (lambda path: _edited(path, lambda s: next(iter(s.values()))[0].fill_(torch.inf)), "not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_cannot_be_taken_is_passed_over_with_the_reason(
    following: SimpleQueue[Any], run: Path, export: Path, case: str
) -> None:
    spoil, reason = BAD[case]
    hidden = run / "elsewhere"
    (hidden / "checkpoints").mkdir(parents=True)
    path = write_checkpoint(hidden, export, 12)
    spoil(path)
    for file in (path, path.with_suffix(".json")):
        shutil.move(file, run / "checkpoints" / file.name)
    told = following.get(timeout=30)
    assert isinstance(told, Followed) and reason in told.error and "rollout-000012" in told.error
    write_checkpoint(run, export, 13)
    taken = following.get(timeout=30)
    assert isinstance(taken, NewWeights) and taken.model.source.name == "rollout-000013.ckpt"


def test_a_link_and_other_names_are_no_checkpoints(following: SimpleQueue[Any], run: Path, export: Path) -> None:
    folder = run / "checkpoints"
    for name in ("rollout-best.ckpt", "rollout-.ckpt", "rollout-99x.ckpt"):
        shutil.copy(folder / "rollout-000010.ckpt", folder / name)
        shutil.copy(folder / "rollout-000010.json", (folder / name).with_suffix(".json"))
    assert newest_sealed(folder)[0] == folder / "rollout-000010.ckpt"
    (folder / "rollout-000011.ckpt").symlink_to("rollout-000002.ckpt")
    seal(folder / "rollout-000011.ckpt", {"rollouts": 11})
    told = following.get(timeout=30)
    assert isinstance(told, Followed) and "no regular file" in told.error


def test_a_run_is_followed_and_the_reason_is_shown_by_ready(
    start: Callable[..., Any], run: Path, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_POLL_S", 0.1)  # of the server, which is a fork
    server = start("--follow", str(run), model=None)
    ready = server.call("GET", "/ready")[1]
    assert ready["weights"].startswith("rollout-000010-") and "error" not in ready
    stream = server.openai().chat.completions.create(
        model="my-run", stream=True, messages=HELLO, max_tokens=1200, seed=7, extra_body={"ignore_eos": True}
    )
    events = iter(stream)
    seen = {next(events).system_fingerprint}
    write_checkpoint(run, export, 12)
    seen |= {event.system_fingerprint for event in events}
    assert seen == {ready["weights"]}  # it ends with the weights with which it began
    wait_until(lambda: server.call("GET", "/ready")[1]["weights"].startswith("rollout-000012-"))
    answer = server.ask(CHAT, {"messages": HELLO, "max_tokens": 8, "seed": 7, "temperature": 1.0})
    assert answer["system_fingerprint"].startswith("rollout-000012-")
    path = write_checkpoint(run, export, 13)
    path.write_bytes(b"")
    wait_until(lambda: "rollout-000013" in server.call("GET", "/ready")[1].get("error", ""))
    assert server.call("GET", "/ready")[0] == 200 and "rollout-000013.ckpt is passed over" in server.log
    write_checkpoint(run, export, 14)
    wait_until(lambda: "error" not in server.call("GET", "/ready")[1])
    server.stop()


def test_a_run_is_followed_or_a_model_is_served_not_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        ServeSettings(model=Path("a"), follow=Path("b"))
    with pytest.raises(ValueError, match=r"no run folder, because .*config.yaml is missing"):
        first_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"template": {"prefill": "<other>"}}, "another template"),
        ({"rewards": [{"class_path": "grpo_pl.rewards.ExactReward", "init_args": {}}]}, "another rewards"),
    ],
)
def test_what_is_another_model_is_refused(run: Path, change: dict[str, Any], reason: str) -> None:
    served = find_model(run)
    assert successor(run / "checkpoints" / "rollout-000002.ckpt", served).checkpoint is not None
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"] |= change
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=reason):
        successor(run / "checkpoints" / "last.ckpt", served)


def test_the_name_of_weights_changes_with_them(export: Path, tmp_path: Path) -> None:
    copy = altered(export, tmp_path / "copy")
    before = find_model(copy).version
    os.utime(copy / "model.safetensors", (1.0, 1.0))
    assert before.startswith("copy-") and find_model(copy).version != before
