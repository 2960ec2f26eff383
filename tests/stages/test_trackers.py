"""Runs that log to trackers other than TensorBoard: each tracker in an environment of its own, offline."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.stages.small_runs import make_material, words_of

ROOT = Path(__file__).parents[2]
PIP = "-m pip install -q --disable-pip-version-check --constraint".split()
# Each prints the logged values of one metric as a JSON list, read from what the tracker has written to the disk.
READERS = {
    # A log in LevelDB's format after 7 bytes: in blocks of 32 KiB, pieces with checksum, length and kind before them.
    "wandb": """
import glob, json, struct
from wandb.proto import wandb_internal_pb2
(path,) = glob.glob("wandb/offline-run-*/run-*.wandb")
data, place, record, values = open(path, "rb").read(), 7, b"", []
while place + 7 <= len(data):
    if place % 32768 > 32768 - 7:
        place += -place % 32768
        continue
    _, length, kind = struct.unpack("<IHB", data[place:place + 7])
    record += data[place + 7:place + 7 + length]
    place += 7 + length
    if kind in (1, 4):  # whole, or the last piece
        message = wandb_internal_pb2.Record()
        message.ParseFromString(record)
        record = b""
        items = {item.key or "/".join(item.nested_key): item.value_json for item in message.history.item}
        values += [json.loads(items[NAME])] if NAME in items else []
print(json.dumps(values))
""",
    "trackio": """
import json
from trackio.sqlite_storage import SQLiteStorage
(project,) = SQLiteStorage.get_projects()
(run,) = SQLiteStorage.get_runs(project)
print(json.dumps([log[NAME] for log in SQLiteStorage.get_logs(project, run) if NAME in log]))
""",
    "mlflow": """
import json, mlflow
client = mlflow.MlflowClient()
(run,) = [run for experiment in client.search_experiments() for run in client.search_runs([experiment.experiment_id])]
print(json.dumps([metric.value for metric in client.get_metric_history(run.info.run_id, NAME)]))
""",
}


def make_environment(folder, package):
    """Return the interpreter of an environment with all that this one has, and a package."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
    python = str(folder / "bin" / "python")
    done = subprocess.run([python, *PIP, str(ROOT / "constraints.txt"), package], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{package} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_gets_the_scores_of_a_run(tracker, tmp_path):
    python = make_environment(tmp_path / "environment", tracker)
    make_material(tmp_path)
    environment = os.environ | {
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }

    def run(*words):
        return subprocess.run([python, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)

    options = ["--report_to", tracker, "--num_rollouts", "2", "--logging_steps", "1", "--num_ppo_epochs", "1"]
    done = run("-m", "onetrunk", *words_of("ppo", *options))
    assert done.returncode == 0, done.stderr
    name = "score/mean" if tracker == "mlflow" else "train/score/mean"  # The callbacks of transformers differ.
    read = run("-c", f"NAME = {name!r}\n{READERS[tracker]}")
    assert read.returncode == 0, read.stderr
    log = (tmp_path / "out-ppo" / "_report" / "log.jsonl").read_text().splitlines()
    expected = [entry["score/mean"] for entry in map(json.loads, log) if "score/mean" in entry]
    assert len(expected) >= 2
    assert json.loads(read.stdout.splitlines()[-1]) == pytest.approx(expected)
