"""A naive reading of the formats of llama2.c: an exporter of random models, a forward over one token, an encoder.

Nothing here is shared with recipes/tinystories-260k/prepare.py: weights are read by an offset in the file, heads
rotate neighbours, and the forward is that of one token at a time in float64.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

SPECIAL = ["<unk>", "\n<s>\n", "\n</s>\n"]
FIRST_PIECE = 259


def write_checkpoint(path: Path, header: tuple[int, ...], seed: int = 0) -> None:
    """Write a random checkpoint, version 0."""
    dim, hidden, layers, heads, kv_heads, vocab, positions = header
    kv_dim, half = dim // heads * kv_heads, dim // heads // 2
    sizes = [abs(vocab) * dim, layers * dim, layers * dim * dim, layers * kv_dim * dim, layers * kv_dim * dim]
    sizes += [layers * dim * dim, layers * dim, *[layers * dim * hidden] * 3, dim, positions * half, positions * half]
    sizes += [-vocab * dim] if vocab < 0 else []
    numbers = np.random.default_rng(seed).normal(0, 0.3, sum(sizes)).astype("<f4")
    for norm in (1, 6, 10):  # Norms are near one.
        first = sum(sizes[:norm])
        numbers[first : first + sizes[norm]] += 1
    angles = np.arange(positions)[:, None] * 10000.0 ** (-2 * np.arange(half) / (dim // heads))
    first = sum(sizes[:11])
    numbers[first : first + 2 * positions * half] = np.concatenate([np.cos(angles), np.sin(angles)]).ravel()
    path.write_bytes(struct.pack("<7i", *header) + numbers.tobytes())


class NaiveLlama:
    """The transformer of llama2.c, one token at a time, in float64."""

    def __init__(self, path: Path):
        data = path.read_bytes()
        header = struct.unpack("<7i", data[:28])
        self.dim, self.hidden, self.layers, self.heads, self.kv_heads, vocab, self.positions = header
        self.numbers = np.frombuffer(data, "<f4", offset=28).astype(np.float64)
        self.place = 0
        head, layers, dim = self.dim // self.heads, self.layers, self.dim
        self.embedding = self._take(abs(vocab), dim)
        self.attention_norm = self._take(layers, dim)
        self.wq = self._take(layers, dim, dim)
        self.wk, self.wv = (self._take(layers, head * self.kv_heads, dim) for _ in range(2))
        self.wo = self._take(layers, dim, dim)
        self.ffn_norm = self._take(layers, dim)
        self.w1 = self._take(layers, self.hidden, dim)
        self.w2 = self._take(layers, dim, self.hidden)
        self.w3 = self._take(layers, self.hidden, dim)
        self.norm = self._take(dim)
        self.cosines, self.sines = (self._take(self.positions, head // 2) for _ in range(2))
        self.output = self._take(-vocab, dim) if vocab < 0 else self.embedding
        assert self.place == len(self.numbers)

    def _take(self, *shape: int) -> np.ndarray:
        first = self.place
        self.place += int(np.prod(shape))
        return self.numbers[first : self.place].reshape(shape)

    def logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits [len(ids), vocabulary] after each token."""
        keys: list[list[np.ndarray]] = [[] for _ in range(self.layers)]
        values: list[list[np.ndarray]] = [[] for _ in range(self.layers)]
        rows = []
        for position, token in enumerate(ids):
            x = self.embedding[token].copy()
            for layer in range(self.layers):
                states = rms_norm(x, self.attention_norm[layer])
                q = self._rotated(self.wq[layer] @ states, position).reshape(self.heads, -1)
                keys[layer].append(self._rotated(self.wk[layer] @ states, position).reshape(self.kv_heads, -1))
                values[layer].append((self.wv[layer] @ states).reshape(self.kv_heads, -1))
                x += self.wo[layer] @ self._attention(q, keys[layer], values[layer])
                states = rms_norm(x, self.ffn_norm[layer])
                gate = self.w1[layer] @ states
                x += self.w2[layer] @ (gate / (1 + np.exp(-gate)) * (self.w3[layer] @ states))
            rows.append(self.output @ rms_norm(x, self.norm))
        return np.array(rows)

    def _rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        pairs = x.reshape(-1, len(self.cosines[0]), 2)
        cos, sin = self.cosines[position], self.sines[position]
        left, right = pairs[..., 0], pairs[..., 1]
        return np.stack([left * cos - right * sin, left * sin + right * cos], -1).reshape(x.shape)

    def _attention(self, q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
        heads = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = np.array([q[head] @ key[group] for key in keys]) / np.sqrt(q.shape[1])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            heads.append(sum(w * value[group] for w, value in zip(weights, values, strict=True)))
        return np.concatenate(heads)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean() + 1e-5)


def write_tokenizer(path: Path, texts: list[str], size: int) -> None:
    """Write a tokenizer: special tokens, bytes, merged pieces with falling scores, then the single characters."""
    words = [list(f" {word}") for text in texts for word in text.split(" ")]
    characters, merged = sorted({c for word in words for c in word}), []
    while FIRST_PIECE + len(characters) + len(merged) < size:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(word, word[1:], strict=False):
                counts[pair] = counts.get(pair, 0) + 1
        pair = max(counts, key=lambda pair: (counts[pair], pair))
        if "".join(pair) not in merged:
            merged.append("".join(pair))
        words = [_merged(word, pair) for word in words]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *characters]
    data = struct.pack("<I", max(len(piece.encode()) for piece in pieces))
    for i, piece in enumerate(pieces):
        text = piece.encode()
        data += struct.pack("<fI", float(min(0, FIRST_PIECE - i)), len(text)) + text
    path.write_bytes(data)


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for piece in word:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


def encode(path: Path, text: str) -> list[int]:
    """Return the ids of a text as run.c of llama2.c finds them: <s>, a space, the best merge until none is left."""
    data, place, pieces, scores = path.read_bytes(), 4, [], []
    while place < len(data):
        score, length = struct.unpack_from("<fI", data, place)
        pieces.append(data[place + 8 : place + 8 + length].decode())
        scores.append(score)
        place += 8 + length
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    tokens: list[int] = []
    for character in f" {text}" if text else "":
        # A character that is no piece becomes its bytes, which follow the three special tokens.
        tokens += [ids[character]] if character in ids else [3 + byte for byte in character.encode()]
    while True:
        joined = [ids.get(pieces[a] + pieces[b]) for a, b in zip(tokens, tokens[1:], strict=False)]
        found = [(scores[token], -i) for i, token in enumerate(joined) if token is not None]
        if not found:
            return [1, *tokens]
        i = -max(found)[1]
        tokens[i : i + 2] = [joined[i]]
