"""From settings to a judge: which kind a spec means, and what each kind is told. Knows the kinds of judges by name.

judge: [rubric]                          plain Python checks (setting rubric)
judge: ["reward:runs/reward"]            a reward model: folder or Hub name, or an adapter of one
judge: ["http://127.0.0.1:8000/v1"]      a server that speaks OpenAI's chat protocol (setting judge_model)
judge: [Qwen/Qwen2.5-7B-Instruct]        a causal language model in this process: folder or Hub name
judge: [a, b]                            the mean of several, each of any kind
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onetrunk.judges.base import Judge
from onetrunk.judges.chat import VERDICT_TOKENS
from onetrunk.judges.constitution import load_constitution
from onetrunk.judges.ensemble import EnsembleJudge
from onetrunk.judges.rubric import TEMPERATURE, Check, RubricJudge

RUBRIC, REWARD, SERVER = "rubric", "reward:", ("http://", "https://")
KINDS = "rubric, reward:FOLDER, a server's address (http://host/v1), or a causal model's folder or Hub name"
DTYPES = ("auto", "bfloat16", "float16", "float32")
METHODS = ("auto", "logprobs", "votes")
# Entries of a call's body that are the judge's own, and the settings of those that have one.
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
EXAMPLES = {"rubric": '{"concise": "checks.py:concise"}'}


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata: dict[str, Any] = {"help": text}
    return field(default=default, metadata=metadata | ({"choices": list(choices)} if choices else {}))


@dataclass
class JudgeSettings:
    """Who judges, by which principles. A dataclass for TrlParser: one field is one YAML key and one option."""

    judge: list[str] | None = _option(
        None,
        "rubric; reward:FOLDER (a reward model, or its Hub name); http(s)://host/v1 (a server; judge_model, or"
        " '#model=NAME' behind the address); else a causal model's folder or Hub name. Several: their mean.",
    )
    constitution: str | None = _option(None, "YAML file with the principles by which is judged.")
    # rubric
    rubric: dict[str, str] | None = _option(
        None,
        "Judge rubric: tag of a principle -> path/to/file.py:function or package.module.function, with the signature"
        " of reward functions; as JSON on the command line.",
    )
    rubric_temperature: float = _option(
        TEMPERATURE, "Judge rubric: P(better) = logistic(score difference / rubric_temperature); above 0."
    )
    # models in this process
    judge_batch_size: int = _option(8, "Questions, or texts of a reward model, in one forward.")
    judge_dtype: str = _option("auto", "Precision of a causal judge's weights. auto: the checkpoint's own.", DTYPES)
    judge_device: str | None = _option(None, "Such as cuda:1 or cpu; None: the accelerator, where there is one.")
    judge_min_label_mass: float = _option(
        0.5, "A causal judge abstains where its labels together have less probability; 0 to 1."
    )
    # models that write
    judge_reasoning_tokens: int = _option(0, "Longest reasoning before each answer, tokens; 0: none.")
    # servers
    judge_model: str | None = _option(None, "Name of the model on the server.")
    judge_api_key_env: str | None = _option(None, "Environment variable that holds the server's key; None: no key.")
    judge_tokenizer: str | None = _option(
        None,
        "Folder or Hub name of the tokenizer of a server's model: its control tokens are taken out of what is judged."
        " None: the marks that a vLLM server's chat template shows (/tokenize), and those of a general rule.",
    )
    judge_max_concurrency: int = _option(8, "Calls of a server at once, at most.")
    judge_timeout_s: float = _option(60.0, "Deadline of one call of a server, seconds.")
    judge_max_calls: int = _option(8, "Calls of a server for one question, the first included, when calls fail.")
    judge_item_timeout_s: float = _option(
        900.0, "Deadline of one question to a server over all its calls and the waits between them, seconds."
    )
    judge_patience_s: float = _option(
        180.0, "Give a server up when it has answered no call for so many seconds, a control question included."
    )
    judge_verdict_tokens: int = _option(
        VERDICT_TOKENS,
        "Longest reply of a server, tokens. A model that reasons on its own before it answers needs room for that too,"
        " such as 2048.",
    )
    judge_chat_template_kwargs: dict[str, Any] | None = _option(
        None,
        "Keywords for the chat template of a server's model, such as {enable_thinking: false}; sent as"
        " chat_template_kwargs (vLLM, SGLang); as JSON on the command line.",
    )
    judge_extra_body: dict[str, Any] | None = _option(
        None,
        "Further entries of the body of every call of a server, such as {reasoning_effort: low}; as JSON on the"
        " command line.",
    )
    judge_samples: int = _option(5, "Votes on a question where the server returns no log probabilities.")
    judge_method: str = _option(
        "auto",
        "auto: log probabilities where a reply has them, else votes; votes: never ask for them; logprobs: refuse a"
        " server without.",
        METHODS,
    )
    judge_allow_http: bool = _option(False, "Plain http also to hosts outside this machine and private networks.")

    def __post_init__(self) -> None:
        if isinstance(self.judge, str):
            self.judge = [self.judge]
        for name in ("rubric", "judge_chat_template_kwargs", "judge_extra_body"):
            setattr(self, name, _mapping(name, getattr(self, name)))
        self._check_extra_body()
        counts = "judge_batch_size judge_max_concurrency judge_samples judge_max_calls judge_verdict_tokens".split()
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if self.judge_reasoning_tokens < 0:
            raise ValueError(f"judge_reasoning_tokens is {self.judge_reasoning_tokens}; set it to 0 or more")
        seconds = ("judge_timeout_s", "judge_item_timeout_s", "judge_patience_s")
        for name in (*seconds, "rubric_temperature"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)}; set a finite number above 0")
        if not 0 <= self.judge_min_label_mass <= 1:
            raise ValueError(f"judge_min_label_mass is {self.judge_min_label_mass}; set it from 0 to 1")
        for name, choices in (("judge_method", METHODS), ("judge_dtype", DTYPES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")

    def _check_extra_body(self) -> None:
        taken = sorted(SENT & set(self.judge_extra_body or {}))
        if taken:
            instead = INSTEAD.get(taken[0])
            raise ValueError(
                f"judge_extra_body sets {taken[0]}, which the judge sets itself;"
                f" {f'set {instead} instead' if instead else 'leave it out'}"
            )
        try:
            json.dumps(self.extra_body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"judge_extra_body or judge_chat_template_kwargs is not JSON ({error}); use text, finite numbers,"
                " true, false, lists and mappings"
            ) from None

    @property
    def extra_body(self) -> dict[str, Any]:
        """What goes into the body of every call of a server beside what the judge sets itself."""
        kwargs = self.judge_chat_template_kwargs
        return (self.judge_extra_body or {}) | ({"chat_template_kwargs": kwargs} if kwargs else {})


def load_judge(settings: JudgeSettings, resolve: Callable[[str], Check] | None = None) -> Judge:
    """Return the judge that settings mean; what is wrong with them is said before a model loads or a server is asked.

    Args:
        settings: with at least one spec in `judge`.
        resolve: makes a function of a text in `rubric`; `rewards.resolve.resolve_reward`, from above. None: the rubric
            holds functions.

    Raises:
        ValueError: no judge, a spec that means none, or settings that a spec needs and lacks.
        FileNotFoundError, RuntimeError: no model where one should be.
    """
    specs = settings.judge or []
    if not specs:
        raise ValueError(f"judge is not set; give {KINDS}")
    _check_specs(specs)
    if settings.rubric and RUBRIC not in specs:
        raise ValueError(f"rubric is set and judge is {', '.join(specs)}; add rubric to judge, or leave rubric out")
    # Those that load nothing come first: their mistakes are the cheapest to find.
    made: dict[str, Judge] = {}
    for spec in sorted(specs, key=lambda spec: (spec != RUBRIC, not spec.startswith(SERVER))):
        made[spec] = _judge(spec, settings, resolve)
    # Servers are asked last: what they answer is bought, and the last member's answers are kept one by one.
    judges = [made[spec] for spec in sorted(specs, key=lambda spec: spec.startswith(SERVER))]
    return judges[0] if len(judges) == 1 else EnsembleJudge(judges)


def check_judge(judge: Judge) -> None:
    """Ask the servers among a judge's members whether they are there and can do what is asked of them.

    Raises:
        ValueError, RuntimeError: see `ServerJudge.check`.
    """
    for member in judge.judges if isinstance(judge, EnsembleJudge) else [judge]:
        if str(member.identity.get("kind")) == "server":
            member.check()


def _judge(spec: str, settings: JudgeSettings, resolve: Callable[[str], Check] | None) -> Judge:
    if spec == RUBRIC:
        return _rubric(settings, resolve)
    if spec.startswith(SERVER):
        return _server(spec, settings)
    device = judge_device(settings.judge_device)
    if spec.startswith(REWARD):
        from onetrunk.judges.reward_model import load_reward_judge

        return load_reward_judge(spec.removeprefix(REWARD), device=device, batch_size=settings.judge_batch_size)
    return _causal(spec, settings, device)


def _causal(spec: str, settings: JudgeSettings, device: torch.device) -> Judge:
    from onetrunk.judges.local import load_causal_judge

    return load_causal_judge(
        spec,
        device=device,
        dtype=settings.judge_dtype,
        batch_size=settings.judge_batch_size,
        reasoning_tokens=settings.judge_reasoning_tokens,
        min_label_mass=settings.judge_min_label_mass,
    )


def _rubric(settings: JudgeSettings, resolve: Callable[[str], Check] | None) -> RubricJudge:
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


def _server(spec: str, settings: JudgeSettings) -> Judge:
    # Not at the top: whoever judges with checks needs no HTTP.
    from onetrunk.judges.calls import RetryPolicy
    from onetrunk.judges.server import ServerJudge

    url, model = _address(spec)
    model = model or settings.judge_model
    if not model:
        raise ValueError(
            f"judge_model is not set, and the server {url} may have several models; name one, or write"
            f" '{url}#model=NAME'"
        )
    return ServerJudge(
        url,
        model,
        api_key_env=settings.judge_api_key_env,
        max_concurrency=settings.judge_max_concurrency,
        samples=settings.judge_samples,
        reasoning_tokens=settings.judge_reasoning_tokens,
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


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from onetrunk.models.base import load_tokenizer

    try:
        return load_tokenizer(name)
    except (OSError, RuntimeError, ValueError) as error:
        raise type(error)(f"judge_tokenizer: {error}") from error


def judge_device(name: str | None) -> torch.device:
    """Return the device of that name; for None the accelerator, or the CPU where there is none.

    Raises:
        ValueError: no device has this name.
    """
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
    """Return the address and, where '#model=NAME' stands behind it, the name."""
    url, separator, option = spec.partition("#")
    if not separator:
        return url, None
    key, _, model = option.partition("=")
    if key != "model" or not model:
        raise ValueError(f"the judge's address has '#{option}' behind it; expected '#model=NAME'")
    return url, model


def _mapping(name: str, given: Any) -> dict[str, Any] | None:
    """Return the mapping that a setting is, or that its JSON is."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except json.JSONDecodeError:
            pass
    if value is not None and not isinstance(value, dict):
        example = EXAMPLES.get(name, '{"enable_thinking": false}')
        raise ValueError(f"{name} is {given!r}; expected a mapping, as JSON such as '{example}'")
    return value
