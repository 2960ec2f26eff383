"""The stages end to end through the real command line, on the tiny recipe with very small settings."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from onetrunk import cli
from onetrunk.utils.files import load_tensors
from tests.stages.recipes import ROOT, load_recipe_module
from tests.stages.small_runs import metrics, read_rows, write_rows

REWARDS = [f"{ROOT}/recipes/tiny/rewards.py:{name}" for name in ("on_task", "polite", "concise", "finished")]
PPO = "--rollout_batch_size 8 --max_completion_length 6 --num_ppo_epochs 2 --num_minibatches 2 --eval_strategy no"
PPO = f"{PPO} --per_device_train_batch_size 4 --lora_r 2".split()
UNSCORED = "--reward_funcs silent.py:judge --reward_weights 1 --max_completion_length 6 --output_dir runs/none".split()
pytestmark = pytest.mark.usefixtures("in_folder")


def run(verb, *options):
    """Run a verb on the tiny recipe without judge and monitor; later options override earlier ones."""
    settings = yaml.safe_load((ROOT / f"recipes/tiny/{verb}.yaml").read_text())
    without = ("judge", "constitution", "rubric", "monitor_")
    settings = {key: value for key, value in settings.items() if not key.startswith(without)}
    Path(f"{verb}.yaml").write_text(yaml.safe_dump(settings))
    rewards = [] if verb == "sft" else ["--reward_funcs", *REWARDS, "--reward_weights", *["0.25"] * 4]
    return cli.main([verb, "--config", f"{verb}.yaml", *rewards, *options])


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with data, base, sft and ppo of the tiny recipe, as the demo leaves them, but hardly trained."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "silent.py").write_text("def judge(completions, **kwargs):\n    return [None] * len(completions)\n")
        load_recipe_module("tiny", "make_data").make_all(num_sft_rows=200)
        held_out = folder / "runs/tiny/held_out.jsonl"
        held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:10]))
        assert run("sft", "--max_steps", "4", "--logging_steps", "2") == 0
        assert run("ppo", *PPO, "--num_rollouts", "2", "--save_steps", "3", "--save_total_limit", "3") == 0
    return folder


def test_eval_of_an_adapter_puts_it_beside_what_it_started_from(capsys):
    assert run("eval", "--max_completion_length", "6", "--seed", "0") == 0
    out = capsys.readouterr().out
    assert "before" in out and "after" in out and "samples" in out
    # Same prompts, seed and weights as at the end of the PPO stage: the same figures.
    evaluated, trained_figures = metrics("runs/tiny/eval"), metrics("runs/tiny/ppo")
    assert trained_figures["steps"] == 8 and trained_figures["num_prompts"] == 10
    for role in ("reference", "policy"):
        low, high = evaluated[role].pop("score/interval")
        assert low <= evaluated[role]["score/mean"] <= high
    assert evaluated["reference"] == trained_figures["reference"] and "kl/ref" not in evaluated["reference"]
    assert evaluated["policy"] == pytest.approx(trained_figures["policy"], abs=1e-6)
    for role in ("reference", "policy"):
        rows = read_rows(Path(f"runs/tiny/eval/samples-{role}.jsonl"))
        assert len(rows) == 10 and {"prompt", "completion", "score", "score/polite"} <= set(rows[0])


@pytest.mark.slow
def test_an_evaluation_with_one_token_left_is_greedy_whatever_the_seed():
    found = []
    for name, options in (("one", "--top_k 1 --seed 1"), ("two", "--top_p 0.0001 --seed 2"), ("whole", "--seed 1")):
        out = ["--output_dir", f"runs/truncated-{name}", "--max_completion_length", "6"]
        assert run("eval", *options.split(), *out) == 0
        found.append([row["completion"] for row in read_rows(Path(f"runs/truncated-{name}/samples-policy.jsonl"))])
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_ppo_goes_on_from_an_adapter_and_eval_compares_with_that_adapter():
    options = ["--model_name_or_path", "runs/tiny/ppo", "--output_dir", "runs/further", "--save_strategy", "no"]
    lora = ["--lora_r", "16", "--lora_alpha", "32"]
    assert run("ppo", *PPO, *options, *lora, "--num_rollouts", "1") == 0
    before = metrics("runs/tiny/ppo")["policy"]
    assert metrics("runs/further")["reference"]["score/mean"] == pytest.approx(before["score/mean"], abs=1e-6)
    evaluation = ["--model_name_or_path", "runs/further", "--output_dir", "runs/further-eval", "--seed", "0"]
    assert run("eval", *evaluation, "--max_completion_length", "6") == 0
    figures = metrics("runs/further-eval")
    for role in ("reference", "policy"):
        del figures[role]["score/interval"]  # Training logs none.
    assert figures["reference"] == metrics("runs/further")["reference"]
    assert figures["policy"] == pytest.approx(metrics("runs/further")["policy"], abs=1e-6)


def test_resuming_from_the_command_line_ends_where_the_uninterrupted_run_did():
    whole, resumed = Path("runs/tiny/ppo"), Path("runs/tiny/ppo-resumed")
    # As after a kill in the middle of the first rollout: one checkpoint, and nothing at the root.
    shutil.copytree(whole / "checkpoint-3", resumed / "checkpoint-3")
    options = ["--num_rollouts", "2", "--save_steps", "3", "--save_total_limit", "3", "--output_dir", str(resumed)]
    assert run("ppo", *PPO, *options, "--resume_from_checkpoint", "runs/tiny/ppo-resumed/checkpoint-3") == 0
    for name in ("adapter_model.safetensors", "value_head.safetensors"):
        expected, found = load_tensors(whole / name), load_tensors(resumed / name)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)
    assert metrics(resumed)["policy"] == metrics(whole)["policy"]


@pytest.mark.slow
def test_ppo_and_eval_run_on_a_base_in_4_bit():
    pytest.importorskip("bitsandbytes")
    quantised = ["--load_in_4bit", "true", "--dtype", "float32"]
    options = [*PPO, *quantised, "--num_rollouts", "1", "--save_strategy", "no", "--output_dir", "runs/ppo-4bit"]
    assert run("ppo", *options) == 0
    evaluation = ["--model_name_or_path", "runs/ppo-4bit", "--output_dir", "runs/eval-4bit", "--seed", "0"]
    assert run("eval", *quantised, *evaluation, "--max_completion_length", "6") == 0
    figures = metrics("runs/eval-4bit")
    del figures["policy"]["score/interval"]
    assert figures["policy"] == pytest.approx(metrics("runs/ppo-4bit")["policy"], abs=1e-6)


@pytest.mark.parametrize("rows", [{"text": "a lamp"}, {"messages": [{"role": "assistant", "content": "a lamp"}]}])
def test_sft_takes_texts_and_messages_and_leaves_other_columns_alone(rows):
    write_rows(Path("rows.jsonl"), [{**rows, "prompt": i} for i in range(4)])
    options = ["--dataset_name", "rows.jsonl", "--eval_size", "1", "--output_dir", "runs/sft-text", "--max_steps", "1"]
    assert run("sft", *options) == 0


@pytest.mark.parametrize(
    ("verb", "options", "sentence"),
    [
        ("sft", ["--dataset_name", "runs/tiny/prompts.jsonl"], "expected prompt and completion, or messages, or text"),
        ("sft", ["--model_name_or_path", "runs/tiny/ppo"], "is an adapter; sft starts from a base model"),
        ("sft", ["--model_name_or_path", "runs/nothing"], "the tokenizer 'runs/nothing' cannot be loaded"),
        ("sft", ["--load_in_8bit", "true"], "a quantised model cannot be trained whole; set use_peft: true"),
        ("sft", ["--max_length", "6"], "max_length is 6, and no row keeps a token of its completion"),
        ("ppo", ["--resume_from_checkpoint", "runs/tiny/base"], "manifest.json: missing"),
        ("eval", ["--max_completion_length", "500"], "the model has 160 positions"),
        ("eval", UNSCORED, "100% of the completions have no finite score, more than max_unscored_frac"),
    ],
)
def test_a_mistake_of_the_user_is_one_sentence_and_exit_code_1(capsys, verb, options, sentence):
    assert run(verb, *options) == 1
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("error: ")
