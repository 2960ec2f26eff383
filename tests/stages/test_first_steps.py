"""`onetrunk ppo --dry_run`: what a run would do, and what would stop it."""

import pytest

from onetrunk.models.build import build_trunk
from onetrunk.stages.ppo import parse_ppo
from onetrunk.stages.tools.dry_run import model_size
from tests.stages.small_runs import run, words_of

BATCHES = "--rollout_batch_size 4 --num_generations 2 --num_minibatches 2 --num_ppo_epochs 3 --num_rollouts 5"
BATCHES += " --max_completion_length 8 --per_device_train_batch_size 3 --save_strategy steps --save_steps 6"


def test_a_dry_run_says_what_a_run_would_do_and_writes_nothing(in_folder, capsys):
    before = sorted(in_folder.rglob("*"))
    assert run("ppo", "--dry_run", *BATCHES.split()) == 0
    out = capsys.readouterr().out
    assert sorted(in_folder.rglob("*")) == before
    # 4 prompts x 2 completions on one process; 3 epochs x 2 minibatches; 5 rollouts of 6 steps and 8 completions.
    for part in (
        "4 prompts x 2 completions on 1 process(es): 8 completions each",
        "3 epochs x 2 minibatches of 4 completions per process = 6 optimizer steps per rollout",
        "forward: at most 3 rows",
        "5 rollouts = 30 optimizer steps, 40 completions of at most 8 tokens",
        "8 prompts, of at most 2 tokens",
        "onetrunk plan",
    ):
        assert part in out, part


@pytest.mark.parametrize(("value_head", "layers"), [("shared", "all"), ("adapter", "top-1")])
def test_a_dry_run_counts_the_weights_that_a_run_trains(in_folder, value_head, layers):
    words = words_of("ppo", "--value_head", value_head, "--adapter_layers", layers, "--lora_r", 3)[1:]
    _, args, model_args, *_ = parse_ppo(words)
    trunk = build_trunk("base", model_args.peft_config(), value_head=value_head, adapter_layers=layers)
    base = trunk.get_base_model()
    size = model_size(base.config, model_args.peft_config(), args)
    assert size.trained == sum(weight.numel() for weight in trunk.parameters() if weight.requires_grad)
    frozen = sum(weight.numel() for name, weight in base.named_parameters() if "lora_" not in name)
    assert size.base == frozen and (size.num_layers, size.first_layer) == (2, 0 if layers == "all" else 1)


def test_a_dry_run_finds_what_would_stop_a_run(in_folder, tmp_path, capsys):
    assert run("ppo", "--dry_run", "--adapter_layers", "top-9") == 1
    assert "neither 'all' nor 'top-k' with k from 1 to the model's 2 layers" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--rollout_batch_size", 4, "--num_minibatches", 3) == 1
    assert "are not divisible by 3 minibatches" in capsys.readouterr().err
    old_run = tmp_path / "old"
    (old_run / "checkpoint-1").mkdir(parents=True)
    assert run("ppo", "--dry_run", "--output_dir", old_run) == 1
    assert "holds a run already (checkpoint-1)" in capsys.readouterr().err
