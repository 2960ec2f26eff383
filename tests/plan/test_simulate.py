"""The simulation agrees with the formulas, repeats itself, and is drawn."""

import xml.etree.ElementTree as ElementTree

import pytest

from onetrunk.plan.evaluate import evaluate
from onetrunk.plan.job import Lengths
from onetrunk.plan.search import Space, search
from onetrunk.plan.timing import COLOCATED, LOCAL, SERVER, SampleLayout, TrainLayout
from scripts.plan.simulate import lanes_of, save_gantt, simulate
from tests.plan.support import device, job_7b, pool


def plan_of(engine: str, schedule: str, **changes):
    one = job_7b(**changes)
    train = TrainLayout(device(), 4, tokens=8192, rows=512)
    return one, evaluate(one, train, SampleLayout(device(), engine, 4, rows=32), schedule)


@pytest.mark.parametrize(
    ("engine", "schedule"),
    [(LOCAL, "sync"), (COLOCATED, "sync"), (SERVER, "sync"), (SERVER, "one_step"), (SERVER, "async")],
)
def test_the_formulas_agree_with_the_simulation(engine, schedule):
    one, plan = plan_of(engine, schedule)
    simulated = [simulate(one, plan, 8, seed).iteration_s for seed in range(3)]
    assert plan.iteration_s == pytest.approx(sum(simulated) / 3, rel=0.15)


def test_equal_lengths_agree_closely():
    lengths = Lengths(256, 512, 512, 512, 0.0)
    for engine, schedule in ((LOCAL, "sync"), (SERVER, "one_step")):
        one, plan = plan_of(engine, schedule, lengths=lengths)
        assert plan.iteration_s == pytest.approx(simulate(one, plan).iteration_s, rel=0.03)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_best_plan_is_the_best_in_the_simulation_too(count):
    one = job_7b()
    ranking = search(one, [pool(count)], Space(tokens=(8192,)))
    seconds = [simulate(one, entry.plan, 6).iteration_s for entry in ranking]
    assert seconds[0] <= 1.10 * min(seconds)


def test_a_simulation_repeats_itself_and_overlaps_only_where_the_schedule_allows():
    one, plan = plan_of(SERVER, "sync")
    first, second = simulate(one, plan, 4, 7), simulate(one, plan, 4, 7)
    assert first == second and first != simulate(one, plan, 4, 8)
    for rollout in range(1, 4):
        update = max(bar.end for bar in first.bars if bar.name == "publish" and bar.rollout == rollout - 1)
        begun = min(bar.start for bar in first.bars if bar.name == "generate" and bar.rollout == rollout)
        assert begun >= update - 1e-6
    one, ahead = plan_of(SERVER, "one_step")
    bars = simulate(one, ahead, 4, 7).bars
    update = next(bar for bar in bars if bar.name == "update" and bar.rollout == 0)
    assert min(bar.start for bar in bars if bar.name == "generate" and bar.rollout == 1) < update.start


def test_a_sampler_that_waits_is_idle():
    one, plan = plan_of(SERVER, "sync")
    timeline = simulate(one, plan, 6)
    busy = plan.phases["generate"].seconds / plan.iteration_s
    assert timeline.idle("sampler 1") == pytest.approx(1 - busy, abs=0.2)
    assert timeline.idle("trainer") == pytest.approx(plan.idle()["trainer"], abs=0.1)


def test_the_chart_is_written_as_png_and_svg(tmp_path):
    one, plan = plan_of(SERVER, "one_step")
    timeline = simulate(one, plan, 3)
    assert list(lanes_of(timeline)) == ["sampler 1", "sampler 2", "sampler 3", "sampler 4", "trainer"]
    save_gantt(timeline, "a plan", tmp_path / "gantt.svg")
    save_gantt(timeline, "a plan", tmp_path / "gantt.png")
    assert ElementTree.parse(tmp_path / "gantt.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")
