"""The value head: a small network from a hidden state of the trunk to a value, and its file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from onetrunk.utils.files import check_tensors, load_tensors, save_tensors

VALUE_HEAD_FILE = "value_head.safetensors"
HEAD_WIDTH = 128
HEAD_SEED = 0


class ValueHead(nn.Module):
    """Maps a hidden state to a value, always in float32; the value is 0 at first.

    It predicts in units of the returns: its output is multiplied by their standard deviation and added to their mean
    (`moments`), so that no learning rate depends on the scale of a reward.

    Args:
        hidden_size: width H of the states.
        width: of the hidden layer, after a LayerNorm.
        device: of the weights.
    """

    def __init__(self, hidden_size: int, width: int = HEAD_WIDTH, device: torch.device | None = None):
        super().__init__()
        # The same weights on every process and in every run, without a draw from the global generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(HEAD_SEED)
            layers = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, width), nn.GELU()
            self.hidden = nn.Sequential(*layers).to(device, torch.float32)
            self.linear = nn.Linear(width, 1).to(device, torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        # [2], mean and standard deviation of the returns.
        self.register_buffer("moments", torch.tensor([0.0, 1.0], device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the values [...] of hidden states [..., H], in float32."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(self.hidden(hidden.float())).squeeze(-1) * self.moments[1] + self.moments[0]

    @torch.no_grad()
    def rescale(self, mean: float, std: float) -> None:
        """Set `moments`; the values stay as they are, but for a new head, which then predicts the mean.

        Source: PopArt (van Hasselt et al. 2016, 1602.07714).
        """
        before = self.moments.clone()
        now = torch.tensor([mean, std], dtype=before.dtype).to(before.device, non_blocking=True)
        bias = self.linear.bias * (before[1] / now[1]) + (before[0] - now[0]) / now[1]
        self.linear.bias.copy_(torch.where(self.linear.weight.any(), bias, self.linear.bias))
        self.linear.weight.mul_(before[1] / now[1])
        self.moments.copy_(now)

    def save(self, folder: str | Path) -> None:
        """Write `value_head.safetensors` into `folder`."""
        save_tensors(Path(folder) / VALUE_HEAD_FILE, {n: t.cpu().contiguous() for n, t in self._tensors().items()})

    def load(self, folder: str | Path) -> None:
        """Read `value_head.safetensors` from `folder`.

        Raises:
            ValueError: the file is missing, is of an earlier version with a value adapter, belongs to another model,
                or holds numbers that are not finite.
        """
        path = Path(folder) / VALUE_HEAD_FILE
        if not path.is_file():
            raise ValueError(f"{path} is missing; the value head is saved with the adapter: pass a folder with both")
        tensors = load_tensors(path)
        if tensors.keys() == {"weight", "bias"}:
            raise ValueError(
                f"{path} is the head of a value adapter, which an earlier version wrote (value_head: adapter) and this"
                f" one no longer reads; delete it and the folder value next to it to continue the policy with a new"
                " value head"
            )
        check_tensors(path, tensors, self._tensors(), "it was trained on another base model")
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._tensors()[name].copy_(tensor)

    def _tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("linear."): tensor for name, tensor in self.state_dict().items()}
