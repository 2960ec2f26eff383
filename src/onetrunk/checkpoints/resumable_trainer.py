"""The base of every trainer here: checkpoints that are whole or absent, exact resume, a clean stop, safe Hub pushes.

transformers' Trainer writes a checkpoint into a staging folder. The files are then synced to disk and listed in a
manifest; the folder is renamed and verified, and only then is an older checkpoint deleted.

This is the ONE file that overrides or reads private members of transformers' Trainer, as trl_trainers.py is for those
of TRL's. Subclasses override the public hooks of ResumableTrainer instead. tests/test_foreign_internals.py pins those
members: with a new version of either library, adapt these files and the upper bounds in pyproject.toml.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Trainer, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy, TrainOutput

from onetrunk.checkpoints.folders import (
    FINISHED,
    LEAST_KEPT,
    MANIFEST,
    PREFIX,
    STAGING,
    begin_staging,
    checkpoint_problems,
    delete_old_run,
    described,
    install,
    publish,
    require_free,
    rotate,
    set_aside_later,
    write_manifest,
    writing,
)
from onetrunk.checkpoints.resume_point import (
    LOOP_FILES,
    EndingCallback,
    LengthSampler,
    LoopEvents,
    RunTensorBoard,
    callbacks_of,
    end_of,
    end_state,
    locate,
    loop_state_file,
    open_mirror,
    read_loop_state,
    restore_early_stopping,
)
from onetrunk.checkpoints.resume_settings import rows_digest
from onetrunk.checkpoints.signals import StopAsked, Stopped, StopSignals
from onetrunk.data.sharded import BlockSampler, ShardedRows
from onetrunk.models.loading import BASE_FILE, require_safetensors, write_base_marks
from onetrunk.parallel.groups import limit_waits
from onetrunk.parallel.heartbeat import SAVE, Heartbeat
from onetrunk.parallel.layout import launch_layout, training_stages
from onetrunk.parallel.sharding import is_divided, is_sharded, replicas_of_what_trains, reshard
from onetrunk.utils.files import atomic_write_json, digest, held_folder, reading_content
from onetrunk.utils.randomness import SAVE_STREAM, derived_seed
from onetrunk.utils.redaction import without_secrets

if TYPE_CHECKING:
    from onetrunk.checkpoints.mirror import Mirror

logger = get_logger(__name__)

# Seconds to wait for uploads to the mirror after a signal, when the process may be killed.
MIRROR_WAIT_WHEN_STOPPED_S = 20.0


class ResumableTrainer(Trainer):
    """Saves, finds and loads checkpoints, and stops a run cleanly.

    With another trainer as a second base, this class comes first: `class T(ResumableTrainer, SomeTrainer)`. The first
    group of methods are hooks for subclasses.
    """

    # Files without which a checkpoint cannot be resumed.
    needed_files: Sequence[str] = LOOP_FILES

    def __init__(self, *args: Any, **kwargs: Any):
        self.stop_signals = StopSignals()
        # Why the run ended before its planned end, if an alarm, the monitor or early stopping ended it.
        self.ended: str | None = None
        self._loop_events = LoopEvents(self.begin_loop, self._begin_pass)
        self._is_staging = False
        self._save_waits = False
        self._saved_step: int | None = None
        self._sampler: Any = None
        self._best_of = ""
        self._resume_from: str | None = None
        self._has_begun = False
        self._mirror: Mirror | None = None
        self._finite_loss_sum = 0.0
        self._layout = launch_layout()
        super().__init__(*args, **kwargs)
        self._continue_tensorboard()
        self.heartbeat = Heartbeat.of(self.args.output_dir, self.args.process_index)
        self._divide_base()
        limit_waits(self.args.ddp_timeout, self.model)
        self.add_callback(self._loop_events)
        self.add_callback(self.heartbeat)

    def _continue_tensorboard(self) -> None:
        """Replace transformers' TensorBoard callback by one that continues the curves of a resumed run."""
        if any(type(callback) is TensorBoardCallback for callback in self.callback_handler.callbacks):
            self.remove_callback(TensorBoardCallback)
            self.add_callback(self.make_tensorboard())

    def _divide_base(self) -> None:
        """Divide the frozen base over the processes as the launch asks, and say so."""
        if self._layout is None:
            return
        from onetrunk.parallel.tensor import distribute_frozen

        line = distribute_frozen(self.model, self._layout, self.args.device)
        if line is not None and self.args.should_log:
            tqdm.write(line, file=sys.stderr)

    # --- hooks for subclasses ---------------------------------------------------------------------------------------

    def make_tensorboard(self) -> RunTensorBoard:
        """Return the callback that writes for TensorBoard."""
        return RunTensorBoard()

    def extra_loop_state(self) -> dict[str, Any]:
        """Return what else this process must remember between two logs, as JSON values."""
        return {}

    def merged_loop_state(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what this process restores from the `extra_loop_state` of another number of processes."""
        return states[0]

    def has_other_groups(self, folder: str) -> bool:
        """Return whether the run that wrote a checkpoint dealt rows to other groups of processes."""
        return False

    def load_extra_loop_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_loop_state` returned."""

    def save_run_state(self, folder: str) -> None:
        """Write further files into a checkpoint that is being made; called on every process."""

    def load_branches_from(self, folder: str) -> bool:
        """Load the trained weights from a checkpoint; return False to leave that to Trainer."""
        return False

    def on_model_saved(self, folder: str) -> None:
        """Add to a folder into which the model has just been saved; called on every process."""

    def prepare_push(self, checkpoint: str) -> None:
        """Copy to output_dir what a push must contain and Trainer does not copy; called before a checkpoint's push."""

    def on_grad_norm(self, norm: float | Tensor) -> float | Tensor:
        """Receive the norm of a step's gradient, before clipping; return it as it is logged."""
        return norm

    def end_training(self) -> None:
        """Release what training holds; called when it ends, is stopped, or fails."""

    def check_checkpoint(self, folder: str) -> None:
        """Raise ValueError if the checkpoint belongs to a run with other settings."""

    def settings_of_run(self) -> dict[str, Any] | None:
        """Return the settings that decide what the run computes, as JSON values; None if they are not known."""
        return None

    def planned_steps(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]

    def may_save(self) -> bool:
        """Return whether the weights at this step are worth a checkpoint."""
        return True

    def saved_numbers(self) -> dict[str, dict[str, Tensor]]:
        """Return by name what is saved and must be finite, under the advice for the case that it is not."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        names = {id(p): name for name, p in trained.items()}
        moments = {
            f"{kind} of {names.get(id(p), 'a weight')}": moment
            for p, state in (self.optimizer.state if self.optimizer else {}).items()
            for kind, moment in state.items()
            if isinstance(moment, Tensor)
        }
        remedy = "resume from one of them with a lower max_grad_norm, or start over with a lower learning_rate"
        return {remedy: {**trained, **moments}}

    def needed_checkpoints(self) -> set[Path]:
        """Return checkpoints that must not be deleted now, apart from the best one."""
        return set()

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; SIGTERM, Ctrl-C, SIGUSR1 and SIGHUP end training with a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint folder, True for the last whole one in output_dir, or "auto" for that
                one if there is any.

        Raises:
            Stopped: a signal came; a SystemExit with code 0.
            LostRanks: another process of the run ended; the message names it.
            ValueError, RuntimeError: there is nothing to resume from, or another process writes to output_dir.
        """
        with self._output_dir_held():
            self._begin_run(resume_from_checkpoint)
            if self._resume_from is not None and self._is_over():
                self.heartbeat.delete()
                return TrainOutput(self.state.global_step, 0.0, {})
            with self.stop_signals.listening(), self.heartbeat.running(self.args.world_size):
                try:
                    output = super().train(resume_from_checkpoint=self._resume_from, **kwargs)
                    self.ended = end_of(self, end_state(self))
                    return output
                except StopAsked:
                    checkpoint = self._end_stopped_run()
                finally:
                    self.end_training()
                if self._mirror is not None:
                    self._mirror.wait(MIRROR_WAIT_WHEN_STOPPED_S)
                raise Stopped(checkpoint, self.stop_signals.received)

    def _begin_run(self, resume_from_checkpoint: str | bool | None) -> None:
        """Find the checkpoint to resume from, and reset what belongs to one run."""
        if self.args.save_total_limit:
            # With a limit of 1 Trainer itself would delete, at its end, all but the best.
            self.args.save_total_limit = max(self.args.save_total_limit, LEAST_KEPT)
        self._mirror = open_mirror(self.args)
        self._resume_from = locate(resume_from_checkpoint, self.args, self.needed_files, self._mirror)
        self._take_output_dir()
        self._saved_step, self._save_waits, self._loop_events.is_pass_end = None, False, False
        self._finite_loss_sum = 0.0
        self.ended = None
        if self._resume_from is not None:
            with reading_content(self._resume_from):
                self.check_checkpoint(self._resume_from)

    def _take_output_dir(self) -> None:
        """Reject an output folder that holds another run, or delete that run if the settings say so."""
        if self._resume_from is None and not self._has_begun:
            require_free(self.args.output_dir, self.args.overwrite_output_dir)
            if self.args.overwrite_output_dir and self.args.should_save:
                delete_old_run(self.args.output_dir)
            if self._mirror is not None:
                self._mirror.require_free(self.args.overwrite_output_dir)
        # Training once more with the same object continues its own run.
        self._has_begun = True

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate, and free what forwards without a backward left gathered.

        Saving frees it too, but on the first process alone, and the next forward is then collective there and not
        elsewhere.
        """
        output = super().evaluation_loop(*args, **kwargs)
        reshard(self.model)
        return output

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with replicas_of_what_trains(self.model):
            return super()._prepare_for_training(*args, **kwargs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # A model that will be sharded or divided moves in parts: the device may not hold it whole.
        is_shared = (self._layout is not None or training_stages() > 1) and self.args.world_size > 1
        if not is_shared or (self._layout is None and is_divided(model)) or is_sharded(model):
            super()._move_model_to_device(model, device)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if isinstance(rows, ShardedRows):
            sampler = BlockSampler(rows.order, seed if self.args.train_sampling_strategy == "random" else None)
        else:
            sampler = super()._get_train_sampler(train_dataset)
        if type(sampler) is LengthGroupedSampler:
            sampler = LengthSampler(sampler.batch_size, sampler.lengths, seed)
        self._sampler = sampler
        return sampler

    def _begin_pass(self) -> None:
        # Trainer and accelerate do not reach a sampler in the wrappers of a resumed run, or of several processes.
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(math.floor(self.state.epoch or 0))

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        # With eval_on_start Trainer evaluates once more whenever a run resumes, which early stopping would count.
        if skip_scheduler and self._resume_from is not None:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _output_dir_held(self) -> AbstractContextManager[None]:
        """Return the lock of output_dir, or nothing on a process that saves nothing."""
        if not self.args.should_save:
            return nullcontext()
        os.makedirs(self.args.output_dir, exist_ok=True)
        return held_folder(self.args.output_dir)

    def _end_stopped_run(self) -> str:
        """Save where the run stands, unless it has just been saved; return the checkpoint, which can be resumed."""
        lacks_optimizer, self.args.save_only_model = self.args.save_only_model, False
        if self._saved_step != self.state.global_step or lacks_optimizer:
            self._save_checkpoint(self.model, trial=None)
        self.args.save_only_model = lacks_optimizer
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        self.is_in_train = False
        return str(Path(self.args.output_dir) / f"{PREFIX}{self.state.global_step}")

    def _is_over(self) -> bool:
        """Return whether nothing is left to train after the checkpoint; if so, restore the trained state.

        A run is over at its planned end, where Trainer itself would train one step more, or where an alarm or early
        stopping ended it.
        """
        args, planned = self.args, self.planned_steps()
        state = TrainerState.load_from_json(str(Path(self._resume_from) / TRAINER_STATE_NAME))
        loop_state = read_loop_state(self, self._resume_from)
        ended = None if args.continue_ended_run else end_of(self, loop_state)
        if state.global_step < planned and ended is None:
            return False
        self._restore_ended(state, loop_state["own"])
        self.ended = ended
        why = f", where the run was ended ({ended}); set continue_ended_run to true"
        if ended is None:
            longer = "max_steps" if args.max_steps > 0 else "num_train_epochs"
            why = f" of {planned} planned; raise {'num_rollouts' if getattr(args, 'num_rollouts', None) else longer}"
        logger.warning(
            f"nothing is left to train: {self._resume_from} is at step {state.global_step}{why} to continue"
        )
        return True

    def _restore_ended(self, state: TrainerState, extra: dict[str, Any]) -> None:
        self.get_train_dataloader()  # Rejects a checkpoint of another run.
        self._load_from_checkpoint(self._resume_from)
        state.is_world_process_zero = self.args.process_index == 0
        state.is_local_process_zero = self.args.local_process_index == 0
        self.state = state
        self.load_extra_loop_state(extra)
        for callback in callbacks_of(self, EndingCallback):
            callback.restore_ended(state)
        # An evaluation after training draws from the same generators.
        self._load_rng_state(self._resume_from)
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._find_best()
            if Path(state.best_model_checkpoint).is_dir():
                self._load_best_model()
            else:
                logger.warning(f"{state.best_model_checkpoint} does not exist any more; the last weights are used")

    def _find_best(self) -> None:
        # The state holds the path of the best checkpoint at the time it was written; the run's folder may have moved.
        best = Path(self._resume_from).parent / f"{PREFIX}{self.state.best_global_step}"
        if self.state.best_global_step and best.is_dir():
            self.state.best_model_checkpoint = str(best)

    def begin_loop(self) -> None:
        """Restore the loop's state from the checkpoint, after Trainer has initialised it."""
        if self.args.should_save:
            # A result that is already there is not the result of this training.
            for name in (FINISHED, MANIFEST):
                (Path(self.args.output_dir) / name).unlink(missing_ok=True)
        self._set_aside_later()
        rows = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        best = [self.args.metric_for_best_model, self.args.greater_is_better]
        self._best_of = digest([*best, {name: rows_digest(part) for name, part in rows.items()}])
        if self._resume_from is None:
            return
        if self.args.should_log:
            step = f"step {self.state.global_step} of {self.state.max_steps}"
            tqdm.write(f"resuming from {self._resume_from}: {step}", file=sys.stderr)
        # Trainer restores the intervals of the checkpoint with its state; these settings may change.
        self.state.compute_steps(self.args, self.state.max_steps)
        if Path(self._resume_from).resolve().parent == Path(self.args.output_dir).resolve():
            self._saved_step = self.state.global_step
        state = read_loop_state(self, self._resume_from)
        self._tr_loss.fill_(state["tr_loss"])
        # The mean loss that training returns is over the steps of this call.
        self._total_loss_scalar = -state["tr_loss"]
        self._globalstep_last_logged = state["last_logged"]
        if state.get("best_of", self._best_of) == self._best_of:
            self._find_best()
            restore_early_stopping(self, state)
        elif self.state.best_metric is not None:
            self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
            logger.warning(
                "metric_for_best_model, greater_is_better or the held-out rows have changed: the best checkpoint and"
                " the patience of early stopping count from here on"
            )
        with reading_content(self._resume_from):
            self.load_extra_loop_state(state["own"])

    def _set_aside_later(self) -> None:
        """Set aside the checkpoints in output_dir after the step at which this training begins, in the mirror too."""
        step = self.state.global_step
        later = set_aside_later(self.args.output_dir, step) if self.args.should_save else []
        if later:
            logger.warning(
                f"this training begins at step {step}; the checkpoints after it in"
                f" {self.args.output_dir} are set aside as {', '.join(path.name for path in later)}: delete them if"
                " you do not need them"
            )
        if self._mirror is not None:
            self._mirror.set_aside_later(step)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.on_grad_norm(super()._get_grad_norm(model, grad_norm=grad_norm))

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: nn.Module, *args: Any, **kw: Any) -> None:
        # At the end of a pass Trainer calls this twice. A checkpoint of the first call would lack what the second one
        # logs, so saving waits for the second.
        is_pass_end = self._loop_events.is_pass_end
        is_last = self.state.global_step >= self.state.max_steps or float(self.state.epoch).is_integer()
        waits = is_last and not is_pass_end
        if waits:
            self._save_waits, self.control.should_save = self.control.should_save, False
        elif self._save_waits:
            self._save_waits, self.control.should_save = False, True
        # Other stops are pauses: the resumed run logs at its interval, as an uninterrupted one does.
        ends = self.state.global_step >= self.state.max_steps or end_of(self, end_state(self)) is not None
        if ends and self.args.logging_strategy != IntervalStrategy.NO:
            # What was measured since the last log would be lost.
            self.control.should_log = True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kw)
        if not waits and self.may_save() and self.stop_signals.agreed(self.accelerator):
            raise StopAsked

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool:
        # With save_strategy "best" Trainer would save nothing else, not even where a callback has ended the run.
        is_best = super()._determine_best_metric(metrics=metrics, trial=trial)
        return is_best or end_of(self, end_state(self)) is not None

    def drop_non_finite_loss(self, loss: float) -> None:
        """Keep a logged loss that is not finite out of later logs.

        Trainer clears its running loss by subtracting it from itself, so one NaN would stay in every later log.
        """
        if math.isfinite(loss):
            self._finite_loss_sum = self._total_loss_scalar
        else:
            self._tr_loss.zero_()
            self._total_loss_scalar = self._finite_loss_sum

    # --- saving -----------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / STAGING) if self._is_staging else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        _require_finite(self.saved_numbers(), self.state.global_step)
        output_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX}{self.state.global_step}"
        with self.heartbeat.during(SAVE), writing(output_dir / name):
            if self.args.should_save:
                begin_staging(output_dir)
            self.accelerator.wait_for_everyone()
            self._is_staging = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._is_staging = False
            self._name_best(output_dir)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._publish_checkpoint(output_dir, name)
        self.accelerator.wait_for_everyone()
        self._saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(output_dir / name))

    def _name_best(self, output_dir: Path) -> None:
        # Trainer recorded the best checkpoint under its path in the staging folder.
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent.name == STAGING:
            self.state.best_model_checkpoint = str(output_dir / Path(best).name)
            if self.args.should_save:
                staged = output_dir / STAGING / f"{PREFIX}{self.state.global_step}"
                self.state.save_to_json(str(staged / TRAINER_STATE_NAME))

    def _publish_checkpoint(self, output_dir: Path, name: str) -> None:
        staged, final = output_dir / STAGING / name, output_dir / name
        write_manifest(staged, step=self.state.global_step, world_size=self.args.world_size)
        publish(staged, final)
        problems = checkpoint_problems(final)
        if problems:
            raise OSError(f"what was read back differs from what was written ({described(problems)})")
        staged.parent.rmdir()
        best = self.state.best_model_checkpoint
        kept = self.needed_checkpoints() | ({Path(best)} if best else set())
        if self._mirror is not None:
            self._mirror.push(final, name, [path.name for path in kept])
            kept |= self._mirror.busy()
        rotate(output_dir, self.args.save_total_limit, kept)

    def _save_rng_state(self, output_dir: str) -> None:
        # Threads of other libraries draw from Python's generator (retries of an upload, a tracker), so its state is
        # not the run's own: this run and a resumed one continue from the same derived state.
        random.seed(derived_seed(self.args.seed, SAVE_STREAM, self.state.global_step, self.args.process_index))
        super()._save_rng_state(output_dir)
        state = {
            "tr_loss": self._tr_loss.item(),
            "last_logged": self._globalstep_last_logged,
            **end_state(self),
            "best_of": self._best_of,
            "own": self.extra_loop_state(),
        }
        atomic_write_json(Path(output_dir) / loop_state_file(self.args.process_index), state)
        self.save_run_state(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with without_secrets(self.args):
            super()._save(output_dir, state_dict)
        model, folder = self.accelerator.unwrap_model(self.model), Path(output_dir or self.args.output_dir)
        if self.args.should_save and isinstance(model, PeftModel) and not (folder / BASE_FILE).exists():
            write_base_marks(model.get_base_model(), folder)
        self.on_model_saved(str(folder))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the trained model, in output_dir with a manifest that is written last; push it if the run is pushed.

        A push that fails here is a warning.
        """
        target = Path(output_dir or self.args.output_dir)
        if _internal_call or target.resolve() != Path(self.args.output_dir).resolve():
            # True: Trainer would push, and a failure would end the run.
            super().save_model(output_dir, True)
        else:
            self._save_result(target)
        if self.args.push_to_hub and not _internal_call:
            from onetrunk.checkpoints.hub import PushFailed

            try:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            except PushFailed as error:
                logger.warning(str(error))

    def _save_result(self, target: Path) -> None:
        _require_finite(self.saved_numbers(), self.state.global_step)
        staged = target / STAGING / "result"
        with writing(target):
            if self.args.should_save:
                begin_staging(target)
            self.accelerator.wait_for_everyone()
            super().save_model(str(staged), True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                install(staged, target)
        self.mirror_result()

    def mirror_result(self) -> None:
        """Copy the result, and all files next to it, into the mirror if there is one; what is there stays."""
        if self._mirror is not None:
            self._mirror.push_result(self.args.output_dir)

    # --- loading ----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._has_loaded_branches(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._has_loaded_branches(self.state.best_model_checkpoint):
            super()._load_best_model()

    def _has_loaded_branches(self, folder: str) -> bool:
        is_loaded = self.load_branches_from(folder)
        if not is_loaded and isinstance(self.model, PeftModel):
            require_safetensors(folder)
        return is_loaded

    # --- the Hub ----------------------------------------------------------------------------------------------------

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push the result to the Hub.

        Raises:
            PushFailed: with the reason, and the command that pushes the saved result.
        """
        # Imported by a run that pushes, and by no other.
        from onetrunk.checkpoints.hub import HUB_ERRORS, push_failed, repo_name, warn_of_failed_pushes

        try:
            return super().push_to_hub(*args, **kwargs)
        except HUB_ERRORS as error:
            repository = str(self.hub_model_id or repo_name(self.args))
            raise push_failed(f"the result is in {self.args.output_dir}", repository, error) from error
        finally:
            warn_of_failed_pushes(self)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Trainer calls this while the folder is still in staging; the push waits until the checkpoint is published.
        if self._is_staging:
            return
        from onetrunk.checkpoints.hub import HUB_ERRORS, warn_of_failed_pushes, warn_of_push

        warn_of_failed_pushes(self)
        try:
            self.prepare_push(checkpoint_folder)
            super()._push_from_checkpoint(checkpoint_folder)
        except HUB_ERRORS as error:
            warn_of_push(error)


@torch.no_grad()
def _require_finite(groups: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
    """Raise RuntimeError if a number is not finite, so that a bad checkpoint does not replace a good one."""
    for remedy, tensors in groups.items():
        checks = [tensor.isfinite().all() for tensor in tensors.values()]
        if not checks or torch.stack([check.to(checks[0].device) for check in checks]).all():
            continue
        bad = [name for name, check in zip(tensors, checks, strict=True) if not check]
        raise RuntimeError(
            f"{len(bad)} of {len(checks)} tensors are not finite after step {step}, the first is {bad[0]}. Nothing was"
            f" saved, and older checkpoints are unchanged: {remedy}"
        )
