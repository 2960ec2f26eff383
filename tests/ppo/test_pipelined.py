"""One job, two layouts: its processes sample as stages of a pipeline, and score and update as replicas or shards."""

import json

import pytest

from tests.checkpoints.test_elastic_restart import OPTIONS, prepared
from tests.places import BACKENDS, CPU, GPU, ROOT, finish_pair, on_gpus, started_pair
from tests.ppo.launches import ALONE, Launch, Launches
from tests.ppo.pipelined_runs import CASES

RUNS = Launches("pipelined_runs.py", {"alone": ALONE, "pipelined": Launch("pipelined"), "fsdp2": Launch("fsdp2")})
launched, facts = RUNS.folder, RUNS.facts
CONFIGS = ["pipelined", "fsdp2"]
LAUNCHES = [(CPU, how) for how in CONFIGS] + [on_gpus(GPU, how) for how in CONFIGS]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_the_same_processes_train_as_replicas_or_shards_of_which_a_stage_gathers_its_own_layers(place, how):
    for rank in (0, 1):
        found = facts(place, how, "shared", rank)
        assert (found["world_size"], found["backend"]) == (2, BACKENDS[place])
        assert found["is_wrapped"] == "DistributedDataParallel"
        is_sharded = ["DTensor", False] in found["kinds"]
        assert is_sharded == (how == "fsdp2")
    held = [json.loads((launched(place, how) / f"layers-{rank}.json").read_text()) for rank in (0, 1)]
    assert held == ([[0], [1]] if how == "fsdp2" else [[0, 1], [0, 1]])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_a_job_with_two_layouts_samples_the_completions_of_one_process_and_ends_with_its_weights(place, how, name):
    RUNS.require_rows_of_one(place, how, name)
    RUNS.require_weights_of_one(place, how, name)
    gaps = [entry["sampling/logprob_gap_max"] for entry in facts(place, how, name)["history"] if "score/mean" in entry]
    assert len(gaps) == 2 and max(gaps) < 5e-5


@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_a_run_says_its_stages_evaluates_as_one_process_and_resumes_in_the_middle_of_a_rollout(place, how):
    log = (launched(place, how) / "stderr.txt").read_text()
    assert "pipelined sampling: stages of 1 layers (" in log
    RUNS.require_evaluation_of_one(place, how, "shared")
    RUNS.require_exact_resume(place, how)


# --- a stage that is lost --------------------------------------------------------------------------------------------

WORDS = ["dying.py", str(ROOT / "scripts/ppo.py"), *OPTIONS.split(), "--rollout_backend", "pipelined"]
# Stage 1 kills itself once: in the second turn of the third rollout. The script has no seam between two turns.
DYING = """
import os, runpy, signal, sys
from pathlib import Path
from onetrunk.rollouts import pipelined

original = pipelined._StageRun._forward
turns = 0

def forward(run, turn, dtype):
    global turns
    if os.environ["RANK"] == "1" and run.backend.policy_version == 2 and Path("fate").exists():
        turns += 1
        if turns == 2:
            Path("fate").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return original(run, turn, dtype)

pipelined._StageRun._forward = forward
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_error_names_a_killed_stage_and_the_run_resumes(tmp_path):
    folder, whole = prepared(tmp_path / "killed"), prepared(tmp_path / "whole")
    for own in (folder, whole):
        (own / "dying.py").write_text(DYING)
    (folder / "fate").touch()
    with started_pair(folder, WORDS) as (first, _):
        assert first.wait() == 1
    log = (folder / "log-0.txt").read_text()
    assert "lost the connection to another process" in log and "rank 1 (process " in log
    assert "Traceback" not in log and "--resume auto" in log
    assert not (folder / "fate").exists() and (folder / "out" / "checkpoint-2").is_dir()
    finish_pair(folder, WORDS)
    finish_pair(whole, WORDS)
    for name in ("adapter_model.safetensors", "value_head.safetensors"):
        assert (folder / "out" / name).read_bytes() == (whole / "out" / name).read_bytes()
