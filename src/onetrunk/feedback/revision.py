"""Critique and revision: a policy looks at its own completion by one principle, and writes it anew.

After "Constitutional AI" (Bai et al. 2022, arXiv:2212.08073, section 3), with templates of our own. The principle is
derived from (seed, prompt, completion), by weight. Knows texts and samplers; no judge and no file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onetrunk.data.rows import text_fault
from onetrunk.feedback.sampling import PromptItem, TextSampler
from onetrunk.feedback.shards import prompt_words
from onetrunk.judges.base import Principle
from onetrunk.types import Prompt, SampledText
from onetrunk.utils.randomness import PRINCIPLE_STREAM, generator_of

COLUMNS: dict[str, type] = {"prompt": list, "completion": list, "original": str, "trail": str}

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


@dataclass
class Reviser:
    """Revises completions, each `num_revisions` times, each time by another principle while there are any left.

    Args:
        policy: writes the revisions.
        critic: writes the critiques; may be the policy.
        principles: of the constitution.
        num_revisions: 1 or more.
        max_prompt_length: tokens of what policy and critic are given; a longer one keeps its end. None: no limit.
    """

    policy: TextSampler
    critic: TextSampler
    principles: Sequence[Principle]
    num_revisions: int = 1
    max_prompt_length: int | None = None

    def rows(
        self, items: Sequence[PromptItem], completions: Sequence[Sequence[SampledText]]
    ) -> list[dict[str, Any] | None]:
        """Return a row per completion, in order; None where `reward` would reject the completion or its last revision
        (blank, or with a NUL character).

        Args:
            items: prompts.
            completions: texts per prompt.

        Returns:
            Rows with prompt, completion (the last revision), original, and trail: JSON of a list of {principle,
            critique, revision}. Prompt and completion are texts, or messages after a conversation.
        """
        written = [
            (item, index, sampled.text)
            for item, row in zip(items, completions, strict=True)
            for index, sampled in enumerate(row)
        ]
        texts = [text for _, _, text in written]
        trails: list[list[dict[str, str]]] = [[] for _ in written]
        plans = [self.plan(item, index) for item, index, _ in written]
        for number in range(self.num_revisions):
            live = [i for i, text in enumerate(texts) if text_fault(text) is None]
            steps = [(written[i][0].prompt, texts[i], self.principles[plans[i][number]].text) for i in live]
            for i, step in zip(live, self._revised(steps), strict=True):
                texts[i] = step["revision"]
                trails[i].append(step)
        return [
            _row(item.prompt, original, text, trail) if text_fault(text) is None else None
            for (item, _, original), text, trail in zip(written, texts, trails, strict=True)
        ]

    def plan(self, item: PromptItem, index: int) -> list[int]:
        """Return the numbers of the principles by which a completion is revised, one per revision."""
        words = (self.policy.seed, *prompt_words(item.key), index, PRINCIPLE_STREAM)
        draws = generator_of(words)
        weights = np.array([principle.weight for principle in self.principles])
        again = self.num_revisions > len(weights)
        return draws.choice(len(weights), self.num_revisions, replace=again, p=weights / weights.sum()).tolist()

    def _revised(self, steps: Sequence[tuple[Prompt, str, str]]) -> list[dict[str, str]]:
        if not steps:
            return []
        asked = [critique_prompt(*step) for step in steps]
        critiques = self._write(self.critic, asked)
        revisions = self._write(
            self.policy, [revision_prompt(prompt, text) for prompt, text in zip(asked, critiques, strict=True)]
        )
        return [
            {"principle": principle, "critique": critique, "revision": revision}
            for (_, _, principle), critique, revision in zip(steps, critiques, revisions, strict=True)
        ]

    def _write(self, sampler: TextSampler, prompts: Sequence[Prompt]) -> list[str]:
        texts = sampler.sample(sampler.items(prompts, self.max_prompt_length), 1)
        return [sampled.text.strip() for (sampled,) in texts]


def critique_prompt(prompt: Prompt, completion: str, principle: str) -> Prompt:
    """Return what asks for a critique, in the form of the prompt: text or conversation."""
    if isinstance(prompt, str):
        return CRITIQUE_TEXT.format(prompt=prompt, completion=completion, principle=principle)
    asked = {"role": "user", "content": CRITIQUE_TURN.format(principle=principle)}
    return [*_answered(prompt, completion), asked]


def revision_prompt(critique: Prompt, text: str) -> Prompt:
    """Return what asks for a revision.

    Args:
        critique: of `critique_prompt`.
        text: the critique that came.
    """
    if isinstance(critique, str):
        return REVISION_TEXT.format(critique_prompt=critique, critique=text)
    return [*critique, {"role": "assistant", "content": text}, {"role": "user", "content": REVISION_TURN}]


def _answered(prompt: Prompt, completion: str) -> list[dict[str, str]]:
    """Return a conversation with its answer; one that the assistant has begun is continued."""
    if prompt[-1]["role"] == "assistant":
        return [*prompt[:-1], {"role": "assistant", "content": prompt[-1]["content"] + completion}]
    return [*prompt, {"role": "assistant", "content": completion}]


def _row(prompt: Prompt, original: str, revision: str, trail: list[dict[str, str]]) -> dict[str, Any]:
    completion = revision if isinstance(prompt, str) else [{"role": "assistant", "content": revision}]
    return {
        "prompt": prompt,
        "completion": completion,
        "original": original,
        "trail": json.dumps(trail, ensure_ascii=False),
    }
