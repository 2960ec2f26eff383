"""Mistakes of a new user: each is answered by one message that says the mend."""

import os
import resource
import subprocess
import sys

import pytest

from onetrunk import cli
from tests.processes import environment, python

GOOD = """model_name_or_path: owner/model
dataset_name: rows.jsonl
reward_funcs: [rewards.py:score]
output_dir: out
"""
REWARDS = "def score(prompts, completions, **columns):\n    return [0.0 for _ in completions]\n"
OK = "ppo --config good.yaml"
JUDGE = "judge --dataset_name rows.jsonl --output_dir out"
GIVEN = "prefs --completions given --dataset_name rows.jsonl --judge rubric --output_dir out"
REVISE = "prefs --mode revise --model_name_or_path m --dataset_name rows.jsonl --output_dir out"
# What is typed, lines added to good.yaml, what the message says, and the exit code.
MISTAKES = [
    ("pppo --config good.yaml", "", "did you mean 'ppo'?", 2),
    ("rlhf --config good.yaml", "", "expected one of sft, judge, prefs", 2),
    ("ppo", "", "dataset_name is not set; give a file", 2),
    ("ppo good.yaml", "", "for a recipe write --config good.yaml", 2),
    ("ppo --config good.yml", "", "does not exist (working folder", 2),
    ("grpo --config good.yaml", "", "the trainer here is ppo, which takes their settings", 2),
    ("dpo", "", "preferences train a reward model here (reward)", 2),
    ("--config good.yaml", "", "the verb comes first: onetrunk ppo --config FILE", 2),
    (OK, "min_p: 0.1\n", "with top_p or top_k; leave it out", 2),
    (OK, "lora_target_modules: q_proj, v_proj\n", "line 5: lora_target_modules: 'q_proj, v_proj' is one text", 2),
    (OK, "reward_weights: 1, 2\n", "'1, 2' is one text; write several as 1 2 on the command line", 2),
    (f"{OK} --report_to tensorboard,wandb", "", "write several as tensorboard wandb on the command line", 2),
    (OK, "resume_from_checkpoint: ${NO_SUCH}/a\n", "good.yaml: '${NO_SUCH}/a' names ${NO_SUCH}, which is not set", 2),
    (OK, "run_name: ${HF_TOKEN}\n", "which is a secret", 2),
    ("sft --model_name_or_path m --dataset_name d --output_dir x --run_name ../x", "", "run_name is ", 2),
    (OK, "stages: {}\n", "line 5: stages: the file is a pipeline, which onetrunk run FILE runs", 2),
    ("run --config good.yaml", "", "good.yaml has no stages; settings of one stage are run by its verb", 2),
    ("reward --model_name_or_path m --dataset_name kto.jsonl --output_dir out", "", "pair one labelled true with", 1),
    (OK, "deepspeed: zero3.json\n", "has no meaning here: the accelerate config of the launch decides", 2),
    (f"{OK} --lora_dropout 0.1", "", "lora_dropout makes the first PPO ratio differ from 1", 2),
    (f"{OK} --use_peft false", "", "use_peft is false, but ppo trains a LoRA adapter", 2),
    (OK, "beta: large\n", "beta is 'large'; expected float", 2),
    (OK, "beta: -0.1\n", "beta is -0.1; it must be 0 or more", 2),
    (OK, "num_rollouts: 1.5\n", "num_rollouts is 1.5 (float); expected int", 2),
    (OK, "eval_strategy: no\n", "is read as False by YAML; write the word in quotes", 2),
    (OK, "eval_strategy: sometimes\n", "select one of ['no', 'steps', 'epoch']", 2),
    (OK, "dtype: bf16\n", "expected one of auto, bfloat16, float16, float32", 2),
    (OK, "load_in_4bit: true\n", "set dtype to bfloat16", 2),
    (OK, "load_in_4bit: true\nload_in_8bit: true\ndtype: bfloat16\n", "8 bit and 4 bit", 2),
    (OK, "lora_task_type: SEQ_CLS\n", "it is always CAUSAL_LM", 2),
    (OK, "eval_size: 2.5\n", "a whole number of rows", 2),
    (OK, "dataset_columns: question\n", "expected a mapping as JSON", 2),
    ("ppo --model_name_or_path m --dataset_name rows.jsonl --output_dir o", "", "reward_funcs is not set", 2),
    (OK, "num_train_epochs: 0\n", "num_train_epochs is 0: no step would be trained", 2),
    (OK, "checkpoint_mirror: out\n", "checkpoint_mirror is the output_dir out", 1),
    (OK, "shuffle_window: 9\n", "shuffle_window is 9, and only streaming uses it", 2),
    (OK, "report_to: swanlab\n", "report_to names swanlab, which is not installed; pip install swanlab", 2),
    (OK, "eval_size: 0.1\neval_dataset_split: test\n", "keep one of them", 2),
    (f"{OK} --resume out/checkpoint-7", "", "there is no folder out/checkpoint-7", 1),
    (f"{OK} --dataset_name ./row.jsonl", "", "./row.jsonl does not exist (working folder", 1),
    (f"{OK} --dataset_name ~data/row.jsonl", "", "~data/row.jsonl does not exist (working folder", 1),
    (f"{OK} --model_name_or_path ./model", "", "the model './model' cannot be loaded: there is no such folder", 1),
    (f"{OK} --reward_funcs reward.py:score", "", "there is no file reward.py (working folder", 1),
    (f"{OK} --reward_funcs rewards.py:scores", "", "rewards.py has no 'scores'; did you mean score?", 1),
    (f"{OK} -lr 3", "", "lr: here learning_rate", 2),
    (f"{OK} beta=0.1", "", "'beta=0.1' is not an option; write --beta VALUE", 2),
    (f"{OK} --reward_funcs score", "", "neither 'package.module.name' nor 'path/to/file.py:name'", 1),
    ("sft --config good.yaml", "", "reward_funcs: an option of onetrunk ppo, eval, chat, which this command", 2),
    ("distill --pipeline_training true", "", "pipeline_training: an option of onetrunk ppo, which this command", 2),
    ("eval --config good.yaml", "kl_coef: 0.1\n", "kl_coef: beta in other commands; this", 2),
    ("eval --config good.yaml --top_k -1", "", "top_k is -1; set a whole number of tokens", 2),
    ("serve", "", "no model is named; write onetrunk serve MODEL --port 8000", 2),
    ("serve org/m --max_lora_rank 513", "", "max_lora_rank is 513; set it from 1 to 512", 2),
    ("serve org/m --dtype int8", "", "argument --dtype: invalid choice", 2),
    (JUDGE, "", "judge is not set; name the judges to measure", 2),
    (f"{JUDGE} --judge rubric --judge_budget_usd 3", "", "judge_prices is not", 2),
    (f"{GIVEN} --mode revise", "", "completions are given; leave mode revise and use_vllm out", 2),
    (f"{GIVEN} --model_name_or_path m", "", "which would sample; leave one of them out", 2),
    (f"{GIVEN} --constitution ~data/c.yaml", "", "the constitution ~data/c.yaml does not exist", 1),
    (f"{GIVEN} --overlong_prompts drop", "", "completions are given; leave max_prompt_length and overlong_prompts", 2),
    (f"{GIVEN} --max_prompt_length 9", "", "completions are given; leave max_prompt_length and overlong_prompts", 2),
    (f"{REVISE} --judge rubric", "", "judge is set and mode is revise, in which nothing is judged; leave", 2),
    (f"{GIVEN} --limit 0", "", "limit is 0; set it to 1 or more", 2),
    ("recipes copy tinny", "", "no recipe is called 'tinny'; there are constitutional-1.5b, ", 1),
    ("recipes copy tiny/ppo", "", "no recipe is called 'tiny/ppo'", 1),
    ("recipes", "", "list|copy", 2),
    (f"{OK} --num_processes 2 --accelerate_config zero3", "", "accelerate_config is 'zero3'", 2),
    (f"{OK} --num_processes 2 --learning_rat 1", "", "did you mean 'learning_rate'?", 2),
    (f"{OK} --num_processes two", "", "argument --num_processes/--num-processes: invalid int value: 'two'", 2),
    ("prefs --num_processes 2", "", "num_processes: set it on the command line of sft, reward", 2),
    ("run absent.yaml", "", "absent.yaml does not exist (working folder", 2),
]


@pytest.fixture
def in_folder(empty_folder):
    (empty_folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (empty_folder / "kto.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    (empty_folder / "rewards.py").write_text(REWARDS)
    (empty_folder / "good.yaml").write_text(GOOD)
    return empty_folder


@pytest.mark.parametrize(("typed", "lines", "message", "expected"), MISTAKES)
def test_a_mistake_is_answered_by_one_message(in_folder, capsys, typed, lines, message, expected):
    (in_folder / "good.yaml").write_text(GOOD + lines)
    assert cli.main(typed.split()) == expected
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1


def test_all_unknown_keys_of_a_file_and_of_the_command_line_are_named_at_once(in_folder, capsys):
    (in_folder / "good.yaml").write_text(GOOD + "lr: 1\nzzz: 2\nbeta: true\n")
    assert cli.main([*OK.split(), "--lora_rank", "8", "--learning_rat", "1"]) == 2
    err = capsys.readouterr().err
    for part in ("line 5: lr: here learning_rate", "line 6: unknown key 'zzz'", "line 7: beta is True (bool)"):
        assert part in err
    assert "unknown key 'lora_rank': did you mean 'lora_r'?" in err and "did you mean 'learning_rate'?" in err
    assert len(err.splitlines()) == 6, "one fault a line"


def test_a_reader_that_ends_early_is_no_error():
    """As in `onetrunk ppo --help all | head -1`; here nobody reads at all."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        command = [sys.executable, "-m", "onetrunk", "ppo", "--help", "all"]
        process = subprocess.run(command, env=environment(), stdout=nobody, stderr=subprocess.PIPE, text=True)
    assert (process.returncode, process.stderr) == (0, "")


# Commands typed in a real process: their exit codes, and the modules that they may not import.
PROBE = """
import sys
from onetrunk.cli import main
for typed in sys.argv[1:]:
    try:
        code = main(typed.split())
    except SystemExit as left:
        code = left.code
    assert code == (0 if "--help" in typed else 2), (typed, code)
    heavy = {"torch", "transformers", "trl", "datasets", "peft", "accelerate"} & {*sys.modules}
    assert not heavy, (typed, heavy)
"""


@pytest.mark.parametrize("typed", ["sft --help all", f"{OK} --lr 3"])
def test_help_and_mistakes_take_under_a_second_and_a_half_of_processor_time(in_folder, typed):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python("-c", PROBE, typed)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


def test_help_and_mistakes_import_nothing_heavy(in_folder):
    typed = ["--help", "ppo --config absent.yaml", "report nope", "export nope --output_dir x", "serve runs/nope"]
    python("-c", PROBE, *typed, "chat ./nope")
