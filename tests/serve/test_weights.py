"""Weights that change while the server answers: by request, and by following a run in training."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file, save_file

from grpo_pl.cli.commands.serve import serve
from grpo_pl.cli.main import main
from grpo_pl.config.objects import build_environment
from grpo_pl.files.checkpoints import CheckpointError
from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.episode_settings import EpisodeSettings
from serve import weights
from serve.settings import ServeSettings
from serve.weights import Follower, newest_sealed, run_of, version_id, weights_of
from tests.forked import Forked
from tests.serve.bodies import HELLO
from tests.serve.conftest import WEIGHTS_KEY as KEY
from tests.serve.conftest import altered, error_of, run_of_export, wait_until, write_checkpoint

LONG = {"messages": HELLO, "max_tokens": 400, "ignore_eos": True, "seed": 7}


@pytest.fixture(scope="module")
def exports(export: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the weights of the served one times a factor."""
    folders = {}
    for name, factor in {"b": 1.5, "c": 0.5, "d": 0.7, "e": 0.9}.items():
        folders[name] = tmp_path_factory.mktemp("others") / name
        shutil.copytree(export, folders[name])
        weights = load_file(export / "model.safetensors")
        changed = {key: factor * weight for key, weight in weights.items()}
        save_file(changed, folders[name] / "model.safetensors", {"format": "pt"})
    return folders


@pytest.fixture
def server(changeable: Any) -> Any:
    return changeable


def _change(server: Any, path: Path | None) -> tuple[int, Any]:
    return server.post("/v1/weights", {} if path is None else {"path": str(path)}, key=KEY)


def _says(server: Any, **further: Any) -> tuple[str, str]:
    """A seeded answer, and the version that gave it."""
    answer = server.ask(
        "/v1/chat/completions", {"messages": HELLO, "max_tokens": 30, "ignore_eos": True, "seed": 7, **further}
    )
    return answer["choices"][0]["message"]["content"], answer["system_fingerprint"]


class _Stream:
    """A long stream that is read when it is told to be."""

    def __init__(self, server: Any, length: int) -> None:
        self._events = server.openai().chat.completions.create(
            model="tiny", stream=True, messages=HELLO, max_tokens=length, seed=7, extra_body={"ignore_eos": True}
        )
        self.versions: set[str] = set()
        self.text = ""
        self._take(next(iter(self._events)))

    def read(self) -> None:
        for event in self._events:
            self._take(event)

    def close(self) -> None:
        self._events.close()

    def _take(self, event: Any) -> None:
        self.versions.add(event.system_fingerprint)
        self.text += event.choices[0].delta.content or ""


def _prompt_logprobs(server: Any) -> list[float]:
    echo = {"prompt": "1+1=", "max_tokens": 0, "echo": True, "logprobs": 1}
    return list(server.ask("/v1/completions", echo)["choices"][0]["logprobs"]["token_logprobs"][1:])


def test_a_stream_ends_under_the_weights_it_began_with(server: Any, export: Path, exports: dict[str, Path]) -> None:
    """Prompts are scored by the newest, too."""
    assert _change(server, export)[0] == 200
    (text, first), scored = _says(server), _prompt_logprobs(server)
    whole = server.post("/v1/chat/completions", LONG)[1]["choices"][0]["message"]["content"]
    stream = _Stream(server, LONG["max_tokens"])
    status, answer = _change(server, exports["b"])
    assert (status, answer["previous"], answer["changed"]) == (200, first, True)
    second = answer["id"]
    other, told = _says(server)
    assert told == second != first and other != text and _prompt_logprobs(server) != scored
    stream.read()
    assert stream.versions == {first} and stream.text == whole
    assert _change(server, export)[0] == 200
    assert _says(server) == (text, first) and _prompt_logprobs(server) == scored
    wait_until(lambda: len(server.call("GET", "/v1/weights")[1]["held"]) == 1)


def test_loaded_weights_stay_as_they_are_whatever_becomes_of_their_file(
    server: Any, export: Path, exports: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(exports["b"], tmp_path / "copy")
    assert _change(server, folder)[0] == 200
    before = _says(server), _prompt_logprobs(server)
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write((exports["c"] / "model.safetensors").read_bytes())
    assert (_says(server), _prompt_logprobs(server)) == before
    os.truncate(file, 0)
    assert (_says(server), _prompt_logprobs(server)) == before
    assert _change(server, export)[0] == 200


def test_every_route_that_draws_names_the_version(server: Any) -> None:
    version = server.call("GET", "/v1/weights")[1]["id"]
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "1+1=", "max_tokens": 2},
        "/v1/responses": {"input": "1+1=", "max_output_tokens": 2},
        "/v1/evaluate": {"items": [{"problem": "1+1=", "answer": "2"}], "n": 2, "max_tokens": 2},
    }
    for route, body in asked.items():
        status, answer = server.post(route, body)
        assert (status, answer["system_fingerprint"]) == (200, version), route
    echo = {"prompt": "1+1=", "max_tokens": 0, "echo": True, "logprobs": 1}
    assert server.post("/v1/completions", echo)[1]["system_fingerprint"] == version


def test_a_change_to_the_same_weights_changes_nothing(server: Any, export: Path) -> None:
    assert _change(server, export)[0] == 200
    now = server.call("GET", "/v1/weights")[1]
    status, answer = _change(server, export)
    assert (status, answer["changed"], answer["id"], answer["since"]) == (200, False, now["id"], now["since"])
    assert answer["source"] == str(export) and "source" not in now  # clients without that key learn no paths


def test_a_change_waits_while_too_many_versions_answer(server: Any, export: Path, exports: dict[str, Path]) -> None:
    assert _change(server, export)[0] == 200
    wait_until(server.is_idle)
    streams = [_Stream(server, 4000)]
    for name in "bcd":
        assert _change(server, exports[name])[0] == 200
        streams.append(_Stream(server, 4000))
    held = [entry["requests"] for entry in server.call("GET", "/v1/weights")[1]["held"]]
    if held == [1, 1, 1, 1]:  # else a stream has reached its end already
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(_change, server, exports["e"])
            streams[0].close()
            assert waiting.result()[0] == 200
    for stream in streams:
        stream.close()
    wait_until(server.is_idle)
    wait_until(lambda: server.metric("weights_versions") == 1)


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_changes(server: Any, exports: dict[str, Path]) -> None:
    worker, front = server.worker("generate"), psutil.Process(server.process.pid)

    def change(times: int) -> None:
        for i in range(times):
            status, answer = _change(server, exports["bc"[i % 2]])
            assert (status, answer["changed"]) == (200, True), answer
            assert _says(server, max_tokens=2)[1] == answer["id"]

    change(30)
    before = [process.memory_info().rss for process in (worker, front)]
    change(100)
    for process, rss in zip((worker, front), before, strict=True):
        assert process.memory_info().rss < rss * 1.05 + (4 << 20)


def test_only_its_own_key_changes_the_weights(server: Any, crowded: Any, exports: dict[str, Path]) -> None:
    body = {"path": str(exports["b"])}
    assert server.refusal("/v1/weights", body, 401)["code"] == "invalid_api_key"
    assert server.call("GET", "/v1/weights", key=KEY)[0] == 401  # which opens no other route
    assert crowded.refusal("/v1/weights", body, 403)["code"] == "no_weights_key"


def test_what_cannot_take_the_place_of_the_weights_is_refused_and_the_old_ones_stay(
    server: Any, export: Path, tmp_path: Path
) -> None:
    before, served = server.call("GET", "/v1/weights")[1]["id"], find_model(export)
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(b"no checkpoint")
    longer = altered(export, tmp_path / "longer")
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    template = json.loads((export / "grpo_pl.json").read_text())["template"]
    refused = {
        tmp_path / "nothing": "no such model",
        altered(export, tmp_path / "template", template={**template, "prefill": ""}): "another template",
        altered(export, tmp_path / "rewards", rewards=[]): "another rewards",
        altered(export, tmp_path / "code", rewards=[{"class_path": "grpo_pl.rewards.FunctionReward"}]): "--trust",
        broken: "broken.ckpt",
        longer: "another tokenizer or context",
    }
    for path, reason in refused.items():
        with pytest.raises((ValueError, CheckpointError), match=reason):
            weights_of(path, served)
    error = error_of(_change(server, broken), 400)
    assert error["param"] == "path" and "broken.ckpt" in error["message"]
    assert _change(server, None)[1]["error"]["message"].startswith("path: give one")
    assert _says(server)[1] == before
    assert server.metric("weights_versions") == 1


def test_a_weights_key_that_is_the_api_key_is_refused() -> None:
    with pytest.raises(ValueError, match="give another one"):
        ServeSettings(model=Path("x"), api_key="same", weights_key="same")
    with pytest.raises(ValueError, match=r"weights key must be ASCII.*GRPO_PL_WEIGHTS_KEY"):
        ServeSettings(model=Path("x"), weights_key=" blank")


# --- checkpoints of a run ---------------------------------------------------------------------------------------------


def test_checkpoints_of_another_run_are_refused(run: Path, export: Path, tmp_path: Path) -> None:
    served = find_model(run / "checkpoints" / "rollout-000002.ckpt")
    newer = weights_of(run / "checkpoints" / "last.ckpt", served)
    assert newer.checkpoint == (run / "checkpoints" / "rollout-000010.ckpt").resolve()  # where the link leads today
    assert version_id(newer).startswith("rollout-000010-") and version_id(newer) != version_id(served)
    other = run_of_export(export, tmp_path / "other-run")
    with pytest.raises(ValueError, match="checkpoint of another run"):
        weights_of(other / "checkpoints" / "last.ckpt", served)


def test_an_export_in_its_run_folder_knows_its_run(run: Path, export: Path) -> None:
    shutil.copytree(export, run / "export")
    assert getattr(run_of(find_model(run)), "path", None) == run.resolve()
    assert run_of(find_model(export)) is None


def test_a_checkpoint_that_is_not_sealed_is_not_seen_and_a_broken_one_is_passed_over(
    run: Path, export: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_POLL_S", 0.05)
    found = run_of(find_model(run / "checkpoints" / "rollout-000002.ckpt"))
    assert found is not None
    newer = write_checkpoint(run, export, 11)
    newer.with_suffix(".json").unlink()
    path, _ = newest_sealed(found)
    assert path is not None and path.name == "rollout-000010.ckpt"

    class Weights:
        """What the follower asks for changes."""

        model = find_model(run / "checkpoints" / "rollout-000002.ckpt")
        changes: list[str] = []  # noqa: RUF012 - one test

        async def change(self, model: Any) -> None:
            self.changes.append(model.checkpoint.name)
            if len(self.changes) == 1:
                broken = write_checkpoint(run, export, 12)
                broken.write_bytes(broken.read_bytes()[:-1])
                return
            raise asyncio.CancelledError

    async def follow(weights: Any) -> None:
        task = asyncio.create_task(Follower(weights, found).follow())
        while "rollout-000012.ckpt is passed over" not in caplog.text:
            await asyncio.sleep(0.02)
        write_checkpoint(run, export, 13)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(follow(Weights()))
    assert Weights.changes == ["rollout-000010.ckpt", "rollout-000013.ckpt"]


def test_a_run_is_followed_or_a_model_is_served_not_both(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        ServeSettings(model=Path("a"), follow=Path("b"))
    with pytest.raises(ValueError, match=r"no run folder, because .*config.yaml is missing"):
        serve(ServeSettings(follow=tmp_path))


# --- a run in training ------------------------------------------------------------------------------------------------

_GATE = """
import pathlib, time

def gate(completions, **_):
    "Lets the run score rollout k + 1 when the gate says k, the number of checkpoints that may be there."
    here = pathlib.Path({folder!r})
    while len(list(here.glob("runs/tiny/checkpoints/rollout-*.json"))) > int((here / "gate").read_text() or 0):
        time.sleep(0.02)
    return [0.0] * len(completions)
"""


@pytest.fixture
def in_training(command_line: Any) -> Iterator[tuple[Any, Callable[[int], None]]]:
    """A run that waits after each checkpoint, and what lets it go on."""
    folder = command_line.folder
    gate = folder / "gate"
    gate.write_text("0")
    (folder / "gates.py").write_text(_GATE.format(folder=str(folder)))
    rewards = [
        {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}},
        {
            "class_path": "grpo_pl.rewards.FunctionReward",
            "init_args": {"function": f"{folder}/gates.py:gate", "weight": 0.01},
        },
    ]
    config = command_line.config(model__rewards=rewards, model__cold_start=None, data__steps=3)
    environment = {**os.environ, "GRPO_PL_CACHE": str(command_line.cache)}
    with (folder / "log").open("w") as log:
        fit = ["fit", f"--config={config}", f"--runs_dir={folder / 'runs'}"]
        process = Forked(partial(main, fit), env=environment, output=log.fileno())

    def open_to(checkpoints: int) -> None:
        partly = folder / "gate.new"
        partly.write_text(str(checkpoints))
        partly.replace(gate)

    yield process, open_to
    process.kill()
    process.wait()


def test_a_run_in_training_is_followed_within_one_checkpoint_and_no_request_fails(
    start: Callable[..., Any], in_training: Any, command_line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_POLL_S", 0.1)  # of the server, which is a fork
    process, open_to = in_training
    folder = command_line.runs / "tiny"
    wait_until(lambda: (folder / "config.yaml").exists() or process.poll() is not None)
    server = start("--follow", str(folder), "--trust-rewards", model=None)
    answers: list[tuple[int, str]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            status, answer = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8})
            answers.append((status, answer.get("system_fingerprint", str(answer))))

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(ask) for _ in range(2)]
        try:
            for rollouts in range(1, 4):  # the run goes on only when the server has the checkpoint
                name = f"rollout-{rollouts:06d}-"
                wait_until(lambda name=name: server.call("GET", "/v1/weights")[1]["id"].startswith(name))
                assert _says(server, max_tokens=2)[1].startswith(name)
                open_to(rollouts)
            assert process.wait(120.0) == 0, (command_line.folder / "log").read_text()
        finally:
            over.set()
        for future in asking:
            future.result()
    assert {status for status, _ in answers} == {200}
    assert {version.rpartition("-")[0] for _, version in answers} >= {f"rollout-{k:06d}" for k in range(1, 3)}
    wait_until(lambda: server.metric("weights_versions") == 1)


# --- a run that has ended ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(command_line: Any) -> Path:
    """A run whose configuration spells its rewards as the quickstart does, with its export."""
    rewards = [
        {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True}},
        {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"weight": 0.1}},
    ]
    config = command_line.config("ended", model__rewards=rewards, data__steps=2)
    command_line.done("fit", f"--config={config}", "--name=ended")
    return Path(command_line.runs / "ended")


@pytest.mark.slow
def test_the_server_of_an_export_takes_the_checkpoints_of_its_run(start: Callable[..., Any], ended: Path) -> None:
    assert "class_path: grpo_pl.rewards.MathReward" in (ended / "config.yaml").read_text()  # the export has the module
    server = start("--weights-key", KEY, model=ended)
    assert server.call("GET", "/v1/weights")[1]["id"].startswith("export-")
    status, answer = _change(server, None)
    assert (status, answer["changed"]) == (200, True), answer
    assert answer["id"].startswith("rollout-000002-")
    for path in sorted((ended / "checkpoints").glob("*.ckpt")):
        status, answer = _change(server, path)
        assert status == 200, answer
    assert _change(server, ended / "export")[0] == 200


SPELT = [
    {"class_path": "grpo_pl.rewards.MathReward", "init_args": {"correctness": True}},
    {"class_path": "grpo_pl.rewards.FormatReward", "init_args": {"weight": 0.5, "partial": True}},
]


@pytest.mark.parametrize(
    ("rewards", "same"),
    [
        (SPELT, True),
        (SPELT[::-1], True),  # each has its name: their order means nothing
        ([{**SPELT[0], "class_path": "grpo_pl.rewards.mathematics.math_reward.MathReward"}, SPELT[1]], True),
        ([SPELT[0], {**SPELT[1], "init_args": {"partial": True, "weight": 0.5, "name": "format"}}], True),
        ([SPELT[0], {**SPELT[1], "init_args": {"partial": True, "weight": 0.4}}], False),
        ([SPELT[0], {**SPELT[1], "init_args": {"partial": True}}], False),
        ([{**SPELT[0], "class_path": "grpo_pl.rewards.ExactReward"}, SPELT[1]], False),
        (SPELT[:1], False),
    ],
)
def test_rewards_are_compared_by_what_they_are_and_not_by_how_they_are_spelt(
    run: Path, export: Path, rewards: list[dict[str, Any]], same: bool
) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["rewards"] = rewards
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    shutil.copytree(export, run / "export")
    served = find_model(run / "export")
    if same:
        assert weights_of(run / "checkpoints" / "last.ckpt", served).checkpoint is not None
    else:
        with pytest.raises(ValueError, match="another rewards"):
            weights_of(run / "checkpoints" / "last.ckpt", served)


def test_environments_and_episodes_are_compared_alike(run: Path, export: Path) -> None:
    short = {
        "class_path": "grpo_pl.environments.tools.ToolEnvironment",
        "init_args": {"tools": ["grpo_pl.environments.calculator:calc"]},
    }
    whole = build_environment(short).spec()
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"] |= {"environment": short, "episodes": {"max_turns": 3}}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    for turns, same in ((3, True), (4, False)):
        episodes = asdict(EpisodeSettings(max_turns=turns))
        served = find_model(altered(export, run / f"export-{turns}", environment=whole, episodes=episodes))
        if same:
            assert weights_of(run / "checkpoints" / "last.ckpt", served).environment == short
        else:
            with pytest.raises(ValueError, match="another episodes"):
                weights_of(run / "checkpoints" / "last.ckpt", served)
