"""What a text in `reward_funcs` names: a table with a line for each kind of reward, and the parser that reads it.

What is special about a kind is in its own file, which is imported when such a reward is loaded: nothing here imports
torch, and the planner asks too.
"""

from __future__ import annotations

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
    """What a reward may need of the policy that it scores.

    Args:
        base: name of the base model, which a reward adapter must share.
        tokenizer: the policy's, which a reward adapter must share too.
        device: where reward models run.
        reward_tokenizer: the one of a reward model; None: the one next to it.
    """

    base: str
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    reward_tokenizer: PreTrainedTokenizerBase | None = None


@dataclass(frozen=True)
class Kind:
    """A kind of reward.

    Args:
        name, form: what it is and how it is written, for messages; "": as the messages of functions say.
        fits: whether a text is of this kind, if it is of no kind before.
        loader: "module:function" that takes the text and a Policy, or None without a trainer, and returns the reward.
        is_model: a model of this process gives the scores.
        loads_first: it loads at once, so a command loads it before anything else to find mistakes.
    """

    name: str
    form: str
    fits: Callable[[str], bool]
    loader: str
    is_model: bool = False
    loads_first: bool = False


def _is_model(text: str) -> bool:
    return Path(text).expanduser().is_dir() or ("/" in text and ":" not in text and not text.endswith(".py"))


KINDS = (
    Kind("server", "'http://host/classify'", lambda text: text.startswith(("http://", "https://")),
         "onetrunk.rewards.remote:remote_reward"),
    Kind("process reward model", "'prm:NAME'", lambda text: text.startswith(PROCESS_MODEL),
         "onetrunk.rewards.process_model:ProcessReward.from_spec", is_model=True),
    Kind("reward model", "a folder that exists or a Hub name 'owner/model'", _is_model,
         "onetrunk.rewards.model:named_model", is_model=True),
    Kind("judge", "the word 'judge' in the settings of onetrunk ppo", lambda text: text == JUDGE,
         "onetrunk.rewards.judge:named_judge"),
    Kind("function", "", lambda text: True,
         "onetrunk.rewards.reward:named_function", loads_first=True),
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """An entry of `reward_funcs` that is a text, and its kind."""

    text: str
    kind: Kind

    def load(self, policy: Policy | None = None) -> Callable[..., Any]:
        """Return the reward; a server is called once to check that it works. Raises what `resolve_reward` raises."""
        return resolve_name(self.kind.loader)(self.text, policy)


def read_spec(text: str) -> Spec:
    """Return what an entry of `reward_funcs` names; nothing is loaded."""
    return Spec(text, next(kind for kind in KINDS if kind.fits(text)))
