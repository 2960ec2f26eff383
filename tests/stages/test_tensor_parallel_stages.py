"""`onetrunk sft`, `reward` and `distill` under tensor parallelism, through the shipped config: the run of one process.

Two processes form one group, which trains on all rows; four form two groups, which train on different rows.
"""

import json
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp

import pytest

from tests.models.reward_adapters import saved_base
from tests.places import CPU, REPEATED, launch, on_gpus, places
from tests.stages.small_runs import LINEAR, judged_pairs, metrics, nouns, require_same_adapter, write_rows

WORKER = Path(__file__).with_name("stages_worker.py")
# The norm of every gradient is above 1, so all are clipped.
OPTIONS = [*LINEAR, *"--max_grad_norm 1 --max_steps 4 --save_steps 2 --logging_steps 1 --use_peft true".split()]
# 5 rows: the last batch of an evaluation is not full.
HELD_OUT = "--eval_strategy steps --eval_steps 2 --eval_size 5 --per_device_eval_batch_size 2".split()
# 14 pairs: two groups would fill up the fourth batch.
PAIRS = "--dataset_name pairs.jsonl --max_steps 3 --activation_checkpointing false"
CASES = {
    "sft": "sft --dataset_name texts.jsonl --activation_checkpointing false",
    # The head is the divided embedding; layers run again in the backward.
    "tied head": "sft --dataset_name texts.jsonl --model_name_or_path tied --activation_checkpointing true",
    "reward": f"reward {PAIRS} --adapter_layers top-2",
    "distill": f"distill {PAIRS}",
}
LAUNCHED = {1: tuple(CASES), 2: tuple(CASES), 4: ("reward",)}
RUNS = [(processes, name) for processes in (2, 4) for name in LAUNCHED[processes]]
PLACED = [(CPU, *run) for run in RUNS] + [on_gpus("cuda", *run, processes=run[0]) for run in RUNS]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


def words_of(name, output, processes=1):
    verb, *own = CASES[name].split()
    rows = ["--per_device_train_batch_size", str(4 if processes < 4 else 2)]
    return [verb, *OPTIONS, *HELD_OUT, *own, *rows, "--output_dir", output]


def run_cases(folder, place, processes, cases, name):
    """Run cases, {name: words}, in one launch."""
    (folder / f"{name}.cases").write_text(json.dumps(cases))
    return launch(place, "tensor_parallel", processes, WORKER, f"{name}.cases", name, cwd=folder)


@cache
def material():
    folder = Path(mkdtemp())
    saved_base(folder / "base")
    saved_base(folder / "tied", "qwen2")
    # Of different lengths: the groups have different numbers of tokens.
    texts = [{"prompt": f"the {n} ", "completion": f"runs {o} fast ." + " the dog" * (i % 3)} for n, o, i in nouns(37)]
    write_rows(folder / "texts.jsonl", texts)
    write_rows(folder / "pairs.jsonl", judged_pairs(37))
    return folder


@cache
def launched(place, processes):
    """Run the cases in one launch; return the folder of the results."""
    folder = Path(mkdtemp()) / "runs"
    copytree(material(), folder)
    cpu = ["--use_cpu", "true"] if (place, processes) == (CPU, 1) else []
    cases = {name: [*words_of(name, name, processes), *cpu] for name in LAUNCHED[processes]}
    done = run_cases(folder, place, processes, cases, "facts")
    (folder / "stdout").write_text(done.stdout)
    return folder


def facts(place, processes, name, rank=0):
    return json.loads((launched(place, processes) / f"facts-{rank}.json").read_text())[name]


@pytest.mark.parametrize(("place", "processes", "name"), PLACED)
def test_every_process_holds_its_share_of_the_base(place, processes, name):
    alone = facts(place, 1, name)
    for rank in range(processes):
        found = facts(place, processes, name, rank)
        assert found["code"] == 0 and found["world_size"] == processes
        assert found["distributed_type"] == f"MULTI_{'CPU' if place == CPU else 'GPU'}"
        assert found["is_wrapped"] == "DistributedDataParallel"
        assert ["DTensor", False] in found["kinds"] and ["DTensor", True] not in found["kinds"]
        # Half of all matrices; what trains, norms and score heads are whole.
        matrices = alone["local_bytes"] - found["whole_bytes"]
        assert found["local_bytes"] - found["whole_bytes"] == pytest.approx(matrices / 2, rel=0.01)
        # Neither the head nor any other matrix is gathered, in the forward, the backward or an evaluation.
        assert "all_gather_single" not in found["collectives"]


@pytest.mark.parametrize(("place", "processes", "name"), PLACED)
def test_all_processes_together_train_the_adapter_of_one(place, processes, name):
    found, alone = (launched(place, n) / name for n in (processes, 1))
    # Gradients agree to 1e-4 of their largest entry (tests/models); the learning rate is 0.1.
    require_same_adapter(found, alone, atol=1e-4, rtol=1e-3)
    assert (launched(place, processes) / "stdout").read_text().count(f"saved an adapter in {name}") <= 1


@pytest.mark.parametrize(("processes", "name"), [(2, "distill"), (4, "reward")])
def test_the_held_out_rows_are_measured_with_the_divided_model(processes, name):
    found, alone = (metrics(launched(CPU, n) / name) for n in (processes, 1))
    part = "held_out" if name == "reward" else "fidelity"
    assert found["num_processes"] == processes / 2
    assert found[part].keys() == alone[part].keys()
    for key, value in alone[part].items():
        if isinstance(value, float):
            assert found[part][key] == pytest.approx(value, rel=1e-3, abs=1e-4), key
    files = [sorted(p.name for p in (launched(CPU, n) / name).iterdir()) for n in (processes, 1)]
    assert files[0] == files[1]


@cache
def resumed(place):
    """Resume each kind of training in the middle, and with another tp_size; return the folder and stderr."""
    whole = launched(place, 2)
    cases = {}
    for name in ("sft", "reward"):
        copytree(whole / name / "checkpoint-2", whole / f"{name}-resumed" / "checkpoint-2")
        cases[name] = [*words_of(name, f"{name}-resumed", 2), "--resume", "auto"]
    copytree(launched(place, 1) / "sft" / "checkpoint-2", whole / "of-one" / "checkpoint-2")
    cases["of one"] = [*words_of("sft", "of-one", 2), "--resume", "auto"]
    cases["all weights"] = [*words_of("sft", "all-weights", 2), "--use_peft", "false"]
    cases["noise"] = [*words_of("sft", "noise", 2), "--neftune_noise_alpha", "5"]
    return whole, run_cases(whole, place, 2, cases, "resumed").stderr


@pytest.mark.parametrize("place", places(2))
@pytest.mark.parametrize("name", ["sft", "reward"])
def test_a_training_resumes_in_the_middle(place, name):
    folder, _ = resumed(place)
    require_same_adapter(folder / f"{name}-resumed", folder / name, **REPEATED[place])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("of one", "was written with tensor_parallel 1 (here 2)"),
        ("all weights", "all weights of this model train; set use_peft: true, or launch with"),
        ("noise", "neftune_noise_alpha is not supported with tensor parallelism"),
    ],
)
def test_what_cannot_work_is_rejected_with_one_message(name, message):
    folder, printed = resumed(CPU)
    assert json.loads((folder / "resumed-0.json").read_text())[name]["code"] == 1
    assert message in printed
    assert "Traceback" not in printed
