"""PPOTrainer: transformers.Trainer whose train dataloader is the experience stream of a policy on one shared trunk.

Trainer keeps schedule, logging, callbacks, checkpoints, DDP and the Hub. This file has what PPO adds, in the order of
a run: construction, the experience stream, the optimizer step over packs, the loss, checkpoints, evaluation, logging.
The math is in onetrunk.ops. Whatever touches private members of Trainer belongs in checkpoints/resumable_trainer.py.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerState

from onetrunk.checkpoints.resumable_trainer import ResumableTrainer
from onetrunk.checkpoints.resume_point import LOOP_FILES, read_loop_state
from onetrunk.checkpoints.resume_settings import rows_digest
from onetrunk.data.sharded import ShardedRows
from onetrunk.models.adapters import POLICY
from onetrunk.models.speedups.memory_use import offloaded_activations
from onetrunk.models.value_head import VALUE_HEAD_FILE
from onetrunk.ops.losses import ppo_loss
from onetrunk.parallel.groups import RowGroups
from onetrunk.ppo.config import PPOConfig, describe_startup, planned_steps
from onetrunk.ppo.evaluation import SampleLog, evaluate_prompts
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.foreign_names import explain_key
from onetrunk.ppo.monitoring.alarms import Alarms, StepEnd, StepGuard
from onetrunk.ppo.monitoring.metrics import MetricLog, without_steps
from onetrunk.ppo.monitoring.profiling import PhaseTimer
from onetrunk.ppo.monitoring.progress import RolloutProgress
from onetrunk.ppo.rollout import ScoredRollout
from onetrunk.ppo.setup import ModelInputs, Reward, check_rows, map_style, prepare_dataset, prepare_run
from onetrunk.ppo.stream_state import STATE_FILE, check_state, processes_per_row, run_settings, written_settings
from onetrunk.rollouts.base import RolloutBackend, samples_ahead
from onetrunk.types import Experience, LossCoefficients, Minibatch, PackOutput, Prompt, to_device
from onetrunk.utils.files import digest, reading_content

if TYPE_CHECKING:
    from onetrunk.ppo.monitoring.progress import PPOTensorBoard
    from onetrunk.rollouts.episodes.environments import Factory
    from onetrunk.rollouts.episodes.kinds import Compact

NO_HELD_OUT = "evaluation needs held-out prompts: pass eval_dataset to PPOTrainer"


class PPOTrainer(ResumableTrainer):
    """Trains a LoRA policy with PPO; policy, value and reference share one frozen base model.

    A user of TRL's GRPOTrainer changes the two names:

        trainer = PPOTrainer(
            model="Qwen/Qwen2.5-0.5B-Instruct",
            reward_funcs=my_reward,
            args=PPOConfig(output_dir="out"),
            train_dataset=dataset,
        )
        trainer.train()

    To change the objective override `compute_loss`; to change advantages or scoring set `stream_class` to a subclass
    of ExperienceStream.

    Args:
        model: a name or path (of a base model, or of an adapter to continue), a transformers decoder, or a PeftModel.
        reward_funcs: one or several of: a function with TRL's signature, a dotted path to one, the name or path of a
            sequence-classification model or of a reward adapter on the policy's base, such a model. None: the
            environment alone gives rewards.
        args: the settings.
        train_dataset: rows with `prompt` (text or a conversation); other columns reach the reward functions.
            ShardedRows are read while training; they need max_prompt_length. None, or rows without `prompt`: the
            environment says the prompts at `reset`.
        eval_dataset: held-out rows with the same columns (or several such sets by name), for `evaluate` and
            eval_strategy.
        processing_class: the policy's tokenizer; None loads it from the model's name.
        reward_processing_classes: tokenizers of reward models, a list with one per reward function (None for
            functions); one tokenizer alone only for a single reward function.
        callbacks: further callbacks.
        optimizers: an optimizer and a scheduler instead of those that `args` describe.
        quantization_config: for a model loaded by name (4 or 8 bit).
        peft_config: LoRA config of a new policy; None: rank 16 on all linear layers.
        rollout_backend: samples the completions; None: this process does.
        tools: functions that the policy may call, sync or async, with type hints and docstrings, as in TRL.
        environment_factory: makes the environment of an episode, TRL's or Gymnasium's (`rollouts/episodes/README.md`);
            several by their names in the dataset's column `environment`.
        compact: with max_context_length, takes the messages of an episode and returns those of its new context, in
            place of the policy's summary.

    Raises:
        ValueError, TypeError: an invalid setting, row or reward function; before the model loads where possible.
    """

    stream_class = ExperienceStream
    needed_files = (*LOOP_FILES, STATE_FILE, VALUE_HEAD_FILE, SAFETENSORS_WEIGHTS_NAME)
    # On the first process of a run that reports to TensorBoard.
    tensorboard: PPOTensorBoard | None = None
    # Metrics of the model that training starts from, and what they depend on.
    _evaluation_before: dict[str, Any] | None = None
    # Step and metrics of the last evaluation of `eval_dataset`.
    _last_evaluation: dict[str, Any] | None = None
    # The checkpoint whose settings this run agrees with.
    _agrees_with: str | None = None
    # Whether the best checkpoint was loaded at the end of training.
    _has_best_weights = False
    _stream: ExperienceStream | None = None
    _has_begun_loop = False
    _step_start = 0.0
    # The largest of the rollout; below 0 if no step of it had anything to train.
    _gradient_norm = -1.0
    # False in the steps of value pretraining, which train nothing.
    _trains_policy = True

    # --- construction -----------------------------------------------------------------------------------------------

    def __new__(cls, *args: Any, **keywords: Any) -> PPOTrainer:
        # Here, not in `__init__`, whose signature then shows a mistake to a type checker.
        known = inspect.signature(cls.__init__).parameters
        unknown = [name for name in keywords if name not in known]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise TypeError(f"{cls.__name__}: {'; '.join(explain_key(name, [*known]) for name in unknown)}")
        return super().__new__(cls)

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | ShardedRows | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        *,
        rollout_backend: RolloutBackend | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        compact: Compact | None = None,
    ):
        args = PPOConfig(output_dir="ppo-output") if args is None else args
        about_model = (model, reward_funcs, processing_class, reward_processing_classes, quantization_config)
        inputs = ModelInputs(*about_model, peft_config, tools, environment_factory, compact)
        hooks = {"progress": self._show_sampling, "poll": self._poll_sampling}
        run = prepare_run(inputs, args, train_dataset, eval_dataset, rollout_backend, hooks)
        self.sampler, self.trunk_plan = run.parts.sampler, run.trunk_plan
        about = (run.trunk_plan.report, run.parts.model.get_base_model().dtype, run.eval_dataset is not None)
        self.progress = RolloutProgress(describe_startup(args, *about))
        self.guard = StepGuard(lambda: self.accelerator.scaler is not None)
        self.alarms = Alarms(
            self._metrics_of_rollout, lambda metrics: self.metric_log.add_rollout(metrics), self.may_save
        )
        is_logged = args.log_completions and args.should_save
        self.samples = SampleLog(args.output_dir, is_on=is_logged)
        # Completions of `eval_dataset` "before" training and "after", at the last evaluation.
        self.held_out_samples: dict[str, ScoredRollout] = {}
        super().__init__(
            model=run.parts.model,
            args=args,
            data_collator=lambda rows: rows,
            train_dataset=run.parts.datasets[0],
            eval_dataset=run.eval_dataset,
            processing_class=run.parts.tokenizer,
            # The guard comes after the alarms: it has the last word on what is saved.
            callbacks=[StepEnd(self._end_step), self.alarms, self.guard, run.memory_check, *(callbacks or [])],
            optimizers=optimizers,
        )
        self.loss_is_scaled_for_ga = True
        self.data_parallel = RowGroups(self.accelerator)
        self.metric_log = MetricLog(self.accelerator, of_rollout=MetricLog(self.accelerator))
        self.watch = PhaseTimer(args, self.accelerator, self.heartbeat)
        self.add_callback(self.watch)
        # The approximate KL of the step, summed over its packs on this process; `target_kl` limits it.
        self._policy_kl = torch.zeros((), device=self.accelerator.device)
        if not args.disable_tqdm:
            self.progress.add_to(self)

    # As in GRPOTrainer.
    beta = property(lambda self: self.args.beta)
    ref_model = property(lambda self: None, doc="None: the reference is the frozen base, or a copy of an adapter.")
    reward_funcs = property(lambda self: self.sampler.rewards.functions)
    reward_func_names = property(lambda self: self.sampler.rewards.names)
    reward_weights = property(lambda self: torch.tensor(self.sampler.rewards.weights))
    reward_processing_classes = property(lambda self: [getattr(f, "tokenizer", None) for f in self.reward_funcs])

    def planned_steps(self) -> int:
        """Return the number of optimizer steps of the whole run; needs no checkpoint."""
        return planned_steps(self.args, len(self.train_dataset))

    def num_examples(self, dataloader: ExperienceStream) -> int:
        """Return the number of training prompts."""
        return len(self.train_dataset)

    def get_total_train_batch_size(self, args: PPOConfig) -> int:
        """Return the completions of one optimizer step, all processes; Trainer's samples per second use it."""
        return args.rollout_batch_size * args.num_generations // args.num_minibatches

    def make_tensorboard(self) -> PPOTensorBoard:
        """Return the callback that writes for TensorBoard; only the first process has something to show there."""
        from onetrunk.ppo.monitoring.progress import PPOTensorBoard

        board = PPOTensorBoard(self)
        self.tensorboard = board if self.is_world_process_zero() else None
        return board

    # --- the experience stream --------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> ExperienceStream:
        """Return the experience stream; it is not prepared by accelerate, which would read one item ahead."""
        if self._stream is not None:  # Of an earlier call; environments made before training are played in.
            self.end_training()
        stream = self.stream_class(self)
        if self._resume_from is not None:
            with reading_content(self._resume_from):
                stream.load(self._resume_from)
        self._stream, self._has_best_weights, self._last_evaluation = stream, False, None
        return stream

    def end_training(self) -> None:
        """Stop sampling ahead, and close the environments."""
        if self._stream is not None:
            self._stream.close()
        self.sampler.close()

    def _show_sampling(self, *done: int) -> None:
        if not samples_ahead():  # Of a rollout ahead only the wait for it is shown.
            self.progress.rollout(*done)

    def _poll_sampling(self) -> None:
        """Give up sampling if the run is to stop, or a rollout ahead once it is over."""
        if not samples_ahead():
            self.poll()

    def reward_extras(self) -> dict[str, Any]:
        """Return the keywords that reward functions get besides the columns; called once per rollout."""
        self.samples.begin()
        log_metric = self.metric_log.add_own
        return {"trainer_state": self.state, "log_extra": self.samples.add_column, "log_metric": log_metric}

    # --- one optimizer step: forward and backward over the packs of a minibatch --------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Minibatch], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run forward and backward over the packs of a minibatch; return its loss, summed over this process."""
        minibatch, num_processes = inputs["minibatch"], self.data_parallel.num_processes
        total = torch.zeros((), device=self.accelerator.device)
        if not self._begin_step(model, minibatch):
            return total
        with self.watch.phase("update"):
            # The stages of a pipeline run the packs together.
            packs = () if self._run_in_stages(model, minibatch, total) else minibatch.experiences
            for experience in packs:
                self.heartbeat.beat()
                is_last = experience is packs[-1]
                with self.watch.last_backward(model) if is_last else self.accelerator.no_sync(model):
                    with offloaded_activations(model) if self.args.activation_offloading else contextlib.nullcontext():
                        loss = self.compute_loss(model, self._inputs_of(experience, minibatch))
                    # DDP averages gradients over processes; the loss is a share of a global mean.
                    self.accelerator.backward(loss * num_processes)
                total += loss.detach() * num_processes
        self._stop_on_target_kl()
        return total

    def _begin_step(self, model: nn.Module, minibatch: Minibatch) -> bool:
        """Return whether the step may change the weights."""
        self._step_start = time.perf_counter()
        self._policy_kl = torch.zeros((), device=self.accelerator.device)
        self._trains_policy = minibatch.trains_policy
        self.guard.begin_step(minibatch.is_empty_slot)
        if minibatch.is_empty_slot:
            self._give_scaler_gradients(model)
        elif not self.model.training:  # The flag of DDP's wrapper stays set after `eval` of what is in it.
            model.train()  # Only where it is needed, because it walks over all modules.
        return not minibatch.is_empty_slot

    def _inputs_of(self, experience: Experience, minibatch: Minibatch) -> dict[str, Any]:
        return {"experience": to_device(experience, self.accelerator.device), "minibatch": minibatch}

    def _run_in_stages(self, model: nn.Module, minibatch: Minibatch, total: Tensor) -> bool:
        """Run the packs through the pipeline of the model and add their losses to `total`; False if it is in none."""
        if not self.args.pipeline_training:
            return False
        from onetrunk.parallel.staged import update_in_stages

        self.heartbeat.beat()
        inputs, args = [self._inputs_of(experience, minibatch) for experience in minibatch.experiences], self.args

        def loss_of(number: int, run: Any) -> Tensor:
            loss = self.compute_loss(run, inputs[number])
            total.add_(loss.detach() * self.data_parallel.num_processes)
            return loss

        packs = [pack["experience"].pack for pack in inputs]
        update_in_stages(model, packs, loss_of, args.temperature, args.entropy_coef > 0)
        return True

    def poll(self) -> None:
        """Renew the heartbeat, and give up the work in progress if the run is to stop."""
        self.heartbeat.beat()
        self.stop_signals.poll()

    def _give_scaler_gradients(self, model: nn.Module) -> None:
        # The gradient scaler of fp16 fails on a step without gradients; StepGuard removes these again.
        if self.args.fp16:
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)

    def _stop_on_target_kl(self) -> None:
        if self.args.target_kl is None:
            return
        if self.data_parallel.sum(self._policy_kl).item() > self.args.target_kl:
            self.guard.begin_step(is_empty=True)
            self._stream.skip_rest_of_rollout()

    def on_grad_norm(self, norm: float | Tensor) -> float:
        """Pass the norm of the step's gradient to the guard; the only wait for the device in a step."""
        norm = float(norm)
        self.guard.on_grad_norm(norm)
        if self._trains_policy:
            self._gradient_norm = max(self._gradient_norm, norm)
        return norm

    def _metrics_of_rollout(self) -> dict[str, float]:
        """Return the metrics of the rollout that has just ended, and forget them; the alarms watch them."""
        metrics = self.metric_log.of_rollout.flush()
        skipped_fraction = metrics.get("policy/skipped_steps", 0.0) / self.args.steps_per_rollout
        metrics["policy/skipped_fraction"] = skipped_fraction
        if self._gradient_norm >= 0:
            metrics["policy/gradient_norm"], self._gradient_norm = self._gradient_norm, -1.0
        return metrics

    def _end_step(self, state: TrainerState) -> None:
        # Trainer counts passes from where this process began, the stream from where the run did.
        state.epoch = self._stream.passes
        if self._trains_policy:
            self.metric_log.end_step(skipped=self.guard.is_empty)
        self.metric_log.add_seconds("update", time.perf_counter() - self._step_start)

    # --- the loss ---------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the PPO loss of one pack: its tokens' sum over the token count of the whole optimizer step.

        Override it for an objective of your own; what you need is in `inputs`: an `experience` and its `minibatch`.
        """
        args, experience, minibatch = self.args, inputs["experience"], inputs["minibatch"]
        output = model(
            pack=experience.pack,
            roles=("policy",),
            states=experience.states,
            temperature=args.temperature,
            entropy_grad=args.entropy_coef > 0,
        )
        coefficients = LossCoefficients(
            epsilon=args.epsilon,
            epsilon_high=args.epsilon_high,
            dual_clip=args.dual_clip,
            entropy_coef=args.entropy_coef,
            kl_weight=self._stream.state.beta if args.kl_in_loss else 0.0,
            kl_estimator=args.kl_estimator,
            ratio_unit=args.ratio_unit,
            policy_objective=args.policy_objective,
            dis_epsilon_low=args.dis_epsilon_low,
            dis_epsilon_high=args.dis_epsilon_high,
        )
        loss, stats = ppo_loss(experience, output, coefficients, minibatch.num_tokens)
        self._keep_stats(stats, experience, output)
        return (loss, output) if return_outputs else loss

    def _keep_stats(self, stats: dict[str, dict[str, Tensor]], experience: Experience, output: PackOutput) -> None:
        for group, group_stats in stats.items():
            self.metric_log.add_stats(group, group_stats)
        self._policy_kl += stats["policy"]["approx_kl"]

    # --- checkpoints and the Hub ------------------------------------------------------------------------------------

    def settings_of_run(self) -> dict[str, Any]:
        """Return the settings that a checkpoint of this run is compared with."""
        model = self.accelerator.unwrap_model(self.model)
        parts = self.sampler.rewards, self.sampler.episodes
        return run_settings(self.args, self.train_dataset, self.data_parallel, model, *parts)

    def check_checkpoint(self, folder: str) -> None:
        """Raise ValueError if the checkpoint belongs to a run with other settings."""
        if folder != self._agrees_with:
            check_state(folder, self.settings_of_run(), self.args.allow_config_change)
            self._agrees_with = folder

    def may_save(self) -> bool:
        """Return whether the last gradient was finite."""
        return not self.guard.is_bad

    def saved_numbers(self) -> dict[str, dict[str, Tensor]]:
        """Return the numbers of the stream and of the value head too, which no gradient of a step trains."""
        remedy = (
            "look at score/mean and value/loss; correct the reward functions, or set score_clip or a lower"
            " value_learning_rate, and resume with allow_config_change"
        )
        own = {} if self._stream is None else {remedy: self._stream.saved_numbers()}
        return {**super().saved_numbers(), **own}

    def needed_checkpoints(self) -> set[Path]:
        """Return the last checkpoints from before the conditions that the alarms are counting."""
        return self.alarms.needed_checkpoints(self.state.global_step, self.args)

    def extra_loop_state(self) -> dict[str, Any]:
        """Return the metrics since the last log, the state of the alarms, the first evaluation and the last one."""
        return {
            "metrics": self.metric_log.state_dict(),
            "alarms": self.alarms.state_dict(),
            "gradient_norm": self._gradient_norm,
            "last_evaluation": self._last_evaluation,
            "before": self._evaluation_before,
        }

    def merged_loop_state(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what other processes than those that wrote a checkpoint resume with."""
        return {**states[0], "metrics": without_steps(states[0]["metrics"])}

    def has_other_groups(self, folder: str) -> bool:
        """Return whether other numbers of processes worked on the same rows in the run that wrote a checkpoint."""
        return processes_per_row(written_settings(folder)) != processes_per_row(self.data_parallel.layout)

    def load_extra_loop_state(self, state: dict[str, Any]) -> None:
        """Restore what `extra_loop_state` returned."""
        self.metric_log.load_state_dict(state["metrics"])
        self.alarms.load_state_dict(state["alarms"], self.args)
        self._gradient_norm = state.get("gradient_norm", -1.0)
        self._last_evaluation = state["last_evaluation"]
        self._evaluation_before = self._evaluation_before or state.get("before")

    def save_run_state(self, folder: str) -> None:
        """Write the experience stream into a checkpoint."""
        self._stream.save(folder)

    def load_branches_from(self, folder: str) -> bool:
        """Load the adapters and the value head from a checkpoint."""
        self.model.load_branches(folder)
        self._has_best_weights = str(folder) == self.state.best_model_checkpoint
        return True

    def on_model_saved(self, folder: str) -> None:
        """Write the model card next to the policy."""
        self._write_card(folder)

    def _write_card(self, folder: str, *args: Any, **data: Any) -> None:
        from onetrunk.ppo.model_card import write_card

        write_card(self, folder, *args, **data)

    def prepare_push(self, checkpoint: str) -> None:
        """Copy the value head and the other adapters to output_dir; Trainer copies only the policy's adapter."""
        self._write_card(self.args.output_dir)
        if not self.is_world_process_zero():
            return
        for name in (VALUE_HEAD_FILE, *(a for a in self.model.peft_config if a != POLICY)):
            source, target = Path(checkpoint) / name, Path(self.args.output_dir) / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.is_file():
                shutil.copy(source, target)

    def create_model_card(
        self,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_name: str | list[str] | None = None,
        **data: Any,
    ) -> None:
        """Write the model card into output_dir; `push_to_hub` calls this with its extra keywords.

        Args:
            model_name: the heading; None: the Hub name, or the name of output_dir.
            finetuned_from: Hub name of the base model, if it was loaded from a folder.
            tags: further tags; every card has lora, onetrunk and ppo.
            dataset: Hub name of the prompts.
            dataset_name: the same, as TRL's trainers call it.
            **data: further metadata (language, license).
        """
        tags = [tags] if isinstance(tags, str) else tags or []
        datasets = dataset or dataset_name
        self._write_card(self.args.output_dir, model_name, finetuned_from, tags, datasets=datasets, **data)

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Sample one completion per held-out prompt and return its metrics: `eval_score/mean`, `eval_kl/ref`, ...

        Several datasets by name give `eval_<name>_score/mean`, ..., as in transformers.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError(NO_HELD_OUT)
        if isinstance(dataset, dict):
            parts = [self.evaluate(d, ignore_keys, f"{metric_key_prefix}_{name}") for name, d in dataset.items()]
            return {name: value for part in parts for name, value in part.items()}
        dataset = map_style(dataset, "eval_dataset")
        if "prompt_ids" not in dataset.column_names:
            dataset = prepare_dataset(dataset, self.processing_class, self.args, self.sampler.episodes)
            check_rows(self.model, self.args, [dataset], self.sampler.episodes)
        start = time.perf_counter()
        values, scored = self.sample_and_score(dataset, "policy", metric_key_prefix.replace("_", " "))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        metrics[f"{metric_key_prefix}_runtime"] = time.perf_counter() - start
        self.samples.record(f"{metric_key_prefix}-{self.state.global_step:06d}", scored, with_columns=False)
        is_own = eval_dataset is None and metric_key_prefix == "eval"
        if is_own:
            self.held_out_samples["after"] = scored
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if is_own:
            rows = rows_digest(self.eval_dataset)
            self._last_evaluation = {"step": self.state.global_step, "rows": rows, "metrics": metrics}
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError: PPO has no labels to predict."""
        raise ValueError("PPOTrainer has no predict; evaluate(eval_dataset) samples completions and scores them")

    def values(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Tensor]:
        """Return what the value function says before each token of some completions (`ValueModel.values`)."""
        from onetrunk.models.value_model import ValueModel

        scorer = ValueModel(self.model, self.processing_class, self.args.chat_template_kwargs)
        with self.accelerator.autocast():
            return scorer.values(prompts, completions)

    def final_evaluation(self) -> dict[str, float]:
        """Evaluate the trained policy. Reuses the last evaluation if it was made at the final step, of these rows."""
        last = self._last_evaluation
        # The best checkpoint is loaded after the last evaluation.
        if last is not None and last["step"] == self.state.global_step and not self.args.load_best_model_at_end:
            if last.get("rows") == rows_digest(self.eval_dataset):
                return dict(last["metrics"])
        return self.evaluate()

    def evaluate_reference(self, resume: str | None = None) -> dict[str, float]:
        """Return the metrics of the model that training starts from, without a prefix; `train` logs them at step 0.

        Args:
            resume: the checkpoint that training will resume from, which is checked first. If it holds these metrics,
                for the same settings and rows, nothing is sampled.
        """
        if isinstance(self.eval_dataset, dict):
            raise ValueError(
                f"evaluate_reference takes one set of held-out prompts, and eval_dataset has"
                f" {', '.join(self.eval_dataset)}; give one, or call evaluate before train"
            )
        if self.eval_dataset is None:
            raise ValueError(NO_HELD_OUT)
        of, kept = digest([self.settings_of_run(), rows_digest(self.eval_dataset)]), None
        if resume is not None:
            with reading_content(resume):
                self.check_checkpoint(resume)
                kept = read_loop_state(self, resume)["own"].get("before")
        if not (kept and kept["of"] == of):
            metrics, self.held_out_samples["before"] = self.sample_and_score(self.eval_dataset, "reference", "before")
            kept = {"of": of, "metrics": metrics}
        self._evaluation_before = kept
        return kept["metrics"]

    def begin_loop(self) -> None:
        """Log the evaluation before training at step 0, unless the run resumes."""
        super().begin_loop()
        is_first, self._has_begun_loop = not self._has_begun_loop, True
        is_new = self.state.global_step == 0 and self._resume_from is None
        if self._evaluation_before is not None and is_new and is_first:
            # The policy is the reference, so their KL is exactly 0; not where the same object trains once more.
            metrics = {f"eval_{name}": value for name, value in self._evaluation_before["metrics"].items()}
            self.log({**metrics, "eval_kl/ref": 0.0})

    def sample_and_score(
        self, dataset: Dataset, role: str, phase: str, is_shown: bool = True
    ) -> tuple[dict[str, float], ScoredRollout]:
        """Return metrics and completions of tokenized prompts; `phase` labels the progress bar."""
        is_shown = is_shown and not self.args.disable_tqdm and self.is_world_process_zero()
        closes = contextlib.nullcontext() if self.is_in_train else contextlib.closing(self.sampler)
        with self.progress.phase(phase, is_shown), self.watch.phase("evaluate"), closes:
            return evaluate_prompts(
                self.model,
                self.sampler,
                dataset,
                self.accelerator,
                self.args,
                role=role,
                # A version number names one set of weights.
                version=self.state.best_global_step if self._has_best_weights else self.state.global_step,
                trainer_state=self.state,
            )

    # --- logging ----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs` together with the PPO metrics gathered since the last log."""
        if "loss" in logs and self._stream:
            self.drop_non_finite_loss(logs["loss"])
            logs = {**logs, **self.metric_log.flush(), **self.watch.flush()}
            scored = self._stream.take_scored()
            if scored is not None:
                self.samples.record(f"step-{self.state.global_step:06d}", scored)
                if self.tensorboard is not None:
                    self.tensorboard.show_rollout(scored, self.state.global_step)
        super().log(logs, start_time)
