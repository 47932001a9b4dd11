"""``Probe``: the doctor of a short run that is thrown away. It also measures what would cost a real run time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.tools.doctor.answers import end_chance, scored_again
from grpo_pl.tools.doctor.callback import Doctor
from grpo_pl.tools.doctor.precision import bfloat16_gain
from grpo_pl.tools.doctor.run_statistics import Finding, ProblemStatistics, RunStatistics
from grpo_pl.training.experience import Experience
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import CUT_OFF

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3
"""Prompts, and answers to each."""
Shown = Mapping[str, Any]
"""``prompt``, with special tokens, its ``gold`` answer, and its first ``answers``: ``text`` as rewards see it,
``reward``, ``status`` of the correctness reward, and ``cut`` where a limit ended it."""


class ProbeTrainer(Trainer):
    """A Trainer with the verb ``doctor``."""

    def doctor(self, model: LightningModule, datamodule: LightningDataModule, weights_only: bool | None = None) -> None:
        """Looks at the first rollouts."""
        self.fit(model, datamodule=datamodule, weights_only=weights_only)


class Probe(Doctor):
    """The doctor of a probe: it has looked at problems and answers before, ends in time, and says nothing itself."""

    drift_every, most_rows, rows_share = 1, 32, 1.0

    def __init__(self, rollouts: int, seconds: float) -> None:
        super().__init__(rollouts)
        self.seconds = seconds
        self.found: ProblemStatistics | None = None
        self.result: RunStatistics | None = None
        self.shown: list[Shown] = []
        self.timed_out = False
        self._began: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the first rollout began."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    def should_stop(self) -> bool:
        self.timed_out = self.timed_out or self.elapsed > self.seconds
        return self.timed_out

    def step_metrics(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> Mapping[str, float]:
        super().step_metrics(trainer, pl_module, experience)
        assert isinstance(pl_module, GRPOModule)
        if not self.shown:
            self.shown = shown_prompts(experience, pl_module.tokenizer)
            gain = bfloat16_gain(trainer, pl_module, experience.samples.prompts, self.should_stop)
            self.measured[-1] = replace(self.measured[-1], bfloat16_gain=gain)
        if len(self.measured) == 1 and self.known is not None:
            again = scored_again(self.known, experience, pl_module.rewards)
            self.known = replace(again, end_chance=end_chance(pl_module, experience))
        return {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        assert isinstance(pl_module, GRPOModule)
        self.result = self.statistics(trainer, pl_module)
        trainer.should_stop = trainer.should_stop or self.should_stop()

    def problems(self, data: RolloutDataModule) -> ProblemStatistics | None:
        return self.found

    def say(self, finding: Finding) -> None:
        """Nothing: all findings are printed together."""


def shown_prompts(experience: Experience, tokenizer: PreTrainedTokenizerBase) -> list[Shown]:
    """The first prompts of a rollout, with the first answers to each."""
    samples, rollout, scored = experience.samples, experience.rollout, experience.scored
    judged, totals = scored.judged(), scored.totals()
    shown = []
    for index, problem in enumerate(samples.prompts[:SHOWN]):
        first = index * rollout.group_size
        ids = rollout.prompt_ids[first][rollout.prompt_mask[first]].tolist()
        answers = [
            {
                "text": samples.completions[row],
                "reward": totals[row],
                "status": judged[row].status,
                "cut": rollout.finish_reasons[row] in CUT_OFF,
            }
            for row in range(first, first + min(SHOWN, rollout.group_size))
        ]
        prompt = str(tokenizer.decode(ids, skip_special_tokens=False))
        shown.append({"prompt": prompt, "gold": problem.answer, "answers": answers})
    return shown


def lines_of(shown: Sequence[Shown]) -> Iterator[str]:
    """For a terminal: texts begin with a bar, so that their own lines and spaces can be seen."""
    for number, one in enumerate(shown, 1):
        yield f"prompt {number} of {len(shown)}, gold answer {one['gold']!r}:"
        yield from _barred(one["prompt"])
        for which, answer in enumerate(one["answers"], 1):
            reward = "no reward" if answer["reward"] is None else f"reward {answer['reward']:.3g}"
            yield f"answer {which}, {reward}, {answer['status']}{', cut off' if answer['cut'] else ''}:"
            yield from _barred(answer["text"])


def _barred(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        yield "  |" + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
