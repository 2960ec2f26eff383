"""How far long work is: a bar in a terminal; elsewhere a line a minute, because frames of a bar would fill a file."""

from __future__ import annotations

import io
import sys
from typing import Any

from tqdm import tqdm

LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {remaining} left{postfix}"
SECONDS = 60


class WorkBar(tqdm):
    """tqdm's bar for prompts, questions and rows; work of less than a minute has no line."""

    def __init__(self, **settings: Any) -> None:
        self.is_line = not sys.stderr.isatty()
        if self.is_line:
            rhythm = {"delay": SECONDS, "mininterval": SECONDS, "maxinterval": SECONDS}
            settings |= {**rhythm, "bar_format": LINE, "file": io.StringIO()}
        super().__init__(**{"disable": False, "dynamic_ncols": True, "smoothing": 0.05, **settings})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar, or write the line."""
        if self.is_line:
            tqdm.write(str(self), file=sys.stderr)
        else:
            super().display(msg, pos)
