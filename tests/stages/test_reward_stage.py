"""`onetrunk reward` and `onetrunk distill` on tiny models: what they leave, how they go on, how they end."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from onetrunk import cli
from onetrunk.models.reward_model import read_score_scale
from onetrunk.rewards.model import load_reward
from onetrunk.stages.distill import StudentArguments
from onetrunk.utils.files import load_tensors
from tests.feedback.runs import answers_in
from tests.models.reward_adapters import saved_base
from tests.stages.small_runs import NOUNS, error_of, metrics, on_two_processes, write_rows

DATA = ["--dataset_name", "train.jsonl", "--eval_dataset_name", "held_out.jsonl"]
TRAIN = "--use_cpu true --report_to none --activation_checkpointing false --learning_rate 1e-2 --max_steps 6".split()
TRAIN += "--per_device_train_batch_size 8 --disable_tqdm true --save_steps 3 --save_total_limit 4".split()
TRAIN += ["--write_report", "false"]
ADAPTER = ["--use_peft", "true", "--lora_r", "4", "--adapter_layers", "top-2"]
SINGLE = ["--unlabelled_dataset_name", "single.jsonl"]
pytestmark = pytest.mark.usefixtures("in_folder")


def pairs(n, **columns):
    rows = []
    for i in range(n):
        noun, other = NOUNS[i % 8], NOUNS[(i + 3) % 8]
        row = {"prompt": f"the {noun} ", "chosen": f"runs {noun} fast ." + " yes" * (i % 3), "rejected": f"no {other}"}
        rows.append({**row, **{name: values[i % len(values)] for name, values in columns.items()}})
    return rows


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A folder with a base, rows, a reward model, a reward adapter, and a student of the reward model."""
    folder = tmp_path_factory.mktemp("reward")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        saved_base(folder / "base")
        saved_base(folder / "small", num_hidden_layers=1)
        write_rows(folder / "train.jsonl", pairs(24))
        write_rows(folder / "held_out.jsonl", pairs(8, label=[1.0, 1.0, 1.0, 0.0]))
        write_rows(folder / "judged.jsonl", pairs(16, probability=[0.9, 0.2, 0.7], margin=[1.0]))
        write_rows(folder / "single.jsonl", [{"prompt": r["prompt"], "completion": r["chosen"]} for r in pairs(5)])
        assert reward("--output_dir", "rm", "--checkpoint_mirror", "mirror") == 0
        assert reward("--output_dir", "adapter", *ADAPTER) == 0
        assert distill("--output_dir", "student", *SINGLE) == 0
    return folder


def reward(*options):
    return cli.main(["reward", *DATA, "--model_name_or_path", "base", *TRAIN, *options])


def distill(*options):
    student = [] if "--student_config" in options else ["--model_name_or_path", "small"]
    return cli.main(["distill", *DATA, "--teacher", "rm", *student, *TRAIN, *options])


def scores(name, side="chosen"):
    rows = pairs(8)
    return load_reward(name)(prompts=[r["prompt"] for r in rows], completions=[r[side] for r in rows])


def test_reward_leaves_a_model_its_figures_and_the_scale_of_its_scores():
    names = {path.name for path in Path("rm").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "metrics.json", "score_scale.json"} <= names
    # What is measured after the model is saved is in the mirror too.
    assert {"model.safetensors", "metrics.json", "score_scale.json"} <= {
        path.name for path in Path("mirror").iterdir()
    }
    assert Path("rm/reliability.png").read_bytes().startswith(b"\x89PNG")
    figures = metrics("rm")["held_out"]
    assert figures["pairs"] == 8 and 0 <= figures["accuracy"] <= 1 and len(figures["accuracy_interval"]) == 2
    for bins in ("reliability", "accuracy_by_margin"):
        assert sum(b["count"] for b in figures[bins]) == 8
    assert {"calibration_error", "length/score_correlation", "length/lead_correlation"} <= set(figures)
    assert json.loads(Path("rm/config.json").read_text())["reads_end_token"] is True
    both = torch.tensor([scores("rm", "chosen"), scores("rm", "rejected")])
    assert read_score_scale("rm").mean == pytest.approx(float(both.mean()), abs=1e-5)


def test_an_adapter_is_saved_with_its_head_and_on_its_layers_alone():
    names = {path.name for path in Path("adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "metrics.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    weights = load_tensors("adapter/adapter_model.safetensors")
    assert "base_model.model.score.weight" in weights
    layers = {key.split(".layers.")[1].split(".")[0] for key in weights if ".layers." in key}
    assert layers == {"2", "3"}
    assert len(set(scores("adapter"))) > 2


def test_distill_leaves_a_student_that_is_read_on_the_teachers_scale():
    figures = metrics("student")
    assert figures["train_rows"] == 24 + 5 and figures["teacher"] == ["rm"]
    assert {"agreement", "spearman", "calibration_error", "pearson"} <= set(figures["fidelity"])
    # The column `label` stands for the truth, which is not what chosen says in every fourth row.
    assert set(figures["labels"]) == {"student", "teacher"}
    assert figures["labels"]["teacher"]["accuracy"] != metrics("rm")["held_out"]["accuracy"]
    ratios = figures["cost"]["teacher_over_student"]
    assert ratios["size"] > 1 and ratios["memory"] > 1 and ratios["speed"] > 0
    student, teacher = (torch.tensor(scores(name)) for name in ("student", "rm"))
    # The student's zero is the mean of the teacher's scores.
    scale = read_score_scale("rm")
    assert (student + scale.mean - teacher).abs().mean() < 2 * scale.std
    assert Path("student/teacher_scores.db").is_file()


@pytest.mark.parametrize("verb", ["rm", "adapter", "student"])
def test_resuming_ends_where_the_uninterrupted_run_did(verb):
    folder = f"{verb}-resumed"
    shutil.copytree(f"{verb}/checkpoint-3", f"{folder}/checkpoint-3")
    stage, options = {"rm": (reward, []), "adapter": (reward, ADAPTER), "student": (distill, SINGLE)}[verb]
    assert stage(*options, "--output_dir", folder, "--resume_from_checkpoint", "true") == 0
    name = "adapter_model.safetensors" if verb == "adapter" else "model.safetensors"
    one, other = load_tensors(f"{verb}/{name}"), load_tensors(f"{folder}/{name}")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    figures, resumed = metrics(verb), metrics(folder)
    for side in (figures, resumed):
        side.pop("cost", None)
    assert resumed == figures


@pytest.mark.multi_process
@pytest.mark.slow
def test_two_processes_with_half_the_rows_each_end_where_one_does():
    """Rows that are all pairs: the same sums in another order. A score of the teacher is bought once for both."""
    words = [*DATA, "--teacher", "rm", "--model_name_or_path", "small", *TRAIN, "--max_steps", "3"]
    words += ["--save_strategy", "no", "--output_dir"]
    assert cli.main(["distill", *words, "ddp-1"]) == 0
    said = on_two_processes("distill", *words, "ddp-2", "--per_device_train_batch_size", 4)
    assert metrics("ddp-2")["num_processes"] == 2 and said.count("distill: saved") == 1
    one, two = (load_tensors(f"{n}/model.safetensors") for n in ("ddp-1", "ddp-2"))
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=2e-4, rtol=0)
    assert answers_in("ddp-1/teacher_scores.db") == answers_in("ddp-2/teacher_scores.db")


def test_unlabelled_rows_of_held_out_prompts_do_not_teach(capsys):
    rows = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in pairs(24)]
    write_rows(Path("all.jsonl"), rows)
    options = ["--dataset_name", "train.jsonl", "--eval_size", "4", "--teacher", "rm", "--model_name_or_path", "small"]
    options += ["--unlabelled_dataset_name", "all.jsonl", *TRAIN, "--max_steps", "1", "--output_dir", "apart"]
    assert cli.main(["distill", *options]) == 0
    figures = metrics("apart")
    held = figures["fidelity"]["pairs"]
    assert held >= 4 and figures["train_rows"] == 2 * (24 - held)
    assert f"rows left out because their prompts are held out: {held}" in capsys.readouterr().out


def test_a_judges_probabilities_teach_and_are_split_by_prompt():
    options = ["--dataset_name", "judged.jsonl", "--eval_size", "2", "--model_name_or_path", "small", *TRAIN]
    assert cli.main(["distill", *options, "--output_dir", "judged"]) == 0
    figures = metrics("judged")
    assert figures["teacher"] == "probability" and figures["fidelity"]["pairs"] == 4
    assert "cost" not in figures and "labels" not in figures


def test_labels_may_be_true_and_false():
    write_rows(Path("flags.jsonl"), pairs(8, label=[True, True, True, False]))
    options = ["--eval_dataset_name", "flags.jsonl", "--max_steps", "1", "--output_dir"]
    assert distill(*options, "flags") == 0
    write_rows(Path("flags.jsonl"), pairs(8, label=[1, 1, 1, 0]))
    assert distill(*options, "ones") == 0
    assert metrics("flags")["labels"] == metrics("ones")["labels"]


def test_a_student_from_a_config():
    config = '{"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}'
    options = ["--student_config", config, "--student_tokenizer", "small", "--output_dir", "bert", "--max_steps", "2"]
    assert distill(*options) == 0
    assert json.loads(Path("bert/config.json").read_text())["model_type"] == "bert"
    assert len(set(scores("bert"))) > 1


def test_without_held_out_rows_nothing_is_measured_and_that_is_said(capsys):
    options = ["--dataset_name", "train.jsonl", "--model_name_or_path", "base", "--output_dir", "blind", *TRAIN]
    assert cli.main(["reward", *options, "--max_steps", "1"]) == 0
    assert "no held-out rows, so nothing is measured" in capsys.readouterr().out
    assert not Path("blind/metrics.json").exists() and Path("blind/score_scale.json").is_file()


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (reward, ["--eval_dataset_name", "bad.jsonl"], "held-out rows: row 1: probability is 1.5"),
        (reward, ["--load_in_8bit", "true"], "a reward model on a quantised base is not tested"),
        (reward, [*ADAPTER, "--lora_dropout", "0.1"], "lora_dropout is 0.1, and a reward adapter is trained without"),
        (distill, [*SINGLE[:1], "talk.jsonl"], "talk.jsonl holds conversations and dataset_name texts; give both in"),
        (distill, ["--teacher", "base"], "lacks score.weight, which would be newly initialised and score at random"),
        (distill, ["--student_tokenizer", "train.jsonl"], "the tokenizer 'train.jsonl' cannot be loaded: it is a"),
        (distill, ["--max_length", "4000"], "is more than the 128 tokens that the model can read"),
    ],
)
def test_what_cannot_be_learned_is_rejected(capsys, stage, options, message):
    write_rows(Path("bad.jsonl"), pairs(8, probability=[0.5, 1.5]))
    user, assistant = ([{"role": role, "content": "yes"}] for role in ("user", "assistant"))
    write_rows(Path("talk.jsonl"), [{"prompt": user, "completion": assistant}])
    assert stage("--output_dir", "new", *options) == 1
    assert message in error_of(capsys)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no student: set model_name_or_path, or student_config"),
        ({"student_config": {"model_type": "llama"}}, "a model without a tokenizer; set student_tokenizer"),
        ({"student_config": {"model_type": "llama"}, "use_peft": True}, "student_config makes a new one; keep one"),
    ],
)
def test_a_student_that_cannot_be_is_rejected_while_parsing(settings, message):
    with pytest.raises(ValueError, match=message):
        StudentArguments(**settings)
