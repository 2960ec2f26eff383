"""Episodes: exact ids, limits, failures, tools and environments, by backends whose turns are known in advance."""

import asyncio
import math
import random
import signal
import threading
import time
from functools import partial

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from onetrunk.rollouts.base import SamplingParams
from onetrunk.rollouts.episodes import tool_calls
from onetrunk.rollouts.episodes.environments import EpisodeLimits, Episodes
from onetrunk.rollouts.episodes.rows import EpisodeCounts, in_thread, play_in_waves, play_row_by_row
from onetrunk.rollouts.episodes.tool_calls import argument_fault, schema_of
from onetrunk.rollouts.local import LocalBackend
from onetrunk.types import Rollout
from tests.chat import END, add, chat_tokenizer, tool_call
from tests.tiny import tiny_model, tiny_tokenizer

DRIVERS = (play_in_waves, play_row_by_row)
WORDS = tiny_tokenizer()
CHAT = [{"role": "user", "content": "2+3?"}]


class Scripted:
    """Samples the turns of a script: {row: [ids of turn 0, ids of turn 1, ...]}; remembers what it was asked."""

    def __init__(self, *rows):
        self.rows, self.asked, self.lock = rows, [], threading.Lock()

    def __call__(self, prompt_ids, params, keys):
        most = params.max_completion_length
        with self.lock:
            self.asked += [(list(ids), most, key) for ids, key in zip(prompt_ids, keys, strict=True)]
        turns = [self.rows[key[2] % len(self.rows)][key[3] if len(key) > 3 else 0][:most] for key in keys]
        stopped = [ids[-1] in params.stop_token_ids for ids in turns]
        logprobs = [torch.full((len(ids),), -1.0) for ids in turns]
        return Rollout(prompt_ids, turns, logprobs, stopped, policy_version=7)


class Counting:
    """A Gymnasium environment: answers 'the dog', gives the number of the turn, ends after `turns` turns."""

    turns = 2

    def reset(self, *, seed=None, options=None):
        self.options, self.seed, self.actions = options, seed, []
        return options.get("hint", ""), {}

    def step(self, action):
        self.actions.append(action)
        return "the dog", len(self.actions), len(self.actions) == self.turns, False, {}


def words(text):
    return WORDS(text)["input_ids"]


def episodes_of(factory=None, tools=None, tokenizer=WORDS, **limits):
    return Episodes(tools, factory, tokenizer, EpisodeLimits(**limits))


def play(
    episodes,
    script,
    prompts=("a cat",),
    driver=play_in_waves,
    length=20,
    columns=None,
    turn=None,
    context=None,
    **options,
):
    """Play one row per prompt; return the rollout."""
    params = SamplingParams(length, 1.0, (END,), max_turn_length=turn, max_context_length=context)
    rows = []
    for i, prompt in enumerate(prompts):
        row = {name: column[i] for name, column in (columns or {}).items()}
        chat = not isinstance(prompt, str)
        schemas = list(episodes.kind_of(row).schemas.values())
        ids = episodes.turns.prompt_ids(prompt, schemas) if chat else words(prompt)
        rows.append(episodes.row(prompt, ids, row, (3, 0, i)))
    return episodes.play(rows, params, partial(driver, script, **options))


def counts_of(rollout):
    return sum((episode.counts for episode in rollout.episodes), EpisodeCounts())


# --- ids, masks and limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_episode_is_the_exact_ids_of_turns_and_observations(driver):
    unknown = WORDS.convert_tokens_to_ids("<unk>")  # A token that its text does not give back.
    first, second, dog = [*words("runs"), unknown, END], [*words("sleeps"), END], words("the dog")
    assert words(WORDS.decode(first, skip_special_tokens=True)) == words("runs")
    script = Scripted([first, second])
    rollout = play(episodes_of(Counting), script, ["a cat"], driver)
    assert rollout.prompt_ids == [words("a cat")]
    assert rollout.completion_ids == [first + dog + second]
    assert rollout.turn_ids == [[0] * 3 + [-1] * 2 + [1] * 2]
    assert rollout.sampler_logprobs[0].tolist() == [-1.0] * 3 + [0.0] * 2 + [-1.0] * 2
    assert (rollout.stopped, rollout.turn_rewards, rollout.policy_version) == ([True], [[1.0, 2.0]], 7)
    assert script.asked == [(words("a cat"), 20, (3, 0, 0)), (words("a cat") + first + dog, 15, (3, 0, 0, 1))]
    assert rollout.episodes[0].environment.actions == ["runs", "sleeps"]
    counts = counts_of(rollout)
    assert (counts.episodes, counts.turns, counts.tool_calls, counts.observation_tokens) == (1, 2, 2, 2)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("length", "limits", "turns", "stopped", "at_limit"),
    [
        (20, {"max_turns": 1}, [0] * 3, False, 1),
        (2, {"max_turns": 1}, [0] * 2, False, 0),  # The length cuts the last turn: this is not the limit of turns.
        (5, {}, [0] * 3, False, 0),  # No room for the observation and one more token.
        (6, {}, [0] * 3 + [-1] * 2 + [1], True, 0),  # The environment ends with this turn, whose end is missing.
    ],
)
def test_the_limits_of_turns_and_tokens_end_an_episode(driver, length, limits, turns, stopped, at_limit):
    script = Scripted([[*words("runs fast"), END], [*words("sleeps sees"), END]])
    rollout = play(episodes_of(Counting, **limits), script, driver=driver, length=length)
    assert (rollout.turn_ids, rollout.stopped) == ([turns], [stopped])
    assert len(rollout.turn_rewards[0]) == max(turns) + 1
    assert counts_of(rollout).turns_at_limit == at_limit


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_turn_that_is_too_long_is_cut_and_the_environment_reads_what_is_there(driver):
    first, second, dog = [*words("runs fast sleeps"), END], [*words("sees"), END], words("the dog")
    rollout = play(episodes_of(Counting), Scripted([first, second]), driver=driver, turn=2)
    assert rollout.completion_ids == [first[:2] + dog + second] and rollout.stopped == [True]
    assert rollout.episodes[0].environment.actions == ["runs fast", "sees"]
    assert (counts_of(rollout).turns, counts_of(rollout).turns_cut) == (2, 1)


class Ending(Counting):
    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, *self.options["ends"], info


def test_an_episode_that_its_environment_truncates_is_cut_off_and_one_that_terminates_is_not():
    # A row that does neither plays until max_turns.
    ends = [(True, False), (False, True), (True, True), (False, False)]
    script = Scripted([[*words("runs"), END]] * 2)
    rollout = play(episodes_of(Ending, max_turns=2), script, ["a"] * 4, columns={"ends": ends})
    assert rollout.stopped == [True, False, True, False]
    assert rollout.turn_rewards == [[1.0], [1.0], [1.0], [1.0, 2.0]]
    # Neither does it matter whether the length cut its last turn off.
    long = Scripted([[*words("runs fast sleeps"), END]] * 2)
    assert play(episodes_of(Ending), long, ["a"] * 4, columns={"ends": ends}, length=2).stopped == rollout.stopped


def test_what_reset_says_belongs_to_the_prompt_and_each_row_has_its_own_environment_and_seed():
    script = Scripted([[END], [END]])
    rollout = play(episodes_of(Counting), script, ["a cat", "a"], columns={"hint": ["red", ""]})
    assert rollout.prompt_ids == [words("a cat red"), words("a")]
    first, second = (episode.environment for episode in rollout.episodes)
    assert first is not second and first.seed != second.seed
    assert first.options == {"prompt": "a cat", "hint": "red"} and rollout.episodes[0].prompt == "a catred"


class Slow(Counting):
    """As Counting, after a random pause."""

    pause_s = 0.1

    def step(self, action):
        time.sleep(random.random() * self.pause_s)
        text, *rest = super().step(action)
        return f"{text} {len(action.split())}", *rest


@pytest.mark.parametrize("driver", DRIVERS)
def test_neither_the_order_of_answers_nor_their_slowness_changes_an_episode(driver):
    model, lock = tiny_model("llama", num_hidden_layers=1), threading.Lock()

    def sample(*args):
        with lock:
            return LocalBackend(model).generate(*args)

    class Quick(Slow):
        pause_s = 0.0

    prompts = [" ".join(["cat"] * (1 + i % 3)) for i in range(8)]
    expected = play(episodes_of(Quick), sample, prompts, play_in_waves, 16)
    rollout = play(episodes_of(Slow), sample, prompts, driver, 16)
    assert rollout.completion_ids == expected.completion_ids
    assert (rollout.turn_ids, rollout.turn_rewards) == (expected.turn_ids, expected.turn_rewards)
    assert max(map(max, rollout.turn_ids)) == 1


@pytest.mark.parametrize("driver", DRIVERS)
def test_progress_is_rows_that_are_over_of_all_rows(driver):
    told, first = [], [*words("runs"), END]
    script = Scripted([first, first], [first, [END]], [[END], [END]])
    rollout = play(episodes_of(Slow), script, ["a"] * 6, driver, progress=lambda *numbers: told.append(numbers))
    assert told == sorted(told) and {total for _, total, _ in told} == {6}
    assert told[-1] == (6, 6, sum(map(len, rollout.completion_ids)))


def test_a_slow_tool_delays_no_other_row():
    class Late(Counting):
        def step(self, action):
            time.sleep(0.8 if action == "eats" else 0.0)
            return super().step(action)

    times = {}

    class Timed(Scripted):
        def __call__(self, prompt_ids, params, keys):
            times.update(dict.fromkeys(keys, time.monotonic()))
            return super().__call__(prompt_ids, params, keys)

    script = Timed([[*words("eats"), END], [END]], [[*words("runs"), END], [END]])
    rollout = play(episodes_of(Late), script, ["a", "a"])
    assert times[3, 0, 0, 1] - times[3, 0, 1, 1] > 0.4
    assert 0.5 < counts_of(rollout).waited_seconds < 1.5 and counts_of(rollout).tool_seconds > 0.7


# --- conversations and tools ---------------------------------------------------------------------------------------


async def later(text: str) -> str:
    """Say a text after a while.

    Args:
        text: what to say
    """
    await asyncio.sleep(0.01)
    return text


class Unprintable:
    def __str__(self):
        raise ValueError("no text")


def broken(kind: str) -> str:
    """Fail.

    Args:
        kind: how
    """
    if kind == "hang":
        time.sleep(3.0)
    if kind == "raise":
        raise KeyError("gone")
    return Unprintable() if kind == "unprintable" else "x" * 10_000_000


def turns_of(tokenizer, *texts):
    return [tokenizer(text)["input_ids"] for text in texts]


def converse(*texts, tokenizer=None, factory=None, tools=None, **limits):
    """Play a conversation in which the policy says these texts; return the rollout."""
    tokenizer = tokenizer or chat_tokenizer()
    episodes = episodes_of(factory, tools, tokenizer, **limits)
    script = Scripted(turns_of(tokenizer, *(f"{text}<|im_end|>" for text in texts)))
    return play(episodes, script, [CHAT], length=9000)


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "qwen3_5_think"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_chat_model_calls_tools_and_reads_their_results(driver, template):
    tokenizer = chat_tokenizer(template)
    episodes = episodes_of(tools=[add, later], tokenizer=tokenizer)
    if template == "qwen3_5_think":
        numbers = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("a", 2), ("b", 3)))
        opening = "so\n</think>\n\n"
        call = f"{opening}<tool_call>\n<function=add>\n{numbers}</function>\n</tool_call>"
    else:
        opening = ""
        call = tool_call("add", a=2, b=3) + "\n" + tool_call("later", text="so")
    script = Scripted(turns_of(tokenizer, f"{call}<|im_end|>", f"{opening}It is 5.<|im_end|>"))
    rollout = play(episodes, script, [CHAT], driver, 4000)
    assert '"name": "add"' in tokenizer.decode(rollout.prompt_ids[0])
    given = [t for t, turn in zip(rollout.completion_ids[0], rollout.turn_ids[0], strict=True) if turn == -1]
    results = ["5"] if template == "qwen3_5_think" else ["5", "so"]
    text = tokenizer.decode(given)
    assert text.startswith("\n<|im_start|>user\n<tool_response>\n5\n</tool_response>")
    assert all(f"<tool_response>\n{result}\n</tool_response>" in text for result in results)
    assert "<|im_end|>\n<|im_start|>assistant\n" in text
    messages = rollout.episodes[0].messages
    assert [m["role"] for m in messages] == ["assistant", *["tool"] * len(results), "assistant"]
    assert messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert messages[-1]["content"] == "It is 5."
    # The same ids as the template gives the whole conversation, where it renders earlier turns as they were.
    if template == "qwen2_5":
        whole = tokenizer.apply_chat_template(
            [*CHAT, *messages], tools=[schema_of(tool) for tool in (add, later)], return_dict=True
        )["input_ids"]
        assert whole[:-1] == rollout.prompt_ids[0] + rollout.completion_ids[0]
    assert rollout.turn_rewards == [None] and counts_of(rollout).tool_errors == 0


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (tool_call("nothing"), "there is no tool 'nothing'; tools: add, broken"),
        (tool_call("add", a=2), "the argument 'b' is missing"),
        (tool_call("add", a=2, b="x"), "the argument 'b' must be integer, not string"),
        (tool_call("add", a=2, b=3, c=4), "unknown argument 'c'; known: a, b"),
        (tool_call("broken", kind="raise"), "KeyError: 'gone'"),
        (tool_call("broken", kind="unprintable"), "ValueError: no text"),
        (tool_call("broken", kind="hang"), "TimedOut: no answer within 0.2 seconds"),
    ],
)
def test_what_goes_wrong_in_a_call_is_an_observation_and_the_episode_goes_on(call, expected):
    rollout = converse(call, "ok", tools=[add, broken], tool_timeout=0.2)
    _, answer, last = rollout.episodes[0].messages
    assert answer["content"] == f'{{"error": "{expected}"}}' and last["content"] == "ok"
    assert (counts_of(rollout).tool_calls, counts_of(rollout).tool_errors) == (1, 1)


def test_the_tools_of_a_turn_run_at_the_same_time_and_answer_in_its_order():
    meeting, done = threading.Barrier(2), threading.Event()

    def tool(name, then):
        def meet(a: int) -> str:
            """Wait for the other one.

            Args:
                a: anything
            """
            meeting.wait()
            then()
            return f"{name} {a}"

        meet.__name__ = name
        return meet

    calls = "".join(tool_call(name, a=i) for i, name in enumerate(("first", "second", "third")))
    rollout = converse(calls, "ok", tools=[tool("first", done.wait), tool("second", done.set)])
    results = [message["content"] for message in rollout.episodes[0].messages[1:-1]]
    assert results[:2] == ["first 0", "second 1"] and "there is no tool 'third'" in results[2]
    assert (counts_of(rollout).tool_calls, counts_of(rollout).tool_errors) == (3, 1)


def rings() -> str:
    """Bound itself, as TRL's example tool does."""
    signal.signal(signal.SIGALRM, print)
    signal.alarm(1)
    return "never said"


def test_a_tool_that_sets_an_alarm_fails_and_one_warning_says_what_to_change(caplog):
    call = tool_call("rings")
    rollout = converse(call, call, "ok", tools=[rings])
    assert "main thread" in rollout.episodes[0].messages[1]["content"] and counts_of(rollout).tool_errors == 2
    assert [r.message for r in caplog.records if "take them out, because tool_timeout bounds each call" in r.message]
    assert len(caplog.records) == 1


def test_a_long_result_is_cut_and_max_turns_calls_no_tool_in_the_last_turn():
    call = tool_call("broken", kind="long")
    rollout = converse(call, call, tools=[broken], observation_characters=10, max_turns=2)
    _, answer, last = rollout.episodes[0].messages
    assert answer["content"] == "xxxxxxxxxx ... (9999990 more characters)" and last["tool_calls"]
    assert (counts_of(rollout).tool_calls, counts_of(rollout).turns_at_limit, rollout.stopped) == (1, 1, [False])


def test_arguments_are_compared_with_the_schema():
    def tool(a: float, b: list[str], c: str | None = None, d: dict[str, int] | None = None) -> str:
        """Take values.

        Args:
            a: a number
            b: texts
            c: a text (choices: ["x", "y"])
            d: numbers
        """

    schema = schema_of(tool)
    fine = [{"a": 1, "b": []}, {"a": 0.5, "b": ["x"], "c": None}, {"a": 1, "b": [], "c": "y", "d": {"k": 1}}]
    assert [argument_fault(arguments, schema) for arguments in fine] == [None] * 3
    wrong = [{"a": True, "b": []}, {"a": 1, "b": [1]}, {"a": 1, "b": "x"}, {"a": 1, "b": [], "c": "z"}]
    wrong += [{"a": 1, "b": [], "d": {"k": "1"}}, {"a": None, "b": []}, {"b": []}, ["a"], None]
    assert all(argument_fault(arguments, schema) for arguments in wrong)


class Calculator:
    """As TRL has environments: its methods are tools."""

    def reset(self, **row):
        self.row, self.total = row, 0
        return row.get("hint")

    def plus(self, number: int) -> str:
        """Add a number to the total.

        Args:
            number: what to add
        """
        self.total += number
        return str(self.total)

    def get_reward(self):
        return float(self.total)


class AsyncCalculator(Calculator):
    async def get_reward(self):
        return float(self.total) + 0.5

    async def minus(self, number: int) -> str:
        """Subtract a number from the total.

        Args:
            number: what to subtract
        """
        self.total -= number
        return str(self.total)


class Alone(Calculator):
    """Counts how many threads are inside of it; its async tools may meet."""

    inside = 0

    def plus(self, number: int) -> str:
        self.inside += 1
        time.sleep(0.02)
        assert self.inside == 1
        self.inside -= 1
        return super().plus(number)

    plus.__doc__ = Calculator.plus.__doc__

    async def meet(self) -> str:
        """Meet the others."""
        self.there = getattr(self, "there", 0) + 1
        while self.there < 2:
            await asyncio.sleep(0.001)
        return f"met after {self.total}"


def test_the_methods_of_an_environment_run_one_after_another_unless_they_are_async():
    calls = [tool_call("plus", number=i) for i in (1, 2, 3)] + [tool_call("meet")] * 2
    rollout = converse("".join(calls), "ok", factory=Alone)
    results = [message["content"] for message in rollout.episodes[0].messages[1:-1]]
    assert results[:3] == ["1", "3", "6"] and all(result.startswith("met after") for result in results[3:])
    assert counts_of(rollout).tool_errors == 0


def test_environments_of_trl_are_chosen_by_a_column_and_score_the_episode():
    tokenizer = chat_tokenizer()
    episodes = episodes_of({"sync": Calculator, "async": AsyncCalculator}, tokenizer=tokenizer)
    texts = [f"{tool_call(name, number=4)}<|im_end|>" for name in ("plus", "minus")]
    script = Scripted(*(turns_of(tokenizer, text, "ok<|im_end|>") for text in texts))
    columns = {"environment": ["sync", "async"], "hint": [" Please.", None]}
    rollout = play(episodes, script, [CHAT, CHAT], columns=columns, length=4000)
    assert rollout.turn_rewards == [[0.0, 4.0], [0.0, -3.5]]
    first, second = rollout.episodes
    assert first.prompt == [{"role": "user", "content": "2+3? Please."}] and second.prompt == CHAT
    assert CHAT == [{"role": "user", "content": "2+3?"}]
    assert first.environment.row == {"prompt": CHAT, "hint": " Please."}
    assert ['"minus"' in text for text in tokenizer.batch_decode(rollout.prompt_ids)] == [False, True]
    episodes.release(rollout)
    again = play(episodes, script, [CHAT, CHAT], columns=columns, length=4000)
    assert again.episodes[0].environment is first.environment and again.turn_rewards == rollout.turn_rewards


@pytest.mark.parametrize("turn", [None, 3])
def test_a_gymnasium_environment_answers_a_conversation_as_the_user(turn):
    # A turn that is cut off has the template's form too: what ends it is given, not sampled.
    tokenizer = chat_tokenizer("qwen2_5")
    episodes = episodes_of(Counting, tokenizer=tokenizer)
    episodes.check_prompts(["prompt"], conversational=True)
    script = Scripted(turns_of(tokenizer, "one<|im_end|>" if turn is None else "one more", "2<|im_end|>"))
    rollout = play(episodes, script, [CHAT], length=400, columns={"hint": [" Go."]}, turn=turn)
    messages = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "the dog"}]
    messages.append({"role": "assistant", "content": "2"})
    assert rollout.episodes[0].messages == messages
    prompt = [{"role": "user", "content": "2+3? Go."}]
    whole = tokenizer.apply_chat_template([*prompt, *messages], return_dict=True)["input_ids"]
    assert whole[:-1] == rollout.prompt_ids[0] + rollout.completion_ids[0]


# --- failures ------------------------------------------------------------------------------------------------------


class Fragile(Counting):
    """Fails in every way, by what the row says."""

    turns = 3

    def reset(self, *, seed=None, options=None):
        self.fault = options["fault"]
        if self.fault == "reset":
            raise OSError("no room")
        if self.fault == "pair":
            return ""
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.fault == "raise":
            raise ValueError(action)
        if self.fault == "hang":
            time.sleep(2.0)
        result = super().step(action)
        return {
            "long": ("dog " * 2_500_000, *result[1:]),
            "form": result[:4],
            "nan": (result[0], math.nan, *result[2:]),
            "reward": (result[0], "lots", *result[2:]),
        }.get(self.fault, result)


FAULTS = ("", "reset", "pair", "raise", "hang", "long", "form", "nan", "reward")
FAILS = ("reset", "pair", "hang", "form", "nan", "reward")


def fragile_rollouts(number, driver=play_in_waves, rows=50):
    episodes = episodes_of(Fragile, tool_timeout=0.5, observation_characters=20, failed_fraction=1.0, max_turns=3)
    script, chosen = Scripted([[*words("runs"), END]] * 3), random.Random(0)
    for _ in range(number // rows):
        faults = [chosen.choice(FAULTS) for _ in range(rows)]
        rollout = play(episodes, script, ["a"] * rows, driver, 40, {"fault": faults})
        yield faults, rollout
        episodes.release(rollout)


class Closing(Fragile):
    """Knows how often it was closed; the second one cannot be."""

    def __init__(self, made):
        made.append(self)
        self.closed, self.is_closed, self.fails = 0, threading.Event(), len(made) == 2

    def close(self):
        self.closed += 1
        self.is_closed.set()
        if self.fails:
            raise OSError("still in use")


def test_every_environment_is_closed_once_and_one_that_broke_when_its_rollout_is_scored(caplog):
    made = []
    episodes = episodes_of(partial(Closing, made), tool_timeout=0.5, failed_fraction=1.0)
    script = Scripted([[*words("runs"), END]] * 3)
    rollout = play(episodes, script, ["a"] * 3, columns={"fault": ["", "", "hang"]})
    [broken] = [episode.environment for episode in rollout.episodes if episode.failure is not None]
    assert len(made) == 3 and not broken.closed
    episodes.release(rollout)
    broken.is_closed.wait()
    assert [environment.closed for environment in made if environment is not broken] == [0, 0]
    episodes.close()
    episodes.close()
    assert [environment.closed for environment in made] == [1, 1, 1]
    message = "close of Closing failed: OSError: still in use"
    # The thread that closed it warns a little later.
    assert any(message in caplog.text or time.sleep(0.01) for _ in range(6000))
    # Those that were closed are not played in again.
    play(episodes, script, ["a"], columns={"fault": [""]})
    assert len(made) == 4


@pytest.mark.parametrize("driver", DRIVERS)
def test_failures_end_no_run_and_each_is_counted(driver):
    for faults, rollout in fragile_rollouts(200, driver):
        counts = counts_of(rollout)
        assert counts.failed_episodes == sum(fault in FAILS for fault in faults)
        errors = {"raise": 3, "reset": 0, "pair": 0, "": 0, "long": 0}
        assert counts.tool_errors == sum(errors.get(fault, 1) for fault in faults)
        columns = rollout.completion_ids, rollout.turn_ids, rollout.turn_rewards, rollout.episodes
        for fault, ids, turns, rewards, episode in zip(faults, *columns, strict=True):
            failed = fault in FAILS
            assert (episode.failure is not None) == failed and (len(ids) == 1) == failed, fault
            if failed:
                assert turns == [0] and math.isnan(rewards[0])
            else:
                assert rewards == ([0.0] * 3 if fault == "raise" else [1.0, 2.0, 3.0]) and max(turns) == 2


@pytest.mark.slow
def test_a_thousand_episodes_with_failures_leave_no_memory_behind():
    import psutil

    process, sizes = psutil.Process(), []
    for _ in fragile_rollouts(1000):
        sizes.append(process.memory_info().rss / 2**20)
    assert sizes[-1] - sizes[len(sizes) // 4] < 60
    time.sleep(2.5)
    assert threading.active_count() < 50


def test_too_many_failed_episodes_end_the_run_with_the_first_reason():
    episodes = episodes_of(Fragile, failed_fraction=0.25)
    script = Scripted([[END]] * 3)
    rollout = play(episodes, script, ["a"] * 4, columns={"fault": ["", "reset", "", ""]})
    episodes.require_played(rollout, 0.25)
    rollout = play(episodes, script, ["a"] * 4, columns={"fault": ["reset", "reset", "", ""]})
    with pytest.raises(RuntimeError, match="50% of the episodes.*max_failed_episodes_fraction 25%.*OSError: no room"):
        episodes.require_played(rollout, 0.5)


def test_an_environment_goes_back_to_those_of_its_factory_also_if_another_makes_the_same_class():
    class Sized(Counting):
        def __init__(self, turns):
            self.turns = turns

    episodes = episodes_of({"one": partial(Sized, 1), "two": partial(Sized, 2)})
    for _ in range(2):
        columns = {"environment": ["one", "one", "two", "one"]}
        rollout = play(episodes, Scripted([[END]] * 2), ["a"] * 4, columns=columns)
        assert [episode.environment.turns for episode in rollout.episodes] == [1, 1, 2, 1]
        episodes.release(rollout)
    assert [len(kind.free) for kind in episodes.kinds.values()] == [3, 1]


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_episode_whose_reset_says_too_much_fails_with_its_prompt_as_it_was(driver):
    script = Scripted([[END]] * 2)
    rollout = play(episodes_of(Counting, longest_prompt=4), script, driver=driver, columns={"hint": [" the dog" * 5]})
    assert "has 12 tokens, more than 4" in rollout.episodes[0].failure and rollout.episodes[0].prompt == "a cat"
    assert rollout.prompt_ids == [words("a cat")]


@pytest.mark.parametrize("slow", ["reset", "get_reward"])
def test_a_run_may_stop_while_an_environment_does_not_answer(slow):
    class Slow(Calculator):
        def reset(self, **row):
            time.sleep(2.0 * (slow == "reset"))

        def get_reward(self):
            time.sleep(2.0 * (slow == "get_reward"))

    def poll():
        if time.monotonic() > start + 0.5:
            raise InterruptedError

    tokenizer = chat_tokenizer()
    episodes = episodes_of(Slow, tokenizer=tokenizer)
    episodes.poll, start = poll, time.monotonic()
    with pytest.raises(InterruptedError):
        play(episodes, Scripted(turns_of(tokenizer, "ok<|im_end|>")), [CHAT], length=4000)
    assert time.monotonic() < start + 1.5


def test_more_hanging_calls_than_the_process_can_leave_behind_end_the_run(monkeypatch):
    monkeypatch.setattr(tool_calls, "MOST_ABANDONED", 2)
    episodes = episodes_of(Fragile, tool_timeout=0.02, failed_fraction=1.0)
    with pytest.raises(RuntimeError, match="3 calls.* hang, each longer than tool_timeout 0.02 s"):
        play(episodes, Scripted([[END]] * 3), ["a"] * 3, columns={"fault": ["hang"] * 3})


def test_a_loop_that_a_tool_blocks_is_left_once_and_not_counted_when_it_answers_again(monkeypatch):
    async def blocking():
        time.sleep(1.0)

    monkeypatch.setattr(tool_calls, "LOOP_S", 0.2)
    monkeypatch.setattr(tool_calls, "MOST_ABANDONED", 2)
    calls = tool_calls.TimedCalls(0.1)
    # The second is still waiting in the loop when the first leaves it.
    first = in_thread(calls.call, blocking)
    time.sleep(0.25)
    second = in_thread(calls.call, later, text="here")
    assert isinstance(first.exception(), tool_calls.TimedOut) and isinstance(second.exception(), tool_calls.TimedOut)
    assert calls.call(later, text="here") == "here"
    time.sleep(1.0)
    # Counted with those, a call that hangs would be one too many.
    with pytest.raises(tool_calls.TimedOut):
        calls.call(time.sleep, 0.3)


def test_an_error_of_the_sampler_is_raised():
    def fails(*args):
        raise RuntimeError("the server is gone")

    for driver in DRIVERS:
        with pytest.raises(RuntimeError, match="the server is gone"):
            play(episodes_of(Counting), fails, driver=driver)


# --- bad input -----------------------------------------------------------------------------------------------------


class NoReset:
    def step(self, action): ...


class Undocumented:
    def reset(self, **row): ...

    def guess(self, word: str): ...


class OldReset(Counting):
    def reset(self): ...


class TwoActions(Counting):
    def step(self, action, other): ...


class NeedsLevel(Counting):
    def __init__(self, level): ...


class Fixed(Calculator):
    def reset(self, hint): ...


def undocumented(a: int):
    return a


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"factory": NoReset}, "makes a NoReset, which has no reset"),
        ({"factory": Undocumented}, "the tool 'guess' cannot be described.*no docstring"),
        ({"factory": OldReset}, r"OldReset.reset\(\) cannot be.*'seed'; write it as reset\(self, \*, seed=None"),
        ({"factory": TwoActions}, r"TwoActions.step\(action, other\) cannot be.*'other'; write it as step\(self"),
        ({"factory": {"x": 3}}, "environment 'x' is a int"),
        ({"factory": {}}, "empty mapping"),
        ({"factory": Counting, "tools": [add]}, "answers by step and cannot have tools"),
        ({"tools": [undocumented]}, "the tool 'undocumented' cannot be described.*no docstring"),
        ({"tools": [add, add]}, "two tools have the same name"),
        ({"tools": undocumented}, "the tool 'undocumented' cannot be described"),
        ({"tools": [3]}, "tools holds 3; a tool is a function"),
        ({"tools": [Counting]}, "Counting.*a tool is a function"),
        ({"tools": [add]}, "has no chat template"),
        ({"tools": [add], "tokenizer": "simple"}, "does not show tool calls"),
        ({"tools": [add], "tokenizer": "unknown"}, "TRL does not know how to train tool calls"),
    ],
)
def test_tools_and_environments_that_cannot_work_are_rejected(arguments, message):
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    kind = arguments.get("tokenizer")
    if kind == "simple":
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    elif kind == "unknown":
        tokenizer = chat_tokenizer()
        tokenizer.chat_template += " "
    with pytest.raises(ValueError, match=message):
        episodes_of(**{**arguments, "tokenizer": tokenizer})


def test_prompts_that_do_not_serve_are_rejected():
    with pytest.raises(ValueError, match="no column 'environment'"):
        episodes_of({"x": Counting}).check_prompts(["prompt"], conversational=False)
    with pytest.raises(ValueError, match="'y'.*has x"):
        episodes_of({"x": Counting}).kind_of({"environment": "y"})
    with pytest.raises(RuntimeError, match="could not make an environment: TypeError.*'level'; it is called without"):
        episodes_of(NeedsLevel)
    calculators = episodes_of({"x": Calculator, "y": Fixed}, tokenizer=chat_tokenizer())
    with pytest.raises(ValueError, match=r"Fixed.reset\(hint\) cannot be.*'prompt'; .* the row has prompt, hint$"):
        calculators.check_prompts(["prompt", "hint", "environment"], conversational=True)
    assert str(calculators).startswith("Calculator (")
    with pytest.raises(ValueError, match="tools are called in conversations"):
        episodes_of(tools=[add], tokenizer=chat_tokenizer()).check_prompts(["prompt"], conversational=False)
