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

from onetrunk.models.frozen_states import TrunkCache
from onetrunk.parallel.sharding import reshard
from onetrunk.parallel.staged import staged
from onetrunk.ppo.rollout import RolloutPack
from onetrunk.types import Experience

T = TypeVar("T")


class PackScorer:
    """Runs the roles over packs in evaluation mode; with a cache, the frozen lower layers run once per pack.

    Args:
        model: returns the TrunkModel, wrapped or not.
        accelerator: unwraps it.
        temperature: of logprobs.
        cache: keeps the trunk states.
    """

    def __init__(
        self, model: Callable[[], nn.Module], accelerator: Accelerator, temperature: float, cache: TrunkCache | None
    ):
        self.model = model
        self.accelerator = accelerator
        self.temperature = temperature
        self.cache = cache
        self._were_captured = False

    @torch.no_grad()
    def run(
        self,
        packs: Sequence[RolloutPack],
        roles: Sequence[str],
        poll: Callable[[], None] = lambda: None,
    ) -> list[RolloutPack]:
        """Return the packs with the outputs of `roles`, and with `output.states` if there is a cache.

        Args:
            packs: all or none with captured states; without them the frozen lower layers make the states.
            roles: as TrunkModel takes them.
            poll: called before each pack; may raise to give up.

        Raises:
            FloatingPointError: a logprob or a value is not finite.
        """
        self.model().eval()
        self._were_captured = any(item.states is not None for item in packs)
        if self.cache is not None and not self._were_captured:
            roles = (*roles, "trunk")
        scored = [] if staged(self.model()) is None else self._staged(packs, roles, poll)
        for item in packs if not scored else ():
            poll()
            output = self.model()(pack=item.pack, states=item.states, roles=tuple(roles), temperature=self.temperature)
            if self.cache is not None:
                states = item.states if self._were_captured else self._in_trunk_dtype(output.states)
                output = output._replace(states=self.cache.keep(states))
            scored.append(replace(item, states=None, output=output))
        reshard(self.model())
        # A score that is not finite leaves out its row only.
        outputs = [item.output._replace(states=None, scores=None) for item in scored]
        if not torch.stack([x.isfinite().all() for output in outputs for x in output if x is not None]).all():
            raise FloatingPointError("logprobs or values are not finite")
        return scored

    def _staged(
        self,
        packs: Sequence[RolloutPack],
        roles: Sequence[str],
        poll: Callable[[], None],
    ) -> list[RolloutPack]:
        """Return the packs with the outputs of a model in pipeline stages, which run them together."""
        poll()
        outputs = staged(self.model()).outputs([item.pack for item in packs], roles, self.temperature)
        return [replace(item, output=output) for item, output in zip(packs, outputs, strict=True)]

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
        """Wait, and return what the function returned or raise what it raised; it runs only once."""
        if self._thread is None and not self._values:
            self._values.append(self._function())
        elif self._thread is not None:
            self._thread.join()
            atexit.unregister(self._thread.join)
        if self._error is not None:
            raise self._error
        return self._values[0]
