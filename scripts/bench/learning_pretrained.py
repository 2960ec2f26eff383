"""Tasks of the study of learning on a pretrained model: SmolLM2-135M-Instruct with adapters on the top 8 of 30 layers.

    python recipes/smollm2-135m-cpu/prepare.py --output_dir runs/learning/smollm2-135m

writes the model that all of them read, and the requests of `replies`, which a rubric scores. `rules` asks for one
sentence with a given word and a given mark at its end. `dialogue` asks for three sentences, one after the other, and
each turn has its own reward. Nothing here imports a trainer by itself.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from learning_tasks import Episode
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests import learning

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2-135m-cpu"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
HELD_OUT = 64
# All topics have the same number of tokens, and all words. Held-out requests share neither with the prompts.
TOPICS = {
    "prompts": (
        "a bridge, a village, a train, a school, a doctor, a clock, a horse, a spider, the moon, a desert, an island,"
        " a bicycle, a library, a robot, a wedding, a castle"
    ).split(", "),
    "held_out": "a garden, a violin, a sailor, the wind, an owl, a museum, a farmer, a piano".split(", "),
}
WORDS = {
    "prompts": (
        "river window winter coffee letter music stone paper summer silver shadow green quiet old dream sugar"
    ).split(),
    "held_out": "golden morning candle water yellow silence glass empty".split(),
}
# "finish" makes both equally long in tokens.
MARKS = {"?": "end it with a question mark", "!": "finish with an exclamation mark"}
ONE_SENTENCE = "Write one sentence about {topic} that contains the word {word}, and {mark}."
FIRST_TURN = "Write a short sentence about {topic} with the word {word}."
LATER_TURN = "Now another one with the word {word}."
TURNS, TURN_LENGTH = 3, 16
LEAST_WORDS = 4


@functools.cache
def rubric() -> ModuleType:
    """Return the recipe's reward functions."""
    spec = importlib.util.spec_from_file_location("rubric", RECIPE / "rewards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Pretrained(ABC):
    """A task whose prompts are requests to the pretrained model.

    Args:
        folder: what prepare.py of smollm2-135m-cpu wrote.
        length: most tokens of a completion.
        beta: coefficient of the KL.
    """

    folder: Path
    name: str = ""
    length: int = 32
    beta: float = 0.05
    pad_id: int = 2
    eos_id: int = 2

    settings = {**learning.SETTINGS, "rollout_batch_size": 32, "per_device_train_batch_size": 32, "lam": 1.0}
    lora = {**learning.LORA, "target_modules": PROJECTIONS, "layers_to_transform": list(range(22, 30))}

    @abstractmethod
    def requests(self, split: str) -> list[str]:
        """Return what the user asks for in "prompts" or "held_out"."""

    @abstractmethod
    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the score of a completion, 0 to 1."""

    def reward(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return what training sees of the score."""
        return self.score(prompt_ids, completion_ids)

    def known(self, seed: int) -> dict[str, float]:
        """Return nothing: what the best policy attains is not known."""
        return {}

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer()

    def model(self, seed: int) -> PreTrainedModel:
        """Return the pretrained model in bfloat16, the same for every seed."""
        return AutoModelForCausalLM.from_pretrained(self._part("base"), dtype=torch.bfloat16).eval()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return its tokenizer."""
        return AutoTokenizer.from_pretrained(self._part("base"))

    def prompts(self, seed: int) -> Tensor:
        """Return the requests of the most frequent length, so that no implementation has to pad, [prompts, tokens]."""
        rows = self._rows("prompts")
        ((length, _),) = Counter(map(len, rows)).most_common(1)
        return torch.tensor([row for row in rows if len(row) == length])

    def text(self, prompt_ids: list[int]) -> str:
        """Return a prompt as text, with the tokens of the chat template."""
        return self._tokenizer.decode(prompt_ids)

    def request(self, prompt_ids: list[int]) -> str:
        """Return what the user asks for in a prompt."""
        return self.text(prompt_ids).rpartition("user\n")[2].partition("<|im_end|>")[0]

    def reply(self, token_ids: list[int]) -> str:
        """Return what the model says as text."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def is_stopped(self, token_ids: list[int]) -> bool:
        """Return whether a reply ended by itself."""
        return token_ids[-1:] == [self.eos_id]

    def held_out(self, model: nn.Module) -> dict[str, float]:
        """Return the mean score of sampled completions of held-out requests."""
        scores = [self.score(*pair) for pair in self.held_out_pairs(model)]
        return {"held_out": round(sum(scores) / len(scores), 5)}

    @torch.no_grad()
    def held_out_pairs(self, model: nn.Module) -> list[tuple[list[int], list[int]]]:
        """Return the ids of held-out requests, each with those of a sampled completion."""
        model.eval()
        rows = self._rows("held_out")[:HELD_OUT]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return list(zip(rows, self._completions(model, rows), strict=True))

    def _completions(self, model: nn.Module, rows: list[list[int]]) -> list[list[int]]:
        return self._generate(model, rows, self.length)[0]

    def _generate(
        self, model: nn.Module, rows: list[list[int]], length: int, **options: Any
    ) -> tuple[list[list[int]], Any]:
        """Sample a reply of up to `length` tokens to every row, which are padded on the left.

        Returns:
            The replies up to EOS, and the output of `generate`, which `options` extend.
        """
        width = max(map(len, rows))
        output = model.generate(
            input_ids=torch.tensor([[self.pad_id] * (width - len(row)) + row for row in rows]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length,
            pad_token_id=self.pad_id,
            eos_token_id=self.eos_id,
            return_dict_in_generate=True,
            **options,
        )
        return [self._cut(row) for row in output.sequences[:, width:].tolist()], output

    def _cut(self, reply: list[int]) -> list[int]:
        return reply[: reply.index(self.eos_id) + 1] if self.eos_id in reply else reply

    def _rows(self, split: str) -> list[list[int]]:
        messages = ([{"role": "user", "content": request}] for request in self.requests(split))
        return [self._render(message) for message in messages]

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    def _part(self, name: str) -> Path:
        if not (self.folder / name).exists():
            command = f"python recipes/smollm2-135m-cpu/prepare.py --output_dir {self.folder}"
            raise FileNotFoundError(f"{self.folder / name} does not exist; make it: {command}")
        return self.folder / name


@dataclass
class Replies(Pretrained):
    """Answer a request in one sentence that is warm and on the subject, by the rubric of smollm2-135m-cpu, 0 to 1.

    The held-out requests are on other subjects.
    """

    name: str = "replies"

    def requests(self, split: str) -> list[str]:
        """Return the requests that prepare.py wrote."""
        lines = self._part(f"{split}.jsonl").read_text().splitlines()
        return [json.loads(line)["prompt"][-1]["content"] for line in lines]

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the mean of the rubric, of which warmth is half."""
        reply = [[{"content": self.reply(completion_ids)}]]
        (warm,) = rubric().warm(reply)
        (one,) = rubric().one_sentence(reply, completion_stopped=[self.is_stopped(completion_ids)])
        (on,) = rubric().on_subject([[{"content": self.request(prompt_ids)}]], reply)
        return (2 * warm + one + on) / 4


@dataclass
class Rules(Pretrained):
    """Write one sentence about a topic, with a given word and a given mark at its end."""

    name: str = "rules"

    def requests(self, split: str) -> list[str]:
        """Return a request for every topic and word; the marks alternate with both."""
        marks = list(MARKS.values())
        return [
            ONE_SENTENCE.format(topic=topic, word=word, mark=marks[(i + j) % 2])
            for (i, topic), (j, word) in product(enumerate(TOPICS[split]), enumerate(WORDS[split]))
        ]

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the share of three rules that hold: has the word, ends with the mark, is one stopped sentence."""
        request, reply = self.request(prompt_ids), self.reply(completion_ids).strip()
        (mark,) = (mark for mark, wish in MARKS.items() if wish in request)
        one = is_sentence(reply) and self.is_stopped(completion_ids)
        return (has_word(reply, asked_word(request)) + reply.endswith(mark) + one) / 3


class Conversation:
    """A Gymnasium text environment that plays the user of `dialogue`. It pays nothing: the task's rules do."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.says = later_requests(options["prompt"][-1]["content"])
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_over = not self.says
        return "" if is_over else self.says.pop(0), 0.0, is_over, False, {}


@dataclass
class Dialogue(Pretrained):
    """Write three sentences in a conversation of three turns; each earns its third of the score at once.

    A turn ends with EOS or at TURN_LENGTH tokens. What the user says next does not depend on the replies.
    """

    name: str = "dialogue"
    length: int = 96

    settings = {**Pretrained.settings, "max_turn_length": TURN_LENGTH}
    environment = Conversation

    def requests(self, split: str) -> list[str]:
        """Return the first request of a conversation for every topic and word."""
        return [FIRST_TURN.format(topic=topic, word=word) for topic, word in product(TOPICS[split], WORDS[split])]

    def messages(self, prompt_ids: list[int]) -> list[dict[str, str]]:
        """Return a prompt as a conversation."""
        return [{"role": "user", "content": self.request(prompt_ids)}]

    def answer_ids(self, request: str, stopped: bool) -> list[int]:
        """Return the tokens of the user's next request, from the end of the reply before to the start of the next.

        Args:
            request: what the user says.
            stopped: whether the reply before ended with EOS; otherwise these tokens begin with it.
        """
        before = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
        ids = self._render([*before, {"role": "user", "content": request}])
        ends = [place for place, token in enumerate(ids) if token == self.eos_id]
        return ids[ends[-2] + stopped :]

    def turn_rewards(self, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
        """Return the reward of each turn: a third of the share of its rules that hold.

        A reply has the word, and is one sentence that ended by itself.
        """
        rewards, rest, first = [], completion_ids, self.request(prompt_ids)
        later = later_requests(first)
        for turn, request in enumerate([first, *later]):
            ids = self._cut(rest[:TURN_LENGTH])
            reply, stopped = self.reply(ids).strip(), self.is_stopped(ids)
            rules = has_word(reply, asked_word(request)) + (is_sentence(reply) and stopped)
            rewards.append(rules / 2 / TURNS)
            if turn < len(later):
                rest = rest[len(ids) + len(self.answer_ids(later[turn], stopped)) :]
        return rewards

    def score(self, prompt_ids: list[int], completion_ids: list[int]) -> float:
        """Return the sum of the turns' rewards."""
        return sum(self.turn_rewards(prompt_ids, completion_ids))

    @torch.no_grad()
    def play(self, model: nn.Module, prompts: Tensor) -> list[Episode]:
        """Sample a conversation after every prompt, for trainers that have no text environments.

        Every turn computes the whole context again, as TRL's own loop over tool calls does.
        """
        episodes = [Episode() for _ in prompts]
        for turn in range(TURNS):
            contexts = [[*row, *episode.ids] for row, episode in zip(prompts.tolist(), episodes, strict=True)]
            drawn = zip(episodes, contexts, *self._draw(model, contexts), strict=True)
            for episode, context, ids, logprobs in drawn:
                episode.add(ids, turn, logprobs)
                if turn < TURNS - 1:
                    says = later_requests(self.request(context[: prompts.shape[1]]))[turn]
                    episode.add(self.answer_ids(says, self.is_stopped(ids)))
        return episodes

    def _draw(self, model: nn.Module, contexts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Return a reply to every context and the logprobs of its tokens."""
        replies, output = self._generate(model, contexts, TURN_LENGTH, output_logits=True)
        drawn = output.sequences[:, -len(output.logits) :]
        columns = [
            logits.float().log_softmax(-1).gather(1, ids[:, None])
            for logits, ids in zip(output.logits, drawn.unbind(1), strict=True)
        ]
        logprobs = torch.cat(columns, 1).tolist()
        return replies, [row[: len(ids)] for row, ids in zip(logprobs, replies, strict=True)]

    def _completions(self, model: nn.Module, rows: list[list[int]]) -> list[list[int]]:
        return [episode.ids for episode in self.play(model, torch.tensor(rows))]


def asked_word(request: str) -> str:
    """Return the word that a request of `rules` or `dialogue` asks for."""
    return re.search(r"the word (\w+)", request)[1]


def later_requests(first: str) -> list[str]:
    """Return what the user of a conversation says after the first request: the words that follow its word."""
    word = asked_word(first)
    (words,) = (words for words in WORDS.values() if word in words)
    start = words.index(word)
    return [LATER_TURN.format(word=words[(start + turn) % len(words)]) for turn in range(1, TURNS)]


def has_word(text: str, word: str) -> bool:
    """Return whether a text has a word, in capitals or not, and not only as a part of another."""
    return re.search(rf"\b{word}\b", text, re.IGNORECASE) is not None


def is_sentence(text: str) -> bool:
    """Return whether a text is a single sentence in one line, of LEAST_WORDS words or more."""
    is_one = text.endswith((".", "!", "?")) and not re.search(r"[.!?]\s|\n", text)
    return is_one and len(text.split()) >= LEAST_WORDS
