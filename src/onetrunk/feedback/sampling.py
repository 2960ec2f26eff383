"""Texts out of a policy: prompts are rendered, completions sampled and decoded, and a ledger keeps what was sampled.

All randomness of a completion derives from (seed, prompt content, index). So it depends neither on the order of the
prompts nor on the shard; on the batch only by float rounding (rollouts/local.py), which is why a chunk that a kill has
left half kept is sampled once more in its old shape. Knows a tokenizer, a backend and a ledger; no judge.
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
from onetrunk.feedback.shards import prompt_key, prompt_words
from onetrunk.judges.base import digest
from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from onetrunk.types import Prompt, SampledText


@dataclass(frozen=True)
class PromptItem:
    """A prompt on its way: its content hash, and the token ids that the policy is given."""

    prompt: Prompt
    key: str
    token_ids: list[int]


@dataclass
class TextSampler:
    """Samples texts, and never twice what a ledger holds.

    Args:
        backend: in-process or not; synced to the policy by whoever made it.
        tokenizer: of the policy.
        params: of every completion.
        identity: what the policy is (fingerprints), as JSON values: a part of every key.
        seed: of all draws, below 2**32.
        ledger: keeps the completions; None: only `draw` can be called.
        num_sampled: completions that were sampled rather than found.
    """

    backend: RolloutBackend
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    identity: dict[str, Any]
    seed: int
    ledger: Ledger | None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    num_sampled: int = 0

    def sample(self, items: Sequence[PromptItem], num_completions: int) -> list[list[SampledText]]:
        """Return `num_completions` texts per prompt.

        Where one of the chunk is missing in the ledger, all are sampled: only the same batch gives the same bits.

        Args:
            items: a chunk.
            num_completions: per prompt.
        """
        found = self.kept(items, num_completions)
        if found is None:
            # One prompt in two places is one: it would draw the same random numbers twice.
            once = list({item.key: item for item in items}.values())
            self.keep(once, self.draw(once, num_completions))
            found = self.kept(items, num_completions)
        return found

    def key(self, item: PromptItem, index: int) -> str:
        """Return what a completion of this prompt is kept under."""
        about = {"model": self.identity, "sampling": asdict(self.params), "seed": self.seed, "index": index}
        return digest({"completion": about, "prompt": item.key, "token_ids": item.token_ids})

    def items(self, prompts: Sequence[Prompt], max_prompt_length: int | None = None) -> list[PromptItem]:
        """Return prompts made on the way (critiques, say) as items; a longer one keeps its end.

        Args:
            prompts: all texts, or all conversations.
            max_prompt_length: tokens; None: no limit.
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

    def draw(self, items: Sequence[PromptItem], num_completions: int) -> list[list[SampledText]]:
        """Return `num_completions` texts per prompt, sampled now, whatever the ledger holds.

        Args:
            items: different prompts.
            num_completions: per prompt.
        """
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

    def kept(self, items: Sequence[PromptItem], num_completions: int) -> list[list[SampledText]] | None:
        """Return the texts of a chunk from the ledger; None where one of them is missing."""
        values = [[self.ledger.get(self.key(item, i)) for i in range(num_completions)] for item in items]
        if any(value is None for row in values for value in row):
            return None
        return [
            [SampledText(value) if isinstance(value, str) else SampledText(**value) for value in row] for row in values
        ]

    def keep(self, items: Sequence[PromptItem], completions: Sequence[Sequence[SampledText]]) -> None:
        """Put sampled texts into the ledger: as a string, or as a dict where the completion was cut off."""
        for item, texts in zip(items, completions, strict=True):
            for index, sampled in enumerate(texts):
                self.ledger.put(self.key(item, index), sampled.text if sampled.stopped else asdict(sampled))


def encoded(rows: Dataset, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Dataset:
    """Return `prepare_prompts` of rows without its progress bar: here it would be one per chunk."""
    was_off = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        return prepare_prompts(rows, tokenizer, **settings)
    finally:
        if not was_off:
            enable_progress_bars()
