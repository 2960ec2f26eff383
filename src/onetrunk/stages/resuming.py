"""Where a run goes on: what `resume_from_checkpoint` may say. Knows paths only."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def resume_point(args: Any) -> str | bool | None:
    """Return a checkpoint folder, True for the last one in output_dir, or None to start anew.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    value = args.resume_from_checkpoint
    if value is None or str(value).lower() in ("false", "none", ""):
        return None
    if str(value).lower() == "true":
        if not any(Path(args.output_dir).glob("checkpoint-*")):
            raise FileNotFoundError(
                f"resume_from_checkpoint is true, but {args.output_dir} holds no checkpoint-* folder; leave it out to"
                " start anew"
            )
        return True
    if not Path(value).is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint {value} is no folder (working folder {Path.cwd()}); give a checkpoint-* folder,"
            " or true for the last one in output_dir"
        )
    return str(value)
