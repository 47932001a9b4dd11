"""Writes the folder of a task: fills the templates, and looks at the source that they make."""

from __future__ import annotations

import importlib.util
import json
import keyword
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

from grpo_pl.data.sources import PromptSource
from grpo_pl.files.writing import staged_folder
from grpo_pl.rewards.base import Reward
from grpo_pl.tools.scaffold.kinds import Draft
from grpo_pl.tools.scaffold.pretrained import Pretrained, pretrained_config
from grpo_pl.tools.scaffold.small_policy import measure_texts, shape_for

TEMPLATES = Path(__file__).parent / "templates"
CHECKED = 16
"""Demonstrations that the reward has to find right."""
HELD_OUT = 200
"""Held-out problems of a validation at most: pass@1 of four samples each is then known to about ±0.03."""


def check_folder(folder: Path) -> str:
    """The name of a task, which is that of its folder and of its Python package."""
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
    return name


def write_task(drafted: Draft, folder: Path, say: Callable[[str], None], pretrained: Pretrained | None = None) -> None:
    """Writes the folder, all of it or nothing.

    Args:
        pretrained: the policy, where it is not a small one from nothing.
    """
    name = check_folder(folder)
    if pretrained is not None and drafted.config is not None:
        raise ValueError(f"--policy: a task of kind {drafted.kind!r} is played by a small policy from nothing.")
    shown: dict[str, object] = {"name": name, "folder": folder.as_posix(), "title": drafted.title, **drafted.values}
    for note in drafted.notes:
        say(note)
    with staged_folder(folder, replace=False) as staging:
        if drafted.copied is not None:
            shutil.copyfile(drafted.copied, staging / drafted.file_name)
        _fill(drafted.kind, "task.py", staging, shown)
        with _imported(staging / "task.py") as task:
            if drafted.config is not None:
                given: Any = drafted.config
                config = {**_shape(int(given["context"])), "steps": 60, "interval": 30, **given}
            else:
                config = _config_of_problems(drafted, task, name, pretrained, say)
        written = "config.yaml" if pretrained is None else "config_pretrained.yaml"
        _fill(drafted.kind, written, staging, {**shown, **config}, name="config.yaml")
        _fill(drafted.kind, "test_task.py", staging, shown)
        _fill(drafted.kind, "README.md", staging, {**shown, **_data_section(drafted)})


def _fill(kind: str, file: str, folder: Path, values: dict[str, object], *, name: str = "") -> None:
    """The template of a kind, or else the one that all kinds share, under its own name or another."""
    own = TEMPLATES / kind / f"{file}.tmpl"
    template = Template((own if own.is_file() else TEMPLATES / f"{file}.tmpl").read_text(encoding="utf-8"))
    (folder / (name or file)).write_text(template.substitute(values), encoding="utf-8")


@contextmanager
def _imported(file: Path) -> Iterator[ModuleType]:
    """The module of a file, for the time of the block."""
    name = "grpo_pl_new_task"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.dont_write_bytecode = before
        del sys.modules[name]


def _config_of_problems(
    drafted: Draft, task: ModuleType, name: str, pretrained: Pretrained | None, say: Callable[[str], None]
) -> dict[str, object]:
    """The values of ``config.yaml`` for a source of problems; says what the source leaves out."""
    source: PromptSource = task.Problems(settings=dict(drafted.settings)) if drafted.settings else task.Problems()
    held_out = min(HELD_OUT, len(source.validation()))
    for line in getattr(source, "notes", ()):  # of reading it for the validation
        say(line)
    if not held_out:
        raise ValueError("no problem is held out: give more rows with different questions.")
    with closing(task.Right(correctness=True)) as reward:
        _check_demonstrations(source, reward)
    if pretrained is not None:
        config = pretrained_config(pretrained, source, name, say)
    else:
        texts = measure_texts(source)
        say(f"prompts of up to {texts.prompt} tokens, completions of up to {texts.completion}.")
        config = {
            **_shape(texts.row),
            "context": texts.context,
            "completion": texts.completion,
            "tags": "".join(f"\n      - {json.dumps(tag, ensure_ascii=False)}" for tag in texts.tags) or " []",
            "characters": "" if texts.ascii_only else _FROM_DATA,
            "shown": "task.py",
        }
    say(f"{held_out} held-out problems.")
    lines = [f"        {name}: {json.dumps(value)}" for name, value in drafted.settings.items()]
    return {**config, "init_args": "\n".join([_SETTINGS, *lines]) if lines else "", "held_out": held_out}


_SETTINGS = """
    init_args:
      settings:  # narrower than the task's own ranges, for a small policy: raise them when it has learned these"""
_FROM_DATA = "    characters: from_data  # those of ASCII and all others that the problems hold\n"


def _shape(tokens: int) -> dict[str, object]:
    """A policy for rows of so many tokens, and the rollouts that it is trained for: by what trains in minutes."""
    shape = shape_for(tokens)
    rollouts = shape.rollouts(tokens)
    return {
        **{"hidden": shape.hidden, "intermediate": shape.intermediate, "layers": shape.layers},
        **{"steps": rollouts, "interval": rollouts // 2},
    }


def _check_demonstrations(source: PromptSource, reward: Reward) -> None:
    """Refuses a task whose reward finds the source's own demonstrations wrong."""
    problems = source.prompts(0, count=CHECKED)
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
