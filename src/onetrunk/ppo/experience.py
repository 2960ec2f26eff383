"""ExperienceStream, the train dataloader of PPOTrainer: prompts, rollouts, rewards, advantages, minibatches.

One item is one optimizer step. The stream samples a new rollout when the previous one is used up, from the weights
that the last update left, so it must never be read ahead. With schedule one_step or async, rollouts are sampled in
threads while the trainer updates on earlier ones (async_rollouts.py); everything else happens when a rollout is used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from onetrunk.checkpoints.stopping import StopSignals
from onetrunk.data.sharded import ShardedRows
from onetrunk.models.frozen_states import TrunkCache
from onetrunk.models.trunk import PackOutput
from onetrunk.ops.advantages import AdaptiveKLController, KLController, gae, length_adaptive_lam, token_rewards
from onetrunk.ops.masking import masked_whiten
from onetrunk.ops.packing import PackLimits
from onetrunk.parallel.groups import DataParallel
from onetrunk.parallel.sharding import is_divided, is_sharded
from onetrunk.ppo.async_rollouts import RolloutsAhead, load_rows, rollouts_since, save_rows
from onetrunk.ppo.checks import plan_batches
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.forward import Background, PackScorer
from onetrunk.ppo.metrics import MetricLog, global_moments, importance_metrics, rollout_metrics
from onetrunk.ppo.rollout import (
    PromptBatch,
    PromptOrder,
    RolloutPack,
    Sampler,
    ScoredRollout,
    equal_counts,
    prompt_batch,
    rollout_packs,
    with_importance,
)
from onetrunk.ppo.stream_state import (
    StreamState,
    load_buffer,
    load_state,
    num_writers,
    run_settings,
    save_buffer,
    save_state,
)
from onetrunk.ppo.watching import Watch
from onetrunk.rewards.shaping import RunningMoments, length_penalty, missing_eos_penalty
from onetrunk.rollouts.colocate import ColocatedBackend
from onetrunk.rollouts.pipelined import PipelinedBackend
from onetrunk.types import Experience, Minibatch, Pack, Rollout, to_device
from onetrunk.utils.randomness import ROLLOUT_STREAM, seed_generators


class ExperienceStream:
    """Yields the minibatches of one pass over the prompts each time it is iterated.

    Override `prompts` to change where prompts come from, `shape_scores` to change how scores become numbers for PPO,
    or `advantages` to change how they are assigned to tokens. For example, advantages without a value function:

        class Reinforce(ExperienceStream):
            def advantages(self, pack, output, rewards, stopped):
                returns = rewards.flip(1).cumsum(1).flip(1) * pack.completion_mask
                return returns, returns

    Args:
        dataset: rows with `prompt` and `prompt_ids`; the other columns go to the reward functions.
        sampler, config, accelerator: of the run.
        model: returns the TrunkModel; a function, because the trainer wraps the model late.
        metrics: receives the metrics of each rollout.
        trunk_cache: keeps the trunk states for the epochs of a rollout; None: every forward computes them.
        reward_extras: returns further keywords for the reward functions; called once per rollout.
        stop_signals: interrupt a rollout when the run is asked to stop.
        watch: records the phases of a rollout.
        num_rollouts: of the whole run, for schedules that sample ahead; None: there is no last one.
    """

    def __init__(
        self,
        dataset: Dataset | ShardedRows,
        sampler: Sampler,
        model: Callable[[], nn.Module],
        config: PPOConfig,
        accelerator: Accelerator,
        metrics: MetricLog,
        trunk_cache: TrunkCache | None = None,
        *,
        reward_extras: Callable[[], dict[str, Any]] = dict,
        stop_signals: StopSignals | None = None,
        watch: Watch | None = None,
        num_rollouts: int | None = None,
    ):
        self.dataset = dataset
        self.sampler = sampler
        self.model = model
        self.config = config
        self.accelerator = accelerator
        self.metrics = metrics
        # Rows are dealt to these; a group of tensor parallelism counts as one.
        self.data_parallel = DataParallel(accelerator)
        self.is_divided = is_divided(model())
        # Whether processes must run each forward of the model together.
        self.is_collective = self.is_divided or is_sharded(model())
        self.scorer = PackScorer(model, accelerator, config.temperature, trunk_cache)
        self.plan = plan_batches(config, accelerator.num_processes)
        self.order = PromptOrder.from_config(config, dataset)
        self.kl_controller = (
            KLController(config.beta)
            if config.kl_target is None
            else AdaptiveKLController(config.beta, config.kl_target, config.kl_horizon)
        )
        corrects = config.vllm_importance_sampling_correction
        # Whether samples are weighted: a sampler with weights of its own rounds differently, or has older ones; and a
        # truncated one draws from another distribution.
        has_other_weights = (
            sampler.is_versioned or isinstance(sampler.backend, ColocatedBackend) or config.pipeline_ahead
        )
        self.corrects_sampler = has_other_weights or config.truncates if corrects is None else corrects
        self.score_moments = RunningMoments()
        self.settings = run_settings(config, dataset, self.data_parallel, model(), sampler.rewards)
        self.state = StreamState()
        self.last_scored: ScoredRollout | None = None
        self.reward_extras = reward_extras
        self.stop_signals = StopSignals() if stop_signals is None else stop_signals
        self.watch = Watch(config, accelerator) if watch is None else watch
        self.ahead: RolloutsAhead | None = None
        self.num_rollouts = most = sys.maxsize if num_rollouts is None else num_rollouts
        if config.schedule != "sync":
            self.ahead = RolloutsAhead(config, sampler, model, self.prompts, self.plan.rows_per_rank, most)
        self._experiences: list[Experience] | None = None
        self._before: tuple[StreamState, list[Experience] | None] | None = None

    # --- one rollout ------------------------------------------------------------------------------------------------

    def make_rollout(self) -> list[Experience]:
        """Sample, score and shape one rollout; return its packs in the order in which they were formed.

        Raises:
            StopAsked: the run is to stop; nothing has changed, and the same rollout can be made again.
        """
        iteration = self.state.iteration
        self.watch.begin_rollout(iteration)
        start = time.perf_counter()
        batch, rollout = self._sampled(iteration)
        sampled = time.perf_counter()

        # What reward functions draw from the global generators depends on the rollout alone. Seeded just before them,
        # because threads of other libraries draw from Python's too: retries of an upload, a tracker.
        seed_generators(self.config.seed, ROLLOUT_STREAM, iteration, self.data_parallel.process_index)
        # The model runs over the packs in the background: reward functions may need the main thread. Collective
        # forwards have a certain order in the main thread only, and a trace sees only that one.
        formed = self._packs(rollout)
        starts_now = self.sampler.may_wait and not (self.is_collective or self.watch.trace.is_recording)
        model_run = Background(lambda: self._run_model(formed), self.accelerator.device, starts_now)
        with self.stop_signals.giving_up(self.accelerator, alone=True), self.watch.phase("score"):
            scored = self.sampler.score(batch, rollout, model_run.result, **self.reward_extras())
            packs = model_run.result()

        experiences = self.shape(scored, packs)
        self.last_scored = replace(scored, rollout=replace(rollout, states=None))
        self.metrics.add_seconds("generate", sampled - start)
        self.metrics.add_seconds("score", time.perf_counter() - sampled)
        if self.ahead is not None:
            self.ahead.finish(iteration)
        return experiences

    def _sampled(self, iteration: int) -> tuple[PromptBatch, Rollout]:
        """Return prompts and completions of a rollout: sampled now, or taken from those that were sampled ahead."""
        if self.ahead is not None:
            batch = self.ahead.begin(iteration)
            with self.stop_signals.giving_up(self.accelerator), self.watch.phase("generate"):
                rollout = self.ahead.take(iteration, self._poll_waiting)
            return batch, rollout
        batch, version = self.prompts(iteration), iteration * self.config.slots_per_rollout
        self.sampler.backend.sync(self.model(), version)
        alone = self.sampler.samples_together
        with self.stop_signals.giving_up(self.accelerator, alone=alone), self.watch.phase("generate"):
            keywords: dict[str, Any] = {"trains": True, "captures_last": self.reads_next_values}
            if self.config.pipeline_ahead and iteration + 1 < self.num_rollouts:
                keywords["ahead"] = self.prompts(iteration + 1)
            rollout = self.sampler.generate(batch, version=version, **keywords)
        return batch, rollout

    def shape(self, scored: ScoredRollout, packs: list[RolloutPack]) -> list[Experience]:
        """Return the experience of a scored rollout, one per pack: rewards, then advantages and returns."""
        scores, stopped = self.shape_scores(scored), torch.tensor(scored.rollout.stopped)
        packs = self._with_rewards(packs, scores, stopped)
        packs = self._with_importance(packs, scored.rollout)
        experiences = [self._experience(pack, stopped) for pack in packs]
        require_finite(experiences, self.state.iteration)
        metrics = rollout_metrics(scored, packs, self.accelerator)
        if self.corrects_sampler:
            metrics |= importance_metrics(packs, self.accelerator)
        if self.ahead is not None or self.config.pipeline_ahead:
            versions = scored.rollout.policy_versions or [scored.rollout.policy_version] * len(scored.rollout)
            staleness = rollouts_since(versions, self.state.iteration, self.config).to(self.accelerator.device)
            staleness = self.data_parallel.gather(staleness)
            metrics |= {
                "sampling/staleness": staleness.mean().item(),
                "sampling/staleness_max": staleness.max().item(),
            }
        if isinstance(self.sampler.backend, PipelinedBackend):
            stages = enumerate(self.sampler.backend.stage_gib)
            metrics |= {f"memory/stage_{stage}_gib": gib for stage, gib in stages}
        self._log_rollout(metrics, scores.isfinite())
        if not self.config.whiten_advantages:
            return experiences
        moments = global_moments([(e.advantages, e.loss_mask) for e in experiences], self.accelerator)
        return [replace(e, advantages=masked_whiten(e.advantages, e.loss_mask, moments=moments)) for e in experiences]

    def prompts(self, iteration: int) -> PromptBatch:
        """Return this process's prompts of a rollout, one per completion."""
        completions, _ = self._deal(iteration)
        return prompt_batch(self.dataset, *self.order.rows(iteration, completions))

    def shape_scores(self, scored: ScoredRollout) -> Tensor:
        """Return the scores [n] that PPO maximises: after penalties, normalisation and clipping. NaN: no score."""
        config, scores = self.config, scored.scores.total
        if config.missing_eos_penalty is not None:
            scores = missing_eos_penalty(scores, torch.tensor(scored.rollout.stopped), config.missing_eos_penalty)
        if config.length_penalty:
            scores = length_penalty(scores, scored.lengths, config.max_completion_length, config.length_penalty)
        if config.normalize_scores:
            moments = global_moments([(scores.nan_to_num(), scores.isfinite())], self.accelerator)
            self.score_moments.update(*(float(m) for m in moments))
            scores = self.score_moments.normalize(scores)
        return scores if config.score_clip is None else scores.clamp(-config.score_clip, config.score_clip)

    def advantages(self, pack: Pack, output: PackOutput, rewards: Tensor, stopped: Tensor) -> tuple[Tensor, Tensor]:
        """Return (advantages, returns) of a pack, both [R, C], by generalised advantage estimation.

        Args:
            pack: the rows.
            output: logprobs, values and next_values at rollout time.
            rewards: [R, C], KL and score included.
            stopped: [R] bool, False if the completion was cut off at max_completion_length.
        """
        config = self.config
        bootstrap = None
        if config.truncated_completions == "bootstrap":
            bootstrap = torch.where(stopped, torch.zeros_like(output.next_values), output.next_values)
        lam_policy: float | Tensor = config.lam if config.lam_policy is None else config.lam_policy
        if config.length_adaptive_lam is not None:
            lam_policy = length_adaptive_lam(pack.completion_mask.sum(1), config.length_adaptive_lam)
        lam_value = config.lam if config.lam_value is None else config.lam_value
        inputs = (rewards, output.values, pack.completion_mask, config.gamma)
        advantages, returns = gae(*inputs, lam_policy, bootstrap)
        if isinstance(lam_policy, Tensor) or lam_policy != lam_value:
            _, returns = gae(*inputs, lam_value, bootstrap)
        return advantages, returns

    @property
    def reads_next_values(self) -> bool:
        """Whether an override may read `next_values` (the value after a row's last token), which GAE does not need."""
        return any(getattr(type(self), n) is not getattr(ExperienceStream, n) for n in ("advantages", "shape"))

    def take_scored(self) -> ScoredRollout | None:
        """Return the last rollout if it has not been taken yet, else None."""
        scored, self.last_scored = self.last_scored, None
        return scored

    # --- the parts of a rollout -------------------------------------------------------------------------------------

    def _deal(self, iteration: int) -> tuple[list[int], list[list[int]]]:
        return self.order.deal(iteration, self.data_parallel.process_index, self.data_parallel.num_processes)

    def _packs(self, rollout: Rollout) -> list[RolloutPack]:
        _, minibatches = self._deal(self.state.iteration)
        agree, pad_id = equal_counts(self.model(), self.accelerator), self.sampler.params.pad_token_id
        return rollout_packs(rollout, minibatches, self._pack_limits, pad_id, self.accelerator.device, agree)

    @property
    def _pack_limits(self) -> PackLimits:
        return PackLimits(self.plan.rows_per_pack, self.config.microbatch_tokens, self.config.padding_free)

    @property
    def _roles(self) -> tuple[str, ...]:
        """The roles that score a rollout."""
        return self.sampler.roles("policy", "value", *(("reference",) if self.config.beta else ()))

    def _run_model(self, packs: Sequence[RolloutPack]) -> list[RolloutPack]:
        try:
            return self.scorer.run(packs, self._roles, self._poll)
        except FloatingPointError as error:
            raise RuntimeError(
                f"logprobs or values of rollout {self.state.iteration} are not finite: the policy has diverged; lower"
                " learning_rate or max_grad_norm and resume from an earlier checkpoint"
            ) from error

    def _poll_waiting(self) -> None:
        self.watch.heartbeat.beat()
        self.stop_signals.poll()

    def _poll(self) -> None:
        self.watch.heartbeat.beat()
        # A process that gives up alone would leave the others waiting in a forward of a sharded or divided base.
        if not self.is_collective:
            self.stop_signals.poll()

    def _with_rewards(self, packs: Sequence[RolloutPack], scores: Tensor, stopped: Tensor) -> list[RolloutPack]:
        """Return the packs with loss masks and token rewards: the score at the last token, less beta times the KL."""
        config, device = self.config, self.accelerator.device
        trains = scores.isfinite()
        if config.truncated_completions == "mask":
            trains &= stopped
        beta = 0.0 if config.kl_in_loss else self.kl_controller.value
        rewarded = []
        for item in packs:
            mask, output = item.pack.completion_mask, item.output
            row_scores = scores.nan_to_num()[item.rows].to(device)
            rewards = token_rewards(row_scores, output.logprobs, output.ref_logprobs, mask, beta, config.kl_estimator)
            loss_mask = mask & trains[item.rows].to(device)[:, None]
            rewarded.append(replace(item, loss_mask=loss_mask, rewards=rewards))
        if not config.whiten_rewards:
            return rewarded
        moments = global_moments([(item.rewards, item.loss_mask) for item in rewarded], self.accelerator)
        return [
            replace(p, rewards=masked_whiten(p.rewards, p.pack.completion_mask, shift_mean=False, moments=moments))
            for p in rewarded
        ]

    def _with_importance(self, packs: Sequence[RolloutPack], rollout: Rollout) -> list[RolloutPack]:
        """Return the packs with importance weights of their tokens, if the sampler is corrected."""
        if not self.corrects_sampler:
            return list(packs)
        prefix = "vllm_importance_sampling"
        bounds = {name: getattr(self.config, f"{prefix}_{name}") for name in ("mode", "clip_min", "clip_max")}
        return [with_importance(item, rollout, **bounds) for item in packs]

    def _experience(self, item: RolloutPack, stopped: Tensor) -> Experience:
        output, row_stopped = item.output, stopped[item.rows].to(self.accelerator.device)
        advantages, returns = self.advantages(item.pack, output, item.rewards, row_stopped)
        return Experience(
            pack=item.pack,
            loss_mask=item.loss_mask,
            old_logprobs=output.logprobs,
            old_values=output.values,
            advantages=advantages,
            returns=returns,
            ref_logprobs=output.ref_logprobs,
            weights=None if item.importance is None else item.importance.weights,
            states=output.states,
        )

    def _log_rollout(self, metrics: dict[str, float], has_score: Tensor) -> None:
        """Log the metrics of a rollout and update the KL coefficient; RuntimeError if too few rows have a score."""
        unscored = 1 - self.accelerator.gather(has_score.float().to(self.accelerator.device)).mean().item()
        if unscored > self.config.max_unscored_fraction:
            raise RuntimeError(
                f"{unscored:.0%} of the rows of rollout {self.state.iteration} have no finite score, more than"
                f" max_unscored_fraction {self.config.max_unscored_fraction:.0%}; look at the reward functions"
                f" ({', '.join(self.sampler.rewards.names)}) or raise the limit"
            )
        self.state.beta = self.kl_controller.value
        metrics |= {"reward/unscored_fraction": unscored, "kl/beta": self.state.beta}
        # Until the policy's first step its KL is 0 and says nothing about beta; so too right after value pretraining.
        # Without pretraining the first rollout counts, as in Ziegler et al.
        pretraining = self.config.value_pretraining_rollouts
        if "kl/ref" in metrics and (self.state.iteration > pretraining or not pretraining):
            num_rows = self.config.rollout_batch_size * self.config.num_generations
            self.kl_controller.update(metrics["kl/ref"], num_rows)
        self.metrics.add_rollout(metrics)

    # --- optimizer steps --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the optimizer steps of one pass over the prompts."""
        return self.order.rollouts_per_pass * self.config.slots_per_rollout

    @property
    def passes(self) -> float:
        """Passes over the prompts trained on so far, as a fraction."""
        return (self.state.iteration * self.config.slots_per_rollout + self.state.slot) / len(self)

    def __iter__(self) -> Iterator[dict[str, Minibatch]]:
        per_pass = self.order.rollouts_per_pass
        end = (self.state.iteration // per_pass + 1) * per_pass
        if self._experiences is not None:
            self._experiences = self.scorer.from_checkpoint(self._experiences)
        if self.ahead is not None:
            self.ahead.resume()
        while self.state.iteration < end:
            if self._experiences is None:
                self._experiences = self.make_rollout()
            minibatch = self._minibatch(self.state.slot)
            self._advance()
            # Code after a yield has not run when a checkpoint is saved: the state is already that of the next step.
            yield {"minibatch": minibatch}

    def _minibatch(self, slot: int) -> Minibatch:
        # The rows of a minibatch stay together for a rollout, as their packs do.
        number = self.order.minibatch(self.state.iteration, slot)
        experiences = tuple(e for e in self._experiences if e.pack.minibatch == number)
        local_tokens = torch.stack([e.loss_mask.sum() for e in experiences]).sum().float()
        num_tokens = self.data_parallel.sum(local_tokens).item()
        return Minibatch(
            experiences=experiences,
            num_tokens=max(1.0, num_tokens),
            trains_policy=self.state.iteration >= self.config.value_pretraining_rollouts,
            # If no token trains, momentum alone would still move the weights.
            is_empty_slot=self.state.skips_rest or not num_tokens,
        )

    def _advance(self) -> None:
        self._before = (replace(self.state), self._experiences)
        self.state.slot += 1
        if self.state.slot == self.config.slots_per_rollout:
            # beta stays: the last step of the rollout is still to come.
            self.state = StreamState(iteration=self.state.iteration + 1, beta=self.state.beta)
            self._experiences = None

    @property
    def can_retreat(self) -> bool:
        """Whether the current step can be given up: it is not the first of its rollout."""
        return self._before is not None and self._before[0].slot > 0

    def retreat(self) -> None:
        """Give up the current step; it is yielded again."""
        self.state, self._experiences = self._before

    def skip_rest_of_rollout(self) -> None:
        """Leave the remaining steps of the rollout in use empty; called after the step that exceeded `target_kl`."""
        if self.state.slot:
            self.state.skips_rest = True

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the stream's state, and this process's share of the rollout in use, into a checkpoint."""
        if self.accelerator.is_main_process:
            save_state(folder, self.state, self.settings, self.kl_controller, self.score_moments)
        if self.data_parallel.is_first_of_group:
            buffer = self.scorer.for_checkpoint(self._experiences or [])
            save_buffer(folder, buffer, self.data_parallel.process_index)
        if self.ahead is not None:
            self.ahead.save(folder, self.data_parallel.process_index, self.accelerator.is_main_process, self._next)
        if self.config.pipeline_ahead and self.data_parallel.is_first_of_group:
            # Not those of a rollout that was given up: the resumed run makes it again, and starts them there.
            rows = {key: row for key, row in self.sampler.backend.started().items() if key[1] == self._next}
            save_rows(folder, self.data_parallel.process_index, rows)

    def load(self, folder: str | Path) -> None:
        """Restore the stream from a checkpoint; ValueError if a file is missing, or does not fit this run."""
        allowed = self.config.allow_config_change
        self.state = load_state(folder, self.settings, self.kl_controller, self.score_moments, allowed)
        self._experiences = None
        if self.state.slot:
            buffer = load_buffer(folder, self.data_parallel.process_index, self.data_parallel.num_processes)
            self._experiences = [to_device(e, self.accelerator.device) for e in buffer]
        if self.ahead is not None:
            self.ahead.load(folder, num_writers(folder), self._next)
        if self.config.pipeline_ahead:
            for rank in range(num_writers(folder)):
                self.sampler.backend.remember(load_rows(folder, rank))

    @property
    def _next(self) -> int:
        """The first rollout that is not in use."""
        return self.state.iteration + bool(self.state.slot)

    def close(self) -> None:
        """Sample nothing more; called when training ends, for whatever reason."""
        if self.ahead is not None:
            self.ahead.close()


def require_finite(experiences: Sequence[Experience], iteration: int) -> None:
    """Raise RuntimeError for advantages or returns that would make the loss non-finite, before any weight changes."""
    pairs = [(tensor, e.loss_mask) for e in experiences for tensor in (e.advantages, e.returns)]
    if not torch.stack([tensor.masked_fill(~mask, 0).square().isfinite().all() for tensor, mask in pairs]).all():
        raise RuntimeError(
            f"advantages or returns of rollout {iteration} are not finite, or too large for float32; look at scores,"
            " KL and values: set score_clip or normalize_scores, or correct the reward functions. The weights are"
            " those before it"
        )
