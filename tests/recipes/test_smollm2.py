"""smollm2-135m-cpu: the rubric by hand, which replies SFT learns from, and the chain on the pretrained model."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from onetrunk import cli
from onetrunk.stages.pipeline import PipelineState, load_pipeline
from tests.recipes.pretrained import make_base_of_wheel
from tests.rollouts.test_vllm_server import Serving
from tests.stages.recipes import ROOT, load_recipe_module

NAME = "smollm2-135m-cpu"
FOLDER = ROOT / "recipes" / NAME
prepare = load_recipe_module(NAME, "prepare")
rewards = load_recipe_module(NAME, "rewards")


def request(text):
    return [{"role": "user", "content": text}]


def reply(text):
    return [{"role": "assistant", "content": text}]


def test_the_rubric_by_hand():
    texts = ["Tea is warm.", "Tea is warm. It is good!", "Tea", "A " + "very " * 20 + "long way.", "Is it 3.5 m?"]
    assert rewards.one_sentence([reply(text) for text in texts]) == [1, 0, 0, 0, 1]
    assert rewards.one_sentence([reply("Tea is warm.")], completion_stopped=[False]) == [0]
    asked = ("Describe onions in a single sentence.", "Write one sentence about rust.", "Hi")
    completions = [reply(text) for text in ("An Onion is round.", "Iron is old.", "Hello.")]
    assert rewards.on_subject(list(map(request, asked)), completions) == [1, 0, None]


def test_every_request_names_its_subject_and_no_held_out_subject_is_trained_on():
    train, held_out = prepare.rows(prepare.SUBJECTS), prepare.rows(prepare.HELD_OUT_SUBJECTS)
    for row in (*train, *held_out):
        assert rewards.SUBJECT.search(row["prompt"][0]["content"])[1] == row["subject"]
    assert {row["subject"] for row in train}.isdisjoint(row["subject"] for row in held_out)
    assert (len(train), len(held_out)) == (660, 120)


def test_sft_learns_from_whole_sentences_on_the_subject_each_once(empty_folder):
    best_replies = load_recipe_module(NAME, "best_replies")
    good, cut, other = "Salt is white.", "Salt is not yet", "Iron is old."
    rows = [
        {"chosen": good, "rejected": other, "chosen_stopped": True, "rejected_stopped": True},
        {"chosen": cut, "rejected": good, "chosen_stopped": False, "rejected_stopped": True},
    ]
    pairs = empty_folder / "runs" / NAME / "prefs/data/preferences.jsonl"
    pairs.parent.mkdir(parents=True)
    prompt = request("Write one sentence about salt.")
    made = [{**row, "prompt": prompt, **{side: reply(row[side]) for side in ("chosen", "rejected")}} for row in rows]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in made))
    assert best_replies.main() == 0
    (kept,) = map(json.loads, (empty_folder / "runs" / NAME / "sft.jsonl").read_text().splitlines())
    assert kept == {"prompt": prompt, "completion": reply(good)}


def test_the_replies_are_chosen_again_if_the_pairs_or_the_rubric_change(empty_folder):
    pairs = empty_folder / "runs" / NAME / "prefs/data/preferences.jsonl"
    pairs.parent.mkdir(parents=True)
    pairs.touch()
    pipeline = load_pipeline(f"{NAME}/pipeline.yaml")
    (best,) = (stage for stage in pipeline.stages if stage.name == "best")
    inputs = {Path(name).resolve() for name in PipelineState(pipeline).plan(best).inputs}
    assert inputs == {pairs, *(FOLDER / name for name in ("best_replies.py", "rewards.py"))}


# Of each stage: enough to run through all of it.
SIZES = {
    "prefs": "--dataset_split train[:8] --num_generations 2",
    "sft": "--max_steps 1 --per_device_train_batch_size 2 --eval_size 1",
    "reward": "--max_steps 1 --per_device_train_batch_size 2 --eval_size 2",
    "distill": "--max_steps 1 --per_device_train_batch_size 2 --eval_size 2",
    "ppo": "--num_rollouts 1 --rollout_batch_size 4 --max_completion_length 16 --eval_dataset_split train[:2]",
    "eval": "--dataset_split train[:4] --max_completion_length 16",
}


@pytest.mark.slow
def test_the_chain_runs_on_the_pretrained_model(workplace, monkeypatch, capsys):
    make_base_of_wheel(monkeypatch, capsys)
    runs = workplace / "runs" / NAME
    tokenizer = AutoTokenizer.from_pretrained(runs / "base")
    model = AutoModelForCausalLM.from_pretrained(runs / "base")
    assert len(tokenizer) == model.config.vocab_size == 49_152
    question, form = request("What is the capital of France?"), {"return_tensors": "pt", "return_dict": True}
    shown = tokenizer.apply_chat_template(question, add_generation_prompt=True, **form)
    said = model.generate(**shown, do_sample=False, max_new_tokens=24)[0, shown["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
    for verb, options in SIZES.items():
        if verb == "sft":
            assert load_recipe_module(NAME, "best_replies").main() == 0
            line = json.dumps({"prompt": request("Hi"), "completion": reply("Hi.")}) + "\n"
            (runs / "sft.jsonl").write_text(line * 4)
        assert cli.main([verb, "--config", f"recipes/{NAME}/{verb}.yaml", *options.split()]) == 0, verb
    metrics = json.loads((runs / "eval/metrics.json").read_text())
    assert {"score/warm", "score/one_sentence", "score/on_subject"} <= set(metrics["policy"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ppo_samples_the_pretrained_model_from_a_real_vllm(workplace, monkeypatch, capsys):
    make_base_of_wheel(monkeypatch, capsys)
    runs = workplace / "runs" / NAME
    server = Serving(runs / "base", workplace / "serve.log", 256)
    model, reward = runs / "base", f"recipes/{NAME}/rewards.py:on_subject"
    options = f"""--model_name_or_path {model} --dtype float32 --reward_funcs {reward} --reward_weights 1
        --num_rollouts 2 --rollout_batch_size 8 --max_completion_length 16 --logging_steps 1 --eval_strategy no
        --use_vllm true --vllm_server_base_url {server.url}"""
    server.start()
    try:
        server.wait()
        assert cli.main(["ppo", "--config", f"recipes/{NAME}/ppo.yaml", *options.split()]) == 0
    finally:
        server.kill()
    (state,) = runs.glob("ppo/checkpoint-*/trainer_state.json")
    logs = json.loads(state.read_text())["log_history"]
    gaps = [row["sampling/logprob_gap_max"] for row in logs if "score/mean" in row]
    # float32 in both; the second rollout is sampled from a trained adapter.
    assert len(gaps) == 2 and max(gaps) < 1e-3
