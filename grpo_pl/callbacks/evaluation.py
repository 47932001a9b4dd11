"""``ReportEvaluation``: what ``grpo-pl validate`` prints and writes."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.evaluation.report import EvaluationReport, comparability_warnings, difference_table, report_table
from grpo_pl.training.module import GRPOModule


class ReportEvaluation(Callback):
    """Prints the held-out metrics with their intervals, and writes them where asked.

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
        module = cast(GRPOModule, pl_module)
        data = cast(RolloutDataModule, trainer.datamodule)  # type: ignore[attr-defined]
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
