"""``grpo-pl serve``: a trained policy over HTTP, with the rewards it was trained on."""

from __future__ import annotations

from serve.settings import ServeSettings


def serve(settings: ServeSettings) -> int:
    """Serves a trained policy: OpenAI chat and completions, its rewards, and evaluation.

    Runs until SIGTERM or Ctrl-C, finishes the requests that it has (for up to 30 seconds) and exits with 0; exits with
    1 when a worker was lost.
    """
    from grpo_pl.policy.quiet import quiet_libraries
    from serve.server import run_server

    quiet_libraries()
    run_server(settings)
    return 0
