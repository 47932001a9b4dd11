"""The web pages: ``/``, one file of HTML, CSS and JavaScript; ``/docs`` and ``/openapi.json``, from the schemas."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from grpo_pl.report.page import whole_page
from serve.errors import json_response

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def _text(kind: str) -> str:
    return Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8")


_HTML = whole_page(_text("html"), title="grpo_pl", style=_text("css"), script=_text("js"))


async def page() -> Response:
    """The page, with a content security policy that allows nothing from other sources."""
    headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    return Response(_HTML, media_type="text/html; charset=utf-8", headers=headers)


_DOCS_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%;margin:.5rem 0 2rem}td{border-top:1px solid #8886;padding:.3rem .6rem;"
    "vertical-align:top;overflow-wrap:anywhere}code{font-size:.9em}"
)
_DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


async def openapi(request: Request) -> Response:
    """The routes as an OpenAPI document."""
    app: FastAPI = request.app
    return json_response(app.openapi())


async def docs(request: Request) -> Response:
    """The same description as an HTML page."""
    app: FastAPI = request.app
    headers = {"Content-Security-Policy": _DOCS_POLICY}
    return Response(_described(app.openapi()), media_type="text/html; charset=utf-8", headers=headers)


def _described(document: Mapping[str, Any]) -> str:
    parts = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                parts.append(_table(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]))
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>grpo_pl: API</title><style>{_DOCS_STYLE}</style>"
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
