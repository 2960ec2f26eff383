"""Sample texts from a policy, and keep them in a ledger.

All randomness of a completion derives from (seed, prompt content, index), so it does not depend on the order of the
prompts or on the shard. It depends on the batch only by float rounding (rollouts/local.py); therefore a chunk that is
only partly in the ledger is sampled again in its old shape. On a server rounding also depends on the other calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from datasets import Dataset
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import PreTrainedTokenizerBase

from onetrunk.data.prompts import decode_completion, prepare_prompts
from onetrunk.feedback.ledger import Ledger
from onetrunk.feedback.shards import prompt_words
from onetrunk.judges.judge import prompt_key
from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from onetrunk.types import Prompt, SampledText
from onetrunk.utils.files import digest


@dataclass(frozen=True)
class PromptItem:
    """A prompt with its content hash and the token ids that the policy reads."""

    prompt: Prompt
    key: str
    token_ids: list[int]


@dataclass
class TextSampler:
    """Samples texts, and reads those that the ledger holds instead of sampling them again.

    Args:
        backend: already synced to the policy.
        tokenizer: of the policy.
        params: of every completion.
        identity: fingerprints of the policy, as JSON values; part of every key.
        seed: of all draws, below 2**32.
        ledger: keeps the completions; None: only `draw` can be called.
        max_positions: most tokens of a prompt with its completion; None: no limit is known.
        num_sampled: completions sampled so far, without those from the ledger.
    """

    backend: RolloutBackend
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    identity: dict[str, Any]
    seed: int
    ledger: Ledger | None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_positions: int | None = None
    num_sampled: int = 0

    def sample(self, items: Sequence[PromptItem], num_completions: int) -> list[list[SampledText]]:
        """Return `num_completions` texts for each prompt of a chunk.

        If one of them is missing in the ledger, all are sampled: only the same batch gives the same bits.
        """
        texts = self.kept(items, num_completions)
        if texts is None:
            # Equal prompts are sampled once: they would draw the same random numbers.
            unique = list({item.key: item for item in items}.values())
            self.keep(unique, self.draw(unique, num_completions))
            texts = self.kept(items, num_completions)
        return texts

    def kept(self, items: Sequence[PromptItem], num_completions: int) -> list[list[SampledText]] | None:
        """Return the texts of a chunk from the ledger; None if one of them is missing."""
        rows = [[self.ledger.get(self.key(item, i)) for i in range(num_completions)] for item in items]
        if any(None in row for row in rows):
            return None
        return [[SampledText(**value) for value in row] for row in rows]

    def draw(self, items: Sequence[PromptItem], num_completions: int) -> list[list[SampledText]]:
        """Sample `num_completions` texts for each of some different prompts, without the ledger."""
        rows = [(item, index) for item in items for index in range(num_completions)]
        keys = [(self.seed, *prompt_words(item.key), index) for item, index in rows]
        rollout = self.backend.generate([item.token_ids for item, _ in rows], self.params, keys)
        self.num_sampled += len(rows)
        # As text also after a conversation: a judge reads texts.
        texts = [
            SampledText(decode_completion(self.tokenizer, ids, stopped, ""), bool(stopped))
            for ids, stopped in zip(rollout.completion_ids, rollout.stopped, strict=True)
        ]
        return [texts[start : start + num_completions] for start in range(0, len(texts), num_completions)]

    def keep(self, items: Sequence[PromptItem], completions: Sequence[Sequence[SampledText]]) -> None:
        """Put sampled texts into the ledger."""
        with self.ledger.writing():
            for item, texts in zip(items, completions, strict=True):
                for index, sampled in enumerate(texts):
                    self.ledger.put(self.key(item, index), asdict(sampled))

    def key(self, item: PromptItem, index: int) -> str:
        """Return the ledger key of a completion of this prompt."""
        about = {"model": self.identity, "sampling": self.params.identity(), "seed": self.seed, "index": index}
        return digest({"completion": about, "prompt": item.key, "token_ids": item.token_ids})

    def items(self, prompts: Sequence[Prompt], max_prompt_length: int | None = None) -> list[PromptItem]:
        """Tokenize prompts (all texts, or all conversations) that are made during the run, such as critiques.

        A prompt of more than `max_prompt_length` tokens keeps its end.
        """
        rows = encoded(
            Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            self.tokenizer,
            max_prompt_length=max_prompt_length,
            overlong_prompts="truncate",
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return [
            PromptItem(prompt, prompt_key(prompt), ids)
            for prompt, ids in zip(prompts, rows["prompt_ids"], strict=True)
        ]


def encoded(rows: Dataset, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Dataset:
    """Return `prepare_prompts` of rows without its progress bar, which would appear once per chunk."""
    was_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return prepare_prompts(rows, tokenizer, **settings)
    finally:
        if not was_disabled:
            enable_progress_bars()
