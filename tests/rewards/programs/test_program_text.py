"""Which part of a completion is the program."""

import pytest

from grpo_pl.rewards.programs.program_text import last_program

F = "```"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (f"{F}python\nprint(1)\n{F}", "print(1)\n"),
        (f"So:\n\n  {F}py\nx = 1\n  {F}\nDone.", "x = 1\n"),
        (f"{F}\nprint(1)\n{F}", "print(1)\n"),
        (f"{F}python\na\n{F}\ntext\n{F}python\nb\n{F}", "b\n"),
        (f"{F}python\na\n{F}\nIts output:\n{F}text\n1\n{F}", "a\n"),
        (f"{F}cpp\nint main;\n{F}", None),
        (f"{F}python\nprint(1)", None),  # cut off: what is left of it might pass by luck
        (f"{F}python\nopen\n{F}python\nclosed\n{F}", "closed\n"),
        ("print(1)", None),
        (f"<think>{F}python\nidea\n{F}</think>I give up.", None),
        (f"<think>idea</think>{F}python title='a.py'\nprint(2)\n{F}", "print(2)\n"),
        (f"{F}python\ns = 'a {F} b'\n{F}", f"s = 'a {F} b'\n"),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(completion: str, program: str | None) -> None:
    assert last_program(completion) == program
