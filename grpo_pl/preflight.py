"""What is looked at before a run costs anything: model, prompts, lengths and gold answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.sources import PromptSource
from grpo_pl.module import GRPOModule
from grpo_pl.policy.cold_start import cache_root
from grpo_pl.policy.loading import context_length, load_tokenizer, model_config
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.rewards.base import Reward
from grpo_pl.rewards.golds import check_golds, describe_bad_golds
from grpo_pl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")


def check_start(module: GRPOModule, data: RolloutDataModule, say: Callable[[str], None]) -> None:
    """Loads tokenizer, model config and prompts; leaves out problems that cannot be trained on, and says so.

    Raises:
        ValueError: a model or data set that cannot be loaded, too few problems, or none that fits the context.
    """
    tokenizer = load_tokenizer(module.policy_config)
    context = context_length(model_config(module.policy_config, tokenizer))
    sources = [data.source, *data.validation_sets.values()]
    for source in sources:
        for split in SPLITS:
            source.problems(split)  # reads files and downloads
        for note in getattr(source, "notes", ()):
            say(note)
        if context is not None:
            limit = context - module.sampling.max_completion_length
            _leave_out_long_prompts(source, _Fits(module.template, tokenizer, limit), say)
        _check_golds(source, module.rewards, say)
    data.source.prompts(0, count=data.prompts_per_step)
    for source in sources:
        if not source.validation(1):
            raise ValueError(
                "the data source has no held-out problems: give it a validation split, or a larger val_share."
            )


def _leave_out_long_prompts(source: PromptSource, fits: _Fits, say: Callable[[str], None]) -> None:
    for split in SPLITS:
        problems = source.problems(split)
        too_long = {prompt.id for prompt in problems or () if not fits(prompt)}
        if problems and too_long:
            what = f"{len(too_long)} of {len(problems)} {split} prompts leave no room for a completion"
            if len(too_long) == len(problems):
                raise ValueError(f"{what}: {fits}. Lower max_completion_length.")
            source.leave_out({split: too_long})
            say(f"{what} and are left out: {fits}.")


def _check_golds(source: PromptSource, rewards: Sequence[Reward], say: Callable[[str], None]) -> None:
    """Gold answers that the correctness reward cannot judge against end the start, or are left out where the source's
    ``bad_rows`` says so."""
    judge = next(reward for reward in rewards if reward.correctness)
    for split in SPLITS:
        problems = source.problems(split) or ()
        bad = check_golds(judge, [prompt.answer for prompt in problems], cache_folder=cache_root() / "golds")
        if not bad:
            continue
        what = f"{split}: {describe_bad_golds(bad, len(problems))}"
        if getattr(source, "bad_rows", "refuse") == "refuse" or len(bad) == len(problems):
            raise ValueError(f"{what}. Mend them, or set data.source.bad_rows to drop.")
        source.leave_out({split: {problems[gold.row].id for gold in bad}})
        say(f"{what}; left out.")


class _Fits:
    """Whether a rendered prompt has at most ``limit`` tokens. Tokenizes only what could be too long."""

    def __init__(self, template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, limit: int) -> None:
        self.template, self.tokenizer, self.limit = template, tokenizer, limit
        self.overhead = len(template.encode("", tokenizer)) + 8  # tokens may merge differently at the seams

    def __call__(self, prompt: Prompt) -> bool:
        # a token stands for at least one byte
        if len(prompt.question.encode()) + self.overhead <= self.limit:
            return True
        return len(self.template.encode(prompt.question, self.tokenizer)) <= self.limit

    def __str__(self) -> str:
        return f"the model's context has {self.limit} tokens beside max_completion_length"
