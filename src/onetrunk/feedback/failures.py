"""When too many questions stay without an answer, a run stops: what is missing can be asked another day.

Two things are counted apart. A judge that fails (a server that is down) fails whatever it is asked. A question that
the judge refuses, or answers with something that is no verdict, says something of that question and its prompt: all
questions on one prompt fail together, so only several prompts say something of the judge.
"""

from __future__ import annotations

from onetrunk.judges.base import ErrorKind, digest
from onetrunk.types import Prompt

# Below this number of questions a share says nothing.
FEWEST = 50
# Questions on fewer prompts than these that are refused or unread never stop a run.
FEWEST_PROMPTS = 5


class FailureLimit:
    """Counts the questions asked in this run, and those that got no answer.

    Args:
        max_failed_fraction: of the questions asked so far, of the first FEWEST at least; 1: never stop. It holds for
            the questions that failed, and, once they are about FEWEST_PROMPTS prompts, for those refused or unread.
            FEWEST failures in a row stop a run too, however many answers came before: the judge is down.
        judge: its name, for the error message.
    """

    def __init__(self, max_failed_fraction: float, judge: str):
        self.max_failed_fraction = max_failed_fraction
        self.judge = judge
        self.asked = self.failed = self.refused = self.unread = self._in_a_row = 0
        self._prompts: set[str] = set()

    def note(self, error: str | None, kind: ErrorKind = "server", prompt: Prompt = "") -> None:
        """Count one question in.

        Args:
            error: why it has no answer; None: it has one.
            kind: of the error.
            prompt: that the question is about.

        Raises:
            RuntimeError: it was one failure too many.
        """
        self.asked += 1
        if error is None:
            self._in_a_row = 0
            return
        allowed = self.max_failed_fraction * max(self.asked, FEWEST)
        if kind == "server":
            self.failed += 1
            self._in_a_row += 1
            too_many = self.failed > allowed or self._in_a_row >= FEWEST
            what = f"left {self.failed} of {self.asked} questions without an answer"
            advice = "repair the judge and run the same command again"
        else:
            # The judge is there: it has replied, or it answers other questions.
            self._in_a_row = 0
            self.refused += kind == "refused"
            self.unread += kind == "unread"
            if len(self._prompts) < FEWEST_PROMPTS:
                self._prompts.add(digest(prompt))
            too_many = self.refused + self.unread > allowed and len(self._prompts) >= FEWEST_PROMPTS
            what = (
                f"refused {self.refused} of {self.asked} questions, and gave {self.unread} of them a reply that is no"
                " verdict"
            )
            advice = "repair the judge, or raise max_failed_fraction to leave these questions out, and run the same"
            advice += " command again"
        if too_many and self.max_failed_fraction < 1:
            raise RuntimeError(
                f"the judge {self.judge} {what}, past max_failed_fraction {self.max_failed_fraction:g} (the last:"
                f" {error}); all answers are kept: {advice}"
            )
