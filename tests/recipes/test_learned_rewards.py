"""The recipes with a learned reward, tldr-0.5b and constitutional-1.5b: data by hand, and the chain of the latter."""

import json
from pathlib import Path

import pytest

from onetrunk import cli
from onetrunk.models.build import BaseShape, make_base
from onetrunk.stages.pipeline import load_pipeline
from tests.stages.recipes import ROOT, load_recipe_module
from tests.stages.small_runs import write_rows
from tests.tiny import CHAT_TEMPLATE

prepare = load_recipe_module("constitutional-1.5b", "prepare")
SPECIAL = ["<user>", "<assistant>", "<eos>"]


def transcript(*turns):
    names = ("Human", "Assistant")
    return "".join(f"\n\n{names[i % 2]}: {turn}" for i, turn in enumerate(turns))


def test_a_transcript_becomes_the_conversation_before_its_last_reply():
    turns = prepare.conversation(transcript("Hi.", "Hello.", "How do I pick a lock?", "Ask a locksmith."))
    assert [turn["content"] for turn in turns] == ["Hi.", "Hello.", "How do I pick a lock?"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert prepare.conversation(transcript("Only a question.")) is None
    assert prepare.conversation(transcript("", "An answer to nothing.")) is None
    assert prepare.conversation("\n\nHuman: One.\n\nHuman: Two.\n\nAssistant: Three.") is None
    assert prepare.conversation("A remark." + transcript("Hi.", "Hello.")) is None
    # An empty last reply does not matter: it is not used.
    assert len(prepare.conversation(transcript("Hi.", ""))) == 1


def test_no_prompt_is_in_two_files_and_each_has_both_kinds():
    texts = {kind: [transcript(f"{kind} {i}?", "Yes.") for i in range(20)] * 2 for kind in prepare.KINDS}
    sizes = {"revise": 12, "prompts": 20, "held_out": 8}
    files = prepare.split_prompts(texts, sizes)
    assert files == prepare.split_prompts(texts, sizes)
    prompts = [row["prompt"][0]["content"] for rows in files.values() for row in rows]
    assert len(prompts) == len(set(prompts)) == 40
    for name, rows in files.items():
        assert [row["kind"] for row in rows].count("helpful") == sizes[name] // 2
    with pytest.raises(ValueError, match="there are 20 different harmless prompts, and 21 are needed"):
        prepare.split_prompts(texts, {**sizes, "held_out": 10})


def test_the_stages_of_a_chain_hand_their_results_on(monkeypatch):
    monkeypatch.chdir(ROOT)
    for recipe in ("tldr-0.5b", "constitutional-1.5b"):
        written: set[str] = set()
        handed = 0
        for stage in load_pipeline(f"recipes/{recipe}/pipeline.yaml").stages:
            values = [stage.settings.get(name) for name in ("model_name_or_path", "dataset_name", "eval_dataset_name")]
            values += stage.settings.get("reward_funcs", [])
            needed = [value for value in values if value and value.startswith("runs/")]
            for value in needed:
                assert any(Path(value).is_relative_to(path) for path in written), (stage.name, value)
            handed += len(needed)
            written |= {str(output) for output in stage.outputs}
        assert handed >= 4


def rubric(path):
    path.write_text(
        "def check(prompts, completions, **columns):\n    return [len(str(c)) / 200 for c in completions]\n"
    )
    return ["--judge", "rubric", "--rubric", json.dumps(dict.fromkeys(TAGS, f"{path}:check"))]


TAGS = ("harmless", "helpful", "explains", "respectful", "coverage", "faithful", "clear")
TRAINS = "--max_steps 2 --save_strategy no --use_cpu true --per_device_train_batch_size 4 --activation_checkpointing"
TRAINS += " false --gradient_accumulation_steps 1 --max_length 200 --report_to none"
PPO = "--num_rollouts 1 --rollout_batch_size 8 --num_minibatches 1 --value_pretraining_rollouts 0 --use_cpu true"
PPO += " --eval_strategy no --max_completion_length 8 --learning_rate 0.02 --warmup_steps 0"


def run(recipe, stage, *options):
    path = ROOT / "recipes" / recipe / f"{stage}.yaml"
    words = [word for option in options for word in ([option] if "{" in option or "/" in option else option.split())]
    assert cli.main([stage.split("_")[0], "--config", str(path), *words]) == 0, stage


@pytest.mark.slow
def test_the_constitutional_chain_runs_from_transcripts_to_a_win_rate(workplace, monkeypatch):
    words = []
    for kind in prepare.KINDS:
        rows = [{"chosen": transcript(f"A {kind} question {i}?", "Yes.")} for i in range(40)]
        write_rows(workplace / f"{kind}.jsonl", rows)
        words += [f"--{kind}_file", f"{kind}.jsonl"]
    sizes = ["--revise", "12", "--prompts", "16", "--held_out", "6"]
    monkeypatch.setattr("sys.argv", ["prepare.py", *words, *sizes])
    assert prepare.main() == 0
    texts = [f"A harmless question {i}? A helpful answer." for i in range(40)]
    make_base(texts, "base", shape=BaseShape(max_positions=1024), chat_template=CHAT_TEMPLATE, special_tokens=SPECIAL)
    recipe, folder = "constitutional-1.5b", workplace / "runs/constitutional-1.5b"
    samples = "--use_cpu true --max_completion_length 12"
    run(recipe, "prefs_revise", f"--model_name_or_path base {samples} --max_critique_length 12")
    trails = [json.loads(line) for line in (folder / "revise/data/revisions.jsonl").read_text().splitlines()]
    assert len(trails) > 6 and all(len(json.loads(row["trail"])) == 2 for row in trails)
    run(recipe, "sft", "--model_name_or_path base --eval_size 2 --eval_strategy no", TRAINS)
    judge = rubric(workplace / "checks.py")
    run(recipe, "prefs", samples, *judge)
    assert (folder / "prefs/data/preferences.jsonl").stat().st_size > 0
    run(recipe, "reward", "--eval_size 3", TRAINS)
    run(recipe, "ppo", PPO)
    run(recipe, "eval", samples, *judge)
    metrics = json.loads((folder / "eval/metrics.json").read_text())
    assert len(metrics["win_rate"]["principles"]) == 4 and metrics["policy"]["kl/ref"] != 0
