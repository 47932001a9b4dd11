"""Exports with a broken file: one line that names it, for the server's weights and for every verb that reads one."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from grpo_pl.cli.main import main
from grpo_pl.policy.trained import find_model
from tests.conftest import exit_status
from tests.serve.bodies import HELLO

CHAT = {"messages": HELLO, "max_tokens": 8, "seed": 7}
Break = Callable[[Path], Any]


def _write(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content)


def _set(name: str, *taken: str, **changes: Any) -> Break:
    def change(folder: Path) -> None:
        tree = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in tree.items() if key not in taken}))

    return change


def _gone(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def _dangling(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("nowhere")

    return change


def _folder(name: str) -> Break:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def _cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 500)


def _without_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


M = "grpo_pl.json"
BROKEN: dict[str, tuple[Break, str]] = {
    "manifest {}": (_write(M, "{}"), "grpo_pl.json has no template"),
    "manifest empty": (_write(M, ""), "grpo_pl.json is not JSON"),
    "manifest list": (_write(M, "[]"), "grpo_pl.json is not a JSON object"),
    "manifest dangling": (_dangling(M), "grpo_pl.json is a link to nowhere"),
    "manifest folder": (_folder(M), "grpo_pl.json is a folder"),
    "manifest bytes": (lambda folder: (folder / M).write_bytes(b"\xff\xfe"), "grpo_pl.json is not UTF-8"),
    "template text": (_set(M, template="x"), "grpo_pl.json: template must be an object with fields, got 'x'"),
    "template unknown": (_set(M, template={"sytem": "x"}), "'template.sytem'; did you mean template.system?"),
    "template type": (_set(M, template={"system": 5}), "template.system must be of type str, got '5'"),
    "template null": (_set(M, template={"user": None}), "null is user"),
    "template question": (_set(M, template={"user": "x"}), "must contain '{question}'"),
    "template examples": (_set(M, template={"examples": ["/etc/passwd"]}), "template.examples must hold fields alone"),
    "template class": (_set(M, template={"class_path": "os.system"}), "template.class_path must hold fields alone"),
    "rewards gone": (_set(M, "rewards"), "grpo_pl.json has no rewards"),
    "rewards text": (_set(M, rewards="x"), "grpo_pl.json: rewards must be a list, got 'x'"),
    "rewards numbers": (_set(M, rewards=[5]), "5 is no class_path with its init_args"),
    "rewards arguments": (_set(M, rewards=[{"class_path": "x", "init_args": 5}]), "is no class_path with its init"),
    "length": (_set(M, max_completion_length="long"), "max_completion_length must be of type int, got 'long'"),
    "length null": (_set(M, max_completion_length=None), "null is max_completion_length"),
    "stop": (_set(M, stop=[5]), "stop must be of type str, got '5'"),
    "environment": (_set(M, environment=5), "environment must be an object with fields, got 5"),
    "episodes": (_set(M, episodes=[1]), "episodes must be an object with fields, got [1]"),
    "algorithm": (_set(M, algorithm="grpo"), "algorithm must be an object with fields, got 'grpo'"),
    "precision": (_set(M, precision=16), "precision must be a text, got 16"),
    "generation empty": (_write("generation_config.json", ""), "generation_config.json is not JSON"),
    "generation gone": (_gone("generation_config.json"), "generation_config.json is missing"),
    "temperature": (_set("generation_config.json", temperature="hot"), "temperature must be a number, got 'hot'"),
    "temperature nan": (_set("generation_config.json", temperature=float("nan")), "temperature must be finite"),
    "end": (_set("generation_config.json", eos_token_id="x"), "eos_token_id must be the number of a token, got 'x'"),
    "config {}": (_write("config.json", "{}"), "model_type"),
    "config number": (_write("config.json", "5"), "config.json is not a JSON object"),
    "config gone": (_gone("config.json"), "config.json"),
    "config dangling": (_dangling("config.json"), "config.json is a link to nowhere"),
    "config type": (_set("config.json", model_type="qwen99"), "qwen99"),
    "config size": (_set("config.json", hidden_size="wide"), "hidden_size"),
    "config layers": (_set("config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3), "layers.2"),
    "config huge": (_set("config.json", hidden_size=1 << 20), "should be"),
    "other model": (_write("config.json", '{"model_type": "gpt2", "vocab_size": 9, "n_positions": 4096}'), "missing"),
    "tokenizer {}": (_write("tokenizer.json", "{}"), "tokenizer.json holds no tokenizer"),
    "tokenizer empty": (_write("tokenizer.json", ""), "tokenizer.json holds no tokenizer"),
    "tokenizer gone": (_gone("tokenizer.json"), "tokenizer"),
    "tokenizer dangling": (_dangling("tokenizer.json"), "tokenizer.json is a link to nowhere"),
    "tokenizer folder": (_folder("tokenizer.json"), "tokenizer.json is a folder"),
    "tokenizer config {}": (_write("tokenizer_config.json", "{}"), "tokenizer_config.json has no tokenizer_class"),
    "tokenizer config": (_write("tokenizer_config.json", "nonsense"), "tokenizer_config.json is not JSON"),
    "tokenizer config gone": (_gone("tokenizer_config.json"), "tokenizer_config.json"),
    "chat template": (_write("chat_template.jinja", "{% if %}"), "chat_template.jinja: the chat template is no Jinja"),
    "chat template type": (_set("tokenizer_config.json", chat_template=5), "the chat template must be a text, got 5"),
    "weights gone": (_gone("model.safetensors"), "model.safetensors"),
    "weights folder": (_folder("model.safetensors"), "model.safetensors is a folder"),
    "weights dangling": (_dangling("model.safetensors"), "model.safetensors is a link to nowhere"),
    "weights cut": (_cut, "model.safetensors cannot be loaded: it is truncated"),
    "weights empty": (_write("model.safetensors", ""), "model.safetensors cannot be loaded: it is truncated"),
    "layer gone": (_without_a_layer, "model.layers.1.mlp.up_proj.weight is missing"),
    "index": (_write("model.safetensors.index.json", "{}"), "model.safetensors.index.json has no weight_map"),
}


@pytest.fixture
def broken(export: Path, tmp_path: Path) -> Callable[[Break], Path]:
    def make(breaks: Break) -> Path:
        folder = Path(shutil.copytree(export, tmp_path / "broken"))
        breaks(folder)
        return folder

    return make


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_export_is_one_line_in_python(broken: Callable[[Break], Path], case: str) -> None:
    breaks, reason = BROKEN[case]
    folder = broken(breaks)
    with pytest.raises(ValueError) as caught:
        find_model(folder).load_policy("cpu")
    line = str(caught.value)
    assert reason in line and str(folder) in line and "\n" not in line


FEW = ["manifest {}", "template unknown", "config dangling", "tokenizer {}", "weights cut"]


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("verb", ["evaluate", "predict", "export", "serve"])
def test_a_broken_export_is_one_line_of_every_verb(
    broken: Callable[[Break], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str, case: str
) -> None:
    breaks, reason = BROKEN[case]
    folder = broken(breaks)
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1=", "answer": "2"}\n')
    (tmp_path / "config.yaml").write_text(
        "data: {source: {class_path: grpo_pl.data.tasks.arithmetic.ArithmeticPrompts, init_args: {digits: 1}}}"
    )
    out = tmp_path / "out"
    given = {
        "evaluate": [f"--model={folder}", f"--data={tmp_path / 'rows.jsonl'}", f"--output={out}"],
        "predict": [f"--model={folder}", f"--config={tmp_path / 'config.yaml'}", f"--output={out}", "--prompts=2"],
        "export": [str(folder), str(out)],
        "serve": [f"--model={folder}", "--port=0"],
    }[verb]
    assert exit_status(lambda: main([verb, *given])) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"grpo-pl {verb}: error: ") and reason in line
    assert not out.exists()


def test_a_link_that_leads_nowhere_beside_the_model_does_not_matter(export: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(export, tmp_path / "linked"))
    (folder / "notes.txt").symlink_to("nowhere")
    assert find_model(folder).version.startswith("linked-")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"examples": 5}, "examples must be a list, got 5"),
        ({"examples": [5]}, "an example needs a problem, got 5"),
        ({"examples": [{"answer": "2"}]}, "an example needs a problem"),
    ],
)
def test_a_broken_record_of_the_run_is_named(export: Path, tmp_path: Path, record: Any, reason: str) -> None:
    folder = Path(shutil.copytree(export, tmp_path / "run" / "export"))
    (folder.parent / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"run\.json: {reason}"):
        find_model(folder)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{}", "has no model"),
        ("model: 5", "model must be an object with fields, got 5"),
        ("model: {rewards: []}", "has no policy"),
        ("model: {policy: {path: x}}", "has no rewards"),
        ("model: {policy: {path: x, from_scratch: {model_type: y}}, rewards: []}", "exactly one of `path`"),
        ("model: {policy: {pth: x}, rewards: []}", "did you mean policy.path?"),
        ("model: {policy: {path: x, lora: /etc/passwd}, rewards: []}", "policy.lora must hold fields alone"),
        ("model: {policy: {path: x}, rewards: [], sampling: {temperature: hot}}", "must be of type float, got 'hot'"),
        ("model: {policy: {path: x}, rewards: [], template: []}", "template must be an object with fields"),
    ],
)
def test_a_broken_configuration_of_a_run_is_named(tmp_path: Path, config: str, reason: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(ValueError, match=r"config\.yaml") as caught:
        find_model(tmp_path)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
