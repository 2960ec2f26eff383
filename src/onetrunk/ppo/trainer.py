"""PPOTrainer: transformers.Trainer whose train dataloader is the experience stream of a policy on one shared trunk.

Trainer keeps schedule, logging, callbacks, checkpoints, DDP and Hub. Here stand the loop over packs and the objective;
evaluation.py and checkpoint.py have what PPO adds there. Math: onetrunk.ops; batch arithmetic: PPOConfig.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from onetrunk.checkpoints.hub import SafePushes
from onetrunk.checkpoints.resume_point import LOOP_FILES
from onetrunk.checkpoints.stopping import StopAsked
from onetrunk.checkpoints.trainer import SafeCheckpoints
from onetrunk.models.adapters import POLICY, VALUE, VALUE_HEAD_FILE, adapter_parameters
from onetrunk.models.speedups.memory import free_memory, is_out_of_memory, offloaded_activations
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.losses import ppo_loss
from onetrunk.ppo.alarms import Alarms
from onetrunk.ppo.callbacks import RolloutProgress, StepEnd, StepGuard
from onetrunk.ppo.checks import check_optimizer
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.evaluation import PromptEvaluation, SampleLog
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.memory import PackSize
from onetrunk.ppo.metrics import MetricLog
from onetrunk.ppo.model_card import ModelCards
from onetrunk.ppo.setup import Reward, prepare_run
from onetrunk.ppo.state import STATE_FILE, run_settings
from onetrunk.rollouts.base import RolloutBackend
from onetrunk.types import LossCoefficients, Minibatch, to_device


class BranchCheckpoints(SafeCheckpoints):
    """The part of PPOTrainer that saves, loads and pushes all branches of the trunk and the experience stream."""

    needed_files = (*LOOP_FILES, STATE_FILE, VALUE_HEAD_FILE, SAFETENSORS_WEIGHTS_NAME)

    def planned_steps(self) -> int:
        """Return how many optimizer steps the run is to have in all; nothing is read from a checkpoint."""
        args = self.args
        if args.max_steps > 0:
            return args.max_steps
        rollouts_per_pass = math.ceil(len(self.train_dataset) / args.rollout_batch_size)
        return math.ceil(args.num_train_epochs * rollouts_per_pass * args.slots_per_rollout)

    def own_state_bytes(self) -> int:
        """Return the bytes of a rollout in use: rows at their longest, and their states where sampling made them."""
        args = self.args
        longest = max(map(len, self.train_dataset["prompt_ids"]))
        rows, width = args.rollout_batch_size * args.num_generations, longest + args.max_completion_length
        # Ids and mask of the row and of its completion are int64; seven figures of a token are float32.
        per_row = 2 * 8 * width + (2 * 8 + 7 * 4) * args.max_completion_length
        if self.trunk_plan.captures_states:
            hidden_size = self.model.get_base_model().config.get_text_config().hidden_size
            per_row += 4 * width * hidden_size
        return rows * per_row

    def own_loop_state(self) -> dict[str, Any]:
        """Return the metrics since the last log, where the alarms stand, and the last evaluation."""
        own = {"alarms": self.alarms.state_dict(), "last_evaluation": self._last_evaluation}
        return {**self.metric_log.state_dict(), **own}

    def load_own_loop_state(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.metric_log.load_state_dict(state)
        if "alarms" in state:
            self.alarms.load_state_dict(state["alarms"], self.args)
        self._last_evaluation = state.get("last_evaluation")

    def may_save(self) -> bool:
        """Return whether the last gradient was finite."""
        return not self.guard.is_bad

    def needed_checkpoints(self) -> set[Path]:
        """Return the last checkpoints from before what the alarms count."""
        return self.alarms.needed_checkpoints(self.state.global_step, self.args)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self._stream.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.model.load_branches(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self.model.load_branches(self.state.best_model_checkpoint)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero() and not self._is_staging:
            # Trainer copies what it knows: the files of the policy's adapter.
            for name in (VALUE_HEAD_FILE, *(a for a in self.model.peft_config if a != POLICY)):
                source, target = Path(checkpoint_folder) / name, Path(self.args.output_dir) / name
                if source.is_dir():
                    shutil.copytree(source, target, dirs_exist_ok=True)
                elif source.is_file():
                    shutil.copy(source, target)
        super()._push_from_checkpoint(checkpoint_folder)


class PackLoop(Trainer):
    """The part of PPOTrainer that runs the packs of an optimizer step."""

    def training_step(self, model: nn.Module, inputs: dict[str, Minibatch], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward over the packs of a minibatch; return its loss, summed over this process."""
        minibatch = inputs["minibatch"]
        self._step_start = time.perf_counter()
        self.guard.begin_step(minibatch.is_empty_slot)
        if minibatch.is_empty_slot:
            self._give_scaler_gradients(model)
            return torch.zeros((), device=self.accelerator.device)
        if not model.training:  # a walk over all modules
            model.train()
        total = self._run_unless_stopped(model, minibatch)
        while isinstance(total, str):  # memory ran out
            self._forget_step(model)
            free_memory()
            self.pack_size.shrink([e.pack for e in minibatch.experiences], total)
            total = self._run_unless_stopped(model, minibatch)
        self._stop_on_target_kl()
        return total

    def _run_unless_stopped(self, model: nn.Module, minibatch: Minibatch) -> Tensor | str:
        # The first step of a rollout is not given up: what the rollout has moved (beta, moments) has moved. Nor is one
        # of several processes, whose gradients the others wait for.
        if self.accelerator.num_processes > 1 or not self._stream.can_retreat:
            return self._run_packs(model, minibatch)
        try:
            with self.stop_signals.giving_up(self.accelerator):
                return self._run_packs(model, minibatch)
        except StopAsked:
            self._forget_step(model)
            self._stream.retreat()
            raise

    def _forget_step(self, model: nn.Module) -> None:
        model.zero_grad()
        self.metric_log.drop_step()

    def _run_packs(self, model: nn.Module, minibatch: Minibatch) -> Tensor | str:
        """Return the loss of a minibatch whose gradients are there, or what torch said where memory ran out."""
        try:
            return self._run_all_packs(model, minibatch)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self.accelerator.num_processes > 1:
                raise self._alone(minibatch, error) from error
            return str(error)

    def _alone(self, minibatch: Minibatch, error: BaseException) -> RuntimeError:
        rows, width = (max(e.pack.input_ids.shape[i] for e in minibatch.experiences) for i in (0, 1))
        reason = (str(error) or "out of memory").splitlines()[0]
        return RuntimeError(
            f"the memory of process {self.accelerator.process_index} does not hold the update of {rows} rows x {width}"
            f" tokens ({reason}). One of several processes can't make a step again whose gradients the others wait"
            f" for: set per_device_train_batch_size to {max(1, rows // 2)}, lower microbatch_tokens or"
            " max_completion_length, or set activation_checkpointing, then resume"
        )

    def memory_figures(self) -> dict[str, float]:
        """Return `memory/halvings`, how often update and scoring have had to take half the rows; nothing where never.

        It counts from the start of this process."""
        count = self.pack_size.num_halvings
        count += self._stream.scorer.pack_size.num_halvings if self._stream else 0
        return {"memory/halvings": float(count)} if count else {}

    def _run_all_packs(self, model: nn.Module, minibatch: Minibatch) -> Tensor:
        total = torch.zeros((), device=self.accelerator.device)
        self._policy_kl = torch.zeros_like(total)
        experiences = [part for whole in minibatch.experiences for part in self.pack_size.parts(whole)]
        last = len(experiences) - 1
        for i, experience in enumerate(experiences):
            self.stop_signals.poll()
            sync = contextlib.nullcontext() if i == last else self.accelerator.no_sync(model)
            with sync:
                pack = {"experience": to_device(experience, self.accelerator.device), "minibatch": minibatch}
                with offloaded_activations(model) if self.args.activation_offloading else contextlib.nullcontext():
                    loss = self.compute_loss(model, pack)
                # DDP averages gradients over processes; the loss is a share of a global mean.
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.detach() * self.accelerator.num_processes
        return total

    def _give_scaler_gradients(self, model: nn.Module) -> None:
        # The gradient scaler of fp16 fails on a step that has seen no gradient; StepGuard takes these away again.
        if self.args.fp16:
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)

    def _stop_on_target_kl(self) -> None:
        if self.args.target_kl is None:
            return
        if self.accelerator.reduce(self._policy_kl, reduction="sum").item() > self.args.target_kl:
            self.guard.begin_step(is_empty=True)
            self._stream.skip_rest_of_rollout()


def split_off_value(optimizer: torch.optim.Optimizer, model: TrunkModel, learning_rate: float) -> None:
    """Give the value head, and the adapter `value` where there is one, groups of their own in `optimizer`."""
    of_value = {id(p) for p in model.value_head.parameters()}
    of_value |= {id(p) for p in adapter_parameters(model, VALUE).values()}
    for group in list(optimizer.param_groups):
        own = [p for p in group["params"] if id(p) in of_value]
        group["params"] = [p for p in group["params"] if id(p) not in of_value]
        settings = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
        if own:
            optimizer.add_param_group({**settings, "params": own, "lr": learning_rate})


class PPOTrainer(SafePushes, ModelCards, BranchCheckpoints, PromptEvaluation, PackLoop):
    """Trains a LoRA policy with PPO; policy, value and reference share one frozen base model.

    A user of TRL's GRPOTrainer changes the two names:

        trainer = PPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=my_reward,
            args=PPOConfig(output_dir="out"),
            train_dataset=dataset,
        )
        trainer.train()

    Batch arithmetic, worked: 2 processes, rollout_batch_size 64, num_generations 1, num_minibatches 4, num_ppo_epochs
    2: 32 completions per process, 8 per minibatch and process, 8 optimizer steps per rollout.

    To change the objective override `compute_loss`; to change advantages or scoring set `stream_class` to a subclass
    of ExperienceStream.

    Args:
        model: a name or path (of a base model, or of an adapter to go on from), a transformers decoder, a PeftModel.
        reward_funcs: one or several of: a function with TRL's signature, a dotted path to one, the name or path of a
            sequence-classification model or of a reward adapter on the policy's base, such a model.
        args: the settings.
        train_dataset: rows with `prompt` (text or a conversation); other columns reach the reward functions.
        eval_dataset: held-out rows of the same kind (or several such sets by name), for `evaluate` and eval_strategy.
        processing_class: the policy's tokenizer; None loads it from the model's name.
        reward_processing_classes: tokenizers of reward models, one per reward function (None for functions).
        callbacks: further callbacks.
        optimizers: an optimizer and a scheduler instead of those that `args` describe.
        quantization_config: for a model given by name (4 or 8 bit).
        peft_config: LoRA config of a new policy; None: rank 16 on all linear layers.
        rollout_backend: where completions come from; None: this process.

    Raises:
        ValueError, TypeError: a setting, a row or a reward function that can't work; before the model loads where
            possible.
    """

    stream_class = ExperienceStream

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Reward | Sequence[Reward],
        args: PPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        *,
        rollout_backend: RolloutBackend | None = None,
    ):
        args = PPOConfig(output_dir="ppo-output") if args is None else args
        check_optimizer(optimizers[0])
        self.progress = RolloutProgress()
        run = prepare_run(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            tokenizer=processing_class,
            reward_tokenizers=reward_processing_classes,
            quantization_config=quantization_config,
            peft_config=peft_config,
            rollout_backend=rollout_backend,
            hooks={"progress": self.progress.rollout, "poll": lambda: self.stop_signals.poll()},
        )
        self.sampler = run.sampler
        self.trunk_plan = run.trunk_plan
        self.progress.opening = run.trunk_plan.report
        self.guard = StepGuard(args.max_skipped_steps)
        self.alarms = Alarms(lambda: self.metric_log, self.may_save)
        self.pack_size = PackSize("the update")
        self._stream: ExperienceStream | None = None
        self._finite_loss = 0.0
        super().__init__(
            model=run.model,
            args=args,
            data_collator=lambda rows: rows,
            train_dataset=run.train_dataset,
            eval_dataset=run.eval_dataset,
            processing_class=run.tokenizer,
            # The guard behind the alarms: it has the last word on what is saved.
            callbacks=[StepEnd(self._end_step), self.alarms, self.guard, run.memory_check, *(callbacks or [])],
            optimizers=optimizers,
        )
        self.loss_is_scaled_for_ga = True
        self.guard.has_scaler = self.accelerator.scaler is not None
        self.metric_log = MetricLog(self.accelerator)
        is_on = args.log_completions and args.should_save
        self.samples = SampleLog(args.output_dir, args.num_completions_to_print, is_on)
        if not args.disable_tqdm:
            self.progress.replace_those_of(self)

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train; with `resume_from_checkpoint` (a folder, True for the last one, "auto") go on from there."""
        self._finite_loss = 0.0
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def get_train_dataloader(self) -> ExperienceStream:
        """Return the experience stream; it is not prepared by accelerate, which would read one item ahead."""
        stream = self.stream_class(
            self.train_dataset,
            self.sampler,
            lambda: self.model,
            self.args,
            self.accelerator,
            self.metric_log,
            self.trunk_plan.cache,
        )
        stream.reward_extras = self._reward_extras
        stream.stop_signals = self.stop_signals
        if self._resume_from is not None:
            stream.load(self._resume_from)
        self._stream = stream
        return stream

    def settings_of_run(self) -> dict[str, Any]:
        """Return what a checkpoint of this run is compared with."""
        model = self.accelerator.unwrap_model(self.model)
        return run_settings(self.args, self.train_dataset, self.accelerator.num_processes, model, self.sampler.rewards)

    def num_examples(self, dataloader: Any) -> int:
        """Return the number of training prompts."""
        return len(self.train_dataset)

    def get_total_train_batch_size(self, args: PPOConfig) -> int:
        """Return the completions of one optimizer step, all processes; Trainer's samples per second use it."""
        return args.rollout_batch_size * args.num_generations // args.num_minibatches

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Return the PPO loss of one pack: its tokens' sum over the token count of the whole optimizer step.

        Override it for an objective of your own; what you need is in `inputs`: an `experience` and its `minibatch`.
        """
        args, experience, minibatch = self.args, inputs["experience"], inputs["minibatch"]
        roles = ("policy", "value") if minibatch.trains_policy else ("value",)
        output = model(
            pack=experience.pack,
            roles=roles,
            states=experience.states,
            temperature=args.temperature,
            entropy_grad=args.entropy_coef > 0,
        )
        loss, stats = ppo_loss(experience, output, self._loss_coefficients(), minibatch.num_tokens)
        for group, group_stats in stats.items():
            self.metric_log.add_stats(group, group_stats)
        if minibatch.trains_policy:
            self._policy_kl += stats["policy"]["approx_kl"]
        return (loss, output) if return_outputs else loss

    def _loss_coefficients(self) -> LossCoefficients:
        args = self.args
        return LossCoefficients(
            epsilon=args.epsilon,
            epsilon_high=args.epsilon_high,
            dual_clip=args.dual_clip,
            value_clip=args.value_clip,
            value_coef=args.value_coef,
            entropy_coef=args.entropy_coef,
            beta=self._stream.state.beta if args.kl_in_loss else 0.0,
            kl_estimator=args.kl_estimator,
        )

    def _end_step(self, state: TrainerState) -> None:
        # Trainer counts epochs from where this process began, the stream from where the run did.
        state.epoch = self._stream.passes
        self.metric_log.end_step(skipped=self.guard.is_empty)
        self.metric_log.add_seconds("update", time.perf_counter() - self._step_start)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer; with value_learning_rate the value head and its adapter get groups of their own."""
        if self.optimizer is not None or self.args.value_learning_rate is None:
            return super().create_optimizer(model)
        optimizer = super().create_optimizer(model)
        split_off_value(optimizer, self.model if model is None else model, self.args.value_learning_rate)
        return optimizer

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.guard.grad_norm = float(norm)
        return norm

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a policy has no labels to predict.

        Raises:
            ValueError: always; the sentence names `evaluate`.
        """
        raise ValueError("PPOTrainer predicts no labels; evaluate(eval_dataset) samples and scores held-out prompts")

    # --- logging ----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs` together with the PPO metrics gathered since the last log."""
        if "loss" in logs:
            self._drop_non_finite_loss(logs["loss"])
            logs = {**logs, **self.metric_log.flush(), **self.memory_figures()}
            if self._stream and self._stream.last_scored:
                self.samples.record(f"step-{self.state.global_step:06d}", self._stream.last_scored)
                self._stream.last_scored = None
        super().log(logs, start_time)

    def _drop_non_finite_loss(self, loss: float) -> None:
        # Trainer empties its running loss by subtracting it from itself: one NaN would stay in every later log.
        if math.isfinite(loss):
            self._finite_loss = self._total_loss_scalar
        else:
            self._tr_loss.zero_()
            self._total_loss_scalar = self._finite_loss

    def _reward_extras(self) -> dict[str, Any]:
        self.samples.begin()
        log_metric = self.metric_log.add_own
        return {"trainer_state": self.state, "log_extra": self.samples.add_column, "log_metric": log_metric}
