"""The record of a training: written while it runs, cut where it resumes, and never a reason to end."""

import json

import pytest

from onetrunk.judges.constitution import Constitution
from onetrunk.judges.hacking_monitor import HackingMonitor
from onetrunk.report.record import RunRecord, changed_settings
from onetrunk.report.runs import read_lines, read_run
from tests.ppo.support import make_config, make_trainer, prompts

SAVING = {"save_strategy": "steps", "save_steps": 2, "num_ppo_epochs": 2, "eval_strategy": "steps", "eval_steps": 4}
SAVING["lr_scheduler_type"] = "constant"  # Whatever the planned length is.
# Of every entry, what depends on the clock.
CLOCK = ("time", "memory/", "throughput/", "train_", "eval_runtime")


def recorded(folder, resume=None, **settings):
    quiet = {"alarm_limits": {"cut_off": None}}
    trainer = make_trainer(folder, eval_dataset=prompts(3), **{**SAVING, **quiet, **settings})
    trainer.evaluate_reference()
    trainer.add_callback(RunRecord(trainer, "ppo"))
    trainer.train(resume_from_checkpoint=resume)
    return read_run(folder)


def without_clock(run):
    entries = [{k: v for k, v in entry.items() if not k.startswith(CLOCK)} for entry in run.log]
    # The last one is Trainer's summary, which is all about time.
    return [entry for entry in entries if not set(entry) <= {"epoch", "step", "total_flos"}]


@pytest.mark.slow
def test_the_record_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path):
    whole = recorded(tmp_path / "whole", num_rollouts=3)
    recorded(tmp_path / "parts", num_rollouts=2)
    # As after a kill between the checkpoint at step 2 and the end.
    parts = recorded(tmp_path / "parts", str(tmp_path / "parts" / "checkpoint-2"), num_rollouts=3)
    assert without_clock(parts) == without_clock(whole)
    assert [entry["step"] for entry in without_clock(whole)] == [0, 1, 2, 3, 4, 4, 5, 6, 6]
    assert whole.series("eval_score/mean")[0] == [0, 4, 6] and whole.series("eval_kl/ref")[1][0] == 0
    assert [event["event"] for event in parts.events] == ["begin", "resumed", "begin", "end"]
    # The time of the steps that were made twice counts twice.
    begin, resumed, again, end = (event["time"] for event in parts.events)
    assert parts.hours() == pytest.approx((resumed - begin + parts.log[-1]["time"] - again) / 3600, abs=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the record of a run with a token and an alarm."""
    alarm = {"alarm_limits": {"entropy": 10.0, "cut_off": None}, "alarm_patience": 2}
    return recorded(tmp_path_factory.mktemp("run"), num_rollouts=3, hub_token="hf_" + 5 * "secret", **alarm)


def test_the_completions_before_and_after_are_of_the_same_prompts(run):
    assert [row["prompt"] for row in run.before] == [row["prompt"] for row in run.after] == prompts(3)["prompt"]
    assert sum(row["score"] for row in run.before) / 3 == pytest.approx(run.series("eval_score/mean")[1][0], abs=1e-6)
    assert sum(row["score"] for row in run.after) / 3 == pytest.approx(run.series("eval_score/mean")[1][-1], abs=1e-6)


def test_an_alarm_is_recorded_with_its_explanation(run):
    (alarm,) = run.alarms()
    assert (alarm.name, alarm.step) == ("entropy", 4) and "the policy's entropy" in alarm.text


def test_a_monitor_alarm_from_before_a_resume_is_not_recorded_again(tmp_path):
    trainer, monitor = make_trainer(tmp_path), HackingMonitor(None, Constitution("none", ()))
    trainer.add_callback(monitor)
    monitor.num_alarms, monitor.explanation = 1, "from step 30 to step 40 the reward rose"
    (tmp_path / "_report").mkdir()
    for trainer.state.global_step, count in ((4, 0), (40, 1)):
        RunRecord(trainer, "ppo").on_step_end(trainer.args, trainer.state, trainer.control)
        assert len(read_lines(tmp_path / "_report" / "log.jsonl")) == count


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, caplog):
    (tmp_path / "_report").write_text("a file where the folder should be")
    trainer = make_trainer(tmp_path, num_rollouts=2)
    trainer.add_callback(RunRecord(trainer, "ppo"))
    trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("the report will lack all that follows") == 1


def test_a_setting_counts_as_changed_if_it_differs_from_its_default(tmp_path):
    config = make_config(tmp_path, beta=0.5, gamma=1.0, num_rollouts=4)
    assert {"beta", "num_rollouts", "learning_rate", "rollout_batch_size"} <= set(changed_settings(config))
    assert not {"gamma", "max_steps", "bf16", "max_staleness"} & set(changed_settings(config))


def test_run_json_has_no_secret(run):
    assert "hf_secretsecret" not in json.dumps(run.about) and run.about["versions"]["torch"]
    assert run.about["digests"]["prompts"].startswith("8 rows, sha256")
