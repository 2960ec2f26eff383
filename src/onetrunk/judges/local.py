"""Any causal language model in this process as a judge: the probability of a label from one forward.

The option tokens behind the question are compared by a softmax over them alone; how much of the whole probability they
have (label mass) says whether the model was answering at all, and below a threshold it abstains. It may reason first.
Knows one model and its tokenizer; no orders, no labels of pairs, no server.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.data.chat_template import apply_chat_template
from onetrunk.judges.base import Pair, Principle, Rating, Verdict, digest
from onetrunk.judges.marks import Marks
from onetrunk.judges.template import LABELS, MAX_CHARACTERS, RATINGS, nonce_of, pairwise_messages, rating_messages
from onetrunk.judges.votes import REASON_FIRST, VERDICT_NOW
from onetrunk.models.base import load_base, load_tokenizer, repair_padding, stop_token_ids
from onetrunk.models.loading import ADAPTER_FILES, put_adapter_on, reading
from onetrunk.models.scorer import length_limit
from onetrunk.models.sources import adapter_base, base_fingerprint, base_of, check_base_marks
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import Message, Prompt
from onetrunk.utils.quiet import peft_calls

ANSWER, REASONS = "Answer:", "Reasons:"
# A label may come with or without a space before it; what a model prefers depends on its tokenizer.
FORMS = ("{}", " {}")
# Templates of models that think before they answer take it; the others do not look at it.
NO_THINKING = {"enable_thinking": False}


class Reader:
    """Renders questions for one tokenizer.

    Args:
        tokenizer: of the judge, with or without a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        begins_with = tokenizer("a")["input_ids"][:1]
        has_bos = tokenizer.bos_token_id is not None and begins_with == [tokenizer.bos_token_id]
        self._prefix = begins_with if has_bos and not tokenizer.chat_template else []

    def text(self, messages: Sequence[Message], cue: str = ANSWER) -> str:
        """Return messages as text that ends where the model goes on.

        Args:
            messages: user and assistant in turn, the user last.
            cue: the last word where there is no chat template.
        """
        if not self.tokenizer.chat_template:
            return "\n\n".join([*(message["content"] for message in messages), cue])
        text = apply_chat_template(self.tokenizer, messages, tokenize=False, add_generation_prompt=True, **NO_THINKING)
        # A space at the end would be a token of its own, where models learned it as a part of their first word.
        return text.rstrip(" ")

    def ids(self, messages: Sequence[Message], cue: str = ANSWER) -> list[int]:
        """Return messages as token ids that end where the model goes on; arguments as in `text`."""
        return self._prefix + self._encoded(self.text(messages, cue))

    def options(self, messages: Sequence[Message], labels: Sequence[str]) -> Options:
        """Return the tokens that mean the labels behind messages.

        Raises:
            ValueError: the labels are not one token each, or not told apart.
        """
        text = self.text(messages)
        before = self._encoded(text)
        found: list[list[int]] = []
        for form in FORMS:
            after = [self._encoded(text + form.format(label)) for label in labels]
            last = [ids[-1] for ids in after]
            is_one = all(ids[:-1] == before for ids in after) and len(set(last)) == len(labels)
            # A form counts for all labels or for none: else one of them would have an advantage.
            if is_one and self.tokenizer.unk_token_id not in last and last not in found:
                found.append(last)
        if not found:
            becomes = [self.tokenizer.convert_ids_to_tokens(self._encoded(text + FORMS[1].format(labels[0])))[-3:]]
            raise ValueError(
                f"the labels {', '.join(labels)} are not single tokens of the judge's tokenizer behind a question"
                f" ({labels[0]} ends in {becomes[0]}), so one forward gives no probability of them; take a model that"
                " has them, or serve this one and give the server's URL, which samples votes"
            )
        return Options(tuple(labels), tuple(zip(*found, strict=True)))

    def _encoded(self, text: str) -> list[int]:
        # verbose: longer texts than the model's limit are cut by us.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@dataclass(frozen=True)
class Options:
    """Labels and the tokens that mean them.

    Args:
        labels: L names.
        token_ids: per label as many ids as every other label has; all different.
    """

    labels: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]


@torch.no_grad()
def last_logits(model: PreTrainedModel, rows: Sequence[list[int]], pad_token_id: int) -> Tensor:
    """Return the logits behind each row: [R, V] float32.

    Args:
        model: a causal LM, in eval mode.
        rows: R lists of token ids, none empty; padded on the LEFT, so that all of them end in the last column and
            logits of other columns are never made.
        pad_token_id: fills the left, where nothing attends to it.
    """
    width = max(map(len, rows))
    input_ids = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows], device=model.device)
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    attention_mask = (torch.arange(width, device=model.device) >= width - lengths[:, None]).long()
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    outputs = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0),
        use_cache=False,
        **({"logits_to_keep": 1} if keeps else {}),
    )
    return outputs.logits[:, -1].float()


def label_shares(logits: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return the probability of each label among the labels, and of all labels together.

    Args:
        logits: [R, V] float32, where the answer begins.
        options: L labels.

    Returns:
        [R, L], rows of sum 1, and [R].
    """
    logprobs = logits.log_softmax(-1)
    token_ids = torch.tensor(options.token_ids, device=logits.device)
    by_label = logprobs[:, token_ids].logsumexp(-1)
    return by_label.softmax(-1), by_label.logsumexp(-1).exp()


MIN_LABEL_MASS = 0.5
# Texts are cut to no less; a question that is too long even so is not asked.
LEAST_CHARACTERS = 40
# A question without material: what it has of tokens and of controls is ours.
BLANK, ANY_CODE = Pair("", "", ""), "0" * 12
NO_REASONS = "(no reasons)"


@dataclass(frozen=True)
class Asked:
    """A question on its way to the model.

    Args:
        messages: returns it with texts of at most so many characters.
        longest: characters of its longest text.
    """

    messages: Callable[[int], list[Message]]
    longest: int


@dataclass(frozen=True)
class Answer:
    """What the model said of one question.

    Args:
        shares: per label its probability among the labels; None: it abstains.
        reason: its reasoning, or why it abstains.
        details: label mass, tokens of the question, characters to which its texts were cut.
    """

    shares: list[float] | None
    reason: str | None
    details: dict[str, Any]


class CausalJudge:
    """A causal language model that answers with one token; see `judges/base.py` for what it may be asked.

    Args:
        model: a transformers causal LM; set to eval mode.
        tokenizer: its own, with or without a chat template.
        name: for reports; None takes the last part of the model's path.
        batch_size: questions of one forward.
        reasoning_tokens: longest reasoning before each answer, decoded greedily; 0 for none.
        min_label_mass: from 0 to 1; with less probability on the labels together the judge abstains.
        max_length: tokens of a question; None for what model and tokenizer allow. Of longer ones the texts are cut.

    Raises:
        ValueError: labels that are not single tokens, a setting out of its range, or no room for a question.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str | None = None,
        batch_size: int = 8,
        reasoning_tokens: int = 0,
        min_label_mass: float = MIN_LABEL_MASS,
        max_length: int | None = None,
    ):
        if batch_size < 1 or reasoning_tokens < 0 or not 0 <= min_label_mass <= 1:
            raise ValueError(
                f"batch_size is {batch_size}, reasoning_tokens {reasoning_tokens} and min_label_mass"
                f" {min_label_mass}; expected at least 1, at least 0, and from 0 to 1"
            )
        self.model, self.tokenizer = model.eval(), repair_padding(tokenizer)
        self.batch_size, self.reasoning_tokens, self.min_label_mass = batch_size, reasoning_tokens, min_label_mass
        self.marks, self.reader = Marks(tokenizer), Reader(tokenizer)
        limits = [limit for limit in (length_limit(model, tokenizer), max_length) if limit is not None]
        self.max_length = min(limits, default=None)
        source = (name or model.name_or_path).rstrip("/").rpartition("/")[2]
        self.name = re.sub(r"[^A-Za-z0-9._-]+", "-", source)[:96] or type(model).__name__
        example = Principle("Which completion is kinder?")
        pairwise = pairwise_messages(BLANK, example, ANY_CODE)
        rating = rating_messages("", "", example, ANY_CODE)
        self._options = self.reader.options(self._before_answer(pairwise, LABELS, NO_REASONS), LABELS)
        if self._room(pairwise, LABELS) < len(self.reader.ids(pairwise)):
            raise ValueError(
                f"judge {self.name} reads {self.max_length} tokens, too few for a question of"
                f" {len(self.reader.ids(pairwise))} without its texts and for reasoning_tokens {reasoning_tokens};"
                " take a model with more positions"
            )
        self.identity: dict[str, Any] = {
            "kind": "causal",
            "model": base_fingerprint(model),
            # As token ids: they change with the wording, the chat template and the tokenizer.
            "template": digest([self.reader.ids(pairwise), self.reader.ids(rating), REASON_FIRST, VERDICT_NOW])[:16],
            "reasoning_tokens": reasoning_tokens,
            "min_label_mass": min_label_mass,
            "max_length": self.max_length,
        }

    def compare(
        self, pairs: Sequence[Pair], principle: Principle, done: Callable[[int, Verdict], None] | None = None
    ) -> list[Verdict]:
        """Return a verdict per pair (see `Judge`).

        Raises:
            RuntimeError: logits that are not finite.
        """
        verdicts: dict[int, Verdict] = {}
        blank = pairwise_messages(BLANK, principle, ANY_CODE)
        for index, answer in self._answers([self._pair(p, principle) for p in pairs], blank, self._options):
            first = None if answer.shares is None else answer.shares[0]
            verdicts[index] = Verdict(first, answer.reason, details=answer.details)
            if done is not None:
                done(index, verdicts[index])
        return [verdicts[index] for index in range(len(pairs))]

    def rate(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[str],
        principle: Principle,
        done: Callable[[int, Rating], None] | None = None,
        stopped: Sequence[bool] | None = None,
    ) -> list[Rating]:
        """Return a rating per completion: the mean of the marks, from 0 for the lowest to 1 for the highest.

        Raises:
            RuntimeError: logits that are not finite.
            ValueError: marks that are not single tokens.
        """
        ratings: dict[int, Rating] = {}
        blank = rating_messages("", "", principle, ANY_CODE)
        options = self.reader.options(self._before_answer(blank, RATINGS, NO_REASONS), RATINGS)
        asked = [self._single(p, c, principle) for p, c in zip(prompts, completions, strict=True)]
        for index, answer in self._answers(asked, blank, options):
            score = None
            if answer.shares is not None:
                score = sum(mark * share for mark, share in enumerate(answer.shares)) / (len(RATINGS) - 1)
            ratings[index] = Rating(score, answer.reason, details=answer.details)
            if done is not None:
                done(index, ratings[index])
        return [ratings[index] for index in range(len(prompts))]

    def _pair(self, pair: Pair, principle: Principle) -> Asked:
        shown = self.marks.cleaned_pair(pair)
        ask = partial(pairwise_messages, shown, principle, nonce_of(pair, principle), self.marks.words)
        return Asked(ask, max(_characters(shown.prompt), len(shown.first), len(shown.second)))

    def _single(self, prompt: Prompt, completion: str, principle: Principle) -> Asked:
        shown = self.marks.cleaned_prompt(prompt), self.marks.cleaned(completion)
        ask = partial(rating_messages, *shown, principle, nonce_of((prompt, completion), principle), self.marks.words)
        return Asked(ask, max(_characters(shown[0]), len(shown[1])))

    def _answers(self, asked: Sequence[Asked], blank: list[Message], options: Options) -> Iterator[tuple[int, Answer]]:
        """Yield (index, answer) as they come, those of long questions first."""
        controls, room = self._num_controls(self.reader.ids(blank)), self._room(blank, options.labels)
        fitted: dict[int, tuple[list[Message], int, dict[str, Any]]] = {}
        for index, question in enumerate(asked):
            messages, ids, details = self._fitted(question, room)
            if len(ids) > room:
                yield index, Answer(None, f"the question has {len(ids)} tokens, at most {room} are read", details)
            elif self._num_controls(ids) != controls:
                yield index, Answer(None, "the texts bring control tokens of the judge along", details)
            else:
                fitted[index] = messages, len(ids), details
        order = sorted(fitted, key=lambda index: -fitted[index][1])
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            answers = self._answer_batch([fitted[index] for index in batch], options)
            yield from zip(batch, answers, strict=True)

    def _fitted(self, question: Asked, room: float) -> tuple[list[Message], list[int], dict[str, Any]]:
        """Return messages, ids and details of a question, its texts cut until it fits, or as far as they are."""
        size = min(question.longest, MAX_CHARACTERS)
        while True:
            messages = question.messages(size)
            ids = self.reader.ids(messages)
            if len(ids) <= room or size <= LEAST_CHARACTERS:
                is_cut = size < question.longest
                return messages, ids, {"tokens": len(ids)} | ({"cut_to_characters": size} if is_cut else {})
            size = max(LEAST_CHARACTERS, int(0.9 * size * room / len(ids)))

    def _answer_batch(
        self, questions: Sequence[tuple[list[Message], int, dict[str, Any]]], options: Options
    ) -> list[Answer]:
        asked = [messages for messages, _, _ in questions]
        reasons = self._reasons(asked) if self.reasoning_tokens else [None] * len(asked)
        turns = [self._before_answer(m, options.labels, r) for m, r in zip(asked, reasons, strict=True)]
        logits = last_logits(self.model, [self.reader.ids(turn) for turn in turns], self.tokenizer.pad_token_id)
        if not logits.isfinite().all():
            raise RuntimeError(
                f"the logits of judge {self.name} are not finite; load it in another precision (bfloat16 or float32)"
            )
        shares, masses = label_shares(logits, options)
        return [
            self._answer(row, mass, reason, details)
            for row, mass, reason, (_, _, details) in zip(
                shares.tolist(), masses.tolist(), reasons, questions, strict=True
            )
        ]

    def _answer(self, shares: list[float], mass: float, reason: str | None, details: dict[str, Any]) -> Answer:
        details = details | {"label_mass": mass}
        if mass < self.min_label_mass:
            return Answer(None, f"label mass {mass:.3g} is below {self.min_label_mass:g}", details)
        return Answer(shares, reason, details)

    def _reasons(self, asked: Sequence[list[Message]]) -> list[str]:
        """Return what the model writes before its answers, without marks: it may quote what it read."""
        params = SamplingParams(
            max_completion_length=self.reasoning_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids(self.tokenizer, self.model.generation_config),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        rows = [self.reader.ids(_with_reasons_asked(messages), REASONS) for messages in asked]
        rollout = LocalBackend(self.model).generate(rows, params, [(row,) for row in range(len(rows))])
        texts = self.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
        return [self.marks.cleaned(text).strip() or NO_REASONS for text in texts]

    def _before_answer(self, messages: list[Message], labels: Sequence[str], reason: str | None) -> list[Message]:
        """Return the messages behind which the answer comes."""
        if not self.reasoning_tokens:
            return messages
        return [
            *_with_reasons_asked(messages),
            {"role": "assistant", "content": reason},
            {"role": "user", "content": VERDICT_NOW.format(labels=" or ".join(labels))},
        ]

    def _room(self, blank: list[Message], labels: Sequence[str]) -> float:
        """Return how many tokens a question may have, so that reasoning and the last turn fit behind it."""
        if self.max_length is None:
            return float("inf")
        behind = len(self.reader.ids(self._before_answer(blank, labels, NO_REASONS))) - len(self.reader.ids(blank))
        # Reasoning that is decoded and encoded again can have a few tokens more.
        return self.max_length - behind - self.reasoning_tokens - self.reasoning_tokens // 8

    def _num_controls(self, ids: Sequence[int]) -> int:
        return sum(token in self.marks.token_ids for token in ids)


def load_causal_judge(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    **settings: Any,
) -> CausalJudge:
    """Return the judge that is the causal model at `name`; the weights of an adapter are merged into its base.

    Args:
        name: folder or Hub name of a model, or of an adapter.
        device: None leaves it on the CPU.
        dtype: of the weights; None for the checkpoint's own.
        revision: branch, tag or commit on the Hub.
        **settings: of CausalJudge.

    Raises:
        RuntimeError: nothing loadable there.
        ValueError: no causal model, no tokenizer of its own, or as CausalJudge.
    """
    base = adapter_base(name, revision)
    tokenizer = load_tokenizer(name, revision=revision)
    if base is None:
        model = load_base(name, dtype=dtype, revision=revision)
    else:
        with base_of(name):
            model = load_base(base, dtype=dtype)
        adapted = put_adapter_on(model, name, revision)
        check_base_marks(adapted.get_base_model(), name, revision)
        # Not every kind of adapter can be merged.
        with peft_calls(), reading("adapter", name, ADAPTER_FILES, f"adapter_config.json in {name}"):
            model = adapted.merge_and_unload()
    model.requires_grad_(False)
    return CausalJudge(model if device is None else model.to(device), tokenizer, **{"name": name, **settings})


def _with_reasons_asked(messages: Sequence[Message]) -> list[Message]:
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + REASON_FIRST}]


def _characters(prompt: Prompt) -> int:
    # With room for the roles that a shown conversation names.
    return len(prompt) if isinstance(prompt, str) else sum(len(m["role"]) + len(m["content"]) + 4 for m in prompt)
