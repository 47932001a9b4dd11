"""A run with thinking budgets: what is fed is no part of the loss, a resumed run goes on, and metrics tell of both."""

import json
from typing import Any

import pytest

from grpo_pl.policy.trained import find_model
from tests.training.runs import resumed


def test_a_run_reports_its_budgets_and_a_resumed_one_goes_on(command_line: Any, read_metrics: Any) -> None:
    config = command_line.config("budgeted", model__sampling__thinking_budget=[1, 4])
    command_line.done("fit", "--config", config)
    run = command_line.runs / "budgeted"
    _, whole = resumed(command_line, read_metrics, run)
    assert all(1.0 <= float(row["thinking/mean_budget"]) <= 4.0 for row in whole)
    assert all(float(row["thinking/mean_length"]) <= float(row["thinking/mean_budget"]) for row in whole)
    assert all(0.0 < float(row["thinking/closed_ratio"]) <= 1.0 for row in whole)
    export, checkpoint = run / "export", run / "checkpoints" / "rollout-000002.ckpt"
    assert json.loads((export / "grpo_pl.json").read_text())["thinking_budget"] == [1, 4]
    assert find_model(export).sampling.thinking_budget == find_model(checkpoint).sampling.thinking_budget == (1, 4)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model__sampling__thinking_budget": 500}, "leave no room for an answer in max_completion_length"),
        ({"model__sampling__thinking_budget": 0}, "thinking_budget must be at least 1"),
        (
            {"model__sampling__thinking_budget": 3, "model__partial_rollouts": {"part_length": 4}},
            "thinking_budget does not go with model.partial_rollouts",
        ),
        (
            {"model__sampling__thinking_budget": 3, "model__template": {"thought_end": ""}},
            "template.thought_end is empty: give the text",
        ),
        (
            {"model__sampling__thinking_budget": 3, "model__template": {"thought_end": "\N{GREEK SMALL LETTER PI}"}},
            "of which the tokenizer knows only a part",
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_ends_in_one_line(command_line: Any, settings: Any, told: str) -> None:
    run = command_line("fit", "--config", command_line.config("refused", **settings))
    assert run.status in (1, 2) and told in run.err and len(run.err.splitlines()) == 1, run.err
