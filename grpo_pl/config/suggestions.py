"""The right name in the place of a wrong one: the nearest, or ours for that of another trainer or version."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable

from grpo_pl.moved import CLASSES
from grpo_pl.rewards.trust import SOURCES

_SHORT = ("lightning.pytorch.callbacks", "lightning.pytorch.loggers")
"""Modules besides ours whose classes may be named without their module."""

_THEIRS = {
    # GRPOConfig
    "model.algorithm.group_size": "num_generations",
    "model.validation.samples": "num_generations_eval",
    "model.sampling.max_completion_length": "max_completion_length max_new_tokens",
    "nothing: prompts that leave no room in the model's context are left out and counted": "max_prompt_length",
    "model.sampling.temperature": "temperature",
    "model.sampling.top_p with model.sampling.sampling_mask, or model.validation.top_p": "top_p",
    "model.sampling.top_k with model.sampling.sampling_mask": "top_k",
    "model.sampling.stop": "stop_strings",
    "fields of model.sampling": "generation_kwargs",
    "data.prompts_per_step times model.algorithm.group_size": "generation_batch_size",
    "model.algorithm.num_minibatches": "steps_per_generation",
    "model.algorithm.num_iterations": "num_iterations",
    "model.algorithm.beta": "beta",
    "model.algorithm.epsilon_low and model.algorithm.epsilon_high": "epsilon",
    "model.algorithm.epsilon_high": "epsilon_high",
    "model.algorithm.dual_clip": "delta",
    "model.algorithm.sapo_temperature_positive": "sapo_temperature_pos",
    "model.algorithm.sapo_temperature_negative": "sapo_temperature_neg",
    "model.algorithm.vespo_k_positive": "vespo_k_pos",
    "model.algorithm.vespo_lambda_positive": "vespo_lambda_pos",
    "model.algorithm.vespo_k_negative": "vespo_k_neg",
    "model.algorithm.vespo_lambda_negative": "vespo_lambda_neg",
    "model.algorithm.ratio_level": "importance_sampling_level",
    "model.algorithm.aggregation, or a preset such as --model.algorithm.preset dapo": "loss_type",
    "model.algorithm.scale": "scale_rewards",
    "model.algorithm.reward_aggregation": "multi_objective_aggregation",
    "the weight of each entry of model.rewards": "reward_weights",
    "model.rewards, functions as grpo_pl.rewards.FunctionReward": "reward_funcs",
    "model.algorithm.mask_truncated": "mask_truncated_completions",
    "model.algorithm.reference: refreshed": "sync_ref_model",
    "model.algorithm.ref_update_every": "ref_model_sync_steps",
    "nothing: a refreshed reference copies the policy (model.algorithm.ref_update_every)": "ref_model_mixup_alpha",
    "the term top_entropy.TopEntropyTokens": "top_entropy_quantile",
    "model.algorithm.entropy_coef": "entropy_coef",
    "the term entropy_target.EntropyTarget": "entropy_target use_adaptive_entropy",
    "coef_step of the term entropy_target.EntropyTarget": "entropy_coef_delta",
    "coef_max of the term entropy_target.EntropyTarget": "entropy_coef_max",
    "model.algorithm.mismatch": "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "model.algorithm.mismatch_max": "vllm_importance_sampling_cap vllm_importance_sampling_clip_max",
    "model.algorithm.mismatch_min": "vllm_importance_sampling_clip_min",
    "model.algorithm.off_policy_mask": "off_policy_mask_threshold",
    "model.engine, a class that draws completions": "use_vllm vllm_mode",
    "model.engine.init_args.max_batch_rows": "vllm_gpu_memory_utilization",
    "model.engine": "use_transformers_paged use_transformers_continuous_batching",
    "fields of model.policy": "model_init_kwargs",
    "nothing: dropout is always off": "disable_dropout",
    "data.source.init_args.seed, which names the order": "shuffle_dataset",
    "samples.every_n_rollouts": "log_completions",
    "samples.completions": "num_completions_to_print",
    # SDFTConfig and SDPOConfig
    "weights of the term self_distillation.SelfDistillation": "teacher_model_kind",
    "rate of the term self_distillation.SelfDistillation, after each rollout": "teacher_update_rate",
    "top_k of the term distillation.Distillation": "distillation_topk",
    "divergence of the term distillation.Distillation, or mix of jensen_shannon": "distillation_alpha",
    "model.privileged": "privileged_context teacher_prompt_template reprompt_template",
    # TrainingArguments
    "model.policy.path": "model_name_or_path",
    "data.source": "dataset_name",
    "model.policy.lora": "peft_config use_peft",
    "model.policy.attn_implementation": "attn_implementation",
    "model.policy.dtype": "torch_dtype",
    "model.optimization.lr": "learning_rate",
    "data.prompts_per_step, over all processes, and model.max_tokens_per_microbatch": "per_device_train_batch_size",
    "data.val_batch_size": "per_device_eval_batch_size",
    "model.max_tokens_per_microbatch; a step always takes the whole rollout": (
        "gradient_accumulation_steps accumulate_grad_batches"
    ),
    "data.steps, in rollouts": "num_train_epochs max_steps max_epochs",
    "model.optimization.warmup_rollouts": "warmup_steps warmup_ratio",
    "model.optimization.schedule": "lr_scheduler_type",
    "model.optimization.weight_decay": "weight_decay",
    "model.optimization.max_grad_norm": "max_grad_norm gradient_clip_val",
    "model.optimization.betas": "adam_beta1 adam_beta2",
    "model.optimization.eps": "adam_epsilon",
    "model.activation_checkpointing": "gradient_checkpointing",
    "trainer.precision: bf16-mixed": "bf16 fp16",
    "trainer.precision (32-true for exact; bf16-mixed for auto, where grpo-pl doctor measures a gain)": "compute",
    "nothing: every rollout is logged": "logging_steps",
    "trainer.logger": "report_to",
    "trainer.val_check_interval": "eval_steps eval_strategy",
    "checkpoint.every_n_rollouts": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "runs_dir and name": "output_dir",
    "name": "run_name",
    "seed_everything": "seed",
    "resume or ckpt_path": "resume_from_checkpoint",
    "--config configs/strategy/fsdp.yaml": "deepspeed fsdp",
}
"""Our field, or what to use in its place -> its names in other libraries and earlier versions."""
NAMES = {name: ours for ours, names in _THEIRS.items() for name in names.split()}
"""Their name -> our field, or what to use in its place."""


def our_name(name: str) -> str:
    """``; here that is X`` for the last part of a dotted name, or nothing where no other trainer has it."""
    ours = NAMES.get(name.rpartition(".")[2])
    return f"; here that is {ours}" if ours and ours != name else ""


def nearest(name: str, candidates: Iterable[str], *, prefix: str = "") -> str:
    """``; did you mean X?``, or nothing where nothing is near. Dotted names are near by their last part first:
    ``algorithm.beta`` means ``model.algorithm.beta``."""
    parents, _, leaf = name.rpartition(".")

    def likeness(candidate: str) -> tuple[float, float]:
        candidate_parents, _, candidate_leaf = candidate.rpartition(".")
        begins = len(leaf) >= 4 and (candidate_leaf.startswith(leaf) or leaf.startswith(candidate_leaf))
        return max(_ratio(leaf, candidate_leaf), 0.8 * begins), _ratio(parents, candidate_parents) if parents else 0.0

    near = [candidate for candidate in candidates if likeness(candidate)[0] >= 0.6]
    best = max(near, key=lambda candidate: sum(likeness(candidate)), default="")
    return f"; did you mean {prefix}{best}?" if best else ""


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def nearest_class(name: str) -> str:
    """The new path of a class that has moved; else like `nearest`, among the names of the module that ``name`` starts
    with, or among the classes that need no module: those of every loaded module of ours and Lightning's callbacks and
    loggers."""
    moved = next((new for old, new in CLASSES.items() if f"{old}.".startswith(f"{name}.")), None)
    if moved is not None:  # also by its module, which is all that some errors name
        return f"; it is {moved} now"
    module, _, leaf = name.rpartition(".")
    try:
        if not module:
            for source in SOURCES:
                importlib.import_module(f"grpo_pl.data.{source}")
        modules = [module] if module else [*(key for key in sys.modules if key.startswith("grpo_pl.")), *_SHORT]
        return nearest(leaf, [found for one in modules for found in _offered(one, anything=bool(module))])
    except ImportError as error:
        return f": {error}"


def nearest_argument(name: str, class_path: str) -> str:
    """Like `nearest`, among the arguments of a class."""
    module, _, kind = class_path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), kind)).parameters
    return nearest(name.split(".")[0], ["init_args", *parameters]) or our_name(name)


def _offered(module: str, *, anything: bool) -> list[str]:
    """Public names of a module: of everything that can be called, or of our and Lightning's classes only. Abstract
    classes are left out, because nobody can name them."""
    return [
        name
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_") and callable(value) and not inspect.isabstract(value)
        if anything or (inspect.isclass(value) and value.__module__.startswith(("grpo_pl.", *_SHORT)))
    ]
