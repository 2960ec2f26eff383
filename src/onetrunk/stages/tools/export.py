"""`onetrunk export FOLDER --to merged | vllm | gguf | ollama`: a result of training, for tools that serve models.

merged is a plain transformers folder: weights, tokenizer, generation config and a card. ollama adds a Modelfile, and
gguf is one file by the converter of llama.cpp. vLLM takes the adapter as it is, so its command is printed.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import ModelCardData
from transformers import PreTrainedTokenizerBase

from onetrunk.checkpoints.folders import MANIFEST, STAGING, begin_staging, install, read_manifest
from onetrunk.checkpoints.hub import push_folder, repo_name, repository, require_push
from onetrunk.models.base_model import check_decoder, load_base, stop_token_ids
from onetrunk.models.build import load_adapted
from onetrunk.models.loading import (
    adapter_base,
    base_revision,
    can_be_on_hub,
    is_same_source,
    load_config,
    read_adapter_config,
    source_file,
)
from onetrunk.ppo.setup import policy_tokenizer
from onetrunk.rollouts.publishing import check_servable, served_rank
from onetrunk.stages.arguments import DTYPES, PushArguments, parse
from onetrunk.stages.tools.serve import checkpoint_dtype, whole_path
from onetrunk.utils.files import atomic_write_text, held_folder, require_output_dir
from onetrunk.utils.options import option
from onetrunk.utils.redaction import markdown_text, redact

VERB = "export"
TARGETS = ("merged", "vllm", "gguf", "ollama")
MERGED, VLLM, GGUF = TARGETS[:3]
CONVERTER = "convert_hf_to_gguf.py"
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
CARD = """---
{metadata}
---

# {title}

{what} by onetrunk {version}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{where}")
tokenizer = AutoTokenizer.from_pretrained("{where}")
```

`"."` is the folder of this file. vLLM serves it: `vllm serve {where}`.
"""


MODELFILE = """# ollama create NAME -f Modelfile
# Ollama reads the safetensors of some architectures only; for the others export gguf.
FROM {source}
{template}
# As PPO samples by default; Ollama's own defaults differ.
PARAMETER temperature 1
PARAMETER top_k 0
PARAMETER top_p 1
PARAMETER repeat_penalty 1
{stops}
"""
CHAT_TEMPLATE = (
    "# Ollama recognises the chat templates of well-known models. Compare `ollama show --template NAME` with"
    "\n# chat_template.jinja, and write a TEMPLATE here if they differ."
)


@dataclass
class ExportArguments(PushArguments):
    """The options of `onetrunk export`."""

    model: str | None = option(None, "Folder or Hub name of an adapter or a model, such as the output_dir of ppo.")
    to: str = option(
        "merged",
        "merged: one model of base and adapter; vllm: print the command that serves it; gguf: one file for llama.cpp;"
        " ollama: merged, with a Modelfile.",
        TARGETS,
    )
    output_dir: str | None = option(None, "Folder that gets the result; not for vllm.")
    converter: str | None = option(None, f"gguf: path of llama.cpp's {CONVERTER}; None: the one on PATH.")
    revision: str | None = option(None, "Branch, tag or commit of the model on the Hub.")
    dtype: str = option("auto", "Precision of the written weights; auto: the base's own.", DTYPES)
    overwrite_output_dir: bool = option(False, "Replace what was exported into output_dir before.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("no model is named; write onetrunk export FOLDER --to merged --output_dir NEW")
        if self.to == VLLM and self.output_dir:
            raise ValueError("output_dir is set, but --to vllm only prints a command; leave it out")
        if self.to != VLLM and not self.output_dir:
            raise ValueError(f"output_dir is not set; name the folder that gets the result of --to {self.to}")
        if self.converter and self.to != GGUF:
            raise ValueError(f"converter is for --to {GGUF}; leave it out")


def check(args: ExportArguments) -> str | None:
    """Return the name of an adapter's base, None for a model; everything is checked that can fail before loading."""
    base = adapter_base(args.model, args.revision)
    if base is None and args.to == MERGED:
        raise ValueError(f"{args.model} is a model already, and not an adapter; there is nothing to merge")
    if base is not None:
        task = read_adapter_config(args.model, args.revision).task_type
        if task not in (None, "CAUSAL_LM"):
            raise ValueError(
                f"{args.model} is an adapter of task type {task}; only adapters of language models are exported"
            )
    config = load_config(args.model, args.revision)
    check_decoder(config, base or args.model)
    if args.to == VLLM:
        return base
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"the base {base or args.model} is a quantised checkpoint, which has no place for the sum of base and"
            " adapter; set base_model_name_or_path in adapter_config.json to the model that it was quantised from"
        )
    if args.to == GGUF:
        run_converter(args.converter, "--help")  # A converter that cannot start is found before a model is merged.
    for source in (args.model, base):
        if source and is_same_source(source, args.output_dir):
            raise ValueError(f"output_dir is {source}, which is read from; name another output_dir")
    output = require_output_dir(args.output_dir)
    names = sorted(path.name for path in output.iterdir() if path.name[0] not in "._")
    # Files of the user next to an earlier export, and results of trainings, which have a manifest too, stay.
    own = {path.parts[0] for path in exported_files(output)}
    others = [name for name in names if name not in own]
    if others or (names and not args.overwrite_output_dir):
        fix = "" if others else "set overwrite_output_dir to true to replace it, or "
        raise ValueError(f"{output} is not empty ({', '.join((others or names)[:3])}); {fix}name another output_dir")
    require_push(args)
    return base


def exported_files(folder: Path) -> list[Path]:
    """Return what an export has written into a folder, relative to it; nothing where something else wrote."""
    with contextlib.suppress(RuntimeError):
        manifest = read_manifest(folder)
        return [Path(name) for name in (MANIFEST, *manifest["files"])] if manifest.get("written_by") == VERB else []
    return []


def converter_words(path: str | None) -> list[str]:
    """Return the command of llama.cpp's converter, without its arguments; ValueError where there is none."""
    if path is not None and Path(path).is_file():
        return [sys.executable, path]
    found = shutil.which(CONVERTER) if path is None else None
    if found is None:
        where = "is not on PATH" if path is None else f"is not at {path}"
        raise ValueError(
            f"llama.cpp's {CONVERTER} {where}; git clone https://github.com/ggml-org/llama.cpp, pip install gguf"
            f" sentencepiece, and give --converter llama.cpp/{CONVERTER}"
        )
    return [found]


def vllm_command(args: ExportArguments, base: str | None) -> str:
    """Return the command with which vLLM serves a model, or an adapter under the name of its folder."""
    # vLLM's own "auto" rounds float32, and a base's generation config has a temperature of its own.
    dtype = args.dtype
    if dtype == "auto":
        dtype = checkpoint_dtype(args.model, args.revision)
        # Its adapters on a GPU need 16 bits.
        dtype = "bfloat16" if base and dtype == "float32" else dtype
    words = ["vllm", "serve", whole_path(base or args.model), "--dtype", dtype, "--generation-config", "vllm"]
    revision = base_revision(args.model, args.revision) if base else args.revision
    words += ["--revision", revision] if revision else []
    if base is None:
        return shlex.join(words)
    config = read_adapter_config(args.model, args.revision)
    check_servable(config, f"the adapter {args.model}")
    if args.revision:
        raise ValueError("vLLM loads an adapter's main revision only; download this one and name its folder")
    folder = whole_path(args.model)
    words += ["--enable-lora", "--lora-modules", f"{Path(folder).name}={folder}"]
    words += ["--max-lora-rank", str(served_rank(config.r))]
    template = source_file(args.model, "chat_template.jinja")
    # The base may have none, or another one.
    return shlex.join(words + (["--chat-template", str(template.resolve())] if template else []))


def write_card(folder: Path, args: ExportArguments, base: str | None) -> None:
    """Write the model card of a model that is whole; it has no path of this machine."""
    source = base or args.model
    on_hub = not Path(source).exists() and can_be_on_hub(source)
    data = ModelCardData(
        base_model=source if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["onetrunk", "ppo"],
    )
    of = f"[{source}](https://huggingface.co/{source})" if on_hub else f"`{markdown_text(Path(source).name)}`"
    text = CARD.format(
        metadata=data.to_yaml(),
        title=markdown_text(repo_name(args).split("/")[-1]),
        what=f"The base model {of}, merged with a LoRA adapter into one model" if base else f"{of}, copied",
        version=sys.modules["onetrunk"].__version__,
        where=repository(args) if args.push_to_hub else ".",
    )
    atomic_write_text(folder / "README.md", redact(text))


def run_converter(path: str | None, *options: str) -> None:
    """Run llama.cpp's converter; RuntimeError with its last line if it fails."""
    words = [*converter_words(path), *options]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        last = ([line for line in done.stderr.splitlines() if line.strip()] or ["no message"])[-1]
        raise RuntimeError(f"llama.cpp's converter failed: {last} ({shlex.join(words)})")


def write(args: ExportArguments, base: str | None, staging: Path) -> tuple[Path, str]:
    """Write the result below `staging`; return its folder, and the precision of its weights."""
    wanted = None if args.dtype == "auto" else args.dtype
    revision = {"revision": args.revision} if args.revision else {}
    tokenizer = policy_tokenizer(args.model, None, revision)
    if base is None:
        model = load_base(args.model, dtype=wanted, **revision)
    else:
        model = load_adapted(args.model, args.revision, dtype=wanted).merge_and_unload(safe_merge=True)
    dtype, source = str(model.dtype).removeprefix("torch."), "."
    staged = staging / "model"
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    if args.to == GGUF:
        # A line break in the folder's name would be one in the Modelfile.
        name = re.sub(r"[^\w.-]", "_", staging.resolve().parent.name)
        source = f"./{name}.gguf"
        staged = staging / "gguf"
        staged.mkdir()
        file = staged / source
        run_converter(args.converter, str(staging / "model"), "--outfile", str(file), "--outtype", OUTTYPES[dtype])
        if not file.is_file():
            raise RuntimeError(f"llama.cpp's converter ended without an error, and wrote no {source}")
    else:
        write_card(staged, args, base)
    if args.to != MERGED:
        stops = stop_token_ids(tokenizer, model.generation_config)
        atomic_write_text(staged / "Modelfile", modelfile(source, tokenizer, stops))
    return staged, dtype


def modelfile(source: str, tokenizer: PreTrainedTokenizerBase, stops: Iterable[int]) -> str:
    """Return the text of a Modelfile.

    Args:
        source: path of the weights, seen from the Modelfile.
        tokenizer: the exported one.
        stops: ids of the tokens that end a completion.
    """
    words = [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in stops]
    # Ollama takes what stands between the quotes as it is: it knows no escapes.
    quotes = ['"""' if re.search(r'["\r\n]', word) else '"' for word in words]
    return MODELFILE.format(
        source=source,
        template=CHAT_TEMPLATE if tokenizer.chat_template else 'TEMPLATE """{{ .Prompt }}"""',
        stops="\n".join(f"PARAMETER stop {q}{word}{q}" for q, word in zip(quotes, words, strict=True)),
    )


@contextlib.contextmanager
def staging_in(output: Path) -> Iterator[Path]:
    """Yield an empty folder in a locked one; nothing of either stays, also after an error."""
    with held_folder(output):
        try:
            yield begin_staging(output)
        finally:
            shutil.rmtree(output / STAGING, ignore_errors=True)  # It may hold a whole model.
            (output / "_run.lock").unlink(missing_ok=True)


def run(args: ExportArguments) -> None:
    """Write the result, or print vLLM's command; push it if that is set."""
    base = check(args)
    if args.to == VLLM:
        print(vllm_command(args, base))
        return
    output = Path(args.output_dir)
    with staging_in(output) as staging:
        staged, dtype = write(args, base, staging)
        for path in exported_files(output):
            (output / path).unlink(missing_ok=True)
        install(staged, output, written_by=VERB)
    print(f"export: saved the {'gguf file' if args.to == GGUF else 'model'} in {output} ({dtype})")
    if args.to != MERGED:
        print(f"export: ollama create NAME -f {shlex.quote(str(output / 'Modelfile'))}")
    if args.push_to_hub:
        print(f"export: pushed it to {push_folder(output, args, 'the exported model is')}")


parse_export = partial(parse, verb=VERB, dataclass_types=(ExportArguments,))
