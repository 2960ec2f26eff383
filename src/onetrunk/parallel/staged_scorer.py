"""Train a reward adapter whose base is divided over the processes of a pipeline: no process holds the whole base.

A microbatch is a block of rows. Every stage runs the forward of the sequence-classification model itself, with the
layers of other stages and the embedding replaced by stand-ins, so masks, positions and the place of the score are the
model's own. The last stage computes the scores and the loss.

A forward without gradients, as in an evaluation, goes through the pipeline too: all stages call it on the same rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from onetrunk.costs import SCORED_AT_ONCE
from onetrunk.models.base_model import active_dropout, computes, decoder_layers, probe_inputs
from onetrunk.models.frozen_prefix import only_between
from onetrunk.models.reward_model import score_layer
from onetrunk.parallel.stages import LayerSplit
from onetrunk.parallel.training_stage import Stage, StagePlace, base_obstacle, divide_layers

# input_ids and attention_mask [b, T] of a microbatch.
Rows = dict[str, Tensor]
# Takes the number of a microbatch and a model that runs the rest of its forward; returns the microbatch's loss.
LossOf = Callable[[int, Callable[..., Any]], Tensor]


def keep_scorer_stage(model: PeftModel, split: LayerSplit, device: torch.device) -> str:
    """Drop the frozen weights of other stages from a reward adapter's base, as `divide_layers`; return its line.

    Raises:
        ValueError: the model cannot be trained in stages; the message says why.
        RuntimeError: the processes loaded different bases.
    """
    obstacle = scorer_obstacle(model)
    if obstacle is not None:
        raise ValueError(f"pipeline_training is not supported {obstacle}")
    verify_stages(model, split)
    num_parameters = model.get_base_model().num_parameters(exclude_embeddings=True)
    place, line = divide_layers(model, split, device)
    StagedScorer(model, place, num_parameters)
    return line


def scorer_obstacle(model: nn.Module) -> str | None:
    """Return why a reward model cannot be trained in stages, or None; it continues "is not supported"."""
    if not isinstance(model, PeftModel):
        return "for a model whose weights all train; set use_peft: true"
    head = {id(parameter) for parameter in score_layer(model).parameters()}
    obstacle = base_obstacle(model, lambda _, parameter: id(parameter) in head)
    if obstacle is not None:
        return obstacle
    dropout = active_dropout(model)
    if dropout is not None:
        return f"with dropout ({dropout}), which every stage would draw for itself; set it to 0"
    return None


class StagedScorer(Stage):
    """This process's stage of a reward adapter. It replaces the forward of the base, which is collective from now on.

    Args:
        model: a PEFT model for sequence classification, without the frozen weights of other stages.
        place: of this process.
        num_parameters: of the whole model, without its embeddings.
    """

    def __init__(self, model: PeftModel, place: StagePlace, num_parameters: int):
        super().__init__(model, place)
        base = model.get_base_model()
        self.model, self.cut, self.num_parameters = model, lowest_trained_layer(model), num_parameters
        self._layer_forward = LayerForward(model, self.layers)
        self._states: Tensor | None = None
        self._is_updating = False
        base.forward = self._forward

    def scores(self, rows: Rows) -> Tensor:
        """Return the scores [n, 1] of rows, float32 and without gradients, on every stage."""
        num_rows = len(rows["input_ids"])
        size = -(-num_rows // min(num_rows, SCORED_AT_ONCE * self.num_stages))
        blocks = [{name: tensor[i : i + size] for name, tensor in rows.items()} for i in range(0, num_rows, size)]
        module = _StageModule(self, blocks, None)
        with torch.no_grad():
            self.run(module, module.lengths, lambda _: [False], has_gradients=False)
            return self._shared(module)

    def update(self, blocks: Sequence[Rows], loss_of: LossOf) -> list[SequenceClassifierOutput]:
        """Run forward and backward over blocks of rows; return their outputs, without gradients, on every stage.

        Each process adds the gradients of its own layers, the last one also those of the score head, to `.grad`.

        Args:
            blocks: the microbatches of the schedule.
            loss_of: called on the last stage once per block.
        """
        module = _StageModule(self, blocks, loss_of)
        self._is_updating = True
        try:
            self.run(module, module.lengths, lambda layer: [layer > self.cut], has_gradients=True)
        finally:
            self._is_updating = False
        scores = self._shared(module).split([len(block["input_ids"]) for block in blocks])
        return [SequenceClassifierOutput(logits=part) for part in scores]

    def block_forward(self, block: Rows, states: Tensor | None) -> Any:
        """Return the states [b, T, H] after the layers of this stage; of the last stage the model's output."""
        self._states = states
        if self._is_updating:
            # Through the forward of the adapter, which accelerate wraps in autocast. It calls `_forward`.
            return self.model(**block)
        return self._layer_forward(states, **block)

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, **others: Any) -> Any:
        """Take the place of the base's forward."""
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self._is_updating:
            return self._layer_forward(self._states, **rows, **others)
        return SequenceClassifierOutput(logits=self.scores(rows))

    def _shared(self, module: _StageModule) -> Tensor:
        num_rows = sum(len(block["input_ids"]) for block in module.blocks)
        found = torch.cat(module.scores).float().flatten() if self.is_last else None
        return self.from_last(found, num_rows)[:, None]


class _StageModule(nn.Module):
    """The forward of this stage as PipelineStage calls it: once per block of rows, in their order."""

    def __init__(self, stage: StagedScorer, blocks: Sequence[Rows], loss_of: LossOf | None):
        super().__init__()
        # Not a submodule: the schedule would look for wrappers among its modules.
        self.__dict__["stage"] = stage
        self.blocks, self.loss_of = blocks, loss_of
        self.lengths = [block["input_ids"].numel() for block in blocks]
        self.scores: list[Tensor] = []
        self.num_done = 0

    def forward(self, *received: Tensor) -> Tensor:
        """Return the states for the next stage, padded to the longest block; of the last stage the loss of a block."""
        number, stage = self.num_done, self.stage
        self.num_done += 1
        block, length = self.blocks[number], self.lengths[number]
        shape = (*block["input_ids"].shape, stage.hidden_size)
        states = None if stage.is_first else received[0][:length].view(shape)

        def run(**given: Tensor) -> Any:
            differs = sorted(name for name in {**block, **given} if given.get(name) is not block.get(name))
            if differs:
                raise ValueError(
                    "with pipeline_training compute_loss must call the model once on input_ids and attention_mask of"
                    f" its inputs, because the stages before have run it so; here {', '.join(differs)} differs"
                )
            output = stage.block_forward(block, states)
            self.scores.append(output.logits.detach())
            return output

        if not stage.is_last:
            sent = stage.block_forward(block, states)
            # What nothing below trains from gets no gradient, whatever the model's own forward asks for.
            sent = sent.detach() if stage.layers.stop <= stage.cut else sent
            return stage.sent([sent.flatten(0, 1)], max(self.lengths))
        if self.loss_of is None:
            run(**block)
            return torch.zeros((), device=stage.device)
        return self.loss_of(number, run)


class LayerForward:
    """The forward of a sequence-classification model in which only some of its layers run.

    Args:
        model: wrapped by PEFT, with its own forward.
        layers: numbers of the layers.
    """

    def __init__(self, model: PeftModel, layers: range):
        base = model.get_base_model()
        self.layers, self.every = layers, decoder_layers(base)
        self.embedding, self.whole = base.get_input_embeddings(), base.forward

    def __call__(self, states: Tensor | None, **inputs: Any) -> Any:
        """Return the states [b, T, H] after the layers; with the last layer among them, the model's output.

        Args:
            states: of the layer before the first one; None if they begin at layer 0.
            inputs: of the model.
        """
        with only_between(self.every, self.layers.start, self.layers.stop) as run, self._embedded(states):
            run.received = states
            output = self.whole(**inputs)
        return output if self.layers.stop == len(self.every) else run.computed

    @contextlib.contextmanager
    def _embedded(self, states: Tensor | None) -> Iterator[None]:
        """Let the embedding, whose weight later stages do not have, return tensors of the right kind."""
        if states is None:
            yield
            return
        self.embedding.forward = lambda _: states.detach()
        try:
            yield
        finally:
            del self.embedding.forward


def lowest_trained_layer(model: PeftModel) -> int:
    """Return the number of the lowest decoder layer with a trained weight; with none, the number of layers."""
    layers = decoder_layers(model)
    trained = (number for number, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
    return next(trained, len(layers))


@torch.no_grad()
def verify_stages(model: PeftModel, split: LayerSplit) -> None:
    """Prove with 8 tokens that the stages of a split, one after the other, score as the whole model does.

    Raises:
        ValueError: they don't.
    """
    ids = probe_inputs(model)["input_ids"]
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, -3:] = 0
    rows = {"input_ids": torch.cat([ids, ids.flip(1)]), "attention_mask": mask.to(ids.device)}

    def in_stages() -> Tensor:
        states: Any = None
        for stage in range(split.num_stages):
            states = LayerForward(model, split.layers(stage))(states, **rows)
        return states.logits

    if not computes(in_stages, expected=model.get_base_model()(**rows).logits):
        raise ValueError(
            f"pipeline_training is not supported for {type(model.get_base_model()).__name__}: a layer returns or reads"
            " more than its hidden states; launch with accelerate_configs/fsdp2.yaml, which shards any base"
        )
