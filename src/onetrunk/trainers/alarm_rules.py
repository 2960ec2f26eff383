"""What each alarm looks at, and its words: what was seen, what usually causes it, what to change.

Knows figures of a rollout and limits; no trainer and no state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# With the sampler's own probabilities, the sum of k1 over a rollout's completions falls below -x with probability
# exp(-x) at most (Markov's inequality, for the mean of exp(-k1) is 1): 2e-9 here.
CHANCE_NATS = 20.0
# Of so few completions that stop, too few more or less would be an alarm.
LEAST_STOPPED = 0.3

OF_FIRST = {"length_collapse": "completion/length", "length_explosion": "completion/stopped_fraction"}


@dataclass(frozen=True)
class Rule:
    """One alarm.

    Args:
        figure: name of the figure that is watched.
        is_upper: True where the limit is the largest figure that is right, False where it is the smallest.
        seen: what the figure is, for a sentence.
        cause: what usually lies behind it.
        change: what to do.
    """

    figure: str
    is_upper: bool
    seen: str
    cause: str
    change: str


RULES = {
    "kl": Rule(
        "kl/ref",
        True,
        "the KL to the reference, nats per completion,",
        "a reward that pays for what the reference never says, too small a beta, or too large a learning rate",
        "raise beta or set kl_target, lower learning_rate, and read completions",
    ),
    "negative_kl": Rule(
        "kl/ref",
        False,
        "the KL to the reference, nats per completion, which can't be negative,",
        "a sampler that draws from other probabilities than the trainer scores: another temperature, truncated"
        " sampling, stale or rounded weights, an override that scores otherwise",
        "look at sampling/logprob_gap_mean and at the rollout backend",
    ),
    "logprob_gap": Rule(
        "sampling/logprob_gap_mean",
        True,
        "the difference between the sampler's logprobs and the trainer's, nats per token,",
        "a sampler that has other weights, another adapter, temperature or precision than the trainer, or a"
        " logits_processor",
        "check that the rollout backend takes over the policy in sync and returns logprobs after temperature",
    ),
    "length_collapse": Rule(
        "completion/length",
        False,
        "the mean completion length, tokens,",
        "a reward or a penalty that is best served by saying nothing",
        "lower length_penalty, score short completions for what they lack, or raise beta",
    ),
    "length_explosion": Rule(
        "completion/stopped_fraction",
        False,
        "the share of completions that end by themselves",
        "a reward that grows with length, or completions that are cut and scored as if they had ended",
        "set missing_eos_penalty or length_penalty, or raise max_completion_length",
    ),
    "entropy": Rule(
        "policy/entropy",
        False,
        "the policy's entropy, nats per token,",
        "a policy that says one thing to everything, after too many steps on too few prompts or one reward that pays"
        " for a phrase",
        "set entropy_coef or raise beta, lower learning_rate or num_ppo_epochs, and use more prompts",
    ),
    "repeated_ngrams": Rule(
        "completion/repeated_ngrams",
        True,
        "the share of 4-grams that occurred before in the same completion",
        "a reward that does not mind repetition, or a policy that has left the reference's language",
        "score repetition in the reward, raise beta, or set missing_eos_penalty",
    ),
    "clip_fraction": Rule(
        "policy/clip_fraction",
        True,
        "the share of tokens that the loss clips",
        "steps too large or too many for one rollout",
        "lower learning_rate or num_ppo_epochs, set target_kl, or raise rollout_batch_size",
    ),
    "skipped_steps": Rule(
        "policy/skipped_fraction",
        True,
        "the share of steps that left the weights alone",
        "a target_kl that the first steps exceed, gradients that are not finite, or completions that are all masked",
        "lower learning_rate, raise target_kl, and look for infinite scores",
    ),
    "explained_variance": Rule(
        "value/explained_variance",
        False,
        "the explained variance of the value head",
        "values that are worse than a constant: too large a value learning rate, or scores whose scale jumps",
        "lower value_learning_rate, set normalize_scores or value_pretraining_rollouts, or try value_head adapter",
    ),
}


@dataclass(frozen=True)
class Finding:
    """A figure beyond its bound."""

    seen: float
    bound: float


def find(
    name: str, limit: float, figures: Mapping[str, float], first: Mapping[str, float], num_rows: int
) -> Finding | None:
    """Return what is wrong with a rollout by one rule; None where nothing is, or where nothing can be said.

    Args:
        name: of the alarm.
        limit: its setting.
        figures: of the rollout.
        first: means of the first rollouts; empty until they are over.
        num_rows: completions of a rollout.
    """
    rule = RULES[name]
    bound = limit
    if name == "negative_kl":
        bound = -max(limit, CHANCE_NATS / num_rows)
    elif name in OF_FIRST:
        if rule.figure not in first or (name == "length_explosion" and first[rule.figure] < LEAST_STOPPED):
            return None
        bound = limit * first[rule.figure]
    seen = figures.get(rule.figure)
    if seen is None or not (seen > bound if rule.is_upper else seen < bound):
        return None
    return Finding(seen, bound)
