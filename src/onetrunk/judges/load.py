"""The settings of judges, and the judge that they mean.

judge: [rubric]                          plain Python checks (setting rubric)
judge: ["reward:runs/reward"]            a reward model: folder or Hub name, or an adapter of one
judge: ["http://127.0.0.1:8000/v1"]      a server with OpenAI's chat protocol (setting judge_model)
judge: [path/to/file.py:MyJudge]         a Judge of the user's: a class, or an instance; also package.module.MyJudge
judge: [Qwen/Qwen2.5-7B-Instruct]        a causal language model in this process: folder or Hub name
judge: [a, b]                            the mean of several (`EnsembleJudge`); servers of one model are one judge
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from onetrunk.judges.base import (
    Done,
    DoneEach,
    Items,
    Judge,
    Principle,
    Rating,
    Verdict,
    ask,
    ask_each,
    digest,
    model_name,
)
from onetrunk.judges.constitution import load_constitution
from onetrunk.judges.rubric import TEMPERATURE, Check, RubricJudge
from onetrunk.judges.template import VERDICT_TOKENS
from onetrunk.utils.calls import EndOfCalls
from onetrunk.utils.objects import find_object, is_dotted_path
from onetrunk.utils.options import option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

RUBRIC, REWARD, SERVER = "rubric", "reward:", ("http://", "https://")
KINDS = (
    "rubric, reward:FOLDER, a server's address (http://host/v1), a Judge of yours (path/to/file.py:NAME), or a causal"
    " model's folder or Hub name"
)
DTYPES = ("auto", "bfloat16", "float16", "float32")
METHODS = ("auto", "logprobs", "votes")
# Entries of a call's body that the judge sets itself, and the settings of those that have one.
SENT = frozenset(
    "model messages max_tokens seed temperature top_p logprobs top_logprobs n stream chat_template_kwargs".split()
)
INSTEAD = {
    "model": "judge_model",
    "max_tokens": "judge_verdict_tokens",
    "logprobs": "judge_method",
    "top_logprobs": "judge_method",
    "chat_template_kwargs": "judge_chat_template_kwargs",
}
# Questions that pass through all members in this process before the next ones.
SLICE = 64
# How long an ensemble that ends with an error waits for the calls of its members.
JOIN_S = 5.0
# What members in threads have answered: numbers of member, principle and item, and the answer; an error; None: an end.
Arrived = queue.SimpleQueue
# Settings, the test of each, and what to change.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "rubric judge_chat_template_kwargs judge_extra_body",
        lambda value: value is None or isinstance(value, dict),
        """expected a mapping, as JSON such as '{"name": "value"}'""",
    ),
    (
        "judge_batch_size judge_max_concurrency judge_samples judge_max_calls judge_verdict_tokens",
        lambda value: value >= 1,
        "set it to 1 or more",
    ),
    ("judge_reasoning_samples", lambda value: value >= 1, "set it to 1 or more"),
    ("judge_reasoning_tokens", lambda value: value >= 0, "set it to 0 or more"),
    (
        "judge_timeout_s judge_item_timeout_s judge_patience_s rubric_temperature",
        lambda value: 0 < value < math.inf,
        "set a finite number above 0",
    ),
    ("judge_min_label_mass", lambda value: 0 <= value <= 1, "set it from 0 to 1"),
    ("judge_method", METHODS.__contains__, f"expected one of {', '.join(METHODS)}"),
    ("judge_dtype", DTYPES.__contains__, f"expected one of {', '.join(DTYPES)}"),
)


@dataclass
class JudgeConfig:
    """Which judges, and by which principles. A dataclass for TrlParser: one field is one YAML key and one option."""

    judge: list[str] | None = option(
        None,
        "rubric; reward:FOLDER (a reward model, or its Hub name); http(s)://host/v1 (a server; judge_model, or"
        " '#model=NAME' after the address); a Judge of yours (path/to/file.py:NAME, package.module.NAME); else a"
        " causal model's folder or Hub name. Several: their mean; servers of one model share its questions.",
    )
    constitution: str | None = option(None, "YAML file with the principles to judge by.")
    # rubric
    rubric: dict[str, str] | None = option(
        None,
        "Judge rubric: tag of a principle -> path/to/file.py:function or package.module.function, with the signature"
        " of reward functions; as JSON on the command line.",
    )
    rubric_temperature: float = option(
        TEMPERATURE, "Judge rubric: P(better) = logistic(score difference / rubric_temperature); above 0."
    )
    # models in this process
    judge_batch_size: int = option(8, "Questions, or texts of a reward model, per forward.")
    judge_dtype: str = option("auto", "Precision of a causal judge's weights. auto: the checkpoint's own.", DTYPES)
    judge_device: str | None = option(None, "Such as cuda:1 or cpu; None: the accelerator, if there is one.")
    judge_min_label_mass: float = option(
        0.5, "A causal judge abstains if its labels together have less probability; 0 to 1."
    )
    # models that write
    judge_reasoning_tokens: int = option(0, "Longest reasoning before each answer, tokens; 0: none.")
    judge_reasoning_samples: int = option(
        1,
        "With judge_reasoning_tokens: samples of reasoning with a verdict each, whose probabilities are averaged; with"
        " 1 a model in this process reasons greedily.",
    )
    # servers
    judge_model: str | None = option(None, "Name of the model on the server.")
    judge_api_key_env: str | None = option(None, "Environment variable that holds the server's key; None: no key.")
    judge_tokenizer: str | None = option(
        None,
        "Folder or Hub name of the tokenizer of a server's model: its control tokens are removed from the judged"
        " texts. None: the marks that a vLLM server's chat template shows (/tokenize), and those of a general rule.",
    )
    judge_max_concurrency: int = option(
        8, "Most calls in flight to each server; fewer while it is overloaded (HTTP 429, 503, or no answer in time)."
    )
    judge_timeout_s: float = option(60.0, "Deadline of one call to a server, seconds.")
    judge_max_calls: int = option(8, "Most calls to a server for one question when calls fail, the first included.")
    judge_item_timeout_s: float = option(
        900.0, "Deadline of one question to a server over all its calls and the waits between them, seconds."
    )
    judge_patience_s: float = option(
        180.0, "Give a server up when it has answered no call, not even a control question, for this many seconds."
    )
    judge_verdict_tokens: int = option(
        VERDICT_TOKENS,
        "Longest reply of a server, tokens. A model that reasons by itself before it answers needs room for that too,"
        " such as 2048.",
    )
    judge_chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "Keywords for the chat template of a server's model, such as {enable_thinking: false}; sent as"
        " chat_template_kwargs (vLLM, SGLang); as JSON on the command line.",
    )
    judge_extra_body: dict[str, Any] | None = option(
        None,
        "More entries for the body of every call to a server, such as {reasoning_effort: low}; as JSON on the"
        " command line.",
    )
    judge_samples: int = option(5, "Votes on a question if the server returns no log probabilities.")
    judge_method: str = option(
        "auto",
        "auto: log probabilities if a reply has them, else votes; votes: never ask for them; logprobs: reject a"
        " server without.",
        METHODS,
    )
    judge_allow_http: bool = option(False, "Allow plain http also to hosts outside this machine and private networks.")

    def __post_init__(self) -> None:
        if isinstance(self.judge, str):
            self.judge = [self.judge]
        for names, is_allowed, expected in RANGES:
            for name in names.split():
                if not is_allowed(getattr(self, name)):
                    raise ValueError(f"{name} is {getattr(self, name)!r}; {expected}")
        if self.judge_reasoning_samples > 1 and not self.judge_reasoning_tokens:
            raise ValueError(
                f"judge_reasoning_samples is {self.judge_reasoning_samples} and judge_reasoning_tokens is 0, so there"
                " is no reasoning; set judge_reasoning_tokens too, such as 512"
            )
        taken = sorted(SENT & set(self.judge_extra_body or {}))
        if taken:
            instead = f"set {INSTEAD[taken[0]]} instead" if taken[0] in INSTEAD else "leave it out"
            raise ValueError(f"judge_extra_body sets {taken[0]}, which the judge sets itself; {instead}")

    @property
    def extra_body(self) -> dict[str, Any]:
        """The entries that are added to the body of every call to a server."""
        kwargs = self.judge_chat_template_kwargs
        return (self.judge_extra_body or {}) | ({"chat_template_kwargs": kwargs} if kwargs else {})


def load_judge(settings: JudgeConfig, resolve: Callable[[str], Check] | None = None) -> Judge:
    """Return the judge that settings mean. Wrong settings are found before a model is loaded.

    Args:
        settings: with at least one spec in `judge`.
        resolve: turns a text in `rubric` into a function (`resolve_reward`); None if the rubric holds functions.

    Raises:
        ValueError: no judge, a spec that means none, or a missing setting.
        RuntimeError: a model that cannot be loaded.
    """
    specs = settings.judge or []
    if not specs:
        raise ValueError(f"judge is not set; give {KINDS}")
    _check_specs(specs)
    if settings.rubric and RUBRIC not in specs:
        raise ValueError(f"rubric is set and judge is {', '.join(specs)}; add rubric to judge, or leave rubric out")
    groups = specs_by_judge(specs, settings)
    # Judges that load nothing come first: their mistakes are the cheapest to find.
    load_order = sorted(
        groups,
        key=lambda group: (group[0] != RUBRIC, not names_a_judge(group[0]), not group[0].startswith(SERVER)),
    )
    by_group = {tuple(group): _judge(group, settings, resolve) for group in load_order}
    # The order is part of an ensemble's identity.
    judges = [by_group[tuple(group)] for group in sorted(groups, key=lambda group: group[0].startswith(SERVER))]
    return judges[0] if len(judges) == 1 else EnsembleJudge(judges)


def specs_by_judge(specs: Sequence[str], settings: JudgeConfig) -> list[list[str]]:
    """Return the specs of each judge: servers of one model are one judge, which shares its questions among them."""
    groups: dict[str, list[str]] = {}
    for spec in specs:
        key = spec
        if spec.startswith(SERVER):
            key = f"server {_address(spec)[1] or settings.judge_model}"
        groups.setdefault(key, []).append(spec)
    return list(groups.values())


def check_judge(judge: Judge) -> None:
    """Check the servers among a judge's members (see `ServerJudge.check`, which raises ValueError or RuntimeError)."""
    for member in judge.judges if isinstance(judge, EnsembleJudge) else [judge]:
        if str(member.identity.get("kind")) == "server":
            member.check()


def _judge(specs: Sequence[str], settings: JudgeConfig, resolve: Callable[[str], Check] | None) -> Judge:
    spec = specs[0]
    if spec == RUBRIC:
        return _rubric(settings, resolve)
    if spec.startswith(SERVER):
        return _server(specs, settings)
    if names_a_judge(spec):
        return own_judge(spec)
    device = judge_device(settings.judge_device)
    if spec.startswith(REWARD):
        from onetrunk.judges.reward_model import load_reward_judge

        return load_reward_judge(spec.removeprefix(REWARD), device=device, batch_size=settings.judge_batch_size)
    from onetrunk.judges.local import load_causal_judge

    return load_causal_judge(
        spec,
        device=device,
        dtype=settings.judge_dtype,
        batch_size=settings.judge_batch_size,
        reasoning_tokens=settings.judge_reasoning_tokens,
        reasoning_samples=settings.judge_reasoning_samples,
        min_label_mass=settings.judge_min_label_mass,
    )


def names_a_judge(spec: str) -> bool:
    """Return whether a text names a Judge in Python: path/to/file.py:NAME or package.module.NAME, and no folder."""
    if spec == RUBRIC or spec.startswith((REWARD, *SERVER)):
        return False
    if Path(spec).expanduser().exists():
        return spec.endswith(".py")  # Without a name in it, which the error asks for.
    return spec.rpartition(":")[0].endswith(".py") or is_dotted_path(spec)


def own_judge(spec: str) -> Judge:
    """Return the Judge of the user's that a text names; a class is called without arguments.

    Raises:
        ValueError: there is no such file, module or name, or its name or identity is not as `Judge` says.
        TypeError: the object is no Judge, or its class needs arguments.
        RuntimeError: importing the module failed.
    """
    judge = find_object(spec, "judge", _is_judge, "judges")
    if not _is_judge(judge):
        raise TypeError(
            f"judge {spec!r} is of type {type(judge).__name__}; expected a subclass of onetrunk.judges.base.Judge, or"
            " an instance of one"
        )
    if inspect.isclass(judge):
        try:
            judge = judge()
        except TypeError as error:
            raise TypeError(
                f"judge {spec!r} cannot be made without arguments ({error}); give its class defaults, or name an"
                " instance"
            ) from error
    name, identity = getattr(judge, "name", None), getattr(judge, "identity", None)
    if not isinstance(name, str) or not name or name != model_name(name):
        raise ValueError(f"judge {spec!r} has the name {name!r}; set name to a text of letters, digits, '.', '_', '-'")
    try:
        is_mapping = isinstance(identity, dict) and bool(digest(identity))
    except (TypeError, ValueError):
        is_mapping = False
    if not is_mapping:
        raise ValueError(
            f"judge {spec!r} has the identity {identity!r}; set identity to a dict of JSON values that names all that"
            " its answers depend on, such as {'kind': 'mine', 'version': 1}"
        )
    return judge


def _is_judge(value: Any) -> bool:
    if inspect.isclass(value):
        return issubclass(value, Judge) and value.__module__ != Judge.__module__
    return isinstance(value, Judge)


def _rubric(settings: JudgeConfig, resolve: Callable[[str], Check] | None) -> RubricJudge:
    if not settings.rubric:
        raise ValueError(
            "judge is rubric and rubric is not set; give the check of each tag, such as"
            " {concise: path/to/file.py:function}"
        )
    checks: dict[str, Check] = {}
    for tag, check in settings.rubric.items():
        if isinstance(check, str) and resolve is not None:
            try:
                check = resolve(check)
            except (ValueError, TypeError, RuntimeError) as error:
                raise type(error)(f"the rubric's check for the tag {tag!r}: {error}") from error
        checks[tag] = check
    judge = RubricJudge(checks, settings.rubric_temperature)
    if settings.constitution:
        judge.require(load_constitution(settings.constitution))
    return judge


def _server(specs: Sequence[str], settings: JudgeConfig) -> Judge:
    # Not at the top: a rubric needs no HTTP.
    from onetrunk.judges.server import ServerJudge
    from onetrunk.utils.calls import RetryPolicy

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
        reasoning_tokens=settings.judge_reasoning_tokens,
        reasoning_samples=settings.judge_reasoning_samples,
        method=settings.judge_method,
        allow_http=settings.judge_allow_http,
        policy=RetryPolicy(
            max_calls=settings.judge_max_calls,
            call_timeout_s=settings.judge_timeout_s,
            item_timeout_s=settings.judge_item_timeout_s,
            patience_s=settings.judge_patience_s,
        ),
        verdict_tokens=settings.judge_verdict_tokens,
        extra_body=settings.extra_body,
        tokenizer=_tokenizer(settings.judge_tokenizer),
    )


def _tokenizer(name: str | None) -> PreTrainedTokenizerBase | None:
    if name is None:
        return None
    from onetrunk.models.base_model import load_tokenizer

    try:
        return load_tokenizer(name)
    except (OSError, RuntimeError, ValueError) as error:
        raise type(error)(f"judge_tokenizer: {error}") from error


def judge_device(name: str | None) -> torch.device:
    """Return the device of that name; for None the accelerator, or the CPU without one."""
    import torch  # Here: the command line checks JudgeConfig before it imports torch.

    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"judge_device is {name!r}; expected such as cpu, cuda or cuda:1") from None


def _check_specs(specs: list[str]) -> None:
    for spec in specs:
        if not isinstance(spec, str) or not spec.strip() or spec == REWARD:
            raise ValueError(f"judge names {spec!r}; expected {KINDS}")
        is_typo = difflib.get_close_matches(spec.lower(), [RUBRIC], cutoff=0.8) and spec != RUBRIC
        if is_typo and not Path(spec).expanduser().exists():
            raise ValueError(f"judge names {spec!r}; did you mean {RUBRIC!r}? There is no such folder")
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise ValueError(f"judge names {twice} twice, which would count double in the mean; name it once")


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

    Members that only wait for servers are asked at the same time, each in a thread; the others are asked meanwhile in
    this thread, because checks of users may need it.

    Args:
        judges: two or more different ones.
    """

    name = "ensemble"

    def __init__(self, judges: Sequence[Judge]):
        identities = [judge.identity for judge in judges]
        twice = next((j.name for i, j in enumerate(judges) if j.identity in identities[:i]), None)
        if twice is not None:
            raise ValueError(f"the judge {twice!r} is twice in the ensemble and would count double; name it once")
        self.judges = list(judges)
        self.names = unique_names([judge.name for judge in judges])
        self.identity: dict[str, Any] = {"kind": "ensemble", "members": identities}
        self.is_remote = all(getattr(judge, "is_remote", False) for judge in self.judges)

    def _answer(self, items: Items, principle: Principle, keep: Done) -> None:
        self._answer_each([(items, principle)], lambda _number, index, answer: keep(index, answer))

    def _answer_each(self, asked: Sequence[tuple[Items, Principle]], keep: DoneEach) -> None:
        answers: dict[tuple[int, int], dict[int, Any]] = {}
        arrived: Arrived = queue.SimpleQueue()
        is_over = threading.Event()
        remote = [n for n, judge in enumerate(self.judges) if getattr(judge, "is_remote", False)]
        threads = [
            threading.Thread(target=_ask_into, args=(arrived, is_over, self.judges[n], n, asked), daemon=True)
            for n in remote
        ]

        def take(member: int, number: int, index: int, answer: Any) -> None:
            found = answers.setdefault((number, index), {})
            found[member] = answer
            if len(found) == len(self.judges):
                del answers[number, index]
                keep(number, index, self._joined([found[n] for n in range(len(self.judges))]))

        for thread in threads:
            thread.start()
        try:
            num_ended = 0
            for number, start, part, principle in _slices(asked):
                for n in sorted(set(range(len(self.judges))) - set(remote)):
                    ask(self.judges[n], part, principle, functools.partial(_take_part, take, n, number, start))
                while not arrived.empty():
                    num_ended += _take_entry(arrived.get(), take)
            while num_ended < len(threads):
                num_ended += _take_entry(arrived.get(), take)
        finally:
            # After an error here, the members begin no further call.
            is_over.set()
            for thread in threads:
                thread.join(JOIN_S)

    def _joined(self, answers: Sequence[Verdict] | Sequence[Rating]) -> Verdict | Rating:
        named = list(zip(self.names, answers, strict=True))
        members, kind = {name: answer.number for name, answer in named}, type(answers[0])
        errors = [f"{name}: {answer.error}" for name, answer in named if answer.error]
        if errors:
            # "server" if one of the errors is the server's, else a kind that is the question's fault.
            kinds = [answer.error_kind for answer in answers if answer.error is not None]
            error_kind = "server" if "server" in kinds else kinds[0]
            return kind(None, error="; ".join(errors), details={"members": members}, error_kind=error_kind)
        numbers = [number for number in members.values() if number is not None]
        reasons = [f"{name}: {answer.reason}" for name, answer in named if answer.reason]
        details = {"members": members, "disagreement": pstdev(numbers) if numbers else None}
        return kind(fmean(numbers) if numbers else None, "\n".join(reasons) or None, details=details)


def _slices(asked: Sequence[tuple[Items, Principle]]) -> Iterator[tuple[int, int, Items, Principle]]:
    """Yield number of the principle, first index, items and principle of parts of at most SLICE items."""
    for number, (items, principle) in enumerate(asked):
        for start in range(0, len(items), SLICE):
            yield number, start, items[start : start + SLICE], principle


def _ask_into(
    arrived: Arrived, is_over: threading.Event, judge: Judge, member: int, asked: Sequence[tuple[Items, Principle]]
) -> None:
    """Ask a member in a thread: put its number, the place and the answer; at the end its error, if any, and None."""

    def put(number: int, index: int, answer: Any) -> None:
        arrived.put((member, number, index, answer))
        if is_over.is_set():
            raise EndOfCalls("the run has ended")

    try:
        ask_each(judge, asked, put)
    except BaseException as error:  # Raised again in the thread that asked the ensemble.
        arrived.put(error)
    arrived.put(None)


def _take_part(
    take: Callable[[int, int, int, Any], None], member: int, number: int, start: int, index: int, answer: Any
) -> None:
    take(member, number, start + index, answer)


def _take_entry(
    entry: tuple[int, int, int, Any] | BaseException | None, take: Callable[[int, int, int, Any], None]
) -> bool:
    """Take an answer, or raise a member's error; return whether a member has ended."""
    if isinstance(entry, BaseException):
        raise entry
    if entry is not None:
        take(*entry)
    return entry is None


def unique_names(names: Sequence[str]) -> list[str]:
    """Return different names: the second of a name becomes name_2."""
    unique: list[str] = []
    for name in names:
        numbered = chain([name], (f"{name}_{number}" for number in count(2)))
        unique.append(next(candidate for candidate in numbered if candidate not in unique))
    return unique
