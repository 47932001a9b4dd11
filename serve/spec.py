"""``RouteSpec``: how routes of the front process are attached to a worker; both sides import it, so it is light."""

from __future__ import annotations

from typing import Any

from litserve.specs.base import LitSpec


class RouteSpec(LitSpec):
    """Routes of the front process that are fed by one worker; the worker itself gets none of them."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.api_path = path

    @property
    def stream(self) -> bool:
        return True  # every answer goes through a response queue, whatever its length

    def setup(self, server: Any) -> None:
        """The routes know the server already; nothing of it may travel to the worker."""

    def __getstate__(self) -> dict[str, Any]:
        return {"api_path": self.api_path}
