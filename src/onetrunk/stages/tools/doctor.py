"""`onetrunk doctor`: what `accelerate env` prints, and what is missing here for onetrunk.

It asks nothing from the network, and shows no token.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from onetrunk.stages.options.reading import Parser
from onetrunk.stages.options.table import VERBS

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
# "ok", "note" (works without it) or "fault"; what was looked at; its state.
Finding = tuple[str, str, str]


def main(argv: Sequence[str]) -> int:
    """Print the report; return 1 if something is at fault."""
    Parser(prog="onetrunk doctor", description=f"{VERBS['doctor']}.", allow_abbrev=False).parse_args(list(argv))
    findings = [*packages(), *accelerator(), *surroundings()]
    for status, subject, state in findings:
        print(f"{status:<6}{subject:<16}{state}")
    return int(any(status == "fault" for status, *_ in findings))


def packages() -> Iterator[Finding]:
    """Yield whether the required packages fit together, and which optional packages are missing."""
    for text in metadata.requires("onetrunk") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = next((found.version for found in metadata.distributions(name=requirement.name)), None)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            yield "fault", requirement.name, f"installed: {installed}; pip install '{text}'"
    for module, command in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            yield "note", module, f"not installed (optional): {command}"


def accelerator() -> Iterator[Finding]:
    """Print what `accelerate env` does, and yield whether torch sees a GPU."""
    try:
        import torch
        from accelerate.commands.env import env_command, env_command_parser

        env_command(env_command_parser().parse_args([]))
        print()
    except Exception as error:  # A broken installation can raise anything.
        yield "fault", "accelerate env", f"fails ({error}); install torch and accelerate again"
        return
    if not torch.cuda.is_available():
        yield "note", "gpu", f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none'}) sees no GPU"


def surroundings() -> Iterator[Finding]:
    """Yield the free space where runs and models are written, and whether there is a token for the Hub."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HOME

    for what, name in (("runs", "."), ("models (HF_HOME)", HF_HOME)):
        place = Path(name).resolve()
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free / GIB
        yield "note" if free < LEAST_FREE_GIB else "ok", "disk", f"{free:.1f} GiB free for {what} at {place}"
    if get_token():
        yield "ok", "hub", "a token is stored"
    else:
        yield "note", "hub", "not logged in, which private models, gated models and pushing need: hf auth login"
