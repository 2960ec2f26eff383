"""The settings of `onetrunk prefs`: pairing, revisions, and output.

One field is one YAML key and one command line option. The settings of judges are in `judges/judge_config.py`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from onetrunk.feedback.shards import Shard
from onetrunk.stages.arguments import PushArguments, SamplingArguments, require_set
from onetrunk.utils.options import option

MODES = ("pairs", "revise")
COMPLETIONS = ("sampled", "given")
PAIRINGS = ("all", "best_worst", "random")
# The settings that decide the rows: an output folder belongs to one value of each. The others (chunk size, printed
# samples) may change when a run is resumed.
DECIDING = (
    "mode dataset_name dataset_config dataset_split dataset_columns num_generations pairing pairs_per_prompt"
    " keep_ties tie_margin completions"
    " num_revisions max_critique_length seed max_prompt_length overlong_prompts"
    " max_completion_length temperature top_p top_k stop_tokens chat_template_kwargs"
).split()


@dataclass
class PrefsArguments(SamplingArguments, PushArguments):
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
    # Pairs
    completions: str = option(
        "sampled",
        "sampled: a model samples them. given: the rows bring them, and no model is loaded: chosen and rejected;"
        " completions of several models; or conversations, of which those with the same prompt are compared.",
        COMPLETIONS,
    )
    num_generations: int = option(4, "Completions per prompt; for pairs 2 or more.")
    pairing: str = option(
        "all",
        "Which completions of a prompt are compared. all: every pair; best_worst: the highest with the lowest rated"
        " (the judge first rates each alone); random: pairs_per_prompt pairs.",
        PAIRINGS,
    )
    pairs_per_prompt: int | None = option(None, "With pairing random: pairs per prompt.")
    keep_ties: bool = option(False, "Also write ties, with an arbitrary choice.")
    # Revisions
    num_revisions: int = option(1, "With mode revise: revisions per completion, each by another principle.")
    max_critique_length: int = option(256, "With mode revise: longest critique, in tokens.")
    # The run
    prompts_per_chunk: int = option(16, "Prompts that are sampled together and judged together.")
    streaming: bool = option(False, "Read the rows only as needed, for inputs that do not fit on the disk.")
    shard: str | None = option(
        None, "i/n: only the prompts of part i (0 to n-1) of n, divided by content; one job per part, same output_dir."
    )
    merge_shards: int | None = option(
        None, "Sample nothing: merge the statistics of this number of finished shards, and write the dataset card."
    )
    limit: int | None = option(
        None, "Number of prompts to use, the first ones, for a trial; the run without it buys no answer again."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "pairs":
            check_pairing(
                self.pairing, 2 if self.completions == "given" else self.num_generations, self.pairs_per_prompt
            )
        _ = self.part  # Raises on a wrong shard.
        for name in ("num_generations", "num_revisions", "prompts_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; completions of a prompt differ only above 0")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; set it to 1 or more")
        if self.merge_shards is not None and self.merge_shards < 2:
            raise ValueError(f"merge_shards is {self.merge_shards}; give the number of shards, 2 or more")
        self._check_together()

    def _check_together(self) -> None:
        """Raise ValueError for settings that do not fit together."""
        is_given, has_shard = self.completions == "given", self.shard is not None
        samples = self.mode == "revise" or self.use_vllm
        fits_prompts = self.max_prompt_length is not None or self.overlong_prompts != "error"
        faults = {
            "completions are given; leave mode revise and use_vllm out, which sample": is_given and samples,
            "completions are given; leave max_prompt_length and overlong_prompts out, which concern prompts to sample"
            " from": is_given and fits_prompts,
            "shard is set; run every shard first, then merge_shards alone": has_shard and self.merge_shards,
            "shard is set; leave push_to_hub to merge_shards": has_shard and self.push_to_hub,
        }
        for message, is_wrong in faults.items():
            if is_wrong:
                raise ValueError(message)

    @property
    def part(self) -> Shard:
        """The shard of this run; 0/1 if none is set."""
        return Shard.parse(self.shard or "0/1")

    def deciding(self) -> dict[str, Any]:
        values = asdict(self)
        return {name: values[name] for name in DECIDING} | {"shards": self.merge_shards or self.part.count}


def check_pairing(pairing: str, num_completions: int, pairs_per_prompt: int | None) -> None:
    """Check the settings of the pairing."""
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing is {pairing!r}; set one of {', '.join(PAIRINGS)}")
    if num_completions < 2:
        raise ValueError(f"num_generations is {num_completions}; a pair needs two completions: set 2 or more")
    if (pairs_per_prompt is not None) != (pairing == "random"):
        raise ValueError(
            f"pairing is {pairing!r} and pairs_per_prompt is {pairs_per_prompt}; set pairs_per_prompt with the pairing"
            " 'random', and only there"
        )
    if pairs_per_prompt is not None and pairs_per_prompt < 1:
        raise ValueError(f"pairs_per_prompt is {pairs_per_prompt}; set it to 1 or more")


def check_parts(args: PrefsArguments, settings: Any, model_args: Any) -> None:
    """Raise ValueError for a model or a judge that is missing or would do nothing."""
    if args.mode == "revise" and settings.judge:
        raise ValueError("judge is set and mode is revise, in which nothing is judged; leave judge out")
    if args.completions == "sampled":
        require_set(model_args, "model_name_or_path")
    elif model_args.model_name_or_path:
        raise ValueError(
            f"completions are given and model_name_or_path is {model_args.model_name_or_path}, which would sample;"
            " leave one of them out"
        )
