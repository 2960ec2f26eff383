"""`--dry_run`: what a run of a stage would do, and what would stop it."""

import json
import shutil

import pytest

from onetrunk.cli import main
from onetrunk.stages.options.reading import check_files
from tests.processes import python
from tests.stages.small_runs import run, words_of, write_rows
from tests.tiny import CHAT_TEMPLATE

GAME = """
class Game:
    def reset(self, *, seed=None, options=None):
        return "the", {}

    def step(self, action):
        return " cat", 1.0, True, False, {}
"""
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
    (tmp_path / "turns.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}')
    assert run("sft", "--dry_run", "--text_as_messages", "true", "--dataset_name", tmp_path / "turns.jsonl") == 1
    assert "text_as_messages reads texts in prompt and completion" in capsys.readouterr().err
    assert run("distill", "--dry_run", "--student_tokenizer", "reward.py") == 1
    assert "the tokenizer 'reward.py' cannot be loaded" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--adapter_layers", "top-9") == 1
    assert "must be 'all', or 'top-k' with k from 1 to the model's 2 layers" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--lora_target_modules", "q_projj") == 1
    assert "names 'q_projj', and the model has no such module" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--rollout_batch_size", 4, "--num_minibatches", 3) == 1
    assert "are not divisible by 3 minibatches" in capsys.readouterr().err
    assert run("ppo", "--dry_run", "--reward_funcs", "runs/no_student") == 1
    assert "there is no folder runs/no_student" in capsys.readouterr().err
    old_run = tmp_path / "old"
    (old_run / "checkpoint-1").mkdir(parents=True)
    assert run("ppo", "--dry_run", "--output_dir", old_run) == 1
    assert "holds a run already (checkpoint-1)" in capsys.readouterr().err


def test_a_dry_run_of_ppo_looks_at_the_prompts_alone(in_folder, tmp_path, capsys):
    turns = [{"role": "user", "content": "a"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "the cat", "messages": turns}] * 8)
    assert run("ppo", "--dry_run", "--dataset_name", tmp_path / rows) == 0
    seeds = write_rows(tmp_path / "seeds.jsonl", [{"seed": i} for i in range(8)])
    (tmp_path / "game.py").write_text(GAME)
    shutil.copytree("base", tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text(CHAT_TEMPLATE)
    words = ["--model_name_or_path", tmp_path / "base", "--environment", f"{tmp_path}/game.py:Game"]
    words += ["--dataset_name", tmp_path / seeds, "--stop_tokens", "cat"]
    assert run("ppo", "--dry_run", *words) == 0, capsys.readouterr().err
    assert "the rows are texts" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "options", "parts"),
    [
        ("sft", "", ["a LoRA adapter on base", "rows: 8, held out: none", "about 2 optimizer steps of 8 rows"]),
        ("reward", "--eval_size 2", ["a reward adapter on base", "rows: 6, held out: 2"]),
        ("distill", "", ["teacher: the column probability", "a reward model from base"]),
        ("eval", "", ["base, compared with no other model", "8 prompts, of at most 2 tokens"]),
        ("prefs", "", ["prompts: 8, 4 completions each", "judge: rubric, by short with 1 principles"]),
        ("judge", "--judge rubric --dataset_name reward.jsonl --constitution principles.yaml", ["8 with 8 pairs"]),
    ],
)
def test_every_stage_has_a_dry_run_that_writes_nothing(in_folder, capsys, verb, options, parts):
    before = sorted(in_folder.rglob("*"))
    command = ["judge", "--output_dir", "out"] if verb == "judge" else words_of(verb)
    assert main([*command, *options.split(), "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert sorted(in_folder.rglob("*")) == before
    for part in ("dry run: nothing is trained or written", *parts):
        assert part in out, part
    wrong = [*options.split(), "--dataset_columns", '{"prompt": "question"}', "--dry-run"]
    assert main([*command, *wrong]) != 0
    assert "must name distinct columns of the dataset" in capsys.readouterr().err


def test_wrong_constitutions_and_columns_are_answered_and_reports_written_without_torch(in_folder, tmp_path):
    (in_folder / "bad.yaml").write_text("name: bad\nprinciples: []\n")
    (in_folder / "q.csv").write_text("question,answer\nwhy,so\n")
    (tmp_path / "metrics.json").write_text('{"policy": {"score/mean": 1.0}, "reference": {}, "steps": 1}')
    mistakes = {
        "the constitution bad.yaml has no principles": words_of("prefs", "--constitution", "bad.yaml"),
        "has the columns prompt; expected prompt and completion": words_of("sft", "--dataset_name", "prompts.jsonl"),
        "has the columns answer, question; expected prompt": words_of("ppo", "--dataset_name", "q.csv"),
        "expected chosen and rejected": words_of("reward", "--dataset_name", "sft.jsonl"),
    }
    code = "import json, sys; from onetrunk.cli import main; commands = json.loads(sys.argv[1])\n"
    code += "for words in commands: print(main(words), 'torch' in sys.modules)"
    done = python("-c", code, json.dumps([*mistakes.values(), ["report", str(tmp_path)]]))
    for message in mistakes:
        assert message in done.stderr, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert answers == ["1 False"] * len(mistakes) + ["0 False"]
    assert (tmp_path / "_report/report.html").is_file()


def test_columns_under_another_name_or_in_another_row_are_found(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "why"}\n{"question": "how", "completion": "so"}\n')
    check_files({"dataset_name": str(rows), "dataset_columns": {"prompt": "question"}}, "sft")
    check_files({"dataset_name": str(rows), "environment": "game.py:Game"}, "ppo")
    rows.write_text("not JSON\n")
    check_files({"dataset_name": str(rows)}, "sft")  # The stage names the line.
