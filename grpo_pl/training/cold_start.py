"""``ColdStart``: the demonstrations that a policy is shown before RL, and the name of what comes of it."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Trainer

from grpo_pl.data.cells import image_digests
from grpo_pl.data.demonstrations import Demonstration, draw_in_passes, read_demonstrations
from grpo_pl.distributed.strategy import computed_by
from grpo_pl.environment import Player, text_of
from grpo_pl.files.cache import cache_root
from grpo_pl.functional.argument_checks import check_choice
from grpo_pl.functional.sampling import row_key, small_seed
from grpo_pl.policy.dialogue import Dialogue
from grpo_pl.policy.loading import PolicyConfig
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import known_characters, lacking_characters, shown_characters
from grpo_pl.training.sft import Example, tokenized
from grpo_pl.training.stage import Stage
from grpo_pl.types import Conversation, Problem

if TYPE_CHECKING:
    from grpo_pl.data.sources import PromptSource

RECIPE, RECIPE_MIXED = 2, 3
"""Count up when what is computed changes, so that caches made by an older recipe are not taken: where the policy
computes in the type of its weights, and elsewhere, as under ``bf16-mixed``."""

Optimizer = Literal["adamw", "muon"]
MADE_UP = 500
"""Prompts or demonstrations that are looked at before a run where there is no list of them."""


@dataclass(frozen=True, kw_only=True)
class ColdStart:
    """Supervised fine-tuning on the form of an answer before RL (DeepSeek-R1, arXiv:2501.12948, section 2.3.1).

    With ``policy.lora`` adapters of the same kind are taught and added to the weights; RL trains new ones on top.
    What is null is derived when a run starts (``grpo_pl.training.defaults``)."""

    steps: int | None = None
    """Optimiser steps; null derives them from the number of demonstrations and from whether the policy was trained
    before."""
    batch_size: int | None = None
    """Demonstrations per step; null takes 32 for a policy from scratch, else 16."""
    lr: float | None = None
    """Peak learning rate; warmed up over the first tenth, then cosine to zero. Null derives it from the policy's size
    and from whether it was trained before."""
    optimizer: Optimizer = "adamw"
    """``muon`` makes the updates of the matrices between embedding and head orthogonal (Jordan et al. 2024, "Muon"),
    scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982, equation 4) and three times as large; the other
    weights keep AdamW. A small policy from nothing learns a form from about half of the demonstrations by it."""
    seed: int = 0
    """Names the demonstrations."""
    demonstrations: str | None = None
    """JSON Lines file of demonstrations (``prompt`` and ``completion``, or chat ``messages``), such as
    ``grpo-pl predict --keep-correct`` writes; null asks the prompt source for its own, which in a run with an
    environment are played there."""
    count: int | None = None
    """Show so many demonstrations only, again and again; null shows all of the file, or new ones of the source at each
    step."""
    privileged: PrivilegedText | None = None
    """Ask for the source's demonstrations with a text that the policy does not see later, as in model.privileged: the
    policy learns to follow it, and not to do without."""

    def __post_init__(self) -> None:
        check_choice("cold_start.optimizer", self.optimizer, Optimizer)
        for name in ("steps", "batch_size", "count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"cold_start.{name} must be at least 1, got {value}.")
        if self.privileged is not None and self.demonstrations is not None:
            raise ValueError(
                "cold_start.privileged is for demonstrations of the source: write the text into the prompts of "
                f"{self.demonstrations}, or set one of the two null."
            )
        shows = None if self.steps is None or self.batch_size is None else self.steps * self.batch_size
        if shows is not None and self.count is not None and self.count > shows:
            raise ValueError(
                f"cold_start.count is {self.count}, but {self.steps} steps of {self.batch_size} show {shows} only: "
                "lower it, or raise steps."
            )

    @property
    def size(self) -> tuple[int, int, float]:
        """Steps, demonstrations per step and learning rate."""
        if self.steps is None or self.batch_size is None or self.lr is None:
            raise ValueError("cold_start: steps, batch_size or lr is null, and no run has derived it: give all three.")
        return self.steps, self.batch_size, self.lr

    @property
    def whole(self) -> bool:
        """True if every process holds the whole model, also under FSDP2: Muon takes whole matrices, in bfloat16, which
        parts of them would round otherwise."""
        return self.optimizer == "muon"

    def shortened(self) -> ColdStart:
        """Two steps of it, for a trial."""
        steps, batch_size, _ = self.size
        return replace(self, steps=min(2, steps), count=self.count and min(self.count, 2 * batch_size))

    def folder(
        self,
        policy: PolicyConfig,
        template: PromptTemplate,
        source: PromptSource,
        stage: Stage | None = None,
        *,
        trainer: Trainer | None = None,
    ) -> Path:
        """The folder of the result: named by a hash of everything it depends on, under ``$GRPO_PL_CACHE``. It does not
        depend on the number of processes.

        Args:
            trainer: tells in which type it is computed; None is that of the weights.
        """
        given = asdict(self)
        if self.privileged is None:
            del given["privileged"]  # as before there was such a field, so that caches stay
        computed = policy.dtype if trainer is None else computed_by(trainer, policy.dtype, whole=self.whole)
        recipe = {
            "recipe": RECIPE if computed == policy.dtype else [RECIPE_MIXED, computed],
            "cold_start": {**given, "demonstrations": _content_hash(self.demonstrations)},
            "policy": {**_fields(policy), "folder": _folder_state(policy.source)},
            "template": template.to_dict(),
            "source": [f"{type(source).__module__}.{type(source).__qualname__}", source.init_args()],
            "data": [leaf.digests() for leaf in source.leaves().values()],
            "code": code_hashes(source, stage),
            **({} if stage is None else {"environment": stage.environment.spec(), "plain": asdict(stage.plain)}),
        }
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return cache_root() / "cold_start" / digest

    def asked(self, source: PromptSource, count: int) -> Iterator[str]:
        """The questions of all demonstrations of the file, or of about the first ``count`` of the source's own."""
        if self.demonstrations is not None:
            yield from (str(each.question) for each in read_demonstrations(self.demonstrations))
            return
        steps, batch_size, _ = self.size
        for step in range(min(steps, -(-count // batch_size))):
            yield from (prompt.question for prompt in source.prompts(-1 - step, count=batch_size))

    def made(self, source: PromptSource, stage: Stage | None = None, first: int = 0) -> Iterator[list[Demonstration]]:
        """The source's own demonstrations, one step after the other from step ``first``."""
        return map(partial(self.from_source, source, stage), range(first, self.size[0]))

    def batches(
        self, template: PromptTemplate, source: PromptSource, tokenizer: Any, stage: Stage | None, first: int = 0
    ) -> Iterator[list[Example]]:
        """The examples of step ``first`` and all after it."""
        steps, batch_size, _ = self.size
        known, tags = known_characters(tokenizer), tokenizer.get_added_vocab()
        shown = None  # those that are shown pass after pass, unless each step has new ones
        if self.demonstrations is not None:
            shown = read_demonstrations(self.demonstrations)[: self.count]
        elif self.count is not None:
            shown = list(islice(chain.from_iterable(self.made(source, stage)), self.count))
        if shown is not None:
            if stage is None and any(each.further for each in shown):
                raise ValueError(f"{self.demonstrations} holds episodes of several turns: set model.environment.")
            check_characters(shown, known, tags)
            draw = partial(draw_in_passes, shown, count=batch_size, seed=self.seed)
            batches: Iterator[list[Demonstration]] = (draw(step=step) for step in range(first, steps))
        else:
            made = self.made(source, stage, first)
            looked_at = list(islice(made, -(-MADE_UP // batch_size)))
            check_characters(list(chain.from_iterable(looked_at)), known, tags)  # before the training
            batches = chain(looked_at, (check_characters(batch, known, tags) for batch in made))
        dialogue = Dialogue(template=template, tokenizer=tokenizer)
        if stage is not None:
            dialogue = replace(dialogue, plain=stage.plain).within(stage.environment)
        for batch in batches:
            yield tokenized(batch, dialogue)

    def _question(self, prompt: Problem) -> str | Conversation:
        """The question that a demonstration answers."""
        if self.privileged is None:  # images stay where messages have them
            return prompt.asked if image_digests(prompt) else prompt.question
        asked = self.privileged.asked(prompt)
        if asked is None:
            raise ValueError(
                f"cold_start.privileged: prompt {prompt.id} has nothing for {self.privileged.texts} "
                f"(its columns: {', '.join(prompt.columns) or 'none'})."
            )
        return asked

    def from_source(
        self,
        source: PromptSource,
        stage: Stage | None,
        step: int,
        *,
        instead: str = "remove model.cold_start, name a file as its `demonstrations`",
    ) -> list[Demonstration]:
        """The source's own demonstrations of a step; ``instead`` says what to set where there are none."""
        rng = random.Random(row_key(self.seed, "cold_start", step))
        shown = []
        played: list[tuple[Problem, Sequence[str] | Player, int]] = []
        for prompt in source.prompts(-1 - step, count=self.size[1]):  # steps below 0 are never rolled out
            if stage is None:
                text = source.demonstration(prompt, rng)
                shown += [] if text is None else [Demonstration(self._question(prompt), text, columns=prompt.columns)]
            elif (actions := source.demonstrated_actions(prompt, rng)) is not None:
                played.append((prompt, actions, small_seed(self.seed, "cold_start", step, prompt.id)))
        if stage is not None:
            shown = stage.demonstrations(played)
        if not shown:
            override = "demonstration()" if stage is None else "demonstrated_actions()"
            raise ValueError(f"{type(source).__name__} has no demonstrations: {instead}, or override {override}.")
        return shown


def check_characters(
    shown: list[Demonstration], known: frozenset[str] | None, tags: Iterable[str]
) -> list[Demonstration]:
    """The same, unless they have characters that a vocabulary of single characters would drop."""
    if known is None:
        return shown
    lacking = [lacking_characters(f"{text_of(each.question)}{each.text}", known, tags) for each in shown]
    characters = sorted(set().union(*lacking))
    if characters:
        raise ValueError(
            f"the vocabulary lacks {shown_characters(characters)}, in {sum(map(bool, lacking))} of {len(shown)} "
            "demonstrations: add them to model.policy.characters, or set that to from_data."
        )
    return shown


def code_hashes(source: PromptSource, stage: Stage | None) -> dict[str, str]:
    """Module of each class that source and environment are made of -> hash of its file, since a task is often edited
    under the same name. What is no file, as in a notebook, has none."""
    owners = [source, *source.leaves().values(), *([] if stage is None else [stage.environment])]
    modules = {kind.__module__ for owner in owners for kind in type(owner).__mro__}
    own = sorted(name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names)
    hashes = {name: _hash_of(sys.modules[name]) for name in own if name in sys.modules}
    return {name: found for name, found in hashes.items() if found}


@cache
def _hash_of(module: ModuleType) -> str:
    """Read once in a process, which goes on with what it has imported: the file may be edited while it runs."""
    file = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _fields(policy: PolicyConfig) -> dict[str, Any]:
    """The fields of a policy; without those of images, where it reads none, so that caches stay."""
    fields = asdict(policy)
    for name in () if policy.images else ("images", "train_vision", "max_image_tokens"):
        del fields[name]
    return fields


def _content_hash(file: str | None) -> str | None:
    """Hash of a demonstration file's content; its path does not count."""
    if file is None:
        return None
    if not Path(file).is_file():
        raise ValueError(f"cold_start.demonstrations: no such file: {file}")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _folder_state(path: str | None) -> list[tuple[str, int, int]] | None:
    """Names, sizes and times of a local policy's files, which a later run may have replaced; None for the hub's."""
    if path is None or not Path(path).is_dir():
        return None
    stats = ((file.name, file.stat()) for file in Path(path).iterdir() if file.is_file())
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
