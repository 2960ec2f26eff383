"""The rows of a run, read as the dataset arguments say. Knows no model."""

from __future__ import annotations

from datasets import Dataset

from onetrunk.data import load_rows, split_rows
from onetrunk.stages.arguments import DatasetArguments, TrainingDataArguments


def load_dataset_rows(args: DatasetArguments) -> Dataset:
    """Return the rows of `dataset_name`."""
    return load_rows(
        args.dataset_name, split=args.dataset_split, config_name=args.dataset_config, columns=args.dataset_columns
    )


def load_training_rows(args: TrainingDataArguments, seed: int) -> tuple[Dataset, Dataset | None]:
    """Return the training rows, and the held-out rows where the arguments name any.

    Args:
        args: which.
        seed: of the split, where `eval_size` makes one.
    """
    train = load_dataset_rows(args)
    if args.eval_size is not None:
        return split_rows(train, args.eval_size, seed)
    if args.eval_dataset_name is None and args.eval_dataset_split is None:
        return train, None
    own = args.eval_dataset_name is None
    held_out = load_rows(
        args.dataset_name if own else args.eval_dataset_name,
        split=args.eval_dataset_split or "train",
        config_name=args.dataset_config if own else None,
        columns=args.dataset_columns,
    )
    return train, held_out
