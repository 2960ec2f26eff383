"""`onetrunk ppo` with alarms in YAML: the run that one ends, its last words, and going on from there."""

import json

import pytest

from onetrunk.checkpoints.folders import checkpoint_folders
from tests.stages.small_runs import make_material, run

# No policy over fewer than 22,026 words has 10 nats of entropy: the alarm comes with the second rollout.
YAML = """
num_rollouts: 3
num_ppo_epochs: 4
alarm_limits: {entropy: 10.0, kl: null}
alarm_patience: 2
stop_on_alarm: [entropy, negative_kl]
"""
GO_ON = ["--continue_ended_run", "true", "--save_strategy", "steps"]


@pytest.mark.slow
def test_an_alarm_of_the_yaml_file_ends_the_run_in_order_and_is_its_last_word(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_material(tmp_path)
    (tmp_path / "ppo.yaml").write_text(YAML)
    assert run("ppo", "--config", "ppo.yaml", "--num_rollouts", 3) == 0
    (folder,) = checkpoint_folders("out-ppo")
    assert folder.name == "checkpoint-8" and (tmp_path / "out-ppo" / "adapter_model.safetensors").is_file()
    out = capsys.readouterr().out
    assert "ppo: saved the adapter in out-ppo; alarms: 1\n  alarm entropy at step 8: the policy's entropy" in out
    logged = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    assert [entry["alarm/entropy"] for entry in logged if "alarm/entropy" in entry] == [0.0, 1.0]
    assert not any("alarm/kl" in entry for entry in logged)
    # It has ended, whatever is planned now, unless that is meant. Limits and stops are free to change.
    options = ["--num_rollouts", 3, "--stop_on_alarm", "null", "--alarm_limits", '{"entropy": 0.001}']
    assert run("ppo", "--config", "ppo.yaml", "--resume", "auto", *options) == 0
    assert "finished at step 8, where it was ended (alarm entropy at step 8); set continue_ended_run to true" in (
        capsys.readouterr().out
    )
    assert checkpoint_folders("out-ppo") == [folder]
    assert run("ppo", "--config", "ppo.yaml", "--resume", "auto", *options, *GO_ON) == 0
    assert checkpoint_folders("out-ppo")[-1].name == "checkpoint-12"
    assert (tmp_path / "out-ppo" / "manifest.json").is_file()
    assert "alarms: 1\n" in capsys.readouterr().out  # The one from before; there was no other.
