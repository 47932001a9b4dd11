"""``LogitProcessor``: changes the logits of one sequence before a token is drawn: penalties, bans, bias, a mask."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TokenMask(Protocol):
    """The tokens that may come next, by a grammar that follows the sequence."""

    def allowed(self, vocabulary: int) -> Tensor:
        """(V,) bool on the CPU."""

    def accept(self, token: int) -> None:
        """Takes the token that was drawn."""


@dataclass(frozen=True, kw_only=True)
class LogitOptions:
    """Changes to the logits, with vLLM's names and meaning; the defaults change nothing."""

    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies others, of tokens in the prompt or the completion so far
    (Keskar et al. 2019, section 4.1)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the completion holds already."""
    frequency_penalty: float = 0.0
    """Subtracted once for every time that the completion holds the token already."""
    min_p: float = 0.0
    """Excludes tokens less likely than this times the most likely one, at the sampling temperature; 0 is off."""
    min_tokens: int = 0
    """No token that ends the completion may be drawn before this many others."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, number added to its logit)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the completion may not hold: the last token is excluded where the others stand."""


class LogitProcessor:
    """The state of one sequence. Order as in vLLM: mask, bad words, min_tokens, bias, penalties, min_p."""

    def __init__(
        self,
        options: LogitOptions,
        prompt_ids: Sequence[int],
        *,
        ends: Collection[int],
        temperature: float,
        mask: TokenMask | None = None,
    ) -> None:
        self._options, self._temperature, self._mask = options, temperature, mask
        self._prompt, self._ends = prompt_ids, list(ends)
        self._drawn: list[int] = []
        self._tally: tuple[Tensor, Tensor] | None = None  # (V,) how often drawn; (V,) bool: in the prompt or drawn

    def __call__(self, logits: Tensor) -> Tensor:
        """New logits (V,), float32; what may not be drawn is -inf, which may be everything."""
        options, logits = self._options, logits.float().clone()
        self._exclude(logits)
        for token, bias in options.logit_bias:
            logits[token] += bias
        counts, seen = self._tally or self._start_counting(logits)
        if options.repetition_penalty != 1.0:
            scale = torch.where(logits > 0, 1.0 / options.repetition_penalty, options.repetition_penalty)
            logits = torch.where(seen, logits * scale, logits)
        if options.frequency_penalty:
            logits -= options.frequency_penalty * counts
        if options.presence_penalty:
            logits -= options.presence_penalty * (counts > 0)
        if options.min_p and self._temperature:
            logits[logits < logits.max() + self._temperature * math.log(options.min_p)] = -torch.inf
        return logits

    def accept(self, token: int) -> None:
        """Takes the token that was drawn."""
        self._drawn.append(token)
        if self._tally is not None:
            counts, seen = self._tally
            counts[token] += 1.0
            seen[token] = True
        if self._mask is not None:
            self._mask.accept(token)

    def _exclude(self, logits: Tensor) -> None:
        if self._mask is not None:
            logits[~self._mask.allowed(len(logits)).to(logits.device)] = -torch.inf
        for *before, last in self._options.bad_words:
            if not before or self._drawn[-len(before) :] == before:
                logits[last] = -torch.inf
        if len(self._drawn) < self._options.min_tokens:
            logits[self._ends] = -torch.inf

    def _start_counting(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[torch.as_tensor([*self._prompt, *self._drawn], device=logits.device)] = True
        counts = torch.zeros_like(logits)
        for token in self._drawn:  # before the sequence came back to the batch
            counts[token] += 1.0
        self._tally = counts, seen
        return self._tally
