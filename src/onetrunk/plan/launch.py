"""The files that start a plan: an accelerate config, a launch line, vLLM servers, and jobs for three schedulers."""

from __future__ import annotations

import json
import math
import shlex
import string
from dataclasses import dataclass
from pathlib import Path

from onetrunk.plan.cost import cost_of
from onetrunk.plan.evaluate import ASYNC_STALENESS, REWARD_DEVICES, Plan, engine_parts, host_gib
from onetrunk.plan.hardware import GIB, Catalog
from onetrunk.plan.job import Job
from onetrunk.plan.memory import INT8_BYTES, NF4_BYTES
from onetrunk.plan.search import MANY_ROWS
from onetrunk.plan.timing import COLOCATED, PIPELINED, SERVER
from onetrunk.utils.files import atomic_write_text

TEMPLATES = Path(__file__).with_name("templates")
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


class _Template(string.Template):
    """Placeholders are written @@{name}, because $ belongs to the shell."""

    delimiter = "@@"


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


def trainer_command(launch: Launch, rendezvous: str = "") -> str:
    """Return the command that trains, in one line; a single process needs no launcher.

    Args:
        rendezvous: options of the launcher for several machines.
    """
    rest = ["--config", launch.config, *settings_of(launch)]
    # A restarted run would delete what it is to resume from.
    rest += ["--overwrite_output_dir", "false", "--resume", "auto"]
    words = " ".join(map(_quoted, rest))
    if launch.plan.train.count == 1 and not rendezvous:
        return f"onetrunk ppo {words}"
    config = shlex.quote(f"{launch.folder}/accelerate.yaml")
    shape = rendezvous or f"--num_processes {launch.plan.train.count} "
    return (
        f"accelerate launch --config_file {config} {shape}--rdzv_backend c10d --max_restarts 3 scripts/ppo.py {words}"
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


def render(name: str, **values: object) -> str:
    """Return a template with its placeholders replaced."""
    return _Template((TEMPLATES / name).read_text(encoding="utf-8")).substitute({k: str(v) for k, v in values.items()})


def _accelerate(launch: Launch) -> str:
    train = launch.plan.train
    sections, kind = "", "MULTI_GPU" if train.count > 1 else "'NO'"
    if train.tensor > 1:
        sections = render("parallelism.txt", replicate=1, shard=1, tensor=train.tensor)
    elif train.shards > 1:
        kind, sections = "FSDP", render("fsdp.txt")
        if train.shards < train.count:
            sections += render("parallelism.txt", replicate=train.count // train.shards, shard=train.shards, tensor=1)
    return render(
        "accelerate.yaml", about=launch.about, command=f"bash {launch.script_folder}/launch.sh", distributed_type=kind,
        sections=sections, machines=launch.machines, processes=train.count,
        use_cpu=str(train.device.is_cpu and train.count == 1).lower(),
    )  # fmt: skip


def _before(launch: Launch) -> str:
    if not launch.has_servers:
        return ""
    script = f"bash {launch.script_folder}/servers.sh"
    if launch.shares_machine:
        return f"\n# The servers come first, in a shell of their own: {script}"
    machines = math.ceil(launch.served_devices / launch.plan.train.per_node)
    where = "a machine of their own" if machines == 1 else f"{machines} machines behind one name"
    return f"\n# The servers come first, on {where}: {script}. SERVER_HOST is the name of that machine."


def launch_files(launch: Launch) -> dict[str, str]:
    """Return the text of each file by its name."""
    train = launch.plan.train
    before, needs_host = _before(launch), launch.has_servers and not launch.shares_machine
    environment = ': "${SERVER_HOST:?the name of the machine of the servers}"\n' if needs_host else ""
    # An engine that sleeps brings an allocator of its own.
    if launch.job.expands_segments and not train.device.is_cpu and launch.plan.sample.engine != COLOCATED:
        environment += "export PYTORCH_ALLOC_CONF=expandable_segments:True\n"
    if train.device.is_cpu and train.count > 1:
        environment += "export ACCELERATE_USE_CPU=true\n"
    if launch.shares_machine and train.count > 0:
        environment += f"export CUDA_VISIBLE_DEVICES=$(seq -s, 0 {train.count - 1})\n"
    common = {"about": launch.about, "folder": launch.script_folder, "machines": launch.machines, "before": before}
    several = launch.machines > 1
    nodes = "--num_machines {n} --num_processes {p} --main_process_ip {ip} --main_process_port {port} "
    hand = (
        nodes.format(n=launch.machines, p=train.count, ip='"$MAIN_HOST"', port=29400) + '--machine_rank "$NODE_RANK" '
    )
    files = {
        "launch.sh": render(
            "launch.sh", about=launch.about, environment=environment,
            command=trainer_command(launch, hand if several else ""),
            before=before + ("\n# On each machine, with MAIN_HOST and NODE_RANK set." if several else ""),
        )
    }  # fmt: skip
    files["accelerate.yaml"] = _accelerate(launch)
    if launch.has_servers:
        files["servers.sh"] = _servers(launch)
    if not train.device.is_cpu:
        files |= _scheduler_files(launch, common, environment)
    return files


def _servers(launch: Launch) -> str:
    """Return the script that starts the servers of one machine."""
    plan, offset = launch.plan, launch.plan.train.count if launch.shares_machine else 0
    devices, here = plan.sample.tensor * plan.sample.stages, 0
    if plan.sample.engine == SERVER:
        here = min(plan.sample.replicas, max(1, (plan.train.per_node - offset) // devices))
    sampler = ""
    if here:
        sampler = render("samplers.txt", last=here - 1, offset=offset, devices=devices, command=server_command(launch))
    reward = ""
    if plan.has_reward_server:
        host = "127.0.0.1" if launch.shares_machine else "0.0.0.0"
        reward = render("reward.txt", device=offset + here * devices, model=shlex.quote(str(launch.reward)), host=host,
                        port=REWARD_PORT)  # fmt: skip
    return render("servers.sh", port=PORT, servers=sampler + reward, about=launch.about)


def _scheduler_files(launch: Launch, common: dict[str, object], environment: str) -> dict[str, str]:
    plan, train = launch.plan, launch.plan.train
    cost = cost_of(launch.job, plan, launch.catalog)
    here = launch.trainers + (launch.served_devices if launch.shares_machine else 0)
    hours = min(24 * 7, math.ceil(1.2 * cost.high_hours))
    time = f"{hours // 24}-{hours % 24:02d}:00:00" if hours >= 24 else f"{hours:02d}:00:00"
    several, shape = (
        launch.machines > 1,
        "--num_machines {} --num_processes {} --main_process_ip {} --main_process_port {} ",
    )
    slurm = environment + (
        'read -r host < <(scontrol show hostnames "$SLURM_JOB_NODELIST")\nport=$((20000 + SLURM_JOB_ID % 10000))\n'
        if several
        else "export PET_RDZV_ENDPOINT=localhost:0\n"
    )
    if launch.shares_machine:
        slurm += f"bash {launch.script_folder}/servers.sh &\n"
    one = f"--num_processes {train.count} "
    # A launcher also for one process: it starts a crashed run again.
    of_slurm = shape.format(launch.machines, train.count, '"$host"', '"$port"') if several else one
    of_sky = shape.format('"$SKYPILOT_NUM_NODES"', train.count, '"$host"', 29400)
    of_kubeflow = shape.format('"$PET_NNODES"', train.count, '"$PET_MASTER_ADDR"', '"$PET_MASTER_PORT"')
    cpus, host = CPUS_PER_GPU * here, math.ceil(sum(host_gib(launch.job, plan).values()) * here)
    disk = math.ceil(100 + 2 * sum(cost.storage_gb.values()))
    start = f"bash {launch.script_folder}/servers.sh &\n  " if launch.shares_machine else ""
    start_job = f"bash {launch.script_folder}/servers.sh &\n        " if launch.shares_machine else ""
    accelerator = SKYPILOT.get(train.device.name, train.device.name)
    sky = render(
        "skypilot.yaml", **common, per_machine=here, accelerator=json.dumps(f"{accelerator}:{here}"),
        use_spot=str(launch.market == "spot").lower(), disk_gb=disk,
        command=_shell(start, environment, "  ") + trainer_command(launch, of_sky),
    )  # fmt: skip
    job = render(
        "trainjob.yaml",
        **common,
        per_machine=here,
        cpus=cpus,
        host_gib=host,
        command=trainer_command(launch, of_kubeflow),
    )
    job = job.replace("        exec ", "        " + _shell(start_job, environment, "        ") + "exec ")
    return {
        "job.sbatch": render(
            "job.sbatch", **common, per_machine=here, cpus=cpus, time=time, environment=slurm,
            command=trainer_command(launch, of_slurm),
        ),
        "skypilot.yaml": sky,
        "trainjob.yaml": job,
    }  # fmt: skip


def _shell(start: str, environment: str, indent: str) -> str:
    return "".join(f"{line}\n{indent}" for line in environment.splitlines()) + start


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
