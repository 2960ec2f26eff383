"""Sample texts from a policy, let a model criticise and revise them, and keep all texts in a ledger.

All randomness of a completion derives from (seed, prompt content, index), so it does not depend on the order of the
prompts or on the shard. It depends on the batch only by float rounding (rollouts/local.py); therefore a chunk that is
only partly in the ledger is sampled again in its old shape. On a server rounding also depends on the other calls.

Critique and revision follow "Constitutional AI" (Bai et al. 2022, arXiv:2212.08073, section 3), with own templates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import PreTrainedTokenizerBase

from onetrunk.data.prompts import decode_completion, prepare_prompts
from onetrunk.data.rows import text_fault
from onetrunk.feedback.shards import prompt_words
from onetrunk.judges.judge import Principle, prompt_key
from onetrunk.rollouts.base import RolloutBackend, SamplingParams
from onetrunk.types import Prompt, SampledText, as_completion, message_text
from onetrunk.utils.files import digest
from onetrunk.utils.ledger import Ledger
from onetrunk.utils.randomness import PRINCIPLE_STREAM, generator_of

CRITIQUE_TURN = (
    "Read your last reply once more, with one rule in mind.\nRule: {principle}\n"
    "Say in a few sentences where the reply falls short of this rule and what should be different. If nothing should,"
    " say so."
)
REVISION_TURN = (
    "Now write the reply again so that it follows the rule and keeps what was good about it. Give the new reply alone,"
    " with no remark before or after."
)
CRITIQUE_TEXT = (
    "## Request\n{prompt}\n\n## Reply\n{completion}\n\n## Rule\n{principle}\n\n"
    "## Where the reply falls short of the rule, and what should be different\n"
)
REVISION_TEXT = "{critique_prompt}{critique}\n\n## The reply, written again so that it follows the rule\n"


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
        identity: fingerprints of the policy, as JSON values; part of every key.
        seed: decides all draws; below 2**32.
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
        texts = self._kept(items, num_completions)
        if texts is None:
            # Equal prompts are sampled once: they would draw the same random numbers.
            unique = list({item.key: item for item in items}.values())
            drawn = self.draw(unique, num_completions)
            with self.ledger.writing():
                for item, completions in zip(unique, drawn, strict=True):
                    for index, sampled in enumerate(completions):
                        self.ledger.put(self.key(item, index), asdict(sampled))
            texts = self._kept(items, num_completions)
        return texts

    def _kept(self, items: Sequence[PromptItem], num_completions: int) -> list[list[SampledText]] | None:
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


@dataclass
class Reviser:
    """Revises completions `num_revisions` times, each time by another principle while there are any left.

    Which principle is drawn by weight from a generator of (seed, prompt, completion).

    Args:
        policy: writes the revisions.
        critic: writes the critiques; may be the policy.
        max_prompt_length: tokens of the prompts for policy and critic; a longer one keeps its end. None: no limit.
        counts: what happened to the completions, by names of `preferences.COUNTS`.
    """

    policy: TextSampler
    critic: TextSampler
    principles: Sequence[Principle]
    num_revisions: int = 1
    max_prompt_length: int | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def rows(self, items: Sequence[PromptItem], completions: Sequence[Sequence[SampledText]]) -> list[dict[str, Any]]:
        """Return the rows of a chunk, in order.

        Returns:
            Rows with prompt, completion (the last revision), original, and trail: JSON of a list of {principle,
            critique, revision}. Prompt and completion are texts, or messages in a conversation. A completion makes no
            row if it or its last revision is blank or holds a NUL character, which a training row may not.
        """
        originals = [
            (item, index, sampled.text)
            for item, row in zip(items, completions, strict=True)
            for index, sampled in enumerate(row)
        ]
        texts, is_whole = [text for *_, text in originals], [True] * len(originals)
        trails: list[list[dict[str, str]]] = [[] for _ in originals]
        plans = [self.plan(item, index) for item, index, _ in originals]
        for number in range(self.num_revisions):
            valid = [i for i, text in enumerate(texts) if text_fault(text) is None]
            steps = [(originals[i][0].prompt, texts[i], self.principles[plans[i][number]].text) for i in valid]
            for i, (step, stopped) in zip(valid, self._revised(steps), strict=True):
                texts[i], is_whole[i] = step["revision"], stopped
                trails[i].append(step)
        is_blank = [text_fault(text) is not None for text in texts]
        rows = [
            {
                "prompt": item.prompt,
                "completion": as_completion(item.prompt, texts[i]),
                "original": original,
                "trail": json.dumps(trails[i], ensure_ascii=False),
            }
            for i, (item, _, original) in enumerate(originals)
            if not is_blank[i]
        ]
        self.counts.update(completions=len(originals), blank_completions=sum(is_blank))
        self.counts.update(cut_revisions=is_whole.count(False))
        return rows

    def plan(self, item: PromptItem, index: int) -> list[int]:
        """Return the indices of the principles by which a completion is revised, one per revision."""
        generator = generator_of((self.policy.seed, *prompt_words(item.key), index, PRINCIPLE_STREAM))
        weights = np.array([principle.weight for principle in self.principles])
        repeats = self.num_revisions > len(weights)
        return generator.choice(len(weights), self.num_revisions, replace=repeats, p=weights / weights.sum()).tolist()

    def _revised(self, steps: Sequence[tuple[Prompt, str, str]]) -> list[tuple[dict[str, str], bool]]:
        """Criticise and revise (prompt, completion, principle) each; False: the revision was cut off."""
        if not steps:
            return []
        prompts = [critique_prompt(*step) for step in steps]
        # A prompt may not hold NUL, which a critic can write; a critique means the same without it.
        critiques = [text.replace("\0", "") for text, _ in self._write(self.critic, prompts)]
        revisions = self._write(self.policy, list(map(revision_prompt, prompts, critiques)))
        return [
            ({"principle": principle, "critique": critique, "revision": revision}, stopped)
            for (_, _, principle), critique, (revision, stopped) in zip(steps, critiques, revisions, strict=True)
        ]

    def _write(self, sampler: TextSampler, prompts: Sequence[Prompt]) -> list[tuple[str, bool]]:
        texts = sampler.sample(sampler.items(prompts, self.max_prompt_length), 1)
        return [(sampled.text.strip(), sampled.stopped) for (sampled,) in texts]


def critique_prompt(prompt: Prompt, completion: str, principle: str) -> Prompt:
    """Return the prompt for a critique, as text or conversation like `prompt`."""
    if isinstance(prompt, str):
        return CRITIQUE_TEXT.format(prompt=prompt, completion=completion, principle=principle)
    *turns, last = prompt
    if last["role"] == "assistant":
        # The completion continues a turn that the prompt has begun.
        reply = message_text(last) + completion
    else:
        turns, reply = prompt, completion
    question = {"role": "user", "content": CRITIQUE_TURN.format(principle=principle)}
    return [*turns, {"role": "assistant", "content": reply}, question]


def revision_prompt(question: Prompt, critique: str) -> Prompt:
    """Return the prompt for a revision, after a critique that answered `question`."""
    if isinstance(question, str):
        return REVISION_TEXT.format(critique_prompt=question, critique=critique)
    return [*question, {"role": "assistant", "content": critique}, {"role": "user", "content": REVISION_TURN}]
