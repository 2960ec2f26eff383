"""The model card (README.md) of a saved policy: base, adapter, training settings, last metrics, and how to load it.

It replaces PEFT's empty template. It must not contain a path of this machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import Trainer

from onetrunk.checkpoints.folders import published_path
from onetrunk.models.adapters import POLICY, REFERENCE
from onetrunk.models.base_model import decoder_layers
from onetrunk.models.loading import can_be_on_hub
from onetrunk.models.trunk import TrunkModel
from onetrunk.utils.files import atomic_write_text
from onetrunk.utils.options import VLLM_RANKS
from onetrunk.utils.redaction import markdown_text, redact

REFERENCE_FILES = f"`{REFERENCE}/` (the reference of the KL)"
METRICS = ("score/mean", "kl/ref", "completion/length")
# The settings that most affect what is learned.
SETTINGS = (
    "max_completion_length max_turns max_turn_length max_context_length temperature beta kl_target num_ppo_epochs"
    " num_minibatches learning_rate lr_scheduler_type epsilon gamma lam seed"
).split()
TEMPLATE = """---
{{ card_data }}
---

# {{ text(title) }}

A LoRA adapter for {{ base_words }}, trained by PPO ({{ steps }} optimizer steps) with onetrunk {{ version }}.

## Use

```python
{%- if near %}
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base = AutoModelForCausalLM.from_pretrained("{{ near }}")
model = PeftModel.from_pretrained(base, "{{ where }}")
{%- else %}
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained("{{ where }}")
{%- endif %}
tokenizer = AutoTokenizer.from_pretrained("{{ where }}")
```
{% if where == "." %}
`"."` is the folder of this file: run the lines there, or write its path instead.
{% endif %}
{%- if rank %}
vLLM serves it under the name `{{ name }}`:

```
vllm serve {{ served }} --enable-lora --max-lora-rank {{ rank }} --lora-modules {{ name }}={{ where }}
```
{% endif %}
`onetrunk export {{ where }} --to merged --output_dir merged` merges base and adapter, for tools that cannot load
adapters; `--to gguf` and `--to ollama` make files for llama.cpp and Ollama.

Next to the adapter: {{ files | join(", ") }}. PPO needs them to continue training; sampling does not.
{% for heading, facts in tables.items() if facts %}
## {{ heading }}

| | |
|---|---|
{%- for name, value in facts.items() %}
| {{ text(name) }} | {{ text(value) }} |
{%- endfor %}
{% endfor %}
Made with {{ packages | join(", ") }}."""


def write_card(
    trainer: Trainer,
    folder: str,
    model_name: str | None = None,
    base: str | None = None,
    tags: Sequence[str] = (),
    **data: Any,
) -> None:
    """Write the model card of a trainer's policy into a folder; only process 0 writes.

    Args:
        model_name: the heading; None: the Hub name, or the name of output_dir.
        base: Hub name of the base model; None: the name it was loaded from.
        tags: further tags; every card has lora, onetrunk and ppo.
    """
    if not trainer.is_world_process_zero():
        return
    model: TrunkModel = trainer.accelerator.unwrap_model(trainer.model)
    config, args = model.peft_config[POLICY], trainer.args
    base = base or model.get_base_model().config.name_or_path or ""
    is_local = bool(base) and Path(base).exists()
    # The Hub does not accept a folder as the base model.
    hub_base = base if base and not is_local and can_be_on_hub(base) else None
    base_words = f"the base model `{markdown_text(Path(base).name)}`" if base else "a base model without a name"
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    where, near = args.hub_model_id or ".", None
    if where == "." and is_local and not Path(base).is_absolute() and not Path(folder).is_absolute():
        # A base's path is relative to where the run was started, the card's to its folder.
        near = os.path.relpath(base, published_path(Path(folder)))
    can_serve = not config.use_dora and config.bias == "none" and not config.target_parameters
    card = ModelCard.from_template(
        ModelCardData(
            base_model=hub_base,
            library_name="peft",
            pipeline_tag="text-generation",
            tags=sorted({"lora", "onetrunk", "ppo", *tags}),
            **data,
        ),
        template_str=TEMPLATE,
        text=lambda value: markdown_text(_plain(value)),
        title=model_name or name.split("/")[-1],
        name=name.split("/")[-1],
        base_words=f"[{hub_base}](https://huggingface.co/{hub_base})" if hub_base else base_words,
        steps=trainer.state.global_step,
        version=sys.modules["onetrunk"].__version__,
        files=["`value_head.safetensors` (the value head)", *([REFERENCE_FILES] * (REFERENCE in model.peft_config))],
        tables=_tables(trainer, model),
        packages=[f"{package} {version(package)}" for package in ("torch", "transformers", "peft")],
        where=where,
        near=near,
        rank=next((rank for rank in VLLM_RANKS if can_serve and rank >= config.r), None),
        served=near or (base if base and not is_local else "BASE"),
    )
    atomic_write_text(Path(folder) / "README.md", redact(f"{card}\n"))


def _tables(trainer: Trainer, model: TrunkModel) -> dict[str, dict[str, Any]]:
    """Return the facts under each heading: of the adapter, the training, its last metrics, and its judges."""
    config, args, rewards = model.peft_config[POLICY], trainer.args, trainer.sampler.rewards
    num_layers, modules = len(decoder_layers(model)), config.target_modules or []
    modules = [modules] if isinstance(modules, str) else {target.rsplit(".", 1)[-1] for target in modules}
    parameters = {target.rsplit(".", 1)[-1] for target in config.target_parameters or []}
    targets = ", ".join([*sorted(modules), *sorted(parameters)])
    adapter = {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "targets": targets,
        "layers trained": f"the last {num_layers - model.cut} of {num_layers}" if model.cut else f"all {num_layers}",
    }
    quantization = getattr(model.get_base_model().config, "quantization_config", None)
    if quantization is not None:
        settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
        bits = [f", {bits} bit" for bits in (4, 8) if settings.get(f"load_in_{bits}bit")]
        adapter["base weights"] = "".join([_plain(settings.get("quant_method")), *bits])
    weighted = [f"{n} x {w:g}" if w != 1 else n for n, w in zip(rewards.names, rewards.weights, strict=True)]
    kinds = [] if trainer.sampler.episodes is None else trainer.sampler.episodes.kinds.values()
    weighted += sorted({f"the environment {kind.class_name}" for kind in kinds if kind.has_reward})
    rollouts = trainer.state.global_step / args.steps_per_rollout
    training = {
        "rewards": ", ".join(weighted),
        "prompts": len(trainer.train_dataset),
        "rollouts": f"{rollouts:g} of {args.rollout_batch_size} prompts x {args.num_generations} completions",
    }
    environments = {kind.class_name for kind in kinds if kind.factory is not None}
    tools = {name for kind in kinds for name in kind.schemas}
    answers = {"environments": environments, "tools": tools}
    training |= {what: ", ".join(sorted(names)) for what, names in answers.items() if names}
    training |= {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    last: dict[str, float] = {}
    for entry in trainer.state.log_history:
        last |= {name: value for name, value in entry.items() if name.endswith(METRICS)}
    measured = {name: f"{value:.4g}" for name, value in sorted(last.items())}
    return {"Adapter": adapter, "Training": training, "Last measured": measured}


def _plain(value: Any) -> str:
    value = getattr(value, "value", value)  # of an enum
    return f"{value:g}" if isinstance(value, float) else str(value)
