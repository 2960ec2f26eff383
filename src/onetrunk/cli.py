"""The command `onetrunk VERB ...`, which runs a stage.

A stage is imported only when its verb is given, so that help and typing mistakes are answered at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

VERBS = {
    "sft": "fine-tune a model on prompts and completions (a starting point for PPO)",
    "prefs": "sample completions, have a judge compare them, write preference data",
    "reward": "train a reward model on preferences, whole or as an adapter for the policy's trunk",
    "distill": "train a small reward model on the scores of reward models or a judge",
    "ppo": "train a LoRA policy on one frozen base by PPO",
    "eval": "sample and score held-out prompts; win rate over the model before training, or another model",
    "run": "run several of these in a row, resumably",
    "report": "write a page about how a run, several runs or a pipeline went",
    "merge": "add an adapter to its base: one model, for tools that do not load adapters",
    "recipes": "list the recipes that come with onetrunk, or copy one to the working folder",
    "serve": "run the vLLM server that ppo, prefs and eval sample from, or print its command",
}
HELP = """usage: onetrunk VERB --config FILE.yaml [--option value ...]

{verbs}

Options override the file; `onetrunk VERB --help` lists them. FILE.yaml may be the name of a
recipe, such as tiny/ppo.
Several GPUs: accelerate launch --config_file accelerate_configs/ddp.yaml scripts/ppo.py --config FILE.yaml
ONETRUNK_TRACEBACK=1 shows where an error came from. Exit codes: 0 done, 1 failed,
2 wrong usage, 130 interrupted, 143 terminated."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage of a verb; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP.format(verbs="\n".join(f"  {verb:<7} {text}" for verb, text in VERBS.items())))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"onetrunk {sys.modules['onetrunk'].__version__}")
        return 0
    if words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(VERBS)}"
        print(f"error: unknown verb {words[0]!r}: {hint}", file=sys.stderr)
        return 2
    return import_module(f"onetrunk.stages.{words[0]}").main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
