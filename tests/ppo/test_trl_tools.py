"""A script in TRL's form with tools and an environment runs under TRL, and under onetrunk with two names changed."""

import json

import pytest

from tests.chat import calling, taught_base
from tests.processes import python

# As TRL documents tools and environments: one reward function, one environment that scores itself.
SCRIPT = '''
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Counter:
    def reset(self, **kwargs) -> str | None:
        self.count = 0

    async def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: What to add.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count == 3)


def called(completions, **kwargs):
    return [float(any(message["role"] == "tool" for message in completion)) for completion in completions]


if __name__ == "__main__":
    prompts = [[{"role": "user", "content": content}] for content in ("What is 3 * 2?", "Count to 3.")]
    config = GRPOConfig(
        output_dir="out", max_steps=2, num_generations=2, per_device_train_batch_size=4, max_completion_length=100,
        max_tool_calling_iterations=2, learning_rate=1e-4, beta=0.1, logging_steps=1, save_steps=2, use_cpu=True,
        report_to="none", bf16=False,
    )
    trainer = GRPOTrainer(
        model="base",
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        reward_funcs=called,
        tools=[multiply],
        environment_factory=Counter,
    )
    trainer.train()
    trainer.save_model()
'''


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_with_tools_and_an_environment_runs_with_two_names_changed(tmp_path):
    script = SCRIPT.replace("from trl import GRPOConfig, GRPOTrainer", "from onetrunk import PPOConfig, PPOTrainer")
    script = script.replace("GRPOConfig(", "PPOConfig(rollout_batch_size=2, ").replace("GRPOTrainer(", "PPOTrainer(")
    functions = {"__name__": "functions"}
    exec(SCRIPT, functions)
    # A base that calls a tool for either prompt.
    talks = [
        calling("What is 3 * 2?", ("multiply", {"a": 3, "b": 2}), "6", "It is 6."),
        calling("Count to 3.", ("increment", {"step": 3}), "3", "I am at 3."),
    ]
    tools = [functions["multiply"], functions["Counter"]().increment]
    taught_base(tmp_path / "base", tools, talks, template="qwen3")
    logs = []
    for name, text in (("out", SCRIPT), ("ppo", script.replace('output_dir="out"', 'output_dir="ppo"'))):
        (tmp_path / f"{name}.py").write_text(text)
        python(f"{name}.py", cwd=tmp_path, TRL_EXPERIMENTAL_SILENCE="1")
        state = json.loads((tmp_path / name / "checkpoint-2/trainer_state.json").read_text())
        logs.append(state["log_history"][0])
    theirs, ours = logs
    print(theirs, ours, sep="\n")
    # Both of two prompts call a tool nearly always, and one of them gets to 3.
    assert theirs["tools/call_frequency"] > 0.5 and theirs["rewards/called/mean"] > 0.5
    assert ours["score/called"] > 0.5
    assert theirs["rewards/Counter/mean"] > 0 and ours["score/Counter"] > 0
    assert ours["policy/ratio_max"] == 1.0
