"""The work of `onetrunk prefs`: chunks of prompts go through the sampler and the judge into a file of rows.

A thread samples some chunks ahead of the judge (feedback/overlap.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm.auto import tqdm

from onetrunk.feedback import preferences, revision
from onetrunk.feedback.asking import Asker, FailureLimit
from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.overlap import StopFlag, chunked, overlapped
from onetrunk.feedback.preferences import PreferenceMaker, PreferenceStatistics, counts_of, merged_judge_statistics
from onetrunk.feedback.revision import Reviser
from onetrunk.feedback.sampling import PromptItem, TextSampler
from onetrunk.feedback.shards import Shard, read_rows, rows_file, shard_files, table_schema
from onetrunk.judges.base import Judge
from onetrunk.judges.constitution import Constitution
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.prefs.output import claim_folder, ledger_path, rows_path, statistics_path, write_report
from onetrunk.stages.prefs.prompts import PromptSource
from onetrunk.stages.prefs.ray import RaySampling
from onetrunk.stages.prefs.sampler import load_sampler, positions_left
from onetrunk.utils.files import read_json

Rows = list[dict[str, Any]]
Product = tuple[list[PromptItem], Any]


@dataclass(frozen=True)
class Result:
    """The file of rows and their number, the statistics, and the file of the statistics."""

    path: Path
    num_rows: int
    statistics: dict[str, Any]
    report: Path


def make_rows(
    args: PrefsArguments, model_args: ModelArguments, constitution: Constitution, judge: Judge | None, folder: Path
) -> Result:
    """Make the rows of a run, or resume it.

    Args:
        judge: None for revisions.
        folder: of the run; exists.

    Raises:
        ValueError: prompts, model and settings do not fit, or the folder belongs to other settings.
        RuntimeError: another process writes there, the judge fails too often, or there are no rows.
    """
    stop = StopFlag()
    source = PromptSource(args, model_args)
    with Ledger(ledger_path(folder, args.part)) as ledger:
        name, length = model_args.model_name_or_path, args.max_completion_length
        sampler = load_sampler(name, args, model_args, ledger, length, stop)
        critic = _load_critic(args, model_args, sampler) if args.mode == "revise" else None
        settings = args.deciding() | {
            "constitution": f"{constitution.name} {constitution.version}",
            "judge": judge and judge.identity,
            "critic": critic and critic.identity,
            "model": sampler.identity,
        }
        claim_folder(folder, settings, args.overwrite_output_dir)
        if critic is not None:
            flow: Flow = RevisionFlow(args, source, sampler, critic, constitution)
        else:
            remote = RaySampling(args, model_args, sampler) if args.engine == "ray" else None
            flow = PairFlow(args, source, sampler, judge, constitution, remote)
        return flow.run(folder, stop, _about(args, model_args, constitution, judge))


def _load_critic(args: PrefsArguments, model_args: ModelArguments, policy: TextSampler) -> TextSampler:
    """Return the sampler of critiques: the policy's model, unless another is named."""
    if args.critic_model is not None:
        return load_sampler(args.critic_model, args, model_args, policy.ledger, args.max_critique_length)
    return replace(policy, params=replace(policy.params, max_completion_length=args.max_critique_length))


class Flow(ABC):
    """Turns chunks of prompts into the rows of one file; subclasses say how."""

    columns: dict[str, type]

    def __init__(self, args: PrefsArguments, source: PromptSource, sampler: TextSampler):
        self.args, self.source, self.sampler = args, source, sampler
        self.counts: Counter[str] = source.counts
        self.num_rows = 0

    @abstractmethod
    def produced(self, chunks: Iterator[list[PromptItem]]) -> Iterator[Product]:
        """Yield each chunk with what was sampled for it; runs in the sampling thread."""

    @abstractmethod
    def label(self, items: list[PromptItem], product: Any) -> Rows:
        """Return the rows of a chunk; runs in the main thread."""

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of all chunks."""
        return {"counts": counts_of(self.counts)}

    def run(self, folder: Path, stop: StopFlag, about: dict[str, Any]) -> Result:
        """Write the rows of every prompt, then the statistics and the card.

        Args:
            folder: of the run.
            stop: set if the run ends early, so that sampling ends too.
            about: facts for the card.
        """
        args = self.args
        path = rows_path(folder, args.mode, args.output_format, args.part)
        bar = tqdm(total=self.source.total, desc="prefs", unit="prompt", dynamic_ncols=True, smoothing=0.05)

        def schema() -> pa.Schema:
            return table_schema(self.columns, self.source.conversational)

        with bar, rows_file(path, schema) as write:

            def consume(product: Product) -> None:
                items, sampled = product
                rows = self.label(items, sampled)
                write(rows)
                self.num_rows += len(rows)
                counts = {name: self.counts[name] for name in ("pairs", "abstained", "unjudged") if self.counts[name]}
                bar.set_postfix(counts | {"rows": self.num_rows}, refresh=False)
                bar.update(len(items))

            products = self.produced(chunked(self.source, args.prompts_per_chunk))
            overlapped(products, consume, max_waiting=args.max_waiting_chunks, stop=stop)
            # A shard may be empty.
            if not self.num_rows and args.part.count == 1:
                counts = ", ".join(f"{name} {count}" for name, count in counts_of(self.counts).items() if count)
                raise RuntimeError(
                    f"no row came out ({counts or 'the input holds no prompts'}); look at the completions: a higher"
                    " temperature or num_generations makes them differ, another judge or constitution tells them apart"
                )
        statistics = self.statistics()
        write_report(folder, args.part, statistics, path, about)
        return Result(path, self.num_rows, statistics, statistics_path(folder, args.part))


class PairFlow(Flow):
    """Completions are paired and judged."""

    columns = preferences.COLUMNS

    def __init__(
        self,
        args: PrefsArguments,
        source: PromptSource,
        sampler: TextSampler,
        judge: Judge,
        constitution: Constitution,
        remote: RaySampling | None = None,
    ):
        super().__init__(args, source, sampler)
        self.remote = remote
        limit = FailureLimit(args.max_failed_fraction, judge.name)
        self.asker = Asker(judge, constitution, sampler.ledger, limit, args.both_orders)
        self.maker = PreferenceMaker(
            self.asker, args.seed, args.pairing, args.pairs_per_prompt, args.keep_ties, self.counts
        )

    def produced(self, chunks: Iterator[list[PromptItem]]) -> Iterator[Product]:
        if self.remote is not None:
            return self.remote(chunks)
        return ((items, self.sampler.sample(items, self.args.num_generations)) for items in chunks)

    def label(self, items: list[PromptItem], product: Any) -> Rows:
        return self.maker.rows(items, product)

    def statistics(self) -> dict[str, Any]:
        sums = dict(vars(self.asker.statistics))
        judge, rows = merged_judge_statistics([sums]), self.maker.statistics.as_dict()
        statistics = super().statistics() | {"judge": judge, "rows": rows}
        return statistics if self.args.part.count == 1 else statistics | {"judge_sums": sums}


class RevisionFlow(Flow):
    """Completions are criticised and revised by the model that wrote them, all in the sampling thread."""

    columns = revision.COLUMNS

    def __init__(
        self,
        args: PrefsArguments,
        source: PromptSource,
        sampler: TextSampler,
        critic: TextSampler,
        constitution: Constitution,
    ):
        super().__init__(args, source, sampler)
        limits = [left for left in (positions_left(sampler), positions_left(critic)) if left is not None]
        limit = min(limits, default=None)
        self.reviser = Reviser(sampler, critic, constitution.principles, args.num_revisions, limit)

    def produced(self, chunks: Iterator[list[PromptItem]]) -> Iterator[Product]:
        for items in chunks:
            yield items, self.reviser.rows(items, self.sampler.sample(items, self.args.num_generations))

    def label(self, items: list[PromptItem], product: Any) -> Rows:
        rows = [row for row in product if row is not None]
        self.counts["completions"] += len(product)
        self.counts["blank_completions"] += len(product) - len(rows)
        return rows


def _about(
    args: PrefsArguments, model_args: ModelArguments, constitution: Constitution, judge: Judge | None
) -> dict[str, Any]:
    """Return facts about the run for the card; only the last part of paths on this machine."""

    def name(path: str) -> str:
        return path.rstrip("/").split("/")[-1] if Path(path).exists() else path

    facts: dict[str, Any] = {
        "mode": args.mode,
        "format": args.output_format,
        "model": name(model_args.model_name_or_path),
        "prompts": name(args.dataset_name),
        "constitution": f"{constitution.name} ({constitution.version[:12]})",
        "completions per prompt": args.num_generations,
        "temperature": args.temperature,
        "max_completion_length": args.max_completion_length,
        "seed": args.seed,
    }
    if judge is None:
        critic = {"critic": name(args.critic_model)} if args.critic_model else {}
        return facts | critic | {"revisions": args.num_revisions}
    return facts | {"judge": judge.name, "pairing": args.pairing, "both_orders": args.both_orders}


def merge_shards(args: PrefsArguments, folder: Path) -> Result:
    """Add up the statistics of finished shards, and write statistics and card of the whole; the rows are not moved.

    Raises:
        RuntimeError: a shard is missing.
        ValueError: the folder holds shards of other settings.
    """
    count = args.merge_shards
    claim_folder(folder, args.deciding(), overwrite=False)
    files = shard_files(rows_path(folder, args.mode, args.output_format, Shard()), count)
    parts = [read_json(statistics_path(folder, Shard(i, count))) for i in range(count)]
    counts = sum((Counter(part["counts"]) for part in parts), Counter())
    statistics: dict[str, Any] = {"counts": counts_of(counts)}
    row_statistics, num_rows = PreferenceStatistics(), 0
    for file in files:
        for row in read_rows(file):
            num_rows += 1
            if args.mode == "pairs":
                row_statistics.add([row])
    if args.mode == "pairs":
        statistics["judge"] = merged_judge_statistics(part["judge_sums"] for part in parts)
        statistics["rows"] = row_statistics.as_dict()
    write_report(folder, Shard(), statistics, files[0], parts[0]["about"])
    return Result(folder / "data", num_rows, statistics, statistics_path(folder, Shard()))
