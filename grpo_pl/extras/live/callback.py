"""``LiveView``: a held-out problem answered again and again while the policy learns, beside its first answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_pl.callbacks.completions import shortened
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.training.hooks import StepCallback
from grpo_pl.training.lightning_loops import completed_rollouts, data_of
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import Problem

BARS = "▁▂▃▄▅▆▇█"
CHOSEN_AMONG = 20
"""Held-out problems of which the first is shown that the policy fails at first."""
STYLES = {True: "green", False: "red", None: ""}
"""By whether an answer is right; None where no reward says so."""
CURVES = {"right": "completions/correct", "length": "completions/mean_length"}
"""Name beside a sparkline -> metric of a rollout."""


class Answered(NamedTuple):
    """The policy's answer to the problem after some rollouts."""

    rollout: int
    text: str
    right: bool | None


class LiveView(StepCallback):
    """Answers one held-out problem greedily at the start, every few rollouts and at the end. A terminal shows the first
    answer and the newest side by side, above the share of right completions and their mean length, rollout by rollout;
    anything else gets a line each time. The rollouts are those of a run without it. A resumed run begins a new view.

    Args:
        every_n_rollouts: rollouts between two answers.
        characters: longest answer that is shown; the middle of longer ones is left out.
        problem: which of the held-out problems, counted from 0, or the last where there are fewer; None takes the first
            of twenty that the policy does not solve at the start.
    """

    def __init__(self, every_n_rollouts: int = 10, characters: int = 1500, problem: int | None = None) -> None:
        super().__init__()
        check_at_least(1, "live", every_n_rollouts=every_n_rollouts, characters=characters)
        check_at_least(0, "live", problem=problem or 0)
        self.every_n_rollouts, self.characters, self.problem = every_n_rollouts, characters, problem
        self.answers: list[Answered] = []
        """So far."""
        self._problem: Problem | None = None
        self._curves: dict[str, list[float]] = {name: [] for name in CURVES}
        self._stage = ""
        self._live: Live | None = None
        self._started = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.monotonic()
        held_out = [problem for problems in data_of(trainer).held_out().values() for problem in problems]
        tried = held_out[:CHOSEN_AMONG] if self.problem is None else held_out[: self.problem + 1][-1:]
        if not tried:
            return  # a run without held-out problems has nothing to show
        answered = _answered(pl_module, tried, completed_rollouts(trainer))
        place = next((i for i, each in enumerate(answered) if not each.right), 0)
        self._problem, self.answers = tried[place], [answered[place]]
        console = Console()
        if trainer.is_global_zero and (self.problem or 0) >= len(held_out):  # after the cold start: too late to refuse
            console.print(f"there is no problem {self.problem} among {len(held_out)} held-out ones: this is the last")
        if trainer.is_global_zero and console.is_terminal:
            self._live = Live(get_renderable=lambda: self._page(trainer), console=console, refresh_per_second=2)
            self._live.start()
        elif trainer.is_global_zero:
            self._print(console, f"held-out problem {self._problem.question.strip()}")
            self._say(console)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, metric in CURVES.items():
            if metric in trainer.callback_metrics:
                self._curves[name].append(float(trainer.callback_metrics[metric]))
        rollout = completed_rollouts(trainer)
        last = rollout == data_of(trainer).steps
        if self._problem is not None and (last or rollout % self.every_n_rollouts == 0):
            self.answers += _answered(pl_module, [self._problem], rollout)
            if self._live is None and trainer.is_global_zero:
                self._say(Console())

    def on_stage_progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        self._stage = f"{stage} {done}/{total}"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()  # before the summary is printed, which a last look would draw over

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()  # what is printed while the page is there would be drawn over

    def _end(self) -> None:
        if self._live is not None:
            self._live.stop()  # after a last look
            self._live = None

    def _say(self, console: Console) -> None:
        """One line about the newest answer."""
        newest = self.answers[-1]
        line = " / ".join(newest.text.strip().splitlines())
        known = [f"{name} {values[-1]:.2f}" for name, values in self._curves.items() if values]
        mark = {True: "right: ", False: "wrong: ", None: ""}[newest.right]
        self._print(console, f"rollout {newest.rollout}: {mark}{shortened(line, self.characters)}", *known)

    @staticmethod
    def _print(console: Console, *texts: str) -> None:
        """As it is: what a policy writes may look like rich's markup."""
        console.print(*texts, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def _page(self, trainer: Trainer) -> RenderableType:
        assert self._problem is not None
        minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
        rollout = f"rollout {completed_rollouts(trainer)}/{data_of(trainer).steps}"
        head = f"{rollout}   {minutes}:{seconds:02d}   {self._stage}"
        return Group(head, side_by_side(self._problem, self.answers, self.characters), *self._sparklines())

    def _sparklines(self) -> list[Text]:
        width = max(10, min(100, Console().width - 30))
        lines = []
        for name, values in self._curves.items():
            if values:
                top = 1.0 if name == "right" else max(values)
                ends = f"{values[0]:.4g} → {values[-1]:.4g}"
                lines.append(Text(f"{name:>8} {sparkline(values, top=top, width=width)} {ends}"))
        return lines


def _answered(module: LightningModule, problems: Sequence[Problem], rollout: int) -> list[Answered]:
    found = cast(GRPOModule, module).answer_greedily(problems)
    assert found.samples is not None
    right = (found.correct & found.judged)[:, 0].tolist()
    verdicts = [None if found.rewards else is_right for is_right in right]  # without a correctness reward none is right
    return [Answered(rollout, text, each) for text, each in zip(found.samples.completions, verdicts, strict=True)]


def side_by_side(problem: Problem, answers: Sequence[Answered], characters: int) -> Table:
    """The first answer and the newest."""
    shown = [answers[0], answers[-1]]
    table = Table(title=Text(f"held-out problem {problem.question.strip()}"), title_justify="left", expand=True)
    for each in shown:
        table.add_column(f"rollout {each.rollout}", ratio=1, overflow="fold")
    table.add_row(*(Text(shortened(each.text.strip(), characters), style=STYLES[each.right]) for each in shown))
    return table


def sparkline(values: Sequence[float], *, top: float, width: int) -> str:
    """A bar for each value between 0 and ``top``, for each of ``width`` spans of them where they are more."""
    spans = min(width, len(values))
    ends = [len(values) * i // spans for i in range(spans + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    return "".join(BARS[min(len(BARS) - 1, max(0, int(mean / (top or 1.0) * len(BARS))))] for mean in means)
