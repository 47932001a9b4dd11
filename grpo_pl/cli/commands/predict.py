"""``grpo-pl predict``: completions of a trained policy with their rewards, or only the right ones as demonstrations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_pl.config.objects import read
from grpo_pl.files.rows import row_writer
from grpo_pl.files.runs import RunFolder
from grpo_pl.training.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_pl.data.sources import PromptSource
    from grpo_pl.policy.template import PromptTemplate
    from grpo_pl.policy.trained import ServedModel
    from grpo_pl.rewards.base import Reward
    from grpo_pl.rollout.sampler import Samples
    from grpo_pl.types import Problem, SamplingParams

DRAW = 32
"""Training prompts asked of the source at a time."""
FRUITLESS = 50
"""So many draws without a new problem, and the source is taken to have no more."""


def predict(
    model: str | None = None,
    output: str = "predictions.jsonl",
    split: Literal["train", "val"] = "val",
    prompts: int = 200,
    samples: int = 4,
    keep_correct: bool = False,
    config: str | None = None,
    temperature: float | None = None,
    max_completion_length: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    device: str = "auto",
    trust_rewards: bool = False,
) -> None:
    """Answers problems with a trained policy and writes one JSON line per completion, with every reward.

    Lines are in the chat form that TRL and `model.cold_start.demonstrations` read: prompt and completion as messages.
    With --keep_correct true only right completions are written, each text once per problem, and none that was cut off
    at the length limit: rejection sampling, for supervised fine-tuning afterwards.

    Args:
        model: exported folder, run folder or checkpoint.
        output: file to write; it appears when it is complete.
        split: train takes training problems in the order of the rollouts, val the held-out ones.
        prompts: how many different problems; fewer where the source has fewer.
        samples: completions per problem.
        keep_correct: write right completions only.
        config: configuration that names the problems (`data.source`); by default the run's own.
        temperature: of the completions; by default the one of training, 0 is greedy.
        max_completion_length: most tokens of a completion; by default the one of training.
        seed: names the samples.
        batch_size: completions decoded at once.
        device: cpu, cuda …; auto takes a GPU where there is one.
        trust_rewards: let the model name any class as a reward or a source, such as functions and judges: only if you
            know who wrote it. Without it such a model is refused.
    """
    if model is None:
        raise ValueError("--model is missing: give an exported folder, a run folder or a checkpoint.")
    for name, value in (("prompts", prompts), ("samples", samples), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")
    from grpo_pl.policy.loading import choose_device
    from grpo_pl.policy.trained import find_model
    from grpo_pl.types import SamplingParams
    from serve.reward_list import build_rewards

    trained = find_model(Path(model), trust_rewards=trust_rewards)
    source = load_source(Path(config)) if config else _own_source(Path(model), trust=trust_rewards)
    problems = source.validation(prompts) if split == "val" else training_problems(source, prompts)
    sampling = SamplingParams(
        max_completion_length=max_completion_length or trained.max_completion_length,
        temperature=trained.temperature if temperature is None else temperature,
        stop=trained.stop,
        stop_token_ids=trained.stop_token_ids,
    )
    policy = trained.load_policy(choose_device(device))
    length = sampling.max_completion_length
    long = too_long(problems, len(problems), trained.template, trained.tokenizer, policy, length)
    problems = [prompt for prompt in problems if prompt not in long]
    tally: Counter[str] = Counter()
    seen: set[tuple[int, str]] = set()
    with ExitStack() as stack:
        rewards = build_rewards(trained.rewards, trust_rewards=trust_rewards)
        for reward in rewards:
            stack.enter_context(closing(reward))
        write = stack.enter_context(row_writer(Path(output)))
        advance = stack.enter_context(progress_bar("predict", len(problems)))
        per_batch = max(1, batch_size // samples)
        for first in range(0, len(problems), per_batch):
            batch = problems[first : first + per_batch]
            drawn = _draw(trained, policy, batch, samples, sampling, seed)
            for row in completion_rows(drawn, rewards):
                fate = _fate(row, seen) if keep_correct else "kept"
                tally[fate] += 1
                tally["correct"] += row["correct"] is True
                tally["judged"] += row["correct"] is not None
                if fate == "kept":
                    write(row)
            advance(min(first + per_batch, len(problems)))
        if not tally["kept"]:
            raise ValueError(f"nothing to write: of {len(problems) * samples} completions {_left_out(tally)}.")
    _report(tally, len(problems), samples, output)


def load_source(config: Path) -> PromptSource:
    """The prompt source that a configuration names under ``data.source``.

    Raises:
        ValueError: no such file, or no source in it.
    """
    from grpo_pl.data.sources import PromptSource

    return read([config]).build("data.source", PromptSource)


def _own_source(model: Path, *, trust: bool) -> PromptSource:
    """The source that the run of ``model`` names; the run may be somebody else's, so not every class is imported.

    Raises:
        ValueError: there is none, or without ``trust`` one that is not ours.
    """
    from grpo_pl.rewards.trust import check_source_trusted

    config = _run_config(model)
    if not config.is_file():
        raise ValueError(f"no such file: {config}: name the problems with --config, a configuration with data.source.")
    if not trust:
        check_source_trusted(read([config]).get("data.source"))
    return load_source(config)


def training_problems(source: PromptSource, count: int) -> list[Problem]:
    """The first ``count`` different training problems in the order of the rollouts, or as many as turn up."""
    found: dict[int, Problem] = {}
    fruitless = step = 0
    while len(found) < count and fruitless < FRUITLESS:
        before = len(found)
        for prompt in source.prompts(step, count=min(DRAW, count)):
            found.setdefault(prompt.id, prompt)
        fruitless = 0 if len(found) > before else fruitless + 1
        step += 1
    return list(found.values())[:count]


def too_long(
    problems: Iterable[Problem],
    total: int,
    template: PromptTemplate,
    tokenizer: PreTrainedTokenizerBase,
    policy: PreTrainedModel,
    length: int,
) -> list[Problem]:
    """The problems that leave no room for a completion; prints how many.

    Raises:
        ValueError: all do.
    """
    from grpo_pl.policy.loading import context_length
    from grpo_pl.policy.template import Fits

    context = context_length(policy.config)
    if context is None:
        return []
    fits = Fits(template, tokenizer, context=context, length=length)
    long = [prompt for prompt in problems if not fits(prompt.asked)]
    what = f"{len(long)} of {total} prompts leave no room for a completion"
    if len(long) == total:
        raise ValueError(f"{what}: {fits}. Lower max_completion_length.")
    if long:
        print(f"{what} and are left out: {fits}.")
    return long


def completion_rows(drawn: Samples, rewards: Sequence[Reward]) -> Iterator[dict[str, Any]]:
    """One row per completion, in order: messages, gold answer, each reward with its status, and whether it is right."""
    from grpo_pl.rewards.base import needs_of
    from grpo_pl.rewards.batch import score_completions

    answers = [prompt.answer for prompt in drawn.per_row]
    scored = score_completions(
        rewards, completions=drawn.completions, answers=answers, columns=drawn.columns(needs_of(rewards))
    )
    totals, correct, lengths = scored.totals(), scored.correct(), drawn.rollout.lengths.tolist()
    for i, prompt in enumerate(drawn.per_row):
        yield {
            "prompt": list(prompt.messages or [{"role": "user", "content": prompt.question}]),
            "completion": [{"role": "assistant", "content": drawn.completions[i]}],
            "answer": prompt.answer,
            "prompt_id": prompt.id,
            "sample": i % drawn.rollout.group_size,
            "reward": totals[i],
            "rewards": scored.described(i),
            "correct": correct[i],
            "tokens": lengths[i],
            "finish_reason": drawn.rollout.finish_reasons[i],
            **scored.noted(i),
        }


def _draw(
    trained: ServedModel,
    policy: PreTrainedModel,
    batch: Sequence[Problem],
    samples: int,
    sampling: SamplingParams,
    seed: int,
) -> Samples:
    from grpo_pl.rollout.native.engine import NativeEngine
    from grpo_pl.rollout.sampler import CompletionSampler

    sampler = CompletionSampler(engine=NativeEngine(), template=trained.template, tokenizer=trained.tokenizer)
    return sampler.sample(policy, batch, group_size=samples, sampling=sampling, seed=seed, split="predict")


def _fate(row: dict[str, Any], seen: set[tuple[int, str]]) -> str:
    """Whether rejection sampling keeps a completion, or why not."""
    if row["correct"] is None:
        return "not judged"
    if row["correct"] is not True:
        return "not correct"
    if row["finish_reason"] == "length":
        return "cut off"
    text = (row["prompt_id"], row["completion"][0]["content"])
    if text in seen:
        return "repeated"
    seen.add(text)
    return "kept"


def _report(tally: Counter[str], problems: int, samples: int, output: str) -> None:
    total = problems * samples
    share = f"{tally['correct'] / tally['judged']:.1%} correct" if tally["judged"] else "none could be judged"
    unjudged = f" of {tally['judged']} that could be judged" if 0 < tally["judged"] < total else ""
    print(f"{total} completions of {problems} problems, {share}{unjudged}")
    dropped = _left_out(tally)
    print(f"{tally['kept']} written to {output}" + (f"; left out: {dropped}" if dropped else ""))


def _left_out(tally: Counter[str]) -> str:
    return ", ".join(
        f"{tally[why]} {why}" for why in ("not correct", "not judged", "cut off", "repeated") if tally[why]
    )


def _run_config(model: Path) -> Path:
    """The resolved configuration of the run that a run folder, export or checkpoint belongs to."""
    folders = [model, model.absolute().parent, model.absolute().parent.parent]
    return next((RunFolder(f).config for f in folders if RunFolder(f).config.is_file()), RunFolder(model).config)
