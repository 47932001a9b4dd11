"""A hub of data sets on this machine: the routes that ``datasets`` and ``huggingface_hub`` ask for."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes]


@contextmanager
def hub_of(sets: Mapping[str, Sequence[Files]]) -> Iterator[str]:
    """The address of a hub with these data sets, each by its commits, of which the last is ``main``."""
    repositories = {
        name: {hashlib.sha1(repr(files).encode()).hexdigest(): files for files in commits}
        for name, commits in sets.items()
    }

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            is_api = parts[0] == "api"
            _, organisation, name, *rest = parts[is_api:] if len(parts) > 2 + is_api else ["", "", ""]
            commits = repositories.get(f"{organisation}/{name}")
            if commits is None:
                return self.answer(404, {"X-Error-Code": "RepoNotFound"})
            what, revision, *path = rest if rest else ["revision", "main"]
            sha = list(commits)[-1] if revision == "main" else revision
            if sha not in commits:
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            files, place = commits[sha], "/".join(path)
            if what == "resolve":
                if place not in files:
                    return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
                etag = hashlib.sha1(files[place]).hexdigest()
                return self.answer(200, {"ETag": f'"{etag}"', "X-Repo-Commit": sha}, files[place])
            listed = [
                {"type": "file", "path": file, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                for file, raw in files.items()
            ]
            folders = {file.rpartition("/")[0] for file in files} - {""}
            listed += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
            if what == "tree":
                deep = parse_qs(urlsplit(self.path).query).get("recursive") == ["True"]
                inside = [entry for entry in listed if entry["path"].startswith(f"{place}/" if place else "")]
                found: Any = [e for e in inside if deep or "/" not in e["path"].removeprefix(f"{place}/")]
                if place and not inside:
                    return self.answer(404, {"X-Error-Code": "EntryNotFound"})
            elif what == "paths-info":
                asked = parse_qs(body).get("paths") or json.loads(body)["paths"]
                found = [entry for entry in listed if entry["path"] in asked]
            else:
                siblings = [{"rfilename": file} for file in files]
                found = {"id": f"{organisation}/{name}", "sha": sha, "siblings": siblings, "tags": [], "private": False}
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

        do_HEAD = do_POST = do_GET

        def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
