"""Progress of a run: a bar in a terminal or notebook, a line per rollout or log elsewhere; and TensorBoard."""

from __future__ import annotations

import contextlib
import io
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.utils import is_in_notebook

from onetrunk.checkpoints.resume_point import RunTensorBoard
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.evaluation import shown_completion, where_rewarded
from onetrunk.ppo.rollout import ScoredRollout
from onetrunk.utils.redaction import redact
from onetrunk.utils.sample_text import score_text, short_text

# A name in a line of progress -> the metric. A line is written for logs that have the first one.
OF_STEPS = {"loss": "loss", "accuracy": "pairs/accuracy", "token accuracy": "mean_token_accuracy"}
OF_ROLLOUTS = {"score": "score/mean", "kl": "kl/ref", "length": "completion/length"}
OF_ROLLOUTS |= {"tokens/s": "throughput/completion_tokens_per_s"}


def _line(text: str) -> None:
    # A notebook shows stderr on red.
    tqdm.write(text, file=sys.stdout if is_in_notebook() else sys.stderr)


class NotebookBar(tqdm):
    """The bar of a terminal as one display of a notebook; tqdm.notebook needs ipywidgets, or prints every frame."""

    monitor_interval = 0  # No thread may write into the notebook.

    def __init__(self, **settings: Any) -> None:
        from IPython.display import DisplayHandle

        self.shown = DisplayHandle()
        self.shown.display({"text/plain": ""}, raw=True)
        super().__init__(**settings, ascii=False, file=io.StringIO())

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Replace the text of the display."""
        self.shown.update({"text/plain": str(self)}, raw=True)


class StepProgress(TrainerCallback):
    """Shows how far a training is, in a bar or in lines: its steps, the metrics that matter, and the time left."""

    shown = OF_STEPS

    def __init__(self, opening: str | None = None) -> None:
        self.opening = opening
        # Frames of a bar would fill a file.
        self.has_bar = sys.stderr.isatty() or is_in_notebook()
        # Over the optimizer steps of a training.
        self.bar: tqdm | None = None
        self._is_training = False
        self._metrics: dict[str, str] = {}
        self._first_step, self._begun, self._is_first_line = 0, 0.0, True

    def add_to(self, trainer: Trainer) -> None:
        """Replace transformers' own progress bar by this one."""
        for callback in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(self)

    def _describe(self, work: str) -> None:
        """Say in the bar what the run does."""

    def _place(self, args: TrainingArguments, state: TrainerState) -> str:
        return f"step {state.global_step}/{state.max_steps}"

    def _steps_paid_for(self, args: TrainingArguments, state: TrainerState) -> int:
        """Return how many steps the time since the start of training, or since the first line, has made."""
        return state.global_step

    def _shown(self, logs: dict[str, Any], prefix: str = "") -> dict[str, str]:
        return {short: f"{logs[prefix + name]:.3g}" for short, name in self.shown.items() if prefix + name in logs}

    # --- events of the training loop --------------------------------------------------------------------------------

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.opening:
            _line(self.opening)
        self._is_training, self._metrics = True, {}
        self._first_step, self._begun, self._is_first_line = state.global_step, time.monotonic(), True
        if self.has_bar:
            # The first step of a rollout takes far longer than the others: only the mean over all predicts the end.
            settings = {"unit": "step", "dynamic_ncols": True, "smoothing": 0, "disable": False}
            bar = NotebookBar if is_in_notebook() else tqdm
            self.bar = bar(total=state.max_steps, initial=state.global_step, **settings)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if not state.is_world_process_zero:
            return
        first, measured, evaluated = next(iter(self.shown)), self._shown(logs), self._shown(logs, "eval_")
        self._metrics |= measured
        if self.bar is not None:
            values = {f"eval_{first}": evaluated[first]} if first in evaluated else {}
            self.bar.set_postfix(self._metrics | values)
        elif not self.has_bar and evaluated:
            _line(f"evaluation at step {state.global_step}: {_listed(evaluated)}")
        elif not self.has_bar and first in measured and self._is_training:
            now, steps = time.monotonic(), self._steps_paid_for(args, state) - self._first_step
            left = tqdm.format_interval((now - self._begun) / max(1, steps) * (state.max_steps - state.global_step))
            _line(f"{self._place(args, state)}: {_listed(measured)}; {left} left")
            if self._is_first_line:
                self._first_step, self._begun, self._is_first_line = state.global_step, now, False

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        self._is_training = False
        if self.bar is not None:
            self._describe("over")
            self.bar.close()
            self.bar = None


class RolloutProgress(StepProgress):
    """Shows which rollout a PPO run is in, and what it does in it."""

    shown = OF_ROLLOUTS

    def __init__(self, opening: str | None = None) -> None:
        super().__init__(opening)
        self._phase, self._num_sampled = "generating", 0
        self._rollout = self._total_rollouts = 0

    @contextlib.contextmanager
    def phase(self, name: str, is_shown: bool) -> Iterator[None]:
        """Label the sampling in the block with `name`; outside training its end is shown if `is_shown`."""
        before, self._phase, self._num_sampled = self._phase, name, 0
        try:
            yield
        finally:
            if is_shown and self._num_sampled and not self._is_training:
                _line(f"{name}: {self._num_sampled} completions")
            self._phase = before
            self._describe(before)

    def rollout(self, done_rows: int, total_rows: int, tokens: int) -> None:
        """Show how far a rollout is; called by the rollout backend."""
        self._num_sampled = done_rows
        is_done = done_rows == total_rows
        self._describe("scoring" if is_done else f"{self._phase} {done_rows}/{total_rows} completions")

    def _describe(self, work: str) -> None:
        """Say in the bar what the run does."""
        if self.bar is not None:
            number = min(self._rollout + 1, self._total_rollouts)
            self.bar.set_description(f"rollout {number}/{self._total_rollouts}: {work}")

    def _place(self, args: PPOConfig, state: TrainerState) -> str:
        return f"rollout {math.ceil(state.global_step / args.steps_per_rollout)}/{self._total_rollouts}"

    def _steps_paid_for(self, args: PPOConfig, state: TrainerState) -> int:
        # Before its first step a rollout has been sampled and scored, most of what it costs.
        slots = args.steps_per_rollout
        return math.ceil(state.global_step / slots) * slots if self._is_first_line else state.global_step

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._total_rollouts = math.ceil(state.max_steps / args.steps_per_rollout)
        self._rollout = state.global_step // args.steps_per_rollout
        super().on_train_begin(args, state, control, **kwargs)
        self._describe(self._phase)

    def on_step_begin(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._describe("updating")

    def on_step_end(self, args: PPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._rollout = state.global_step // args.steps_per_rollout
        super().on_step_end(args, state, control, **kwargs)
        self._describe(self._phase)


def _listed(metrics: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in metrics.items())


# --- TensorBoard ----------------------------------------------------------------------------------------------------


ALARM = "alarm/"
# Logged in place of one metric per alarm.
COUNT = "alarm/count"
# Curves that training and held-out prompts share. TensorBoard gives a colour to each run, so held-out ones are a run
# of their own, in a folder of this name inside the run's.
SHARED, HELD_OUT = ("score/mean", "kl/ref", "completion/length"), "held-out"
# The tab Custom Scalars.
LAYOUT = {
    "PPO at a glance": {
        "score": ["Multiline", ["train/score/mean"]],
        "KL to the reference": ["Multiline", ["train/kl/ref"]],
        "completion length": ["Multiline", ["train/completion/length"]],
        "seconds per phase": ["Multiline", ["train/time/generate_s", "train/time/score_s", "train/time/update_s"]],
        "alarms that last": ["Multiline", [f"train/{COUNT}"]],
    }
}
# Completions in a text, and characters of one.
NUM_SAMPLES = 4
LONGEST_TEXT = 1000


class PPOTensorBoard(RunTensorBoard):
    """TensorBoard of a PPO run: curves, a first page, histograms, completions, alarms as events."""

    def __init__(self, trainer: Trainer):
        super().__init__()
        self.trainer = trainer
        self.held_out_writer: Any | None = None
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
        held_out = {name: logs[f"eval_{name}"] for name in SHARED if f"eval_{name}" in logs}
        if self.tb_writer is not None and held_out:
            self._show_held_out(held_out, state.global_step)

    def _show_held_out(self, metrics: dict[str, float], step: int) -> None:
        if self.held_out_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.held_out_writer = SummaryWriter(log_dir=f"{self.logging_dir}/{HELD_OUT}", purge_step=step)
        for name, value in metrics.items():
            self.held_out_writer.add_scalar(f"train/{name}", value, step)
        self.held_out_writer.flush()

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
        score = score_text(f"{scored.scores.total[i].item():.3f}", where_rewarded(scored, i))
        prompt, completion = _indented(scored.batch.prompts[i]), _indented(shown_completion(scored, i))
        parts.append(f"**score {score}**\n\n{prompt}\n\ncompletion:\n\n{completion}")
    return redact("\n\n---\n\n".join(parts))


def _indented(text: Any) -> str:
    # Markdown shows an indented block as it is.
    return "\n".join(f"    {line}" for line in short_text(text, LONGEST_TEXT).splitlines() or [""])
