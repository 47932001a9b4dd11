"""Tasks of inspect-ai: sums, with a calculator or without, and two scorers."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes, mean, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import tool


@tool
def calc() -> Any:
    async def execute(expression: str) -> str:
        """Works a sum out.

        Args:
            expression: Numbers with + between them.
        """
        return str(sum(map(int, expression.split("+"))))

    return execute


@scorer(metrics=[mean()])
def digits() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        text = state.output.completion
        return Score(value=sum(map(str.isdigit, text)) / max(1, len(text)))

    return score


@scorer(metrics=[accuracy()])
def undecided() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value={"left": 1, "right": 0})

    return score


@task
def sums(most: int = 9, tools: bool = False, scorers: str = "digits") -> Task:
    samples = [Sample(input=f"{a}+{b}=", target=str(a + b)) for a in range(1, most + 1) for b in range(1, most + 1)]
    chosen = {"digits": [digits()], "both": [includes(), digits()], "undecided": [undecided()]}[scorers]
    return Task(dataset=samples, solver=[*([use_tools(calc())] if tools else []), generate()], scorer=chosen)
