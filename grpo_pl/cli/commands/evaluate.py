"""``grpo-pl evaluate``: problems of a file, answered and judged in this process or by a server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

from grpo_pl.cli.commands import check_at_least
from grpo_pl.files.rows import check_output, row_writer
from grpo_pl.files.tables import table_rows
from grpo_pl.training.progress import progress_bar
from serve.settings import API_KEY

if TYPE_CHECKING:
    from pydantic import BaseModel

    from grpo_pl.evaluation.problems import EvalProblem

Model = TypeVar("Model", bound="BaseModel")
_QUESTION_NAMES = ("problem", "question", "prompt")


def evaluate(
    data: str | None = None,
    model: str | None = None,
    server: str | None = None,
    n: int = 8,
    temperature: float | None = None,
    top_p: float = 1.0,
    max_completion_length: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    output: str = "evaluation.jsonl",
    api_key: str | None = None,
    device: str = "auto",
    max_batch_size: int = 64,
    trust_rewards: bool = False,
) -> int:
    """Answers every problem of a file n times and says how many answers are right.

    A policy that was trained in an environment plays each problem there, where it is evaluated in this process; one
    that reads images finds them in the columns image or images.

    Shows pass@1, unbiased pass@k and maj@k with 95 % intervals over problems, and writes one line per problem. Both
    ways draw the same completions for the same seed.

    Args:
        data: JSONL, JSON, CSV or Parquet, by its ending. Each row has problem (or question, or prompt), a text or a
            list of chat messages, and answer. Further columns go to the rewards and to the environment, in which
            neither of the two is needed. An answer that is a list or an object is bad_gold.
        model: Exported folder, run folder or checkpoint to evaluate in this process.
        server: Address of a running `grpo-pl serve` to evaluate instead, such as http://127.0.0.1:8000.
        n: Completions per problem, 1 to 64.
        temperature: Temperature of the completions; by default the one of training, 0 is greedy.
        top_p: Nucleus of the completions; 1 is off.
        max_completion_length: Most tokens of a completion; by default the one of training.
        seed: Names the samples.
        limit: Take only the first problems of the file.
        output: File for the results, one JSON line per problem; it is overwritten.
        api_key: The server's key; by default $GRPO_PL_API_KEY.
        device: Where to evaluate without a server: cpu, cuda …; auto takes a GPU where there is one.
        max_batch_size: Completions decoded at once without a server.
        trust_rewards: Let the model name any class as a reward, such as functions and judges: only if you know who
            wrote it. Without it such a model is refused.
    """
    if data is None:
        raise ValueError("--data is missing: give a JSONL file with problem and answer on each line.")
    if (model is None) == (server is None):
        raise ValueError("give either --model (evaluates in this process) or --server (asks a running server).")
    check_at_least(1, limit=limit, max_batch_size=max_batch_size)
    check_output(Path(output), Path(data))
    from grpo_pl.evaluation.metrics import summarise
    from serve.schemas import Sampling

    asked = {"n": n, "temperature": temperature, "top_p": top_p, "max_completion_length": max_completion_length}
    sampling = _validated(Sampling, asked, "--")
    if server is not None:
        from grpo_pl.cli.remote_evaluation import evaluate_remotely

        problems = read_problems(Path(data), limit)
        items = [problem.model_dump() for problem in problems]
        key = api_key if api_key is not None else os.environ.get(API_KEY)
        answers = evaluate_remotely(server, items, {**asked, "seed": seed}, api_key=key)
    else:
        from grpo_pl.cli.local_evaluation import evaluate_locally, evaluate_whole
        from grpo_pl.config.objects import closed_rewards
        from grpo_pl.policy.loading import choose_device
        from grpo_pl.policy.text_check import check_texts
        from grpo_pl.policy.trained import find_model

        trained = find_model(Path(str(model)), trust_rewards=trust_rewards)
        images = trained.policy.images
        problems = read_problems(Path(data), limit, asks=trained.environment is None, images=images)
        read = (trained.policy, trained.template, trained.tokenizer, problems[0].asked)
        closed = closed_rewards(trained.rewards, trust_rewards=trained.trust_rewards)
        for line in check_texts(*read, closed, trained.sampling):
            print(line, file=sys.stderr)
        answer = evaluate_locally if trained.environment is None and not images else evaluate_whole
        place = choose_device(device)
        answers = answer(trained, problems, sampling, seed=seed, device=place, max_rows=max_batch_size)
    with row_writer(Path(output)) as write:  # which refuses before the first question is asked
        for result in (results := _gather(answers, len(problems))):
            write(result)
    _show(summarise(results, n=n), Path(output))
    return 0


def read_problems(
    file: Path, limit: int | None = None, *, asks: bool = True, images: bool = False
) -> list[EvalProblem]:
    """The problems of a file of rows.

    Args:
        asks: each row needs a problem and an answer; without one they are empty where they are missing.
        images: read those of the columns ``image`` and ``images``, whose paths are relative to the file.
    """
    from grpo_pl.evaluation.problems import EvalProblem

    problems: list[EvalProblem] = []
    _, rows = table_rows(file, ["answer", *_QUESTION_NAMES])
    for number, row in enumerate(islice(rows, limit), start=1):
        name = next((name for name in _QUESTION_NAMES if name in row), "problem")
        row = row if asks else {name: "", "answer": "", **row}
        row = _with_images(row, name, file, number) if images else row
        fields = {"problem" if key == name else key: value for key, value in row.items()}
        for key in ("problem", "answer"):
            if isinstance(fields.get(key), int | float):
                fields[key] = str(fields[key])
        where = f"row {number} of {str(file)!r}: "
        if fields.get("answer") is None and asks:
            raise ValueError(f"{where}it has no answer.")
        if not isinstance(answer := fields.get("answer"), str | list | dict):
            fields["answer"] = "" if answer is None else [str(answer)]  # a type that has no text, such as bytes
        problems.append(_validated(EvalProblem, fields, where))
    if not problems:
        raise ValueError(f"{file} holds no problems.")
    return problems


def _with_images(row: Mapping[str, Any], question: str, file: Path, number: int) -> dict[str, Any]:
    from grpo_pl.extras.images.row_images import row_with_images

    read = row_with_images(row, question, file=file, number=number, option="--data")
    if read["images"] and not isinstance(read.get(question), str):
        raise ValueError(
            f"row {number} of {str(file)!r}: its question is a conversation with images: write it as a text."
        )
    return read if read["images"] else {name: value for name, value in read.items() if name != "images"}


def _validated(kind: type[Model], fields: Mapping[str, Any], where: str) -> Model:
    """The fields as a model of pydantic's; the first fault is one line that begins with ``where`` and the field."""
    from pydantic import ValidationError

    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{where}{'.'.join(map(str, fault['loc']))}: {fault['msg']}.") from error


def _gather(answers: Iterable[tuple[int, dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    """The answers in the order of the problems, from answers in any order."""
    results: dict[int, dict[str, Any]] = {}
    verdicts: list[bool] = []
    with progress_bar("evaluate", count) as advance:
        for i, result in answers:
            results[i] = result
            verdicts += [sample["correct"] for sample in result["samples"] if sample["correct"] is not None]
            advance(len(results), f"{sum(verdicts) / len(verdicts):.1%} right" if verdicts else "")
    return [results[i] for i in range(count)]


def _show(summary: Mapping[str, Any], output: Path) -> None:
    table = Table("metric", "value", "95 % interval", "problems")
    for name, estimate in summary["metrics"].items():
        table.add_row(
            name,
            f"{estimate['value']:.4f}",
            f"{estimate['low']:.4f} … {estimate['high']:.4f}",
            str(estimate["problems"]),
        )
    console = Console()
    console.print(table)
    unjudged = f", {summary['unjudged']} of which could not be judged and count nowhere" if summary["unjudged"] else ""
    console.print(
        f"{summary['problems']} problems × {summary['n']} completions{unjudged}; mean length "
        f"{summary['mean_length']:.1f} tokens, {summary['clipped_ratio']:.1%} cut off; results in {output}.",
        highlight=False,
    )
    shown = {name: {k: round(e[k], 6) for k in ("value", "low", "high")} for name, e in summary["metrics"].items()}
    print(json.dumps({**summary, "metrics": shown}))  # one line for programs
