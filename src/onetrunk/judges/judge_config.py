"""The settings of judges, and the judge that they mean.

judge: [rubric]                          plain Python checks (setting rubric)
judge: ["reward:runs/reward"]            a reward model: folder or Hub name, or an adapter of one
judge: ["http://127.0.0.1:8000/v1"]      a server with OpenAI's chat protocol (setting judge_model)
judge: [path/to/file.py:MyJudge]         a Judge of the user's: a class, or an instance; also package.module.MyJudge
judge: [Qwen/Qwen2.5-7B-Instruct]        a causal language model in this process: folder or Hub name
judge: [a, b]                            the mean of several (`EnsembleJudge`); servers of one model are one judge
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from onetrunk.judges.constitution import Check, RubricJudge, load_constitution
from onetrunk.judges.judge import Answer, Done, Judge, Question, model_name
from onetrunk.judges.labels import ask_missing
from onetrunk.judges.template import VERDICT_TOKENS
from onetrunk.utils.files import digest, unique_names
from onetrunk.utils.import_path import find_object, is_dotted_path
from onetrunk.utils.ledger import Ledger
from onetrunk.utils.options import option, replace_none

if TYPE_CHECKING:
    import torch


RUBRIC, REWARD, SERVER = "rubric", "reward:", ("http://", "https://")
KINDS = (
    "rubric; reward:FOLDER (a reward model, or its Hub name); http(s)://host/v1 (a server; judge_model, or"
    " '#model=NAME' after the address); a Judge of yours (path/to/file.py:NAME, package.module.NAME); else a causal"
    " model's folder or Hub name"
)
# Entries of a call's body that the judge sets itself, with the settings that change them.
SENT = dict.fromkeys("messages seed temperature top_p logprobs top_logprobs n stream".split())
SENT |= {"model": "judge_model", "max_tokens": "judge_verdict_tokens"}


@dataclass
class JudgeConfig:
    """Which judges, and by which principles. A dataclass for TrlParser: one field is one YAML key and one option."""

    judge: list[str] | None = option(None, f"{KINDS}. Several: their mean; servers of one model share its questions.")
    constitution: str | None = option(None, "YAML file with the principles to judge by.")
    rubric: dict[str, str] | None = option(
        None,
        "Judge rubric: tag of a principle -> path/to/file.py:function or package.module.function, with the signature"
        " of reward functions; as JSON on the command line.",
    )
    # models in this process
    judge_batch_size: int = option(8, "Questions, or texts of a reward model, per forward.")
    judge_device: str | None = option(None, "Such as cuda:1 or cpu; None: the accelerator, if there is one.")
    # servers
    judge_model: str | None = option(None, "Name of the model on the server.")
    judge_api_key_env: str | None = option(None, "Environment variable that holds the server's key; None: no key.")
    judge_max_concurrency: int = option(8, "Most calls in flight to each server.")
    judge_timeout_s: float = option(60.0, "Deadline of one call to a server, seconds.")
    judge_verdict_tokens: int = option(
        VERDICT_TOKENS,
        "Longest reply of a server, tokens. A model that reasons by itself before it answers needs room for that too,"
        " such as 2048.",
    )
    judge_extra_body: dict[str, Any] | None = option(
        None,
        "More entries for the body of every call to a server, such as {reasoning_effort: low} or"
        " {chat_template_kwargs: {enable_thinking: false}}; as JSON on the command line.",
    )
    judge_samples: int = option(5, "Votes on a question if the server returns no log probabilities.")

    def __post_init__(self) -> None:
        replace_none(self)
        if isinstance(self.judge, str):
            self.judge = [self.judge]
        for name in ("rubric", "judge_extra_body"):
            if not isinstance(getattr(self, name), (dict, type(None))):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a mapping, as JSON on the command line")
        for name in ("judge_batch_size", "judge_max_concurrency", "judge_samples", "judge_verdict_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if not 0 < self.judge_timeout_s < math.inf:
            raise ValueError(f"judge_timeout_s is {self.judge_timeout_s}; set a finite number above 0")
        for name in sorted(SENT.keys() & (self.judge_extra_body or {})):
            instead = f"set {SENT[name]} instead" if SENT[name] else "leave it out"
            raise ValueError(f"judge_extra_body sets {name}, which the judge sets itself; {instead}")


def load_judge(settings: JudgeConfig) -> Judge:
    """Return the judge that settings mean."""
    specs = settings.judge or []
    if not specs or not all(isinstance(spec, str) and spec.strip() and spec != REWARD for spec in specs):
        raise ValueError(f"judge is {specs}; give {KINDS}")
    if settings.rubric and RUBRIC not in specs:
        raise ValueError(f"rubric is set and judge is {', '.join(specs)}; add rubric to judge, or leave rubric out")
    # The order is part of an ensemble's identity.
    groups = sorted(specs_by_judge(specs, settings), key=lambda group: group[0].startswith(SERVER))
    judges = [_judge(group, settings) for group in groups]
    return judges[0] if len(judges) == 1 else EnsembleJudge(judges)


def specs_by_judge(specs: Sequence[str], settings: JudgeConfig) -> list[list[str]]:
    """Return the specs of each judge: servers of one model are one judge, which shares its questions among them."""
    groups: dict[str, list[str]] = {}
    for spec in specs:
        is_server = spec.startswith(SERVER)
        key = f"server {_address(spec)[1] or settings.judge_model}" if is_server else spec
        groups.setdefault(key, []).append(spec)
    return list(groups.values())


def _judge(specs: Sequence[str], settings: JudgeConfig) -> Judge:
    spec = specs[0]
    if spec == RUBRIC:
        return _rubric(settings)
    if spec.startswith(SERVER):
        return _server(specs, settings)
    if names_a_judge(spec):
        return own_judge(spec)
    device = judge_device(settings.judge_device)
    if spec.startswith(REWARD):
        from onetrunk.judges.local import load_reward_judge

        return load_reward_judge(spec.removeprefix(REWARD), device=device, batch_size=settings.judge_batch_size)
    from onetrunk.judges.local import load_causal_judge
    from onetrunk.models.loading import LoadError

    try:
        return load_causal_judge(spec, device=device, batch_size=settings.judge_batch_size)
    except LoadError as error:
        raise LoadError(f"judge: {error}. Write a judge on a server as http://HOST:PORT/v1#model={spec}") from error


def names_a_judge(spec: str) -> bool:
    """Return whether a text names a Judge in Python: path/to/file.py:NAME or package.module.NAME, and no folder."""
    if spec == RUBRIC or spec.startswith((REWARD, *SERVER)):
        return False
    if Path(os.path.expanduser(spec)).exists():
        return spec.endswith(".py")  # Without a name in it, which the error asks for.
    return spec.rpartition(":")[0].endswith(".py") or is_dotted_path(spec)


def own_judge(spec: str) -> Judge:
    """Return the Judge of the user's that a text names; a class is called without arguments."""
    judge = find_object(spec, "judge")
    is_class = inspect.isclass(judge)
    if not (issubclass(judge, Judge) if is_class else isinstance(judge, Judge)):
        raise TypeError(
            f"judge {spec!r} is of type {type(judge).__name__}; expected a subclass of onetrunk.judges.judge.Judge, or"
            " an instance of one"
        )
    if is_class:
        try:
            judge = judge()
        except TypeError as error:
            raise TypeError(
                f"judge {spec!r} cannot be made without arguments ({error}); give its class defaults, or name an"
                " instance"
            ) from error
    try:
        is_named = judge.name == model_name(judge.name) != "" and isinstance(judge.identity, dict)
        digest(judge.identity)
    except (AttributeError, TypeError, ValueError):
        is_named = False
    if not is_named:
        raise ValueError(
            f"judge {spec!r} needs a name of letters, digits, '.', '_' and '-', and an identity: a dict of JSON values"
            " that names all that its answers depend on, such as {'kind': 'mine', 'version': 1}"
        )
    return judge


def _rubric(settings: JudgeConfig) -> RubricJudge:
    if not settings.rubric:
        raise ValueError(
            "judge is rubric and rubric is not set; give the check of each tag, such as"
            " {concise: path/to/file.py:function}"
        )
    checks: dict[str, Check] = {}
    for tag, check in settings.rubric.items():
        what = f"the rubric's check for the tag {tag!r}:"
        checks[tag] = find_object(check, what) if isinstance(check, str) else check
    judge = RubricJudge(checks)
    if settings.constitution:
        judge.require(load_constitution(settings.constitution))
    return judge


def _server(specs: Sequence[str], settings: JudgeConfig) -> Judge:
    # Not at the top: a rubric needs no HTTP.
    from onetrunk.judges.server import ServerJudge
    from onetrunk.servers.fleet import RetryPolicy

    urls = [_address(spec)[0] for spec in specs]
    model = _address(specs[0])[1] or settings.judge_model
    if not model:
        raise ValueError(
            f"judge_model is not set, and the server {urls[0]} may have several models; name one, or write"
            f" '{urls[0]}#model=NAME'"
        )
    return ServerJudge(
        urls,
        model,
        api_key_env=settings.judge_api_key_env,
        max_concurrency=settings.judge_max_concurrency,
        samples=settings.judge_samples,
        policy=RetryPolicy(call_timeout_s=settings.judge_timeout_s),
        verdict_tokens=settings.judge_verdict_tokens,
        extra_body=settings.judge_extra_body,
    )


def judge_device(name: str | None) -> torch.device:
    """Return the device of that name; for None the accelerator, or the CPU without one."""
    import torch  # Here: the command line checks JudgeConfig before it imports torch.

    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"judge_device is {name!r}; expected a device such as cpu or cuda:1") from None


def _address(spec: str) -> tuple[str, str | None]:
    """Return the address of a server and the name after "#model=", if any."""
    url, separator, option = spec.partition("#")
    if not separator:
        return url, None
    key, _, model = option.partition("=")
    if key != "model" or not model:
        raise ValueError(f"the judge's address has '#{option}' after it; expected '#model=NAME'")
    return url, model


class EnsembleJudge(Judge):
    """The mean of its members' answers (see `Judge`).

    A member that abstains is left out of the mean; if all abstain, so does the ensemble. A member's error is the
    ensemble's error, because the mean would change once that member answers. `details` hold each member's answer and
    their disagreement, the population standard deviation.

    Args:
        judges: two or more different ones.
        memory: keeps the answers of each member as soon as they arrive; what it holds is not asked again.
    """

    name = "ensemble"

    def __init__(self, judges: Sequence[Judge], memory: Ledger | None = None):
        self.memory = memory
        identities = [judge.identity for judge in judges]
        twice = next((j.name for i, j in enumerate(judges) if j.identity in identities[:i]), None)
        if twice is not None:
            raise ValueError(f"the judge {twice!r} is twice in the ensemble and would count double; name it once")
        self.members = dict(zip(unique_names([judge.name for judge in judges]), judges, strict=True))
        self.identity: dict[str, Any] = {"kind": "ensemble", "members": identities}

    def _answer_all(self, questions: Sequence[Question], keep: Done) -> None:
        """Ask one member after the other; an answer is known when the last one has given its own."""
        answers: dict[int, dict[str, Answer]] = {}
        *_, last = self.members

        def take(index: int, answer: Answer, member: str) -> None:
            answers.setdefault(index, {})[member] = answer
            if member == last:
                keep(index, _joined(answers.pop(index)))

        for name, judge in self.members.items():
            ask_missing(judge, questions, self.memory, done=functools.partial(take, member=name))


def with_memory(judge: Judge, memory: Ledger) -> Judge:
    """Return a judge that keeps the answers of its members too, so that none is lost while another member is asked."""
    return EnsembleJudge(list(judge.members.values()), memory) if isinstance(judge, EnsembleJudge) else judge


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
