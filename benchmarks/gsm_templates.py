"""Measures which templates of GSM-Symbolic a run can use: `grpo_pl.data.tasks.gsm_symbolic` names the others.

Each template draws 200 problems in a new process, for 60 s at most. Of each problem, every calculation of the working
is made again, and the answer must be the result of the last one, or the last number.

    python benchmarks/gsm_templates.py --output benchmarks/results/gsm-templates.json
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from fractions import Fraction
from typing import Any

from common import add, parser_of, publish, surroundings, write

from grpo_pl.data.tasks.gsm_symbolic import Drawing
from grpo_pl.data.tasks.gsm_templates import PACKAGE, VERSION
from grpo_pl.functional.sampling import row_key

DRAWS, LIMIT_S = 200, 60.0


def disagreement(worked: str) -> str:
    """What of a worked answer does not fit together; nothing where all does."""
    working, _, answer = worked.rpartition("####")
    steps = re.findall(r"<<(.*?)=([^=]*?)>>", working)
    for term, result in steps:
        if not _agree(term, result):
            return f"{term} is not {result}"
    ends = [step[1] for step in steps[-1:]]
    ends += re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r"<<.*?>>", "", working))[-1:]
    if not any(_agree(end, answer) for end in ends):
        return f"the working ends with {' and '.join(ends)}, the answer is {answer.strip()}"
    return ""


def _agree(term: str, result: str) -> bool:
    """True if both have the same value, but for the rounding of floating-point numbers, or are the same text."""
    value, wanted = _value(term), _value(result)
    if value is None or wanted is None:
        return term.strip() == result.strip()
    return abs(value - wanted) <= 1e-9 * abs(wanted)


def _value(term: str) -> Fraction | None:
    """The value of a term of numbers and operations; None of another."""
    plain = re.sub(r"[\s,$]|(?<=\d)%", "", term)
    if not re.fullmatch(r"[\d.+*/()-]+", plain):
        return None
    exact = re.sub(r"\d+\.?\d*|\.\d+", r"Fraction('\g<0>')", plain)
    return Fraction(eval(exact, {"__builtins__": {}, "Fraction": Fraction}))


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    record: dict[str, Any] = {"benchmark": "gsm_templates", PACKAGE: VERSION, **surroundings("cpu"), "templates": []}
    for template in range(100):
        drawn: list[tuple[str, str]] = []
        start, slowest = time.perf_counter(), 0.0
        with Drawing() as drawing, suppress(ValueError):  # of a draw beyond its limit
            while len(drawn) < DRAWS and (begun := time.perf_counter()) < start + LIMIT_S:
                drawn.append(drawing.ask(template, row_key(0, "gsm_symbolic", template, len(drawn))))
                slowest = max(slowest, time.perf_counter() - begun)
        faults = list(filter(None, (disagreement(worked) for _, worked in drawn)))
        row: dict[str, Any] = {
            "template": template,
            "draws": len(drawn),
            "different": len({question for question, _ in drawn}),
        }
        row |= {"seconds": round(time.perf_counter() - start, 2), "slowest": round(slowest, 2), "faults": len(faults)}
        add(row | ({"fault": faults[0]} if faults else {}), record["templates"])
        write(record, arguments.output)
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
