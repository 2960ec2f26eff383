"""ColocatedBackend and PPO on the real engine of vLLM; a process of its own, in an environment that has vLLM.

python -m tests.rollouts.colocated_vllm FOLDER [--sleeps]
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from onetrunk.models.build import build_trunk
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rollouts import ColocatedBackend, LocalBackend, SamplingParams
from tests.ppo.support import logged, lora, make_trainer, trained_weights
from tests.rollouts.small import KEYS, PROMPTS, SERVED_SIZES
from tests.rollouts.test_vllm import assert_sampled_from, shaken
from tests.tiny import tiny_model

STOPS = tuple(range(8, 14))
# Rounding of float32 on a CPU; on a GPU vLLM multiplies adapters in TF32. Old weights are wrong by more than 1.
TOLERANCE = 2e-2 if torch.cuda.is_available() else 1e-5


def sample(base: Path, folder: Path, sleeps: bool) -> None:
    """Sample three versions and the reference, each from its own weights."""
    torch.manual_seed(0)
    model = shaken(build_trunk(str(base), lora()))
    backend = ColocatedBackend(folder, sleeps=sleeps, gpu_memory_utilization=0.2)
    generators = torch.get_rng_state(), random.getstate()
    backend.check_policy(model, 64)
    assert generators[0].equal(torch.get_rng_state()) and generators[1] == random.getstate()
    for version in range(3):
        backend.sync(shaken(model, version), version)
        rollout = backend.generate(PROMPTS, SamplingParams(12, 0.7, STOPS), KEYS)
        assert rollout.policy_version == version
        assert_sampled_from(model, rollout, 0.7, TOLERANCE)
        again = backend.generate(PROMPTS, SamplingParams(12, 0.7, STOPS), KEYS)
        assert again.completion_ids == rollout.completion_ids
        greedy = SamplingParams(12, 0.0, STOPS)
        ours = LocalBackend(model).generate(PROMPTS, greedy, KEYS)
        assert backend.generate(PROMPTS, greedy, KEYS).completion_ids == ours.completion_ids
        assert backend._llm.llm_engine.list_loras() == {backend._num_loads}
    with model.as_role("reference"):
        backend.sync(model, 3)
        assert_sampled_from(model, backend.generate(PROMPTS, SamplingParams(12, 1.0), KEYS), 1.0, TOLERANCE)
    backend.close()
    print("sampled", flush=True)


def keep_weights_as_they_are() -> None:
    """Switch vLLM's packed kernels for CPUs off. They drop the weights that the trainer could read."""
    from vllm.model_executor.layers import utils

    def plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def train(base: Path, folder: Path, sleeps: bool) -> None:
    """Train three rollouts of PPO whose samples are the engine's, on one copy of the base."""
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2}
    model = AutoModelForCausalLM.from_pretrained(base)
    sleep = {"vllm_enable_sleep_mode": sleeps, "use_cpu": not torch.cuda.is_available()}
    trainer = make_trainer(folder, model=model, num_rollouts=3, temperature=0.8, **settings, **sleep)
    before = trained_weights(trainer.model)
    (engine,) = trainer.sampler.backend._llm.apply_model(lambda model: model)
    theirs = {name: p for name, p in engine.named_parameters() if "lora_" not in name}
    ours = [p for name, p in trainer.model.get_base_model().named_parameters() if "lora_" not in name]
    spans = [(p.data_ptr(), p.data_ptr() + p.nbytes) for p in theirs.values()]
    assert all(any(a <= p.data_ptr() and p.data_ptr() + p.nbytes <= b for a, b in spans) for p in ours)
    copies = {name: weight.clone() for name, weight in theirs.items()}
    trainer.train()
    assert all(weight.equal(copies[name]) for name, weight in theirs.items())
    gaps = logged(trainer, "sampling/logprob_gap_max")
    assert len(gaps) == 3 and max(gaps) < 10 * TOLERANCE, gaps
    after = trained_weights(trainer.model)
    assert any(not after[name].equal(weight) for name, weight in before.items() if "lora_B.default" in name)
    check_gap(trainer)
    trainer.sampler.backend.close()


def check_gap(trainer: PPOTrainer) -> None:
    """Check that both roles have the same logprobs in the trainer and in the engine, after training."""
    model, backend = trainer.model, trainer.sampler.backend
    for version, role in enumerate(("policy", "reference"), 100):
        with model.as_role(role):
            backend.sync(model, version)
            rollout = backend.generate([ids[:4] for ids in PROMPTS], SamplingParams(6, 1.0), KEYS)
            assert_sampled_from(model, rollout, 1.0, TOLERANCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sleeps", action="store_true")
    args = parser.parse_args()
    base = args.folder / "base"
    tiny_model("llama", **SERVED_SIZES).save_pretrained(base)
    sample(base, args.folder / "adapters", args.sleeps)
    if not torch.cuda.is_available():
        keep_weights_as_they_are()
    train(base, args.folder / "run", args.sleeps)
    print("sampled and trained")


if __name__ == "__main__":
    main()
