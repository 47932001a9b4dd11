"""The page to try a policy out: one file of HTML, CSS and JavaScript."""

from __future__ import annotations

from pathlib import Path

from fastapi import Response

from grpo_pl.extras.report.page import whole_page

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
