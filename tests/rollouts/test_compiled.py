"""The compiled decode loop against the eager one. Its step is traced here, and compiled to machine code where slow."""

import logging

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from onetrunk.rollouts import LocalBackend, SamplingParams, compiled
from tests.models.branches import a_trunk
from tests.rollouts.small import MANY_KEYS, PROMPTS, assert_same, generate, mixed_params, tiny
from tests.tiny import VOCAB_SIZE

MANY = PROMPTS * 2
GRAPHS = torch._dynamo.utils.counters["stats"]


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Trace and guard as usual, and run the traced operations as they are: C++ takes a minute per step."""
    monkeypatch.setattr(compiled, "COMPILER", "eager")
    torch._dynamo.reset()


def both(model, params, **settings):
    """The rollouts of the eager and of the compiled loop, and the compiled backend."""
    backend = LocalBackend(model, compiles=True, **settings)
    rollout = backend.generate(MANY, params, MANY_KEYS[: len(MANY)])
    assert backend._obstacle is None
    return generate(model, params, MANY, MANY_KEYS, **settings), rollout, backend


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("max_rows", [None, 4])
def test_a_compiled_step_samples_what_an_eager_one_does(family, max_rows):
    eager, rollout, _ = both(tiny(family), mixed_params(temperature=1.3), max_rows=max_rows)
    assert_same(rollout, eager)


def test_greedy_decoding_and_a_last_stop_token_are_the_same():
    model = tiny()
    tokens = generate(model, SamplingParams(3, temperature=0)).completion_ids[0]
    eager, rollout, _ = both(model, SamplingParams(3, temperature=0, stop_token_ids=(tokens[2],)))
    assert_same(rollout, eager)
    assert rollout.stopped[0] and not all(rollout.stopped)


@pytest.mark.slow
def test_the_number_of_graphs_is_bounded_and_another_call_needs_none():
    model, params = tiny(), mixed_params(temperature=1.3)
    before = GRAPHS["unique_graphs"]
    _, _, backend = both(model, params)
    made = GRAPHS["unique_graphs"] - before
    # A forward and a draw for each of four sizes, at most; graph breaks would add to them.
    assert 2 <= made <= 2 * len(compiled.SHARES)
    for seed in (7, 8):
        keys = [(seed, 0, row) for row in range(len(MANY))]
        backend.generate(MANY, params, keys)
        backend.generate(MANY[:3], params, keys[:3])
    assert GRAPHS["unique_graphs"] - before <= 2 * len(compiled.SHARES)


@pytest.mark.slow
def test_an_update_of_the_policy_reaches_the_compiled_step():
    trunk = a_trunk(base=tiny(), adapter_layers="top-2")
    params = mixed_params(temperature=1.3)
    eager, rollout, backend = both(trunk, params)
    assert_same(rollout, eager)
    before = GRAPHS["unique_graphs"]
    for name, parameter in trunk.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    updated = backend.generate(MANY, params, MANY_KEYS[: len(MANY)])
    assert updated.completion_ids != rollout.completion_ids
    assert_same(updated, generate(trunk, params, MANY, MANY_KEYS))
    assert GRAPHS["unique_graphs"] == before


class Without(LogitsProcessor):
    """Rules out the tokens that a row has already, as no mask over the vocabulary alone could."""

    def __call__(self, input_ids, scores):
        ruled_out = scores.scatter(1, input_ids, -torch.inf)
        ruled_out[:, 1] = scores[:, 1]  # The padding, of which there may be any number.
        return ruled_out


@pytest.mark.slow
def test_a_logits_processor_sees_the_rows_that_decode_padded_on_the_left():
    processor = LogitsProcessorList([Without()])
    params = mixed_params(temperature=0.8, pad_token_id=1)
    eager, rollout, _ = both(tiny(), params, logits_processor=processor, max_rows=4)
    assert_same(rollout, eager)


@pytest.mark.slow
def test_logits_that_turn_bad_on_the_way_name_the_row_and_the_token():
    model = tiny()
    tokens = generate(model, SamplingParams(max_completion_length=4)).completion_ids[0]
    assert tokens[2] not in tokens[:2] + PROMPTS[0]
    backend = LocalBackend(model, compiles=True)
    backend.generate(PROMPTS[:1], SamplingParams(4), MANY_KEYS[:1])
    model.model.embed_tokens.weight.data[tokens[2]] = torch.nan
    with pytest.raises(RuntimeError, match="not finite at row 0, token 3"):
        LocalBackend(model).generate(PROMPTS[:1], SamplingParams(4), [(0, 0, 0)])
    with pytest.raises(RuntimeError, match="not finite at row 0, token 3"):
        backend.generate(PROMPTS[:1], SamplingParams(4), [(0, 0, 0)])


def test_a_model_that_cannot_be_compiled_decodes_eagerly_and_one_line_says_so(caplog):
    model, params = tiny("hybrid"), mixed_params()
    backend = LocalBackend(model, compiles=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(backend.generate(PROMPTS, params, MANY_KEYS[:5]), generate(model, params, PROMPTS, MANY_KEYS))
    assert sum("layers of other kinds" in record.getMessage() for record in caplog.records) == 1


def test_an_attention_without_masks_and_a_cache_that_changes_the_logits_are_obstacles(monkeypatch):
    model = tiny("mistral")
    model.config._attn_implementation = "flash_attention_2"
    assert "takes no mask per row" in compiled.CompiledDecoder(model, {}).obstacle()
    model = tiny()
    assert compiled.CompiledDecoder(model, {}).obstacle() is None
    monkeypatch.setattr(compiled, "next_logits", lambda call, state: torch.ones(2, VOCAB_SIZE))
    assert "changes its logits" in compiled.CompiledDecoder(model, {}).obstacle()


@pytest.mark.slow
def test_without_a_compiler_the_rows_decode_eagerly(monkeypatch, caplog):
    def no_compiler(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled, "COMPILER", no_compiler)
    model, params = tiny(), mixed_params()
    backend = LocalBackend(model, compiles=True)
    with caplog.at_level(logging.WARNING):
        rollout = backend.generate(PROMPTS, params, MANY_KEYS[:5])
    assert_same(rollout, generate(model, params, PROMPTS, MANY_KEYS))
    assert len([record for record in caplog.records if "decodes eagerly" in record.message]) == 1


@pytest.mark.sampled(0, slow=1)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_step_in_machine_code_samples_what_an_eager_one_does(family, monkeypatch):
    monkeypatch.setattr(compiled, "COMPILER", "inductor")
    eager, rollout, _ = both(tiny(family), mixed_params(temperature=1.3))
    assert_same(rollout, eager)
