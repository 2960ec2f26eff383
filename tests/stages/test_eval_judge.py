"""`onetrunk eval` with a judge, opponents and checks: what it writes, what it refuses, and what must hold of it."""

import json
import math
import shutil
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from onetrunk import cli
from onetrunk.judges.constitution import load_constitution
from onetrunk.judges.judge import Judge, Pair, Verdict
from onetrunk.report.blocks import contest_findings
from onetrunk.stages.eval import EvalArguments, hold_contest
from tests.feedback import runs
from tests.stages.small_runs import error_of, metrics, on_two_processes, read_rows
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

CHECKS = '''
def text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def warm(prompts, completions, **columns):
    """Score the share of words that begin with a letter of the first half."""
    words = [text(c).split() for c in completions]
    return [sum(word[0] < "n" for word in w) / max(1, len(w)) for w in words]


def concise(prompts, completions, **columns):
    return [1 / (1 + len(text(c))) for c in completions]


def silent(prompts, completions, **columns):
    return [None] * len(completions)
'''
NUM_PROMPTS = 13


def save_adapter(folder, model, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = runs.make_inputs(tmp_path_factory.mktemp("eval-inputs"), num_prompts=NUM_PROMPTS - 1)
    (folder / "checks.py").write_text(CHECKS)
    save_adapter(folder / "adapter", folder / "model", seed=1)
    save_adapter(folder / "adapter-2", folder / "model", seed=2)
    tiny_model("llama", seed=3, initializer_range=0.1).save_pretrained(folder / "other-words")
    tiny_tokenizer(vocab_size=50, chat_template=CHAT_TEMPLATE).save_pretrained(folder / "other-words")
    tiny_model("llama", seed=4, initializer_range=0.1).save_pretrained(folder / "rival")
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder / "rival")
    config = {"model_name_or_path": f"{folder}/adapter", "dataset_name": f"{folder}/prompts.jsonl"}
    config |= {"max_completion_length": 8, "use_cpu": True}
    (folder / "eval.yaml").write_text(json.dumps(config))
    judge = {"judge": ["rubric"], "constitution": str(folder / "constitution.yaml")}
    rubric = {"warm": f"{folder}/checks.py:warm", "concise": f"{folder}/checks.py:concise"}
    (folder / "judged.yaml").write_text(json.dumps({**config, **judge, "rubric": rubric}))
    return folder


@pytest.fixture
def evaluate(inputs, empty_folder):
    """Return a function that runs the verb in an empty folder; it returns the exit code."""

    def call(*options, out="out", config="judged"):
        words = ["--config", inputs / f"{config}.yaml", "--output_dir", out, *options]
        return cli.main(["eval", *map(str, words)])

    return call


def test_an_adapter_is_compared_with_what_it_started_from(evaluate, inputs, tmp_path, capsys):
    assert evaluate("--reward_funcs", f"{inputs}/checks.py:warm") == 0
    out = tmp_path / "out"
    figures = metrics(out)
    wins = figures["win_rate"]
    assert {"score/mean", "score/warm", "kl/ref"} <= set(figures["policy"]) and "score/warm" in figures["reference"]
    pairs = read_rows(out / "pairs.jsonl")
    counted = Counter(pair["outcome"] for pair in pairs)
    # One prompt stands twice.
    assert len(pairs) == wins["pairs"] == NUM_PROMPTS and wins["prompts"] == NUM_PROMPTS - 1
    assert (wins["wins"], wins["ties"], wins["losses"]) == (counted["win"], counted["tie"], counted["loss"])
    assert wins["discrete_win_rate"] == pytest.approx((counted["win"] + counted["tie"] / 2) / NUM_PROMPTS)
    assert wins["win_rate"] == pytest.approx(sum(pair["probability"] for pair in pairs) / NUM_PROMPTS)
    assert wins["interval"][0] <= wins["win_rate"] <= wins["interval"][1]
    assert wins["opponent"] == "reference" and wins["unjudged"] == wins["abstained"] == 0
    assert wins["position"]["position_consistency"] == 1.0 and wins["position"]["first_slot_probability"] == 0.5
    # Both sides' samples are those that were compared.
    for role, key in (("policy", "policy"), ("reference", "opponent")):
        assert [row["completion"] for row in read_rows(out / f"samples-{role}.jsonl")] == [pair[key] for pair in pairs]
    page = (out / "_report/report.md").read_text()
    for part in ("## Win rate", "by the principle: Which reply is warmer?", "The clearest losses"):
        assert part in page
    shown = capsys.readouterr().out
    assert "against reference on 12 prompts by the judge rubric" in shown and "at equal length" in shown


def test_a_judge_alone_is_enough_and_leaves_no_scores(evaluate, tmp_path):
    assert evaluate() == 0
    figures = metrics(tmp_path / "out")
    assert not [name for side in ("policy", "reference") for name in figures[side] if name.startswith("score/")]
    assert "reward/unscored_fraction" not in figures["policy"] and "kl/ref" in figures["policy"]
    row = read_rows(tmp_path / "out/samples-policy.jsonl")[0]
    assert row["score"] is None and "score/unscored" not in row


def test_a_judge_that_fails_loses_nothing_of_what_was_measured(evaluate, inputs, tmp_path, capsys):
    rubric = json.dumps(dict.fromkeys(("warm", "concise"), f"{inputs}/checks.py:silent"))
    assert evaluate("--rubric", rubric, "--reward_funcs", f"{inputs}/checks.py:warm") == 1
    assert f"the judge rubric decided none of {NUM_PROMPTS} pairs" in error_of(capsys)
    figures = metrics(tmp_path / "out")
    assert "score/mean" in figures["policy"] and "score/mean" in figures["reference"] and "win_rate" not in figures
    assert len(read_rows(tmp_path / "out/pairs.jsonl")) == NUM_PROMPTS


def test_the_interval_of_a_mean_score_is_that_of_students_t(evaluate, inputs, tmp_path):
    words = ["--reward_funcs", f"{inputs}/checks.py:warm", "--dataset_name", "few.jsonl"]
    runs.write_prompts(tmp_path / "few.jsonl", ["the cat", "a dog", "old house"])
    assert evaluate(*words, config="eval") == 0
    policy = metrics(tmp_path / "out")["policy"]
    low, high = policy["score/interval"]
    # Two degrees of freedom.
    assert policy["score/std"] > 0 and (high - low) / 2 == pytest.approx(4.303 * policy["score/std"] / math.sqrt(3))
    runs.write_prompts(tmp_path / "few.jsonl", ["the cat"])
    assert evaluate(*words, config="eval") == 0
    assert metrics(tmp_path / "out")["policy"]["score/interval"] == [None, None]


def test_an_evaluation_in_the_same_folder_leaves_no_side_of_the_one_before(evaluate, inputs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("samples-opponent.jsonl", "pairs.jsonl"):
        (out / name).write_text("{}\n")
    words = ["--model_name_or_path", inputs / "model", "--reward_funcs", f"{inputs}/checks.py:warm"]
    assert evaluate(*words, config="eval") == 0
    assert sorted(path.name for path in out.glob("*.jsonl")) == ["samples-policy.jsonl"]


def test_the_folder_of_a_training_is_rejected(evaluate, inputs, tmp_path, capsys):
    shutil.copytree(inputs / "adapter", tmp_path / "out")
    (tmp_path / "out/metrics.json").write_text("of the training")
    for options in ([], ["--dry_run"]):
        assert evaluate(*options) == 1
        assert "out holds a training (adapter_config.json), whose metrics and report" in error_of(capsys)
    assert (tmp_path / "out/metrics.json").read_text() == "of the training"


@pytest.mark.slow
def test_another_adapter_is_an_opponent_and_the_sides_can_be_exchanged(evaluate, inputs, tmp_path):
    assert evaluate("--opponent", inputs / "adapter-2") == 0
    assert evaluate("--model_name_or_path", inputs / "adapter-2", "--opponent", inputs / "adapter", out="other") == 0
    ours, theirs = (metrics(tmp_path / name)["win_rate"] for name in ("out", "other"))
    assert (ours["wins"], ours["ties"], ours["losses"]) == (theirs["losses"], theirs["ties"], theirs["wins"])
    assert ours["win_rate"] == pytest.approx(1 - theirs["win_rate"])
    samples = {key: [row[key] for row in read_rows(tmp_path / "out/pairs.jsonl")] for key in ("policy", "opponent")}
    assert samples["opponent"] == [row["completion"] for row in read_rows(tmp_path / "other/samples-policy.jsonl")]


@pytest.mark.parametrize(
    ("config", "options", "code", "sentence"),
    [
        ("eval", [], 2, "reward_funcs is not set, and neither is a judge"),
        ("eval", ["--judge", "rubric"], 2, "judge is set and constitution is not"),
        ("eval", ["--constitution", "{}/constitution.yaml"], 2, "constitution is set and judge is not"),
        ("judged", ["--tie_margin", "0.5"], 2, "set it from 0 to below 0.5"),
        ("judged", ["--model_name_or_path", "{}/model"], 1, "opponent is not set, and {}/model is a base model"),
        ("judged", ["--opponent", "nowhere/to/be"], 1, "there is no such folder"),
        ("judged", ["--opponent", "{}/../{name}/adapter"], 1, "is the model itself"),
        ("judged", ["--opponent", "{}/other-words"], 1, "is not that of {}/adapter (only one of them has the token"),
    ],
)
def test_a_mistake_is_one_sentence(evaluate, inputs, capsys, config, options, code, sentence):
    def filled(text):
        return text.replace("{name}", inputs.name).replace("{}", str(inputs))

    assert evaluate(*map(filled, options), config=config) == code
    assert filled(sentence) in error_of(capsys)


@pytest.mark.slow
@pytest.mark.multi_process
def test_two_processes_compare_what_one_does(evaluate, inputs, tmp_path):
    assert evaluate() == 0
    on_two_processes("evaluate", "--config", inputs / "judged.yaml", "--output_dir", "two")
    assert read_rows(tmp_path / "two/pairs.jsonl") == read_rows(tmp_path / "out/pairs.jsonl")
    assert metrics(tmp_path / "two")["win_rate"] == metrics(tmp_path / "out")["win_rate"]


# The contest alone, with judges that are seen through.

PAIRS = [Pair(f"prompt {i}", f"first {'x' * i}", f"second {'y' * (3 * i % 7)}") for i in range(9)]


class LengthJudge(Judge):
    """Likes the longer one, whatever it reads first."""

    name = "length"
    identity = {"judge": "length"}

    def _answer(self, items, principle, keep):
        for index, pair in enumerate(items):
            keep(index, Verdict((1 + (len(pair.first) > len(pair.second)) - (len(pair.first) < len(pair.second))) / 2))


@pytest.fixture
def contest(inputs, tmp_path):
    constitution = load_constitution(inputs / "constitution.yaml")

    def hold(judge, pairs=PAIRS, **settings):
        args = EvalArguments(dataset_name="d", output_dir=str(tmp_path), **settings)
        return hold_contest(args, judge, constitution, pairs, "reference")

    return hold


def test_a_win_rate_that_is_length_alone_is_gone_at_equal_length(contest):
    # Of six pairs the policy's completion is longer by 4 in four, as long in one, and shorter by 4 in one.
    pairs = [Pair(f"prompt {i}", "x" * (8, 8, 8, 8, 6, 4)[i % 6], "y" * (4, 4, 4, 4, 6, 8)[i % 6]) for i in range(60)]
    found = contest(LengthJudge(), pairs)
    rates = found.metrics
    assert rates["win_rate"] == rates["discrete_win_rate"] == pytest.approx((4 + 1 / 2) / 6)
    assert rates["length_controlled_win_rate"] == pytest.approx(0.5, abs=0.02)
    assert "the completions are 2 characters longer on average" in " ".join(contest_findings(rates))


def test_nothing_is_bought_twice_in_a_rerun_and_equal_texts_not_at_all(contest, tmp_path):
    same = [Pair("prompt", "a", "a"), *PAIRS]
    judge = runs.CountingJudge(tmp_path / "asked.log")
    first = contest(judge, same)
    again = contest(judge, same)
    asked = runs.questions_asked(tmp_path / "asked.log")
    assert set(asked.values()) == {1} and len(asked) == 2 * 2 * len(PAIRS)  # Orders times principles.
    assert again.metrics == first.metrics
    assert first.outcomes[0] == "tie" and first.metrics["identical"] == 1
    assert first.metrics["pairs"] == sum(outcome != "no verdict" for outcome in first.outcomes)
    assert first.metrics["abstained"] + first.metrics["pairs"] == len(same)
