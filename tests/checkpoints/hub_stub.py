"""A Hugging Face Hub on 127.0.0.1 that takes uploads: as much of its HTTP interface as `push_to_hub` speaks.

It has one repository, someone/out.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub import constants, utils

from tests.servers.stub import Answer, Stub


class HubStub(Stub):
    """Keeps what is pushed: `files` maps path in the repository to bytes, `commits` lists (summary, paths).

    `refusals` maps a part of a path to the status that such requests get, `me` is who every token belongs to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.free = {
            "/api/whoami*": lambda _body: (200, self.me),
            "/api/repos/create": lambda _body: (200, {"url": f"{self.url}/someone/out", "id": "someone/out"}),
            "/api/validate-yaml": lambda _body: (200, {"errors": [], "warnings": []}),
            "*/someone/out/preupload/*": self._preupload,
            "*/someone/out.git/info/lfs/objects/batch": self._batch,
            "*/someone/out/commit/*": self._commit,
            "/lfs/*": self._upload,
            "/api/models/someone/out*": self._repository,
            "/api/datasets/someone/out*": self._repository,
        }
        self.refusals: dict[str, int] = {}
        self.me: dict[str, Any] = {"name": "someone", "type": "user", "orgs": []}
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[tuple[str, list[str]]] = []

    def answer(self, path: str, authorization: str, body: Any) -> Answer:
        status = next((status for part, status in self.refusals.items() if part in path), None)
        if status is not None:
            return status, {"error": f"no, {status}", "url": f"{self.url}/someone/out"}
        return super().answer(path, authorization, body)

    def _repository(self, _body: Any) -> Answer:
        files = [{"rfilename": name} for name in self.files]
        return 200, {"id": "someone/out", "sha": "0" * 40, "siblings": files, "tags": []}

    def _preupload(self, body: Any) -> Answer:
        big = ".safetensors", ".bin", ".pt", ".pth"
        modes = {f["path"]: "lfs" if f["path"].endswith(big) else "regular" for f in body["files"]}
        return 200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}

    def _batch(self, body: Any) -> Answer:
        upload = [{**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in body["objects"]]
        return 200, {"transfer": "basic", "objects": upload}

    def _upload(self, body: bytes) -> Answer:
        self.objects[hashlib.sha256(body).hexdigest()] = body
        return 200, {}

    def _commit(self, body: bytes) -> Answer:
        added, summary = {}, ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.objects[value["oid"]]
        self.files |= added
        self.commits.append((summary, sorted(added)))
        return 200, {"commitUrl": f"{self.url}/someone/out/commit/{'1' * 40}", "commitOid": "1" * 40}


@contextmanager
def stand_in(monkeypatch: Any) -> Iterator[HubStub]:
    """Yield a Hub that this process takes for the real one; what is read once at import is set by hand."""
    with HubStub() as stub:
        monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 30)
        for name, value in {"ENDPOINT": stub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)
        utils.close_session()
        yield stub
