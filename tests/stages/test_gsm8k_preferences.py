"""Preferences of the gsm8k-tiny recipe: copies corrupted by hand, pairs per question, the real text if there."""

import json
import random

from tests.stages.recipes import load_recipe_module
from tests.stages.small_runs import write_rows

prepare = load_recipe_module("gsm8k-tiny", "prepare_preferences")
rewards = load_recipe_module("gsm8k-tiny", "rewards")
MODELS = ("a", "b", "c")


def test_a_copy_has_a_wrong_result_in_every_calculation_and_betrays_itself_nowhere_else():
    answer = "By hand 6/2 = <<6/2=3>>3 each.\nIn all 3*7 = $<<3*7=21>>21.\n#### 21"
    for seed in range(20):
        wrong = prepare.corrupted(answer, random.Random(seed))
        assert rewards.annotation_score(None, [wrong]) == [0.0]
        first, second = (match[2] for match in prepare.STEP.finditer(wrong))
        assert wrong == (
            f"By hand 6/2 = <<6/2={first}>>{first} each.\nIn all 3*7 = $<<3*7={second}>>{second}.\n#### {second}"
        )
        assert len(second) == 2 and sum(a != b for a, b in zip(second, "21", strict=True)) == 1


def test_what_follows_a_result_or_ends_an_answer_stays_where_it_is_another_number():
    wrong = prepare.corrupted("<<1/4=.25>>25 percent\n#### 75", random.Random(0))
    assert wrong.endswith(">>25 percent\n#### 75") and wrong != "<<1/4=.25>>25 percent\n#### 75"
    assert prepare.corrupted("no calculation\n#### 5", random.Random(0)) == "no calculation\n#### 5"


def solutions(path, n):
    def said(i, model):
        return {"is_correct": (i + MODELS.index(model)) % 3 != 0, "solution": f"by {model} {i}"}

    rows = [{"question": f"how many {i} ?", "ground_truth": "x", **{m: said(i, m) for m in MODELS}} for i in range(n)]
    write_rows(path, rows)


def answers(path, n):
    rows = [{"question": f"what is {i} + 1 ?", "answer": f"<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"} for i in range(n)]
    write_rows(path, rows)


def test_both_tasks_are_split_by_question(tmp_path, monkeypatch, capsys):
    given = [str(tmp_path / name) for name in ("s.jsonl", "t.jsonl")]
    solutions(tmp_path / "s.jsonl", 160)
    answers(tmp_path / "t.jsonl", 520)
    monkeypatch.setattr("sys.argv", ["prepare_preferences.py", *given, "--output_dir", str(tmp_path / "out")])
    assert prepare.main() == 0

    def read(name):
        return [json.loads(line) for line in (tmp_path / f"out/{name}.jsonl").read_text().splitlines()]

    # Two right and one wrong solution a question: two pairs; and two copies of every answer
    assert [len(read(f"solutions_{part}")) for part in ("train", "held_out")] == [20, 300]
    assert [len(read(f"arithmetic_{part}")) for part in ("train", "held_out")] == [40, 1000]
    assert len(read("arithmetic_unlabelled")) == 20
    for task in ("solutions", "arithmetic"):
        train, held_out = ({row["prompt"] for row in read(f"{task}_{part}")} for part in ("train", "held_out"))
        assert not train & held_out
    assert not {row["prompt"] for row in read("arithmetic_unlabelled")} & held_out
    assert (tmp_path / "out/base-reward/model.safetensors").is_file()
    assert "20 rows in solutions_train.jsonl" in capsys.readouterr().out
