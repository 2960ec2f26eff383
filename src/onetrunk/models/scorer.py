"""A separate reward model: load it, turn prompts and completions into its rows, score them, scale the scores.

Rows must be read as the reward model was trained: with or without special tokens (a chat template writes its own), and
with or without an end token. `onetrunk/rewards/model.py` decides which rows are scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, has_file

from onetrunk.data.chat_template import apply_chat_template
from onetrunk.data.prompts import without_second_bos
from onetrunk.models.loading import check_source, expand, load_weights, read_config, read_tokenizer
from onetrunk.types import Conversation, Message, Prompt
from onetrunk.utils.files import atomic_write_json, read_json

Completion = str | list[Message]

# Tokenizers without a limit report a number beyond any text.
NO_LIMIT = 10**9
# Key of config.json: True where the model was trained on rows that end with the end token.
READS_END = "reads_end_token"
# Rows of a batch have at least this share of the tokens of its longest: padding costs as much as text.
SHORTEST = 0.75
# Marks the end of a rendered completion; what the chat template adds after it is dropped.
CUT_MARK = "<onetrunk:cut>"
SCALE_FILE = "score_scale.json"
SMALLEST_STD = 1e-8


# --- load ---


def load_scorer(
    path: str | Path,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
) -> PreTrainedModel:
    """Load a sequence-classification model for scoring: every weight from the checkpoint, eval mode, frozen.

    Args:
        device: None leaves it on the CPU.
        dtype: None for the checkpoint's own.

    Raises:
        FileNotFoundError, RuntimeError, ValueError: as `scorer_source`; or nothing loadable there, several labels, or
            weights missing from the checkpoint.
    """
    name = scorer_source(path)
    config = read_config("reward model", name, revision=revision)
    settings = {"revision": revision, "trust_remote_code": False} | ({} if dtype is None else {"dtype": dtype})
    if "ForSequenceClassification" not in "".join(config.architectures or []):
        settings["num_labels"] = 1  # Its head is missing; load it to name the missing weights.
    else:
        check_scorer(config, name)
    model, loading = load_weights(AutoModelForSequenceClassification, "reward model", name, **settings)
    missing_keys = sorted(map(str, loading["missing_keys"]))
    if missing_keys:
        raise ValueError(
            f"reward model {name}: its checkpoint lacks {', '.join(missing_keys)}, which would be newly initialised"
            " and score at random; give a trained reward model (sequence classification, one label)"
        )
    model.requires_grad_(False)
    return (model if device is None else model.to(device)).eval()


def scorer_source(path: str | Path) -> str:
    """Return the folder or Hub name of a reward model, without reading any of its files.

    Raises:
        FileNotFoundError: a path that does not exist.
        RuntimeError: a file, or a folder without a model.
        ValueError: an adapter.
    """
    name = expand(path)
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"reward model {name} does not exist; give an existing folder or a name on the Hub")
    if (Path(name) / "adapter_config.json").exists():
        raise ValueError(f"reward model {name} is an adapter; merge it into its base model and give that folder")
    check_source(name, "reward model")
    return name


def check_scorer(model: PreTrainedModel | PreTrainedConfig, name: str = "") -> None:
    """Raise a ValueError unless the model gives one number per text."""
    labels = getattr(model, "num_labels", "no")
    if labels != 1:
        raise ValueError(
            f"reward model {name or type(model).__name__} has {labels} labels; expected a sequence-classification"
            " model with 1, the score"
        )


def reads_end_token(model: PreTrainedModel) -> bool:
    """Return whether the config says that the model reads its score after an end token."""
    return bool(model.config.to_dict().get(READS_END, False))


def score_layer(model: nn.Module) -> nn.Linear:
    """Return the layer that computes the score: the last linear one with one output (in PEFT, the trained copy)."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layer with one output, so no score; give a sequence-classification"
            " model with one label"
        )
    return layers[-1]


def adapter_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer saved with a reward adapter, or None."""
    source = expand(name)
    has_tokenizer = has_file(source, "tokenizer_config.json")
    return read_tokenizer(source, "tokenizer of the reward adapter") if has_tokenizer else None


# --- rows ---


def length_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the most tokens that both the model's positions and its tokenizer allow, or None without a limit."""
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
    return min((limit for limit in limits if limit is not None and 0 < limit < NO_LIMIT), default=None)


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    max_length: int | None,
    end_token: bool,
    name: str,
    stopped: Sequence[bool] | None = None,
) -> tuple[list[list[int]], int]:
    """Return the token ids of each row for a reward model, and how many rows were shortened.

    A completion that was cut off at a length limit gets no end token, so that its score equals that of a reward
    adapter on the policy's trunk.

    Args:
        prompts: n texts or n conversations.
        completions: n texts, or n lists that end with an assistant message.
        max_length, end_token, stopped: as for `encode_texts`.
        name: of the reward model, for errors.

    Raises:
        ValueError: conversations and a tokenizer without a chat template, or a text without tokens.
    """
    stopped = [True] * len(prompts) if stopped is None else stopped
    rows = list(zip(prompts, completions, stopped, strict=True))
    conversational = bool(rows) and not isinstance(prompts[0], str)
    texts = [
        _render(tokenizer, prompt, completion, is_stopped, name) if conversational else prompt + completion
        for prompt, completion, is_stopped in rows
    ]
    return encode_texts(
        tokenizer, texts, max_length, add_special_tokens=not conversational, end_token=end_token, stopped=stopped
    )


def _render(
    tokenizer: PreTrainedTokenizerBase, prompt: Conversation, completion: list[Message], is_stopped: bool, name: str
) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"the prompts are conversations and the tokenizer of reward model {name!r} has no chat "
            "template; set tokenizer.chat_template to the one it was trained with"
        )
    messages = [*prompt, *completion]
    if prompt and prompt[-1]["role"] == "assistant":
        # The completion continues the prompt's last message: one message, not two in a row.
        opened = messages[len(prompt) - 1]
        joined = {**opened, "content": opened["content"] + messages[len(prompt)]["content"]}
        messages[len(prompt) - 1 : len(prompt) + 1] = [joined]
    if is_stopped:
        return apply_chat_template(tokenizer, messages, tokenize=False)
    # transformers' continue_final_message raises where a template rewrites the message (moves the reasoning, say).
    messages[-1] = {**messages[-1], "content": messages[-1]["content"] + CUT_MARK}
    text, mark, _ = apply_chat_template(tokenizer, messages, tokenize=False).rpartition(CUT_MARK)
    if not mark:
        raise ValueError(
            f"the chat template of reward model {name!r} leaves out the end of the last message, so a completion that"
            " was cut off cannot be scored; set tokenizer.chat_template to one that keeps the whole message"
        )
    return text


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    max_length: int | None,
    add_special_tokens: bool = True,
    end_token: bool = False,
    stopped: Sequence[bool] | None = None,
) -> tuple[list[list[int]], int]:
    """Tokenize texts. A text that is too long keeps its first special token and its end, where the completion is.

    Args:
        max_length: tokens; None for no limit.
        add_special_tokens: False for texts from a chat template, which writes them itself.
        end_token: True makes every row end with the tokenizer's end token, as sampled completions do: it is added, or
            the white space that a chat template writes after it is dropped.
        stopped: n booleans, False for a text that was cut off at a length limit: it never ends with an end token.
            None: no text was cut off.

    Returns:
        n lists of token ids, and how many of them were shortened.

    Raises:
        ValueError: a text without tokens.
    """
    # Not verbose: texts that are too long are shortened here, and counted.
    rows = tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"] if texts else []
    empty = [index for index, row in enumerate(rows) if not row]
    if empty:
        raise ValueError(f"the texts at {empty[:20]} have no tokens to score; leave empty completions out")
    if add_special_tokens:
        rows = [without_second_bos(row, tokenizer.bos_token_id) for row in rows]
    stopped = [True] * len(rows) if stopped is None else stopped
    rows = [
        (_with_end_token(tokenizer, row) if end_token else row) if is_stopped else _without_end_token(tokenizer, row)
        for row, is_stopped in zip(rows, stopped, strict=True)
    ]
    if max_length is None:
        return rows, 0
    starts = {tokenizer.bos_token_id, tokenizer.cls_token_id} - {None}
    num_shortened = 0
    for index, row in enumerate(rows):
        if len(row) > max_length:
            head = row[:1] if row[0] in starts and max_length > 1 else []
            rows[index] = head + row[len(row) - (max_length - len(head)) :]
            num_shortened += 1
    return rows, num_shortened


def _with_end_token(tokenizer: PreTrainedTokenizerBase, row: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    if end is None:
        return row
    if end in row:
        last = len(row) - row[::-1].index(end)
        if not tokenizer.decode(row[last:]).strip():
            return row[:last]
    return [*row, end]


def _without_end_token(tokenizer: PreTrainedTokenizerBase, row: list[int]) -> list[int]:
    end = tokenizer.eos_token_id
    # An encoder's end token is its separator (RoBERTa), which closes every text, however it ended.
    is_separator = end is not None and end == tokenizer.sep_token_id
    return row[:-1] if len(row) > 1 and row[-1] == end and not is_separator else row


# --- scores ---


def score_token_ids(model: PreTrainedModel, rows: Sequence[list[int]], batch_size: int) -> Tensor:
    """Score n rows of token ids, none empty, in batches of similar length, padded on the right.

    A decoder reads its score at the last token that differs from the pad token of its config. A pad token in the
    config is the one that the model was trained with, so it is kept, even if it is the end token too.

    Returns:
        [n] float32 on the CPU.
    """
    pad_token_id = model.config.get_text_config().pad_token_id
    scores = torch.empty(len(rows))
    # The longest first, so that an out-of-memory error comes at once.
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for indices in _batches(order, [len(row) for row in rows], batch_size):
        batch = [rows[index] for index in indices]
        if pad_token_id is None:
            scores[indices] = _score_without_pad_token(model, batch)
        else:
            scores[indices] = _score_batch(model, batch, pad_token_id)
    return scores


def _batches(order: list[int], lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Cut rows, the longest first, into batches in which no row is below SHORTEST of the longest."""
    start = 0
    for end in range(1, len(order) + 1):
        is_full = end == len(order) or end - start == batch_size
        if is_full or lengths[order[end]] < SHORTEST * lengths[order[start]]:
            yield order[start:end]
            start = end


def _score_without_pad_token(model: PreTrainedModel, batch: list[list[int]]) -> Tensor:
    """Pad with a token that the batch does not contain, so that the score is read at the last token."""
    config = model.config.get_text_config()
    present = set().union(*batch)
    absent = next((token for token in range(config.vocab_size) if token not in present), None)
    if absent is None:
        return torch.cat([_score_batch(model, [row], 0) for row in batch])
    config.pad_token_id = absent
    try:
        return _score_batch(model, batch, absent)
    finally:
        config.pad_token_id = None


@torch.no_grad()
def _score_batch(model: PreTrainedModel, batch: list[list[int]], pad_token_id: int) -> Tensor:
    width = max(len(row) for row in batch)
    input_ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in batch], device=model.device)
    lengths = torch.tensor([len(row) for row in batch], device=model.device)
    attention_mask = (torch.arange(width, device=model.device) < lengths[:, None]).long()
    return model(input_ids=input_ids, attention_mask=attention_mask).logits[:, 0].float().cpu()


@dataclass(frozen=True)
class ScoreScale:
    """Mean and standard deviation of a reward model's scores.

    Raises:
        ValueError: not finite, or a standard deviation of 0.
    """

    mean: float
    std: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > SMALLEST_STD):
            raise ValueError(
                f"scores with mean {self.mean} and standard deviation {self.std} tell nothing apart; look at the"
                " reward model and its rows"
            )

    @classmethod
    def of(cls, scores: Tensor) -> ScoreScale:
        """Return the scale of [n] scores."""
        scores = scores.double()
        return cls(float(scores.mean()), float(scores.std()) if len(scores) > 1 else 0.0)

    def standardize(self, scores: Tensor) -> Tensor:
        """Return the scores minus the mean, in standard deviations."""
        return (scores - self.mean) / self.std

    def restore(self, standardized: Tensor) -> Tensor:
        """Invert `standardize`."""
        return standardized * self.std + self.mean

    def save(self, folder: str | Path) -> None:
        """Write the scale into the folder of a reward model."""
        atomic_write_json(Path(folder) / SCALE_FILE, asdict(self))


def read_score_scale(name: str) -> ScoreScale | None:
    """Return the scale saved with the reward model at `name`, a folder or a Hub name, or None."""
    source = expand(name)
    if not has_file(source, SCALE_FILE):
        return None
    path = cached_file(source, SCALE_FILE)
    data = read_json(path)
    try:
        return ScoreScale(float(data["mean"]), float(data["std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{path} does not hold the mean and std of scores ({error}); write it anew") from error
