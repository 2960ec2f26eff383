"""ExperienceStream: prompts -> rollouts -> rewards -> advantages -> minibatches, the train dataloader of PPOTrainer.

One item is one optimizer step. The stream samples when its buffer is used up, so a rollout always comes from the
weights that the last update left; it must never be read ahead. Knows the sampler, the model's roles and the batch
arithmetic; no optimizer and no loss.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from onetrunk.checkpoints.stopping import StopSignals
from onetrunk.models.cache import TrunkCache
from onetrunk.models.speedups.memory import free_memory, is_out_of_memory
from onetrunk.models.trunk import PackOutput
from onetrunk.ops.advantages import gae, length_adaptive_lam, token_rewards
from onetrunk.ops.masking import masked_whiten
from onetrunk.ops.packing import deal_rows
from onetrunk.ppo.checks import plan_batches
from onetrunk.ppo.config import PPOConfig
from onetrunk.ppo.memory import PackSize, join_rows
from onetrunk.ppo.metrics import MetricLog, global_moments, rollout_figures
from onetrunk.ppo.sampling import (
    PromptBatch,
    PromptOrder,
    Sampler,
    ScoredRollout,
    pack_states,
    prompt_batch,
    rollout_packs,
)
from onetrunk.ppo.state import (
    StreamState,
    kl_controller,
    load_buffer,
    load_state,
    run_settings,
    save_buffer,
    save_state,
)
from onetrunk.rewards.shaping import RunningMoments, length_penalty, missing_eos_penalty
from onetrunk.types import Experience, Minibatch, Pack, to_device
from onetrunk.utils.randomness import DEAL_STREAM, MINIBATCH_STREAM, ROLLOUT_STREAM, derived_seed, seed_generators

T = TypeVar("T")

LONGEST_WAIT_S = 60.0


class Background(Generic[T]):
    """Runs `function` beside the main thread, which goes on with what only it may do (user code, signals).

    An error in the main thread is told at once; the process then ends with the thread, or LONGEST_WAIT_S later.

    Args:
        function: takes nothing. Grad mode and autocast are a thread's own: it sets what it needs.
        device: the accelerator it works on, which is a thread's own too.
        starts_now: False to run it in the main thread, at `result`.
    """

    def __init__(self, function: Callable[[], T], device: torch.device, starts_now: bool = True):
        self._function = function
        self._device = device
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if starts_now:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
            # Python tears a daemon thread down inside torch, which aborts: exit code 134, whatever the run's was.
            atexit.register(self._thread.join, LONGEST_WAIT_S)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._values.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Return what the function returned, or raise what it raised; it has run once, however often this is asked."""
        if self._thread is None and not self._values:
            self._values.append(self._function())
        elif self._thread is not None:
            self._thread.join()
            atexit.unregister(self._thread.join)
        if self._error is not None:
            raise self._error
        return self._values[0]


def shaped_rewards(
    packs: Sequence[Pack],
    outputs: Sequence[PackOutput],
    scores: Sequence[Tensor],
    masks: Sequence[Tensor],
    beta: float,
    config: PPOConfig,
    accelerator: Accelerator,
) -> list[Tensor]:
    """Return the token rewards [R, C] of every pack: the score at the last token, less beta times the KL of each.

    Args:
        packs: the rows.
        outputs: logprobs under policy and reference.
        scores: [R] of every pack, no NaN.
        masks: [R, C] bool of every pack, the tokens that count in the moments.
        beta: KL coefficient; 0 where the KL is in the loss, or not used.
        config: kl_estimator and whiten_rewards.
        accelerator: gathers the moments.
    """
    rewards = [
        token_rewards(s, o.logprobs, o.ref_logprobs, p.completion_mask, beta, config.kl_estimator)
        for p, o, s in zip(packs, outputs, scores, strict=True)
    ]
    if not config.whiten_rewards:
        return rewards
    moments = global_moments(list(zip(rewards, masks, strict=True)), accelerator)
    return [
        masked_whiten(r, p.completion_mask, shift_mean=False, moments=moments)
        for r, p in zip(rewards, packs, strict=True)
    ]


def require_finite(shaped: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor], iteration: int) -> None:
    """Refuse advantages and returns of which variance or loss would not be finite; no weight has changed then.

    Args:
        shaped: advantages and returns of each pack, [R, C].
        masks: [R, C] bool, the tokens that train.
        iteration: number of the rollout.

    Raises:
        RuntimeError: says what to set.
    """
    pairs = [(figure, mask) for pair, mask in zip(shaped, masks, strict=True) for figure in pair]
    if not torch.stack([figure.masked_fill(~mask, 0).square().isfinite().all() for figure, mask in pairs]).all():
        raise RuntimeError(
            f"advantages or returns of rollout {iteration} are not finite, or too large for float32; look at scores,"
            " KL and values: set score_clip or normalize_scores, or mend the reward functions. The weights are those"
            " before it"
        )


def require_scored(unscored: float, config: PPOConfig, iteration: int, names: Sequence[str]) -> None:
    """Refuse a rollout of which too few rows have a score.

    Args:
        unscored: share of the rows without a finite one.
        config: max_unscored_fraction.
        iteration: number of the rollout.
        names: of the reward functions.

    Raises:
        RuntimeError: says what to look at.
    """
    if unscored > config.max_unscored_fraction:
        raise RuntimeError(
            f"{unscored:.0%} of the rows of rollout {iteration} have no finite score, more than max_unscored_fraction"
            f" {config.max_unscored_fraction:.0%}; look at the reward functions ({', '.join(names)}) or raise the"
            " limit"
        )


def whitened(advantages: Sequence[Tensor], masks: Sequence[Tensor], accelerator: Accelerator) -> list[Tensor]:
    """Return the advantages [R, C] of every pack with zero mean and unit variance over the tokens of all processes."""
    moments = global_moments(list(zip(advantages, masks, strict=True)), accelerator)
    return [masked_whiten(a, m, moments=moments) for a, m in zip(advantages, masks, strict=True)]


class PackScorer:
    """Runs the roles over packs in evaluation mode; with a cache, the layers below the cut run once a pack.

    Args:
        model: returns the TrunkModel, wrapped or not.
        accelerator: unwraps it.
        temperature: of logprobs.
        cache: where the trunk states go; None: nowhere, every forward runs the layers below the cut again.
    """

    def __init__(
        self, model: Callable[[], nn.Module], accelerator: Accelerator, temperature: float, cache: TrunkCache | None
    ):
        self.model = model
        self.accelerator = accelerator
        self.temperature = temperature
        self.cache = cache
        self.pack_size = PackSize("the scoring")
        self._were_given = False

    @torch.no_grad()
    def score(
        self,
        packs: Sequence[Pack],
        roles: Sequence[str],
        given: Sequence[Tensor] | None = None,
        poll: Callable[[], None] = lambda: None,
    ) -> list[PackOutput]:
        """Return the outputs of `roles` over the packs, with `states` where there is a cache.

        Args:
            packs: the rows.
            roles: as TrunkModel takes them.
            given: states of each pack that are there already; None: the layers below the cut make them.
            poll: called before each pack; may raise to give up.

        Raises:
            FloatingPointError: a logprob or a value is not finite.
        """
        model = self.model()
        model.eval()
        self._were_given = given is not None
        asked = tuple(roles) if self.cache is None or given is not None else (*roles, "trunk")
        outputs = []
        for i, pack in enumerate(packs):
            poll()
            states = None if given is None else given[i]
            output = self._answer(pack, asked, states)
            if self.cache is not None:
                states = self._in_own_dtype(output.states) if given is None else states
                output = output._replace(states=self.cache.keep(states))
            outputs.append(output)
        # A score that is not finite leaves out its row alone.
        apart = ("states", "scores")
        figures = [t for o in outputs for name, t in o._asdict().items() if t is not None and name not in apart]
        if not torch.stack([torch.isfinite(t).all() for t in figures]).all():
            raise FloatingPointError("logprobs or values are not finite")
        return outputs

    def _answer(self, pack: Pack, roles: Sequence[str], states: Tensor | None) -> PackOutput:
        """Return what the model says of a pack; where memory runs out, of its parts."""
        while True:
            try:
                parts = self.pack_size.parts(pack)
                shares = [None] * len(parts) if states is None else states.split([p.num_rows for p in parts])
                settings = {"roles": roles, "temperature": self.temperature}
                answers = [self.model()(pack=p, states=s, **settings) for p, s in zip(parts, shares, strict=True)]
                return join_rows(answers)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            answers = []
            free_memory()
            self.pack_size.shrink([pack], reason)

    def for_checkpoint(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the experiences as a checkpoint keeps them: without states that the same forwards make again.

        Those that sampling made would come back with another rounding, so they stay.
        """
        return list(experiences) if self._were_given else [replace(e, states=None) for e in experiences]

    @torch.no_grad()
    def from_checkpoint(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the experiences out of a checkpoint with their states, read or made anew."""
        if self.cache is None:
            return list(experiences)
        self._were_given = any(e.states is not None for e in experiences)
        model = self.model()
        model.eval()
        restored = []
        for experience in experiences:
            states = experience.states
            if states is None:
                states = self._in_own_dtype(model(pack=experience.pack, roles=("trunk",)).states)
            restored.append(replace(experience, states=self.cache.keep(states)))
        return restored

    def _in_own_dtype(self, states: Tensor) -> Tensor:
        # Outside of its forward accelerate hands out float32; the trunk's own type holds every bit of it.
        return states.to(self.accelerator.unwrap_model(self.model()).states_dtype)


class ExperienceStream:
    """Yields the minibatches of one pass over the prompts each time it is iterated.

    Override `prompts`, `shape_scores` or `advantages` to change where prompts come from, how scores become numbers for
    PPO, or how they are dealt to tokens. For example, advantages without a value function:

        class Reinforce(ExperienceStream):
            def advantages(self, pack, output, rewards, stopped):
                returns = rewards.flip(1).cumsum(1).flip(1) * pack.completion_mask
                return returns, returns

    Args:
        dataset: rows with `prompt` and `prompt_ids`; the other columns go to the reward functions.
        sampler: backend, reward functions, tokenizer and sampling parameters.
        model: returns the TrunkModel; called when needed, for the trainer wraps it late.
        config: the settings.
        accelerator: processes and device.
        metrics: receives the figures of each rollout.
        trunk_cache: where the states at the cut stay for a rollout's epochs; None: they are made in every forward.
        reward_extras: returns further keywords for the reward functions; called once per rollout.
        stop_signals: interrupt a rollout when the run is asked to stop.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        model: Callable[[], nn.Module],
        config: PPOConfig,
        accelerator: Accelerator,
        metrics: MetricLog,
        trunk_cache: TrunkCache | None = None,
        *,
        reward_extras: Callable[[], dict[str, Any]] = dict,
        stop_signals: StopSignals | None = None,
    ):
        self.dataset = dataset
        self.sampler = sampler
        self.model = model
        self.config = config
        self.accelerator = accelerator
        self.metrics = metrics
        self.scorer = PackScorer(model, accelerator, config.temperature, trunk_cache)
        self.plan = plan_batches(config, accelerator.num_processes)
        data_seed = config.seed if config.data_seed is None else config.data_seed
        self.order = PromptOrder(
            len(dataset),
            config.rollout_batch_size,
            config.num_generations,
            order_seed=data_seed,
            seed=config.seed,
            shuffle=config.shuffle_dataset,
        )
        self.kl_controller = kl_controller(config.beta, config.kl_target, config.kl_horizon)
        self.score_moments = RunningMoments()
        if any(getattr(type(self), n) is not getattr(ExperienceStream, n) for n in ("advantages", "shape")):
            # They may read next_values, the value of the state that a row's last token leaves.
            sampler.captures_last = True
        self.settings = run_settings(config, dataset, accelerator.num_processes, model(), sampler.rewards)
        self.state = StreamState()
        self.last_scored: ScoredRollout | None = None
        self.reward_extras = reward_extras
        self.stop_signals = StopSignals() if stop_signals is None else stop_signals
        self._experiences: list[Experience] | None = None
        self._before: tuple[StreamState, list[Experience] | None] | None = None

    def __len__(self) -> int:
        """Return the optimizer steps of one pass over the prompts."""
        return self.order.rollouts_per_pass * self.config.slots_per_rollout

    @property
    def passes(self) -> float:
        """Return how many passes over the prompts have been trained on, as a fraction."""
        return (self.state.iteration * self.config.slots_per_rollout + self.state.slot) / len(self)

    def __iter__(self) -> Iterator[dict[str, Minibatch]]:
        per_pass = self.order.rollouts_per_pass
        end = (self.state.iteration // per_pass + 1) * per_pass
        if self._experiences is not None:
            self._experiences = self.scorer.from_checkpoint(self._experiences)
        while self.state.iteration < end:
            if self._experiences is None:
                self._experiences = self.make_rollout()
            minibatch = self._minibatch(self.state.slot)
            self._advance()
            # Code behind a yield has not run when a checkpoint is taken: the state is already that of the next step.
            yield {"minibatch": minibatch}

    def _advance(self) -> None:
        self._before = (replace(self.state), self._experiences)
        self.state.slot += 1
        if self.state.slot == self.config.slots_per_rollout:
            # beta stays: the last step of the rollout is still to come.
            self.state = StreamState(iteration=self.state.iteration + 1, beta=self.state.beta)
            self._experiences = None

    @property
    def can_retreat(self) -> bool:
        """Whether the step in hand is not the first of its rollout, and can be given up."""
        return self._before is not None and self._before[0].slot > 0

    def retreat(self) -> None:
        """Go back before the step in hand, which is given up; it is yielded again."""
        self.state, self._experiences = self._before

    def skip_rest_of_rollout(self) -> None:
        """Leave the remaining steps of the rollout in use empty; called after the step that exceeded `target_kl`."""
        if self.state.slot:
            self.state.skips_rest = True

    # --- prompts, rollout, scores -----------------------------------------------------------------------------------

    def prompts(self, iteration: int) -> PromptBatch:
        """Return this process's prompts of a rollout, one per completion."""
        completions, _ = self._deal(iteration)
        return prompt_batch(self.dataset, *self.order.rows(iteration, completions))

    def make_rollout(self) -> list[Experience]:
        """Sample, score and shape one rollout; return its packs in the order that they were formed.

        Raises:
            StopAsked: the run is to stop; nothing has changed, and the same rollout can be made again.
        """
        start = time.perf_counter()
        # What reward functions draw from the global generators depends on the rollout alone too.
        seed_generators(self.config.seed, ROLLOUT_STREAM, self.state.iteration, self.accelerator.process_index)
        batch = self.prompts(self.state.iteration)
        self.sampler.backend.sync(self.model(), self.state.iteration * self.config.slots_per_rollout)
        with self.stop_signals.giving_up(self.accelerator):
            rollout = self.sampler.generate(batch, trains=True)
        sampled = time.perf_counter()
        device, pad_id = self.accelerator.device, self.sampler.params.pad_token_id
        _, minibatches = self._deal(self.state.iteration)
        packs, rows = rollout_packs(
            rollout, minibatches, self.plan.rows_per_pack, self.config.microbatch_tokens, pad_id, device
        )
        states = pack_states(rollout, packs, rows)
        outputs = Background(lambda: self._model_outputs(packs, states), device, self.sampler.may_wait)
        with self.stop_signals.giving_up(self.accelerator, alone=True):
            scored = self.sampler.score(batch, rollout, outputs.result, rows, **self.reward_extras())
            outputs.result()
        experiences = self.shape(scored, packs, rows, outputs.result())
        self.last_scored = replace(scored, rollout=replace(rollout, states=None))
        self.metrics.add_seconds("generate", sampled - start)
        self.metrics.add_seconds("score", time.perf_counter() - sampled)
        return experiences

    def shape_scores(self, scored: ScoredRollout) -> Tensor:
        """Return the scores [n] that PPO maximises: raw ones after penalties, normalisation, clipping; NaN: none."""
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

    def shape(
        self, scored: ScoredRollout, packs: list[Pack], rows: list[list[int]], outputs: list[PackOutput]
    ) -> list[Experience]:
        """Return the experience of a scored rollout, a pack each: with logprobs, values, advantages and returns.

        Args:
            scored: n rows and their scores.
            packs: the same rows as the model takes them.
            rows: which rows of the rollout each pack holds.
            outputs: what the model says of each pack.
        """
        scores = self.shape_scores(scored)
        scored_rows = scores.isfinite()
        device = self.accelerator.device
        loss_rows = scored_rows.clone()
        if self.config.truncated_completions == "mask":
            loss_rows &= torch.tensor(scored.rollout.stopped)
        masks = [p.completion_mask & loss_rows[r].to(device)[:, None] for p, r in zip(packs, rows, strict=True)]
        row_scores = [scores.nan_to_num()[r].to(device) for r in rows]
        in_reward = 0.0 if self.config.kl_in_loss else self.kl_controller.value
        rewards = shaped_rewards(packs, outputs, row_scores, masks, in_reward, self.config, self.accelerator)
        stopped = torch.tensor(scored.rollout.stopped)
        shaped = [
            self.advantages(pack, output, reward, stopped[r].to(device))
            for pack, output, reward, r in zip(packs, outputs, rewards, rows, strict=True)
        ]
        require_finite(shaped, masks, self.state.iteration)
        figures = rollout_figures(scored, packs, rows, outputs, self.accelerator)
        self._account(figures, scored_rows)
        advantages = [a for a, _ in shaped]
        if self.config.whiten_advantages:
            advantages = whitened(advantages, masks, self.accelerator)
        return [
            Experience(p, m, o.logprobs, o.values, a, returns, o.ref_logprobs, states=o.states)
            for p, m, o, a, (_, returns) in zip(packs, masks, outputs, advantages, shaped, strict=True)
        ]

    def advantages(self, pack: Pack, output: PackOutput, rewards: Tensor, stopped: Tensor) -> tuple[Tensor, Tensor]:
        """Return (advantages, returns) of a pack, both [R, C], by generalised advantage estimation.

        Args:
            pack: the rows.
            output: logprobs, values and next_values at rollout time.
            rewards: [R, C], KL and score already in them.
            stopped: [R] bool, False where the completion was cut at max_completion_length.
        """
        config = self.config
        bootstrap = None
        if config.truncated_completions == "bootstrap":
            bootstrap = torch.where(stopped, torch.zeros_like(output.next_values), output.next_values)
        lam_policy: float | Tensor = config.lam if config.lam_policy is None else config.lam_policy
        if config.length_adaptive_lam is not None:
            lam_policy = length_adaptive_lam(pack.completion_mask.sum(1), config.length_adaptive_lam)
        lam_value = config.lam if config.lam_value is None else config.lam_value
        settings = (rewards, output.values, pack.completion_mask, config.gamma)
        advantages, returns = gae(*settings, lam_policy, bootstrap)
        if isinstance(lam_policy, Tensor) or lam_policy != lam_value:
            _, returns = gae(*settings, lam_value, bootstrap)
        return advantages, returns

    # --- the parts of shape -----------------------------------------------------------------------------------------

    def _model_outputs(self, packs: list[Pack], states: list[Tensor] | None) -> list[PackOutput]:
        roles = ("policy", "value", "reference") if self.config.beta else ("policy", "value")
        try:
            return self.scorer.score(packs, self.sampler.roles(*roles), states, poll=self.stop_signals.poll)
        except FloatingPointError as error:
            raise RuntimeError(
                f"logprobs or values of rollout {self.state.iteration} are not finite: the policy has diverged; lower"
                " learning_rate or max_grad_norm and resume from an earlier checkpoint"
            ) from error

    def _account(self, figures: dict[str, float], scored_rows: Tensor) -> None:
        """Log the figures of a rollout, move the KL coefficient, and stop where too few rows have a score."""
        unscored = 1 - self.accelerator.gather(scored_rows.float().to(self.accelerator.device)).mean().item()
        require_scored(unscored, self.config, self.state.iteration, self.sampler.rewards.names)
        self.state.beta = self.kl_controller.value
        figures |= {"reward/unscored_fraction": unscored, "kl/beta": self.state.beta}
        # Until the policy's first step its KL is 0 and says nothing of beta, in the rollout after pretraining too.
        # Without pretraining the first rollout counts, as in Ziegler et al.
        pretraining = self.config.value_pretraining_rollouts
        if "kl/ref" in figures and (self.state.iteration > pretraining or not pretraining):
            num_rows = self.config.rollout_batch_size * self.config.num_generations
            self.kl_controller.update(figures["kl/ref"], num_rows)
        self.metrics.add_rollout(figures)

    def _generator(self, *place: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self.config.seed, *place))

    def _deal(self, iteration: int) -> tuple[list[int], list[list[int]]]:
        """Return this process's completions of a rollout, and the positions among them of each minibatch's."""
        return deal_rows(
            self.config.rollout_batch_size * self.config.num_generations,
            self.config.num_minibatches,
            self._generator(DEAL_STREAM, iteration),
            self.accelerator.process_index,
            self.accelerator.num_processes,
        )

    def _minibatch(self, slot: int) -> Minibatch:
        epoch, place = divmod(slot, self.config.num_minibatches)
        # The rows of a minibatch stay together for a rollout, as their packs do; every epoch has its own order.
        order = self._generator(MINIBATCH_STREAM, self.state.iteration, epoch)
        chosen = torch.randperm(self.config.num_minibatches, generator=order)[place]
        experiences = tuple(e for e in self._experiences if e.pack.minibatch == chosen)
        own = torch.stack([e.loss_mask.sum() for e in experiences]).sum().float()
        num_tokens = self.accelerator.reduce(own, reduction="sum").item()
        return Minibatch(
            experiences=experiences,
            num_tokens=max(1.0, num_tokens),
            trains_policy=self.state.iteration >= self.config.value_pretraining_rollouts,
            # Where no token trains, momentum alone would still move the weights.
            is_empty_slot=self.state.skips_rest or not num_tokens,
        )

    # --- state ------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the stream's state and this process's share of the rollout in use into a checkpoint."""
        if self.accelerator.is_main_process:
            save_state(folder, self.state, self.settings, self.kl_controller, self.score_moments)
        buffer = self.scorer.for_checkpoint(self._experiences or [])
        save_buffer(folder, buffer, self.accelerator.process_index)

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint.

        Raises:
            ValueError: a file is missing, or does not fit this run.
        """
        allowed = self.config.allow_config_change
        self.state = load_state(folder, self.settings, self.kl_controller, self.score_moments, allowed)
        self._experiences = None
        if self.state.slot:
            buffer = load_buffer(folder, self.accelerator.process_index)
            self._experiences = [to_device(e, self.accelerator.device) for e in buffer]
