"""Makes stdout and stderr survive the end of their reader, and print any text in any encoding.

If the reader of a pipe ends (`onetrunk ppo ... | head`) or the terminal is closed, further output is discarded and the
process gets SIGHUP, on which a training writes a checkpoint and stops. Characters that the output's encoding lacks
(`PYTHONIOENCODING=ascii`) are printed as `\\xe9`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator

# The errors of a write when the reader of the pipe, or the terminal, is gone.
GONE = (errno.EPIPE, errno.EIO)


class _LastingFile(io.FileIO):
    """A file for writing that discards its output once the reader is gone."""

    def write(self, data: bytes | memoryview) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        # Python runs the handler in the main thread. Without one, SIGHUP would end the process at once.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGHUP)
        return len(data)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Make stdout and stderr survive their readers inside the block. Replaced streams (in a notebook, in pytest) are
    left alone."""
    originals = {name: getattr(sys, name) for name in ("stdout", "stderr") if _is_plain(getattr(sys, name))}
    for name, stream in originals.items():
        stream.flush()
        raw = _LastingFile(stream.fileno(), "w", closefd=False)
        settings = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        buffer = io.BufferedWriter(raw)
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, errors="backslashreplace", **settings))
    try:
        yield
    finally:
        for name, stream in originals.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)


def _is_plain(stream: object) -> bool:
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # With `python -u` there is no buffer.
    return type(stream) is io.TextIOWrapper and type(raw) is io.FileIO and not stream.closed
