"""``grpo-pl demo``: a fit with the live view, and a report that opens only before a screen."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_pl.data.tasks.countdown import CountdownPrompts
from grpo_pl.extras.live import command as demo_module
from tests.config.test_jsonargparse_adapter import Parsed


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was asked to open."""
    found: list[str] = []
    monkeypatch.setattr(demo_module.webbrowser, "open", found.append)
    return found


@pytest.mark.parametrize("screen", [True, False])
def test_the_report_opens_before_a_screen_only(
    command_line: Any, opened: list[str], monkeypatch: pytest.MonkeyPatch, screen: bool
) -> None:
    monkeypatch.setattr(demo_module, "can_show", lambda: screen)
    config = command_line.config("shown")
    done = command_line(
        "demo", f"--config={config}", "--seed=3", "--every=2", f"--name=screen_{screen}", "--data.steps=2"
    )
    assert done.status == 0, done.err
    folder = Path(command_line.runs) / f"screen_{screen}"
    assert opened == ([(folder / "report.html").absolute().as_uri()] if screen else [])
    written = (folder / "config.yaml").read_text()
    assert (
        "grpo_pl.extras.live.callback.LiveView" in written and "seed_everything: 3" in written and "steps: 2" in written
    )


@pytest.mark.parametrize(
    ("options", "seed", "every"),
    [((), 7, 0), (("--samples.every_n_rollouts=5", "--seed=3"), 3, 5)],
)
def test_settings_that_are_given_win(
    command_line: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], seed: int, every: int
) -> None:
    config = command_line.config("given", seed_everything=7)
    handed_on: list[str] = []
    monkeypatch.setattr(demo_module, "main", lambda args: handed_on.extend(args) or 1)
    assert command_line("demo", f"--config={config}", *options).status == 1
    fit = Parsed(handed_on).config.fit
    assert (fit.seed_everything, fit.samples.every_n_rollouts) == (seed, every)


SMALL = (
    *("--model.cold_start.steps=1", "--model.sampling.max_completion_length=4", "--model.validation.samples=1"),
    *("--data.steps=1", "--data.prompts_per_step=1"),
)


def test_options_alone_change_the_default_configuration(command_line: Any) -> None:
    """Which is read, and whose problem of few solutions is watched."""
    done = command_line.done("demo", "--name=small", *SMALL)
    assert f"held-out problem {CountdownPrompts().validation()[demo_module.LONG_SEARCH].question}\n" in done.out
    assert "--config configs/countdown_search.yaml" in done.out  # in the command that comes next


def test_the_same_recipe_takes_another_puzzle(command_line: Any) -> None:
    files = ("--config=configs/countdown_search.yaml", "--config=configs/puzzle/subset_sum.yaml")
    done = command_line.done("demo", *files, "--name=another", *SMALL)
    assert re.search(r"^held-out problem (\d\d ){4}\d\d:\d\d$", done.out, re.MULTILINE)
    assert "rewards/subset_sum/mean" in (Path(command_line.runs) / "another" / "metrics.csv").read_text()


def test_a_fit_that_fails_opens_nothing(command_line: Any, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "can_show", lambda: True)
    assert command_line("demo", "--config=configs/sorting.yaml", "--data.steps=-1").status != 0
    assert opened == []


@pytest.mark.parametrize("screen", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_browser_opens_for_a_person_before_a_screen_only(
    monkeypatch: pytest.MonkeyPatch, screen: bool, terminal: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr(demo_module.webbrowser, "get", lambda: None)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    if screen:
        monkeypatch.setenv("DISPLAY", ":0")
    assert demo_module.can_show() == (screen and terminal)
