"""Critique and revision: a policy criticises its own completion by one principle, and rewrites it.

After "Constitutional AI" (Bai et al. 2022, arXiv:2212.08073, section 3), with our own templates. The principle is
drawn by weight from a generator of (seed, prompt, completion).
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
from onetrunk.judges.judge import Principle
from onetrunk.types import Prompt, SampledText, as_completion
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
    """Revises completions `num_revisions` times, each time by another principle while there are any left.

    Args:
        policy: writes the revisions.
        critic: writes the critiques; may be the policy.
        principles: of the constitution.
        num_revisions: 1 or more.
        max_prompt_length: tokens of the prompts for policy and critic; a longer one keeps its end. None: no limit.
    """

    policy: TextSampler
    critic: TextSampler
    principles: Sequence[Principle]
    num_revisions: int = 1
    max_prompt_length: int | None = None

    def rows(
        self, items: Sequence[PromptItem], completions: Sequence[Sequence[SampledText]]
    ) -> list[dict[str, Any] | None]:
        """Return a row per completion, in order.

        Returns:
            Rows with prompt, completion (the last revision), original, and trail: JSON of a list of {principle,
            critique, revision}. Prompt and completion are texts, or messages in a conversation. None if the
            completion or its last revision is blank or holds a NUL character, which a training row may not.
        """
        originals = [
            (item, index, sampled.text)
            for item, row in zip(items, completions, strict=True)
            for index, sampled in enumerate(row)
        ]
        texts = [text for *_, text in originals]
        trails: list[list[dict[str, str]]] = [[] for _ in originals]
        plans = [self.plan(item, index) for item, index, _ in originals]
        for number in range(self.num_revisions):
            valid = [i for i, text in enumerate(texts) if text_fault(text) is None]
            steps = [(originals[i][0].prompt, texts[i], self.principles[plans[i][number]].text) for i in valid]
            for i, step in zip(valid, self._revised(steps), strict=True):
                texts[i] = step["revision"]
                trails[i].append(step)
        return [
            None
            if text_fault(text) is not None
            else {
                "prompt": item.prompt,
                "completion": as_completion(item.prompt, text),
                "original": original,
                "trail": json.dumps(trail, ensure_ascii=False),
            }
            for (item, _, original), text, trail in zip(originals, texts, trails, strict=True)
        ]

    def plan(self, item: PromptItem, index: int) -> list[int]:
        """Return the indices of the principles by which a completion is revised, one per revision."""
        generator = generator_of((self.policy.seed, *prompt_words(item.key), index, PRINCIPLE_STREAM))
        weights = np.array([principle.weight for principle in self.principles])
        repeats = self.num_revisions > len(weights)
        return generator.choice(len(weights), self.num_revisions, replace=repeats, p=weights / weights.sum()).tolist()

    def _revised(self, steps: Sequence[tuple[Prompt, str, str]]) -> list[dict[str, str]]:
        """Criticise and revise (prompt, completion, principle) each."""
        if not steps:
            return []
        prompts = [critique_prompt(*step) for step in steps]
        # A prompt may not hold NUL, which a critic can write; a critique means the same without it.
        critiques = [text.replace("\0", "") for text in self._write(self.critic, prompts)]
        revisions = self._write(self.policy, list(map(revision_prompt, prompts, critiques)))
        return [
            {"principle": principle, "critique": critique, "revision": revision}
            for (_, _, principle), critique, revision in zip(steps, critiques, revisions, strict=True)
        ]

    def _write(self, sampler: TextSampler, prompts: Sequence[Prompt]) -> list[str]:
        texts = sampler.sample(sampler.items(prompts, self.max_prompt_length), 1)
        return [sampled.text.strip() for (sampled,) in texts]


def critique_prompt(prompt: Prompt, completion: str, principle: str) -> Prompt:
    """Return the prompt for a critique, as text or conversation like `prompt`."""
    if isinstance(prompt, str):
        return CRITIQUE_TEXT.format(prompt=prompt, completion=completion, principle=principle)
    *turns, last = prompt
    if last["role"] == "assistant":
        # The completion continues a turn that the prompt has begun.
        reply = last["content"] + completion
    else:
        turns, reply = prompt, completion
    question = {"role": "user", "content": CRITIQUE_TURN.format(principle=principle)}
    return [*turns, {"role": "assistant", "content": reply}, question]


def revision_prompt(question: Prompt, critique: str) -> Prompt:
    """Return the prompt for a revision, after a critique that answered `question`."""
    if isinstance(question, str):
        return REVISION_TEXT.format(critique_prompt=question, critique=critique)
    return [*question, {"role": "assistant", "content": critique}, {"role": "user", "content": REVISION_TURN}]
