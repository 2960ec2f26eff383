"""The README as the page of a package index, where relative links lead nowhere: a hook of hatchling."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE = re.compile(r'(\]\(|src="|srcset=")(?!https?://|#)([^)"\s]+)')


def with_whole_addresses(text: str, repository: str) -> str:
    """Return Markdown whose links and pictures have whole addresses, below the page of the repository."""

    def whole(match: re.Match[str]) -> str:
        kind = "raw" if match[2].endswith((".svg", ".png")) else "blob"
        return f"{match[1]}{repository}/{kind}/main/{match[2]}"

    return RELATIVE.sub(whole, text)


class CustomMetadataHook(MetadataHookInterface):
    """Gives the package its long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        page = with_whole_addresses(text, metadata["urls"]["Source"])
        metadata["readme"] = {"content-type": "text/markdown", "text": page}
