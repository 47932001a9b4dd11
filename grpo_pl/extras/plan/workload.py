"""The memory workload of a ``fit`` configuration for one process, read without building the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from transformers import PreTrainedModel

from grpo_pl.config.objects import ConfigArguments, build, settings
from grpo_pl.data.datamodule import RolloutDataModule, check_shares
from grpo_pl.data.sources import PromptSource
from grpo_pl.distributed.strategy import computed_in
from grpo_pl.extras.engines.native_child import NativeChildEngine
from grpo_pl.extras.engines.ray import RayEngine
from grpo_pl.extras.kernels.decode_kernel import MOST_ROWS, built_kernels
from grpo_pl.extras.kernels.fused_modules import is_fused
from grpo_pl.extras.kernels.library import training_kernels
from grpo_pl.extras.plan.memory import Fused, KernelLayout, Layout, Workload, shape_of, teacher_bytes
from grpo_pl.objective.algorithm import GRPOAlgorithm
from grpo_pl.policy.inputs import encode_prompts, reading_of
from grpo_pl.policy.loading import PolicyConfig, context_length, load_model, load_tokenizer
from grpo_pl.policy.quiet import quiet_libraries
from grpo_pl.policy.teacher import TeacherConfig
from grpo_pl.policy.template import PromptTemplate
from grpo_pl.policy.tokenizer import FROM_DATA
from grpo_pl.rollout.engine import RolloutEngine
from grpo_pl.rollout.native.decoder_choice import default_decoder
from grpo_pl.rollout.native.engine import NativeEngine
from grpo_pl.rollout.native.weights import refuse_llama_family
from grpo_pl.training.defaults import prompts_of_a_step
from grpo_pl.training.frozen_models import teacher_configs
from grpo_pl.training.microbatches import MOST_TOKENS
from grpo_pl.training.module import GRPOModule
from grpo_pl.types import PromptInputs

ASSUMED_PROMPT = 256
"""Tokens of a prompt where none can be read."""
PROMPTS_READ = 64


def resolved_settings(files: ConfigArguments) -> Namespace:
    """The parts of a ``fit`` configuration that take memory, checked and with their defaults; nothing is built."""
    quiet_libraries()
    parts = {"model": GRPOModule, "data": RolloutDataModule, "trainer": Trainer}
    given = settings(files, *parts)
    return Namespace({name: given.settings(name, kind) for name, kind in parts.items()})


def meta_model(parts: Any) -> PreTrainedModel:
    """The policy without its weights."""
    policy = _policy(parts)
    tokenizer = load_tokenizer(policy)
    with torch.device("meta"):
        return load_model(policy, tokenizer, weights=False)


def longest_prompt(parts: Any) -> tuple[int, PromptInputs | None, str]:
    """Tokens of the longest of the first prompts, the largest inputs of one, and what that is; an assumption where they
    cannot be read."""
    if parts.model.environment is not None:
        about = f"{ASSUMED_PROMPT} tokens are assumed, for those of an environment are not looked at"
        return ASSUMED_PROMPT, None, about
    try:
        source = build(PromptSource, parts.data.source, "data.source")
        problems = source.prompts(0, count=min(PROMPTS_READ, parts.data.prompts_per_step or PROMPTS_READ))
    except (OSError, ImportError, ValueError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        return ASSUMED_PROMPT, None, f"{ASSUMED_PROMPT} tokens are assumed, for the data cannot be read ({why})"
    template, tokenizer = build(PromptTemplate, parts.model.template, "model.template"), load_tokenizer(_policy(parts))
    encoded = encode_prompts([(problem.asked, problem.columns) for problem in problems], template, tokenizer)
    longest = max(len(prompt.ids) for prompt in encoded)
    largest = max((prompt.inputs for prompt in encoded if prompt.inputs is not None), key=input_bytes, default=None)
    return longest, largest, f"{longest} tokens, the longest of the first {len(problems)}"


def input_bytes(inputs: PromptInputs) -> int:
    """Bytes of what a model reads beside a prompt."""
    return sum(tensor.nbytes for tensor in inputs.tensors.values())


def _policy(parts: Any) -> PolicyConfig:
    policy = build(PolicyConfig, parts.model.policy, "model.policy")
    if policy.characters == FROM_DATA:  # a few more tokens make no difference here
        policy = replace(policy, characters=None)
    return policy


def teachers_of(parts: Any, layout: Layout) -> tuple[float, float]:
    """Bytes of the largest teacher in a process that asks it, and of all their heads."""
    model = parts.model
    one = model.teacher and build(TeacherConfig, model.teacher, "model.teacher")
    named = {name: build(TeacherConfig, each, "teacher") for name, each in (model.teachers or {}).items()}
    sizes, heads = [0.0], 0.0
    for config in set(teacher_configs(one, named).values()):
        if config.url is not None:
            continue
        with torch.device("meta"):
            teacher = load_model(config.model, cast(Any, None), weights=False)
        each = teacher.dtype.itemsize
        sizes.append(teacher_bytes(shape_of(teacher), weight_bytes=each, layout=layout))
        heads += teacher.get_output_embeddings().weight.numel() * each
    return max(sizes), heads


def workload(
    parts: Any, policy: PreTrainedModel, *, gpus: int, prompt_tokens: int, inputs: PromptInputs | None = None
) -> Workload:
    """The work of one of ``gpus`` processes.

    Args:
        policy: the model, from `meta_model`.
        inputs: images of a prompt; None for one small image of a policy that reads images.
    """
    if inputs is None and (reading := reading_of(policy)) is not None:
        inputs = reading.probe.inputs
    model = parts.model
    algorithm = build(GRPOAlgorithm, model.algorithm, "model.algorithm")
    prompts = parts.data.prompts_per_step or prompts_of_a_step(algorithm.group_size, None)
    strategy = parts.trainer.strategy
    arguments: Any = getattr(strategy, "init_args", None)
    layout: Layout = "fsdp" if arguments is not None and "FSDP2" in strategy.class_path else "ddp"
    check_shares(prompts, gpus)
    weights = {"float32": 4, "auto": 4}.get(model.policy.dtype, 2)
    on_cpu = parts.trainer.accelerator == "cpu"
    compute_type = computed_in(
        str(parts.trainer.precision or ""),
        weights={"auto": "float32"}.get(model.policy.dtype, model.policy.dtype),
        sharded=arguments.param_dtype if layout == "fsdp" else None,
        device="cpu" if on_cpu else "cuda",
    )
    compute: int = getattr(torch, compute_type).itemsize
    ahead = parts.data.staleness
    default = NativeChildEngine if ahead else NativeEngine
    engine = build(RolloutEngine, model.engine, "model.engine") if model.engine else default()
    own_type = getattr(engine, "dtype", None)
    copied = compute if own_type is None else 4 if own_type == "float32" else 2
    apart = engine.drawing_engine
    own, bytes_each, keeps = apart.memory_bytes, copied, isinstance(apart, NativeChildEngine)
    if isinstance(engine, RayEngine) and (not on_cpu or engine.gpus):  # elsewhere, or on GPUs that no rank trains on
        own, bytes_each, keeps = 0, 0, False
    elif isinstance(engine, RayEngine):  # all may share this host, whose object store holds the weights once more
        own, bytes_each = engine.actors * (own or 0), engine.actors * copied + weights
    completion_tokens = model.sampling.max_completion_length
    if model.environment is not None:  # of an episode, with its observations
        context = context_length(policy.config) or 0
        limits = [n for n in (model.episodes.max_episode_tokens, context - prompt_tokens) if n > 0]
        completion_tokens = min(limits, default=model.episodes.max_turns * completion_tokens)
    teacher = algorithm.needs.teacher
    weights_of_teacher = teacher.weights if teacher else "model"
    asked = teacher is not None and not teacher.of_itself
    largest, heads = teachers_of(parts, layout) if asked else (0.0, 0.0)
    adapted = model.policy.lora is not None  # whose start needs no copy
    return Workload(
        input_bytes=0 if inputs is None else input_bytes(inputs),
        pixels=0 if inputs is None else inputs.tensors["pixel_values"].numel() // 3,
        layout="single" if gpus == 1 and layout == "ddp" else layout,
        processes=gpus,
        rows=prompts // gpus * algorithm.group_size,
        group_size=algorithm.group_size,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        micro_batch_tokens=model.max_tokens_per_microbatch or MOST_TOKENS,
        weight_bytes=weights,
        compute_bytes=compute,
        reference=algorithm.needs.loads_reference,
        quantized=model.policy.quantization is not None,
        checkpointing=model.activation_checkpointing,
        offload=layout == "fsdp" and arguments.cpu_offload,
        deferred=layout == "fsdp" and arguments.defer_gradient_sync,
        engine_bytes=own,
        engine_keeps_rows=keeps,
        ahead=ahead,
        in_main_memory=on_cpu,
        engine_weight_bytes=bytes_each if own else 0,
        teacher_bytes=largest,
        teacher_head_bytes=heads if teacher and teacher.whole else 0.0,
        own_teacher=weights_of_teacher == "average" or (weights_of_teacher == "start" and not adapted),
        own_head=bool(teacher and teacher.of_itself and teacher.whole),
        kernel=_kernel(engine, policy, by_torch=not on_cpu or compute != 4 or bool(model.sampling.stop)),
        fused=_fused(policy, on_cpu=on_cpu, float32=weights == compute == 4, masked=model.sampling.sampling_mask),
    )


def _fused(policy: PreTrainedModel, *, on_cpu: bool, float32: bool, masked: bool) -> Fused:
    """The kernels that compute parts of an update."""
    if not is_fused(policy):
        return "none"
    if on_cpu:
        return "cpu" if float32 and training_kernels() is not None else "none"
    return "none" if masked else "gpu"


def _kernel(engine: RolloutEngine, policy: PreTrainedModel, *, by_torch: bool) -> KernelLayout | None:
    """The decode kernel that draws the run's rollouts on this machine; None if torch does."""
    if by_torch or not isinstance(engine, NativeEngine | NativeChildEngine):
        return None
    if refuse_llama_family(policy, length=1) is not None:
        return None
    kernel = built_kernels().get(default_decoder(policy))
    return None if kernel is None else KernelLayout(panel=kernel.panel, rows=MOST_ROWS * torch.get_num_threads())
