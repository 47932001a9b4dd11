"""Memory that a training run needs in each process, from the shapes of its model; no weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from grpo_pl.extras.kernels.launch import CHUNK_ELEMENTS, CHUNK_TOKENS
from grpo_pl.functional import logprobs as head
from grpo_pl.policy.inputs import reading_of
from grpo_pl.policy.quantization import BITS_PER_WEIGHT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
PROGRAM = 0.45 * GIB
"""Main memory of Python, torch, transformers and Lightning beside all tensors, measured on Linux."""
_RACED = 1024  # logits of a row that the decode kernel holds at once
Layout = Literal["single", "ddp", "fsdp"]
Fused = Literal["none", "gpu", "cpu"]
"""Which kernels compute parts of an update: those of GPUs norms, SiLU and the LM head, those of CPUs norms, SiLU and
attention."""


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """The sizes of a vision tower that its memory follows from."""

    parameters: int
    """Of the tower and what leads from it to the language model."""
    layers: int
    hidden: int
    intermediate: int
    patch: int
    """Pixels of a side of a patch."""
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a decoder that its memory follows from."""

    parameters: int
    trainable: int
    """Parameters that take a gradient; fewer than all with LoRA."""
    block_parameters: int
    """Of one transformer block."""
    layers: int
    hidden: int
    intermediate: int
    query: int
    """Query heads times head size."""
    key: int
    """Key heads times head size."""
    vocabulary: int
    head_size: int = 0
    """0 where it does not matter."""
    vision: VisionShape | None = None
    """None for a policy that reads text."""


@dataclass(frozen=True, kw_only=True)
class KernelLayout:
    """The decode kernel that draws the rollouts of a process."""

    panel: int
    """Columns, and components of values, are filled up to multiples of it."""
    rows: int
    """Most rows under way, of all threads together: the others wait, and have no keys and values."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of one process in a step."""

    layout: Layout
    processes: int
    rows: int
    """Completions of one process per rollout."""
    group_size: int
    prompt_tokens: int
    completion_tokens: int
    micro_batch_tokens: int
    """Most tokens per forward and backward pass."""
    weight_bytes: int
    """Per parameter; gradients and both moments of AdamW have the same type."""
    compute_bytes: int
    """Per activation."""
    reference: bool
    checkpointing: bool
    offload: bool
    deferred: bool
    engine_bytes: int | None = None
    """Memory of an engine with a process of its own, besides its weights; None for one that draws in this process."""
    engine_weight_bytes: int = 0
    """Per parameter, of that engine's copy."""
    engine_keeps_rows: bool = False
    """That engine keeps keys and values of all rows while it draws, as one in this process does."""
    kernel: KernelLayout | None = None
    """None where torch draws."""
    ahead: int = 0
    """Rollouts that are drawn beside an update."""
    quantized: bool = False
    """The weights of the blocks are held in 4 bits."""
    in_main_memory: bool = False
    """The device is main memory, where the whole weights of each launch lie, and teachers all the time."""
    teacher_bytes: float = 0.0
    """Of the largest teacher, as far as one process holds it while it is asked."""
    teacher_head_bytes: float = 0.0
    """Of all teachers' LM heads, which an update needs whole for a divergence; 0 without one."""
    own_teacher: bool = False
    """The policy teaches itself by a copy of its weights, its start or a moving average."""
    own_head: bool = False
    """It does so by a divergence, for which an update needs a copy of its LM head."""
    fused: Fused = "none"
    input_bytes: int = 0
    """Of the images of a prompt, as the model reads them."""
    pixels: int = 0
    """Of the images of a prompt."""

    @property
    def prompts_at_once(self) -> int:
        """Most prompts in a micro-batch of completions of full length, one of which may be of the group before, and one
        of that behind."""
        others = 2 * (self.group_size - 1) * self.completion_tokens
        whole = self.prompt_tokens + self.group_size * self.completion_tokens
        return min(self.rows // self.group_size, max(1, (self.tokens + others) // whole))

    @property
    def longest(self) -> int:
        """Tokens of a prompt and a completion at full length."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def all_tokens(self) -> int:
        """Tokens of all completions of one process, at full length."""
        return self.rows // self.group_size * self.prompt_tokens + self.rows * self.completion_tokens

    @property
    def tokens(self) -> int:
        """Most tokens in a micro-batch."""
        return min(self.micro_batch_tokens, self.all_tokens)

    @property
    def passing_bytes(self) -> int:
        """Per parameter, as forward and backward passes find it: FSDP2 gathers in the type of the computation."""
        return self.compute_bytes if self.layout == "fsdp" else self.weight_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on one device, by what they are for."""

    kept: Mapping[str, float]
    """All the time."""
    rollout: Mapping[str, float]
    update: Mapping[str, float]
    teacher: Mapping[str, float] = field(default_factory=dict)
    """While the samples are scored by a teacher, between the two."""
    together: bool = False
    """Rollout and update are in memory at once; otherwise never."""

    @property
    def peak(self) -> float:
        rollout, *later = (sum(part.values()) for part in (self.rollout, self.update, self.teacher))
        return sum(self.kept.values()) + (rollout + max(later) if self.together else max(rollout, *later))


def shape_of(model: PreTrainedModel) -> Shape:
    """Sizes of a model, which may lie on the meta device."""
    from grpo_pl.distributed.sharding import transformer_blocks

    config: Any = model.config.get_text_config()
    vision = None
    if reading_of(model) is not None:
        whole: Any = model
        language = {id(p) for part in (whole.get_decoder(), whole.get_output_embeddings()) for p in part.parameters()}
        seeing, tower = model.config.vision_config, whole.get_encoder(modality="image")
        vision = VisionShape(
            parameters=sum(p.numel() for p in model.parameters() if id(p) not in language),
            layers=seeing.num_hidden_layers,
            hidden=seeing.hidden_size,
            intermediate=seeing.intermediate_size,
            patch=seeing.patch_size,
            trained=any(p.requires_grad for p in tower.parameters()),
        )
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    blocks = transformer_blocks(model)
    return Shape(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        block_parameters=sum(p.numel() for p in blocks[0].parameters()) if blocks else 0,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        query=heads * size,
        key=(getattr(config, "num_key_value_heads", None) or heads) * size,
        vocabulary=config.vocab_size,
        head_size=size,
        vision=vision,
    )


def _weights(shape: Shape, work: Workload) -> float:
    """Bytes of the policy's weights."""
    weights = float(shape.parameters * work.weight_bytes)
    if work.quantized:  # those of the blocks; embeddings and head are not
        weights -= shape.layers * shape.block_parameters * (work.weight_bytes - BITS_PER_WEIGHT / 8)
    return weights


def memory_plan(shape: Shape, work: Workload) -> MemoryPlan:
    """The plan of one process. Formulas and what they leave out: docs/scaling.md."""
    cut = work.processes if work.layout == "fsdp" else 1
    on_device = 0.0 if work.offload else 1.0
    parameters = _weights(shape, work) / cut * on_device
    gradients = shape.trainable * work.weight_bytes / cut * on_device
    kept = {"parameters": parameters, "optimiser": 2 * gradients}
    if work.in_main_memory:
        kept["the program itself"] = PROGRAM
    if work.reference:
        kept["reference"] = parameters
    if work.own_teacher:
        kept["teacher"] = parameters
    if work.teacher_bytes and work.in_main_memory:
        kept["teacher"] = work.teacher_bytes
    if work.engine_bytes is not None:
        kept["engine"] = float(work.engine_bytes)
        kept["engine's weights"] = float(shape.parameters * work.engine_weight_bytes)
    if work.ahead and work.in_main_memory:  # those under way, and the one that is compared
        each = (shape.parameters + shape.trainable / cut) * float(work.weight_bytes)
        kept["weights of launches"] = (work.ahead + 1) * each
    if shape.vision is not None:
        kept["pixels"] = float((work.ahead + 1) * work.rows // work.group_size * work.input_bytes)
    if work.layout == "ddp":
        gradients *= 2  # and the buckets in which they are averaged
    if work.layout == "fsdp" and work.deferred:
        gradients += shape.trainable * 4
    kept_for_backward, computed_again = activation_bytes(shape, work)
    update = {
        "gradients": gradients,
        "activations": float(work.tokens * (kept_for_backward + computed_again)),
        "LM head": head_bytes(shape, work),
    }
    if work.layout == "fsdp":
        update = {"gradients": gradients, **_fsdp_update(shape, work)}
    if shape.vision is not None:
        update["images"] = image_bytes(shape.vision, work, work.prompts_at_once, update=True)
    if work.teacher_head_bytes or work.own_head:
        own = shape.vocabulary * shape.hidden * work.weight_bytes if work.own_head else 0
        update["teacher's head"] = work.teacher_head_bytes + own
    teacher = {"teacher": work.teacher_bytes} if work.teacher_bytes and not work.in_main_memory else {}
    return MemoryPlan(
        kept=kept, rollout=rollout_bytes(shape, work), update=update, teacher=teacher, together=work.ahead > 0
    )


def _fsdp_update(shape: Shape, work: Workload) -> dict[str, float]:
    """What an update takes beside this process's gradients, at the fullest of three moments: the backward pass is in
    the LM head, in the last block, or where it sums the gradients of what is outside of blocks."""
    kept, again = (work.tokens * number for number in activation_bytes(shape, work))
    c, block = work.compute_bytes, shape.block_parameters
    root = shape.parameters - shape.layers * block
    head, share = shape.vocabulary * shape.hidden, shape.trainable / shape.parameters
    moments = (
        {"activations": kept, "LM head": head_bytes(shape, work), "gathered weights": root * c},
        {
            "activations": kept + again,
            "LM head": head * c * share,  # its gradient waits for that of the embedding
            "gathered weights": (root + 2 * block) * c,  # the next block is on its way
            "whole gradients": block * (c + 4) * share,  # in the type of the computation, and as they are summed
        },
        {"gathered weights": root * c, "whole gradients": root * (c + 4) * share},
    )
    return max(moments, key=lambda parts: sum(parts.values()))


def teacher_bytes(shape: Shape, *, weight_bytes: int, layout: Layout) -> float:
    """Bytes of a teacher on one device while it is asked: its weights; under FSDP2, where shards wait in main memory,
    those of two blocks and of what is outside of blocks."""
    if layout != "fsdp":
        return float(shape.parameters * weight_bytes)
    root = shape.parameters - shape.layers * shape.block_parameters
    return float((root + 2 * shape.block_parameters) * weight_bytes)


def activation_bytes(shape: Shape, work: Workload) -> tuple[float, float]:
    """Bytes per token that wait for the backward pass, and those that one block at a time computes again there.

    A block keeps the inputs of its products and norms: 6 h + 4 q + 2 k + 4 f numbers (hidden size h, query width q, key
    width k, intermediate size f). Where norms and SiLU are fused, it is 3 f; and of h the two inputs of norms in the
    type of the weights and the inputs of products in theirs: five if that is another type, else two. With attention in
    C it is 2 q. With activation checkpointing it keeps its input, and one block at a time the rest.
    """
    wide, narrow = work.passing_bytes, work.compute_bytes
    fused = work.fused != "none"
    outer = shape.hidden * (2 * wide + (2 if wide == narrow else 5) * narrow if fused else 6 * narrow)
    query = 2 if work.fused == "cpu" else 4
    inner = query * shape.query + 2 * shape.key + (3 if fused else 4) * shape.intermediate
    block = outer + inner * narrow
    ends = 3 * shape.hidden * 4
    if work.checkpointing:
        return shape.layers * shape.hidden * work.compute_bytes + ends, block
    return shape.layers * block + ends, 0.0


def image_bytes(vision: VisionShape, work: Workload, prompts: int, *, update: bool) -> float:
    """Bytes for the images of so many prompts, which are encoded at once: a copy of their pixels, and for each patch
    what a layer takes, 8 h + 2 f numbers (hidden size h, intermediate size f); in an update of a trained tower what all
    layers keep, or with activation checkpointing their inputs and one layer at a time."""
    layer = (8 * vision.hidden + 2 * vision.intermediate) * work.compute_bytes
    kept = layer
    if update and vision.trained:
        inputs = vision.layers * vision.hidden * work.compute_bytes
        kept = inputs + layer if work.checkpointing else vision.layers * layer
    patches = work.pixels / vision.patch**2
    return prompts * (work.input_bytes + patches * kept)


def head_bytes(shape: Shape, work: Workload) -> float:
    """Kept probabilities, and two chunks of logits; independent of the number of tokens once there are many. Beside a
    teacher's head nothing is kept, and smaller chunks are in memory eight times. On a GPU one chunk in the type of the
    products, a copy of the weight in that type, and the weight's gradient with what a chunk adds to it."""
    positions = min(work.tokens, work.rows * work.completion_tokens)
    if work.teacher_head_bytes or work.own_head:
        return 4.0 * 8 * min(positions * shape.vocabulary, head._TAUGHT_ELEMENTS)
    if work.fused == "gpu":
        wide, narrow = work.passing_bytes, work.compute_bytes
        tokens = min(positions, CHUNK_TOKENS, max(1, CHUNK_ELEMENTS // shape.vocabulary))
        per_entry = tokens * narrow + shape.hidden * (4 + narrow + (narrow if wide != narrow else 0))
        return float(shape.vocabulary * per_entry)
    chunk = min(positions, head._CHUNK_TOKENS, max(1, head._CHUNK_ELEMENTS // shape.vocabulary)) * shape.vocabulary
    kept = min(positions * shape.vocabulary, head._KEPT_ELEMENTS)
    return 4.0 * (kept + 2 * chunk)


def rollout_bytes(shape: Shape, work: Workload) -> dict[str, float]:
    """Keys and values at full length (by torch of all rows, more than a CPU needs where a group shares its prompt), and
    the engine's own copy of the weights. Nothing for an engine that keeps its memory all the time."""
    if work.engine_bytes is not None and not work.engine_keeps_rows:
        return {}
    if work.kernel is not None:
        keys_and_values, logits = _kernel_bytes(shape, work, work.kernel)
    else:
        columns = work.prompt_tokens + work.completion_tokens
        keys_and_values = float(work.rows * columns * shape.layers * 2 * shape.key * work.compute_bytes)
        logits = 3.0 * work.rows * shape.vocabulary * 4
    copied = shape.parameters  # joined, packed or in another type: a second copy
    if shape.vision is not None:
        copied -= shape.vision.parameters
    if work.quantized and work.engine_bytes is None:  # those of the blocks stay as they are
        copied -= shape.layers * shape.block_parameters
    elif work.fused == "gpu" and shape.trainable == shape.parameters and work.passing_bytes == work.compute_bytes:
        copied = shape.layers * shape.hidden * (shape.query + 2 * shape.key + 2 * shape.intermediate)  # only the joined
    parts = {
        "keys and values": keys_and_values,
        "weights for decoding": float(copied * work.compute_bytes),
        "logits": logits,
    }
    if work.layout == "fsdp" and work.engine_bytes is None:
        parts["gathered weights"] = float(shape.parameters * work.compute_bytes)
    if shape.vision is not None:
        parts["images"] = image_bytes(shape.vision, work, work.rows // work.group_size, update=False)
    return parts


def _kernel_bytes(shape: Shape, work: Workload, kernel: KernelLayout) -> tuple[float, float]:
    """Keys and values of the decode kernel, each prompt once and each row under way; its activations and logits."""

    def filled(n: int) -> int:
        return -(-n // kernel.panel) * kernel.panel

    live = min(work.rows, kernel.rows)
    columns = -(-work.rows // work.group_size) * filled(work.prompt_tokens) + live * filled(work.completion_tokens)
    column = shape.layers * (shape.key + shape.key // shape.head_size * filled(shape.head_size))
    activations = live * (2 * shape.hidden + 3 * shape.intermediate + 2 * shape.query + _RACED)
    return 4.0 * columns * column, 4.0 * activations


def token_budget(shape: Shape, work: Workload, memory: float) -> int:
    """Tokens of the largest micro-batch with which the plan stays within ``memory`` bytes: a power of two, or all
    tokens; 0 where not even one completion does."""

    def fits(tokens: int) -> bool:
        return memory_plan(shape, replace(work, micro_batch_tokens=tokens)).peak <= memory

    powers = [2**n for n in range(work.all_tokens.bit_length()) if 2**n >= work.longest]
    return max((tokens for tokens in [work.longest, *powers, work.all_tokens] if fits(tokens)), default=0)


def rollout_budget(shape: Shape, work: Workload, memory: float) -> int:
    """Most completions decoded at once within ``memory`` bytes, for ``engine.max_batch_rows``."""
    fixed = memory_plan(shape, replace(work, rows=0)).kept.values()
    parts = rollout_bytes(shape, replace(work, rows=0))
    per_row = sum(rollout_bytes(shape, replace(work, rows=1)).values()) - sum(parts.values())
    left = memory - sum(fixed) - sum(parts.values())
    return max(0, min(work.rows, int(left / per_row))) if per_row else work.rows
