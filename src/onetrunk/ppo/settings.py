"""PPOSettings: the fields of PPOConfig that are not TrainingArguments' own, and every check of their values.

It imports neither torch nor transformers, so that `onetrunk plan` can check settings without them. Names follow TRL's
GRPOConfig where the concept is the same, TRL 1.12's PPOConfig otherwise. A new setting is a field here, a line in
RANGES, and a kind: whether it may change when a run is resumed (checkpoints/resume_settings.py, ppo/stream_state.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from onetrunk.checkpoints.config import CheckpointConfig
from onetrunk.ppo.foreign_names import check_optimizer, read_inherited, word
from onetrunk.ppo.monitoring.alarm_rules import check_limits, limits_in_use, stopping_alarms
from onetrunk.utils.options import (
    IMPORTANCE_MODES,
    TRUNK_CACHES,
    defaults_of,
    is_whole,
    option,
    parse_adapter_layers,
    replace_none,
    require_seed,
    require_truncation,
    stage_obstacles,
)

logger = logging.getLogger(__name__)

SERVER_SETTINGS = ("vllm_server_base_url", "vllm_server_timeout", "vllm_request_timeout", "vllm_api_key_env")
ENGINE_SETTINGS = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")
BACKENDS = ("local", "pipelined")
IS_CLIP = "vllm_importance_sampling_clip"
# Of a sample that may be many rollouts old; measured in scripts/bench/learning/README.md, "Stale samples".
LEAST_STALE_WEIGHT = 1 / 3
# What policy_objective dis replaces.
CLIP_SETTINGS = (
    *("epsilon", "epsilon_high", "dual_clip", "ratio_unit"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", f"{IS_CLIP}_max", f"{IS_CLIP}_min"),
)


class Derived(int):
    """A number that other settings decided; in a copy of the settings (dataclasses.replace) they decide it again."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return words.__contains__, f"one of {', '.join(words)}"


# Settings, the test of their values, and what is expected. None is also allowed where the type says so.
RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "rollout_batch_size num_generations num_rollouts max_prompt_length max_completion_length max_rollout_rows"
        " num_ppo_epochs num_minibatches microbatch_tokens per_device_train_batch_size per_device_eval_batch_size"
        " alarm_patience pipeline_batches value_steps max_turns max_turn_length max_context_length max_compactions"
        " max_observation_characters",
        lambda v: is_whole(v) and v > 0,
        "a whole number above 0",
    ),
    (
        "temperature score_clip kl_target kl_horizon length_adaptive_lam epsilon epsilon_high target_kl"
        " dis_epsilon_low dis_epsilon_high"
        " value_learning_rate gamma vllm_server_timeout vllm_request_timeout tool_timeout",
        lambda v: _is_number(v) and v > 0,
        "a number above 0",
    ),
    (
        f"learning_rate missing_eos_penalty length_penalty beta entropy_coef {IS_CLIP}_min {IS_CLIP}_max",
        lambda v: _is_number(v) and v >= 0,
        "0 or more",
    ),
    (
        "gamma lam lam_value max_unscored_fraction max_failed_episodes_fraction",
        lambda v: _is_number(v) and 0 <= v <= 1,
        "between 0 and 1",
    ),
    ("dual_clip", lambda v: _is_number(v) and v > 1, "above 1"),
    ("epsilon", lambda v: v < 1, "below 1"),
    ("dis_epsilon_low", lambda v: v <= 1, "at most 1"),
    ("vllm_gpu_memory_utilization", lambda v: _is_number(v) and 0 < v < 1, "above 0 and below 1"),
    (
        "value_pretraining_rollouts trace_rollouts max_staleness max_tool_calling_iterations kept_turns",
        lambda v: is_whole(v) and v >= 0,
        "0 or more",
    ),
    ("pipeline_stages", lambda v: is_whole(v) and v > 1, "a whole number above 1"),
    (
        "pipeline_split",
        lambda v: isinstance(v, list) and len(v) > 1 and all(is_whole(n) and n > 0 for n in v),
        "a list of whole numbers above 0, at least two",
    ),
    ("max_grad_norm", lambda v: _is_number(v) and v >= 0, "0 (no clipping) or more"),
    ("kl_estimator", *_one_of("k1", "k2", "k3")),
    ("truncated_completions", *_one_of("terminal", "bootstrap", "penalize", "mask")),
    ("overlong_prompts", *_one_of("error", "drop", "truncate")),
    ("trunk_cache", *_one_of(*TRUNK_CACHES)),
    ("schedule", *_one_of("sync", "one_step", "async")),
    ("gae_unit", *_one_of("token", "turn")),
    ("ratio_unit", *_one_of("token", "turn")),
    ("policy_objective", *_one_of("clip", "dis")),
    (
        "rollout_backend",
        lambda v: v in BACKENDS or isinstance(v, str) and (":" in v or "." in v),
        "one of local, pipelined, package.module.name and path/to/file.py:name",
    ),
    ("vllm_mode", *_one_of("server", "colocate")),
    ("vllm_importance_sampling_mode", *_one_of(*IMPORTANCE_MODES)),
)


@dataclass(repr=False)
class VLLMServerConfig:
    """Which vLLM servers sample. Every command that samples has these settings.

    List it before the other bases, whose __post_init__ it calls.
    """

    use_vllm: bool = option(
        False, "Sample with vLLM, which receives the adapter, instead of with the model in this process."
    )
    vllm_server_base_url: list[str] | None = option(
        None, "Address of the vLLM server; several: rows are spread over them. None: http://127.0.0.1:8000."
    )
    vllm_server_timeout: float = option(600.0, "Seconds to wait at startup until every vLLM server is up; above 0.")
    vllm_request_timeout: float = option(
        900.0,
        "Time limit of one completion on a vLLM server, seconds, including retries and the waits that it asks for"
        " (Retry-After); above 0. After that the run ends.",
    )
    vllm_api_key_env: str | None = option(
        None, "Environment variable that holds the vLLM servers' key (onetrunk serve --api_key_env); None: no key."
    )

    def __post_init__(self) -> None:
        urls = self.vllm_server_base_url
        self.vllm_server_base_url = urls = [urls] if isinstance(urls, str) else urls
        for url in urls or []:
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"vllm_server_base_url {url!r} is not an address; write it with its scheme, such as"
                    " http://localhost:8000"
                )
        if len(set(self.server_urls)) != len(self.server_urls):
            raise ValueError("vllm_server_base_url names a server twice; name each once")
        for name in ("vllm_server_timeout", "vllm_request_timeout"):
            if not (_is_number(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a number of seconds above 0")
        changed = _changed(self, SERVER_SETTINGS)
        if changed and not self.use_vllm:
            raise ValueError(f"{changed[0]} is set and use_vllm is not; set use_vllm: true, or leave it out")
        super().__post_init__()

    @property
    def server_urls(self) -> list[str]:
        """Addresses of the vLLM servers, without a slash at the end."""
        return [url.rstrip("/") for url in self.vllm_server_base_url or ["http://127.0.0.1:8000"]]


@dataclass(repr=False)
class EpisodeConfig:
    """What bounds an episode: a completion of several turns, answered by tools or an environment."""

    max_turns: int | None = option(
        None, "With tools or an environment: most turns of an episode; None: max_completion_length decides."
    )
    max_turn_length: int | None = option(
        None,
        "With tools or an environment: most tokens of a turn. A longer one is cut off: step gets it, and the episode"
        " continues; with tools the episode ends. None: max_completion_length decides.",
    )
    max_context_length: int | None = option(
        None,
        "With tools or an environment: most tokens of a context, a turn included. Before it overflows, the context is"
        " compacted: the policy writes a summary, a turn that trains as any other, and continues from the prompt, the"
        " summary and the last turns. max_completion_length bounds all contexts together. None: off.",
    )
    max_compactions: int | None = option(None, "With max_context_length: most compactions of an episode. None: any.")
    kept_turns: int = option(
        2, "With max_context_length: last turns, with their answers, that are kept verbatim; fewer if they do not fit."
    )
    compaction_prompt: str = option(
        "Summarise the conversation so far in a few sentences: the task, what was found out, and what is left to do."
        " You will go on from this summary alone.",
        "With max_context_length: the prompt that asks for a summary.",
    )
    tool_timeout: float = option(
        60.0, "Time limit of a call, seconds; above 0. After it a tool gives an error; an environment's episode fails."
    )
    max_observation_characters: int = option(
        2000, "Longest answer of a tool or an environment, in characters; the rest is cut off."
    )
    observation_control_tokens: bool = option(
        False,
        "Read control tokens such as <|im_end|> in answers of tools and environments as tokens. False: as plain"
        " characters, so that no outside text ends or begins a turn.",
    )
    max_failed_episodes_fraction: float = option(
        0.1,
        "Stop if a larger share of a rollout's episodes fails: their environment cannot be reset, or breaks; 0 to 1."
        " They have no score, so max_unscored_fraction counts them too.",
    )


@dataclass(repr=False)
class PPOSettings(EpisodeConfig, VLLMServerConfig, CheckpointConfig):
    """The settings of PPO. List it before TrainingArguments among the bases."""

    # Fields with another default than in TrainingArguments.
    learning_rate: float = option(3e-4, "Peak learning rate of the adapters.")
    logging_steps: float = option(1, "Optimizer steps between two logs.")
    bf16: bool | None = option(
        None, "bfloat16 autocast. None: on if an accelerator supports it (not yet run on hardware)."
    )
    fp16: bool = option(False, "float16 autocast with a gradient scaler (not yet run on hardware).")
    ignore_data_skip: bool = option(True, "Always True: the stream restores its own position.")
    remove_unused_columns: bool = option(False, "Always False: reward functions receive every column.")
    logging_nan_inf_filter: bool = option(False, "Always False: a non-finite step is skipped and counted instead.")

    # Rollout
    rollout_batch_size: int = option(64, "Prompts per rollout, all processes together.")
    num_generations: int = option(1, "Completions per prompt.")
    num_rollouts: int | None = option(None, "Rollouts in total; None: num_train_epochs or max_steps decides.")
    max_prompt_length: int | None = option(None, "Longest prompt, tokens; None: only the model's own limit.")
    overlong_prompts: str = option(
        "error", "What happens to a longer prompt: 'error', 'drop' (the row) or 'truncate' (to its last tokens)."
    )
    max_completion_length: int = option(256, "Longest completion, tokens.")
    temperature: float = option(1.0, "Divides the logits of sampler, policy and reference; above 0.")
    top_p: float = option(
        1.0,
        "Sample from the smallest set of tokens with this total probability; above 0, at most 1 (all tokens). Below 1"
        " it biases training: other tokens are never sampled; importance weights correct the rest.",
    )
    top_k: int = option(0, "Sample from the k most probable tokens; 0: from all. Biases training as top_p does.")
    stop_tokens: list[str] | None = option(None, "Texts of tokens that end a completion, besides the model's EOS.")
    max_rollout_rows: int | None = option(None, "Most rows that a process decodes at once; None: all of the rollout.")
    rollout_backend: str = option(
        "local",
        "What samples without use_vllm. 'local': each process its own rows, with all layers. 'pipelined': the layers"
        " are divided over consecutive processes, each of which runs its share for the rows of all of them, with"
        " several batches in flight. A process then keeps the cache, and of a sharded base the gathered weights, of"
        " its own layers only (not yet run on hardware). package.module.name or path/to/file.py:name: a sampler of"
        " yours, a class or a function that makes one without arguments.",
    )
    pipeline_stages: int | None = option(
        None,
        "With rollout_backend pipelined, or pipeline_training: processes that form a pipeline, 2 or more; None: all.",
    )
    pipeline_batches: int | None = option(
        None,
        "With rollout_backend pipelined: batches in flight at once, 1 or more. Fewer than pipeline_stages leave"
        " processes idle; more hide uneven stages, with fewer rows in each batch. None: one per stage.",
    )
    pipeline_split: list[int] | None = option(
        None,
        "With rollout_backend pipelined, or pipeline_training: number of layers of each stage, 1 or more; their sum is"
        " the model's layers."
        " None: stages that should be equally fast, the output head included.",
    )
    pipeline_training: bool = option(
        False,
        "With rollout_backend pipelined, or use_vllm: score and update in pipeline stages, by the 1F1B schedule over"
        " the packs of a minibatch. Each process then loads and holds the frozen weights of its own layers only, so"
        " that a base that needs several devices can be trained on them; a pipeline counts as one process for rows"
        " (not yet run on hardware).",
    )
    chat_template_kwargs: dict[str, Any] | None = option(None, "Keywords for the tokenizer's chat template.")
    max_tool_calling_iterations: int | None = option(
        None, "TRL's name for max_turns - 1: most turns whose tools are called; 0 or more."
    )
    shuffle_dataset: bool = option(True, "Draw a new order of the prompts in every pass, from data_seed or seed.")

    # Reward
    reward_weights: list[float] | None = option(None, "Weight of each reward function; None: 1 each.")
    missing_eos_penalty: float | None = option(None, "Subtracted from the score of a cut-off completion; 0 or more.")
    length_penalty: float = option(0.0, "Subtracted from the score, in proportion to length / max_completion_length.")
    truncated_completions: str | None = option(
        None,
        "What happens to a completion cut off at max_completion_length, at max_turns or by its environment: 'terminal'"
        " (as if it had ended), 'bootstrap' (the value of its last state stands for the rest), 'penalize'"
        " (missing_eos_penalty) or 'mask' (left out of the update). None: 'penalize' if there is a penalty, else"
        " 'terminal'.",
    )
    normalize_scores: bool = option(False, "Shift and scale scores by their running mean and standard deviation.")
    score_clip: float | None = option(None, "Largest |score| after normalisation; None: no bound.")
    max_unscored_fraction: float = option(0.1, "Stop if a larger share of a rollout has no finite score; 0 to 1.")

    # Advantage
    beta: float = option(0.05, "Coefficient of the KL to the reference; 0: the reference is not run for training.")
    kl_estimator: str = option(
        "k1",
        "Per-token KL estimator: k1 in the reward; k2 or k3 with kl_in_loss. There k2 has the gradient of KL(policy ||"
        " reference), k3 that of KL(reference || policy).",
    )
    kl_in_loss: bool = option(
        False,
        "Add beta * KL to the loss instead of subtracting it from the rewards. A token counts there by its probability"
        " under the current policy relative to the sampler's. It is then not credited with the KL of later tokens, and"
        " with whiten_advantages beta is in units of the advantage's standard deviation.",
    )
    kl_target: float | None = option(None, "Target KL of an adaptive beta, nats per completion; None: beta is fixed.")
    kl_horizon: int = option(10_000, "Time scale of the adaptive beta, in completions.")
    gae_unit: str = option(
        "token",
        "The unit of GAE. 'token': each sampled token. 'turn': a turn of an episode is one action; all of"
        " its tokens have its advantage, and only the value at its first token trains (all with truncated_completions"
        " bootstrap).",
    )
    gamma: float = option(1.0, "Discount per token, or per turn with gae_unit turn, in (0, 1].")
    lam: float = option(
        1.0, "Lambda of GAE, in [0, 1]. Below 1, a score reaches a token n steps earlier with weight lam^n."
    )
    lam_value: float | None = option(None, "Lambda of the value targets only; None: lam.")
    length_adaptive_lam: float | None = option(
        None, "alpha of lam = 1 - 1 / (alpha * length), with gae_unit turn of the number of turns; None: off."
    )
    whiten_advantages: bool = option(True, "Zero mean and unit variance over the tokens of the global rollout.")
    whiten_rewards: bool = option(False, "Unit variance of the token rewards over the global rollout, mean kept.")

    # Loss
    num_ppo_epochs: int = option(4, "Passes over a rollout.")
    num_minibatches: int = option(1, "Optimizer steps per pass.")
    microbatch_tokens: int | None = option(
        None, "Most tokens in one forward, padding included unless padding_free is set; None: no bound."
    )
    padding_free: bool = option(
        False,
        "Run the rows of a forward in one sequence, without padding: for a GPU with attn_implementation:"
        " flash_attention_2 (not yet run on hardware). Slower on a CPU, where a mask keeps the rows apart. Rejected"
        " for models in which they would not stay apart.",
    )
    ratio_unit: str = option(
        "token",
        "The unit of the ratio of new to old probability. 'token': each token. 'turn': each turn of an episode, the"
        " geometric mean of the ratios of its tokens.",
    )
    policy_objective: str = option(
        "clip",
        "'clip': PPO. The ratio is that to the policy at the start of the update, and is clipped; importance weights"
        " correct for another sampler. 'dis': direct double-sided importance sampling (SAO). The ratio is that to the"
        " sampler, of whatever version; a token whose ratio is out of bounds does not train.",
    )
    dis_epsilon_low: float = option(
        0.3, "With policy_objective dis: tokens with a ratio of at most 1 - this do not train; at most 1."
    )
    dis_epsilon_high: float = option(
        5.0, "With policy_objective dis: tokens with a ratio of at least 1 + this do not train."
    )
    epsilon: float = option(0.2, "Clip range of the ratio, below 1 - epsilon and above 1 + epsilon.")
    epsilon_high: float | None = option(None, "Upper clip range; None: epsilon.")
    dual_clip: float | None = option(None, "Upper bound (above 1) of the ratio for negative advantages; None: off.")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    target_kl: float | None = option(
        None, "Skip the remaining steps of a rollout once KL(old, new) per token exceeds it; None: off."
    )
    value_pretraining_rollouts: int = option(
        0, "Rollouts at the start that train only the value; the learning rate's schedule continues, warmup included."
    )
    value_learning_rate: float = option(1e-3, "Learning rate of the value head, which is fitted after each rollout.")
    value_steps: int = option(
        40,
        "Steps of 512 tokens by which the value head is fitted to the returns of each rollout. A rollout of fewer than"
        " 128 completions, or 512 tokens, gets fewer in proportion.",
    )

    # Trunk
    adapter_layers: str = option("all", "'all', or 'top-k': adapt and train only the last k layers.")
    trunk_cache: str = option(
        "auto",
        "Where the output of the frozen lower layers is kept for the epochs of a rollout: device, cpu (pinned memory),"
        " off (computed in every forward) or auto (the device if it has room).",
    )
    capture_trunk_states: bool | None = option(
        None,
        "Keep the output of frozen lower layers that sampling computes, instead of one more forward. It differs from"
        " that forward by rounding (1e-6 in float32), and is saved in checkpoints. With tools or an environment the"
        " rows of a rollout then wait for each other's answers after every turn. None: on in float32, without those.",
    )
    model_init_kwargs: dict[str, Any] | None = option(None, "Keywords of from_pretrained for a model given by name.")

    # Schedule
    schedule: str = option(
        "sync",
        "'sync': sample, then update. 'one_step': sample the next rollout during the update. 'async': sample up to"
        " max_staleness rollouts ahead, row by row. The last two need a sampler with weights of its own (use_vllm).",
    )
    max_staleness: int | None = option(
        None,
        "Largest staleness: on how many rollouts the policy may have trained since it began a completion; 0 or more,"
        " for async. None: 1; with sync it is always 0, with one_step 1.",
    )

    # Safety and logging
    activation_offloading: bool = option(False, "Keep activations in host memory (not yet run on hardware).")
    check_memory: bool = option(True, "Run the largest pack once at startup, and print the memory that it needs.")
    log_completions: bool = option(False, "Print and save a table of samples at every evaluation and logging step.")
    trace_rollouts: int = option(
        0, "Rollouts, after the first, that torch.profiler records into output_dir/trace; 0: none."
    )

    vllm_mode: str = option(
        "server",
        "'server': the servers run as processes of their own (onetrunk serve). 'colocate': the engine runs in the"
        " training process and shares its GPU (not yet run on a GPU).",
    )
    vllm_gpu_memory_utilization: float = option(
        0.3, "colocate: share of the GPU's memory that the engine takes, above 0, below 1."
    )
    vllm_enable_sleep_mode: bool = option(
        False,
        "colocate: between two rollouts the engine's cache is freed, so the update has the whole GPU; a quantised"
        " base's second copy is in the machine's memory then. Needs a GPU.",
    )
    vllm_importance_sampling_correction: bool | None = option(
        None,
        "Multiply the policy loss of a token, and its KL in the loss and in kl/ref, by the ratio of the policy's"
        " probability at the start of the update to the sampler's. None: on with vLLM, a schedule that samples ahead,"
        " top_p or top_k; else off.",
    )
    vllm_importance_sampling_mode: str = option(
        "token_truncate",
        "What happens to a ratio outside the bounds: 'token_truncate' moves it to the bound, 'token_mask' leaves the"
        " token out.",
    )
    vllm_importance_sampling_clip_max: float | None = option(3.0, "Upper bound of the ratio, above 0; None: no bound.")
    vllm_importance_sampling_clip_min: float | None = option(
        None,
        "Lower bound of the ratio, 0 or more and below the upper bound. None: 1/3 with schedule async and mode"
        " token_truncate, because a weight near 0 also takes away the KL that brings a token back; else no bound.",
    )

    # Alarms
    alarm_limits: dict[str, float | None] | None = option(
        None,
        "Limits of alarms that differ from their defaults, such as {kl: 50, entropy: null}; null: no such alarm. kl:"
        " 100 nats per completion; negative_kl: 0.1 nats below 0; logprob_gap: 0.1 nats per token between sampler"
        " and trainer; length_collapse: 0.2 of the first rollouts' length; length_explosion: 0.3 of their share of"
        " ended completions; entropy: 0.01 nats per token; repeated_ngrams: 0.5 of the 4-grams; clip_fraction: 0.5"
        " of the tokens; skipped_steps: 0.8 of the steps; explained_variance: -0.5; useless_values: 0.02, the upper"
        " end of the 95% interval of its mean over at least 512 completions and 8 rollouts; equal_scores: 1e-6, the"
        " standard deviation of scores; cut_off: 0.01 of the completions end; one_token: 1.5 tokens; no_gradient:"
        " 1e-7, its norm; tool_errors: 0.5 of the calls; turn_limit, length_limit: 0.5 of the episodes. With"
        " truncated sampling negative_kl and logprob_gap are off, and where rollouts are sampled ahead negative_kl"
        " is.",
    )
    alarm_patience: int = option(3, "Rollouts in a row in which the condition must hold before an alarm is raised.")
    stop_on_alarm: list[str] | None = option(
        None,
        "all: any alarm ends the run, with a checkpoint; names (kl, entropy, ...): only these do; None: alarms only"
        " warn.",
    )

    def __post_init__(self) -> None:
        replace_none(self, self._inherited_defaults())
        # TrainingArguments' meaning of it is gone after this; `describe_steps` compares with it.
        self.grpo_accumulation = self.gradient_accumulation_steps
        lines = read_inherited(self, self._inherited_defaults())
        check_optimizer(self)
        self._check_ranges()
        self._derive()
        faults = self._objective_faults(), self._sampling_faults(), self._compaction_faults(), self._pipeline_faults()
        for is_wrong, message in chain(*faults):
            if is_wrong:
                raise ValueError(message)
        check_limits(self.alarm_limits)
        self.stop_on_alarm = stopping_alarms(self.stop_on_alarm, self.limits)
        super().__post_init__()
        for line in lines if getattr(self, "should_log", True) else ():
            logger.warning(line)

    @property
    def limits(self) -> dict[str, float | None]:
        """Limit of each alarm; None: no such alarm."""
        limits = limits_in_use(self.alarm_limits, self.truncates, self.max_staleness > 0)
        return {**limits, "one_token": None} if self.max_completion_length == 1 else limits

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that a rollout feeds."""
        return self.num_ppo_epochs * self.num_minibatches

    @property
    def truncates(self) -> bool:
        """Whether rollouts are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def importance_bounds(self) -> dict[str, Any]:
        """The keywords with which importance weights are computed (`ops.losses.importance_weights`)."""
        mode, low = self.vllm_importance_sampling_mode, self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if low is None and self.schedule == "async" and mode == "token_truncate":
            low = LEAST_STALE_WEIGHT if high is None else min(LEAST_STALE_WEIGHT, high)
        return {"mode": mode, "clip_min": low, "clip_max": high}

    @property
    def is_colocated(self) -> bool:
        """Whether vLLM's engine runs in the training process."""
        return self.use_vllm and self.vllm_mode == "colocate"

    @property
    def versions_in_use(self) -> int:
        """Most versions of the policy that a sampler needs at a time: of rollouts, and of evaluations among them."""
        evaluations = 0 if word(self.eval_strategy) == "no" else 1
        if evaluations and self.eval_strategy == "steps":
            # A share of all steps, below 1, is a number of steps that is not known yet.
            every = self.eval_steps or self.logging_steps
            evaluations += self.steps_per_rollout if every < 1 else self.steps_per_rollout // int(every)
        return (self.max_staleness + 1) * (1 + evaluations) + 1

    def _inherited_defaults(self) -> dict[str, Any]:
        """Return the default of every field, also of those that this class does not have itself."""
        return defaults_of(self)

    def _check_ranges(self) -> None:
        require_seed("seed", self.seed)
        require_seed("data_seed", self.data_seed)
        require_truncation(self.top_p, self.top_k)
        for names, holds, expected in RANGES:
            for name in names.split():
                _require(name, getattr(self, name), holds, expected)
        for name in FLAGS:  # A text such as "no" would be taken for true.
            _require(name, getattr(self, name), lambda v: isinstance(v, bool), "true or false")
        parse_adapter_layers(self.adapter_layers)

    def _derive(self) -> None:
        """Set what other settings decide, where it is None."""
        for name in ("max_steps", "max_turns", "max_staleness", "pipeline_stages"):
            if isinstance(getattr(self, name), Derived):
                setattr(self, name, type(self).__dataclass_fields__[name].default)
        if self.num_rollouts is not None:
            steps = self.num_rollouts * self.steps_per_rollout
            if self.max_steps not in (-1, steps):
                raise ValueError(
                    f"num_rollouts {self.num_rollouts} makes {steps} optimizer steps, but max_steps is"
                    f" {self.max_steps}; set one of them"
                )
            self.max_steps = Derived(steps)
        if self.max_tool_calling_iterations is not None:
            turns = self.max_tool_calling_iterations + 1
            if self.max_turns not in (None, turns):
                raise ValueError(
                    f"max_tool_calling_iterations {turns - 1} is max_turns {turns}, and max_turns is {self.max_turns};"
                    " set one of them"
                )
            self.max_turns = Derived(turns)
        if self.truncated_completions is None:
            self.truncated_completions = "terminal" if self.missing_eos_penalty is None else "penalize"
        if self.pipeline_stages is None and self.pipeline_split is not None:
            self.pipeline_stages = Derived(len(self.pipeline_split))
        if self.max_staleness is None:
            self.max_staleness = Derived(0 if self.schedule == "sync" else 1)
        if self.metric_for_best_model is None and (self.load_best_model_at_end or word(self.save_strategy) == "best"):
            # Trainer would look for a loss, which an evaluation by sampling does not have.
            self.metric_for_best_model = "score/mean"
            self.greater_is_better = True if self.greater_is_better is None else self.greater_is_better

    def _objective_faults(self) -> Iterator[tuple[Any, str]]:
        """Yield whether settings of the objective contradict each other, and the message; so do the next two."""
        yield (
            self.epsilon_high is not None and self.epsilon_high < self.epsilon,
            f"epsilon_high {self.epsilon_high} is below epsilon {self.epsilon}; raise it or leave it out",
        )
        yield (
            self.kl_in_loss and self.kl_estimator == "k1",
            "kl_in_loss with kl_estimator k1 has no useful gradient; set kl_estimator to k2 or k3",
        )
        yield (
            self.beta and not self.kl_in_loss and self.kl_estimator != "k1",
            f"kl_estimator {self.kl_estimator} in the reward has another gradient than the KL (it pushes tokens below"
            " the reference further down); use k1, or set kl_in_loss",
        )
        yield self.kl_in_loss and not self.beta, "kl_in_loss needs beta above 0"
        names = CLIP_SETTINGS if self.policy_objective == "dis" else ("dis_epsilon_low", "dis_epsilon_high")
        changed = ", ".join(_changed(self, names))
        yield changed, f"{changed} has no effect with policy_objective {self.policy_objective!r}; leave it out"
        yield self.kl_target is not None and not self.beta, "kl_target adapts beta by factors: start it above 0"
        # Beta falls by at most a fifth per horizon (KL_ERROR_LIMIT of ops.advantages).
        completions = self.rollout_batch_size * self.num_generations
        yield (
            self.kl_target is not None and completions >= 5 * self.kl_horizon,
            f"kl_horizon is {self.kl_horizon}, and a rollout of {completions} completions could bring beta to 0; set"
            f" it to several times {completions}",
        )
        yield (
            (self.truncated_completions == "penalize") != (self.missing_eos_penalty is not None),
            f"truncated_completions {self.truncated_completions!r} and missing_eos_penalty {self.missing_eos_penalty}"
            " contradict each other: 'penalize' needs a penalty, the others none",
        )
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        yield (
            high is not None and not high > (low or 0),
            f"{IS_CLIP}_max is {high} and {IS_CLIP}_min is {low}; the upper bound must be above 0 and above the lower"
            " one",
        )
        yield (
            self.vllm_importance_sampling_correction is not False and low is None and high is None,
            f"{IS_CLIP}_min and {IS_CLIP}_max are both null: a single rare token could then outweigh a rollout; set"
            f" {IS_CLIP}_max, such as 3.0, or vllm_importance_sampling_correction to false",
        )

    def _compaction_faults(self) -> Iterator[tuple[Any, str]]:
        is_on = self.max_context_length is not None
        changed = ", ".join(_changed(self, ("max_compactions", "kept_turns", "compaction_prompt")))
        yield changed and not is_on, f"{changed} has no effect without max_context_length; set it, or leave it out"
        yield (
            is_on and self.max_turn_length is None,
            "max_context_length needs max_turn_length, the room that a turn and a summary get; set it",
        )
        yield (
            is_on and self.truncated_completions == "bootstrap",
            "truncated_completions 'bootstrap' is not supported with max_context_length; set it to terminal or mask",
        )
        yield is_on and not self.compaction_prompt.strip(), "compaction_prompt is empty; say what asks for a summary"

    def _sampling_faults(self) -> Iterator[tuple[Any, str]]:
        yield (
            self.max_prompt_length is None and self.overlong_prompts != "error",
            f"overlong_prompts {self.overlong_prompts!r} needs max_prompt_length",
        )
        yield (
            self.truncates and self.vllm_importance_sampling_correction is False,
            f"top_p is {self.top_p} and top_k is {self.top_k}, so completions are not sampled from the policy that is"
            " trained, and vllm_importance_sampling_correction, which corrects for that, is false; leave it out, or"
            " leave top_p and top_k out",
        )
        yield (
            self.vllm_mode != "server" and not self.use_vllm,
            "vllm_mode is set and use_vllm is not; set use_vllm: true, or leave it out",
        )
        changed = ", ".join(_changed(self, SERVER_SETTINGS if self.is_colocated else ENGINE_SETTINGS))
        yield (
            changed and self.is_colocated,
            f"{changed} is set, and vllm_mode 'colocate' has no server; leave it out",
        )
        yield (
            changed,
            f"{changed} belongs to vllm_mode 'colocate'; set use_vllm: true and vllm_mode: colocate, or give it to the"
            " server (onetrunk serve)",
        )
        yield (
            self.schedule != "sync" and self.is_colocated,
            f"schedule {self.schedule!r} samples during the update, and vllm_mode 'colocate' has the trainer's GPU"
            " only between two updates; set schedule to sync, or vllm_mode to server",
        )
        fixed = {"sync": 0, "one_step": 1}.get(self.schedule, self.max_staleness)
        yield (
            fixed != self.max_staleness,
            f"max_staleness is {self.max_staleness} and schedule {self.schedule!r} always has {fixed}; leave"
            " max_staleness out, or set schedule to async",
        )

    def _pipeline_faults(self) -> Iterator[tuple[Any, str]]:
        samples, trains = self.rollout_backend == "pipelined", self.pipeline_training
        stages = "pipeline_training" if self.use_vllm else "rollout_backend 'pipelined'"
        yield (
            self.rollout_backend != "local" and self.use_vllm,
            f"rollout_backend is {self.rollout_backend!r} and use_vllm samples on a server; leave one of them out",
        )
        for name in () if samples else PIPELINE_SETTINGS:
            value, is_of_sampling = getattr(self, name), name == "pipeline_batches"
            is_set = value and not isinstance(value, Derived)
            yield (
                is_set and (is_of_sampling or not (self.use_vllm and trains)),
                f"{name} is set and rollout_backend is not 'pipelined'; set it, or leave {name} out"
                + ("" if is_of_sampling else " (with pipeline_training, use_vllm samples too)"),
            )
        split = self.pipeline_split or ()
        yield (
            split and len(split) != self.pipeline_stages,
            f"pipeline_split has {len(split)} numbers and pipeline_stages is {self.pipeline_stages}; give one number"
            " of layers for each stage",
        )
        yield (
            trains and self.is_colocated,
            "pipeline_training is not supported with vllm_mode 'colocate', whose engine loads the whole base on the"
            " trainer's GPU; set vllm_mode to server",
        )
        yield (
            self.schedule != "sync" and (samples or trains),
            f"schedule {self.schedule!r} samples during the update, and the processes of {stages} work together then;"
            " set schedule to sync",
        )
        for name, why, remedy in stage_obstacles(vars(self)):
            setting = f"{name} {getattr(self, name)}"
            yield trains, f"pipeline_training is not supported with {setting}, which {why}; {remedy}"


def _require(name: str, value: Any, holds: Callable[[Any], bool], expected: str) -> None:
    if value is None and name in MAY_BE_NONE:
        return
    if isinstance(value, str) and "one of" not in expected and expected != "true or false":
        number = expected if expected.startswith("a ") else f"a number, {expected}"
        raise ValueError(f"{name} is the text {value!r}; it must be {number}")
    if value is None or not holds(value):
        raise ValueError(f"{name} is {value!r}; it must be {expected}")


def _changed(config: Any, names: Sequence[str]) -> list[str]:
    """Return the names of the settings that are not at their defaults."""
    return [name for name in names if getattr(config, name) != PPOSettings.__dataclass_fields__[name].default]


PIPELINE_SETTINGS = tuple(f.name for f in fields(PPOSettings) if f.name.startswith("pipeline_"))
# Read once: transformers' parser rewrites the types of fields.
FLAGS = tuple(f.name for f in fields(PPOSettings) if f.type in ("bool", "bool | None"))
MAY_BE_NONE = frozenset(f.name for f in fields(PPOSettings) if "None" in str(f.type))
