"""``/openapi.json`` and ``/docs``: what the routes take, written from the schemas that check it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve.errors import json_response
from serve.responses import ResponsesRequest
from serve.schemas import ChatRequest, CompletionRequest, EvaluateRequest
from serve.tokens import DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/evaluate": EvaluateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_SCORE = {
    "type": "object",
    "description": "`POST /v1/score`: completions to judge; further fields of an item are columns for the rewards.",
    "required": ["items"],
    "properties": {
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["completion", "answer"],
                "properties": {"completion": {"type": "string"}, "answer": {"type": "string"}},
            },
        },
        "group": {"type": "boolean", "default": False, "description": "Take the items as samples of one problem."},
    },
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%;margin:.5rem 0 2rem}td{border-top:1px solid #8886;padding:.3rem .6rem;"
    "vertical-align:top;overflow-wrap:anywhere}code{font-size:.9em}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


class Documentation:
    """Both forms of the description of ``routes``: "METHOD /path" and a line about each."""

    def __init__(self, routes: Mapping[str, str]) -> None:
        self._routes = routes

    async def openapi(self, request: Request) -> Response:
        return json_response(describe(tuple(self._routes.items())))

    async def docs(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        text = _page(describe(tuple(self._routes.items())))
        return Response(text, media_type="text/html; charset=utf-8", headers=headers)


@cache
def describe(routes: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The routes as an OpenAPI 3.1 document."""
    wanted = [(body, "validation") for body in _BODIES.values()]
    references, shared = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = {**shared.get("$defs", {}), "ScoreRequest": _SCORE, "Error": _ERROR}
    refused = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    paths: dict[str, Any] = {}
    for route, summary in routes:
        method, _, path = route.partition(" ")
        answers = {"200": {"description": "OK"}, "4XX": {"description": "Refused", **refused}}
        operation: dict[str, Any] = {"summary": summary, "responses": answers}
        if method == "POST":
            kind = _BODIES.get(path)
            schema = references[kind, "validation"] if kind else {"$ref": "#/components/schemas/ScoreRequest"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if "{" in path:
            name = path.partition("{")[2].partition("}")[0]
            operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "grpo_pl", "version": "1", "description": "A trained policy with its rewards."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _page(document: Mapping[str, Any]) -> str:
    parts = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                parts.append(_table(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]))
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>grpo_pl: API</title><style>{_STYLE}</style>"
    return f"{head}<h1>API</h1><p>As OpenAPI: <a href=/openapi.json>/openapi.json</a></p>{''.join(parts)}"


def _table(schema: Mapping[str, Any]) -> str:
    rows = []
    for name, entry in schema["properties"].items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        cells = (f"<code>{html.escape(name)}</code>{needed}", _kind(entry), html.escape(entry.get("description", "")))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _kind(entry: Mapping[str, Any]) -> str:
    kinds = [entry, *entry.get("anyOf", ())]
    names = [str(k.get("type") or k.get("$ref", "").rpartition("/")[2]) for k in kinds if "type" in k or "$ref" in k]
    shown = " or ".join(name for name in names if name != "null")
    default = entry.get("default")
    return html.escape(shown + (f", default {default!r}" if default is not None else ""))
