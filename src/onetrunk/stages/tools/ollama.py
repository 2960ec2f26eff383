"""An Ollama Modelfile: where the weights are, the chat template in Go's language, stop words, sampling as in PPO.

A Jinja chat template that puts fixed texts around each message can be said in Go's language, and the texts are found
by formatting conversations. What other templates do (tools, thoughts, rules about order) is not guessed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

MODELFILE = """# ollama create NAME -f Modelfile
# Ollama reads the safetensors of some architectures only; for the others export gguf.
FROM {source}
{template}
# As PPO samples by default; Ollama's own defaults are others.
PARAMETER temperature 1
PARAMETER top_k 0
PARAMETER top_p 1
PARAMETER repeat_penalty 1
{stops}
"""
UNKNOWN = (
    "# The chat template does more than to put texts around messages. Ollama knows the templates of well-known models;"
    "\n# compare `ollama show --template NAME` with chat_template.jinja, and write TEMPLATE here if they differ."
)
SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
# Conversations on which the texts are checked.
PROOFS = ((USER,), (SYSTEM, USER), (USER, ASSISTANT, USER), (SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER))
LATER_SYSTEM = (SYSTEM, USER, ASSISTANT, SYSTEM, USER)


def modelfile(source: str, tokenizer: PreTrainedTokenizerBase, stops: Iterable[int]) -> str:
    """Return the text of a Modelfile.

    Args:
        source: path of the weights, seen from the Modelfile.
        stops: ids of the tokens that end a completion.
    """
    template = go_template(tokenizer) if tokenizer.chat_template else "{{ .Prompt }}"
    words = [tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in stops]
    # Ollama takes what stands between the quotes as it is: it knows no escapes.
    quotes = ['"""' if re.search(r'["\r\n]', word) else '"' for word in words]
    return MODELFILE.format(
        source=source,
        template=UNKNOWN if template is None else f'TEMPLATE """{template}"""',
        stops="\n".join(f"PARAMETER stop {q}{word}{q}" for q, word in zip(quotes, words, strict=True)),
    )


def go_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the chat template in Go's language, None if it cannot be said so.

    A BOS token that the tokenizer adds is left out: Ollama adds it too.
    """
    try:
        texts = find_texts(tokenizer)
        is_right = all(texts.formatted(roles) == format_chat(tokenizer, roles, generates=True) for roles in PROOFS)
        with contextlib.suppress(TemplateError):  # Many templates take a system message at the start only.
            is_right &= texts.formatted(LATER_SYSTEM) == format_chat(tokenizer, LATER_SYSTEM, generates=True)
    except (TemplateError, ValueError):
        return None
    bos = tokenizer.bos_token
    adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if adds_bos:
        texts = replace(texts, start=texts.start.removeprefix(bos))
    fixed = texts.formatted(PROOFS[0]) + texts.formatted(PROOFS[-1])
    # What a template of Go would not print, a second BOS token, and a date, which would stay that of today.
    is_plain = not any(sign in fixed for sign in ("{{", '"""')) and "strftime" not in tokenizer.chat_template
    is_plain &= not (adds_bos and fixed.startswith(bos))
    return texts.in_go() if is_right and is_plain else None


@dataclass(frozen=True)
class Texts:
    """The fixed texts of a chat template.

    Args:
        start: what every conversation begins with.
        opening: what follows if no message is a system message.
        around: the texts before and after a message, by role.
        generation: what begins the answer.
    """

    start: str
    opening: str
    around: dict[str, tuple[str, str]]
    generation: str

    def formatted(self, roles: Sequence[str]) -> str:
        """Return what `format_chat` would, if these texts were all that the template has."""
        turns = (f"{self.around[role][0]}@{i}@{self.around[role][1]}" for i, role in enumerate(roles))
        return "".join([self.start, "" if SYSTEM in roles else self.opening, *turns, self.generation])

    def in_go(self) -> str:
        """Return them as a template of Go."""
        turns = {role: f"{before}{{{{ .Content }}}}{after}" for role, (before, after) in self.around.items()}
        opening = f"{{{{ if not .System }}}}{self.opening}{{{{ end }}}}" if self.opening else ""
        return (
            f'{self.start}{opening}{{{{ range .Messages }}}}{{{{ if eq .Role "system" }}}}{turns[SYSTEM]}'
            f'{{{{ else if eq .Role "user" }}}}{turns[USER]}{{{{ else }}}}{turns[ASSISTANT]}{{{{ end }}}}{{{{ end }}}}'
            f"{self.generation}"
        )


def format_chat(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], generates: bool = False) -> str:
    """Return a conversation as the tokenizer formats it; message i is `@i@`."""
    messages = [{"role": role, "content": f"@{i}@"} for i, role in enumerate(roles)]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generates)


def find_texts(tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Return what stands between the messages of a few conversations; ValueError if a message is not in its text."""

    def between(*roles: str, generates: bool = False) -> list[str]:
        return re.split("|".join(f"@{i}@" for i in range(len(roles))), format_chat(tokenizer, roles, generates))

    first, answered, after_answer = between(USER, ASSISTANT)
    _, _, again, after_user = between(USER, ASSISTANT, USER)
    before_system, asked, _ = between(SYSTEM, USER)
    _, end = between(USER, generates=True)
    before_user, bos = again.removeprefix(after_answer), tokenizer.bos_token or ""
    begins = first.startswith(bos) and before_system.startswith(bos)
    # Where each turn begins with it, as in SmolLM2, it is a part of the turn.
    start = bos if begins and not before_user.startswith(bos) else ""
    around = {
        SYSTEM: (before_system.removeprefix(start), asked.removesuffix(before_user)),
        USER: (before_user, after_user),
        ASSISTANT: (answered.removeprefix(after_user), after_answer),
    }
    return Texts(start, first.removeprefix(start).removesuffix(before_user), around, end.removeprefix(after_user))
