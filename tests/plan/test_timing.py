"""Seconds against hand-worked numbers, theorems, and the order of published measurements."""

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.plan.costs import forward_flops, gathers, head_flops, slowest_stage
from onetrunk.plan.hardware import Rates
from onetrunk.plan.job import Lengths
from onetrunk.plan.timing import (
    LATENCY_S,
    LOCAL,
    PIPELINED,
    SERVER,
    UNMERGED,
    PhaseTime,
    SampleLayout,
    TrainLayout,
    decode_seconds,
    generate_time,
    packs_of,
    publish_seconds,
    score_time,
    step_parts,
    update_time,
)
from scripts.plan import errors
from tests.plan.support import SMALL, device, job, job_7b

# Every share of a peak is 1, and nothing costs time but products and bandwidth.
IDEAL = Rates(
    matmul=1.0, decode_matmul=1.0, attention=1e30, hidden_half=0.0, tokens_half=0.0, layer_s=0.0, adapter_layer_s=0.0,
    decode_layer_s=0.0, launch_s=0.0, served_layer_s=0.0, served_step_s=0.0, served_row_s=0.0, bandwidth=1.0, link=1.0,
)  # fmt: skip
EVEN = Lengths(100, 100, 100, 100, 0.0)


def test_a_decoded_token_reads_the_weights_once_by_hand():
    own = device(rates=IDEAL, bandwidth_gb_s=1.0)
    parts = step_parts(job(), SampleLayout(own, LOCAL, 1), rows=1, context=10)
    # All layers and the head in bfloat16, and the cache: 2 x 4 layers x 2 heads x 16 x 10 tokens x 2 bytes.
    read = 2 * (SMALL.num_layers * SMALL.layer_parameters + SMALL.head_parameters) + 2 * 4 * 2 * 16 * 10 * 2
    assert sum(parts.values()) == pytest.approx(read / 1e9)
    served = step_parts(job(), SampleLayout(own, SERVER, 1), rows=1, context=10)
    assert sum(served.values()) == pytest.approx(UNMERGED * read / 1e9)
    # A server reads the checkpoint, in 16 bits at most, whatever precision the trainer's base has.
    for one in (job(base_bytes=0.516), job(model=replace(job().model, itemsize=4.0))):
        assert step_parts(one, SampleLayout(own, SERVER, 1), rows=1, context=10) == served


def test_many_rows_are_bound_by_products():
    own = device(rates=IDEAL, tflops=0.001)
    parts = step_parts(job(), SampleLayout(own, LOCAL, 1), rows=1000, context=0)
    flops = 1000 * (forward_flops(SMALL, 1, 4) + head_flops(SMALL, 1))
    assert parts["bandwidth"] == 0 and parts["compute"] == pytest.approx(flops / 1e9)


def test_a_decode_of_equal_lengths_is_its_steps():
    one = decode_seconds(lambda rows, context: {"x": rows}, rows=4, most_rows=9, lengths=EVEN)
    assert one.seconds == pytest.approx(4 * 100) and one.tail == pytest.approx(0, abs=1e-6)
    # Two waves of two rows.
    two = decode_seconds(lambda rows, context: {"x": 1.0}, rows=4, most_rows=2, lengths=EVEN)
    assert two.seconds == pytest.approx(200, rel=0.05)


def test_the_longest_completion_decides_and_its_share_is_the_tail():
    spread = Lengths(100, 100, 1000, 100, 0.8)
    time = decode_seconds(lambda rows, context: {"x": 1.0}, rows=64, most_rows=64, lengths=spread)
    source = random.Random(0)
    drawn = [max(spread.quantile(source.random()) for _ in range(64)) for _ in range(50)]
    assert time.seconds == pytest.approx(statistics.median(drawn), rel=0.25)
    assert time.tail == pytest.approx(time.seconds - 100, rel=0.05)


def test_lengths_have_the_mean_that_was_asked_for_after_the_cut():
    lengths = Lengths(10, 120, 200, 10, 0.9)
    points = [lengths.survival(x + 0.5) for x in range(200)]
    assert sum(points) == pytest.approx(120, rel=0.01)
    assert lengths.quantile(0.999999) == pytest.approx(200, rel=0.01) and lengths.survival(200) == 0


def test_a_pipeline_of_the_trainers_processes_is_as_fast_as_replicas_but_for_its_slowest_stage():
    own = device(rates=IDEAL, link_gb_s=1e9)
    replicas, stages = (
        generate_time(job(lengths=EVEN), layout).parts
        for layout in (SampleLayout(own, LOCAL, 4), SampleLayout(own, PIPELINED, 1, stages=4))
    )
    # Each of 4 batches has the rows of a replica. Stages of a layer each, and the last one also has the head.
    slowest = (
        (SMALL.layer_parameters + SMALL.head_parameters) * 4 / (4 * SMALL.layer_parameters + SMALL.head_parameters)
    )
    assert slowest_stage(SMALL, (1, 1, 1, 1)) == pytest.approx(slowest) and slowest > 1.5
    for name in ("bandwidth", "compute"):
        assert stages[name] == pytest.approx(slowest * replicas[name])


def test_an_update_is_two_forwards_and_with_checkpointing_three():
    plain, kept = (
        update_time(job(lengths=EVEN, is_padding_free=True), TrainLayout(device(rates=IDEAL), 1, is_checkpointed=c))
        for c in (False, True)
    )
    # 16 rows of 200 tokens, 4 epochs; the head runs forward on completions, and half as much again for its gradient.
    tokens, own = 16 * 200 * 4, device()
    layers, head = forward_flops(SMALL, tokens, 4), 1.5 * head_flops(SMALL, tokens // 2)
    assert plain.seconds == pytest.approx(2 * (layers + head) / (own.tflops * 1e12))
    assert kept.seconds == pytest.approx(1.5 * plain.seconds)


def staged(stages=2, split=(), data=1, **changes):
    """Return a layout that trains in stages, on devices without any overhead and with forwards of two rows."""
    own = device(**{"rates": IDEAL, "link_gb_s": 1e12, **changes})
    return TrainLayout(own, data, rows=2, stages=stages, split=split)


def test_two_training_stages_by_hand():
    # 16 rows of 200 tokens in 2 minibatches: 4 packs of 2 rows. The last stage has 2 of the 4 layers and the head.
    one = job(lengths=EVEN, is_padding_free=True)
    score, update = (time(one, staged(split=(2, 2), tflops=0.001)) for time in (score_time, update_time))
    layers, head, flops = forward_flops(SMALL, 400, 2), head_flops(SMALL, 200), 1e9
    # Forward and gradients, 4 epochs of 8 packs. A minibatch fills and empties the pipeline: 4 + 2 - 1 packs.
    pack = 2 * (layers + 1.5 * head) / flops
    assert update.parts["compute"] == pytest.approx(4 * 8 * pack)
    assert update.parts["bubble"] == pytest.approx(4 * 2 * (pack + LATENCY_S))
    # Scoring: policy and reference, all 8 packs together.
    assert score.parts["compute"] == pytest.approx(8 * (2 * layers + 2 * head) / flops)
    assert score.parts["bubble"] == pytest.approx(score.parts["compute"] / 8)
    # 24 packs are scored in three sequences of 4 x 2.
    many = score_time(replace(one, rollout_batch_size=48), staged(split=(2, 2), tflops=0.001))
    assert many.parts["bubble"] == pytest.approx(3 / 24 * many.parts["compute"])


def test_training_stages_send_hidden_states_and_sum_gradients():
    one, slow = job(lengths=EVEN, is_padding_free=True), staged(link_gb_s=0.001, network_gb_s=0.0001)
    state, sums = 400 * 64 * 2, 2 * 4 * one.adapter_weights * 0.5
    # The first stage sends the states of policy and reference.
    link = score_time(one, slow).parts["link"]
    assert link == pytest.approx(8 * (2 * state / 1e6 + LATENCY_S))
    # The update sends states in one direction and gradients in the other; 8 optimizer steps sum what trains.
    link = update_time(one, slow).parts["link"]
    assert link == pytest.approx(4 * 8 * (state / 1e6 + LATENCY_S) + 8 * (sums / 1e6 + 2 * LATENCY_S))
    # Below the adapters there are no gradients to send, and one forward serves all roles.
    top = replace(one, adapted_layers=1)
    uneven = replace(slow, split=(3, 1))
    assert score_time(top, uneven).parts["link"] == pytest.approx(8 * (state / 1e6 + LATENCY_S))
    # A pipeline that does not fit one machine sends over the network.
    crossing = replace(slow, per_node=1)
    assert score_time(one, crossing).parts["link"] == pytest.approx(8 * (2 * state / 1e5 + LATENCY_S))


@settings(deadline=None, max_examples=20)
@given(
    stages=st.integers(2, 4),
    adapted=st.integers(1, 4),
    has_reference=st.booleans(),
    rows=st.sampled_from([8, 16, 32]),
    is_checkpointed=st.booleans(),
    keeps_states=st.booleans(),
)
def test_stages_are_never_faster_than_their_share_and_more_packs_leave_less_idle(
    stages, adapted, has_reference, rows, is_checkpointed, keeps_states
):
    one = job(lengths=EVEN, adapted_layers=adapted, has_reference=has_reference,
              rollout_batch_size=rows, is_padding_free=True, keeps_states=keeps_states)  # fmt: skip
    # Slow, so that latencies do not count.
    layout = replace(staged(stages, tflops=0.001), is_checkpointed=is_checkpointed)
    alone = TrainLayout(layout.device, 1, rows=2, is_checkpointed=is_checkpointed)
    for time in (score_time, update_time):
        parts, whole = time(one, layout).parts, time(one, alone).seconds
        busy = sum(value for name, value in parts.items() if name not in ("bubble", "link"))
        # All stages together do at least the work of one process: the slowest does its share or more.
        assert busy >= whole / stages * (1 - 1e-9)
        assert parts["bubble"] > 0
        larger = time(replace(one, rollout_batch_size=2 * rows), layout)
        assert larger.parts["bubble"] / larger.seconds <= parts["bubble"] / sum(parts.values()) * (1 + 1e-9)
    # Replicas of the pipeline divide its rows.
    two = update_time(replace(one, rollout_batch_size=2 * rows), replace(layout, data=2))
    same = update_time(one, layout)
    assert two.parts["compute"] == pytest.approx(same.parts["compute"])


def test_a_gpu_hides_launches_behind_its_products_and_a_cpu_does_not():
    slow, fast = (replace(IDEAL, layer_s=seconds) for seconds in (1e-1, 1e-9))
    for is_cpu in (True, False):
        launched, computed, both = (
            update_time(job(), TrainLayout(device(is_cpu=is_cpu, tflops=tflops, rates=rates), 1)).seconds
            for tflops, rates in ((1e9, slow), (0.001, fast), (0.001, slow))
        )
        expected = launched + computed if is_cpu else max(launched, computed)
        assert both == pytest.approx(expected, rel=1e-3)


def test_no_phase_is_faster_than_the_launches_of_its_operations_by_hand():
    own = device(rates=replace(IDEAL, launch_s=1e-5), bandwidth_gb_s=1e9)
    one = job(lengths=EVEN, is_padding_free=True)
    # A decoded token of 4 layers in bfloat16: 43 operations of a layer and 18 of its adapters, and 73 besides.
    generate = generate_time(one, SampleLayout(own, LOCAL, 1))
    assert generate.launched == pytest.approx(100 * (4 * (43 + 18) + 73) * 1e-5)
    # 16 rows of 200 tokens in 2 minibatches: 2 packs. Policy and reference score; forward and backward, 4 epochs.
    score, update = (time(one, TrainLayout(own, 1)) for time in (score_time, update_time))
    assert score.launched == pytest.approx(2 * (4 * (41 + 18) + 4 * 41 + 221) * 1e-5)
    assert update.launched == pytest.approx(4 * 2 * (4 * (41 + 56 + 134) + 193) * 1e-5)
    for phase in (generate, score, update):
        assert phase.seconds == pytest.approx(phase.launched) and phase.bottleneck == "launches"
    # With one adapted layer the three below run once for both roles, and not in the update, which keeps their states.
    top = replace(one, adapted_layers=1)
    assert score_time(top, TrainLayout(own, 1)).launched == pytest.approx(2 * (3 * 41 + 41 + 18 + 41 + 221) * 1e-5)
    assert update_time(top, TrainLayout(own, 1)).launched == pytest.approx(8 * (41 + 56 + 134 + 193) * 1e-5)
    # A slow device hides the launches; an engine replays them as a graph, and a CPU has none.
    slow = replace(own, tflops=1e-6)
    assert update_time(one, TrainLayout(slow, 1)).parts["launches"] == 0
    assert generate_time(one, SampleLayout(own, SERVER, 1)).launched == 0
    assert generate_time(one, SampleLayout(replace(own, is_cpu=True), LOCAL, 1)).launched == 0


def test_a_sharded_base_pays_for_its_gathers():
    slow = device(rates=IDEAL, link_gb_s=0.001)
    whole, sharded = (update_time(job(), TrainLayout(slow, 4, shards=n)).seconds for n in (1, 4))
    packs = packs_of(job(), TrainLayout(slow, 4))
    moved = gathers(SMALL, 0, packs.number, 4, lower_layers="scoring")["update"].num_bytes(SMALL, 2.0) * 0.75
    assert sharded - whole == pytest.approx(moved / 1e6, rel=0.02)


def test_publishing_to_servers_sends_adapters_and_a_sharded_base_gathers_for_sampling():
    own = device(rates=IDEAL)
    train = TrainLayout(own, 1)
    assert publish_seconds(job(), train, SampleLayout(own, LOCAL, 1)) == 0
    assert publish_seconds(job(), replace(train, data=4, shards=4), SampleLayout(own, LOCAL, 4)) > 0
    one, three = (publish_seconds(job(), train, SampleLayout(own, SERVER, n)) for n in (1, 3))
    assert three - one == pytest.approx(2 * 2 * job().adapter_weights / 50e9)


def test_a_phase_names_what_takes_most_of_its_time():
    assert PhaseTime({"compute": 1.0, "link": 2.0}).bottleneck == "link"
    assert generate_time(job_7b(), SampleLayout(device(), LOCAL, 1)).bottleneck == "launches"
    assert score_time(job_7b(), TrainLayout(device(tflops=1.0), 1)).bottleneck == "compute"


def test_published_runs_are_met_in_their_order():
    chat = errors.compared_deepspeed_chat()
    assert errors.rank_correlation([r.predicted for r in chat], [r.measured for r in chat]) >= 0.85
    slow, fast = errors.compared_openrlhf()
    for rows in (slow, fast):
        assert errors.rank_correlation([r.predicted for r in rows], [r.measured for r in rows]) >= 0.7
    # An engine beats the trainer's own loop at every size, by a factor of 1 to 4.
    assert all(1 < ratio.predicted < 4 and 1 < ratio.measured < 4 for ratio in errors.compared_engines())
    checkpointing, throughput = errors.compared_hf()
    assert checkpointing.predicted == pytest.approx(checkpointing.measured, rel=0.2)
    assert throughput.predicted == pytest.approx(throughput.measured, rel=0.5)
