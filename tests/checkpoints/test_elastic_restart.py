"""A process of two is killed: the launchers start both again, they resume, and the result has the same bytes."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.processes import ON_CPUS, ROOT, python
from tests.stages.small_runs import make_material

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(1800)]
# Two rollouts follow the first checkpoint, so the killed process has a rollout to lose.
OPTIONS = "--model_name_or_path base --dataset_name prompts.jsonl --output_dir out --reward_funcs reward.py:dying"
OPTIONS += " --rollout_batch_size 4 --num_rollouts 4 --num_ppo_epochs 1 --num_minibatches 1 --max_completion_length 4"
OPTIONS += " --lora_r 2 --save_steps 2 --use_cpu true --report_to none --disable_tqdm true --resume auto"
# Rank 1 kills or stops itself while it scores the third rollout, once; every call leaves a line.
REWARD = """
import os, signal
from pathlib import Path

def dying(completions, trainer_state, **kwargs):
    rank, step = os.environ["RANK"], trainer_state.global_step
    with open(f"calls-{rank}.txt", "a") as calls:
        calls.write(f"{os.getpid()} {step}\\n")
    for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        if rank == "1" and step == 2 and Path(name).exists():
            Path(name).unlink()
            os.kill(os.getpid(), number)
    return [-float(len(c)) for c in completions]
"""
TORCHRUN = "torch.distributed.run --nnodes 1 --nproc_per_node 2 --max_restarts 1 --rdzv_backend c10d".split()
TORCHRUN += [str(ROOT / "scripts/ppo.py")]
# As the files of recipes/launch do; the config asks for GPUs, ACCELERATE_USE_CPU takes processors instead.
OURS = "onetrunk ppo --accelerate_config ddp --num_processes 2 --max_restarts 1 --rdzv_backend c10d".split()


def launched(folder: Path, launcher: list[str]) -> None:
    """Run PPO on two processes to its end."""
    # Without it the restarted processes hang in init_process_group. The endpoint gives a run on one node its own port.
    rendezvous = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PET_RDZV_ENDPOINT": "localhost:0"}
    # A run that hangs is ended by the time limit of the test.
    python("-m", *launcher, *OPTIONS.split(), cwd=folder, **ON_CPUS, **rendezvous)


def prepared(folder: Path) -> Path:
    make_material(folder)
    (folder / "reward.py").write_text(REWARD)
    return folder


@cache
def uninterrupted() -> Path:
    folder = prepared(Path(mkdtemp()))
    launched(folder, TORCHRUN)
    return folder


def calls(folder: Path, rank: int) -> list[tuple[str, int]]:
    """Return the process and the step of each call of the reward."""
    lines = (folder / f"calls-{rank}.txt").read_text().splitlines()
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def test_after_a_kill_both_processes_restart_and_end_with_the_same_bytes(tmp_path):
    folder = prepared(tmp_path)
    (folder / "kill").touch()
    launched(folder, OURS)
    assert not (folder / "kill").exists()
    for rank in (0, 1):
        assert [step for _, step in calls(uninterrupted(), rank)] == [0, 1, 2, 3]
        processes = {process for process, _ in calls(folder, rank)}
        assert len(processes) == 2, "both processes were started again"
        assert [step for _, step in calls(folder, rank)][-2:] == [2, 3], "the run resumed from its checkpoint"
    for name in ("adapter_model.safetensors", "value_head.safetensors"):
        assert (folder / "out" / name).read_bytes() == (uninterrupted() / "out" / name).read_bytes()
