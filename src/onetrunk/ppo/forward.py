"""Run the roles of the trunk over the packs of a rollout, in the background while reward functions work."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from onetrunk.models.frozen_layers import TrunkCache
from onetrunk.parallel.groups import pack_outputs
from onetrunk.parallel.sharding import is_collective, reshard
from onetrunk.ppo.rollout import RolloutPack
from onetrunk.types import Experience

T = TypeVar("T")


class Forward:
    """Runs the roles over packs in evaluation mode; with a cache, the frozen lower layers run once per pack.

    Args:
        model: returns the TrunkModel, wrapped or not.
        accelerator: unwraps it.
        temperature: of logprobs.
        cache: keeps the trunk states.
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
        self._were_captured = False

    def start(
        self, packs: Sequence[RolloutPack], roles: Sequence[str], iteration: int, has_time: bool
    ) -> Background[list[RolloutPack]]:
        """Begin `run` over the packs of a rollout: in the background if the main thread `has_time` for it.

        Forwards that processes run together have a certain order in the main thread only, so there they run at once.
        """

        def run() -> list[RolloutPack]:
            try:
                return self.run(packs, roles)
            except FloatingPointError as error:
                raise RuntimeError(
                    f"logprobs or values of rollout {iteration} are not finite: the policy has diverged; lower"
                    " learning_rate or max_grad_norm and resume from an earlier checkpoint"
                ) from error

        return Background(run, self.accelerator.device, has_time and not self.is_collective)

    @torch.no_grad()
    def run(self, packs: Sequence[RolloutPack], roles: Sequence[str]) -> list[RolloutPack]:
        """Return the packs with the outputs of `roles`, and with `output.states` if there is a cache.

        Args:
            packs: all or none with captured states; without them the frozen lower layers make the states.
            roles: as TrunkModel takes them.

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
                kept = item.states if self._were_captured else self._in_trunk_dtype(output.states)
                output = output._replace(states=self.cache.keep(kept))
            scored.append(replace(item, states=None, output=output))
        reshard(model)
        # A score that is not finite leaves out its row only.
        finite = [item.output._replace(states=None, scores=None) for item in scored]
        if not torch.stack([x.isfinite().all() for output in finite for x in output if x is not None]).all():
            raise FloatingPointError("logprobs or values are not finite")
        return scored

    def _poll(self) -> None:
        self._beat()
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


LONGEST_WAIT_S = 60.0


class Background(Generic[T]):
    """Runs `function` in a thread, while the main thread does what only it may do (user code, signals).

    An error in the main thread is reported at once; the process then ends with the thread, or LONGEST_WAIT_S later.

    Args:
        function: takes nothing. Grad mode and autocast are set per thread: it sets what it needs.
        device: the accelerator it works on, which is set per thread too.
        in_thread: False to run it at once, in the main thread.
    """

    def __init__(self, function: Callable[[], T], device: torch.device, in_thread: bool = True):
        self._function = function
        self._device = device
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if not in_thread:
            self._values.append(function())
            return
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        # At exit Python kills a daemon thread inside torch, which aborts with exit code 134.
        atexit.register(self._thread.join, LONGEST_WAIT_S)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._values.append(self._function())
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Wait, and return what the function returned or raise what it raised."""
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._thread.join)
        if self._error is not None:
            raise self._error
        return self._values[0]
