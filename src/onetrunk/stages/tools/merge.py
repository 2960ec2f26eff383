"""`onetrunk merge ADAPTER --output_dir FOLDER`: one model out of an adapter and its base.

For tools that load models and no adapters. The result is a plain transformers folder: weights, tokenizer, generation
config and a card.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from huggingface_hub import ModelCardData

from onetrunk.checkpoints.folders import MANIFEST, begin_staging, install
from onetrunk.checkpoints.hub import push_folder, repo_name, require_push
from onetrunk.models.base_model import check_decoder
from onetrunk.models.build import load_adapted
from onetrunk.models.loading import adapter_base, base_of, can_be_on_hub, load_config, read_adapter_config
from onetrunk.ppo.setup import policy_tokenizer
from onetrunk.stages.arguments import DTYPES, PushArguments, parse
from onetrunk.stages.run_context import run_stage
from onetrunk.utils.files import atomic_write_text, held_folder, require_output_dir
from onetrunk.utils.options import option
from onetrunk.utils.redaction import markdown_text, redact

CARD = """---
{metadata}
---

# {title}

{base}, merged with a LoRA adapter into one model by onetrunk {version}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{where}")
tokenizer = AutoTokenizer.from_pretrained("{where}")
```

`"."` is the folder of this file. vLLM serves it: `vllm serve {where}`.
"""


@dataclass
class MergeArguments(PushArguments):
    """The options of `onetrunk merge`."""

    adapter: str | None = option(None, "Folder or Hub name of the adapter, such as the output_dir of onetrunk ppo.")
    output_dir: str | None = option(None, "Folder that gets the merged model.")
    revision: str | None = option(None, "Branch, tag or commit of the adapter on the Hub.")
    dtype: str = option("auto", "Precision of the written weights; auto: the base's own.", DTYPES)
    overwrite_output_dir: bool = option(False, "Replace a model that was merged into output_dir before.")

    def __post_init__(self) -> None:
        if not self.adapter:
            raise ValueError("no adapter is named; write onetrunk merge ADAPTER --output_dir FOLDER")
        if not self.output_dir:
            raise ValueError("output_dir is not set; name the folder that gets the merged model")


def check(args: MergeArguments) -> str:
    """Return the name of the base model; everything is checked here that can fail before weights load."""
    base = adapter_base(args.adapter, args.revision)
    if base is None:
        raise ValueError(f"{args.adapter} is a model already, and not an adapter; there is nothing to merge")
    task = read_adapter_config(args.adapter, args.revision).task_type
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"{args.adapter} is an adapter of task type {task}; only adapters of language models are merged"
        )
    with base_of(args.adapter):
        config = load_config(base)
        check_decoder(config, base)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"the base {base} is a quantised checkpoint, which has no place for the sum of base and adapter; set"
            " base_model_name_or_path in adapter_config.json to the model that it was quantised from"
        )
    output = require_output_dir(args.output_dir)
    names = sorted(path.name for path in output.iterdir() if path.name[0] not in "._")
    if names and not (args.overwrite_output_dir and MANIFEST in names):
        fix = "set overwrite_output_dir to true to replace it, or " if MANIFEST in names else ""
        raise ValueError(f"{output} is not empty ({', '.join(names[:3])}); {fix}name another output_dir")
    require_push(args)
    return base


def write_card(folder: Path, args: MergeArguments, base: str) -> None:
    """Write the model card of a merged model; it has no path of this machine."""
    on_hub = not Path(base).exists() and can_be_on_hub(base)
    data = ModelCardData(
        base_model=base if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["onetrunk", "ppo"],
    )
    name, base_name = repo_name(args), markdown_text(Path(base).name)
    text = CARD.format(
        metadata=data.to_yaml(),
        title=markdown_text(name.split("/")[-1]),
        base=f"[{base}](https://huggingface.co/{base})" if on_hub else f"The base model `{base_name}`",
        version=sys.modules["onetrunk"].__version__,
        where=name if args.hub_model_id and args.push_to_hub else ".",
    )
    atomic_write_text(folder / "README.md", redact(text))


def merge(args: MergeArguments) -> None:
    """Merge, save and, if that is set, push."""
    base = check(args)
    output = Path(args.output_dir)
    with held_folder(output):
        source = {"revision": args.revision} if args.revision else {}
        tokenizer = policy_tokenizer(args.adapter, None, source)
        adapted = load_adapted(args.adapter, args.revision, dtype=None if args.dtype == "auto" else args.dtype)
        model = adapted.merge_and_unload(safe_merge=True)
        staged = begin_staging(output) / "model"
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        write_card(staged, args, base)
        # Weights of an earlier merge may be in another number of files.
        for path in output.glob("*.safetensors*"):
            path.unlink()
        install(staged, output)
    print(f"merge: saved the merged model in {output} ({str(model.dtype).removeprefix('torch.')})")
    if args.push_to_hub:
        print(f"merge: pushed it to {push_folder(output, args, 'the merged model is')}")


parse_merge = partial(parse, verb="merge", dataclass_types=(MergeArguments,))
main = partial(run_stage, "merge", parse_merge, merge)
