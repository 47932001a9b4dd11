"""Every command of the pages and of the configurations that is meant for a GPU computes in bfloat16 there."""

import re
from itertools import pairwise

import pytest
from jsonargparse import Namespace

from grpo_pl.distributed.strategy import computed_in
from grpo_pl.extras.plan.workload import resolved_settings
from tests.docs.test_commands import COMMANDS, GPU, ROOT, RUN_BY, _pattern

MEANT_FOR_GPUS = re.compile(r"--nproc-per-node|srun |gpu|GPU")


def _of_comments() -> list[str]:
    """Commands at the heads of the configurations."""
    found = []
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        text = re.sub(r"\\\n#\s*", "", file.read_text())
        found += re.findall(r"^#\s+((?:torchrun|srun|grpo-pl fit) .*configs/\S+.*)$", text, re.MULTILINE)
    return found


def _on_gpus() -> dict[str, list[str]]:
    """Commands that train, with the files and options that they name; those of recipes that say GPU among them."""
    found = {}
    for command in [*(command for _, command in COMMANDS), *_of_comments()]:
        words = command.split()
        files = [word for before, word in pairwise(words) if before == "--config" and (ROOT / word).is_file()]
        if " fit " not in f" {command} " or not files or "configs/" not in files[0]:
            continue
        pattern = _pattern(command)
        said = any("GPU" in (ROOT / file).read_text() for file in files if "/engine/" not in file)
        if said or MEANT_FOR_GPUS.search(command) or (pattern is not None and RUN_BY[pattern] == GPU):
            options = [word for word in words if re.match(r"--(model|data|trainer)\.\S+=", word)]
            options += [f"{name}={value}" for name, value in pairwise(words) if re.match(r"--model\.[^=]+$", name)]
            found[command] = [*files, *options]
    return found


COMMANDS_FOR_GPUS = _on_gpus()


def test_they_are_found() -> None:
    text = "\n".join(COMMANDS_FOR_GPUS)
    for part in ("fsdp.yaml", "fsdp_multinode.yaml", "ddp.yaml", "engine/vllm.yaml", "engine/ray.yaml", "srun"):
        assert part in text, part
    assert len(COMMANDS_FOR_GPUS) >= 8


@pytest.mark.parametrize("command", COMMANDS_FOR_GPUS)
def test_it_computes_in_bfloat16(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parts = resolved_settings(COMMANDS_FOR_GPUS[command])
    strategy = parts.trainer.strategy
    sharded = getattr(strategy.init_args, "param_dtype", None) if isinstance(strategy, Namespace) else None
    how = {"weights": parts.model.policy.dtype, "sharded": sharded}
    assert computed_in(str(parts.trainer.precision), **how, device="cuda") == "bfloat16"
    engine = parts.model.engine
    assert engine is None or getattr(engine.init_args, "dtype", None) is None  # the same
