"""``CompletionsLog``: what the policy wrote and what it got for it, in ``completions.jsonl`` of the run's folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.data.cells import image_digests
from grpo_pl.environment import text_of
from grpo_pl.files.rows import Row, json_line, read_lines, row_writer
from grpo_pl.files.runs import IMAGES
from grpo_pl.files.writing import append_lines, best_effort, staged
from grpo_pl.functional.argument_checks import check_at_least
from grpo_pl.rollout.sampler import episode_row
from grpo_pl.training.experience import Experience
from grpo_pl.training.lightning_loops import completed_rollouts
from grpo_pl.types import Problem


class CompletionsLog(Callback):
    """Writes the first groups of every rollout, one completion a line. The file never outgrows its limit: when it
    would, every second of the rollouts it holds is dropped, and from then on only such rollouts are written, so that
    it covers the whole run evenly. With several processes it shows the prompts of the first. Small copies of the images
    of these prompts are in the folder ``images`` beside it, under their digests.

    Args:
        groups_per_rollout: prompts of each rollout that are written, each with all of its completions; 0 writes none.
        max_megabytes: largest size of the file, and of all images together.
    """

    def __init__(self, groups_per_rollout: int = 4, max_megabytes: float = 32.0) -> None:
        super().__init__()
        check_at_least(0, "completions", groups_per_rollout=groups_per_rollout)
        if not max_megabytes > 0:
            raise ValueError(f"completions needs max_megabytes > 0, got {max_megabytes}.")
        self.groups_per_rollout, self.max_megabytes = groups_per_rollout, max_megabytes
        self.path: Path | None = None
        """Set by the command line to a file of the run's folder; None writes nothing."""
        self._stride = 1  # rollouts from one that is written to the next

    def state_dict(self) -> dict[str, Any]:
        return {"stride": self._stride}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stride = state_dict["stride"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drops the rows of rollouts that a resumed run makes again."""
        if self.path is not None and trainer.is_global_zero and self.path.exists():
            completed = completed_rollouts(trainer)
            with best_effort(self.path):
                self._keep(lambda row: row["step"] < completed)

    def covers(self, step: int) -> bool:
        """Whether the rollout of this number is one that the file holds, as far as there is room."""
        return step % self._stride == 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        experience: Experience = outputs["experience"]
        if self.path is None or not trainer.is_global_zero or not self.covers(experience.samples.step):
            return
        text = "".join(map(json_line, completion_rows(experience, groups=self.groups_per_rollout)))
        with best_effort(self.path):
            if text and self._make_room(len(text.encode())):
                append_lines(self.path, text)
                prompts = experience.samples.prompts[: self.groups_per_rollout]
                write_images(prompts, self.path.with_name(IMAGES), max_megabytes=self.max_megabytes)

    def _make_room(self, size: int) -> bool:
        """Drops every second rollout of the file until ``size`` more bytes fit; false where that does not help."""
        assert self.path is not None
        limit = self.max_megabytes * 1e6
        before = math.inf
        while (now := self.path.stat().st_size if self.path.exists() else 0) + size > limit:
            if now == before or now == 0:
                return False
            before, self._stride = now, self._stride * 2
            self._keep(lambda row: row["step"] % self._stride == 0)
            self._drop_images()
        return True

    def _drop_images(self) -> None:
        """Removes the images that are in no row any more."""
        assert self.path is not None
        files = list(self.path.with_name(IMAGES).glob("*.png"))
        kept = {digest for line in read_lines(self.path) for digest in line.row.get("images", ())} if files else set()
        for file in files:
            if file.stem not in kept:
                file.unlink()

    def _keep(self, wanted: Callable[[Row], bool]) -> None:
        """Rewrites the file with the wanted rows only, without a last line that a crash cut short."""
        assert self.path is not None
        with row_writer(self.path) as write:
            for line in read_lines(self.path, may_be_cut_short=True):
                if wanted(line.row):
                    write(line.row)


def write_images(prompts: Iterable[Problem], folder: Path, *, max_megabytes: float) -> None:
    """Writes a small copy of each image of these problems that is not there yet, as long as there is room."""
    seen = {image.sha256: image for prompt in prompts if image_digests(prompt) for image in prompt.columns["images"]}
    new = {file: image for digest, image in seen.items() if not (file := folder / f"{digest}.png").exists()}
    size = sum(file.stat().st_size for file in folder.glob("*.png")) if new else 0
    for file, image in new.items():
        small = image.thumbnail()
        size += len(small)
        if size > max_megabytes * 1e6:
            return
        with staged(file) as staging:
            staging.write_bytes(small)


def completion_rows(experience: Experience, *, groups: int) -> list[Row]:
    """The completions of this process's first ``groups`` prompts, in the order of the rollout."""
    samples = experience.samples
    return rows_of(experience, range(min(groups * samples.rollout.group_size, len(samples.completions))))


def rows_of(experience: Experience, numbers: Iterable[int]) -> list[Row]:
    """This process's completions of these numbers."""
    samples = experience.samples
    size = samples.rollout.group_size
    lengths = samples.rollout.action_lengths.tolist()
    rewards = experience.statistics.rewards.flatten().tolist()
    mask = experience.rollout.action_mask  # (B, T)
    by_token = experience.advantages.expand(mask.shape)
    advantages = ((by_token * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()  # the mean where tokens differ
    correct = experience.scored.correct()
    rows = []
    for i in numbers:
        prompt = samples.prompts[i // size]
        rows.append(
            {
                "step": samples.step,
                "prompt_id": prompt.id,
                "sample": i % size,
                "prompt": samples.prompt_texts[i // size],
                "question": prompt.question,
                "answer": prompt.answer,
                **({"images": digests} if (digests := image_digests(prompt)) else {}),
                "completion": samples.completions[i],
                "tokens": lengths[i],
                "finish_reason": samples.rollout.finish_reasons[i],
                "rewards": experience.scored.described(i),
                "correct": correct[i],
                **experience.scored.extra_of(i),
                "reward": _finite(rewards[experience.first_row + i]),
                "advantage": _finite(advantages[i]),
                **({} if samples.episodes is None else {"episode": _credited(experience, i)}),
            }
        )
    return rows


def _credited(experience: Experience, number: int) -> Row:
    """An episode of this process with the advantage of each of its turns."""
    episodes, credit = experience.samples.episodes, experience.turn_advantages
    assert episodes is not None
    row = episode_row(episodes[number])
    for turn, values in enumerate(row["turns"]):
        of_turn = experience.advantages[number, 0] if credit is None else credit[number, turn]
        values["advantage"] = _finite(of_turn.item())
    return row


def exchange_text(episode: Mapping[str, Any]) -> str:
    """An episode for people: each action with its reward and advantage, and below it what the policy read next."""
    lines = []
    for number, turn in enumerate(episode["turns"], start=1):
        reward = f"  reward {turn['reward']:+g}" if turn["reward"] else ""
        credit = "" if turn.get("advantage") is None else f"  advantage {turn['advantage']:+.2f}"
        where = f" (segment {turn['segment']})" if "segment" in turn else ""
        lines += [f"{number}.{where} {turn['action'].strip()}{reward}{credit}", text_of(turn["observation"]).strip()]
    status = "" if episode["status"] == "ok" else f"{episode['status']}: {episode['detail']}"
    return "\n".join(filter(None, [*lines, status]))


def flat_row(row: Mapping[str, Any]) -> Row:
    """A row as columns of a table: ``rewards`` becomes ``reward/<name>`` and ``status/<name>``, ``extra`` becomes
    ``extra/<name>``, ``episode`` becomes ``exchange``, ``turns`` and ``return``."""
    flat = {key: value for key, value in row.items() if key not in ("rewards", "extra", "episode")}
    if "episode" in row:
        episode = row["episode"]
        flat |= {"exchange": exchange_text(episode), "turns": len(episode["turns"]), "return": episode["return"]}
    flat |= {f"extra/{name}": value for name, value in row.get("extra", {}).items()}
    for name, score in row["rewards"].items():
        flat[f"reward/{name}"], flat[f"status/{name}"] = score["value"], score["status"]
    return flat


def shortened(text: str, characters: int) -> str:
    """``text``, the middle left out where it is longer than ``characters``."""
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]} […] {text[len(text) - half :]}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
