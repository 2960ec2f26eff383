"""The job that is planned: the model's shape, the lengths of rows, and the settings of a PPO recipe.

A shape comes from a config.json, read as JSON, or from `models.yaml`, for public models by name.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from onetrunk.costs import ModelShape
from onetrunk.rewards.specs import Spec, read_spec
from onetrunk.utils.files import read_json, read_yaml
from onetrunk.utils.options import parse_adapter_layers, stage_obstacles

MODELS = Path(__file__).with_name("models.yaml")
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# Endings of names that do not change a shape.
TUNED = ("-instruct", "-chat", "-base", "-it", "-hf")
ITEMSIZES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0}
# A weight in 4 bits with the constants of its block, and in 8; embedding and head of such a base stay in 16 bits.
FP32, HALF_BYTES, INT8_BYTES, NF4_BYTES = 4, 2.0, 1.0, 0.516
DTYPES = {"float32": 4.0, "bfloat16": 2.0, "int8": INT8_BYTES, "nf4": NF4_BYTES}
# The two numbers of Adam for a trained weight, in float32 and in 8 bits.
ADAM_BYTES, ADAM_8BIT_BYTES = 8, 2
# Where neither the recipe nor the user says more; completions and prompts are about half as long as the longest.
ASSUMED_ROLLOUTS, ASSUMED_PROMPT, MEAN_SHARE = 100, 256, 0.5
# Of the logarithm of completion lengths; 0.6 is usual for chat replies, 1 has a heavy tail.
SPREAD = 0.6
# Share of a device that stays free: the error of the estimate, and fragments. Rows of changing length leave more of
# these: what one published program reserved was 1.2 to 1.4 times the predicted peak.
MARGIN, CHANGING_MARGIN = 0.08, 0.2
# Variables with the settings of torch's allocator: the name of today, and the old one.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SCHEDULES = ("sync", "one_step", "async")
# Settings that a job has under the same name.
SAME_NAMES = (
    "rollout_batch_size", "num_generations", "num_ppo_epochs", "num_minibatches", "microbatch_tokens",
    "max_rollout_rows", "schedule",
)  # fmt: skip
NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class ModelFacts:
    """What a plan knows of a model.

    Args:
        itemsize: bytes of a weight in the checkpoint.
        source: where the shape comes from, for people.
        base: name of the base, where the model is a folder with an adapter on it.
        lora_rank, first_layer: rank of that adapter, and the first layer that it changes.
    """

    name: str
    shape: ModelShape
    itemsize: float
    source: str
    base: str | None = None
    lora_rank: int | None = None
    first_layer: int = 0


def read_model(name: str) -> ModelFacts:
    """Return the facts of a model: a folder, a config.json, a name in the Hub's cache, or one of models.yaml."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        config = _adapter_config(path)
        if config is not None:
            base, layers = config["base_model_name_or_path"], config.get("layers_to_transform") or 0
            first = layers if isinstance(layers, int) else min(layers)
            return replace(read_model(base), name=name, base=base, lora_rank=config.get("r"), first_layer=first)
        path /= CONFIG
    elif not path.exists():
        path = _in_cache(name) or path
    if path.is_file():
        config = read_json(path)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        return ModelFacts(name, shape_of_config(config, str(path)), ITEMSIZES.get(dtype, 2.0), str(path))
    shapes = known_shapes()
    plain = {_plain(full): full for full in shapes} | {_plain(full).partition("/")[2]: full for full in shapes}
    if _plain(name) in plain:
        full = plain[_plain(name)]
        return ModelFacts(name, shapes[full], 2.0, f"the table of plan/models.yaml ({full})")
    names = {plain[near] for near in difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.5)}
    hint = f"models of nearly this name: {', '.join(sorted(names))}; " if names else ""
    raise ValueError(
        f"no config.json of the model {name!r} is on this machine (working folder {Path.cwd()}), and nothing is"
        f" downloaded: {hint}give --model a folder with a config.json; `hf download NAME config.json` fetches it"
    )


def _adapter_config(folder: Path) -> dict[str, Any] | None:
    """Return the config of the adapter in a folder; None if there is none, or a whole model."""
    is_adapter = (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file()
    return read_json(folder / ADAPTER_CONFIG) if is_adapter else None


def _in_cache(name: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    return next(iter(sorted(folder.glob(f"*/{CONFIG}"))), None)


def _plain(name: str) -> str:
    plain = name.lower()
    for ending in (*TUNED, *TUNED):
        plain = plain.removesuffix(ending)
    return plain


@functools.cache
def known_shapes() -> Mapping[str, ModelShape]:
    """Return the shapes of models.yaml by name."""
    content, _ = read_yaml(MODELS)
    return {
        name: ModelShape(*entry["dims"], entry.get("gated", True), entry["tied"], *entry.get("experts", ()))
        for name, entry in content.items()
    }


# Names of GPT-2 and its relatives in a config.json.
OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
}


def shape_of_config(config: Mapping[str, Any], place: str) -> ModelShape:
    """Return the shape in the content of a config.json; of a multimodal model, that of its text model."""
    values = {"model_type": "", **config, **(config.get("text_config") or {})}
    for new, names in OTHER_NAMES.items():
        found = [values[name] for name in (new, *names) if name in values]
        values |= {new: found[0]} if found else {}
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    wrong = [key for key in needed if not isinstance(values.get(key), int) or values[key] < 1]
    if wrong:
        raise ValueError(f"{place} is not a config of a language model: it has no {', '.join(wrong)} above 0")
    return ModelShape.from_config(SimpleNamespace(**values))


def base_weights_bytes(shape: ModelShape, base_bytes: float) -> float:
    """Return the bytes of a whole base whose layers have `base_bytes` per weight."""
    outer = HALF_BYTES if base_bytes <= INT8_BYTES else base_bytes
    return (shape.parameters - shape.outer_parameters) * base_bytes + shape.outer_parameters * outer


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
        middle = _log_middle(self.completion, self.longest, self.spread)
        return 0.5 * math.erfc((math.log(length) - middle) / (self.spread * math.sqrt(2)))

    def quantile(self, share: float) -> float:
        """Return the length that a share of the completions does not exceed; `share` is above 0 and below 1."""
        if self.spread == 0:
            return self.completion
        middle = _log_middle(self.completion, self.longest, self.spread)
        return min(float(self.longest), math.exp(middle + self.spread * NORMAL.inv_cdf(share)))


@functools.cache
def _log_middle(mean: float, longest: int, spread: float) -> float:
    """Return the mean logarithm of the log-normal lengths that, cut off at `longest`, have the mean `mean`."""

    def cut_mean(uncut: float) -> float:
        z = (math.log(longest) - math.log(uncut) + spread**2 / 2) / spread
        return uncut * NORMAL.cdf(z - spread) + longest * (1 - NORMAL.cdf(z))

    low, high = mean, longest * 1e6
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return math.log(high) - spread**2 / 2


@dataclass(frozen=True)
class Job:
    """A PPO run, as memory and time see it; the fields have the meaning of the settings of their names.

    Args:
        base_bytes: bytes of a weight of the base.
        itemsize: bytes of an activation.
        adapted_layers: layers with adapters, the last of the model.
        frozen_copies: adapters that do not train: the reference of a continued one, a reward on the trunk.
        reward: a reward model of its own that scores every completion in the trainer's processes; None: none.
        reward_bytes: bytes of a weight of it.
        keeps_states: the states at the cut stay on the device (trunk_cache auto or device).
        captures_states: sampling provides the states at the cut, so scoring does not run the layers below it.
        plays: completions are episodes with tools or an environment.
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
    plays: bool = False
    expands_segments: bool = True
    stage_obstacle: str | None = None
    is_padding_free: bool = False
    schedule: str = "sync"
    uses_server: bool = False
    save_every: int = 0
    keeps_checkpoints: int | None = None
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
        """Weights of one adapter; those of a value head are few."""
        return self.shape.lora_parameters(self.lora_rank, self.adapted_layers)


def job_of(
    values: Mapping[str, Any],
    model: ModelFacts,
    reward: ModelFacts | None = None,
    *,
    prompt_tokens: float | None = None,
    completion_tokens: float | None = None,
    spread: float = SPREAD,
    on_cpu: bool = False,
) -> Job:
    """Return the job that the values of a PPO recipe describe.

    Args:
        model: the base, or the adapter that the policy continues; a frozen copy of it is the reference then.
        reward: a reward model that the trainer loads; None: none.
        prompt_tokens, completion_tokens: mean lengths; None: assumed.
        on_cpu: activations have the precision of the base.
    """
    assumed: list[str] = []
    lengths = _lengths(values, prompt_tokens, completion_tokens, spread, assumed)
    lengths, segments = _segments(values, lengths, assumed)
    base_bytes = _base_bytes(values, model)
    bf16 = not on_cpu if values["bf16"] is None else values["bf16"]
    is_half = bf16 or values["fp16"] or (base_bytes <= 2.0 and not on_cpu)
    rewards = reward_specs(values)
    branches = trunk_rewards([spec.text for spec in rewards], model)
    if reward is None and any(spec.kind.is_model and spec.text not in branches for spec in rewards):
        assumed.append("the reward takes no memory and no time on these devices; name a model with --reward_model")
    captures, plays = values["capture_trunk_states"], bool(values.get("tools") or values.get("environment"))
    first_layer = parse_adapter_layers(values["adapter_layers"], model.shape.num_layers)
    allocator = " ".join(os.environ.get(name, "") for name in ALLOCATOR).lower()
    return Job(
        model=model,
        base_bytes=base_bytes,
        itemsize=2.0 if is_half else 4.0,
        lengths=lengths,
        lora_rank=model.lora_rank or int(values["lora_r"]),
        adapted_layers=model.shape.num_layers - max(first_layer, model.first_layer),
        frozen_copies=(model.base is not None) + len(branches),
        has_reference=values["beta"] > 0 or values["kl_target"] is not None,
        reward=None if reward is None else reward.shape,
        reward_bytes=4.0 if on_cpu else min(2.0, reward.itemsize if reward else 2.0),
        num_rollouts=_rollouts(values, assumed),
        microbatch_rows=values["per_device_train_batch_size"],
        is_checkpointed=any(values.get(f"{name}_checkpointing") for name in ("activation", "gradient")),
        is_offloaded=bool(values["activation_offloading"]),
        optimizer_bytes=ADAM_8BIT_BYTES if "8bit" in str(values.get("optim")) else ADAM_BYTES,
        keeps_states=values["trunk_cache"] in ("auto", "device"),
        captures_states=not (is_half or plays) if captures is None else bool(captures),
        plays=plays,
        expands_segments=on_cpu or "expandable_segments:true" in allocator,
        stage_obstacle=_stage_obstacle(values, branches, plays),
        is_padding_free=bool(values["padding_free"]),
        uses_server=bool(values["use_vllm"]),
        save_every=int(values["save_steps"]) if values.get("save_strategy", "steps") == "steps" else 0,
        keeps_checkpoints=values.get("save_total_limit"),
        assumed=tuple(assumed),
        **{**{name: values[name] for name in SAME_NAMES}, "num_generations": values["num_generations"] * segments},
    )


def reward_specs(values: Mapping[str, Any]) -> list[Spec]:
    written = values.get("reward_funcs") or []
    return [read_spec(str(text)) for text in ([written] if isinstance(written, str) else written)]


def trunk_rewards(names: list[str], model: ModelFacts) -> list[str]:
    """Return the rewards that are adapters on the policy's base, and so branches of its trunk."""
    configs = {name: _adapter_config(Path(os.path.expanduser(name))) for name in names}
    bases = {name: config["base_model_name_or_path"] for name, config in configs.items() if config is not None}
    policy = Path(model.base or model.name).resolve()
    return [name for name, base in bases.items() if Path(base).resolve() == policy]


def _stage_obstacle(values: Mapping[str, Any], branches: list[str], plays: bool) -> str | None:
    """Return the setting with which training in pipeline stages would be rejected; a plan sets the others itself."""
    if plays:
        return "processes that sample the same rows together cannot play episodes with tools or an environment"
    for name, why, _ in stage_obstacles(values):
        if name != "activation_offloading":
            return f"{name} {values[name]} {why}"
    return f"the reward {branches[0]} is an adapter on the policy's base" if branches else None


def _lengths(
    values: Mapping[str, Any], prompt: float | None, completion: float | None, spread: float, assumed: list[str]
) -> Lengths:
    longest, longest_prompt = int(values["max_completion_length"]), values["max_prompt_length"]
    if longest_prompt is None and prompt is None:
        context = values.get("max_context_length")
        longest_prompt = min(ASSUMED_PROMPT, context // 2) if context else ASSUMED_PROMPT
        assumed.append(f"prompts of at most {longest_prompt} tokens (the recipe has no max_prompt_length)")
    elif longest_prompt is None:
        longest_prompt = math.ceil(prompt)
    if prompt is None:
        prompt = longest_prompt * MEAN_SHARE
        assumed.append(f"prompts of {prompt:g} tokens on average (--prompt_tokens)")
    if completion is None:
        completion = longest * MEAN_SHARE
        assumed.append(f"completions of {completion:g} tokens on average (--completion_tokens)")
    for name, mean, most in (("completion", completion, longest), ("prompt", prompt, longest_prompt)):
        if not 0 < mean <= most:
            raise ValueError(
                f"--{name}_tokens is {mean:g} and max_{name}_length {most}; give a mean above 0 and at most that"
            )
    return Lengths(prompt, completion, longest, longest_prompt, 0.0 if completion > 0.999 * longest else spread)


def _segments(values: Mapping[str, Any], lengths: Lengths, assumed: list[str]) -> tuple[Lengths, int]:
    """Return the lengths of a segment, and the mean number of them in an episode whose contexts are compacted."""
    context = values.get("max_context_length")
    if context is None:
        return lengths, 1
    if context <= lengths.longest_prompt:
        raise ValueError(
            f"max_context_length is {context}, and prompts have up to {lengths.longest_prompt} tokens; raise it, or"
            " lower max_prompt_length (without one, --prompt_tokens)"
        )
    longest = min(lengths.longest, context - lengths.longest_prompt)
    count = math.ceil(lengths.completion / longest)
    assumed.append(f"{count} contexts per episode on average, of at most {context} tokens (max_context_length)")
    return replace(lengths, completion=lengths.completion / count, longest=longest), count


def _base_bytes(values: Mapping[str, Any], model: ModelFacts) -> float:
    if values.get("load_in_4bit"):
        return NF4_BYTES
    if values.get("load_in_8bit"):
        return INT8_BYTES
    return ITEMSIZES.get(str(values.get("dtype")), model.itemsize)


def _rollouts(values: Mapping[str, Any], assumed: list[str]) -> int:
    if values["num_rollouts"] is not None:
        return int(values["num_rollouts"])
    if values.get("max_steps", -1) > 0:
        return math.ceil(values["max_steps"] / (values["num_ppo_epochs"] * values["num_minibatches"]))
    assumed.append(f"{ASSUMED_ROLLOUTS} rollouts (the recipe says neither num_rollouts nor max_steps; --num_rollouts)")
    return ASSUMED_ROLLOUTS
