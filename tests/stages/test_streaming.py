"""`streaming: true` in SFT, reward, distillation and PPO: equal to rows in memory, exact resume, what is rejected."""

import json
import shutil

import pytest

from onetrunk import cli
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.stages.small_runs import LINEAR, NOUNS, REWARD, judged_pairs, nouns, require_same_adapter, write_rows
from tests.tiny import tiny_tokenizer

OPTIONS = [*LINEAR, *"--activation_checkpointing false --max_grad_norm 0 --write_report false".split()]
OPTIONS += "--save_steps 2 --save_total_limit 20".split()
# 30 rows: two passes with an incomplete last batch.
PASSES = "--num_train_epochs 2 --use_peft true".split()
OWN = {
    "sft": PASSES,
    "reward": PASSES,
    "distill": PASSES,
    "teacher": [*PASSES, "--teacher", "teacher", "--learning_rate", "0.001"],
    "ppo": "--num_rollouts 6 --num_ppo_epochs 1 --learning_rate 0.01 --rollout_batch_size 6 --num_minibatches 2"
    " --max_completion_length 4 --beta 0.1 --max_prompt_length 8 --reward_funcs reward.py:short".split(),
}
STREAMED = ["--streaming", "true", "--shuffle_window", "9"]


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streaming")
    base = saved_base(folder / "base")
    saved_reward_adapter(folder / "teacher", base, tokenizer=tiny_tokenizer())
    kinds = {
        "sft": [{"prompt": f"the {n} ", "completion": f"runs {o} fast ."} for n, o, _ in nouns(30)],
        "pairs": judged_pairs(30),
        "ppo": [{"prompt": f"the {n} {o} {NOUNS[i // 4]}"} for n, o, i in nouns(30)],
    }
    for kind, rows in kinds.items():
        (folder / kind).mkdir()
        for number, (first, last) in enumerate([(0, 11), (11, 13), (13, 30)]):
            write_rows(folder / kind / f"{number}.jsonl", rows[first:last])
        write_rows(folder / f"{kind}.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(autouse=True)
def small_blocks(there, monkeypatch):
    monkeypatch.chdir(there)
    # Files of a few lines then have several blocks.
    monkeypatch.setattr("onetrunk.data.sharded.CONVERTED_GROUP_ROWS", 4)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", there / "cache-of-blocks-of-4")


def rows_of(verb):
    return verb if verb in ("sft", "ppo") else "pairs"


def run(name, output, *options):
    words = ["--use_cpu", "true", "--per_device_train_batch_size", "4", "--output_dir", output]
    return cli.main(["distill" if name == "teacher" else name, *OPTIONS, *OWN[name], *words, *options])


@pytest.fixture(scope="module")
def whole(there):
    """Return a function that runs a streamed command without interruption, once."""
    done = {}

    def run_once(name):
        if name not in done:
            done[name] = there / f"{name}-whole"
            assert run(name, done[name].name, "--dataset_name", f"{rows_of(name)}/*.jsonl", *STREAMED) == 0
        return done[name]

    return run_once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward", "ppo"])
def test_in_the_order_of_the_files_a_streamed_run_is_the_run_in_memory(there, name):
    in_order = ["--shuffle_dataset", "false"] if name == "ppo" else ["--train_sampling_strategy", "sequential"]
    assert run(name, f"{name}-memory", "--dataset_name", f"{rows_of(name)}.jsonl", *in_order) == 0
    pattern = f"{rows_of(name)}/*.jsonl"
    assert run(name, f"{name}-streamed", "--dataset_name", pattern, *STREAMED, *in_order) == 0
    require_same_adapter(there / f"{name}-streamed", there / f"{name}-memory")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "teacher", "ppo"])
def test_a_resumed_streamed_run_ends_as_the_uninterrupted_one(there, whole, name):
    # From the first pass, and from the second one (8 steps in a pass of SFT; 5 rollouts of 2 steps in one of PPO).
    for step in (2, 10):
        output = there / f"{name}-resumed-{step}"
        shutil.copytree(whole(name) / f"checkpoint-{step}", output / f"checkpoint-{step}")
        options = ["--dataset_name", f"{rows_of(name)}/*.jsonl", *STREAMED, "--resume", "auto"]
        assert run(name, output.name, *options) == 0
        require_same_adapter(output, whole(name))


@pytest.mark.slow
def test_workers_of_the_loader_read_and_tokenize_the_same_rows(there, whole):
    options = ["--dataset_name", "sft/*.jsonl", *STREAMED, "--dataloader_num_workers", "2"]
    assert run("sft", "sft-workers", *options) == 0
    require_same_adapter(there / "sft-workers", whole("sft"))


@pytest.mark.slow
def test_rows_that_changed_do_not_resume(there, whole, tmp_path, capfd, monkeypatch):
    output = tmp_path / "changed"
    shutil.copytree(whole("sft") / "checkpoint-2", output / "checkpoint-2")
    shutil.copytree(there / "sft", tmp_path / "sft")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    options = ["--dataset_name", f"{tmp_path}/sft/*.jsonl", *STREAMED, "--resume", "auto"]
    with (tmp_path / "sft" / "1.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "the cat ", "completion": "sleeps"}) + "\n")
    assert run("sft", str(output), *options) == 1
    assert "rows 30 rows in 1 files, sha256 " in capfd.readouterr().err
    repaired = [{"prompt": "the dog ", "completion": "is repaired"}, {"prompt": "the cat ", "completion": "runs ."}]
    write_rows(tmp_path / "sft" / "1.jsonl", repaired)
    assert run("sft", str(output), *options) == 1
    assert "settings have changed since: row_contents" in capfd.readouterr().err
    assert run("sft", str(output), *options, "--allow_config_change", "true") == 0


def test_a_longer_row_is_replaced_and_a_bad_one_ends_the_run(there, tmp_path, capfd, caplog):
    rows = [{"prompt": "the cat ", "chosen": "runs .", "rejected": "no", "probability": 0.8} for _ in range(12)]
    rows[5]["chosen"] = "runs " * 60
    path = tmp_path / "pairs.jsonl"
    write_rows(path, rows)
    options = ["--dataset_name", str(path), *STREAMED, "--max_length", "24"]
    assert run("reward", str(tmp_path / "out"), *options) == 0
    assert "pairs.jsonl, row 5 is left out" in caplog.text
    assert f"streaming {path}: files 1, rows 12\n" in capfd.readouterr().out
    rows[7]["rejected"] = rows[7]["chosen"]
    write_rows(path, rows)
    assert run("reward", str(tmp_path / "bad"), *options) == 1
    assert "pairs.jsonl, row 7: chosen and rejected are identical" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "code", "message"),
    [
        ("sft", ["--eval_size", "4"], 2, "eval_size holds out rows of a dataset in memory"),
        ("sft", ["--packing", "true"], 1, "packing is True, and with streaming that joins rows"),
        ("sft", ["--train_sampling_strategy", "group_by_length"], 1, "needs the lengths of all rows"),
        ("sft", ["--shuffle_window", "0"], 2, "shuffle_window is 0; set 1 row or more"),
        ("teacher", ["--dataloader_num_workers", "1"], 1, "the teacher labels them in this process"),
        ("teacher", ["--unlabelled_dataset_name", "sft.jsonl"], 2, "unlabelled_dataset_name adds rows"),
        ("ppo", ["--max_prompt_length", "none"], 1, "the prompts are streamed, so the longest one is not known"),
    ],
)
def test_what_cannot_be_streamed_exactly_is_rejected(there, capfd, name, options, code, message):
    rows = ["--dataset_name", f"{rows_of(name)}/*.jsonl", *STREAMED]
    assert run(name, "rejected", *rows, *options) == code
    assert message in capfd.readouterr().err
