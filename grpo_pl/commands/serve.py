"""``grpo-pl serve``: a trained policy over HTTP, with the rewards it was trained on."""

from __future__ import annotations

import os
from pathlib import Path

API_KEY = "GRPO_PL_API_KEY"
"""Environment variable with the server's key."""


def serve(
    model: str | None = None,
    port: int = 8000,
    host: str = "127.0.0.1",
    api_key: str | None = None,
    max_batch_size: int = 64,
    max_queue: int = 128,
    deadline: float = 120.0,
    device: str = "auto",
    max_body_mb: int = 8,
) -> int:
    """Serves a trained policy: OpenAI chat and completions, its rewards, and evaluation.

    Runs until SIGTERM or Ctrl-C, finishes what is in flight and exits with 0; exits with 1 when a worker is lost.

    Args:
        model: Exported folder, run folder, or checkpoint of a run.
        port: Port to listen on.
        host: Address to listen on: 127.0.0.1, or 0.0.0.0 and :: for other machines to reach it.
        api_key: Bearer token that every route but /health asks for; by default $GRPO_PL_API_KEY, and none without it.
        max_batch_size: Completions decoded at once.
        max_queue: Requests that may wait for a place; further ones get 429.
        deadline: Seconds after which an unfinished request gets 504.
        device: cpu, cuda, cuda:1 …; auto takes a GPU where there is one.
        max_body_mb: Largest request body in MiB.
    """
    if model is None:
        raise ValueError("--model is missing: give an exported folder, a run folder or a checkpoint.")
    from serve.app import run_server
    from serve.settings import ServeSettings

    settings = ServeSettings(
        model=Path(model),
        port=port,
        host=host,  # type: ignore[arg-type]  # checked by the settings
        api_key=api_key if api_key is not None else os.environ.get(API_KEY) or None,
        max_batch_size=max_batch_size,
        max_queue=max_queue,
        deadline_s=deadline,
        device=device,
        max_body_mb=max_body_mb,
    )
    return run_server(settings)
