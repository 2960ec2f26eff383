"""What the roles of the trunk say of a rollout's packs, and the trunk states that scoring leaves for the epochs.

Knows packs, the model and the cache of its states; no reward, no advantage and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from onetrunk.models.pack_output import PackOutput
from onetrunk.models.trunk_cache import TrunkCache
from onetrunk.ops.out_of_memory import free_memory, is_out_of_memory
from onetrunk.trainers.smaller_packs import PackSize, join_rows
from onetrunk.types import Experience, Pack


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
