"""A Hugging Face Hub on 127.0.0.1 that takes uploads: as much of its HTTP interface as `push_to_hub` speaks."""

from __future__ import annotations

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from huggingface_hub import constants, utils


class HubStub:
    """Serves in a thread; `files` maps path in the repository to bytes, `commits` lists (summary, paths).

    `refusals` maps a part of a path to the status that such requests get (0: no answer at all), `asked` lists method
    and path of all requests, `me` is who every token belongs to.
    """

    def __init__(self) -> None:
        self.refusals: dict[str, int] = {}
        self.asked: list[str] = []
        self.me: dict[str, Any] = {"name": "someone", "type": "user", "orgs": []}
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[tuple[str, list[str]]] = []
        stub = self

        class Handler(_Handler):
            hub = stub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def stand_in(monkeypatch: Any) -> HubStub:
    """Return a Hub that this process takes for the real one; what is read once at import is set by hand."""
    stub = HubStub()
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
    for name, value in {"ENDPOINT": stub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    utils.close_session()
    return stub


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def parse_request(self) -> bool:
        is_fine = super().parse_request()
        if is_fine:
            self.hub.asked.append(f"{self.command} {self.path}")
        return is_fine

    def _is_refused(self) -> bool:
        status = next((status for part, status in self.hub.refusals.items() if part in self.path), None)
        if status == 0:
            time.sleep(60)
        elif status is not None:
            self._answer({"error": f"no, {status}", "url": f"{self.hub.url}/someone/out"}, status)
        return status is not None

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
        if self._is_refused():
            return
        if self.path.startswith("/api/whoami"):
            self._answer(self.hub.me)
        elif self.path.startswith(("/api/models/", "/api/datasets/")):
            files = [{"rfilename": name} for name in self.hub.files]
            self._answer({"id": "someone/out", "sha": "0" * 40, "siblings": files, "tags": []})
        else:
            self._answer({"error": "not found"}, 404)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        body = self._body()
        if not self._is_refused():
            self.hub.objects[self.path.rsplit("/", 1)[1]] = body
            self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        if self._is_refused():
            return
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
