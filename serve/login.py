"""The login form for the page of a server with a key; it gives the browser a session cookie."""

from __future__ import annotations

import hashlib
import hmac
import html
import secrets
import time
from collections.abc import Mapping
from urllib.parse import parse_qs

from starlette.responses import HTMLResponse, RedirectResponse, Response

LOGIN = "/login"
LOGIN_BYTES = 4096
_SESSION_S = 12 * 3600
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
_FORM = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>grpo_pl: log in</title><style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 22rem; margin: 18vh auto 0; padding: 0 1rem; }
input, button { font: inherit; display: block; width: 100%; box-sizing: border-box; margin-top: .6rem; padding: .5rem; }
</style></head><body><main><h1>grpo_pl</h1>
<form method="post" action="/login"><label>API key of this server
<input id="key" type="password" name="key" autocomplete="current-password" required autofocus></label>
<button>Log in</button></form><p role="alert">MESSAGE</p></main></body></html>
"""


class Sessions:
    """Sessions as signed cookies; a restart of the server ends all sessions.

    Args:
        key: the server's API key, with which a session is opened.
        port: part of the cookie's name, because browsers share cookies between ports of a host.
    """

    def __init__(self, key: bytes, port: int) -> None:
        self.key, self._secret, self._name = key, secrets.token_bytes(32), f"grpo_pl_{port}"

    def holds(self, cookies: Mapping[str, str]) -> bool:
        """True if the cookies of a request hold a session that has not expired."""
        expires, _, seal = cookies.get(self._name, "").partition(".")
        own = hmac.compare_digest(seal.encode("utf-8", "replace"), self._seal(expires).encode())
        return own and int(expires) > time.time()

    def open(self, form: bytes, *, secure: bool) -> Response:
        """The answer to the form: a redirect to the page with a session cookie, or the form again for a wrong key."""
        try:
            given = parse_qs(form.decode("latin-1"), max_num_fields=4, encoding="utf-8").get("key", [""])[0]
        except ValueError:
            given = ""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.key):
            return login_page("This is not the key.")
        expires = str(int(time.time()) + _SESSION_S)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            self._name,
            f"{expires}.{self._seal(expires)}",
            max_age=_SESSION_S,
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return answer

    def _seal(self, expires: str) -> str:
        return hmac.new(self._secret, expires.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def login_page(message: str = "") -> Response:
    """The form, with status 401."""
    headers = {
        "Content-Security-Policy": _POLICY,
        "WWW-Authenticate": "Bearer",
        "Referrer-Policy": "same-origin",  # with `no-referrer` a browser would send the form with a null `Origin`
    }
    return HTMLResponse(_FORM.replace("MESSAGE", html.escape(message)), status_code=401, headers=headers)
