"""`onetrunk ppo --num_processes 2 --accelerate_config NAME` launches by itself: one exit code, and no second trace."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onetrunk import cli
from onetrunk.stages.launch import SIGNALS, config_file, split_words
from onetrunk.stages.options.reading import UsageError
from tests.places import CPU, launch_environment
from tests.stages.small_runs import ROOT, words_of


def test_the_words_of_the_launch_are_taken_out_and_the_others_keep_their_order():
    words = "--beta 0.3 --num-processes 2 --config a.yaml --accelerate_config fsdp2 --reward_funcs a b".split()
    launch, rest = split_words("ppo", words)
    assert launch == {"num_processes": "2", "accelerate_config": "fsdp2"}
    assert rest == "--beta 0.3 --config a.yaml --reward_funcs a b".split()
    # One process; the stage says so itself.
    assert split_words("prefs", words) == ({}, words)


def test_a_config_is_a_path_or_a_name_of_ours_from_any_folder(empty_folder):
    ours = str(ROOT / "accelerate_configs/fsdp2.yaml")
    assert config_file("fsdp2") == config_file("accelerate_configs/fsdp2.yaml") == ours
    Path("fsdp2").touch()
    assert config_file("fsdp2") == "fsdp2"
    with pytest.raises(UsageError, match="accelerate_config is 'zero3'.* one of ddp, fsdp2, .*, tensor_parallel"):
        config_file("zero3")


CONFIGS = {
    "empty": ("", "holds no settings, such as num_processes: 2"),
    "list": ("- 2", "holds no settings"),
    "broken": ("a: [b", "is not YAML"),
    "port": ("distributed_type: MULTI_GPU\nmain_process_port: abc", "main_process_port is 'abc'; expected 0 to 65535"),
    "mapping": ("num_processes: {a: 1}", "num_processes is {'a': 1}; expected 1 to 1024"),
    "type": ("distributed_type: NOPE\nnum_processes: 2", "'NOPE' is not a valid DistributedType"),
    "parallelism": ("parallelism_config: {parallelism_config_tp_size: 0}", "parallelism_config_tp_size is 0"),
}


@pytest.mark.parametrize(("text", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_broken_config_of_accelerate_is_one_message_and_leaves_signal_handlers(tmp_path, capsys, text, message):
    before = [signal.getsignal(number) for number in SIGNALS]
    (tmp_path / "a.yaml").write_text(text)
    assert cli.main(["sft", "--num_machines", "1", "--accelerate_config", str(tmp_path / "a.yaml")]) == 2
    assert [signal.getsignal(number) for number in SIGNALS] == before
    err = capsys.readouterr().err
    assert "error: accelerate cannot launch this: " in err and message in err, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num_processes 0", "num_processes is '0'; expected 1 to 1024"),
        ("--num_processes 100000000", "expected 1 to 1024"),
        ("--num_processes 2 --main_process_port 70000", "main_process_port is '70000'; expected 0 to 65535"),
        ("--num_processes 2 --main_process_port -1", "main_process_port is '-1'"),
        ("--num_processes 2 --num_machines 0", "num_machines is '0'"),
        ("--num_processes 3 --num_machines 2", "num_processes 3 is not a multiple of num_machines 2"),
        ("--num_processes 2 --num_machines 2 --machine_rank 5", "machine_rank is '5'; expected 0 to 1"),
        ("--num_processes 2 --max_restarts -1", "max_restarts is '-1'"),
        ("--num_processes 2 --rdzv_backend nope", "nope"),
    ],
)
def test_numbers_of_a_launch_that_mean_nothing_start_no_process(capsys, monkeypatch, words, message):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert cli.main(["sft", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_process_of_a_launch_launches_no_others(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["sft", "--num_processes", "2"]) == 2
    assert "this process was launched already" in capsys.readouterr().err


def started(folder: Path, *options: str) -> subprocess.Popen:
    """Start PPO on two processes, as from a terminal; what it prints goes to the file `log`."""
    env = launch_environment(CPU, 2)
    words = [sys.executable, "-m", "onetrunk", *words_of("ppo", "--num_processes", "2", *options)]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(words, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)


@pytest.mark.slow
@pytest.mark.multi_process
def test_the_exit_code_is_that_of_the_first_process_that_failed_and_no_second_trace_follows(own_material):
    assert started(own_material, "--adapter_layers", "top-9").wait() == 1
    log = (own_material / "log").read_text()
    assert "adapter_layers is 'top-9'; it must be" in log and "Traceback" not in log


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_one_signal_stops_all_processes_with_a_checkpoint(own_material, number, code):
    process, log = started(own_material, "--num_rollouts", "5000", "--logging_steps", "1"), own_material / "log"
    while "score/mean" not in log.read_text():
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.2)
    # A terminal sends Ctrl-C to the whole group; a scheduler signals what it has started.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.wait() == code
    text = log.read_text()
    assert text.count("everything is saved in out-ppo/checkpoint-") == 2 and "Traceback" not in text
    assert list((own_material / "out-ppo").glob("checkpoint-*/manifest.json"))
