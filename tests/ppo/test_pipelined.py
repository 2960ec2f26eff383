"""One job, two layouts: its processes sample as stages of a pipeline, and score and update as replicas or shards."""

import json
from pathlib import Path

import pytest

from onetrunk.ppo.setup import check_pipeline
from tests import learning
from tests.places import BACKENDS, CPU, GPU, REPEATED, ROOT, finish_pair, on_gpus, started_pair
from tests.ppo.launches import ALONE, Launch, Launches
from tests.ppo.pipelined_runs import CASES
from tests.ppo.support import assert_same, make_config

RUNS = Launches("pipelined_runs.py", {"alone": ALONE, "pipelined": Launch("pipelined"), "fsdp2": Launch("fsdp2")})
launched, facts, weights = RUNS.folder, RUNS.facts, RUNS.weights
CONFIGS = ["pipelined", "fsdp2"]
LAUNCHES = [(CPU, how) for how in CONFIGS] + [on_gpus(GPU, how) for how in CONFIGS]
launches = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(3600)]


def several(function):
    for mark in launches:
        function = mark(function)
    return function


@several
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_the_same_processes_train_as_replicas_or_shards(place, how):
    for rank in (0, 1):
        found = facts(place, how, "shared", rank)
        assert (found["world_size"], found["backend"]) == (2, BACKENDS[place])
        assert found["is_wrapped"] == "DistributedDataParallel"
        is_sharded = ["DTensor", False] in found["kinds"]
        assert is_sharded == (how == "fsdp2")


@several
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_of_a_sharded_base_a_stage_gathers_its_own_layers(place, how):
    held = [json.loads((launched(place, how) / f"layers-{rank}.json").read_text()) for rank in (0, 1)]
    assert held == ([[0], [1]] if how == "fsdp2" else [[0, 1], [0, 1]])


@several
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_two_stages_sample_the_completions_of_one_process(place, how, name):
    RUNS.require_rows_of_one(place, how, name)


@several
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_a_job_with_two_layouts_ends_with_the_weights_of_one_process(place, how, name):
    RUNS.require_weights_of_one(place, how, name)
    gaps = [entry["sampling/logprob_gap_max"] for entry in facts(place, how, name)["history"] if "score/mean" in entry]
    assert len(gaps) == 2 and max(gaps) < 5e-5


@several
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_an_evaluation_in_stages_is_that_of_one_process(place, how):
    RUNS.require_evaluation_of_one(place, how, "shared")


@several
@pytest.mark.parametrize(("place", "how"), LAUNCHES)
def test_a_run_says_which_layers_a_stage_has_and_resumes_in_the_middle_of_a_rollout(place, how):
    log = (launched(place, how) / "stderr.txt").read_text()
    assert "pipelined sampling: stages of 1 layers (" in log
    whole = weights(place, how, "whole")
    for rank in (0, 1):
        assert_same(weights(place, how, "resumed", rank), whole, **REPEATED[place])


@several
@pytest.mark.parametrize("task", ["a", "b"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_ppo_learns_the_tasks_with_two_stages(task, seed):
    reached = json.loads((launched(CPU, "pipelined", "learn", str(seed)) / "reached.json").read_text())
    best = learning.task_optimum({"a": learning.TASK_A, "b": learning.TASK_B}[task], seed).objective
    print(f"task {task}, seed {seed}: {reached[task] / best:.1%} of J*")
    assert reached[task] >= 0.95 * best


# --- settings ------------------------------------------------------------------------------------------------------


def test_one_process_is_no_pipeline(tmp_path):
    with pytest.raises(ValueError, match="forms pipelines of 2 processes and 1 run; launch a multiple of that number"):
        check_pipeline(make_config(tmp_path, rollout_backend="pipelined"))


# --- a stage that is lost --------------------------------------------------------------------------------------------

OPTIONS = "--model_name_or_path base --dataset_name prompts.jsonl --output_dir out --reward_funcs reward.py:shortest"
OPTIONS += " --rollout_batch_size 4 --num_rollouts 4 --num_ppo_epochs 1 --num_minibatches 1 --max_completion_length 6"
OPTIONS += " --lora_r 2 --save_steps 1 --use_cpu true --report_to none --disable_tqdm true --resume auto"
OPTIONS += " --rollout_backend pipelined"
WORDS = ["dying.py", str(ROOT / "scripts/ppo.py"), *OPTIONS.split()]
REWARD = """
def shortest(completions, **kwargs):
    return [-float(len(c)) for c in completions]
"""
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


def prepared(folder: Path) -> Path:
    from tests.stages.small_runs import make_material

    make_material(folder)
    (folder / "reward.py").write_text(REWARD)
    (folder / "dying.py").write_text(DYING)
    return folder


@several
def test_the_error_names_a_killed_stage_and_the_run_resumes(tmp_path):
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    folder, whole = prepared(tmp_path / "killed"), prepared(tmp_path / "whole")
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


# --- memory ----------------------------------------------------------------------------------------------------------
