"""The job that is planned: the numbers of a PPO recipe that memory and time depend on, with what had to be assumed."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onetrunk.costs import ModelShape
from onetrunk.plan.memory import ADAM_8BIT_BYTES, ADAM_BYTES, INT8_BYTES, NF4_BYTES
from onetrunk.plan.ranges import SETTINGS, require_ranges
from onetrunk.plan.shapes import ADAPTER_CONFIG, ITEMSIZES, ModelFacts

DTYPES = {"float32": 4.0, "bfloat16": 2.0, "int8": INT8_BYTES, "nf4": NF4_BYTES}
# Where neither the recipe nor the user says more.
ASSUMED_ROLLOUTS = 100
ASSUMED_PROMPT = 256
# Completions are about half as long as the longest, unless they are known.
MEAN_SHARE = 0.5
# Of the logarithm of completion lengths; 0.6 is that of chat replies, 1 has a heavy tail.
SPREAD = 0.6
# Share of a device that stays free: the error of the estimate, and fragments. Rows of changing length leave more of
# these: what one published program reserved was 1.2 to 1.4 times the predicted peak.
MARGIN, CHANGING_MARGIN = 0.08, 0.2
NORMAL = statistics.NormalDist()
# Variables with the settings of torch's allocator: the name of today, and the old one.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SCHEDULES = ("sync", "one_step", "async")


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and completions. Completions are log-normal, cut off at `longest`.

    Args:
        prompt: mean tokens of a prompt.
        completion: mean tokens of a completion.
        longest: most tokens of a completion.
        longest_prompt: most tokens of a prompt.
        spread: standard deviation of the logarithm of completion lengths; 0: all have the mean length.
    """

    prompt: float
    completion: float
    longest: int
    longest_prompt: int
    spread: float = SPREAD

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.longest_prompt + self.longest

    @property
    def row(self) -> float:
        """Mean tokens of a row."""
        return self.prompt + self.completion

    def survival(self, length: float) -> float:
        """Return the share of completions that are longer than `length` tokens."""
        if length >= self.longest:
            return 0.0
        if self.spread == 0 or length <= 0:
            return 1.0 if length < self.completion else 0.0
        middle = math.log(max(1e-9, self._uncut_mean())) - self.spread**2 / 2
        return 0.5 * math.erfc((math.log(length) - middle) / (self.spread * math.sqrt(2)))

    def quantile(self, share: float) -> float:
        """Return the length that a share of the completions does not exceed; `share` is above 0 and below 1."""
        if self.spread == 0:
            return self.completion
        middle = math.log(max(1e-9, self._uncut_mean())) - self.spread**2 / 2
        return min(float(self.longest), math.exp(middle + self.spread * NORMAL.inv_cdf(share)))

    def _uncut_mean(self) -> float:
        """Return the mean before the cut at `longest`, such that the mean after it is `completion`."""
        return _uncut_mean(self.completion, float(self.longest), self.spread)


def _cut_mean(mean: float, longest: float, spread: float) -> float:
    """Return the mean of min(length, longest) for log-normal lengths of a mean."""
    middle = math.log(mean) - spread**2 / 2
    z = (math.log(longest) - middle) / spread

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return mean * normal(z - spread) + longest * (1 - normal(z))


_MEANS: dict[tuple[float, float, float], float] = {}


def _uncut_mean(mean: float, longest: float, spread: float) -> float:
    key = (mean, longest, spread)
    if key not in _MEANS:
        low, high = mean, longest * 1e6
        for _ in range(80):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if _cut_mean(middle, longest, spread) < mean else (low, middle)
        _MEANS[key] = high
    return _MEANS[key]


@dataclass(frozen=True)
class Job:
    """A PPO run, as memory and time see it; the fields have the meaning of the settings of their names.

    Args:
        base_bytes: bytes of a weight of the base.
        itemsize: bytes of an activation.
        adapted_layers: layers with adapters, the last of the model.
        trained_copies: adapters that train: policy, and the value's own.
        frozen_copies: adapters that do not train: the reference of a continued one, a reward on the trunk.
        reward: a reward model of its own that scores every completion in the trainer's processes; None: none.
        reward_bytes: bytes of a weight of it.
        keeps_states: the states at the cut stay on the device (trunk_cache auto or device).
        captures_states: sampling provides the states at the cut, so scoring does not run the layers below it.
        expands_segments: the allocator grows its segments, so that rows of changing length leave few fragments.
        stage_obstacle: the setting that excludes training in pipeline stages, with why; None: nothing does.
        assumed: what the recipe did not say, for people.
    """

    model: ModelFacts
    base_bytes: float
    itemsize: float
    lengths: Lengths
    lora_rank: int = 16
    adapted_layers: int = 0
    trained_copies: int = 1
    frozen_copies: int = 0
    has_reference: bool = True
    reward: ModelShape | None = None
    reward_bytes: float = 2.0
    rollout_batch_size: int = 64
    num_generations: int = 1
    num_rollouts: int = ASSUMED_ROLLOUTS
    num_ppo_epochs: int = 4
    num_minibatches: int = 1
    microbatch_rows: int = 8
    microbatch_tokens: int | None = None
    max_rollout_rows: int | None = None
    is_checkpointed: bool = False
    is_offloaded: bool = False
    optimizer_bytes: float = ADAM_BYTES
    keeps_states: bool = True
    captures_states: bool = False
    expands_segments: bool = True
    stage_obstacle: str | None = None
    is_padding_free: bool = False
    schedule: str = "sync"
    max_staleness: int = 0
    uses_server: bool = False
    save_every: int = 0
    keeps_checkpoints: int | None = None
    recipe: str | None = None
    assumed: tuple[str, ...] = field(default=(), compare=False)

    @property
    def shape(self) -> ModelShape:
        """Shape of the base."""
        return self.model.shape

    @property
    def rows(self) -> int:
        """Completions of a rollout."""
        return self.rollout_batch_size * self.num_generations

    @property
    def margin(self) -> float:
        """Share of a trainer's device that stays free."""
        return MARGIN if self.expands_segments or self.lengths.spread == 0 else CHANGING_MARGIN

    @property
    def adapter_weights(self) -> int:
        """Weights of one adapter."""
        return self.shape.lora_parameters(self.lora_rank, self.adapted_layers)

    @property
    def trained_weights(self) -> int:
        """Weights that train: adapters, and the value head."""
        return self.trained_copies * self.adapter_weights + self.shape.hidden_size + 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_rollouts * self.num_ppo_epochs * self.num_minibatches

    def tokens_of_forward(self, rows: int) -> int:
        """Return the most tokens of a forward, in a process that has `rows` rows in a minibatch."""
        tokens = min(rows, self.microbatch_rows) * self.lengths.width
        return min(tokens, max(self.microbatch_tokens, self.lengths.width)) if self.microbatch_tokens else tokens


def job_of(
    values: Mapping[str, Any],
    model: ModelFacts,
    *,
    reward: ModelFacts | None = None,
    prompt_tokens: float | None = None,
    completion_tokens: float | None = None,
    spread: float = SPREAD,
    num_rollouts: int | None = None,
    is_continued: bool = False,
    on_cpu: bool = False,
) -> Job:
    """Return the job that the values of a PPO recipe describe.

    Args:
        values: every setting of `onetrunk ppo` by name.
        model: facts of the base.
        reward: of a reward model that the trainer loads.
        prompt_tokens, completion_tokens: mean lengths; None: assumed.
        spread: of completion lengths.
        num_rollouts: instead of the recipe's.
        is_continued: the policy continues an adapter, so a frozen copy of it is the reference.
        on_cpu: activations have the precision of the base.

    Raises:
        ValueError: settings out of range, or that contradict each other or the model; the message names them.
    """
    assumed: list[str] = []
    require_ranges(values, SETTINGS)
    lengths = _lengths(values, prompt_tokens, completion_tokens, spread, assumed)
    base_bytes = _base_bytes(values, model)
    is_half = values["bf16"] or values["fp16"] or (base_bytes <= 2.0 and not on_cpu)
    rollouts = _rollouts(values, num_rollouts, assumed)
    if reward is None and any("/" in spec or spec.startswith("runs") for spec in _rewards(values)):
        assumed.append("the reward takes no memory and no time on these devices; name a model with --reward_model")
    captures = values["capture_trunk_states"]
    return Job(
        model=model,
        base_bytes=base_bytes,
        itemsize=2.0 if is_half else 4.0,
        lengths=lengths,
        adapted_layers=_adapted_layers(str(values["adapter_layers"]), model.shape.num_layers),
        frozen_copies=1 if is_continued else 0,
        reward=None if reward is None else reward.shape,
        reward_bytes=4.0 if on_cpu else min(2.0, reward.itemsize if reward else 2.0),
        num_rollouts=rollouts,
        captures_states=(not is_half) if captures is None else bool(captures),
        expands_segments=on_cpu or any("expandable_segments:true" in os.environ.get(n, "").lower() for n in ALLOCATOR),
        stage_obstacle=_stage_obstacle(values),
        assumed=tuple(assumed),
        **_settings(values),
    )


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job that are settings, or follow from one or two of them."""
    staleness = values["max_staleness"] if values["max_staleness"] is not None else 1
    same = ("rollout_batch_size", "num_generations", "num_ppo_epochs", "num_minibatches", "microbatch_tokens",
            "max_rollout_rows", "schedule")  # fmt: skip
    return {name: values[name] for name in same} | {
        "lora_rank": int(values["lora_r"]),
        "trained_copies": 2 if values["value_head"] == "adapter" else 1,
        "has_reference": values["beta"] > 0 or values["kl_target"] is not None,
        "microbatch_rows": values["per_device_train_batch_size"],
        "is_checkpointed": bool(values["activation_checkpointing"] or values.get("gradient_checkpointing")),
        "is_offloaded": bool(values["activation_offloading"]),
        "optimizer_bytes": ADAM_8BIT_BYTES if "8bit" in str(values.get("optim")) else ADAM_BYTES,
        "keeps_states": values["trunk_cache"] in ("auto", "device"),
        "is_padding_free": bool(values["padding_free"]),
        "max_staleness": {"sync": 0, "one_step": 1}.get(values["schedule"], staleness),
        "uses_server": bool(values["use_vllm"]),
        "save_every": int(values["save_steps"]) if values.get("save_strategy", "steps") == "steps" else 0,
        "keeps_checkpoints": values.get("save_total_limit"),
    }


def _stage_obstacle(values: Mapping[str, Any]) -> str | None:
    """Return the setting that a run with pipeline_training would reject; a plan sets the others itself."""
    if values["fp16"]:
        return "fp16 scales gradients"
    if values["capture_trunk_states"]:
        return "capture_trunk_states keeps states for the layers above the cut"
    if values["trunk_cache"] not in ("auto", "off"):
        return f"trunk_cache {values['trunk_cache']} keeps the output of layers that other processes have"
    adapters = [spec for spec in _rewards(values) if (Path(spec).expanduser() / ADAPTER_CONFIG).is_file()]
    return f"the reward {adapters[0]} is an adapter on the policy's base" if adapters else None


def _rewards(values: Mapping[str, Any]) -> list[str]:
    written = values.get("reward_funcs") or []
    return [written] if isinstance(written, str) else [str(spec) for spec in written]


def _lengths(
    values: Mapping[str, Any],
    prompt_tokens: float | None,
    completion_tokens: float | None,
    spread: float,
    assumed: list[str],
) -> Lengths:
    longest, longest_prompt = int(values["max_completion_length"]), values["max_prompt_length"]
    if longest_prompt is None:
        longest_prompt = max(ASSUMED_PROMPT, math.ceil(prompt_tokens or 0))
        if prompt_tokens is None:
            assumed.append(f"prompts of at most {longest_prompt} tokens (the recipe has no max_prompt_length)")
        else:
            longest_prompt = math.ceil(prompt_tokens)
    if prompt_tokens is None:
        prompt_tokens = longest_prompt * MEAN_SHARE
        assumed.append(f"prompts of {prompt_tokens:g} tokens on average (--prompt_tokens)")
    if completion_tokens is None:
        completion_tokens = longest * MEAN_SHARE
        assumed.append(f"completions of {completion_tokens:g} tokens on average (--completion_tokens)")
    if not 0 < completion_tokens <= longest:
        raise ValueError(
            f"--completion_tokens is {completion_tokens:g} and max_completion_length {longest}; give a mean above 0"
            " and at most that"
        )
    if not 0 < prompt_tokens <= longest_prompt:
        raise ValueError(
            f"--prompt_tokens is {prompt_tokens:g} and max_prompt_length {longest_prompt}; give a mean above 0 and at"
            " most that"
        )
    if completion_tokens > 0.999 * longest:
        spread = 0.0
    return Lengths(prompt_tokens, completion_tokens, longest, longest_prompt, spread)


def _base_bytes(values: Mapping[str, Any], model: ModelFacts) -> float:
    if values.get("load_in_4bit"):
        return NF4_BYTES
    if values.get("load_in_8bit"):
        return INT8_BYTES
    dtype = str(values.get("dtype") or "auto")
    return model.itemsize if dtype == "auto" else ITEMSIZES.get(dtype, model.itemsize)


def _adapted_layers(text: str, layers: int) -> int:
    if text == "all":
        return layers
    number = text.removeprefix("top-")
    if not number.isdigit() or not 1 <= int(number) <= layers:
        raise ValueError(
            f"adapter_layers is {text!r}; this model has {layers} layers: write all, or top-1 to top-{layers}"
        )
    return int(number)


def _rollouts(values: Mapping[str, Any], given: int | None, assumed: list[str]) -> int:
    if given is not None or values["num_rollouts"] is not None:
        return given if given is not None else int(values["num_rollouts"])
    if values.get("max_steps", -1) > 0:
        return math.ceil(values["max_steps"] / (values["num_ppo_epochs"] * values["num_minibatches"]))
    assumed.append(f"{ASSUMED_ROLLOUTS} rollouts (the recipe says neither num_rollouts nor max_steps; --num_rollouts)")
    return ASSUMED_ROLLOUTS
