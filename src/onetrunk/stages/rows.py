"""Read and check the rows of a stage, as its dataset arguments say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from onetrunk.data.files import load_rows
from onetrunk.data.pairs import how_read, read_pairs
from onetrunk.data.prompts import check_completions, check_prompts, completion_columns
from onetrunk.data.rows import check_labels, check_preferences, refuse_variables, split_by_prompt, split_rows
from onetrunk.data.sharded import ShardedRows, known_rows, load_sharded_rows
from onetrunk.stages.arguments import DatasetArguments, PPODataArguments, TrainingDataArguments
from onetrunk.types import message_text

TrainingRows = Dataset | ShardedRows
# Columns of text or conversations.
TEXT_COLUMNS = ("prompt", "completion", "messages", "text", "chosen", "rejected")


def load_dataset_rows(args: DatasetArguments) -> Dataset:
    return load_rows(
        args.dataset_name, split=args.dataset_split, config_name=args.dataset_config, columns=args.dataset_columns
    )


def stream_dataset_rows(args: DatasetArguments, window: int) -> ShardedRows:
    """Return rows that are read as they are needed; `window` of them are shuffled together and in memory."""
    source = {"split": args.dataset_split, "config_name": args.dataset_config, "columns": args.dataset_columns}
    return load_sharded_rows(args.dataset_name, **source, window=window)


def load_training_rows(
    args: TrainingDataArguments,
    seed: int,
    check: Callable[[TrainingRows], TrainingRows],
    split: Callable[[Dataset, int | float, int], tuple[Dataset, Dataset]] = split_rows,
) -> tuple[TrainingRows, Dataset | None]:
    """Return the training rows, and the held-out rows if the arguments name any.

    Every row is checked; of streamed rows a sample now, and each row when it is read. Held-out rows are in memory.

    Args:
        check: returns the rows, changed or not; it sees them in the order of the file.
        split: takes rows, `eval_size` and the seed.
    """
    train = stream_training_rows(args) if args.streaming else load_dataset_rows(args)
    if args.eval_size is not None:
        return split(check(train), args.eval_size, seed)
    if args.eval_dataset_name is None and args.eval_dataset_split is None:
        return check(train), None
    config = args.dataset_config if args.eval_dataset_name is None else None
    source = {"split": args.eval_dataset_split or "train", "config_name": config, "columns": args.dataset_columns}
    name = args.eval_dataset_name or args.dataset_name
    if args.streaming and not Path(name).is_file():
        held_out = load_sharded_rows(name, **source)
        held_out = held_out.select(range(len(held_out)))
    else:
        held_out = load_rows(name, **source)
    checked = []
    for kind, rows in (("training", train), ("held-out", held_out)):
        try:
            checked.append(check(rows))
        except ValueError as error:
            raise ValueError(f"{kind} rows: {error}") from error
    return checked[0], checked[1]


def stream_training_rows(args: TrainingDataArguments) -> ShardedRows:
    """Return the training rows as they are in their files; the first process of a machine indexes them."""
    with PartialState().local_main_process_first():
        rows = stream_dataset_rows(args, args.shuffle_window)
    if PartialState().is_main_process:
        print(f"streaming {args.dataset_name}: files {len(rows.index.urls):,}, rows {len(rows):,}")
    return rows


def prompt_rows(rows: TrainingRows, is_open: bool = False) -> TrainingRows:
    """Return rows of prompts, checked as far as possible without a tokenizer; raises ValueError for bad rows.

    Args:
        is_open: whether an environment says or completes the prompts.
    """
    check_prompts(rows, is_open)
    return rows


def load_prompt_rows(data: PPODataArguments, seed: int) -> tuple[TrainingRows, Dataset | None]:
    """Return rows of prompts as `load_training_rows` does; no prompt is in both, unless an environment says it."""
    is_open = bool(data.environment)
    split = split_rows if is_open else split_by_prompt
    return load_training_rows(data, seed, partial(prompt_rows, is_open=is_open), split)


def load_preference_rows(
    data: TrainingDataArguments, seed: int, has_labels: bool = False
) -> tuple[TrainingRows, Dataset | None]:
    """Return training rows and held-out rows as `load_training_rows` does; no prompt is in both.

    Args:
        has_labels: whether the column `label` is read, and so checked.
    """
    check = labelled_rows if has_labels else preference_rows
    return load_training_rows(data, seed, check, split_by_prompt)


def preference_rows(rows: TrainingRows) -> TrainingRows:
    """Return checked preference rows of one form; prints how they are read, where they have another."""
    line = how_read(rows)
    if line is not None and PartialState().is_main_process:
        print(line)
    return check_preferences(read_pairs(rows))


def labelled_rows(rows: TrainingRows) -> TrainingRows:
    """Return `preference_rows` whose column `label` is checked too."""
    return check_labels(preference_rows(rows))


def load_unlabelled_rows(name: str | None, split: str) -> Dataset | None:
    """Return checked rows with `prompt`, `completion` and, if present, `completion_stopped`; None without a name."""
    if name is None:
        return None
    rows = load_rows(name, split=split)
    if completion_columns(rows) != ["prompt", "completion"]:
        raise ValueError(
            f"unlabelled_dataset_name {name} has no columns prompt and completion, which the teacher scores; give rows"
            " that have them"
        )
    refuse_variables(rows, "a teacher")
    check_completions(rows)
    optional = [name for name in ("completion_stopped",) if name in rows.column_names]
    return rows.select_columns(["prompt", "completion", *optional])


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, name: str, rows: Sequence[TrainingRows | None], vocab_size: int
) -> None:
    """Check that a tokenizer has a chat template if the rows need one, and that the model has its token ids.

    Prints that rows of texts are read without the chat template, if there is one.
    """
    known = [known_rows(part) for part in rows if part is not None]
    columns = [part[column] for part in known for column in TEXT_COLUMNS if column in part.column_names]
    if any(isinstance(values[0], list) for values in columns) and not tokenizer.chat_template:
        raise ValueError(
            f"the rows are conversations and the tokenizer of {name} has no chat template; take an instruct model's"
            " tokenizer, write a chat_template.jinja into its folder, or give the rows as text"
        )
    if tokenizer.chat_template and all(isinstance(values[0], str) for values in columns):
        if PartialState().is_main_process:
            print(
                f"the rows are texts, which are read without the chat template of {name}; to use it give lists of"
                ' messages such as {"role": "user", "content": TEXT} (sft: or set text_as_messages: true)'
            )
    special = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) if i is not None]
    largest = max(special, default=0)
    if len(tokenizer) > vocab_size:  # Some models leave out tokens that no text has.
        cells = [[cell] if isinstance(cell, str) else cell for values in columns for cell in values]
        texts = [part if isinstance(part, str) else message_text(part) for cell in cells for part in cell]
        largest = max([largest, *(i for ids in tokenizer(texts, verbose=False)["input_ids"] for i in ids)])
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of {name} gives token id {largest} and the model knows {vocab_size} tokens; take the"
            " tokenizer that belongs to the model"
        )
