"""Images on two processes: the samples, metrics and weights of one."""

from pathlib import Path

import pytest
import yaml

from tests.distributed.conftest import Calls
from tests.images import training

pytestmark = pytest.mark.slow


def test_two_processes_draw_and_learn_what_one_does(
    like_one_process: Calls, five_rollouts: Path, tmp_path: Path
) -> None:
    """Micro-batches without an image among them."""
    tree = yaml.safe_load(five_rollouts.read_text())
    for place, value in training().items():
        part, _, field = place.partition("__")
        tree[part][field] = value
    file = tmp_path / "images.yaml"
    file.write_text(yaml.safe_dump(tree))
    single = like_one_process("ddp", file, rollouts=tree["data"]["steps"])
    assert any("vision_model" in name for name in single.state(1)["state_dict"])
