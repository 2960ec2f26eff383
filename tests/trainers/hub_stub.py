"""A Hugging Face Hub on 127.0.0.1 that takes uploads: as much of its HTTP interface as `push_to_hub` speaks."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubStub:
    """Serves in a thread; `files` maps path in the repository to bytes, `commits` lists (summary, paths)."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[tuple[str, list[str]]] = []
        stub = self

        class Handler(_Handler):
            hub = stub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        if self.path.startswith("/api/whoami"):
            self._answer({"name": "someone", "type": "user", "orgs": []})
        elif self.path.startswith("/api/models/"):
            files = [{"rfilename": name} for name in self.hub.files]
            self._answer({"id": "someone/out", "sha": "0" * 40, "siblings": files, "tags": []})
        else:
            self._answer({"error": "not found"}, 404)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rsplit("/", 1)[1]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/api/repos/create":
            self._answer({"url": f"{self.hub.url}/someone/out", "id": "someone/out"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            big = ".safetensors", ".bin", ".pt", ".pth"
            modes = [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(big) else "regular"} for f in files]
            self._answer({"files": [{**m, "shouldIgnore": False} for m in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            upload = [{**o, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}}} for o in wanted]
            self._answer({"transfer": "basic", "objects": upload})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines() if line.strip()])
            self._answer({"commitUrl": f"{self.hub.url}/someone/out/commit/{'1' * 40}", "commitOid": "1" * 40})
        else:
            self._answer({"error": self.path}, 404)

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        added, summary = {}, ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.files |= added
        self.hub.commits.append((summary, sorted(added)))
