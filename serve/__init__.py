"""The HTTP server of a trained policy: chat, completions, reward scores and evaluation, in LitServe's worker processes.

- Start and end: ``settings`` (options), ``app`` (routes), ``server`` (HTTP thread and workers), ``litserve_adapter``.
- Before a route: ``protocol`` (connections, headers, time), ``middleware`` (length, key, body, sender, login),
  ``large_json`` (bodies and large answers), ``schemas`` (fields), ``errors``.
- Routes: ``completions`` (chat, completions), ``responses``, ``prompts`` (tokens), ``scoring``, ``evaluation``,
  ``weights``, ``pages``, ``metrics``.
- Prompts: ``conversations``, ``prompts``. Answers: ``answers``, ``streaming``.
- To the workers and back: ``worker_client``, ``admission``, ``generator``; ``worker_channel`` has the messages.
- In the workers: ``generate_worker``, ``versions``, ``grammars`` (and their check before); ``score_worker``.
- ``parts``: the same for a ``litserve.LitServer`` of your own, as ``PolicyAPI`` and ``RewardAPI``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time they are loaded when they are first asked for
    from serve.parts import PolicyAPI as PolicyAPI
    from serve.parts import RewardAPI as RewardAPI

__all__ = ["PolicyAPI", "RewardAPI"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'serve' has no attribute {name!r}")
    from serve import parts

    return getattr(parts, name)
