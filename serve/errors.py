"""``ApiError``, and the one JSON format in which clients get every error, and small answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from grpo_pl.openai_format.answers import error_body

log = logging.getLogger(__name__)

_LONGEST = 500  # characters of a message, which may quote the client

to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode  # `json.dumps` makes one at each call


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``value`` as a JSON response in ASCII, so that texts with lone surrogates are valid JSON as well."""
    return Response(to_json(value), status_code=status, headers=headers, media_type="application/json")


class ApiError(HTTPException):
    """An error for the client, with the fields of OpenAI's errors."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.status, self.code, self.param = status, code, param and param[:_LONGEST]
        self.message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]} …"

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, code=self.code, param=self.param)

    def response(self) -> Response:
        return json_response(self.body(), status=self.status, headers=self.headers)


def bad_request(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """The error for a wrong value of the field ``param``, whose name is told first."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def check_model(asked: str | None, served: str) -> None:
    """Refuses a request for another model than the served one (404); None asks for the served one."""
    if asked not in (None, served):
        message = f"there is no model {asked!r} here, only {served!r}."
        raise ApiError(404, message, code="model_not_found", param="model")


def internal_error() -> ApiError:
    return ApiError(500, "internal error; the server's log has the details.", code="internal_error")


def worker_lost() -> ApiError:
    return ApiError(503, "a worker process of the server ended; the server is shutting down.", code="worker_lost")


def install_handlers(app: FastAPI) -> None:
    """Gives every error the common format, also the framework's own (unknown route, wrong method) and bugs."""

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if not isinstance(error, ApiError):
            code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
            message = f"{request.method} {request.url.path}: {error.detail}"
            error = ApiError(error.status_code, message, code=code, headers=error.headers)
        return error.response()

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        return internal_error().response()
