"""Judges in this process: any causal language model (`CausalJudge`), or a reward model (`RewardModelJudge`).

A language model gives the probability of each label from one forward. The label tokens after the question are compared
by a softmax over them alone. Their share of the whole probability (label mass) shows whether the model was answering
at all; below a threshold the judge abstains. A reward model cannot read a principle, so it says the same under each.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.judges.judge import (
    Done,
    Items,
    Judge,
    Pair,
    Principle,
    Rating,
    ScoringJudge,
    Single,
    Verdict,
    logistic,
    model_name,
)
from onetrunk.judges.template import (
    LABELS,
    MAX_CHARACTERS,
    PAIRWISE,
    RATING,
    Opinion,
    form_of,
    longest_text,
    nonce_of,
    question_messages,
)
from onetrunk.models.base_model import load_base, load_tokenizer, repair_padding
from onetrunk.models.loading import (
    adapter_base,
    base_fingerprint,
    base_of,
    base_revision,
    put_adapter_on,
    read_tokenizer,
    reading,
    scorer_fingerprint,
)
from onetrunk.models.reward_model import (
    ScoreScale,
    check_scorer,
    encode_rows,
    is_adapter_name,
    length_limit,
    load_adapter_scorer,
    load_scorer,
    read_score_scale,
    reads_end_token,
    score_token_ids,
)
from onetrunk.rollouts.local import last_logits_only
from onetrunk.types import Message, as_completion
from onetrunk.utils.files import digest
from onetrunk.utils.startup import peft_calls

ANSWER = "Answer:"
# A label may have a space before it or not; what a model prefers depends on its tokenizer.
FORMS = ("{}", " {}")
# Read by the templates of models that think before they answer; others ignore it.
NO_THINKING = {"enable_thinking": False}
# With less probability on the labels together the model was not answering: an abstention.
MIN_LABEL_MASS = 0.5
# Texts are not shortened further than this; a question that is still too long gets an abstention.
LEAST_CHARACTERS = 40
# For a question without material: its tokens and control tokens are our own.
ANY_CODE = "0" * 12
# The token ids of a question, and what a report says of it.
Fitted = tuple[list[int], dict[str, Any]]
# Per label the same number of token ids that mean it; all different.
LabelIds = tuple[tuple[int, ...], ...]


class CausalJudge(Judge):
    """A causal language model that answers with one token (see `Judge`).

    Args:
        model: a transformers causal LM; set to eval mode.
        tokenizer: the model's, with or without a chat template.
        name: the judge's name in reports; None takes the last part of the model's path.
        batch_size: questions per forward.
        min_label_mass: from 0 to 1; with less probability on the labels together the judge abstains.

    Raises:
        ValueError: labels that are not single tokens, or no room for a question.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        batch_size: int = 8,
        min_label_mass: float = MIN_LABEL_MASS,
    ):
        self.model, self.tokenizer = model.eval(), repair_padding(tokenizer)
        self.batch_size, self.min_label_mass = batch_size, min_label_mass
        self.reader = Reader(tokenizer)
        self.control_words, self.control_ids = control_tokens(tokenizer)
        self.max_length = length_limit(model, tokenizer)
        self.room = float("inf") if self.max_length is None else self.max_length
        self.name = model_name(name or model.name_or_path) or type(model).__name__
        example = Principle("Which completion is kinder?")
        pairwise, rating = (question_messages(form.blank, example, ANY_CODE) for form in (PAIRWISE, RATING))
        pairwise_ids, rating_ids = self.reader.ids(pairwise), self.reader.ids(rating)
        # An error for a tokenizer in which the labels are not single tokens.
        self.reader.label_ids(pairwise, LABELS)
        if self.room < len(pairwise_ids):
            raise ValueError(
                f"judge {self.name} reads {self.max_length} tokens, and a question without its texts has"
                f" {len(pairwise_ids)}; take a model with more positions"
            )
        self.identity: dict[str, Any] = {
            "kind": "causal",
            "model": base_fingerprint(model),
            # As token ids: they change with the wording, the chat template and the tokenizer.
            "template": digest([pairwise_ids, rating_ids])[:16],
            "min_label_mass": min_label_mass,
            "max_length": self.max_length,
        }

    def _answer(self, items: Items, principle: Principle, keep: Done) -> None:
        """Answer too long questions first, then the others from long to short."""
        form = form_of(items[0])
        blank = question_messages(form.blank, principle, ANY_CODE)
        label_ids = self.reader.label_ids(blank, form.labels)
        controls = self._num_controls(self.reader.ids(blank))
        fitted: dict[int, Fitted] = {}
        for index, item in enumerate(items):
            ids, details = self._fit(item, principle)
            if len(ids) > self.room:
                problem = f"the question has {len(ids)} tokens, at most {self.room} are read"
            elif self._num_controls(ids) != controls:
                problem = "the texts contain control tokens of the judge"
            else:
                fitted[index] = ids, details
                continue
            keep(index, form.answer(Opinion(None, problem, details)))
        order = sorted(fitted, key=lambda index: -len(fitted[index][0]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            opinions = self._opinions([fitted[index] for index in batch], form.labels, label_ids)
            for index, opinion in zip(batch, opinions, strict=True):
                keep(index, form.answer(opinion))

    def _fit(self, item: Pair | Single, principle: Principle) -> Fitted:
        """Shorten the texts until the question fits, or they have LEAST_CHARACTERS."""
        longest, nonce = longest_text(item), nonce_of(item, principle)
        size = min(longest, MAX_CHARACTERS)
        while True:
            ids = self.reader.ids(question_messages(item, principle, nonce, self.control_words, size))
            if len(ids) <= self.room or size <= LEAST_CHARACTERS:
                cut = {"cut_to_characters": size} if size < longest else {}
                return ids, {"tokens": len(ids), **cut}
            size = max(LEAST_CHARACTERS, int(0.9 * size * self.room / len(ids)))

    def _opinions(self, questions: Sequence[Fitted], labels: Sequence[str], label_ids: LabelIds) -> list[Opinion]:
        rows = [ids for ids, _ in questions]
        self.usage.prompt_tokens += sum(map(len, rows))
        logits = last_logits(self.model, rows, self.tokenizer.pad_token_id)
        if not logits.isfinite().all():
            raise RuntimeError(
                f"the logits of judge {self.name} are not finite; save it in another precision (bfloat16 or float32)"
            )
        shares, masses = (values.tolist() for values in label_shares(logits, label_ids))
        opinions = []
        for (_, details), share, mass in zip(questions, shares, masses, strict=True):
            details = details | {"label_mass": mass}
            if mass < self.min_label_mass:
                opinions.append(Opinion(None, f"label mass {mass:.3g} is below {self.min_label_mass:g}", details))
            else:
                opinions.append(Opinion(dict(zip(labels, share, strict=True)), None, details))
        return opinions

    def _num_controls(self, ids: Sequence[int]) -> int:
        return sum(token in self.control_ids for token in ids)


def load_causal_judge(name: str, *, device: torch.device | str | None = None, **settings: Any) -> CausalJudge:
    """Return the causal model at `name` as a judge; an adapter's weights are merged into its base.

    Args:
        name: folder or Hub name of a model, or of an adapter.
        device: None leaves it on the CPU.
        **settings: of CausalJudge, which may raise ValueError.

    Raises:
        RuntimeError: nothing loadable there.
    """
    base = adapter_base(name)
    tokenizer = load_tokenizer(name)
    if base is None:
        model = load_base(name)
    else:
        with base_of(name):
            model = load_base(base, revision=base_revision(name))
        adapted = put_adapter_on(model, name)
        # Not every type of adapter can be merged.
        with peft_calls(), reading("adapter", name, "adapter_config.json"):
            model = adapted.merge_and_unload()
    model.requires_grad_(False)
    return CausalJudge(model if device is None else model.to(device), tokenizer, **{"name": name, **settings})


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], frozenset[int]]:
    """Return the control tokens of a tokenizer as words, and as ids.

    The ids leave out the unknown token, which any rare word may become.
    """
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    words = sorted(added | set(tokenizer.all_special_tokens))
    ids = tokenizer.convert_tokens_to_ids(words)
    return words, frozenset(i for i in ids if i is not None and i >= 0) - {tokenizer.unk_token_id}


class Reader:
    """Renders questions for one tokenizer, with or without a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        begins_with = tokenizer("a")["input_ids"][:1]
        has_bos = tokenizer.bos_token_id is not None and begins_with == [tokenizer.bos_token_id]
        self._prefix = begins_with if has_bos and not tokenizer.chat_template else []

    def text(self, messages: Sequence[Message]) -> str:
        """Return messages as text that ends where the model's answer begins."""
        if not self.tokenizer.chat_template:
            return "\n\n".join([*(message["content"] for message in messages), ANSWER])
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **NO_THINKING)
        # A space at the end would be a separate token, but models learned it as a part of their first word.
        return text.rstrip(" ")

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Return `text` as token ids."""
        return self._prefix + self._encoded(self.text(messages))

    def label_ids(self, messages: Sequence[Message], labels: Sequence[str]) -> LabelIds:
        """Return the tokens that mean the labels as an answer to messages, or raise ValueError if one has none."""
        text = self.text(messages)
        before = self._encoded(text)
        forms: list[list[int]] = []
        for form in FORMS:
            after = [self._encoded(text + form.format(label)) for label in labels]
            last = [ids[-1] for ids in after]
            is_one = all(ids[:-1] == before for ids in after) and len(set(last)) == len(labels)
            # A form counts for all labels or for none, or one of them would have an advantage.
            if is_one and self.tokenizer.unk_token_id not in last and last not in forms:
                forms.append(last)
        if not forms:
            end = self.tokenizer.convert_ids_to_tokens(self._encoded(text + FORMS[1].format(labels[0])))[-3:]
            raise ValueError(
                f"the labels {', '.join(labels)} are not single tokens of the judge's tokenizer after a question"
                f" ({labels[0]} ends in {end}), so one forward gives no probability of them; take another model,"
                " or serve this one and give the server's URL, which samples votes"
            )
        return tuple(zip(*forms, strict=True))

    def _encoded(self, text: str) -> list[int]:
        # Not verbose: we shorten texts that exceed the model's limit.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@torch.no_grad()
def last_logits(model: PreTrainedModel, rows: Sequence[list[int]], pad_token_id: int) -> Tensor:
    """Return the logits after each row: [R, V] float32.

    The rows, none empty, are padded on the LEFT, so that all end in the last column and only that column's logits are
    computed. Nothing attends to the padding.
    """
    width = max(map(len, rows))
    input_ids = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows], device=model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    attention_mask = (torch.arange(width, device=model.device) >= width - lengths[:, None]).long()
    outputs = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0),
        use_cache=False,
        **last_logits_only(model),
    )
    return outputs.logits[:, -1].float()


def label_shares(logits: Tensor, label_ids: LabelIds) -> tuple[Tensor, Tensor]:
    """Return the probability of each of L labels among the labels, [R, L], and of all together, [R].

    `logits` are those where the answer begins, [R, V] float32; `label_ids` come from the reader.
    """
    by_label = logits.log_softmax(-1)[:, torch.tensor(label_ids, device=logits.device)].logsumexp(-1)
    return by_label.softmax(-1), by_label.logsumexp(-1).exp()


logger = logging.getLogger(__name__)


class RewardModelJudge(ScoringJudge):
    """Judges by the scores of a sequence-classification model with one label (see `Judge`).

    Each different completion of a prompt is scored once per call, so equal completions tie exactly. Texts that are
    too long lose their beginning, as they do when a reward model scores for PPO.

    Args:
        model: a sequence-classification model with one label; set to eval mode.
        tokenizer: the model's.
        scale: the mean and spread of its scores: rating = sigmoid((score - mean) / std); None: sigmoid(score).
        batch_size: texts per forward.
        name: the judge's name in reports; None takes the last part of the model's path.

    Raises:
        ValueError: not a scalar reward model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        scale: ScoreScale | None = None,
        batch_size: int = 16,
        name: str | None = None,
    ):
        check_scorer(model)
        self.model, self.tokenizer = model.eval(), tokenizer
        self.scale, self.batch_size = scale, batch_size
        self.max_length = length_limit(model, tokenizer)
        self.name = model_name(name or model.name_or_path) or type(model).__name__
        self.num_shortened = 0
        self.identity: dict[str, Any] = {
            "kind": "reward model",
            "model": scorer_fingerprint(model),
            "reads": digest([tokenizer("The cat sat, twice!")["input_ids"], tokenizer.chat_template])[:16],
            "end_token": reads_end_token(model),
            "scale": None if scale is None else [scale.mean, scale.std],
        }

    def _verdict(self, first: float | None, second: float | None) -> Verdict:
        if first is None or second is None:
            return Verdict(None, "a score is not finite")
        return Verdict(logistic(first - second), details={"scores": [first, second]})

    def _rating(self, score: float | None) -> Rating:
        if score is None:
            return Rating(None, "the score is not finite")
        centred = score if self.scale is None else (score - self.scale.mean) / self.scale.std
        return Rating(logistic(centred), details={"score": score})

    def _scores(self, rows: Sequence[Single], principle: Principle) -> list[float | None]:
        """Return the score of each row, None for one that is not finite."""
        # Sorted, so that the order of a pair changes no batch, and so not a bit of a score.
        keys = [digest([row.prompt, row.text] if row.stopped else [row.prompt, row.text, False]) for row in rows]
        by_key = dict(sorted(zip(keys, rows, strict=True), key=lambda entry: entry[0]))
        unique = list(by_key.values())
        token_ids, num_shortened = encode_rows(
            self.tokenizer,
            [row.prompt for row in unique],
            [as_completion(row.prompt, row.text) for row in unique],
            self.max_length,
            reads_end_token(self.model),
            self.name,
            [row.stopped for row in unique],
        )
        if num_shortened and not self.num_shortened:
            logger.warning(
                f"judge {self.name}: {num_shortened} of {len(unique)} texts had more than {self.max_length} tokens and"
                " lost their beginning; later ones are only counted, in num_shortened"
            )
        self.num_shortened += num_shortened
        self.usage.prompt_tokens += sum(map(len, token_ids))
        scores = score_token_ids(self.model, token_ids, self.batch_size).tolist()
        finite = {key: score if math.isfinite(score) else None for key, score in zip(by_key, scores, strict=True)}
        return [finite[key] for key in keys]


def load_reward_judge(
    name: str, *, device: torch.device | str | None = None, batch_size: int = 16
) -> RewardModelJudge:
    """Return the reward model at `name` as a judge, with the score scale saved next to it, if any.

    `name` is the folder or Hub name of a sequence-classification model with one label, or of an adapter of one.

    Raises:
        RuntimeError: nothing loadable there.
        ValueError: a model or an adapter without a trained score head, or with several labels.
    """
    path = Path(os.path.expanduser(name))
    source = str(path) if path.exists() else name
    if is_adapter_name(name):
        model, tokenizer = load_adapter_scorer(name, device=device)
    else:
        model = load_scorer(name, device=device)
        tokenizer = read_tokenizer(source, "tokenizer of the reward model")
    scale = read_score_scale(source)
    return RewardModelJudge(model, tokenizer, scale=scale, batch_size=batch_size, name=Path(source).name)
