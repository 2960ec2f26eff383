"""What a plan makes of episodes whose contexts are compacted."""

import pytest

from onetrunk.plan.job import job_of
from onetrunk.ppo.config import PPOConfig
from tests.plan.support import read_model

SHAPE = {"max_prompt_length": 100, "max_completion_length": 8000, "max_turn_length": 100}


def job(**settings):
    values = {**vars(PPOConfig(output_dir="unused", use_cpu=True, num_rollouts=2, **SHAPE, **settings))}
    return job_of({**values, "lora_r": 16}, read_model("Qwen/Qwen2.5-7B"), completion_tokens=3000, prompt_tokens=80)


def test_contexts_are_rows_of_their_own():
    whole, divided = job(), job(max_context_length=1100)
    # 3,000 tokens in contexts of 1,000 beside the prompt.
    assert divided.rows == 3 * whole.rows and divided.lengths.completion == 1000
    assert (whole.lengths.width, divided.lengths.width) == (8100, 1100)
    assert any("3 contexts per episode" in line for line in divided.assumed)


def test_a_context_needs_room_beside_the_prompt():
    text = "max_context_length is 100, and prompts have up to 100 tokens; raise it, or lower max_prompt_length"
    with pytest.raises(ValueError, match=text):
        job(max_context_length=100)
