"""qwen2.5-1.5b-tools: the calculator and its reward by hand, and the chain with a tiny model that calls it."""

import json

import pytest

from tests.chat import calling, taught_base
from tests.recipes.pretrained import run_stages
from tests.stages.recipes import load_recipe_module
from tests.stages.small_runs import write_rows

calculator = load_recipe_module("qwen2.5-1.5b-tools", "calculator")


@pytest.mark.parametrize(
    ("expression", "result"),
    [("48 / 2 + 48", "72"), ("1,000*(2-.5)", "1500"), ("10/3", "3.333333333"), ("-(2)", "-2"), ("1e2", "100")],
)
def test_the_calculator_by_hand(expression, result):
    assert calculator.calculate(expression) == result


@pytest.mark.parametrize(
    "expression", ["2**9", "__import__('os')", "a+1", "1/0", "", "1+" * 200 + "1", "'a'*9", "True+1"]
)
def test_the_calculator_evaluates_nothing_but_arithmetic(expression):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator.calculate(expression)


def test_the_reward_reads_the_last_message_alone():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculate"}}]}
    tool = {"role": "tool", "content": "#### 72"}
    texts = ["So #### 7 or #### $1,072.", "#### 71", None]
    completions = [[call, tool, {"role": "assistant", "content": text}] for text in texts]
    assert calculator.correct(None, completions, answer=["1072", "72", "72"]) == [1, 0, 0]
    assert calculator.called(None, completions[:1]) == [1]


@pytest.mark.slow
def test_the_chain_calls_the_tool(workplace):
    rows = [{"question": f"What is {i} * 2?", "answer": f"{i} * 2 = 4\n#### {i * 2}"} for i in range(510)]
    write_rows(workplace / "gsm8k.jsonl", rows)
    prepare = load_recipe_module("gsm8k-0.5b", "prepare")
    prepare.prepare("gsm8k.jsonl", "gsm8k.jsonl", "runs/qwen2.5-1.5b-tools")
    prompts = [json.loads(line)["prompt"] for line in open("runs/qwen2.5-1.5b-tools/train.jsonl").readlines()[:2]]
    call = ("calculate", {"expression": "2*2"})
    talks = [calling(prompt[0]["content"], call, "4", "#### 4") for prompt in prompts]
    taught_base(workplace / "base", [calculator.calculate], talks)
    ppo = "--model_name_or_path base --num_rollouts 1 --rollout_batch_size 4 --num_minibatches 1 --lora_r 2"
    ppo += " --max_prompt_length 1500 --value_pretraining_rollouts 0 --dataset_split train[:8] --eval_strategy no"
    ppo += " --report_to none --use_cpu true"
    metrics = run_stages("qwen2.5-1.5b-tools", {"ppo": ppo, "eval": "--dataset_split train[:4] --use_cpu true"})
    assert metrics["reference"]["score/called"] > 0.5
