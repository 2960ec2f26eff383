"""The stage `onetrunk prefs`: prompts -> completions of a model -> pairs -> a judge's verdicts -> preference rows.

With `completions: given` the rows bring the completions, and no model is loaded. With `mode: revise`, critiques and
revisions for supervised fine-tuning instead. A thread samples some chunks of prompts ahead of the judge
(feedback/asking.py). Everything sampled or judged is kept at once: after a kill the same command resumes, and ends
with the same file.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from onetrunk.checkpoints.hub import push_folder, require_push
from onetrunk.feedback.asking import Asker, StopFlag, check_judges, chunked, overlapped
from onetrunk.feedback.costs import CostConfig, Costs
from onetrunk.feedback.preferences import PreferenceMaker, PreferenceStatistics, counts_of, merged_judge_statistics
from onetrunk.feedback.sampling import PromptItem, Reviser, TextSampler
from onetrunk.feedback.shards import Shard, read_rows, rows_file, shard_files
from onetrunk.judges.constitution import Constitution, load_constitution
from onetrunk.judges.judge import Judge
from onetrunk.judges.judge_config import JudgeConfig, load_judge
from onetrunk.judges.labels import statistics_warnings
from onetrunk.stages.arguments import ModelArguments, OptionalModelArguments, parse
from onetrunk.stages.prefs.arguments import PrefsArguments, check_parts
from onetrunk.stages.prefs.output import (
    claim_folder,
    ledger_path,
    pushed_files,
    rows_path,
    statistics_path,
    write_report,
)
from onetrunk.stages.prefs.sampling import GivenSource, Source, load_sampler, open_source, sampling_servers
from onetrunk.stages.run_context import Terminated, say, say_how
from onetrunk.utils.bars import WorkBar
from onetrunk.utils.files import delete_temporaries, held_folder, read_json, require_output_dir
from onetrunk.utils.ledger import Ledger

# Prompts with given completions that are judged together: nothing is sampled, and a server should not wait for the
# last answer of a few questions.
GIVEN_CHUNK = 2048
# Chunks that may be sampled ahead of the judge.
MAX_WAITING = 4
Rows = list[dict[str, Any]]
Product = tuple[list[PromptItem], Any]


@dataclass(frozen=True)
class Result:
    """The file of rows and their number, the statistics, and the file of the statistics."""

    path: Path
    num_rows: int
    statistics: dict[str, Any]
    report: Path


def run(
    args: PrefsArguments, judge_settings: JudgeConfig, prices: CostConfig, model_args: OptionalModelArguments
) -> None:
    """Make the rows of a run (or merge finished shards), and print a summary."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"prefs runs in one process, and a launcher has started {os.environ['WORLD_SIZE']}; start one command per"
            " device, each with its own shard (--shard 0/2, --shard 1/2)"
        )
    folder = require_output_dir(args.output_dir)
    require_push(args, "dataset")
    if args.merge_shards is not None:
        result = merge_shards(args, folder)
    else:
        with held_folder(folder, args.part.suffix()):
            result = make(args, judge_settings, prices, model_args, folder)
    print(f"prefs: {result.num_rows} rows in {result.path}; statistics in {result.report}")
    if args.part.count == 1:
        say_how(folder, "prefs")
    if args.push_to_hub:
        where = push_folder(folder, args, "the rows are", repo_type="dataset", patterns=pushed_files(args.mode))
        print(f"prefs: pushed the rows to {where}")


def make(
    args: PrefsArguments, judge_settings: JudgeConfig, prices: CostConfig, model_args: ModelArguments, folder: Path
) -> Result:
    """Check everything that can be checked before a large model loads; load constitution and judge; make the rows."""
    source = open_source(args, model_args)
    constitution = load_constitution(judge_settings.constitution)
    claim_folder(folder, deciding(args, constitution), args.overwrite_output_dir)
    judge = load_judge(judge_settings) if args.mode == "pairs" else None
    costs = Costs(folder, [] if judge is None else [judge], prices)
    if judge is not None:
        check_judges([judge])
    try:
        return make_rows(args, model_args, constitution, judge, folder, costs, source)
    except (KeyboardInterrupt, Terminated):
        say("everything sampled and judged is kept; run the same command again to resume", after_bar=True)
        raise
    finally:
        costs.close()


def make_rows(
    args: PrefsArguments,
    model_args: ModelArguments,
    constitution: Constitution,
    judge: Judge | None,
    folder: Path,
    costs: Costs | None = None,
    source: Source | None = None,
) -> Result:
    """Make the rows of a run in its folder, or resume it.

    Args:
        judge: None for revisions.
        costs: counts what the judge uses; None: nothing does.
        source: the items to label; None: opened here.
    """
    stop, source = StopFlag(), source or open_source(args, model_args)
    with Ledger(ledger_path(folder, args.part)) as ledger, sampling_servers(args, stop) as servers:
        sampler = None
        if not isinstance(source, GivenSource):
            sampler = load_sampler(args, model_args, ledger, stop, servers, source.longest_prompt)
        if args.part.count == 1:  # Shards share the folder, and another one may be writing now.
            delete_temporaries(folder)
        identities = {name: part and part.identity for name, part in (("judge", judge), ("model", sampler))}
        claim_folder(folder, deciding(args, constitution) | identities, args.overwrite_output_dir)
        if args.mode == "revise":
            flow: Flow = RevisionFlow(args, source.counts, sampler, constitution)
        else:
            asker = Asker(judge, constitution, ledger, args.max_failed_fraction, costs)
            flow = PairFlow(args, source.counts, sampler, asker)
        about = _about(args, model_args, constitution, judge)
        if sampler is not None:
            about["sampled by"] = sampler.backend.description
        return _write_rows(flow, source, folder, stop, about)


def deciding(args: PrefsArguments, constitution: Constitution) -> dict[str, Any]:
    """Return the settings that decide the rows, without the identities of the models."""
    return args.deciding() | {"constitution": f"{constitution.name} {constitution.version}"}


class Flow(ABC):
    """Turns chunks of prompts into the rows of one file; subclasses say how.

    `sampler` is None where the rows bring the completions.
    """

    def __init__(self, args: PrefsArguments, counts: Counter[str], sampler: TextSampler | None):
        self.args, self.counts, self.sampler = args, counts, sampler

    def produced(self, items: Iterable[PromptItem]) -> Iterator[Product]:
        """Yield chunks of items with what was sampled for each; runs in the sampling thread."""
        if self.sampler is None:
            chunks = chunked(items, max(self.args.prompts_per_chunk, GIVEN_CHUNK))
            return ((chunk, [item.texts() for item in chunk]) for chunk in chunks)
        chunks = chunked(items, self.args.prompts_per_chunk)
        return ((chunk, self.sampler.sample(chunk, self.args.num_generations)) for chunk in chunks)

    @abstractmethod
    def label(self, items: list[PromptItem], product: Any) -> Rows:
        """Return the rows of a chunk; runs in the main thread."""

    def spent(self) -> dict[str, str]:
        """Return what the judge has cost so far, for the progress bar."""
        return {}

    def statistics(self) -> dict[str, Any]:
        return {"counts": counts_of(self.counts)}


class PairFlow(Flow):
    """Completions are compared by a judge."""

    def __init__(self, args: PrefsArguments, counts: Counter[str], sampler: TextSampler | None, asker: Asker):
        super().__init__(args, counts, sampler)
        self.asker = asker
        self.maker = PreferenceMaker(
            asker, args.seed, args.pairing, args.pairs_per_prompt, args.keep_ties, args.tie_margin, counts
        )

    def label(self, items: list[PromptItem], product: Any) -> Rows:
        references = [item.group.reference for item in items] if self.sampler is None else None
        return self.maker.rows(items, product, references)

    def spent(self) -> dict[str, str]:
        return {} if self.asker.costs is None else self.asker.costs.shown()

    def statistics(self) -> dict[str, Any]:
        sums = {"judge_sums": dict(self.asker.statistics.sums)}
        judge = merged_judge_statistics(sums.values()) | {"abstention": self.asker.statistics.abstention}
        statistics = super().statistics() | {"judge": judge, "rows": self.maker.statistics.as_dict()}
        return statistics if self.args.part.count == 1 else statistics | sums


class RevisionFlow(Flow):
    """Completions are criticised and revised by the model that wrote them, all in the sampling thread."""

    def __init__(self, args: PrefsArguments, counts: Counter[str], sampler: TextSampler, constitution: Constitution):
        super().__init__(args, counts, sampler)
        critic = replace(sampler, params=replace(sampler.params, max_completion_length=args.max_critique_length))
        longest = max(args.max_critique_length, args.max_completion_length)
        room = None if sampler.max_positions is None else sampler.max_positions - longest
        self.reviser = Reviser(sampler, critic, constitution.principles, args.num_revisions, room, counts)

    def produced(self, items: Iterable[PromptItem]) -> Iterator[Product]:
        sampled = super().produced(items)
        return ((chunk, self.reviser.rows(chunk, completions)) for chunk, completions in sampled)

    def label(self, items: list[PromptItem], product: Any) -> Rows:
        return product


def _write_rows(flow: Flow, source: Source, folder: Path, stop: StopFlag, about: dict[str, Any]) -> Result:
    """Write the rows of every prompt, then the statistics and the card.

    `stop` is set if the run ends early, so that sampling ends too; `about` are facts for the card.
    """
    args, num_rows = flow.args, 0
    path = rows_path(folder, args.mode, args.part)
    total = source.total if args.limit is None or source.total is None else min(args.limit, source.total)
    bar = WorkBar(total=total, desc="prefs", unit="prompt")
    with bar, rows_file(path) as write:

        def consume(product: Product) -> None:
            nonlocal num_rows
            items, sampled = product
            rows = flow.label(items, sampled)
            write(rows)
            num_rows += len(rows)
            counts = {name: flow.counts[name] for name in ("pairs", "abstained", "unjudged") if flow.counts[name]}
            bar.set_postfix(counts | {"rows": num_rows} | flow.spent(), refresh=False)
            bar.update(len(items))

        overlapped(flow.produced(islice(source, args.limit)), consume, max_waiting=MAX_WAITING, stop=stop)
        statistics = flow.statistics()
        # A shard may be empty.
        if not num_rows and args.part.count == 1:
            counts = ", ".join(f"{name} {count}" for name, count in counts_of(flow.counts).items() if count)
            advice = (
                "give at least two different completions of a prompt; another judge or constitution tells them apart"
                if args.completions == "given"
                else "look at the completions: a higher temperature or num_generations makes them differ, another"
                " judge or constitution tells them apart"
            )
            reasons = "; ".join([counts or "the input holds no prompts", *statistics_warnings(statistics)])
            raise RuntimeError(f"no row came out ({reasons}); {advice}")
    return Result(path, num_rows, statistics, write_report(folder, args.part, statistics, path, about))


def _about(
    args: PrefsArguments, model_args: ModelArguments, constitution: Constitution, judge: Judge | None
) -> dict[str, Any]:
    """Return facts about the run for the card; only the last part of paths on this machine."""

    def name(path: str) -> str:
        return path.rstrip("/").split("/")[-1] if Path(path).exists() else path

    facts: dict[str, Any] = {"mode": args.mode}
    if args.completions == "given":
        facts |= {"completions": f"given by {name(args.dataset_name)}"}
    else:
        facts |= {"model": name(model_args.model_name_or_path), "prompts": name(args.dataset_name)}
    facts["constitution"] = f"{constitution.name} ({constitution.version[:12]})"
    if args.completions == "sampled":
        facts |= {
            "completions per prompt": args.num_generations,
            "temperature": args.temperature,
            "max_completion_length": args.max_completion_length,
        }
    facts["seed"] = args.seed
    if judge is None:
        return facts | {"revisions": args.num_revisions}
    return facts | {"judge": judge.name, "pairing": args.pairing}


def merge_shards(args: PrefsArguments, folder: Path) -> Result:
    """Add up the statistics of finished shards, and write statistics and card of the whole; the rows are not moved."""
    count = args.merge_shards
    claim_folder(folder, args.deciding(), overwrite=False)
    files = shard_files(rows_path(folder, args.mode, Shard()), count)
    parts = [read_json(statistics_path(folder, Shard(i, count))) for i in range(count)]
    counts = sum((Counter(part["counts"]) for part in parts), Counter())
    statistics: dict[str, Any] = {"counts": counts_of(counts)}
    of_rows, num_rows = PreferenceStatistics(), 0
    for file in files:
        for row in read_rows(file):
            num_rows += 1
            if args.mode == "pairs":
                of_rows.add([row])
    if args.mode == "pairs":
        statistics["judge"] = merged_judge_statistics(part["judge_sums"] for part in parts)
        statistics["rows"] = of_rows.as_dict()
    report = write_report(folder, Shard(), statistics, files[0], parts[0]["about"])
    return Result(folder / "data", num_rows, statistics, report)


parse_prefs = partial(
    parse,
    verb="prefs",
    dataclass_types=(PrefsArguments, JudgeConfig, CostConfig, OptionalModelArguments),
    check=lambda args, settings, prices, model_args: check_parts(args, settings, model_args),
)
