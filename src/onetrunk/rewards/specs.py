"""What a text in `reward_funcs` names: a table with a line for each kind of reward, and the parser that reads it.

What is special about a kind is in its own file, which is imported when such a reward is loaded: nothing here imports
torch, and the planner asks too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

# The word that stands for the judge in the settings of a run.
JUDGE = "judge"
PROCESS_MODEL = "prm:"


@dataclass(frozen=True)
class Policy:
    """What a reward may need of the policy that it scores."""

    base: str  # The name of the base model. A reward adapter must share it and the tokenizer.
    tokenizer: PreTrainedTokenizerBase
    device: torch.device  # Where reward models run.
    reward_tokenizer: PreTrainedTokenizerBase | None = None  # That of a reward model; None: the one next to it.


@dataclass(frozen=True)
class Kind:
    """A kind of reward."""

    name: str
    form: str  # How it is written, for the message about a text that is of no kind.
    fits: Callable[[str], bool]  # Whether a text is of this kind, if it is of no kind before.
    loader: str  # "module:function" here that takes the text, and a Policy or None; "": the stage makes the reward.
    is_model: bool = False  # A model of this process gives the scores.
    loads_first: bool = False  # A command loads it before anything else, to find mistakes at once.
    in_python: str = ""  # What to give without a Policy, where the text does not say enough.


def _is_model(text: str) -> bool:
    return Path(os.path.expanduser(text)).is_dir() or ("/" in text and ":" not in text and not text.endswith(".py"))


KINDS = (
    Kind("server", "'http://host/classify'", lambda text: text.startswith(("http://", "https://")),
         "remote:remote_reward"),
    Kind("process reward model", "'prm:NAME'", lambda text: text.startswith(PROCESS_MODEL),
         "process_model:ProcessReward.from_spec", is_model=True, in_python="ProcessReward"),
    Kind("reward model", "a folder that exists or a Hub name 'owner/model'", _is_model,
         "model:named_model", is_model=True, in_python="ModelReward"),
    Kind("judge", "the word 'judge' of onetrunk ppo", lambda text: text == JUDGE, "", in_python="JudgeReward"),
    Kind("function", "", lambda text: True, "reward:named_function", loads_first=True),
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """An entry of `reward_funcs` that is a text, and its kind."""

    text: str
    kind: Kind

    def load(self, policy: Policy | None = None) -> Callable[..., Any]:
        """Return the reward; a server is called once to check that it works. Raises what `resolve_reward` raises."""
        if not self.kind.loader or (policy is None and self.kind.in_python):
            raise ValueError(
                f"reward function {self.text!r} names a {self.kind.name}, which is not loaded by its name here; give"
                f" onetrunk.rewards.{self.kind.in_python}"
            )
        return resolve_name(f"onetrunk.rewards.{self.kind.loader}")(self.text, policy)


def read_spec(text: str) -> Spec:
    """Return what an entry of `reward_funcs` names; nothing is loaded."""
    return Spec(text, next(kind for kind in KINDS if kind.fits(text)))
