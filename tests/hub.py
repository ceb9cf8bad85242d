"""A local Hub: an HTTP server with the API of the Hugging Face Hub that serves local folders.

FOLDER/datasets/owner/name/COMMIT/...   and the commit of `main` in FOLDER/datasets/owner/name/main
"""

import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _HubHandler(BaseHTTPRequestHandler):
    root: Path

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "api":
            self._answer_api(parts[1:], body)
        elif len(parts) > 5 and parts[3] == "resolve":
            self._file(parts[:3], parts[4], "/".join(parts[5:]))
        else:
            self._send_error("EntryNotFound")

    def _answer_api(self, parts: list[str], body: bytes) -> None:
        repository, (what, *rest) = parts[:3], parts[3:] or ["revision"]
        folder = self._folder(repository, rest[0] if rest else "main")
        if folder is None:
            self._send_error("RevisionNotFound" if self.root.joinpath(*repository).is_dir() else "RepoNotFound")
            return
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        match what:
            case "revision":
                facts = {"siblings": [{"rfilename": name} for name in names], "private": False, "gated": False}
                self._json({"id": "/".join(repository[1:]), "sha": folder.name, "tags": [], "downloads": 0, **facts})
            case "tree":
                below = "/".join(rest[1:])
                self._json([_describe(folder, name) for name in names if name.startswith(below)])
            case "paths-info":
                paths = urllib.parse.parse_qs(body.decode()).get("paths", [])
                if body.startswith(b"{"):
                    paths = json.loads(body)["paths"]
                self._json([_describe(folder, name) for name in names if name in paths])
            case _:
                self._send_error("EntryNotFound")

    def _file(self, repository: list[str], revision: str, name: str) -> None:
        folder = self._folder(repository, revision)
        if folder is None or not (folder / name).is_file():
            self._send_error("EntryNotFound" if folder else "RevisionNotFound")
            return
        content = (folder / name).read_bytes()
        self._send(200, content, ETag=f'"{_oid(content)}"', **{"X-Repo-Commit": folder.name})

    def _folder(self, repository: list[str], revision: str) -> Path | None:
        """The folder of a revision's commit."""
        root = self.root.joinpath(*repository)
        if revision == "main" and (root / "main").is_file():
            revision = (root / "main").read_text()
        return root / revision if (root / revision).is_dir() else None

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send_error(self, code: str) -> None:
        self._send(404, b"{}", **{"X-Error-Code": code})

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """No log."""


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _describe(folder: Path, name: str) -> dict[str, Any]:
    content = (folder / name).read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}


@contextmanager
def hub(root: Path) -> Iterator[str]:
    """Serve `root`; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (_HubHandler,), {"root": root}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
