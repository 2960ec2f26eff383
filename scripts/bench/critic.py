"""What a value head can explain: record the rollouts of a run once, then fit any head to them in seconds.

    python scripts/bench/critic.py record runs/critic/tiny ppo --config recipes/tiny/ppo.yaml --output_dir runs/run
    python scripts/bench/critic.py record runs/critic/four_tokens --task four_tokens
    python scripts/bench/critic.py replay runs/critic/tiny runs/critic/four_tokens

Every head predicts a rollout before it is fitted to it, so no result comes from overfitting. The policy is that
of the recorded run for all of them. Needs the repository's root in PYTHONPATH. Results: learning/README.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onetrunk import cli
from onetrunk.models.value_head import ValueHead
from onetrunk.ops.advantages import gae
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.ppo.value_fit import FULL_ROLLOUT

LAM = 1.0
NEW_WEIGHT = 0.1
# Rollouts that a head predicts after its pretraining, or as its first ones.
FIRST_ROLLOUTS = 5
CELL = "{:+.3f}; {:.2f}; {:.2f}".format
# What a head reads: the last hidden state of the policy or of the frozen trunk, or that of the frozen middle layer.
STATES = ("policy", "frozen", "middle")


class Recording(ExperienceStream):
    """Keeps the states that a head could read, and the rewards that it has to predict."""

    folder = Path("runs/critic")
    oracle = None

    def add_advantages(self, packs: Any, sampled: Any) -> Any:
        """Return what PPO does, and keep the packs."""
        self.kept = [{name: tensor.clone() for name, tensor in self._kept(item).items()} for item in packs]
        return super().add_advantages(packs, sampled)

    def _kept(self, item: Any) -> dict[str, Tensor]:
        pack = item.pack
        (frozen, middle), (policy, _) = self._states(pack, "reference"), self._states(pack, "policy")
        kept = {"policy": policy, "frozen": frozen, "middle": middle, "mask": pack.completion_mask}
        kept |= {"rewards": item.rewards, "online": item.output.values}
        return kept if self.oracle is None else {**kept, "oracle": self.oracle(self.model, pack)}

    @torch.no_grad()
    def _states(self, pack: Any, role: str) -> tuple[Tensor, Tensor]:
        model, width = self.accelerator.unwrap_model(self.model), pack.completion_mask.shape[1]
        inputs = {"input_ids": pack.input_ids, "attention_mask": pack.attention_mask}
        with model.as_role(role):
            every = model.get_base_model().model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        # The last prompt token predicts the first completion token.
        at = pack.prompt_lengths[:, None] - 1 + torch.arange(width)
        at = at.clamp(max=pack.input_ids.shape[1] - 1)[..., None]
        last, middle = (h.gather(1, at.expand(-1, -1, h.shape[-1])) for h in (every[-1], every[len(every) // 2]))
        return last.float(), middle.float()

    def whiten(self, experiences: Any) -> Any:
        """Write the rollout."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{number}.{name}": tensor for number, pack in enumerate(self.kept) for name, tensor in pack.items()
        }
        save_file(tensors, self.folder / f"{self.state.iteration:04d}.safetensors")
        return super().whiten(experiences)


@torch.no_grad()
def four_token_oracle(seed: int) -> Any:
    """Return a function that gives the values of a policy on `four_tokens`, all completions added up."""
    from tests import learning

    task = learning.TASK_B
    reference, scores = learning.reference_model(task, seed), learning.all_scores(task)

    def values(model: Any, pack: Any) -> Tensor:
        prompts = pack.input_ids[:, : learning.PROMPT_LENGTH]
        model.eval()
        own = learning.outcome_logprobs(model, task, prompts)
        log_ratio = own - learning.outcome_logprobs(reference, task, prompts)
        number = ((pack.completion_ids - learning.FIRST) * task.num_tokens ** torch.arange(task.length).flip(0)).sum(1)
        columns = []
        for place in range(task.length):
            # Outcomes with the same first `place` tokens are neighbours.
            block = task.num_tokens ** (task.length - place)
            row, group = torch.arange(len(prompts)), number // block
            same = own.reshape(len(prompts), -1, block)[row, group]
            before = same.logsumexp(1) - (same - log_ratio.reshape(len(prompts), -1, block)[row, group]).logsumexp(1)
            rest = log_ratio.reshape(len(prompts), -1, block)[row, group] - before[:, None]
            returns = scores.reshape(-1, block)[group] - task.beta * rest
            columns.append((same.softmax(1) * returns).sum(1))
        return torch.stack(columns, 1).float()

    return values


def record(folder: Path, rest: list[str]) -> int:
    """Run a training and keep its rollouts; return the exit code."""
    Recording.folder = folder
    PPOTrainer.stream_class = Recording
    if rest[:1] != ["--task"]:
        return cli.main(rest)
    sys.path.insert(0, str(Path(__file__).parent))
    from learning import make_trainer
    from learning_study import Rule
    from learning_tasks import make_task

    task = make_task(rest[1], folder.parent)
    Recording.oracle = staticmethod(four_token_oracle(0)) if rest[1] == "four_tokens" else None
    with tempfile.TemporaryDirectory() as output:
        make_trainer(task, Rule(task, task.tokenizer()), {"learning_rate": 1e-3}, 0, 20, output).train()
    return 0


@dataclass(frozen=True)
class Head:
    """How a head is made and fitted.

    Args:
        states: which of STATES it reads.
        width: of its hidden layer; 0: linear.
        steps: of Adam after a rollout of FULL_ROLLOUT completions; fewer in proportion, as in training.
        learning_rate, batch: of a step.
        scaled: whether the scale of the returns is divided out.
        rollouts: from how many of the last rollouts tokens are drawn.
        lam: of the targets.
    """

    states: str = "policy"
    width: int = 128
    steps: int = 40
    learning_rate: float = 1e-3
    batch: int = 512
    scaled: bool = True
    rollouts: int = 1
    lam: float = LAM


HEADS = {
    "default": Head(),
    "linear": Head(width=0),
    "linear, 160 steps": Head(width=0, steps=160),
    "frozen states": Head(states="frozen"),
    "frozen middle layer": Head(states="middle"),
    "width 32": Head(width=32),
    "width 512": Head(width=512),
    "10 steps": Head(steps=10),
    "20 steps": Head(steps=20),
    "80 steps": Head(steps=80),
    "160 steps": Head(steps=160),
    "rate 3e-4": Head(learning_rate=3e-4),
    "rate 3e-3": Head(learning_rate=3e-3),
    "rate 3e-3, unscaled": Head(learning_rate=3e-3, scaled=False),
    "unscaled": Head(scaled=False),
    "last 4 rollouts": Head(rollouts=4),
    "targets of lam 0.95": Head(lam=0.95),
}


def explained(
    rollouts: list[list[dict[str, Tensor]]], values_of: Any, learn: Any = None, measured: slice | None = None
) -> tuple[float, float, float]:
    """Return mean explained variance, its share above 0, and the mean variance ratio, after the first tenth.

    As `value/explained_variance` and `value/variance_ratio`: observed returns (lam 1), and a critic of zeros with LAM.
    `measured`: other rollouts in place of those after the first tenth.
    """
    results = []
    for number, packs in enumerate(rollouts):
        columns: list[list[Tensor]] = []
        for pack in packs:
            mask, values = pack["mask"], values_of(pack) * pack["mask"]
            zeros = torch.zeros_like(values)
            advantages, plain = (gae(pack["rewards"], v, mask, 1.0, LAM)[0] for v in (values, zeros))
            _, returns = gae(pack["rewards"], zeros, mask, 1.0, 1.0)
            columns.append([x[mask] for x in (values, returns, advantages, plain)])
        values, returns, advantages, plain = (torch.cat(column) for column in zip(*columns, strict=True))
        results.append((1 - (returns - values).var() / returns.var(), advantages.var() / plain.var()))
        if learn is not None:
            learn(number, packs)
    later = torch.tensor(results)[measured or slice(max(1, len(results) // 10), None)]
    return later[:, 0].mean().item(), (later[:, 0] > 0).float().mean().item(), later[:, 1].mean().item()


class LinearHead(nn.Linear):
    """A linear map from a state to a value, which is 0 at first."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values [...] of states [..., H], in float32."""
        return super().forward(states.float()).squeeze(-1)


def fitted(
    rollouts: list[list[dict[str, Tensor]]], given: Head, measured: slice | None = None
) -> tuple[float, float, float]:
    """Fit a head rollout by rollout; return what `explained` does."""
    hidden_size = rollouts[0][0][given.states].shape[-1]
    head = ValueHead(hidden_size, given.width) if given.width else LinearHead(hidden_size)
    optimizer = torch.optim.Adam(head.parameters(), given.learning_rate)
    generator, past, moments = torch.Generator().manual_seed(0), [], (0.0, 1.0)

    def predict(pack: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            return head(pack[given.states])

    def learn(number: int, packs: list[dict[str, Tensor]]) -> None:
        nonlocal past, moments
        targets = [gae(p["rewards"], predict(p) * p["mask"], p["mask"], 1.0, given.lam)[1][p["mask"]] for p in packs]
        past = [*past, (torch.cat([p[given.states][p["mask"]] for p in packs]), torch.cat(targets))][-given.rollouts :]
        states, returns = (torch.cat(parts) for parts in zip(*past, strict=True))
        if given.scaled and given.width:
            weight, own = max(NEW_WEIGHT, 1 / (number + 1)), torch.cat(targets)
            first = (1 - weight) * moments[0] + weight * own.mean().item()
            second = (1 - weight) * (moments[0] ** 2 + moments[1] ** 2) + weight * own.square().mean().item()
            moments = (first, max(1e-6, second - first**2) ** 0.5)
            head.rescale(*moments)
        std = moments[1]
        num_rows = sum(len(pack["mask"]) for pack in packs)
        for _ in range(math.ceil(given.steps * min(1.0, len(past[-1][1]) / given.batch, num_rows / FULL_ROLLOUT))):
            rows = torch.randint(len(states), (given.batch,), generator=generator)
            loss = ((head(states[rows]) - returns[rows]) / std).square().mean() / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return explained(rollouts, predict, learn, measured)


def least_squares(rollouts: list[list[dict[str, Tensor]]], is_held_out: bool) -> float:
    """Return what a linear head explains that is fitted to a rollout by least squares.

    Args:
        is_held_out: fitted to one half of the rows and measured on the other; False: measured where it was fitted.
    """
    found = []
    for packs in rollouts[max(1, len(rollouts) // 10) :]:
        states = torch.cat([p["policy"][p["mask"]] for p in packs]).double()
        plain = [gae(p["rewards"], torch.zeros_like(p["rewards"]), p["mask"], 1.0, 1.0)[0][p["mask"]] for p in packs]
        returns, inputs = torch.cat(plain).double(), nn.functional.pad(states, (0, 1), value=1.0)
        half = len(inputs) // 2
        train, test = (slice(half), slice(half, None)) if is_held_out else (slice(None), slice(None))
        weights = torch.linalg.lstsq(inputs[train], returns[train, None], driver="gelsd").solution[:, 0]
        found.append(1 - (returns[test] - inputs[test] @ weights).var() / returns[test].var())
    return torch.stack(found).mean().item()


def load(file: Path) -> list[dict[str, Tensor]]:
    """Return the packs of a recorded rollout."""
    packs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(file).items():
        number, name = key.split(".")
        packs.setdefault(number, {})[name] = tensor
    return [packs[number] for number in sorted(packs, key=int)]


def read_recorded(folders: list[Path]) -> dict[str, list[list[dict[str, Tensor]]]]:
    """Return the rollouts of each folder by its name, and print the head of a Markdown table."""
    torch.set_num_threads(1)
    recorded = {folder.name: [load(file) for file in sorted(folder.glob("*.safetensors"))] for folder in folders}
    print("| head | " + " | ".join(recorded) + " |")
    print("|---" * (1 + len(recorded)) + "|")
    return recorded


def compare_starts(folders: list[Path], logged: int) -> int:
    """Print what the default head explains after `logged` rollouts, of which it has seen none, and all.

    The second is like a pretraining on logged rows.
    """
    recorded = read_recorded(folders)
    for seen in (0, logged):
        part = slice(seen, seen + FIRST_ROLLOUTS)
        found = [fitted(rows[logged - seen :], HEADS["default"], part) for rows in recorded.values()]
        print(f"| default, after {seen} rollouts | " + " | ".join(CELL(*numbers) for numbers in found) + " |")
    return 0


def replay(folders: list[Path], names: list[str]) -> int:
    """Print a Markdown table: explained variance, its share above 0 and the variance ratio, for each folder."""
    recorded, cell = read_recorded(folders), CELL
    for name in names:
        print(
            f"| {name} | " + " | ".join(cell(*fitted(rows, HEADS[name])) for rows in recorded.values()) + " |",
            flush=True,
        )
    for bound, of_row in (("least squares, same rows", False), ("least squares, other rows", True)):
        cells = [f"{least_squares(rows, of_row):+.3f}" for rows in recorded.values()]
        print(f"| {bound} | " + " | ".join(cells) + " |")
    known = [
        cell(*explained(rows, lambda pack: pack["oracle"])) if "oracle" in rows[0][0] else "-"
        for rows in recorded.values()
    ]
    print("| the best predictor | " + " | ".join(known) + " |")
    return 0


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run a training and keep its rollouts")
    recording.add_argument("folder", type=Path)
    recording.add_argument("rest", nargs=argparse.REMAINDER, help="ppo and its options, or --task four_tokens or sums")
    replaying = commands.add_parser("replay", help="fit heads to recorded rollouts")
    replaying.add_argument("folders", type=Path, nargs="+")
    replaying.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS))
    replaying.add_argument(
        "--logged",
        type=int,
        default=0,
        help="compare two starts of the default head instead: cold, and after this many rollouts",
    )
    given = parser.parse_args(arguments)
    if given.command == "record":
        return record(given.folder, given.rest)
    if given.logged:
        return compare_starts(given.folders, given.logged)
    return replay(given.folders, given.heads)


if __name__ == "__main__":
    sys.exit(main())
