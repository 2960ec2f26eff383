"""TRL's trainers for SFT and reward models, with the checkpoints of `resumable_trainer.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import TrainingArguments
from trl import SFTTrainer

from onetrunk.checkpoints.resumable_trainer import ResumableTrainer
from onetrunk.checkpoints.resume_point import LOOP_FILES
from onetrunk.checkpoints.resume_settings import (
    SETTINGS_FILE,
    check_group_settings,
    check_plain_settings,
    check_streaming,
    plain_settings,
)
from onetrunk.data.sharded import ShardedRows
from onetrunk.parallel.groups import GroupAccelerator
from onetrunk.parallel.layout import group_size, train_in_stages
from onetrunk.parallel.sharding import is_divided
from onetrunk.utils.files import atomic_write_json, atomic_write_text
from onetrunk.utils.redaction import redact

# Column that numbers the rows of a batch while TRL tokenizes them.
PLACE = "_place"


class ResumableTRLTrainer(ResumableTrainer):
    """ResumableTrainer for a trainer of TRL's, which is the second base.

    `streamed` are encoded rows that are read while training; train_dataset is then a sample of them.

    Checkpoints also keep TRL's counters, and the settings of the run, which a resumed run is compared with. No secret
    appears in TRL's model card.
    """

    needed_files = (*LOOP_FILES, SETTINGS_FILE)

    def __init__(self, *args: Any, streamed: ShardedRows | None = None, **kwargs: Any):
        train_in_stages(1)  # A PPO run of this process may have trained in stages.
        super().__init__(*args, **kwargs)
        if streamed is not None:
            # TRL takes only its own kinds of datasets, and has checked a sample of these rows.
            check_streaming(self.args)
            self.train_dataset = streamed
        self._settings = plain_settings(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator, which counts a group of processes that divides the base as one."""
        super().create_accelerator_and_postprocess()
        if group_size() > 1:
            check_group_settings(self.args)
            GroupAccelerator.convert(self.accelerator)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the rows of an optimizer step; the processes of a group that divides the base share theirs."""
        return super().get_total_train_batch_size(args) // group_size()

    def settings_of_run(self) -> dict[str, Any]:
        """Return the settings and digests that decide what the run computes."""
        return self._settings

    def check_checkpoint(self, folder: str) -> None:
        """Raise ValueError if the checkpoint belongs to a run with other settings."""
        check_plain_settings(folder, self._settings, self.args.allow_config_change)

    def save_run_state(self, folder: str) -> None:
        """Write the settings of the run."""
        if self.args.should_save:
            atomic_write_json(Path(folder) / SETTINGS_FILE, self._settings)

    def extra_loop_state(self) -> dict[str, Any]:
        """Return TRL's counters: the tokens seen, and the metrics since the last log."""
        metrics = {name: list(values) for name, values in self._metrics["train"].items()}
        return {**super().extra_loop_state(), "tokens": self._total_train_tokens, "metrics": metrics}

    def load_extra_loop_state(self, state: dict[str, Any]) -> None:
        """Restore TRL's counters."""
        super().load_extra_loop_state(state)
        self._total_train_tokens = state["tokens"]
        self._metrics["train"].clear()
        self._metrics["train"].update(state["metrics"])

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card, and redact the secrets in it."""
        super().create_model_card(*args, **kwargs)
        path = Path(self.args.output_dir) / "README.md"
        if self.is_world_process_zero() and path.is_file():
            text = path.read_text(encoding="utf-8")
            if redact(text) != text:
                atomic_write_text(path, redact(text))


class ResumableSFTTrainer(ResumableTRLTrainer, SFTTrainer):
    """TRL's SFTTrainer; an interrupted run that is resumed computes what an uninterrupted run computes.

    train_dataset may be ShardedRows, which are read and tokenized while training.
    """

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any):
        if isinstance(train_dataset, ShardedRows):
            sample = train_dataset.sample()
            streamed = train_dataset.encoded(lambda rows: self._encode(rows))
            super().__init__(*args, train_dataset=sample, streamed=streamed, **kwargs)
            self._prepare_streamed(sample)
        else:
            super().__init__(*args, train_dataset=train_dataset, **kwargs)
        if is_divided(self.model):
            from onetrunk.parallel.tensor import keep_head_divided

            keep_head_divided(self.model.get_base_model())

    def _prepare_streamed(self, sample: Dataset) -> None:
        batch: list[dict[str, Any]] = [{**row, PLACE: place} for place, row in enumerate(sample)]
        # datasets hashes what the function holds: with `self` that would be the model, which fails if it is sharded.
        source = IterableDataset.from_generator(lambda: iter(batch))
        self._batch = batch
        # TRL's own steps, which run when this is iterated.
        self._prepared = self._prepare_dataset(source, self.processing_class, self.args, False, None, "train")

    def _encode(self, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        """Return rows as TRL tokenizes them; None for a row that it drops, which has no token to learn from."""
        self._batch[:] = [{**row, PLACE: place} for place, row in enumerate(rows)]
        # Not row by row: in a worker of the DataLoader datasets would give it a share of them.
        parts = list(self._prepared.iter(batch_size=max(1, len(rows))))
        encoded = {
            place: {name: part[name][i] for name in ("input_ids", "labels")}
            for part in parts
            for i, place in enumerate(part[PLACE])
        }
        return [encoded.get(place) for place in range(len(rows))]
