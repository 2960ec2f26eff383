"""ExperienceStream, the train dataloader of PPOTrainer: prompts, rollouts, rewards, advantages, minibatches.

One item is one optimizer step. The stream makes a new rollout when the previous one is used up, from the weights that
the last update left, so it must never be read ahead. A RolloutSource (rollout.py) hides what samples, and when.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from onetrunk.checkpoints.folders import step_of
from onetrunk.checkpoints.signals import StopSignals
from onetrunk.data.sharded import ShardedRows
from onetrunk.models.trunk import PackOutput
from onetrunk.ops.advantages import (
    AdaptiveKLController,
    KLController,
    RunningMoments,
    gae,
    length_adaptive_lam,
    length_penalty,
    missing_eos_penalty,
    token_rewards,
    turn_gae,
    with_cut_targets,
)
from onetrunk.ops.masking import masked_whiten, turn_starts
from onetrunk.ops.packing import PackLimits
from onetrunk.parallel.groups import RowGroups
from onetrunk.parallel.sharding import equal_counts
from onetrunk.ppo.config import PPOConfig, plan_batches
from onetrunk.ppo.forward import Forward
from onetrunk.ppo.monitoring.metrics import (
    MetricLog,
    dis_metrics,
    episode_metrics,
    global_moments,
    importance_metrics,
    rollout_metrics,
    row_ages,
    staleness_metrics,
    value_metrics,
)
from onetrunk.ppo.monitoring.profiling import PhaseTimer
from onetrunk.ppo.packs import RolloutPack, cut, joined, rollout_packs, with_importance
from onetrunk.ppo.rollout import (
    PromptBatch,
    PromptOrder,
    RolloutMaker,
    RolloutSource,
    Sampled,
    ScoredRollout,
    SyncSource,
    prompt_batch,
    with_turn_values,
)
from onetrunk.ppo.stream_state import StreamState, load_buffer, load_state, save_buffer, save_state
from onetrunk.ppo.value_fit import ValueFit
from onetrunk.types import Experience, Minibatch, Pack, Rollout, to_device
from onetrunk.utils.randomness import ROLLOUT_STREAM, seed_generators


class StreamTrainer(Protocol):
    """What an ExperienceStream needs of the trainer that trains on it."""

    args: PPOConfig
    accelerator: Accelerator
    # The policy, which the trainer wraps after the stream is made.
    model: nn.Module
    sampler: RolloutMaker
    train_dataset: Dataset | ShardedRows
    data_parallel: RowGroups
    # Whose `cache` keeps the outputs of the frozen layers.
    trunk_plan: Any
    watch: PhaseTimer
    metric_log: MetricLog
    stop_signals: StopSignals

    def planned_steps(self) -> int:
        """Return the optimizer steps of the whole run."""
        ...

    def settings_of_run(self) -> dict[str, Any]:
        """Return what must not change when the run is resumed."""
        ...

    def reward_extras(self) -> dict[str, Any]:
        """Return the keywords that reward functions get besides the columns."""
        ...

    def poll(self) -> None:
        """Renew the heartbeat, and give up the work in progress if the run is to stop."""
        ...


class ExperienceStream:
    """Yields the minibatches of one pass over the prompts each time it is iterated.

    Override `prompts` to change where prompts come from, `shape_scores` to change how scores become numbers for PPO,
    or `advantages` to change how they are assigned to tokens. For example, advantages without a value function:

        class Reinforce(ExperienceStream):
            def advantages(self, pack, output, rewards, stopped):
                returns = rewards.flip(1).cumsum(1).flip(1) * pack.completion_mask
                return returns, returns

    Args:
        trainer: what trains on the stream, a PPOTrainer.
    """

    def __init__(self, trainer: StreamTrainer):
        config = trainer.args
        self.trainer = trainer
        self.config = config
        self.sampler, self.accelerator, self.watch = trainer.sampler, trainer.accelerator, trainer.watch
        # Rows are dealt to these; processes that hold the same rows count as one.
        self.data_parallel = trainer.data_parallel
        self.num_rollouts = math.ceil(trainer.planned_steps() / config.steps_per_rollout)
        self.plan = plan_batches(config, trainer.accelerator.num_processes)
        self.order = PromptOrder.from_config(config, trainer.train_dataset)
        self.kl_controller = (
            KLController(config.beta)
            if config.kl_target is None
            else AdaptiveKLController(config.beta, config.kl_target, config.kl_horizon)
        )
        # Whether samples are weighted: a sampler with weights of its own rounds differently, or has older ones; and a
        # truncated one draws from another distribution.
        corrects = config.vllm_importance_sampling_correction
        differs = self.sampler.has_own_weights or config.truncates
        self.is_direct = config.policy_objective == "dis"  # The loss itself corrects for the sampler.
        self.corrects_sampler = differs and not self.is_direct if corrects is None else corrects
        self.score_moments = RunningMoments()
        self.settings = trainer.settings_of_run()
        self.state = StreamState()
        self.last_scored: ScoredRollout | None = None
        beat, stop = self.watch.heartbeat.beat, trainer.stop_signals.poll
        cache = trainer.trunk_plan.cache
        self.forward = Forward(lambda: self.model, self.accelerator, config.temperature, cache, beat, stop)
        self.source = self.make_source()
        head = self.accelerator.unwrap_model(trainer.model).value_head
        self.value_fit = ValueFit(head, config, self.data_parallel)
        self._experiences: list[Experience] | None = None

    @property
    def model(self) -> nn.Module:
        """The policy; the trainer wraps it late."""
        return self.trainer.model

    def make_source(self) -> RolloutSource:
        """Return where the rollouts come from. Override it to sample in another way."""
        if self.config.schedule == "sync":
            return SyncSource(self)
        from onetrunk.ppo.async_rollouts import AsyncSource

        return AsyncSource(self, self.plan.rows_per_rank)

    # --- one rollout ------------------------------------------------------------------------------------------------

    def make_rollout(self) -> list[Experience]:
        """Sample, score and shape one rollout; return its packs in the order in which they were formed.

        Raises:
            StopAsked: the run is to stop; nothing has changed, and the same rollout can be made again.
        """
        self.watch.begin_rollout(self.state.iteration)
        with self._timed("generate"):
            sampled = self.source.next(self.state.iteration)  # 1 prompts and completions
        with self._timed("score"), self._interruptible("score"):
            packs = self.form_packs(sampled.rollout)
            with self.run_model(packs) as running:  # 2 old logprobs, values, reference
                scored = self.score(sampled, running.result)  # 3 raw scores, meanwhile
                rows = running.result()
            packs = self.add_importance_weights(joined(rows, sampled.rollout), sampled.rollout)
        scores = self.shape_scores(scored)
        packs = self.add_rewards(packs, scores, scored)  # 4 the score over the tokens, minus beta * KL
        experiences = self.add_advantages(packs, scored)  # 5 GAE
        metrics = self.log_rollout(scored, packs, experiences)  # no algorithm
        self.update_beta(metrics)  # the KL coefficient, for the next rollout
        self.fit_value(packs, experiences, scored)  # the value head, for the next rollout
        return self.whiten(cut(experiences, rows))  # 6 advantages of mean 0 and variance 1

    def prompts(self, iteration: int) -> PromptBatch:
        """Return this process's prompts of a rollout, one per completion."""
        completions, _ = self._deal(iteration)
        return prompt_batch(self.trainer.train_dataset, *self.order.rows(iteration, completions))

    def form_packs(self, rollout: Rollout) -> list[RolloutPack]:
        """Return the packs of the rollout in use; they keep their rows and width for all of its steps."""
        limits = PackLimits.of(self.config, self.plan.rows_per_pack)
        _, minibatches = self._deal(self.state.iteration)
        agree, pad_id = equal_counts(self.model, self.accelerator), self.sampler.params.pad_token_id
        return rollout_packs(rollout, minibatches, limits, pad_id, self.accelerator.device, agree)

    def run_model(self, packs: Sequence[RolloutPack]) -> AbstractContextManager[Future[list[RolloutPack]]]:
        """Run the policy, the value head and the reference over the packs while the block of the result lasts.

        Reward functions may need the main thread, so this happens in the background where they may wait for a server;
        but a trace sees the main thread only.
        """
        roles = self.sampler.roles("policy", "value", *(("reference",) if self.config.beta else ()))
        has_time = self.sampler.may_wait and not self.watch.is_tracing
        return self.forward.running(packs, roles, self.state.iteration, has_time)

    def score(self, sampled: Sampled, packs: Callable[[], Sequence[RolloutPack]]) -> ScoredRollout:
        """Return the raw scores of a rollout; `packs` waits for the model, where an adapter on the trunk scores."""
        # What reward functions draw from the global generators depends on the rollout alone. Seeded just before them,
        # because threads of other libraries draw from Python's too: retries of an upload, a tracker.
        seed_generators(self.config.seed, ROLLOUT_STREAM, self.state.iteration, self.data_parallel.process_index)
        return self.sampler.score(sampled, packs, **self.trainer.reward_extras())

    def shape_scores(self, scored: ScoredRollout) -> Tensor:
        """Return the scores [n] that PPO maximises: after penalties, normalisation and clipping. NaN: no score."""
        config, scores = self.config, scored.scores.total
        if config.missing_eos_penalty is not None:
            scores = missing_eos_penalty(scores, scored.stopped, config.missing_eos_penalty)
        if config.length_penalty:
            scores = length_penalty(scores, scored.lengths, config.max_completion_length, config.length_penalty)
        if config.normalize_scores:
            moments = global_moments([(scores.nan_to_num(), scores.isfinite())], self.accelerator)
            self.score_moments.update(*torch.stack(moments).tolist())
            scores = self.score_moments.normalize(scores)
        return scores if config.score_clip is None else scores.clamp(-config.score_clip, config.score_clip)

    def advantages(self, pack: Pack, output: PackOutput, rewards: Tensor, stopped: Tensor) -> tuple[Tensor, Tensor]:
        """Return (advantages, returns) of a pack, both [R, C], by generalised advantage estimation over `gae_unit`.

        It is called again with values of 0, for `value/variance_ratio`.

        Args:
            pack: the rows.
            output: logprobs, values and next_values at rollout time.
            rewards: [R, C], KL and score included.
            stopped: [R] bool, False if the completion was cut off at max_completion_length.
        """
        config, actions = self.config, pack.completion_mask
        if config.gae_unit == "turn":
            actions = turn_starts(actions, pack.turns)
        lam: float | Tensor = config.lam
        if config.length_adaptive_lam is not None:
            lam = length_adaptive_lam(actions.sum(1), config.length_adaptive_lam)
        lam_value = config.lam if config.lam_value is None else config.lam_value
        advantages, returns = self.estimate(pack, output, rewards, stopped, lam)
        if isinstance(lam, Tensor) or lam != lam_value:
            _, returns = self.estimate(pack, output, rewards, stopped, lam_value)
        return advantages, returns

    def estimate(
        self, pack: Pack, output: PackOutput, rewards: Tensor, stopped: Tensor, lam: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (advantages, returns) by generalised advantage estimation with `lam`, over `gae_unit`."""
        bootstrap = None
        if self.config.truncated_completions == "bootstrap":
            bootstrap = torch.where(stopped, torch.zeros_like(output.next_values), output.next_values)
        over_unit = partial(turn_gae, turn_ids=pack.turns) if self.config.gae_unit == "turn" else gae
        return over_unit(rewards, output.values, pack.completion_mask, self.config.gamma, lam, bootstrap)

    def add_rewards(self, packs: Sequence[RolloutPack], scores: Tensor, scored: ScoredRollout) -> list[RolloutPack]:
        """Return the packs with loss masks and token rewards: the score less beta times the KL.

        Dense rewards arrive at their tokens, and what is left of the score at the last token.

        Args:
            packs: with the outputs of the model.
            scores: [n] of this process's rows; a row without a finite one does not train.
            scored: the rows with their raw scores.
        """
        config, device = self.config, self.accelerator.device
        scale = self.score_moments.scale if config.normalize_scores else 1.0
        trains = scores.isfinite()
        if config.truncated_completions == "mask":
            trains &= scored.stopped
        self.state.beta = self.kl_controller.value
        beta = 0.0 if config.kl_in_loss else self.state.beta
        rewarded = []
        for item in packs:
            mask, output = item.pack.completion_mask, item.output
            row_scores = scores.nan_to_num()[item.rows].to(device, non_blocking=True)
            dense = item.dense_rewards(scored.scores, scale)
            logprobs = (output.logprobs, output.ref_logprobs)
            rewards = token_rewards(row_scores, *logprobs, mask, beta, config.kl_estimator, dense)
            loss_mask = mask & trains[item.rows].to(device, non_blocking=True)[:, None]
            rewarded.append(replace(item, loss_mask=loss_mask, rewards=rewards))
        if not config.whiten_rewards:
            return rewarded
        moments = global_moments([(item.rewards, item.loss_mask) for item in rewarded], self.accelerator)
        return [
            replace(p, rewards=masked_whiten(p.rewards, p.pack.completion_mask, shift_mean=False, moments=moments))
            for p in rewarded
        ]

    def add_importance_weights(self, packs: Sequence[RolloutPack], rollout: Rollout) -> list[RolloutPack]:
        """Return the packs with importance weights of their tokens, if the sampler is corrected."""
        if not self.corrects_sampler:
            return list(packs)
        return [with_importance(item, rollout, **self.config.importance_bounds) for item in packs]

    def add_advantages(self, packs: Sequence[RolloutPack], sampled: Sampled) -> list[Experience]:
        """Return the experience of each pack: with advantages and returns."""
        stopped, experiences, by_turn = sampled.stopped, [], self.config.gae_unit == "turn"
        bootstraps = self.config.truncated_completions == "bootstrap"
        for item in packs:
            output = item.output
            row_stopped = stopped[item.rows].to(self.accelerator.device, non_blocking=True)
            advantages, returns = self.advantages(item.pack, output, item.rewards, row_stopped)
            value_mask, ends = None, None
            if by_turn:  # Advantages of turns read no other value, but for that after a cut.
                value_mask = item.loss_mask if bootstraps else turn_starts(item.loss_mask, item.pack.turns)
            if self._bootstraps_turns(item.pack):
                returns = self._cut_targets(item, returns)
                ends = item.pack.turn_ends & item.loss_mask.any(1, keepdim=True)
            experience = Experience(
                pack=item.pack,
                loss_mask=item.loss_mask,
                old_logprobs=item.sampler_logprobs(sampled.rollout).float() if self.is_direct else output.logprobs,
                old_values=output.values,
                advantages=advantages,
                returns=returns,
                ref_logprobs=output.ref_logprobs,
                weights=None if item.importance is None else item.importance.weights,
                states=output.states,
                value_mask=value_mask,
                end_mask=ends,
            )
            experiences.append(experience)
        require_finite(experiences, self.state.iteration)
        return experiences

    def _bootstraps_turns(self, pack: Pack) -> bool:
        has_turns = self.config.gae_unit == "turn" or pack.turn_ids is not None
        return self.config.truncated_completions == "bootstrap" and has_turns

    def _cut_targets(self, item: RolloutPack, returns: Tensor) -> Tensor:
        turns = item.pack.turns if self.config.gae_unit == "turn" else None
        return with_cut_targets(returns, item.rewards, item.pack.completion_mask, item.pack.turn_ends, turns)

    def without_critic(self, packs: Sequence[RolloutPack], sampled: Sampled) -> tuple[list[Tensor], list[Tensor]]:
        """Return the observed returns of each pack, and the advantages that a critic of zeros would give it.

        Observed returns contain no value, except the one that stands for the rest of a truncated completion.
        """
        observed, plain = [], []
        for item in packs:
            output, stopped = item.output, sampled.stopped[item.rows].to(self.accelerator.device, non_blocking=True)
            following = None if output.next_values is None else torch.zeros_like(output.next_values)
            zeros = output._replace(values=torch.zeros_like(output.values), next_values=following)
            returns = self.estimate(item.pack, output, item.rewards, stopped, lam=1.0)[1]
            observed.append(self._cut_targets(item, returns) if self._bootstraps_turns(item.pack) else returns)
            plain.append(self.advantages(item.pack, zeros, item.rewards, stopped)[0])
        return observed, plain

    def fit_value(self, packs: Sequence[RolloutPack], experiences: Sequence[Experience], sampled: Sampled) -> None:
        """Fit the value head to the returns."""
        numbers = [completion for _, _, completion in sampled.batch.keys]
        loss = self.value_fit.fit(packs, experiences, numbers, self.state.iteration)
        self.trainer.metric_log.add_rollout({"value/loss": loss})

    def whiten(self, experiences: list[Experience]) -> list[Experience]:
        """Return the experiences with advantages of mean 0 and variance 1 over all tokens that train, if set."""
        if not self.config.whiten_advantages:
            return experiences
        moments = global_moments([(e.advantages, e.loss_mask) for e in experiences], self.accelerator)
        return [replace(e, advantages=masked_whiten(e.advantages, e.loss_mask, moments=moments)) for e in experiences]

    # --- what surrounds it ------------------------------------------------------------------------------------------

    @property
    def reads_next_values(self) -> bool:
        """Whether an override may read `next_values` (the value after a row's last token), which GAE does not need."""
        names = ("advantages", "estimate", "add_advantages")
        return any(getattr(type(self), name) is not getattr(ExperienceStream, name) for name in names)

    def take_scored(self) -> ScoredRollout | None:
        """Return the last rollout if it has not been taken yet, else None."""
        scored, self.last_scored = self.last_scored, None
        return scored

    def _deal(self, iteration: int) -> tuple[list[int], list[list[int]]]:
        return self.order.deal(iteration, self.data_parallel.process_index, self.data_parallel.num_processes)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.trainer.metric_log.add_seconds(phase, time.perf_counter() - start)

    @contextlib.contextmanager
    def _interruptible(self, phase: str, is_collective: bool = True) -> Iterator[None]:
        """Record a phase that ends early, by StopAsked, if the run is to stop; collective: only with one process."""
        stop_signals = self.trainer.stop_signals
        with stop_signals.giving_up(self.accelerator, alone=is_collective), self.watch.phase(phase):
            yield

    def sampling(self, is_collective: bool) -> AbstractContextManager[None]:
        """Return a block in which this process samples, and the run may be stopped.

        Args:
            is_collective: whether processes sample together there, so that none may give up alone.
        """
        return self._interruptible("generate", is_collective)

    def poll(self) -> None:
        """Renew the heartbeat, and give up the work in progress if the run is to stop."""
        self.trainer.poll()

    def log_rollout(
        self, scored: ScoredRollout, packs: Sequence[RolloutPack], experiences: Sequence[Experience]
    ) -> dict[str, float]:
        """Log and keep a rollout; return its metrics."""
        self.last_scored = with_turn_values(replace(scored, rollout=replace(scored.rollout, states=None)), packs)
        metrics = rollout_metrics(scored, packs, self.accelerator) | episode_metrics(scored, self.accelerator)
        self.sampler.require_played(scored.rollout, metrics)
        self._require_scores(metrics["reward/unscored_fraction"])
        metrics |= value_metrics(experiences, *self.without_critic(packs, scored), self.accelerator)
        if self.corrects_sampler:
            metrics |= importance_metrics(packs, self.accelerator)
        if self.is_direct:
            ages = row_ages(scored.rollout, self.state.iteration, self.config)
            bounds = self.config.dis_epsilon_low, self.config.dis_epsilon_high
            metrics |= dis_metrics(packs, scored, ages, bounds, self.accelerator)
        metrics |= staleness_metrics(scored.rollout, self.state.iteration, self.config, self.data_parallel)
        metrics |= self.sampler.metrics()
        metrics["kl/beta"] = self.state.beta
        self.trainer.metric_log.add_rollout(metrics)
        return metrics

    def update_beta(self, metrics: dict[str, float]) -> None:
        """Let the KL controller read `kl/ref` of a rollout."""
        # Until the policy's first step its KL is 0 and says nothing about beta; so too right after value pretraining.
        # Without pretraining the first rollout counts, as in Ziegler et al.
        pretraining = self.config.value_pretraining_rollouts
        if "kl/ref" in metrics and (self.state.iteration > pretraining or not pretraining):
            num_rows = self.config.rollout_batch_size * self.config.num_generations
            self.kl_controller.update(metrics["kl/ref"], num_rows)

    def _require_scores(self, unscored: float) -> None:
        if unscored > self.config.max_unscored_fraction:
            raise RuntimeError(
                f"{unscored:.0%} of the rows of rollout {self.state.iteration} have no finite score, more than"
                f" max_unscored_fraction {self.config.max_unscored_fraction:.0%}; look at the reward functions"
                f" ({', '.join(self.sampler.rewards.names)}) or raise the limit"
            )

    # --- optimizer steps --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the optimizer steps of one pass over the prompts."""
        return self.order.rollouts_per_pass * self.config.steps_per_rollout

    @property
    def passes(self) -> float:
        """Passes over the prompts trained on so far, as a fraction."""
        return (self.state.iteration * self.config.steps_per_rollout + self.state.slot) / len(self)

    def __iter__(self) -> Iterator[dict[str, Minibatch]]:
        per_pass = self.order.rollouts_per_pass
        end = (self.state.iteration // per_pass + 1) * per_pass
        if self._experiences is not None:
            self._use(self.forward.from_checkpoint(self._experiences))
        self.source.start()
        while self.state.iteration < end:
            if self._experiences is None:
                self._use(self.make_rollout())
            minibatch = self._minibatch(self.state.slot)
            self._advance()
            # Code after a yield has not run when a checkpoint is saved: the state is already that of the next step.
            yield {"minibatch": minibatch}

    def _use(self, experiences: list[Experience]) -> None:
        """Train on these; count the tokens of their minibatches, in one copy from the device."""
        self._experiences = experiences
        counts = torch.zeros(self.config.num_minibatches, device=self.accelerator.device)
        for e in experiences:
            counts[e.pack.minibatch] += e.loss_mask.sum()
        self._token_counts = self.data_parallel.sum(counts).tolist()

    def _minibatch(self, slot: int) -> Minibatch:
        # The rows of a minibatch stay together for a rollout, as their packs do.
        number = self.order.minibatch(self.state.iteration, slot)
        experiences = tuple(e for e in self._experiences if e.pack.minibatch == number)
        num_tokens = self._token_counts[number]
        trains_policy = self.state.iteration >= self.config.value_pretraining_rollouts
        return Minibatch(
            experiences=experiences,
            num_tokens=max(1.0, num_tokens),
            trains_policy=trains_policy,
            # If no token trains, momentum alone would still move the weights.
            is_empty_slot=self.state.skips_rest or not num_tokens or not trains_policy,
        )

    def _advance(self) -> None:
        self.state.slot += 1
        if self.state.slot == self.config.steps_per_rollout:
            # beta stays: the last step of the rollout is still to come.
            self.state = StreamState(iteration=self.state.iteration + 1, beta=self.state.beta)
            self._experiences = None

    def skip_rest_of_rollout(self) -> None:
        """Leave the remaining steps of the rollout in use empty; called after the step that exceeded `target_kl`."""
        if self.state.slot:
            self.state.skips_rest = True

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the stream's state, and this process's share of the rollout in use, into a checkpoint."""
        if self.accelerator.is_main_process:
            save_state(folder, self.state, self.settings, self.kl_controller, self.score_moments)
            self.value_fit.save(folder)
        if self.data_parallel.is_first_of_group:
            buffer = self.forward.for_checkpoint(self._experiences or [])
            save_buffer(folder, buffer, self.data_parallel.process_index)
        self.source.save(folder, self._next)

    def saved_numbers(self) -> dict[str, Tensor]:
        """Return by name the numbers that `save` writes and that must be finite, and those of the value head."""
        numbers = {"beta": self.state.beta, **self.score_moments.state_dict()}
        numbers |= {f"the KL controller's {name}": value for name, value in self.kl_controller.state_dict().items()}
        return {**self.value_fit.tensors(), **{name: torch.tensor(value) for name, value in numbers.items()}}

    def load(self, folder: str | Path) -> None:
        """Restore the stream from a checkpoint; ValueError if a file is missing, or does not fit this run."""
        self.state = load_state(folder, self.kl_controller, self.score_moments)
        step, slots = step_of(folder), self.config.steps_per_rollout
        if not 0 <= self.state.slot < slots or step not in (None, self.state.iteration * slots + self.state.slot):
            raise ValueError(
                f"{folder} holds the state of another step ({self.state}); resume from another checkpoint"
            )
        if self.state.iteration or self.state.slot:
            self.value_fit.load(folder)
        self._experiences = None
        if self.state.slot:
            processes = self.data_parallel.process_index, self.data_parallel.num_processes
            counts = equal_counts(self.model, self.accelerator)
            buffer = load_buffer(folder, *processes, needs_equal_counts=counts is not None)
            self._experiences = [to_device(e, self.accelerator.device) for e in buffer]
        self.source.load(folder, self._next)

    @property
    def _next(self) -> int:
        """The first rollout that is not in use."""
        return self.state.iteration + bool(self.state.slot)

    def close(self) -> None:
        """Sample nothing more; called when training ends, for whatever reason."""
        self.source.close()


def require_finite(experiences: Sequence[Experience], iteration: int) -> None:
    """Raise RuntimeError for advantages or returns that would make the loss non-finite, before any weight changes."""
    pairs = [(tensor, e.loss_mask) for e in experiences for tensor in (e.advantages, e.returns)]
    if not torch.stack([tensor.masked_fill(~mask, 0).square().isfinite().all() for tensor, mask in pairs]).all():
        raise RuntimeError(
            f"advantages or returns of rollout {iteration} are not finite, or too large for float32; look at scores,"
            " KL and values: set score_clip or normalize_scores, or correct the reward functions. The weights are"
            " those before it"
        )
