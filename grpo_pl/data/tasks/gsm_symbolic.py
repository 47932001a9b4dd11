"""``GSMSymbolic``: school mathematics with new numbers, in templates of which some are never trained on."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import chain, islice
from itertools import count as integers
from typing import Literal, Self

from grpo_pl.data.tasks.generated import GeneratedPrompts
from grpo_pl.data.tasks.gsm_templates import PACKAGE, VERSION
from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.sampling import row_key
from grpo_pl.processes.child_process import ChildProcess, ChildStartError
from grpo_pl.processes.variables import clean_environment
from grpo_pl.types import Problem

PYTHON = "GRPO_PL_GSM_PYTHON"
"""Environment variable: the interpreter that draws; by default this one. The package needs Python 3.12."""
TAKEN_OUT = frozenset({62})
"""Templates that are not used, measured once by ``benchmarks/gsm_templates.py``: the working of 62 cuts 58 % of 50 down
to 28. None took a minute for 200 draws."""
LIMIT_S = 60.0
"""Seconds of one draw; a run whose draw takes longer ends."""
TEMPLATES = tuple(
    sorted(set(range(100)) - TAKEN_OUT, key=lambda template: hashlib.sha256(str(template).encode()).hexdigest())
)
"""All that are used, by ``id_shuffled``, in the order of its SHA-256."""
HELD_OUT, TRAINED = TEMPLATES[:20], TEMPLATES[20:]
DRAWS_HELD_OUT = 20
"""Held-out problems of a held-out template."""
DEFAULT_HELD_OUT = 400
"""Held-out problems of the trained templates where no number is asked for."""
HeldOut = Literal["numbers", "templates", "originals"]


@dataclass(kw_only=True)
class GSMSymbolic(GeneratedPrompts):
    """Problems of GSM-Symbolic (Mirzadeh et al. 2024, arXiv:2410.05229): 100 problems of GSM8K's test set with names
    and numbers drawn anew, by the English templates of the package multilingual-gsm-symbolic.

    Problem ``number`` of a template depends on seed, template and number alone. Columns: ``template``, the package's
    ``id_shuffled``, and ``working``, the worked answer.
    """

    held_out: HeldOut = "numbers"
    """Kind of held-out problems: of the templates of training with other numbers, of the 20 templates that training
    never uses (20 draws of each), or the original problems of these, which are in GSM8K's test set."""

    def __post_init__(self) -> None:
        check_choice("held_out", self.held_out, HeldOut)
        check_package()

    def demonstration(self, prompt: Problem, rng: random.Random) -> str:
        return f"{prompt.columns['working']}\n#### {prompt.answer}"

    def validation(self, count: int | None = None) -> list[Problem]:
        if self.held_out == "numbers":
            return super().validation(DEFAULT_HELD_OUT if count is None else count)
        every = len(HELD_OUT) * (DRAWS_HELD_OUT if self.held_out == "templates" else 1)
        return self._distinct("val", count=every if count is None else min(count, every), least=1)

    def candidates(self, split: Literal["train", "val"], *place: int, count: int) -> Iterator[Problem]:
        if split == "train":
            rng = random.Random(row_key(self.seed, split, *place))
            for _ in range(1000):
                for template in rng.sample(TRAINED, len(TRAINED)):
                    yield _drawn(self.seed, template, rng.randrange(2**31))
        elif self.held_out == "numbers":
            for number in range(1000):
                yield from (_drawn(self.seed, template, number) for template in TRAINED)
        elif self.held_out == "templates":
            rows = zip(*map(self._different, HELD_OUT), strict=True)
            yield from chain.from_iterable(islice(rows, DRAWS_HELD_OUT))
        else:
            yield from (_problem(template, *_ask(template)) for template in HELD_OUT)

    def _different(self, template: int) -> Iterator[Problem]:
        """The draws of a template in their order, without end; of equal ones the first."""
        seen: set[int] = set()
        for number in integers():
            problem = _drawn(self.seed, template, number)
            if problem.id not in seen:
                seen.add(problem.id)
                yield problem

    def identity(self, problem: Problem) -> tuple[int | str, ...]:
        """Template and numbers: problems that differ in names and things alone are held out together."""
        return (problem.columns["template"], *re.findall(r"\d[\d,.]*", problem.columns["working"]))

    def is_held_out(self, problem: Problem) -> bool:
        return problem.columns["template"] in HELD_OUT or super().is_held_out(problem)


def check_package() -> None:
    """Checks that an interpreter is there to draw.

    Raises:
        ValueError: this Python is too old, or the one that is named is none.
        ImportError: the package is not installed.
    """
    if python := os.environ.get(PYTHON):
        if not os.access(python, os.X_OK):
            raise ValueError(f"{PYTHON}: there is no interpreter {python!r}.")
    elif sys.version_info < (3, 12):
        this = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(
            f"GSM-Symbolic needs {PACKAGE}, which needs Python 3.12, and this is {this}: install it for a newer Python "
            f"and name that interpreter in {PYTHON}."
        )
    elif find_spec("multilingual_gsm_symbolic") is None:
        raise ImportError(f"{PACKAGE} is not installed: pip install 'grpo_pl[gsm]'.")


@lru_cache(maxsize=10_000)
def _drawn(seed: int, template: int, number: int) -> Problem:
    return _problem(template, *_ask(template, row_key(seed, "gsm_symbolic", template, number)))


def _problem(template: int, question: str, worked: str) -> Problem:
    working, _, answer = worked.rpartition("####")
    working = re.sub(r"<<.*?>>", "", working)  # what a calculator would be given
    return Problem(
        id=row_key("gsm_symbolic", question),
        question=question,
        answer=answer.strip(),
        columns={"template": template, "working": working.strip()},
    )


class Drawing:
    """A process with the package, in which problems are drawn.

    Raises:
        ValueError: it cannot be started, or does not have the package.
    """

    def __init__(self) -> None:
        environment = clean_environment() | {"PYTHONHASHSEED": "0"}
        if python := os.environ.get(PYTHON, ""):
            for name in ("PYTHONPATH", "PYTHONHOME"):  # of this interpreter
                environment.pop(name, None)
        main = "grpo_pl.data.tasks.gsm_templates:main"
        self._child = ChildProcess(main, environment=environment, keep_output=True, python=python)
        try:
            fault = self._child.start(b"")
        except ChildStartError as error:
            raise ValueError(f"GSM-Symbolic: the process that draws {error}") from error
        if fault:
            self.close()
            raise ValueError(f"GSM-Symbolic: {python or 'this Python'} {fault}: pip install '{PACKAGE}=={VERSION}'.")

    def ask(self, template: int, *key: int) -> tuple[str, str]:
        """A question and its worked answer: the draw that a key determines, without one the original.

        Raises:
            ValueError: the process took more than ``LIMIT_S`` and was ended, or ended by itself.
        """
        try:
            question, worked = json.loads(self._child.channel.ask(json.dumps([template, *key]).encode(), LIMIT_S))
        except (TimeoutError, EOFError, OSError) as error:
            how = f"took more than {LIMIT_S:g} s" if isinstance(error, TimeoutError) else self._child.death()
            self.close()
            raise ValueError(f"GSM-Symbolic: a draw of its template {template} {how}.") from error
        return question, worked

    def close(self) -> None:
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_lock = threading.Lock()


@cache
def _drawing(process: int) -> Drawing:
    """That of the process with this id, for one that is forked must start its own."""
    return Drawing()


def _ask(template: int, *key: int) -> tuple[str, str]:
    """What `Drawing.ask` returns, in any thread."""
    with _lock:
        try:
            return _drawing(os.getpid()).ask(template, *key)
        except ValueError:
            _drawing.cache_clear()
            raise
