"""`onetrunk doctor`: what `accelerate env` prints, and what is missing here for onetrunk.

It asks nothing from the network, and shows no token.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from onetrunk.stages.options.parser import Parser

GIB = 2**30
# Less free space than this is reported, GiB.
LEAST_FREE_GIB = 10
# Module -> the command that installs it.
EXTRAS = {
    "bitsandbytes": "pip install 'onetrunk[quant]'",
    "flash_attn": "pip install --no-build-isolation 'onetrunk[flash]'",
    "vllm": "python -m venv vllm && vllm/bin/pip install vllm",
    "ray": "pip install 'onetrunk[ray]'",
    "s3fs": "pip install 'onetrunk[s3]'",
}


class Finding(NamedTuple):
    """One line of the report: "ok", "note" (works without it) or "fault", what was looked at, and what was found."""

    status: str
    subject: str
    text: str


def main(argv: Sequence[str]) -> int:
    """Print the report; return 1 if something is at fault."""
    text = "Report versions, GPU, packages, disk and Hub login, and how to install what is missing."
    parser = Parser(prog="onetrunk doctor", description=text, allow_abbrev=False)
    parser.parse_args(list(argv))
    findings = [*packages(), *accelerator(), *extras(), *disk(), hub_login()]
    for finding in findings:
        print(f"{finding.status:<6}{finding.subject:<16}{finding.text}")
    return 1 if any(finding.status == "fault" for finding in findings) else 0


def packages() -> Iterator[Finding]:
    """Yield the required packages whose version is missing or does not fit, or one line if all do."""
    from packaging.requirements import Requirement

    is_complete = True
    for text in metadata.requires("onetrunk") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            is_complete = False
            found = "is not installed" if version is None else f"{version} does not fit {requirement.specifier}"
            yield Finding("fault", requirement.name, f"{found}: pip install '{text}'")
    if is_complete:
        yield Finding("ok", "packages", f"onetrunk {metadata.version('onetrunk')} has all that it needs")


def accelerator() -> Iterator[Finding]:
    """Print what `accelerate env` does, and yield the GPUs as torch sees them."""
    try:
        import torch
        from accelerate.commands.env import env_command, env_command_parser

        env_command(env_command_parser().parse_args([]))
        print()
    except Exception as error:  # A broken installation can raise anything.
        yield Finding("fault", "accelerate env", f"fails ({error}); install torch and accelerate again")
        return
    build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: set fp16"
        yield Finding("ok", f"gpu {index}", f"{about.name}, {about.total_memory / GIB:.0f} GiB, {bf16}; {build}")
    if not torch.cuda.is_available():
        driver = "is" if shutil.which("nvidia-smi") else "is not"
        yield Finding("note", "gpu", f"{build} sees no GPU; an NVIDIA driver {driver} installed")


def extras() -> Iterator[Finding]:
    """Yield whether each optional package is installed."""
    for module, command in EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding("ok", module, "installed")
        else:
            yield Finding("note", module, f"not installed (optional): {command}")


def disk() -> Iterator[Finding]:
    """Yield the free space where runs and models are written."""
    from huggingface_hub.constants import HF_HOME

    for what, name in (("runs", "."), ("models (HF_HOME)", HF_HOME)):
        place = Path(name).resolve()
        existing = next(path for path in (place, *place.parents) if path.exists())
        free = shutil.disk_usage(existing).free / GIB
        yield Finding("note" if free < LEAST_FREE_GIB else "ok", "disk", f"{free:.1f} GiB free for {what} at {place}")


def hub_login() -> Finding:
    """Return whether there is a token for the Hub; it is neither printed nor sent."""
    from huggingface_hub import get_token

    if get_token():
        return Finding("ok", "hub", "a token is stored")
    return Finding("note", "hub", "not logged in, which private models, gated models and pushing need: hf auth login")
