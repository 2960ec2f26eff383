"""The files of recipes/launch start commands that our parsers take, and are what their schedulers accept.

The shell code is run with stand-ins for the programs that it calls, which record their arguments.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from onetrunk.stages.launch import split_words
from tests.stages.recipes import ROOT
from tests.stages.test_recipes import check_command

pytestmark = pytest.mark.usefixtures("at_the_root")
LAUNCH = ROOT / "recipes" / "launch"
BATCH_FILES = sorted(LAUNCH.glob("*.sbatch"))
TRAINERS = [path for path in BATCH_FILES if path.name != "slurm_server.sbatch"]
# Options of sbatch that our files may use, each with the form of its value; None: the option takes none.
SBATCH_OPTIONS = {"job-name": r"[\w-]+", "time": r"(\d+-)?\d+:\d\d:\d\d", "mem": r"\d+G?", "output": r"\S+"}
SBATCH_OPTIONS |= dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task"), r"\d+")
SBATCH_OPTIONS |= {"requeue": None, "open-mode": r"append|truncate", "signal": r"([RB]:)?[A-Z0-9]+@\d+"}
# What Slurm sets in a job of two nodes.
SLURM = {"SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "64"}
SLURM["SLURM_GPUS_PER_NODE"] = "8"
RECORD = """
import json, os, sys
name = os.path.basename(sys.argv[0])
watched = ("TORCH_", "PET_", "SRUN_")
entry = {"words": [name, *sys.argv[1:]], "env": {k: v for k, v in os.environ.items() if k.startswith(watched)}}
with open(os.environ["RECORDED"], "a") as calls:
    calls.write(json.dumps(entry) + "\\n")
print(os.environ.get(f"PRINTS_{name}", ""))
sys.exit(int(os.environ.get(f"EXITS_{name}", 0)))
"""


@pytest.fixture
def run_shell(tmp_path):
    """Return a function that runs words of a shell and returns its exit code and the calls of the programs in it."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("srun", "scontrol", "squeue", "scancel", "curl", "ray", "onetrunk"):
        program = programs / name
        program.write_text(f"#!{sys.executable}\n{RECORD}")
        program.chmod(0o755)

    def run(words: list[str], **env: str) -> tuple[int, list[dict]]:
        record = tmp_path / "calls"
        record.unlink(missing_ok=True)
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        done = subprocess.run(words, env={**os.environ, "PATH": path, "RECORDED": str(record), **env}, timeout=1500)
        calls = [json.loads(line) for line in record.read_text().splitlines()]
        return done.returncode, calls

    return run


def called(calls: list[dict], name: str) -> list[list[str]]:
    """Return the words of each call of a program."""
    return [call["words"] for call in calls if call["words"][0] == name]


def launched(words: list[str]) -> dict[str, str]:
    """Check a whole command that contains `onetrunk ppo`; return the options of the launch."""
    words = words[words.index("onetrunk") :]
    check_command(words)
    assert words[1] == "ppo" and words[words.index("--resume") + 1] == "auto"
    return {f"--{name}": value for name, value in split_words("ppo", words[2:])[0].items()}


def check_elastic(options: dict[str, str], env: dict[str, str]) -> None:
    """Crashed processes are started again: c10d can, and only with this variable do they meet again."""
    assert options["--rdzv_backend"] == "c10d" and int(options["--max_restarts"]) > 0
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def sbatch_options(path: Path) -> dict[str, str | None]:
    """Return the options in the #SBATCH lines before the first command, where sbatch stops reading; all are valid."""
    options: dict[str, str | None] = {}
    for line in path.read_text().splitlines()[1:]:
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            name, is_given, value = line.removeprefix("#SBATCH --").partition("=")
            options[name] = value if is_given else None
            form = SBATCH_OPTIONS[name]
            assert not is_given if form is None else re.fullmatch(form, value), line
    assert len(options) == path.read_text().count("\n#SBATCH "), "an option after the first command is ignored"
    return options


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.name)
def test_the_command_of_a_training_job_parses_uses_every_gpu_and_gets_the_signal_in_time_to_save(path, run_shell):
    options = sbatch_options(path)
    assert options["open-mode"] == "append", "a requeued job would overwrite its log"
    is_for, _, seconds = options["signal"].partition("@")
    # The launcher is the task itself, so steps are signalled, not the batch shell.
    assert is_for == "TERM" and options["ntasks-per-node"] == "1"
    code, calls = run_shell(["bash", str(path), "77"], **SLURM, PRINTS_squeue="n1", PRINTS_scontrol="n1\nn2")
    assert code == 0
    (srun,) = (call for call in calls if call["words"][0] == "srun")
    words, env = srun["words"], srun["env"]
    command = [word for word in words[1:] if word != "--kill-on-bad-exit=0"]
    assert command[:2] == ["onetrunk", "ppo"], "nothing stands between srun and the launcher"
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < int(seconds) and env["SRUN_CPUS_PER_TASK"] == "64"
    launch = launched(words)
    check_elastic(launch, env)
    assert int(launch["--num_processes"]) == int(options["nodes"]) * int(options["gpus-per-node"])
    if options["nodes"] == "1":
        assert env["PET_RDZV_ENDPOINT"] == "localhost:0"
    else:
        assert "PET_RDZV_ENDPOINT" not in env
        assert (launch["--num_machines"], launch["--main_process_ip"]) == ("2", "n1")
        assert 1024 < int(launch["--main_process_port"]) < 32768


@pytest.mark.parametrize("path", TRAINERS, ids=lambda path: path.name)
@pytest.mark.parametrize("left, is_requeued", [(200, True), (5000, False)])
def test_a_stopped_job_is_requeued_and_a_failed_one_is_not(path, run_shell, left, is_requeued):
    date = subprocess.run(["date", "-d", f"{left} seconds", "+%FT%T"], capture_output=True, text=True, check=True)
    env = {**SLURM, "PRINTS_squeue": date.stdout.strip(), "EXITS_srun": "1"}
    code, calls = run_shell(["bash", str(path), "77"], **env)
    assert code == 1 and called(calls, "scancel") == []
    assert (["scontrol", "requeue", "12345"] in called(calls, "scontrol")) is is_requeued


def test_the_training_job_asks_the_server_at_the_port_where_it_listens(run_shell):
    _, calls = run_shell(["bash", str(LAUNCH / "slurm_server.sbatch")], **{**SLURM, "SLURM_JOB_ID": "77"})
    (server,) = called(calls, "srun")
    assert server[1:3] == ["vllm", "serve"]
    port = server[server.index("--port") + 1]
    path = LAUNCH / "slurm_with_server.sbatch"
    _, calls = run_shell(["bash", str(path), "77"], **SLURM, PRINTS_squeue="n7")
    assert called(calls, "curl")[0][-1] == f"http://n7:{port}/health"
    (words,) = called(calls, "srun")
    reward = words[words.index("--reward_funcs") + 1]
    assert reward == f"http://n7:{port}/classify#model={server[3]}&tokenizer={server[3]}"
    assert called(calls, "scancel") == [["scancel", "77"]], "the server ends with the run"


def test_the_training_job_ends_if_the_job_of_its_server_has_ended(run_shell):
    code, calls = run_shell(["bash", str(LAUNCH / "slurm_with_server.sbatch"), "77"], **SLURM)
    assert code == 1 and called(calls, "srun") == []


def test_the_command_of_the_skypilot_task_parses(run_shell):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    env = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    env |= {name: value or "s3://bucket/ppo" for name, value in task["envs"].items()}
    code, calls = run_shell(["bash", "-c", task["run"]], **env)
    assert code == 0
    (call,) = calls
    launch = launched(call["words"])
    check_elastic(launch, call["env"])
    assert (launch["--num_processes"], launch["--main_process_ip"]) == ("16", "10.0.0.1")
    assert call["words"][call["words"].index("--checkpoint_mirror") + 1] == "s3://bucket/ppo"


def test_the_command_of_the_trainjob_parses(run_shell):
    trainer = yaml.safe_load((LAUNCH / "trainjob.yaml").read_text())["spec"]["trainer"]
    # What Kubeflow Trainer sets, and what our file sets.
    env = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    env |= {"PET_MASTER_ADDR": "ppo-node-0-0.ppo", "PET_MASTER_PORT": "29400", "PET_NODE_RANK": "1"}
    env |= {entry["name"]: entry["value"] for entry in trainer["env"] if "value" in entry}
    (script,) = trainer["args"]
    # The image has the repository in a folder of its own.
    script = script.replace("cd /onetrunk", f"cd {ROOT}")
    code, calls = run_shell([*trainer["command"], script], **env)
    assert code == 0
    (call,) = calls
    launch = launched(call["words"])
    check_elastic(launch, call["env"])
    assert int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == trainer["numProcPerNode"]
    assert int(launch["--num_processes"]) == trainer["numNodes"] * trainer["numProcPerNode"]
    assert re.search(r"^exec onetrunk ppo", script, re.MULTILINE), "the launcher must be the first process"


def test_the_command_of_the_ray_job_parses(run_shell):
    code, calls = run_shell(["bash", str(LAUNCH / "ray_job.sh")], OUTPUT_DIR="/shared/runs/ppo")
    assert code == 0
    (words,) = called(calls, "ray")
    assert words[1:3] == ["job", "submit"]
    file = words[words.index("--runtime-env") + 1]
    launch = launched(words)
    check_elastic(launch, yaml.safe_load(Path(file).read_text())["env_vars"])
    assert launch["--num_processes"] == words[words.index("--entrypoint-num-gpus") + 1]
    assert words[words.index("--output_dir") + 1] == "/shared/runs/ppo"
