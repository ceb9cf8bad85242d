"""A local Hugging Face Hub with the requests that huggingface_hub makes to create and fill a repository.

Large files use LFS: announced, uploaded by PUT, then referenced in the commit; small ones are part of the commit.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"


@dataclass
class Hub:
    """Uploaded content, and the answer to the next request."""

    address: str = ""
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> {visibility, files, message}
    refuse: int | None = None  # answer everything with this status
    num_commits: int = 0
    uploaded: dict[str, bytes] = field(default_factory=dict)  # LFS content by SHA-256


@contextmanager
def running_hub() -> Iterator[Hub]:
    """The server at `hub.address` while the block runs."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def answer(self, content: Any, status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def allowed(self) -> bool:
            if hub.refuse is not None:
                self.answer({"error": "You don't have the rights to do this"}, hub.refuse)
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer({"error": "Invalid username or password."}, 401)
            else:
                return True
            return False

        def do_GET(self) -> None:
            self.body()
            if not self.allowed():
                return
            name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2]).partition("?")[0]
            repository = hub.repositories.get(name)
            if repository is None:
                self.answer({"error": f"{name} not found"}, 404)
            elif "/tree/" in self.path:
                files = repository["files"].items()
                self.answer([{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files])
            else:
                siblings = [{"rfilename": path} for path in repository["files"]]
                self.answer({"id": name, "sha": "0" * 40, "siblings": siblings, "private": False, "tags": []})

        def do_PUT(self) -> None:
            content = self.body()
            hub.uploaded[hashlib.sha256(content).hexdigest()] = content
            self.answer({})

        def do_POST(self) -> None:
            body = self.body()
            if not self.allowed():
                return
            if self.path == "/api/repos/create":
                options = json.loads(body)
                name = f"{options['organization']}/{options['name']}"
                hub.repositories.setdefault(name, {"visibility": options.get("visibility"), "files": {}})
                self.answer({"url": f"{hub.address}/{name}"})
            elif self.path == "/api/validate-yaml":
                self.answer({"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                kinds = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
                self.answer({"files": [{"path": p, "uploadMode": k, "shouldIgnore": False} for p, k in kinds.items()]})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(body)["objects"]
                at = f"{hub.address}/lfs"
                uploads = [one | {"actions": {"upload": {"href": f"{at}/{one['oid']}"}}} for one in objects]
                self.answer({"transfer": "basic", "objects": uploads})
            elif "/commit/" in self.path:
                self.commit(self.path.removeprefix("/api/models/").partition("/commit/")[0], body)
            else:
                self.answer({"error": f"{self.path} is unknown here"}, 404)

        def commit(self, name: str, body: bytes) -> None:
            files = hub.repositories[name]["files"]
            hub.num_commits += 1
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                match line["key"]:
                    case "header":
                        hub.repositories[name]["message"] = value["summary"]
                    case "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        files[value["path"]] = hub.uploaded[value["oid"]]
                    case "deletedFile":
                        del files[value["path"]]
            self.answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{hub.address}/{name}/commit/1"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
