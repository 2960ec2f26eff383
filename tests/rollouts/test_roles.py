"""Sampling under a role gives the probabilities of that role's own forward, in every precision."""

import contextlib

import pytest
import torch
from peft import get_peft_model
from transformers import BitsAndBytesConfig

from onetrunk.models.base_model import load_base
from onetrunk.models.build import attach_score_adapter
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.models.trunk import TrunkModel
from onetrunk.rollouts import LocalBackend, SamplingParams
from tests.models.branches import lora, move
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.rollouts.small import KEYS, PROMPTS

CASES = [("float32", "llama", False), ("autocast", "gemma2", True), ("4-bit", "llama", True)]
# Float rounding between the cached decoding of one token and a forward over whole rows.
TOLERANCE = {"float32": 1e-4, "4-bit": 1e-4, "autocast": 0.05}
# What another role's probabilities differ by, on average, nats.
LEAST_DIFFERENCE = 0.15


def a_trunk(tmp_path, precision, family, is_continued):
    """Return a trunk whose roles have different probabilities; the reference is an adapter if it `is_continued`."""
    sizes, settings = {}, {"dtype": torch.float32}
    if precision == "4-bit":
        sizes["hidden_size"] = 64  # bitsandbytes quantises in blocks of 64.
        settings["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        settings["device_map"] = "cpu"
    # Narrow weights: rounding to bfloat16 then changes a logprob by less than a role does.
    folder = saved_base(tmp_path / "base", family, eos_token_id=None, initializer_range=0.1, **sizes)
    base = load_base(str(folder), **settings)
    if is_continued:
        trunk = TrunkModel.from_adapter(get_peft_model(base, lora(init_lora_weights=False)))
    else:
        trunk = TrunkModel(base, lora())
    if family == "llama":  # It has a reward adapter too.
        adapter = saved_reward_adapter(tmp_path / "reward", folder)
        attach_score_adapter(trunk, read_score_adapter(str(adapter)))
    move(trunk)
    return trunk.eval()


def own_logprobs(trunk, role, rollout):
    """Return the logprobs [t, V] of a role's full forwards at the tokens of all completions."""
    rows = []
    with torch.no_grad(), trunk.as_role(role):
        for prompt, completion in zip(rollout.prompt_ids, rollout.completion_ids, strict=True):
            logits = trunk(input_ids=torch.tensor([prompt + completion])).logits[0].float()
            rows.append(logits[len(prompt) - 1 : -1].log_softmax(-1))
    return torch.cat(rows)


@pytest.mark.parametrize(("precision", "family", "is_continued"), CASES)
def test_greedy_tokens_and_logprobs_are_those_of_the_roles_own_forward(tmp_path, precision, family, is_continued):
    if precision == "4-bit":
        pytest.importorskip("bitsandbytes")
    trunk = a_trunk(tmp_path, precision, family, is_continued)
    roles = ("policy", "reference", *(("reward",) if trunk.reward_branch is not None else ()))
    is_autocast, tolerance = precision == "autocast", TOLERANCE[precision]
    for role in roles:
        with torch.autocast("cpu", dtype=torch.bfloat16) if is_autocast else contextlib.nullcontext():
            with trunk.as_role(role):
                rollout = LocalBackend(trunk).generate(PROMPTS, SamplingParams(8, temperature=0), KEYS)
            own = {name: own_logprobs(trunk, name, rollout) for name in roles}
        tokens, sampled = torch.tensor(sum(rollout.completion_ids, [])), torch.cat(list(rollout.sampler_logprobs))
        gaps = {name: (x[torch.arange(len(x)), tokens] - sampled).abs() for name, x in own.items()}
        assert gaps.pop(role).max() < tolerance
        # A token is the most probable one, or tied with it but for rounding.
        assert (own[role].max(dim=1).values - sampled).max() < tolerance
        assert all(gap.mean() > LEAST_DIFFERENCE for gap in gaps.values())
