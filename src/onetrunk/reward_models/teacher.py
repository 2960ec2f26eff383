"""The scores of reward models on the rows from which a student learns.

Each score is computed once and kept in a ledger in the run's folder, keyed by what it depends on (the
model's weights, prompt, completion). A resumed run, or another student in the same folder, reads it from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from tqdm.auto import tqdm

from onetrunk.data.rows import PAIR, SIDES, STOPPED, check_preferences, stopped_column
from onetrunk.data.sharded import ShardedRows
from onetrunk.feedback.ledger import Ledger
from onetrunk.models.loading import base_fingerprint
from onetrunk.rewards.model import ModelReward, load_reward
from onetrunk.rewards.reward import Completion
from onetrunk.types import Prompt
from onetrunk.utils.files import digest

SCORES_FILE = "teacher_scores.db"
# Rows scored between two writes to the ledger: the most that a killed run computes again.
CHUNK = 128


def identity(reward: ModelReward) -> str:
    """Return what the scores of a reward model depend on: its weights, its adapter if any, and its token limit."""
    adapters = [p.detach().float().cpu().contiguous() for n, p in reward.model.named_parameters() if ".lora_" in n]
    lora = hashlib.sha256(b"".join(p.numpy().tobytes() for p in adapters)).hexdigest()
    return f"{base_fingerprint(reward.model)}, lora {lora[:16]}, max_length {reward.max_length}"


class Teacher:
    """One or several reward models: their mean score, and the mean probability that they give to a pair.

    Preferences do not fix the zero of a reward model, so each member's mean over the training rows is subtracted
    (`centre`) before scores are averaged. The probability of a member is sigmoid(lead / temperature).

    Args:
        members: at least one reward model with its tokenizer.
        cache: the ledger's file; None: nothing is kept.
        temperature: above 0; above 1 gives softer labels.
        is_shown: True shows a progress bar.
    """

    def __init__(
        self,
        members: Sequence[ModelReward],
        cache: str | Path | None,
        temperature: float = 1.0,
        is_shown: bool = False,
    ):
        self.members, self.cache = list(members), None if cache is None else Path(cache)
        self.temperature, self.is_shown = temperature, is_shown
        self.identities = [identity(member) for member in self.members]
        self.means = torch.zeros(len(self.members))
        self.num_computed = 0

    @classmethod
    def load(
        cls, names: Sequence[str], cache: str | Path, *, batch_size: int, device: torch.device | str, **settings: Any
    ) -> Teacher:
        """Return the teacher of the reward models (or reward adapters) at these folders or Hub names."""
        return cls([load_reward(n, device=device, batch_size=batch_size) for n in names], cache, **settings)

    def member_scores(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], stopped: Sequence[bool] | None = None
    ) -> Tensor:
        """Return raw scores [members, n] in float32. Only those that are not in the ledger are computed.

        Args:
            prompts: n texts or conversations.
            completions: n texts, or lists that end with an assistant message.
            stopped: n booleans, False for a completion that was cut off; None: no completion was cut off.
        """
        stopped = [True] * len(prompts) if stopped is None else stopped
        if self.cache is None:
            columns = {"prompts": prompts, "completions": completions, "completion_stopped": stopped}
            return torch.tensor([member(**columns) for member in self.members])
        items = list(zip(prompts, completions, stopped, strict=True))
        keys = [[_score_key(name, *item) for item in items] for name in self.identities]
        with Ledger(self.cache) as ledger:
            missing = [
                {key: item for key, item in zip(row, items, strict=True) if ledger.get(key) is None} for row in keys
            ]
            total = sum(map(len, missing))
            with tqdm(total=total, desc="teacher", unit="row", disable=not (self.is_shown and total)) as bar:
                for member, new in zip(self.members, missing, strict=True):
                    rows = list(new.items())
                    for start in range(0, len(rows), CHUNK):
                        chunk = rows[start : start + CHUNK]
                        self._compute(member, chunk, ledger)
                        bar.update(len(chunk))
            return torch.tensor([[ledger.get(key) for key in row] for row in keys])

    def _compute(self, member: ModelReward, chunk: list[tuple[str, tuple]], ledger: Ledger) -> None:
        prompts, completions, stopped = map(list, zip(*(item for _, item in chunk), strict=True))
        scores = member(prompts=prompts, completions=completions, completion_stopped=stopped)
        with ledger.writing():
            for (key, _), score in zip(chunk, scores, strict=True):
                ledger.put(key, score)
        self.num_computed += len(chunk)

    def centre(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], stopped: Sequence[bool] | None = None
    ) -> None:
        """Set each member's zero to its mean over these rows."""
        self.means = self.member_scores(prompts, completions, stopped).mean(dim=1)

    def scores(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], stopped: Sequence[bool] | None = None
    ) -> Tensor:
        """Return scores [n]: the mean over the members, each minus its zero."""
        return self._centred(self.member_scores(prompts, completions, stopped))

    def _centred(self, member_scores: Tensor) -> Tensor:
        return torch.mean(member_scores - self.means[:, None], dim=0)

    def label_pairs(self, rows: Dataset) -> Dataset:
        """Return preference rows with `chosen_score`, `rejected_score`, and the teacher's `probability`."""
        check_preferences(rows)
        stopped = {name: stopped_column(rows, name) for name in STOPPED}
        sides = [self.member_scores(rows["prompt"], rows[name], stopped[f"{name}_stopped"]) for name in SIDES]
        probability = torch.sigmoid((sides[0] - sides[1]) / self.temperature).mean(dim=0)
        scores = {f"{name}_score": self._centred(side).tolist() for name, side in zip(SIDES, sides, strict=True)}
        columns = {name: rows[name] for name in PAIR}
        return Dataset.from_dict({**columns, **stopped, **scores, "probability": probability.tolist()})


def label_rows(teacher: Teacher, pairs: Dataset, singles: Dataset | None = None) -> Dataset:
    """Centre the teacher, and return the labelled training rows.

    Args:
        singles: rows with `prompt` and `completion`, which become pairs without a rejected side; or None.
    """
    prompts, completions = [*pairs["prompt"], *pairs["prompt"]], [*pairs["chosen"], *pairs["rejected"]]
    stopped = [has_stopped for name in STOPPED for has_stopped in stopped_column(pairs, name)]
    if singles is None:
        teacher.centre(prompts, completions, stopped)
        return teacher.label_pairs(pairs)
    single = (list(singles["prompt"]), list(singles["completion"]), stopped_column(singles, "completion_stopped"))
    teacher.centre(prompts + single[0], completions + single[1], stopped + single[2])
    rows = [
        {"prompt": prompt, "chosen": chosen, "chosen_stopped": ended, "rejected_stopped": True, "chosen_score": score}
        for prompt, chosen, ended, score in zip(*single, teacher.scores(*single).tolist(), strict=True)
    ]
    # A column that a row lacks is null in it.
    return Dataset.from_list([*teacher.label_pairs(pairs), *rows])


def label_streamed(teacher: Teacher, pairs: ShardedRows) -> ShardedRows:
    """Centre the teacher on a sample of preference rows, and return the rows, labelled as they are read.

    No ledger keeps their scores: it would grow with the rows.
    """
    sample = pairs.sample()
    sides = [(sample["prompt"], sample[name], stopped_column(sample, f"{name}_stopped")) for name in SIDES]
    teacher.centre(*([value for side in sides for value in side[part]] for part in range(3)))
    labelling = Teacher(teacher.members, None, teacher.temperature)
    labelling.means = teacher.means
    about = f"teacher {digest([*teacher.identities, teacher.temperature])}"
    return pairs.encoded(lambda rows: list(labelling.label_pairs(Dataset.from_list(rows))), about)


def _score_key(model: str, prompt: Prompt, completion: Completion, stopped: bool) -> str:
    about = {"model": model, "prompt": prompt, "completion": completion}
    return digest(about if stopped else {**about, "stopped": False})
