"""Checkpoints that survive anything, for every Trainer: whole or absent, verified, with all that exact resume needs.

transformers' Trainer writes its files into a folder aside; they are made durable, get a manifest, and the folder is
renamed and read again before an older one is deleted. A signal ends a run with a checkpoint. Knows Trainer's loop and
files; no model and no objective.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from peft import PeftModel
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput
from trl import SFTTrainer

from onetrunk.checkpoints.folders import (
    FINISHED,
    LEAST_KEPT,
    PREFIX,
    STAGING,
    begin_staging,
    checkpoint_problems,
    described,
    publish,
    rotate,
    set_aside_later,
)
from onetrunk.checkpoints.hub import SafePushes
from onetrunk.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from onetrunk.checkpoints.mirror import Mirror
from onetrunk.checkpoints.resume_point import (
    AUTO,
    LOOP_FILES,
    LoopEvents,
    end_of,
    end_state,
    ending_callbacks,
    load_loop_state,
    locate,
    open_mirror,
    read_loop_state,
    save_loop_state,
)
from onetrunk.checkpoints.secrets import SecretFreeCards, without_secrets
from onetrunk.checkpoints.settings import SETTINGS_FILE, check_plain_settings, plain_settings, settings_digest
from onetrunk.checkpoints.stopping import StopAsked, Stopped, StopSignals
from onetrunk.checkpoints.writing import install, reading, require_finite_weights, require_room, writing
from onetrunk.models.sources import BASE_FILE, require_safetensors, write_base_marks
from onetrunk.utils.files import atomic_write_json
from onetrunk.utils.locks import held_folder


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


logger = get_logger(__name__)

TRAIN_ON = "set continue_ended_run to true to train on"
# For what the second home still lacks, in seconds: at the end of a run, and when whoever stops it may soon kill it.
MIRROR_WAIT_S, MIRROR_WAIT_WHEN_STOPPED_S = 600.0, 20.0


class SafeCheckpoints(Trainer):
    """The part of a trainer that saves, finds and loads checkpoints, and ends a run in order. It stands before Trainer
    (or TRL's trainer) among the bases of a class."""

    needed_files: Sequence[str] = LOOP_FILES

    def __init__(self, *args: Any, **kwargs: Any):
        self.stop_signals = StopSignals()
        self.is_pass_end = False
        self._is_staging = False
        self._save_waits = False
        self._saved_step: int | None = None
        self._resume_from: str | None = None
        self._run_id = ""
        self._mirror: Mirror | None = None
        self._settings: dict[str, Any] | None = None
        # Why the run ended before its plan, where an alarm, the monitor or early stopping ended it.
        self.ended: str | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(LoopEvents(self))

    # --- what a kind of trainer adds --------------------------------------------------------------------------------

    def own_loop_state(self) -> dict[str, Any]:
        """Return what this process has to remember between two logs besides Trainer's own, in terms of JSON."""
        return {}

    def load_own_loop_state(self, state: dict[str, Any]) -> None:
        """Take back what `own_loop_state` returned."""

    def remember_settings(self) -> None:
        """Keep the run's settings in its checkpoints, and compare them where it goes on; call it in `__init__`."""
        self._settings = plain_settings(self)
        self.needed_files = (*self.needed_files, SETTINGS_FILE)

    def settings_of_run(self) -> dict[str, Any] | None:
        """Return all that decides what the run computes, in terms of JSON; None where that is not known."""
        return self._settings

    def planned_steps(self) -> int:
        """Return how many optimizer steps the run is to have in all."""
        return self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]

    def own_state_bytes(self) -> int:
        """Return how many bytes a checkpoint holds at most beside weights and optimizer, in all processes."""
        return 0

    def may_save(self) -> bool:
        """Return whether the weights are worth a checkpoint at this step."""
        return True

    def needed_checkpoints(self) -> set[Path]:
        """Return checkpoints that no rotation may delete now, beside the best one."""
        return set()

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; SIGTERM, Ctrl-C and SIGUSR1 end it with a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint folder, True for the last whole one in output_dir, or "auto" for that
                one if there is any.
            **kwargs: as Trainer takes them.

        Raises:
            Stopped: a signal came; a SystemExit with code 0.
            ValueError, RuntimeError: there is nothing to resume from, or another process writes to output_dir.
        """
        if self.args.save_total_limit:
            # With a limit of 1 Trainer itself would delete, at its end, all but the best.
            self.args.save_total_limit = max(self.args.save_total_limit, LEAST_KEPT)
        self._mirror = open_mirror(self.args)
        self._resume_from = locate(resume_from_checkpoint, self.args, self.needed_files, self._mirror)
        self._saved_step, self._save_waits, self.is_pass_end = None, False, False
        self.ended = None
        self._run_id = secrets.token_hex(8)
        if self._resume_from is not None:
            self._run_id = read_manifest(self._resume_from).get("run", self._run_id)
            if self._settings is not None:
                check_plain_settings(self._resume_from, self._settings, self.args.allow_config_change)
        if self._mirror is not None:
            overwrite = getattr(self.args, "overwrite_output_dir", False)
            # A stage passes the checkpoint that it found for "auto", or none; its arguments still say "auto".
            is_resuming = AUTO in (resume_from_checkpoint, self.args.resume_from_checkpoint)
            self._mirror.claim(self._run_id, overwrite, settings_digest(self.settings_of_run()), is_resuming)
        if not self.args.should_save:
            return self._train_until_stopped(**kwargs)
        os.makedirs(self.args.output_dir, exist_ok=True)
        with held_folder(self.args.output_dir):
            return self._train_until_stopped(**kwargs)

    def _train_until_stopped(self, **kwargs: Any) -> TrainOutput:
        if self._resume_from is not None and self._is_over():
            return TrainOutput(self.state.global_step, 0.0, {})
        with self.stop_signals.listening():
            try:
                output = super().train(resume_from_checkpoint=self._resume_from, **kwargs)
                self.ended = end_of(self, end_state(self))
                return output
            except StopAsked:
                checkpoint = self._save_where_it_stands()
                self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
                self.is_in_train = False
        if self._mirror is not None:
            self._mirror.wait(MIRROR_WAIT_WHEN_STOPPED_S)
        raise Stopped(checkpoint, self.stop_signals.received)

    def _is_over(self) -> bool:
        """Return whether nothing is left to train after the checkpoint; if so, the trainer is as training left it.

        A run is over at its planned end, where Trainer itself would train one step more, and where an alarm or early
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
        longer = "max_steps" if args.max_steps > 0 else "num_train_epochs"
        longer = "num_rollouts" if getattr(args, "num_rollouts", None) else longer
        if ended is None:
            how = f"step {state.global_step} of {planned} planned; raise {longer} to train on"
        else:
            how = f"step {state.global_step}, where the run was ended ({ended}); {TRAIN_ON}"
        logger.warning(f"nothing is left to train: {self._resume_from} is at {how}")
        return True

    def _restore_ended(self, state: TrainerState, own: dict[str, Any]) -> None:
        self.get_train_dataloader()  # Refuses a checkpoint of another run.
        self._load_from_checkpoint(self._resume_from)
        state.is_world_process_zero = self.args.process_index == 0
        state.is_local_process_zero = self.args.local_process_index == 0
        self.state = state
        self.load_own_loop_state(own)
        for callback in ending_callbacks(self):
            callback.restore_ended(state)
        # What is measured after training draws from the same generators.
        self._load_rng_state(self._resume_from)
        if self.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._find_best()
            if Path(state.best_model_checkpoint).is_dir():
                self._load_best_model()
            else:
                logger.warning(
                    f"the best checkpoint, {state.best_model_checkpoint}, does not exist any more; the weights are"
                    f" those of {self._resume_from}"
                )

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        place = super()._init_training_state(*args, **kwargs)
        if self._resume_from is not None:
            self._find_best()
        return place

    def _find_best(self) -> None:
        # The state names the best checkpoint by its path when it was written; the run's folder may have moved since.
        best = Path(self._resume_from).parent / f"{PREFIX}{self.state.best_global_step}"
        if self.state.best_global_step and best.is_dir():
            self.state.best_model_checkpoint = str(best)

    def _save_where_it_stands(self) -> str:
        if self._saved_step != self.state.global_step:
            self._save_checkpoint(self.model, trial=None)
        return str(Path(self.args.output_dir) / f"{PREFIX}{self.state.global_step}")

    def begin_loop(self) -> None:
        """Bring the loop to where the checkpoint left it; Trainer has just set it to its beginning."""
        require_room(self)
        if self.args.should_save:
            # A result that lies there is not this training's.
            for name in (FINISHED, MANIFEST):
                (Path(self.args.output_dir) / name).unlink(missing_ok=True)
        if self._resume_from is not None:
            if Path(self._resume_from).resolve().parent == Path(self.args.output_dir).resolve():
                self._saved_step = self.state.global_step
                self._set_aside_later()
            self.load_own_loop_state(load_loop_state(self, self._resume_from))

    def _set_aside_later(self) -> None:
        aside = set_aside_later(self.args.output_dir, self.state.global_step) if self.args.should_save else []
        if aside:
            logger.warning(
                f"this run goes on from step {self.state.global_step}; the checkpoints after it are set aside as"
                f" {', '.join(path.name for path in aside)}: delete them if you need them no more"
            )

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, model: nn.Module, *args: Any, **kw: Any) -> None:
        # At the end of a pass Trainer comes here twice, and a checkpoint of the first time would lack what the second
        # logs: it waits.
        is_last = self.state.global_step >= self.state.max_steps or float(self.state.epoch).is_integer()
        waits = is_last and not self.is_pass_end
        if waits:
            self._save_waits, self.control.should_save = self.control.should_save, False
        elif self._save_waits:
            self._save_waits, self.control.should_save = False, True
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kw)
        if not waits and self.may_save() and self.stop_signals.agreed(self.accelerator):
            raise StopAsked

    # --- saving -----------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / STAGING) if self._is_staging else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        require_finite_weights(self.model, self.state.global_step)
        output_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX}{self.state.global_step}"
        with writing(output_dir / name):
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
                self._finish(output_dir, name)
        self.accelerator.wait_for_everyone()
        self._saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(output_dir / name))

    def _name_best(self, output_dir: Path) -> None:
        # Trainer named the best checkpoint by the folder in which it was made.
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).parent.name == STAGING:
            self.state.best_model_checkpoint = str(output_dir / Path(best).name)
            if self.args.should_save:
                staged = output_dir / STAGING / f"{PREFIX}{self.state.global_step}"
                self.state.save_to_json(str(staged / TRAINER_STATE_NAME))

    def _finish(self, output_dir: Path, name: str) -> None:
        staged, final = output_dir / STAGING / name, output_dir / name
        about = {"step": self.state.global_step, "kind": type(self).__name__}
        write_manifest(staged, **about, world_size=self.args.world_size, run=self._run_id)
        publish(staged, final)
        found = checkpoint_problems(final)
        if found:
            raise OSError(f"read again, it is not what was written ({described(found)})")
        staged.parent.rmdir()
        best = self.state.best_model_checkpoint
        kept = self.needed_checkpoints() | ({Path(best)} if best else set())
        if self._mirror is not None:
            self._mirror.push(final, kept=[path.name for path in kept])
            kept |= self._mirror.busy()
        rotate(output_dir, self.args.save_total_limit, kept)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # Trainer calls it while the folder is being made; it is pushed once it is proven.
        if not self._is_staging:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        save_loop_state(self, output_dir, self.own_loop_state())
        if self._settings is not None and self.args.should_save:
            atomic_write_json(Path(output_dir) / SETTINGS_FILE, self._settings)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        with without_secrets(self.args):
            super()._save(output_dir, state_dict)
        model, folder = self.accelerator.unwrap_model(self.model), Path(output_dir or self.args.output_dir)
        if self.args.should_save and isinstance(model, PeftModel) and not (folder / BASE_FILE).exists():
            write_base_marks(model.get_base_model(), folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained model into output_dir: its files take their places one by one, the manifest last."""
        target = Path(output_dir or self.args.output_dir)
        if _internal_call or target.resolve() != Path(self.args.output_dir).resolve():
            super().save_model(output_dir, _internal_call)
            return
        staged = target / STAGING / "result"
        with writing(target):
            if self.args.should_save:
                begin_staging(target)
            self.accelerator.wait_for_everyone()
            super().save_model(str(staged), True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                install(staged, target, run=self._run_id)
        if self._mirror is not None:
            self._mirror.push_result(target)
            self._mirror.wait(MIRROR_WAIT_S)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # --- loading ----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if isinstance(self.model, PeftModel):
            require_safetensors(resume_from_checkpoint)
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if isinstance(self.model, PeftModel):
            require_safetensors(self.state.best_model_checkpoint)
        super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with reading(str(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(str(checkpoint)):
            super()._load_rng_state(checkpoint)


class ResumableSFTTrainer(SafePushes, SecretFreeCards, TRLCounters, SafeCheckpoints, SFTTrainer):
    """TRL's SFTTrainer, whose interrupted and resumed run is the run that was not interrupted."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.remember_settings()
