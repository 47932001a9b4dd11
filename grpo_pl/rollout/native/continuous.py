"""``ContinuousBatch``: sequences join and leave a running batch between two tokens, each with its own sampling."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from grpo_pl.functional import accelerated
from grpo_pl.functional.sampling import Noise, draw_tokens, token_keys, truncate_logits
from grpo_pl.policy.inputs import reading_of
from grpo_pl.policy.loading import end_token_ids
from grpo_pl.rollout.native.decoder_choice import TORCH, refuse_kernel, resumed_decoder
from grpo_pl.rollout.native.slots import ForwardSlots, LlamaFamilySlots, alike, slot_decoder
from grpo_pl.rollout.native.weights import InputTable
from grpo_pl.rollout.processors import LogitOptions, LogitProcessor, TokenMask
from grpo_pl.rollout.texts import TextStream
from grpo_pl.types import FinishReason, PromptInputs, SamplingParams, StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_pl.extras.kernels.kernel_slots import Draw, KernelSlots
    from grpo_pl.policy.trained import ServedModel

log = logging.getLogger(__name__)
_BLOCK = 64  # positions whose keys are computed at once
_READ = 64  # tokens of a prompt that the kernel reads at most for each token that it draws of another sequence


class Drawn(NamedTuple):
    """The tokens that one sequence got in a step, one at least."""

    sequence: int
    tokens: list[int]
    logprobs: list[float]
    """Under the distributions they were drawn from, as in ``Rollout.sampling_logprobs``."""
    tops: list[tuple[tuple[int, float], ...]]
    """The most likely (token, log-probability) pairs at each place; empty if not asked for."""
    finish: FinishReason | None
    """The reason if the sequence ends with the last token; None while it goes on."""


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Options of all sequences of one request."""

    sampling: SamplingParams
    ignore_eos: bool = False
    """Go on to the full length whatever is drawn: for measuring speed."""
    top_logprobs: int = 0
    """Report this many of the most likely tokens at every position."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end a sequence, whatever ``ignore_eos`` says."""
    logits: LogitOptions | None = None
    """Changes to the logits before a token is drawn; None is none, and costs nothing."""


class ScoredToken(NamedTuple):
    """One token of a prompt under the model: log softmax(logits), no temperature."""

    token: int
    logprob: float | None
    """None for the first token, which nothing predicts."""
    top: tuple[tuple[int, float], ...]
    """The most likely (token, log-probability) pairs at its place."""


@dataclass
class _Row:
    sequence: int
    options: SequenceOptions
    key: int
    ends: frozenset[int]  # tokens that end it
    processor: LogitProcessor | None
    text: TextStream | None = None  # where a stop string may end it
    drawn: int = 0
    token_keys: list[int] = field(default_factory=list)  # one per position, of the block that it is in

    @cached_property
    def kind(self) -> tuple[float, int, float]:
        """Sampling parameters; rows of equal ones are drawn in one call."""
        sampling = self.options.sampling
        return sampling.temperature, sampling.top_k, sampling.top_p


@dataclass
class _Joining:
    prompt: Sequence[int]
    drawn: list[int]  # by each of the rows
    rows: list[_Row]
    inputs: PromptInputs | None  # where the prompt does not name rows of the table in their places


class ContinuousBatch:
    """Decodes a changing set of sequences, some tokens each per `step`; for one thread.

    Sequences draw what an engine draws for the same key, prompt and weights, up to near-ties of floating point,
    whoever else is in the batch. The weights are read once, here.

    With a decode kernel, `needs_logits` says which sequences it draws and which get their logits from it.

    Args:
        model: the policy.
        decoder: a decode kernel that can compute ``model``, by its name, or ``torch``.
        eos_token_ids: tokens that end a sequence, unless its options ignore them.
        max_rows: most sequences at once.
        stops: strings that end one likewise, those that the policy was trained with.
        numbers: where the numbers of sequences come from; batches that share it never give two the same.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        max_rows: int,
        stops: StopStrings | None = None,
        numbers: Iterator[int] | None = None,
        decoder: str = TORCH,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}.")
        self.max_rows = max_rows
        self._eos, self._stops = frozenset(eos_token_ids), stops
        self._device, self._vocabulary = model.device, model.get_input_embeddings().num_embeddings
        kind = self._device.type
        self._computing = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        self._table = None if reading_of(model) is None else InputTable(model)
        self._decoder: KernelSlots | LlamaFamilySlots | ForwardSlots
        if decoder == TORCH:
            self._decoder = slot_decoder(model, rows=max_rows)
        else:
            with torch.no_grad():
                self._decoder = accelerated.KernelSlots(accelerated.built_kernels()[decoder], model, rows=max_rows)
        self._rows: list[_Row] = []  # in the decoder's order
        self._tokens: list[int] = []  # the last one of each row, which the decoder has not seen yet
        self._joining: list[_Joining] = []
        self._numbers = count() if numbers is None else numbers

    def __len__(self) -> int:
        """Sequences that are decoding or about to."""
        return len(self._rows) + sum(len(join.rows) for join in self._joining)

    def add(
        self,
        prompt_ids: Sequence[int],
        keys: Sequence[int],
        options: SequenceOptions,
        masks: Sequence[TokenMask] | None = None,
        *,
        drawn: Sequence[int] = (),
        inputs: PromptInputs | None = None,
    ) -> list[int]:
        """Lets one sequence per key continue the prompt from the next step on, and returns their numbers.

        Args:
            prompt_ids: token ids; computed once for all keys.
            keys: sampling keys, from ``functional.sampling.row_key``.
            masks: one per key, where a grammar says what may come next.
            drawn: tokens that the sequences have drawn already, in an earlier stay in the batch; they go on behind
                them, as if they had never left.
            inputs: what the policy reads of the prompt beside its tokens; it is computed here.

        Raises:
            ValueError: an empty prompt, a token that the policy does not have, inputs of a policy of text, more
                sequences than the batch has room for, or ``drawn`` that end a sequence. In a step any of them would
                fail the whole batch.
        """
        if inputs is not None and self._table is None:
            raise ValueError("a prompt has images, and the policy reads text.")
        if not prompt_ids:
            raise ValueError("a prompt has no tokens: the policy needs at least one to start from.")
        if (wrong := next((i for i in (*prompt_ids, *drawn) if not 0 <= i < self._vocabulary), None)) is not None:
            raise ValueError(f"a prompt has the token {wrong}, and the policy's vocabulary {self._vocabulary} tokens.")
        if len(self) + len(keys) > self.max_rows:
            raise ValueError(f"{len(keys)} sequences do not fit: {len(self)} of {self.max_rows} places are taken.")
        ends = frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else self._eos)

        def processor(i: int) -> LogitProcessor | None:
            if masks is None and options.logits is None:
                return None
            mask = None if masks is None else masks[i]
            changes, temperature = options.logits or LogitOptions(), options.sampling.temperature
            return LogitProcessor(changes, prompt_ids, ends=ends, temperature=temperature, mask=mask)

        rows = [_Row(next(self._numbers), options, key, ends, processor(i)) for i, key in enumerate(keys)]
        if (stops := self._stops) is not None and not options.ignore_eos:
            least = 0 if options.logits is None else options.logits.min_tokens
            for row in rows:
                row.text = TextStream(stops.tokenizer, stops.texts, prefix=stops.prefix, min_tokens=least)
        for row in rows:
            if any([_advance(row, token) for token in drawn]):
                raise ValueError(f"these {len(drawn)} tokens end a completion: nothing is left to draw.")
        if inputs is not None and not isinstance(self._decoder, ForwardSlots):
            prompt_ids, inputs = self._read_inputs(prompt_ids, inputs), None
        self._joining.append(_Joining(prompt_ids, list(drawn), rows, inputs))
        return [row.sequence for row in rows]

    @torch.no_grad()
    def _read_inputs(self, prompt_ids: Sequence[int], inputs: PromptInputs) -> list[int]:
        """The prompt in which each place of its inputs is a row of the table that the decoder reads."""
        slots = self._decoder
        assert self._table is not None and not isinstance(slots, ForwardSlots)
        unread = bool(self._joining) or (not isinstance(slots, LlamaFamilySlots) and slots.reading)
        with self._computing:
            numbered = self._table.numbered(prompt_ids, inputs, unread=unread)
        slots.read_from(self._table.rows)
        return numbered

    def remove(self, sequences: Sequence[int]) -> None:
        """Takes sequences out; those that have ended already are passed over."""
        gone = set(sequences)
        for join in self._joining:
            join.rows = [row for row in join.rows if row.sequence not in gone]
        self._joining = [join for join in self._joining if join.rows]
        self._keep([row.sequence not in gone for row in self._rows])

    @torch.no_grad()
    def prompt_logprobs(self, prompt_ids: Sequence[int], *, top: int = 0) -> list[ScoredToken]:
        """Log-probabilities of a prompt's own tokens; nothing is drawn and no row is taken."""
        scored = [ScoredToken(prompt_ids[0], None, ())]
        for logits in self._decoder.prompt_logits(prompt_ids):
            logprobs = logits.float().log_softmax(dim=-1)  # (some positions, V)
            following = prompt_ids[len(scored) : len(scored) + len(logprobs)]  # the last position has none
            best = logprobs.topk(min(top, logprobs.shape[-1]))
            tokens = torch.tensor(following, dtype=torch.int64, device=logprobs.device).unsqueeze(1)
            own = logprobs[: len(following)].gather(1, tokens).squeeze(1).tolist()
            tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            scored += [
                ScoredToken(token, logprob, tuple(zip(*pairs, strict=True)))
                for token, logprob, pairs in zip(following, own, tops, strict=False)
            ]
        return scored

    @torch.no_grad()
    def step(self, most: int = 1) -> list[Drawn]:
        """Draws the next token of every sequence, or up to ``most`` where the kernel draws all of them; those that end
        are gone afterwards. A long prompt beside others is read in parts by the kernel, and its sequences get no token
        before the last one."""
        slots = self._decoder
        if isinstance(slots, LlamaFamilySlots | ForwardSlots):
            drawn = self._by_torch(slots)
        else:
            drawn = self._by_kernel(slots, most)
        self._keep([d.finish is None for d in drawn])
        return [d for d in drawn if d.tokens]

    def _by_torch(self, slots: LlamaFamilySlots | ForwardSlots) -> list[Drawn]:
        logits = []
        if self._rows:
            logits.append(slots.step(torch.tensor(self._tokens, device=self._device)))
        contexts = [[*join.prompt, *join.drawn] for join in self._joining]
        for part in alike(contexts):
            group = [self._joining[i] for i in part]
            prompts, copies = [contexts[i] for i in part], [len(join.rows) for join in group]
            if isinstance(slots, ForwardSlots):
                logits.append(slots.join(prompts, copies, [join.inputs for join in group]))
            else:
                logits.append(slots.join(prompts, copies))
            self._rows += [row for join in group for row in join.rows]
        self._joining.clear()
        if not self._rows:
            return []
        drawn = self._draw(self._rows, logits[0] if len(logits) == 1 else torch.cat(logits))
        self._tokens = [d.tokens[-1] for d in drawn]
        return drawn

    def _by_kernel(self, slots: KernelSlots, most: int) -> list[Drawn]:
        for join in self._joining:
            slots.join(join.prompt, [_draw_of(row, join.drawn) for row in join.rows])
            self._rows += join.rows
        self._joining.clear()
        if not self._rows:
            return []
        by_torch = any(needs_logits(row.options, row.processor) for row in self._rows)
        steps = 1 if by_torch else most
        advanced = slots.advance(steps, read=_READ * steps)
        lengths = advanced.lengths.tolist()
        drawn = list[Drawn]()
        for row, tokens, logprobs, length in zip(
            self._rows, advanced.tokens.tolist(), advanced.logprobs.tolist(), lengths, strict=True
        ):
            finish, taken = None, 0
            while taken < length and finish is None:  # a stop string may end it, which the kernel does not know
                finish, taken = _advance(row, tokens[taken]), taken + 1
            drawn.append(Drawn(row.sequence, tokens[:taken], logprobs[:taken], [], finish))
        if advanced.undrawn:
            rest = self._draw([self._rows[i] for i in advanced.undrawn], advanced.logits)
            for number, own in zip(advanced.undrawn, rest, strict=True):
                drawn[number] = own
                slots.feed(number, own.tokens[0])
        return drawn

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> list[Drawn]:
        """The next token of each row, from its logits (rows, V)."""
        noise = Noise(_token_keys(rows).to(logits.device))
        kinds: dict[tuple[float, int, float], list[int]] = {}
        for i, row in enumerate(rows):
            kinds.setdefault(row.kind, []).append(i)
        if processed := [(i, row.processor) for i, row in enumerate(rows) if row.processor is not None]:
            logits = logits.float().clone()
            for i, processor in processed:
                logits[i] = processor(logits[i])
        if len(kinds) == 1:
            tokens, logprobs = _draw_kind(rows[0].kind, logits, noise)
        else:
            tokens, logprobs = (logits.new_empty(len(logits), dtype=dtype) for dtype in (torch.int64, torch.float32))
            for kind, members in kinds.items():
                index = torch.tensor(members, device=logits.device)
                tokens[index], logprobs[index] = _draw_kind(kind, logits[index], noise[index])
        drawn = []
        for i, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            tops = [_most_likely(logits[i], row.options)] if row.options.top_logprobs else []
            drawn.append(Drawn(row.sequence, [token], [logprob], tops, _advance(row, token)))
        return drawn

    def _keep(self, alive: Sequence[bool]) -> None:
        if not all(alive):
            order = self._decoder.keep(alive)
            self._rows = [self._rows[i] for i in order]
            self._tokens = [self._tokens[i] for i in order] if self._tokens else []


def needs_logits(options: SequenceOptions, processor: LogitProcessor | None) -> bool:
    """True for the sequences that the decode kernel leaves to torch, which draws from the kernel's logits: those with
    top_k or top_p, with likeliest tokens to report, and with changes to the logits or a grammar."""
    sampling = options.sampling
    truncates = sampling.temperature != 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0)
    return truncates or options.top_logprobs > 0 or processor is not None


def _draw_of(row: _Row, drawn: Sequence[int]) -> Draw:
    return accelerated.Draw(
        key=row.key,
        temperature=row.options.sampling.temperature,
        limit=row.options.sampling.max_completion_length,
        ends=row.ends,
        drawn=drawn,
        by_torch=needs_logits(row.options, row.processor),
    )


def _token_keys(rows: Sequence[_Row]) -> Tensor:
    """(rows,) int64: each row's key for its next position. They are computed for many positions at once."""
    if short := [row for row in rows if row.drawn % _BLOCK == 0 or not row.token_keys]:
        blocks = [(row.key, row.drawn - row.drawn % _BLOCK) for row in short]
        keys, drawn = torch.tensor(blocks, dtype=torch.int64).unsqueeze(-1).unbind(1)
        for row, following in zip(short, token_keys(keys, drawn + torch.arange(_BLOCK)).tolist(), strict=True):
            row.token_keys = following
    return torch.tensor([row.token_keys[row.drawn % _BLOCK] for row in rows])


def _draw_kind(kind: tuple[float, int, float], logits: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    temperature, top_k, top_p = kind
    return draw_tokens(logits, noise, temperature=temperature, top_k=top_k, top_p=top_p)


def _advance(row: _Row, token: int) -> FinishReason | None:
    """Adds a token to a row; returns the reason if the row ends with it."""
    row.drawn += 1
    if row.processor is not None:
        row.processor.accept(token)
    if row.text is not None:
        row.text.push([token])
    if token in row.ends or (row.text is not None and row.text.stopped):
        return "stop"
    return "length" if row.drawn == row.options.sampling.max_completion_length else None


def _most_likely(logits: Tensor, options: SequenceOptions) -> tuple[tuple[int, float], ...]:
    """The most likely tokens of one row (V,) under the distribution that it is drawn from."""
    sampling, logits = options.sampling, logits.float().unsqueeze(0)
    if sampling.temperature:
        logits = truncate_logits(logits / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    best = logits.log_softmax(dim=-1)[0].topk(min(options.top_logprobs, logits.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple((token, logprob) for token, logprob in pairs if logprob > float("-inf"))


def batch_of(
    trained: ServedModel, policy: PreTrainedModel, max_rows: int, numbers: Iterator[int] | None = None
) -> ContinuousBatch:
    """A batch of a trained policy whose completions end as in training, on the decoder of its training."""
    ends = end_token_ids(policy, trained.tokenizer, trained.sampling)
    stops = StopStrings.of(trained.sampling, trained.tokenizer, trained.template.prefill)
    decoder, line = resumed_decoder(trained.decoder or TORCH, policy)  # before there was a kernel, torch drew
    if line is not None:
        log.warning(line)
    with trained.computing(policy):  # the own forward pass reads its type where it is made, and keeps it
        if decoder != TORCH and (reason := refuse_kernel(policy, length=trained.context or 1 << 30)) is not None:
            log.info("the running batch is drawn by torch: the decode kernel %s", reason)
            decoder = TORCH
        return ContinuousBatch(
            policy, eos_token_ids=ends, max_rows=max_rows, stops=stops, numbers=numbers, decoder=decoder
        )
