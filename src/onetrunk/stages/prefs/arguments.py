"""The settings of `onetrunk prefs`, and its output folder.

One field is one YAML key and one command line option. The settings of judges are in `judges/judge_config.py`.

README.md         the dataset card: how the rows were made, and their statistics
statistics.json   the same statistics for programs (statistics-00000-of-00004.json for a shard)
settings.json     everything that decides the rows; a run with other settings is rejected
data/             the rows: one file, or one per shard
ledger/           every completion, verdict and rating, kept as soon as it arrives, and what they cost
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from onetrunk.feedback.sampling import Shard, read_rows
from onetrunk.judges.labels import statistics_warnings
from onetrunk.report.blocks import flat
from onetrunk.stages.arguments import PushArguments, SamplingArguments, require_set
from onetrunk.stages.results import as_json, markdown_table, shortened
from onetrunk.utils.files import atomic_write_json, atomic_write_text, read_json
from onetrunk.utils.options import option
from onetrunk.utils.redaction import redact, redact_all

MODES = ("pairs", "revise")
COMPLETIONS = ("sampled", "given")
ENGINES = ("local", "ray")
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
    engine: str = option(
        "local",
        "ray: workers on Ray Data (pip install onetrunk[ray]) sample the completions; each holds the model."
        " RAY_ADDRESS names a cluster, otherwise Ray starts on this machine.",
        ENGINES,
    )
    ray_workers: int = option(1, "With engine ray: workers, each with a CPU core and, if there is one, a GPU.")
    prompts_per_chunk: int = option(16, "Prompts that are sampled together and judged together.")
    streaming: bool = option(False, "Read the rows only as needed, for inputs that do not fit on the disk.")
    shard: str | None = option(
        None, "i/n: only the prompts of part i (0 to n-1) of n, divided by content; one job per part, same output_dir."
    )
    merge_shards: int | None = option(
        None, "Sample nothing: merge the statistics of this number of finished shards, and write the dataset card."
    )
    limit: int | None = option(
        None, "Use only the first prompts, this number of them, for a trial; the run without it buys no answer again."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "pairs":
            check_pairing(
                self.pairing, 2 if self.completions == "given" else self.num_generations, self.pairs_per_prompt
            )
        _ = self.part  # Raises on a wrong shard.
        for name in ("num_generations", "num_revisions", "prompts_per_chunk", "ray_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; set it to 1 or more")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; completions of a prompt differ only above 0")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; set it to 1 or more")
        self._check_together()

    def _check_together(self) -> None:
        """Raise ValueError for settings that do not fit together."""
        revises, is_given, has_ray = self.mode == "revise", self.completions == "given", self.engine == "ray"
        samples = revises or has_ray or self.use_vllm
        has_shard = self.shard is not None
        faults = {
            "completions are given; leave mode revise, engine ray and use_vllm out, which sample": is_given
            and samples,
            "shard is set; run every shard first, then merge_shards alone": has_shard and bool(self.merge_shards),
            "shard is set; leave push_to_hub to merge_shards": has_shard and self.push_to_hub,
            "engine is ray, whose workers each hold the model; leave use_vllm out": has_ray and self.use_vllm,
            "engine ray samples for mode pairs; revise on one machine, or in shards": has_ray and revises,
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


def check_model_is_named(args: PrefsArguments, model_args: Any) -> None:
    """Raise ValueError without a model to sample from, or with one where the rows bring the completions."""
    if args.completions == "sampled":
        require_set(model_args, "model_name_or_path")
    elif model_args.model_name_or_path:
        raise ValueError(
            f"completions are given and model_name_or_path is {model_args.model_name_or_path}, which would sample;"
            " leave one of them out"
        )


SETTINGS, CARD = "settings.json", "README.md"
NAMES = {"pairs": "preferences", "revise": "revisions"}
ABOUT = {
    "pairs": "Preferences of a judge between completions of the same prompts. `probability` is that of `chosen` being"
    " the better one: the mean over principles and both orders. `votes` is what each principle said,"
    " `consistent` whether both orders agree. `chosen_stopped` and `rejected_stopped` are false for a completion that"
    " was cut off at max_completion_length, which a reward model reads without an end token.",
    "revise": "Completions that a model has criticised by a principle and written anew, for supervised fine-tuning:"
    " `completion` is the last revision, `original` the completion before, `trail` the principles, critiques and"
    " revisions between them.",
}
TAGS = {"pairs": "preference", "revise": "sft"}


def rows_path(folder: Path, kind: str, part: Shard) -> Path:
    return folder / "data" / f"{NAMES[kind]}{part.suffix()}.jsonl"


def pushed_files(kind: str) -> tuple[str, ...]:
    """Return the patterns of the files that are uploaded: rows, statistics and card, without ledgers."""
    return CARD, f"data/{NAMES[kind]}*", "statistics.json"


def statistics_path(folder: Path, part: Shard) -> Path:
    return folder / f"statistics{part.suffix()}.json"


def ledger_path(folder: Path, part: Shard) -> Path:
    return folder / "ledger" / f"ledger{part.suffix()}.db"


def claim_folder(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Check that a folder is new or belongs to a run with these settings, and write the settings into it.

    Args:
        settings: everything that decides the rows, as JSON values. Without the key "model", which is known only after
            the model is loaded, the others are compared and nothing is written.
        overwrite: replace the results of other settings.
    """
    path, settings = folder / SETTINGS, json.loads(json.dumps(redact_all(settings)))
    there = read_json(path) if path.is_file() else {}
    changed = [name for name in settings if there.get(name) != settings[name]]
    if there and changed and not overwrite:
        pairs = [(name, as_json(there.get(name)), as_json(settings[name])) for name in changed]
        differences = "; ".join(f"{name}: {old} there, {new} here" for name, old, new in pairs)
        raise ValueError(
            f"{folder} holds the rows of a run with other settings ({differences}); use those settings, set"
            " overwrite_output_dir to true to replace the rows, or name another output_dir"
        )
    if not there and not overwrite and ((folder / CARD).exists() or (folder / "data").exists()):
        raise ValueError(
            f"{folder} holds something else (a README.md or data, and no {SETTINGS}); name another output_dir, or set"
            " overwrite_output_dir to true to write there anyway"
        )
    if "model" not in settings:
        return
    if there and there != settings:
        # A file of the old settings under another name would be read together with the new ones.
        patterns = [f"data/{name}*" for name in NAMES.values()] + ["statistics*.json", CARD]
        for old in [old for pattern in patterns for old in folder.glob(pattern)]:
            old.unlink()
    atomic_write_json(path, settings)


def write_report(folder: Path, part: Shard, statistics: dict[str, Any], rows: Path, about: dict[str, Any]) -> Path:
    """Write statistics.json and, unless `part` is one of several shards, the card; return the path of the former.

    The card takes its examples from the file `rows`; `about` are its facts, including `mode`.
    """
    about = redact_all(about)
    path = statistics_path(folder, part)
    atomic_write_json(path, {**statistics, "about": about})
    if part.count == 1:
        atomic_write_text(folder / CARD, redact(card(statistics, about, list(islice(read_rows(rows), 3)))))
    return path


def card(statistics: dict[str, Any], about: dict[str, Any], examples: list[dict[str, Any]]) -> str:
    mode = about["mode"]
    metadata = DatasetCardData(
        tags=["onetrunk", "trl", TAGS[mode], "synthetic"],
        configs=[{"config_name": "default", "data_files": f"data/{NAMES[mode]}*.jsonl"}],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {NAMES[mode].capitalize()}",
        ABOUT[mode] + f" Made with onetrunk {sys.modules['onetrunk'].__version__}.",
        "## How",
        markdown_table({"": {name: value for name, value in about.items() if name != "mode"}}),
        "## What they are like",
        *(f"{text[0].upper()}{text[1:]}." for text in statistics_warnings(statistics)),
        markdown_table({"": dict(flat(statistics))}),
        "## Examples",
        *(_example(row) for row in examples),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _example(row: dict[str, Any]) -> str:
    # Inside a code fence a completion cannot become part of the card's Markdown.
    text = json.dumps(row, indent=1, ensure_ascii=False).replace("`", "'")
    return f"```json\n{shortened(text, 2000)}\n```"
