"""Draws the first eight held-out images of a run with their questions, and the answers before and after GRPO.

Run ``python docs/plots/shapes.py runs/shapes`` after ``grpo-pl fit --config configs/shapes.yaml``; writes
``docs/images/shapes.png``. Answers are the greedy ones of the run's first and last validation.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from PIL import Image

from grpo_pl.files.rows import read_lines
from grpo_pl.files.runs import RunFolder

ROWS, COLUMNS = 2, 4
GROUP = "val"
SHADES = {True: "#18794e", False: "#b3261e", None: "#555555"}
"""Colours of right and wrong answers, and of all else."""
LONGEST = 16
"""Characters of an answer that are drawn."""


def both_ends(run: RunFolder) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The first held-out problems with an image, as the first and the last validation have them.

    Raises:
        ValueError: there are too few.
    """
    lines = [line.row for line in read_lines(run.held_out)] if run.held_out.exists() else []
    ends = [
        {row["id"]: row for row in line["answers"] if row["group"] == GROUP and row.get("images")}
        for line in (lines[:1] + lines[-1:])
    ]
    found = [(before, ends[-1][number]) for number, before in ends[0].items()] if len(lines) > 1 else []
    if len(found) < ROWS * COLUMNS:
        raise ValueError(f"{run.held_out} has {len(found)} images with answers before and after: finish the run.")
    return found[: ROWS * COLUMNS]


def answer_of(row: dict[str, Any]) -> tuple[str, bool]:
    """What the policy answered greedily, and whether it is right."""
    said = row.get("greedy", row["completions"][0])
    boxed = re.findall(r"\\boxed\{(.*?)\}", said["completion"])
    text = boxed[-1] if boxed else " ".join(said["completion"].split())
    return (text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…") or "nothing", said["value"] == 1.0


def drawn(run: RunFolder) -> bytes:
    """The picture, a PNG."""
    figure, axes = plt.subplots(ROWS, COLUMNS, figsize=(9.6, 2.5), layout="constrained")
    for axis, (before, after) in zip(axes.flat, both_ends(run), strict=True):
        shown = plt.imread(run.held_out_images / f"{before['images'][0]}.png")
        axis.imshow(shown, interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_anchor("W")
        axis.text(1.08, 0.86, before["question"], transform=axis.transAxes, weight="bold", fontsize=10)
        told = {"before": answer_of(before), "after": answer_of(after), "gold": (before["answer"], None)}
        for height, (name, (text, right)) in zip((0.58, 0.34, 0.1), told.items(), strict=True):
            axis.text(1.08, height, name, transform=axis.transAxes, fontsize=9, color=SHADES[None])
            axis.text(1.62, height, text, transform=axis.transAxes, fontsize=9, color=SHADES[right], parse_math=False)
    file, small = io.BytesIO(), io.BytesIO()
    figure.savefig(file, dpi=110)
    plt.close(figure)
    Image.open(file).convert("RGB").quantize(96).save(small, "PNG", optimize=True)
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "images" / "shapes.png")
    arguments = parser.parse_args()
    arguments.output.write_bytes(drawn(RunFolder(arguments.run)))


if __name__ == "__main__":
    main()
