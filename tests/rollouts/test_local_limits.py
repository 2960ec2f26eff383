"""What the local backend accepts, refuses and reports: processors, bad logits, bad calls, sync, progress."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from onetrunk.rollouts import LocalBackend, SamplingParams
from tests.rollouts.small import KEYS, PROMPTS, assert_same, generate, mixed_params, tiny


class OnlyTokens(LogitsProcessor):
    """Rules out every token but `allowed`, and records the widths that it saw."""

    def __init__(self, allowed):
        self.allowed = torch.tensor(allowed, dtype=torch.int64)
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        return torch.full_like(scores, -torch.inf).index_copy(1, self.allowed, scores[:, self.allowed])


def test_a_logits_processor_rules_tokens_out_and_the_logprobs_say_so():
    model = tiny()
    processor = OnlyTokens([3, 17])
    params = SamplingParams(max_completion_length=6, temperature=0.5, pad_token_id=1)
    rollout = generate(model, params, logits_processor=LogitsProcessorList([processor]))
    assert set(sum(rollout.completion_ids, [])) == {3, 17}
    with torch.no_grad():
        pair = (model(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1, [3, 17]] / 0.5).log_softmax(-1)
    expected = pair[[3, 17].index(rollout.completion_ids[1][0])]
    torch.testing.assert_close(rollout.sampler_logprobs[1][0], expected, atol=5e-5, rtol=0)
    # The longest prompt comes first; the row beside it is padded on the left.
    assert processor.seen[2][1] == [1] * 10 + PROMPTS[3] + rollout.completion_ids[3][:2]


def test_a_processor_that_leaves_no_token_is_named():
    with pytest.raises(RuntimeError, match="logits_processor left no token to draw.* at row 1, token 0"):
        generate(tiny(), SamplingParams(4), logits_processor=LogitsProcessorList([OnlyTokens([])]))


def test_logits_that_are_not_finite_name_the_row():
    model = tiny()
    model.model.embed_tokens.weight.data[63] = float("inf")  # only prompt 4 holds token 63
    backend = LocalBackend(max_rows=1)
    backend.sync(model, 12)
    with pytest.raises(RuntimeError, match=r"not finite at row 4, token 0 \(policy version 12\)"):
        backend.generate(PROMPTS, SamplingParams(1), KEYS)


@pytest.mark.parametrize(
    ("prompts", "keys", "sentence"),
    [
        ([[1], []], [(0, 0, 0), (0, 0, 1)], "prompt 1 is empty"),
        ([[1], [2]], [(0, 0, 0)], "2 prompts came with 1 keys"),
        ([[1], [2]], [(0, 0, 0), (0, 0, 0)], "two rows have the same key"),
        ([[1] * 121], [(0, 0, 0)], "a prompt of 121 tokens and max_completion_length 8 exceed the model's 128"),
        ([[1]], [(0, 0, -1)], "non-negative"),
    ],
)
def test_a_call_that_cannot_be_served_is_refused(prompts, keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        LocalBackend(tiny()).generate(prompts, SamplingParams(max_completion_length=8), keys)


def test_a_backend_without_a_model_says_how_to_give_it_one():
    with pytest.raises(RuntimeError, match="sync"):
        LocalBackend().generate([[1]], SamplingParams(8), [(0, 0, 0)])
    with pytest.raises(ValueError, match="max_rows is 0"):
        LocalBackend(max_rows=0)


def test_sync_replaces_the_model_and_stamps_the_version():
    params = mixed_params()
    backend = LocalBackend(tiny("llama"))
    assert backend.generate(PROMPTS, params, KEYS).policy_version == 0
    backend.sync(tiny("qwen2"), 9)
    rollout = backend.generate(PROMPTS, params, KEYS)
    assert rollout.policy_version == 9
    assert_same(rollout, generate(tiny("qwen2"), params))


def test_a_model_that_keeps_no_cache_is_refused():
    model = tiny()
    forward = model.forward

    def forgetful(input_ids, past_key_values=None, use_cache=None, **kwargs):
        return forward(input_ids=input_ids, use_cache=False, **kwargs)

    model.forward = forgetful
    with pytest.raises(RuntimeError, match="left 0 of 20 tokens in the key-value cache"):
        generate(model, SamplingParams(4))


def test_no_prompts_give_an_empty_rollout():
    assert len(LocalBackend(tiny()).generate([], SamplingParams(8), [])) == 0
