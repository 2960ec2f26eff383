"""Where a run goes on: what `resume_from_checkpoint` may say. Knows paths only."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def resume_point(args: Any) -> str | bool | None:
    """Return a folder that exists, True for the last checkpoint in output_dir (there or not), or None to start anew.

    What a checkpoint must hold is the trainer's to say: PPO asks `find_checkpoint`, SFT `require_checkpoint`.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    value = args.resume_from_checkpoint
    if value is None or str(value).lower() in ("false", "none", ""):
        return None
    if str(value).lower() == "true":
        return True
    if not Path(value).is_dir():
        raise FileNotFoundError(
            f"resume_from_checkpoint {value} is no folder (working folder {Path.cwd()}); give a checkpoint-* folder,"
            " or true for the last one in output_dir"
        )
    return str(value)


def require_checkpoint(resume: str | bool | None, output_dir: str) -> None:
    """Refuse True where there is no checkpoint, before anything is loaded; TRL's trainer would say so after that.

    Raises:
        FileNotFoundError: `output_dir` holds none.
    """
    from transformers.trainer_utils import get_last_checkpoint

    if resume is True and (not Path(output_dir).is_dir() or get_last_checkpoint(output_dir) is None):
        raise FileNotFoundError(
            f"resume_from_checkpoint is true, but {output_dir} holds no checkpoint-* folder; leave it out to start"
            " anew"
        )
