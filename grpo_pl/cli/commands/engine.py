"""``grpo-pl engine``: an engine that draws the rollouts of runs on other hosts."""

from __future__ import annotations

import logging
from pathlib import Path

from grpo_pl.cli.given import Given, settings


def engine(
    config: Given = None,
    host: str = "127.0.0.1",
    port: int = 8001,
    token_file: str | None = None,
    lease: float = 30.0,
    weights_folder: str | None = None,
    max_weights_gib: float = 64.0,
    max_request_mb: int = 32,
    ssl_certfile: str | None = None,
    ssl_keyfile: str | None = None,
) -> int:
    """Draws rollouts for runs whose engine is a RemoteEngine (configs/engine/vllm_server.yaml), one run at a time.

    It learns the policy from the run, and refuses what it cannot draw from. Runs until SIGTERM or Ctrl-C and exits
    with 0; the engine's process ends with it.

    Args:
        config: configuration that names the engine (model.engine), such as configs/engine/vllm.yaml; the native engine
            without one.
        host: Address or name to listen on: 127.0.0.1, or 0.0.0.0 and :: for other machines, which needs a token.
        port: Port to listen on; 0 takes a free one.
        token_file: File with the token that every request must bring; by default $GRPO_PL_ENGINE_TOKEN.
        lease: Seconds for which a run that is not heard from keeps the engine.
        weights_folder: Folder on a file system that is shared with runs, from which weights may be read.
        max_weights_gib: Largest push of weights in GiB.
        max_request_mb: Largest other request in MiB, tokenizers aside.
        ssl_certfile: Certificate chain in PEM form, to serve https.
        ssl_keyfile: Private key of the certificate, if its file does not hold it.
    """
    from functools import partial

    from grpo_pl.policy.quiet import quiet_libraries
    from grpo_pl.rollout.child.engine import ChildEngine
    from grpo_pl.rollout.native.child import NativeChildEngine
    from grpo_pl.rollout.remote.server import run_server
    from grpo_pl.rollout.remote.settings import ServerSettings, forget_secrets, token_of
    from serve.protocol import ACCEPTED_AT_ONCE, BoundedProtocol, Crowd, connection_limit

    given = settings(config, "model.engine")
    served = given.build("model.engine", ChildEngine) if "model.engine" in given else NativeChildEngine()
    checked = ServerSettings(
        host=host,
        port=port,
        token=token_of(token_file),
        lease_s=lease,
        weights_folder=None if weights_folder is None else Path(weights_folder),
        max_request_mb=max_request_mb,
        max_weights_gib=max_weights_gib,
        ssl_certfile=None if ssl_certfile is None else Path(ssl_certfile),
        ssl_keyfile=None if ssl_keyfile is None else Path(ssl_keyfile),
    )
    forget_secrets()
    quiet_libraries()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("grpo_pl").setLevel(logging.INFO)
    served.check()
    crowd = Crowd(connection_limit())
    bounded = partial(BoundedProtocol, crowd=crowd)
    run_server(served, checked, protocol=bounded, accepted_at_once=ACCEPTED_AT_ONCE)
    return 0
