"""Sampling on Ray Data, for more than one machine: workers that each hold the model draw the same chunks.

The driver keeps the ledger, the judge and the rows, so keys, bytes and resuming are those of the local engine. Workers
load the model under the driver's name for it: on a cluster a shared folder or a Hub name.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from onetrunk.feedback.sampling import PromptItem, TextSampler
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.prefs.sampling import load_sampler, policy_device
from onetrunk.types import SampledText

# Chunks per worker in one Ray job; the workers start again for each job.
CHUNKS_PER_WORKER = 256
ERROR_LINE = re.compile(r"\s*(?!ray\.)[\w.]*(Error|Exception): ")


def require_ray() -> Any:
    """Return the module ray, started and quiet; raise ImportError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray.data
    except ImportError as error:
        raise ImportError(f"engine ray needs Ray Data ({error}); pip install onetrunk[ray]") from error
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # RaySampling reports the errors.
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    return ray


@dataclass
class RaySampling:
    """Samples the completions of chunks with Ray workers; the sampler is the driver's, for keys and the ledger."""

    args: PrefsArguments
    model_args: ModelArguments
    sampler: TextSampler

    def __call__(
        self, chunks: Iterator[list[PromptItem]]
    ) -> Iterator[tuple[list[PromptItem], list[list[SampledText]]]]:
        """Yield the chunks with their completions, in order. Chunks in the ledger are not sent to a worker.

        Raises:
            RuntimeError: a worker or the cluster failed.
        """
        number = self.args.num_generations
        size = CHUNKS_PER_WORKER * self.args.ray_workers
        while window := list(islice(chunks, size)):
            kept = [self.sampler.kept(items, number) for items in window]
            drawn = self._drawn([items for items, texts in zip(window, kept, strict=True) if texts is None])
            for items, texts in zip(window, kept, strict=True):
                if texts is None:
                    self.sampler.keep(items, next(drawn))
                yield items, self.sampler.kept(items, number)

    def _drawn(self, chunks: Sequence[list[PromptItem]]) -> Iterator[list[list[SampledText]]]:
        if not chunks:
            return
        ray = require_ray()
        model_args = init_fields(self.model_args)
        if Path(self.model_args.model_name_or_path).is_dir():
            # A worker may have another working folder than the driver.
            model_args["model_name_or_path"] = str(Path(self.model_args.model_name_or_path).resolve())
        on_gpu = policy_device(self.args.use_cpu).type != "cpu"
        rows = ray.data.from_items([{"chunk": json.dumps([asdict(item) for item in chunk])} for chunk in chunks])
        drawn = rows.map_batches(
            Worker,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=self.args.ray_workers),
            fn_constructor_args=(init_fields(self.args), model_args),
            num_cpus=1,
            num_gpus=1 if on_gpu else 0,
        )
        try:
            for row in drawn.iter_rows():
                self.sampler.num_sampled += len(chunks[0]) * self.args.num_generations
                yield [[SampledText(**sampled) for sampled in texts] for texts in json.loads(row["texts"])]
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"Ray failed while it sampled ({_reason(error)}); what was sampled is kept: repair the cause, and run"
                " the same command again"
            ) from error


def _reason(error: Exception) -> str:
    """Return the line of a worker's stack trace, which Ray passes on as one text, that holds the error message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if ERROR_LINE.match(line)), lines[0])


class Worker:
    """Draws chunks in a process of Ray's. The arguments are the fields of PrefsArguments and ModelArguments."""

    def __init__(self, args: dict[str, Any], model_args: dict[str, Any]):
        self.args = PrefsArguments(**args)
        model = ModelArguments(**model_args)
        self.sampler = load_sampler(model.model_name_or_path, self.args, model, None, self.args.max_completion_length)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        texts = []
        for chunk in batch["chunk"]:
            items = [PromptItem(**item) for item in json.loads(chunk)]
            drawn = self.sampler.draw(items, self.args.num_generations)
            texts.append(json.dumps([[asdict(sampled) for sampled in row] for row in drawn]))
        return {"texts": texts}


def init_fields(settings: Any) -> dict[str, Any]:
    return {f.name: getattr(settings, f.name) for f in fields(settings) if f.init}
