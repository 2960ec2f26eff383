"""Sampling from a real tiny model: a completion depends on prompt, seed and number, and is sampled once."""

import json

import pytest

from onetrunk.feedback.sampling import PromptItem, Reviser, TextSampler
from onetrunk.judges.judge import Principle, prompt_key
from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import SampledText
from onetrunk.utils.ledger import Ledger
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

PROMPTS = ["the cat", "a dog runs", "the sun and the moon", "please", "old house"]
PRINCIPLES = [Principle("warm", 1.0), Principle("small", 3.0), Principle("please be good", 2.0)]


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        yield ledger


def sampler(ledger, seed=0, **settings):
    model = tiny_model("llama", max_position_embeddings=512)
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    params = SamplingParams(max_completion_length=6, stop_token_ids=(1,))
    return TextSampler(LocalBackend(model), tokenizer, params, {"model": "tiny"}, seed, ledger, **settings)


def test_completions_do_not_depend_on_order_or_on_the_prompts_beside(tmp_path, ledger):
    one = sampler(ledger)
    together = one.sample(one.items(PROMPTS), 3)
    with Ledger(tmp_path / "other.db") as other:
        alone = sampler(other)
        assert [alone.sample([item], 3)[0] for item in reversed(alone.items(PROMPTS))] == together[::-1]
    assert len({text for row in together for text in row}) > 10


def test_what_the_ledger_holds_is_not_sampled_again(ledger):
    first, again = sampler(ledger), sampler(ledger)
    items = first.items(PROMPTS)
    texts = first.sample(items, 2)
    assert again.sample(items, 2) == texts
    assert (first.num_sampled, again.num_sampled) == (10, 0)
    # A further completion of each, and then another seed
    assert [row[:2] for row in again.sample(items, 3)] == texts
    assert sampler(ledger, seed=1).sample(items, 2) != texts


@pytest.mark.parametrize("conversational", [False, True])
def test_revisions_keep_their_trail_and_are_written_once(ledger, conversational):
    policy = sampler(ledger)
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS] if conversational else PROMPTS
    reviser = Reviser(policy, policy, PRINCIPLES, num_revisions=2, max_prompt_length=200)
    given = policy.items(prompts)
    completions = policy.sample(given, 2)
    rows = reviser.rows(given, completions)
    assert rows and len(rows) + reviser.counts["blank_completions"] == 10
    for row in rows:
        trail = json.loads(row["trail"])
        assert [set(step) for step in trail] == [{"principle", "critique", "revision"}] * 2
        assert len({step["principle"] for step in trail}) == 2
        text = row["completion"][0]["content"] if conversational else row["completion"]
        assert text == trail[-1]["revision"] and row["prompt"] in prompts
    before = policy.num_sampled
    assert reviser.rows(given, completions) == rows and policy.num_sampled == before


class HalfCutSampler(TextSampler):
    """Writes the same text to every prompt, cut off to every second one."""

    def sample(self, items, num_completions):
        return [[SampledText("the sun", bool(number % 2))] for number in range(len(items))]


def test_a_revision_that_was_cut_off_is_counted(ledger):
    policy = HalfCutSampler(**vars(sampler(ledger)))
    items, reviser = policy.items(PROMPTS[:4]), Reviser(policy, policy, PRINCIPLES)
    # That the original was cut off does not matter.
    assert len(reviser.rows(items, [[SampledText("the", False)]] * 4)) == 4
    assert reviser.counts == {"completions": 4, "cut_revisions": 2, "blank_completions": 0}


def test_principles_are_drawn_by_weight_and_each_once_while_there_are_any(ledger):
    policy = sampler(ledger)
    reviser = Reviser(policy, policy, PRINCIPLES, num_revisions=3)
    plans = [reviser.plan(PromptItem("x", prompt_key(str(i)), [5]), 0) for i in range(300)]
    assert all(sorted(plan) == [0, 1, 2] for plan in plans)
    first = [plan[0] for plan in plans]
    # Weights 1, 3, 2 of 6: 50, 150, 100 of 300; standard deviations 6, 9, 8
    assert abs(first.count(0) - 50) < 30 and abs(first.count(1) - 150) < 40
    assert len(Reviser(policy, policy, PRINCIPLES, num_revisions=5).plan(policy.items(PROMPTS)[0], 0)) == 5
