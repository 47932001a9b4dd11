"""``grpo-pl plan``: whether a configuration fits into memory, without loading a model's weights."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from grpo_pl.config.objects import ConfigArguments
from grpo_pl.extras.plan.memory import (
    GIB,
    MemoryPlan,
    Shape,
    Workload,
    memory_plan,
    rollout_budget,
    shape_of,
    token_budget,
)
from grpo_pl.extras.plan.workload import longest_prompt, meta_model, resolved_settings, workload
from grpo_pl.policy.inputs import reading_of
from grpo_pl.training.microbatches import MOST_TOKENS, MOST_TOKENS_ON_CPU

USABLE = 0.92
"""Share of a device's memory that tensors can have; the rest goes to kernels, communication and fragmentation."""


def plan(
    config: ConfigArguments = "configs/gsm8k.yaml",
    overlay: str | None = None,
    gpu_memory: float = 80.0,
    gpus: int = 8,
    prompt_tokens: int | None = None,
) -> int:
    """Memory per process for a configuration, whether it fits, and the largest micro-batch that does.

    The model's configuration and tokenizer are loaded, and a few prompts. docs/scaling.md has the formulas. The exit
    status is 1 if it does not fit.

    Args:
        config: the configuration of the run.
        overlay: another configuration, read after it, such as configs/strategy/fsdp.yaml.
        gpu_memory: memory of one device in GiB.
        gpus: processes, one for each device.
        prompt_tokens: tokens of a long prompt; without it the longest of the first prompts is measured.
    """
    for name, value in (("gpu-memory", gpu_memory), ("gpus", gpus), ("prompt-tokens", prompt_tokens)):
        if value is not None and not value > 0:
            raise ValueError(f"--{name} must be positive, got {value}.")
    files = [*(config if isinstance(config, list) else [str(config)]), *([overlay] if overlay else [])]
    parts = resolved_settings(files)
    model = meta_model(parts)
    said = []
    longest, inputs, about = longest_prompt(parts) if prompt_tokens is None or reading_of(model) else (0, None, "")
    if prompt_tokens is None:
        prompt_tokens = longest
        said.append(f"prompts     {about}; --prompt-tokens sets another length")
    work = workload(parts, model, gpus=gpus, prompt_tokens=prompt_tokens, inputs=inputs)
    shape = shape_of(model)
    usable = USABLE * gpu_memory * GIB
    if parts.model.max_tokens_per_microbatch is None:  # a run finds the largest that fits by itself
        most = MOST_TOKENS_ON_CPU if work.in_main_memory else MOST_TOKENS
        work = replace(work, micro_batch_tokens=min(most, token_budget(shape, work, usable) or work.longest))
    memory = memory_plan(shape, work)
    console = Console()
    console.print(_table(shape, work, memory, f"{' + '.join(files)}: GiB for each of {gpus}"))
    fits = memory.peak <= usable
    console.print(
        f"peak        {memory.peak / GIB:.2f} GiB of {usable / GIB:.1f} usable ({USABLE:.0%} of {gpu_memory:g}): "
        + ("it fits" if fits else "it does not fit"),
        *said,
        *_advice(shape, work, usable, fits),
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    return int(not fits)


def _table(shape: Shape, work: Workload, memory: MemoryPlan, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(f"{shape.parameters / 1e6:,.1f} M parameters, {work.layout}")
    columns = {"always": memory.kept, "rollout": memory.rollout, "teacher": memory.teacher, "update": memory.update}
    columns = {heading: parts for heading, parts in columns.items() if parts or heading != "teacher"}
    for heading in columns:
        table.add_column(heading, justify="right")
    for column, parts in enumerate(columns.values()):
        for name, size in parts.items():
            cells = [""] * len(columns)
            cells[column] = f"{size / GIB:.2f}"
            table.add_row(name, *cells)
    return table


def _advice(shape: Shape, work: Workload, usable: float, fits: bool) -> list[str]:
    tokens = token_budget(shape, work, usable)
    decoded = rollout_budget(shape, work, usable)
    lines = []
    if tokens:
        lines.append(f"update      model.max_tokens_per_microbatch up to {tokens} (assumed: {work.tokens})")
    if 0 < decoded < work.rows:
        lines.append(f"rollout     model.engine.init_args.max_batch_rows: {decoded} (of {work.rows} completions)")
    if not fits and not work.checkpointing and token_budget(shape, replace(work, checkpointing=True), usable):
        lines.append("try         model.activation_checkpointing: true")
    if not fits and work.layout != "fsdp" and work.processes > 1:
        cut = memory_plan(shape, replace(work, layout="fsdp")).peak / GIB
        lines.append(f"try         --overlay configs/strategy/fsdp.yaml: {cut:.2f} GiB")
    return lines
