"""Arguments that concern rows: where they come from, how they are sampled, who scores and judges them.

One field is one YAML key and one command line option. The module imports neither torch nor transformers (see
`utils/options.py`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from onetrunk.data.names import looks_like_path
from onetrunk.judges.load import REWARD, JudgeConfig
from onetrunk.ppo.settings import MONITOR_ACTIONS, PPOSettings, VLLMServerConfig, check_monitor
from onetrunk.utils.options import VLLM_RANKS, option, require_seed, require_truncation

# Fields of TRL's ModelConfig that a stage rejects, and why.
WITHOUT_MEANING = {
    "lora_modules_to_save": "the base stays frozen, and the value head is saved next to the adapter",
    "lora_target_parameters": "adapters stand on linear layers; use lora_target_modules",
    "lora_task_type": "it is always CAUSAL_LM",
    "bnb_4bit_quant_storage": "it is for sharded training, which is not supported yet",
}
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cuda", "cpu")
# Words in reward_funcs that stand for the judge.
JUDGE, PAIRWISE = "judge", "pairwise"


@dataclass
class DatasetArguments:
    """Where the rows come from."""

    dataset_name: str | None = option(None, "A .jsonl, .json, .parquet or .csv file, a folder, or a name on the Hub.")
    dataset_config: str | None = option(None, "Configuration of a Hub dataset with several.")
    dataset_split: str = option("train", "Split, with a slice if wanted: train[:1000]. A file has only train.")
    dataset_columns: dict[str, str] | None = option(
        None, "Columns under another name, ours first: {prompt: question}; as JSON on the command line."
    )

    def __post_init__(self) -> None:
        if not self.dataset_name:
            raise ValueError("dataset_name is not set; give a file, a folder, or the name of a dataset on the Hub")

    @property
    def hub_dataset(self) -> str | None:
        """The dataset's name for a model card; None for a local dataset, which the Hub does not know."""
        is_local = Path(self.dataset_name).exists() or looks_like_path(self.dataset_name)
        return None if is_local else self.dataset_name


@dataclass
class SamplingArguments(VLLMServerConfig, DatasetArguments):
    """Prompts, and where and how completions of them are sampled. The names are those of PPOConfig."""

    output_dir: str | None = option(None, "Folder that the run writes to.")
    seed: int = option(42, "Seed of the completions.")
    max_prompt_length: int | None = option(None, "Longest prompt, in tokens; None: the model's limit.")
    overlong_prompts: str = option(
        "error", "What to do with a longer prompt: 'error', 'drop' the row, or 'truncate' to its last tokens."
    )
    max_completion_length: int = option(256, "Longest completion, in tokens.")
    temperature: float = option(1.0, "Sampling temperature; above 0.")
    top_p: float = option(
        1.0, "Sample from the fewest tokens that have this probability together; above 0, at most 1 (all tokens)."
    )
    top_k: int = option(0, "Sample from so many most probable tokens; 0: from all.")
    stop_tokens: list[str] | None = option(None, "Tokens that end a completion besides the model's EOS, as text.")
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "Keywords for the tokenizer's chat template, as in training; as JSON on the command line."
    )
    max_rollout_rows: int | None = option(None, "Largest number of rows that a process decodes together; None: all.")
    use_cpu: bool = option(False, "Use the CPU even if there is an accelerator.")
    max_failed_fraction: float = option(
        0.1,
        "Stop when more than this fraction of the judge's questions, or 50 in a row, get no answer. Questions that it"
        " refuses or answers without a verdict are counted separately; they stop a run only on 5 prompts or more.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_output_dir_is_set(self)
        require_seed("seed", self.seed)
        require_truncation(self.top_p, self.top_k)
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"max_failed_fraction is {self.max_failed_fraction}; set it from 0 to 1")


@dataclass
class TrainingDataArguments(DatasetArguments):
    """Training rows and held-out rows: another dataset or split, or a part of the training rows."""

    streaming: bool = option(
        False,
        "Read the training rows from Parquet or JSONL files while training: they need not fit on the disk or in"
        " memory. dataset_name may be *.parquet, and at hf://, s3:// or gs://.",
    )
    shuffle_window: int = option(
        10_000, "streaming: rows that are shuffled together, and about how many are in memory; 1 or more."
    )

    eval_dataset_name: str | None = option(None, "Held-out rows: a file, folder or Hub name with the same columns.")
    eval_dataset_split: str | None = option(None, "Their split; alone it names a split of dataset_name.")
    eval_size: float | None = option(
        None, "Without another dataset: hold out this number of training rows (1 or more), or this share (below 1)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shuffle_window < 1:
            raise ValueError(f"shuffle_window is {self.shuffle_window}; set 1 row or more (10000 is common)")
        if not self.streaming and self.shuffle_window != TrainingDataArguments.shuffle_window:
            raise ValueError(f"shuffle_window is {self.shuffle_window}, and only streaming uses it; set both or none")
        if self.streaming and self.eval_size is not None:
            raise ValueError(
                "eval_size holds out rows of a dataset in memory, and streaming keeps none there; name the held-out"
                " rows by eval_dataset_name or eval_dataset_split"
            )
        if self.eval_size is None:
            return
        if self.eval_dataset_name or self.eval_dataset_split:
            raise ValueError("eval_size and eval_dataset_name or eval_dataset_split are both set; keep one of them")
        if self.eval_size >= 1:
            if self.eval_size != int(self.eval_size):
                raise ValueError(f"eval_size is {self.eval_size}; give a whole number of rows, or a share below 1")
            self.eval_size = int(self.eval_size)


@dataclass
class PPODataArguments(TrainingDataArguments):
    """Rows of prompts, and the reward functions that score the completions."""

    reward_funcs: list[str] | None = option(
        None,
        "package.module.function, path/to/file.py:function, a reward model's folder or Hub name (an adapter on the"
        " policy's own base is a branch of its trunk), a server's address, http://host:port/classify#model=NAME, or"
        " with a judge the words judge (its rating) and pairwise (log P of beating the reference); one or several.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.reward_funcs:
            raise ValueError("reward_funcs is not set; give at least one, such as path/to/file.py:function")
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = [self.reward_funcs]


@dataclass
class PPOJudgeArguments:
    """A judge as a reward function, and another judge that monitors the reward."""

    judge_report: str | None = option(
        None, "output_dir of onetrunk judge, which measured the judge of this run: the model card quotes it."
    )
    monitor_judge: list[str] | None = option(
        None,
        "Specs of a judge that is not part of the reward, as in judge. It rates completions of held-out prompts during"
        " training, and an alarm is raised where the reward rises while its ratings fall.",
    )
    monitor_constitution: str | None = option(None, "YAML file with its principles; None: constitution.")
    monitor_rubric: dict[str, str] | None = option(None, "Its rubric, where it is one; None: rubric.")
    monitor_every: int = option(1, "Rollouts between two of its measurements.")
    monitor_rows: int = option(64, "Number of held-out prompts that it rates; without held-out rows training prompts.")
    monitor_action: str = option("warn", "At an alarm: warn, or stop training.", MONITOR_ACTIONS)

    def __post_init__(self) -> None:
        if isinstance(self.monitor_judge, str):
            self.monitor_judge = [self.monitor_judge]
        check_monitor(self.monitor_every, self.monitor_action, self.monitor_rows)
        changed = [
            f.name for f in fields(self) if f.name.startswith("monitor_") and getattr(self, f.name) != f.default
        ]
        if changed and not self.monitor_judge:
            raise ValueError(f"{changed[0]} is set and monitor_judge is not; name a judge, or leave {changed[0]} out")

    def monitor_settings(self, settings: JudgeConfig) -> JudgeConfig:
        """Return the settings of the monitor's judge: those of the reward's judge with the monitor's own values."""
        return replace(
            settings,
            judge=self.monitor_judge,
            constitution=self.monitor_constitution or settings.constitution,
            rubric=self.monitor_rubric or (settings.rubric if "rubric" in self.monitor_judge else None),
        )


def check_judges(
    data: PPODataArguments,
    args: PPOSettings,
    model_args: Any,
    settings: JudgeConfig,
    arguments: PPOJudgeArguments,
) -> None:
    """Raise ValueError for a judge without settings, settings without a judge, or a judge that monitors itself."""
    reward_funcs = data.reward_funcs
    words = [word for word in (JUDGE, PAIRWISE) if word in reward_funcs]
    if words and not settings.judge:
        raise ValueError(f"reward_funcs names {words[0]}, and judge is not set; name who judges, such as rubric")
    if settings.judge and not words:
        raise ValueError(
            f"judge is set, and reward_funcs names neither {JUDGE} (its rating) nor {PAIRWISE} (log P of being better"
            " than the reference's completion); add one of them, or leave judge out (monitor_judge only watches)"
        )
    if words and not settings.constitution:
        raise ValueError("judge is set and constitution is not; a judge judges by one: name a YAML file")
    if arguments.judge_report and not settings.judge and not arguments.monitor_judge:
        raise ValueError("judge_report is set and no judge is; name the judge that it measured, or leave it out")
    if not arguments.monitor_judge:
        return
    monitor = arguments.monitor_settings(settings)
    if not monitor.constitution:
        raise ValueError("monitor_judge is set, and neither monitor_constitution nor constitution; name a YAML file")
    same = [spec for spec in arguments.monitor_judge if spec.removeprefix(REWARD) in reward_funcs]
    if words and monitor == settings:
        same = list(arguments.monitor_judge)
    if same:
        raise ValueError(
            f"monitor_judge {same[0]} is what the reward is made of, and would see no gap; name a judge that PPO does"
            " not see"
        )


@dataclass
class ServeArguments:
    """The options of `onetrunk serve`; names as in `vllm serve` and `trl vllm-serve`."""

    model: str | None = option(
        None, "Name or folder of the base model that PPO trains on; for an adapter, its base is served."
    )
    host: str = option(
        "127.0.0.1", "Address to listen on. Whoever reaches it can load adapters, so do not open it to others."
    )
    port: int = option(8000, "Port to listen on, 1 to 65535.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the Hub.")
    dtype: str = option("auto", "auto (the checkpoint's own), float32, bfloat16 or float16; as the trainer's base.")
    max_lora_rank: int = option(16, "Largest rank of an adapter, 1 to 512; rounded up to a rank that vLLM knows.")
    max_loras: int = option(2, "Adapters that sample at the same time, at least 1; others wait on the CPU or on disk.")
    max_model_len: int | None = option(
        None, "Most tokens of a prompt with its completion, at least 2; the model's own positions if left out."
    )
    tensor_parallel_size: int = option(1, "GPUs that share the model, at least 1.")
    gpu_memory_utilization: float = option(
        0.9, "Share of a GPU's memory that the server takes, above 0, at most 1; lower it beside a trainer."
    )
    device: str = option("auto", "cuda, cpu, or auto: cuda if there is a GPU.")
    api_key_env: str | None = option(
        None,
        "Environment variable with the key that calls must bring; for ppo, eval and prefs it is vllm_api_key_env.",
    )
    python: str | None = option(
        None, "Interpreter of the environment that has vLLM; it may need another transformers than onetrunk has."
    )
    command: str | None = option(
        None,
        "Command to run when the server is ready, such as 'onetrunk prefs --config prefs.yaml'; the server is stopped"
        " when the command ends.",
    )
    print: bool = option(False, "Print the command of the server instead of starting it.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("no model is named; write onetrunk serve MODEL --port 8000")
        if self.command is not None:
            self._check_command()
        at_least = {"port": 1, "max_lora_rank": 1, "max_loras": 1, "tensor_parallel_size": 1, "max_model_len": 2}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}; set it to {least} or more")
        if self.port > 65535:
            raise ValueError(f"port is {self.port}; set it to 65535 or less")
        if self.max_lora_rank > VLLM_RANKS[-1]:
            raise ValueError(f"max_lora_rank is {self.max_lora_rank}, and vLLM serves ranks up to {VLLM_RANKS[-1]}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; set it above 0, at most 1")
        for name, known in (("dtype", DTYPES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {', '.join(known)}")

    def _check_command(self) -> None:
        if self.print:
            raise ValueError("command and print are both set; print starts no server, so leave one of them out")
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"command is {self.command!r}, whose quotes do not match; close them") from error
        if not words:
            raise ValueError("command is empty; write one as in a shell, such as 'onetrunk prefs --config prefs.yaml'")


@dataclass
class PushArguments:
    """Whether and where the result of a stage that trains nothing is uploaded (`checkpoints/hub.py`)."""

    push_to_hub: bool = option(False, "Also upload the result to the Hub.")
    hub_model_id: str | None = option(None, "Its name there; None: the name of output_dir.")
    hub_private_repo: bool | None = option(None, "Make the repository private if it is new.")
    hub_revision: str | None = option(None, "Branch to upload to; None: main.")

    # What `require_push` also reads of the settings of a training.
    process_index: ClassVar[int] = 0
    hub_token: ClassVar[None] = None


@dataclass
class MergeArguments(PushArguments):
    """The options of `onetrunk merge`."""

    adapter: str | None = option(None, "Folder or Hub name of the adapter, such as the output_dir of onetrunk ppo.")
    output_dir: str | None = option(None, "Folder that gets the merged model.")
    revision: str | None = option(None, "Branch, tag or commit of the adapter on the Hub.")
    dtype: str = option(
        "auto", "Precision of the written weights: auto (the base's own), float32, bfloat16 or float16.", DTYPES
    )
    overwrite_output_dir: bool = option(False, "Replace a model that was merged into output_dir before.")

    def __post_init__(self) -> None:
        if not self.adapter:
            raise ValueError("no adapter is named; write onetrunk merge ADAPTER --output_dir FOLDER")
        if not self.output_dir:
            raise ValueError("output_dir is not set; name the folder that gets the merged model")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; expected {', '.join(DTYPES)}")


def require_output_dir_is_set(args: Any) -> None:
    if not args.output_dir:
        raise ValueError("output_dir is not set; name the folder that this run writes to")


def check_seeds(args: Any) -> None:
    require_seed("seed", args.seed)
    require_seed("data_seed", args.data_seed)


def require_model_name(args: Any) -> None:
    if not args.model_name_or_path:
        raise ValueError("model_name_or_path is not set; give a folder or a name on the Hub")


def check_model(args: Any, defaults: Mapping[str, Any], needs_model: bool = True) -> None:
    """Raise ValueError for settings of a model that are missing, or that mean nothing here.

    Args:
        args: ModelArguments, or an object with its fields.
        defaults: of the fields in WITHOUT_MEANING.
        needs_model: False for a stage that may need no model.
    """
    if needs_model:
        require_model_name(args)
    for name, reason in WITHOUT_MEANING.items():
        if getattr(args, name) != defaults[name]:
            raise ValueError(f"{name}={getattr(args, name)!r} has no meaning here: {reason}")
    if isinstance(args.lora_r, int) and args.lora_r < 1:
        raise ValueError(f"lora_r is {args.lora_r}; set a rank of 1 or more, such as 16")
    if args.load_in_4bit and args.dtype in (None, "auto"):
        raise ValueError("load_in_4bit computes in dtype, which is auto; set dtype to bfloat16 (float32 on a CPU)")
