"""An export that has lost a tensor is refused in one line by every verb, before anything is made with it."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForSequenceClassification

from grpo_pl.cli.main import main
from grpo_pl.files.checkpoints import seal
from grpo_pl.policy.export import TrainedWith, export_policy
from grpo_pl.policy.loading import PolicyConfig, load_model
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards import ExactReward
from grpo_pl.types import SamplingParams
from tests.conftest import TINY_POLICY
from tests.forked import forked, with_forked_workers

LAYER = "model.layers.0.self_attn.q_proj.weight"
EXACT = {"class_path": "grpo_pl.rewards.ExactReward", "init_args": {"correctness": True}}


@pytest.fixture(scope="module")
def export(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "export"
    rewards = [ExactReward(correctness=True).spec()]
    trained = TrainedWith(template=PromptTemplate(), rewards=rewards, sampling=SamplingParams(max_completion_length=8))
    export_policy(
        folder, trained, model=load_model(PolicyConfig(from_scratch=TINY_POLICY), tokenizer), tokenizer=tokenizer
    )
    return folder


@pytest.fixture
def lacking(export: Path, tmp_path: Path) -> Path:
    """The export without one tensor."""
    folder = Path(shutil.copytree(export, tmp_path / "lacking"))
    weights = load_file(folder / "model.safetensors")
    del weights[LAYER]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def run(export: Path, tmp_path: Path) -> Callable[..., Path]:
    """``run(lambda weights: …)``: a run folder whose checkpoint has changed weights."""

    def make(changed: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        folder = tmp_path / "run"
        (folder / "checkpoints").mkdir(parents=True)
        tree = {"policy": {"from_scratch": TINY_POLICY}, "rewards": [EXACT], "sampling": {"max_completion_length": 8}}
        (folder / "config.yaml").write_text(yaml.safe_dump({"model": tree}))
        weights = {f"policy.{name}": weight for name, weight in load_file(export / "model.safetensors").items()}
        changed(weights)
        path = folder / "checkpoints" / "rollout-000001.ckpt"
        torch.save({"state_dict": weights, "global_step": 1}, path)
        seal(path, {"rollouts": 1})
        (folder / "checkpoints" / "last.ckpt").symlink_to(path.name)
        return folder

    return make


def _refused(command_line: Any, verb: str, *arguments: object) -> str:
    outcome = command_line(verb, *arguments)
    assert outcome.status == 1, outcome
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"grpo-pl {verb}: error: ")
    return str(line)


@pytest.mark.parametrize(
    ("verb", "changes"),
    [
        ("fit", {"model__cold_start": None}),
        ("fit", {"model__algorithm": {"group_size": 4, "beta": 0.1}}),  # the reference is a copy of the policy
        ("validate", {}),
    ],
)
def test_a_policy(fresh_command_line: Any, lacking: Path, verb: str, changes: dict[str, Any]) -> None:
    config = fresh_command_line.config(model__policy={"path": str(lacking)}, **changes)
    assert f"{LAYER} is missing" in _refused(fresh_command_line, verb, f"--config={config}")
    assert not fresh_command_line.cache.exists() and not fresh_command_line.runs.exists()


def test_a_teacher_before_the_cold_start(fresh_command_line: Any, lacking: Path) -> None:
    term = {"class_path": "grpo_pl.objective.terms.distillation.Distillation", "init_args": {"alone": True}}
    algorithm = {"group_size": 4, "beta": 0.0, "baseline": "none", "scale": "none", "terms": {"distillation": term}}
    config = fresh_command_line.config(model__teacher={"path": str(lacking)}, model__algorithm=algorithm)
    assert f"{LAYER} is missing" in _refused(fresh_command_line, "fit", f"--config={config}")
    assert not (fresh_command_line.cache / "cold_start").exists() and not fresh_command_line.runs.exists()


@pytest.fixture
def judge(lacking: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A reward whose model has lost a tensor."""
    folder = lacking.parent / "judge"
    config = Qwen2Config(**{**TINY_POLICY, "vocab_size": len(tokenizer), "pad_token_id": 0})
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return {"class_path": "grpo_pl.rewards.ModelReward", "init_args": {"model": str(folder)}}


def test_a_reward_model_before_the_cold_start(fresh_command_line: Any, judge: dict[str, Any]) -> None:
    config = fresh_command_line.config(model__rewards=[EXACT, judge])
    assert "score.weight is missing" in _refused(fresh_command_line, "fit", f"--config={config}")
    assert not (fresh_command_line.cache / "cold_start").exists() and not fresh_command_line.runs.exists()


def _problems(folder: Path) -> Path:
    file = folder / "problems.jsonl"
    file.write_text('{"problem": "1+1=", "answer": "2"}\n')
    return file


def _asked(verb: str, model: Path, folder: Path, config: Path) -> list[object]:
    """What asks a verb for ``folder / "out"``."""
    out = folder / "out"
    return {
        "evaluate": [f"--model={model}", f"--data={_problems(folder)}", f"--output={out}", "-n=1"],
        "predict": [f"--model={model}", f"--config={config}", f"--output={out}", "--prompts=2", "--samples=1"],
        "filter": [f"--model={model}", f"--config={config}", f"--output={out}", "--samples=1"],
        "export": [model, out],
    }[verb]


VERBS = ["evaluate", "predict", "filter", "export"]


@pytest.mark.parametrize("verb", VERBS)
def test_an_export(fresh_command_line: Any, export: Path, lacking: Path, tmp_path: Path, verb: str) -> None:
    config = fresh_command_line.config()
    line = _refused(fresh_command_line, verb, *_asked(verb, lacking, tmp_path, config))
    assert f"{LAYER} is missing" in line and str(lacking) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("verb", "changed", "reason"),
    [
        ("evaluate", lambda weights: weights.pop(f"policy.{LAYER}"), f"{LAYER} is missing"),
        ("predict", lambda weights: weights.update({"policy.more": torch.zeros(1)}), "more is not part of the model"),
        (
            "export",
            lambda weights: weights.update({"policy.model.norm.weight": torch.zeros(3)}),
            "model.norm.weight is [3] and should be [32]",
        ),
        ("export", lambda weights: weights.update({"policy.model.norm.weight": 5}), "norm.weight is int and should be"),
        ("export", lambda weights: weights.pop("policy.model.embed_tokens.weight"), "embed_tokens.weight are missing"),
    ],
)
def test_a_checkpoint(
    fresh_command_line: Any, run: Callable[..., Path], tmp_path: Path, verb: str, changed: Any, reason: str
) -> None:
    config, folder = fresh_command_line.config(), run(changed)
    line = _refused(fresh_command_line, verb, *_asked(verb, folder, tmp_path, config))
    assert reason in line and ".ckpt does not fit the policy of its run" in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def judged(export: Path, judge: dict[str, Any], tmp_path: Path) -> Path:
    """The whole export, with that reward."""
    folder = Path(shutil.copytree(export, tmp_path / "judged"))
    manifest = json.loads((folder / "grpo_pl.json").read_text())
    (folder / "grpo_pl.json").write_text(json.dumps({**manifest, "rewards": [EXACT, judge]}))
    return folder


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_reward_model_of_an_export(fresh_command_line: Any, judged: Path, tmp_path: Path, verb: str) -> None:
    asked = [*_asked(verb, judged, tmp_path, fresh_command_line.config()), "--trust-rewards"]
    assert "score.weight is missing" in _refused(fresh_command_line, verb, *asked)


@pytest.mark.parametrize(("what", "weight"), [("lacking", LAYER), ("judged", "score.weight")])
def test_a_server_does_not_start(request: pytest.FixtureRequest, what: str, weight: str) -> None:
    asked = ["serve", f"--model={request.getfixturevalue(what)}", "--port=0", "--trust-rewards"]
    process, output = forked(partial(with_forked_workers, partial(main, asked)))
    with output:
        said = output.read()
    assert process.wait() == 1 and len(said.splitlines()) == 1, said
    assert said.startswith("grpo-pl serve: error: ") and f"{weight} is missing" in said


def test_a_whole_export_is_taken(
    fresh_command_line: Any, export: Path, run: Callable[..., Path], tmp_path: Path
) -> None:
    config = fresh_command_line.config()
    for model in (export, run(lambda weights: None)):
        for verb in ("evaluate", "predict"):
            fresh_command_line.done(verb, *_asked(verb, model, tmp_path, config))
