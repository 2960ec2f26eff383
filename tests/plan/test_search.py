"""The search equals trying everything; more memory or devices never make the best plan worse; what fits is said."""

from dataclasses import replace

import pytest

from onetrunk.plan.hardware import load_catalog
from onetrunk.plan.job import FP32, INT8_BYTES, NF4_BYTES
from onetrunk.plan.search import (
    OBJECTIVES,
    Space,
    evaluate,
    inner_layouts,
    plans,
    rejected,
    search,
    server_layouts,
    smallest_hardware,
    train_layouts,
    value_of,
    why_not,
)
from onetrunk.plan.timing import COLOCATED, LOCAL, PIPELINED, SERVER, TrainLayout, most_rows_of
from tests.plan.support import SMALL, job, job_7b, pool

FEW = Space(tokens=(2048, 8192))


def everything(one_job, pools, space):
    """Yield every plan that fits, without any pruning: each layout of the trainer with each of the samplers."""
    for own in pools:
        for train in train_layouts(one_job, own, space):
            pairs = [("sync", sample) for sample in inner_layouts(one_job, train, space)]
            for other in pools if not train.is_staged else ():
                for sample in server_layouts(one_job, other):
                    served = train.serves_reward + sample.count
                    if not train.serves_reward if other is not own else train.count + served <= own.count:
                        accepted = space.schedules if train.tensor == 1 else ("sync",)
                        pairs += [(schedule, sample) for schedule in accepted]
            for schedule, sample in pairs:
                plan = evaluate(one_job, train, sample, schedule)
                if plan.shortage() is None:
                    yield plan


def objective_of(plan, objective):
    return value_of(plan, objective, "on_demand")[0]


@pytest.mark.parametrize("memory", [0.9, 40.0])
def test_the_search_equals_trying_everything(memory):
    one = job(rollout_batch_size=8, reward=SMALL, lengths=replace(job().lengths, spread=0.9))
    # With 0.9 GiB only stages fit: 0.82 GiB, 0.78 of them for the process.
    second = pool(1, name="E", memory_gib=8.0 if memory > 1 else 0.1, tflops=10.0, usd_per_hour=5.0)
    pools, space = [pool(4, memory_gib=memory, tflops=1.0), second], Space(tokens=(1024,))
    tried = list(everything(one, pools, space))
    assert len(tried) > (1000 if memory > 1 else 10)
    for objective in OBJECTIVES:
        ranking = search(one, pools, space, objective)
        least = min(objective_of(plan, objective) for plan in tried)
        assert objective_of(ranking[0], objective) == pytest.approx(least, rel=1e-9)
        assert all(entry.shortage() is None for entry in ranking)


@pytest.mark.parametrize(
    ("count", "more", "memory", "extra"), [(1, 7, 24.0, 8.0), (6, 2, 18.0, 100.0), (17, 24, 80.0, 8.0)]
)
def test_more_memory_or_devices_never_make_the_best_plan_worse(count, more, memory, extra):
    def best(devices, gib, objective):
        # The same machines of 8, so that only their number changes.
        own = replace(pool(devices, memory_gib=gib), per_node=8)
        ranking = search(job_7b(), [own], FEW, objective, most=1)
        return objective_of(ranking[0], objective) if ranking else float("inf")

    for objective in OBJECTIVES:
        least = best(count, memory, objective)
        assert best(count + more, memory, objective) <= least * (1 + 1e-9)
        assert best(count, memory + extra, objective) <= least * (1 + 1e-9)


def test_a_pipeline_of_the_trainers_processes_wins_where_the_gathered_base_does_not_fit():
    # 15.2 GB of weights on four devices of 12 GiB: sharded they fit, gathered for sampling they do not.
    one, four = job_7b(), [pool(4, memory_gib=12.0)]
    engines = {engine: Space(tokens=(2048,), engines=(engine,)) for engine in (LOCAL, PIPELINED)}
    assert all(entry.train.tensor > 1 for entry in search(one, four, engines[LOCAL]))
    sharded = replace(engines[PIPELINED], stage_training=False)
    best = search(one, four, sharded)[0]
    assert (best.sample.stages, best.sample.replicas, best.train.shards) == (4, 1, 4)
    # Three stages do not divide four processes. With room for the base, replicas are faster.
    assert not search(one, four, replace(sharded, stages=3))
    both = Space(tokens=(2048,), engines=(LOCAL, PIPELINED))
    assert search(one, [pool(4)], both)[0].sample.engine == LOCAL


def test_training_stages_win_over_slow_links_and_where_heads_do_not_divide():
    # Three devices do not divide four key-value heads, and 15.2 GB of weights do not fit one of 16 GiB with the rest.
    plan = search(job_7b(), [pool(3, memory_gib=16.0)], FEW)[0]
    assert (plan.train.data, plan.train.stages, plan.sample.engine) == (1, 3, PIPELINED)
    assert (plan.sample.stages, plan.sample.split) == (3, ()) == (plan.train.stages, plan.train.split)
    assert plan.sample.count == plan.train.count == plan.count == 3 and plan.schedule == "sync"
    # Four divide them, and the products of a group are faster than stages, while the link is fast.
    assert search(job_7b(), [pool(4, memory_gib=12.0)], FEW)[0].train.tensor > 1
    # On machines of their own they share nothing but the network, where hidden states are the least to send.
    apart = replace(pool(4, memory_gib=12.0, network_gb_s=0.5), per_node=1)
    plan = search(job_7b(), [apart], FEW)[0]
    assert plan.train.is_staged
    without = search(job_7b(), [apart], replace(FEW, stage_training=False))[0]
    assert without.train.shards > 1 and without.iteration_s > 2 * plan.iteration_s


def test_stages_of_a_recipe_are_those_of_training_and_sampling():
    one, split = job_7b(), (10, 18)
    space = Space(tokens=(2048,), engines=(PIPELINED,), stages=2, split=split, stage_training=True)
    ranking = search(one, [pool(4)], space)
    assert {(entry.train.data, entry.train.stages) for entry in ranking} == {(2, 2)}
    assert all(entry.train.split == entry.sample.split == split for entry in ranking)
    # Rows of a process are bounded as in a run: those of a stage.
    capped = search(replace(one, max_rollout_rows=4), [pool(2)], space)[0]
    assert most_rows_of(replace(one, max_rollout_rows=4), capped.sample) == 8


def test_what_excludes_training_stages_is_named():
    def reasons(one, **changes):
        return [line for line in rejected(one, [pool(2)], replace(FEW, **changes)) if "training in pipeline" in line]

    (line,) = reasons(job_7b(stage_obstacle="fp16 scales gradients"))
    assert line == "training in pipeline stages is not tried: fp16 scales gradients"
    (line,) = reasons(job_7b(), base_bytes=(0.516,))
    assert "quantised base" in line
    (line,) = reasons(job_7b(is_offloaded=True), keeps_settings=True)
    assert "activation_offloading" in line
    # Other settings of a forward do not exclude them, and without a second device nobody asks.
    assert reasons(job_7b(is_offloaded=True)) == [] and reasons(job_7b(), base_bytes=(2.0, 0.516)) == []
    assert not any("pipeline stages" in line for line in rejected(job_7b(stage_obstacle="x"), [pool(1)], FEW))
    # None of them is in any layout.
    staged = [o for o in train_layouts(job_7b(), pool(4), Space(base_bytes=(2.0, 0.516))) if o.is_staged]
    assert staged and all(o.base_bytes == 2.0 and o.shards == o.tensor == 1 and not o.is_offloaded for o in staged)
    assert not any(o.is_staged for o in train_layouts(job_7b(), pool(4), Space(schedules=("async",))))
    # Each stage has a layer, and 16 are the most.
    sizes = {o.stages for o in train_layouts(job(), pool(8), FEW)}
    assert sizes == {1, 2, 3, 4} and max(o.stages for o in train_layouts(job_7b(), pool(32), FEW)) == 16


def held(one, **changes):
    """Return (tensor, shards, stages) above 1 of the layouts of a trainer on four devices."""
    layouts = list(train_layouts(one, pool(4), replace(FEW, **changes)))
    return {name for name in ("tensor", "shards", "stages") for o in layouts if getattr(o, name) > 1}


def engines(one, base_bytes=2.0):
    """Return the engines in the processes of one or two devices that hold the base whole."""
    layouts = [TrainLayout(pool(1).device, count, base_bytes=base_bytes) for count in (1, 2)]
    return {sample.engine for layout in layouts for sample in inner_layouts(one, layout, FEW)}


def test_what_the_trainer_rejects_at_startup_is_not_planned():
    assert held(job_7b()) == {"tensor", "shards", "stages"}
    # parallel/tensor.py rejects any quantised base, parallel/sharding.py and rollouts/colocate.py one in 8 bit.
    assert held(job_7b(), base_bytes=(NF4_BYTES,)) == {"shards"} and held(job_7b(), base_bytes=(INT8_BYTES,)) == set()
    assert engines(job_7b()) == engines(job_7b(), NF4_BYTES) == {LOCAL, PIPELINED, COLOCATED}
    for size in (INT8_BYTES, FP32):
        assert engines(job_7b(), size) == {LOCAL, PIPELINED}
        reasons = rejected(job_7b(), [pool(1)], replace(FEW, base_bytes=(size,)))
        assert any("colocated engine is not tried" in line for line in reasons)
    # ppo/setup.py rejects activations that are offloaded next to a divided or sharded base.
    layouts = list(train_layouts(job_7b(), pool(4), FEW))
    assert not any(entry.is_offloaded and max(entry.tensor, entry.shards, entry.stages) > 1 for entry in layouts)
    assert any(entry.is_offloaded for entry in layouts)
    # ppo/setup.py rejects episodes with tensor parallelism and pipelined sampling; servers are still divided.
    episodes = job_7b(plays=True, stage_obstacle="episodes")
    assert held(episodes) == {"shards"} and engines(episodes) == {LOCAL, COLOCATED}
    assert any(layout.tensor > 1 for layout in server_layouts(episodes, pool(4)))
    # And tensor parallelism with another schedule than sync.
    small = [pool(2, memory_gib=14.0), pool(2, name="E")]
    ranking = search(job_7b(), small, replace(FEW, engines=(SERVER,)), most=99)
    divided = {entry.schedule for entry in ranking if entry.train.tensor > 1}
    assert divided == {"sync"} and {entry.schedule for entry in ranking} == {"sync", "one_step", "async"}


def test_the_objectives_choose_differently():
    one, pools = job_7b(), [pool(16)]
    fast, cheap, few = (search(one, pools, FEW, objective)[0] for objective in OBJECTIVES)
    assert few.count == 1 < cheap.count < fast.count
    assert fast.iteration_s < cheap.iteration_s < few.iteration_s
    cost = [plan.iteration_s * plan.usd_per_hour("on_demand") for plan in (fast, cheap, few)]
    assert min(cost) == cost[1]


def test_colocation_wins_on_few_devices_and_a_split_on_many():
    # HybridFlow's observation. Here the reason is the floor of each phase: on many devices neither generation (the
    # longest completion) nor the update (launches) gets shorter, so the phases gain by running at the same time.
    one = job_7b()
    placements = {n: search(one, [replace(pool(n), per_node=8)], FEW)[0].sample.engine for n in (1, 64)}
    assert placements == {1: COLOCATED, 64: SERVER}


def test_every_loser_has_a_reason():
    first, *others = search(job_7b(), [pool(8)], FEW)
    assert len(others) > 1 and why_not(first, first, "time", "on_demand") == ""
    for plan in others:
        why = why_not(plan, first, "time", "on_demand")
        assert why
        if plan.iteration_s > 1.01 * first.iteration_s:
            assert "times as long" in why and any(w in why for w in ("needs", "wait", "publishing"))


def test_next_to_a_schedule_that_does_not_wait_the_waiting_is_the_reason():
    first, *others = search(job_7b(), [pool(8)], FEW)
    assert first.schedule == "async"
    same = replace(first, iteration_s=2 * first.iteration_s)
    for schedule, part in (("one_step", "its rollouts wait for their longest"), ("sync", "its phases wait for each")):
        assert part in why_not(replace(same, schedule=schedule), first, "time", "on_demand")
    # Its trainer is slower too, but that explains less than half of the difference.
    (sharded,) = (p for p in others if p.schedule == "one_step" and p.train.shards > 1)
    assert sharded.phases["update"].seconds > first.phases["update"].seconds
    assert "its rollouts wait" in why_not(sharded, first, "time", "on_demand")
    assert "publishing" in why_not(same, first, "time", "on_demand")


def test_a_mixed_pool_samples_on_the_cheaper_devices():
    own, other = pool(4), pool(4, name="E", memory_gib=44.0, tflops=360.0, bandwidth_gb_s=860.0, usd_per_hour=0.5)
    mixed = search(job_7b(), [own, other], FEW)[0]
    alone = search(job_7b(), [own], FEW)[0]
    assert mixed.iteration_s < alone.iteration_s and set(mixed.devices) == {"D", "E"}


def test_schedules_other_than_sync_need_servers():
    assert search(job_7b(), [pool(4)], Space(schedules=("async",), engines=(LOCAL, COLOCATED))) == []
    plan = search(job_7b(), [pool(4)], Space(schedules=("async",), tokens=(8192,)))[0]
    assert plan.schedule == "async" and plan.sample.engine == SERVER


def test_what_does_not_fit_says_by_how_much_and_on_what_it_would():
    one, pools = job_7b(), [pool(1, memory_gib=14.6)]
    assert search(one, pools, Space()) == []
    (line,) = rejected(one, pools, Space())
    assert "whole base (D)" in line and "of 13.4 GiB, of which weights" in line
    found, price = smallest_hardware(one, load_catalog(), Space(), "on_demand")
    assert search(one, [found], Space(schedules=("sync",)))
    cheaper = [d for d in load_catalog().devices.values() if d.usd_per_hour < price and not d.is_cpu]
    for other in cheaper:
        assert not search(one, [replace(found, device=other, count=1, per_node=1)], Space())


def test_a_launcher_divides_the_processes_over_the_machines():
    layouts = [o for o in train_layouts(job_7b(rollout_batch_size=60), pool(16), FEW) if o.count > 8]
    # 60 prompts divide over 15 processes, and 15 do not over two machines; a group stays on its own.
    assert layouts and all(o.count % 2 == 0 and o.count // 2 % o.tensor == 0 for o in layouts)


def test_all_servers_run_on_one_machine_that_the_trainer_leaves():
    one, pools = job_7b(reward=SMALL), [pool(20), pool(16, name="E")]
    tried = list(plans(one, pools, Space(schedules=("sync",), engines=(LOCAL, SERVER), tokens=(8192,))))
    same = [plan for plan in tried if list(plan.devices) == ["D"]]
    assert len(same) < len(tried) and any(plan.train.serves_reward for plan in same)
    assert max(plan.served_devices for plan in tried) == 8
    assert all(plan in same or plan.sample.engine == SERVER and not plan.train.serves_reward for plan in tried
               if plan.train.device.name == "D")  # fmt: skip
    # Of three machines two are left to a trainer that shares none with the servers.
    assert all(plan.count <= 8 or plan.train.count <= 16 for plan in same if plan.served_devices)


def test_layouts_divide_rows_and_heads():
    one = job(rollout_batch_size=12, num_minibatches=2)
    layouts = list(train_layouts(one, pool(16), Space(tokens=())))
    # 12 prompts: 1, 2, 3 and 6 processes; 12 would leave one row for two minibatches. With 2 key-value heads,
    # groups have 1 or 2 devices.
    assert {layout.data for layout in layouts} == {1, 2, 3, 6}
    assert {layout.tensor for layout in layouts} == {1, 2}
    kept = list(train_layouts(one, pool(1), Space(keeps_settings=True)))
    assert [(layout.rows, layout.is_checkpointed) for layout in kept] == [(8, False)]
