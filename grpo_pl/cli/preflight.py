"""Checks before a run starts: its model, prompts, lengths and gold answers, and the checkpoint that it goes on from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from grpo_pl.cli.run_folder import as_list
from grpo_pl.config.suggestions import NAMES, nearest
from grpo_pl.data.datamodule import RolloutDataModule, check_distinct
from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.strategy import check_strategy
from grpo_pl.environment import Environment
from grpo_pl.evaluation.held_out import HeldOutMetrics
from grpo_pl.files.cache import cache_root
from grpo_pl.files.runs import RunFolder, config_changes, read_settings
from grpo_pl.policy.dialogue import Dialogue, reading_prompts
from grpo_pl.policy.inputs import asked_of, encode_prompt
from grpo_pl.policy.loading import (
    PolicyConfig,
    check_weights,
    context_length,
    load_model,
    load_tokenizer,
    model_config,
)
from grpo_pl.policy.template import Fits
from grpo_pl.rewards.base import Reward, correctness_index, require_correctness
from grpo_pl.training.checks import check_extras, check_length, check_precision
from grpo_pl.training.cold_start import ColdStart, code_hashes
from grpo_pl.training.defaults import table
from grpo_pl.training.module import GRPOModule
from grpo_pl.training.vocabulary import check_vocabulary, demonstrated_problems, first_prompts
from grpo_pl.types import Problem, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")
MAY_CHANGE = ("dtype", "attn_implementation", "path", "init_seed", "from_scratch.initializer_range", "max_image_tokens")
"""Fields of ``model.policy`` that may change: weights of the same shapes mean the same under each value of these."""


def check_start(
    module: GRPOModule, data: RolloutDataModule, say: Callable[[str], None], *, resumes: bool = False
) -> None:
    """Loads tokenizer, model config and prompts; leaves out problems that cannot be trained on, and derives the fields
    that are null; says so.

    Args:
        resumes: the weights of the policy come from a checkpoint.

    Raises:
        ValueError: a model or data set that cannot be loaded, a policy or teacher without all of its weights, too few
            problems, none that fits the context, characters that the vocabulary lacks, held-out problems that are
            trained on or demonstrated, an engine that is not installed, a reward that this machine cannot compute, or
            one that fails when it is tried.
    """
    from grpo_pl.cli.answering import leave_no_room
    from grpo_pl.policy.text_check import check_texts
    from grpo_pl.training.reward_probe import PROBLEMS, probe_rewards

    module.choose_source(data)
    module.engine.check()
    for reward in module.rewards:
        reward.check()
    if correctness_index(module.rewards) is None:
        if type(data.source).observe is not PromptSource.observe:
            require_correctness(module.rewards, f"{type(data.source).__name__}, which follows what is solved,")
        say(
            "No reward has `correctness: true`: val/reward and val/rewards/… measure the held-out problems, not pass@k."
        )
    if not resumes:
        check_weights(module.policy_config)
    if module.algorithm.needs.teacher:
        for teacher in module.teacher_configs.values():
            if teacher.url is None:
                check_weights(teacher.model)
    check_shown(module, data)
    derived = module.derive_defaults(data)
    tokenizer = load_tokenizer(module.policy_config)
    StopStrings.of(module.sampling, tokenizer, module.template.prefill)  # refuses those that no text can hold
    module.template.thought(module.sampling, tokenizer)  # refuses a thinking budget that leaves no room for an answer
    unknown = next((token for token in module.sampling.stop_token_ids if token >= len(tokenizer)), None)
    if unknown is not None:
        raise ValueError(f"sampling.stop_token_ids: there is no token {unknown}, only 0 … {len(tokenizer) - 1}.")
    dialogue, fits, context = prompt_encoding(module, tokenizer)
    if dialogue.tells_tools:
        say("The chat template has no place for tools: the system message describes them.")
    for source in (data.source, *data.validation_sets.values()):
        for name, leaf in source.leaves().items():
            _check_source(leaf, name, module.rewards, fits, say)
    module.check_teachers(data)
    check_vocabulary(
        module.policy_config, module.template, tokenizer, data, module.cold_start, say, module.demonstrations
    )
    if module.demonstrations is not None:
        module.demonstrations.check(data.source, dialogue, in_environment=module.environment is not None)
    first = data.source.prompts(0, count=data.prompt_count)
    check_distinct(first, "the first rollout")
    _check_images(module, first, tokenizer)
    asked = first[0].asked
    for line in check_texts(module.policy_config, module.template, tokenizer, asked, module.rewards, module.sampling):
        say(line)
    module.source.check_prompts(first)
    if module.pool is not None:
        _check_columns(module.pool.environment, first)
    leave_no_room(first, len(first), fits, lambda _: None, split="first ")  # refuses, where none does
    if module.budget.configured is not None:
        train = data.source.problems("train")
        _check_budget(module.budget.configured, module, first if train is None else train, dialogue, context)
    _check_splits(data, say)
    probe_rewards(
        module.rewards,
        first[:PROBLEMS],
        data.source,
        module.template,
        tokenizer,
        group_size=module.algorithm.group_size,
        plays=module.pool is not None,
        say=say,
    )
    if module.cold_start is not None:
        code_hashes(data.source, module.stage)  # of what was imported: it may be edited before the cold start
    if module.cold_start is not None and not data.allow_overlap:
        _check_demonstrations(module.cold_start, "the cold start's demonstrations", data, say)
    if module.demonstrations is not None and not data.allow_overlap:
        _check_demonstrations(module.demonstrations.shown, "model.demonstrations", data, say)
    if derived:
        say(table(derived))


def prompt_encoding(module: GRPOModule, tokenizer: PreTrainedTokenizerBase) -> tuple[Dialogue, Fits, int | None]:
    """The encoding of prompts, a test of whether a prompt leaves room for a completion, and most tokens of both (None
    if nothing says)."""
    limits = (context_length(model_config(module.policy_config, tokenizer)), module.engine.max_tokens)
    context = min((limit for limit in limits if limit is not None), default=None)
    dialogue = Dialogue(template=module.template, tokenizer=tokenizer, plain=module.episodes.plain_turns)
    if module.pool is not None:
        module.pool.start()
        dialogue = dialogue.within(module.pool.environment)
        fits = module.episodes.fits(dialogue, module.pool.environment, context or 1 << 30)
    else:  # without a limit as well, for it encodes each conversation, which the chat template may refuse
        length = module.sampling.max_completion_length
        reading = reading_prompts(dialogue)
        fits = Fits(dialogue.prompt_ids, context=context or 1 << 30, length=length, encode_all=reading)
    return dialogue, fits, context


def _check_images(module: GRPOModule, first: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses problems with images for a policy that reads text, and a policy that reads images of problems that have
    none."""
    for problem in first:
        asked_of(problem.asked, problem.columns, tokenizer)
    if not module.policy_config.images:
        return
    read = (encode_prompt(problem.asked, problem.columns, module.template, tokenizer) for problem in first)
    if all(prompt.inputs is None for prompt in read):
        raise ValueError(
            f"model.policy.images is true, and none of the first {len(first)} problems has an image: set it false, or "
            "give the data a column `images`."
        )


def check_shown(module: GRPOModule, data: RolloutDataModule) -> None:
    """Refuses to keep problems for demonstrations that nobody shows: no rollout would ever ask them."""
    start, beside = module.cold_start, module.demonstrations
    shows = (start is not None and start.demonstrations is None) or (beside is not None and beside.file is None)
    for leaf in () if shows else data.source.leaves().values():
        if (share := getattr(leaf, "demonstrated_share", 1.0)) < 1.0:
            raise ValueError(
                f"data.source.demonstrated_share is {share:g}, but the run shows no demonstration of the source, and "
                "rollouts would never ask that part: set it to 1."
            )


def check_trainer(settings: Any) -> None:
    """Refuses settings of Lightning's Trainer for which a run has fields of its own."""
    ours = {
        "accumulate_grad_batches": (1, NAMES["accumulate_grad_batches"]),
        "gradient_clip_val": (None, NAMES["gradient_clip_val"]),
        "gradient_clip_algorithm": (None, NAMES["gradient_clip_val"]),
    }
    for name, (off, field) in ours.items():
        if (value := settings[name]) not in (None, off):
            raise ValueError(f"trainer.{name} is {value}, but a step of ours is no batch of Lightning's: set {field}.")
    if settings["barebones"]:
        raise ValueError("trainer.barebones would leave out all that a run consists of: grpo-pl plan measures a step.")
    check_lightning(settings)
    interval = settings["val_check_interval"]
    if isinstance(interval, int | float) and not (interval >= 1 and math.isfinite(interval)):
        raise ValueError(
            f"trainer.val_check_interval must be 1 rollout or more, got {interval}: data.steps validates at both ends "
            "only, trainer.limit_val_batches: 0 never."
        )


def check_lightning(settings: Any) -> None:
    """Refuses settings of Lightning's Trainer that no run can have."""
    check_length(settings["max_epochs"], settings["max_steps"])
    check_precision(str(settings["precision"]))
    check_strategy(settings["strategy"])  # before Lightning, which names no other
    check_extras([*as_list(settings["callbacks"]), *as_list(settings["plugins"])])


def check_monitor(monitor: str | None, module: GRPOModule, data: RolloutDataModule) -> None:
    """Refuses to look for the best checkpoint by a metric that no validation will measure.

    Raises:
        ValueError: the name, and all there are.
    """
    metrics = HeldOutMetrics(module.validation, module.rewards, data.held_out_groups(), torch.device("cpu")).metrics
    if monitor is not None and monitor not in metrics:
        names = ", ".join(metrics)
        raise ValueError(f"checkpoint.monitor: no validation measures {monitor!r}{nearest(monitor, metrics)} ({names})")


def check_resume(
    checkpoint: Path, module: GRPOModule, data: RolloutDataModule, config: Mapping[str, Any], *, fit: bool
) -> None:
    """Refuses a checkpoint of another policy, and to train on with data that have changed.

    Args:
        config: the resolved configuration, of which the policy is compared with that of the checkpoint's own run.
        fit: training continues; otherwise the data do not matter.
    """
    from grpo_pl.files.sharded_checkpoints import read_head

    shapes, state = read_head(checkpoint)
    own = RunFolder(checkpoint.absolute().parent.parent).config
    changes = []
    earlier = read_settings(own.read_text(encoding="utf-8")) if own.is_file() else None
    if earlier:  # an interrupted write leaves an empty file
        trees = [earlier, config]
        default = {each.name: each.default for each in fields(PolicyConfig) if each.default is not MISSING}
        policies = (default | ((tree.get("model") or {}).get("policy") or {}) for tree in trees)  # new fields as well
        before, now = ({"model": {"policy": policy}} for policy in policies)
        changes = config_changes(before, now)
    free = tuple(f"model.policy.{name}: " for name in MAY_CHANGE)
    differences = [c for c in changes if not c.startswith(free)] or _different_shapes(shapes, module)
    if differences:
        raise ValueError(
            f"{checkpoint} holds another model: {'; '.join(differences)}. Take the earlier values back, or begin a run "
            "of another --name."
        )
    if fit and data.__class__.__qualname__ in state:
        data.require_unchanged(state[data.__class__.__qualname__])


def _different_shapes(shapes: Mapping[str, tuple[int, ...]], module: GRPOModule) -> list[str]:
    """The first weight that is missing on one side or has another shape; what a configuration cannot tell."""
    policy = module.policy_config
    with torch.device("meta"):
        model = load_model(policy, load_tokenizer(policy), weights=False)
    ours = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if policy.quantization is not None:  # frozen weights are in no checkpoint
        ours = {name: shape for name, shape in ours.items() if name in shapes or ".lora_" in name}
    for name in [*shapes, *(name for name in ours if name not in shapes)]:
        there, here = shapes.get(name), ours.get(name)
        if there != here:
            return [f"{name} has the shape {there or 'none'} there and {here or 'none'} in model.policy"]
    return []


def _check_columns(environment: Environment, prompts: Iterable[Problem]) -> None:
    """Refuses prompts without a column that every episode needs."""
    for prompt in prompts:
        missing = set(environment.columns) - {"question", "answer"} - prompt.columns.keys()
        if missing:
            raise ValueError(
                f"the environment needs the column {min(missing)!r}, and prompt {prompt.id} has "
                f"{sorted(prompt.columns) or 'none'}: add it to the data, or take it out of the environment's settings."
            )


def _check_source(
    source: PromptSource, name: str, rewards: Sequence[Reward], fits: Fits, say: Callable[[str], None]
) -> None:
    """Loads the problems of a source; leaves out those that are too long, and those whose gold answers the correctness
    reward cannot judge against where the source's ``bad_rows`` says so."""
    from grpo_pl.cli.answering import leave_no_room
    from grpo_pl.rewards.golds import check_golds, describe_bad_golds, needs_golds
    from grpo_pl.rewards.per_source import PerSource

    own = [reward.rewards.get(name) if isinstance(reward, PerSource) else reward for reward in rewards]
    if getattr(source, "answer", "") is None:
        for reward in own:
            if reward is not None and needs_golds(reward):
                raise ValueError(
                    f"reward {reward.name!r} needs gold answers, and {name or 'data.source'}.answer is null: "
                    "name the column that holds them, or take rewards that need none."
                )
    place, part = correctness_index(rewards), f"{name}: " if name else ""
    judge = None if place is None else own[place] or rewards[place]
    for split in SPLITS:
        source.problems(split)  # reads files and downloads
    for note in getattr(source, "notes", ()):
        say(f"{part}{note}")
    drop = getattr(source, "bad_rows", "refuse") == "drop"
    for split in SPLITS:
        problems = source.problems(split)
        if not problems:
            continue
        if out := leave_no_room(problems, len(problems), fits, say, part, f"{split} ", drop_refused=drop):
            source.leave_out({split: out})
    if judge is None:
        return  # nothing is compared with gold answers
    for split in SPLITS:
        problems = source.problems(split) or ()
        bad = check_golds(judge, [prompt.answer for prompt in problems], cache_folder=cache_root() / "golds")
        if not bad:
            continue
        what = f"{part}{split}: {describe_bad_golds(bad, len(problems))}"
        if not drop or len(bad) == len(problems):
            raise ValueError(f"{what}. Mend them, or set data.source.bad_rows to drop.")
        source.leave_out({split: {problems[gold.row].id for gold in bad}})
        say(f"{what}; left out.")


def _check_budget(
    budget: int, module: GRPOModule, prompts: Iterable[Problem], dialogue: Dialogue, context: int | None
) -> None:
    """Refuses a micro-batch that is too small for a prompt with a completion or an episode of full length."""
    if context is not None and budget >= context:
        return
    plays, length = module.pool is not None, module.sampling.max_completion_length
    if plays:
        length = module.episodes.max_episode_tokens or context or length
    read = reading_prompts(dialogue)
    fits = Fits(dialogue.prompt_ids, context=budget, length=length, encode_all=read)
    too_long = [prompt for prompt in prompts if not fits(prompt.asked, prompt.columns)]
    if too_long:
        read = read or (lambda asked, _: dialogue.prompt_ids(asked))
        longest = max(len(read(prompt.asked, prompt.columns)) for prompt in too_long)
        needed = min(length + longest, context or 1 << 30)
        told = f"an episode may have {needed} tokens"
        if not plays:
            told = f"the longest prompt with a completion of {length} tokens has {needed}"
        raise ValueError(
            f"model.max_tokens_per_microbatch is {budget}, but {told}: set it to "
            f"{context if plays and context else needed} at least, or to null."
        )


def _check_splits(data: RolloutDataModule, say: Callable[[str], None]) -> None:
    """Refuses data without held-out problems, or with held-out problems that are trained on."""
    from grpo_pl.data.overlap import find_overlaps, refuse_repeats

    held_out = data.held_out()
    lists = [leaf.problems("train") for leaf in data.source.leaves().values()]
    overlaps = find_overlaps(chain.from_iterable(rows for rows in lists if rows is not None), held_out)
    for name, overlap in overlaps.items():
        if overlap.alike:
            say(f"{name}: {overlap}")
    if data.allow_overlap:
        return
    refuse_repeats(overlaps)
    if any(rows is None for rows in lists):
        refuse_repeats(find_overlaps(first_prompts(data), held_out))


def _check_demonstrations(
    cold_start: ColdStart, name: str, data: RolloutDataModule, say: Callable[[str], None]
) -> None:
    """Refuses demonstrations of held-out problems."""
    from grpo_pl.data.overlap import find_overlaps, refuse_repeats

    file = cold_start.demonstrations
    overlaps = find_overlaps(demonstrated_problems(cold_start, data.source), data.held_out())
    refuse_repeats(overlaps, what=f"shown by {name}{f' ({file})' if file else ''}")
    for name, overlap in overlaps.items():
        if overlap.alike:
            say(f"{name}, beside the demonstrations: {overlap}")
