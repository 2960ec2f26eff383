"""Read and check the rows of a stage, as its dataset arguments say."""

from __future__ import annotations

from collections.abc import Callable

from datasets import Dataset
from trl import extract_prompt

from onetrunk.data.files import load_rows
from onetrunk.data.preferences import split_by_prompt, validate_preferences, validate_sides
from onetrunk.data.prompts import split_rows, validate_completions, validate_prompts
from onetrunk.stages.arguments import DatasetArguments, TrainingDataArguments


def load_dataset_rows(args: DatasetArguments) -> Dataset:
    return load_rows(
        args.dataset_name, split=args.dataset_split, config_name=args.dataset_config, columns=args.dataset_columns
    )


def load_training_rows(
    args: TrainingDataArguments,
    seed: int,
    check: Callable[[Dataset], Dataset],
    split: Callable[[Dataset, int | float, int], tuple[Dataset, Dataset]] = split_rows,
) -> tuple[Dataset, Dataset | None]:
    """Return the training rows, and the held-out rows if the arguments name any; every row is checked.

    Args:
        args: which rows.
        seed: of the split that `eval_size` makes.
        check: returns the rows, changed or not; it sees them in the order of the file.
        split: takes rows, `eval_size` and the seed.

    Raises:
        ValueError: bad rows; with two datasets the message says in which.
    """
    train = load_dataset_rows(args)
    if args.eval_size is not None:
        return split(check(train), args.eval_size, seed)
    if args.eval_dataset_name is None and args.eval_dataset_split is None:
        return check(train), None
    config = args.dataset_config if args.eval_dataset_name is None else None
    split_name = args.eval_dataset_split or "train"
    name = args.eval_dataset_name or args.dataset_name
    held_out = load_rows(name, split=split_name, config_name=config, columns=args.dataset_columns)
    checked = []
    for kind, rows in (("training", train), ("held-out", held_out)):
        try:
            checked.append(check(rows))
        except ValueError as error:
            raise ValueError(f"{kind} rows: {error}") from error
    return checked[0], checked[1]


def prompt_rows(rows: Dataset) -> Dataset:
    """Return rows of prompts, checked as far as possible without a tokenizer; raises ValueError for bad rows."""
    validate_prompts(rows)
    return rows


def completion_rows(rows: Dataset) -> Dataset:
    """Return rows of completions, checked, with only the columns that SFT trains on."""
    kind = validate_completions(rows)
    return rows.select_columns(["prompt", "completion"] if kind == "prompt" else [kind])


def load_preference_rows(data: TrainingDataArguments, seed: int) -> tuple[Dataset, Dataset | None]:
    """Return training rows and held-out rows as `load_training_rows` does; no prompt is in both."""
    return load_training_rows(data, seed, preference_rows, split_by_prompt)


def preference_rows(rows: Dataset) -> Dataset:
    """Return preference rows with a column `prompt`, checked; without one, TRL takes what both sides share."""
    if "prompt" not in rows.column_names and {"chosen", "rejected"} <= set(rows.column_names):
        validate_sides(rows)
        rows = rows.map(extract_prompt, desc="prompts")
    validate_preferences(rows)
    return rows


def load_unlabelled_rows(name: str | None, split: str) -> Dataset | None:
    """Return checked rows with `prompt`, `completion` and, if present, `completion_stopped`; None without a name."""
    if name is None:
        return None
    rows = load_rows(name, split=split)
    if validate_completions(rows) != "prompt":
        raise ValueError(
            f"unlabelled_dataset_name {name} has no columns prompt and completion, which the teacher scores; give rows"
            " that have them"
        )
    optional = [name for name in ("completion_stopped",) if name in rows.column_names]
    return rows.select_columns(["prompt", "completion", *optional])
