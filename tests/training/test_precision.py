"""A run in ``bf16-mixed`` draws, trains and validates in it, and so does whoever takes its model."""

import json
from typing import Any

import pytest
import torch

from grpo_pl.cli.main import main
from grpo_pl.functional.gemm import multiplies_bfloat16
from grpo_pl.policy.trained import find_model
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.update import PolicyUpdate

AUTO = {"gain": 1.5, "mean_error": 1e-3, "p99_error": 1e-2, "equal_rows": 0.9}
"""What ``model.compute: auto`` of an earlier version noted where it took bfloat16."""


def test_a_run_in_bfloat16_draws_trains_and_validates_in_it(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[bool]] = {"rollout": set(), "update": set()}
    draw, score = NativeEngine.generate, PolicyUpdate.run

    def drawn(self: Any, *arguments: Any, **options: Any) -> Any:
        seen["rollout"].add(torch.is_autocast_enabled("cpu"))
        return draw(self, *arguments, **options)

    def updated(self: Any, *arguments: Any, **options: Any) -> Any:
        seen["update"].add(torch.is_autocast_enabled("cpu"))
        return score(self, *arguments, **options)

    monkeypatch.setattr(NativeEngine, "generate", drawn)
    monkeypatch.setattr(PolicyUpdate, "run", updated)
    for precision, on in (("bf16-mixed", True), ("32-true", False)):
        config = command_line.config(f"seen_{precision}", trainer__precision=precision)
        command_line.done("fit", f"--config={config}", f"--name=seen_{precision}", "--data.steps=2")
        assert seen == {"rollout": {on}, "update": {on}}
        run = command_line.runs / f"seen_{precision}"
        last = run / "checkpoints" / "last.ckpt"
        assert json.loads((run / "run.json").read_text())["compute"]["precision"] == precision
        state = torch.load(last, weights_only=True)
        moments = [value for moment in state["optimizer_states"][0]["state"].values() for value in moment.values()]
        assert {value.dtype for value in [*state["state_dict"].values(), *moments]} == {torch.float32}
        seen = {name: set() for name in seen}
        command_line.done("validate", f"--config={config}", f"--ckpt_path={last}")
        assert seen == {"rollout": {on}, "update": set()}
        seen = {name: set() for name in seen}
        output = command_line.runs / f"seen_{precision}.jsonl"
        assert main(["predict", f"--model={run}", "--prompts=2", "--samples=2", f"--output={output}"]) == 0
        assert seen == {"rollout": {on and multiplies_bfloat16()}, "update": set()}
        seen = {name: set() for name in seen}
        for model in (run / "export", last):
            trained = find_model(model)
            with trained.computing(trained.load_policy("cpu")):
                assert torch.is_autocast_enabled("cpu") is (on and multiplies_bfloat16())
    bf16 = command_line.runs / "seen_bf16-mixed"
    changed = ["--trainer.precision=32-true", "--data.steps=3", "--resume"]
    outcome = command_line.done("fit", "--config", bf16 / "config.yaml", "--name=seen_bf16-mixed", *changed)
    assert seen == {"rollout": {False}, "update": {False}}
    assert "precision 32-true, processes 1" in outcome.err
    assert find_model(bf16 / "checkpoints" / "last.ckpt").precision == "32-true"


@pytest.mark.parametrize(
    ("noted", "options", "said"),
    [
        (AUTO, [], 1),
        (AUTO, ["--trainer.precision=bf16-mixed"], 0),
        pytest.param(AUTO | {"gain": 1.29}, [], 0, marks=pytest.mark.slow),
        pytest.param(AUTO | {"mean_error": float("nan")}, [], 0, marks=pytest.mark.slow),
        pytest.param({}, [], 0, marks=pytest.mark.slow),
    ],
    ids=["bfloat16", "bfloat16_again", "slow", "apart", "exact"],
)
def test_a_run_of_an_earlier_version_that_chose_bfloat16_says_so(
    command_line: Any,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
    request: pytest.FixtureRequest,
    noted: dict[str, float],
    options: list[str],
    said: int,
) -> None:
    name = request.node.callspec.id
    config, run = command_line.config(name, data__steps=1), command_line.runs / name
    save = GRPOModule.on_save_checkpoint

    def saved(self: GRPOModule, checkpoint: dict[str, Any]) -> None:
        save(self, checkpoint)
        checkpoint["compute"] = noted

    with monkeypatch.context() as patch:
        patch.setattr(GRPOModule, "on_save_checkpoint", saved)
        assert command_line("fit", f"--config={config}").status == 0
    earlier = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(earlier.replace("\nmodel:\n", "\nmodel:\n  compute: auto\n"))
    assert "compute: auto" in (run / "config.yaml").read_text()
    recwarn.clear()
    outcome = command_line.done("fit", f"--config={config}", "--resume", "--data.steps=2", *options)
    lines = [*map(str, (w.message for w in recwarn)), *outcome.err.splitlines()]
    assert len([line for line in lines if "bf16-mixed goes on as before" in line]) == said
    assert "model.compute: " not in "".join(line for line in lines if line.startswith("changed"))
