"""docs/lightning.md shows the files of examples/, which run, and names what is refused."""

import re
from pathlib import Path
from typing import Any

import yaml

from grpo_pl.training.checks import REFUSED
from tests.docs.pages import ROOT, blocks, page, run

PAGE = page("lightning")


def test_the_page_shows_the_examples_as_they_are() -> None:
    assert (ROOT / "examples/cli.py").read_text() in blocks(PAGE, "python")
    assert (ROOT / "examples/fabric.py").read_text() == blocks(page("python"), "python")[0]


def test_the_page_names_every_callback_that_is_refused() -> None:
    names = {"BaseFinetuning": "BackboneFinetuning"}  # the base of it
    for kind in REFUSED:
        assert f"`{names.get(kind.__name__, kind.__name__)}`" in PAGE


def test_the_loop_of_fabric_learns(tmp_path: Path) -> None:
    shorter = (ROOT / "examples/fabric.py").read_text().replace("= 400, 32, 8, 4,", "= 40, 16, 8, 4,")
    (tmp_path / "loop.py").write_text(shorter)
    points = [float(found) for found in re.findall(r"rollout \d+: ([\d.]+) of 7", run("loop.py", folder=tmp_path))]
    assert len(points) == 2 and points[0] > 2.0 and points[1] > points[0]


def test_a_command_line_of_ten_lines_trains_twice_and_tests(command_line: Any, tmp_path: Path) -> None:
    config = yaml.safe_load(Path(command_line.config()).read_text())
    del config["checkpoint"], config["model"]["cold_start"]
    config["data"]["source"]["class_path"] = "ArithmeticPrompts"
    config["trainer"]["enable_progress_bar"] = False
    config["data"]["steps"] = 2
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    own = (ROOT / "examples/cli.py").read_text().replace("SortingPrompts", "ArithmeticPrompts")
    (tmp_path / "cli.py").write_text(own.replace("sorting import", "arithmetic import"))
    for verb in ("fit", "fit", "test"):
        said = run("cli.py", verb, "--config", "my.yaml", folder=tmp_path)
    assert "test/pass@1" in said
    assert len(list((tmp_path / "lightning_logs").iterdir())) >= 2
