"""Held-out problems: when a fit answers them, its ``held_out.jsonl``, and the output of ``grpo-pl validate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from grpo_pl.callbacks.completions import exchange_text, shortened, write_images
from grpo_pl.callbacks.metrics_csv import MetricsCSV
from grpo_pl.callbacks.samples import log_table
from grpo_pl.data.cells import image_digests
from grpo_pl.evaluation.held_out import Answers
from grpo_pl.evaluation.metrics import ks_of
from grpo_pl.evaluation.report import EvaluationReport, comparability_warnings, difference_table, report_table
from grpo_pl.files.rows import Row, read_lines, row_writer
from grpo_pl.files.runs import HELD_OUT_IMAGES
from grpo_pl.files.writing import best_effort
from grpo_pl.functional.estimates import Estimate, estimate_mean, pass_at_k
from grpo_pl.rollout.sampler import episode_row
from grpo_pl.training.lightning_loops import completed_rollouts, data_of, validate_now
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import Problem, PromptBatch

MOST_PROBLEMS = 1000
"""Problems of a group whose counts are written."""
MOST_COMPLETIONS = 8
"""Sampled completions of a problem that are written."""
MOST_IMAGES = 8.0
"""Megabytes of the images of problems whose completions are written."""
LONGEST = 8000
"""Characters of a completion; the middle of a longer one is left out."""


class ValidateAtBothEnds(Callback):
    """Lightning validates every ``trainer.val_check_interval`` rollouts; this adds rollout 0 and the end of the run.

    After a resume it repeats a validation that was due at the checkpoint but did not finish, and drops from
    ``metrics.csv`` what is logged again.
    """

    def __init__(self) -> None:
        self._validated_at = -1  # completed rollouts

    def state_dict(self) -> dict[str, Any]:
        return {"validated_at": self._validated_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated_at = state_dict["validated_at"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        completed = completed_rollouts(trainer)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCSV):
                logger.resume(completed, validated_at=self._validated_at)
        due = completed % (trainer.val_check_batch or 1) == 0  # between this rollout and the next
        if self._validated_at != completed and due:
            validate_now(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = completed_rollouts(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validated_at != completed_rollouts(trainer):
            validate_now(trainer)


class HeldOutLog(Callback):
    """Writes one line per validation: estimates with their intervals, pass@k for k = 1, 2, 4 … up to the number of
    samples, and the right and judged completions of each problem. The first and the last line also hold the completions
    of the first problems, before and after; loggers with tables get these at every validation. With several processes
    the completions are those of the first.

    Args:
        path: the file.
        problems: held-out problems of each set whose completions are written; 0 writes none.
    """

    def __init__(self, path: Path, problems: int = 12) -> None:
        self.path, self.problems = path, problems
        self._answers: list[Row] = []
        self._asked: list[Problem] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._answers, self._asked = [], []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: PromptBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.is_global_zero or not _in_fit(trainer):
            return
        for number, groups in enumerate(batch.groups):
            taken = sum(row["group"] == groups[0] for row in self._answers)
            if batch.valid[number] and taken < self.problems:
                self._answers.append({"group": groups[0], **answers_row(batch, number, outputs)})
                self._asked.append(batch.prompts[number])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not _in_fit(trainer):
            return
        module, step = cast(GRPOModule, pl_module), completed_rollouts(trainer)
        row = validation_row(module, step) | {"answers": self._answers}
        with best_effort(self.path):
            self._write(row)
            write_images(self._asked, self.path.parent / HELD_OUT_IMAGES, max_megabytes=MOST_IMAGES)
        table = [flat for answers in self._answers for flat in _flat(answers)]
        for logger in trainer.loggers if table else []:
            log_table(logger, "held_out", table, step)

    def _write(self, new: Row) -> None:
        """Adds a row; those that a resumed run makes again go, and of those between first and last the completions."""
        kept = []
        if self.path.exists():
            kept = [line.row for line in read_lines(self.path, may_be_cut_short=True) if line.row["step"] < new["step"]]
        with row_writer(self.path) as write:
            for number, row in enumerate(kept):
                write({**row, "answers": row["answers"] if number == 0 else []})
            write(new)


def validation_row(module: GRPOModule, step: int) -> Row:
    """The numbers of a module's last validation."""
    samples = module.validation.samples
    shares = {
        key: found for key, found in module.held_out.items() if not key.endswith(("/mean_length", "/clipped_ratio"))
    }
    estimates = {key: found.estimate() for key, found in shares.items()}
    counts = module.held_out_counts

    def curve(group: str) -> list[list[float]]:
        known = {k: estimates[f"{group}/pass@{k}"] for k in module.validation.ks if f"{group}/pass@{k}" in estimates}
        return pass_curve(list(counts[group].values()), samples, known)

    return {
        "step": step,
        "samples": samples,
        "temperature": module.validation.temperature,
        "metrics": {key: asdict(estimate) for key, estimate in estimates.items()},
        "pass_at": {group: curve(group) for group in counts},
        "problems": {group: dict(list(of.items())[:MOST_PROBLEMS]) for group, of in counts.items()},
        "unjudged": dict(module.unjudged),
    }


def pass_curve(
    counts: Sequence[tuple[int, int]], samples: int, known: Mapping[int, Estimate] | None = None
) -> list[list[float]]:
    """[k, pass@k, low, high] for the k of `ks_of`; one that no problem has so many verdicts for is left out.

    Args:
        counts: right and judged completions of each problem.
        known: estimates that were made already, by k; an interval takes a tenth of a second.
    """
    places = torch.arange(samples)
    right, judged = torch.tensor(counts, dtype=torch.long).reshape(len(counts), 2, 1).unbind(dim=1)  # (P, 1) each
    curve = []
    for k in ks_of(samples):
        found = (known or {}).get(k)
        if found is None:
            values = pass_at_k(places < right, k, places < judged)
            values = values[~values.isnan()]
            found = estimate_mean(values) if len(values) else None
        if found is not None:
            curve.append([k, found.value, found.low, found.high])
    return curve


def answers_row(batch: PromptBatch, number: int, outputs: Mapping[str, Answers | None]) -> Row:
    """One problem of a batch with its sampled completions and the greedy one."""
    problem, sampled, greedy = batch.prompts[number], outputs["sampled"], outputs["greedy"]
    assert sampled is not None
    row: Row = {"id": problem.id, "question": shortened(problem.question, LONGEST), "answer": problem.answer}
    row |= {"images": digests} if (digests := image_digests(problem)) else {}
    row["completions"] = _completions(sampled, number)
    return row if greedy is None else row | {"greedy": _completions(greedy, number)[0]}


def _completions(answers: Answers, number: int) -> list[Row]:
    assert answers.samples is not None
    n, samples = answers.correct.shape[1], answers.samples
    rows = []
    for i in range(number * n, number * n + min(n, MOST_COMPLETIONS)):
        text, score = samples.completions[i], answers.scores[i]
        judged = {} if answers.rewards else {"correct": score.correct}  # nobody was asked without a correctness reward
        if samples.episodes is not None:
            text = exchange_text(episode_row(samples.episodes[i]))
        rows.append(
            {
                "completion": shortened(text, LONGEST),
                "tokens": int(answers.lengths.flatten()[i]),
                "finish_reason": samples.rollout.finish_reasons[i],
                **judged,
                **score.to_dict(),
            }
        )
    return rows


def _flat(answers: Row) -> list[Row]:
    """A problem as rows of a table, the greedy completion last."""
    asked = {key: answers[key] for key in ("group", "id", "question", "answer")}
    drawn = [(False, row) for row in answers["completions"]]
    greedy = [(True, answers["greedy"])] if "greedy" in answers else []
    return [{**asked, "greedy": is_greedy, **row} for is_greedy, row in (*drawn, *greedy)]


def _in_fit(trainer: Trainer) -> bool:
    return trainer.state.fn == "fit" and not trainer.sanity_checking


class ReportEvaluation(Callback):
    """Prints the held-out metrics of ``grpo-pl validate`` with their intervals, and writes them where asked.

    Args:
        output: JSON file for the metrics of every problem; null writes none.
        baseline: such a file of another policy, to take the paired difference to.
    """

    def __init__(self, output: Path | None = None, baseline: Path | None = None) -> None:
        if output is not None and output.is_dir():
            raise ValueError(f"--output {output} is a folder: name a file.")
        self.output = output
        self.baseline = None if baseline is None else EvaluationReport.read(baseline)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        module, data = cast(GRPOModule, pl_module), data_of(trainer)
        report = EvaluationReport(
            measured=module.held_out,
            questions={name: {each.id: each.question for each in prompts} for name, prompts in data.held_out().items()},
            facts={
                "rollouts": data.completed_rollouts,
                "samples": module.validation.samples,
                "temperature": module.validation.temperature,
                "top_p": module.validation.top_p,
                "seed": module.seed,
                "unjudged": module.unjudged,
            },
        )
        if self.output is not None:
            report.write(self.output)
        console = Console()
        console.print(report_table(report))
        for group, count in module.unjudged.items():
            if count:
                line = f"{group}: {count} completions could not be judged; they count neither as right nor as wrong."
                console.print(line, highlight=False, soft_wrap=True)
        if self.baseline is not None:
            console.print(difference_table(report, self.baseline))
            for line in comparability_warnings(report, self.baseline):
                console.print(line, highlight=False, soft_wrap=True)
        if self.output is not None:
            console.print(f"metrics     {self.output}", highlight=False, soft_wrap=True)
