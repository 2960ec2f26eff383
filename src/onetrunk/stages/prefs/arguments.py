"""What a recipe can say about preference data: which prompts, how they are sampled and paired, what is written where.

A dataclass for TrlParser: one field is one YAML key and one command line option. What judges are asked is in
`judges/load.py`. Knows no rows and no model.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from onetrunk.feedback.preferences import PAIRINGS, check_pairing
from onetrunk.feedback.shards import FORMATS, Shard
from onetrunk.stages.arguments import DatasetArguments
from onetrunk.utils.randomness import require_seed

MODES = ("pairs", "revise")
ENGINES = ("local", "ray")
# What decides the rows: a folder belongs to one value of each. The rest (chunks, rows at once, samples shown) may
# change between a run and its resumption.
DECIDING = (
    "mode dataset_name dataset_config dataset_split dataset_columns num_generations pairing pairs_per_prompt"
    " both_orders keep_ties num_revisions max_critique_length seed max_prompt_length overlong_prompts"
    " max_completion_length temperature stop_tokens chat_template_kwargs output_format"
).split()


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    metadata: dict[str, Any] = {"help": text}
    return field(default=default, metadata=metadata | ({"choices": list(choices)} if choices else {}))


@dataclass
class PrefsArguments(DatasetArguments):
    """Prompts, how they are answered, and how the answers become rows. Names of sampling are those of PPOConfig."""

    # What is made
    mode: str = _option(
        "pairs",
        "pairs: completions are compared by a judge and become preferences. revise: they are criticised by a principle"
        " and written anew, and become rows for sft.",
        MODES,
    )
    output_dir: str | None = _option(None, "Folder for the rows, the ledger, statistics and a dataset card.")
    overwrite_output_dir: bool = _option(
        False, "Replace the rows that other settings have left in output_dir. Its ledger stays, and is used."
    )
    output_format: str = _option("jsonl", "Of the rows.", FORMATS)
    # Pairs
    num_generations: int = _option(4, "Completions per prompt; for pairs 2 or more.")
    pairing: str = _option(
        "all",
        "Which completions of a prompt are compared: all pairs; best_worst: the highest with the lowest rated, for"
        " which the judge rates each alone; random: pairs_per_prompt of them.",
        PAIRINGS,
    )
    pairs_per_prompt: int | None = _option(None, "With pairing random: pairs per prompt.")
    both_orders: bool = _option(True, "Show each pair in both orders: a preference for a place cancels out.")
    keep_ties: bool = _option(False, "Write pairs whose label is exactly 0.5 too; which is chosen says nothing then.")
    max_failed_fraction: float = _option(
        0.1,
        "Stop when the judge leaves more of its questions than that without an answer, or 50 in a row. Questions that"
        " it refuses, or answers with no verdict, count apart; they stop a run only on 5 prompts or more.",
    )
    # Revisions
    num_revisions: int = _option(1, "With mode revise: revisions of a completion, each by another principle.")
    critic_model: str | None = _option(None, "With mode revise: a model that criticises; None: the model itself.")
    max_critique_length: int = _option(256, "With mode revise: longest critique, tokens.")
    # Sampling
    seed: int = _option(42, "Of completions, pairs and principles.")
    max_prompt_length: int | None = _option(None, "Longest prompt, tokens; None: no limit but the model's.")
    overlong_prompts: str = _option(
        "error", "A longer prompt: 'error', 'drop' the row, or 'truncate' to its last tokens."
    )
    max_completion_length: int = _option(256, "Longest completion, tokens.")
    temperature: float = _option(1.0, "Divides the logits; above 0.")
    stop_tokens: list[str] | None = _option(None, "Tokens that end a completion beside the model's EOS, as text.")
    chat_template_kwargs: dict[str, Any] | None = _option(
        None, "Keywords for the tokenizer's chat template; as JSON on the command line."
    )
    max_rollout_rows: int | None = _option(None, "Most rows that decode at once; None: all of a chunk.")
    use_cpu: bool = _option(False, "Stay on the CPU even where there is an accelerator.")
    # The run
    engine: str = _option(
        "local",
        "ray: completions are sampled by workers on Ray Data (pip install onetrunk[ray]), each of which holds the"
        " model; RAY_ADDRESS names a cluster, else Ray starts on this machine.",
        ENGINES,
    )
    ray_workers: int = _option(1, "With engine ray: workers, each with a CPU and, where there are any, a GPU.")
    prompts_per_chunk: int = _option(16, "Prompts that are sampled together, and then judged together.")
    max_waiting_chunks: int = _option(4, "Chunks that may be sampled ahead of the judge.")
    streaming: bool = _option(False, "Read the rows as they are needed: for inputs that do not fit on the disk.")
    shard: str | None = _option(
        None, "i/n: only prompts whose content falls into part i (0 to n-1) of n; one job each, the same output_dir."
    )
    merge_shards: int | None = _option(
        None, "Sample nothing; add up the statistics of so many finished shards, and write their card."
    )
    num_samples_to_print: int = _option(3, "Rows shown in the terminal; 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.output_dir:
            raise ValueError("output_dir is not set; name the folder that this run writes to")
        if self.mode == "pairs":
            check_pairing(self.pairing, self.num_generations, self.pairs_per_prompt)
        if self.shard is not None and self.merge_shards is not None:
            raise ValueError("shard and merge_shards are both set; run every shard first, then merge_shards alone")
        Shard.parse(self.shard or "0/1")
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
        """The shard that this run takes: the whole where none is named."""
        return Shard.parse(self.shard or "0/1")

    def deciding(self) -> dict[str, Any]:
        """Return the settings that decide the rows, as JSON values."""
        values = asdict(self)
        return {name: values[name] for name in DECIDING} | {"shards": self.merge_shards or self.part.count}
