"""``grpo-pl compare``: the same task under several algorithms, as a table, a plot and the figures behind it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from grpo_pl.cli.commands import check_at_least
from grpo_pl.config.objects import Config, ConfigArguments, settings
from grpo_pl.config.presets import PRESET
from grpo_pl.config.shipped import CONFIGS
from grpo_pl.evaluation.curves import Points, read_curves
from grpo_pl.extras.compare.comparison import draw_curves, results_table, write_curves
from grpo_pl.files.runs import RunFolder, claim_run_folder


def compare(
    config: ConfigArguments = "configs/quickstart.yaml",
    algorithms: str = "grpo,dr_grpo,rloo",
    steps: int = 40,
    seed: int = 0,
    overlay: str | None = None,
    runs_dir: str = "runs",
    name: str = "compare",
) -> int:
    """Fits one configuration under several algorithms, one after the other, with equal seeds and prompts.

    Every fit is a run of its own inside ``runs_dir/name``, which also gets compare.csv and compare.png. A cold start is
    made once and shared. KL and entropy are means over all completions that are in the loss. A fit that fails is left
    out, and the exit status is 1.

    Args:
        config: the configuration of the task.
        algorithms: presets with commas between them. A name is looked for as NAME.yaml in the folder `algorithm` beside
            the configuration, then in the project's own configs/algorithm; anything ending in .yaml is a file.
        steps: rollouts of each fit; the learning-rate schedule ends there.
        seed: seed of every fit.
        overlay: another configuration, read after each preset, so that it wins.
        runs_dir: folder that holds one folder per comparison.
        name: name of the comparison's folder.
    """
    given = settings(config, "model", "data", "trainer", "checkpoint")
    if not given.files:
        raise ValueError("--config is missing: give the configuration of the task.")
    presets = find_presets(algorithms, Path(given.files[0]))
    last = settings(overlay)
    if PRESET in Config(last.files, last.trees, given.options):
        raise ValueError(f"{PRESET} would take the place of every preset of --algorithms: name it there only.")
    check_at_least(1, steps=steps)
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("compare draws with matplotlib, which is not installed: pip install 'grpo_pl[plot]'.")
    folder = claim_run_folder(Path(runs_dir), name).path
    runs: dict[str, dict[str, Points]] = {}
    for number, (preset, file) in enumerate(presets.items(), start=1):
        print(f"[{number}/{len(presets)}] {preset}", flush=True)
        files = [f"--config={one}" for one in (*given.files, file, *last.files)]
        if _fit([*files, *given.options], folder, preset, steps=steps, seed=seed):
            runs[preset] = read_curves(RunFolder(folder / preset).metrics)
    failed = [preset for preset in presets if preset not in runs]
    if runs:
        curves, plot = folder / "compare.csv", folder / "compare.png"
        write_curves(curves, runs)
        draw_curves(plot, runs, f"{Path(given.files[0]).stem}, seed {seed}")
        console = Console()
        console.print(results_table(runs))
        console.print(f"curves  {curves}\nplot    {plot}", highlight=False, soft_wrap=True)
    if failed:
        print(f"grpo-pl compare: error: {', '.join(failed)} failed; the reason stands above.", file=sys.stderr)
    return int(bool(failed))


def find_presets(algorithms: str, config: Path) -> dict[str, Path]:
    """Preset name -> its file, in the order given."""
    folders = [config.parent / "algorithm", CONFIGS / "algorithm"]
    given = [name.strip() for name in algorithms.split(",") if name.strip()]
    if not given:
        raise ValueError("--algorithms is empty: give presets such as grpo,dr_grpo,rloo.")
    files = []
    for name in given:
        own = [Path(name)] if name.endswith((".yaml", ".yml")) else [folder / f"{name}.yaml" for folder in folders]
        found = next((file for file in own if file.is_file()), None)
        if found is None:
            known = ", ".join(sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})) or "none"
            raise ValueError(f"no preset {name!r}. There are: {known}; or give the path of a .yaml file.")
        files.append(found)
    twice = [stem for stem, count in Counter(file.stem for file in files).items() if count > 1]
    if twice:
        raise ValueError(f"--algorithms has {twice[0]!r} twice: each needs a name of its own.")
    return {file.stem: file for file in files}


def _fit(given: Sequence[str], folder: Path, name: str, *, steps: int, seed: int) -> bool:
    """Runs one fit in a process of its own, so that runs share no state; true if it succeeded."""
    options = {
        "seed_everything": seed,
        "data.steps": steps,
        "trainer.val_check_interval": steps,  # at both ends only
        "model.algorithm.skip_zero_advantage": "false",  # else KL and entropy would not be over the same completions
        "runs_dir": folder,
        "name": name,
    }
    command = [sys.executable, "-m", "grpo_pl", "fit", *given, *(f"--{key}={value}" for key, value in options.items())]
    return subprocess.run(command, check=False).returncode == 0
