"""The settings of `onetrunk prefs`: prompts, sampling, pairing, and output.

One field is one YAML key and one command line option. The settings of judges are in `judges/load.py`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from onetrunk.feedback.preferences import PAIRINGS, check_pairing
from onetrunk.feedback.shards import FORMATS, Shard
from onetrunk.stages.arguments import DatasetArguments
from onetrunk.utils.options import option
from onetrunk.utils.randomness import require_seed

MODES = ("pairs", "revise")
ENGINES = ("local", "ray")
# The settings that decide the rows: an output folder belongs to one value of each. The others (chunk size, printed
# samples) may change when a run is resumed.
DECIDING = (
    "mode dataset_name dataset_config dataset_split dataset_columns num_generations pairing pairs_per_prompt"
    " both_orders keep_ties num_revisions max_critique_length seed max_prompt_length overlong_prompts"
    " max_completion_length temperature stop_tokens chat_template_kwargs output_format"
).split()


@dataclass
class PrefsArguments(DatasetArguments):
    """Prompts, how completions are sampled (names as in PPOConfig), and how they become rows."""

    # Output
    mode: str = option(
        "pairs",
        "pairs: a judge compares completions, which become preferences. revise: the model criticises its completions"
        " by a principle and rewrites them; they become rows for sft.",
        MODES,
    )
    output_dir: str | None = option(None, "Folder for the rows, the ledger, statistics and a dataset card.")
    overwrite_output_dir: bool = option(
        False, "Replace the rows of other settings in output_dir. Its ledger is kept and used."
    )
    output_format: str = option("jsonl", "File format of the rows.", FORMATS)
    # Pairs
    num_generations: int = option(4, "Completions per prompt; for pairs 2 or more.")
    pairing: str = option(
        "all",
        "Which completions of a prompt are compared. all: every pair; best_worst: the highest with the lowest rated"
        " (the judge first rates each alone); random: pairs_per_prompt pairs.",
        PAIRINGS,
    )
    pairs_per_prompt: int | None = option(None, "With pairing random: pairs per prompt.")
    both_orders: bool = option(True, "Show each pair in both orders: a preference for a position cancels out.")
    keep_ties: bool = option(False, "Also write pairs with a label of exactly 0.5, with an arbitrary choice.")
    max_failed_fraction: float = option(
        0.1,
        "Stop when more than this fraction of the questions, or 50 in a row, get no answer. Questions that the judge"
        " refuses or answers without a verdict are counted separately; they stop a run only on 5 prompts or more.",
    )
    # Revisions
    num_revisions: int = option(1, "With mode revise: revisions per completion, each by another principle.")
    critic_model: str | None = option(None, "With mode revise: the model that criticises; None: the policy.")
    max_critique_length: int = option(256, "With mode revise: longest critique, in tokens.")
    # Sampling
    seed: int = option(42, "Seed of completions, pairs and principles.")
    max_prompt_length: int | None = option(None, "Longest prompt, in tokens; None: the model's limit.")
    overlong_prompts: str = option(
        "error", "What to do with a longer prompt: 'error', 'drop' the row, or 'truncate' to its last tokens."
    )
    max_completion_length: int = option(256, "Longest completion, in tokens.")
    temperature: float = option(1.0, "Sampling temperature; above 0.")
    stop_tokens: list[str] | None = option(None, "Tokens that end a completion besides the model's EOS, as text.")
    chat_template_kwargs: dict[str, Any] | None = option(
        None, "Keywords for the tokenizer's chat template; as JSON on the command line."
    )
    max_rollout_rows: int | None = option(None, "Largest number of rows decoded together; None: all of a chunk.")
    use_cpu: bool = option(False, "Use the CPU even if there is an accelerator.")
    # The run
    engine: str = option(
        "local",
        "ray: workers on Ray Data (pip install onetrunk[ray]) sample the completions; each holds the model."
        " RAY_ADDRESS names a cluster, otherwise Ray starts on this machine.",
        ENGINES,
    )
    ray_workers: int = option(1, "With engine ray: workers, each with a CPU core and, if there is one, a GPU.")
    prompts_per_chunk: int = option(16, "Prompts that are sampled together and judged together.")
    max_waiting_chunks: int = option(4, "Chunks that may be sampled ahead of the judge.")
    streaming: bool = option(False, "Read the rows only as needed, for inputs that do not fit on the disk.")
    shard: str | None = option(
        None, "i/n: only the prompts of part i (0 to n-1) of n, divided by content; one job per part, same output_dir."
    )
    merge_shards: int | None = option(
        None, "Sample nothing: merge the statistics of this number of finished shards, and write the dataset card."
    )
    num_samples_to_print: int = option(3, "Rows printed at the end; 0: none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output_dir:
            raise ValueError("output_dir is not set; name the folder that this run writes to")
        if self.mode == "pairs":
            check_pairing(self.pairing, self.num_generations, self.pairs_per_prompt)
        if self.shard is not None and self.merge_shards is not None:
            raise ValueError("shard and merge_shards are both set; run every shard first, then merge_shards alone")
        _ = self.part  # Raises on a wrong shard.
        if not 0 <= self.max_failed_fraction <= 1:
            raise ValueError(f"max_failed_fraction is {self.max_failed_fraction}; set it from 0 to 1")
        require_seed("seed", self.seed)
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; completions of a prompt differ only above 0")
        for name in ("num_generations", "num_revisions", "prompts_per_chunk", "max_waiting_chunks", "ray_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if self.critic_model is not None and self.mode != "revise":
            raise ValueError("critic_model is set and mode is pairs; set mode to revise, or leave critic_model out")
        if self.engine == "ray" and self.mode == "revise":
            raise ValueError("engine ray samples for mode pairs; revise on one machine, or in shards (--shard i/n)")

    @property
    def part(self) -> Shard:
        """The shard of this run; 0/1 if none is set."""
        return Shard.parse(self.shard or "0/1")

    def deciding(self) -> dict[str, Any]:
        """Return the settings that decide the rows, as JSON values."""
        values = asdict(self)
        return {name: values[name] for name in DECIDING} | {"shards": self.merge_shards or self.part.count}
