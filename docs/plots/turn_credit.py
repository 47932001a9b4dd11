"""Plots the advantage of every turn of four episodes on one frozen lake, as three objectives see it.

Run ``python docs/plots/turn_credit.py``; writes ``turn_credit`` as CSV and PNG beside this file.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_pl.environment import play
from grpo_pl.extras.agents.frozen_lake import MOVES
from grpo_pl.extras.agents.gymnasium_ids import GymnasiumEnvironment
from grpo_pl.functional.turn_credit import anchor_groups, gigpo_advantages, turn_returns

MAP = ("SFFF", "FHFH", "FFFH", "HFFG")
EPISODES = (
    "down down right down right right",  # a shortest way
    "right left down down right down right right",  # the same after a look around
    "down down right up",  # a good beginning, and then a hole
    "down right",  # a hole at once
)
ARROWS = dict(zip(MOVES, "←↓→↑", strict=True))


class Group(NamedTuple):
    """Four episodes of one prompt."""

    moves: list[list[str]]
    fields: list[list[str]]
    """The field that each move was made from: its row, a to d, and its column."""
    rewards: Tensor  # (4, K)
    present: Tensor  # (4, K)


def played() -> Group:
    """The episodes, played in Gymnasium's own lake."""
    lake = GymnasiumEnvironment(
        id="FrozenLake-v1",
        kwargs={"desc": list(MAP), "is_slippery": False},
        observe="grpo_pl.extras.agents.frozen_lake:show",
        parse="grpo_pl.extras.agents.frozen_lake:parse",
    )
    moves = [episode.split() for episode in EPISODES]
    longest = max(map(len, moves))
    rewards = torch.zeros(len(moves), longest, dtype=torch.float64)
    present = torch.zeros(len(moves), longest, dtype=torch.bool)
    fields = []
    for row, actions in enumerate(moves):
        turns = play(lake, actions)
        assert turns[-1].terminated and len(turns) == len(actions) + 1
        rewards[row, : len(actions)] = torch.tensor([turn.reward for turn in turns[1:]])
        present[row, : len(actions)] = True
        fields.append([_field(str(turn.observation)) for turn in turns[:-1]])
    return Group(moves, fields, rewards, present)


def _field(shown: str) -> str:
    row, line = next((row, line) for row, line in enumerate(shown.split("\n")) if "@" in line)
    return f"{'abcd'[row]}{line.index('@') + 1}"


def advantages(group: Group) -> dict[str, Tensor]:
    """(4, K) of each objective."""
    size = len(group.moves)
    anchors = anchor_groups(group.fields, group_size=size)
    values = group.rewards.sum(1, keepdim=True)
    return {
        "grpo (scale: none)": (values - values.mean()) * group.present,
        "turn_returns": turn_returns(group.rewards, group.present, anchors, group_size=size),
        "gigpo": gigpo_advantages(group.rewards, group.present, anchors, group_size=size),
    }


def save(folder: Path, group: Group, table: dict[str, Tensor]) -> None:
    with (folder / "turn_credit.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["episode", "turn", "field", "move", "reward", *table])
        for row, turn in group.present.nonzero().tolist():
            credit = [f"{values[row, turn]:.6g}" for values in table.values()]
            reward = f"{group.rewards[row, turn]:g}"
            writer.writerow([row + 1, turn + 1, group.fields[row][turn], group.moves[row][turn], reward, *credit])


def plot(folder: Path, group: Group, table: dict[str, Tensor]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = [4, *[group.present.shape[1]] * len(table)]
    figure, (lake, *panels) = pyplot.subplots(
        1, 1 + len(table), figsize=(14, 2.9), width_ratios=widths, layout="constrained"
    )
    colours = {"S": "#dceaf7", "F": "#dceaf7", "H": "#33475b", "G": "#9fd8a4"}
    for row, line in enumerate(MAP):
        for column, tile in enumerate(line):
            lake.add_patch(pyplot.Rectangle((column, row), 0.95, 0.95, color=colours[tile]))
            name = f"{'abcd'[row]}{column + 1}" + {"S": "\nstart", "G": "\ngoal"}.get(tile, "")
            ink = "white" if tile == "H" else "black"
            lake.text(column + 0.48, row + 0.48, name, ha="center", va="center", color=ink, fontsize=8)
    lake.set(xlim=(0, 4), ylim=(4, 0), aspect="equal", title="the lake")
    lake.axis("off")
    for axes, (name, values) in zip(panels, table.items(), strict=True):
        for row, turn in group.present.nonzero().tolist():
            value = float(values[row, turn])
            colour = pyplot.get_cmap("RdBu")(0.5 + value / 3)
            axes.add_patch(pyplot.Rectangle((turn, row), 0.95, 0.95, color=colour))
            ink = "white" if abs(value) > 0.85 else "black"
            what = f"{group.fields[row][turn]} {ARROWS[group.moves[row][turn]]}\n{value:+.2f}"
            axes.text(turn + 0.48, row + 0.48, what, ha="center", va="center", color=ink, fontsize=7.5)
        ends = ["goal" if float(total) else "hole" for total in group.rewards.sum(1)]
        axes.set(xlim=(0, group.present.shape[1]), ylim=(len(ends), 0), title=name, xlabel="turn")
        axes.set_yticks([row + 0.5 for row in range(len(ends))], ends)
        axes.set_xticks([turn + 0.5 for turn in range(group.present.shape[1])], range(1, group.present.shape[1] + 1))
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.savefig(folder / "turn_credit.png", dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    group = played()
    table = advantages(group)
    save(args.out, group, table)
    plot(args.out, group, table)


if __name__ == "__main__":
    main()
