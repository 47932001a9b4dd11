"""``Digests``: what a run can be proved by later: digests of its weights and of what it wrote, in ``digests.jsonl``."""

from __future__ import annotations

import hashlib
import time
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.callbacks.completions import CompletionsLog
from grpo_pl.files.rows import Row, append_rows, read_lines, row_writer
from grpo_pl.files.runs import RunFolder
from grpo_pl.files.writing import best_effort
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.policy.weights import weights_digest
from grpo_pl.rollout.sampler import Samples
from grpo_pl.training.experience import Experience
from grpo_pl.training.lightning_loops import completed_rollouts
from grpo_pl.training.module import GRPOModule


class Digests(Callback):
    """Writes a line with the digest of the policy's weights before the first rollout, that is of a cold start, beside
    each checkpoint, and one rollout behind either, so that one update can be repeated and compared; after each rollout
    of which ``completions.jsonl`` has completions, one with digests of their token ids, as `token_digests` gives them;
    when the fit ends, however it does, one of ``completions.jsonl``. Each line has the completed rollouts and the
    seconds that it took, about one for each gigabyte of weights.

    Args:
        every_n_rollouts: also after so many rollouts, 1 for each; 0 adds none.
    """

    def __init__(self, every_n_rollouts: int = 0) -> None:
        super().__init__()
        check_at_least(0, "digests", every_n_rollouts=every_n_rollouts)
        self.every_n_rollouts = every_n_rollouts
        self.folder: RunFolder | None = None
        """Set by the command line to the run's folder; None writes nothing."""
        self._written: set[int] = set()
        self._begun = 0  # completed rollouts at the start of this process or at the newest checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = trainer.strategy.broadcast(self.folder) if stage == "fit" else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the lines of rollouts that a resumed run makes again."""
        completed = completed_rollouts(trainer)
        rows: list[Row] = []
        if self.folder is not None and trainer.is_global_zero and self.folder.digests.exists():
            lines = read_lines(self.folder.digests, may_be_cut_short=True)
            rows = [line.row for line in lines if "completions" not in line.row and line.row["step"] <= completed]
            with best_effort(self.folder.digests), row_writer(self.folder.digests) as write:
                for row in rows:
                    write(row)
        self._begun = completed
        self._written = set(trainer.strategy.broadcast({row["step"] for row in rows if "weights" in row}))
        self._write_weights(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        completed = completed_rollouts(trainer)
        self._write_token_digests(trainer, outputs["experience"])
        if completed == self._begun + 1 or (self.every_n_rollouts and completed % self.every_n_rollouts == 0):
            self._write_weights(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._begun = completed_rollouts(trainer)
        self._write_weights(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_completions(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.lightning_module is not None and self._written:
            self._write_completions(trainer)

    def _write_weights(self, trainer: Trainer, module: LightningModule) -> None:
        """On all ranks, which gather sharded weights together."""
        completed = completed_rollouts(trainer)
        if self.folder is None or completed in self._written:
            return
        begun = time.perf_counter()
        digest = weights_digest(cast(GRPOModule, module).require_policy().state_dict().items())
        self._written.add(completed)
        self._write(trainer, {"step": completed, "weights": digest}, begun)

    def _write_token_digests(self, trainer: Trainer, experience: Experience) -> None:
        """Of the rows of this rollout in ``completions.jsonl``, which alone a replay is held to."""
        log = next((each for each in trainer.callbacks if isinstance(each, CompletionsLog)), None)  # type: ignore[attr-defined]
        if self.folder is None or not trainer.is_global_zero or log is None or not log.groups_per_rollout:
            return
        if log.covers(experience.samples.step):
            begun = time.perf_counter()
            digests = token_digests(experience.samples, log.groups_per_rollout)
            self._write(trainer, {"step": completed_rollouts(trainer), "token_ids": digests}, begun)

    def _write_completions(self, trainer: Trainer) -> None:
        if self.folder is None or not trainer.is_global_zero or not self.folder.completions.exists():
            return
        begun = time.perf_counter()
        with best_effort(self.folder.completions), self.folder.completions.open("rb") as file:
            digest = hashlib.file_digest(file, hashlib.sha256).hexdigest()
            self._write(trainer, {"step": completed_rollouts(trainer), "completions": digest}, begun)

    def _write(self, trainer: Trainer, row: Row, begun: float) -> None:
        if self.folder is not None and trainer.is_global_zero:
            with best_effort(self.folder.digests):
                append_rows(self.folder.digests, [{**row, "seconds": round(time.perf_counter() - begun, 6)}])


def token_digests(samples: Samples, groups: int) -> list[tuple[int, list[str]]]:
    """Prompt id and a digest of each of its completions, for the first ``groups`` prompts: the first 12 digits of the
    SHA-256 of the token ids, end tokens and observations included, as 64-bit integers, little-endian."""
    rollout = samples.rollout
    prompts, size = samples.prompts[:groups], rollout.group_size
    ids = rollout.completion_ids[: len(prompts) * size].cpu().numpy().astype("<i8")
    lengths = rollout.lengths.tolist()
    digests = [
        hashlib.sha256(row[:length].tobytes()).hexdigest()[:12] for row, length in zip(ids, lengths, strict=False)
    ]
    return [(prompt.id, digests[at * size : (at + 1) * size]) for at, prompt in enumerate(prompts)]
