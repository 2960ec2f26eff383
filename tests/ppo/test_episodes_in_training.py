"""Training on episodes: the first ratio, what equals a run without them, schedules, resuming, chats, bad settings."""

import contextlib
import json
import random
import time
from functools import partial

import pytest
import torch
from datasets import Dataset

from onetrunk.data.rows import variables_of
from onetrunk.models.reward_model import encode_rows
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.experience import ExperienceStream
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.combine import RewardSet
from tests.chat import CHAT_VOCAB, END, add, chat_tokenizer, tool_call
from tests.fakes import CannedBackend, CopyBackend
from tests.places import CPU
from tests.ppo import support
from tests.ppo.launches import ALONE, Launch, Launches
from tests.ppo.support import StopAt, assert_same, base_model, logged, lora, make_trainer, prompts, trained_weights
from tests.tiny import tiny_tokenizer

LENGTH, NOUNS = 14, ("cat", "dog", "river")
SETTINGS = {"max_completion_length": LENGTH, "num_ppo_epochs": 2, "num_minibatches": 2, "check_memory": False}


class Words:
    """A text environment of three turns: the reward of a turn is the number of its words that are in a list."""

    turns, pause_s = 3, 0.0

    def reset(self, *, seed=None, options=None):
        self.turn, self.seed = 0, seed
        return f" {('red', 'green')[seed % 2]}", {}

    def step(self, action):
        time.sleep(random.random() * self.pause_s)
        self.turn += 1
        reward = sum(map(action.split().count, NOUNS))
        return f" the {('dog', 'bird')[self.turn % 2]}", reward, self.turn == self.turns, False, {}


class SlowWords(Words):
    pause_s = 0.1


class Long(Words):
    turns = 5


# Three turns of at most 3 tokens: a context is compacted about twice.
COMPACTED = {
    "factory": Long,
    "max_turn_length": 3,
    "max_context_length": 22,
    "kept_turns": 1,
    "compaction_prompt": " the lantern",
    "max_completion_length": 80,
}


def words_trainer(folder, factory=Words, reward=None, backend=None, compact=None, **settings):
    """Return a trainer whose turns end at a few common words."""
    stops = [tiny_tokenizer().convert_ids_to_tokens(i) for i in range(40, 64)]
    made = partial(PPOTrainer, environment_factory=factory, compact=compact)
    settings = {"stop_tokens": stops, **SETTINGS, **settings}
    return make_trainer(folder, reward=reward, rollout_backend=backend, trainer_class=made, **settings)


def run(folder, resume=None, **arguments):
    trainer = words_trainer(folder, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


TOP = {"adapter_layers": "top-1", "num_rollouts": 2, "rollout_batch_size": 8}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TOP, {**TOP, "capture_trunk_states": True}, {**TOP, "top_p": 0.9}])
def test_slow_answers_change_no_bit_of_the_weights(tmp_path, settings):
    quick = run(tmp_path / "quick", **settings)
    slow = run(tmp_path / "slow", factory=SlowWords, **settings)
    assert_same(trained_weights(slow.model), trained_weights(quick.model))
    assert (quick.sampler.keeps is not None) == settings.get("capture_trunk_states", False)


class Ending(Words):
    ends = (True, False)

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, *self.ends, info


class EndsAtLimit(ExperienceStream):
    """Advantages of a policy whose values are 0, and 8 after the last token; keeps what the last one adds."""

    def advantages(self, pack, output, rewards, stopped):
        eights = torch.full_like(output.next_values, 8.0)
        output = output._replace(values=torch.zeros_like(output.values), next_values=eights)
        advantages, returns = super().advantages(pack, output, rewards, stopped)
        last = pack.completion_mask.long().cumsum(1).argmax(1, keepdim=True)
        self.trainer.added += (advantages - rewards).gather(1, last).flatten().tolist()
        return advantages, returns


@pytest.mark.parametrize("gae_unit", ["token", "turn"])
@pytest.mark.parametrize(
    ("ends", "added"), [((True, False), 0.0), ((False, True), 4.0), ((True, True), 0.0), ((False, False), 4.0)]
)
def test_an_episode_that_a_limit_ends_is_no_terminal_state(tmp_path, monkeypatch, ends, added, gae_unit):
    # With gamma 1/2 the value after a cut adds 1/2 * 8 to the last action; (False, False) ends at max_turns.
    monkeypatch.setattr(Ending, "ends", ends)
    settings = {"truncated_completions": "bootstrap", "gamma": 0.5, "max_turns": 1, "max_completion_length": 100}
    trainer = words_trainer(tmp_path, Ending, gae_unit=gae_unit, beta=0.0, **settings)
    trainer.stream_class, trainer.added = EndsAtLimit, []
    trainer.train()
    # The metrics ask once more, for a critic of zeros.
    assert trainer.added == pytest.approx([added] * 8)


def test_a_terminated_turn_that_was_cut_off_has_no_penalty_and_keeps_its_last_word(tmp_path):
    kept = {}

    def reward(completions, completion_ids, **kwargs):
        kept.update(zip(completions, map(tuple, completion_ids), strict=True))
        return [1.0] * len(completions)

    trainer = run(tmp_path, factory=Ending, reward=reward, max_turn_length=2, missing_eos_penalty=5.0)
    assert logged(trainer, "episode/turns_cut")[0] > 0 and logged(trainer, "completion/stopped_fraction") == [1.0]
    stops = {1, *range(40, 64)}
    cut = {text: ids for text, ids in kept.items() if ids[-1] not in stops}
    assert cut and all(text == tiny_tokenizer().decode(ids, skip_special_tokens=True) for text, ids in cut.items())


class Closing(Words):
    def __init__(self, made):
        made.append(self)
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_environments_are_closed_once_when_a_run_ends_and_after_an_evaluation(tmp_path, error):
    made = []

    def failing(completions, **kwargs):
        if error is not None:
            raise error("in a reward function")
        return [0.0] * len(completions)

    trainer = words_trainer(tmp_path, partial(Closing, made), failing, eval_dataset=prompts(3))
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        trainer.train()
    assert len(made) == 4 and {environment.closed for environment in made} == {1}
    if error is None:
        trainer.evaluate()
        assert len(made) == 7 and {environment.closed for environment in made} == {1}


def test_a_pool_of_as_many_environments_as_rows_is_enough(tmp_path):
    """One of them is looked at before training, and played in as the others are."""
    pool = iter([Words() for _ in range(4)])
    trainer = run(tmp_path, factory=lambda: next(pool), num_rollouts=2, max_failed_episodes_fraction=0)
    assert logged(trainer, "episode/failed") == [0.0, 0.0]


class Once(Words):
    turns = 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "", {}


def test_an_episode_of_one_turn_trains_as_a_completion_does_bit_for_bit(tmp_path):
    def nouns(completions, **kwargs):
        return [float(sum(map(text.split().count, NOUNS))) for text in completions]

    episodes = run(tmp_path / "episodes", factory=Once, num_rollouts=2)
    rows = run(tmp_path / "rows", factory=None, reward=nouns, num_rollouts=2)
    assert_same(trained_weights(episodes.model), trained_weights(rows.model))
    assert logged(episodes, "score/Once") == logged(episodes, "score/mean") == logged(rows, "score/mean")


TURNS_AS_ACTIONS = {"gae_unit": "turn", "ratio_unit": "turn", "truncated_completions": "bootstrap"}


@pytest.mark.parametrize(
    ("schedule", "own"),
    [
        ("sync", TURNS_AS_ACTIONS),
        ("one_step", TURNS_AS_ACTIONS),
        ("async", COMPACTED),
        pytest.param("sync", COMPACTED, marks=pytest.mark.slow),
        pytest.param("one_step", COMPACTED, marks=pytest.mark.slow),
        pytest.param("async", TURNS_AS_ACTIONS, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_stops_amid_a_rollout_resumes_to_the_same_weights(tmp_path, schedule, own):
    def make(name):
        backend = None if schedule == "sync" else CopyBackend(TrunkModel(base_model(), lora()))
        settings = {"num_rollouts": 3, "schedule": schedule, "learning_rate": 1e-3, **own}
        return words_trainer(tmp_path / name, backend=backend, **settings)

    whole, _ = support.whole_and_resumed(make, 6)  # The third step of the second rollout.
    assert max(logged(whole, "score/std")) > 0
    assert own is TURNS_AS_ACTIONS or min(logged(whole, "episode/compactions")) >= 1


def test_without_rows_an_environment_says_texts_and_a_run_resumes_or_grows_longer_to_the_same_weights(tmp_path):
    lengths = iter([3, 2, 3])

    def make(name):
        own = {"learning_rate": 1e-3, "num_rollouts": next(lengths), "lr_scheduler_type": "constant"}
        return words_trainer(tmp_path / name, dataset=None, **own)

    whole, _ = support.whole_and_resumed(make, 6)
    assert max(logged(whole, "score/std")) > 0


def test_another_environment_is_noticed_when_a_run_is_resumed(tmp_path):
    run(tmp_path, num_rollouts=2, callbacks=[StopAt(2)])
    for change, words in (({"factory": Once}, "environment.Words"), ({"max_turns": 7}, "max_turns: None -> 7")):
        with pytest.raises(ValueError, match=words):
            run(tmp_path, num_rollouts=2, resume=str(tmp_path / "checkpoint-2"), **change)


class Broken(Words):
    def reset(self, *, seed=None, options=None):
        if seed % 4 == 0:
            raise OSError("no room")
        return super().reset(seed=seed)


def test_a_failed_episode_trains_nothing_and_is_no_error_below_the_limit(tmp_path):
    settings = {"max_failed_episodes_fraction": 1.0, "max_unscored_fraction": 1.0, "rollout_batch_size": 8}
    seen = []

    def turns(environments, log_extra, **kwargs):
        seen.append(len(environments))
        log_extra("seed", [environment.seed for environment in environments])
        return [float(environment.turn) for environment in environments]

    trainer = run(tmp_path / "few", factory=Broken, reward=turns, log_completions=True, **settings)
    assert 0 < logged(trainer, "reward/unscored_fraction")[0] == 1 - seen[0] / 8 < 1
    (sample, *_) = (tmp_path / "few/completions").glob("*.jsonl")
    rows = [json.loads(line) for line in sample.read_text().splitlines()]
    # An episode that failed has no score and no entry of a column that reward functions log.
    assert [row["seed"] is None for row in rows] == [row["score"] is None for row in rows] and len(rows) == 8
    with pytest.raises(
        RuntimeError, match="max_failed_episodes_fraction 0%; the first: reset raised OSError: no room"
    ):
        run(tmp_path / "many", factory=Broken, **{**settings, "max_failed_episodes_fraction": 0.0})


class Guess:
    """An environment in TRL's manner that owns its data: `reset` says the whole prompt."""

    prompts = ("Guess the word.", "Guess the number of the day.")

    def reset(self, **row):
        Guess.made += 1
        return self.prompts[Guess.made % 2]

    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: the word
        """
        return "no"


class Asks:
    """One that only says prompts: it has no tools, so an episode is one answer."""

    prompts = Guess.prompts

    def reset(self, **row):
        return Guess.reset(self)


@pytest.mark.parametrize("factory", [Guess, Asks, {"a": Guess, "b": Asks}])
def test_an_environment_may_own_its_data(tmp_path, factory):
    def length(prompts, completions, **kwargs):
        assert {prompt[-1]["content"] for prompt in prompts} <= {*Guess.prompts}
        return [float(len(completion[-1]["content"])) for completion in completions]

    Guess.made = 0
    dataset = Dataset.from_dict({"environment": ["a", "b"] * 4}) if isinstance(factory, dict) else None
    settings = {"tokenizer": chat_tokenizer(), "trainer_class": partial(PPOTrainer, environment_factory=factory)}
    settings |= {"max_completion_length": LENGTH, "check_memory": False, "num_rollouts": 2}
    model = base_model(vocab_size=CHAT_VOCAB, max_position_embeddings=1024)
    trainer = support.trained(tmp_path, model=model, reward=length, dataset=dataset, **settings)
    assert len(logged(trainer, "score/mean")) == 2 and Guess.made == 8 and not any(logged(trainer, "episode/failed"))


NAMED = {"alone": ALONE, "ddp": Launch("ddp"), "fsdp2": Launch("fsdp2", cases=("several_turns", "compacted"))}
RUNS = Launches("two_process_episodes.py", NAMED)


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", ["several_turns", "compacted"])
def test_two_processes_train_on_episodes_of_several_turns_as_one_does(how, case):
    RUNS.require_weights_of_one(CPU, how, case)
    alone, found = (RUNS.facts(CPU, launch, case) for launch in ("alone", how))
    assert min(alone["metrics"]["episode/turns"]) > 2
    assert case == "several_turns" or min(alone["metrics"]["episode/compactions"]) > 1
    assert ("DTensor" in found["kinds"]) == (how == "fsdp2")
    for metric, values in alone["metrics"].items():
        assert found["metrics"][metric] == pytest.approx(values, rel=2e-3, abs=2e-4), metric


@pytest.mark.multi_process
@pytest.mark.slow
@pytest.mark.parametrize("name", ["some_fail", "too_many_fail"])
def test_failed_episodes_are_counted_over_all_processes(name):
    alone, *others = (RUNS.facts(CPU, *of) for of in (("alone", name), ("ddp", name, 0), ("ddp", name, 1)))
    # All episodes of one process fail, and half of all.
    assert sorted(own["failed"] for own in others) == [0, 2] and alone["failed"] == 2
    if name == "too_many_fail":
        assert all("50% of the episodes" in own["error"] and "no room" in own["error"] for own in (alone, *others))
    else:
        metrics = alone["metrics"].items()
        assert all(others[0]["metrics"][metric] == pytest.approx(x, rel=1e-4, abs=1e-6) for metric, x in metrics)


# --- conversations -------------------------------------------------------------------------------------------------


class Caller(CannedBackend):
    """Calls the tool in every other row, and then answers."""

    def generate(self, prompt_ids, params, keys):
        tokenizer = chat_tokenizer()
        call = [tool_call("add", a=2, b=3), "no idea"]
        texts = ["It is 5." if len(key) > 3 else call[key[2] % 2] for key in keys]
        self.completions = [tokenizer(f"{text}<|im_end|>")["input_ids"] for text in texts]
        return super().generate(prompt_ids, params, keys)


def test_a_chat_model_trains_on_episodes_and_a_reward_model_reads_them_with_the_tools_that_the_prompt_shows(tmp_path):
    tokenizer, seen, read = chat_tokenizer(), [], []

    def answers(prompts, completions, **kwargs):
        seen.extend(completions)
        return [float("5" in messages[-1]["content"]) for messages in completions]

    def model(prompts, completions, **columns):
        variables = variables_of(columns, len(prompts))
        rows, _ = encode_rows(tokenizer, prompts, completions, None, True, "rm", None, variables)
        shown = tokenizer.apply_chat_template(prompts, tools=columns["tools"][0], add_generation_prompt=True)
        read.extend(zip(rows, shown["input_ids"], strict=True))
        return [0.0] * len(rows)

    questions = [[{"role": "user", "content": f"What is {i}+3?"}] for i in range(8)]
    base = base_model(vocab_size=CHAT_VOCAB, eos_token_id=END, bos_token_id=None, max_position_embeddings=1200)
    given = {"dataset": Dataset.from_dict({"prompt": questions}), "trainer_class": partial(PPOTrainer, tools=[add])}
    given |= {"tokenizer": chat_tokenizer(), "rollout_backend": Caller(), "max_completion_length": 300}
    settings = {"max_tool_calling_iterations": 1, "check_memory": False}
    trainer = support.trained(tmp_path, model=base, reward=[answers, model], **given, **settings)
    assert trainer.args.max_turns == 2
    called = [messages for messages in seen if len(messages) > 1]
    assert len(called) == 2 and [m["role"] for m in called[0]] == ["assistant", "tool", "assistant"]
    assert called[0][1] == {"role": "tool", "name": "add", "content": "5"}
    assert logged(trainer, "score/mean") == [0.5] and logged(trainer, "policy/ratio_max") == [1.0]
    assert len(read) == 4 and all("add" in tokenizer.decode(prompt) for _, prompt in read)
    assert all(row[: len(prompt)] == prompt for row, prompt in read)


def test_a_reward_function_may_leave_out_the_tools():
    def zeros(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, x):
        return [0.0] * len(prompts)

    rewards = RewardSet(zeros)
    rewards.check_columns(["x", "tools"])
    assert rewards.score(["a"], ["b"], [[1]], {"x": [1], "tools": [[{}]]}).total.tolist() == [0.0]


# --- bad input -----------------------------------------------------------------------------------------------------


class Together(CannedBackend):
    """Samples rows of several processes at once, as a pipeline does."""

    is_collective = True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factory": None, "max_turns": 3}, "max_turns is 3, and there are neither tools nor an environment"),
        ({"backend": Together()}, "not supported with rollout_backend 'pipelined'"),
        ({"factory": None, "max_turn_length": 3}, "max_turn_length is 3, and there are neither tools"),
        ({**COMPACTED, "max_context_length": 12}, "a context may need 16 tokens: the longest prompt"),
        ({"compact": len}, "compact is given and max_context_length is not"),
        ({**COMPACTED, "compact": "last_two"}, "compact is 'last_two'; give a function"),
        ({"dataset": None, "factory": {"a": Words}}, "needs train_dataset: rows with a column 'prompt' and 'environ"),
        ({"dataset": None, "factory": None}, "needs train_dataset: rows with a column 'prompt'$"),
        ({"dataset": None, "num_train_epochs": 1}, "but not their number; set num_rollouts"),
        ({"factory": {"x": Words}}, "no column 'environment'"),
        ({"factory": object}, "makes a object, which has no reset"),
        ({"factory": None}, "no reward function was given"),
    ],
)
def test_settings_that_cannot_work_are_rejected_before_anything_is_sampled(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        words_trainer(tmp_path, **settings)
