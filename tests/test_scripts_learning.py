"""The study of learning: end to end on a handful of rollouts, its tasks, and its table."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import learning

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_a_right_sum_that_ends_scores_one_and_nothing_else_does(tmp_path, bench):
    tasks = bench("learning_tasks")
    task = tasks.Sums(tmp_path)
    prompt = tasks.sum_prompts(torch.tensor([[47, 58]]))[0].tolist()
    assert task.text(prompt) == "4 7 + 5 8 ="
    assert task.tokenizer()(task.text(prompt))["input_ids"] == prompt
    right = [tasks.ID[c] for c in "105"]
    assert task.score(prompt, [*right, tasks.EOS]) == 1
    assert task.score(prompt, right) == task.score(prompt, [*right[:2], tasks.EOS]) == 0


def test_the_taught_model_is_made_once_and_held_out_sums_are_in_no_prompt(tmp_path, bench):
    tasks = bench("learning_tasks")
    task = tasks.Sums(tmp_path / "base", hidden_size=16, taught_enough=0.0)
    first = task.model(seed=0)
    held_out = task.held_out(first)["held_out"]
    assert 0 < held_out < 1
    assert task.held_out(task.model(seed=1))["held_out"] == held_out
    # 90 * 90 pairs, 600 of them held out; no pair comes twice.
    assert len({tuple(row) for row in task.prompts(0).tolist()}) == 8100 - 600


def test_what_play_samples_is_what_the_environment_of_the_chain_answers_and_pays(bench):
    task = bench("learning_tasks").FourTurns()
    tokenizer, prompts = task.tokenizer(), task.prompts(0)[:8]
    ids, turns, logprobs = task.play(task.model(0), prompts)
    assert turns[0].tolist() == [0, 0, -1, 1, 1, -1, 2, 2, -1, 3, 3]
    assert (logprobs[turns < 0] == 0).all() and (logprobs <= 0).all()
    for prompt, row in zip(prompts.tolist(), ids.tolist(), strict=True):
        words = tokenizer.convert_ids_to_tokens(row[len(prompt) :])
        game = learning.ChainGame(task.chain)
        game.reset(options={"prompt": task.text(prompt)})
        steps = [game.step(action) for action in words[::3]]
        assert [step[0] for step in steps] == [*words[2::3], ""] and words[1::3] == ["<eos>"] * 4
        assert [step[1] for step in steps] == pytest.approx(task.turn_rewards(prompt, row[len(prompt) :]))


def test_the_pretrained_task_names_the_command_that_makes_its_model(tmp_path, bench):
    task = bench("learning_tasks").make_task("replies", tmp_path)
    assert task.known(0) == {}
    command = rf"python recipes/smollm2-135m-cpu/prepare.py --output_dir {tmp_path}/smollm2-135m"
    with pytest.raises(FileNotFoundError, match=command):
        task.prompts(0)


STUDIES = {
    "staleness": "--lags 1 --rates 1e-3 --seeds 0 --arms dis --rollouts 2",
    "compaction": "--compactions 1 --seeds 0 --rollouts 2 --arms",
    "online": "--rates 1e-3 --seeds 0 --rollouts 20 --arms",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arm"),
    [
        ("staleness", ""),
        *(("compaction", arm) for arm in ("chain", "the paper's correction, lam 0.95", "summaries masked")),
        *(("online", arm) for arm in ("running mean", "groups of 8")),
    ],
)
def test_a_small_study_prints_its_table(script, arm):
    command = [sys.executable, str(BENCH / f"{script}.py"), *STUDIES[script].split(), *([arm] if arm else [])]
    paths = os.pathsep.join(str(BENCH.parents[1] / name) for name in ("", "src"))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    (share,) = re.findall(rf"^\| {re.escape(arm or 'dis')} \|.*? (0\.\d+) \(\S+\) \|", done.stdout, re.MULTILINE)
    assert 0 < float(share) < 1


@pytest.mark.slow
def test_the_study_runs_ours_and_grpo_and_goes_on_where_it_ended(tmp_path):
    command = [sys.executable, str(BENCH / "study.py"), "--tasks", "one_token", "--trainers", "ours", "grpo"]
    command += ["--rollouts", "1", "--seeds", "0", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = [json.loads(line) for line in (tmp_path / "one_token.jsonl").read_text().splitlines()]
    assert {run["arm"] for run in runs} == {"shared", "adapter", "top-1", "lam-1", "grpo"}
    assert len(runs) == len({(run["arm"], run["seed"], str(run["rates"])) for run in runs})
    assert "| `grpo` |" in done.stdout and (tmp_path / "one_token.png").is_file()
