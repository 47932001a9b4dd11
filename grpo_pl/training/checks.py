"""Checks that a run's parts go together; each refusal is one line that says what to set."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from grpo_pl.data.datamodule import RolloutDataModule
from grpo_pl.data.demonstrations import refuse_images
from grpo_pl.distributed.strategy import WHOLE_ONLY, FSDP2Strategy, check_strategy, computed_by
from grpo_pl.environment import Environment
from grpo_pl.evaluation.held_out import HeldOutMetrics, Validation
from grpo_pl.functional.sampling import DRAW_RULE
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.objective.terms.hooks import call
from grpo_pl.policy.loading import PolicyConfig, load_tokenizer, model_config
from grpo_pl.policy.privileged import PrivilegedText
from grpo_pl.policy.teacher import TeacherConfig
from grpo_pl.rewards.base import Reward, require_correctness, with_inner
from grpo_pl.rewards.batch import check_rewards
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.training.frozen_models import check_teachers
from grpo_pl.training.optimization import Optimization
from grpo_pl.training.policy_module import PolicyModule
from grpo_pl.types import SamplingParams


def check_parts(
    module: PolicyModule,
    *,
    teachers: Mapping[str, TeacherConfig],
    privileged: PrivilegedText | None,
    max_tokens_per_microbatch: int | None,
) -> None:
    """Refuses fields of a run that contradict each other."""
    algorithm, sampling, rewards = module.algorithm, module.sampling, module.rewards
    environment, demonstrations = module.environment, module.demonstrations
    needs = algorithm.needs
    if bool(demonstrations) != bool(needs.demonstrations):
        raise ValueError(
            "model.demonstrations and a term that learns from them, such as CHORD, belong together: "
            f"{'the term' if demonstrations else 'model.demonstrations'} is missing; set both, or neither."
        )
    if demonstrations is not None and demonstrations.file is None and environment is not None:
        raise ValueError(
            "model.demonstrations.file is null, but in model.environment a source's own demonstrations are played for "
            "a cold start alone: name a file of episodes, or set model.cold_start instead of model.demonstrations."
        )
    check_rewards(rewards, steps_needed=needs.step_rewards)
    if needs.correct:
        require_correctness(rewards, "model.algorithm (samples: correct, or an estimator with needs_correct)")
    for name, term in algorithm.active_terms.items():
        call(name, term, "check_run", sampling=sampling, in_environment=environment is not None)
    check_episodes(environment, algorithm, rewards)
    of_text = {"environment": environment, "privileged": privileged, "teacher and model.teachers": teachers or None}
    others = [name for name, part in of_text.items() if part is not None]
    if module.policy_config.images and others:
        raise ValueError(f"policy.images does not go with model.{others[0]}, where text alone is read: leave out one.")
    if module.policy_config.images:
        files = (demonstrations and demonstrations.file, module.cold_start and module.cold_start.demonstrations)
        for file in files:
            if file and Path(file).is_file():  # one that is missing is refused where it is needed
                refuse_images(file)
    check_teachers(teachers, algorithm, temperature=sampling.temperature)
    if bool(privileged) != bool(needs.teacher and needs.teacher.of_itself):
        raise ValueError(
            "model.privileged, the texts that the policy reads besides the question as its own teacher, and a term in "
            "which it is its own teacher, such as SelfDistillation, belong together: "
            f"{'the term' if privileged else 'model.privileged'} is missing; set both, or neither."
        )
    if privileged is not None and privileged.feedback_of is None and "feedback" in privileged.names:
        require_correctness(rewards, "model.privileged with {feedback} and feedback_of null")
    if privileged is not None and environment is not None and environment.writes_prompt:
        raise ValueError(
            f"model.privileged does not go with {type(environment).__name__}, which writes the prompts of its episodes "
            "itself, so that there is no question to add a text to: leave out one of the two."
        )
    sampling.require_on_policy()
    if sampling.sampling_mask and environment is not None:
        raise ValueError(
            "model.sampling.sampling_mask is for completions drawn in one turn: set model.environment null, or top_k 0 "
            "and top_p 1."
        )
    if sampling.top_logprobs not in (0, needs.top_logprobs):
        raise ValueError(
            f"model.sampling.top_logprobs is {sampling.top_logprobs}, which the objective's terms set: set it to 0."
        )
    if module.policy_config.quantization is not None and module.cold_start is not None:
        raise ValueError(
            "model.cold_start writes whole weights, which policy.quantization would round again: set one of them null."
        )
    if max_tokens_per_microbatch is not None and max_tokens_per_microbatch <= sampling.max_completion_length:
        raise ValueError(
            f"model.max_tokens_per_microbatch is {max_tokens_per_microbatch}, but must hold a prompt and a "
            f"completion of up to {sampling.max_completion_length} tokens (model.sampling.max_completion_length)."
        )


REFUSED: dict[type, str] = {
    StochasticWeightAveraging: "averages once an epoch, and a run has one: take EMAWeightAveraging",
    GradientAccumulationScheduler: "counts Lightning's batches: set model.max_tokens_per_microbatch",
    LearningRateFinder: "looks for a loss that falls, and a rollout's does not: see docs/tuning.md for the rate",
    BatchSizeFinder: "counts Lightning's batches: leave model.max_tokens_per_microbatch null, which finds what fits",
    ModelPruning: "masks weights of which engines have no masks: prune the exported model",
    BaseFinetuning: "changes what is trained in the middle of a run: set model.policy.lora to train adapters alone",
    AsyncCheckpointIO: "writes later, and a checkpoint counts once it is whole: set checkpoint.every_n_rollouts",
}
"""Callbacks and plugins of Lightning's that would do nothing here, or something else than they say, and what to do."""


def check_data(trainer: Any) -> None:
    """Refuses to train or answer on other data than a `RolloutDataModule`."""
    data = trainer.datamodule
    if not isinstance(data, RolloutDataModule):
        given = "none" if data is None else type(data).__name__
        raise ValueError(
            f"trainer.{trainer.state.fn.value if trainer.state.fn else 'fit'} needs a RolloutDataModule as datamodule, "
            f"and was given {given}: dataloaders are not taken, and a source of your own is an argument of it "
            "(docs/data.md)."
        )


def warn_of_global_seed(seed: int) -> None:
    """Says that Lightning's seed changes nothing, where it is set and the module's is not."""
    set_to = os.environ.get("PL_GLOBAL_SEED") or "0"
    if seed == 0 != int(set_to):
        rank_zero_warn(
            f"seed_everything({set_to}) has no effect on a run, whose samples are named by the seed of GRPOModule, 0: "
            f"give GRPOModule(seed={set_to})."
        )


def check_optimization(module: Any) -> None:
    """Refuses fields of ``optimization`` that set nothing beside the module's own `configure_optimizers`."""
    clips = ("max_grad_norm", "max_skipped_updates")
    set_here = [
        field.name
        for field in fields(Optimization)
        if field.name not in clips and getattr(module.optimization, field.name) != field.default
    ]
    if module.has_own_optimizer and set_here:
        raise ValueError(
            f"model.optimization has {', '.join(set_here)}, and {type(module).__name__} its own configure_optimizers, "
            f"which is used as it is: set these there, and here {' and '.join(clips)} alone."
        )


def check_optimizers(module: Any) -> None:
    """Refuses what `configure_optimizers` returned unless it is one optimiser that updates weights of the policy, with
    schedulers that count rollouts or its steps."""
    name, trainer = f"configure_optimizers of {type(module).__name__}", module.trainer
    if len(trainer.optimizers) != 1:
        raise ValueError(
            f"{name} returns {len(trainer.optimizers)} optimisers, and one updates the policy: return one, in which "
            "weights with other settings are a group."
        )
    updated = {id(weight) for group in trainer.optimizers[0].param_groups for weight in group["params"]}
    if not any(id(weight) in updated for weight in module.require_policy().parameters()):
        raise ValueError(
            f"{name} returns no optimiser that updates a weight of the policy: give it parameters of self.policy."
        )
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"{name} returns ReduceLROnPlateau, which waits for a metric, and schedulers take a step after each "
                "rollout: take one that counts, such as LambdaLR."
            )
        if config.interval not in ("step", "epoch"):
            raise ValueError(
                f"{name} returns a scheduler with interval {config.interval!r}: give 'epoch', which is a rollout here, "
                "or 'step', a step of the optimiser."
            )


def check_extras(extras: Iterable[object]) -> None:
    """Refuses callbacks and plugins of a Trainer that are in `REFUSED`, and checkpoints in no folder."""
    for extra in extras:
        for kind, reason in REFUSED.items():
            if isinstance(extra, kind):
                raise ValueError(f"trainer: {type(extra).__name__} {reason}.")
        if "://" in (folder := str(getattr(extra, "dirpath", ""))):
            raise ValueError(
                f"trainer: {type(extra).__name__} has dirpath {folder!r}, and checkpoints are written to files of this "
                "machine: mount it as a folder, or copy checkpoints afterwards."
            )


def check_monitors(
    callbacks: Iterable[Callback], validation: Validation, rewards: Sequence[Reward], data: RolloutDataModule
) -> None:
    """Refuses an EarlyStopping that waits for a number which no validation measures, and a ModelCheckpoint with a
    misspelt one. A reward's own numbers, by ``log_metric``, are not known before: the former must be told ``strict:
    false``.
    """
    from grpo_pl.config.suggestions import nearest

    watching = [callback for callback in callbacks if isinstance(callback, EarlyStopping | ModelCheckpoint)]
    if not watching:
        return
    groups = data.held_out_groups()
    known = [
        *HeldOutMetrics(validation, rewards, groups, torch.device("cpu")).metrics,
        *(f"{group}/unjudged" for group in groups),
    ]
    for callback in watching:
        name, near = callback.monitor, nearest(str(callback.monitor), known)
        if name is None or name in known or not getattr(callback, "strict", True):
            continue
        if isinstance(callback, EarlyStopping) or (name.startswith("val") and near):
            instead = "; strict: false waits for one that a reward logs" if isinstance(callback, EarlyStopping) else ""
            raise ValueError(
                f"trainer: {type(callback).__name__} monitors {name!r}, which no validation measures{near} "
                f"({', '.join(known)}){instead}."
            )


def check_averaging(module: PolicyModule) -> None:
    """Refuses averaged weights where they would be drawn from, or where the module cannot be copied."""
    sharded = isinstance(module.trainer.strategy, FSDP2Strategy)
    copied = sharded or module.engine.copies_weights or module.environment is not None
    callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    if copied and any(isinstance(callback, WeightAveraging) for callback in callbacks):
        raise ValueError(
            "trainer: averaged weights go with an engine that reads the policy's own (NativeEngine, PlainEngine), with "
            "single turns, and with a policy that is not sharded."
        )


def check_precision(precision: str) -> None:
    """Refuses a precision of Lightning's that changes the type of the weights, or scales gradients before they are
    clipped.
    """
    if precision in ("bf16", "16", "16-mixed", "bf16-true", "16-true") or precision.startswith("transformer-engine"):
        raise ValueError(
            f"trainer.precision is {precision}: set bf16-mixed to compute in bfloat16; the type of the weights is "
            "model.policy.dtype."
        )


def computes_in_float32_on_gpu(trainer: Trainer, weights: torch.dtype) -> bool:
    """True if a policy with such weights computes in float32 on a GPU, several times slower than in bfloat16."""
    name = computed_by(trainer, weights=str(weights).removeprefix("torch."))
    return trainer.strategy.root_device.type == "cuda" and name == "float32"


def warn_of_float32_on_gpu(trainer: Trainer, policy: PolicyConfig) -> None:
    """Says that a run on a GPU computes in float32, as it would be slow without another word."""
    auto = policy.dtype == "auto"  # then the checkpoint's own, of which the config tells
    weights = model_config(policy, load_tokenizer(policy)).dtype if auto else getattr(torch, policy.dtype)
    if computes_in_float32_on_gpu(trainer, weights or torch.float32):
        rank_zero_warn(
            "the GPU computes in float32, several times slower than in bfloat16 (D45): set trainer.precision to "
            "bf16-mixed, or param_dtype of FSDP2Strategy to auto."
        )


def check_length(max_epochs: int | None, max_steps: int | None) -> None:
    """Refuses to go over a run's rollouts more than once, or to end in the middle."""
    from grpo_pl.config.suggestions import NAMES

    for name, value, whole_run in (("max_epochs", max_epochs, 1), ("max_steps", max_steps, -1)):
        if value not in (None, whole_run):
            raise ValueError(f"trainer.{name} is {value}: the length of a run is {NAMES[name]}; set it to {whole_run}.")


def check_trainer(trainer: Trainer) -> None:
    """Refuses a Trainer, also one made by hand, that would train otherwise than asked."""
    check_strategy(trainer.strategy)
    check_extras([*trainer.callbacks, trainer.strategy.checkpoint_io])  # type: ignore[attr-defined]
    check_precision(str(trainer.precision))
    if isinstance(trainer.strategy, FSDP2Strategy) and trainer.strategy.sharded_checkpoints:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, ModelCheckpoint) and callback.save_weights_only for callback in callbacks):
            raise ValueError(WHOLE_ONLY)
    if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "trainer.use_distributed_sampler would cut problems that are cut by process already: set false."
        )
    if trainer.training and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        check_length(trainer.max_epochs, trainer.max_steps)


def check_episodes(environment: Environment | None, algorithm: GRPOAlgorithm, rewards: Sequence[Reward]) -> None:
    """Refuses what needs an environment without one, and the other way round."""
    from grpo_pl.rewards.environment import EnvironmentReward

    paid = next((reward for reward in with_inner(rewards) if isinstance(reward, EnvironmentReward)), None)
    if environment is not None:
        if algorithm.needs.greedy_values and algorithm.dynamic_sampling:
            raise ValueError(
                "algorithm.baseline greedy with dynamic_sampling would play the greedy episode in another world than "
                "the group that it is compared with: set dynamic_sampling to false."
            )
        if paid is not None and not environment.pays:
            raise ValueError(
                f"reward {paid.name!r} pays what an environment gave, but {type(environment).__name__} gives nothing: "
                "set its rewarded_by to agent, or take a reward that judges the text."
            )
        return
    if paid is not None:
        raise ValueError(f"reward {paid.name!r} pays what an environment gave, but there is no model.environment.")


def check_engine(
    engine: RolloutEngine, algorithm: GRPOAlgorithm, sampling: SamplingParams, *, images: bool = False
) -> None:
    """Refuses an engine that takes no request, cannot record what the objective asks for, or not read prompts."""
    name = type(engine).__name__
    try:
        inspect.signature(engine.generate).bind("model", "request", progress=None, should_stop=None)
    except TypeError as error:
        raise ValueError(
            f"model.engine: generate of {name} does not take (model, request, *, progress, should_stop): {error}. The "
            "arguments of earlier versions are fields of `request` now, see docs/engines.md."
        ) from None
    if sampling.sampling_mask and not engine.supports_sampling_mask:
        raise ValueError(
            f"model.sampling.sampling_mask needs an engine that notes what was left to draw from, and {name} does not: "
            "leave model.engine out, with data.staleness 0."
        )
    if images and not engine.supports_inputs:
        raise ValueError(
            f"policy.images needs an engine that reads images, and {name} does not: leave model.engine out."
        )
    if algorithm.needs.top_logprobs and not engine.supports_top_logprobs:
        raise ValueError(
            f"a term of model.algorithm.terms needs an engine that records the likeliest tokens, and {name} does not: "
            "leave model.engine out, or the term."
        )


def warn_of_earlier_rules(checkpoint: Mapping[str, Any], precision: str) -> None:
    """Says in which way a run goes on otherwise than the earlier version that wrote its checkpoint."""
    if checkpoint.get("draw_rule") != DRAW_RULE:
        rank_zero_warn(
            "the checkpoint's run drew tokens by an earlier rule than this version's: samples differ from here on."
        )
    found = checkpoint.get("compute")  # what an earlier version's model.compute: auto measured
    in_bfloat16 = found and found["gain"] >= 1.3 and found["mean_error"] <= 1e-2 and found["p99_error"] <= 5e-2
    if in_bfloat16 and precision == "32-true":
        rank_zero_warn(
            "the checkpoint's run computed in bfloat16 by model.compute: auto, this one computes in float32; "
            "trainer.precision: bf16-mixed goes on as before."
        )
