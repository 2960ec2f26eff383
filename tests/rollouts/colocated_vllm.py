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
from onetrunk.types import Rollout
from tests.ppo.support import logged, lora, make_trainer, trained_weights
from tests.rollouts.scripted import Scripted
from tests.rollouts.small import KEYS, PROMPTS, SERVED_SIZES
from tests.rollouts.test_vllm import assert_sampled_from, shaken
from tests.rollouts.vllm_episodes import cached_tokens, require_asked, story_trainer
from tests.tiny import tiny_model

STOPS = tuple(range(8, 14))
SAMPLED, GREEDY = SamplingParams(12, 0.7, STOPS), SamplingParams(12, 0.0, STOPS)
ON_GPU = torch.cuda.is_available()
# Rounding: of float32 on a CPU, of bfloat16 on a GPU, where vLLM has adapters in 16 bits only. In bfloat16 vLLM on a
# CPU differs from our forward by up to 0.05. Old weights are wrong by more than 1.
TOLERANCE, LARGEST_GAP = (0.1, 0.1) if ON_GPU else (5e-5, 5e-4)


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
        rollout = backend.generate(PROMPTS, SAMPLED, KEYS)
        assert rollout.policy_version == version
        assert_sampled_from(model, rollout, 0.7, TOLERANCE)
        greedy = backend.generate(PROMPTS, GREEDY, KEYS)
        assert_sampled_from(model, greedy, 1.0, TOLERANCE)
        assert backend._llm.llm_engine.list_loras() == {backend._num_loads}
        if not ON_GPU:  # In bfloat16 rounding decides some tokens.
            require_equal_tokens(model, backend, rollout, greedy)
    with model.as_role("reference"):
        backend.sync(model, 3)
        assert_sampled_from(model, backend.generate(PROMPTS, SamplingParams(12, 1.0), KEYS), 1.0, TOLERANCE)
    backend.close()
    print("sampled", flush=True)


def require_equal_tokens(model: torch.nn.Module, backend: ColocatedBackend, rollout: Rollout, greedy: Rollout) -> None:
    """Check that the engine repeats a rollout, also as episodes of one turn, and that its greedy tokens are ours."""
    assert backend.generate(PROMPTS, SAMPLED, KEYS).completion_ids == rollout.completion_ids
    once = backend.generate_turns(PROMPTS, SAMPLED, KEYS, Scripted(lambda row, turn: None))
    assert (once.completion_ids, once.stopped) == (rollout.completion_ids, rollout.stopped)
    assert greedy.completion_ids == LocalBackend(model).generate(PROMPTS, GREEDY, KEYS).completion_ids
    episodes = PROMPTS, SamplingParams(40, 0.0, STOPS), KEYS
    ours = LocalBackend(model).generate_turns(*episodes, Scripted())
    theirs = backend.generate_turns(*episodes, Scripted())
    assert (theirs.completion_ids, theirs.turn_ids) == (ours.completion_ids, ours.turn_ids)


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
    sleep = {"vllm_enable_sleep_mode": sleeps, "use_cpu": not ON_GPU}
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
    assert len(gaps) == 3 and max(gaps) < LARGEST_GAP, gaps
    after = trained_weights(trainer.model)
    assert any(not after[name].equal(weight) for name, weight in before.items() if "lora_B.default" in name)
    check_gap(trainer)
    trainer.sampler.backend.close()


def noting(function, note):
    """Return a function that also calls `note` with its result."""

    def noted(*args, **kwargs):
        result = function(*args, **kwargs)
        note(result)
        return result

    return noted


class Recording(ColocatedBackend):
    """Keeps the requests of each wave with their answers, the tokens that the engine had cached, and its sleep.

    On a CPU the engine sleeps too: it takes no requests and forgets what it has cached, but frees no memory.
    """

    def check(self) -> None:
        pass

    def _start(self, settings):
        super()._start(settings)
        self.waves, self.cached, self.slept = [], [], []
        llm, engine = self._llm, self._llm.llm_engine
        llm.wake_up = noting(llm.wake_up, lambda _: self.slept.append("wake_up"))
        llm.sleep = noting(llm.sleep, lambda _: self.slept.append("sleep"))
        engine.step = noting(engine.step, lambda rows: self.cached.extend(row.num_cached_tokens for row in rows))

    def _complete(self, requests, adapter, progress=None):
        completed = super()._complete(requests, adapter, progress)
        if adapter is not None:
            self.waves.append(list(zip(requests, completed, strict=True)))
        return completed


def play(base: Path, folder: Path, sleeps: bool) -> None:
    """Train on episodes of several turns, with exact ids, cached prefixes, and one sleep per rollout."""
    backend, played, told = Recording(folder / "adapters", sleeps=sleeps, gpu_memory_utilization=0.2), [], []
    settings = {"num_rollouts": 3, "temperature": 0.8, "use_cpu": not ON_GPU}
    trainer = story_trainer(folder, base, played, backend, **settings)
    backend.progress = lambda *numbers: told.append(numbers)
    backend.cached.clear()
    backend.slept.clear()
    trainer.train()
    require_asked([(r.prompt_ids, c.token_ids) for wave in backend.waves for r, c in wave], played)
    # Rows of one wave have limits of their own.
    assert any(len({request.params.max_completion_length for request, _ in wave}) > 1 for wave in backend.waves)
    assert max(logged(trainer, "sampling/logprob_gap_max")) < LARGEST_GAP
    assert logged(trainer, "policy/ratio_max")[0] == 1.0
    assert len(backend.waves) > 2 * 3 and backend.slept == ["wake_up", "sleep"] * 3 * sleeps
    if not ON_GPU:  # On a GPU blocks are smaller.
        assert sum(backend.cached) == sum(map(cached_tokens, played))
    assert [done for done, _, _ in told].count(6) == 3 and {total for _, total, _ in told} == {6}
    backend.close()
    print("played", flush=True)


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
    tiny_model("llama", **SERVED_SIZES).to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(base)
    sample(base, args.folder / "adapters", args.sleeps)
    if not ON_GPU:
        keep_weights_as_they_are()
    train(base, args.folder / "run", args.sleeps)
    # On a CPU an engine sleeps in name only, which is enough to see when it is woken.
    play(base, args.folder / "episodes", sleeps=args.sleeps or not ON_GPU)
    print("sampled and trained")


if __name__ == "__main__":
    main()
