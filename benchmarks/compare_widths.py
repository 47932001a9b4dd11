"""How much narrower pairing makes the interval of `grpo-pl compare`: ten pairs of policies, from two rollouts apart to
other models. Makes seven short runs of the quickstart first.

    python benchmarks/compare_widths.py --output RECORD.json   # half an hour on a busy core
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import parser_of, publish, surroundings, write
from runs import CONFIGS, fit

from grpo_pl.extras.compare import Comparison, PairedProblems, compare
from grpo_pl.extras.compare.paired import Pair

SAMPLES, STEPS = 4, 40
SHORT = (
    f"--data.steps={STEPS}",
    "--data.prompts_per_step=16",
    "--model.algorithm.num_minibatches=1",  # as the record was made
    "--model.algorithm.mismatch=auto",
    f"--trainer.val_check_interval={STEPS}",
    "--checkpoint.every_n_rollouts=2",
    "--checkpoint.keep=100",
    "--checkpoint.keep_best=0",
)
RUNS: Mapping[str, Sequence[str]] = {
    "base": (),
    "half_rate": ("--model.optimization.lr=3e-4",),
    "dr_grpo": (f"--config={CONFIGS / 'algorithm' / 'dr_grpo.yaml'}",),
    "rloo": (f"--config={CONFIGS / 'algorithm' / 'rloo.yaml'}",),
    "draws": ("--seed_everything=1",),
    "cold_start": ("--seed_everything=1", "--model.policy.init_seed=1", "--model.cold_start.seed=1"),
    "narrow": ("--model.policy.from_scratch.hidden_size=96",),
}
"""Run -> what is other in it."""
PAIRS: Mapping[str, tuple[str, str]] = {
    "rollouts 38 and 40 of one run": ("base@38", "base@40"),
    "rollouts 30 and 40": ("base@30", "base@40"),
    "rollouts 20 and 40": ("base@20", "base@40"),
    "rollouts 10 and 40": ("base@10", "base@40"),
    "half the learning rate": ("base@40", "half_rate@40"),
    "preset dr_grpo": ("base@40", "dr_grpo@40"),
    "preset rloo": ("base@40", "rloo@40"),
    "another seed of the draws": ("base@40", "draws@40"),
    "another cold start": ("base@40", "cold_start@40"),
    "another width of the model": ("base@40", "narrow@40"),
}
"""What is other -> run and rollout of the two policies."""


def widths(found: Comparison) -> dict[str, Any]:
    """pass@1 of both, problems that flip with one answer, and ratios of widths: of one answer with equal keys and with
    other keys, each the mean over the samples, and of all answers."""
    (every,) = found.sets.values()
    pairs = every.pairs

    def one(shift: int) -> list[PairedProblems]:
        taken = ((i, (i + shift) % SAMPLES) for i in range(SAMPLES))
        return [PairedProblems.of([Pair(problem=p.problem, a=[p.a[i]], b=[p.b[k]]) for p in pairs]) for i, k in taken]

    alike, apart = one(0), one(1)
    return {
        "pass@1": [round(values.mean().item(), 4) for values in every.values],
        "flipped": fmean(each.cells["only_a"] + each.cells["only_b"] for each in alike),
        "ratio": {
            "one answer": round(fmean(each.width_ratio or 0.0 for each in alike), 3),
            "one answer, other keys": round(fmean(each.width_ratio or 0.0 for each in apart), 3),
            f"{SAMPLES} answers": round(every.width_ratio or 0.0, 3),
        },
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=Path, help="keep the runs here, and take those that are there")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"benchmark": "compare_widths", **surroundings("cpu"), "rollouts": STEPS}
    record |= {"samples": SAMPLES, "pairs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.runs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name, options in RUNS.items():
            if not (folder / name / "export").is_dir():
                fit(CONFIGS / "quickstart.yaml", folder, *options, *SHORT, name=name)

        def policy(name: str) -> Path:
            run, _, rollouts = name.partition("@")
            return folder / run / "checkpoints" / f"rollout-{int(rollouts):06d}.ckpt"

        for what, (a, b) in PAIRS.items():
            record["pairs"][what] = widths(compare(policy(a), policy(b), samples=SAMPLES, device="cpu"))
            print(json.dumps({what: record["pairs"][what]}), flush=True)
            write(record, arguments.output)
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
