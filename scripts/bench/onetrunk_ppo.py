"""One process of our PPOTrainer on the workload: one frozen trunk, a value head, a reward model.

    python scripts/bench/onetrunk_ppo.py --shape base --mixed --adapter_layers top-4

It prints one JSON line. The trainer is used as a user would: text prompts, the reward model through text with its own
tokenizer, the local backend. What is added are marks at the phases' borders and a processor that ends completions.
"""

from __future__ import annotations

import os

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

if "cuda" not in sys.argv and "--nf4" not in sys.argv:
    # PEFT and transformers import these development tools wherever they are installed: 120 MB that a plain
    # installation, such as TRL's here, does not have.
    sys.modules.update(dict.fromkeys(("bitsandbytes", "scipy", "triton")))

import torch
import transformers
from datasets import Dataset
from decode_profile import decode_profile
from peft import LoraConfig, get_peft_model
from roofline import Ceilings, Iteration, decode_seconds, least_seconds, measure_ceilings
from torch import Tensor
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig, LogitsProcessor, TrainerCallback
from workload import EOS, FORBIDDEN, LORA, PAD, Meter, Workload

from onetrunk import PPOConfig, PPOTrainer, __version__
from onetrunk.types import Experience, Rollout


class ForceLengthOfRunningRows(LogitsProcessor):
    """Does what ForceLength does in a loop that drops rows as they end, and adds rows that waited after the others.

    Args:
        work: the workload.
        prompt_ids: of the rows.
        lengths: of their completions.
    """

    def __init__(self, work: Workload, prompt_ids: list[list[int]], lengths: list[int]):
        self.longest = work.completion
        # Prompts are random words, so each is unique.
        self.length_of = {tuple(ids): length for ids, length in zip(prompt_ids, lengths, strict=True)}
        # Of the rows that decode: the lengths of their completions, and how many tokens these have.
        self.lengths = self.counts = torch.zeros(0, dtype=torch.int64)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        runs = self.counts < self.lengths
        new = [self._length(row) for row in input_ids[int(runs.sum()) :].tolist()]
        self.lengths = torch.cat([self.lengths[runs], torch.tensor(new, dtype=torch.int64)])
        self.counts = torch.cat([self.counts[runs], torch.zeros(len(new), dtype=torch.int64)]) + 1
        if len(self.lengths) != len(scores):
            raise RuntimeError(f"{len(scores)} rows decode where the forced lengths leave {len(self.lengths)}")
        # On the CPU, so that a GPU is not waited for at every token.
        ends = ((self.counts == self.lengths) & (self.lengths < self.longest)).nonzero()[:, 0].to(scores.device)
        scores[:, EOS] = FORBIDDEN
        if len(ends):
            scores[ends] = FORBIDDEN
            scores[ends, EOS] = 0.0
        return scores

    def _length(self, row: list[int]) -> int:
        """Return the length of the completion of a row that has only its prompt, behind padding."""
        return self.length_of[tuple(i for i in row if i != PAD)]


def rule(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return scores that cost nothing: of the numbers of words."""
    return [float(len(text.split()) % 7) for text in completions]


class Marks(TrainerCallback):
    """Marks the phases' borders on the meter and forces the lengths of each rollout."""

    def __init__(self, work: Workload, meter: Meter):
        self.work = work
        self.meter = meter
        self.rollouts: list[Rollout] = []
        self.tokens = self.padded_tokens = self.forwards = 0
        self.padding_free = False

    def attach(self, trainer: PPOTrainer) -> None:
        """Wrap the sampler and the training step of a trainer."""
        sample, step, sampler = trainer.sampler.generate, trainer.training_step, trainer.sampler
        self.padding_free = trainer.args.padding_free

        def generate(batch: Any, **kwargs: Any) -> Rollout:
            self.meter.enter("generate")
            lengths = self.work.completion_lengths(len(self.meter.iterations) - 1)
            sampler.backend.logits_processor = ForceLengthOfRunningRows(self.work, batch.prompt_ids, lengths)
            rollout = sample(batch, **kwargs)
            if [len(ids) for ids in rollout.completion_ids] != lengths:
                raise RuntimeError("the completions do not have the lengths that were to be forced")
            self.rollouts.append(replace(rollout, states=None))
            self.meter.enter("score")
            return rollout

        def training_step(*args: Any, **kwargs: Any) -> Tensor:
            self.meter.enter("update")
            self._count(args[1]["minibatch"].experiences)
            return step(*args, **kwargs)

        object.__setattr__(sampler, "generate", generate)  # The record is frozen.
        trainer.training_step = training_step

    def _count(self, experiences: Sequence[Experience]) -> None:
        self.forwards += len(experiences)
        for experience in experiences:
            mask = experience.pack.attention_mask
            self.tokens += int(mask.sum())
            self.padded_tokens += int(mask.sum()) if self.padding_free else mask.numel()

    @property
    def update_packs(self) -> dict[str, float]:
        """Forwards of the update in one epoch, and the share of their tokens that is padding."""
        epochs = len(self.rollouts) * self.work.epochs
        return {"forwards": self.forwards / epochs, "padding": round(1 - self.tokens / self.padded_tokens, 3)}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.enter("between")


def ppo_config(work: Workload, folder: str, given: argparse.Namespace) -> PPOConfig:
    """Return our settings of the same iteration; a forward holds as many padded tokens as TRL's, or fewer.

    `microbatch_tokens` sets another number.
    """
    rows = {"per_device_train_batch_size": work.microbatch}
    if work.mixed or given.microbatch_tokens:
        budget = given.microbatch_tokens or work.microbatch * (work.prompt + work.completion)
        rows = {"per_device_train_batch_size": work.rollout, "microbatch_tokens": budget}
    names = ("trunk_cache", "padding_free", "max_rollout_rows")
    settings = {f.name: getattr(given, f.name) for f in fields(PPOConfig) if f.name in names}
    return PPOConfig(
        output_dir=folder,
        rollout_batch_size=work.rollout,
        num_rollouts=work.iterations,
        num_ppo_epochs=work.epochs,
        num_minibatches=given.num_minibatches,
        max_completion_length=work.completion,
        beta=0.05,
        lam=0.95,  # TRL's default.
        adapter_layers=given.adapter_layers,
        shuffle_dataset=False,
        use_cpu=work.device == "cpu",
        bf16=work.dtype == "bfloat16",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **rows,
        **settings,
    )


def save_reward_adapter(base: str, folder: str, adapter_layers: str) -> str:
    """Write a LoRA and a score head on `base`, on the layers that the policy adapts, into a folder; return it."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    total = model.config.num_hidden_layers
    first = 0 if adapter_layers == "all" else total - int(adapter_layers[4:])
    config = LoraConfig(**{**LORA, "task_type": "SEQ_CLS"}, layers_to_transform=list(range(first, total)))
    get_peft_model(model, config).save_pretrained(folder)
    return folder


def build_trainer(work: Workload, folder: str, given: argparse.Namespace, marks: Marks) -> PPOTrainer:
    """Return the trainer of the workload, marks attached."""
    tokenizer = work.tokenizer()
    # A prompt ends with a space, so that prompt and completion make the same words again when they are one text.
    texts = [tokenizer.decode(ids) + " " for ids in work.prompts()]
    model, quantization = work.policy(), None
    has_model = not (given.reward_adapter or given.learn_only)
    reward = work.scalar_model(work.small_reward) if has_model else rule
    if given.reward_adapter:
        model.save_pretrained(f"{folder}/base")
        model = f"{folder}/base"
        reward = save_reward_adapter(model, f"{folder}/reward", given.adapter_layers)
    if given.nf4:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=getattr(torch, work.dtype)
        )
        model.save_pretrained(f"{folder}/base")
        model = f"{folder}/base"
    trainer = PPOTrainer(
        model=model,
        reward_funcs=reward,
        reward_processing_classes=None if given.learn_only else tokenizer,
        args=ppo_config(work, folder, given),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        quantization_config=quantization,
        peft_config=LoraConfig(**LORA),
        callbacks=[marks],
    )
    marks.attach(trainer)
    return trainer


def parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the options: those of the workload, and what only our trainer has."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    Workload.add_options(parser)
    parser.add_argument("--adapter_layers", default="all", help="all, or top-k")
    parser.add_argument("--num_minibatches", type=int, default=1, help="optimizer steps per epoch")
    parser.add_argument("--trunk_cache", default="auto")
    parser.add_argument("--microbatch_tokens", type=int, default=0, help="of a forward; 0: as many as TRL's have")
    parser.add_argument("--max_rollout_rows", type=int, help="most rows that decode at once; default: all")
    parser.add_argument("--padding_free", action="store_true", help="the rows of a forward in one sequence")
    parser.add_argument("--reward_adapter", action="store_true", help="a LoRA on the trunk scores, no second model")
    parser.add_argument("--learn_only", action="store_true", help="a rule scores, and sampling takes 0 s")
    parser.add_argument("--nf4", action="store_true", help="the base in 4 bit")
    parser.add_argument("--profile_tokens", type=int, default=0, help="measure a decoded token over this many; 0: not")
    return parser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    return parser(__doc__).parse_args(arguments)


def itemsize(work: Workload, given: argparse.Namespace) -> float:
    """Return the bytes of a weight of the base's layers."""
    return 0.5 if given.nf4 else getattr(torch, work.dtype).itemsize


def roofline(work: Workload, given: argparse.Namespace, marks: Marks, ceilings: Ceilings) -> dict[str, float]:
    """Return the ceilings of this machine and each phase's least seconds over its median."""
    layers = work.config().num_hidden_layers
    counted = marks.rollouts[1:]
    least = [
        least_seconds(
            Iteration(
                policy=work.config(),
                reward=None if given.reward_adapter else work.scalar_config(work.small_reward),
                trained_layers=layers if given.adapter_layers == "all" else int(given.adapter_layers[4:]),
                epochs=work.epochs,
                prompts=[len(ids) for ids in rollout.prompt_ids],
                completions=[len(ids) for ids in rollout.completion_ids],
                itemsize=itemsize(work, given),
            ),
            ceilings,
        )
        for rollout in counted
    ]
    measured = marks.meter.results()["seconds"]
    fractions = {
        phase: round(sum(row[phase] for row in least) / len(least) / measured[phase], 3)
        for phase in least[0]
        if measured[phase]
    }
    return {
        "gemm_gflops": round(ceilings.flops / 1e9),
        "copy_gb_per_s": round(ceilings.bandwidth / 1e9, 1),
        **fractions,
    }


def one_token(
    work: Workload, given: argparse.Namespace, trainer: PPOTrainer, now: Callable[[], float], ceilings: Ceilings
) -> dict[str, Any]:
    """Return what one decoded token of a whole rollout costs after training, and its share of the roofline."""
    backend, prompts = trainer.sampler.backend, work.prompts()[: work.rollout]
    backend.logits_processor = None
    costs = {"rows": len(prompts), **decode_profile(backend, prompts, given.profile_tokens, now)}
    if costs["seconds"]:
        least = decode_seconds(work.config(), len(prompts), itemsize(work, given), ceilings)
        costs["tokens_per_s"] = round(len(prompts) / costs["seconds"])
        costs["roofline"] = round(least / costs["seconds"], 3)
    return costs


def main() -> None:
    given = parse()
    work = Workload.from_options(given)
    torch.set_num_threads(1)
    meter = Meter(work.device, uncounted="generate" if given.learn_only else "")
    meter.start()
    marks = Marks(work, meter)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(work, folder, given, marks)
        trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    result = {"implementation": f"onetrunk {__version__}", **meter.results(), "trained": trained, **versions}
    tokens = [sum(map(len, r.prompt_ids)) + sum(map(len, r.completion_ids)) for r in marks.rollouts[1:]]
    sampled = [sum(map(len, r.completion_ids)) for r in marks.rollouts[1:]]
    result |= {"tokens": tokens, "sampled_tokens": sampled, "update_packs": marks.update_packs}
    # Not 1 if scoring and the first update of a rollout compute different bits.
    ratios = [row["policy/ratio_max"] for row in trainer.state.log_history if "policy/ratio_max" in row]
    result["first_ratio"] = max(ratios[:: work.epochs * given.num_minibatches])
    ceilings = measure_ceilings(work.device, getattr(torch, work.dtype), meter.now)
    if not given.learn_only:
        result["roofline"] = roofline(work, given, marks, ceilings)
    if given.profile_tokens:
        result["decode"] = one_token(work, given, trainer, meter.now, ceilings)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
