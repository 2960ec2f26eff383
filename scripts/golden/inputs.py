"""Models and data of the cases, made by transformers and PEFT alone, so that both commits read the same files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

WORDS = (
    "a the dog cat bird fish tree house river stone sun moon star rain wind snow red green blue white big small old"
    " new fast slow warm cold good bad sings runs sleeps eats sees finds likes wants gives makes and or not in on . ,"
).split()
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    # Wide weights: a wrong mask, position or scale shows.
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
ROWS = 24
CONSTITUTION = "name: short\nprinciples:\n  - text: Which reply has the shorter words?\n    tags: [short]\n"


def make_inputs(folder: Path) -> None:
    """Write base, sft-adapter, reward-model and reward-adapter, the data, the constitution and rewards.py."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    torch.manual_seed(0)
    tokenizer, config = _tokenizer(), LlamaConfig(**SHAPE)

    def save(model: Any, name: str) -> None:
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    def adapted(kind: Any, task: str, **settings: Any) -> Any:
        model = kind.from_pretrained(folder / "base", **settings)
        peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type=task))
        for parameter in (p for p in peft.parameters() if p.requires_grad):
            parameter.data = 0.2 * torch.randn_like(parameter)
        peft.peft_config["default"].base_model_name_or_path = "inputs/base"  # As cases see it.
        return peft

    save(AutoModelForCausalLM.from_config(config), "base")
    config.num_labels = 1
    save(AutoModelForSequenceClassification.from_config(config), "reward-model")
    save(adapted(AutoModelForCausalLM, "CAUSAL_LM"), "sft-adapter")
    save(adapted(AutoModelForSequenceClassification, "SEQ_CLS", num_labels=1), "reward-adapter")
    for name, rows in _data().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "constitution.yaml").write_text(CONSTITUTION)
    shutil.copy(Path(__file__).with_name("rewards.py"), folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = (*SPECIAL, *WORDS, *(f"w{i}" for i in range(SHAPE["vocab_size"])))[: SHAPE["vocab_size"]]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _data() -> dict[str, list[dict[str, Any]]]:
    def said(role: str, first: int, number: int) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(WORDS[(7 * first + 5 * i) % len(WORDS)] for i in range(number))}]

    # Of different lengths, so that masks and padding matter.
    prompts = [said("user", i, 2 + i % 4) for i in range(ROWS + 4)]
    good, bad = ([said("assistant", i + shift, 3 + (i + shift) % 5) for i in range(ROWS)] for shift in (3, 11))
    return {
        "prompts": [{"prompt": prompt} for prompt in prompts[:ROWS]],
        "held-out": [{"prompt": prompt} for prompt in prompts[ROWS:]],
        "texts": [{"prompt": p, "completion": c} for p, c in zip(prompts, good, strict=False)],
        "pairs": [
            {"prompt": p, "chosen": c, "rejected": r, "probability": 0.6 + i % 3 / 10}
            for i, (p, c, r) in enumerate(zip(prompts, good, bad, strict=False))
        ],
    }


if __name__ == "__main__":
    make_inputs(Path(sys.argv[1]))
