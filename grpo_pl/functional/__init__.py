"""Pure functions on tensors and numbers: no state, no logging, no I/O.

Those in ``__all__`` can be imported from here, and are loaded when they are first asked for: rewards use some modules
of this package, and no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time the table below counts
    from grpo_pl.functional.advantages import combine_rewards as combine_rewards
    from grpo_pl.functional.advantages import normalize_each_reward as normalize_each_reward
    from grpo_pl.functional.advantages import overlong_penalty as overlong_penalty
    from grpo_pl.functional.advantages import process_advantages as process_advantages
    from grpo_pl.functional.advantages import rescale as rescale
    from grpo_pl.functional.advantages import subtract_baseline as subtract_baseline
    from grpo_pl.functional.estimates import bootstrap_interval as bootstrap_interval
    from grpo_pl.functional.estimates import majority_at_k as majority_at_k
    from grpo_pl.functional.estimates import paired_difference as paired_difference
    from grpo_pl.functional.estimates import pass_at_k as pass_at_k
    from grpo_pl.functional.estimates import wilson_interval as wilson_interval
    from grpo_pl.functional.kl import k1 as k1
    from grpo_pl.functional.kl import k2 as k2
    from grpo_pl.functional.kl import k3 as k3
    from grpo_pl.functional.logprobs import token_entropy as token_entropy
    from grpo_pl.functional.logprobs import token_logprobs as token_logprobs
    from grpo_pl.functional.losses import cispo_surrogate as cispo_surrogate
    from grpo_pl.functional.losses import clip_surrogate as clip_surrogate
    from grpo_pl.functional.losses import importance_ratio as importance_ratio
    from grpo_pl.functional.losses import mismatch_weights as mismatch_weights
    from grpo_pl.functional.losses import sapo_surrogate as sapo_surrogate
    from grpo_pl.functional.losses import surrogate as surrogate
    from grpo_pl.functional.losses import token_weights as token_weights
    from grpo_pl.functional.losses import vespo_surrogate as vespo_surrogate
    from grpo_pl.functional.sampling import draw_tokens as draw_tokens
    from grpo_pl.functional.sampling import sample_key as sample_key
    from grpo_pl.functional.sampling import token_keys as token_keys

_DEFINED_IN = {
    "advantages": (
        "combine_rewards normalize_each_reward overlong_penalty process_advantages rescale subtract_baseline"
    ),
    "estimates": "bootstrap_interval majority_at_k paired_difference pass_at_k wilson_interval",
    "kl": "k1 k2 k3",
    "logprobs": "token_entropy token_logprobs",
    "losses": (
        "cispo_surrogate clip_surrogate importance_ratio mismatch_weights sapo_surrogate surrogate token_weights "
        "vespo_surrogate"
    ),
    "sampling": "draw_tokens sample_key token_keys",
}
"""Module -> its public functions."""
_MODULE_OF = {name: module for module, names in _DEFINED_IN.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'grpo_pl.functional' has no attribute {name!r}")
    value = getattr(import_module(f"grpo_pl.functional.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
