"""PPOSettings: the fields of PPOConfig that are not TrainingArguments' own, and every check of their values.

It imports neither torch nor transformers, so that the command line can check settings before it does (stages/options).
Names follow TRL's GRPOConfig where the concept is the same, TRL 1.12's PPOConfig otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from onetrunk.checkpoints.config import CheckpointConfig
from onetrunk.ppo.alarm_rules import RULES, AlarmConfig, stopping_alarms
from onetrunk.ppo.server_settings import VLLMConfig
from onetrunk.utils.options import (
    TRUNK_CACHES,
    VALUE_HEADS,
    is_whole,
    option,
    require_seed,
    require_split,
    require_truncation,
)

KL_ESTIMATORS = ("k1", "k2", "k3")
TRUNCATED = ("terminal", "bootstrap", "penalize", "mask")
OVERLONG = ("error", "drop", "truncate")
# What the monitor does at an alarm.
MONITOR_ACTIONS = ("warn", "stop")
LOG_FORMATS = ("auto", "bar", "lines")
SCHEDULES = ("sync", "one_step", "async")
ROLLOUT_BACKENDS = ("local", "pipelined")
PIPELINE_SETTINGS = (
    "pipeline_stages",
    "pipeline_batches",
    "pipeline_split",
    "pipeline_ahead",
    "pipeline_training",
)
# Those of stages that train, whatever samples.
STAGE_SETTINGS = ("pipeline_stages", "pipeline_split", "pipeline_training")

# Fields of TrainingArguments that must keep their default, by the reason.
_WITHOUT_MEANING = {
    "the stream samples in the main process": "dataloader_num_workers dataloader_persistent_workers"
    " dataloader_multiprocessing_context dataloader_pin_memory dataloader_in_order",
    "a rollout sampled ahead of its update would be off-policy": "dataloader_prefetch_factor",
    "rollouts are filled up with prompts from the start of the pass": "dataloader_drop_last",
    "shuffle_dataset says how prompts are drawn, and packs are sorted by length already": "train_sampling_strategy",
    "packs are sorted by length already": "length_column_name",
    "set microbatch_tokens: it bounds a forward without changing the gradient": "auto_find_batch_size",
    "noise on embeddings makes the first PPO ratio differ from 1": "neftune_noise_alpha",
    "the fused logprobs of onetrunk take its place": "use_liger_kernel liger_kernel_config",
    "rollouts keep a cache and training forwards need none": "use_cache",
    "a loss is always divided by the tokens of all processes": "average_tokens_across_devices",
    "what runs in a step changes with the roles that it trains": "ddp_static_graph",
    "it acts per process; use save_steps": "enable_jit_checkpoint",
    "see completion/length and throughput/completion_tokens_per_s": "include_num_input_tokens_seen",
    "a checkpoint without optimizer and stream state can't be resumed; use save_strategy: 'no'": "save_only_model",
    "not tested with adapter switching yet": "torch_compile torch_compile_backend torch_compile_mode",
    "it would act on Trainer's own training step only": "torch_empty_cache_steps",
    "evaluation runs as training does": "fp16_full_eval bf16_full_eval",
    "evaluation samples and scores": "batch_eval_metrics eval_accumulation_steps eval_use_gather_object"
    " eval_do_concat_batches prediction_loss_only",
    "evaluation samples and scores; a reward function sees every column": "include_for_metrics",
    "PPO has no labels": "label_names label_smoothing_factor",
    "the accelerate config of the launch decides (accelerate_configs/README.md)": "parallelism_config fsdp deepspeed",
}
INHERITED_WITHOUT_MEANING = {name: reason for reason, names in _WITHOUT_MEANING.items() for name in names.split()}
# Fields of TrainingArguments with one possible value, and why.
FIXED = {
    "ignore_data_skip": (True, "the experience stream restores its own position"),
    "remove_unused_columns": (False, "reward functions receive every column"),
    "logging_nan_inf_filter": (False, "a step that is not finite is skipped and counted, not averaged away"),
    "ddp_find_unused_parameters": (True, "a step that trains the value alone leaves the policy without gradient"),
    "ddp_broadcast_buffers": (False, "processes make unequal numbers of forwards"),
}
# Alarms about differences between sampler and trainer, which truncated sampling makes on purpose.
TRUNCATION_ALARMS = ("negative_kl", "logprob_gap")
REFUSED_OPTIMIZERS = {
    "lomo": "it updates weights inside the backward, which runs once per pack here",
    "layerwise": "it updates weights inside the backward, which runs once per pack here",
    "schedule_free": "its weights in training are not those that it evaluates and saves",
}


@dataclass(repr=False)
class PPOSettings(AlarmConfig, CheckpointConfig, VLLMConfig):
    """The settings of PPO. List it before TrainingArguments among the bases."""

    # Fields with another default than in TrainingArguments.
    learning_rate: float = option(1e-4, "Peak learning rate of the adapters.")
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
        "Sample from the fewest tokens that have this probability together; above 0, at most 1 (all tokens). Below 1"
        " it biases training, because what is left out is never sampled; importance weights correct the rest.",
    )
    top_k: int = option(0, "Sample from so many most probable tokens; 0: from all. Biases training as top_p does.")
    stop_tokens: list[str] | None = option(None, "Texts of tokens that end a completion, besides the model's EOS.")
    max_rollout_rows: int | None = option(None, "Most rows that a process decodes at once; None: all of the rollout.")
    rollout_backend: str = option(
        "local",
        "What samples without use_vllm. 'local': each process its own rows, with all layers. 'pipelined': the layers"
        " are divided over consecutive processes, each of which runs its share for the rows of all of them, with"
        " several batches in flight. A process then keeps the cache, and of a sharded base the gathered weights, of"
        " its own layers only (not yet run on hardware).",
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
    pipeline_ahead: bool = option(
        False,
        "With rollout_backend pipelined: let rows of the next rollout start where places are free while the last rows"
        " of a rollout decode. The next one uses all of them: rows that still run go on there, with tokens of the new"
        " policy. Tokens of the old one are corrected by vllm_importance_sampling_correction, as with schedule"
        " one_step.",
    )
    pipeline_training: bool = option(
        False,
        "With rollout_backend pipelined, or use_vllm: score and update in pipeline stages, by the 1F1B schedule over"
        " the packs of a minibatch. Each process then loads and holds the frozen weights of its own layers only, so"
        " that a base that needs several devices can be trained on them; a pipeline counts as one process for rows"
        " (not yet run on hardware).",
    )
    chat_template_kwargs: dict[str, Any] | None = option(None, "Keywords for the tokenizer's chat template.")
    shuffle_dataset: bool = option(True, "Draw a new order of the prompts in every pass, from data_seed or seed.")

    # Reward
    reward_weights: list[float] | None = option(None, "Weight of each reward function; None: 1 each.")
    missing_eos_penalty: float | None = option(None, "Subtracted from the score of a cut-off completion; 0 or more.")
    length_penalty: float = option(0.0, "Subtracted from the score at max_completion_length; in proportion below.")
    truncated_completions: str | None = option(
        None,
        "What happens to a completion cut off at max_completion_length: 'terminal' (as if it had ended), 'bootstrap'"
        " (the value of its last state stands for the rest), 'penalize' (missing_eos_penalty) or 'mask' (left out of"
        " the update). None: 'penalize' if there is a penalty, else 'terminal'.",
    )
    normalize_scores: bool = option(False, "Shift and scale scores by their running mean and standard deviation.")
    score_clip: float | None = option(None, "Largest |score| after normalisation; None: no bound.")
    max_unscored_fraction: float = option(0.1, "Stop if more of a rollout's rows have no finite score; 0 to 1.")

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
    kl_target: float | None = option(None, "Nats per completion that an adaptive beta keeps; None: beta is fixed.")
    kl_horizon: int = option(10_000, "Completions over which the adaptive beta moves.")
    gamma: float = option(1.0, "Discount per token, in (0, 1].")
    lam: float = option(0.95, "Lambda of GAE, in [0, 1].")
    lam_policy: float | None = option(None, "Lambda of the advantages only; None: lam.")
    lam_value: float | None = option(None, "Lambda of the value targets only; None: lam.")
    length_adaptive_lam: float | None = option(None, "alpha of lam_policy = 1 - 1 / (alpha * length); None: off.")
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
    epsilon: float = option(0.2, "Clip range of the ratio, below 1 - epsilon and above 1 + epsilon.")
    epsilon_high: float | None = option(None, "Upper clip range; None: epsilon.")
    dual_clip: float | None = option(None, "Upper bound (above 1) of the ratio for negative advantages; None: off.")
    value_clip: float | None = option(0.2, "Clip range of the value around its rollout value; None: off.")
    value_coef: float = option(0.1, "Weight of the value loss.")
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.")
    target_kl: float | None = option(
        None, "Skip the remaining steps of a rollout once KL(old, new) per token exceeds it; None: off."
    )
    value_pretraining_rollouts: int = option(0, "Rollouts at the start that train only the value.")
    value_learning_rate: float | None = option(
        None, "Learning rate of the value head and, with value_head adapter, of its LoRA; None: learning_rate."
    )

    # Trunk
    value_head: str = option("shared", "shared, detached (stop-gradient) or adapter (a LoRA of its own).")
    adapter_layers: str = option("all", "'all', or 'top-k': adapt and train only the last k layers.")
    value_head_init: str | None = option(
        None,
        "Reward model (folder or Hub name, same hidden size) whose score head starts the value head; None: zeros.",
    )
    trunk_cache: str = option(
        "auto",
        "Where the output of the frozen lower layers is kept for the epochs of a rollout: device, cpu (pinned memory),"
        " disk (a file in output_dir), off (computed in every forward) or auto (the first of them with room).",
    )
    capture_trunk_states: bool | None = option(
        None,
        "Take that output from sampling, which computes it anyway, instead of from one more forward. It differs from"
        " that forward by rounding (1e-6 in float32), and is saved in checkpoints. None: on in float32.",
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
        "Rollouts that the policy may be trained on between the start of a completion and its use; 0 or more, for"
        " async. None: 1; with sync it is always 0, with one_step 1.",
    )

    # Safety and logging
    activation_offloading: bool = option(False, "Keep activations in host memory (not yet run on hardware).")
    check_memory: bool = option(True, "Run the largest pack once at startup, and print the memory that the run needs.")
    max_skipped_steps: int = option(3, "Stop after this many non-finite optimizer steps in a row.")
    eval_top_p: float | None = option(None, "top_p of evaluations, above 0, at most 1; None: as in training.")
    eval_top_k: int | None = option(None, "top_k of evaluations, 0 (all tokens) or more; None: as in training.")
    log_completions: bool = option(False, "Print and save a table of samples at every evaluation and logging step.")
    num_completions_to_print: int = option(4, "Rows of that table.")
    log_format: str = option(
        "auto",
        "How progress is shown: 'bar'; 'lines' (one per rollout, with score, KL, length, tokens per second, seconds);"
        " 'auto': a bar in a terminal, lines elsewhere.",
    )
    log_trl_names: bool = option(
        False, "Log the metrics that TRL's GRPOTrainer has under its names too: reward, completions/mean_length, ..."
    )
    trace_rollouts: int = option(
        0, "Rollouts, after the first, that torch.profiler records into output_dir/trace; 0: none."
    )

    def __post_init__(self) -> None:
        self._check_inherited()
        self._check_ranges()
        self._check_rollout()
        self._check_pipeline()
        self._check_objective()
        self._check_truncation()
        self._check_schedule()
        self._switch_alarms_off()
        self.stop_on_alarm = stopping_alarms(self)
        self._choose_best_metric()
        super().__post_init__()

    @property
    def slots_per_rollout(self) -> int:
        """Optimizer steps that a rollout feeds."""
        return self.num_ppo_epochs * self.num_minibatches

    @property
    def initial_beta(self) -> float:
        """The KL coefficient at the start; the one in use is in the state of the stream."""
        return self.beta

    @property
    def truncates(self) -> bool:
        """Whether rollouts are sampled from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def versions_in_use(self) -> int:
        """Most versions of the policy that a sampler needs at a time: of rollouts, and of evaluations among them."""
        evaluations = 0 if str(getattr(self.eval_strategy, "value", self.eval_strategy)) == "no" else 1
        if evaluations and self.eval_strategy == "steps":
            # A share of all steps, below 1, is a number of steps that is not known yet.
            every = self.eval_steps or self.logging_steps
            evaluations += self.slots_per_rollout if every < 1 else self.slots_per_rollout // int(every)
        return (self.max_staleness + 1) * (1 + evaluations) + 1

    def _inherited_defaults(self) -> dict[str, Any]:
        """Return the default of every field, also of those that this class does not have itself."""
        return {f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(self)}

    def _check_inherited(self) -> None:
        for name, default in self._inherited_defaults().items():
            # On a CPU TrainingArguments itself turns pinning off.
            if name not in INHERITED_WITHOUT_MEANING or (name == "dataloader_pin_memory" and self.use_cpu):
                continue
            value = getattr(self, name)
            if value != default and (value or default is True):
                raise ValueError(f"{name}={value!r} has no meaning here: {INHERITED_WITHOUT_MEANING[name]}")
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                f"gradient_accumulation_steps {self.gradient_accumulation_steps} has no meaning here: an optimizer"
                " step is a minibatch, cut into forwards by microbatch_tokens or per_device_train_batch_size; leave it"
                " at 1"
            )
        for name, (required, reason) in FIXED.items():
            value = getattr(self, name)
            if value is None and name.startswith("ddp_"):
                setattr(self, name, required)
            elif value is not required:
                raise ValueError(f"{name} must stay {required}: {reason}")
        optim = str(getattr(self.optim, "value", self.optim))
        for part, reason in REFUSED_OPTIMIZERS.items():
            if part in optim:
                raise ValueError(f"optim {optim!r} is not supported: {reason}; set adamw_torch, adamw_bnb_8bit, ...")
        scheduler = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        if scheduler in ("reduce_lr_on_plateau", "greedy"):
            raise ValueError(
                f"lr_scheduler_type {scheduler!r} follows a loss on labels, which PPO does not have; choose another"
            )

    def _choose_best_metric(self) -> None:
        saves_best = str(getattr(self.save_strategy, "value", self.save_strategy)) == "best"
        if self.metric_for_best_model is None and (self.load_best_model_at_end or saves_best):
            # Trainer would look for a loss, which an evaluation by sampling does not have.
            self.metric_for_best_model = "score/mean"
            self.greater_is_better = True if self.greater_is_better is None else self.greater_is_better

    def _check_ranges(self) -> None:
        require_seed("seed", self.seed)
        require_seed("data_seed", self.data_seed)
        whole = "rollout_batch_size num_generations num_rollouts max_prompt_length max_completion_length"
        whole += " max_rollout_rows num_ppo_epochs num_minibatches microbatch_tokens max_skipped_steps"
        whole += " per_device_train_batch_size per_device_eval_batch_size alarm_patience pipeline_batches"
        for name in whole.split():
            _require(self, name, lambda v: is_whole(v) and v > 0, "a whole number above 0")
        positive = "temperature score_clip kl_target kl_horizon length_adaptive_lam epsilon epsilon_high value_clip"
        for name in f"{positive} target_kl value_learning_rate gamma".split():
            _require(self, name, lambda v: _is_number(v) and v > 0, "a number above 0")
        for name in ("missing_eos_penalty", "length_penalty", "beta", "value_coef", "entropy_coef"):
            _require(self, name, lambda v: _is_number(v) and v >= 0, "0 or more")
        for name in ("gamma", "lam", "lam_policy", "lam_value", "max_unscored_fraction"):
            _require(self, name, lambda v: _is_number(v) and 0 <= v <= 1, "between 0 and 1")
        _require(self, "dual_clip", lambda v: _is_number(v) and v > 1, "above 1")
        _require(self, "epsilon", lambda v: v < 1, "below 1")
        for name in ("value_pretraining_rollouts", "num_completions_to_print", "trace_rollouts", "max_staleness"):
            _require(self, name, lambda v: is_whole(v) and v >= 0, "0 or more")
        switches = "padding_free pipeline_ahead pipeline_training"
        for name in switches.split():
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        _require(self, "max_grad_norm", lambda v: _is_number(v) and v >= 0, "0 (no clipping) or more")
        if not re.fullmatch(r"all|top-[1-9][0-9]*", str(self.adapter_layers)):
            raise ValueError(
                f"adapter_layers is {self.adapter_layers!r}; it must be 'all', or 'top-k' for the last k layers, such"
                " as top-4"
            )
        for name, words in (
            ("kl_estimator", KL_ESTIMATORS),
            ("truncated_completions", TRUNCATED),
            ("overlong_prompts", OVERLONG),
            ("value_head", VALUE_HEADS),
            ("trunk_cache", TRUNK_CACHES),
            ("schedule", SCHEDULES),
            ("log_format", LOG_FORMATS),
            ("rollout_backend", ROLLOUT_BACKENDS),
        ):
            _require(self, name, lambda v, words=words: v in words, "one of " + ", ".join(words))
        for name, rule in RULES.items():
            value, (low, high, words) = getattr(self, f"alarm_{name}"), rule.range
            if value is not None and not (_is_number(value) and low <= value <= high):
                raise ValueError(f"alarm_{name} is {value!r}; it must be a number, {words}, or null for no such alarm")

    def _check_rollout(self) -> None:
        if self.num_rollouts is not None:
            steps = self.num_rollouts * self.slots_per_rollout
            if self.max_steps not in (-1, steps):
                raise ValueError(
                    f"num_rollouts {self.num_rollouts} makes {steps} optimizer steps, but max_steps is"
                    f" {self.max_steps}; set one of them"
                )
            self.max_steps = steps
        if self.max_prompt_length is None and self.overlong_prompts != "error":
            raise ValueError(f"overlong_prompts {self.overlong_prompts!r} needs max_prompt_length")
        if self.truncated_completions is None:
            self.truncated_completions = "terminal" if self.missing_eos_penalty is None else "penalize"
        if (self.truncated_completions == "penalize") != (self.missing_eos_penalty is not None):
            raise ValueError(
                f"truncated_completions {self.truncated_completions!r} and missing_eos_penalty"
                f" {self.missing_eos_penalty} contradict each other: 'penalize' needs a penalty, the others none"
            )

    def _check_pipeline(self) -> None:
        if self.rollout_backend == "pipelined":
            if self.use_vllm:
                raise ValueError(
                    "rollout_backend is 'pipelined' and use_vllm samples on a server; leave one of them out"
                )
        else:
            self._check_pipeline_without_sampling()
            if not self.pipeline_training:
                return
        if self.schedule != "sync":
            what = "pipeline_training" if self.use_vllm else "rollout_backend 'pipelined'"
            raise ValueError(
                f"schedule {self.schedule!r} samples during the update, and the processes of {what} work together"
                " then; set schedule to sync"
            )
        _require(self, "pipeline_stages", lambda v: is_whole(v) and v > 1, "a whole number above 1")
        require_split(self)
        if self.pipeline_training:
            self._check_stage_training()

    def _check_pipeline_without_sampling(self) -> None:
        """Check that no setting asks for stages but, with rollouts from a server, those that train."""
        stages_train = self.use_vllm and self.pipeline_training
        for name in PIPELINE_SETTINGS:
            if getattr(self, name) and not (stages_train and name in STAGE_SETTINGS):
                raise ValueError(
                    f"{name} is set and rollout_backend is not 'pipelined'; set it, or leave {name} out"
                    + (" (with pipeline_training, use_vllm samples too)" if name in STAGE_SETTINGS else "")
                )
        if stages_train and self.is_colocated:
            raise ValueError(
                "pipeline_training is not supported with vllm_mode 'colocate', whose engine loads the whole base on"
                " the trainer's GPU; set vllm_mode to server"
            )

    def _check_stage_training(self) -> None:
        for name, why, fix in (
            ("fp16", "scales gradients", "set bf16, or neither"),
            ("activation_offloading", "wraps a whole forward", "set activation_checkpointing"),
            ("capture_trunk_states", "keeps states for the layers above the cut", "leave it out"),
        ):
            if getattr(self, name):
                raise ValueError(f"pipeline_training is not supported with {name}, which {why}; {fix}")
        if self.trunk_cache not in ("auto", "off"):
            raise ValueError(
                f"trunk_cache is {self.trunk_cache!r} and pipeline_training runs the lower layers on other processes"
                " than the upper ones; set trunk_cache to auto or off"
            )

    def _check_schedule(self) -> None:
        if self.schedule != "sync" and self.is_colocated:
            raise ValueError(
                f"schedule {self.schedule!r} samples during the update, and vllm_mode 'colocate' has the trainer's GPU"
                " only between two updates; set schedule to sync, or vllm_mode to server"
            )
        fixed = {"sync": 0, "one_step": 1}.get(self.schedule)
        if self.max_staleness is None:
            self.max_staleness = 1 if fixed is None else fixed
        if fixed not in (None, self.max_staleness):
            raise ValueError(
                f"max_staleness is {self.max_staleness} and schedule {self.schedule!r} always has {fixed}; leave"
                " max_staleness out, or set schedule to async"
            )

    def _check_truncation(self) -> None:
        require_truncation(self.top_p, self.top_k)
        require_truncation(self.eval_top_p, self.eval_top_k, "eval_")
        if self.truncates and self.vllm_importance_sampling_correction is False:
            raise ValueError(
                f"top_p is {self.top_p} and top_k is {self.top_k}, so completions are not sampled from the policy that"
                " is trained, and vllm_importance_sampling_correction, which weighs them, is false; leave it out, or"
                " leave top_p and top_k out"
            )

    def _switch_alarms_off(self) -> None:
        samples_ahead = self.max_staleness > 0 or self.pipeline_ahead
        for name in TRUNCATION_ALARMS if self.truncates else ("negative_kl",) if samples_ahead else ():
            if getattr(self, f"alarm_{name}") == getattr(AlarmConfig, f"alarm_{name}"):
                setattr(self, f"alarm_{name}", None)

    def _check_objective(self) -> None:
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise ValueError(
                f"epsilon_high {self.epsilon_high} is below epsilon {self.epsilon}; raise it or leave it out"
            )
        if self.kl_in_loss and self.kl_estimator == "k1":
            raise ValueError("kl_in_loss with kl_estimator k1 has no useful gradient; set kl_estimator to k2 or k3")
        if self.beta and not self.kl_in_loss and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_estimator {self.kl_estimator} in the reward has another gradient than the KL (it pushes tokens"
                " below the reference further down); use k1, or set kl_in_loss"
            )
        if self.kl_in_loss and not self.beta:
            raise ValueError("kl_in_loss needs beta above 0")
        if self.kl_target is not None and not self.beta:
            raise ValueError("kl_target adapts beta by factors: start it above 0")
        if self.length_adaptive_lam is not None and self.lam_policy is not None:
            raise ValueError("length_adaptive_lam and lam_policy both set the policy's lambda; set one of them")


def check_monitor(every: int, window: int, action: str, num_rows: int) -> None:
    """Raise ValueError for a setting of a monitor that is out of range."""
    if every < 1:
        raise ValueError(f"monitor_every is {every} rollouts between two measurements; set it to 1 or more")
    if window < 2:
        raise ValueError(f"monitor_window is {window}; a change takes two measurements: set it to 2 or more")
    if num_rows < 2:
        raise ValueError(f"monitor_rows is {num_rows}; one prompt shows no change for sure: set it to 2 or more")
    if action not in MONITOR_ACTIONS:
        raise ValueError(f"monitor_action is {action!r}; expected {' or '.join(MONITOR_ACTIONS)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(config: PPOSettings, name: str, holds: Callable[[Any], bool], expected: str) -> None:
    value = getattr(config, name)
    if value is None and name in MAY_BE_NONE:
        return
    if isinstance(value, str) and "one of" not in expected:
        number = expected if expected.startswith("a ") else f"a number, {expected}"
        raise ValueError(f"{name} is the text {value!r}; it must be {number}")
    if value is None or not holds(value):
        raise ValueError(f"{name} is {value!r}; it must be {expected}")


# Read once: transformers' parser rewrites the types of fields.
MAY_BE_NONE = frozenset(f.name for f in fields(PPOSettings) if "None" in str(f.type))
