"""A calculator as a tool."""

from __future__ import annotations

from grpo_pl.rewards.sandbox.gym_guards import calculate


def calc(expression: str) -> str:
    """Works an arithmetic expression out.

    Args:
        expression: Whole or decimal numbers with + - * / and brackets.
    """
    value = calculate(expression, exact=True)
    return str(value) if value.denominator == 1 else str(float(value))
