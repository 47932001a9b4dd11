"""Tasks of inspect-ai: sums, with a calculator or without, and two scorers."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes, mean, scorer
from inspect_ai.solver import Solver, TaskState, generate, solver, use_tools
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


@scorer(metrics=[accuracy()])
def asks_a_grader() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=(await get_model(role="grader").generate("Is it right?")).completion)

    return score


@scorer(metrics=[accuracy()])
def praises() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="excellent")

    return score


@solver
def reads_a_number() -> Solver:
    async def solve(state: TaskState, generate: Any) -> TaskState:
        int((await generate(state)).output.completion)
        return state

    return solve


@task
def shuffled() -> Task:
    dataset = MemoryDataset([Sample(input=f"{a}+1=", target=str(a + 1)) for a in range(50)])
    dataset.shuffle()
    return Task(dataset=dataset, solver=generate(), scorer=digits())


@task
def numbers() -> Task:
    return Task(
        dataset=[Sample(input="1+1=", target="2")], solver=reads_a_number(), scorer=digits(), fail_on_error=False
    )


@task
def sums(most: int = 9, tools: bool = False, scorers: str = "digits") -> Task:
    samples = [Sample(input=f"{a}+{b}=", target=str(a + b)) for a in range(1, most + 1) for b in range(1, most + 1)]
    chosen = {
        "digits": [digits()],
        "both": [includes(), digits()],
        "undecided": [undecided()],
        "asks_a_grader": [asks_a_grader()],
        "praises": [praises()],
    }[scorers]
    return Task(dataset=samples, solver=[*([use_tools(calc())] if tools else []), generate()], scorer=chosen)
