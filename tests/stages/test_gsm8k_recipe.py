"""The gsm8k-tiny recipe: annotations and answers by hand, rows and preferences made from files, the calculator."""

import random

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from onetrunk import cli
from tests.stages.recipes import load_recipe_module
from tests.stages.small_runs import metrics, read_rows, write_rows

prepare = load_recipe_module("gsm8k-tiny", "prepare")
preferences = load_recipe_module("gsm8k-tiny", "prepare_preferences")
rewards = load_recipe_module("gsm8k-tiny", "rewards")
MODELS = ("a", "b", "c")


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


def write_problems(path, count=600):
    texts = [(f" What is {i} + {i}? ", f"<<{i}+{i}={2 * i}>>\n#### {2 * i}") for i in range(count)]
    write_rows(path, [{"question": question, "answer": answer} for question, answer in texts])


def test_rows_become_prompts_and_the_last_ones_are_held_out(tmp_path, monkeypatch, capsys):
    write_problems(tmp_path / "train.jsonl")
    monkeypatch.setattr("sys.argv", ["prepare.py", f"{tmp_path}/train.jsonl", "--output_dir", f"{tmp_path}/out"])
    assert prepare.main() == 0
    assert "100 training rows, 500 held out" in capsys.readouterr().out
    answer, first = "<<100+100=200>>\n#### 200", read_rows(tmp_path / "out/held_out.jsonl")[0]
    assert first == {"prompt": "What is 100 + 100?\n", "completion": answer, "answer": answer}
    assert (tmp_path / "out/base/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("action", "observation", "is_over"),
    [
        ("In May <<48/2=", "24>>", False),
        (" and <<1,000*2.5=", "2500>>", False),
        ("<<10/3=", "3.3333>>", False),
        ("<<.1+.2=", "0.3>>", False),
        ("<<2-5=", "-3>>", False),
        ("48/2 =", "", False),  # outside an annotation
        ("<<a+b=", "", False),  # no arithmetic: the policy goes on by itself
        ("<<9**9=", "", False),
        ("<<1/0=", "", False),
        ("<<999999999*9=", "", False),
        ("<<" + "1+" * 60 + "1=", "", False),
        ("24 clips.\n#### 72", "", True),
        ("", "", True),
        ("<<48/2", "", True),
    ],
)
def test_the_calculator_completes_annotations(action, observation, is_over):
    calculator = rewards.Calculator()
    assert calculator.reset(seed=0, options={}) == ("", {})
    assert calculator.step(action) == (observation, 0.0, is_over, False, {})
    if observation:
        annotation = f"<<{action.rpartition('<<')[2]}{observation}"
        assert rewards.annotation_score(None, [annotation]) == [1]


@pytest.mark.slow
def test_the_chain_runs_with_the_calculator(workplace, monkeypatch):
    write_problems(workplace / "train.jsonl")
    monkeypatch.setattr("sys.argv", ["prepare.py", "train.jsonl"])
    assert prepare.main() == 0
    runs = workplace / "runs/gsm8k-tiny"
    model, tokenizer = LlamaForCausalLM.from_pretrained(runs / "base"), AutoTokenizer.from_pretrained(runs / "base")
    text = "What is 2 + 2?\nIt is <<2+2=4>>4.\n#### 4" + tokenizer.eos_token
    row = tokenizer(text, return_tensors="pt").input_ids
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        model(input_ids=row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(runs / "sft")
    tokenizer.save_pretrained(runs / "sft")
    for name in ("train", "held_out"):
        write_rows(runs / f"{name}.jsonl", [{"prompt": "What is 2 + 2?\n", "answer": "<<2+2=4>>\n#### 4"}] * 8)
    ppo = "--num_rollouts 1 --rollout_batch_size 8 --eval_strategy no --report_to none --save_strategy no"
    for verb, words in {"ppo": ppo, "eval": ""}.items():
        assert cli.main([verb, "--config", f"recipes/gsm8k-tiny/{verb}_calculator.yaml", *words.split()]) == 0
    found = metrics(runs / "eval-calculator")["reference"]
    # The tokens of "4>>", where the policy asks.
    assert found["score/annotation_score"] > 0.5 and found["episode/observation_tokens"] > 1


def test_a_copy_has_a_wrong_result_in_every_calculation_and_betrays_itself_nowhere_else():
    answer = "By hand 6/2 = <<6/2=3>>3 each.\nIn all 3*7 = $<<3*7=21>>21.\n#### 21"
    for seed in range(20):
        wrong = preferences.corrupted(answer, random.Random(seed))
        assert rewards.annotation_score(None, [wrong]) == [0.0]
        first, second = (match[2] for match in preferences.STEP.finditer(wrong))
        assert wrong == (
            f"By hand 6/2 = <<6/2={first}>>{first} each.\nIn all 3*7 = $<<3*7={second}>>{second}.\n#### {second}"
        )
        assert len(second) == 2 and sum(a != b for a, b in zip(second, "21", strict=True)) == 1


def test_what_follows_a_result_or_ends_an_answer_stays_where_it_is_another_number():
    wrong = preferences.corrupted("<<1/4=.25>>25 percent\n#### 75", random.Random(0))
    assert wrong.endswith(">>25 percent\n#### 75") and wrong != "<<1/4=.25>>25 percent\n#### 75"
    assert preferences.corrupted("no calculation\n#### 5", random.Random(0)) == "no calculation\n#### 5"


def solutions(path, n):
    def said(i, model):
        return {"is_correct": (i + MODELS.index(model)) % 3 != 0, "solution": f"by {model} {i}"}

    rows = [{"question": f"how many {i} ?", "ground_truth": "x", **{m: said(i, m) for m in MODELS}} for i in range(n)]
    write_rows(path, rows)


def test_both_tasks_are_split_by_question(tmp_path, monkeypatch, capsys):
    given = [str(tmp_path / name) for name in ("s.jsonl", "t.jsonl")]
    solutions(tmp_path / "s.jsonl", 160)
    write_problems(tmp_path / "t.jsonl", 520)
    monkeypatch.setattr("sys.argv", ["prepare_preferences.py", *given, "--output_dir", str(tmp_path / "out")])
    assert preferences.main() == 0

    def read(name):
        return read_rows(tmp_path / f"out/{name}.jsonl")

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
