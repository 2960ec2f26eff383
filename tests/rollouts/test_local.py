"""The decode loop against `generate` of transformers, a full forward, and itself in other batches; what it refuses."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessor, LogitsProcessorList

from onetrunk.rollouts import LocalBackend, SamplingParams, decoding
from onetrunk.utils.versions import checkpointing_enabler
from tests.rollouts import small
from tests.rollouts.small import KEYS, MANY_KEYS, PROMPTS, assert_same, generate, mixed_params, tiny


def huggingface_greedy(model, params, prompts=PROMPTS):
    """Completions of transformers' own `generate`, cut after the first stop token."""
    width = max(map(len, prompts))
    outputs = model.generate(
        input_ids=torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
        do_sample=False,
        max_new_tokens=params.max_completion_length,
        eos_token_id=list(params.stop_token_ids) or None,
        pad_token_id=0,
    )
    rows = outputs[:, width:].tolist()
    ends = [next((t for t, token in enumerate(row) if token in params.stop_token_ids), len(row)) for row in rows]
    return [row[: end + 1] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt2", "hybrid"])
def test_greedy_decoding_equals_generate(family):
    model = tiny(family)
    endless = SamplingParams(max_completion_length=16, temperature=0)
    unstopped = huggingface_greedy(model, endless)
    assert generate(model, endless).completion_ids == unstopped
    # Two tokens that came up become stop tokens, so that rows leave while others go on with sliced caches.
    stopping = SamplingParams(16, temperature=0, stop_token_ids=(unstopped[0][2], unstopped[3][5]))
    expected = huggingface_greedy(model, stopping)
    assert len(expected[0]) <= 3 and max(map(len, expected)) > 6
    rollout = generate(model, stopping)
    assert rollout.completion_ids == expected
    assert list(rollout.stopped) == [ids[-1] in stopping.stop_token_ids for ids in expected]


@pytest.mark.parametrize("family", ["llama", "gemma3", "hybrid"])
def test_a_completion_is_the_same_whatever_the_batch(family):
    model = tiny(family)
    params = mixed_params(temperature=1.3)
    together = generate(model, params)
    lengths = {len(ids) for ids in together.completion_ids}
    assert min(lengths) < max(lengths)  # rows leave at different steps, or this test shows little
    for row in range(len(PROMPTS)):
        assert_same(LocalBackend(model).generate([PROMPTS[row]], params, [KEYS[row]]), together, [row])
    order = [3, 0, 4, 2, 1]
    permuted = generate(model, params, [PROMPTS[row] for row in order], [KEYS[row] for row in order])
    assert_same(permuted, together, order)
    assert list(together.prompt_ids) == PROMPTS


def test_rows_that_finished_are_not_carried():
    model = tiny()
    shapes = small.shapes_of(model)
    lengths = [len(ids) for ids in generate(model, mixed_params()).completion_ids]
    assert [rows for rows, _, _ in shapes] == [sum(length > t for length in lengths) for t in range(max(lengths))]
    assert shapes[0][0] == len(PROMPTS) > shapes[-1][0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2"])
def test_sampler_logprobs_equal_a_rescore_of_the_unpadded_row(family):
    model, temperature = tiny(family), 0.7
    rollout = generate(model, mixed_params(temperature=temperature))
    rows = zip(small.logprobs_of(model, rollout, temperature), rollout.sampler_logprobs, strict=True)
    for expected, logprobs in rows:
        assert logprobs.dtype == torch.float32 and logprobs.device.type == "cpu"
        torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)  # cache against full forward, float32


def test_a_pad_token_that_is_the_stop_token_changes_nothing():
    model = tiny()
    prompts = [[9, 5, 9], [9], [4, 9, 8, 7, 6, 9]]  # the stop token also stands in the prompts
    rollouts = [
        generate(model, SamplingParams(16, stop_token_ids=(9, 10, 11, 12, 13), pad_token_id=pad), prompts)
        for pad in (0, 9)
    ]
    assert any(rollouts[0].stopped)
    assert_same(*rollouts)


def test_activation_checkpointing_a_config_without_cache_and_training_mode_change_nothing():
    model = tiny()
    params = mixed_params()
    plain = generate(model, params)
    checkpointing_enabler(model)()
    model.config.use_cache = False
    model.train()
    model.model.layers[1].eval()
    use_cache = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: use_cache.append(kwargs["use_cache"]), with_kwargs=True
    )
    assert_same(generate(model, params), plain)
    assert set(use_cache) == {True}
    assert model.training and model.lm_head.training and model.model.layers[0].mlp.training
    assert not model.model.layers[1].training and not model.model.layers[1].mlp.training
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert model.config.use_cache is False


def test_an_exception_restores_the_training_mode_and_gradients():
    model = tiny().train()
    model.lm_head.weight.data[:] = torch.nan
    with pytest.raises(RuntimeError, match="not finite"):
        generate(model, SamplingParams(max_completion_length=2))
    assert model.training and torch.is_grad_enabled()


def test_the_head_gets_one_whole_column_in_half_precision_on_a_cpu():
    """Of a strided column torch would copy the head's matrix once for each row: gigabytes and seconds."""
    model, columns = tiny("llama").bfloat16(), []
    model.lm_head.register_forward_pre_hook(lambda head, inputs: columns.append(inputs[0]))
    generate(get_peft_model(model, LoraConfig(r=2)), SamplingParams(3))
    assert len(columns) == 3 and all(column.shape[1] == 1 and column.is_contiguous() for column in columns)


@pytest.mark.parametrize(("family", "half_weights"), [("qwen2", True), ("gemma3", False)])
def test_logprobs_are_taken_in_float32_under_bfloat16_weights_and_autocast(family, half_weights):
    model = tiny(family).bfloat16() if half_weights else tiny(family)
    with torch.autocast("cpu", torch.bfloat16, enabled=not half_weights), torch.no_grad():
        alone = generate(model, SamplingParams(max_completion_length=1), PROMPTS[:1])
        logits = model(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1]
        assert {True, False} == set(generate(model, mixed_params(), PROMPTS * 3, MANY_KEYS).stopped)
    expected = logits.float().log_softmax(-1)[alone.completion_ids[0]]
    torch.testing.assert_close(alone.sampler_logprobs[0], expected, atol=1e-6, rtol=0)  # equal shapes, equal logits


MANY = PROMPTS * 3


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "hybrid"])
def test_a_row_that_joins_others_in_mid_batch_has_the_same_completion(family):
    model = tiny(family)
    params = mixed_params(temperature=1.3)
    together = generate(model, params, MANY, MANY_KEYS)
    shapes = small.shapes_of(model)
    joined = generate(model, params, MANY, MANY_KEYS, max_rows=4)
    assert_same(joined, together)
    # Some forwards over prompts come between forwards over single tokens of several rows.
    kinds = ["prompts" if columns > 1 else "tokens" for _, columns, _ in shapes]
    assert kinds.index("tokens") < len(kinds) - 1 - kinds[::-1].index("prompts")
    assert max(rows for rows, _, _ in shapes) == 4


def test_columns_that_are_padding_in_every_row_are_dropped():
    model, params = tiny(), mixed_params(temperature=1.3)
    shapes = small.shapes_of(model)
    generate(model, params, MANY, MANY_KEYS, max_rows=2)
    # Each step adds a column. A row that joins has at most as many before it as one that was there has tokens.
    bound = max(map(len, MANY)) + 2 * params.max_completion_length
    assert max(width for _, _, width in shapes) < bound < len(shapes)


def test_a_cache_whose_rows_cannot_be_put_together_decodes_one_batch_after_another(monkeypatch):
    model = tiny()
    params = mixed_params(temperature=1.3)
    together = generate(model, params, MANY, MANY_KEYS)
    monkeypatch.setattr(decoding, "JOINABLE_LAYERS", ())
    shapes = small.shapes_of(model)
    assert_same(generate(model, params, MANY, MANY_KEYS, max_rows=4), together)
    starts = [i for i, (_, columns, _) in enumerate(shapes) if columns > 1]
    assert all(shapes[i - 1][0] <= 4 for i in starts) and len(starts) >= 3


def test_a_prompt_that_comes_several_times_runs_once():
    model = tiny()
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    params, shapes = mixed_params(), small.shapes_of(model)
    rollout = generate(model, params, prompts, MANY_KEYS)
    assert shapes[0][:2] == (len(PROMPTS), max(map(len, PROMPTS)))
    assert shapes[1][0] > len(PROMPTS)  # One row for each completion from its second token on.
    for row, (prompt, key) in enumerate(zip(prompts, MANY_KEYS, strict=True)):
        assert_same(LocalBackend(model).generate([prompt], params, [key]), rollout, [row])


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
