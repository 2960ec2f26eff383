"""What can go wrong with a call to a server."""

from __future__ import annotations

from typing import Literal

# Why a question has no answer yet. server: the server failed. refused: it rejects this question or never finishes it,
# but answers others. unread: it replied, and the reply is not an answer.
ErrorKind = Literal["server", "refused", "unread"]

# The server has too many calls: too many requests, not available, overloaded (several hosted servers).
OVERLOADED = frozenset((429, 503, 529))


class CallError(RuntimeError):
    """A call without an answer.

    Args:
        reason: why, without a secret.
        kind: "again": the next call may succeed; "refused": this question never will; "stop": no question will;
            "unread": there are replies, but no answer.
        status: the status of the HTTP response; None without a response.
        retry_after_s: wait that the server asks for.
        timed_out: a deadline passed before there was an answer.
        is_unreachable: there was no connection.
        may_be_paid: False if the server certainly bills nothing: it was not reached, or it rejected the call.
    """

    # The server that was asked last.
    server = ""

    def __init__(
        self,
        reason: str,
        kind: Literal["again", "refused", "stop", "unread"] = "again",
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        timed_out: bool = False,
        is_unreachable: bool = False,
        may_be_paid: bool = True,
    ):
        super().__init__(reason)
        self.kind, self.status, self.retry_after_s = kind, status, retry_after_s
        self.timed_out, self.is_unreachable, self.may_be_paid = timed_out, is_unreachable, may_be_paid

    @property
    def error_kind(self) -> ErrorKind:
        """The kind that the question's answer records."""
        return self.kind if self.kind in ("refused", "unread") else "server"


class EndOfCalls(RuntimeError):
    """Ends a run of calls: no further call begins, calls in flight end, and then the run raises this.

    Raised by its `done`, or by a call that has sent nothing. While other calls are in flight, such a call does not end
    the run; it is repeated when one of them has ended.
    """


class ServerUnavailable(RuntimeError):
    """The servers were given up; the message says why, how much was answered, and that the run can be resumed."""
