"""Two nodes of two processes each, started here through the shipped configs, give the run of one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ppo.support import assert_same

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("two_processes.py"))
CASES = ["shared", "kept"]
# Config -> options for 2 x 2 processes, copies of the base, and processes that share one.
CONFIGS = {
    "hybrid_shard": ["--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"],
    "fsdp2_multi_node": [],
}
SHARDS = {"hybrid_shard": 2, "fsdp2_multi_node": 4}
pytestmark = [pytest.mark.multi_process, pytest.mark.slow]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def environment():
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # As every launch file sets it: an elastic restart hangs without it.
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return env | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def start_node(config, rank, port, folder):
    """Start one of two agents, as the command at the head of the config says."""
    address = ["--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    file = ["--config_file", str(ROOT / f"accelerate_configs/{config}.yaml"), *CONFIGS[config]]
    command = [sys.executable, "-m", "accelerate.commands.launch", *file, "--num_processes", "4", *address]
    with (folder / f"node-{rank}.log").open("w") as log:
        return subprocess.Popen([*command, SCRIPT, str(folder), *CASES], env=environment(), stdout=log, stderr=log)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    done = subprocess.run([sys.executable, SCRIPT, str(folder), *CASES], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("config", CONFIGS)
def test_two_nodes_end_with_the_weights_of_one_process(config, alone, tmp_path):
    port = free_port()
    nodes = [start_node(config, rank, port, tmp_path) for rank in (0, 1)]
    codes = [node.wait(timeout=1500) for node in nodes]
    logs = [(tmp_path / f"node-{rank}.log").read_text() for rank in (0, 1)]
    assert codes == [0, 0], logs[0][-3000:] + logs[1][-3000:]
    for name in CASES:
        facts = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(4)]
        one = json.loads((alone / f"{name}-0.json").read_text())
        assert {f["world_size"] for f in facts} == {4}
        assert all(f["kinds"] == [["DTensor", False], ["Parameter", True]] for f in facts)
        trained = one["trained_bytes"]
        for f in facts:
            assert (f["local_bytes"] - trained) * SHARDS[config] == one["local_bytes"] - trained
        expected = load_file(alone / f"{name}-0.safetensors")
        for rank in range(4):
            # Other packs and another order of the sums.
            assert_same(load_file(tmp_path / f"{name}-{rank}.safetensors"), expected, atol=2e-5, rtol=1e-4)
        sampled = sorted(tuple(map(str, row)) for f in facts for row in f["completions"])
        assert sampled == sorted(tuple(map(str, row)) for row in one["completions"])
