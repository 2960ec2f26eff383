"""Several judges as one: the mean of their answers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from onetrunk.judges.judge import Answer, Done, Judge, Question
from onetrunk.judges.labels import Memory, ask_missing
from onetrunk.servers.errors import EndOfCalls
from onetrunk.utils.files import unique_names

# How long an ensemble that ends with an error waits for the calls of its members.
JOIN_S = 5.0


class EnsembleJudge(Judge):
    """The mean of its members' answers (see `Judge`).

    A member that abstains is left out of the mean; if all abstain, so does the ensemble. A member's error is the
    ensemble's error, because the mean would change once that member answers. `details` hold each member's answer and
    their disagreement, the population standard deviation.

    Members that only wait for servers are asked at the same time, each in a thread; the others are asked meanwhile in
    this thread, because checks of users may need it. `done` is called in any of them, by one at a time.

    Args:
        judges: two or more different ones.
        memory: keeps the answers of each member as soon as they arrive; what it holds is not asked again.
    """

    name = "ensemble"

    def __init__(self, judges: Sequence[Judge], memory: Memory | None = None):
        self.memory = memory
        identities = [judge.identity for judge in judges]
        twice = next((j.name for i, j in enumerate(judges) if j.identity in identities[:i]), None)
        if twice is not None:
            raise ValueError(f"the judge {twice!r} is twice in the ensemble and would count double; name it once")
        self.members = dict(zip(unique_names([judge.name for judge in judges]), judges, strict=True))
        self.identity: dict[str, Any] = {"kind": "ensemble", "members": identities}
        self.is_remote = all(judge.is_remote for judge in judges)

    def _answer_all(self, questions: Sequence[Question], keep: Done) -> None:
        answers: dict[int, dict[str, Answer]] = {}
        errors: list[BaseException] = []
        lock = threading.Lock()

        def take(member: str, index: int, answer: Answer) -> None:
            with lock:
                if errors:
                    raise EndOfCalls("another member of the ensemble has ended the run")
                by_member = answers.setdefault(index, {})
                by_member[member] = answer
                if len(by_member) == len(self.members):
                    del answers[index]
                    keep(index, _joined({name: by_member[name] for name in self.members}))

        def ask(member: str) -> None:
            try:
                ask_missing(self.members[member], questions, self.memory, done=functools.partial(take, member))
            except BaseException as error:
                errors.append(error)

        remote = [name for name, judge in self.members.items() if judge.is_remote]
        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in remote]
        for thread in threads:
            thread.start()
        try:
            for name in self.members:
                if name not in remote and not errors:
                    ask(name)
            for thread in threads:
                while thread.is_alive() and not errors:
                    thread.join(0.05)
        except BaseException as error:  # A signal.
            errors.insert(0, error)
        if errors:
            for thread in threads:
                thread.join(JOIN_S)
            raise errors[0]


def _joined(answers: dict[str, Answer]) -> Answer:
    kind = type(next(iter(answers.values())))
    members = {name: answer.number for name, answer in answers.items()}
    errors = [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error]
    if errors:
        # "server" if one of the errors is the server's, else a kind that is the question's fault.
        kinds = [answer.error_kind for answer in answers.values() if answer.error is not None]
        error_kind = "server" if "server" in kinds else kinds[0]
        return kind(None, error="; ".join(errors), details={"members": members}, error_kind=error_kind)
    numbers = [number for number in members.values() if number is not None]
    reasons = [f"{name}: {answer.reason}" for name, answer in answers.items() if answer.reason]
    details = {"members": members, "disagreement": pstdev(numbers) if numbers else None}
    return kind(fmean(numbers) if numbers else None, "\n".join(reasons) or None, details=details)
