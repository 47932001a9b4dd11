"""Writes the folder of a task: fills the templates, and looks at the source that they make."""

from __future__ import annotations

import importlib.util
import json
import keyword
import math
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from string import Template
from types import ModuleType

import yaml

from grpo_pl.data.demonstrations import Demonstration
from grpo_pl.data.sources import PromptSource
from grpo_pl.extras.scaffold.budget import Plan, measure_speed, plan
from grpo_pl.extras.scaffold.kinds import Draft
from grpo_pl.extras.scaffold.pretrained import asked_config, played_config
from grpo_pl.extras.scaffold.small_policy import measure_texts, shape_for
from grpo_pl.files.writing import staged_folder
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.processes.modules import load_module
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.function import FunctionReward
from grpo_pl.training.defaults import SCRATCH_BATCH

TEMPLATES = Path(__file__).parent / "templates"
CHECKED = 16
"""Demonstrations that the reward has to find right, at most."""
FEWEST_ROWS = 8
"""Of a file, for a cold start and for rollouts each."""
FEW_ROWS = 1000
"""Training rows below which a rule is seldom learned from scratch: docs/tuning.md has what files gave."""
DEMONSTRATED = 0.5
"""Share of the training problems that the cold start shows."""
PLAYED_HELD_OUT = 50
HELD_OUT = 200
"""Held-out problems of a validation: pass@1 of four samples each is then known to about ±0.03."""
PLENTY = 300
"""Where fewer are held out, a validation takes all: with another seed there are others, and perhaps fewer."""


def check_folder(folder: Path) -> None:
    """Refuses a folder whose name, which is that of the task, cannot be that of a Python package."""
    name = folder.name
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} cannot be the name of a task: Python imports its task.py by it, so take letters, digits and _, "
            "with a letter first."
        )
    if folder.exists():
        raise ValueError(f"{folder} exists; nothing was written. Choose another name.")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ValueError(f"{name!r} is the name of a Python package that is installed: choose another one.")


def write_task(drafted: Draft, folder: Path, policy: str | None, *, lora: bool | None, minutes: float) -> None:
    """Writes the folder, all of it or nothing, and prints what it looked at.

    Args:
        policy: a pretrained one; None is a tiny one from scratch.
        lora: train adapters of it; None goes by its size.
        minutes: the run is made to take about so long on this machine, unless the policy is pretrained.
    """
    name = folder.name
    shown: dict[str, object] = {"name": name, "folder": folder.as_posix(), "title": drafted.title}
    shown |= {"reward": _reward(drafted, name), **drafted.values}
    for note in drafted.notes:
        print(note)
    with staged_folder(folder, replace=False) as staging:
        if drafted.copied is not None:
            shutil.copyfile(drafted.copied, staging / drafted.file_name)
        _fill(drafted.kind, "task.py", staging, shown)
        task = load_module(str(staging / "task.py"))
        shutil.rmtree(staging / "__pycache__", ignore_errors=True)  # which importing it made
        if policy is None:
            _small_policy(drafted, task, staging, shown, minutes)
        else:
            if drafted.played:
                config = {**played_config(policy, drafted, lora=lora), "held_out": PLAYED_HELD_OUT}
            else:
                source, found = _source(drafted, task)
                _shares(source)
                config = {**asked_config(policy, source, drafted, lora=lora), "held_out": _of_held_out(found)[1]}
            _fill(drafted.kind, "config_pretrained.yaml", staging, {**shown, **config}, name="config.yaml")
        shown["unanswered"] = "0" if drafted.kind == "reward" else '"no_answer"'
        _fill(drafted.kind, "test_task.py", staging, shown, name=f"test_{name}.py")  # pytest wants different names
        _fill(drafted.kind, "README.md", staging, {**shown, **_data_section(drafted)})


def _fill(kind: str, file: str, folder: Path, values: dict[str, object], *, name: str = "") -> None:
    """The template of a kind, or else the one that all kinds share, under its own name or another."""
    own = TEMPLATES / kind / f"{file}.tmpl"
    template = Template((own if own.is_file() else TEMPLATES / f"{file}.tmpl").read_text(encoding="utf-8"))
    (folder / (name or file)).write_text(template.substitute(values), encoding="utf-8")


def _source(drafted: Draft, task: ModuleType) -> tuple[PromptSource, int]:
    """The source that task.py makes, and how many problems it holds out; prints what it leaves out."""
    source: PromptSource = task.Problems(demonstrated_share=DEMONSTRATED)
    found = len(source.validation())
    for line in getattr(source, "notes", ()):  # of reading it for the validation
        print(line)
    if not found:
        raise ValueError("no problem is held out: give more rows with different questions.")
    with closing(_reward_of(drafted, task)) as reward:
        _check_demonstrations(source, reward)
    return source, found


def _of_held_out(found: int) -> tuple[int, str]:
    """How many held-out problems a validation has, and ``data.val_prompts`` that gives them with any seed."""
    return (found, "null") if found < PLENTY else (HELD_OUT, str(HELD_OUT))


def _small_policy(drafted: Draft, task: ModuleType, folder: Path, shown: Mapping[str, object], minutes: float) -> None:
    """Writes the configuration of a policy from scratch, first without its budget to measure the speed of what it
    makes."""
    demonstrated: int | None = None
    asked: int | None = None
    given: dict[str, object]
    if played := drafted.played:
        held_out, samples, given = PLAYED_HELD_OUT, 2 + 1, {**played, "held_out": PLAYED_HELD_OUT}
        written, shape = played["turns"] * played["completion"], shape_for(played["context"])
        demonstrations: Sequence[Demonstration] = [Demonstration("0", "0" * (played["context"] - 8))]
    else:
        source, found = _source(drafted, task)
        held_out, val_prompts = _of_held_out(found)
        texts = measure_texts(source)
        print(f"prompts of up to {texts.prompt} tokens, completions of up to {texts.completion}.")
        demonstrated, asked = _shares(source)
        samples, written, demonstrations, shape = 4 + 1, texts.written, texts.shown, shape_for(texts.row)
        given = {
            "context": texts.context,
            "completion": texts.completion,
            "tags": "".join(f"\n      - {json.dumps(tag, ensure_ascii=False)}" for tag in texts.tags) or " []",
            "characters": "" if texts.ascii_only else _FROM_DATA,
            "shown": "task.py",
            "held_out": val_prompts,
        }
    given = {**shown, **given, "hidden": shape.hidden, "intermediate": shape.intermediate, "layers": shape.layers}
    unknown = dict.fromkeys(("steps", "interval", "cold_steps", "prompts", "minibatches"), 0)
    _fill(drafted.kind, "config.yaml", folder, {**given, **unknown})
    policy = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["model"]["policy"]
    speed = measure_speed(PolicyConfig(**{**policy, "characters": None}), demonstrations, written=written)
    chosen = plan(
        speed,
        minutes=minutes,
        held_out=held_out,
        samples=samples,
        shown=demonstrated,
        asked=asked,
        played=bool(played),
    )
    if demonstrated is not None and asked is not None:
        print(_of_rows(demonstrated, asked, held_out, chosen))
    given |= {"steps": chosen.rollouts, "interval": -(-chosen.rollouts // 3), "prompts": chosen.prompts}
    given |= {"minibatches": chosen.minibatches, "cold_steps": chosen.steps}
    _fill(drafted.kind, "config.yaml", folder, given)
    print(f"Of {minutes:g} minutes (--minutes):\n{chosen.table()}")


def _shares(source: PromptSource) -> tuple[int | None, int | None]:
    """Training problems that the cold start may show, and those that rollouts may ask; None of problems without end."""
    rows, shown = source.problems("train"), source.demonstrated()
    if rows is None or shown is None:
        return None, None
    if min(shown, len(rows) - shown) < FEWEST_ROWS:
        raise ValueError(
            f"{len(rows)} training rows are too few to share between a cold start and rollouts: give "
            f"{3 * FEWEST_ROWS} or more."
        )
    return shown, len(rows) - shown


def _of_rows(demonstrated: int, asked: int, held_out: int, chosen: Plan) -> str:
    """How the rows of a file are shared out, and a warning where they are few."""
    passes = chosen.steps * SCRATCH_BATCH / demonstrated
    told = (
        f"of the rows, the cold start shows {demonstrated} up to {math.ceil(passes)} times, rollouts ask {asked} "
        f"others, and {held_out} are held out."
    )
    if demonstrated + asked >= FEW_ROWS:
        return told
    return (
        f"{told}\n{demonstrated + asked} rows to train on are few to learn a rule from: a tiny policy may know "
        "them by heart and answer others wrong. What helps: a pretrained model (leave --policy out), more rows, or a "
        "generator (write `draw` as in the example that `grpo-pl new NAME` makes)."
    )


def _reward(drafted: Draft, name: str) -> str:
    """The lines of a configuration that name the reward of the task, up to its next argument."""
    if drafted.kind == "reward":
        return (
            "    - class_path: grpo_pl.rewards.FunctionReward\n      init_args:\n"
            f"        function: {name}.task:right\n        name: right\n"
        )
    return f"    - class_path: {name}.task.Right\n      init_args:\n"


def _reward_of(drafted: Draft, task: ModuleType) -> Reward:
    if drafted.kind == "reward":
        return FunctionReward(function=task.right, correctness=True)
    reward: Reward = task.Right(correctness=True)
    return reward


_FROM_DATA = "    characters: from_data  # those of ASCII and all others that the problems hold\n"


def _check_demonstrations(source: PromptSource, reward: Reward) -> None:
    """Refuses a task whose reward finds the source's own demonstrations wrong."""
    rows = source.problems("train")
    problems = source.prompts(0, count=CHECKED) if rows is None else list(islice(rows, CHECKED))
    texts = [str(source.demonstration(problem, random.Random(0))) for problem in problems]
    columns = {key: [problem.columns.get(key) for problem in problems] for key in problems[0].columns}
    scores = reward(texts, [problem.answer for problem in problems], columns)
    for text, problem, score in zip(texts, problems, scores, strict=True):
        if not score.correct:
            raise ValueError(
                f"the gold answer {problem.answer[:60]!r} of {problem.question[:60]!r} cannot be judged: its own "
                f"demonstration {text[-60:]!r} is {score.status}."
            )


def _data_section(drafted: Draft) -> dict[str, object]:
    """The values of the README's section about the data."""
    files = f"| `{drafted.file_name}` | the problems, a copy of {drafted.copied.name} |" if drafted.copied else ""
    notes = {
        "reward": "The problems are made up by `Problems.draw`, and `right` is the reward function.",
        "rows": "The columns are named in `task.py`.",
        "environment": "Each prompt is the seed of a world. Change what the policy sees in `shown`, and what counts as "
        "right in `Right`.",
    }[drafted.kind]
    if drafted.kind == "rows" and drafted.copied is None:
        notes = f"The data are read where they are, {drafted.values['file_shown']}: they are too large to copy. {notes}"
    return {"files": files, "notes": notes}
