"""`onetrunk ppo --dry_run`: what a run would do, and what would stop it."""

from tests.stages.small_runs import run

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


def test_a_dry_run_finds_what_would_stop_a_run(in_folder, tmp_path, capsys):
    assert run("ppo", "--dry_run", "--adapter_layers", "top-9") == 1
    assert "neither 'all' nor 'top-k' with k from 1 to the model's 2 layers" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--lora_target_modules", "q_projj") == 1
    assert "names 'q_projj', and the model has no such module" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--rollout_batch_size", 4, "--num_minibatches", 3) == 1
    assert "are not divisible by 3 minibatches" in capsys.readouterr().err
    old_run = tmp_path / "old"
    (old_run / "checkpoint-1").mkdir(parents=True)
    assert run("ppo", "--dry_run", "--output_dir", old_run) == 1
    assert "holds a run already (checkpoint-1)" in capsys.readouterr().err
