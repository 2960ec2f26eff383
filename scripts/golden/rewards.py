"""The reward functions of the cases: the same score for the same text, and a note of what was sampled."""

import json
import os
import signal
from pathlib import Path


def short_words(completions, prompts=None, completion_ids=None, **columns):
    """Score the share of words of at most three letters; write down the rows if this is a training.

    With GOLDEN_DIES_AT=n, the process is killed in call n, once.
    """
    if completion_ids is not None:
        texts = [row if isinstance(row, str) else row[-1]["content"] for row in prompts]
        with open(f"completions-{os.environ.get('RANK', '0')}.jsonl", "a") as file:
            for prompt, ids in zip(texts, completion_ids, strict=True):
                file.write(json.dumps({"prompt": prompt, "ids": list(map(int, ids))}) + "\n")
        _die_once(int(os.environ.get("GOLDEN_DIES_AT", 0)))
    words = [(row if isinstance(row, str) else row[-1]["content"]).split() for row in completions]
    return [sum(len(word) <= 3 for word in row) / max(1, len(row)) for row in words]


def _die_once(at):
    _die_once.calls = getattr(_die_once, "calls", 0) + 1
    if _die_once.calls == at and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
