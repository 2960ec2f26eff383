"""Two processes sample ahead, each its own rows, and train as one process does; one resumes what two have saved.

They run twice: under DDP, and through the shipped fsdp2.yaml with a sharded base.
"""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.places import CPU
from tests.ppo.launches import Launch, Launches
from tests.ppo.support import assert_same, trained_weights, without_wall_clock
from tests.ppo.two_process_ahead import CASES, STOP, make

RUNS = Launches("two_process_ahead.py", {"ddp": Launch("ddp"), "fsdp2": Launch("fsdp2")})
# Float32 sums in another order, through 16 steps of SGD.
ROUNDING = {"atol": 2e-5, "rtol": 0.0}
SHARDED = {"ddp": "Parameter", "fsdp2": "DTensor"}
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


@cache
def alone(schedule):
    trainer = make(Path(mkdtemp()), schedule)
    trainer.train()
    return trainer


@pytest.mark.parametrize("schedule", CASES)
@pytest.mark.parametrize("how", SHARDED)
def test_two_processes_ahead_equal_one(how, schedule):
    facts = [RUNS.facts(CPU, how, schedule, rank) for rank in (0, 1)]
    assert [own["num_processes"] for own in facts] == [2, 2]
    assert facts[0]["kinds"] == facts[1]["kinds"] == [[SHARDED[how], False], ["Parameter", True]]
    weights = [RUNS.weights(CPU, how, schedule, rank) for rank in (0, 1)]
    assert_same(weights[0], weights[1])
    assert_same(weights[0], trained_weights(alone(schedule).model), **ROUNDING)
    own = without_wall_clock(alone(schedule).state.log_history)
    for name in ("sampling/staleness", "sampling/staleness_max", "score/mean"):
        logs = [[entry[name] for entry in log if name in entry] for log in (own, *(f["history"] for f in facts))]
        assert logs[1] == logs[2] == pytest.approx(logs[0], abs=1e-6)
    staleness = [entry["sampling/staleness"] for entry in own if "sampling/staleness" in entry]
    assert staleness == ([0, 1, 1, 1] if schedule == "one_step" else [0, 1, 2, 2])


@pytest.mark.parametrize("schedule", CASES)
@pytest.mark.parametrize("how", SHARDED)
def test_one_process_resumes_rollouts_ahead_and_scores_of_two(how, schedule, tmp_path):
    resumed = make(tmp_path, schedule)
    resumed.train(resume_from_checkpoint=str(RUNS.folder(CPU, how) / schedule / "cut" / f"checkpoint-{STOP}"))
    assert_same(trained_weights(resumed.model), trained_weights(alone(schedule).model), **ROUNDING)
