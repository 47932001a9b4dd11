"""Rare parts of the objective, one file each."""

from grpo_pl.objective.terms.base import Term

__all__ = ["Term"]
