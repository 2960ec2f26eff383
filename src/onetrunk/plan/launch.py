"""The files that start a plan: an accelerate config, a launch line, vLLM servers, and jobs for three schedulers."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from onetrunk.plan.cost import cost_of
from onetrunk.plan.evaluate import ASYNC_STALENESS, REWARD_DEVICES, Plan, engine_parts, host_gib
from onetrunk.plan.hardware import GIB, Catalog
from onetrunk.plan.job import Job
from onetrunk.plan.memory import INT8_BYTES, NF4_BYTES
from onetrunk.plan.search import MANY_ROWS
from onetrunk.plan.timing import COLOCATED, PIPELINED, SERVER
from onetrunk.utils.files import atomic_write_text

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
# Written for GPUs only.
SCHEDULERS = ("job.sbatch", "skypilot.yaml", "trainjob.yaml")
# The first server listens here, the next one on the port after it.
PORT, REWARD_PORT = 8100, 8090
# Address of servers on a machine that the user names when the script starts.
REMOTE = "http://$SERVER_HOST"
CPUS_PER_GPU = 8
# Ranks that vLLM serves.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Names of accelerators in SkyPilot's catalog.
SKYPILOT = {
    "A100-40GB": "A100", "A100-80GB": "A100-80GB", "H100-80GB": "H100", "H200-141GB": "H200", "B200-180GB": "B200",
    "L40S-48GB": "L40S", "A6000-48GB": "RTXA6000", "RTX4090-24GB": "RTX4090", "RTX3090-24GB": "RTX3090",
    "T4-16GB": "T4",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What files are made of.

    Args:
        config: YAML file of the recipe, as `onetrunk ppo --config` takes it.
        model: name or folder of the policy, as `onetrunk ppo` takes it.
        base: name or folder of its base, which servers load.
        folder: that the files go to.
        is_overridden: the model is not the recipe's, so the command names it.
        reward: name of the reward model, which a plan may put on a server.
    """

    job: Job
    plan: Plan
    catalog: Catalog
    config: str
    model: str
    base: str
    folder: str
    market: str = "on_demand"
    is_overridden: bool = False
    reward: str | None = None

    def __post_init__(self):
        plan = self.plan
        names = (self.config, self.model, self.base, self.folder, self.reward, *plan.devices, plan.sample.device.name)
        wrong = next((name for name in names if name is not None and not str(name).isprintable()), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} has a line break or another control character; rename it")

    @property
    def script_folder(self) -> str:
        """The folder for a shell."""
        return shlex.quote(self.folder)

    @property
    def served_devices(self) -> int:
        """Devices of servers: of samplers, and of the reward."""
        plan = self.plan
        return (plan.sample.count if plan.sample.engine == SERVER else 0) + (
            REWARD_DEVICES if plan.has_reward_server else 0
        )

    @property
    def has_servers(self) -> bool:
        """Whether the plan needs a server."""
        return self.served_devices > 0

    @property
    def machines(self) -> int:
        """Machines of the trainer."""
        return max(1, math.ceil(self.plan.train.count / self.plan.train.per_node))

    @property
    def trainers(self) -> int:
        """Trainer's devices on each of its machines."""
        return math.ceil(self.plan.train.count / self.machines)

    @property
    def shares_machine(self) -> bool:
        """Whether servers stand on the trainer's only machine."""
        plan = self.plan
        if plan.sample.device.name != plan.train.device.name:
            return False
        return self.has_servers and plan.train.count + self.served_devices <= plan.train.per_node

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
    job, plan = launch.job, launch.plan
    train, words = plan.train, []
    if launch.is_overridden:
        words += ["--model_name_or_path", launch.model]
    if train.base_bytes != job.base_bytes:
        words += {NF4_BYTES: ["--load_in_4bit", "true"], INT8_BYTES: ["--load_in_8bit", "true"]}.get(
            train.base_bytes, ["--dtype", "float32" if train.base_bytes == 4 else "bfloat16"]
        )
    rows = job.rows // train.data // job.num_minibatches
    if train.rows == MANY_ROWS:
        words += ["--per_device_train_batch_size", str(max(1, min(train.rows, rows)))]
        words += ["--microbatch_tokens", str(train.tokens)]
    words += ["--activation_checkpointing", str(train.is_checkpointed).lower()]
    words += ["--activation_offloading", str(train.is_offloaded).lower()]
    words += ["--schedule", plan.schedule]
    if plan.schedule == "async":
        words += ["--max_staleness", str(ASYNC_STALENESS)]
    if plan.sample.engine == COLOCATED:
        # The engine's own part: vLLM refuses a share of which the trainer has taken some before.
        share = sum(engine_parts(job, plan.sample).values()) / (train.device.memory_gib * GIB)
        words += ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_enable_sleep_mode", "true"]
        words += ["--vllm_gpu_memory_utilization", f"{math.ceil(100 * share) / 100:.2f}"]
    elif plan.sample.engine == SERVER:
        words += ["--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", *_urls(launch)]
    elif plan.sample.engine == PIPELINED:
        words += pipeline_settings(job, plan)
    elif plan.sample.rows < job.rows // train.data:
        words += ["--max_rollout_rows", str(plan.sample.rows)]
    if plan.has_reward_server:
        words += [
            "--reward_funcs",
            f"{_host(launch)}:{REWARD_PORT}/classify#model={launch.reward}&tokenizer={launch.reward}",
        ]
    if train.device.is_cpu:
        words += ["--use_cpu", "true"]
    return words


def pipeline_settings(job: Job, plan: Plan) -> list[str]:
    """Return the options with which the trainer's processes sample, and may train, as a pipeline."""
    sample = plan.sample
    words = ["--rollout_backend", "pipelined", "--pipeline_stages", str(sample.stages)]
    words += ["--pipeline_split", *map(str, sample.sizes(job.shape)), "--pipeline_batches", str(sample.in_flight)]
    if plan.train.is_staged:
        words += ["--pipeline_training", "true"]
    if sample.rows < job.rows // sample.replicas:
        words += ["--max_rollout_rows", str(sample.rows // sample.stages)]
    # Settings of the recipe that belong to another sampler.
    words += ["--use_vllm", "false"] if job.uses_server else []
    return words


def _host(launch: Launch) -> str:
    """Return where servers are: this machine, or the one that the variable SERVER_HOST names."""
    return "http://localhost" if launch.shares_machine else REMOTE


def _quoted(word: str) -> str:
    """Return a word for a shell, which replaces nothing in it but our own variable."""
    return f'"{REMOTE}"{shlex.quote(word.removeprefix(REMOTE))}' if word.startswith(REMOTE) else shlex.quote(word)


def _urls(launch: Launch) -> list[str]:
    return [f"{_host(launch)}:{PORT + number}" for number in range(launch.plan.sample.replicas)]


def trainer_command(launch: Launch, file: str) -> str:
    """Return the command with which a file starts the training, in one line."""
    rest = ["--config", launch.config, *settings_of(launch)]
    # A restarted run would delete what it is to resume from.
    rest += ["--overwrite_output_dir", "false", "--resume", "auto"]
    words, processes = " ".join(map(_quoted, rest)), f"--num_processes {launch.plan.train.count} "
    if file == "launch.sh" and launch.plan.train.count == 1:
        return f"onetrunk ppo {words}"  # A scheduler has a launcher also for one process, which restarts it.
    if launch.machines > 1 or file in ("skypilot.yaml", "trainjob.yaml"):
        machines, address, port = MEETINGS[file]
        processes = f"--num_machines {machines.format(machines=launch.machines)} {processes}"
        processes += f"--main_process_ip {address} --main_process_port {port} "
        processes += '--machine_rank "$NODE_RANK" ' if file == "launch.sh" else ""
    config = shlex.quote(f"{launch.folder}/accelerate.yaml")
    return (
        f"accelerate launch --config_file {config} {processes}--rdzv_backend c10d --max_restarts 3 scripts/ppo.py"
        f" {words}"
    )


def server_command(launch: Launch) -> str:
    """Return the command of one server; a pipeline is vLLM's own option."""
    job, sample = launch.job, launch.plan.sample
    rank = next((rank for rank in RANKS if rank >= job.lora_rank), RANKS[-1])
    adapters = 2 + {"sync": 0, "one_step": 1, "async": ASYNC_STALENESS}[launch.plan.schedule]
    host = "127.0.0.1" if launch.shares_machine else "0.0.0.0"
    if sample.stages == 1:
        words = ["onetrunk", "serve", launch.base, "--host", host, "--max_lora_rank", str(rank)]
        words += ["--max_loras", str(adapters), "--max_model_len", str(job.lengths.width)]
        words += ["--tensor_parallel_size", str(sample.tensor), "--port"]
        # In an environment of its own vLLM has an interpreter of its own.
        return f'{shlex.join(words)} $(({PORT} + number)) ${{VLLM_PYTHON:+--python "$VLLM_PYTHON"}}'
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", launch.base, "--host", host, "--enable-lora"]
    words += ["--max-lora-rank", str(rank), "--max-loras", str(adapters), "--max-model-len", str(job.lengths.width)]
    words += ["--tensor-parallel-size", str(sample.tensor), "--pipeline-parallel-size", str(sample.stages)]
    words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--port"]
    environment = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_NO_USAGE_STATS=1"
    return f'{environment} "${{VLLM_PYTHON:-python}}" {shlex.join(words)} $(({PORT} + number))'


def launch_files(launch: Launch) -> dict[str, str]:
    """Return the text of each file by its name."""
    names = ["launch.sh", "accelerate.yaml", *(["servers.sh"] if launch.has_servers else [])]
    names += [] if launch.plan.train.device.is_cpu else SCHEDULERS
    values = _values(launch)
    values["environment"] = TEMPLATES.get_template("environment.sh").render(values).splitlines()
    return {
        name: TEMPLATES.get_template(name).render(
            values, command=trainer_command(launch, name) if name in MEETINGS else ""
        )
        for name in names
    }


def _values(launch: Launch) -> dict[str, Any]:
    """Return what the templates show."""
    plan, train, sample = launch.plan, launch.plan.train, launch.plan.sample
    cost = cost_of(launch.job, plan, launch.catalog)
    here = launch.trainers + (launch.served_devices if launch.shares_machine else 0)
    hours = min(24 * 7, math.ceil(1.2 * cost.high_hours))
    offset, per_server = train.count if launch.shares_machine else 0, sample.tensor * sample.stages
    servers_here = 0
    if sample.engine == SERVER:
        servers_here = min(sample.replicas, max(1, (train.per_node - offset) // per_server))
    return {
        "launch": launch, "plan": plan, "train": train, "folder": launch.script_folder, "per_machine": here,
        "machines_of_servers": math.ceil(launch.served_devices / train.per_node),
        # An engine that sleeps brings an allocator of its own.
        "expands": launch.job.expands_segments and not train.device.is_cpu and sample.engine != COLOCATED,
        "time": f"{hours // 24}-{hours % 24:02d}:00:00" if hours >= 24 else f"{hours:02d}:00:00",
        "cpus": CPUS_PER_GPU * here, "host_gib": math.ceil(sum(host_gib(launch.job, plan).values()) * here),
        "disk_gb": math.ceil(100 + 2 * sum(cost.storage_gb.values())),
        "accelerator": json.dumps(f"{SKYPILOT.get(train.device.name, train.device.name)}:{here}"),
        "port": PORT, "reward_port": REWARD_PORT, "host": "127.0.0.1" if launch.shares_machine else "0.0.0.0",
        "offset": offset, "per_server": per_server, "servers_here": servers_here,
        "server_command": server_command(launch) if servers_here else "",
    }  # fmt: skip


def write_files(launch: Launch) -> list[Path]:
    """Write the files into the folder of the launch, and return their paths."""
    folder = Path(launch.folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in launch_files(launch).items():
        path = folder / name
        atomic_write_text(path, text)
        if path.suffix == ".sh":
            path.chmod(0o755)
        paths.append(path)
    return paths
