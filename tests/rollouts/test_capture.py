"""The states at the cut that sampling leaves are those of a pass over prompt and completion."""

import pytest
import torch

from onetrunk.ops.packing import make_pack
from onetrunk.rollouts import LocalBackend, SamplingParams
from tests.models.branches import a_trunk
from tests.rollouts.small import KEYS, PROMPTS, assert_same, tiny


@pytest.mark.parametrize("keeps_last", [False, True])
@pytest.mark.parametrize(("family", "max_rows"), [("gpt2", None), ("gemma3", 2)])
def test_captured_states_are_those_of_a_pass_of_the_lower_layers(family, max_rows, keeps_last):
    trunk = a_trunk(family, base=tiny(family), adapter_layers="top-2")
    params = SamplingParams(max_completion_length=9, stop_token_ids=tuple(range(8, 14)))
    backend = LocalBackend(trunk, max_rows=max_rows)
    rollout = backend.generate(PROMPTS, params, KEYS, keeps_states=True, keeps_last_state=keeps_last)
    assert_same(rollout, backend.generate(PROMPTS, params, KEYS))
    lengths = [len(p) + len(c) for p, c in zip(rollout.prompt_ids, rollout.completion_ids, strict=True)]
    assert min(lengths) < max(lengths) and rollout.states.shape[:2] == (len(PROMPTS), max(map(len, PROMPTS)) + 9)
    for row, length in enumerate(lengths):
        pack = make_pack([rollout.prompt_ids[row]], [rollout.completion_ids[row]], 0)
        end = length if keeps_last else length - 1
        expected = trunk(pack=pack, roles=("trunk",)).states[:end]
        torch.testing.assert_close(rollout.states[row, :end], expected, atol=2e-5, rtol=1e-5)
        assert not rollout.states[row, end:].any()


def test_a_rollout_without_the_wish_keeps_no_states():
    trunk = a_trunk(base=tiny(), adapter_layers="top-2")
    assert LocalBackend(trunk).generate(PROMPTS, SamplingParams(3), KEYS).states is None
