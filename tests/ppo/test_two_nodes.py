"""Two nodes of two processes each, started here through the shipped configs, give the run of one process."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from onetrunk import cli
from tests.ppo.support import SGD, assert_same
from tests.processes import ON_CPUS, ROOT, environment, free_port
from tests.stages.small_runs import make_material

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


# In the place of Slurm: two nodes are two launchers on this machine. As machine 0 the later one would reject the port
# that the other has opened.
SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=0
[ "$1 $2" = "onetrunk ppo" ] || exit 9
for node in 0 1; do
    "$PYTHON" -m onetrunk ppo --machine_rank 1 "${@:3}" &
    nodes[$node]=$!
done
wait "${nodes[0]}" && wait "${nodes[1]}"
"""
RECIPE = {
    "model_name_or_path": "base",
    "dataset_name": "prompts.jsonl",
    "reward_funcs": ["reward.py:short"],
    "output_dir": "out",
    "rollout_batch_size": 8,
    "num_rollouts": 2,
    "num_ppo_epochs": 2,
    "max_completion_length": 4,
    "lora_r": 2,
    "report_to": "none",
    "disable_tqdm": True,
    **SGD,
}


def test_the_slurm_file_trains_on_two_nodes_what_one_process_trains(tmp_path, monkeypatch):
    make_material(tmp_path)
    for name in ("accelerate_configs", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    recipe = tmp_path / "recipes/llama-3.1-8b/ppo.yaml"  # The name that the file gives.
    recipe.parent.mkdir(parents=True)
    recipe.write_text(json.dumps(RECIPE))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    slurm |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_GPUS_PER_NODE": "2"}
    slurm |= {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": sys.executable}
    # As every launch file sets it: an elastic restart hangs without it.
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **ON_CPUS, **slurm)
    command = ["bash", str(ROOT / "recipes/launch/slurm_nodes.sbatch")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the frozen base is sharded over 2 processes, 2 copies" in done.stderr
    assert done.stdout.count("ppo: saved the adapter") == 1
    found = load_file(tmp_path / "out/adapter_model.safetensors")
    shutil.move(tmp_path / "out", tmp_path / "of-two-nodes")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ppo", "--config", str(recipe), "--use_cpu", "true"]) == 0
    # Other packs and another order of the sums.
    assert_same(found, load_file(tmp_path / "out/adapter_model.safetensors"), atol=2e-5, rtol=1e-4)
