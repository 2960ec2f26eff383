"""One frozen base model that plays every role of PPO: roles run over a pack and return logprobs, values, scores.

The policy is the LoRA adapter `default`; the value is a head on the policy's last hidden states, which never gets a
gradient here: it is fitted to states that are kept (`ppo/value_fit.py`). The reference is the trunk with adapters off,
or a frozen copy of the adapter that the policy started from. The layers below the cut contain nothing that trains:
they run once per pack, without gradient, and every role starts from their output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, PeftModel, PeftModelForCausalLM
from torch import Tensor
from transformers import PreTrainedModel

from onetrunk.models.adapters import (
    POLICY,
    REFERENCE,
    REWARD,
    copy_adapter,
    find_tuner_layers,
    first_trained_layer,
    fit_layers,
    freeze_below,
    initial_weights,
    list_name,
    policy_config,
    read_branches,
    role,
    set_adapter_weights,
)
from onetrunk.models.base_model import (
    backbone,
    check_cache,
    check_supported,
    decoder_layers,
    disable_dropout,
    keep_kernels,
    output_head,
    verify_head,
)
from onetrunk.models.frozen_layers import only_between, verify_cut
from onetrunk.models.loading import write_base_marks
from onetrunk.models.speedups.fused_lora import fuse_lora
from onetrunk.models.speedups.token_grid import (
    Positions,
    TokenGrid,
    known_masks,
    narrow_blocks,
    packing_obstacle,
    token_grid,
)
from onetrunk.models.value_head import ValueHead
from onetrunk.ops.logprobs import fused_token_logprobs
from onetrunk.types import Pack, PackOutput
from onetrunk.utils.options import parse_adapter_layers
from onetrunk.utils.startup import peft_calls
from onetrunk.utils.versions import checkpointing_enabler

if TYPE_CHECKING:
    from onetrunk.models.reward_model import ScoreBranch

ROLES = ("policy", "value", "reference", "reward", "trunk")


@dataclass(frozen=True)
class StageInput:
    """What a stage of a pipeline runs in one forward.

    Args:
        layers: numbers of its layers.
        received: the states [N, H] of the stage before, one per stream; one for all streams up to the cut. None on
            the first stage.
        is_last: whether the last layer is among them.
    """

    layers: range
    received: tuple[Tensor, ...] | None
    is_last: bool


def checked_first_layer(base: PreTrainedModel, adapter_layers: str) -> int:
    """Return the first layer with adapters; ValueError for a base that cannot be a trunk, or lacks these layers."""
    check_supported(base.config)
    check_cache(base)
    return parse_adapter_layers(adapter_layers, len(decoder_layers(base)))


class TrunkModel(PeftModelForCausalLM):
    """A PEFT model whose forward over a pack computes the policy, the value, the reference and a reward adapter.

    Called without a pack it is the plain PEFT model with the policy active, so that sampling, `generate` and every
    tool for PEFT models work on it. `model.cut` is the first layer that trains (0: all layers train).

    Args:
        base: a decoder that transformers loads; it is frozen, and its dropout set to 0.
        peft_config: LoRA config of the policy.
        adapter_layers: "all", or "top-k" to adapt only the last k layers.
        initial_adapter: weights that the policy starts from (`TrunkModel.from_adapter`). The reference is then a
            frozen copy of them. Those below the first trained layer stay frozen and active in every role.

    Raises:
        ValueError: a setting that the trunk can't carry; the message names it.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        peft_config: PeftConfig,
        *,
        adapter_layers: str = "all",
        initial_adapter: dict[str, Tensor] | None = None,
    ):
        first_layer = checked_first_layer(base, adapter_layers)
        num_layers = len(decoder_layers(base))
        keep_kernels(base)
        verify_head(base)
        disable_dropout(base)
        # An initial adapter keeps all its layers; `freeze_below` freezes the lower ones.
        config = policy_config(peft_config, first_layer if initial_adapter is None else 0, num_layers)
        fit_layers(config, base, decoder_layers(base))
        with peft_calls():
            super().__init__(base, config, POLICY)
        if hasattr(base.get_input_embeddings(), "base_layer"):
            raise ValueError("peft_config.target_modules matches the embedding, which every role shares; leave it out")
        self.has_reference_adapter = initial_adapter is not None
        self._role: str | None = POLICY
        self.reward_branch: ScoreBranch | None = None
        self._attach_branches(initial_adapter, first_layer)
        self.tuner_layers = find_tuner_layers(self)
        fuse_lora(self.tuner_layers)
        # Results of the checks in speedups/merged.py, by the way in which the model is called.
        self.merge_proofs: dict[Any, bool] = {}
        hidden_size, device = base.config.get_text_config().hidden_size, output_head(base).weight.device
        self.value_head = ValueHead(hidden_size, device=device).requires_grad_(False)
        self.cut = first_trained_layer(self, list_name(self, decoder_layers(base)))
        self.states_dtype: torch.dtype | None = None
        if self.cut:
            verify_cut(base, self.cut)
        self.narrow = narrow_blocks(base)
        self.padding_free = False
        # Whether values are also computed at the ends of turns, because they train there.
        self.values_turn_ends = False
        if any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
            self.activation_checkpointing_enable()

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, as PEFT does."""
        super().add_adapter(*args, **kwargs)
        self.tuner_layers = find_tuner_layers(self)
        fuse_lora(self.tuner_layers)

    @classmethod
    def from_adapter(cls, model: PeftModel, *, adapter_layers: str = "all") -> TrunkModel:
        """Return a trunk whose policy continues the active adapter of `model`, which is removed from `model`."""
        config, weights = initial_weights(model)
        checked_first_layer(model.get_base_model(), adapter_layers)  # Before the adapter is removed.
        return cls(model.unload(), config, adapter_layers=adapter_layers, initial_adapter=weights)

    def _attach_branches(self, initial_adapter: dict[str, Tensor] | None, first_layer: int) -> None:
        if initial_adapter is not None:
            set_adapter_weights(self, initial_adapter, POLICY, "the initial adapter")
            copy_adapter(self, POLICY, REFERENCE)
        freeze_below(self, list_name(self, decoder_layers(self.get_base_model())), first_layer)

    def use_padding_free(self, is_on: bool = True) -> None:
        """Run the rows of a pack in one sequence without padding from now on, or padded again.

        Call it on all processes, and before the base is sharded.

        Raises:
            ValueError: a check shows that rows would not stay apart in this model.
        """
        base = self.get_base_model()
        obstacle = packing_obstacle(base) if is_on else None
        if obstacle is not None:
            raise ValueError(
                f"padding_free is not possible with {type(base).__name__} and the attention"
                f" {base.config.get_text_config()._attn_implementation!r}: {obstacle}. Leave padding_free out"
            )
        self.padding_free = is_on

    def grid_of(self, pack: Pack) -> TokenGrid:
        """Return the tokens of a pack as the decoder takes them."""
        return token_grid(self.get_base_model(), pack, self.padding_free)

    @contextlib.contextmanager
    def as_role(self, name: str) -> Iterator[None]:
        """Play a role ("policy", "reference", "reward") in the block, also for forwards without a pack."""
        adapters = {"policy": POLICY, "reference": REFERENCE if self.has_reference_adapter else None}
        if self.reward_branch is not None:
            adapters["reward"] = REWARD
        if name not in adapters:
            raise ValueError(f"role {name!r} is none of {', '.join(adapters)}")
        before, self._role = self._role, adapters[name]
        try:
            with role(self, adapters[name]):
                yield
        finally:
            self._role = before

    def forward(
        self,
        *args: Any,
        pack: Pack | None = None,
        roles: Sequence[str] = ("policy", "value"),
        states: Tensor | None = None,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        body_only: bool = False,
        stage: StageInput | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the PackOutput of `roles` over `pack`; without a pack, the output of the plain PEFT model.

        Args:
            pack: the rows, on the model's device.
            roles: some of "policy", "value", "reference", "reward" and "trunk". Only "policy" has a gradient.
            states: [N, H] kept output of the layers below the cut (role "trunk"), so that they don't run again.
            temperature: divides the logits of policy and reference.
            entropy_grad: make the entropy differentiable, for an entropy bonus.
            body_only: without a pack, return the output of the decoder, whose head does not run.
            stage: run only the layers of a stage of a pipeline, and return the states that the next stage starts from,
                one [N, H] per stream (`streams`); of the last stage the PackOutput.
        """
        if body_only:
            return backbone(self.get_base_model())(*args, **kwargs)
        if pack is None:
            return super().forward(*args, **kwargs)
        unknown = set(roles) - set(ROLES)
        if unknown:
            raise ValueError(f"roles {sorted(unknown)} are none of {', '.join(ROLES)}")
        grid = self.grid_of(pack)
        if stage is not None:
            hidden = self._stage_hidden(grid, roles, stage)
            return self._stage_output(hidden, grid, roles, temperature, entropy_grad) if stage.is_last else hidden
        needs_states = set(roles) != {"reward"} or (self.reward_branch is not None and self.reward_branch.from_states)
        if states is None and self.cut and needs_states:
            states = self._trunk_states(grid)
            self.states_dtype = states.dtype
        if states is not None and len(states) != grid.num_tokens:
            raise ValueError(f"states {list(states.shape)} are not of this pack, which has {grid.num_tokens} tokens")
        out: dict[str, Tensor | None] = {"states": states if "trunk" in roles else None}
        hidden = None
        if "policy" in roles or "value" in roles:
            with self.as_role("policy"), torch.set_grad_enabled(torch.is_grad_enabled() and "policy" in roles):
                hidden = self._hidden(grid, states)
        if "policy" in roles:
            out["logprobs"], out["entropy"] = self._token_logprobs(hidden, grid, temperature, entropy_grad)
        if "value" in roles:
            out |= self._values(hidden.detach(), grid)
        if "reference" in roles:
            with torch.no_grad(), self.as_role("reference"):
                out["ref_logprobs"], _ = self._token_logprobs(self._hidden(grid, states), grid, temperature, False)
        if "reward" in roles:
            with torch.no_grad(), self.as_role("reward"):
                out["scores"] = self._scores(grid, states)
        return PackOutput(**out)

    def _run(self, grid: TokenGrid, read: Tensor | None = None) -> Tensor:
        """Return the decoder's last hidden states [B * L, H] of all tokens, under the active adapter and cut.

        They are valid at the indices `read`; None: at those of `grid.read`.
        """
        body = backbone(self.get_base_model())
        with self.narrow.at(grid.positions(read)), known_masks(is_packed=grid.is_packed):
            output = body(input_ids=grid.input_ids, use_cache=False, **grid.arguments)
        return output.last_hidden_state.flatten(0, 1)

    @torch.no_grad()
    def _trunk_states(self, grid: TokenGrid) -> Tensor:
        with only_between(decoder_layers(self.get_base_model()), 0, self.cut) as below:
            self._run(grid)
        return grid.without_padding(below.computed)

    def _hidden(self, grid: TokenGrid, states: Tensor | None, read: Tensor | None = None) -> Tensor:
        if not self.cut or states is None:
            return self._run(grid, read)
        layers = decoder_layers(self.get_base_model())
        with only_between(layers, self.cut, len(layers), grid.with_padding(states)):
            return self._run(grid, read)

    def _token_logprobs(
        self, hidden: Tensor, grid: TokenGrid, temperature: float, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        pack = grid.pack
        rows, columns = _rows_and_columns(pack, pack.places.sampled)
        head = replace(output_head(self.get_base_model()), temperature=temperature).local()
        predicting = hidden[grid.first[rows] + pack.prompt_lengths[rows] - 1 + columns]
        with torch.autocast(hidden.device.type, enabled=False):
            logprobs, entropy = fused_token_logprobs(
                predicting.to(head.weight.dtype), head, pack.completion_ids[rows, columns], entropy_grad=entropy_grad
            )
        return tuple(_spread(flat.float(), rows, columns, pack.completion_mask) for flat in (logprobs, entropy))

    def _values(self, hidden: Tensor, grid: TokenGrid) -> dict[str, Tensor]:
        mask, places = grid.pack.completion_mask, grid.pack.places
        valued = torch.cat([places.sampled, places.ended]).sort().values if self.values_turn_ends else places.sampled
        rows, columns = _rows_and_columns(grid.pack, valued)
        predicting = grid.first + grid.pack.prompt_lengths - 1
        value_states = hidden[predicting[rows] + columns]
        values = _spread(self.value_head(value_states), rows, columns, mask)
        # The state of the last sampled token predicts what comes after it; [R], 0 for a row without any.
        after = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(dim=1)
        next_values = self.value_head(hidden[predicting + after])
        return {"values": values, "next_values": next_values, "value_states": value_states}

    def _scores(self, grid: TokenGrid, states: Tensor | None) -> Tensor:
        branch = self.reward_branch
        last = grid.first + branch.last_tokens(grid.pack)
        return branch(self._hidden(grid, states if branch.from_states else None, last)[last])

    # --- one stage of a pipeline ------------------------------------------------------------------------------------

    def streams(self, roles: Sequence[str]) -> dict[str, bool]:
        """Return the roles whose hidden states pass the layers above the cut, and whether they get gradients.

        The value reads those of the policy.
        """
        streams = {"policy": "policy" in roles} if {"policy", "value"} & set(roles) else {}
        return streams | ({"reference": False} if "reference" in roles else {})

    def _stage_hidden(self, grid: TokenGrid, roles: Sequence[str], stage: StageInput) -> tuple[Tensor, ...]:
        """Return the states after the layers of a stage: [N, H] each, of the last stage [B * L, H]."""
        streams, layers, received = self.streams(roles), stage.layers, stage.received
        if layers.start < self.cut:
            below = range(layers.start, min(self.cut, layers.stop))
            with torch.no_grad(), self.as_role(next(iter(streams))):  # They are the same below the cut.
                received = (self._run_layers(grid, below, received[0] if received else None),)
            if layers.stop <= self.cut:
                return received
        above = range(max(layers.start, self.cut), layers.stop)
        if above.start <= self.cut:
            received = (received or (None,)) * len(streams)
        hidden = []
        for (name, has_gradient), states in zip(streams.items(), received, strict=True):
            with self.as_role(name), torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
                hidden.append(self._run_layers(grid, above, states))
        return tuple(hidden)

    def _run_layers(self, grid: TokenGrid, layers: range, states: Tensor | None) -> Tensor:
        base = self.get_base_model()
        body, every = backbone(base), decoder_layers(base)
        received = None if states is None else grid.with_padding(states)
        # Later stages have no embedding; the stand-in for the layer before theirs hands in the states.
        inputs = {"input_ids": grid.input_ids} if received is None else {"inputs_embeds": received}
        modes = self.narrow.at(grid.positions()), known_masks(is_packed=grid.is_packed)
        with modes[0], modes[1], only_between(every, layers.start, layers.stop, received) as run:
            output = body(**inputs, use_cache=False, **grid.arguments)
            if layers.stop == len(every):
                return output.last_hidden_state.flatten(0, 1)
            return grid.without_padding(run.computed)

    def _stage_output(
        self, hidden: Sequence[Tensor], grid: TokenGrid, roles: Sequence[str], temperature: float, entropy_grad: bool
    ) -> PackOutput:
        states = dict(zip(self.streams(roles), hidden, strict=True))
        out: dict[str, Tensor | None] = {}
        if "policy" in roles:
            out["logprobs"], out["entropy"] = self._token_logprobs(states["policy"], grid, temperature, entropy_grad)
        if "value" in roles:
            out |= self._values(states["policy"].detach(), grid)
        if "reference" in roles:
            with torch.no_grad():
                out["ref_logprobs"], _ = self._token_logprobs(states["reference"], grid, temperature, False)
        return PackOutput(**out)

    # --- modes, checkpointing, files --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> TrunkModel:
        """Set train or eval mode; the base computes the same in both."""
        super().train(mode)
        keep_kernels(self.get_base_model())
        return self

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Recompute the activations of each layer in the backward, under the adapter that was active in the forward.

        Without `context_fn` of torch.utils.checkpoint the recompute would use the adapter of the last role.
        """
        settings = dict(activation_checkpointing_kwargs or {})
        if settings.pop("use_reentrant", False) or "context_fn" in settings:
            raise ValueError(
                "activation_checkpointing_kwargs: use_reentrant=True, or a context_fn other than ours, recomputes"
                " under the wrong adapter; leave both out"
            )

        def context_fn() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
            return contextlib.nullcontext(), self._as_in_forward(self._role, self.narrow.positions)

        settings |= {"use_reentrant": False, "context_fn": context_fn}
        checkpointing_enabler(self.get_base_model())(settings, **kwargs)

    @contextlib.contextmanager
    def _as_in_forward(self, adapter: str | None, positions: Positions | None) -> Iterator[None]:
        with role(self, adapter), self.narrow.at(positions):
            yield

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Do the same under transformers' older name, which PEFT would otherwise forward to the base model."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **kwargs)

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any) -> None:
        """Write the trained branches and the reference into a folder; the policy at the root, for PEFT and vLLM."""
        kwargs.setdefault("save_embedding_layers", False)
        kwargs.setdefault("selected_adapters", [name for name in self.peft_config if name != REWARD])
        if kwargs.get("state_dict") is None:
            # PEFT would collect the weights of the base too, which may be sharded.
            kwargs["state_dict"] = {name: p.detach() for name, p in self.named_parameters() if ".lora_" in name}
        super().save_pretrained(str(save_directory), is_main_process=is_main_process, **kwargs)
        if is_main_process:
            self.value_head.save(save_directory)
            write_base_marks(self.get_base_model(), save_directory)

    def load_branches(self, folder: str | Path) -> None:
        """Load every adapter and the value head from a folder that `save_pretrained` wrote.

        Raises:
            ValueError: a file is missing, unexpected, or does not fit this trunk; no weight has changed then.
        """
        weights = read_branches(self, folder)
        self.value_head.load(folder)
        for adapter, tensors in weights.items():
            set_adapter_weights(self, tensors, adapter, folder)


def _rows_and_columns(pack: Pack, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the column [K] of every place in the [R, C] tensors of a pack."""
    width = pack.completion_mask.shape[1]
    return places // width, places % width


def _spread(flat: Tensor, rows: Tensor, columns: Tensor, mask: Tensor) -> Tensor:
    """Return [R, C] with the N entries of `flat` at (rows, columns), 0 elsewhere."""
    return flat.new_zeros(mask.shape).index_put((rows, columns), flat)
