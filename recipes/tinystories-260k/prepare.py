"""Fetch the model stories260K, convert it to a transformers Llama, and write prompts for stories.

    python recipes/tinystories-260k/prepare.py

Weights and tokenizer are fetched from karpathy/tinyllamas on the Hub (MIT licence) and checked by their
sha256. Files that are already on the machine need no network:

    python recipes/tinystories-260k/prepare.py --checkpoint stories260K.bin --tokenizer tok512.bin

Both are in the formats of llama2.c (https://github.com/karpathy/llama2.c). Everything is written below
`runs/tinystories-260k`: base/, prompts.jsonl and held_out.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from onetrunk.utils.files import atomic_write_text, require_output_dir

REPO = "karpathy/tinyllamas"
# File on the Hub -> its sha256.
FILES = {
    "stories260K/stories260K.bin": "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696",
    "stories260K/tok512.bin": "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312",
}
NORM_EPSILON, ROPE_THETA = 1e-5, 10000.0  # Constants in llama2.c, not in its files.
# A story begins with <s>, and the next one begins where it ends: the same token starts and stops.
UNKNOWN, START, UNUSED = "<unk>", "<s>", "</s>"
SPECIAL = (UNKNOWN, START, UNUSED)
NUM_BYTES = 256
SPACE = "▁"
PLACES = "in a small town/by the sea/near a big forest/on a farm/in a red house/in a far village".split("/")
PEOPLE = "girl/boy".split("/")
NAMES = {
    "girl": "Lily Mia Anna Sara Lucy Emma Amy Jane Ella Nora".split(),
    "boy": "Tim Tom Ben Sam Max Jack Leo Bob Dan Finn".split(),
}
KINDS = "little kind happy shy brave clever".split()
OPENINGS = (
    "Once upon a time, there was a {kind} {person} named {name}.",
    "Once upon a time, {place}, there was a {kind} {person} named {name}.",
    "One day, a {kind} {person} named {name} went outside.",
    "{name} was a {kind} {person} who lived {place}.",
)
HELD_OUT = 100


class Shape(NamedTuple):
    """The header of a checkpoint: seven integers. A negative vocab_size: the output matrix is not the embedding."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int

    def check(self, path: Path) -> None:
        """Raise ValueError if this is not the header of a Llama."""
        positive = min(self._replace(vocab_size=abs(self.vocab_size))) > 0
        if not positive or self.dim % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{path} does not begin with the header of a llama2.c checkpoint (version 0): {self}")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of every tensor, in the order of the file."""
        head_dim, layers = self.dim // self.num_heads, self.num_layers
        kv_dim = head_dim * self.num_kv_heads
        yield "embedding", (abs(self.vocab_size), self.dim)
        yield "attention_norm", (layers, self.dim)
        yield "wq", (layers, self.dim, self.dim)
        yield "wk", (layers, kv_dim, self.dim)
        yield "wv", (layers, kv_dim, self.dim)
        yield "wo", (layers, self.dim, self.dim)
        yield "ffn_norm", (layers, self.dim)
        yield "w1", (layers, self.hidden_dim, self.dim)
        yield "w2", (layers, self.dim, self.hidden_dim)
        yield "w3", (layers, self.hidden_dim, self.dim)
        yield "norm", (self.dim,)
        yield "cosines", (self.max_positions, head_dim // 2)
        yield "sines", (self.max_positions, head_dim // 2)
        if self.vocab_size < 0:
            yield "output", (-self.vocab_size, self.dim)


def read_checkpoint(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Return the header and the float32 tensors of a llama2.c checkpoint, version 0.

    Raises:
        ValueError: the header or the size of the file is wrong.
    """
    data = path.read_bytes()
    if len(data) < 28:
        raise ValueError(f"{path} has {len(data)} bytes; expected a llama2.c checkpoint, such as stories260K.bin")
    shape = Shape(*struct.unpack("<7i", data[:28]))
    shape.check(path)
    sizes = {name: math.prod(size) for name, size in shape.tensors()}
    if len(data) != 28 + 4 * sum(sizes.values()):
        raise ValueError(
            f"{path} has {len(data)} bytes, and its header {shape} asks for {28 + 4 * sum(sizes.values())}; download"
            " it again"
        )
    flat = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32)
    parts = flat.split(list(sizes.values()))
    return shape, {name: part.view(size) for part, (name, size) in zip(parts, shape.tensors(), strict=True)}


def halves(weight: Tensor, num_heads: int) -> Tensor:
    """Return a query or key matrix [heads * D, dim] whose heads rotate (i, i + D/2) instead of (2i, 2i + 1).

    llama2.c rotates neighbours, transformers rotates the two halves of a head: the same rotation in another order.
    """
    pairs = weight.view(num_heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def convert_model(path: Path) -> LlamaForCausalLM:
    """Return the Llama of a checkpoint of llama2.c."""
    shape, tensors = read_checkpoint(path)
    config = LlamaConfig(
        vocab_size=abs(shape.vocab_size),
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=NORM_EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=shape.vocab_size > 0,
        bos_token_id=SPECIAL.index(START),
        eos_token_id=SPECIAL.index(START),
        pad_token_id=SPECIAL.index(UNUSED),
    )
    model = LlamaForCausalLM(config)
    weights = {
        "model.embed_tokens.weight": tensors["embedding"],
        "model.norm.weight": tensors["norm"],
        "lm_head.weight": tensors.get("output", tensors["embedding"]),
    }
    for i in range(shape.num_layers):
        layer = {
            "input_layernorm": tensors["attention_norm"][i],
            "self_attn.q_proj": halves(tensors["wq"][i], shape.num_heads),
            "self_attn.k_proj": halves(tensors["wk"][i], shape.num_kv_heads),
            "self_attn.v_proj": tensors["wv"][i],
            "self_attn.o_proj": tensors["wo"][i],
            "post_attention_layernorm": tensors["ffn_norm"][i],
            "mlp.gate_proj": tensors["w1"][i],
            "mlp.down_proj": tensors["w2"][i],
            "mlp.up_proj": tensors["w3"][i],
        }
        weights |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    model.load_state_dict(weights)
    return model.eval()


def read_pieces(path: Path) -> list[tuple[str, float]]:
    """Return the pieces of a llama2.c tokenizer with their scores, by id; a piece may begin with a space.

    Raises:
        ValueError: the file is damaged, or has no special tokens and bytes at its beginning.
    """
    data, place, pieces = path.read_bytes(), 4, []
    try:
        while place < len(data):
            score, length = struct.unpack_from("<fI", data, place)
            text = data[place + 8 : place + 8 + length]
            if len(text) < length:
                raise ValueError("it ends within a piece")
            pieces.append((text.decode("utf-8"), score))
            place += 8 + length
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path} is not a tokenizer of llama2.c ({error}); download it again") from error
    if len(pieces) < len(SPECIAL) + NUM_BYTES or [piece.strip() for piece, _ in pieces[:3]] != list(SPECIAL):
        raise ValueError(f"{path} does not begin with {', '.join(SPECIAL)} and {NUM_BYTES} bytes, as llama2.c's do")
    return pieces


def convert_tokenizer(path: Path, max_positions: int) -> PreTrainedTokenizerFast:
    """Return a fast tokenizer that merges as llama2.c does: always the pair whose piece has the highest score."""
    pieces = read_pieces(path)
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(NUM_BYTES))]
    names += [piece.replace(" ", SPACE) for piece, _ in pieces[len(names) :]]
    vocab = {name: i for i, name in enumerate(names)}
    merges = []
    for name in sorted(names[len(SPECIAL) + NUM_BYTES :], key=lambda name: -pieces[vocab[name]][1]):
        cuts = ((name[:i], name[i:]) for i in range(1, len(name)))
        merges += [cut for cut in cuts if cut[0] in vocab and cut[1] in vocab]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=UNKNOWN, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(f"{START} $A", special_tokens=[(START, vocab[START])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=START,
        eos_token=START,
        unk_token=UNKNOWN,
        pad_token=UNUSED,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def make_prompts() -> list[dict[str, str]]:
    """Return the beginnings of stories, in a fixed random order."""
    texts = [
        opening.format(kind=kind, person=person, name=name, place=place)
        for opening in OPENINGS
        for kind in KINDS
        for person in PEOPLE
        for name in NAMES[person]
        for place in PLACES
    ]
    texts = list(dict.fromkeys(texts))  # Two of the openings have no place.
    random.Random(0).shuffle(texts)
    return [{"prompt": text} for text in texts]


def fetch(name: str) -> Path:
    """Download a file from the Hub and check its sha256."""
    path = Path(hf_hub_download(REPO, name))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != FILES[name]:
        raise ValueError(
            f"{name} of {REPO} has the sha256 {digest}, expected {FILES[name]}: another file is there now; give the"
            " files that you trust as --checkpoint and --tokenizer"
        )
    return path


def prepare(checkpoint: Path, tokenizer: Path, output_dir: str) -> Path:
    """Write base model and prompts; return their folder."""
    folder = require_output_dir(output_dir)
    model = convert_model(checkpoint)
    fast = convert_tokenizer(tokenizer, model.config.max_position_embeddings)
    if len(fast) != model.config.vocab_size:
        raise ValueError(
            f"{tokenizer} has {len(fast)} pieces and {checkpoint} an embedding of {model.config.vocab_size}; give the"
            " tokenizer of this model"
        )
    model.save_pretrained(folder / "base")
    fast.save_pretrained(folder / "base")
    prompts = make_prompts()
    for name, rows in (("prompts", prompts[:-HELD_OUT]), ("held_out", prompts[-HELD_OUT:])):
        atomic_write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="stories260K.bin; otherwise fetched from the Hub")
    parser.add_argument("--tokenizer", type=Path, help="tok512.bin; otherwise fetched from the Hub")
    parser.add_argument("--output_dir", default="runs/tinystories-260k")
    args = parser.parse_args()
    try:
        weights, pieces = FILES
        folder = prepare(args.checkpoint or fetch(weights), args.tokenizer or fetch(pieces), args.output_dir)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"base model, {len(make_prompts()) - HELD_OUT} prompts and {HELD_OUT} held-out ones in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
