"""The view of one held-out problem while the policy learns: lines in a file, a page on a terminal, the same run."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from grpo_pl.extras.live.callback import Answered, LiveView, side_by_side, sparkline
from grpo_pl.types import Problem


def view(settings: str = "every_n_rollouts: 2") -> str:
    return f"--trainer.callbacks+={{class_path: grpo_pl.extras.live.callback.LiveView, init_args: {{{settings}}}}}"


def test_a_sparkline_has_a_bar_for_each_value_or_for_the_mean_of_a_span() -> None:
    assert sparkline([0.0, 0.25, 0.5, 1.0], top=1.0, width=10) == "▁▃▅█"
    assert sparkline([0.0, 0.5, 1.0, 1.0], top=1.0, width=2) == "▃█"  # 0.25 and 1
    assert sparkline([0.0, 0.0], top=0.0, width=2) == "▁▁"
    assert len(sparkline([1.0] * 7, top=1.0, width=3)) == 3


def test_the_first_answer_stands_beside_the_newest_and_markup_is_text() -> None:
    answers = [Answered(0, "[red]first", False), Answered(10, "second", False), Answered(20, "third", True)]
    printed = io.StringIO()
    Console(file=printed, width=80).print(side_by_side(Problem(id=1, question="12 7 3:36", answer="36"), answers, 1000))
    text = printed.getvalue()
    assert "held-out problem 12 7 3:36" in text and "rollout 0" in text and "rollout 20" in text
    assert "[red]first" in text and "third" in text and "second" not in text
    marked = Problem(id=1, question="a[/b] :100:", answer="1")
    Console(file=printed, width=80).print(side_by_side(marked, answers, 1000))
    assert "a[/b] :100:" in printed.getvalue()


def test_a_line_shows_an_answer_letter_by_letter() -> None:
    """An unmatched [/x] would be an error of rich's in the middle of a training."""
    live, printed = LiveView(), io.StringIO()
    live.answers = [Answered(3, "x[i] [/INST] :100:\nend", True)]
    live._say(Console(file=printed, width=40))
    assert printed.getvalue() == "rollout 3: right: x[i] [/INST] :100: / end\n"


def test_a_file_gets_a_line_for_each_answer_and_the_last_one_and_the_run_is_the_same(
    command_line: Any, read_metrics: Callable[..., list[dict[str, str]]]
) -> None:
    config = command_line.config("live", data__steps=3)
    command_line.done("fit", "--config", config, "--name=alone")
    seen = command_line.done("fit", "--config", config, "--name=seen", view())
    assert re.findall(r"^rollout (\d): (?:right|wrong): ", seen.out, re.MULTILINE) == list("023")
    assert re.search(r"^held-out problem \d+\+\d+=$", seen.out, re.MULTILINE)
    assert "\x1b" not in seen.out
    metrics = [read_metrics(command_line.runs / name / "metrics.csv") for name in ("alone", "seen")]
    assert metrics[0] == metrics[1]


def test_a_terminal_gets_both_answers_and_two_curves(command_line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    options = ["--data.steps=2", "--trainer.enable_progress_bar=false", view()]
    done = command_line.done("fit", "--config", command_line.config("shown"), *options)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.out)
    assert re.search(r"rollout 2/2 +\d+:\d\d", text)
    assert text.rindex("rollout 2/2") < text.index("held-out problems")  # the page ends before the summary begins
    assert re.search(r"right [▁▂▃▄▅▆▇█]{2} ", text) and re.search(r"length [▁▂▃▄▅▆▇█]{2} ", text)


def test_the_problem_to_be_watched_can_be_named_and_the_last_stands_for_one_that_is_not_there(
    command_line: Any,
) -> None:
    """The cold start is behind it: a number too large is no reason to lose that."""
    config = command_line.config("named", data__steps=1)
    first, last = (command_line.done("fit", "--config", config, view(f"problem: {n}")).out for n in (0, 999))
    told = r"^there is no problem 999 among \d+ held-out ones: this is the last\nheld-out"
    assert re.search(told, last, re.MULTILINE) and "there is no problem" not in first
    questions = [re.findall(r"^held-out problem (.*)$", out, re.MULTILINE) for out in (first, last)]
    assert all(questions) and questions[0] != questions[1]


@pytest.mark.parametrize("name", ["every_n_rollouts", "characters", "problem"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"live needs {name} >="):
        LiveView(**{name: -1})
