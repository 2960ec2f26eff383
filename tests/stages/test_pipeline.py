"""`onetrunk run`: what is done is skipped, what changed runs again with all that rests on it, what stopped goes on."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onetrunk import cli
from onetrunk.stages.pipeline import PipelineState, files_of, load_pipeline, paths_in
from tests.feedback.runs import answers_in
from tests.servers.stub import wait_until
from tests.stages.small_runs import write_rows
from tests.tiny import CHAT_TEMPLATE, WORDS, tiny_model, tiny_tokenizer

# Appends to a log of calls, then writes what it was told to make of its input.
STEP = """
import argparse, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--source"); parser.add_argument("--target"); parser.add_argument("--word", default="")
parser.add_argument("--wait", type=float, default=0)
given = parser.parse_args()
with open("calls.log", "a") as log:
    log.write(pathlib.Path(given.target).name + "\\n")
time.sleep(given.wait)
if given.word == "fail":
    sys.exit(3)
if given.word != "nothing":
    pathlib.Path(given.target).parent.mkdir(parents=True, exist_ok=True)
    text = pathlib.Path(given.source).read_text() if given.source else ""
    pathlib.Path(given.target).write_text(text + given.word)
"""
CHAIN = {
    "a": {"script": "step.py", "outputs": ["out/a"], "options": {"target": "out/a", "word": "1"}},
    "b": {"script": "step.py", "outputs": ["out/b"], "options": {"source": "out/a", "target": "out/b", "word": "2"}},
    "c": {"script": "step.py", "outputs": ["out/c"], "options": {"source": "out/b", "target": "out/c", "word": "3"}},
}


@pytest.fixture
def folder(empty_folder):
    Path("step.py").write_text(STEP)
    write()


def write(**changes):
    """Write pipeline.yaml: the chain with some options changed (a stage -> options), as JSON, which is YAML."""
    stages = {name: {**stage, "options": stage["options"] | changes.get(name, {})} for name, stage in CHAIN.items()}
    Path("pipeline.yaml").write_text(json.dumps({"output_dir": "state", "stages": stages}))


def run(*words):
    return cli.main(["run", "pipeline.yaml", *words])


def calls():
    """Return the stages that ran since the last look."""
    log = Path("calls.log")
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


def test_a_chain_runs_in_order_and_then_only_what_changed_and_what_rests_on_it(folder, capfd):
    assert run() == 0 and calls() == ["a", "b", "c"]
    assert Path("out/c").read_text() == "123"
    assert run() == 0 and calls() == []
    assert capfd.readouterr().out.count("skipped") == 3
    # Forced, it makes the same; changed, something else.
    assert run("--force", "b") == 0 and calls() == ["b"]
    write(b={"word": "x"})
    assert run() == 0 and calls() == ["b", "c"]
    assert Path("out/c").read_text() == "1x3"
    # What is gone is made again, and what was edited is read.
    Path("out/b").unlink()
    assert run() == 0 and calls() == ["b"]
    Path("out/a").write_text("7")
    assert run() == 0 and calls() == ["b", "c"]
    assert Path("out/c").read_text() == "7x3"


def test_a_failed_stage_ends_the_chain_with_its_code_and_goes_on_there(folder, capfd):
    write(b={"word": "fail"})
    assert run() == 3 and calls() == ["a", "b"]
    said = capfd.readouterr()
    assert "run: b ended with exit code 3; the same command resumes there" in said.err
    assert json.loads(Path("state/pipeline.json").read_text())["stages"]["b"]["status"] == "failed"
    write()
    assert run() == 0 and calls() == ["b", "c"]


def test_from_and_until_run_a_part(folder, capfd):
    assert run("--until", "b") == 0 and calls() == ["a", "b"]
    assert run("--from", "c") == 0 and calls() == ["c"]
    write(a={"word": "9"})
    assert run("--from", "b") == 0 and calls() == []
    Path("out/a").unlink()
    assert run("--from", "b") == 1
    assert "--from b skips a, which has not written out/a yet; begin with --from a" in capfd.readouterr().err
    assert run("--until", "b", "--force", "c") == 2 and calls() == []
    assert "--force c: --from and --until leave it out, and run a, b; force" in capfd.readouterr().err


def test_a_file_that_a_script_names_itself_is_one_of_its_inputs(folder, capfd):
    reader = {"script": "step.py", "inputs": ["out/a"], "outputs": ["out/b"], "options": {"target": "out/b"}}
    for name in ("out", "out/a"):  # Either exists only after the first stage.
        stages = {"a": CHAIN["a"], "b": {**reader, "inputs": [name]}}
        Path("pipeline.yaml").write_text(json.dumps({"output_dir": "state", "stages": stages}))
        assert run("--dry-run") == 0
    assert run() == 0 and calls() == ["a", "b"]
    assert run() == 0 and calls() == []
    Path("out/a").write_text("7")
    assert run() == 0 and calls() == ["b"]
    Path("out/a").unlink()
    assert run("--dry-run") == 0 and "waits for out/a" in re.sub(r"\s+", " ", capfd.readouterr().out)


def test_a_dry_run_shows_what_would_run_and_writes_nothing(folder, capfd):
    assert run("--dry-run") == 0 and calls() == [] and not Path("state").exists()
    assert run() == 0 and calls() == ["a", "b", "c"]
    write(a={"word": "9"})
    before = Path("state/pipeline.json").read_bytes()
    capfd.readouterr()
    assert run("--dry-run") == 0 and calls() == []
    shown = re.sub(r"\s+", " ", capfd.readouterr().out)
    assert "changed: word: 1 -> 9" in shown and "waits for out/a" in shown and "waits for out/b" in shown
    assert Path("state/pipeline.json").read_bytes() == before


@pytest.mark.slow
def test_a_terminated_chain_stops_its_stage_and_goes_on_there(folder):
    write(b={"wait": 3600})
    command = [sys.executable, "-m", "onetrunk.cli", "run", "pipeline.yaml"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    wait_until(lambda: Path("calls.log").exists() and "b" in Path("calls.log").read_text(), 250)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=1500)
    assert process.returncode == 143
    assert b"b was stopped; the same command resumes there" in said
    assert json.loads(Path("state/pipeline.json").read_text())["stages"]["b"]["status"] == "interrupted"
    calls()
    write()
    assert run() == 0 and calls() == ["b", "c"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stages: {a: {script: step.py}}", "output_dir is not set"),
        ("output_dir: x\nstages: {a: {script: step.py}}", "give config, the YAML file of a verb; or script, any"),
        ("output_dir: x\nstages: {a: {script: no.py, outputs: [y]}}", "stage a: no.py does not exist"),
        ("output_dir: x\nstages: {train: {config: sft.yaml}}", "set verb to one of sft, judge, prefs"),
        ("output_dir: x\nstages: {sft: {config: sft.yaml}}", "sft.yaml line 2: unknown key 'learning_rat'"),
        ("output_dir: x\nstages: {sft: {config: sft.yaml, gpu: 1}}", "unknown key 'gpu'; the keys are verb, config"),
        ("output_dir: x\nstages: {a/b: {config: sft.yaml}}", "a name has 1 to 96 of the characters"),
        ("output_dir: x\nstages: {a: &a {script: step.py, outputs: [y]}, b: *a}", "stages a and b both write y; give"),
        (
            "output_dir: x\nstages: {a: {script: step.py, inputs: [b], outputs: [y]},"
            " c: {script: step.py, outputs: [b]}}",
            "stage a: input b does not exist, and no earlier stage writes it",
        ),
        ("output_dir: x\nstages: {a: {script: step.py, outputs: [y], verb: sft}}", "its outputs, and no verb"),
        ("output_dir: x\nstages: {a: {script: step.py, outputs: [y], options: {word: null}}}", "word is empty"),
        (
            "output_dir: x\nstages: {sft: {config: sft.yaml, inputs: [y]}}",
            "script, any inputs and its outputs, and no verb",
        ),
    ],
)
def test_a_wrong_pipeline_is_one_sentence_before_anything_runs(folder, capsys, text, sentence):
    Path("sft.yaml").write_text("output_dir: runs/sft\nlearning_rat: 1.0\n")
    Path("pipeline.yaml").write_text(text)
    assert run() == 2
    assert sentence in capsys.readouterr().err
    assert calls() == []


def test_a_process_reward_model_is_a_path_and_a_pattern_all_its_files(folder):
    assert Path("runs/prm") in paths_in({"reward_funcs": ["prm:runs/prm#separator=%0A", "rewards.py:score"]})
    assert Path("runs/prm") in paths_in("prm:runs/prm")
    for name in "ab":
        Path(f"{name}.jsonl").touch()
    found = [path for path in paths_in({"dataset_name": "*.jsonl"}) if path.exists()]
    assert found == [Path("a.jsonl"), Path("b.jsonl")]


def test_a_text_that_names_no_file_is_no_input(folder):
    write(a={"word": "x" * 300}, b={"word": "."}, c={"word": "~nobody/x"})
    assert run() == 0 and calls() == ["a", "b", "c"]
    assert run() == 0 and calls() == []


def test_a_function_named_by_a_dotted_path_stands_for_the_file_of_its_module(folder, monkeypatch):
    for place in (".", "lib/pkg"):
        Path(place).mkdir(parents=True, exist_ok=True)
        Path(place, "mine.py").touch()
    monkeypatch.syspath_prepend("lib")
    assert Path("mine.py") in paths_in({"reward_funcs": ["mine.score"]})
    assert Path("lib/pkg/mine.py") in paths_in({"judge": ["pkg.mine.MyJudge"]})


def test_a_stage_rests_on_the_paths_in_its_config_and_not_on_what_runs_leave_beside(folder):
    Path("model").mkdir()
    Path("model/weights").write_text("w")
    Path("judge.py").write_text("def fair(): pass\n")
    Path("rm").mkdir()
    config = {"output_dir": "runs/ppo", "model_name_or_path": "model", "reward_funcs": ["judge.py:fair", "reward:rm"]}
    # A stop token is no path.
    Path("ppo.yaml").write_text(json.dumps({**config, "dataset_name": "step.py", "stop_tokens": ["pipeline.yaml"]}))
    Path("pipeline.yaml").write_text(json.dumps({"output_dir": "state", "stages": {"ppo": {"config": "ppo.yaml"}}}))
    pipeline = load_pipeline("pipeline.yaml")
    before = PipelineState(pipeline).plan(pipeline.stages[0]).inputs
    assert set(before) == {"model", "judge.py", "rm", "step.py"}
    Path("model/checkpoint-1").mkdir()
    Path("model/checkpoint-1/weights").write_text("w")
    assert PipelineState(pipeline).plan(pipeline.stages[0]).inputs == before
    Path("model/weights").write_text("v")
    after = PipelineState(pipeline).plan(pipeline.stages[0]).inputs
    assert {name for name in after if after[name] != before[name]} == {"model"}
    assert [file.name for file in files_of(Path("model"))] == ["weights"]


GRAMMAR = """
def long(completions, **columns):
    return [len(text) for text in completions]
"""


def make_base():
    tiny_model("llama", initializer_range=0.1, eos_token_id=1).save_pretrained("base")
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained("base")
    words = [WORDS[i : i + 4] for i in range(12)]
    write_rows(Path("rows.jsonl"), [{"prompt": f"{w[0]} {w[1]}", "completion": f" {w[2]} {w[3]}"} for w in words])


@pytest.fixture
def real(empty_folder):
    """A chain of real verbs on a tiny model: supervised fine-tuning, preferences, a reward model."""
    make_base()
    rules = {"name": "rules", "principles": [{"text": "Which is longer?", "tags": ["long"]}]}
    Path("rules.yaml").write_text(json.dumps(rules))
    Path("rules.py").write_text(GRAMMAR)
    common = {"use_cpu": True, "seed": 1}
    train = {**common, "per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 1, "report_to": "none"}
    train["write_report"] = False
    judge = {"judge": ["rubric"], "rubric": {"long": "rules.py:long"}, "constitution": "rules.yaml"}
    sampling = {"num_generations": 3, "max_completion_length": 6}
    configs = {
        "sft": {**train, "model_name_or_path": "base", "dataset_name": "rows.jsonl"},
        "prefs": {**common, **judge, **sampling, "model_name_or_path": "out/sft", "dataset_name": "rows.jsonl"},
        "reward": {**train, "model_name_or_path": "out/sft", "dataset_name": "out/prefs/data", "eval_size": 4},
    }
    for verb, config in configs.items():
        Path(f"{verb}.yaml").write_text(json.dumps({**config, "output_dir": f"out/{verb}"}))
    stages = {verb: {"config": f"{verb}.yaml"} for verb in configs}
    Path("pipeline.yaml").write_text(json.dumps({"output_dir": "state", "stages": stages}))


SFT = {
    "model_name_or_path": "base", "dataset_name": "rows.jsonl", "output_dir": "out", "use_cpu": True, "seed": 1,
    "per_device_train_batch_size": 4, "max_steps": 2, "save_steps": 1, "report_to": "none", "use_peft": True,
    "write_report": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A pipeline of one training that has ended, with two checkpoints and a result."""
    place = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        make_base()
        Path("pipeline.yaml").write_text("output_dir: state\nstages: {sft: {config: sft.yaml}}\n")
        Path("sft.yaml").write_text(json.dumps(SFT))
        assert run() == 0
    return place


@pytest.fixture
def training(finished, tmp_path, monkeypatch):
    """A copy of it to change."""
    shutil.copytree(finished, tmp_path / "copy", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path / "copy")


def change(**settings):
    Path("sft.yaml").write_text(json.dumps({**SFT, **settings}))


CHOOSING = "run changed: greater_is_better: not set -> true; load_best_model_at_end: not set -> false; metric_for"


def bytes_of_results():
    return {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"save_total_limit": 3, "run_name": "again"}, "done nothing that it depends on has changed"),
        ({"max_steps": 3}, "resume another length: max_steps: 2 -> 3"),
        ({"continue_ended_run": True}, "resume another length: continue_ended_run: not set -> true"),
        ({"load_best_model_at_end": False, "greater_is_better": True, "metric_for_best_model": "loss"}, CHOOSING),
        ({"learning_rate": 0.5, "allow_config_change": True}, "resume changed: learning_rate: not set -> 0.5"),
    ],
)
def test_a_free_setting_changes_nothing_and_one_that_is_meant_resumes(training, capfd, settings, shown):
    change(**settings)
    assert run("--dry-run") == 0
    # The lines of a cell stand below each other.
    rows = [line.split("│")[1:-1] for line in capfd.readouterr().out.splitlines() if line.startswith("│")]
    assert shown.replace(" ", "") in "".join(row[1].strip() + row[2].strip() for row in rows).replace(" ", "")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda: change(learning_rate=0.5), "changed: learning_rate: not set -> 0.5"),
        (lambda: Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() * 2), "changed: rows.jsonl"),
        (lambda: Path("state/pipeline.json").unlink(), "never ran"),
    ],
)
def test_nothing_is_deleted_for_another_change_before_overwrite_says_so(training, capfd, edit, reason):
    edit()
    before = bytes_of_results()
    assert run() == 1
    told = capfd.readouterr().err
    assert f"stage sft would start over ({reason}" in told
    assert "delete checkpoint-1, checkpoint-2, adapter_config.json" in told
    assert "add --overwrite to delete it" in told
    assert bytes_of_results() == before


def test_a_training_stopped_before_it_has_deleted_its_old_checkpoints_does_not_resume_from_them(training, capfd):
    change(learning_rate=0.5)
    pipeline = load_pipeline("pipeline.yaml")
    state, (stage,) = PipelineState(pipeline), pipeline.stages
    state.note(state.plan(stage), "running")  # As a run does that may delete them.
    assert not state.resumable(stage)
    assert run("--dry-run") == 0
    assert "$ onetrunk sft --config sft.yaml --overwrite_output_dir true\n" in capfd.readouterr().out
    change(learning_rate=0.5, resume_from_checkpoint="auto")  # Which would continue what is to start over.
    assert run("--dry-run") == 0
    assert "--overwrite_output_dir true --resume_from_checkpoint false\n" in capfd.readouterr().out
    change(learning_rate=0.5)
    with_options = {"sft": {"config": "sft.yaml", "options": {"resume": "auto"}}}
    Path("pipeline.yaml").write_text(json.dumps({"output_dir": "state", "stages": with_options}))
    assert run("--dry-run") == 0
    assert "--overwrite_output_dir true --resume_from_checkpoint false\n" in capfd.readouterr().out
    os.utime("out/checkpoint-2")  # Its own first checkpoint.
    state.note(state.plan(stage), "interrupted")
    assert run("--dry-run") == 0
    assert "--resume_from_checkpoint auto\n" in capfd.readouterr().out


def test_a_training_whose_disk_is_gone_resumes_from_its_mirror(training, capfd):
    change(checkpoint_mirror="mirror")
    pipeline = load_pipeline("pipeline.yaml")
    state, (stage,) = PipelineState(pipeline), pipeline.stages
    state.note(state.plan(stage), "interrupted")
    shutil.rmtree("out")
    assert run("--dry-run") == 0
    assert "$ onetrunk sft --config sft.yaml --resume_from_checkpoint auto\n" in capfd.readouterr().out


def test_an_option_may_be_written_as_on_the_command_line(training):
    stages = {"sft": {"config": "sft.yaml", "options": {"max-steps": 3}}}
    Path("pipeline.yaml").write_text(json.dumps({"output_dir": "state", "stages": stages}))
    (stage,) = load_pipeline("pipeline.yaml").stages
    assert stage.settings["max_steps"] == 3
    assert PipelineState(load_pipeline("pipeline.yaml")).plan(stage).action == "resume"


@pytest.mark.parametrize(
    ("verb", "written", "settings"),
    [
        ("prefs", ["data/preferences.jsonl", "statistics.json"], {"completions": "given", "judge": ["rubric"]}),
        ("prefs", ["statistics.json", "data/preferences.jsonl"], {"completions": "given", "judge": ["rubric"]}),
        ("eval", ["metrics.json"], {"model_name_or_path": "base", "reward_funcs": ["len"]}),
        ("judge", ["metrics.json"], {"judge": ["rubric"]}),
    ],
)
def test_output_that_is_gone_is_made_again(empty_folder, verb, written, settings):
    Path(f"{verb}.yaml").write_text(json.dumps({"output_dir": "out", "dataset_name": "rows.jsonl", **settings}))
    Path("pipeline.yaml").write_text(f"output_dir: state\nstages: {{{verb}: {{config: {verb}.yaml}}}}")
    state = PipelineState(load_pipeline("pipeline.yaml"))
    (stage,) = state.pipeline.stages
    for path in (Path("out", name) for name in written):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    state.note(state.plan(stage), "done")
    assert state.plan(stage).action == "done"
    Path("out", written[0]).unlink()
    plan = state.plan(stage)
    assert (plan.action, plan.reason) == ("resume", "its output is incomplete or damaged")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_stages_resume_skip_and_start_anew(real, capfd):
    # Stopped within SFT: the second run goes on from its checkpoint, to the weights of a run that was never stopped.
    assert run("--until", "sft") == 0
    whole = Path("out/sft/model.safetensors").read_bytes()
    for name in ("model.safetensors", "config.json"):
        Path("out/sft", name).unlink()
    for step in (3, 4):
        shutil.rmtree(f"out/sft/checkpoint-{step}")
    record = json.loads(Path("state/pipeline.json").read_text())
    record["stages"]["sft"]["status"] = "running"
    Path("state/pipeline.json").write_text(json.dumps(record))
    capfd.readouterr()
    assert run() == 0
    said = capfd.readouterr()
    assert "sft: was running" in said.out and Path("out/sft/model.safetensors").read_bytes() == whole
    assert not Path("out/sft/checkpoint-1").stat().st_mtime_ns > Path("out/sft/checkpoint-3").stat().st_mtime_ns
    stages = json.loads(Path("state/pipeline.json").read_text())["stages"]
    assert {name: stage["status"] for name, stage in stages.items()} == dict.fromkeys(stages, "done")
    # Another rule: the preferences are made anew, from completions that are kept, and the reward model after them.
    Path("rules.py").write_text(GRAMMAR.replace("len(text)", "-len(text)"))
    kept = answers_in("out/prefs/ledger/ledger.db")
    before = Path("out/reward/model.safetensors").read_bytes()
    assert run() == 1
    assert "stage prefs would start over (changed: rules.py) and delete data in out/prefs" in capfd.readouterr().err
    assert Path("out/reward/model.safetensors").read_bytes() == before
    assert run("--overwrite") == 0
    assert "prefs: changed: rules.py" in capfd.readouterr().out
    assert len(answers_in("out/prefs/ledger/ledger.db")) > len(kept)
    assert Path("out/reward/model.safetensors").read_bytes() != before
    assert run("--dry-run") == 0 and capfd.readouterr().out.count("done") == 3
