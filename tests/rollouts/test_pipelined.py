"""A decoder in stages, one in each process, samples what a whole one samples, with every row in any batch."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from onetrunk.costs import ModelShape, balanced_split, decode_split
from onetrunk.parallel.stages import LayerSplit, StageCache, verify_split
from onetrunk.plan.costs import kv_cache_bytes, sampling_bytes
from onetrunk.rollouts.pipelined import PipelinedBackend
from tests.places import CPU, GPU, found_by_ranks, on_gpus, places
from tests.rollouts import pipeline_worker
from tests.rollouts.pipeline_worker import CASES, ROWS, SEEDED
from tests.rollouts.small import KEYS, PROMPTS, tiny


def several(function):
    # One launch runs all cases of its number of processes.
    for mark in (pytest.mark.slow, pytest.mark.multi_process, pytest.mark.timeout(3600)):
        function = mark(function)
    return function


# Of four processes.
OF_FOUR = ("lora, seeded", "pipelines of two", "refilled")


@cache
def launched(world_size, place):
    folder = Path(mkdtemp())
    names = list(CASES) if world_size == 2 else list(OF_FOUR)
    return found_by_ranks(pipeline_worker.work, folder, world_size, world_size, names, place)


def found(world_size, case, place):
    return [rank[case] for rank in launched(world_size, place)]


NAMES = [(2, case) for case in CASES] + [(4, case) for case in OF_FOUR]
RUNS = [(*name, CPU) for name in NAMES] + [on_gpus(*name, GPU, processes=name[0]) for name in NAMES]


@several
@pytest.mark.parametrize(("world_size", "case", "place"), RUNS)
def test_rows_sampled_in_stages_are_those_of_one_process_and_each_runs_its_own_layers(world_size, case, place):
    stages = found(world_size, case, place)
    assert sum(stage["rows"] for stage in stages) == ROWS
    lengths = [length for stage in stages for length in stage["lengths"]]
    assert min(lengths) < max(lengths)  # Rows leave at different steps, or this test shows little.
    for stage in stages:
        assert stage["repeats"]
        # On some processors rounding in bfloat16 depends on the shape of a batch, and may draw another token.
        if "bfloat16" in case and not stage["same_tokens"]:
            continue
        assert stage["same_tokens"] and stage["same_stops"]
        # Float32 rounding between batches of other shapes; bfloat16 has 8 bits.
        assert stage["logprob_gap"] < (0.2 if "bfloat16" in case else 5e-5)
    size = 2 if case == "pipelines of two" else world_size
    for first in range(0, world_size, size):
        pipeline = stages[first : first + size]
        assert [number for stage in pipeline for number in stage["own_layers"]] == [0, 1, 2, 3]
        assert all(stage["layers_run"] == stage["own_layers"] for stage in pipeline)
        assert len({stage["turns"] for stage in pipeline}) == 1


@several
@pytest.mark.parametrize("place", places(2))
def test_progress_counts_the_rows_of_all_stages(place):
    first, second = found(2, "refilled", place)
    assert first["progress"] == [[ROWS, ROWS, sum(first["lengths"] + second["lengths"])]]
    assert second["progress"] == []


@several
@pytest.mark.parametrize("place", places(2))
def test_an_error_on_one_stage_ends_the_call_on_all_with_its_reason(place):
    for stage, messages in enumerate(rank["faults"] for rank in launched(2, place)):
        assert "prompt 0 is empty" in messages["empty prompt"]
        assert ("stage 1 of the pipeline" in messages["empty prompt"]) == (stage == 0)
        assert "all processes must pass the same settings" in messages["other settings"]
        assert "policy logits are not finite at row" in messages["not finite"]
        assert messages["afterwards"] == ""


@several
@pytest.mark.parametrize("place", places(2))
def test_each_stage_keeps_its_share_of_the_cache(place):
    for rank in launched(2, place):
        # Both stages hold both processes' rows: 8 instead of 4, in half of the layers.
        assert rank["cache"]["pipeline"] == rank["cache"]["alone"] > 0


def test_stages_are_balanced_by_the_time_of_their_layers():
    # 10 layers of 1 and a head of 3: 6.5 each would be best; 6 + (4 + 3) and 7 + (3 + 3) both need 7.
    assert balanced_split([1.0] * 10, 2, last=3.0) in ((6, 4), (7, 3))
    assert balanced_split([1.0] * 10, 3, last=2.0) == (4, 4, 2)
    assert balanced_split([1.0] * 8, 4) == (2, 2, 2, 2)
    assert balanced_split([1.0] * 8, 2, first=2.0) == (3, 5)
    # Measured times may differ from layer to layer: 5 + 1 | 3 + 3 | 4.
    assert balanced_split([5.0, 1.0, 3.0, 3.0, 4.0], 3) == (2, 2, 1)
    assert balanced_split([1.0, 1.0], 2, last=100.0) == (1, 1)
    with pytest.raises(ValueError, match="3 pipeline stages for 2 layers"):
        balanced_split([1.0, 1.0], 3)


def test_the_head_counts_as_work_of_the_last_stage():
    # Qwen2.5-0.5B: 24 layers of 14.9M weights, a head of 136M, as much as 9 layers.
    shape = ModelShape(151_936, 896, 24, 4864, 14, 2, 64)
    assert decode_split(shape, 2) == (16, 8) or decode_split(shape, 2) == (17, 7)
    assert sum(decode_split(shape, 4)) == 24 and decode_split(shape, 4)[-1] == 1


def test_a_stage_holds_the_cache_of_its_layers_for_the_rows_of_all_stages():
    # A row of 10 tokens, 4 layers, 2 heads of 8, float32: 2 * 10 * 4 * 2 * 8 * 4 = 5,120 bytes in one process, whose
    # sampler holds 3 * 64 logits of 4 bytes.
    shape = ModelShape(64, 32, 4, 64, 4, 2, 8)
    assert kv_cache_bytes(shape, 10, 4) == 5120
    assert sampling_bytes(shape, (4,), 1, 10, 4) == [{"kv_cache": 5120, "logits": 768}]
    # Twice the rows in a quarter and three quarters of the layers; two batches take turns on the last stage.
    small, large = sampling_bytes(shape, (1, 3), 2, 10, 4, batches=2)
    assert small == {"kv_cache": 2560, "logits": 0} and large == {"kv_cache": 7680, "logits": 768}
    # Of a sharded base the layers of the stage are gathered, one of the other stage for a moment, and the rest.
    small, _ = sampling_bytes(shape, (1, 3), 2, 10, 4, gathered=2)
    assert small["transient"] == 2 * (2 * shape.layer_parameters + shape.outer_parameters)


def test_a_split_that_does_not_fit_is_rejected():
    model = tiny()
    assert LayerSplit.of(model, 2, [3, 1]).layers(1) == range(3, 4)
    for sizes in ([2, 1], [4, 0], [1, 1, 2]):
        with pytest.raises(ValueError, match="give 2 numbers of layers, 1 or more each, that add up to 4"):
            LayerSplit.of(model, 2, sizes)


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
def test_each_family_is_proved_to_decode_in_stages(family):
    verify_split(tiny(family), LayerSplit((1, 3)))


def test_a_proof_fails_where_a_stage_takes_the_offset_of_masks_from_the_first_layer(monkeypatch):
    # What transformers' own pipeline does: a later stage reads the cache's length from a layer that it never runs.
    def all_layers(self, config, layers):
        super(StageCache, self).__init__(config=config)
        self.first = 0

    monkeypatch.setattr(StageCache, "__init__", all_layers)
    with pytest.raises(ValueError, match="cannot run in stages"):
        verify_split(tiny(), LayerSplit((2, 2)))


def test_a_model_whose_cache_holds_other_states_is_rejected():
    with pytest.raises(ValueError, match="its cache holds more than keys and values .*set rollout_backend to 'local'"):
        verify_split(tiny("hybrid"), LayerSplit((2, 2)))


def test_settings_that_no_pipeline_has_are_rejected():
    with pytest.raises(ValueError, match="batches is 0"):
        PipelinedBackend(batches=0)
    with pytest.raises(ValueError, match="3 pipeline stages and 1 processes"):
        PipelinedBackend(tiny(), stages=3).generate(PROMPTS, SEEDED, KEYS)
