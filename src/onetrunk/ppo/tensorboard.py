"""What a PPO run shows in TensorBoard besides its curves: a first page, histograms, completions, alarms as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerControl, TrainerState

from onetrunk.checkpoints.tensorboard import RunTensorBoard
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.rollout import ScoredRollout
from onetrunk.types import Experience
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
        # For each pack: mask, log ratios and advantages [R, C].
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._num_alarms = 0

    def keep(self, experience: Experience, logprobs: Tensor) -> None:
        """Keep what the histograms show of a pack of the last step of a rollout; nothing waits for the device.

        The experience itself is not kept: with its trunk states it is large.
        """
        if (self.trainer.state.global_step + 1) % self.trainer.args.slots_per_rollout == 0:
            log_ratios = logprobs.detach() - experience.old_logprobs
            self._kept.append((experience.loss_mask, log_ratios, experience.advantages))

    def forget(self) -> None:
        """Drop what was kept of a step that will run again."""
        self._kept = []

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
        self._kept, self._num_alarms = [], 0
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
        logs = logs or {}
        lasting = [value > 0 for name, value in logs.items() if name.startswith(ALARM)]
        logs = {name: value for name, value in logs.items() if not name.startswith(ALARM)}
        if lasting:
            logs[COUNT] = float(sum(lasting))
        super().on_log(args, state, control, logs=logs, **kwargs)

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        kept, self._kept = self._kept, []
        if self.tb_writer is None:
            return
        if kept:
            masks, log_ratios, advantages = zip(*kept, strict=True)
            self._histogram("policy/ratio", [x.exp() for x in log_ratios], masks, state.global_step)
            self._histogram("policy/advantages", advantages, masks, state.global_step)
        raised = self.trainer.alarms.raised
        for name, explanation in raised[self._num_alarms :]:
            self.tb_writer.add_text(f"{ALARM}{name}", redact(explanation), state.global_step)
        self._num_alarms = len(raised)

    def on_evaluate(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        scored = self.trainer.held_out_samples.get("after")
        if self.tb_writer is not None and scored is not None:
            self.tb_writer.add_text("eval/completions", completions_text(scored), state.global_step)

    def _histogram(self, tag: str, values: Sequence[Tensor], masks: Sequence[Tensor], step: int) -> None:
        flat = torch.cat([x[mask.to(x.device)].float().cpu() for x, mask in zip(values, masks, strict=True)])
        flat = flat[flat.isfinite()]
        if len(flat):
            self.tb_writer.add_histogram(tag, flat, step)


def completions_text(scored: ScoredRollout) -> str:
    """Return the first completions of a rollout as Markdown, which TensorBoard renders."""
    parts = []
    for i in range(min(NUM_SAMPLES, len(scored.completions))):
        score = scored.scores.total[i].item()
        prompt, completion = _plain(scored.batch.prompts[i]), _plain(scored.completions[i])
        parts.append(f"**score {score:.3f}**\n\n{_indented(prompt)}\n\ncompletion:\n\n{_indented(completion)}")
    return redact("\n\n---\n\n".join(parts))


def _plain(text: Any) -> str:
    plain = text if isinstance(text, str) else "\n".join(f"{m['role']}: {m['content']}" for m in text)
    return plain if len(plain) <= LONGEST_TEXT else plain[:LONGEST_TEXT] + " ..."


def _indented(text: str) -> str:
    # Markdown shows an indented block as it is.
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
