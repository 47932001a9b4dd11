"""The kinds of tasks that ``grpo-pl new`` writes: their templates, and the values that fill them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

from grpo_pl.data.cells import is_text
from grpo_pl.data.tables import load_table
from grpo_pl.extras.agents.gymnasium_ids import numbers_of
from grpo_pl.files.tables import FORMATS

Kind = Literal["rows", "reward", "environment"]
"""What a task is made of, and the folder of its templates."""
COPIED = 50 * 2**20
"""Bytes of the largest data file that is copied into the folder; a larger one is read where it is."""
QUESTIONS = ("question", "problem", "prompt", "query", "input", "instruction", "q", "text")
ANSWERS = ("answer", "gold", "gold_answer", "target", "label", "output", "response", "completion", "result", "a")
WORKED = ("worked", "work", "reasoning", "rationale", "explanation", "solution", "steps", "cot", "chain_of_thought")
NUMBER = r"\d+(?:\.\d+)?"
LOOKED_AT = 1000
"""Questions of a file that are looked at for numbers."""
FEWEST = 40
"""Rows of a file from which some can be held out."""
PATTERNS = {r"####\s*(.+)": "####", r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}": r"\boxed{"}
"""Regular expression of an answer at the end of a text -> what its texts have in common."""
EPISODES = 200
"""Episodes of random actions that an environment is looked at in."""
LONGEST_EPISODE = 40
"""Actions of an episode at most."""
MOST_NUMBERS = 32
"""Numbers of an observation at most."""
TENTHS = 10
"""Digits that stand for a fraction."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A task before its source was looked at."""

    kind: Kind
    title: str
    """The task in a sentence."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Values that fill ``task.py``."""
    copied: Path | None = None
    """Data file that goes into the folder, and the name it has there."""
    file_name: str = ""
    notes: Sequence[str] = ()
    """Guesses, as lines to print."""
    played: Mapping[str, int] = field(default_factory=dict)
    """Of an environment: the most ``turns`` of an episode, tokens of an action with its end (``completion``) and of an
    episode (``context``); nothing where problems are asked and answered."""


def kind_of(origin: str) -> tuple[Kind, str]:
    """The kind of the task that ``--from`` asks for, and what it names."""
    known = "csv:FILE, jsonl:FILE, reward or gymnasium:ID"
    scheme, colon, rest = origin.partition(":")
    if not colon and (Path(origin).suffix in FORMATS or Path(origin).is_file()):
        return "rows", origin
    if scheme == "reasoning_gym":
        raise ValueError(
            f"--from {origin} is gone: set data.source to grpo_pl.data.tasks.reasoning_gym.ReasoningGymPrompts, as "
            "configs/smollm2_think.yaml does."
        )
    if origin == "reward":
        return "reward", ""
    if scheme in ("csv", "jsonl", "gymnasium"):
        if not rest:
            raise ValueError(f"--from {origin} does not say which: give {known}.")
        return ("environment", rest) if scheme == "gymnasium" else ("rows", origin)
    raise ValueError(f"--from must be {known}, got {origin!r}.")


def draft(
    kind: Kind, named: str, question: str | None = None, answer: str | None = None, *, small_policy: bool = True
) -> Draft:
    """The draft of a kind, for a tiny policy from scratch or for a pretrained one.

    Args:
        named: what `kind_of` found: the file with or without ``csv:`` or ``jsonl:``, or the id of the environment.
    """
    if kind == "rows":
        scheme, colon, rest = named.partition(":")
        file = Path(rest).expanduser() if colon else Path(named)
        return _table(file, scheme if colon else "", question, answer, small_policy=small_policy)
    if question is not None or answer is not None:
        raise ValueError("--question and --answer name columns of a file: give it as --from csv:FILE or jsonl:FILE.")
    if kind == "environment":
        return _gymnasium(named)
    title = "The second largest of some numbers: an example to change into your own problems and reward function."
    return Draft(kind="reward", title=title)


# --- files ----------------------------------------------------------------------------------------------------------


def _table(file: Path, kind: str, question: str | None, answer: str | None, *, small_policy: bool) -> Draft:
    if not file.is_file():
        raise ValueError(f"--from: there is no file {str(file)!r}.")
    if file.suffix not in FORMATS:
        raise ValueError(f"--from: the name of {str(file)!r} must end in one of {', '.join(FORMATS)}.")
    if kind and FORMATS[file.suffix] != FORMATS[f".{kind}"]:
        raise ValueError(f"--from {kind}: {str(file)!r} is of another kind; leave `{kind}:` out.")
    ((table, _),) = load_table(str(file), None, "train", written=[])
    columns = table.columns
    asked, gold = _columns(str(file), columns, question, answer)
    worked = next((name for name in columns if name.lower() in WORKED and name not in (asked, gold)), None)
    first = list(table.read(range(min(LOOKED_AT, len(table)))))
    cells = [str(row[gold]) for row in first[:FEWEST] if is_text(row.get(gold))]
    pattern = next((p for p, mark in PATTERNS.items() if cells and all(mark in cell for cell in cells)), "")
    rows = len(table)
    if rows < FEWEST:
        raise ValueError(f"{str(file)!r} has {rows} rows: a task needs {FEWEST} at least, of which some are held out.")
    notes = [f"question: column {asked!r}, answer: column {gold!r}" + (f", work: column {worked!r}" if worked else "")]
    if pattern:
        notes.append(f"the answer is what {pattern} finds in {gold!r}.")
    questions = [str(row[asked]) for row in first if is_text(row.get(asked))]
    of_numbers = small_policy and worked is None and bool(cells) and _of_numbers(questions, cells)
    if of_numbers:
        notes.append(
            "questions and answers hold numbers: every other demonstration repeats those of the question first."
        )
    small = file.stat().st_size <= COPIED
    name = f"problems{file.suffix}"
    path = f'str(Path(__file__).with_name("{name}"))' if small else repr(str(file.resolve()))
    return Draft(
        kind="rows",
        title=f"The problems of {file.name}.",
        values={
            "file_shown": name if small else str(file.resolve()),
            "path": path,
            "path_import": "from pathlib import Path\n" if small else "",
            "question": _literal(asked),
            "answer": _literal(gold),
            "pattern": f'\n    answer_pattern: str = r"{pattern}"' if pattern else "",
            "worked": _literal(worked),
            **_work(worked, of_numbers=of_numbers),
            "val_share": min(0.2, max(0.05, round(200 / rows, 2))),
        },
        copied=file if small else None,
        file_name=name,
        notes=notes,
    )


def _of_numbers(questions: Sequence[str], answers: Sequence[str]) -> bool:
    """True where answers are numbers, and questions hold two or more, all without signs, separators and fractions."""
    plain = (
        len(re.findall(NUMBER, question)) > 1 and not re.search(r"[-+,./:]0", re.sub(NUMBER, "0", question))
        for question in questions
    )
    return all(re.fullmatch(NUMBER, answer.strip()) for answer in answers) and all(plain)


def _work(worked: str | None, *, of_numbers: bool) -> dict[str, str]:
    """What demonstrations of a file show before the answer: its column of work, else every other time the numbers of
    the question, which a small policy reckons with better side by side."""
    if worked is not None:
        lines = ["work = super().demonstration(prompt, rng)"]
        lines.append('thought = "" if work is None else f"<think>{work}</think>"')
        named = "the worked column, and the answer"
    elif of_numbers:
        lines = [f'numbers = " ".join(re.findall(r"{NUMBER}", prompt.question))']
        lines.append('thought = f"<think>{numbers}</think>" if numbers and rng.random() < 0.5 else ""')
        named = "the answer, every other time behind the numbers"
    else:
        return {"work_named": "the answer", "work": "", "work_shown": ""}
    return {"work_named": named, "work": "".join(f"        {line}\n" for line in lines), "work_shown": "{thought}"}


def _columns(file: str, columns: Sequence[str], question: str | None, answer: str | None) -> tuple[str, str]:
    """The columns of questions and answers: those that are named, else those with a usual name, else the other one of
    two."""
    for name in (question, answer):
        if name is not None and name not in columns:
            raise ValueError(f"{file!r} has no column {name!r}; its columns are {', '.join(columns)}.")

    def usual(names: Sequence[str], taken: str | None) -> str | None:
        lower = {column.lower().strip(): column for column in reversed(columns) if column != taken}
        return next((lower[name] for name in names if name in lower), None)

    asked = question or usual(QUESTIONS, answer)
    gold = answer or usual(ANSWERS, asked) or usual(("solution",), asked)
    others = [column for column in columns if column not in (asked, gold)]
    if len(columns) == 2 and len(others) == 1:
        asked, gold = asked or others[0], gold or others[0]
    if asked is None or gold is None or asked == gold:
        missing = "questions" if asked is None else "answers"
        raise ValueError(
            f"{file!r}: which column holds the {missing}? Its columns are {', '.join(columns)}; say so by "
            "--question COLUMN --answer COLUMN."
        )
    return asked, gold


def _literal(text: str | None) -> str:
    """A text in double quotes, as Python reads it."""
    return "None" if text is None else json.dumps(text, ensure_ascii=False)


# --- Gymnasium ------------------------------------------------------------------------------------------------------


def _gymnasium(name: str) -> Draft:
    """The draft of an environment with numbered actions, from some episodes of random play."""
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError("gymnasium is not installed: pip install 'grpo_pl[environments]'.") from error
    try:
        env: Any = gymnasium.make(name, disable_env_checker=True)
    except Exception as error:  # gymnasium's own errors, or whatever the environment raises
        detail = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
        raise ValueError(f"gymnasium cannot make {name!r}: {detail}") from error
    if not isinstance(env.action_space, gymnasium.spaces.Discrete):
        raise ValueError(
            f"{name!r} takes actions of {env.action_space}; `grpo-pl new` writes tasks with numbered ones."
        )
    rewards, observations = _random_play(env)
    env.close()
    edges = _edges(observations)
    turns = max(2, min(LONGEST_EPISODE, sorted(map(len, rewards))[len(rewards) * 19 // 20]))
    returns = [sum(episode[:turns]) for episode in rewards]  # of what an episode may reach in so many
    if max(returns) == min(returns):
        raise ValueError(
            f"{EPISODES} episodes of {turns} random actions in {name!r} all return {returns[0]:g}: none is a "
            "demonstration, and no completion would be better than another."
        )
    first, count = int(env.action_space.start), int(env.action_space.n)
    action = max(len(str(first)), len(str(first + count - 1))) + 1
    return Draft(
        kind="environment",
        title=f"Gymnasium's {name}, action by action.",
        values={
            "id": name,
            "turns": turns,
            "actions": f"{first} to {first + count - 1}",
            "threshold": repr(max(returns)),
            "episodes": EPISODES,
            "edges": "".join(f"    {tuple(each)!r},\n" for each in edges),
        },
        notes=[f"an episode counts as right from a return of {max(returns):g}, the best of {EPISODES} random ones."],
        played={
            "turns": turns,
            "completion": action,
            "context": -(-((turns + 1) * (_width(observations, edges) + 2 + action) + 16) // 32) * 32,
        },
    )


def _random_play(env: Any) -> tuple[list[list[float]], list[list[Any]]]:
    """The rewards of episodes of random actions, action by action, and the numbers of all observations."""
    rewards: list[list[float]] = []
    observations: list[list[Any]] = []
    env.action_space.seed(0)
    for seed in range(EPISODES):
        observation, _ = env.reset(seed=seed)
        episode: list[float] = []
        done = False
        while not done and len(episode) < LONGEST_EPISODE:
            numbers = numbers_of(observation)
            if numbers is None or len(numbers) > MOST_NUMBERS:
                raise ValueError(f"its observations are {env.observation_space}: too much to read as a few numbers.")
            if not all(map(math.isfinite, numbers)) or len(numbers) != len((observations or [numbers])[0]):
                raise ValueError(f"its observations are not the same count of finite numbers each time: {numbers}.")
            observations.append(numbers)
            observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            done = terminated or truncated
            episode.append(float(reward))
        rewards.append(episode)
    return rewards, observations


def _edges(observations: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each number of an observation, where its tenths begin; of ten different values or fewer, the middles between
    them; nothing for whole numbers."""
    found: list[list[float]] = []
    for values in zip(*observations, strict=True):
        distinct = sorted(set(values))
        if all(isinstance(value, int) for value in values):
            found.append([])
        elif len(distinct) <= TENTHS:
            found.append([(low + high) / 2 for low, high in pairwise(distinct)] or distinct)
        else:
            digits = 2 - math.floor(math.log10(distinct[-1] - distinct[0]))
            found.append(sorted({round(edge, digits) for edge in quantiles(values, n=TENTHS)}))
    return found


def _width(observations: Sequence[Sequence[float]], edges: Sequence[Sequence[float]]) -> int:
    """Characters of the longest observation as the task shows it: a digit for a fraction, whole numbers as they are."""
    spaces = 0 if all(edges) else len(edges) - 1
    return spaces + max(
        sum(1 if edge else len(str(number)) for edge, number in zip(edges, numbers, strict=True))
        for numbers in observations
    )
