"""A trained policy and its rewards over HTTP, by LitServe: chat, completions, scores and evaluation.

- ``server``: ``PolicyServer``, the LitServer of ``grpo-pl serve``; ``settings`` (options), ``middleware`` (what is
  checked before a route), ``metrics``.
- LitAPIs: ``policy`` (``PolicyAPI``, decoding) and ``rewards`` (``RewardAPI``), over ``worker`` (``WorkerAPI``,
  ``WorkerLoop``). ``follow`` loads newer weights.
- LitSpecs, in the HTTP process: ``calls`` (``WorkerSpec``), ``completions`` (``PolicySpec``), ``rewards``;
  ``evaluation`` asks both. ``messages`` has what they send to the workers.
- Requests: ``bodies``, ``schemas`` (fields), ``conversations`` and ``prompts`` (tokens). Answers: ``answers``,
  ``streaming``, ``scoring``, ``errors``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time they are loaded when they are first asked for
    from serve.policy import PolicyAPI as PolicyAPI
    from serve.rewards import RewardAPI as RewardAPI
    from serve.server import PolicyServer as PolicyServer

__all__ = ["PolicyAPI", "PolicyServer", "RewardAPI"]
_MODULES = {"PolicyAPI": "policy", "PolicyServer": "server", "RewardAPI": "rewards"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"serve.{_MODULES[name]}"), name)
