"""Micro-batches: completions that go through a forward and backward pass at once, within a budget of tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from torch import Tensor

from grpo_pl.distributed.collective import Collective
from grpo_pl.distributed.sharding import local_part
from grpo_pl.functional.device_memory import OutOfMemory, free_gpu_memory, is_out_of_memory
from grpo_pl.policy.checkpointing import recomputes_activations
from grpo_pl.policy.logprobs import (
    Head,
    completion_logprobs,
    completion_states,
    shares_prompts,
)
from grpo_pl.policy.packing import Rows, differing_inputs
from grpo_pl.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_TOKENS, MOST_TOKENS_ON_CPU = 16_384, 4_096
"""A budget that is found stays below this: products of matrices gain nothing from more rows. A CPU even loses, because
every tensor beyond 32 MiB comes from the system anew (width 256, 8,192 tokens: 1.25 s, in halves 0.92 s)."""
_SHARE_OF_FREE_MEMORY = 0.5  # the rest: temporaries of the backward pass, the LM head, fragmentation
_PROBE_TOKENS = (32, 96)


def micro_batches(rollout: Rollout, rows: Tensor, budget: int, *, share_prompts: bool) -> list[Tensor]:
    """Cuts ``rows`` into parts of at most ``budget`` tokens each.

    A row costs its completion and, where the row before it in the part has another one, its prompt; in their order, so
    that groups stay together. Without ``share_prompts``, a part costs its number of rows times its longest prompt plus
    its longest completion, padding included, a segment being a row; then rows of similar length come together, the
    longest first.

    Args:
        rows: (b,) indices into the rollout.
    """
    prompts = rollout.prompt_mask[rows].sum(dim=1).tolist()
    completions = rollout.completion_mask[rows].sum(dim=1).tolist()
    longest = max((p + c for p, c in zip(prompts, completions, strict=True)), default=0)
    check_longest(longest, budget)
    ids, mask = rollout.prompt_ids[rows], rollout.prompt_mask[rows]
    same = ((ids == ids.roll(1, 0)) & (mask == mask.roll(1, 0))).all(dim=1)  # (b,), the prompt of the row before
    counts = (rollout.segment_index[rows].amax(dim=1) + 1).tolist()  # segments of each row
    same &= torch.tensor(counts, device=rows.device).roll(1) == 1  # else other prompts stand between
    same &= ~differing_inputs(None if rollout.inputs is None else rollout.inputs[rows], rows.device)
    same[:1] = False
    if not share_prompts:
        unfolded = Rows.of(rollout, rows).unfolded()
        prompts, completions = (
            [int(part.max()) for part in mask.sum(dim=1).split(counts)]
            for mask in (unfolded.prompt_mask, unfolded.completion_mask)
        )
    order = range(len(rows)) if share_prompts else sorted(range(len(rows)), key=lambda i: -completions[i] - prompts[i])
    parts, same_prompt = list[list[int]](), same.tolist()
    tokens = prompt = completion = segments = 0  # of the last part: all that count, and its longest ones
    for i in order:
        prompt, completion = max(prompt, prompts[i]), max(completion, completions[i])
        if share_prompts:
            tokens += completions[i] + (0 if same_prompt[i] else prompts[i])
        elif parts:
            tokens = (segments + counts[i]) * (prompt + completion)
        if parts and tokens <= budget:
            parts[-1].append(i)
            segments += counts[i]
        else:
            parts.append([i])
            prompt, completion, segments = prompts[i], completions[i], counts[i]
            tokens = prompt + completion
    return [rows[part] for part in parts]


def longest_row(rollout: Rollout) -> int:
    """Tokens of the longest prompt with its completion."""
    return int((rollout.prompt_mask.sum(dim=1) + rollout.completion_mask.sum(dim=1)).max())


def longest_segment(rollout: Rollout) -> int:
    """Tokens of the longest row that the model reads: a prompt and what follows it."""
    rows = Rows.of(rollout, torch.arange(len(rollout.prompt_ids), device=rollout.prompt_ids.device)).unfolded()
    return int((rows.prompt_mask.sum(dim=1) + rows.completion_mask.sum(dim=1)).max())


def check_longest(longest: int, budget: int) -> None:
    """Refuses a row of ``longest`` tokens that no micro-batch may hold."""
    if longest > budget:
        raise ValueError(
            f"model.max_tokens_per_microbatch is {budget}, but a prompt with its completion has {longest} tokens: set "
            f"it to {longest} at least."
        )


def rollout_rows(rollout: Rollout, rows: Tensor) -> dict[str, Any]:
    """The tensors of some rows, cut to the longest prompt and completion among them, and inputs of their prompts."""
    prompt_mask, completion_mask = rollout.prompt_mask[rows], rollout.completion_mask[rows]
    prompt = int(prompt_mask.sum(dim=1).max())
    completion = max(1, int(completion_mask.sum(dim=1).max()))
    return {
        "prompt_ids": rollout.prompt_ids[rows][:, -prompt:],
        "prompt_mask": prompt_mask[:, -prompt:],
        "completion_ids": rollout.completion_ids[rows][:, :completion],
        "completion_mask": completion_mask[:, :completion],
        "action_mask": rollout.action_mask[rows][:, :completion],
        "segment_index": rollout.segment_index[rows][:, :completion],
        **({} if rollout.support is None else {"support": rollout.support[rows][:, :completion]}),
        **({} if rollout.inputs is None else {"inputs": rollout.inputs[rows]}),
    }


@dataclass(kw_only=True)
class TokenBudget:
    """Most tokens in a micro-batch of a run: as configured, or found before the first step; halved when memory ends."""

    configured: int | None = None
    tokens: int | None = None
    """None until it is resolved."""
    found_for: str = ""
    """Device and number of processes that the budget was found for."""

    def __post_init__(self) -> None:
        if self.configured is not None and self.configured < 1:
            raise ValueError(f"model.max_tokens_per_microbatch must be at least 1, got {self.configured}.")
        self.tokens = self.tokens or self.configured

    def cut(self, rollout: Rollout, rows: Tensor, policy: PreTrainedModel) -> list[Tensor]:
        """``micro_batches`` of ``rows`` for this policy. A budget that was found or halved gives way to a longer
        row, up to the configured one.
        """
        assert self.tokens is not None, "the budget is not resolved"
        longest = longest_row(rollout)
        budget = max(self.tokens, min(longest, self.configured or longest))
        return micro_batches(rollout, rows, budget, share_prompts=shares_prompts(policy, longest))

    def check(self, rollout: Rollout, collective: Collective) -> None:
        """Refuses on every rank what `cut` would refuse on one, while the others wait for it."""
        if self.configured is not None:
            check_longest(collective.max(longest_row(rollout), rollout.completion_ids.device), self.configured)

    def rounds(
        self, rollout: Rollout, rows: Tensor, model: PreTrainedModel, collective: Collective
    ) -> Iterator[tuple[Tensor, bool]]:
        """The parts of ``rows``, and whether each is this rank's own: every rank goes equally many rounds, or
        collectives inside of forward passes would hang. What fills up is the last part again, or row 0."""
        parts = self.cut(rollout, rows, model)
        last = parts[-1] if parts else rows.new_zeros(1)
        for number in range(collective.max(len(parts), rows.device)):
            yield (parts[number], True) if number < len(parts) else (last, False)

    def within_memory(self, run: Callable[[], T], rollout: Rollout, collective: Collective) -> T:
        """``run()``, from its start with half the budget each time that memory runs out.

        Raises:
            OutOfMemory: there is nothing left to halve, or other ranks have gone on already.
        """
        while True:
            try:
                return run()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = error.with_traceback(None)  # its frames hold the tensors that take up the memory
            self._halve(rollout, collective, reason)

    def resolve(
        self, policy: PreTrainedModel, *, trained_before: bool, collective: Collective, reserved: int = 0
    ) -> None:
        """Finds the budget where neither the configuration has one nor a checkpoint from the same kind of device and
        number of processes; the same on every rank.

        A dry forward pass counts the bytes that wait for the backward pass, per token. The budget is the largest power
        of two, at most ``MOST_TOKENS``, that takes up half of the memory that is free.

        Args:
            trained_before: gradients' and optimiser's memory is in use already.
            reserved: bytes of what is free that an engine will take before the update.
        """
        recomputes = recomputes_activations(policy)
        found_for = f"{_describe(policy.device)}, {collective.world} processes, recomputing: {recomputes}"
        if self.configured is not None or (self.tokens is not None and self.found_for == found_for):
            return
        each = saved_bytes_per_token(policy)
        free = free_memory(policy.device, processes=int(os.environ.get("LOCAL_WORLD_SIZE", collective.world)))
        free -= reserved
        if not trained_before:
            free -= 3 * sum(local_part(p).nbytes for p in policy.parameters() if p.requires_grad)
        most = MOST_TOKENS_ON_CPU if policy.device.type == "cpu" else MOST_TOKENS
        fitting = int(max(1.0, min(float(most), _SHARE_OF_FREE_MEMORY * free / each)))
        power = fitting.bit_length() - 1
        self.tokens, self.found_for = 2 ** -collective.max(-power, policy.device), found_for
        log.info("Micro-batches of up to %d tokens, of which each keeps %.0f KiB.", self.tokens, each / 1024)

    def _halve(self, rollout: Rollout, collective: Collective, error: BaseException) -> None:
        assert self.tokens is not None
        longest = longest_row(rollout)
        largest = int(rollout.prompt_mask.sum() + rollout.completion_mask.sum())
        before = max(longest, min(self.tokens, largest))
        self.tokens = max(before // 2, longest)
        if collective.world > 1 or self.tokens == before:
            advice = (
                f"set model.max_tokens_per_microbatch to {self.tokens} or less"
                if self.tokens < before
                else "it is one completion already; set model.activation_checkpointing to true, or shorten completions"
            )
            raise OutOfMemory(f"Memory ran out in a micro-batch of up to {before} tokens: {advice}.") from error
        log.warning("Memory ran out: micro-batches of up to %d tokens from now on (before: %d).", self.tokens, before)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def state_dict(self) -> dict[str, Any]:
        return {"configured": self.configured, "tokens": self.tokens, "found_for": self.found_for}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what was found or halved, unless the run has been told otherwise since."""
        if state["configured"] == self.configured:
            self.tokens, self.found_for = state["tokens"], state["found_for"]


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Reads a rollout under a model, no gradient, a micro-batch at a time; all ranks call it together."""

    budget: TokenBudget
    collective: Collective
    temperature: float

    def logprobs(
        self, model: PreTrainedModel, rollout: Rollout, rows: Tensor, *, of_teacher: bool = False, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T) log-probabilities of ``rows``, in float32 at least, 0 elsewhere; and entropies if asked for."""
        exact = torch.promote_types(model.dtype, torch.float32)

        @torch.no_grad()
        def run() -> tuple[Tensor, Tensor | None]:
            logprobs = torch.zeros_like(rollout.sampling_logprobs, dtype=exact)
            entropies = torch.zeros_like(logprobs) if entropy else None
            for chosen, mine in self.budget.rounds(rollout, rows, model, self.collective):
                part = rollout_rows(rollout, chosen)
                part = _readable(part, model) if of_teacher else part
                scored, uncertain = completion_logprobs(
                    model, **part, temperature=self.temperature, with_entropy=entropy
                )
                if mine:
                    logprobs[chosen, : scored.shape[1]] = scored.to(exact)
                if mine and entropies is not None and uncertain is not None:
                    entropies[chosen, : scored.shape[1]] = uncertain
            return logprobs, entropies

        return self.budget.within_memory(run, rollout, self.collective)

    def head_states(self, model: PreTrainedModel, rollout: Rollout, rows: Tensor) -> tuple[dict[int, Tensor], Head]:
        """Row -> inputs of a teacher's head at its tokens, and that head, both on the CPU."""

        def run() -> tuple[dict[int, Tensor], Head]:
            states: dict[int, Tensor] = {}
            head: Head | None = None
            for chosen, _ in self.budget.rounds(rollout, rows, model, self.collective):
                part = _readable(rollout_rows(rollout, chosen), model)
                found, copied = completion_states(model, **part)
                if head is None:
                    head = Head(copied.weight.cpu(), None if copied.bias is None else copied.bias.cpu())
                counts = part["action_mask"].sum(dim=1).tolist()
                states.update(zip(chosen.tolist(), found.cpu().split(counts), strict=True))
            assert head is not None, "every rank runs at least one micro-batch"
            return states, head

        return self.budget.within_memory(run, rollout, self.collective)


def _readable(part: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """A micro-batch for a teacher, whose distribution stays whole where the student's was truncated. With a smaller
    embedding than the student's, what the student may draw of its own padding, which no tokenizer knows, becomes the
    teacher's last token."""
    last = model.get_input_embeddings().weight.shape[0] - 1
    return {
        name: tensor.clamp(max=last) if name.endswith("_ids") else tensor
        for name, tensor in part.items()
        if name != "support"
    }


def saved_bytes_per_token(policy: PreTrainedModel) -> float:
    """Bytes that autograd keeps for each token of a micro-batch: what a dry forward pass of more tokens keeps more.

    Where activations are computed again, those of one layer come on top.
    """
    kept = _bytes_per_token(policy)
    again = [module for module in policy.modules() if getattr(module, "gradient_checkpointing", False)]
    if not recomputes_activations(policy):
        return kept
    for module in again:
        module.gradient_checkpointing = False
    try:
        layers: int = policy.config.get_text_config().num_hidden_layers
        return kept + _bytes_per_token(policy) / layers
    finally:
        for module in again:
            module.gradient_checkpointing = True


def _bytes_per_token(policy: PreTrainedModel) -> float:
    with torch.random.fork_rng():  # a policy with dropout draws the same afterwards
        fewer, more = (_saved_bytes(policy, tokens) for tokens in _PROBE_TOKENS)
    return max(1.0, (more - fewer) / (_PROBE_TOKENS[1] - _PROBE_TOKENS[0]))


def _saved_bytes(policy: PreTrainedModel, tokens: int) -> int:
    ids = torch.arange(tokens + 1, device=policy.device).unsqueeze(0) % policy.config.get_text_config().vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprobs, _ = completion_logprobs(
            policy,
            prompt_ids=ids[:, :1],
            prompt_mask=mask[:, :1],
            completion_ids=ids[:, 1:],
            completion_mask=mask[:, 1:],
            temperature=1.0,
        )
    del logprobs
    return sum(kept.values())


def free_memory(device: torch.device, *, processes: int) -> float:
    """Bytes that this process may still take: of its GPU, or its share of the machine's or container's memory."""
    of_gpu = free_gpu_memory(device)
    if of_gpu is not None:
        return of_gpu
    free = float(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip().isdigit():
        used = float((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = float(counts.get("inactive_file", 0))  # files that were read, given up when memory is asked for
        free = min(free, float(limit.read_text()) - used + cached)
    return free / processes


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} with {properties.total_memory / 2**30:.0f} GiB"
