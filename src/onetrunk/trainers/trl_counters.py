"""What TRL's trainers count for their logs and forget in a checkpoint. Knows their attributes; no rows and no loss."""

from __future__ import annotations

from typing import Any

from transformers import Trainer


class TRLCounters(Trainer):
    """The part of a trainer on TRL's that keeps the tokens seen and the metrics since the last log."""

    def own_loop_state(self) -> dict[str, Any]:
        """Return TRL's counters."""
        metrics = {name: list(values) for name, values in self._metrics["train"].items()}
        return {**super().own_loop_state(), "tokens": self._total_train_tokens, "metrics": metrics}

    def load_own_loop_state(self, state: dict[str, Any]) -> None:
        """Take TRL's counters back."""
        super().load_own_loop_state(state)
        self._total_train_tokens = state["tokens"]
        self._metrics["train"].clear()
        self._metrics["train"].update(state["metrics"])
