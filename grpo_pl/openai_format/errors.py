"""Errors in OpenAI's format, from what pydantic found in a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_WITHOUT_CLASSES = {
    **dict.fromkeys(("model_type", "dict_type"), "Input should be a JSON object"),
    "is_instance_of": "Input should be a valid string",  # of `str`, the only class that is asked for
}
"""pydantic's error types whose messages name classes or types of Python."""
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    **dict.fromkeys((501, 505), "invalid_request_error"),
}


class FieldFault(NamedTuple):
    """What is wrong with a field of a request."""

    message: str
    param: str | None
    code: str


def field_fault(fault: Mapping[str, Any]) -> FieldFault:
    """One of pydantic's ``errors()``, with the path of the field as ``param``."""
    path = [part for part in map(str, fault["loc"]) if part.isidentifier() or part.isdigit()]  # no names of union types
    if named := fault.get("ctx", {}).get("field"):  # a rule for the whole object may still be about one field
        path.append(named)
    param = ".".join(path) or None
    codes = {"missing": "missing_field"} | {kind: kind for kind in ("unknown_parameter", "unsupported_parameter")}
    code = codes.get(fault["type"], "invalid_value")
    message = _WITHOUT_CLASSES.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
    return FieldFault(f"{param}: {message}" if param else message, param, code)


def error_body(status: int, message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of an answer with a status of 400 or more."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
