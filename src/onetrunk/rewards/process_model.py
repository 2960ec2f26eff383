"""A process reward model as a reward function: a score for each step of a completion, which arrives where it ends.

The model classifies tokens. It reads rows as the PRMTrainer of TRL up to 1.9 writes them: the prompt, then each step
followed by the step separator, tokenized piece by piece. The label of a step stands at the separator's last token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.data.foreign import ForeignText
from onetrunk.data.prompts import without_second_bos
from onetrunk.data.rows import variables_of, without_nulls
from onetrunk.models.loading import load_weights, read_config, read_tokenizer, scorer_fingerprint
from onetrunk.models.reward_model import length_limit, scorer_source
from onetrunk.rewards.model import SAMPLE_TEXTS
from onetrunk.rewards.reward import BuiltInReward, Completion, PerToken
from onetrunk.rewards.specs import PROCESS_MODEL, Policy
from onetrunk.types import Prompt
from onetrunk.utils.files import digest

KIND = "process reward model"


class ProcessReward(BuiltInReward):
    """Scores of a process reward model: the probability of the last label, or of the only one, for each step.

    The score of a step arrives at the token that ends it: where its separator is complete, and for a last step without
    one at the last token. White space alone is not a step. In an episode a step that ends in an observation arrives at
    the policy's last token in it; one that is all observation has no reward. A prompt that is too long loses its
    beginning; a completion that does not fit alone has no score.

    Args:
        path: folder or Hub name of a token-classification model.
        policy_tokenizer: decodes the completions.
        separator: text that ends a step.
        batch_size: rows per forward.
        device: None: the CPU.

    Raises:
        ValueError: it is not a token-classification model, or a setting cannot work.
        RuntimeError: nothing can be loaded from there.
    """

    runs_here = True

    def __init__(
        self,
        path: str | Path,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        separator: str = "\n",
        batch_size: int = 16,
        device: torch.device | str | None = None,
    ) -> None:
        if not separator or batch_size < 1:
            raise ValueError(f"{KIND} {path}: separator is {separator!r} and batch_size {batch_size}; set both")
        self.policy_tokenizer, self.separator, self.batch_size = policy_tokenizer, separator, batch_size
        source = scorer_source(path)
        self.tokenizer = read_tokenizer(source, f"tokenizer of the {KIND}")
        self.foreign = ForeignText(self.tokenizer, None)
        self.model = _load(source).to(device or "cpu")
        self.max_length = length_limit(self.model, self.tokenizer)
        self.__name__ = Path(source).name

    @classmethod
    def from_spec(cls, spec: str, policy: Policy) -> ProcessReward:
        """Return the model that "prm:NAME" or "prm:NAME#separator=TEXT" names; TEXT is percent-encoded."""
        path, _, option = spec.removeprefix(PROCESS_MODEL).partition("#")
        key, _, value = option.partition("=")
        if option and key != "separator":
            raise ValueError(f"{spec} has an unknown option {key!r} after '#'; there is separator=TEXT")
        if not path:
            raise ValueError(f"{spec!r} names no model; write prm:FOLDER, or prm:OWNER/NAME of the Hub")
        settings = {"separator": unquote(value)} if option else {}
        return cls(path, policy.tokenizer, device=policy.device, **settings)

    def __call__(
        self, prompts: list[Prompt], completions: list[Completion], completion_ids: list[list[int]], **columns: Any
    ) -> list[PerToken | None]:
        """Return the rewards of n completions; of the columns `completion_stopped` and `turn_ids` count, and what the
        chat template reads."""
        stopped = columns.get("completion_stopped") or [True] * len(prompts)
        turn_ids = columns.get("turn_ids") or [[0] * len(ids) for ids in completion_ids]
        steps = [self.steps(*row) for row in zip(completion_ids, stopped, strict=True)]
        texts = list(map(self._text, prompts, variables_of(columns, len(prompts))))
        rows = [self._encode(before, [text for text, _ in row]) for before, row in zip(texts, steps, strict=True)]
        scored = iter(self._probabilities([row for row in rows if row is not None]))
        return [
            None if row is None else _rewards(next(scored), [end for _, end in ends], turns)
            for row, ends, turns in zip(rows, steps, turn_ids, strict=True)
        ]

    def steps(self, ids: list[int], stopped: bool = True) -> list[tuple[str, int]]:
        """Return the text of each step of a completion, without its separator, and the number of its last token."""

        def decoded(count: int) -> str:
            return self.policy_tokenizer.decode(ids[:count], skip_special_tokens=True)

        text = decoded(len(ids) - stopped)
        *pieces, rest = text.split(self.separator)
        ends = accumulate(len(piece) + len(self.separator) for piece in pieces)
        # A token may hold the end of a step and the beginning of the next one.
        steps = [
            (piece, bisect_left(range(len(ids)), True, key=lambda t, end=end: decoded(t + 1).startswith(text[:end])))
            for piece, end in zip(pieces, ends, strict=True)
        ]
        return [(piece, min(end, len(ids) - 1)) for piece, end in [*steps, (rest, len(ids) - 1)] if piece.strip()]

    def _encode(self, prompt: str, steps: Sequence[str]) -> tuple[list[int], list[int]] | None:
        """Return token ids, and the places of the ends of the steps; None if the steps alone are too long."""

        foreign = self.foreign
        pieces = [[*foreign.encode(foreign.divide(step)), *foreign.encode(self.separator)] for step in steps]
        own = [token for piece in pieces for token in piece]
        bos = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        before = without_second_bos([*bos, *foreign.encode(prompt)], self.tokenizer.bos_token_id)
        excess = 0 if self.max_length is None else max(0, len(before) + len(own) - self.max_length)
        if excess > len(before) - len(bos):
            return None
        before = [*bos, *before[len(bos) + excess :]]
        return [*before, *own], [len(before) + end - 1 for end in accumulate(map(len, pieces))]

    def _text(self, prompt: Prompt, variables: dict[str, Any]) -> str:
        if isinstance(prompt, str):
            return prompt
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the prompts are conversations and the tokenizer of the {KIND} {self.__name__!r} has no chat"
                " template; save the one that it was trained with next to it"
            )
        opens = {"continue_final_message" if prompt[-1]["role"] == "assistant" else "add_generation_prompt": True}
        return self.tokenizer.apply_chat_template(without_nulls(prompt), tokenize=False, **{**opens, **variables})

    @torch.no_grad()
    def _probabilities(self, rows: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Return the probabilities at the places of each row, computed in batches of similar length."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row][0]))
        found: list[list[float]] = [[]] * len(rows)
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            ids = [torch.tensor(rows[row][0], dtype=torch.int64, device=self.model.device) for row in batch]
            mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
            logits = self.model(input_ids=pad_sequence(ids, batch_first=True), attention_mask=mask).logits.float()
            for number, row in enumerate(batch):
                at = logits[number, rows[row][1]]
                found[row] = (at[:, 0].sigmoid() if at.shape[1] == 1 else at.softmax(1)[:, -1]).tolist()
        return found

    def content(self) -> str:
        reads = [self.tokenizer(list(SAMPLE_TEXTS))["input_ids"], self.tokenizer.chat_template, self.separator]
        return f"{scorer_fingerprint(self.model)}, tokenizer sha256 {digest(reads)[:16]}, max_length {self.max_length}"


def _load(source: str) -> PreTrainedModel:
    pinned = {"revision": None, "trust_remote_code": False}
    kinds = read_config(KIND, source, **pinned).architectures or ["a model without a class"]
    expected = "expected a token-classification model, as TRL's PRMTrainer saves it"
    if not all(kind.endswith("ForTokenClassification") for kind in kinds):
        raise ValueError(f"{KIND} {source} is {', '.join(kinds)}; {expected}")
    model, loading = load_weights(AutoModelForTokenClassification, KIND, source, **pinned)
    if loading["missing_keys"]:
        missing = ", ".join(sorted(map(str, loading["missing_keys"])))
        raise ValueError(f"{KIND} {source}: its checkpoint lacks {missing}; {expected}, with its trained head")
    return model.requires_grad_(False).eval()


def _rewards(probabilities: Sequence[float], ends: Sequence[int], turns: Sequence[int]) -> PerToken:
    sampled = [token for token, turn in enumerate(turns) if turn >= 0]
    rewards, previous = dict.fromkeys(sampled, 0.0), -1
    for probability, end in zip(probabilities, ends, strict=True):
        own = [token for token in sampled if previous < token <= end or token == end]
        if own:
            rewards[own[-1]] += probability
        previous = end
    return PerToken(list(rewards.values()))
