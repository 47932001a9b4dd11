"""What a wrong name may have meant: the nearest right spelling, and our names for those of TRL and others."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable

_SHORT = ("lightning.pytorch.callbacks", "lightning.pytorch.loggers")
"""Modules besides ours whose classes may be named without their module."""

NAMES: dict[str, str] = {
    # GRPOConfig
    "num_generations": "model.algorithm.group_size",
    "num_generations_eval": "model.validation.samples",
    "max_completion_length": "model.sampling.max_completion_length",
    "max_new_tokens": "model.sampling.max_completion_length",
    "max_prompt_length": "nothing: prompts that leave no room in the model's context are left out and counted",
    "temperature": "model.sampling.temperature",
    "top_p": "model.sampling.top_p, which training refuses, or model.validation.top_p",
    "top_k": "model.sampling.top_k, which training refuses",
    "stop_strings": "model.sampling.stop",
    "generation_kwargs": "fields of model.sampling",
    "generation_batch_size": "data.prompts_per_step times model.algorithm.group_size",
    "steps_per_generation": "model.algorithm.num_minibatches",
    "num_iterations": "model.algorithm.num_iterations",
    "beta": "model.algorithm.beta",
    "epsilon": "model.algorithm.epsilon_low and model.algorithm.epsilon_high",
    "epsilon_high": "model.algorithm.epsilon_high",
    "delta": "model.algorithm.dual_clip",
    "sapo_temperature_pos": "model.algorithm.sapo_temperature_positive",
    "sapo_temperature_neg": "model.algorithm.sapo_temperature_negative",
    "importance_sampling_level": "model.algorithm.ratio_level",
    "loss_type": "model.algorithm.aggregation, or a preset such as --config configs/algorithm/dapo.yaml",
    "scale_rewards": "model.algorithm.scale",
    "multi_objective_aggregation": "model.algorithm.reward_aggregation",
    "reward_weights": "the weight of each entry of model.rewards",
    "reward_funcs": "model.rewards, functions as grpo_pl.rewards.FunctionReward",
    "mask_truncated_completions": "model.algorithm.mask_truncated",
    "sync_ref_model": "model.algorithm.reference: refreshed",
    "ref_model_sync_steps": "model.algorithm.ref_update_every",
    "ref_model_mixup_alpha": "nothing: a refreshed reference copies the policy (model.algorithm.ref_update_every)",
    "top_entropy_quantile": "model.algorithm.top_entropy_quantile",
    "entropy_coef": "model.algorithm.entropy_coef",
    "vllm_importance_sampling_correction": "model.algorithm.mismatch",
    "vllm_importance_sampling_mode": "model.algorithm.mismatch",
    "vllm_importance_sampling_cap": "model.algorithm.mismatch_max",
    "vllm_importance_sampling_clip_max": "model.algorithm.mismatch_max",
    "vllm_importance_sampling_clip_min": "model.algorithm.mismatch_min",
    "use_vllm": "model.engine, a class that draws completions",
    "vllm_mode": "model.engine, a class that draws completions",
    "vllm_gpu_memory_utilization": "model.engine.init_args.max_batch_rows",
    "use_transformers_paged": "model.engine",
    "use_transformers_continuous_batching": "model.engine",
    "model_init_kwargs": "fields of model.policy",
    "disable_dropout": "nothing: dropout is always off",
    "shuffle_dataset": "data.source.init_args.seed, which names the order",
    "log_completions": "samples.every_n_rollouts",
    "num_completions_to_print": "samples.completions",
    # TrainingArguments
    "model_name_or_path": "model.policy.path",
    "dataset_name": "data.source",
    "peft_config": "model.policy.lora",
    "use_peft": "model.policy.lora",
    "attn_implementation": "model.policy.attn_implementation",
    "torch_dtype": "model.policy.dtype",
    "learning_rate": "model.optimization.lr",
    "per_device_train_batch_size": "data.prompts_per_step, over all processes, and model.max_tokens_per_microbatch",
    "per_device_eval_batch_size": "data.val_batch_size",
    "gradient_accumulation_steps": "model.max_tokens_per_microbatch; a step always takes the whole rollout",
    "num_train_epochs": "data.steps, in rollouts",
    "max_steps": "data.steps, in rollouts",
    "warmup_steps": "model.optimization.warmup_rollouts",
    "warmup_ratio": "model.optimization.warmup_rollouts",
    "lr_scheduler_type": "model.optimization.schedule",
    "weight_decay": "model.optimization.weight_decay",
    "max_grad_norm": "model.optimization.max_grad_norm",
    "adam_beta1": "model.optimization.betas",
    "adam_beta2": "model.optimization.betas",
    "adam_epsilon": "model.optimization.eps",
    "gradient_checkpointing": "model.activation_checkpointing",
    "bf16": "trainer.precision: bf16-mixed",
    "fp16": "trainer.precision: bf16-mixed",
    "logging_steps": "nothing: every rollout is logged",
    "report_to": "trainer.logger",
    "eval_steps": "trainer.val_check_interval",
    "eval_strategy": "trainer.val_check_interval",
    "save_steps": "checkpoint.every_n_rollouts",
    "save_total_limit": "checkpoint.keep",
    "output_dir": "runs_dir and name",
    "run_name": "name",
    "seed": "seed_everything",
    "resume_from_checkpoint": "resume or ckpt_path",
    "deepspeed": "--config configs/strategy/fsdp.yaml",
    "fsdp": "--config configs/strategy/fsdp.yaml",
    # Lightning's Trainer, at another place
    "accumulate_grad_batches": "model.max_tokens_per_microbatch; a step always takes the whole rollout",
    "gradient_clip_val": "model.optimization.max_grad_norm",
    "max_epochs": "data.steps, in rollouts",
}
"""Their name -> ours, or what stands for it."""


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

    best = max(candidates, key=lambda candidate: sum(likeness(candidate)), default="")
    return f"; did you mean {prefix}{best}?" if best and likeness(best)[0] >= 0.6 else ""


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def nearest_class(name: str) -> str:
    """Like `nearest`, among what the module that ``name`` starts with offers, or among the classes that need no
    module: those of every loaded module of ours and Lightning's callbacks and loggers."""
    module, _, leaf = name.rpartition(".")
    try:
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
