"""``grpo-pl serve``: a trained policy over HTTP, with the rewards it was trained on."""

from __future__ import annotations

from serve.settings import ServeSettings


def serve(settings: ServeSettings) -> int:
    """Serves a trained policy: OpenAI chat and completions, its rewards, and evaluation.

    Runs until SIGTERM or Ctrl-C, finishes what is being drawn, refuses what waits and exits with 0; exits with 1 when
    something was refused that way or a worker was lost.
    """
    from serve.app import run_server

    run_server(settings)
    return 0
