"""The files of a plan are taken by the parsers and the schedulers that read them, and name the plan's devices."""

import os
import shlex
import subprocess
from dataclasses import replace

import pytest
import yaml

from onetrunk import cli
from onetrunk.costs import decode_split
from onetrunk.plan.hardware import GIB, Pool, load_catalog
from onetrunk.plan.job import INT8_BYTES, NF4_BYTES, read_model
from onetrunk.plan.launch import PORT, Launch, launch_files, settings_of, trainer_command, write_files
from onetrunk.plan.memory import engine_parts
from onetrunk.plan.search import Space, evaluate, host_gib, search
from onetrunk.plan.timing import COLOCATED, LOCAL, PIPELINED, SERVER, SampleLayout, TrainLayout
from onetrunk.stages.ppo import parse_ppo
from onetrunk.stages.tools.serve import parse_serve
from tests.plan.support import SMALL, job_7b
from tests.stages.recipes import ROOT, commands_of
from tests.test_launch_files import SLURM, check_elastic, launched, run_shell, sbatch_options

__all__ = ["run_shell"]  # A fixture.
pytestmark = pytest.mark.usefixtures("at_the_root")

DEVICE = load_catalog().devices["H100-80GB"]
CONFIG = "recipes/qwen2.5-0.5b/ppo.yaml"
# Layouts of training and sampling, and the schedule.
PLANS = {
    "servers": (TrainLayout(DEVICE, 4, rows=512), SampleLayout(DEVICE, SERVER, 2, 2), "one_step"),
    "hybrid": (TrainLayout(DEVICE, 16, shards=8), SampleLayout(DEVICE, LOCAL, 16), "sync"),
    "staged": (TrainLayout(DEVICE, 2, rows=512, stages=4), SampleLayout(DEVICE, PIPELINED, 2, 1, 4, 32), "sync"),
    "apart": (TrainLayout(DEVICE, 8, serves_reward=True), SampleLayout(DEVICE, SERVER, 7), "async"),
    "one": (TrainLayout(DEVICE, 1), SampleLayout(DEVICE, LOCAL, 1), "sync"),
    "colocated": (TrainLayout(DEVICE, 1, rows=512), SampleLayout(DEVICE, COLOCATED, 1, rows=64), "sync"),
    "divided": (TrainLayout(DEVICE, 2, 2, serves_reward=True), SampleLayout(DEVICE, LOCAL, 2, 2), "sync"),
    "stages": (TrainLayout(DEVICE, 4, shards=4), SampleLayout(DEVICE, PIPELINED, 2, 1, 2, 16), "sync"),
}
FAST = ("servers", "hybrid", "staged")


def launch_of(name: str, folder, **changes) -> Launch:
    one = job_7b(reward=SMALL, adapted_layers=28, **changes)
    plan = evaluate(one, *PLANS[name])
    return Launch(one, plan, load_catalog(), CONFIG, str(folder), "spot", True, "org/reward")


@pytest.fixture(params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PLANS])
def written(request, tmp_path):
    """Return a launch whose files are in a folder."""
    launch = launch_of(request.param, tmp_path)
    write_files(launch)
    return launch


def check_settings(launch: Launch, words: list[str]) -> None:
    """Check the PPO settings of a command, which the complete parser takes."""
    parsed, plan = parse_ppo(words[words.index("--config") :]), launch.plan
    settings = next(part for part in parsed if hasattr(part, "schedule"))
    assert settings.schedule == plan.schedule and settings.resume_from_checkpoint == "auto"
    assert settings.use_vllm is (plan.sample.engine not in (LOCAL, PIPELINED))
    assert (settings.rollout_backend == "pipelined") is (plan.sample.engine == PIPELINED)
    if plan.sample.engine == PIPELINED:
        # 16 rows of two stages, or 32 of four, so 8 per process; the split is the one that a run would choose.
        stages = plan.sample.stages
        assert (settings.pipeline_stages, settings.pipeline_batches, settings.max_rollout_rows) == (stages, stages, 8)
        assert settings.pipeline_split == list(decode_split(launch.job.shape, stages))
    assert settings.pipeline_training is plan.train.is_staged
    if plan.sample.engine == SERVER:
        assert len(settings.vllm_server_base_url) == plan.sample.replicas
    if plan.train.rows == 512:
        assert settings.microbatch_tokens == plan.train.tokens
    served = any("/classify#model=org/reward" in word for word in words)
    assert served is plan.train.serves_reward


def test_bash_reads_every_script_and_the_launch_line_parses(written, run_shell, tmp_path):
    for path in [*tmp_path.glob("*.sh"), *tmp_path.glob("*.sbatch")]:
        subprocess.run(["bash", "-n", str(path)], check=True)
    if written.plan.train.count == 1:
        (words,) = [c for c in commands_of((tmp_path / "launch.sh").read_text().replace("exec ", "")) if "ppo" in c]
        check_settings(written, words)
        return
    env = {"SERVER_HOST": "s1", "MAIN_HOST": "n1", "NODE_RANK": "0"}
    code, (call,) = run_shell(["bash", str(tmp_path / "launch.sh")], **env)
    assert code == 0
    options = launched(call["words"])
    check_elastic(options, call["env"])
    check_settings(written, call["words"])
    assert int(options["--num_processes"]) == written.plan.train.count


def test_the_accelerate_config_says_how_the_base_is_held(written, tmp_path):
    config = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    train = written.plan.train
    assert config["num_processes"] == train.count and config["use_cpu"] is False
    kind = "FSDP" if train.shards > 1 else "MULTI_GPU" if train.count > 1 else "NO"
    assert config["distributed_type"] == kind
    sizes = config.get("parallelism_config", {})
    if train.tensor > 1:
        assert sizes["parallelism_config_tp_size"] == train.tensor
    if 1 < train.shards < train.count:
        assert sizes["parallelism_config_dp_replicate_size"] * sizes["parallelism_config_dp_shard_size"] == train.count


def test_slurm_takes_the_job_and_it_starts_the_plan(written, run_shell, tmp_path):
    path = tmp_path / "job.sbatch"
    options = sbatch_options(path)
    env = {**SLURM, "SERVER_HOST": "s1", "PRINTS_scontrol": "n1\nn2", "PRINTS_squeue": "n1", "VLLM_PYTHON": "true"}
    code, calls = run_shell(["bash", str(path)], **env)
    assert code == 0
    words = next(call["words"] for call in calls if call["words"][0] == "srun")
    launch = launched(words)
    assert int(launch["--num_processes"]) == written.plan.train.count
    assert int(options["nodes"]) == written.machines
    check_settings(written, words)


def test_skypilot_and_kubeflow_start_the_plan(written, run_shell, tmp_path):
    task = yaml.safe_load((tmp_path / "skypilot.yaml").read_text())
    assert task["resources"]["use_spot"] is True and task["num_nodes"] == written.machines
    env = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": str(written.machines), "MIRROR": "s3://b"}
    env |= {"VLLM_PYTHON": "true", **task["envs"], "MIRROR": "s3://b"}
    env |= {"SERVER_HOST": "s1"} if "SERVER_HOST" in task["envs"] else {}
    code, calls = run_shell(["bash", "-c", task["run"]], **env)
    words = next(call["words"] for call in calls if call["words"][:2] == ["onetrunk", "ppo"])
    assert code == 0 and launched(words)["--main_process_ip"] == "10.0.0.1"
    assert words[words.index("--checkpoint_mirror") + 1] == "s3://b"
    trainer = yaml.safe_load((tmp_path / "trainjob.yaml").read_text())["spec"]["trainer"]
    assert trainer["numNodes"] == written.machines
    env = {"PET_NNODES": str(written.machines), "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29400"}
    env |= {"VLLM_PYTHON": "true"}
    env |= {"SERVER_HOST": "s1"} if any(entry["name"] == "SERVER_HOST" for entry in trainer["env"]) else {}
    script = trainer["args"][0].replace("cd /onetrunk", f"cd {ROOT}")
    code, calls = run_shell([*trainer["command"], script], **env)
    words = next(call["words"] for call in calls if call["words"][:2] == ["onetrunk", "ppo"])
    assert code == 0 and int(launched(words)["--num_processes"]) == written.plan.train.count


@pytest.mark.parametrize(
    ("config", "before", "after", "expected"),
    [
        ("recipes/qwen2.5-1.5b-tools/ppo.yaml", 2.0, NF4_BYTES, (True, False, "bfloat16")),  # Its dtype is auto.
        (CONFIG, 2.0, INT8_BYTES, (False, True, "bfloat16")),
        (CONFIG, 2.0, 4.0, (False, False, "float32")),
        ("recipes/llama-3.1-8b/ppo_qlora.yaml", NF4_BYTES, 2.0, (False, False, "bfloat16")),
    ],
)
def test_another_precision_of_the_base_replaces_all_settings_of_the_recipe(config, before, after, expected):
    one = job_7b(base_bytes=before)
    plan = evaluate(one, TrainLayout(DEVICE, 1, base_bytes=after), SampleLayout(DEVICE, LOCAL, 1), "sync")
    words = settings_of(Launch(one, plan, load_catalog(), config, "plans"))
    model = next(part for part in parse_ppo(["--config", config, *words]) if hasattr(part, "load_in_4bit"))
    assert (model.load_in_4bit, model.load_in_8bit, model.dtype) == expected


@pytest.mark.parametrize("name", ["servers", "one", "stages", "colocated"])
@pytest.mark.parametrize(
    "recipe",
    [
        "--use_vllm true",
        "--use_vllm true --schedule async --max_staleness 3",
        "--use_vllm true --vllm_mode colocate --vllm_enable_sleep_mode true --vllm_gpu_memory_utilization 0.5",
    ],
)
def test_the_sampler_of_a_plan_replaces_that_of_the_recipe(name, recipe, tmp_path):
    launch = replace(launch_of(name, tmp_path, uses_server=True), words=tuple(recipe.split()))
    check_settings(launch, shlex.split(trainer_command(launch, "launch.sh")))


def test_every_scheduler_is_told_the_machine_of_the_servers(tmp_path):
    here, apart = (launch_files(launch_of(name, tmp_path)) for name in ("servers", "apart"))
    head, _, rest = apart["skypilot.yaml"].partition("name: ppo")
    assert "--env SERVER_HOST=NAME" in head and yaml.safe_load(rest)["envs"]["SERVER_HOST"] is None
    trainer = yaml.safe_load(apart["trainjob.yaml"])["spec"]["trainer"]
    # The script ends with a message where it is empty.
    assert {"name": "SERVER_HOST", "value": ""} in trainer["env"]
    before = f"# The servers come first, on a machine of their own: bash {tmp_path}/servers.sh. SERVER_HOST is"
    for name in ("job.sbatch", "skypilot.yaml", "trainjob.yaml"):
        assert before in apart[name] and "SERVER_HOST" not in here[name]
        # Such a job starts its servers itself.
        assert "The servers come first" not in here[name] and f"bash {tmp_path}/servers.sh &" in here[name]


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B"])
def test_the_share_of_a_colocated_engine_is_one_that_vllm_takes(model):
    one = job_7b(model=read_model(model))
    (best, *_) = search(one, [Pool(DEVICE, 1, 1)], Space(engines=(COLOCATED,)))
    words = settings_of(Launch(one, best, load_catalog(), CONFIG, "plans"))
    share = float(words[words.index("--vllm_gpu_memory_utilization") + 1])
    # When the engine starts, vLLM asks for its share of all memory, and only what the trainer has left is free.
    total, engine = DEVICE.memory_gib * GIB, sum(engine_parts(one, best.sample).values())
    free = total - (best.peaks()["generate"] - engine)
    assert engine <= share * total <= free


def test_a_colocated_engine_has_the_base_a_second_time_only_if_the_base_is_quantised():
    base, sleeping = {}, {}
    for kind, num_bytes in (("bf16", 2.0), ("nf4", 0.516)):
        train = TrainLayout(DEVICE, 1, rows=512, base_bytes=num_bytes)
        sample = SampleLayout(DEVICE, COLOCATED, 1, rows=64)
        one = replace(job_7b(), base_bytes=num_bytes)
        plan = evaluate(one, train, sample, "sync")
        base[kind] = plan.memory["generate"]["weights"] / plan.memory["update"]["weights"]
        sleeping[kind] = "sleeping engine" in host_gib(one, plan)
    assert base == {"bf16": 1.0, "nf4": 2.0} and sleeping == {"bf16": False, "nf4": True}


@pytest.mark.parametrize("name", ["one", "apart", "servers"])
def test_names_are_only_names_to_a_shell(name, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("onetrunk", "srun", "scontrol", "squeue"):
        (programs / program).write_text("#!/bin/sh\necho n1\n")
        (programs / program).chmod(0o755)
    trap = f"m$(touch {tmp_path}/made)`touch {tmp_path}/made`';touch {tmp_path}/made;'"
    folder = tmp_path / "a $(touch made) folder"
    own = launch_of(name, folder)
    own = replace(own, job=replace(own.job, model=replace(own.job.model, name=trap)), config=trap, reward=trap)
    for path in write_files(own):
        if path.suffix in (".sh", ".sbatch"):
            env = {**os.environ, **SLURM, "SERVER_HOST": "s1", "VLLM_PYTHON": "true"}
            env["PATH"] = f"{programs}:{env['PATH']}"
            subprocess.run(["bash", str(path)], env=env, check=True, capture_output=True, timeout=300)
            assert not (tmp_path / "made").exists() and not (ROOT / "made").exists(), path.name
    (line,) = [line for line in (folder / "launch.sh").read_text().splitlines() if line.startswith("exec ")]
    assert trap in shlex.split(line)
    yaml.safe_load((folder / "skypilot.yaml").read_text())


def test_a_colocated_engine_is_planned_for_one_process_only():
    ranking = search(job_7b(), [Pool(DEVICE, 8, 8)], Space(engines=(COLOCATED,)))
    assert {entry.count for entry in ranking} == {1}


def test_servers_take_the_devices_that_the_trainer_leaves(tmp_path):
    files = launch_files(launch_of("servers", tmp_path))
    assert "first=$((4 + number * 2))" in files["servers.sh"] and "seq 0 1" in files["servers.sh"]
    assert "CUDA_VISIBLE_DEVICES=$(seq -s, 0 3)" in files["launch.sh"]
    line = next(line for line in files["servers.sh"].splitlines() if "onetrunk serve" in line)
    words = line.split(" $((")[0].split()[2:]
    (args,) = parse_serve([*words, str(PORT)])
    assert (args.tensor_parallel_size, args.max_loras, args.max_model_len, args.dtype) == (2, 3, 1024, "bfloat16")
    assert "--runner pooling" in launch_files(launch_of("divided", tmp_path))["servers.sh"]
    apart = launch_files(launch_of("apart", tmp_path))
    assert "$SERVER_HOST" in apart["launch.sh"] and "first=$((0 + number * 1))" in apart["servers.sh"]
    # Seven servers, and the reward model on the last device of their machine.
    assert "seq 0 6" in apart["servers.sh"] and "CUDA_VISIBLE_DEVICES=7 " in apart["servers.sh"]


def test_a_plan_without_servers_writes_none(tmp_path):
    assert "servers.sh" not in launch_files(launch_of("hybrid", tmp_path))
    cpu = load_catalog().devices["CPU"]
    launch = launch_of("one", tmp_path)
    plan = evaluate(launch.job, TrainLayout(cpu, 1), SampleLayout(cpu, LOCAL, 1), "sync")
    files = launch_files(Launch(launch.job, plan, load_catalog(), CONFIG, str(tmp_path)))
    assert set(files) == {"launch.sh", "accelerate.yaml"} and "--use_cpu true" in files["launch.sh"]
    assert yaml.safe_load(files["accelerate.yaml"])["use_cpu"] is True


PLANNED = ROOT / "recipes" / "launch" / "planned"
# Run it again after a change of templates or rates.
PLANNED_COMMAND = """plan --config recipes/llama-3.1-8b/ppo.yaml --model meta-llama/Llama-3.1-8B --hardware 8xH100-80GB
    --schedules one_step --engines server --completion_tokens 300 --prompt_tokens 200 --write recipes/launch/planned"""


def test_the_example_of_the_repository_is_what_a_plan_writes(empty_folder):
    assert cli.main(PLANNED_COMMAND.split()) == 0
    for path in sorted((empty_folder / "recipes/launch/planned").iterdir()):
        # The last digits of numbers differ between versions and processors.
        if path.suffix != ".json":
            assert path.read_text() == (PLANNED / path.name).read_text(), f"run onetrunk {PLANNED_COMMAND}"
