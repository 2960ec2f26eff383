"""The decode loop against transformers' `generate`, against a full forward, and against itself in other batches."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from onetrunk.rollouts import LocalBackend, SamplingParams
from onetrunk.utils.versions import checkpointing_enabler
from tests.rollouts.small import (
    KEYS,
    MANY_KEYS,
    PROMPTS,
    assert_same,
    generate,
    logprobs_of,
    mixed_params,
    shapes_of,
    tiny,
)

ATTENTION_FAMILIES = ["llama", "gemma3", "phi3", "gpt2"]


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


@pytest.mark.parametrize("family", [*ATTENTION_FAMILIES, "hybrid"])
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
    assert_same(generate(model, params, max_rows=2), together)
    assert list(together.prompt_ids) == PROMPTS


def test_rows_that_finished_are_not_carried():
    model = tiny()
    shapes = shapes_of(model)
    lengths = [len(ids) for ids in generate(model, mixed_params()).completion_ids]
    assert [rows for rows, _, _ in shapes] == [sum(length > t for length in lengths) for t in range(max(lengths))]
    assert shapes[0][0] == len(PROMPTS) > shapes[-1][0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt2"])
def test_sampler_logprobs_equal_a_rescore_of_the_unpadded_row(family):
    model, temperature = tiny(family), 0.7
    rollout = generate(model, mixed_params(temperature=temperature))
    for expected, logprobs in zip(logprobs_of(model, rollout, temperature), rollout.sampler_logprobs, strict=True):
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
    with pytest.raises(RuntimeError):
        generate(model, SamplingParams(max_completion_length=2))
    assert model.training and torch.is_grad_enabled()


def test_the_adapter_of_a_peft_model_is_the_one_that_samples():
    params = mixed_params(temperature=0)
    base = generate(tiny(), params)
    model = get_peft_model(tiny(), LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))
    assert_same(generate(model, params), base)  # a fresh adapter adds zero
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    adapted = generate(model, params)
    assert adapted.completion_ids != base.completion_ids
    assert adapted.completion_ids == huggingface_greedy(model, params)
    with model.disable_adapter():
        assert_same(generate(model, params), base)


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
