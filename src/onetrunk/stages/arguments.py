"""The settings of the stages, and how they are parsed: a user's mistake becomes one message and exit code 2.

    onetrunk ppo --config recipes/tiny/ppo.yaml --learning_rate 1e-3

The YAML file sets values, and the command line overrides them. Relative paths in both start at the working folder, not
at the YAML file. One field of a dataclass is one YAML key and one option: `options/table.py` reads the fields from the
source code of this file, and `options/reading.py` reads the values and checks their types. The dataclasses check the
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trl import ModelConfig, SFTConfig, get_peft_config

from onetrunk.checkpoints.config import CheckpointConfig
from onetrunk.data.files import BUILDERS
from onetrunk.models.loading import is_adapter
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.foreign_names import OF_MODEL_CONFIG
from onetrunk.ppo.settings import VLLMServerConfig
from onetrunk.servers.openenv import open_environment
from onetrunk.stages.options.reading import UsageError, read
from onetrunk.utils.files import looks_like_path, require_name
from onetrunk.utils.import_path import find_object
from onetrunk.utils.options import option, require_seed, require_truncation
from onetrunk.utils.redaction import SecretFreeArguments

if TYPE_CHECKING:
    from peft import LoraConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")


# Settings without which a stage does not start, and what to give.
NEEDED = {
    "judge": "name the judges to measure, such as reward:runs/reward, a server's address, or a causal model's folder;"
    " several are measured one by one and as an ensemble",
    "dataset_name": "give a file, a folder, or the name of a dataset on the Hub",
    "model_name_or_path": "give a folder or a name on the Hub",
    "output_dir": "name the folder that this run writes to",
    "reward_funcs": "give at least one, such as path/to/file.py:function",
}


def require_set(settings: Any, name: str) -> None:
    """Raise ValueError if a setting of NEEDED has no value."""
    if not getattr(settings, name):
        raise ValueError(f"{name} is not set; {NEEDED[name]}")


@dataclass
class DatasetArguments:
    """Where the rows come from."""

    dataset_name: str | None = option(None, "A .jsonl, .json, .parquet or .csv file, a folder, or a name on the Hub.")
    dataset_config: str | None = option(None, "Configuration of a Hub dataset with several.")
    dataset_split: str = option("train", "Split, with a slice if wanted: train[:1000]. A file has only train.")
    dataset_columns: dict[str, str] | None = option(
        None, "Columns to rename, ours first: {prompt: question}; as JSON on the command line."
    )

    def __post_init__(self) -> None:
        require_set(self, "dataset_name")

    @property
    def hub_dataset(self) -> str | None:
        """The dataset's name for a model card; None for a local dataset, which the Hub does not know."""
        is_local = Path(self.dataset_name).exists() or looks_like_path(self.dataset_name, BUILDERS)
        return None if is_local else self.dataset_name


@dataclass
class AskingArguments(DatasetArguments):
    """Rows about which judges are asked, and where the run writes."""

    output_dir: str | None = option(None, "Folder that the run writes to.")
    max_failed_fraction: float = option(
        0.1,
        "Stop when more than this fraction of a judge's questions, or 50 in a row, get no answer. Questions that it"
        " refuses or answers without a verdict are counted separately; they stop a run only on 5 prompts or more.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_set(self, "output_dir")
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"max_failed_fraction is {self.max_failed_fraction}; set it from 0 to 1")


@dataclass
class SamplingArguments(VLLMServerConfig, AskingArguments):
    """Prompts, and where and how completions of them are sampled. The options are named as in PPOConfig."""

    seed: int = option(42, "Seed of the completions.")
    max_prompt_length: int | None = option(None, "Longest prompt, in tokens; None: the model's limit.")
    overlong_prompts: str = option(
        "error", "What to do with a longer prompt: 'error', 'drop' the row, or 'truncate' to its last tokens."
    )
    max_completion_length: int = option(256, "Longest completion, in tokens.")
    temperature: float = option(1.0, "Sampling temperature; above 0.")
    top_p: float = option(
        1.0, "Sample from the smallest set of tokens with this total probability; above 0, at most 1 (all tokens)."
    )
    top_k: int = option(0, "Sample from the k most probable tokens; 0: from all.")
    stop_tokens: list[str] | None = option(
        None, "Tokens that end a completion, in addition to the model's EOS, as text."
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "Keywords for the tokenizer's chat template, as in training; as JSON on the command line."
    )
    max_rollout_rows: int | None = option(None, "Largest number of rows that a process decodes together; None: all.")
    use_cpu: bool = option(False, "Use the CPU even if there is an accelerator.")
    tie_margin: float = option(0.0, "Pairs whose label is at most this far from 0.5 are ties; from 0 to below 0.5.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.tie_margin < 0.5:
            raise ValueError(f"tie_margin is {self.tie_margin}; set it from 0 to below 0.5")
        require_seed("seed", self.seed)
        require_truncation(self.top_p, self.top_k)


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
    eval_dataset_split: str | None = option(None, "Split of eval_dataset_name; without that, of dataset_name.")
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
class EpisodeArguments:
    """What answers the turns of episodes."""

    tools: list[str] | None = option(
        None,
        "Functions that the policy may call: path/to/file.py:function or package.module.function; one or several.",
    )
    environment: str | dict[str, str] | None = option(
        None,
        "Class or function that makes an environment with TRL's or Gymnasium's methods: path/to/file.py:Class; or the"
        " address of an OpenEnv server, http://HOST:PORT; or in YAML a mapping to several of these from names"
        " in the column environment.",
    )

    compact: str | None = option(
        None,
        "With max_context_length: function that takes the messages of an episode and returns those of its new context,"
        " in place of the policy's summary: path/to/file.py:function.",
    )

    def episode_parts(self) -> dict[str, Any]:
        """Return `tools`, `environment_factory` and `compact` as PPOTrainer takes them; imports what they name."""
        tools, factory = [find_object(spec, "tool") for spec in self.tools or ()], self.environment
        if isinstance(factory, dict):
            factory = {name: _environment(str(spec)) for name, spec in factory.items()}
        elif factory is not None:
            factory = _environment(factory)
        compact = None if self.compact is None else find_object(self.compact, "function")
        return {"tools": tools or None, "environment_factory": factory, "compact": compact}


def _environment(spec: str) -> Callable[[], Any]:
    if spec.startswith(("http://", "https://")):
        return partial(open_environment, spec)
    return find_object(spec, "environment", ", nor the address of an OpenEnv server")


@dataclass
class PPODataArguments(EpisodeArguments, TrainingDataArguments):
    """Rows of prompts, and the reward functions that score the completions."""

    reward_funcs: list[str] | None = option(
        None,
        "package.module.function, path/to/file.py:function, one of TRL's such as think_format_reward, a reward model's"
        " folder or Hub name (an adapter on the policy's own base is a branch of its trunk), prm:NAME for a process"
        " reward model, a server's address,"
        " http://host:port/classify#model=NAME, or judge: the rating of the judge in the settings; one or several.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.environment:
            require_set(self, "reward_funcs")


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
class ModelArguments(ModelConfig):
    """TRL's ModelConfig (the model, its precision, the LoRA adapter), without LoRA dropout."""

    needs_model: ClassVar[bool] = True

    model_revision: str = option("main", "Branch, tag or commit on the Hub.")
    dtype: str | None = option(
        "auto",
        "Precision of the weights. auto: the checkpoint's own; for full fine-tuning float32.",
        ("auto", "bfloat16", "float16", "float32"),
    )
    use_peft: bool | None = option(None, "sft: train a LoRA adapter instead of all weights. ppo always trains one.")
    lora_dropout: float = option(0.0, "LoRA dropout; sft only.")
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Names of modules that get LoRA; all-linear: all but the head."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # TRL turns a list of one name into a string, which PEFT would read as a regular expression over whole paths.
        if isinstance(self.lora_target_modules, str) and self.lora_target_modules != "all-linear":
            self.lora_target_modules = [self.lora_target_modules]
        if self.needs_model:
            require_set(self, "model_name_or_path")
        for name, reason in OF_MODEL_CONFIG.items():
            if getattr(self, name) != getattr(ModelConfig, name):
                raise ValueError(f"{name}={getattr(self, name)!r} has no meaning here: {reason}")
        if self.lora_r < 1:
            raise ValueError(f"lora_r is {self.lora_r}; set a rank of 1 or more, such as 16")
        if self.load_in_4bit and self.dtype in (None, "auto"):
            raise ValueError("load_in_4bit computes in dtype, which is auto; set dtype to bfloat16 (float32 on a CPU)")

    def init_kwargs(self) -> dict[str, Any]:
        attention = self.attn_implementation
        kwargs = {"dtype": self.dtype, "attn_implementation": attention, "revision": self.model_revision}
        return {key: value for key, value in kwargs.items() if value is not None}

    def base_kwargs(self, args: SFTConfig | RewardTrainingArguments, what: str) -> dict[str, Any]:
        """Return the keyword arguments to load a base model with, and move `model_init_kwargs` out of the settings."""
        name = self.model_name_or_path
        if name and is_adapter(name, self.model_revision):
            raise ValueError(f"{name} is an adapter; {what} starts from a base model: give that")
        given, args.model_init_kwargs = args.model_init_kwargs or {}, None
        kwargs = {**self.init_kwargs(), "trust_remote_code": args.trust_remote_code, **given}
        if not self.use_peft and kwargs.get("dtype") == "auto":
            # All weights train: bfloat16 would lose small updates.
            kwargs["dtype"] = "float32"
        return kwargs

    def peft_config(self) -> LoraConfig:
        return get_peft_config(replace(self, use_peft=True))

    def changed_lora_fields(self) -> list[str]:
        plain = ModelArguments(model_name_or_path=self.model_name_or_path)
        names = [f.name for f in fields(self) if f.name.startswith("lora_") or f.name in ("use_rslora", "use_dora")]
        return [name for name in names if getattr(self, name) != getattr(plain, name)]


@dataclass
class OptionalModelArguments(ModelArguments):
    """ModelArguments of a stage that may need no model; the stage checks whether it does."""

    needs_model: ClassVar[bool] = False


@dataclass(repr=False)
class StageTrainingArguments:
    """What every training stage adds to its trainer's settings class; it stands before that class."""

    write_report: bool = option(
        True, "At the end, write _report/report.html in output_dir: curves, alarms, samples, settings."
    )

    def __post_init__(self) -> None:
        require_set(self, "output_dir")
        if self.run_name is not None:  # A tracker makes it a part of a path.
            require_name(self.run_name, "run_name")
        super().__post_init__()


@dataclass(repr=False)
class RewardTrainingArguments(StageTrainingArguments):
    """What a stage adds that trains a reward model; which layers of a reward adapter train."""

    adapter_layers: str = option(
        "all", "With use_peft, layers that get LoRA: all, or top-k (from PPO's cut upwards it reuses kept states)."
    )


@dataclass(repr=False)
class SFTArguments(StageTrainingArguments, CheckpointConfig, SecretFreeArguments, SFTConfig):
    """Settings of `onetrunk sft`."""

    text_as_messages: bool = option(
        False,
        "Read the texts prompt and completion as messages of the user and the assistant, through the chat template.",
    )

    def __post_init__(self) -> None:
        require_seed("seed", self.seed)
        require_seed("data_seed", self.data_seed)
        super().__post_init__()


@dataclass(repr=False)
class PPOArguments(StageTrainingArguments, PPOConfig):
    """Settings of `onetrunk ppo`."""


def parse(
    argv: Sequence[str], verb: str, dataclass_types: Sequence[type], check: Callable[..., None] | None = None
) -> tuple[Any, ...]:
    """Return one instance of each dataclass, from the YAML file after --config and the options in `argv`.

    Args:
        check: raises ValueError if the instances, its arguments, do not fit together.

    Raises:
        UsageError: names the file and line, or the option, and what to write instead; also for a secret in either.
    """
    values = read(verb, argv)
    try:
        parsed = tuple(
            settings(**{f.name: values[f.name] for f in fields(settings) if f.name in values})
            for settings in dataclass_types
        )
        if check is not None:
            check(*parsed)
        return parsed
    except UsageError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise UsageError(str(error)) from error
