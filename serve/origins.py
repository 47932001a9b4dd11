"""Checks by which name a request addresses the server, and that no foreign web page sent it."""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Scope

from serve.errors import ApiError
from serve.settings import ServeSettings

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
_OWN_SITES = ("same-origin", "none")  # the server's own page, and addresses that a person typed or opened


class Origins:
    """Checks ``Host``, ``Origin`` and ``Sec-Fetch-Site``; clients that are not browsers send only the first.

    Without the check of ``Host``, a foreign page could resolve its own name to the server's address (DNS rebinding) and
    read answers. Without that of ``Origin``, it could make the browser send requests, although not read the answers.
    """

    def __init__(self, settings: ServeSettings) -> None:
        listening = [ip_address(address[0].partition("%")[0]) for _, address in settings.addresses]
        self._anywhere = any(address.is_unspecified for address in listening)
        own = [socket.gethostname()] if any(not address.is_loopback for address in listening) else []
        self._names = {name.lower().rstrip(".") for name in ("localhost", *own, *settings.allowed_hosts)}
        self._addresses = {*listening, ip_address("127.0.0.1"), ip_address("::1")}
        self._cors = frozenset(origin.rstrip("/").lower() for origin in settings.cors_origins)

    def check(self, scope: Scope) -> None:
        """Refuses requests that a page of another site may have sent.

        Raises:
            ApiError: not exactly one valid ``Host`` (400), a foreign ``Host`` (403), or a foreign page (403).
        """
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if not hosts and scope["http_version"] == "1.0":  # which has no such header; every browser sends it
            hosts = ["localhost"]
        if len(hosts) != 1 or not (match := _HOST.fullmatch(hosts[0].strip().lower())):
            raise ApiError(400, "send one `Host` header with the server's name.", code="invalid_host")
        name = match[1].rstrip(".")
        if not self._is_own(name):
            message = f"this server is not called {name!r}; if it should be, start it with --allowed-host {name}."
            raise ApiError(403, message, code="host_not_allowed")
        origins = [value.lower() for value in headers.getlist("origin")]
        if any(origin not in self._cors and origin.partition("://")[2] != match[0] for origin in origins):
            message = f"pages of {origins[0]} may not use this server; if they should, start it with --cors-origin."
            raise ApiError(403, message, code="origin_not_allowed")
        if origins or all(site in _OWN_SITES for site in headers.getlist("sec-fetch-site")):
            return
        if headers.getlist("sec-fetch-mode") != ["navigate"] or scope["method"] != "GET" or scope["path"] != "/":
            raise ApiError(403, "pages of other sites may link to `/` and to nothing else.", code="origin_not_allowed")

    def _is_own(self, name: str) -> bool:
        if name in self._names:
            return True
        try:
            address = ip_address(name.strip("[]"))
        except ValueError:
            return False
        return self._anywhere or address in self._addresses


class CrossOrigin(CORSMiddleware):
    """Starlette's CORS middleware, with refusals in the common format of errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = "a page of this origin may not send such a request to this server."
        return ApiError(403, message, code="origin_not_allowed").response()


def require_json(scope: Scope) -> None:
    """Refuses content types that browsers send to other sites without a preflight (forms, text), and encoded bodies.

    Raises:
        ApiError: the body is not plain ``application/json`` (415).
    """
    headers = Headers(scope=scope)
    kinds = [value.partition(";")[0].strip().lower() for value in headers.getlist("content-type")]
    if kinds != ["application/json"]:
        raise ApiError(415, "send the header `Content-Type: application/json`.", code="unsupported_media_type")
    if any(value.strip().lower() != "identity" for value in headers.getlist("content-encoding")):
        raise ApiError(415, "send the body as it is, without `Content-Encoding`.", code="unsupported_media_type")
