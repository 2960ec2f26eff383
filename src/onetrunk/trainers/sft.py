"""TRL's SFTTrainer with checkpoints that survive anything and resume exactly. Knows TRL's counters; no rows."""

from __future__ import annotations

from typing import Any

from trl import SFTTrainer

from onetrunk.trainers.checkpoint import SafeCheckpoints
from onetrunk.trainers.hub import SafePushes
from onetrunk.trainers.secret_free import SecretFreeCards
from onetrunk.trainers.trl_counters import TRLCounters


class ResumableSFTTrainer(SafePushes, SecretFreeCards, TRLCounters, SafeCheckpoints, SFTTrainer):
    """TRL's SFTTrainer, whose interrupted and resumed run is the run that was not interrupted."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.remember_settings()
