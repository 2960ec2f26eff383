"""The stages end to end through the real command line, on the tiny recipe with very small settings."""

import json
import shutil

import pytest
import torch
import yaml

from onetrunk import cli
from onetrunk.utils.files import load_tensors
from tests.stages.recipes import ROOT, load_recipe_module
from tests.stages.small_runs import metrics

REWARDS = [f"{ROOT}/recipes/tiny/rewards.py:{name}" for name in ("on_task", "polite", "concise", "finished")]
PPO = "--rollout_batch_size 8 --max_completion_length 6 --num_ppo_epochs 2 --num_minibatches 2 --eval_strategy no"
PPO = f"{PPO} --per_device_train_batch_size 4 --lora_r 2".split()


def run(verb, folder, *options, recipe=True):
    """Run a verb in `folder` on the tiny recipe; return its exit code. Later options override earlier ones."""
    config = ["--config", str(recipe_without_a_judge(verb, folder))] if recipe else []
    rewards = [] if verb == "sft" else ["--reward_funcs", *REWARDS, "--reward_weights", *["0.25"] * 4]
    return cli.main([verb, *config, *rewards, *options])


def recipe_without_a_judge(verb, folder):
    """Return a copy of a verb's recipe without judge and monitor, which have tests of their own."""
    settings = yaml.safe_load((ROOT / f"recipes/tiny/{verb}.yaml").read_text())
    without = ("judge", "constitution", "rubric", "monitor_")
    settings = {key: value for key, value in settings.items() if not key.startswith(without)}
    (folder / f"{verb}.yaml").write_text(yaml.safe_dump(settings))
    return folder / f"{verb}.yaml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data, base, sft and ppo of the tiny recipe, as the demo leaves them, but hardly trained."""
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        load_recipe_module("tiny", "make_data").make_all(num_sft_rows=200)
        held_out = folder / "runs/tiny/held_out.jsonl"
        held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:10]))
        assert run("sft", folder, "--max_steps", "4", "--logging_steps", "2") == 0
        assert run("ppo", folder, *PPO, "--num_rollouts", "2", "--save_steps", "3", "--save_total_limit", "3") == 0
    return folder


@pytest.fixture
def there(trained, monkeypatch):
    monkeypatch.chdir(trained)
    return trained


def test_eval_of_an_adapter_puts_it_beside_what_it_started_from(there, capsys):
    assert run("eval", there, "--max_completion_length", "6", "--seed", "0") == 0
    out = capsys.readouterr().out
    assert "before" in out and "after" in out and "samples" in out
    # Same prompts, seed and weights as at the end of the PPO stage: the same figures.
    evaluated, trained_figures = metrics(there / "runs/tiny/eval"), metrics(there / "runs/tiny/ppo")
    assert trained_figures["steps"] == 8 and trained_figures["num_prompts"] == 10
    for role in ("reference", "policy"):
        low, high = evaluated[role].pop("score/interval")
        assert low <= evaluated[role]["score/mean"] <= high
    assert evaluated["reference"] == trained_figures["reference"] and "kl/ref" not in evaluated["reference"]
    assert evaluated["policy"] == pytest.approx(trained_figures["policy"], abs=1e-6)
    for role in ("reference", "policy"):
        lines = (there / f"runs/tiny/eval/samples-{role}.jsonl").read_text().splitlines()
        assert len(lines) == 10 and {"prompt", "completion", "score", "score/polite"} <= set(json.loads(lines[0]))


@pytest.mark.slow
def test_an_evaluation_with_one_token_left_is_greedy_whatever_the_seed(there):
    found = []
    for name, options in (("one", "--top_k 1 --seed 1"), ("two", "--top_p 0.0001 --seed 2"), ("whole", "--seed 1")):
        out = ["--output_dir", f"runs/truncated-{name}", "--max_completion_length", "6"]
        assert run("eval", there, *options.split(), *out) == 0
        lines = (there / f"runs/truncated-{name}/samples-policy.jsonl").read_text().splitlines()
        found.append([json.loads(line)["completion"] for line in lines])
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_ppo_goes_on_from_an_adapter_and_eval_compares_with_that_adapter(there):
    options = ["--model_name_or_path", "runs/tiny/ppo", "--output_dir", "runs/further", "--save_strategy", "no"]
    lora = ["--lora_r", "16", "--lora_alpha", "32"]
    assert run("ppo", there, *PPO, *options, *lora, "--num_rollouts", "1") == 0
    before = metrics(there / "runs/tiny/ppo")["policy"]
    assert metrics(there / "runs/further")["reference"]["score/mean"] == pytest.approx(before["score/mean"], abs=1e-6)
    evaluation = ["--model_name_or_path", "runs/further", "--output_dir", "runs/further-eval", "--seed", "0"]
    assert run("eval", there, *evaluation, "--max_completion_length", "6") == 0
    figures = metrics(there / "runs/further-eval")
    for role in ("reference", "policy"):
        del figures[role]["score/interval"]  # Training logs none.
    assert figures["reference"] == metrics(there / "runs/further")["reference"]
    assert figures["policy"] == pytest.approx(metrics(there / "runs/further")["policy"], abs=1e-6)


def test_resuming_from_the_command_line_ends_where_the_uninterrupted_run_did(there):
    resumed = there / "runs/tiny/ppo-resumed"
    # As after a kill in the middle of the first rollout: one checkpoint, and nothing at the root.
    shutil.copytree(there / "runs/tiny/ppo/checkpoint-3", resumed / "checkpoint-3")
    options = ["--num_rollouts", "2", "--save_steps", "3", "--save_total_limit", "3", "--output_dir", str(resumed)]
    assert run("ppo", there, *PPO, *options, "--resume_from_checkpoint", "runs/tiny/ppo-resumed/checkpoint-3") == 0
    for name in ("adapter_model.safetensors", "value_head.safetensors"):
        whole = load_tensors(there / "runs/tiny/ppo" / name)
        assert all(torch.equal(tensor, whole[key]) for key, tensor in load_tensors(resumed / name).items())
    assert metrics(resumed)["policy"] == metrics(there / "runs/tiny/ppo")["policy"]


@pytest.mark.slow
def test_ppo_and_eval_run_on_a_base_in_4_bit(there):
    pytest.importorskip("bitsandbytes")
    quantised = ["--load_in_4bit", "true", "--dtype", "float32"]
    options = [*PPO, *quantised, "--num_rollouts", "1", "--save_strategy", "no", "--output_dir", "runs/ppo-4bit"]
    assert run("ppo", there, *options) == 0
    evaluation = ["--model_name_or_path", "runs/ppo-4bit", "--output_dir", "runs/eval-4bit", "--seed", "0"]
    assert run("eval", there, *quantised, *evaluation, "--max_completion_length", "6") == 0
    figures = metrics(there / "runs/eval-4bit")
    del figures["policy"]["score/interval"]
    assert figures["policy"] == pytest.approx(metrics(there / "runs/ppo-4bit")["policy"], abs=1e-6)


@pytest.mark.parametrize("rows", [{"text": "a lamp"}, {"messages": [{"role": "assistant", "content": "a lamp"}]}])
def test_sft_takes_texts_and_messages_and_leaves_other_columns_alone(there, rows):
    (there / "rows.jsonl").write_text("".join(json.dumps({**rows, "prompt": i}) + "\n" for i in range(4)))
    options = ["--dataset_name", "rows.jsonl", "--eval_size", "1", "--output_dir", "runs/sft-text", "--max_steps", "1"]
    assert run("sft", there, *options) == 0


@pytest.mark.parametrize(
    ("verb", "options", "sentence"),
    [
        ("sft", ["--dataset_name", "runs/tiny/prompts.jsonl"], "expected prompt and completion, or messages, or text"),
        ("sft", ["--model_name_or_path", "runs/tiny/ppo"], "is an adapter; sft starts from a base model"),
        ("sft", ["--model_name_or_path", "runs/nothing"], "the tokenizer 'runs/nothing' cannot be loaded"),
        ("sft", ["--load_in_8bit", "true"], "a quantised model cannot be trained whole; set use_peft: true"),
        ("sft", ["--max_length", "6"], "max_length is 6, and no row keeps a token of its completion"),
        ("ppo", ["--reward_weights", "1"], "1 reward weights for 4 reward functions"),
        ("ppo", ["--resume_from_checkpoint", "runs/tiny/base"], "manifest.json: missing"),
        ("eval", ["--max_completion_length", "500"], "the model has 160 positions"),
    ],
)
def test_a_mistake_of_the_user_is_one_sentence_and_exit_code_1(there, capsys, verb, options, sentence):
    assert run(verb, there, *options) == 1
    err = capsys.readouterr().err
    assert sentence in err and "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("error: ")


def test_eval_fails_where_the_rewards_score_nothing(there, capsys):
    (there / "silent.py").write_text("def judge(completions, **kwargs):\n    return [None] * len(completions)\n")
    options = ["--reward_funcs", "silent.py:judge", "--reward_weights", "1"]
    assert run("eval", there, *options, "--max_completion_length", "6", "--output_dir", "runs/unscored") == 1
    assert "100% of the completions have no finite score, more than max_unscored_frac" in capsys.readouterr().err
