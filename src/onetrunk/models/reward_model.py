"""Reward models: load one, turn prompts and completions into its rows, score them, scale the scores.

A reward model is a sequence-classification model, or an adapter of one: LoRA weights and a score head (TRL's
RewardTrainer with a peft_config saves one). On the trunk an adapter is a frozen branch, which needs no second base
model; `load_adapter_scorer` loads it with a base of its own.

Rows must be read as the reward model was trained: with or without special tokens (a chat template writes its own), and
with or without an end token. `onetrunk/rewards/model.py` decides which rows are scored.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftConfig
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.data.foreign import ForeignText
from onetrunk.data.prompts import without_second_bos
from onetrunk.data.rows import without_nulls
from onetrunk.models.adapters import check_adapter_config, require_lora
from onetrunk.models.base_model import repair_padding
from onetrunk.models.loading import (
    adapter_base,
    check_source,
    expand,
    load_weights,
    pinned_source,
    put_adapter_on,
    read_adapter_config,
    read_adapter_weights,
    read_config,
    read_tokenizer,
    source_file,
)
from onetrunk.types import Completion, Conversation, Message, Pack, Prompt
from onetrunk.utils.files import atomic_write_json, read_json, read_number

# Modules of transformers that report weights which are missing, left over, or on one device.
REPORTING = ("modeling_utils", "utils.loading_report", "distributed.tensor_parallel")
# The modules that PEFT trains whole in a sequence-classification model; a decoder has only `score`.
HEAD_MODULES = {"score", "classifier"}
_HEAD_KEYS = ("base_model.model.score.weight", "base_model.model.score.bias")
# Values of init_lora_weights that leave the base model unchanged.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
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


# --- a model of its own ---


def load_scorer(path: str | Path, *, device: torch.device | str | None = None) -> PreTrainedModel:
    """Load a sequence-classification model for scoring: every weight from the checkpoint, eval mode, frozen."""
    name = scorer_source(path)
    model, missing_keys = _load("reward model", name, {"trust_remote_code": False}, {})
    if missing_keys:
        raise ValueError(
            f"reward model {name}: its checkpoint lacks {', '.join(missing_keys)}, which would be newly initialised"
            " and score at random; give a trained reward model (sequence classification, one label)"
        )
    model.requires_grad_(False)
    return (model if device is None else model.to(device)).eval()


def scorer_source(path: str | Path) -> str:
    """Return the folder or Hub name of a reward model, without reading any of its files."""
    name = expand(path)
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


def keep_head_float32(model: nn.Module) -> None:
    """Give the score head float32 weights also on a base of half precision, where rounding would lose small steps."""
    layer = score_layer(model)
    if layer.weight.dtype in (torch.bfloat16, torch.float16):
        layer.float()
        layer.register_forward_pre_hook(lambda head, args: (args[0].to(head.weight.dtype), *args[1:]))


def load_with_new_head(name: str, **settings: Any) -> PreTrainedModel:
    """Load a model to train as a reward model; a language model gets a new score head, a reward model keeps its head.

    A new head is drawn from torch's global random state: seed it first. `settings` are for `from_pretrained`.
    """
    source = pinned_source(settings.pop("revision", None), settings.pop("trust_remote_code", False))
    settings.pop("code_revision", None)
    with quiet_load():
        model, missing_keys = _load("model", name, source, settings)
    # What is outside the body is the head. BERT's relatives also lack a pooler inside it, which trains with the head.
    body = f"{model.base_model_prefix}."
    missing_keys = [key for key in missing_keys if key.startswith(body) and ".pooler." not in key]
    if missing_keys:
        raise ValueError(
            f"the checkpoint of {name} lacks {len(missing_keys)} weights below the head, the first is"
            f" {missing_keys[0]}, which would be newly initialised; give a model that has them"
        )
    return model


def _load(kind: str, name: str, source: dict[str, Any], settings: dict[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """Return a sequence-classification model with one label, and the weights that its checkpoint lacks."""
    config = read_config(kind, name, **source)
    if "ForSequenceClassification" in "".join(config.architectures or []):
        check_scorer(config, name)
    if kind == "reward model" and "ForTokenClassification" in "".join(config.architectures or []):
        raise ValueError(f"{kind} {name} classifies tokens; write 'prm:{name}' for a process reward model")
    model, loading = load_weights(AutoModelForSequenceClassification, kind, name, num_labels=1, **source, **settings)
    return model, sorted(map(str, loading["missing_keys"]))


@contextlib.contextmanager
def quiet_load() -> Iterator[None]:
    """Silence transformers' report on missing weights inside the block: the caller checks them itself."""
    levels = {name: logging.getLogger(f"transformers.{name}").level for name in REPORTING}
    for name in levels:
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(f"transformers.{name}").setLevel(level)


def load_reward_tokenizer(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a reward model; if it has no padding token, it pads with its end token."""
    tokenizer = read_tokenizer(name, **pinned_source(revision, trust_remote_code))
    return tokenizer if tokenizer.pad_token_id is not None else repair_padding(tokenizer)


# --- an adapter ---


@dataclass(frozen=True)
class ScoreAdapter:
    """A reward adapter that was read but is not on a trunk yet.

    Args:
        base: name of the base model that it was trained on.
        weights: under PEFT's names.
        head: "weight" [1, H], and "bias" [1] if it has one.
        pad_token_id: the score is read at the last token that differs from it; None: at the last token.
    """

    name: str
    base: str
    config: LoraConfig
    weights: dict[str, Tensor]
    head: dict[str, Tensor]
    pad_token_id: int | None = None


def is_adapter_name(name: str) -> bool:
    """Return whether `name` leads to an adapter; False also if it leads nowhere."""
    return source_file(expand(name), "adapter_config.json") is not None


def read_score_adapter(name: str) -> ScoreAdapter:
    """Read the reward adapter at `name`, a folder or a name on the Hub, without its pad token."""
    source = expand(name)
    base, config = adapter_base(source), _checked_config(name, read_adapter_config(source))
    weights = read_adapter_weights(source)
    head = {key.rsplit(".", 1)[-1]: weights.pop(key) for key in _HEAD_KEYS if key in weights}
    if "weight" not in head:
        raise ValueError(
            f"reward adapter {name} has no score head (a tensor {_HEAD_KEYS[0]}); train it as a sequence-"
            "classification adapter (PEFT's task_type SEQ_CLS), which saves its head"
        )
    if len(head["weight"]) != 1:
        raise ValueError(f"reward adapter {name} has {len(head['weight'])} labels; expected 1, a score")
    others = sorted(k for k in weights if ".lora_" not in k or ".lora_embedding" in k)
    if others:
        raise ValueError(
            f"reward adapter {name} has {len(others)} tensors besides LoRA on the layers and its head, the first is"
            f" {others[0]}; the trunk stays frozen: merge the adapter into its base model and give that folder"
        )
    return ScoreAdapter(name, base, config, weights, head)


def load_adapter_scorer(
    name: str, *, device: torch.device | str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a reward adapter on a base model of its own, for scoring (in eval mode, frozen), with its tokenizer.

    Its rows end with the end token, as the completions that the trunk scores do. Raises as `read_score_adapter`.
    """
    adapter, source = read_score_adapter(name), expand(name)
    base = load_with_new_head(adapter.base, revision=adapter.config.revision)
    keep_head_float32(base)
    # The model that PEFT wraps: its layers carry the adapter, and its head is that of the adapter.
    model = put_adapter_on(base, source).get_base_model()
    model.config.update({READS_END: True, "name_or_path": source})
    model.requires_grad_(False)
    tokenizer = adapter_tokenizer(name)
    if tokenizer is None:
        tokenizer = read_tokenizer(adapter.base, **pinned_source(adapter.config.revision, None))
    else:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return (model if device is None else model.to(device)).eval(), tokenizer


def _checked_config(name: str, config: PeftConfig) -> LoraConfig:
    if config.task_type != "SEQ_CLS":
        raise ValueError(
            f"reward adapter {name} has the task_type {config.task_type}, so no score head; give one with SEQ_CLS,"
            " which a sequence-classification model with an adapter saves"
        )
    require_lora(config, f"reward adapter {name}")
    config = copy.deepcopy(config)
    if set(config.modules_to_save or ()) <= HEAD_MODULES:
        config.modules_to_save = None
    if config.init_lora_weights in _PLAIN_STARTS:
        config.init_lora_weights = True
    try:
        check_adapter_config(config)
    except ValueError as error:
        raise ValueError(f"reward adapter {name} can't be a branch of the trunk: {error}") from error
    config.task_type, config.inference_mode, config.lora_dropout = "CAUSAL_LM", False, 0.0
    return config


def adapter_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer saved with a reward adapter, or None."""
    source = expand(name)
    has_tokenizer = source_file(source, "tokenizer_config.json") is not None
    return read_tokenizer(source, "tokenizer of the reward adapter") if has_tokenizer else None


# --- a branch of the trunk ---


class ScoreBranch(nn.Module):
    """The head of the reward adapter, in float32, and the positions that it reads.

    Args:
        obstacle: why it cannot start from the states at the cut, a clause; None: it starts from them.
    """

    def __init__(self, adapter: ScoreAdapter, hidden_size: int, device: torch.device, obstacle: str | None):
        super().__init__()
        self.name, self.pad_token_id, self.obstacle = adapter.name, adapter.pad_token_id, obstacle
        if adapter.head["weight"].shape != (1, hidden_size):
            raise ValueError(
                f"reward adapter {adapter.name} has a head of {list(adapter.head['weight'].shape)}, and this trunk is"
                f" {hidden_size} wide: it was trained on another base model"
            )
        head = {"bias": torch.zeros(1), **adapter.head}
        self.weight, self.bias = (
            nn.Parameter(head[name].to(device, torch.float32), requires_grad=False) for name in ("weight", "bias")
        )

    @property
    def from_states(self) -> bool:
        """Whether it starts from the states at the cut; otherwise it runs every layer."""
        return self.obstacle is None

    def last_tokens(self, pack: Pack) -> Tensor:
        """Return the column [R] of each row at which the score is read.

        Source: transformers' GenericForSequenceClassification: the last token that is not the pad token, even if the
        pad token is the end token.
        """
        counts = pack.attention_mask.bool()
        if self.pad_token_id is not None:
            counts = counts & (pack.input_ids != self.pad_token_id)
        return (torch.arange(counts.shape[1], device=counts.device) * counts).argmax(dim=1)

    def forward(self, states: Tensor) -> Tensor:
        """Return the scores [R], float32, of the rows' states [R, H] at `last_tokens` under this adapter."""
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), self.weight, self.bias).squeeze(-1)


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
    variables: Sequence[dict[str, Any]] | None = None,
) -> tuple[list[list[int]], int]:
    """Return the token ids of each row for a reward model, and how many rows were shortened.

    A completion that was cut off at a length limit gets no end token, so that its score equals that of a reward
    adapter on the policy's trunk. `variables` of a row are for the chat template (`template_variables`). The messages
    of a completion are foreign text: special tokens that a policy or a tool spells out are characters, as in the ids
    of the rollout. A text is read as it stands, because a template may have rendered it beforehand.
    """
    stopped = [True] * len(prompts) if stopped is None else stopped
    rows = list(zip(prompts, completions, stopped, strict=True))
    if not rows or isinstance(prompts[0], str):
        texts = [prompt + completion for prompt, completion, _ in rows]
        end = tokenizer.eos_token_id if end_token else None
        return encode_texts(tokenizer, texts, max_length, end=end, stopped=stopped)
    foreign = ForeignText(tokenizer, None)
    texts = [
        _render(tokenizer, prompt, foreign.divide_all(completion), is_stopped, name, own)
        for (prompt, completion, is_stopped), own in zip(rows, variables or [{}] * len(rows), strict=True)
    ]
    end = turn_end(tokenizer) if end_token else None
    return _finished(tokenizer, foreign.encode_all(texts), max_length, end, stopped)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that ends the assistant's turn, where a reward model reads a conversation's score.

    It is the first special token that the chat template writes after an answer: <end_of_turn> of gemma, <|end|> of
    Phi, at which their policies stop, where the tokenizer's end token is another. Without one it is that end token.
    """
    probe = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": CUT_MARK}]
    try:
        _, mark, rest = tokenizer.apply_chat_template(probe, tokenize=False).rpartition(CUT_MARK)
    except Exception:  # A template may raise anything; this one does not take such a conversation.
        mark, rest = "", ""
    added = tokenizer.added_tokens_decoder
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"] if mark else []
    return next((i for i in ids if i in added and added[i].special), tokenizer.eos_token_id)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Conversation,
    completion: list[Message],
    is_stopped: bool,
    name: str,
    variables: dict[str, Any],
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
        rest = messages[len(prompt)]
        joined = {**opened, **rest, "content": (opened["content"] or "") + (rest["content"] or "")}
        messages[len(prompt) - 1 : len(prompt) + 1] = [joined]
    if is_stopped:
        return tokenizer.apply_chat_template(without_nulls(messages), tokenize=False, **variables)
    # transformers' continue_final_message raises where a template rewrites the message (moves the reasoning, say).
    messages[-1] = {**messages[-1], "content": (messages[-1]["content"] or "") + CUT_MARK}
    text = tokenizer.apply_chat_template(without_nulls(messages), tokenize=False, **variables)
    text, mark, _ = text.rpartition(CUT_MARK)
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
    end: int | None = None,
    stopped: Sequence[bool] | None = None,
) -> tuple[list[list[int]], int]:
    """Tokenize texts. A text that is too long keeps its first special token and its end, where the completion is.

    Args:
        max_length: tokens; None for no limit.
        end: token id with which every row then ends, as sampled completions do. None: rows end as they are.
        stopped: n booleans, False for a text that was cut off at a length limit: it never ends with an end token.
            None: no text was cut off.

    Returns:
        n lists of token ids, and how many of them were shortened.
    """
    # Not verbose: texts that are too long are shortened here, and counted.
    rows = tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
    rows = [without_second_bos(row, tokenizer.bos_token_id) for row in rows]
    return _finished(tokenizer, rows, max_length, end, stopped)


def _finished(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[list[int]],
    max_length: int | None,
    end: int | None,
    stopped: Sequence[bool] | None,
) -> tuple[list[list[int]], int]:
    """Give rows their end token, and shorten those that are too long (`encode_texts`).

    What a chat template writes after the end token (white space, special tokens) is dropped.
    """
    empty = [index for index, row in enumerate(rows) if not row]
    if empty:
        raise ValueError(f"the texts at {empty[:20]} have no tokens to score; leave empty completions out")
    stopped = [True] * len(rows) if stopped is None else stopped
    rows = [
        _with_end(tokenizer, row, end) if is_stopped else _without_end_token(tokenizer, row)
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


def _with_end(tokenizer: PreTrainedTokenizerBase, row: list[int], end: int | None) -> list[int]:
    if end is None:
        return row
    ends = [place for place, token in enumerate(row) if token == end]
    # The first of those after the text: a template may end the turn and then the conversation by the same token.
    whole = row
    while ends and not tokenizer.decode(row[ends[-1] :], skip_special_tokens=True).strip():
        whole = row[: ends.pop() + 1]
    return whole if whole[-1:] == [end] else [*row, end]


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
                f"scores with mean {self.mean} and standard deviation {self.std} distinguish nothing; check the"
                " reward model and its rows"
            )

    @classmethod
    def of(cls, scores: Tensor) -> ScoreScale:
        """Return the scale of [n] scores."""
        scores = scores.double()
        return cls(float(scores.mean()), float(scores.std()) if len(scores) > 1 else 0.0)

    def restore(self, standardized: Tensor) -> Tensor:
        """Return the scores of values in standard deviations from the mean."""
        return standardized * self.std + self.mean

    def save(self, folder: str | Path) -> None:
        """Write the scale into the folder of a reward model."""
        atomic_write_json(Path(folder) / SCALE_FILE, asdict(self))


def read_score_scale(name: str) -> ScoreScale | None:
    """Return the scale saved with the reward model at `name`, a folder or a Hub name, or None."""
    path = source_file(expand(name), SCALE_FILE)
    if path is None:
        return None
    data = read_json(path)
    try:
        return ScoreScale(read_number(data["mean"]), read_number(data["std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"{path} does not hold the mean and std of scores ({error}); write it again") from error
