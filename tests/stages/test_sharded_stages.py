"""`onetrunk sft`, `reward` and `distill` on two processes, through the shipped accelerate configs: the run of one."""

import json
import shutil

import pytest

from onetrunk import cli
from tests.models.reward_adapters import saved_base
from tests.places import CPU, launch
from tests.processes import ROOT
from tests.stages.small_runs import LINEAR, REWARD, judged_pairs, nouns, require_same_adapter, write_rows

pytestmark = [pytest.mark.multi_process, pytest.mark.slow, pytest.mark.usefixtures("in_folder")]

OPTIONS = "--per_device_train_batch_size 2 --activation_checkpointing false --max_grad_norm 0".split()
OPTIONS += [*"--write_report false --save_steps 2".split(), *LINEAR]
TRAINING = "--max_steps 4 --use_peft true".split()
EVALUATED = "--eval_strategy steps --eval_steps 4 --per_device_eval_batch_size 2".split()
VERBS = {
    "sft": ["--dataset_name", "texts.jsonl", "--lora_target_modules", "all-linear"],
    "reward": ["--dataset_name", "pairs.jsonl", "--adapter_layers", "top-2", *EVALUATED],
    "distill": ["--dataset_name", "pairs.jsonl"],
}
# The same sums in another order.
REORDERED = {"atol": 2e-5, "rtol": 1e-4}
HELD_OUT = ["--eval_size", "4"]
# Files whose rows are read while it trains, for more than a pass; such rows are not held out.
STREAMED = ["--streaming", "true", "--shuffle_window", "20"]
STREAMED += "--dataset_name files-of-texts --max_prompt_length 8 --max_completion_length 4 --num_ppo_epochs 1".split()
STREAMED += "--reward_funcs reward.py:short --beta 0.1 --num_rollouts 6 --rollout_batch_size 8".split()
STREAMED += ["--num_minibatches", "2", "--learning_rate", "0.001"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    saved_base(folder / "base")
    # Equally long completions: the mean over the tokens of two processes is then the mean over all.
    texts = [{"prompt": f"the {n} ", "completion": f"runs {o} fast ."} for n, o, _ in nouns(36)]
    write_rows(folder / "texts.jsonl", texts)
    write_rows(folder / "pairs.jsonl", judged_pairs(36))
    lines = (folder / "texts.jsonl").read_text().splitlines(keepends=True)
    (folder / "files-of-texts").mkdir()
    for number, part in enumerate((lines[:15], lines[15:])):
        (folder / "files-of-texts" / f"{number}.jsonl").write_text("".join(part))
    (folder / "reward.py").write_text(REWARD)
    return folder


def trained_on(verb):
    return [*VERBS[verb], *TRAINING, *HELD_OUT]


def launched(config, verb, output, *options, data=None, code=0):
    """Run a stage on two processes, with half of the rows of `run_alone`; return what it printed."""
    words = [*OPTIONS, *(data or trained_on(verb)), "--output_dir", output, *options]
    return launch(CPU, config, 2, ROOT / f"scripts/{verb}.py", *words, code=code)


def run_alone(verb, data, output):
    """Run a stage in this process, with the rows of two."""
    options = ["--use_cpu", "true", "--output_dir", output, "--per_device_train_batch_size", "4"]
    assert cli.main([verb, *OPTIONS, *data, *options]) == 0


@pytest.fixture(scope="module")
def alone(material):
    """Run every stage in this process, with the rows of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(material)
        for verb in VERBS:
            run_alone(verb, trained_on(verb), f"{verb}-alone")


@pytest.mark.parametrize(("verb", "config"), [("sft", "ddp"), ("reward", "fsdp2"), ("distill", "fsdp2")])
@pytest.mark.usefixtures("alone")
def test_two_processes_end_with_the_adapter_of_one(material, verb, config):
    output = f"{verb}-{config}"
    done = launched(config, verb, output)
    assert done.stdout.count(f"{verb}: saved") == 1
    assert ("the frozen base is sharded over 2 processes" in done.stderr) == (config == "fsdp2")
    require_same_adapter(material / output, material / f"{verb}-alone", **REORDERED)
    if verb == "reward":  # 18 rows are no multiple of 4, so accelerate repeats some of them.
        two, one = (evaluation_of(material / name) for name in (output, f"{verb}-alone"))
        assert two["eval_pairs/accuracy"] == one["eval_pairs/accuracy"]
        assert two["eval_pairs/lead"] == pytest.approx(one["eval_pairs/lead"], abs=1e-4)


def evaluation_of(run):
    """Return what the last checkpoint of a run says of the held-out pairs."""
    log = json.loads((run / "checkpoint-4/trainer_state.json").read_text())["log_history"]
    return next(entry for entry in reversed(log) if "eval_pairs/lead" in entry)


def test_two_processes_read_the_rows_of_one_from_a_stream(material):
    run_alone("ppo", STREAMED, "streamed-alone")
    launched("fsdp2", "ppo", "streamed", data=STREAMED)
    require_same_adapter(material / "streamed", material / "streamed-alone", **REORDERED)


def test_two_processes_resume_in_the_second_pass_over_a_stream(material):
    data = "--streaming true --shuffle_window 20 --dataset_name files-of-texts --num_train_epochs 2".split()
    data += "--use_peft true --lora_target_modules all-linear".split()
    launched("ddp", "sft", "passes", data=data)
    shutil.copytree(material / "passes/checkpoint-12", material / "passes-resumed/checkpoint-12")  # Of 18 steps.
    launched("ddp", "sft", "passes-resumed", "--resume", "auto", data=data)
    require_same_adapter(material / "passes-resumed", material / "passes")


def test_a_sharded_run_resumes_bit_for_bit(material):
    verb = "reward"
    whole, resumed = material / f"{verb}-fsdp2", material / f"{verb}-resumed"
    if not whole.exists():
        launched("fsdp2", verb, whole.name)
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    launched("fsdp2", verb, resumed.name, "--resume", "auto")
    require_same_adapter(resumed, whole)


def test_a_model_whose_weights_all_train_is_rejected_by_name(material):
    done = launched("fsdp2", "sft", "whole", "--use_peft", "false", code=1)
    assert "set use_peft: true, or launch with accelerate_configs/ddp.yaml" in done.stderr
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]


def test_a_base_in_4_bit_is_sharded_through_fsdp2_qlora(material):
    data = [*STREAMED, "--load_in_4bit", "true", "--dtype", "bfloat16"]
    run_alone("ppo", data, "qlora-alone")
    done = launched("fsdp2_qlora", "ppo", "qlora", data=data)
    assert "the frozen base is sharded over 2 processes" in done.stderr
    require_same_adapter(material / "qlora", material / "qlora-alone", **REORDERED)
