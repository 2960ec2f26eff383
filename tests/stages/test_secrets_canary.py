"""Real runs with canaries for secrets: no byte that a run leaves or says holds one, plain or packed."""

import gzip
import logging
import os
import zipfile
from pathlib import Path

import pytest
from datasets import Dataset

from onetrunk import PPOConfig, PPOTrainer, cli
from tests.judges.stub_server import StubServer
from tests.models.reward_adapters import saved_base
from tests.ppo.support import even_share
from tests.processes import python
from tests.stages.small_runs import NOUNS, write_rows

# No shape of a known key: only their names and places make them secrets.
CANARIES = {
    "HF_TOKEN": "kanari-hub-Xq81/+w",
    "OPENAI_API_KEY": "kanari-openai-Zt52",
    "JUDGE_ACCESS": "kanari-judge-Lm37",  # No telling name: it is known because judge_api_key_env names it.
    "url": "kanari-url-Pw94",
    "hub_token": "kanari-setting-Rb63",
}
REWARD = """
import logging
import os
import warnings

from transformers.utils import logging as theirs


def leaky(completions, log_extra=None, **columns):
    token, key = os.environ["HF_TOKEN"], os.environ["OPENAI_API_KEY"]
    logging.getLogger("user.code").warning("asked with %s", token)
    theirs.get_logger("transformers.user").warning(f"asked with {key}")
    warnings.warn(f"old address https://anna:kanari-url-Pw94@host/{token}")
    if log_extra:
        log_extra("header", [f"Bearer {token}"] * len(completions))
    try:
        raise ValueError(token)
    except ValueError:
        logging.getLogger("user.code").exception("not asked")
    return [-float(len(c)) for c in completions]


def failing(completions, **columns):
    leaky(completions)
    raise RuntimeError(f"401 for {os.environ['HF_TOKEN']} at https://anna:kanari-url-Pw94@host/v1")
"""
TRAIN = "--use_cpu true --report_to tensorboard --disable_tqdm true --save_strategy steps --save_steps 1".split()
PPO = "--rollout_batch_size 4 --max_completion_length 4 --lora_r 2 --num_ppo_epochs 1 --num_rollouts 1".split()
PPO += ["--num_minibatches", "2", "--log_completions", "true"]


def canaries_in(data):
    """Return the names of the canaries in bytes, and in what is packed in them."""
    found = {name for name, canary in CANARIES.items() if canary.encode() in data}
    if data[:2] == b"\x1f\x8b":
        found |= canaries_in(gzip.decompress(data))
    return found


def leaks(folder):
    """Return file -> canaries for every file below a folder, and for its name."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        names = canaries_in(os.fsencode(path.name))
        if path.is_file():
            names |= canaries_in(path.read_bytes())
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    names |= {name for entry in archive.namelist() for name in canaries_in(archive.read(entry))}
        if names:
            found[str(path.relative_to(folder))] = names
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    saved_base(folder / "base", num_hidden_layers=2)
    saved_base(folder / "rival", num_hidden_layers=1, seed=1)
    write_rows(folder / "rows.jsonl", [{"prompt": f"the {noun}"} for noun in NOUNS[:4]])
    (folder / "reward.py").write_text(REWARD)
    (folder / "constitution.yaml").write_text("name: c\nprinciples:\n  - text: Which answer is better?\n")
    return folder


@pytest.fixture
def place(base, empty_folder, monkeypatch):
    """An empty working folder, and the canaries in the environment."""
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "JUDGE_ACCESS"):
        monkeypatch.setenv(name, CANARIES[name])
    return empty_folder


def words_of(base, verb, *options):
    words = ["--model_name_or_path", base / "base", "--dataset_name", base / "rows.jsonl", "--output_dir", "out"]
    return [verb, *map(str, [*words, *options])]


def nothing_leaked(folder, *texts):
    assert leaks(folder) == {}
    for text in texts:
        assert canaries_in(text.encode()) == set()


@pytest.mark.slow
def test_ppo_with_a_reward_that_logs_secrets_leaves_none(base, place, capfd, caplog):
    options = [*TRAIN, *PPO, "--reward_funcs", f"{base}/reward.py:leaky", "--eval_dataset_name", base / "rows.jsonl"]
    with caplog.at_level(logging.WARNING):
        assert cli.main(words_of(base, "ppo", *options)) == 0
    said = capfd.readouterr()
    assert "asked with <redacted HF_TOKEN>" in caplog.text and "not asked" in caplog.text
    assert "asked with <redacted OPENAI_API_KEY>" in caplog.text + said.err
    assert any("<redacted HF_TOKEN>" in path.read_text() for path in place.rglob("*.jsonl"))
    nothing_leaked(place, *said, caplog.text)


def test_an_evaluation_by_a_judge_behind_a_key_leaves_none(base, place, capfd, caplog):
    options = ["--reward_funcs", f"{base}/reward.py:leaky", "--opponent", base / "rival", "--use_cpu", "true"]
    options += ["--max_completion_length", "4", "--constitution", base / "constitution.yaml"]
    with StubServer(key=CANARIES["JUDGE_ACCESS"]) as stub:
        options += ["--judge", stub.url, "--judge_model", "judge-1", "--judge_api_key_env", "JUDGE_ACCESS"]
        assert cli.main(words_of(base, "eval", *options)) == 0
        assert any(CANARIES["JUDGE_ACCESS"] in str(headers) for headers in stub.headers)
    assert (place / "out/_report/report.md").is_file() and (place / "out/metrics.json").is_file()
    nothing_leaked(place, *capfd.readouterr(), caplog.text)


@pytest.mark.slow
def test_a_step_that_fails_with_a_secret_in_its_message_leaves_none(base, place):
    words = words_of(base, "ppo", *TRAIN, *PPO, "--reward_funcs", f"{base}/reward.py:failing")
    run = python("-m", "onetrunk.cli", *words, code=1, ONETRUNK_TRACEBACK="1")
    assert "401 for <redacted HF_TOKEN> at https://<redacted password>@host/v1" in run.stderr
    assert "old address https://<redacted password>@host/<redacted HF_TOKEN>" in run.stderr
    assert "asked with <redacted HF_TOKEN>" in run.stderr and "asked with <redacted OPENAI_API_KEY>" in run.stderr
    assert "in failing" in run.stderr
    nothing_leaked(place, run.stdout, run.stderr)


def test_a_server_that_repeats_its_headers_puts_the_key_into_no_file(base, place, capfd, caplog):
    with StubServer(key=CANARIES["JUDGE_ACCESS"], thinks="inline", repeats_headers=True) as stub:
        words = ["--judge", stub.url, "--judge_model", "judge-1", "--judge_api_key_env", "JUDGE_ACCESS"]
        words += ["--constitution", base / "constitution.yaml", "--judge_verdict_tokens", "200"]
        words += ["--num_generations", "2", "--max_completion_length", "6", "--use_cpu", "true"]
        assert cli.main(words_of(base, "prefs", *words)) == 0
    assert cli.main(["report", "out"]) == 0
    kept = b"".join(path.read_bytes() for path in place.rglob("*") if path.is_file())
    assert b"Bearer <redacted JUDGE_ACCESS>" in kept
    nothing_leaked(place, *capfd.readouterr(), caplog.text)


def test_a_token_given_in_python_is_in_no_checkpoint_event_file_or_card(base, place, capfd, caplog, monkeypatch):
    names = {"run_name": f"run-{CANARIES['url']}-https://anna:{CANARIES['url']}@host/"}
    names |= {"project": f"https://anna:{CANARIES['url']}@host/project", "hub_token": CANARIES["hub_token"]}
    sizes = {"rollout_batch_size": 4, "num_rollouts": 1, "num_minibatches": 2, "max_completion_length": 4}
    logs = {"report_to": "tensorboard", "save_steps": 1, "log_completions": True, "disable_tqdm": True}
    args = PPOConfig(output_dir="out", use_cpu=True, **names, **sizes, **logs)
    monkeypatch.setenv("RUN_PASSWORD", CANARIES["url"])
    rows = Dataset.from_list([{"prompt": f"the {noun}"} for noun in NOUNS[:4]])
    trainer = PPOTrainer(str(base / "base"), even_share, args, rows)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name=f"trained with {CANARIES['hub_token']}")
    print(trainer.args, repr(trainer.args))
    assert trainer.args.hub_token == CANARIES["hub_token"]
    files = {path.name for path in place.rglob("*")}
    assert {"training_args.bin", "README.md", "trainer_state.json"} <= files
    nothing_leaked(place, *capfd.readouterr(), caplog.text)
