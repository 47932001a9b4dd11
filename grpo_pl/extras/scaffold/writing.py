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
from grpo_pl.extras.scaffold.pretrained import pretrained_config
from grpo_pl.extras.scaffold.small_policy import measure_texts, shape_for
from grpo_pl.files.writing import staged_folder
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.processes.modules import load_module
from grpo_pl.rewards.base import Reward
from grpo_pl.training.defaults import SCRATCH_BATCH

TEMPLATES = Path(__file__).parent / "templates"
CHECKED = 16
"""Demonstrations that the reward has to find right, at most."""
FEWEST_ROWS = 8
"""Of a file, for a cold start and for rollouts each."""
FEW_ROWS = 1000
"""Training rows below which a rule is seldom learned from nothing: docs/tuning.md has what files gave."""
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
        policy: a pretrained one; None is a small one from nothing.
        lora: train adapters of it; None goes by its size.
        minutes: the run is made to take about so long on this machine, unless the policy is pretrained.
    """
    name = folder.name
    if policy is not None and drafted.played:
        raise ValueError(f"--policy: a task of kind {drafted.kind!r} is played by a small policy from nothing.")
    shown: dict[str, object] = {"name": name, "folder": folder.as_posix(), "title": drafted.title, **drafted.values}
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
            source, found = _source(drafted, task)
            config = pretrained_config(policy, source, name, lora=lora)
            config |= {"init_args": _init_args(_settings(drafted)), "held_out": _of_held_out(found)[1]}
            _fill(drafted.kind, "config_pretrained.yaml", staging, {**shown, **config}, name="config.yaml")
        _fill(drafted.kind, "test_task.py", staging, shown, name=f"test_{name}.py")  # pytest wants different names
        _fill(drafted.kind, "README.md", staging, {**shown, **_data_section(drafted)})


def _fill(kind: str, file: str, folder: Path, values: dict[str, object], *, name: str = "") -> None:
    """The template of a kind, or else the one that all kinds share, under its own name or another."""
    own = TEMPLATES / kind / f"{file}.tmpl"
    template = Template((own if own.is_file() else TEMPLATES / f"{file}.tmpl").read_text(encoding="utf-8"))
    (folder / (name or file)).write_text(template.substitute(values), encoding="utf-8")


def _source(drafted: Draft, task: ModuleType, **others: object) -> tuple[PromptSource, int]:
    """The source that task.py makes, and how many problems it holds out; prints what it leaves out."""
    settings = {"settings": dict(drafted.settings)} if drafted.settings else {}
    source: PromptSource = task.Problems(**settings, **others)
    found = len(source.validation())
    for line in getattr(source, "notes", ()):  # of reading it for the validation
        print(line)
    if not found:
        raise ValueError("no problem is held out: give more rows with different questions.")
    with closing(task.Right(correctness=True)) as reward:
        _check_demonstrations(source, reward)
    return source, found


def _of_held_out(found: int) -> tuple[int, str]:
    """How many held-out problems a validation has, and ``data.val_prompts`` that gives them with any seed."""
    return (found, "null") if found < PLENTY else (HELD_OUT, str(HELD_OUT))


def _small_policy(drafted: Draft, task: ModuleType, folder: Path, shown: Mapping[str, object], minutes: float) -> None:
    """Writes the configuration of a policy from nothing, first without its budget to measure the speed of what it
    makes."""
    demonstrated = asked = None
    given: dict[str, object]
    if played := drafted.played:
        held_out, samples, given = PLAYED_HELD_OUT, 2 + 1, {**played, "held_out": PLAYED_HELD_OUT}
        written, shape = played["turns"] * played["completion"], shape_for(played["context"])
        demonstrations: Sequence[Demonstration] = [Demonstration("0", "0" * (played["context"] - 8))]
    else:
        source, found = _source(drafted, task, demonstrated_share=DEMONSTRATED)
        held_out, val_prompts = _of_held_out(found)
        texts = measure_texts(source)
        print(f"prompts of up to {texts.prompt} tokens, completions of up to {texts.completion}.")
        rows = source.problems("train")
        if rows is not None:
            demonstrated = source.demonstrated()
            asked = len(rows) - (demonstrated or 0)
            if min(demonstrated or 0, asked) < FEWEST_ROWS:
                raise ValueError(
                    f"{len(rows)} training rows are too few to share between a cold start and rollouts: give "
                    f"{3 * FEWEST_ROWS} or more, or a pretrained model by --policy."
                )
        samples, written, demonstrations, shape = 4 + 1, texts.written, texts.shown, shape_for(texts.row)
        given = {
            "context": texts.context,
            "completion": texts.completion,
            "tags": "".join(f"\n      - {json.dumps(tag, ensure_ascii=False)}" for tag in texts.tags) or " []",
            "characters": "" if texts.ascii_only else _FROM_DATA,
            "shown": "task.py",
            "init_args": _init_args([_SHARE, *_settings(drafted)]),
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
        f"{told}\n{demonstrated + asked} rows to train on are few to learn a rule from: a policy from nothing may know "
        "them by heart and answer others wrong. What helps: a generator (write `draw` as in the example that `grpo-pl "
        "new NAME` makes), more rows, or a pretrained model (--policy)."
    )


def _settings(drafted: Draft) -> list[str]:
    """The lines of a configuration that set what differs from the source's own defaults."""
    lines = [f"  {name}: {json.dumps(value)}" for name, value in drafted.settings.items()]
    return [f"settings:  # {_NARROWER}", *lines] if lines else []


def _init_args(lines: Sequence[str]) -> str:
    return "".join(f"\n    {line}" for line in ["init_args:", *(f"  {line}" for line in lines)] if lines)


_NARROWER = "narrower than the task's own ranges, for a small policy: raise them when it has learned these"
_SHARE = f"demonstrated_share: {DEMONSTRATED}  # of the problems, in the cold start; rollouts ask the others"
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
        "example": "The data are made up by `Problems.draw`. The cold start shows half of the answers with their work.",
        "table": "The columns are named in `task.py`. With more rows than a small policy can learn from nothing, give "
        "`model.policy` a `path` of a trained model.",
        "reasoning_gym": "The problems are made up without end by reasoning-gym, and its scorer judges them. Make them "
        "easier or harder by `settings` in `config.yaml`.",
        "gymnasium": "Each prompt is the seed of a world. Change what the policy sees in `shown`, and what counts as "
        "right in `Right`.",
    }[drafted.kind]
    if drafted.kind == "table" and drafted.copied is None:
        notes = f"The data are read where they are, {drafted.values['file_shown']}: they are too large to copy. {notes}"
    return {"files": files, "notes": notes}
