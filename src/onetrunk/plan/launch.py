"""The files that start a plan: an accelerate config, a launch line, vLLM servers, and jobs for three schedulers."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from onetrunk.plan.hardware import GIB, Catalog
from onetrunk.plan.job import FP32, INT8_BYTES, NF4_BYTES, Job
from onetrunk.plan.memory import ASYNC_STALENESS, engine_parts
from onetrunk.plan.search import MANY_ROWS, Plan, cost_of, host_gib
from onetrunk.plan.timing import COLOCATED, PIPELINED, SERVER, split_of
from onetrunk.utils.files import atomic_write_text
from onetrunk.utils.options import VLLM_RANKS

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), undefined=StrictUndefined,
    keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
TEMPLATES.filters["quote"] = shlex.quote
# How the processes of several machines meet: their number, address and port, as whoever starts them names these.
MEETINGS = {
    "launch.sh": ("{machines}", '"$MAIN_HOST"', "29400"),
    "job.sbatch": ("{machines}", '"$host"', '"$port"'),
    "skypilot.yaml": ('"$SKYPILOT_NUM_NODES"', '"$host"', "29400"),
    "trainjob.yaml": ('"$PET_NNODES"', '"$PET_MASTER_ADDR"', '"$PET_MASTER_PORT"'),
}
# Rollouts between a sample's policy and the one that trains on it, as the trainer counts them.
STALENESS = {"sync": 0, "one_step": 1, "async": ASYNC_STALENESS}
# Written for GPUs only.
SCHEDULERS = ("job.sbatch", "skypilot.yaml", "trainjob.yaml")
# The first server listens here, the next one on the port after it.
PORT, REWARD_PORT = 8100, 8090
# Address of servers on a machine that the user names when the script starts.
REMOTE = "http://$SERVER_HOST"
CPUS_PER_GPU = 8
# Names in SkyPilot's catalog that are not the first part of ours.
SKYPILOT = {"A100-80GB": "A100-80GB", "A6000-48GB": "RTXA6000"}


@dataclass(frozen=True)
class Launch:
    """What files are made of.

    Args:
        config: YAML file of the recipe, as `onetrunk ppo --config` takes it.
        folder: that the files go to.
        is_overridden: the model is not the recipe's, so the command names it.
        reward: name of the reward model, which a plan may put on a server.
        words: settings of PPO that the user adds to the recipe.
    """

    job: Job
    plan: Plan
    catalog: Catalog
    config: str
    folder: str
    market: str = "on_demand"
    is_overridden: bool = False
    reward: str | None = None
    words: tuple[str, ...] = ()

    @property
    def has_servers(self) -> bool:
        """Whether the plan needs a server."""
        return self.plan.served_devices > 0

    @property
    def machines(self) -> int:
        """Machines of the trainer."""
        return max(1, math.ceil(self.plan.train.count / self.plan.train.per_node))

    @property
    def shares_machine(self) -> bool:
        """Whether servers run on the trainer's only machine."""
        plan = self.plan
        is_same = plan.sample.device.name == plan.train.device.name
        return is_same and self.has_servers and plan.count <= plan.train.per_node

    @property
    def needs_host(self) -> bool:
        """Whether servers run on machines that the user names by SERVER_HOST."""
        return self.has_servers and not self.shares_machine

    @property
    def host(self) -> str:
        """Where servers are: this machine, or the one that the variable SERVER_HOST names."""
        return "http://localhost" if self.shares_machine else REMOTE

    @property
    def about(self) -> str:
        """The plan in one line."""
        plan = self.plan
        devices = ", ".join(f"{count} x {name}" for name, count in plan.devices.items())
        return (
            f"{plan.schedule}, {plan.sample.engine} sampling, on {devices}: {plan.iteration_s:.1f} s per iteration,"
            " by onetrunk plan"
        )


def settings_of(launch: Launch) -> list[str]:
    """Return the options of `onetrunk ppo` that the plan sets."""
    job, plan, train = launch.job, launch.plan, launch.plan.train
    words = ["--model_name_or_path", launch.job.model.name] if launch.is_overridden else []
    if train.base_bytes != job.base_bytes:
        # All three, because the recipe may have set any of them.
        for name, size in (("--load_in_4bit", NF4_BYTES), ("--load_in_8bit", INT8_BYTES)):
            words += [name, str(train.base_bytes == size).lower()]
        # A quantised base computes in this precision.
        is_full = train.base_bytes == FP32 or (train.base_bytes <= INT8_BYTES and train.device.is_cpu)
        words += ["--dtype", "float32" if is_full else "bfloat16"]
    if train.rows == MANY_ROWS:
        rows = job.rows // train.data // job.num_minibatches
        words += ["--per_device_train_batch_size", str(max(1, min(train.rows, rows)))]
        words += ["--microbatch_tokens", str(train.tokens)]
    words += ["--activation_checkpointing", str(train.is_checkpointed).lower()]
    words += ["--activation_offloading", str(train.is_offloaded).lower()]
    words += ["--schedule", plan.schedule, "--max_staleness", str(STALENESS[plan.schedule])]
    words += _sampler_settings(launch)
    if train.serves_reward:
        address = f"{launch.host}:{REWARD_PORT}/classify"
        words += ["--reward_funcs", f"{address}#model={launch.reward}&tokenizer={launch.reward}"]
    return words + (["--use_cpu", "true"] if train.device.is_cpu else [])


def _sampler_settings(launch: Launch) -> list[str]:
    """Return the options that say where completions are sampled, and whether training runs in the same stages."""
    job, train, sample = launch.job, launch.plan.train, launch.plan.sample
    if sample.engine == COLOCATED:
        # The engine's own part: vLLM refuses a share of which the trainer has taken some before.
        parts = engine_parts(replace(job, base_bytes=train.base_bytes), sample)
        share = sum(parts.values()) / (train.device.memory_gib * GIB)
        words = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "true"]
        return [*words, "--vllm_gpu_memory_utilization", f"{math.ceil(100 * share) / 100:.2f}"]
    # A recipe that samples by vLLM may have settings of another engine; these are the defaults.
    words = ["--vllm_enable_sleep_mode", "false", "--vllm_gpu_memory_utilization", "0.3"] if job.uses_server else []
    if sample.engine == SERVER:
        urls = [f"{launch.host}:{PORT + number}" for number in range(sample.replicas)]
        return [*words, "--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", *urls]
    words += ["--use_vllm", "false", "--vllm_mode", "server"] if job.uses_server else []
    if sample.engine == PIPELINED:
        words += ["--rollout_backend", "pipelined", "--pipeline_stages", str(sample.stages), "--pipeline_split"]
        words += [*map(str, split_of(sample, job.shape)), "--pipeline_batches", str(sample.stages)]
        words += ["--pipeline_training", "true"] if train.is_staged else []
    if sample.rows < job.rows // sample.replicas:
        words += ["--max_rollout_rows", str(sample.rows // sample.stages)]
    return words


def _quoted(word: str) -> str:
    """Return a word for a shell, which replaces nothing in it but our own variable."""
    return f'"{REMOTE}"{shlex.quote(word.removeprefix(REMOTE))}' if word.startswith(REMOTE) else shlex.quote(word)


def trainer_command(launch: Launch, file: str) -> str:
    """Return the command with which a file starts the training, in one line."""
    # A restarted run would delete what it is to resume from.
    rest = ["--overwrite_output_dir", "false", "--resume", "auto"]
    words = " ".join(map(_quoted, ["--config", launch.config, *launch.words, *settings_of(launch), *rest]))
    processes = f"--num_processes {launch.plan.train.count} "
    if file == "launch.sh" and launch.plan.train.count == 1:
        return f"onetrunk ppo {words}"  # A scheduler has a launcher also for one process, which restarts it.
    if launch.machines > 1 or file in ("skypilot.yaml", "trainjob.yaml"):
        machines, address, port = MEETINGS[file]
        processes = f"--num_machines {machines.format(machines=launch.machines)} {processes}"
        processes += f"--main_process_ip {address} --main_process_port {port} "
        processes += '--machine_rank "$NODE_RANK" ' if file == "launch.sh" else ""
    config = shlex.quote(f"{launch.folder}/accelerate.yaml")
    return f"onetrunk ppo --accelerate_config {config} {processes}--rdzv_backend c10d --max_restarts 3 {words}"


def server_command(launch: Launch) -> str:
    """Return the command of one server."""
    job, sample = launch.job, launch.plan.sample
    rank = next((rank for rank in VLLM_RANKS if rank >= job.lora_rank), VLLM_RANKS[-1])
    adapters = 2 + STALENESS[launch.plan.schedule]
    host = "127.0.0.1" if launch.shares_machine else "0.0.0.0"
    words = ["onetrunk", "serve", job.model.base or job.model.name, "--host", host]
    words += [] if sample.device.is_cpu else ["--dtype", "bfloat16"]
    words += ["--max_lora_rank", str(rank), "--max_loras", str(adapters), "--max_model_len", str(job.lengths.width)]
    words += ["--tensor_parallel_size", str(sample.tensor), "--port"]
    # In an environment of its own vLLM has an interpreter of its own.
    return f'{shlex.join(words)} $(({PORT} + number)) ${{VLLM_PYTHON:+--python "$VLLM_PYTHON"}}'


def launch_files(launch: Launch) -> dict[str, str]:
    """Return the text of each file by its name."""
    names = ["launch.sh", "accelerate.yaml", *(["servers.sh"] if launch.has_servers else [])]
    names += [] if launch.plan.train.device.is_cpu else SCHEDULERS
    values = _values(launch)
    values["environment"] = TEMPLATES.get_template("environment.sh").render(values).splitlines()
    commands = {name: trainer_command(launch, name) for name in MEETINGS}
    return {name: TEMPLATES.get_template(name).render(values, command=commands.get(name)) for name in names}


def _values(launch: Launch) -> dict[str, Any]:
    """Return what the templates show."""
    plan, train, sample = launch.plan, launch.plan.train, launch.plan.sample
    cost = cost_of(launch.job, plan, launch.catalog)
    here = math.ceil(train.count / launch.machines) + (plan.served_devices if launch.shares_machine else 0)
    hours = min(24 * 7, math.ceil(1.2 * cost.high_hours))
    servers = sample.replicas if sample.engine == SERVER else 0
    return {
        "launch": launch, "plan": plan, "train": train, "folder": shlex.quote(launch.folder), "per_machine": here,
        # An engine that sleeps brings an allocator of its own.
        "expands": launch.job.expands_segments and not train.device.is_cpu and sample.engine != COLOCATED,
        "time": f"{hours // 24}-{hours % 24:02d}:00:00" if hours >= 24 else f"{hours:02d}:00:00",
        "cpus": CPUS_PER_GPU * here, "host_gib": math.ceil(sum(host_gib(launch.job, plan).values()) * here),
        "disk_gb": math.ceil(100 + 2 * sum(cost.storage_gb.values())),
        "accelerator": json.dumps(f"{SKYPILOT.get(train.device.name, train.device.name.partition('-')[0])}:{here}"),
        "port": PORT, "reward_port": REWARD_PORT, "host": "127.0.0.1" if launch.shares_machine else "0.0.0.0",
        "offset": train.count if launch.shares_machine else 0, "per_server": sample.tensor, "servers": servers,
        "server_command": server_command(launch) if servers else "",
    }  # fmt: skip


def write_files(launch: Launch) -> list[Path]:
    """Write the files into the folder of the launch, and return their paths."""
    folder, paths = Path(launch.folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in launch_files(launch).items():
        path = folder / name
        atomic_write_text(path, text)
        if path.suffix == ".sh":
            path.chmod(0o755)
        paths.append(path)
    return paths
