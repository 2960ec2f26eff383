"""The oracle: numbers on which five PPO implementations agree, as padded float64 tensors.

oracle_ppo_cases.json is a copy of the project's oracle; its "about" line names the implementations and their versions.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from onetrunk.ops.masking import length_mask


def padded(rows):
    return pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], batch_first=True)


@pytest.fixture
def oracle():
    case = json.loads((Path(__file__).parent / "oracle_ppo_cases.json").read_text())
    names = ("old_logprobs", "ref_logprobs", "old_values", "logprobs_minus_old")
    inputs = {name: padded(case["inputs"][name]) for name in names}
    return SimpleNamespace(
        **inputs,
        logprobs=inputs["old_logprobs"] + inputs["logprobs_minus_old"],
        mask=length_mask(torch.tensor(case["inputs"]["lengths"]), 6),
        scores=torch.tensor(case["inputs"]["scores"], dtype=torch.float64),
        expected=case["expected"],
        padded=padded,
    )
