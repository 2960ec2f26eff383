"""The model card (README.md) of a saved policy: base, adapter, training settings, last metrics, and how to load it.

It replaces PEFT's empty template. It must not contain a path of this machine.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from transformers import Trainer

from onetrunk.models.adapters import POLICY, REFERENCE, VALUE
from onetrunk.models.base import decoder_layers
from onetrunk.models.loading import can_be_on_hub
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.config import PPOConfig
from onetrunk.utils.files import atomic_write_text
from onetrunk.utils.redaction import redact

CARD = "README.md"
TAGS = ("lora", "onetrunk", "ppo")
SHOWN_METRICS = ("score/mean", "kl/ref", "completion/length")
USE = """```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer
model = AutoPeftModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```"""


def write_card(
    trainer: Trainer, folder: str, model_name: str | None = None, base: str | None = None, **data: Any
) -> None:
    """Write the model card of a trainer's policy into a folder; only process 0 writes.

    Args:
        trainer: trained or not.
        folder: of the saved policy.
        model_name: the heading; None: the Hub name, or the name of output_dir.
        base: Hub name of the base model; None: the name it was loaded from.
        **data: metadata of the card (language, license, tags, datasets).
    """
    if not trainer.is_world_process_zero():
        return
    name = trainer.args.hub_model_id or Path(trainer.args.output_dir).resolve().name
    card = ModelCard(trainer, model_name or name.split("/")[-1], name, base)
    atomic_write_text(Path(folder) / CARD, redact(card.text(**data)))


class ModelCard:
    """The text of a card and its parts.

    Args:
        trainer: trained or not.
        title: the heading.
        name: where the adapter can be loaded from: a Hub name, or the folder's name.
        base: Hub name of the base model; None: the name it was loaded from.
    """

    def __init__(self, trainer: Trainer, title: str, name: str, base: str | None = None):
        self.trainer, self.title, self.name = trainer, title, name
        self.args: PPOConfig = trainer.args
        self.model: TrunkModel = trainer.accelerator.unwrap_model(trainer.model)
        self.base_path = base or self.model.get_base_model().config.name_or_path or ""

    def base_on_hub(self) -> str | None:
        """Return the base model's Hub name; None for a folder, which the Hub does not accept as metadata."""
        if not self.base_path or Path(self.base_path).exists() or not can_be_on_hub(self.base_path):
            return None
        return self.base_path

    def text(self, tags: list[str] | None = None, **data: Any) -> str:
        """Return the card: metadata as YAML, then Markdown."""
        metadata = ModelCardData(
            base_model=self.base_on_hub(),
            library_name="peft",
            pipeline_tag="text-generation",
            tags=sorted({*TAGS, *(tags or [])}),
            **data,
        )
        steps = self.trainer.state.global_step
        parts = [
            f"---\n{metadata.to_yaml()}\n---",
            f"# {self.title}",
            f"A LoRA adapter for {self._base()}, trained by PPO ({steps} optimizer steps) with onetrunk"
            f" {sys.modules['onetrunk'].__version__}.",
            "## Use",
            USE.format(name=self.name),
            self._files(),
            "## Adapter",
            _table(self.adapter()),
            "## Training",
            _table(self.settings()),
            *self._measured(),
            "Made with " + ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "peft")) + ".",
        ]
        return "\n\n".join(parts) + "\n"

    def _base(self) -> str:
        base = self.base_on_hub()
        if base:
            return f"[{base}](https://huggingface.co/{base})"
        return f"the base model `{Path(self.base_path).name}`" if self.base_path else "a base model without a name"

    def _files(self) -> str:
        adapters = {VALUE: "the value's adapter", REFERENCE: "the reference that the KL was measured to"}
        folders = [f"`{name}/` ({what})" for name, what in adapters.items() if name in self.model.peft_config]
        files = ", ".join(["`value_head.safetensors` (the value head)", *folders])
        return f"Next to the adapter: {files}. PPO needs them to train on; sampling does not."

    def adapter(self) -> dict[str, Any]:
        """Return rank, targets and layers of the policy."""
        config, model = self.model.peft_config[POLICY], self.model
        num_layers = len(decoder_layers(model))
        targets, top = config.target_modules, num_layers - model.cut
        if not isinstance(targets, str):
            targets = ", ".join(sorted({target.rsplit(".", 1)[-1] for target in targets}))
        facts = {
            "rank": config.r,
            "alpha": config.lora_alpha,
            "targets": targets,
            "layers trained": f"the last {top} of {num_layers}" if model.cut else f"all {num_layers}",
            "value head": model.value_head_kind,
        }
        quantization = getattr(model.get_base_model().config, "quantization_config", None)
        if quantization is not None:
            settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
            bits = next((bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit")), None)
            method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
            facts["base weights"] = f"{method}, {bits} bit" if bits else method
        return facts

    def settings(self) -> dict[str, Any]:
        """Return the settings that most affect what is learnt."""
        args, rewards = self.args, self.trainer.sampler.rewards
        weighted = [f"{n} x {w:g}" if w != 1 else n for n, w in zip(rewards.names, rewards.weights, strict=True)]
        rollouts = self.trainer.state.global_step / args.slots_per_rollout
        schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        size = f"{args.rollout_batch_size} prompts x {args.num_generations}"
        return {
            "rewards": ", ".join(weighted),
            "prompts": len(self.trainer.train_dataset),
            "rollouts": f"{rollouts:g} of {size} completions",
            "max_completion_length": args.max_completion_length,
            "temperature": args.temperature,
            "beta": f"{args.beta:g}, adapting to a KL of {args.kl_target:g}" if args.kl_target else f"{args.beta:g}",
            "num_ppo_epochs x num_minibatches": f"{args.num_ppo_epochs} x {args.num_minibatches}",
            "learning_rate": f"{args.learning_rate:g}, {schedule}",
            "epsilon": f"{args.epsilon:g}",
            "gamma, lam": f"{args.gamma:g}, {args.lam:g}",
            "seed": args.seed,
        }

    def metrics(self) -> dict[str, float]:
        """Return the last logged score, KL and length, of training and of each evaluation."""
        last: dict[str, float] = {}
        for entry in self.trainer.state.log_history:
            last |= {name: value for name, value in entry.items() if name.endswith(SHOWN_METRICS)}
        return last

    def _measured(self) -> list[str]:
        metrics = {name: f"{value:.4g}" for name, value in sorted(self.metrics().items())}
        return ["## Last measured", _table(metrics)] if metrics else []


def _table(facts: dict[str, Any]) -> str:
    rows = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])
