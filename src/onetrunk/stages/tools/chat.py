"""`onetrunk chat FOLDER`: talk to a model or an adapter, also next to what its training started from.

Lines are read from the terminal or from a pipe. A tokenizer with a chat template keeps the conversation; without one
each line is a prompt of its own.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import TextStreamer

from onetrunk.data.prompts import encode_prompt
from onetrunk.models.base_model import stop_token_ids
from onetrunk.models.build import build_trunk
from onetrunk.models.loading import is_adapter, source_file
from onetrunk.models.trunk import TrunkModel
from onetrunk.models.value_head import VALUE_HEAD_FILE
from onetrunk.models.value_model import load_value_model
from onetrunk.ppo.setup import ModelInputs, base_name, policy_tokenizer, resolve_rewards, tokens_of
from onetrunk.rewards.combine import RewardSet
from onetrunk.stages.arguments import DTYPES, parse
from onetrunk.stages.eval import restore_reference
from onetrunk.stages.options.reading import say
from onetrunk.stages.run_context import explain
from onetrunk.types import Prompt
from onetrunk.utils.options import option
from onetrunk.utils.redaction import printable

RESET = "/reset"
# Of a line, in characters; the memory of a model grows with it.
LONGEST_LINE = 100_000


@dataclass
class ChatArguments:
    """The options of `onetrunk chat`."""

    model: str | None = option(None, "Folder or Hub name of a model or an adapter.")
    compare: bool = option(False, "Let the model before training answer every prompt too.")
    reward_funcs: list[str] | None = option(None, "As in ppo, for every answer; functions get no dataset columns.")
    max_completion_length: int = option(256, "Most tokens of an answer.")
    temperature: float = option(1.0, "Sampling temperature; 0: the most likely token.")
    stop_tokens: list[str] | None = option(None, "Tokens that end an answer besides EOS.")
    revision: str | None = option(None, "Branch, tag or commit on the Hub.")
    dtype: str = option("auto", "Precision of the weights; auto: that of the files.", DTYPES)
    seed: int = option(0, "Of sampling.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("no model is named; write onetrunk chat FOLDER")
        if self.temperature < 0 or self.max_completion_length < 1:
            raise ValueError("temperature must be 0 or more, and max_completion_length 1 or more")


class PrintableStreamer(TextStreamer):
    """Prints what a model writes without its control characters."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(printable(text), stream_end)


class Chat:
    """A conversation with the policy and, if that is asked for, with the model before training."""

    def __init__(self, args: ChatArguments):
        self.args, is_adapted = args, is_adapter(args.model, args.revision)
        if args.compare and not is_adapted:
            raise ValueError(f"compare is set and {args.model} is not an adapter: there is no base to compare it with")
        source = {"revision": args.revision} if args.revision else {}
        self.tokenizer = policy_tokenizer(args.model, None, source)
        self.is_chat = bool(self.tokenizer.chat_template)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base = base_name(args.model, source)
        # Rewards first: a wrong name is said before the model loads.
        functions = resolve_rewards(ModelInputs(args.model, args.reward_funcs), device, base, self.tokenizer)
        self.rewards = RewardSet(functions) if functions else None
        if self.rewards is not None and self.rewards.trunk_reward is not None:
            raise ValueError("a reward adapter scores on the trunk of a run; onetrunk eval scores with it")
        has_values = is_adapted and source_file(args.model, VALUE_HEAD_FILE, args.revision)
        kwargs = source | ({} if args.dtype == "auto" else {"dtype": args.dtype})
        self.values = load_value_model(args.model, **kwargs) if has_values else None
        model = self.values.model if self.values else build_trunk(args.model, model_init_kwargs=kwargs)
        self.model: TrunkModel = model.to(device).eval()
        ends = stop_token_ids(self.tokenizer, self.model.get_base_model().generation_config)
        self.stops = [*ends, *tokens_of(args.stop_tokens or [], self.tokenizer)]
        self.messages: list[dict[str, str]] = []
        if args.compare:
            restore_reference(self.model, args.model, args.revision or "main")
        torch.manual_seed(args.seed)

    def answer(self, text: str) -> None:
        """Print the answers to a line, and remember it with that of the policy; a line that fails is forgotten."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt: Prompt = messages if self.is_chat else text
        sides = {"policy": "policy", "before": "reference"} if self.args.compare else {"": "policy"}
        try:
            answers = [self._sample(title, role, prompt) for title, role in sides.items()]
        except Exception as error:  # A chat template or a reward function may raise anything.
            say(
                f"error: {explain(error) or repr(error)}",
                "the line is forgotten; the conversation continues",
                after_bar=True,
            )
        else:
            self.messages = [*messages, {"role": "assistant", "content": answers[0]}]

    @torch.no_grad()
    def _sample(self, title: str, role: str, prompt: Prompt) -> str:
        ids = torch.tensor([encode_prompt(prompt, self.tokenizer, self.is_chat, {})], device=self.model.device)
        positions = getattr(self.model.get_base_model().config.get_text_config(), "max_position_embeddings", None)
        room = self.args.max_completion_length if positions is None else positions - ids.shape[1]
        if room < 1:
            raise ValueError(
                f"the prompt has {ids.shape[1]} tokens and the model {positions} positions; write less, or {RESET}"
            )
        print(f"[{title}] " * bool(title), end="", flush=True)
        temperature = self.args.temperature
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        streamer = PrintableStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with self.model.as_role(role):
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                streamer=streamer,
                max_new_tokens=min(room, self.args.max_completion_length),
                eos_token_id=self.stops,
                pad_token_id=self.tokenizer.pad_token_id,
                # As in training: nothing of the base's own generation config.
                top_k=0,
                top_p=1.0,
                repetition_penalty=1.0,
                **sampling,
            )
        completion_ids = output[0, ids.shape[1] :].tolist()
        text = self.tokenizer.decode(completion_ids, skip_special_tokens=True)
        numbers = list(self._numbers(prompt, text, completion_ids))
        if numbers:
            print(f"  ({', '.join(numbers)})")
        return text

    def _numbers(self, prompt: Prompt, text: str, completion_ids: list[int]) -> Iterator[str]:
        if self.rewards is not None:
            completion = [{"role": "assistant", "content": text}] if self.is_chat else text
            scores = self.rewards.score([prompt], [completion], [completion_ids], {}).by_function
            yield from (f"{name} {float(values[0]):.3g}" for name, values in scores.items())
        if self.values is not None:
            yield f"value {self.values.values([prompt], [text])[0][-1].item():.3g}"


def lines() -> Iterator[str]:
    """Return what the user writes, line by line, until the end."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            line = f"{input('> ')}\n" if sys.stdin.isatty() else sys.stdin.readline(LONGEST_LINE + 1)
        except EOFError:
            return
        if not line:
            return
        if len(line) > LONGEST_LINE:
            while line and not line.endswith("\n"):
                line = sys.stdin.readline(LONGEST_LINE)
            say(f"a line has more than {LONGEST_LINE:,} characters and is skipped")
        elif line.strip():
            yield line.strip().encode("utf-8", "replace").decode("utf-8")


def run(args: ChatArguments) -> None:
    """Answer lines until there are no more."""
    if sys.stdin is None or sys.stdin.closed:
        raise ValueError("there is no standard input; talk in a terminal, or pipe lines into the command")
    talk = Chat(args)
    if sys.stdin.isatty():
        print(printable(f"{args.model}; {RESET} starts a new conversation, Ctrl-D ends"))
    for line in lines():
        if line == RESET:
            talk.messages = []
        else:
            talk.answer(line)


parse_chat = partial(parse, verb="chat", dataclass_types=(ChatArguments,))
