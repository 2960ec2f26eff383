"""`onetrunk doctor`: what this machine has for onetrunk, and the command that mends what is missing.

It reads and asks nothing from the network, and shows no token.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from onetrunk.costs import host_memory_bytes
from onetrunk.stages.options.parser import Parser, UsageError
from onetrunk.stages.secrets import say

GIB = 2**30
# Less free space than this is reported, GiB.
LEAST_FREE_GIB = 10
# Package -> what it is for, and the command that installs it.
EXTRAS = {
    "bitsandbytes": ("4-bit and 8-bit base models, 8-bit optimizers", "pip install 'onetrunk[quant]'"),
    "flash_attn": (
        "attn_implementation: flash_attention_2, padding_free on a GPU",
        "pip install --no-build-isolation 'onetrunk[flash]'",
    ),
    "vllm": (
        "use_vllm and onetrunk serve; lives in an environment of its own",
        "python -m venv vllm && vllm/bin/pip install vllm",
    ),
    "ray": ("onetrunk prefs with engine: ray", "pip install 'onetrunk[ray]'"),
    "s3fs": ("rows and checkpoints at s3://", "pip install 'onetrunk[s3]'"),
    "matplotlib": ("plots in reports", "pip install matplotlib"),
    "wandb": ("report_to: wandb", "pip install wandb"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        status: ok; note (an extra that is missing, or something to know); fault (onetrunk will not work).
        subject: what was looked at.
        text: what was found.
        mend: command or change that mends it, or None.
    """

    status: str
    subject: str
    text: str
    mend: str | None = None


def main(argv: Sequence[str]) -> int:
    """Print the report; return 1 if something is at fault."""
    parser = Parser(
        prog="onetrunk doctor",
        description="Report versions, GPU, packages, disk and Hub login, and how to mend what is missing.",
        allow_abbrev=False,
    )
    try:
        parser.parse_args(list(argv))
    except UsageError as error:
        say(f"error: {error}", "all options: onetrunk doctor --help")
        return 2
    except SystemExit:
        return 0
    findings = list(examine())
    for finding in findings:
        print(f"{finding.status:<6}{finding.subject:<16}{finding.text}")
        if finding.mend:
            print(f"{'':<22}-> {finding.mend}")
    faults = sum(finding.status == "fault" for finding in findings)
    notes = sum(finding.status == "note" for finding in findings)
    print(f"\n{faults} faults, {notes} notes")
    return 1 if faults else 0


def examine() -> Iterator[Finding]:
    """Yield what was found, in the order of the report."""
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}")
    yield Finding("ok", "machine", f"{os.cpu_count()} CPU cores, {host_memory_bytes() / GIB:.1f} GiB of memory")
    yield from packages()
    yield from accelerator()
    yield from extras()
    yield from disk()
    yield hub_login()


def packages() -> Iterator[Finding]:
    """Yield the required packages whose version is missing or does not fit, or one line if all do."""
    from packaging.requirements import Requirement

    faults, versions = [], []
    for text in metadata.requires("onetrunk") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            faults.append(Finding("fault", requirement.name, "is not installed", f"pip install '{text}'"))
            continue
        versions.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{version} does not fit {requirement.specifier}"
            faults.append(Finding("fault", requirement.name, wanted, f"pip install '{requirement}'"))
    if not faults:
        yield Finding("ok", "packages", f"onetrunk {metadata.version('onetrunk')}, {', '.join(versions)}")
    yield from faults


def accelerator() -> Iterator[Finding]:
    """Yield the GPUs as torch sees them, and why it sees none."""
    try:
        import torch
    except Exception as error:  # A broken installation can raise anything.
        yield Finding("fault", "torch", f"cannot be imported: {error}", "pip install --force-reinstall torch")
        return
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    has_driver = shutil.which("nvidia-smi") is not None
    if not torch.cuda.is_available():
        if has_driver and torch.version.cuda is None:
            command = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
            yield Finding("note", "gpu", f"{build}: a CPU build on a machine with an NVIDIA driver", command)
        elif has_driver:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = f"CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else "the driver may be older than CUDA"
            yield Finding("note", "gpu", f"{build}: no GPU is visible; {why}", "nvidia-smi")
        else:
            yield Finding("note", "gpu", f"{build}: no GPU; runs use the CPU (dtype: float32 is fastest there)")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: set fp16"
        yield Finding("ok", f"gpu {index}", f"{about.name}, {about.total_memory / GIB:.0f} GiB, {bf16}; {build}")
    count = torch.cuda.device_count()
    if count > 1:
        command = (
            f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes {count} scripts/ppo.py ..."
        )
        yield Finding("note", "several gpus", "onetrunk ppo uses one process per GPU", command)


def extras() -> Iterator[Finding]:
    """Yield the optional packages and the attention kernels."""
    for module, (purpose, command) in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding("ok", module, purpose)
        else:
            yield Finding("note", module, f"not installed: {purpose}", command)
    yield Finding("ok", "attention", "sdpa and eager come with torch; flash_attention_2 needs flash_attn")


def disk() -> Iterator[Finding]:
    """Yield the free space where runs, models and temporary files are written."""
    cache = os.environ.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    places = {"runs": ".", "models (HF_HOME)": cache, "TMPDIR": tempfile.gettempdir()}
    for what, name in places.items():
        path = Path(name)
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free / GIB
        is_low = free < LEAST_FREE_GIB
        text = f"{free:.1f} GiB free for {what} at {Path(name).resolve()}"
        yield Finding("note" if is_low else "ok", "disk", text, "make room, or set another place" if is_low else None)


def hub_login() -> Finding:
    """Return whether a token for the Hub is stored; it is neither read out nor sent."""
    if os.environ.get("HF_TOKEN"):
        return Finding("ok", "hub", "HF_TOKEN is set")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    if Path(os.environ.get("HF_TOKEN_PATH") or home / "token").is_file():
        return Finding("ok", "hub", "logged in (hf auth login)")
    return Finding("note", "hub", "not logged in: needed for private and gated models, and to push", "hf auth login")
