"""``Asked``: a question and the completion that answers it rightly, and how likely the policy makes it as a run goes
on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from grpo_pl.data.demonstrations import Demonstration, read_demonstrations
from grpo_pl.extras.replay.recorded import CannotReplay, RecordedRun
from grpo_pl.policy.tokenizer import known_characters, lacking_characters, shown_characters
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.sft import Example, demonstration_logprobs, tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORES = "scores.json"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the policy is asked, and the text whose log-probability is measured."""

    question: str
    """As it stands in the data, before the template."""
    completion: str
    """The right completion, the template's prefill included."""
    origin: str
    """Where the completion is from."""
    answer: str = ""
    """The gold answer, where it is known."""

    @classmethod
    def of(cls, run: RecordedRun, question: str, answer: str | None) -> Asked:
        """Finds the right completion: a demonstration of the run's files that asks this question, else the last right
        completion of it in ``completions.jsonl``, else ``answer`` word by word.

        Args:
            answer: a text that the demonstration holds, or the gold answer of the recorded question; or else the
                completion itself.

        Raises:
            CannotReplay: there is none, or the run's completions are episodes, or its policy reads images.
        """
        if run.settings["model"].get("environment") is not None:
            raise CannotReplay(f"{run.path} was played in an environment, and one completion is no whole answer there.")
        if (run.settings["model"].get("policy") or {}).get("images"):
            raise CannotReplay(f"the policy of {run.path} reads images, and a question given as a text has none.")
        if not question.strip() or (answer is not None and not answer.strip()):
            raise CannotReplay("the question or the answer is empty: give both as texts, such as '12+34=' and 46.")
        gold = ""
        for file, shown in _demonstrations(run):
            if shown.question == question and (answer is None or answer in shown.completion):
                return cls(question=question, completion=shown.completion, origin=f"demonstration of {file}")
        rows = [row for row in run.completions(0, run.completed) if row.get("question") == question]
        right = [row for row in rows if row.get("correct") and answer in (None, row.get("answer"))]
        if rows:
            gold = str(rows[-1].get("answer") or "")
        if right:
            origin = f"right completion of step {right[-1]['step']}, sample {right[-1]['sample']}"
            return cls(question=question, completion=right[-1]["completion"], origin=origin, answer=gold)
        if answer is not None:
            return cls(question=question, completion=answer, origin="the given answer, word by word", answer=gold)
        seen = "no completion of it that the run recorded is right" if rows else "the run recorded no such question"
        raise CannotReplay(
            f"{question!r}: {seen}, and no demonstration answers it: give --answer, the right completion word by word."
        )

    def example(self, module: GRPOModule) -> Example:
        """Its tokens, as a rollout of the run would have them.

        Raises:
            CannotReplay: the policy cannot write a character of it.
        """
        tokenizer, prefill = module.tokenizer, module.template.prefill
        known, tags = known_characters(tokenizer), tokenizer.get_added_vocab()
        lacking = set() if known is None else lacking_characters(f"{self.question}{self.completion}", known, tags)
        if lacking:
            raise CannotReplay(
                f"the policy's vocabulary lacks {shown_characters(sorted(lacking))}: ask and answer in characters of "
                "the run."
            )
        text = self.completion if self.completion.startswith(prefill) else prefill + self.completion
        (found,) = tokenized([Demonstration(self.question, text)], module.sampler.dialogue)
        return found


def _demonstrations(run: RecordedRun) -> Iterator[tuple[str, Demonstration]]:
    """The demonstrations of the run's files, those of one turn."""
    model = run.settings["model"]
    named = [(model.get("demonstrations") or {}).get("file"), (model.get("cold_start") or {}).get("demonstrations")]
    for file in filter(None, named):
        if not Path(file).is_file():
            raise CannotReplay(f"{file}, from which the run took demonstrations, is gone: put it back.")
        yield from ((file, shown) for shown in read_demonstrations(file) if not shown.further)


@torch.no_grad()
def answer_logprob(policy: PreTrainedModel, example: Example, pad_token_id: int) -> float:
    """Σ log π over the tokens of the completion, its end included, at temperature 1; in nats."""
    logprobs, written = demonstration_logprobs(policy, [example], pad_token_id=pad_token_id)
    return float(logprobs[written].double().sum())


class Curve(Callback):
    """Scores the right completion before the first step of a replay and behind each, and writes `Scores` at the end.

    Args:
        folder: where they go.
    """

    def __init__(self, asked: Asked, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.values: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = cast(GRPOModule, pl_module)
        self.example, self.pad_token_id = self.asked.example(module), int(module.tokenizer.pad_token_id)
        self._score(trainer, module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._score(trainer, cast(GRPOModule, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            tokenizer = cast(GRPOModule, pl_module).tokenizer
            ids = (self.example.prompt, self.example.completion)
            prompt, completion = (str(tokenizer.decode(each, skip_special_tokens=False)) for each in ids)
            found = Scores(prompt=prompt, scored=completion, tokens=len(ids[1]), values=self.values)
            (self.folder / SCORES).write_text(json.dumps(asdict(found)), encoding="utf-8")

    def _score(self, trainer: Trainer, module: GRPOModule) -> None:
        with trainer.precision_plugin.forward_context():
            self.values.append(answer_logprob(module.require_policy(), self.example, self.pad_token_id))


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What `Curve` found."""

    prompt: str
    """What the policy read."""
    scored: str
    """What was scored, special tokens included."""
    tokens: int
    """Of ``scored``."""
    values: list[float]
    """Log-probability before the first step that was made, and behind each."""

    @classmethod
    def read(cls, folder: Path) -> Scores:
        """Those that `Curve` wrote."""
        return cls(**json.loads((folder / SCORES).read_text(encoding="utf-8")))
