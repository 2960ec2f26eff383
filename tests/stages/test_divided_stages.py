"""`onetrunk sft`, `reward` and `distill` with a divided base, through the shipped configs: the run of one process.

Two processes form one group (tensor parallelism) or one pipeline (stages), which trains on all rows; four form two,
which train on different rows.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp

import pytest
import torch

from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.places import CPU, GPU, REPEATED, launch, on_gpus
from tests.stages.small_runs import LINEAR, NOUNS, adapter, judged_pairs, metrics, nouns, write_rows
from tests.tiny import tiny_tokenizer

WORKER = Path(__file__).with_name("stages_worker.py")
# The norm of every gradient is above 1, so all are clipped.
OPTIONS = [*LINEAR, *"--max_grad_norm 1 --max_steps 4 --save_steps 2 --logging_steps 1 --use_peft true".split()]
# 5 rows: the last batch of an evaluation is not full.
OPTIONS += "--eval_strategy steps --eval_steps 2 --eval_size 5 --per_device_eval_batch_size 2".split()
# 14 pairs: two groups would fill up the fourth batch.
PAIRS = "--dataset_name pairs.jsonl --max_steps 3 --activation_checkpointing false"


@dataclass(frozen=True)
class Division:
    """How the processes of a launch divide the base.

    Args:
        cases: the commands that are run on one process and on two, the first one also with what is `rejected`.
        four: the case of four processes.
        near, near_metrics: tolerances of the adapter and of what is measured.
        rejected: name -> (options, message); without options: resumed from a checkpoint of one process.
        words, own: options of launches of several processes, and those of a case.
    """

    config: str
    cases: dict[str, str]
    four: str
    near: dict[str, float]
    near_metrics: dict[str, float]
    rejected: dict[str, tuple[str, str]]
    words: str = ""
    own: dict[str, str] = field(default_factory=dict)

    def runs(self) -> list[tuple[int, str]]:
        """Return (processes, case) of the launches of several processes."""
        return [*((2, name) for name in self.cases), (4, self.four)]


WHOLE = ("--use_peft false", "all weights of this model train; set use_peft: true, or launch with")
TENSOR = Division(
    "tensor_parallel",
    {
        "sft": "sft --dataset_name texts.jsonl --activation_checkpointing false",
        # The head is the divided embedding; layers run again in the backward.
        "tied head": "sft --dataset_name texts.jsonl --model_name_or_path tied --activation_checkpointing true",
        "reward": f"reward {PAIRS} --adapter_layers top-2",
        "distill": f"distill {PAIRS}",
    },
    "reward",
    # Gradients agree to 1e-4 of their largest entry (tests/models); the learning rate is 0.1.
    {"atol": 1e-4, "rtol": 1e-3},
    {"abs": 1e-4, "rel": 1e-3},
    {
        "of one": ("", "was written with tensor_parallel 1 (here 2)"),
        "all weights": WHOLE,
        "dropout": (
            "--lora_dropout 0.1",
            "is not supported with dropout (model.layers.0.self_attn.q_proj.lora_dropout.default)",
        ),
        "noise": ("--neftune_noise_alpha 5", "neftune_noise_alpha is not supported with tensor parallelism"),
    },
)
STAGES = Division(
    "pipelined",
    {
        "reward": f"reward {PAIRS} --center_rewards_coefficient 0.01",
        # Frozen lower layers, microbatches of several pairs, batches that are accumulated, layers that run again.
        "uneven": "reward --dataset_name pairs.jsonl --adapter_layers top-2 --gradient_accumulation_steps 2"
        " --activation_checkpointing true",
        # A reward model labels the pairs, and rows of one completion: two pipelines have different numbers of pairs.
        "teacher": f"distill {PAIRS} --teacher scorer --unlabelled_dataset_name singles.jsonl",
    },
    "teacher",
    # Sums in another order, over 3 or 4 steps of float32 with a learning rate of 0.1.
    {"atol": 1e-5, "rtol": 1e-4},
    {"abs": 1e-5, "rel": 1e-4},
    {
        "all weights": WHOLE,
        "sizes": ("--pipeline_split 1 2", "pipeline_split is [1, 2], and the 4 layers of the model"),
        "stages": ("--pipeline_stages 3", "pipeline_training forms pipelines of 3 processes and 2 run"),
        "noise": ("--neftune_noise_alpha 5", "neftune_noise_alpha is not supported with pipeline_training"),
    },
    "--pipeline_training true --pipeline_stages 2",
    {"uneven": "--pipeline_split 1 3 --pipeline_batches 2"},
)
KINDS = {"tensor": TENSOR, "stages": STAGES}
RUNS = [(kind, CPU, *run) for kind, division in KINDS.items() for run in division.runs()]
RUNS += [on_gpus("tensor", GPU, *run, processes=run[0]) for run in TENSOR.runs()]
STAGED = [("stages", *run) for run in STAGES.runs()]
pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(1800)]


def words_of(kind, name, output, processes=1):
    verb, *own = KINDS[kind].cases[name].split()
    rows = 4 // (2 if "--gradient_accumulation_steps" in own else 1) // (2 if processes == 4 else 1)
    divided = "" if processes == 1 else f"{KINDS[kind].words} {KINDS[kind].own.get(name, '')}"
    rows = ["--per_device_train_batch_size", str(rows)]
    return [verb, *OPTIONS, *own, *divided.split(), *rows, "--output_dir", output]


@cache
def material():
    """Return a folder of models and rows; each launch begins with a copy of it."""
    folder = Path(mkdtemp()) / "made"
    folder.mkdir()
    saved_base(folder / "tied", "qwen2")
    saved_reward_adapter(folder / "scorer", saved_base(folder / "base"), tokenizer=tiny_tokenizer())
    # Of different lengths: the groups have different numbers of tokens.
    texts = [{"prompt": f"the {n} ", "completion": f"runs {o} fast ." + " the dog" * (i % 3)} for n, o, i in nouns(37)]
    write_rows(folder / "texts.jsonl", texts)
    write_rows(folder / "pairs.jsonl", judged_pairs(37))
    singles = [{"prompt": f"the {n} ", "completion": "sees " * i + "."} for i, n in enumerate(NOUNS)]
    write_rows(folder / "singles.jsonl", singles)
    return folder


def run_cases(kind, place, processes, folder, cases, name):
    """Run {case: words} in one launch; return the folder, with what was printed and NAME-RANK.json of facts."""
    if not folder.exists():
        copytree(material(), folder)
    if (place, processes) == (CPU, 1):
        cases = {case: [*words, "--use_cpu", "true"] for case, words in cases.items()}
    (folder / f"{name}.cases").write_text(json.dumps(cases))
    done = launch(place, KINDS[kind].config, processes, WORKER, f"{name}.cases", name, cwd=folder)
    (folder / f"{name}.stdout").write_text(done.stdout)
    (folder / f"{name}.stderr").write_text(done.stderr)
    return folder


@cache
def launched(kind, place, processes):
    """Run the cases of a division; return the folder of the results."""
    names = [KINDS[kind].four] if processes == 4 else KINDS[kind].cases
    cases = {name: words_of(kind, name, name, processes) for name in names}
    return run_cases(kind, place, processes, Path(mkdtemp()) / "runs", cases, "facts")


def facts(kind, place, processes, name, rank=0):
    return json.loads((launched(kind, place, processes) / f"facts-{rank}.json").read_text())[name]


def log_of(folder):
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize(("kind", "place", "processes", "name"), RUNS)
def test_every_process_holds_its_share_of_the_base(kind, place, processes, name):
    alone = facts(kind, place, 1, name)
    for rank in range(processes):
        found = facts(kind, place, processes, name, rank)
        assert found["code"] == 0 and found["world_size"] == processes
        assert found["trained_bytes"] == alone["trained_bytes"]
        if kind == "stages":
            assert found["local_bytes"] < 0.8 * alone["local_bytes"]
            continue
        assert found["distributed_type"] == f"MULTI_{'CPU' if place == CPU else 'GPU'}"
        assert found["is_wrapped"] == "DistributedDataParallel"
        assert ["DTensor", False] in found["kinds"] and ["DTensor", True] not in found["kinds"]
        # Half of all matrices; what trains, norms and score heads are whole.
        matrices = alone["local_bytes"] - found["whole_bytes"]
        assert found["local_bytes"] - found["whole_bytes"] == pytest.approx(matrices / 2, rel=0.01)
        # Neither the head nor any other matrix is gathered, in the forward, the backward or an evaluation.
        assert "all_gather_single" not in found["collectives"]


@pytest.mark.parametrize(("kind", "place", "processes", "name"), RUNS)
def test_all_processes_together_train_the_adapter_of_one(kind, place, processes, name):
    found, alone = (adapter(launched(kind, place, n) / name) for n in (processes, 1))
    assert found.keys() == alone.keys()
    for key, expected in alone.items():
        torch.testing.assert_close(found[key], expected, **KINDS[kind].near)
    trained = [found[key].any() for key in found if "lora_B" in key]
    assert trained and all(trained), "nothing was trained"
    assert (launched(kind, place, processes) / "facts.stdout").read_text().count(f"saved an adapter in {name}") <= 1


@pytest.mark.parametrize(("kind", "processes", "name"), [("tensor", 2, "distill"), ("tensor", 4, "reward"), *STAGED])
def test_the_held_out_rows_are_measured_with_the_divided_model(kind, processes, name):
    folders = [launched(kind, CPU, n) / name for n in (processes, 1)]
    files = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert files[0] == files[1]
    found, alone = map(metrics, folders)
    part = "held_out" if KINDS[kind].cases[name].startswith("reward") else "fidelity"
    assert found["num_processes"] == processes / 2
    assert found[part].keys() == alone[part].keys()
    for key, value in alone[part].items():
        if isinstance(value, float):
            near = KINDS[kind].near_metrics
            # Of ranks: two completions with almost the same score may change places.
            near = {**near, "rel": 3e-3} if key == "spearman" else near
            assert found[part][key] == pytest.approx(value, **near, nan_ok=True), key


@pytest.mark.parametrize(("kind", "processes", "name"), STAGED)
def test_the_log_counts_each_row_once(kind, processes, name):
    found, alone = (log_of(launched(kind, CPU, n) / name) for n in (processes, 1))
    assert len(found) == len(alone)
    for one, other in zip(found, alone, strict=True):
        assert one.keys() == other.keys()
        # Two pipelines fill up the last batch of an evaluation.
        compared = [key for key in one if not (processes == 4 and key.startswith("eval_"))]
        for key in compared:
            if not key.endswith(("runtime", "per_second")):
                assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key


@cache
def resumed(kind, place):
    """Resume every case in the middle, from checkpoints of two processes and of one; return the folder."""
    whole, cases, division = launched(kind, place, 2), {}, KINDS[kind]
    for name in division.cases:
        copytree(whole / name / "checkpoint-2", whole / f"{name}-resumed" / "checkpoint-2")
        cases[name] = [*words_of(kind, name, f"{name}-resumed", 2), "--resume", "auto"]
    first = next(iter(division.cases))
    copytree(launched(kind, place, 1) / first / "checkpoint-2", whole / "of-one" / "checkpoint-2")
    for name, (words, _) in division.rejected.items():
        cases[name] = [*words_of(kind, first, "rejected", 2), *words.split()]
    cases["of one"] = [*words_of(kind, first, "of-one", 2), "--resume", "auto"]
    return run_cases(kind, place, 2, whole, cases, "resumed")


@pytest.mark.parametrize(
    ("kind", "place", "name"),
    [(kind, CPU, name) for kind, division in KINDS.items() for name in division.cases]
    + [on_gpus("tensor", GPU, name) for name in TENSOR.cases],
)
def test_a_training_resumes_in_the_middle(kind, place, name):
    folder = resumed(kind, place)
    whole = adapter(folder / name)
    for key, found in adapter(folder / f"{name}-resumed").items():
        torch.testing.assert_close(found, whole[key], **(REPEATED[place] or {"atol": 0, "rtol": 0}))


def test_a_checkpoint_goes_on_in_another_number_of_stages():
    whole, folder = launched("stages", CPU, 1) / "reward", Path(mkdtemp()) / "runs"
    copytree(material(), folder)
    copytree(launched("stages", CPU, 2) / "reward" / "checkpoint-2", folder / "of-stages" / "checkpoint-2")
    words = [*words_of("stages", "reward", "of-stages"), "--resume", "auto"]
    run_cases("stages", CPU, 1, folder, {"of stages": words}, "resumed")
    for found in (adapter(resumed("stages", CPU) / "of-one"), adapter(folder / "of-stages")):
        for key, expected in adapter(whole).items():
            torch.testing.assert_close(found[key], expected, **STAGES.near)
    assert len(log_of(folder / "of-stages")) == len(log_of(whole))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, own in KINDS.items() for name in own.rejected])
def test_what_cannot_work_is_rejected_with_one_message(kind, name):
    folder = resumed(kind, CPU)
    printed = (folder / "resumed.stderr").read_text()
    assert json.loads((folder / "resumed-0.json").read_text())[name]["code"] in (1, 2)
    assert KINDS[kind].rejected[name][1] in printed and "Traceback" not in printed
