"""`onetrunk ppo --num_processes 8 --accelerate_config fsdp2`: a stage on several processes, by accelerate's launcher.

The options are those of `accelerate launch` under the same names; only `accelerate_config` is TRL's. They stand on the
command line, because a recipe runs on any number of processes.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from types import FrameType

import psutil

from onetrunk.stages.options.reading import Parser, UsageError, flags
from onetrunk.utils.files import read_json, read_yaml
from onetrunk.utils.shipped import shipped_folder
from onetrunk.verbs import VERBS

CONFIGS = "accelerate_configs"
# Shown by `--help`; the others as in `accelerate launch --help`.
EXPLAINED = {
    "num_processes": "Number of processes, one per GPU, over all machines.",
    "accelerate_config": "How they share the work: a YAML file, or a name such as ddp (the default) or fsdp2.",
}
# The least value of each number; the number of machines decides how large those after it may be.
LEAST = {"num_machines": 1, "num_processes": 1, "machine_rank": 0, "main_process_port": 0, "max_restarts": 0}
LEAST |= {f"parallelism_config_{name}_size": 1 for name in ("tp", "dp_shard", "dp_replicate")}
# Of a number without another limit, and of the processes of one machine.
MOST = 1024
TEXTS = ("accelerate_config", "main_process_ip", "rdzv_backend")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def split_words(verb: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of the launch by name, and the words that are left for the stage."""
    if not VERBS[verb].launches:
        return {}, list(words)
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
    for name in dict.fromkeys((*EXPLAINED, *LEAST, *TEXTS)):
        parser.add_argument(*flags(name), dest=name, type=str if name in TEXTS else int)
    known, rest = parser.parse_known_args(list(words))
    launch = {name: str(value) for name, value in vars(known).items()}
    if launch and "RANK" in os.environ:
        raise UsageError(f"this process was launched already, and {', '.join(launch)} would launch again")
    return launch, rest


def launch(verb: str, options: dict[str, str], words: Sequence[str]) -> int:
    """Run a stage in as many processes as the options say; return the exit code of the first that failed, or 0."""
    options = dict(options)
    config = config_file(options.pop("accelerate_config", "ddp"))
    given = [word for name, value in options.items() for word in (f"--{name}", value)]

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = ["--config_file", config, *given, "--module", "onetrunk", verb, *words]
    if "max_restarts" not in options:  # Stopped processes would be started again.
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGQUIT")  # torch waits 30 s for a checkpoint, we wait longer.
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # As under nohup.
    before = {number: signal.signal(number, _forward) for number in numbers}
    try:
        _check(Path(config), options)
        launch_command(launch_command_parser().parse_args(arguments))
        return 0
    except ChildFailedError as error:
        return _exit_code(error.get_first_failure()[1].exitcode)
    except CalledProcessError as error:
        return _exit_code(error.returncode)
    except SignalException as error:
        return _exit_code(-error.sigval)
    except Exception as error:  # What a stage raises has ended its process, and not this one.
        reason = str(error) or type(error).__name__
        raise UsageError(f"accelerate cannot launch this: {reason.splitlines()[0]}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check(config: Path, options: Mapping[str, str]) -> None:
    """Raise ValueError for an accelerate config that is not a mapping, and for numbers that mean nothing."""
    content = read_json(config) if config.suffix == ".json" else read_yaml(config)[0]
    if not isinstance(content, dict):
        raise ValueError(f"{config} holds no settings, such as num_processes: 2")
    inner = content.get("parallelism_config")
    settings = content | (inner if isinstance(inner, dict) else {}) | dict(options)
    numbers = {name: settings.get(name) for name in LEAST}
    machines = 1
    for name, value in numbers.items():
        if value is None:
            continue
        most = {"main_process_port": 65535, "machine_rank": machines - 1, "num_processes": MOST * machines}
        if not re.fullmatch(r"-?\d{1,9}", str(value)) or not LEAST[name] <= int(value) <= most.get(name, MOST):
            raise ValueError(f"{name} is {value!r:.100}; expected {LEAST[name]} to {most.get(name, MOST)}")
        machines = int(value) if name == "num_machines" else machines
    if int(numbers["num_processes"] or machines) % machines:
        raise ValueError(f"num_processes {numbers['num_processes']} is not a multiple of num_machines {machines}")


def _forward(number: int, frame: FrameType | None) -> None:
    """Pass a signal on to the processes, which end by themselves; without any, end."""
    processes = psutil.Process().children()
    if not processes:
        sys.exit(128 + number)
    for process in processes:
        # A terminal sends Ctrl-C to all of its group.
        if number != signal.SIGINT or os.getpgid(process.pid) != os.getpgrp():
            process.send_signal(number)


def _exit_code(code: int) -> int:
    """Return the exit code of a process as a shell gives it: one that a signal ended has a negative one in Python."""
    return 128 - code if code < 0 else code


def config_file(name: str) -> str:
    """Return the path of an accelerate config that is given as a path or as the name of one of ours."""
    folder = shipped_folder(CONFIGS)
    for path in (name, folder / f"{name}.yaml", folder / name.removeprefix(f"{CONFIGS}/")):
        if os.path.isfile(path):
            return str(path)
    known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise UsageError(f"accelerate_config is {name!r}, and there is no such file; give a path, or one of {known}")
