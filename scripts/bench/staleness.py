"""Which objective bears samples that are k rollouts old: the exact J of the policy at the end, as a share of J*.

    python scripts/bench/staleness.py --lags 2 8 --seeds 0 1 2      # 20 minutes on 1 core

Tasks A and B of tests/learning.py (one token of 16, four tokens of 8), whose optima are enumerated. A sampler with
weights of its own draws from the policy of k rollouts ago; 60 rollouts of 128 completions, one pass over each. On
`--task replies` (SmolLM2-135M, learning_pretrained.py; 32 completions per rollout) J is that of held-out requests. The
root of the repository must be in PYTHONPATH. Results: learning/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import datasets
import torch
from learning import make_trainer as make_study_trainer
from learning_pretrained import Pretrained
from learning_study import Rule
from learning_tasks import make_task
from online import GROUP, Groups
from torch import Tensor, nn

from onetrunk.models.adapters import POLICY, adapter_parameters
from onetrunk.rollouts import LocalBackend
from tests import learning

TASKS = {"four_tokens": learning.TASK_B, "one_token": learning.TASK_A}
PRETRAINED = "replies"
# Prompts on which J is enumerated.
MEASURED_PROMPTS = 64
ARMS: dict[str, dict[str, Any]] = {
    "clip, weights up to 3": {},
    "clip, weights 1/3 to 3 (default of async)": {"vllm_importance_sampling_clip_min": 1 / 3},
    "clip, weights 2/3 to 3/2": {
        "vllm_importance_sampling_clip_min": 2 / 3,
        "vllm_importance_sampling_clip_max": 3 / 2,
    },
    "clip, no weights": {"vllm_importance_sampling_correction": False},
    "dis": {"policy_objective": "dis"},
    "dis, bounds 0.8 and 3": {"policy_objective": "dis", "dis_epsilon_low": 0.8, "dis_epsilon_high": 3.0},
    "dis, target_kl 0.2": {"policy_objective": "dis", "target_kl": 0.2},
    "dis, groups of 8": {"policy_objective": "dis", **GROUP},
    "clip, weights 1/3 to 3, groups of 8": {"vllm_importance_sampling_clip_min": 1 / 3, **GROUP},
}
# A sampler that lags sets off alarms; they say nothing here.
OFF = dict.fromkeys(("logprob_gap", "negative_kl", "cut_off", "clip_fraction", "entropy", "kl"))


class Lagging:
    """Samples from the policy of `lag` rollouts ago, or the oldest that there is."""

    has_own_weights = True

    def __init__(self, lag: int):
        self.lag, self.kept = lag, []

    def sync(self, model: nn.Module, version: int) -> None:
        """Keep the policy's weights."""
        if not self.kept:
            self.model, self.local = model, LocalBackend(model)
        self.kept.append((version, self._copy()))
        del self.kept[: -(self.lag + 1)]

    def generate(self, prompt_ids: Any, params: Any, keys: Any) -> Any:
        """Sample from the oldest weights that are kept."""
        version, old = self.kept[0]
        now = self._copy()
        self._load(old, version)
        rollout = self.local.generate(prompt_ids, params, keys)
        self._load(now, self.kept[-1][0])
        return replace(rollout, policy_versions=[version] * len(prompt_ids), states=None)

    def _copy(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in adapter_parameters(self.model, POLICY).items()}

    @torch.no_grad()
    def _load(self, weights: dict[str, Tensor], version: int) -> None:
        for name, parameter in adapter_parameters(self.model, POLICY).items():
            parameter.copy_(weights[name])
        self.local.sync(self.model, version)


@torch.no_grad()
def share_of_optimum(task: learning.Task, model: nn.Module, seed: int) -> float:
    """Return J of a policy over all completions, as a share of the best policy's."""
    prompts, scores = learning.task_prompts(task, seed)[:MEASURED_PROMPTS], learning.all_scores(task)
    reference = learning.outcome_logprobs(learning.reference_model(task, seed), task, prompts)
    policy = learning.outcome_logprobs(model.eval(), task, prompts)
    objective = (policy.exp() * scores).sum(1).mean().item() - task.beta * learning.exact_kl(policy, reference)
    return objective / learning.optimum(reference, scores, task.beta).objective


@torch.no_grad()
def held_out_objective(task: Pretrained, model: nn.Module) -> float:
    """Return J = score - beta * KL of a policy, estimated by a sampled completion of every held-out request."""
    pairs, total = task.held_out_pairs(model), 0.0
    for prompt, completion in pairs:
        ids = torch.tensor([prompt + completion])
        policy = _logprobs(model, ids, len(prompt))
        with model.disable_adapter():
            kl = (policy - _logprobs(model, ids, len(prompt))).sum().item()
        total += task.score(prompt, completion) - task.beta * kl
    return total / len(pairs)


def _logprobs(model: nn.Module, ids: Tensor, start: int) -> Tensor:
    logits = model(input_ids=ids).logits[:, start - 1 : -1].float()
    return logits.log_softmax(-1).gather(2, ids[:, start:, None]).squeeze(2)


def run(
    task: learning.Task | Pretrained, arm: dict[str, Any], lag: int, rate: float, seed: int, rollouts: int
) -> float:
    """Train once; return the share of J* that the policy attains, or J."""
    settings = {"num_ppo_epochs": 1, "num_rollouts": rollouts, "learning_rate": rate, "lam": 1.0, **arm}
    settings |= {"rollout_backend": Lagging(lag), "alarm_limits": OFF}
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(task, Pretrained):
            rule = Rule(task, task.tokenizer())
            trainer = make_study_trainer(task, rule, settings, seed, rollouts, folder)
            trainer.train()
            return held_out_objective(task, trainer.model)
        trainer = learning.make_trainer(task, seed, folder, **settings)
        if "num_generations" in arm:
            trainer.stream_class = Groups
        trainer.train()
    return share_of_optimum(task, trainer.model, seed)


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=[*TASKS, PRETRAINED], default="four_tokens")
    parser.add_argument("--lags", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--work", type=Path, default=Path("runs/learning"), help="folder of the pretrained model")
    given = parser.parse_args(arguments)
    task = make_task(given.task, given.work) if given.task == PRETRAINED else TASKS[given.task]
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    columns = [(lag, rate) for lag in given.lags for rate in given.rates]
    print("| objective | " + " | ".join(f"{lag} old, rate {rate:g}" for lag, rate in columns) + " |")
    print("|---" * (1 + len(columns)) + "|", flush=True)
    for name in given.arms:
        cells = []
        for lag, rate in columns:
            shares = [run(task, ARMS[name], lag, rate, seed, given.rollouts) for seed in given.seeds]
            cells.append(f"{sum(shares) / len(shares):.2f} ({min(shares):.2f})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
