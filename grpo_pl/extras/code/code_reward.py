"""``CodeReward``: runs the programs that a policy writes against tests, each in an isolated process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from grpo_pl.extras.code.asserts import BadTests
from grpo_pl.extras.code.suites import Outcome, Run, Suite, read_suite
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.rewards.base import Columns, MissingColumn, Reward, Score, Status, not_judged
from grpo_pl.rewards.completion_text import last_program
from grpo_pl.rewards.sandbox.pool import Job, SandboxSettings, Verdict, WorkerPool, shared_pool

JUDGE = "grpo_pl.extras.code.program_judge"
LEVELS = {"required": ["namespaces"], "available": ["namespaces", "filter"]}
LONGEST_S = 60.0
WORKER_S = 600.0
"""Seconds after which a worker is given up that says nothing."""
WALL_FACTOR = 6
"""Seconds of the clock that a program may take, in multiples of its CPU time: for those that sleep, and on a busy
machine."""


class _Finding(NamedTuple):
    """Result of one process of a program."""

    faults: Sequence[str]
    """Of each test that it decides why it is not passed, or ``""``."""
    status: Status


@dataclass(kw_only=True)
class CodeReward(Reward):
    """1 if the program passes all tests, else 0; range {0, 1}, or [0, 1] with ``partial``: the share that it passes.

    The program is the last block of Python between lines of three backticks. The gold answer, or the column ``tests``,
    holds the tests: inputs and outputs of a program that reads and prints, calls of a function and what they return, or
    assertions. Each program runs in a process of its own, with limits on time, memory, files, threads and output, and
    without network, other processes and environment variables; what is expected is compared here and never gets there.
    """

    reads_form = True
    name: str = "code"
    correctness: bool = True
    partial: bool = False
    """Give the share of the tests that are passed instead of 0 where one is not."""
    tests: str | None = None
    """Column that holds the tests; null: the gold answer."""
    isolation: Literal["required", "available"] = "required"
    """``required``: namespaces, and a refusal on a machine without; ``available``: else a filter of system calls."""
    workers: int = 2
    """Programs that run at the same time."""
    time_limit_s: float = 4.0
    """CPU seconds of a program for one input, or for all calls (status ``timeout``)."""
    memory_limit_mb: int = 1024
    """Address space of a program in MiB."""
    output_limit_kb: int = 1024
    """Most that a program may print or return, in KiB (status ``too_long``)."""
    max_answer_chars: int = 50_000
    """Longer programs are not run (status ``too_long``)."""
    pool: WorkerPool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.isolation not in LEVELS:
            raise ValueError(f"isolation must be 'required' or 'available', got {self.isolation!r}.")
        if not 0 < self.time_limit_s <= LONGEST_S:
            raise ValueError(f"time_limit_s must lie between 0 and {LONGEST_S:g} seconds, got {self.time_limit_s}.")
        section, chars = f"reward {self.name!r}", self.max_answer_chars
        check_at_least(128, section, memory_limit_mb=self.memory_limit_mb)
        check_at_least(1, section, output_limit_kb=self.output_limit_kb, max_answer_chars=chars)
        # the worker itself only waits: limits on the program are held by its supervisor, these are a last resort
        last = {"soft_limit_s": WORKER_S - 10.0, "hard_limit_s": WORKER_S, "wall_factor": 1.0}
        self.pool = shared_pool(
            SandboxSettings(workers=self.workers, judge=JUDGE, cache_size=0, **last)  # type: ignore[arg-type]
        )

    @property
    def level(self) -> str:
        """The isolation of programs on this machine: ``namespaces`` or ``filter``.

        Raises:
            ValueError: there is none that ``isolation`` allows.
        """
        question = json.dumps({"levels": LEVELS[self.isolation], "level": True})
        (verdict,) = self.pool.run([(question, "")])
        if verdict.status == "ok":
            return verdict.detail
        other = " `isolation: available` takes a filter of system calls instead." * (self.isolation == "required")
        raise ValueError(
            f"reward {self.name!r}: programs cannot be isolated on this machine ({verdict.detail}).{other}"
        )

    def start(self) -> None:
        _ = self.level  # which starts the workers

    def check(self) -> None:
        _ = self.level

    def close(self) -> None:
        """Ends the workers, also for other rewards that share them; the next use of one starts new workers."""
        self.pool.close()

    def gold_faults(self, golds: Sequence[str]) -> list[str]:
        return [""] * len(golds) if self.tests is not None else [_fault(gold) for gold in golds]

    def __call__(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> list[Score]:
        golds = answers if self.tests is None else self._column(columns)
        ready = [self._ready(text, gold) for text, gold in zip(completions, golds, strict=True)]
        pairs = dict.fromkeys(pair for pair in ready if not isinstance(pair, Score))
        if pairs:
            _ = self.level
        verdicts = self._run({pair: read_suite(pair[1]) for pair in pairs})
        return [found if isinstance(found, Score) else self._score(found, verdicts[found]) for found in ready]

    def _column(self, columns: Columns) -> list[str]:
        if self.tests is None or self.tests not in columns:
            raise MissingColumn(
                f"reward {self.name!r} finds its tests in the column {self.tests!r}, and there is none."
            )
        return [cell if isinstance(cell, str) else json.dumps(cell) for cell in columns[self.tests]]

    def _ready(self, completion: str, gold: str) -> Score | tuple[str, str]:
        """The score where nothing has to be run, else the program and its tests."""
        if fault := _fault(gold):
            return Score(None, "bad_gold", fault)
        program = last_program(completion) or ""
        return not_judged(program if program.strip() else "", self.max_answer_chars) or (program, gold)

    def _run(self, suites: dict[tuple[str, str], Suite]) -> dict[tuple[str, str], list[_Finding]]:
        """Results of the processes of each program. The first process goes ahead: a program that fails it is not run
        again where all tests must be passed, and never if it took too long or printed too much."""
        found = self._findings({pair: suite[:1] for pair, suite in suites.items()})
        rest = {
            pair: suite[1:]
            for pair, suite in suites.items()
            if len(suite) > 1 and (found[pair][0].status == "ok" or (self.partial and found[pair][0].status == "wrong"))
        }
        for pair, further in self._findings(rest).items():
            found[pair] = [*found[pair], *further]
        return found

    def _findings(self, suites: dict[tuple[str, str], Suite]) -> dict[tuple[str, str], list[_Finding]]:
        jobs = [self._job(program, run) for (program, _), suite in suites.items() for run in suite]
        verdicts = iter(self.pool.run(jobs))
        return {pair: [_finding(run, next(verdicts)) for run in suite] for pair, suite in suites.items()}

    def _job(self, program: str, run: Run) -> Job:
        limits = {
            "cpu_s": self.time_limit_s,
            "wall_s": WALL_FACTOR * self.time_limit_s,
            "memory_bytes": self.memory_limit_mb * 2**20,
            "output_bytes": self.output_limit_kb * 2**10,
        }
        asked = {"levels": LEVELS[self.isolation], "limits": limits, "input": run.input, "steps": run.steps}
        return json.dumps(asked), program

    def _score(self, pair: tuple[str, str], findings: Sequence[_Finding]) -> Score:
        tests = sum(run.tests for run in read_suite(pair[1]))
        faults = [fault for finding in findings for fault in finding.faults]
        passed, failed = faults.count(""), next((i for i, fault in enumerate(faults) if fault), None)
        if any(finding.status == "unavailable" for finding in findings):
            return Score(None, "unavailable", next(filter(None, faults), ""))
        if failed is None and passed == tests:
            return Score(1.0, "ok", f"{tests} of {tests}")
        value = passed / tests if self.partial else 0.0
        status = next(finding.status for finding in findings if finding.status != "ok")
        detail = f"{passed} of {tests}" + ("" if failed is None else f"; test {failed + 1}: {faults[failed]}")
        return Score(value, "wrong" if value else status, detail)


def _fault(gold: str) -> str:
    try:
        read_suite(gold)
    except BadTests as error:
        return str(error)
    return ""


def _finding(run: Run, verdict: Verdict) -> _Finding:
    if verdict.status != "ok":
        return _Finding([verdict.detail or verdict.status] * run.tests, verdict.status)
    outcome = Outcome(**json.loads(verdict.detail))
    faults = run.judge(outcome)
    return _Finding(faults, _status(outcome) if any(faults) else "ok")


def _status(outcome: Outcome) -> Status:
    """The status of a program that does not pass."""
    if outcome.cause == "ended":
        return "crashed" if outcome.code < 0 else "wrong"
    return "too_long" if outcome.cause == "output" else "timeout"
