"""The native engine: an own decode loop that shares prompts within a group and drops rows as they finish."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor

from grpo_pl.functional import accelerated
from grpo_pl.functional.device_memory import OutOfMemory, free_gpu_memory, is_out_of_memory
from grpo_pl.functional.sampling import PrecomputedNoise
from grpo_pl.rollout.decoding import DecodeMonitor, pad_left
from grpo_pl.rollout.engine import RolloutEngine, Watching
from grpo_pl.rollout.native.decoder_choice import TORCH, choose_decoder, decodes_in_graphs
from grpo_pl.rollout.native.weights import read_prompts, refuse_llama_family
from grpo_pl.rollout.plain import PlainEngine
from grpo_pl.types import GenerateRequest, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.extras.kernels.decode_kernel import DecodeKernel
    from grpo_pl.extras.kernels.kernel_slots import KernelSlots
    from grpo_pl.rollout.native.llama_family import LlamaFamilyDecoder
    from grpo_pl.rollout.native.slots import TurnSlots

log = logging.getLogger(__name__)
_SHARE_OF_FREE_MEMORY = 0.8
"""The rest is for the prefill and for what lies unused between blocks."""
OWN_PASS = "the own forward pass of the Llama family"


@dataclass(kw_only=True)
class NativeEngine(PlainEngine):
    """Prefills each prompt once for its whole group and decodes with fused weights; finished rows cost nothing.

    Draws the samples of `PlainEngine`, up to near-ties of floating point. Llama, Mistral, Qwen2 and Qwen3 have
    an own forward pass, with LoRA adapters or FSDP2 sharding as well; any other model is handed to the plain engine.
    On a CPU, small policies in float32 are drawn from by the decode kernel, a whole rollout in one call of C.
    The weights are read at every call.
    """

    native: ClassVar[bool] = True
    max_batch_rows: int = 0
    """Most completions decoded, or episodes played, at once; 0 takes all of them, of completions on a GPU those for
    which memory is free at the first rollout, and half as many each time that memory runs out. Outside episodes the
    decode kernel does without: it keeps those of 32 completions a thread."""
    decoder: str | None = field(default=None, init=False, compare=False)
    """The decoder of the whole run where it can draw: a kernel by its name, or ``torch``. None follows the rule."""
    _logged: set[str] = field(default_factory=set, init=False, repr=False)
    _found_rows: int | None = field(default=None, init=False, repr=False, compare=False)
    # most completions at once for which there was memory; None while there was for all

    def generate(self, model: PreTrainedModel, request: GenerateRequest, **watching: Unpack[Watching]) -> Rollout:
        rows = len(request.keys) * request.group_size
        while True:
            try:
                return super().generate(model, request, **watching)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                before = self._rows_at_once(rows)
                if before == 1:
                    raise OutOfMemory(
                        "Memory ran out in a rollout of one completion at once: shorten completions "
                        "(model.sampling.max_completion_length), or draw in vLLM (configs/engine/vllm.yaml)."
                    ) from error
            # here nothing of the failed attempt is held any longer
            self._found_rows = before // 2
            log.warning(
                "Memory ran out: rollouts of up to %d completions at once from now on (before: %d).",
                self._found_rows,
                before,
            )
            if model.device.type == "cuda":
                torch.cuda.empty_cache()

    def state_dict(self) -> dict[str, Any]:
        return {"configured": self.max_batch_rows, "rows": self._found_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what was found or halved, unless the run has been told otherwise since."""
        if state.get("configured") == self.max_batch_rows:
            self._found_rows = state["rows"]

    def _rows_at_once(self, rows: int) -> int:
        return min(most for most in (self.max_batch_rows, self._found_rows, rows) if most)

    def _chunks(self, owners: Tensor) -> Iterator[tuple[int, Tensor]]:
        size = self._rows_at_once(len(owners))
        return ((first, owners[first : first + size]) for first in range(0, len(owners), size))

    def _draw(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, owners: Tensor, keys: Tensor, monitor: DecodeMonitor
    ) -> list[tuple[Tensor, Tensor]]:
        longest = monitor.sampling.max_completion_length
        reason = refuse_llama_family(model, length=ids.shape[1] + longest)
        if reason is not None:
            self._log_once(model, f"transformers' generate: {reason}")
            return super()._draw(model, ids, mask, owners, keys, monitor)
        kernel = self._kernel(model, monitor)
        prompts, embedding = monitor.request.prompt_ids, None
        if monitor.request.inputs is not None:
            with torch.no_grad():
                prompts, embedding = read_prompts(model, prompts, monitor.request.inputs)
            ids = pad_left(prompts, monitor.request.pad_token_id)[0].to(ids)
        if kernel is not None:
            with torch.no_grad():
                return [self._draw_by_kernel(kernel, model, prompts, embedding, owners, keys, monitor)]
        from grpo_pl.rollout.native.llama_family import LlamaFamilyDecoder

        drawn = []
        with torch.no_grad():
            kind = accelerated.GraphDecoder if decodes_in_graphs(model) else LlamaFamilyDecoder
            decoder = kind(model, rows=self._rows_at_once(len(owners)), embedding=embedding)
            self._fit(decoder, model.device, len(owners), ids.shape[1] + longest)
            with torch.autocast(owners.device.type, enabled=False):
                for first, mine in self._chunks(owners):
                    begin, end = int(mine[0]), int(mine[-1]) + 1
                    logits = decoder.start(ids[begin:end], mask[begin:end], mine - begin, room=longest - 1)
                    drawn.append(self._decode(decoder, logits, keys[first : first + len(mine)], first, monitor))
        return drawn

    def _fit(self, decoder: LlamaFamilyDecoder, device: torch.device, rows: int, tokens: int) -> None:
        """Finds how many rows of so many tokens fit on a GPU beside the decoder's weights, where nobody has said it."""
        if self.max_batch_rows or self._found_rows or (free := free_gpu_memory(device)) is None:
            return
        fitting = int(_SHARE_OF_FREE_MEMORY * free / decoder.row_bytes(tokens))
        if fitting < rows:
            self._found_rows = max(1, fitting)
            log.warning(
                "There is memory for %d of %d completions of %d tokens at once: they are drawn in parts.",
                self._found_rows,
                rows,
                tokens,
            )

    def _kernel(self, model: PreTrainedModel, monitor: DecodeMonitor) -> DecodeKernel | None:
        """The decode kernel that draws this rollout; None if torch does."""
        name, reason = choose_decoder(model, monitor.sampling, stop_strings=bool(monitor.texts), recorded=self.decoder)
        if name == TORCH:
            if decodes_in_graphs(model):
                self._log_once(model, f"{OWN_PASS}, as graphs with kernels in Triton")
            else:
                self._log_once(model, OWN_PASS + (f"; the decode kernel {reason}" if reason else ""))
            return None
        self._log_once(model, f"the decode kernel ({name})")
        return accelerated.built_kernels()[name]

    def _draw_by_kernel(
        self,
        kernel: DecodeKernel,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        embedding: Tensor | None,
        owners: Tensor,
        keys: Tensor,
        monitor: DecodeMonitor,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (B, T) of all rows."""
        columns = max(map(len, prompts)) + monitor.sampling.max_completion_length
        tokens, logprobs, lengths = accelerated.draw_rollout(
            kernel,
            accelerated.PackedPolicy(kernel, model, columns=columns, embedding=embedding),
            prompts,
            owners=owners,
            keys=keys,
            limits=torch.tensor(monitor.request.row_limits),
            temperature=monitor.sampling.temperature,
            stop_tokens=sorted(monitor.eos),
            ask=monitor.follow,
        )
        width = int(lengths.max())
        return tokens[:, :width], logprobs[:, :width]

    def continuing(self, model: PreTrainedModel, *, rows: int) -> RolloutEngine:
        reason = refuse_llama_family(model, length=1)  # few episodes come to the end of the context
        if reason is not None:
            self._log_once(model, f"transformers' generate: {reason}")
            return super().continuing(model, rows=rows)
        turns = _TurnsEngine(rows)
        turns.decoder, turns._logged = self.decoder, self._logged
        return turns

    def _decode(
        self,
        decoder: LlamaFamilyDecoder,
        logits: Tensor,
        keys: Tensor,
        first_row: int,
        monitor: DecodeMonitor,
        order: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (rows, T) of one chunk of rows, T being its longest completion. A decoder that
        looks ahead draws a few tokens behind the end of a row, which `assemble` masks.

        Args:
            order: the chunk's row of each row of the decoder; by default the same.
        """
        longest = monitor.sampling.max_completion_length
        noise = PrecomputedNoise(keys, longest)
        completion_ids = keys.new_zeros(len(keys), longest)
        logprobs = torch.zeros(len(keys), longest, dtype=torch.float32, device=keys.device)  # whatever the default is
        rows = torch.tensor(order or range(len(keys)), device=keys.device)  # in the decoder's order
        alive, recent, seen = [True] * len(keys), list[Tensor](), 0  # which go on; what the monitor has not seen yet
        for position in range(longest):
            monitor.check_stop()
            drawn = noise.at(rows, position, logits.shape[-1])
            tokens, chosen = monitor.draw(logits, drawn, rows + first_row, position)
            completion_ids[rows, position], logprobs[rows, position] = tokens, chosen
            recent.append(tokens)
            if position + 1 == longest or len(recent) == decoder.lookahead:
                alive, used = _follow(recent, rows + first_row, alive, seen, monitor)
                recent, seen = [], seen + used
                if not any(alive):
                    break
                if not all(alive):
                    kept = decoder.keep(alive)
                    alive = [alive[i] for i in kept]
                    if len(kept) < len(rows):
                        places = torch.tensor(kept, device=rows.device)
                        rows, tokens = rows[places], tokens[places]
            logits = decoder.step(tokens)
        return completion_ids[:, :seen], logprobs[:, :seen]

    def describe(self) -> str:
        return "; ".join([type(self).__name__, *(line.rstrip(".") for line in sorted(self._logged))])

    def _log_once(self, model: PreTrainedModel, what: str) -> None:
        line = f"rollouts of {type(model).__name__} run on {what}."
        if line not in self._logged:
            self._logged.add(line)
            log.info(line)


def _follow(
    recent: Sequence[Tensor], rows: Tensor, alive: Sequence[bool], first: int, monitor: DecodeMonitor
) -> tuple[list[bool], int]:
    """Which of the rows go on after the tokens of several positions, each (rows,); and how many positions those that
    were alive have used.

    Args:
        rows: (rows,), their numbers in the request.
        alive: before these tokens.
        first: the first position.
    """
    alive = list(alive)
    drawn = torch.stack(list(recent)) if len(recent) > 1 else recent[0].unsqueeze(0)
    if len(recent) > 1:  # one wait for the GPU, and none for each position
        drawn, rows = drawn.cpu(), rows.cpu()
        monitor.read_ahead(drawn, rows, alive, first)
    for used, tokens in enumerate(drawn):
        live = [i for i, goes_on in enumerate(alive) if goes_on]
        if not live:
            return alive, used
        some = slice(None) if len(live) == len(alive) else live
        last = first + used + 1 == monitor.sampling.max_completion_length
        still = monitor.alive(tokens[some], rows[some], last=last, position=first + used, ahead=len(recent) > 1)
        for i, goes_on in zip(live, still, strict=True):
            alive[i] = goes_on
    return alive, len(recent)


class _TurnsEngine(NativeEngine):
    """Draws turns of episodes: keeps the keys and values of contexts for those that continue them in the order of the
    last time; any other is computed from its beginning. The weights are read once, at the first turn."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._most = rows
        self._slots: TurnSlots | KernelSlots | None = None
        self._held: list[list[int]] = []  # by row of the slots: the tokens whose keys and values are kept
        self._numbers: list[int] = []  # by row: the context that it continues

    def _draw(
        self, model: PreTrainedModel, ids: Tensor, mask: Tensor, owners: Tensor, keys: Tensor, monitor: DecodeMonitor
    ) -> list[tuple[Tensor, Tensor]]:
        from grpo_pl.rollout.native.slots import TurnSlots, continued

        longest = ids.shape[1] + monitor.sampling.max_completion_length
        if refuse_llama_family(model, length=longest) is not None:  # contexts have outgrown its attention window
            return super()._draw(model, ids, mask, owners, keys, monitor)
        contexts = [row[real].tolist() for row, real in zip(ids[owners].cpu(), mask[owners].cpu(), strict=True)]
        with torch.no_grad():
            if self._slots is None:
                kernel, rows = self._kernel(model, monitor), self._most
                if kernel is None:
                    self._slots = TurnSlots(model, rows=rows)
                else:
                    self._slots = accelerated.KernelSlots(kernel, model, rows=rows)
            slots = self._slots
            found, fresh = continued(self._held, self._numbers, contexts)
            wanted = [row in found for row in range(len(self._held))]
            order = slots.resume(wanted) if isinstance(slots, TurnSlots) else slots.keep(wanted)
            self._numbers = [found[row] for row in order]
            new = [contexts[number][slots.held(row) :] for row, number in enumerate(self._numbers)]
            if isinstance(slots, TurnSlots):
                with torch.autocast(owners.device.type, enabled=False):
                    tokens, logprobs = self._turn_by_torch(slots, new, fresh, keys, monitor)
            else:
                tokens, logprobs = self._turn_by_kernel(slots, new, fresh, keys, monitor)
            numbered = enumerate(self._numbers)
            self._held = [[*contexts[n], *tokens[n].tolist()][: slots.held(row)] for row, n in numbered]
        return [(tokens, logprobs)]

    def _turn_by_kernel(
        self,
        slots: KernelSlots,
        new: Sequence[Sequence[int]],
        fresh: Mapping[tuple[int, ...], list[int]],
        keys: Tensor,
        monitor: DecodeMonitor,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (B, T) of one turn, of what rows see ``new`` and of ``fresh`` contexts; behind a
        row's end there may be anything."""
        ends, temperature = frozenset(monitor.eos), monitor.sampling.temperature
        limits = zip(keys.tolist(), monitor.request.row_limits, strict=True)
        draws = [accelerated.Draw(key=key, temperature=temperature, limit=limit, ends=ends) for key, limit in limits]
        for row, tokens in enumerate(new):
            slots.prepare(row, draws[self._numbers[row]], feed=tokens)
        for context, numbers in fresh.items():
            slots.join(context, [draws[number] for number in numbers])
            self._numbers += numbers
        monitor.follow(0, 0)
        advanced = slots.advance(max(draw.limit for draw in draws), monitor.follow)
        monitor.follow(int(advanced.lengths.sum()), len(draws))
        rows, width = torch.tensor(self._numbers).argsort(), int(advanced.lengths.max())
        return advanced.tokens[rows, :width], advanced.logprobs[rows, :width]

    def _turn_by_torch(
        self,
        slots: TurnSlots,
        new: Sequence[Sequence[int]],
        fresh: Mapping[tuple[int, ...], list[int]],
        keys: Tensor,
        monitor: DecodeMonitor,
    ) -> tuple[Tensor, Tensor]:
        """The same by the own forward pass."""
        from grpo_pl.rollout.native.slots import alike

        logits, prompts = [slots.extend(new)] if new else [], list(fresh)
        for part in alike(prompts):
            logits.append(slots.join([prompts[i] for i in part], [len(fresh[prompts[i]]) for i in part]))
            self._numbers += [number for i in part for number in fresh[prompts[i]]]
        slots.numbers = self._numbers  # which change places with their rows
        return self._decode(slots, torch.cat(logits), keys, 0, monitor, list(self._numbers))
