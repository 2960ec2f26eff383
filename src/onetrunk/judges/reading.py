"""How a causal model is asked: a question becomes token ids that end where its answer begins, a label one token after.

With a chat template a question is a turn of the user; without one it is text that ends with "Answer:". Knows a
tokenizer, messages and logits; no principle.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.chat_template import apply_chat_template
from onetrunk.types import Message

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
