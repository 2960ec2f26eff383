"""The gsm8k-tiny recipe: annotations judged by hand, rows made from a file, and both on the real text where it is."""

import json

import pytest

from onetrunk import cli
from tests.stages.recipes import ROOT, load_recipe_module

rewards = load_recipe_module("gsm8k-tiny", "rewards")
prepare = load_recipe_module("gsm8k-tiny", "prepare")
REAL = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("no annotation", 0),
        ("<<48/2=24>> and <<48+24=72>>", 1),
        ("<<48/2=24>> and <<48+24=73>>", 1 / 2),
        ("<<1+1=2>> <<1+1=2>> <<1+1=3>>", 1 / 2),  # a repeat counts once
        ("<<10/3=3.33>>", 1),  # rounded to the decimals that are shown
        ("<<10/3=3>>", 0),  # a whole number must be exact
        ("<<.5*20=10>> <<1,000*2=2,000>> <<2-5=-3>>", 1),
        ("<<(1+2)*3=9>>", 1),
        ("<<5=5>> <<-5=-5>>", 0),  # nothing is calculated
        ("<<2*2=4>> <<2 * 2 = 4>> <<1+1=3>>", 1 / 2),  # the same one twice
        ("<<2*2=4>> <<2*2=2+2=4>> <<>>", 1 / 3),  # malformed ones count as wrong
        (f"<<2*2=4>> <<{'1+' * 60}1=61>>", 1 / 2),  # and so do endless ones
        ("<<1/0=1>> <<9**9=1>> <<a+b=2>> <<__import__('os')=1>> <<2+2=>>", 0),
    ],
)
def test_the_share_of_annotations_that_are_right(text, share):
    assert rewards.annotation_score(prompts=None, completions=[text]) == [pytest.approx(share)]


def test_the_last_line_and_its_answer():
    texts = ["so\n#### 72", "so\n#### 71", "#### 72 and more", "so\n#### 1,000", "72"]
    assert rewards.final_line(prompts=None, completions=texts) == [1, 1, 0, 1, 0]
    true = ["by hand\n#### 72"] * 3 + ["by hand\n#### 1000", "by hand\n#### 72"]
    assert rewards.answer_accuracy(prompts=None, completions=texts, answer=true) == [1, 0, 0, 1, 0]


def write_problems(path):
    rows = [{"question": f" What is {i} + {i}? ", "answer": f"<<{i}+{i}={2 * i}>>\n#### {2 * i}"} for i in range(600)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_become_prompts_and_the_last_ones_are_held_out(tmp_path, monkeypatch, capsys):
    write_problems(tmp_path / "train.jsonl")
    monkeypatch.setattr("sys.argv", ["prepare.py", f"{tmp_path}/train.jsonl", "--output_dir", f"{tmp_path}/out"])
    assert prepare.main() == 0
    assert "100 training rows, 500 held out" in capsys.readouterr().out
    held_out = [json.loads(line) for line in (tmp_path / "out/held_out.jsonl").read_text().splitlines()]
    assert held_out[0] == {
        "prompt": "What is 100 + 100?\n",
        "completion": "<<100+100=200>>\n#### 200",
        "answer": "<<100+100=200>>\n#### 200",
    }
    assert (tmp_path / "out/base/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"text": "x"}\n', "has no column answer, question"),
        ('{"question": "x", "answer": "y"}\n', "500 of them are held out"),
        (None, "error: "),
    ],
)
def test_a_file_that_is_not_gsm8k_is_refused(tmp_path, monkeypatch, capsys, content, sentence):
    path = tmp_path / "train.jsonl"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("sys.argv", ["prepare.py", str(path), "--output_dir", str(tmp_path / "out")])
    assert prepare.main() == 1
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error


def test_an_output_folder_that_is_a_file_is_refused(tmp_path, monkeypatch, capsys):
    write_problems(tmp_path / "train.jsonl")
    (tmp_path / "out").write_text("")
    monkeypatch.setattr("sys.argv", ["prepare.py", f"{tmp_path}/train.jsonl", "--output_dir", f"{tmp_path}/out"])
    assert prepare.main() == 1
    assert "out is a file; name a folder" in capsys.readouterr().err


@pytest.mark.skipif(not REAL.is_file(), reason="the real text is not beside the checkout")
def test_the_real_solutions_have_the_last_line_and_mostly_right_annotations():
    with REAL.open(encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines]
    assert set(rewards.final_line(None, answers)) == {1.0}
    assert set(rewards.answer_accuracy(None, answers, answer=answers)) == {1.0}
    scores = rewards.annotation_score(None, answers)
    assert sum(scores) / len(scores) > 0.95


@pytest.mark.slow
def test_the_commands_of_the_recipe_lead_from_a_file_to_figures_before_and_after(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    write_problems(tmp_path / "problems.jsonl")
    monkeypatch.setattr("sys.argv", ["prepare.py", "problems.jsonl"])
    assert prepare.main() == 0
    runs = tmp_path / "runs/gsm8k-tiny"
    held_out = runs / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:6]))
    few = "--max_completion_length 24"
    sizes = {
        "sft": "--max_steps 60 --save_strategy no",
        "ppo": f"{few} --num_rollouts 1 --rollout_batch_size 32 --num_minibatches 1",
        "eval": few,
    }
    for verb, options in sizes.items():
        assert cli.main([verb, "--config", f"recipes/gsm8k-tiny/{verb}.yaml", *options.split()]) == 0
    figures = json.loads((runs / "eval/metrics.json").read_text())
    assert (figures["model"], figures["num_prompts"]) == ("runs/gsm8k-tiny/ppo", 6)
    assert json.loads((runs / "ppo/metrics.json").read_text())["steps"] == 2
    names = {"score/annotation_score", "score/final_line", "score/answer_accuracy"}
    assert names <= set(figures["reference"]) and names | {"kl/ref"} <= set(figures["policy"])
    # Two steps have moved the policy away from what it started from.
    assert figures["policy"]["kl/ref"] != 0
    rows = [json.loads(line) for line in (runs / "eval/samples-policy.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [f"What is {i} + {i}?\n" for i in range(100, 106)]
    assert any(row["score/final_line"] for row in rows)
    for row in rows:
        rewarded = row["score/annotation_score"] + 0.25 * row["score/final_line"]
        assert row["score"] == pytest.approx(rewarded)
