"""`onetrunk doctor`: what `accelerate env` prints, and what is missing here for onetrunk.

It asks nothing from the network, and shows no token.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

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
# "ok", "note" (works without it) or "fault"; what was looked at; what was found.
Finding = tuple[str, str, str]


def main(argv: Sequence[str]) -> int:
    """Print the report; return 1 if something is at fault."""
    text = "Report versions, GPU, packages, disk and Hub login, and how to install what is missing."
    Parser(prog="onetrunk doctor", description=text, allow_abbrev=False).parse_args(list(argv))
    findings = [*packages(), *accelerator(), *extras(), *disk(), hub_login()]
    for status, subject, found in findings:
        print(f"{status:<6}{subject:<16}{found}")
    return int(any(status == "fault" for status, *_ in findings))


def packages() -> Iterator[Finding]:
    """Yield whether each required package is installed in a version that fits."""
    from packaging.requirements import Requirement

    for text in metadata.requires("onetrunk") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield "fault", requirement.name, f"is not installed: pip install '{text}'"
            continue
        if requirement.specifier.contains(version, prereleases=True):
            yield "ok", requirement.name, version
        else:
            yield "fault", requirement.name, f"{version} does not fit {requirement.specifier}: pip install '{text}'"


def accelerator() -> Iterator[Finding]:
    """Print what `accelerate env` does, and yield the GPUs as torch sees them."""
    try:
        import torch
        from accelerate.commands.env import env_command, env_command_parser

        env_command(env_command_parser().parse_args([]))
        print()
    except Exception as error:  # A broken installation can raise anything.
        yield "fault", "accelerate env", f"fails ({error}); install torch and accelerate again"
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: set fp16"
        yield "ok", f"gpu {index}", f"{about.name}, {about.total_memory / GIB:.0f} GiB, {bf16}"
    if not torch.cuda.is_available():
        driver = "is" if shutil.which("nvidia-smi") else "is not"
        build = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
        yield "note", "gpu", f"{build} sees no GPU; an NVIDIA driver {driver} installed"


def extras() -> Iterator[Finding]:
    """Yield whether each optional package is installed."""
    for module, command in EXTRAS.items():
        is_installed = importlib.util.find_spec(module) is not None
        yield ("ok", module, "installed") if is_installed else ("note", module, f"not installed (optional): {command}")


def disk() -> Iterator[Finding]:
    """Yield the free space where runs and models are written."""
    from huggingface_hub.constants import HF_HOME

    for what, name in (("runs", "."), ("models (HF_HOME)", HF_HOME)):
        place = Path(name).resolve()
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free / GIB
        yield "note" if free < LEAST_FREE_GIB else "ok", "disk", f"{free:.1f} GiB free for {what} at {place}"


def hub_login() -> Finding:
    """Return whether there is a token for the Hub; it is neither printed nor sent."""
    from huggingface_hub import get_token

    if get_token():
        return "ok", "hub", "a token is stored"
    return "note", "hub", "not logged in, which private models, gated models and pushing need: hf auth login"
