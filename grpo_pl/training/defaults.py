"""Values of the fields that nobody has set, derived from what is known before a run starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from grpo_pl.data.demonstrations import read_demonstrations
from grpo_pl.policy.loading import context_length, load_model, load_tokenizer
from grpo_pl.policy.tokenizer import FROM_DATA

if TYPE_CHECKING:
    from grpo_pl.data.datamodule import RolloutDataModule
    from grpo_pl.policy.loading import PolicyConfig
    from grpo_pl.training.cold_start import ColdStart
    from grpo_pl.training.optimization import Optimization

COMPLETIONS = 256
"""Completions of a rollout, P · G."""
SCRATCH_BATCH, SCRATCH_PASSES = 32, 40
"""Demonstrations of a step of the cold start from scratch, and passes over them at most."""
FIELDS: dict[str, Sequence[str]] = {
    "model.optimization": ("lr", "warmup_rollouts", "schedule"),
    "model.cold_start": ("lr", "batch_size", "steps"),
    "data": ("prompts_per_step",),
}
"""Fields that may be null, to be derived, by the part that has them."""
Kind = Literal["from scratch", "trained before", "adapters"]


class Derived(NamedTuple):
    """A value that was derived, and from what."""

    field: str
    """Dotted name, such as ``model.optimization.lr``."""
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that are known before it starts."""

    parameters: int
    """Of the policy, without adapters."""
    kind: Kind
    """The start of the policy, and the weights that are trained."""
    rollouts: int
    """``data.steps``."""
    group_size: int
    tokens: int
    """Of the longest completion; of an episode, with its observations."""
    problems: int | None = None
    """Training problems that rollouts ask; None where they are made up without end."""
    demonstrations: int | None = None
    """Different ones of the cold start; None where the source makes its problems up without end."""

    @property
    def size(self) -> str:
        """The policy in words."""
        scale, unit = (10**9, "B") if self.parameters >= 10**9 else (10**6, "M")
        return f"{self.parameters / scale:.3g}{unit} parameters, {self.kind}"


def peak_rate(parameters: int, kind: Kind) -> float:
    """Peak learning rate of the updates after rollouts.

    - from scratch: 4·10⁻⁴ · (6·10⁵ / n)^¼, at most 4·10⁻⁴. With the depth fixed, n grows with the square of the width,
      so the rate falls with the square root of the width.
    - trained before: 10⁻⁶ · (5·10⁸ / n)^0.85, not below 10⁻⁶, the customary rate for 0.5B parameters and more, and at
      most half of that from scratch.
    - adapters: ten times that of all weights (Schulman et al. 2025, "LoRA Without Regret").

    The quickstart learns at 6·10⁻⁴. Where fewer answers are right that unlearns a task (simple_equations of
    reasoning-gym with one in five right, n = 6.2·10⁵), and 2·10⁻⁴ does not.
    """
    scratch = min(4e-4, 4e-4 * (6e5 / parameters) ** 0.25)
    if kind == "from scratch":
        return _rounded(scratch)
    full = min(max(1e-6, 1e-6 * (5e8 / parameters) ** 0.85), scratch / 2)
    return _rounded(full if kind == "trained before" else 10.0 * full)


def demonstration_rate(parameters: int, kind: Kind) -> float:
    """Peak learning rate of the cold start.

    - from scratch: 3·10⁻³ · (6·10⁵ / n)^¼, at most 3·10⁻³.
    - else: ten times the rate of its updates, at most that from scratch; 10⁻⁵ for all of 0.5B parameters.
    """
    scratch = min(3e-3, 3e-3 * (6e5 / parameters) ** 0.25)
    return _rounded(scratch if kind == "from scratch" else min(scratch, 10.0 * peak_rate(parameters, kind)))


def demonstration_steps(kind: Kind, tokens: int, demonstrations: int | None, batch_size: int) -> int:
    """Steps of the cold start.

    - from scratch: 18 T for completions of up to T tokens, since longer work takes longer to learn, but no more than
      64,000 / T, since a step on it takes longer as well; within 600 … 800. Where demonstrations are finite, a file's
      or those of a source of rows, 40 passes over them at most. A short answer that a longer cold start has perfected
      leaves nothing to GRPO.
    - else: 200, and 3 passes over finite demonstrations at most.
    """
    scratch = min(800, max(600, min(18 * tokens, 64_000 // tokens)))
    most, passes = (scratch, SCRATCH_PASSES) if kind == "from scratch" else (200, 3)
    return most if demonstrations is None else min(most, max(1, math.ceil(passes * demonstrations / batch_size)))


def warm_up(rollouts: int) -> int:
    """Rollouts of the rise to the peak rate: one in twenty, at most 10."""
    return min(10, rollouts // 20)


def prompts_of_a_step(group_size: int, problems: int | None) -> int:
    """256 / G, so that a rollout has 256 completions; halved until it is at most half of the problems, since the start
    may leave some out, and processes come in powers of two."""
    wanted = max(1, COMPLETIONS // group_size)
    while problems is not None and wanted > max(1, problems // 2):
        wanted //= 2
    return wanted


def derive(facts: RunFacts, unset: Sequence[str]) -> list[Derived]:
    """The rules of this file, applied to the fields of ``unset``."""
    scratch = facts.kind == "from scratch"
    batch = min(SCRATCH_BATCH if scratch else 16, facts.demonstrations or SCRATCH_BATCH)
    shown = "demonstrations without end" if facts.demonstrations is None else f"{facts.demonstrations} demonstrations"
    found = "problems without end" if facts.problems is None else f"{facts.problems} problems"
    start = "from scratch" if scratch else "trained before"
    derived = [
        Derived("model.optimization.lr", peak_rate(facts.parameters, facts.kind), facts.size),
        Derived("model.optimization.warmup_rollouts", warm_up(facts.rollouts), f"{facts.rollouts} rollouts"),
        Derived("model.optimization.schedule", "cosine" if scratch else "constant", start),
        Derived("model.cold_start.lr", demonstration_rate(facts.parameters, facts.kind), facts.size),
        Derived("model.cold_start.batch_size", batch, start),
        Derived(
            "model.cold_start.steps",
            demonstration_steps(facts.kind, facts.tokens, facts.demonstrations, batch),
            f"completions of up to {facts.tokens} tokens, {shown}, {start}",
        ),
        Derived(
            "data.prompts_per_step",
            prompts_of_a_step(facts.group_size, facts.problems),
            f"groups of {facts.group_size}, {found}",
        ),
    ]
    return [each for each in derived if each.field in unset]


def run_facts(
    policy: PolicyConfig,
    group_size: int,
    longest_action: int,
    cold_start: ColdStart | None,
    data: RolloutDataModule,
    *,
    episodes: bool,
) -> RunFacts:
    """The facts of a run; counts parameters without loading weights, and reads files of problems."""
    model = _without_weights(policy)
    file, count = (None, None) if cold_start is None else (cold_start.demonstrations, cold_start.count)
    leaves = data.source.leaves().values()
    of_source = [leaf.demonstrated() for leaf in leaves]
    shown = None if None in of_source else sum(rows for rows in of_source if rows is not None)
    lists = [leaf.problems("train") for leaf in leaves]
    problems = None if None in lists else sum(len(rows) for rows in lists if rows is not None)
    if problems is not None and shown is not None and shown < problems:
        problems -= shown  # those that rollouts ask
    if file is not None:
        shown = len(read_demonstrations(file))
    return RunFacts(
        parameters=sum(weight.numel() for weight in model.parameters()),
        kind=_kind(policy),
        rollouts=data.steps,
        group_size=group_size,
        tokens=(context_length(model.config) if episodes else None) or longest_action,
        problems=problems,
        demonstrations=None if cold_start is None else min((n for n in (shown, count) if n is not None), default=None),
    )


def derive_supervised(policy: PolicyConfig, optimization: Optimization, steps: int) -> list[Derived]:
    """The null fields of ``model.optimization`` in supervised fine-tuning, by the rules of a cold start; ``steps`` are
    those of the run."""
    unset = [name for name in FIELDS["model.optimization"] if getattr(optimization, name) is None]
    if not unset:
        return []
    facts = RunFacts(
        parameters=sum(weight.numel() for weight in _without_weights(policy).parameters()),
        kind=_kind(policy),
        rollouts=steps,
        group_size=1,
        tokens=1,
    )
    derived = {
        "lr": (demonstration_rate(facts.parameters, facts.kind), facts.size),
        "warmup_rollouts": (steps // 10, f"{steps} steps"),
        "schedule": ("cosine", "supervised"),
    }
    return [Derived(f"model.optimization.{name}", *derived[name]) for name in unset]


def _without_weights(policy: PolicyConfig) -> Any:
    """The policy's architecture without adapters."""
    characters = None if policy.characters == FROM_DATA else policy.characters
    counted = replace(policy, lora=None, quantization=None, characters=characters)
    with torch.device("meta"):
        return load_model(counted, load_tokenizer(counted), weights=False)


def _kind(policy: PolicyConfig) -> Kind:
    return "from scratch" if policy.path is None else "trained before" if policy.lora is None else "adapters"


def unset_fields(optimization: Optimization | None, cold_start: ColdStart | None, data: RolloutDataModule) -> list[str]:
    """Dotted names of the fields of a run that are to be derived: those that are null, of parts that are used."""
    parts: dict[str, Any] = {"model.optimization": optimization, "model.cold_start": cold_start, "data": data}
    return [
        f"{place}.{name}"
        for place, names in FIELDS.items()
        for name in names
        if parts[place] is not None and getattr(parts[place], name) is None
    ]


def with_values(
    values: Mapping[str, Any], optimization: Optimization, cold_start: ColdStart | None, data: RolloutDataModule
) -> tuple[Optimization, ColdStart | None]:
    """Sets fields by their dotted names; of the frozen parts, what they are with those."""
    parts: dict[str, dict[str, Any]] = {place: {} for place in FIELDS}
    for field, value in values.items():
        place, _, name = field.rpartition(".")
        parts[place][name] = value
    for name, value in parts["data"].items():
        setattr(data, name, value)
    shown = None if cold_start is None else replace(cold_start, **parts["model.cold_start"])
    return replace(optimization, **parts["model.optimization"]), shown


def table(found: Sequence[Derived]) -> str:
    """One line a value: the field, the value, and what it was derived from."""
    rows = [(each.field, f"{each.value:g}" if isinstance(each.value, float) else str(each.value)) for each in found]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = [
        f"  {name:<{first}}  {value:>{second}}  {each.why}" for (name, value), each in zip(rows, found, strict=True)
    ]
    return "\n".join(["Nobody set these fields, so they were derived (docs/tuning.md):", *lines])


def _rounded(rate: float) -> float:
    """To two digits, as one would write it."""
    return float(f"{rate:.1e}")
