"""Whole runs of preference data for the tests: a tiny model on disk, a judge that counts, and processes that die."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from onetrunk import cli
from onetrunk.judges.constitution import load_constitution
from onetrunk.judges.judge import Done, Judge, Pair, Principle, Rating, Single, Verdict
from onetrunk.rollouts.local import LocalBackend
from onetrunk.stages.arguments import ModelArguments
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.prefs.stage import Result, make_rows
from onetrunk.utils.ledger import Ledger
from tests.tiny import CHAT_TEMPLATE, WORDS, tiny_model, tiny_tokenizer

CONSTITUTION = """
name: test
principles:
  - text: Which reply is warmer?
    weight: 2.0
    tags: [warm]
  - text: Which reply is shorter?
    tags: [concise]
"""
# Runs of a few seconds.
SMALL = {"num_generations": 3, "max_completion_length": 8, "prompts_per_chunk": 4, "use_cpu": True}


def make_inputs(folder: Path, num_prompts: int = 20) -> Path:
    """Write a model, a constitution and prompts (one of them twice) into `folder`; return it."""
    # Narrow weights: completions end, and say something else each time.
    tiny_model("llama", initializer_range=0.1).save_pretrained(folder / "model")
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder / "model")
    (folder / "constitution.yaml").write_text(CONSTITUTION)
    prompts = [f"{WORDS[i % 11]} {WORDS[11 + i]}" for i in range(num_prompts)]
    write_prompts(folder / "prompts.jsonl", [*prompts, prompts[0]])
    return folder


def write_prompts(path: Path, prompts: Sequence[object]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt, "other": i}) + "\n" for i, prompt in enumerate(prompts)))


def write_recipe(inputs: Path, **settings: object) -> None:
    """Write `prefs.yaml` for the command line, with these settings of the judge."""
    paths = {
        "model_name_or_path": str(inputs / "model"),
        "dataset_name": str(inputs / "prompts.jsonl"),
        "constitution": str(inputs / "constitution.yaml"),
    }
    (inputs / "prefs.yaml").write_text(json.dumps({**paths, **SMALL, **settings}))


def prefs(inputs: Path, *options: object, out: str | Path = "out") -> int:
    """Run `onetrunk prefs` with the recipe of `write_recipe`; return the exit code."""
    return cli.main(["prefs", *map(str, ["--config", inputs / "prefs.yaml", "--output_dir", out, *options])])


def run(inputs: Path, output: Path, judge: CountingJudge | None, **settings: object) -> Result:
    """Make the rows of a run in this process."""
    paths = {"dataset_name": str(inputs / "prompts.jsonl"), "output_dir": str(output)}
    args = PrefsArguments(**{**paths, **SMALL, **settings})
    model_args = ModelArguments(model_name_or_path=str(inputs / "model"))
    output.mkdir(parents=True, exist_ok=True)
    return make_rows(args, model_args, load_constitution(str(inputs / "constitution.yaml")), judge, output)


class CountingJudge(Judge):
    """Answers by a checksum of the question, and writes every question to a file before it answers.

    Args:
        log: the file; a line per question.
        dies_at: the process kills itself when it is asked so often.
        fails: says of a question's number in this process (from 1) whether it gets no answer.
    """

    name = "counting"
    identity = {"judge": "counting"}

    def __init__(self, log: Path, dies_at: int | None = None, fails: Callable[[int], bool] = lambda n: False):
        self.log, self.dies_at, self.fails = log, dies_at, fails
        self.asked = 0

    def _answer(self, items: Sequence[Pair] | Sequence[Single], principle: Principle, keep: Done) -> None:
        for index, item in enumerate(items):
            if isinstance(item, Pair):
                number = self._number([principle.text, item.prompt, item.first, item.second])
                answer = Verdict(None, error="down") if number is None else Verdict((number % 89) / 100 + 0.05)
                if number is not None and number % 13 == 0:
                    answer = Verdict(None, reason="cannot tell")
            else:
                number = self._number([principle.text, item.prompt, item.text])
                answer = Rating(None, error="down") if number is None else Rating((number % 101) / 100)
            keep(index, answer)

    def _number(self, question: list[object]) -> int | None:
        self.asked += 1
        text = json.dumps(question)
        with open(self.log, "a") as file:
            file.write(text + "\n")
        if self.asked == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return None if self.fails(self.asked) else zlib.crc32(text.encode())


class DyingBackend(LocalBackend):
    """A local backend whose process kills itself in its n-th call (from 1), after the sampling."""

    dies_at = 1
    calls = 0

    def generate(self, *words, **options):
        rollout = super().generate(*words, **options)
        type(self).calls += 1
        if self.calls == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return rollout


def questions_asked(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines()) if log.exists() else Counter()


def in_a_process(work: Callable[[], object], when: Callable[[], bool] | None = None) -> int:
    """Run `work` in a fork of this process (whose imports are warm); return its exit code, negative for a signal.

    The fork is killed as soon as `when` is true.
    """
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            os._exit(1)
    while when is not None and not when():
        if os.waitpid(child, os.WNOHANG)[0]:
            raise AssertionError("the process ended before it was to be killed")
        time.sleep(0.01)
    if when is not None:
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def answers_in(path: str | Path) -> dict[str, object]:
    """Return what a ledger holds."""
    with Ledger(path) as ledger:
        return {key: ledger.get(key) for key in ledger.keys()}


def files_of(folder: Path) -> dict[str, bytes]:
    """Return rows, statistics and card of a run, without report and ledger, whose order is that of the answers."""
    names = [p for p in folder.rglob("*") if p.is_file() and not {"ledger", "_report"} & set(p.parts)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in names}
