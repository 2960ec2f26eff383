"""The settings of `onetrunk prefs`: pairing, revisions, and output.

One field is one YAML key and one command line option. The settings of judges are in `judges/load.py`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from onetrunk.feedback.pairings import PAIRINGS, check_pairing
from onetrunk.feedback.shards import FORMATS, Shard
from onetrunk.stages.plain_arguments import SamplingArguments
from onetrunk.utils.options import option

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
class PrefsArguments(SamplingArguments):
    """How sampled completions become rows."""

    # Output
    mode: str = option(
        "pairs",
        "pairs: a judge compares completions, which become preferences. revise: the model criticises its completions"
        " by a principle and rewrites them; they become rows for sft.",
        MODES,
    )
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
    # Revisions
    num_revisions: int = option(1, "With mode revise: revisions per completion, each by another principle.")
    critic_model: str | None = option(None, "With mode revise: the model that criticises; None: the policy.")
    max_critique_length: int = option(256, "With mode revise: longest critique, in tokens.")
    judge_report: str | None = option(
        None, "output_dir of onetrunk judge, which measured this run's judge: the card quotes it."
    )
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
        if self.mode == "pairs":
            check_pairing(self.pairing, self.num_generations, self.pairs_per_prompt)
        if self.shard is not None and self.merge_shards is not None:
            raise ValueError("shard and merge_shards are both set; run every shard first, then merge_shards alone")
        _ = self.part  # Raises on a wrong shard.
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; completions of a prompt differ only above 0")
        for name in ("num_generations", "num_revisions", "prompts_per_chunk", "max_waiting_chunks", "ray_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if self.critic_model is not None and self.mode != "revise":
            raise ValueError("critic_model is set and mode is pairs; set mode to revise, or leave critic_model out")
        if self.judge_report is not None and self.mode != "pairs":
            raise ValueError("judge_report is set and mode is revise, which asks no judge; leave judge_report out")
        if self.engine == "ray" and self.mode == "revise":
            raise ValueError("engine ray samples for mode pairs; revise on one machine, or in shards (--shard i/n)")

        if self.engine == "ray" and self.use_vllm:
            raise ValueError(
                "engine is ray, whose workers each hold the model, and use_vllm is set; set engine to local, and name"
                " several servers in vllm_server_base_url"
            )

    @property
    def part(self) -> Shard:
        """The shard of this run; 0/1 if none is set."""
        return Shard.parse(self.shard or "0/1")

    def deciding(self) -> dict[str, Any]:
        values = asdict(self)
        return {name: values[name] for name in DECIDING} | {"shards": self.merge_shards or self.part.count}
