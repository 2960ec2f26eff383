"""RewardModelTrainer: TRL's RewardTrainer with labels that are probabilities.

A scalar model, whole or as a LoRA adapter with a score head, learns from preferences under the Bradley-Terry model:
L = -(p log sigmoid(d) + (1 - p) log sigmoid(-d)) with d the score of `chosen` minus that of `rejected`. TRL's trainer
handles the model, PEFT, checkpoints and cards. This module adds the rows (encoded as rewards/model.py encodes them in
PPO), the loss and the logged metrics.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from datasets import Dataset, Features, List, Value
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from onetrunk.checkpoints.config import CheckpointConfig
from onetrunk.checkpoints.trl_trainers import ResumableTRLTrainer
from onetrunk.data.pairs import read_pairs
from onetrunk.data.rows import SIDES, check_preferences, variables_of
from onetrunk.data.sharded import ShardedRows
from onetrunk.models.adapters import keep_revision, require_lora
from onetrunk.models.reward_model import READS_END, encode_rows, keep_head_float32, length_limit, score_layer
from onetrunk.ops.losses import bradley_terry_loss
from onetrunk.ops.masking import length_mask
from onetrunk.ops.packing import pad_ids
from onetrunk.utils.options import option, replace_none, require_seed
from onetrunk.utils.redaction import SecretFreeArguments

logger = logging.getLogger(__name__)

NAN = float("nan")
ENCODED = ("chosen_ids", "rejected_ids")
# Options of TRL that do nothing here, and why.
WITHOUT_MEANING = {
    "chat_template_path": "rows are encoded before TRL reads it; put chat_template.jinja into the tokenizer's folder",
    "label_smoothing_factor": "labels are probabilities; give the rows a column probability, with 0.9 in place of 1",
}


@dataclass(repr=False)
class RewardModelConfig(CheckpointConfig, SecretFreeArguments, RewardConfig):
    """TRL's RewardConfig, and how the labels of the rows are used.

    Raises:
        ValueError: a value out of range.
    """

    soft_labels: bool = option(
        True, "Learn from the column probability (that chosen is better) if there is one; False: chosen is better."
    )
    use_margin: bool = option(False, "Require a lead of the better completion by the column margin.")
    end_token: bool = option(
        True, "Read the score at the end token, with which sampled completions end; adapters always do."
    )
    remove_unused_columns: bool = option(False, "Always False: the labels are columns that the model does not take.")

    def __post_init__(self) -> None:
        replace_none(self)
        require_seed("seed", self.seed)
        require_seed("data_seed", self.data_seed)
        super().__post_init__()
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns is true, which would drop the labels; leave it out")
        for name, reason in WITHOUT_MEANING.items():
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}: {reason}")
        coefficient = self.center_rewards_coefficient
        if coefficient is not None and not coefficient >= 0:
            raise ValueError(f"center_rewards_coefficient is {coefficient}; set 0 or more (0.01 is common)")


@dataclass
class PairCollator:
    """Makes a batch of encoded rows, padded on the right: all chosen completions, then the rejected ones of the pairs.

    Args:
        pad_to_multiple_of: tokens; None: the batch is as wide as its longest row.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return input_ids and attention_mask [N, T]; the indices `first` and `second` [P] of the labelled pairs, with
        their labels [P]; and for a teacher's scores `scores` [N], NaN if unknown."""
        pairs = [index for index, f in enumerate(features) if f["rejected_ids"]]
        rows = [f["chosen_ids"] for f in features] + [features[index]["rejected_ids"] for index in pairs]
        batch = self.pad(rows)
        labelled = {
            index: len(features) + place
            for place, index in enumerate(pairs)
            if features[index].get("probability", 1.0) is not None
        }
        batch["first"] = torch.tensor(list(labelled), dtype=torch.long)
        batch["second"] = torch.tensor(list(labelled.values()), dtype=torch.long)
        for name in ("probability", "margin"):
            if name in features[0]:
                batch[name] = torch.tensor([features[index][name] for index in labelled], dtype=torch.float32)
        if "chosen_score" in features[0]:
            scores = [f["chosen_score"] for f in features] + [features[index]["rejected_score"] for index in pairs]
            batch["scores"] = torch.tensor([NAN if s is None else s for s in scores], dtype=torch.float32)
        return batch

    def pad(self, rows: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return input_ids and attention_mask [n, T] of n lists of token ids."""
        ids, lengths = pad_ids(rows, self.pad_token_id)
        if self.pad_to_multiple_of:
            ids = F.pad(ids, (0, -ids.shape[1] % self.pad_to_multiple_of), value=self.pad_token_id)
        return {"input_ids": ids, "attention_mask": length_mask(lengths, ids.shape[1]).long()}

    @staticmethod
    def label_counts(batch: dict[str, Tensor]) -> Tensor:
        """Return float32 [2]: how many scores and how many labelled pairs a batch has."""
        num_pairs = batch["input_ids"].new_full((), len(batch["first"]))
        num_scores = torch.isfinite(batch["scores"]).sum() if "scores" in batch else torch.zeros_like(num_pairs)
        return torch.stack([num_scores, num_pairs]).float()

    @classmethod
    def denominators(cls, batch: dict[str, Tensor]) -> Tensor:
        """Return what divides the sums of the losses: the batch's entry `label_counts`, else its own counts."""
        counts = batch["label_counts"] if "label_counts" in batch else cls.label_counts(batch)
        return torch.where(counts > 0, counts, 1.0)


@dataclass(frozen=True)
class PairEncoder:
    """Tokenizes a batch of checked rows as `ModelReward` does in PPO, and adds the labels that are used."""

    tokenizer: PreTrainedTokenizerBase
    reads_end: bool
    labels: tuple[str, ...] = ()

    def __call__(self, batch: Mapping[str, Sequence[Any]], places: Sequence[int]) -> dict[str, list[Any]]:
        """Return chosen_ids, rejected_ids and labels of rows, given as columns."""
        try:
            columns = {f"{side}_ids": self._side(batch, side, len(places)) for side in SIDES}
        except ValueError as error:
            raise ValueError(f"rows {places[0]} to {places[-1]}: {error}") from error
        columns |= {name: list(batch[name]) if name in batch else [None] * len(places) for name in self.labels}
        return columns

    def features(self, rows: Dataset) -> Features:
        """Return the types of the encoded rows of a dataset."""
        ids = {f"{side}_ids": List(Value("int32")) for side in SIDES}
        labels = {name: rows.features.get(name, Value("float64")) for name in self.labels}
        return Features(ids | labels)

    def _side(self, batch: Mapping[str, Sequence[Any]], side: str, number: int) -> list[list[int]]:
        """Return the token ids of prompt and completion of each row; none where it has no completion on this side."""
        completions = batch.get(side, [None] * number)
        columns = batch["prompt"], completions, batch.get(f"{side}_stopped", [True] * number)
        present = [place for place, completion in enumerate(completions) if completion is not None]
        prompts, completions, stopped = ([column[place] for place in present] for column in columns)
        all_variables = variables_of(batch, number)
        settings = (None, self.reads_end, "to train", stopped, [all_variables[place] for place in present])
        encoded, _ = encode_rows(self.tokenizer, prompts, completions, *settings)
        ids = dict(zip(present, encoded, strict=True))
        return [ids.get(place, []) for place in range(number)]


class RewardModelTrainer(ResumableTRLTrainer, RewardTrainer):
    """Trains a reward model on preferences with hard or soft labels.

    Rows have `prompt`, `chosen`, `rejected` in any shape that `read_pairs` takes, and may have `chosen_stopped`,
    `rejected_stopped`, `probability`, `margin` (`check_preferences`) and what the chat template reads. They are
    tokenized as `ModelReward` does it in PPO: prompt + completion, or both through the chat template.

    Args:
        model: a sequence-classification model with one label, or a PeftModel of one; for a language model's folder or
            name see `models.reward_model.load_with_new_head`.
        args: settings.
        train_dataset: preference rows; ShardedRows are read while training.
        eval_dataset: held-out rows, or several such datasets by name.
        processing_class: the model's tokenizer; its pad token becomes the model's.
        **trl: further keywords of TRL's RewardTrainer (peft_config, callbacks, optimizers, ...). A copy of peft_config
            gets the task_type SEQ_CLS, with which PEFT trains and saves the head.

    Raises:
        ValueError: bad rows, a tokenizer that cannot pad, a max_length above the model's limit or below every row, or
            a PeftModel whose head is frozen, an adapter of a model whose head is not called score.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: RewardModelConfig,
        train_dataset: Dataset | ShardedRows,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **trl: Any,
    ):
        if trl.get("peft_config") is not None:
            require_lora(trl["peft_config"], "peft_config")
            if score_layer(model) is not getattr(model, "score", None):
                raise ValueError(
                    f"an adapter of {type(model).__name__} could not be read again, because its head is not called"
                    " score, as that of a decoder is; train the whole model, without peft_config (use_peft)"
                )
            trl["peft_config"] = copy.deepcopy(trl["peft_config"])
            trl["peft_config"].task_type = "SEQ_CLS"
            keep_revision(trl["peft_config"], model)
        if isinstance(model, PeftModel) and model.active_peft_config.task_type != "SEQ_CLS":
            raise ValueError(
                f"the model has an adapter of the task_type {model.active_peft_config.task_type}, which leaves the"
                " score head frozen; make it with SEQ_CLS, or give the model and a peft_config"
            )
        set_tokens(processing_class, args)
        check_length(args, model, processing_class)
        reads_end = args.end_token or trl.get("peft_config") is not None or hasattr(model, "peft_config")
        model.config.update({READS_END: reads_end})
        self.reads_end = reads_end
        streamed = None
        if isinstance(train_dataset, ShardedRows):
            streamed = train_dataset.encoded(partial(self.encode_streamed, tokenizer=processing_class, args=args))
            train_dataset = train_dataset.sample()
        self.pair_sums: dict[str, dict[str, list[Tensor]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        super().__init__(
            model=model,
            args=args,
            data_collator=PairCollator(processing_class.pad_token_id, args.pad_to_multiple_of),
            train_dataset=self.encode(train_dataset, processing_class, args, "sampled" if streamed else "training"),
            streamed=streamed,
            eval_dataset=self.encode(eval_dataset, processing_class, args, "held-out"),
            processing_class=processing_class,
            **trl,
        )
        if score_layer(self.model).weight.requires_grad:
            keep_head_float32(self.model)

    def extra_loop_state(self) -> dict[str, Any]:
        """Return the loop state, with the metrics since the last log."""
        sums = {name: [t.tolist() for t in tensors] for name, tensors in self.pair_sums["train"].items()}
        return {**super().extra_loop_state(), "figures": sums}

    def load_extra_loop_state(self, state: dict[str, Any]) -> None:
        """Restore the loop state, with the metrics since the last log."""
        super().load_extra_loop_state(state)
        device = self.accelerator.device
        for name, sums in state["figures"].items():
            self.pair_sums["train"][name] = [torch.tensor(pair, device=device) for pair in sums]

    def encode(self, dataset: Any, tokenizer: PreTrainedTokenizerBase, args: RewardModelConfig, kind: str) -> Any:
        """Return a dataset, or each of several, as token ids and labels; None and encoded rows are unchanged."""
        if isinstance(dataset, dict):
            return {name: self.encode(rows, tokenizer, args, f"{kind} {name}") for name, rows in dataset.items()}
        if dataset is None or isinstance(dataset, str) or set(ENCODED) <= set(dataset.column_names):
            return dataset
        dataset = read_pairs(dataset)
        self.check_rows(dataset, args)
        encoder = self.encoder(dataset.column_names, tokenizer, args)
        # Written to the cache of `datasets` and mapped from there, so that memory does not grow with the rows; rows in
        # memory stay there.
        encoded = dataset.with_format(None).map(
            encoder,
            batched=True,
            with_indices=True,
            features=encoder.features(dataset),
            remove_columns=dataset.column_names,
            num_proc=args.dataset_num_proc,
            # The key of the cache does not change with the functions that the encoder calls.
            load_from_cache_file=False,
            desc=f"{kind} rows",
        )
        encoded = drop_overlong(encoded, args.max_length, kind)
        needs_lengths = args.train_sampling_strategy not in ("random", "sequential")
        return encoded.add_column(args.length_column_name, row_lengths(encoded)) if needs_lengths else encoded

    def check_rows(self, dataset: Dataset, args: RewardModelConfig) -> None:
        """Raise ValueError for rows that cannot be learned from."""
        check_preferences(dataset)
        if args.use_margin and "margin" not in dataset.column_names:
            raise ValueError(
                "use_margin is true and the rows have no column margin; name it in dataset_columns, or leave"
                " use_margin out"
            )

    def encoder(
        self, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, args: RewardModelConfig
    ) -> PairEncoder:
        """Return what encodes rows with these columns."""
        labels = [
            name for name, is_used in (("probability", args.soft_labels), ("margin", args.use_margin)) if is_used
        ]
        used = tuple(name for name in labels if name in columns)
        return PairEncoder(tokenizer, self.reads_end, used)

    def encode_streamed(
        self, rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, args: RewardModelConfig
    ) -> list[dict[str, Any] | None]:
        """Return rows of a batch as `encode` does, None for those that are longer than max_length."""
        limit, dataset = args.max_length, read_pairs(Dataset.from_list(rows))
        self.check_rows(dataset, args)
        encoder = self.encoder(dataset.column_names, tokenizer, args)
        columns = encoder(dataset[:], range(len(rows)))
        encoded = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return [row if limit is None or max(len(row[name]) for name in ENCODED) <= limit else None for row in encoded]

    def evaluate(self, eval_dataset: Any = None, **kwargs: Any) -> dict[str, float]:
        """Return the metrics of this trainer's held-out rows, or of other preference rows."""
        encoded = self.encode(eval_dataset, self.processing_class, self.args, "held-out")
        return super().evaluate(eval_dataset=encoded, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Any]:
        """Return the batches of an optimizer step, each with the mean `label_counts` of all batches and processes.

        Divided by it, a row weighs the same in whichever batch and process it is.
        """
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            own = torch.stack([PairCollator.label_counts(batch) for batch in batches]).sum(0)
            total = self.accelerator.reduce(torch.cat([own, own.new_tensor([len(batches)])]).to(device), "sum")
            batches = [{**batch, "label_counts": total[:-1] / total[-1]} for batch in batches]
        return batches, num_items

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the Bradley-Terry loss, plus a term that centres the scores on 0 (2312.09244, equation 2).

        The sum over the pairs of the inputs is divided by `label_counts`: in training the mean number of a batch
        (`get_batch_samples`); in an evaluation the number of the inputs.
        """
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        scores = outputs.logits.squeeze(-1).float()
        chosen, rejected = scores[inputs["first"]], scores[inputs["second"]]
        loss = bradley_terry_loss(chosen, rejected, inputs.get("probability"), inputs.get("margin"))
        if self.args.center_rewards_coefficient:
            loss = loss + self.args.center_rewards_coefficient * (chosen + rejected).square().mean()
        self.note_pairs(scores.detach(), chosen.detach(), rejected.detach(), inputs.get("probability"))
        loss = loss * len(chosen) / PairCollator.denominators(inputs)[1]
        return (loss, outputs) if return_outputs else loss

    def note_pairs(self, scores: Tensor, chosen: Tensor, rejected: Tensor, probability: Tensor | None) -> None:
        """Add the metrics of a batch to the next log: all its scores, and the scores of its pairs."""
        labels = torch.ones_like(chosen) if probability is None else probability
        if not self.model.training and len(scores) == 2 * len(chosen):
            kept = slice(self._num_own(len(chosen)))
            chosen, rejected, labels = chosen[kept], rejected[kept], labels[kept]
            scores = torch.cat([chosen, rejected])
        prefers = torch.sign(labels - 0.5)
        signs = torch.sign(chosen - rejected) * prefers
        pair_sums = self.pair_sums["train" if self.model.training else "eval"]
        pair_sums["pairs/accuracy"].append(torch.stack([((signs + 1) / 2 * prefers.abs()).sum(), prefers.abs().sum()]))
        for name, values in (("pairs/lead", chosen - rejected), ("score/mean", scores)):
            pair_sums[name].append(torch.stack([values.sum(), values.new_full((), len(values))]))

    def _num_own(self, count: int) -> int:
        """Return how many of `count` rows of an evaluation's batch no process has had before: accelerate fills the
        last batches with the first rows.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return count
        return min(count, max(0, state.remainder - self.accelerator.process_index * count))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the metrics of all processes since the last log; a metric without rows is left out."""
        mode = "train" if self.model.training else "eval"
        sums = [torch.stack(parts).sum(0) for parts in self.pair_sums[mode].values()]
        totals = self.accelerator.reduce(torch.stack(sums), "sum").tolist() if sums else []
        for name, (total, count) in zip(self.pair_sums[mode], totals, strict=True):
            if count:
                logs[name if mode == "train" else f"eval_{name}"] = total / count
        self.pair_sums[mode].clear()
        super().log(logs, start_time)


def set_tokens(tokenizer: PreTrainedTokenizerBase | None, args: RewardModelConfig) -> None:
    """Give the tokenizer the tokens of the settings; raise ValueError if it is missing or cannot pad.

    TRL does so too, but only after the rows are encoded.
    """
    if tokenizer is None:
        raise ValueError("the trainer needs the model's tokenizer; pass processing_class")
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name)
        if token is not None and token not in tokenizer.get_vocab():
            raise ValueError(f"{name} is {token!r}, and the tokenizer has no such token; name one of its vocabulary")
        if token is not None:
            setattr(tokenizer, name, token)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "the tokenizer has no padding token, and a reward model reads its score at the last token before the"
            " padding; set tokenizer.pad_token to a token that no text contains (the end token works, and is then not"
            " read)"
        )


def check_length(args: RewardModelConfig, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError for a max_length that is too long for the model; without one, set it to the model's limit."""
    limit = length_limit(model, tokenizer)
    if limit is None or (args.max_length is not None and args.max_length <= limit):
        return
    if args.max_length not in (None, RewardConfig.max_length):
        raise ValueError(
            f"max_length {args.max_length} is more than the {limit} tokens that the model can read; lower it"
        )
    args.max_length = limit


def drop_overlong(rows: Dataset, max_length: int | None, kind: str) -> Dataset:
    """Return the rows whose completions, with their prompt, fit max_length tokens; warn of dropped rows."""
    if max_length is None:
        return rows
    lengths = row_lengths(rows)
    kept = np.flatnonzero(lengths <= max_length)
    if not len(kept):
        raise ValueError(
            f"all {len(rows)} {kind} rows are longer than max_length {max_length} (the shortest has {lengths.min()}"
            " tokens); raise it"
        )
    if len(kept) < len(rows):
        counts = (len(rows) - len(kept), len(rows), kind, max_length)
        logger.warning("dropped %d of %d %s rows longer than max_length %d tokens", *counts)
    return rows.select(kept)


def row_lengths(rows: Dataset) -> np.ndarray:
    """Return the tokens [n] of the longer side of each encoded row."""
    tables = rows.with_format("arrow").iter(batch_size=10_000)
    sides = ([pc.list_value_length(table[name]).to_numpy() for name in ENCODED] for table in tables)
    return np.concatenate([np.maximum(*lengths) for lengths in sides])
