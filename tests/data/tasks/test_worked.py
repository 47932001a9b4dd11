"""Work behind answers, worked out by hand, and that its last line gives the answer of every entry."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset

from grpo_pl.data.tasks import worked as work


@pytest.mark.parametrize(
    ("function", "arguments", "lines"),
    [
        (work.running_totals, ("4 + 3 - 9",), ["4+3=7", "7-9=-2"]),
        (work.running_totals, ("-14 - 3",), ["-14-3=-17"]),
        (work.running_totals, ("23.21 + 60.2",), ["23.21+60.2=83.41"]),
        (work.reduced, ("7 * ( 2 + 3 )",), ["2+3=5", "7*5=35"]),
        (work.reduced, ("-( 20 - 4 / 2 )",), ["4/2=2", "20-2=18"]),
        (work.reduced, ("7 / 2",), []),  # no whole number
        (work.reduced, ("7 / 0",), []),
        (work.long_product, ("43 * 32",), ["43*2=86", "43*3=129", "9+8=17", "12+1=13"]),  # 13, 7, 6
        (work.long_product, ("12 * -30",), ["12*0=0", "12*3=36"]),
        (work.long_product, ("99 * 99",), ["99*9=891", "99*9=891", "1+9=10", "9+8+1=18", "8+1=9"]),  # 9, 8, 0, 1
        (work.long_product, ("2 * 3 * 4",), []),
        (work.in_columns, (129, 8), ["9+8=17", "12+1=13"]),
        (work.in_columns, (121, 44), ["1+4=5", "2+4=6"]),
        (work.in_columns, (129, 0), []),
        (work.common_multiple, ([4, 6],), ["4=2*2", "6=2*3", "2=2", "4/2=2", "6*2=12"]),
        (work.common_multiple, ([12, 8],), ["12=2*2*3", "8=2*2*2", "2*2=4", "8/4=2", "12*2=24"]),
        (work.common_multiple, ([3, 5],), ["3=3", "5=5", "1=1", "5*3=15"]),
        (work.common_multiple, ([1001, 7],), ["1001-143*7=0", "7/7=1", "1001*1=1001"]),
        (work.common_multiple, ([2, 3, 4],), []),
        (work.divided_out, (4, 6), ["6-1*4=2", "4-2*2=0", "4/2=2", "6/2=3"]),
        (work.factored, ([2, 3, 7],), ["42/2=21", "21/3=7"]),
        (work.factored, ([7],), []),
        (work.rebased, ("132", 4, 6), ["1*4+3=7", "7*4+2=30", "30=5*6+0", "5=0*6+5"]),
        (work.rebased, ("f", 16, 2), ["15=7*2+1", "7=3*2+1", "3=1*2+1", "1=0*2+1"]),
        (work.rebased, ("", 4, 6), []),  # how reasoning-gym writes 0
        (work.worked, ("spell_backward", {"word": "sun"}), "s1\nu2\nn3\n"),
        (work.deciphered, (1, "IF NF", "HE ME"), ["1", "IHFE", "NMFE"]),
        (work.counted, ("No one", "o"), "No1 o2ne"),
        (work.worked, ("isomorphic_strings", {"words": ("odd", "egg")}), "oe dg dg\n"),
        (work.needed, ("tat", "tap"), ["t2/1", "a1/1"]),
        (work.inserted, (["3", "1", "2"], ["1", "2", "3"]), ["3", "1 3", "1 2 3"]),
        (work.compared, (["6.4", "5", "5.1"], "5.1"), ["6.4>5.1", "5<5.1", "5.1=5.1"]),
        (work.legs, ({"bird": 2, "ant": 1},), ["2*2=4, 4", "1*6=6, 10"]),
        (work.euclid, ([9, 12],), ["12-1*9=3", "9-3*3=0"]),
        (work.euclid, ([12, 18, 4],), ["18-1*12=6", "12-2*6=0", "6-1*4=2", "4-2*2=0"]),
        (work.common_factors, ([12, 18],), ["12=2*2*3", "18=2*3*3", "2*3=6"]),
        (work.common_factors, ([1, 7],), ["1=1", "7=7", "1=1"]),
        (work.common_factors, ([12, 18, 20],), ["12=2*2*3", "18=2*3*3", "20=2*2*5", "2=2"]),
        (work.common_factors, ([1001, 7],), work.euclid([1001, 7])),  # too large for a table
        (work.halving, (5,), ["5:1", "2:1", "1:2"]),
        (work.halving, (0,), []),
        (work.isolated, ("56 - 98*e = -1218",), ["-1218-56=-1274", "127-1*98=29", "294-3*98=0"]),
        (work.isolated, ("5*x + 1 = 2*x + 7",), ["7-1=6", "5-2=3", "6/3=2"]),
        (work.isolated, ("x + 3 = 5",), ["5-3=2", "2/1=2"]),
        (work.isolated, ("3 - 2*x = -7",), ["-7-3=-10", "-10/-2=5"]),
        (work.isolated, ("0 = 0",), []),  # any value is right
        (work.isolated, ("(x + 1)*2 = 4",), []),  # no sum of terms
    ],
)
def test_the_work_by_hand(function: Callable[..., Any], arguments: tuple[Any, ...], lines: Any) -> None:
    assert function(*arguments) == lines


def product(lines: list[str]) -> str:
    """The sum of a long product's parts, each times ten to its place."""
    parts = [found for line in lines if (found := re.fullmatch(r"(\d+)\*\d=(\d+)", line))]
    parts = [part for part in parts if part[1] == parts[-1][1]]  # not the primes before
    return str(sum(int(part[2]) * 10**place for place, part in enumerate(parts)))


@pytest.mark.parametrize(
    ("task", "result"),
    [
        ("gcd", lambda lines: lines[-1].split("=")[1]),
        ("count_bits", lambda lines: lines[-1].split(":")[1]),
        (
            "simple_equations",
            lambda lines: (
                lines[-1].split("=")[1]
                if "/" in lines[-1]
                else "".join(re.findall(r"^\d+-(\d)\*", "\n".join(lines), re.MULTILINE))
            ),
        ),
        ("caesar_cipher", lambda lines: " ".join(line[1::2] for line in lines[1:])),
        ("chain_sum", lambda lines: lines[-1].split("=")[1]),
        ("decimal_chain_sum", lambda lines: lines[-1].split("=")[1]),
        (
            "base_conversion",
            lambda lines: "".join(
                f"{int(line.split('+')[1]):x}" for line in reversed(lines) if re.match(r"\d+=", line)
            ),
        ),
        ("lcm", product),
        ("leg_counting", lambda lines: lines[-1].split(", ")[1]),
        ("number_sorting", lambda lines: str(lines[-1].split())),
        ("products", product),
        (
            "ransom_note",
            lambda lines: str(not any(int(a) > int(b) for a, b in (line[1:].split("/") for line in lines))),
        ),
        ("spell_backward", lambda lines: "".join(line[0] for line in reversed(lines))),
        ("string_manipulation", lambda lines: lines[-1]),
        ("string_splitting", lambda lines: lines[-1]),
        ("word_sequence_reversal", lambda lines: ", ".join(line.split()[1] for line in lines[::-1])),
        ("word_sorting", lambda lines: ", ".join(lines[-1].split())),
    ],
)
def test_the_work_ends_in_the_answer(task: str, result: Callable[[list[str]], str]) -> None:
    shown = 0
    for entry in create_dataset(task, size=200, seed=3):
        lines = work.worked(task, entry["metadata"]).splitlines()
        if lines:
            shown += 1
            assert result(lines) == entry["answer"], (entry, lines)
    assert shown > 150


def test_tasks_without_known_work_have_none() -> None:
    assert work.worked("syllogism", {"is_valid": True}) == ""
