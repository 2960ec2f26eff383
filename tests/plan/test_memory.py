"""Memory against hand-worked numbers, and against published measurements that the constants were not fitted on."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.costs import ModelShape
from onetrunk.plan.hardware import GIB, load_catalog
from onetrunk.plan.job import INT8_BYTES, NF4_BYTES, base_weights_bytes, read_model
from onetrunk.plan.memory import (
    FITTED,
    Constants,
    Training,
    engine_parts,
    sample_memory,
    train_memories,
    train_memory,
    training_parts,
)
from onetrunk.plan.timing import COLOCATED, PIPELINED, SERVER, SampleLayout, TrainLayout
from scripts.plan.errors import WITHIN, cross_checked
from scripts.plan.measurements import fit_constants, halves, measured_rows, peak_bytes, peak_ratios, relative_errors
from tests.plan.support import LENGTHS, SMALL, device, job, job_7b


def test_the_parts_of_a_lora_training_by_hand():
    # 1,000 tokens; the four layers keep their inputs of 64 bfloat16 numbers.
    parts = training_parts(Training(SMALL, 1000, 2.0, trained=5000), Constants(1.0, 10.0, 3.0, 0.0, 0.0))
    assert parts == {
        "weights": SMALL.parameters * 2,
        "adapters": 4 * 5000,
        "gradients": 4 * 5000,
        "optimizer": 8 * 5000,
        "activations": 1000 * 64 * 4 * 2 + 10 * 1000 * 64 + 3 * 1000 * 128,
        "logits": 12 * 1000 * 1000,
        "transient": 0.0,
        "runtime": GIB,
    }


def test_a_quantised_base_keeps_its_embedding_and_head_in_16_bits():
    # Qwen3 of 4 layers of 512, as bitsandbytes loads it.
    shape = ModelShape(32_000, 512, 4, 1536, 8, 4, 64, is_tied=False)
    outer, layers = 2 * 32_000 * 512, 4 * shape.layer_parameters
    for per_weight in (NF4_BYTES, INT8_BYTES):
        held = training_parts(Training(shape, 1000, per_weight, trained=5000))["weights"]
        assert held == pytest.approx(2 * outer + per_weight * layers)
    assert training_parts(Training(shape, 1000, 2.0, trained=5000))["weights"] == 2 * shape.parameters


def test_a_sharded_base_and_a_divided_one_hold_their_share():
    whole = training_parts(Training(SMALL, 1000, 2.0, trained=5000))
    sharded = training_parts(Training(SMALL, 1000, 2.0, trained=5000, shards=4))
    divided = training_parts(Training(SMALL, 1000, 2.0, trained=5000, tensor=4))
    assert sharded["weights"] == divided["weights"] == whole["weights"] / 4
    # Adapters are replicated in both; only a divided matrix divides the activations.
    assert sharded["optimizer"] == divided["optimizer"] == whole["optimizer"]
    assert sharded["activations"] == whole["activations"] == pytest.approx(4 * divided["activations"])


def test_offloading_leaves_the_working_set_alone():
    training = Training(SMALL, 1000, 2.0, trained=5000)
    kept, offloaded = training_parts(training), training_parts(replace(training, is_offloaded=True))
    assert kept["activations"] - offloaded["activations"] == pytest.approx(1000 * 64 * 4 * 2)


def test_the_memory_of_two_training_stages_by_hand():
    # 16 rows of 350 tokens at most in 2 minibatches, forwards of 2 rows: 4 packs. One layer on the first stage.
    one = job(adapted_layers=2, is_padding_free=True)
    train = TrainLayout(device(), 1, rows=2, stages=2, split=(1, 3), is_checkpointed=True)
    tokens = 2 * LENGTHS.width
    first, last = train_memories(one, train)
    alone = train_memory(one, replace(train, stages=1, split=()))
    outer = SMALL.head_parameters
    for memory, layers in ((first, 1), (last, 3)):
        # The embedding is on the first stage, the tied head on the last, both as large as the other.
        assert memory["update"]["weights"] == 2 * (layers * SMALL.layer_parameters + outer)
        for part in ("adapters", "gradients", "optimizer", "runtime"):
            assert memory["update"][part] == alone["update"][part]
        # What the frozen layers compute is not kept.
        assert "states" not in memory["update"] and "states" in alone["update"]
    state = tokens * 64 * 2
    # Checkpointed, the two adapted layers on the last stage keep their inputs, of the one pack in flight.
    working = alone["update"]["activations"] - 2 * state
    assert first["update"]["activations"] == pytest.approx(working)
    assert last["update"]["activations"] == pytest.approx(working + 2 * state)
    # The boundary is below the adapters: one state per pack, no gradients. Scoring has all 8 packs in work.
    assert (first["score"]["buffers"], last["score"]["buffers"]) == (8 * state, 8 * state)
    assert (first["update"]["buffers"], last["update"]["buffers"]) == (2 * state, 4 * state)
    # The stage that needs most counts.
    assert train_memory(one, train)["update"] == last["update"]
    # While it samples, a stage has the cache of its layers, next to its weights.
    sample = SampleLayout(device(), PIPELINED, 1, 1, 2, 16, (1, 3))
    parts = sample_memory(one, train, sample, last["score"])["generate"]
    assert parts["weights"] == last["update"]["weights"] and "buffers" not in parts
    assert parts["kv_cache"] == 2 * 2 * 16 * LENGTHS.width * 3 * 2 * 16


def test_the_first_training_stage_keeps_the_activations_of_as_many_packs_as_there_are_stages():
    one = job(is_padding_free=True)
    train = TrainLayout(device(), 1, rows=1, stages=4, is_checkpointed=True)
    stages = [memory["update"]["activations"] for memory in train_memories(one, train)]
    state = LENGTHS.width * 64 * 2
    # One layer each; 4, 3, 2 and 1 packs in flight.
    assert [a - b for a, b in itertools.pairwise(stages)] == pytest.approx([state] * 3)
    # Two packs in a minibatch: every stage runs both forwards first.
    few = [memory["update"]["activations"] for memory in train_memories(one, replace(train, rows=4))]
    assert few[0] == few[1] == few[2] == few[3]


@settings(deadline=None, max_examples=20)
@given(
    stages=st.integers(2, 28),
    adapted=st.integers(1, 28),
    rows=st.sampled_from([1, 4, 16]),
    is_checkpointed=st.booleans(),
)
def test_a_training_stage_never_holds_more_weights_than_one_process_and_never_less_state(
    stages, adapted, rows, is_checkpointed
):
    one = job_7b(adapted_layers=adapted)
    train = TrainLayout(device(), 1, rows=rows, is_checkpointed=is_checkpointed)
    alone = train_memory(one, train)
    memories = train_memories(one, replace(train, stages=stages))
    held = [memory["update"]["weights"] for memory in memories]
    # Not tied: all stages together hold each weight once.
    assert sum(held) == one.shape.parameters * 2 and max(held) < alone["update"]["weights"]
    for phase in ("score", "update"):
        assert all(memory[phase]["optimizer"] == alone[phase]["optimizer"] for memory in memories)
    # One more stage never makes the largest share of the weights larger.
    if stages < 28:
        more = train_memories(one, replace(train, stages=stages + 1))
        assert max(memory["score"]["weights"] for memory in more) <= max(held)


def test_a_server_divides_weights_and_cache():
    one = job(lengths=replace(LENGTHS, prompt=60, completion=40))
    whole, halves_ = (engine_parts(one, SampleLayout(device(), SERVER, 1, tensor, rows=10)) for tensor in (1, 2))
    # Keys and values of 4 layers, 2 heads of 16, of 10 rows of 100 tokens, in bfloat16.
    assert whole["kv_cache"] == 2 * 2 * 10 * 100 * 4 * 2 * 16 and whole["weights"] == 2 * SMALL.parameters
    assert halves_["kv_cache"] == whole["kv_cache"] / 2 and halves_["weights"] == whole["weights"] / 2


def test_a_server_holds_the_checkpoint_and_a_colocated_engine_the_base_of_the_trainer():
    def engine(one, kind, where=None):
        return engine_parts(one, SampleLayout(where or device(), kind, 1, rows=10))

    # `onetrunk serve` does not quantise, and serves a float32 checkpoint in float32 on a CPU alone.
    quantised, served = job(base_bytes=NF4_BYTES), engine(job(), SERVER)
    assert engine(quantised, SERVER) == served and served["weights"] == 2 * SMALL.parameters
    assert engine(quantised, COLOCATED)["weights"] == base_weights_bytes(SMALL, NF4_BYTES)
    full_job = job(model=replace(job().model, itemsize=4.0))
    full = engine(full_job, SERVER, load_catalog().devices["CPU"])
    assert engine(full_job, SERVER) == served
    for part in ("weights", "kv_cache", "adapters"):
        assert full[part] == 2 * served[part]
    # A plan with another precision of the base than the recipe.
    train, sample = TrainLayout(device(), 1, base_bytes=2.0), SampleLayout(device(), COLOCATED, 1, rows=10)
    held = sample_memory(quantised, train, sample, train_memory(quantised, train)["score"])["generate"]["weights"]
    assert held == 2 * SMALL.parameters


def test_measured_peaks_of_the_other_half_are_met_within_10_percent_on_at_least_85_percent():
    first, second = halves(measured_rows())
    assert len(first) + len(second) == len(measured_rows()) == 53 and abs(len(first) - len(second)) <= 1
    # Not even the same training on another GPU is in both.
    assert not {row.key for row in first} & {row.key for row in second}
    for fitted, tested in ((first, second), (second, first)):
        errors = relative_errors(tested, fit_constants(fitted))
        assert sum(abs(error) <= WITHIN for error in errors) >= 0.95 * len(tested)
    # The two that miss were measured months later than all others, with another version of that software.
    missed = [row.measured_on for row, error in cross_checked() if abs(error) > WITHIN]
    later = [row.measured_on for row in measured_rows() if row.measured_on > "2026-03"]
    assert missed == later == ["2026-06-24"] * 2


def test_the_constants_in_use_are_those_of_all_measured_rows():
    fitted = fit_constants(measured_rows())
    for name in ("per_hidden", "per_width", "per_copy", "gathered"):
        assert getattr(FITTED, name) == pytest.approx(getattr(fitted, name), rel=0.02)


def test_a_training_that_ran_out_of_memory_is_predicted_to():
    shape = read_model("Qwen/Qwen3-0.6B").shape
    training = Training(shape, 65536, 4.0, shape.parameters)
    assert peak_bytes(training, is_full=True, keeps_logits=True) / GIB > 79.2
    assert peak_bytes(training, is_full=True) / GIB < 79.2


def test_most_peaks_of_a_program_that_nothing_was_fitted_to_are_met_within_10_percent():
    ratios = peak_ratios()
    assert sum(abs(ratio - 1) <= WITHIN for ratio in ratios["Qwen finetune.py"]) >= 0.7 * 18
    # Its logits are kept in half precision, where the formula counts float32; none needs more than predicted.
    assert all(1 - WITHIN <= ratio < 1.5 for ratio in ratios["fms-hf-tuning"])
