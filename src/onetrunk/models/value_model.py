"""The value function that PPO has trained, as a scorer: for best-of-n, or to see where a text goes wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from onetrunk.data.prompts import encode_prompt
from onetrunk.models.base_model import load_tokenizer
from onetrunk.models.build import build_trunk
from onetrunk.models.loading import adapter_base, base_revision, check_source, source_file
from onetrunk.models.trunk import TrunkModel
from onetrunk.models.value_head import VALUE_HEAD_FILE
from onetrunk.ops.packing import make_pack
from onetrunk.types import Prompt, to_device


class ValueModel:
    """The reward that the policy still expects at any place in a text.

    Args:
        model: a trunk; in training it may be wrapped.
        tokenizer: its tokenizer.
        template_kwargs: variables for the chat template.
    """

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.model, self.tokenizer, self.template_kwargs = model, tokenizer, template_kwargs or {}

    @torch.no_grad()
    def values(self, prompts: Sequence[Prompt], completions: Sequence[str], batch_size: int = 8) -> list[Tensor]:
        """Return the values before each token of the completions, float32 on the CPU, one tensor per completion.

        A value is the score that is still to come, less the KL penalty, in the units of the rewards. The first has
        seen the prompt alone; the last, before the EOS token that is added, the whole completion: it ranks the
        completions of a prompt.

        Args:
            prompts: texts or conversations, n.
            completions: what the assistant says after each, n.

        Raises:
            ValueError: the numbers differ, or a prompt is neither a text nor a conversation.
        """
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts and {len(completions)} completions; give one completion each")
        was_training = self.model.training
        self.model.eval()
        values: list[Tensor] = []
        for at in range(0, len(prompts), batch_size):
            values += self._values(prompts[at : at + batch_size], completions[at : at + batch_size])
        self.model.train(was_training)
        return values

    def _values(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> Iterator[Tensor]:
        tokenizer = self.tokenizer
        before = [encode_prompt(p, tokenizer, not isinstance(p, str), self.template_kwargs) for p in prompts]
        after = [[*tokenizer(c, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for c in completions]
        pack = to_device(make_pack(before, after, tokenizer.pad_token_id), next(self.model.parameters()).device)
        values = self.model(pack=pack, roles=("value",)).values.float().cpu()
        return (row[: len(ids)] for row, ids in zip(values, after, strict=True))


def load_value_model(name: str | Path, revision: str | None = None, **model_init_kwargs: Any) -> ValueModel:
    """Return the value model in the output folder of a PPO run, or in its repository on the Hub.

    Args:
        model_init_kwargs: keywords of from_pretrained for the base, such as dtype.

    Raises:
        ValueError: there is no value head.
        RuntimeError: something in it cannot be loaded.
    """
    name = str(name)
    check_source(name)
    base = adapter_base(name, revision)
    if base is None or source_file(name, VALUE_HEAD_FILE, revision) is None:
        raise ValueError(f"{name} holds no adapter with {VALUE_HEAD_FILE}; give the output_dir of a PPO run")
    if revision is not None:
        model_init_kwargs["revision"] = revision
    model: TrunkModel = build_trunk(name, model_init_kwargs=model_init_kwargs)
    if source_file(name, "tokenizer_config.json", revision) is None:
        name, revision = base, base_revision(name, revision)
    return ValueModel(model.eval(), load_tokenizer(name, revision))
