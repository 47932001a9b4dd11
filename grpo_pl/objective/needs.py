"""``Needs``: what a part of the objective asks the pipeline to compute."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the pipeline has to compute for a part of the objective; ``a | b`` is what both ask for."""

    old_logprobs: bool = False
    """Log-probabilities of the policy at collection."""
    old_entropy: bool = False
    """Entropies of the policy's next-token distributions at collection, as ``entropy`` in `Term.prepare`."""
    ref_logprobs: bool = False
    """Log-probabilities of the reference, which is loaded for them."""
    sampling_logprobs: bool = False
    """Log-probabilities as the engine drew the tokens."""
    entropy: bool = False
    """Entropies now, with a gradient."""

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)})
