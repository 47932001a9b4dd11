"""Teachers of the parts of a mixture: one process, DDP on two and FSDP2 on two learn the same from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


def _part(seed: int) -> dict[str, Any]:
    arguments = {"digits": 1, "scratchpad_share": 0.0, "seed": seed}
    return {"class_path": "grpo_pl.data.tasks.arithmetic.ArithmeticPrompts", "init_args": arguments}


@pytest.fixture(scope="module")
def taught(completed: Callable[..., Any], five_rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rollouts of two parts, each with a teacher: the policy of another run."""
    folder = tmp_path_factory.mktemp("taught")
    tree = yaml.safe_load(five_rollouts.read_text())
    teacher = {"path": str(completed("single").path / "export")}
    tree["model"]["teachers"] = {"odd": teacher, "even": teacher | {"attn_implementation": "eager"}}
    tree["model"]["algorithm"] |= {"beta": 0.0, "distillation": "jensen_shannon", "distillation_mix": 0.3}
    tree["data"]["source"] = {
        "class_path": "grpo_pl.data.mixture.MixturePrompts",
        "init_args": {"parts": {"odd": _part(0), "even": _part(1)}},
    }
    tree["data"] |= {"steps": 2, "allow_overlap": True}
    file = folder / "taught.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_what_is_learned_from_teachers_is_that_of_one_process(
    like_one_process: Callable[..., Any], read_metrics: Callable[..., Any], taught: Path, name: str
) -> None:
    single = like_one_process(name, taught, rollouts=2)
    assert any(float(row.get("teacher/divergence", 0)) > 0 for row in read_metrics(single.metrics))
