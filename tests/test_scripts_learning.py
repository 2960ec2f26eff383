"""The study of learning: end to end on a handful of rollouts, its tasks, and its table."""

import importlib
import json
import re
from pathlib import Path

import pytest
import torch

from onetrunk.ops.packing import make_pack
from onetrunk.rollouts.episodes.chat_turns import ChatTurns
from tests import learning
from tests.chat import CHAT_VOCAB, chat_tokenizer
from tests.processes import python
from tests.tiny import tiny_model

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"
SMOLLM2 = BENCH.parents[1] / "runs" / "learning" / "smollm2-135m"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_a_right_sum_that_ends_scores_one_and_nothing_else_does(tmp_path, bench):
    tasks = bench("learning_tasks")
    task = tasks.Sums(tmp_path)
    prompt = tasks.sum_prompts(torch.tensor([[47, 58]]))[0].tolist()
    assert task.text(prompt) == "4 7 + 5 8 ="
    assert task.tokenizer()(task.text(prompt))["input_ids"] == prompt
    right = [tasks.ID[c] for c in "105"]
    assert task.score(prompt, [*right, tasks.EOS]) == 1
    assert task.score(prompt, right) == task.score(prompt, [*right[:2], tasks.EOS]) == 0


def test_the_taught_model_is_made_once_and_held_out_sums_are_in_no_prompt(tmp_path, bench):
    tasks = bench("learning_tasks")
    task = tasks.Sums(tmp_path / "base", hidden_size=16, taught_enough=0.0)
    first = task.model(seed=0)
    held_out = task.held_out(first)["held_out"]
    assert 0 < held_out < 1
    assert task.held_out(task.model(seed=1))["held_out"] == held_out
    # 90 * 90 pairs, 600 of them held out; no pair comes twice.
    assert len({tuple(row) for row in task.prompts(0).tolist()}) == 8100 - 600


@pytest.mark.parametrize(("name", "num_turns"), [("chain-1", 1), ("chain", 4), ("chain-16", 16)])
def test_what_play_samples_is_what_the_environment_of_the_chain_answers_and_pays(name, num_turns, bench):
    task = bench("learning_tasks").make_task(name, "")
    tokenizer, prompts = task.tokenizer(), task.prompts(0)[:8]
    for prompt, episode in zip(prompts.tolist(), task.play(task.model(0), prompts), strict=True):
        assert episode.turns == [turn for number in range(num_turns) for turn in (number, number, -1)][:-1]
        assert episode.logprobs[2::3] == [0] * (num_turns - 1) and max(episode.logprobs) <= 0
        words = tokenizer.convert_ids_to_tokens(episode.ids)
        game = learning.ChainGame(task.chain)
        game.reset(options={"prompt": task.text(prompt)})
        steps = [game.step(action) for action in words[::3]]
        assert [step[0] for step in steps] == [*words[2::3], ""] and words[1::3] == ["<eos>"] * num_turns
        assert [step[1] for step in steps] == pytest.approx(task.turn_rewards(prompt, episode.ids))


@pytest.mark.parametrize("name", ["replies", "rules", "dialogue"])
def test_a_pretrained_task_names_the_command_that_makes_its_model(name, tmp_path, bench):
    task = bench("learning_tasks").make_task(name, tmp_path)
    assert task.known(0) == {}
    command = rf"python recipes/smollm2-135m-cpu/prepare.py --output_dir {tmp_path}/smollm2-135m"
    with pytest.raises(FileNotFoundError, match=command):
        task.prompts(0)


def small(task_class, folder, **changes):
    """Return a pretrained task with a tokenizer of bytes and a tiny Llama in place of the pretrained model."""
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.save_pretrained(folder / "base")
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {"vocab_size": CHAT_VOCAB, "max_position_embeddings": 1024, "num_hidden_layers": 2}
    tiny_model("llama", **shape, **ends, initializer_range=0.02).save_pretrained(folder / "base")
    task = task_class(folder, pad_id=tokenizer.pad_token_id, eos_id=tokenizer.eos_token_id, **changes)
    task.lora = learning.LORA
    return task


def prompt_and_encode(task, request):
    """Return the ids of a request, and a function from what the model says (`#` is EOS) to ids."""
    tokenizer = task.tokenizer()
    (prompt,) = (row for row in task._rows("prompts") if task.request(row) == request)
    return prompt, lambda said: tokenizer(said.replace("#", tokenizer.eos_token))["input_ids"]


def test_rules_scores_by_hand(tmp_path, bench):
    task = small(bench("learning_pretrained").Rules, tmp_path)
    # The first topic takes the first mark with the first word, the second with the second.
    request = "Write one sentence about a bridge that contains the word river, and end it with a question mark."
    prompt, ids = prompt_and_encode(task, request)
    thirds = {
        "Is a River under the bridge?#": 3,
        "Is a river under the bridge?": 2,  # Not stopped.
        "The river is wide.#": 2,  # Another mark.
        "Is it wide? Is the river?#": 2,  # Two sentences.
        "Is it\nthe river?#": 2,  # Two lines.
        "River?#": 2,  # Too short for a sentence.
        "Are there rivers under it?#": 2,  # Another word.
        "There is 1.5 m of water.#": 1,
        "A river": 1,
        "#": 0,
    }
    assert {said: round(3 * task.score(prompt, ids(said)), 6) for said in thirds} == thirds
    request = "Write one sentence about a bridge that contains the word window, and finish with an exclamation mark."
    prompt, ids = prompt_and_encode(task, request)
    assert task.score(prompt, ids("The bridge has a window!#")) == 1
    assert task.reward(prompt, ids("The bridge has a window.#")) == pytest.approx(2 / 3)


def test_the_turns_of_a_dialogue_by_hand(tmp_path, bench):
    pretrained = bench("learning_pretrained")
    task = small(pretrained.Dialogue, tmp_path)
    prompt, ids = prompt_and_encode(task, "Write a short sentence about a bridge with the word river.")
    later = ["Now another one with the word window.", "Now another one with the word winter."]
    assert pretrained.later_requests(task.request(prompt)) == later
    between = "{}\n<|im_start|>user\n{}#\n<|im_start|>assistant\n"

    def earned(*turns):
        # A turn of 16 bytes is cut off, and its end belongs to the answer.
        ends = ["" if said.endswith("#") else "#" for said in turns[:2]]
        asked = [between.format(*pair) for pair in zip(ends, later, strict=True)]
        completion = ids(turns[0] + asked[0] + turns[1] + asked[1] + turns[2])
        rewards = task.turn_rewards(prompt, completion)
        assert task.score(prompt, completion) == pytest.approx(sum(rewards))
        return [round(6 * reward, 6) for reward in rewards]

    assert earned("A river is old.#", "I saw a window.#", "I like a winter#") == [2, 2, 1]
    # Cut off; the word of another turn; cut off at the end of a sentence.
    assert earned("A river is large", "A river is old.#", "Winter is a cup.") == [1, 1, 1]
    assert earned("#", "#", "A long long way.") == [0, 0, 0]


def test_play_and_the_environment_of_a_dialogue_send_the_same_tokens(tmp_path, bench):
    """Whatever the model says, cut off or not: ours plays, and `play` gets the same replies."""
    pretrained, study, ours = bench("learning_pretrained"), bench("learning_study"), bench("learning")
    played = []

    class Recorded(study.Rule):
        def function(self, paid=None):
            rule = super().function(paid)

            def recorded(prompts, completions, completion_ids, turn_ids, **columns):
                rewards = rule(prompts, completions, completion_ids)
                played.extend(zip(map(self._ids, prompts), completion_ids, turn_ids, rewards, strict=True))
                return rewards

            return recorded

    task = small(pretrained.Dialogue, tmp_path / "model", length=500)
    task.settings = {**task.settings, "rollout_batch_size": 8, "per_device_train_batch_size": 8, "num_ppo_epochs": 1}
    rule = Recorded(task, task.tokenizer())
    model = task.model(0)
    with torch.no_grad():  # About half of the turns end by themselves.
        embeddings = model.get_output_embeddings()
        biased = torch.nn.Linear(embeddings.in_features, embeddings.out_features, bias=True, dtype=torch.bfloat16)
        biased.weight.copy_(embeddings.weight)
        biased.bias.zero_()[task.eos_id] = 2.5
    model.set_output_embeddings(biased)
    task.model = lambda seed: model
    settings = {"pays": "turns", "learning_rate": 1e-3}
    ours.make_trainer(task, rule, settings, seed=0, rollouts=1, folder=str(tmp_path / "run")).train()

    assert len(played) == 8
    replies = [
        [[i for i, at in zip(ids, turns, strict=True) if at == turn] for turn in range(3)]
        for _, ids, turns, _ in played
    ]
    stopped = [task.is_stopped(reply) for row in replies for reply in row]
    assert any(stopped) and not all(stopped)
    prompts = [prompt for prompt, *_ in played]
    assert {tuple(prompt) for prompt in prompts} <= {tuple(row) for row in task.prompts(0).tolist()}
    # `play` takes the same replies.
    said = iter(zip(*replies, strict=True))
    task._draw = lambda model, contexts: (turn := next(said), [[-1.0] * len(reply) for reply in turn])
    episodes = task.play(None, torch.tensor(prompts))
    assert [(episode.ids, episode.turns) for episode in episodes] == [(ids, turns) for _, ids, turns, _ in played]
    for episode in episodes:
        assert [logprob < 0 for logprob in episode.logprobs] == [turn >= 0 for turn in episode.turns]
    # Each turn was paid for itself.
    assert [list(rewards.rewards) for *_, rewards in played] == [
        task.turn_rewards(prompt, episode.ids) for prompt, episode in zip(prompts, episodes, strict=True)
    ]


def test_play_returns_the_logprobs_of_what_it_sampled(tmp_path, bench):
    task = small(bench("learning_pretrained").Dialogue, tmp_path, length=500)
    model, prompts = task.model(0).float(), task.prompts(0)[:4]
    torch.manual_seed(0)
    for prompt, episode in zip(prompts.tolist(), task.play(model, prompts), strict=True):
        ids = torch.tensor([prompt + episode.ids])
        logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        taken = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        sampled = torch.tensor(episode.turns) >= 0
        # Padding on the left and a cache: rounding in float32.
        torch.testing.assert_close(torch.tensor(episode.logprobs)[sampled], taken[sampled], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["rules", "dialogue"])
def test_held_out_requests_share_neither_topic_nor_word_with_the_prompts(name, bench):
    pretrained = bench("learning_pretrained")
    task = bench("learning_tasks").make_task(name, "nowhere")
    prompts, held_out = task.requests("prompts"), task.requests("held_out")
    assert (len(set(prompts)), len(set(held_out))) == (16 * 16, 8 * 8) == (256, pretrained.HELD_OUT)
    for lists in (pretrained.TOPICS, pretrained.WORDS):
        assert set(lists["prompts"]).isdisjoint(lists["held_out"])
        for request in held_out:
            assert not any(re.search(rf"\b{entry}\b", request) for entry in lists["prompts"])


@pytest.mark.skipif(not (SMOLLM2 / "base").is_dir(), reason=f"no pretrained model in {SMOLLM2}; prepare.py makes it")
@pytest.mark.parametrize("name", ["rules", "dialogue"])
def test_all_prompts_of_the_pretrained_tokenizer_have_one_length(name, bench):
    task = bench("learning_tasks").make_task(name, SMOLLM2.parent)
    prompts = task.prompts(0)
    assert len({tuple(row) for row in prompts.tolist()}) == 256
    assert {len(row) for row in task._rows("held_out")} == {prompts.shape[1]}
    # Through text, as GRPO and AgileRL get them.
    texts = [task.text(row) for row in prompts.tolist()]
    assert task.tokenizer()(texts)["input_ids"] == prompts.tolist()


@pytest.mark.skipif(not (SMOLLM2 / "base").is_dir(), reason=f"no pretrained model in {SMOLLM2}; prepare.py makes it")
def test_the_dialogue_of_the_pretrained_tokenizer_is_what_episodes_send_and_fits(bench):
    task = bench("learning_tasks").make_task("dialogue", SMOLLM2.parent)
    chat, lengths = ChatTurns(task.tokenizer()), set()
    for prompt in task.prompts(0).tolist():
        assert chat.prompt_ids(task.messages(prompt), []) == prompt
        for request in bench("learning_pretrained").later_requests(task.request(prompt)):
            message = [{"role": "user", "content": request}]
            for stopped in (True, False):
                assert task.answer_ids(request, stopped) == chat.ids_of(message, (task.eos_id,), stopped)
            lengths.add(len(task.answer_ids(request, stopped=False)))
    assert 3 * 16 + 2 * max(lengths) <= task.length


def test_a_context_begins_at_each_pair_of_its_first_tokens(bench):
    class Stream(bench("compaction").Segmented):
        start = (7, 8)

        def __init__(self):
            """Make no samples."""

    ids = torch.tensor([[8, 7, 8, 1, 7, 7, 8, 2], [7, 8, 7, 1, 8, 7, 7, 8], [1, 2, 3, 4, 5, 6, 8, 7]])
    pack = make_pack([[1]] * 3, ids.tolist(), 0)
    expected = [[0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2], [0] * 8]
    assert Stream().segments(pack).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "rollouts", "arms"),
    [
        ("staleness", "--lags 1 --rates 1e-3", 2, ["dis", "dis, groups of 8"]),
        ("compaction", "--compactions 1", 2, ["chain", "the paper's correction, lam 0.95", "summaries masked"]),
        ("online", "--rates 1e-3", 20, ["running mean", "groups of 8"]),
    ],
)
def test_a_small_study_prints_its_table(script, options, rollouts, arms):
    words = [*options.split(), "--seeds", 0, "--rollouts", rollouts, "--arms", *arms]
    done = python(BENCH / f"{script}.py", *words)
    for arm in arms:
        (share,) = re.findall(rf"^\| {re.escape(arm)} \|.*? (0\.\d+) \(\S+\) \|", done.stdout, re.MULTILINE)
        assert 0 < float(share) < 1, arm


@pytest.mark.slow
def test_the_study_runs_ours_and_grpo_and_goes_on_where_it_ended(tmp_path):
    words = "--tasks one_token --trainers ours grpo --rollouts 1 --seeds 0 --out".split()
    for _ in range(2):
        done = python(BENCH / "study.py", *words, tmp_path, "--work", tmp_path / "work")
    runs = [json.loads(line) for line in (tmp_path / "one_token.jsonl").read_text().splitlines()]
    assert {run["arm"] for run in runs} == {"shared", "top-1", "lam-1", "grpo"}
    assert len(runs) == len({(run["arm"], run["seed"], str(run["rates"])) for run in runs})
    assert "| `grpo` |" in done.stdout and (tmp_path / "one_token.png").is_file()
