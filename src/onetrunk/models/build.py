"""Build a TrunkModel from a name, a model, a PEFT model, or the folder of an adapter; or models out of nothing."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from onetrunk.models.adapters import (
    POLICY,
    REWARD,
    adapter_parameters,
    check_adapter_config,
    check_adapter_fits,
    check_targets,
    find_tuner_layers,
    layer_index,
    list_name,
    match_modules,
    set_adapter_weights,
)
from onetrunk.models.base_model import decoder_layers, load_base, output_head
from onetrunk.models.loading import (
    adapter_base,
    adding_adapter,
    base_of,
    base_revision,
    check_base_marks,
    expand,
    is_adapter,
    put_adapter_on,
    read_adapter_weights,
)
from onetrunk.models.trunk import TrunkModel
from onetrunk.models.value_head import VALUE_HEAD_FILE
from onetrunk.utils.files import require_output_dir
from onetrunk.utils.options import parse_adapter_layers

if TYPE_CHECKING:
    from onetrunk.models.reward_model import ScoreAdapter

logger = logging.getLogger(__name__)

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
NUM_BYTES = 256


def default_peft_config() -> LoraConfig:
    """Return the default LoRA config: rank 16 on every linear layer of the trunk."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def build_trunk(
    model: str | PathLike[str] | PreTrainedModel | PeftModel,
    peft_config: PeftConfig | None = None,
    *,
    adapter_layers: str = "all",
    quantization_config: Any = None,
    model_init_kwargs: dict[str, Any] | None = None,
) -> TrunkModel:
    """Return the trunk with its branches.

    Args:
        model: a name or path of a base model or of an adapter, a transformers decoder, or a PeftModel. The policy
            continues an adapter, with a frozen copy of it as the reference, and a value head saved with it.
        peft_config: LoRA config of a new policy; None: rank 16 on all linear layers.
        adapter_layers: "all" or "top-k".
        quantization_config: for a model given by name.
        model_init_kwargs: keywords of from_pretrained, for a model given by name.

    Raises:
        ValueError: settings that exclude each other, or a model that can't be a trunk.
        TypeError: not a model.
        RuntimeError: nothing loadable at its name.
    """
    model = source = fspath(model) if isinstance(model, PathLike) else model
    check_model_type(model)
    if peft_config is not None:
        check_adapter_config(peft_config)
    if not isinstance(model, str) and (quantization_config is not None or model_init_kwargs):
        raise ValueError(
            "quantization_config and model_init_kwargs are for a model given by name or path; this one is loaded"
            " already"
        )
    if isinstance(model, str):
        model = _load(model, peft_config, quantization_config, model_init_kwargs or {})
    if isinstance(model, TrunkModel):
        _check_settings(model, peft_config, adapter_layers)
        return model
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "the model carries an adapter already and peft_config asks for a new one: leave peft_config out to"
                " continue the adapter, or merge it first (model.merge_and_unload())"
            )
        trunk = TrunkModel.from_adapter(model, adapter_layers=adapter_layers)
        if isinstance(source, str):
            _restore_value(trunk, source, (model_init_kwargs or {}).get("revision"))
        return trunk
    if find_tuner_layers(model):
        raise ValueError(
            "the model has adapters already, such as those of another trainer, which a new one would change; load it"
            " again, or give the trainer's own model (trainer.model) to continue its adapter"
        )
    peft_config = peft_config or default_peft_config()
    check_targets(peft_config, model)
    return TrunkModel(model, peft_config, adapter_layers=adapter_layers)


def check_model_type(model: Any) -> None:
    """Raise a TypeError for anything but a name or a model."""
    if not isinstance(model, (str, PathLike, PreTrainedModel, PeftModel)):
        kind = "None" if model is None else f"of type {type(model).__name__}"
        raise TypeError(f"model is {kind}; give a name or path, a transformers decoder, or a PeftModel")


def attach_score_adapter(trunk: PeftModel, adapter: ScoreAdapter) -> None:
    """Make `adapter` the branch `reward` of a TrunkModel; no `requires_grad` flag of another branch changes."""
    from onetrunk.models.reward_model import ScoreBranch  # Few runs have one.

    check_base_marks(trunk.get_base_model(), expand(adapter.name))
    flags = [(p, p.requires_grad) for p in trunk.parameters()]
    if REWARD in trunk.peft_config:
        trunk.delete_adapter(REWARD)
    with adding_adapter(adapter.name):
        match_modules(adapter.config, trunk.get_base_model())
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


def _restore_value(trunk: TrunkModel, adapter: str, revision: str | None) -> None:
    if not Path(adapter).is_dir():
        adapter = snapshot_download(adapter, revision=revision, allow_patterns=VALUE_HEAD_FILE)
    folder = Path(adapter)
    if (folder / VALUE_HEAD_FILE).is_file():
        trunk.value_head.load(folder)
        logger.info("the value head continues from %s", folder)


def _check_settings(model: TrunkModel, peft_config: PeftConfig | None, adapter_layers: str) -> None:
    if peft_config is not None:
        raise ValueError("the model is a TrunkModel, which has its own LoRA config; leave peft_config out")
    if parse_adapter_layers(adapter_layers, len(decoder_layers(model))) > model.cut:
        raise ValueError(
            f"the model is a TrunkModel that trains from layer {model.cut} on, which is below adapter_layers"
            f" {adapter_layers!r}; build it with adapter_layers, or set 'all'"
        )


def _load(
    name: str, peft_config: PeftConfig | None, quantization_config: Any, kwargs: dict[str, Any]
) -> PreTrainedModel | PeftModel:
    if not is_adapter(name, kwargs.get("revision")):
        return load_base(name, quantization_config=quantization_config, **kwargs)
    if peft_config is not None:
        raise ValueError(f"{name} is an adapter and peft_config asks for a new one; leave peft_config out")
    return load_adapted(name, quantization_config=quantization_config, **kwargs)


def load_adapted(name: str, revision: str | None = None, **kwargs: Any) -> PeftModel:
    """Return the base of the adapter at `name` with the adapter on it; `kwargs` are for `load_base`.

    Raises:
        ValueError: the adapter does not fit the base, or was trained on another one.
        RuntimeError: a file is missing or damaged.
    """
    base_name = adapter_base(name, revision)
    with base_of(name):
        base = load_base(base_name, revision=base_revision(name, revision), **kwargs)
    # PEFT would list every tensor that does not fit; `check_adapter_fits` raises one error instead.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some weights of|Found missing adapter keys")
        model = put_adapter_on(base, name, revision, ignore_mismatched_sizes=True)
    check_adapter_fits(model, read_adapter_weights(name, revision), POLICY, name)
    return model


# --- models out of nothing: for students, and for recipes and tests that must not download anything ---


@dataclass(frozen=True)
class BaseShape:
    """The size of a base model.

    Args:
        vocab_size: most tokens: 256 bytes, the special tokens, and the merges learned from the texts.
        hidden_size: width; an even multiple of num_heads.
        max_positions: most tokens of a prompt with its completion.
        init_scale: times the spread that keeps the logits of a narrow, untrained model near unit variance.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    max_positions: int = 128
    init_scale: float = 1.0


def make_base(
    texts: Iterable[str],
    output_dir: str | Path,
    *,
    shape: BaseShape | None = None,
    chat_template: str | None = None,
    special_tokens: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a tokenizer trained on `texts` and a Llama with random weights into a folder, and return the folder.

    Args:
        chat_template: Jinja text, saved with the tokenizer.
        special_tokens: further tokens that are never split, such as those of the chat template.
        seed: of the weights; the global random state stays unchanged.
    """
    shape = shape or BaseShape()
    folder = require_output_dir(output_dir)
    tokenizer = train_tokenizer(texts, shape.vocab_size, special_tokens)
    tokenizer.chat_template = chat_template
    tokenizer.model_max_length = shape.max_positions
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=True,
        initializer_range=shape.init_scale * shape.hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer: every text can be encoded, and decodes to itself."""
    special = [PAD_TOKEN, END_TOKEN, *special_tokens]
    if vocab_size <= NUM_BYTES + len(special):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: {NUM_BYTES} bytes and {len(special)} special tokens come first;"
            f" set it to {NUM_BYTES + len(special) + 1} or more"
        )
    texts = list(texts)
    if not any(texts):
        raise ValueError("no texts to train a tokenizer on; give some that look like the data")
    backend = Tokenizer(models.BPE())
    # Digits one by one: a small model learns to calculate only on the digits themselves.
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=list(special_tokens),
        clean_up_tokenization_spaces=False,
    )


def scorer_from_config(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a reward model with random weights, drawn from torch's global random state: seed it first.

    Args:
        settings: `model_type` (llama, bert, ...) and fields of its config.
        tokenizer: sets the vocabulary and the special tokens.

    Raises:
        ValueError: a missing or unknown model_type, or fields that its config rejects.
    """
    fields = dict(settings)
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise ValueError(
            f"student_config has no model_type, only {', '.join(map(str, fields)) or 'nothing'}; write for instance"
            " {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4}"
        )
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    try:
        config = AutoConfig.for_model(
            model_type, **{"vocab_size": len(tokenizer), **tokens, "num_labels": 1, **fields}
        )
        return AutoModelForSequenceClassification.from_config(config)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"student_config {dict(settings)} makes no model: {reason}; repair it") from error
