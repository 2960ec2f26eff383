"""A reward adapter as a frozen branch of the trunk: LoRA weights and a score head.

Such an adapter comes from a sequence-classification model (TRL's RewardTrainer with a peft_config saves one). On the
trunk it needs no second base model; `load_adapter_scorer` loads it with a base of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from onetrunk.models.adapters import (
    POLICY,
    REWARD,
    ValueHead,
    adapter_parameters,
    check_adapter_config,
    layer_index,
    list_name,
    require_lora,
    set_adapter_weights,
)
from onetrunk.models.base import decoder_layers, output_head
from onetrunk.models.loading import (
    adapter_base,
    adding_adapter,
    check_base_marks,
    expand,
    put_adapter_on,
    read_adapter_config,
    read_adapter_weights,
    source_file,
)
from onetrunk.models.new_scorer import load_with_new_head
from onetrunk.models.scorer import READS_END
from onetrunk.types import Pack

# The modules that PEFT trains whole in a sequence-classification model; a decoder has only `score`.
HEAD_MODULES = {"score", "classifier"}
_HEAD_KEYS = ("base_model.model.score.weight", "base_model.model.score.bias")
# Values of init_lora_weights that leave the base model unchanged.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class ScoreAdapter:
    """A reward adapter that was read but is not on a trunk yet.

    Args:
        name: folder or Hub name.
        base: name of the base model that it was trained on.
        config: of its LoRA.
        weights: under PEFT's names.
        head: "weight" [1, H], and "bias" [1] if it has one.
        pad_token_id: the score is read at the last token that differs from it; None: at the last token.
    """

    name: str
    base: str
    config: LoraConfig
    weights: dict[str, Tensor]
    head: dict[str, Tensor]
    pad_token_id: int | None = None


def is_adapter_name(name: str) -> bool:
    """Return whether `name` leads to an adapter; False also if it leads nowhere."""
    return source_file(expand(name), "adapter_config.json") is not None


def read_score_adapter(name: str) -> ScoreAdapter:
    """Read the reward adapter at `name`, a folder or a name on the Hub, without its pad token.

    Raises:
        ValueError: not LoRA, a variant that the trunk can't carry, no score head, or one with several labels.
        RuntimeError: its base model is missing.
    """
    source = expand(name)
    base, config = adapter_base(source), _checked_config(name, read_adapter_config(source))
    weights = read_adapter_weights(source)
    head = {key.rsplit(".", 1)[-1]: weights.pop(key) for key in _HEAD_KEYS if key in weights}
    if "weight" not in head:
        raise ValueError(
            f"reward adapter {name} has no score head (a tensor {_HEAD_KEYS[0]}); train it as a sequence-"
            "classification adapter (PEFT's task_type SEQ_CLS), which saves its head"
        )
    if len(head["weight"]) != 1:
        raise ValueError(f"reward adapter {name} has {len(head['weight'])} labels; expected 1, a score")
    others = sorted(k for k in weights if ".lora_" not in k or ".lora_embedding" in k)
    if others:
        raise ValueError(
            f"reward adapter {name} has {len(others)} tensors besides LoRA on the layers and its head, the first is"
            f" {others[0]}; the trunk stays frozen: merge the adapter into its base model and give that folder"
        )
    return ScoreAdapter(name, base, config, weights, head)


def load_adapter_scorer(
    name: str, *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
) -> PreTrainedModel:
    """Load a reward adapter on a base model of its own, for scoring: in eval mode, frozen.

    Its rows end with the end token, as the completions that the trunk scores do. Raises as `read_score_adapter`.

    Args:
        device: None leaves it on the CPU.
        dtype: of the base; None for the checkpoint's own.
    """
    adapter, source = read_score_adapter(name), expand(name)
    base = load_with_new_head(adapter.base, **({} if dtype is None else {"dtype": dtype}))
    # The model that PEFT wraps: its layers carry the adapter, and its head is that of the adapter.
    model = put_adapter_on(base, source).get_base_model()
    check_base_marks(model, source)
    model.config.update({READS_END: True, "name_or_path": source})
    model.requires_grad_(False)
    return (model if device is None else model.to(device)).eval()


def _checked_config(name: str, config: PeftConfig) -> LoraConfig:
    if config.task_type != "SEQ_CLS":
        raise ValueError(
            f"reward adapter {name} has the task_type {config.task_type}, so no score head; give one with SEQ_CLS,"
            " which a sequence-classification model with an adapter saves"
        )
    require_lora(config, f"reward adapter {name}")
    config = copy.deepcopy(config)
    if set(getattr(config, "modules_to_save", None) or ()) <= HEAD_MODULES:
        config.modules_to_save = None
    if getattr(config, "init_lora_weights", None) in _PLAIN_STARTS:
        config.init_lora_weights = True
    try:
        check_adapter_config(config)
    except ValueError as error:
        raise ValueError(f"reward adapter {name} can't be a branch of the trunk: {error}") from error
    config.task_type, config.inference_mode, config.lora_dropout = "CAUSAL_LM", False, 0.0
    return config


class ScoreBranch(nn.Module):
    """The head of the reward adapter, in float32, and the positions that it reads.

    Args:
        adapter: the adapter.
        hidden_size: width of the trunk.
        device: of the trunk's last layer.
        obstacle: why it cannot start from the states at the cut, a clause; None: it starts from them.
    """

    def __init__(self, adapter: ScoreAdapter, hidden_size: int, device: torch.device, obstacle: str | None):
        super().__init__()
        self.name, self.pad_token_id, self.obstacle = adapter.name, adapter.pad_token_id, obstacle
        self.head = ValueHead(hidden_size, device=device)
        if adapter.head["weight"].shape != self.head.linear.weight.shape:
            raise ValueError(
                f"reward adapter {adapter.name} has a head of {list(adapter.head['weight'].shape)}, and this trunk is"
                f" {hidden_size} wide: it was trained on another base model"
            )
        with torch.no_grad():
            for key, tensor in adapter.head.items():
                getattr(self.head.linear, key).copy_(tensor)
        self.requires_grad_(False)

    @property
    def from_states(self) -> bool:
        """Whether it starts from the states at the cut; otherwise it runs every layer."""
        return self.obstacle is None

    def last_tokens(self, pack: Pack) -> Tensor:
        """Return the column [R] of each row at which the score is read.

        Source: transformers' GenericForSequenceClassification: the last token that is not the pad token, even if the
        pad token is the end token.
        """
        counts = pack.attention_mask.bool()
        if self.pad_token_id is not None:
            counts = counts & (pack.input_ids != self.pad_token_id)
        return (torch.arange(counts.shape[1], device=counts.device) * counts).argmax(dim=1)

    def forward(self, states: Tensor) -> Tensor:
        """Return the scores [R], float32, of the rows' states [R, H] at `last_tokens` under this adapter."""
        return self.head(states)


def attach_score_adapter(trunk: PeftModel, adapter: ScoreAdapter) -> None:
    """Make `adapter` the branch `reward` of a TrunkModel; no `requires_grad` flag of another branch changes."""
    check_base_marks(trunk.get_base_model(), expand(adapter.name))
    flags = [(p, p.requires_grad) for p in trunk.parameters()]
    if REWARD in trunk.peft_config:
        trunk.delete_adapter(REWARD)
    with adding_adapter(adapter.config, trunk.get_base_model(), adapter.name):
        trunk.add_adapter(REWARD, copy.deepcopy(adapter.config))
    set_adapter_weights(trunk, adapter.weights, REWARD, adapter.name)
    for parameter in adapter_parameters(trunk, REWARD).values():
        parameter.requires_grad_(False)
    for parameter, requires_grad in flags:
        parameter.requires_grad_(requires_grad)
    base = trunk.get_base_model()
    hidden_size = base.config.get_text_config().hidden_size
    device = output_head(base).weight.device
    trunk.reward_branch = ScoreBranch(adapter, hidden_size, device, _obstacle(trunk))


def _obstacle(trunk: PeftModel) -> str | None:
    first_layer = lowest_layer(trunk, REWARD)
    if not trunk.cut:
        return "layer 0 trains, so there is no cut"
    if first_layer < trunk.cut:
        return f"it changes layer {first_layer} and the cut is at {trunk.cut}"
    if lowest_layer(trunk, POLICY) < trunk.cut:
        return "the policy continues an adapter that is active below the cut, where this one is not"
    return None


def lowest_layer(trunk: PeftModel, adapter: str) -> int:
    """Return the lowest decoder layer that an adapter changes; 0 for weights outside the layers."""
    layers = list_name(trunk, decoder_layers(trunk.get_base_model()))
    return min((layer_index(name, layers) or 0 for name in adapter_parameters(trunk, adapter)), default=0)
