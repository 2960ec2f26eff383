"""Run the roles of the trunk over the packs of a rollout, in the background while reward functions work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from onetrunk.models.frozen_layers import TrunkCache
from onetrunk.parallel.groups import pack_outputs
from onetrunk.parallel.sharding import is_collective, reshard
from onetrunk.ppo.packs import RolloutPack
from onetrunk.types import Experience


class Forward:
    """Runs the roles over packs in evaluation mode; with a cache, the frozen lower layers run once per pack.

    Args:
        model: returns the TrunkModel, wrapped or not.
        temperature: divides the logits of which logprobs are taken.
        beat, stop: called before each pack; `stop` may raise to give up.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        accelerator: Accelerator,
        temperature: float,
        cache: TrunkCache | None = None,
        beat: Callable[[], None] = lambda: None,
        stop: Callable[[], None] = lambda: None,
    ):
        self.model = model
        self.accelerator = accelerator
        self.temperature = temperature
        self.cache = cache
        self.is_collective = is_collective(model())
        self._beat, self._stop = beat, stop
        self._were_captured = self._is_given_up = False

    @contextlib.contextmanager
    def running(
        self, packs: Sequence[RolloutPack], roles: Sequence[str], iteration: int, has_time: bool
    ) -> Iterator[Future[list[RolloutPack]]]:
        """`run` over the packs of a rollout during the block: in a thread if the main one `has_time` for user code.

        Forwards that processes run together have a certain order in the main thread only, so there they run at once.
        If the block raises, the thread gives up before its next pack; no forward continues after the block.
        """

        # The current GPU is set per thread, and the accelerator's device of one process has no index.
        gpu = torch.cuda.current_device() if self.accelerator.device.type == "cuda" else None

        def run() -> list[RolloutPack]:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            try:
                return self.run(packs, roles)
            except FloatingPointError as error:
                raise RuntimeError(
                    f"logprobs or values of rollout {iteration} are not finite: the policy has diverged; lower"
                    " max_grad_norm and resume from an earlier checkpoint, or start a new run with a lower"
                    " learning_rate"
                ) from error

        if not has_time or self.is_collective:
            done: Future[list[RolloutPack]] = Future()
            done.set_result(run())
            yield done
            return
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            yield executor.submit(run)
        except BaseException:
            self._is_given_up = True
            raise
        finally:
            executor.shutdown()
            self._is_given_up = False

    @torch.no_grad()
    def run(self, packs: Sequence[RolloutPack], roles: Sequence[str]) -> list[RolloutPack]:
        """Return the packs with the outputs of `roles`, and with `output.states` if there is a cache.

        Args:
            packs: all or none with captured states; without them the frozen lower layers make the states.

        Raises:
            FloatingPointError: a logprob or a value is not finite.
        """
        model = self.model()
        model.eval()
        self._were_captured = any(item.states is not None for item in packs)
        if self.cache is not None and not self._were_captured:
            roles = (*roles, "trunk")
        states = [item.states for item in packs]
        outputs = pack_outputs(model, [item.pack for item in packs], roles, self.temperature, states, self._poll)
        scored = []
        for item, output in zip(packs, outputs, strict=True):
            if self.cache is not None:
                trunk_states = item.states if self._were_captured else self._in_trunk_dtype(output.states)
                output = output._replace(states=self.cache.keep(trunk_states))
            if output.value_states is not None:
                # On the CPU: a rollout of long completions has gigabytes of them. They are there after the wait below.
                output = output._replace(value_states=TrunkCache("cpu").keep(output.value_states))
            scored.append(replace(item, states=None, output=output))
        reshard(model)
        # A score that is not finite leaves out its row only.
        finite = [item.output._replace(states=None, scores=None, value_states=None) for item in scored]
        if not torch.stack([x.isfinite().all() for output in finite for x in output if x is not None]).all():
            raise FloatingPointError("logprobs or values are not finite")
        return scored

    def _poll(self) -> None:
        self._beat()
        if self._is_given_up:
            raise CancelledError
        # A process that gives up alone would leave the others waiting in a forward of a sharded or divided base.
        if not self.is_collective:
            self._stop()

    def for_checkpoint(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the experiences as a checkpoint keeps them: without the states that the same forwards make again.

        Captured states stay, because a forward would round them differently.
        """
        return list(experiences) if self._were_captured else [replace(e, states=None) for e in experiences]

    @torch.no_grad()
    def from_checkpoint(self, experiences: Sequence[Experience]) -> list[Experience]:
        """Return the experiences of a checkpoint with their states, as saved or computed again."""
        if self.cache is None:
            return list(experiences)
        self._were_captured = any(e.states is not None for e in experiences)
        model = self.model()
        model.eval()
        restored = []
        for experience in experiences:
            states = experience.states
            if states is None:
                states = self._in_trunk_dtype(model(pack=experience.pack, roles=("trunk",)).states)
            restored.append(replace(experience, states=self.cache.keep(states)))
        reshard(model)
        return restored

    def _in_trunk_dtype(self, states: Tensor) -> Tensor:
        # Accelerate's wrapper of forward returns float32; the trunk's own dtype holds every bit of it.
        return states.to(self.accelerator.unwrap_model(self.model()).states_dtype)
