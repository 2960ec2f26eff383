"""MemoryCheck runs the largest batch of a PPO run once, when training begins.

It does a forward and backward at full length and discards the gradients: weights, optimizer and random numbers
stay as they are, and an out-of-memory error appears in the first minute. What is allocated later (optimizer state,
key-value cache, trunk states) is added by arithmetic.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from onetrunk.costs import ModelShape, decode_split, host_memory_bytes, sampling_bytes, trunk_states_bytes
from onetrunk.models.speedups.memory_use import is_out_of_memory, offloaded_activations
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import make_pack
from onetrunk.parallel.sharding import gathered_itemsize, local_bytes
from onetrunk.ppo.config import PPOConfig, plan_batches
from onetrunk.ppo.monitoring.metrics import peak_gib
from onetrunk.types import Pack, to_device

logger = get_logger(__name__)

GIB = 2**30


def sampled_bytes(
    args: PPOConfig, shape: ModelShape, rows: int, width: int, itemsize: float, gathered: float = 0.0
) -> int:
    """Return the bytes that sampling adds to a process: cache, logits, and the gathered share of a sharded base.

    Args:
        args: the settings of the run; in a pipeline the result is for the stage that needs most.
        rows: that decode at once, per process; a pipeline that trains counts as one process.
        gathered: bytes of a gathered weight; 0: the base is whole on every process already.
    """
    is_pipeline = args.rollout_backend == "pipelined"
    sizes = stage_sizes(args, shape) if is_pipeline else (shape.num_layers,)
    # max_rollout_rows bounds the rows that each stage adds, also where the stages train.
    is_whole_pipeline = args.pipeline_training and args.max_rollout_rows is None
    parts = sampling_bytes(
        shape,
        sizes,
        rows if is_whole_pipeline else rows * len(sizes),
        width,
        itemsize,
        batches=(args.pipeline_batches or len(sizes)) if is_pipeline else 1,
        gathered=gathered,
    )
    return int(max(sum(stage.values()) for stage in parts))


def stage_sizes(args: PPOConfig, shape: ModelShape) -> Sequence[int]:
    """Return the layers of each stage of a pipeline."""
    return args.pipeline_split or decode_split(shape, args.pipeline_stages or args.world_size)


def largest_pack(args: PPOConfig, longest_prompt: int) -> Pack:
    """Return the pack with the most tokens that a rollout can have on this process."""
    lengths = (longest_prompt, args.max_completion_length)
    most_rows, budget = plan_batches(args, args.world_size).rows_per_pack, args.microbatch_tokens
    num_rows = most_rows if budget is None else max(1, min(most_rows, budget // sum(lengths)))
    rows = [lengths] * num_rows
    rest = 0 if budget is None else budget - num_rows * sum(lengths)
    if args.padding_free and num_rows < most_rows and rest > 1:
        # A shorter row, most of it completion, fills the sequence up.
        completion = min(args.max_completion_length, rest - 1)
        rows.append((min(longest_prompt, rest - completion), completion))
    return make_pack([[0] * prompt for prompt, _ in rows], [[0] * completion for _, completion in rows], 0)


def run_largest_pack(model: TrunkModel, pack: Pack, args: PPOConfig) -> None:
    """Score and train on `pack`, and discard the gradients; raises RuntimeError if memory runs out."""
    try:
        model.train()
        if args.pipeline_training:
            from onetrunk.parallel.staged import rehearse_in_stages

            rehearse_in_stages(model, pack, args.temperature, args.entropy_coef > 0)
            return
        with torch.no_grad():
            states = model(pack=pack, roles=("trunk",)).states
            roles = ("policy", "value", "reference", *(() if model.reward_branch is None else ("reward",)))
            model(pack=pack, roles=roles, states=states, temperature=args.temperature)
        with offloaded_activations(model) if args.activation_offloading else contextlib.nullcontext():
            output = model(pack=pack, states=states, temperature=args.temperature, entropy_grad=args.entropy_coef > 0)
        # Not `backward`: DDP would count its gradients as those of a step.
        trained = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(output.logprobs.sum() + output.values.sum(), trained, allow_unused=True)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        rows, width = pack.input_ids.shape
        raise RuntimeError(
            f"out of memory with the largest pack of this run, {rows} rows x {width} tokens"
            f" ({str(error).splitlines()[0]}); lower per_device_train_batch_size, microbatch_tokens or"
            " max_completion_length, or set activation_checkpointing, or load the base in 4 bit"
        ) from error


class MemoryCheck(TrainerCallback):
    """Runs the largest pack when training begins, and prints the memory that the run will need.

    `states_stay` says whether the trunk states of a rollout stay on the trunk's device.
    """

    def __init__(self, longest_prompt: int, states_stay: bool):
        self.longest_prompt = longest_prompt
        self.states_stay = states_stay
        self.peak_bytes: int | None = None

    def on_train_begin(
        self, args: PPOConfig, state: TrainerState, control: TrainerControl, model: TrunkModel, **kwargs: Any
    ) -> None:
        if not args.check_memory:
            return
        run_largest_pack(model, to_device(largest_pack(args, self.longest_prompt), args.device), args)
        self.peak_bytes = self._forecast(model, args)
        on_cuda = args.device.type == "cuda"
        total = torch.cuda.get_device_properties(args.device).total_memory if on_cuda else host_memory_bytes()
        line = f"memory: about {self.peak_bytes / GIB:.1f} of {total / GIB:.1f} GiB at the peak of this process"
        if self.peak_bytes > total:
            logger.warning(
                f"{line}, which is too much; lower per_device_train_batch_size, microbatch_tokens or max_rollout_rows"
            )
        elif state.is_world_process_zero and not args.disable_tqdm:
            tqdm.write(line, file=sys.stderr)

    def _forecast(self, model: TrunkModel, args: PPOConfig) -> int:
        """Return an upper estimate of the bytes at the peak, after the largest pack has run.

        Its peak is measured. Optimizer state (two float32 numbers per trained weight, less in 8 bit), trunk states and
        sampling are added by arithmetic. Sampling frees its cache before packs run, so the larger of the two counts.
        """
        base = model.get_base_model()
        shape = ModelShape.from_config(base.config.get_text_config())
        rows = plan_batches(args, args.world_size).rows_per_rank
        width = self.longest_prompt + args.max_completion_length
        decoding, itemsize = min(rows, args.max_rollout_rows or rows), base.dtype.itemsize
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        optimizer = trained * (2 if "8bit" in str(args.optim) else 8)
        states = trunk_states_bytes(shape, rows * width, itemsize) if model.cut and self.states_stay else 0
        sampling = sampled_bytes(args, shape, decoding, width, itemsize, gathered_itemsize(model))
        return optimizer + states + max(int(peak_gib() * GIB), local_bytes(base) + sampling)
