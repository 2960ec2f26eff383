"""Output that outlives its reader, and shows any text in any encoding.

The reader of a pipe may end (`onetrunk ppo ... | head`), and a terminal may be closed. What is printed after that goes
nowhere, and the process gets SIGHUP, as where its terminal is closed: a training writes a checkpoint and stops.
Characters that the output's encoding lacks (`PYTHONIOENCODING=ascii`) are shown as `\\xe9`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator

# What a write says where the other end of a pipe, or the terminal, is gone.
GONE = (errno.EPIPE, errno.EIO)


class _LastingFile(io.FileIO):
    """A descriptor for writing that leads nowhere once its reader is gone."""

    def write(self, data: bytes | memoryview) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        # Python runs the handler in the main thread, whoever was writing; under nohup SIGHUP is ignored.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGHUP)
        return len(data)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let stdout and stderr outlive their readers inside the block. Streams that somebody has put in their place (a
    notebook, pytest) stay as they are."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr") if _is_plain(getattr(sys, name))}
    for name, stream in before.items():
        stream.flush()
        raw = _LastingFile(stream.fileno(), "w", closefd=False)
        settings = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        buffer = io.BufferedWriter(raw)
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, errors="backslashreplace", **settings))
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)


def _is_plain(stream: object) -> bool:
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)  # With `python -u` there is no buffer.
    return type(stream) is io.TextIOWrapper and type(raw) is io.FileIO and not stream.closed
