"""Writes the result of a validation as a JSON file and as a table, alone or compared with another policy's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from grpo_pl.evaluation.held_out import MetricResult
from grpo_pl.files.rows import read_object
from grpo_pl.files.writing import staged
from grpo_pl.functional.estimates import Estimate, paired_difference

FORMAT = "grpo_pl validation 1"


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """The metrics of a policy on held-out problems, with the value of each problem."""

    measured: Mapping[str, MetricResult]
    """Metric key, such as ``val/pass@1`` -> result."""
    questions: Mapping[str, Mapping[int, str]]
    """Set -> problem id -> question; two reports can be compared only if their questions agree."""
    facts: Mapping[str, Any]
    """Conditions of the validation: completed rollouts, samples, temperature …"""

    def write(self, path: Path) -> None:
        """Writes a JSON file atomically, for ``read``."""
        metrics = {}
        for key, found in self.measured.items():
            estimate = found.estimate()
            metrics[key] = {
                "value": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "interval": f"95 % {estimate.method}",
                "problems": {str(name): value for name, value in found.problems.items()},
            }
        tree = {"format": FORMAT, **self.facts, "metrics": metrics, "questions": self.questions}
        with staged(path) as file:
            file.write_text(json.dumps(tree, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> EvaluationReport:
        """Reads a file that ``write`` wrote."""
        if not path.is_file():
            raise ValueError(f"there is no file {path}.")
        tree = read_object(path)
        if tree.get("format") != FORMAT:
            raise ValueError(f"{path} was not written by `grpo-pl validate --output`.")
        measured = {
            key: MetricResult(mean=entry["value"], problems={int(name): v for name, v in entry["problems"].items()})
            for key, entry in tree["metrics"].items()
        }
        questions = {name: {int(i): text for i, text in entry.items()} for name, entry in tree["questions"].items()}
        facts = {key: value for key, value in tree.items() if key not in ("format", "metrics", "questions")}
        return cls(measured=measured, questions=questions, facts=facts)

    def differences(self, baseline: EvaluationReport) -> dict[str, Estimate]:
        """This report minus ``baseline``, paired by problem, for every metric and over the problems that both have."""
        for name in self.questions.keys() & baseline.questions.keys():
            here, there = self.questions[name], baseline.questions[name]
            other = next((i for i in here.keys() & there.keys() if here[i] != there[i]), None)
            if other is not None:
                raise ValueError(
                    f"problem {other} of {name} is {here[other][:60]!r} here and {there[other][:60]!r} in the "
                    "baseline: they were measured on different problems."
                )
        differences = {}
        for key in self.measured.keys() & baseline.measured.keys():
            mine, theirs = self.measured[key].problems, baseline.measured[key].problems
            both = sorted(mine.keys() & theirs.keys())
            if both:
                values, others = ([side[i] for i in both] for side in (mine, theirs))
                differences[key] = paired_difference(torch.tensor(values), torch.tensor(others))
        if not differences:
            raise ValueError("the baseline has no metric of a common problem: it was measured on different problems.")
        return differences


def report_table(report: EvaluationReport) -> Table:
    """One row per metric: its mean, 95 % interval and number of problems."""
    table = number_table("held-out problems", "value", "95 % interval", "problems")
    for key, found in report.measured.items():
        estimate, digits = found.estimate(), _digits(key)
        table.add_row(key, f"{estimate.value:.{digits}f}", _interval(estimate, digits), str(estimate.problems))
    return table


def difference_table(report: EvaluationReport, baseline: EvaluationReport) -> Table:
    """One row per metric that both have: the baseline's mean, and the paired difference to it with its interval."""
    differences = report.differences(baseline)
    table = number_table("difference to the baseline", "baseline", "difference", "95 % interval", "problems")
    for key in report.measured:
        if key in differences:
            gap, digits = differences[key], _digits(key)
            there = f"{baseline.measured[key].mean:.{digits}f}"
            table.add_row(key, there, f"{gap.value:+.{digits}f}", _interval(gap, digits, "+"), str(gap.problems))
    return table


def comparability_warnings(report: EvaluationReport, baseline: EvaluationReport) -> list[str]:
    """One line for each respect in which the baseline was measured differently: problems that it lacks, number of
    samples, temperature, top_p."""
    lines = []
    for name, here in report.questions.items():
        common = len(here.keys() & baseline.questions.get(name, {}).keys())
        if 0 < common < len(here):
            lines.append(f"only {common} of {len(here)} problems of {name} are in the baseline.")
    for fact in ("samples", "temperature", "top_p"):
        if report.facts.get(fact) != baseline.facts.get(fact):
            lines.append(
                f"the baseline was measured with {fact} {baseline.facts.get(fact)}, this with {report.facts.get(fact)}."
            )
    return lines


def number_table(title: str, *headings: str) -> Table:
    """An empty table of numbers with these headings; the first column has none and is for the names of the rows."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _digits(key: str) -> int:
    return 1 if key.endswith("/mean_length") else 3  # tokens, else shares


def _interval(estimate: Estimate, digits: int, sign: str = "") -> str:
    return f"{estimate.low:{sign}.{digits}f} … {estimate.high:{sign}.{digits}f}"
