"""What a PPO run shows in TensorBoard besides its curves: a first page, histograms, completions, alarms as events."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState

from onetrunk.checkpoints.resume_point import RunTensorBoard
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.evaluation import short_text
from onetrunk.ppo.rollout import ScoredRollout
from onetrunk.utils.redaction import redact

ALARM = "alarm/"
# Logged in place of one metric per alarm.
COUNT = "alarm/count"
# The tab Custom Scalars.
LAYOUT = {
    "PPO at a glance": {
        "score": ["Multiline", ["train/score/mean", "eval/score/mean"]],
        "KL to the reference": ["Multiline", ["train/kl/ref", "eval/kl/ref"]],
        "completion length": ["Multiline", ["train/completion/length", "eval/completion/length"]],
        "seconds per phase": ["Multiline", ["train/time/generate_s", "train/time/score_s", "train/time/update_s"]],
        "alarms that last": ["Multiline", [f"train/{COUNT}"]],
    }
}
# Completions in a text, and characters of one.
NUM_SAMPLES = 4
LONGEST_TEXT = 1000


class PPOTensorBoard(RunTensorBoard):
    """TensorBoard of a PPO run.

    Args:
        trainer: a PPOTrainer; its alarms and samples are shown.
    """

    def __init__(self, trainer: Trainer):
        super().__init__()
        self.trainer = trainer
        self._num_alarms = 0

    def show_rollout(self, scored: ScoredRollout, step: int) -> None:
        """Write the histograms and some completions of a rollout of this process."""
        if self.tb_writer is None:
            return
        total = scored.scores.total[scored.scores.total.isfinite()]
        if len(total):
            self.tb_writer.add_histogram("rollout/score", total, step)
        self.tb_writer.add_histogram("rollout/length", scored.lengths, step)
        self.tb_writer.add_text("rollout/completions", completions_text(scored), step)

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._num_alarms = 0
        if self.tb_writer is not None:
            self.tb_writer.add_custom_scalars(LAYOUT)

    def on_log(
        self,
        args: PPOConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        lasting = [value > 0 for name, value in (logs or {}).items() if name.startswith(ALARM)]
        logs = {name: value for name, value in (logs or {}).items() if not name.startswith(ALARM)}
        if lasting:
            logs[COUNT] = float(sum(lasting))
        super().on_log(args, state, control, logs=logs, **kwargs)

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        raised = self.trainer.alarms.raised
        for name, explanation in raised[self._num_alarms :] if self.tb_writer is not None else ():
            self.tb_writer.add_text(f"{ALARM}{name}", redact(explanation), state.global_step)
        self._num_alarms = len(raised)

    def on_evaluate(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        scored = self.trainer.held_out_samples.get("after")
        if self.tb_writer is not None and scored is not None:
            self.tb_writer.add_text("eval/completions", completions_text(scored), state.global_step)


def completions_text(scored: ScoredRollout) -> str:
    """Return the first completions of a rollout as Markdown, which TensorBoard renders."""
    parts = []
    for i in range(min(NUM_SAMPLES, len(scored.completions))):
        score = scored.scores.total[i].item()
        prompt, completion = _indented(scored.batch.prompts[i]), _indented(scored.completions[i])
        parts.append(f"**score {score:.3f}**\n\n{prompt}\n\ncompletion:\n\n{completion}")
    return redact("\n\n---\n\n".join(parts))


def _indented(text: Any) -> str:
    # Markdown shows an indented block as it is.
    return "\n".join(f"    {line}" for line in short_text(text, LONGEST_TEXT).splitlines() or [""])
