"""Images on several processes: the samples, metrics and weights of one."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_pl.files.checkpoints import policy_weights
from tests.distributed.conftest import Calls
from tests.images import LLAVA

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["ddp", "four", "in threes", "fsdp", "sharded"])
def test_any_number_of_processes_and_any_batch_draw_and_learn_what_one_process_does(
    like_one_process: Calls, completed: Calls, seeing: Path, name: str
) -> None:
    single = like_one_process(name, seeing, rollouts=5)
    assert any("vision_model" in weight for weight in single.state(1)["state_dict"])
    weights = policy_weights(completed(name, seeing).state(5))
    exported = load_file(completed(name, seeing).path / "export" / "model.safetensors")
    assert all(torch.equal(weights[key], value) for key, value in exported.items())


def test_a_large_frozen_tower_and_a_renewed_reference_are_sharded_as_one_process_has_them(
    like_one_process: Calls, seeing: Path, tmp_path: Path
) -> None:
    """A tower with more weights than the language model."""
    tree = yaml.safe_load(seeing.read_text())
    tower = {"vision_config": LLAVA["vision_config"] | {"hidden_size": 64, "intermediate_size": 128}}
    tree["model"]["policy"] |= {"from_scratch": LLAVA | tower, "train_vision": False}
    tree["model"]["algorithm"] |= {"reference": "refreshed", "ref_update_every": 2}
    tree["data"]["steps"] = 3
    file = tmp_path / "llava.yaml"
    file.write_text(yaml.safe_dump(tree))
    like_one_process("fsdp", file, rollouts=3)


def test_shards_in_bfloat16_read_images(completed: Calls, read_metrics: Calls, seeing: Path) -> None:
    run = completed("bfloat16", seeing)
    assert [row["step"] for row in read_metrics(run.metrics)][-1] == "5"
