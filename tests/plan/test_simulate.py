"""The simulation agrees with the formulas."""

import pytest

from onetrunk.plan.job import Lengths
from onetrunk.plan.search import Space, evaluate, search
from onetrunk.plan.timing import COLOCATED, LOCAL, SERVER, SampleLayout, TrainLayout
from scripts.plan.simulate import simulate
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
    simulated = [simulate(one, plan, 8, seed) for seed in range(3)]
    assert plan.iteration_s == pytest.approx(sum(simulated) / 3, rel=0.15)


def test_equal_lengths_agree_closely():
    lengths = Lengths(256, 512, 512, 512, 0.0)
    for engine, schedule in ((LOCAL, "sync"), (SERVER, "one_step")):
        one, plan = plan_of(engine, schedule, lengths=lengths)
        assert plan.iteration_s == pytest.approx(simulate(one, plan), rel=0.03)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_best_plan_is_the_best_in_the_simulation_too(count):
    one = job_7b()
    ranking = search(one, [pool(count)], Space(tokens=(8192,)))
    seconds = [simulate(one, entry, 6) for entry in ranking]
    assert seconds[0] <= 1.10 * min(seconds)
