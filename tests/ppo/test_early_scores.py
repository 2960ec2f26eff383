"""Scoring while others decode: the same scores, metrics and weights as whole rollouts, nothing paid twice.

The sampler has a copy of the trunk, as a server would. SLOTS optimizer steps belong to a rollout, which is sampled row
by row with `async`.
"""

import json
import logging
import os
import signal
import threading
import time

import pytest
from transformers import TrainerCallback

from onetrunk.checkpoints.stopping import Stopped
from onetrunk.judges.base import Judge, Rating
from onetrunk.judges.constitution import Constitution, Principle
from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.ahead import SCORES_FILE
from onetrunk.rewards import JudgeReward, RemoteReward, row_wise
from onetrunk.types import Rollout
from tests.fakes import CopyBackend
from tests.ppo.support import (
    StopAt,
    assert_same,
    base_model,
    even_share,
    logged,
    lora,
    make_config,
    make_trainer,
    prompts,
    row_share,
    trained_weights,
    without_wall_clock,
)

SLOTS, ROWS, ROLLOUTS = 2, 8, 4
SHAPE = {"num_rollouts": ROLLOUTS, "num_ppo_epochs": 1, "num_minibatches": 2, "rollout_batch_size": ROWS}
LONG_S = 120


class Slow(CopyBackend):
    """Rows arrive one after the other."""

    def generate_as(self, *args):
        time.sleep(0.01)
        return super().generate_as(*args)


def run(folder, rewards, schedule="async", backend=None, **settings):
    """Return a trainer that samples ahead; `settings` as for make_trainer."""
    settings = {**SHAPE, "schedule": schedule, "dataset": prompts(16, bonus=[i % 3 for i in range(16)]), **settings}
    backend = backend or Slow(TrunkModel(base_model(), lora()))
    return make_trainer(folder, reward=rewards, rollout_backend=backend, check_memory=False, **settings)


def trained(*args, **kwargs):
    trainer = run(*args, **kwargs)
    trainer.train()
    return trainer


class Calls:
    """Counts the rows and the threads of the calls of a reward function."""

    def __init__(self):
        self.rows, self.threads, self.texts = [], set(), []

    def note(self, prompts, completion_ids):
        self.rows.append(len(prompts))
        self.threads.add(threading.current_thread() is threading.main_thread())
        self.texts += [(prompt, tuple(ids)) for prompt, ids in zip(prompts, completion_ids, strict=True)]


def reward_functions():
    """Return a row-wise function, an async one, and one that compares the rows of a rollout, with their calls."""
    calls = [Calls(), Calls(), Calls()]

    @row_wise
    def with_bonus(prompts, completions, completion_ids, completion_stopped, bonus, log_metric, log_extra, **kwargs):
        calls[0].note(prompts, completion_ids)
        assert len(completions) == len(completion_stopped) == len(bonus)
        log_metric("mine/tokens", sum(map(len, completion_ids)) / len(prompts))
        log_extra("mine", [f"{prompt} {b}" for prompt, b in zip(prompts, bonus, strict=True)])
        evens = [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
        return [None if b == 2 else b / 10 + share for b, share in zip(bonus, evens, strict=True)]

    @row_wise
    async def waits(prompts, completion_ids, **kwargs):
        calls[1].note(prompts, completion_ids)
        return [float("nan") if ids[0] == 5 else float(ids[0] % 3) for ids in completion_ids]

    def against_the_others(prompts, completion_ids, **kwargs):
        calls[2].note(prompts, completion_ids)
        mean = sum(map(len, completion_ids)) / len(prompts)
        return [len(ids) - mean for ids in completion_ids]

    return [with_bonus, waits, against_the_others], calls


def same_run(one, other, besides=()):
    assert_same(trained_weights(one.model), trained_weights(other.model))
    histories = [without_wall_clock(trainer.state.log_history) for trainer in (one, other)]
    for name in besides:
        values = [[entry.pop(name) for entry in history if name in entry] for history in histories]
        assert len(values[0]) == ROLLOUTS and values[0] == pytest.approx(values[1], rel=1e-12)
    assert histories[0] == histories[1]


# --- the same result --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "staleness"), [pytest.param("one_step", None, marks=pytest.mark.slow), ("async", 2)]
)
def test_rows_scored_as_they_arrive_give_the_run_of_whole_rollouts_bit_for_bit(tmp_path, schedule, staleness):
    settings = {"max_staleness": staleness, "normalize_scores": True, "max_unscored_fraction": 1.0}
    settings |= {"log_completions": True, "num_completions_to_print": 0}
    trainers, counted = [], []
    for score_early in (True, False):
        functions, calls = reward_functions()
        folder = tmp_path / str(score_early)
        trainers.append(trained(folder, functions, schedule, score_early=score_early, **settings))
        counted.append(calls)
    same_run(*trainers, besides=["mine/tokens"])
    tables = [sorted((tmp_path / str(early) / "completions").glob("*.jsonl")) for early in (True, False)]
    assert [path.name for path in tables[0]] == [path.name for path in tables[1]] and len(tables[0]) == ROLLOUTS
    assert [path.read_text() for path in tables[0]] == [path.read_text() for path in tables[1]]
    early, whole = counted
    assert all(calls.rows == [ROWS] * ROLLOUTS for calls in (*whole, early[2]))
    assert whole[0].threads == whole[2].threads == early[2].threads == {True}
    assert early[0].threads == {False} and sum(early[0].rows) == sum(early[1].rows) == ROWS * ROLLOUTS
    assert early[0].rows == [ROWS] * ROLLOUTS if schedule == "one_step" else len(early[0].rows) > ROLLOUTS


def test_async_without_staleness_scores_early_and_equals_sync_bit_for_bit(tmp_path):
    functions, _ = reward_functions()
    sync = trained(tmp_path / "sync", functions, "sync", max_unscored_fraction=1.0)
    functions, calls = reward_functions()
    other = trained(tmp_path / "async", functions, max_staleness=0, max_unscored_fraction=1.0)
    assert calls[0].threads == {False}
    for entry in other.state.log_history:
        for name in ("sampling/staleness", "sampling/staleness_max"):
            entry.pop(name, None)
    same_run(sync, other)


# --- when rows are scored ---------------------------------------------------------------------------------------


def test_a_row_is_scored_while_others_of_its_rollout_decode(tmp_path):
    scored, is_first = threading.Event(), [True]

    @row_wise
    def reward(completion_ids, **kwargs):
        scored.set()
        return [float(len(ids)) for ids in completion_ids]

    class Waiting(CopyBackend):
        def generate_as(self, *args):
            if not is_first:
                assert scored.wait(LONG_S), "no row was scored before all were sampled"
            is_first.clear()
            return super().generate_as(*args)

    backend = Waiting(TrunkModel(base_model(), lora()))
    trainer = trained(tmp_path, reward, backend=backend, num_rollouts=1, max_rollout_rows=1)
    assert trainer.state.global_step == SLOTS


class Telling(CopyBackend):
    """Samples the rows of a call one after the other, and tells of each; `told` is called after each."""

    told = staticmethod(lambda number_of_rows: None)

    def stream_as(self, role, version, prompt_ids, params, keys, arrived):
        rows = []
        for place, (ids, key) in enumerate(zip(prompt_ids, keys, strict=True)):
            rows.append(self.generate_as(role, version, [ids], params, [key]))
            arrived(place, rows[-1])
            self.told(place + 1)
        columns = ("prompt_ids", "completion_ids", "sampler_logprobs", "stopped")
        return Rollout(*([row for part in rows for row in getattr(part, name)] for name in columns), version)


@pytest.mark.parametrize("schedule", ["one_step", "async"])
def test_every_row_is_scored_before_the_next_row_of_its_call_is_sampled(tmp_path, schedule):
    """`one_step` has one call per rollout: a sampler that tells of its rows lets them be scored one by one."""
    texts, has_changed = [], threading.Condition()

    @row_wise
    def reward(prompts, completion_ids, **kwargs):
        with has_changed:
            texts.extend(map(tuple, completion_ids))
            has_changed.notify_all()
        return [float(len(ids)) for ids in completion_ids]

    class Waiting(Telling):
        num_told = 0

        def told(self, number_of_rows):
            with has_changed:
                self.num_told += 1
                assert has_changed.wait_for(lambda: len(texts) >= self.num_told, LONG_S), "a row waits for others"

    backend = Waiting(TrunkModel(base_model(), lora()))
    # One call at a time, so that the rows that were told of are those that must be scored.
    settings = {"num_rollouts": 1} if schedule == "one_step" else {"num_rollouts": 2, "max_rollout_rows": 1}
    trainer = trained(tmp_path, reward, schedule, backend=backend, **settings)
    assert trainer.state.global_step == SLOTS * settings["num_rollouts"]
    assert len(texts) == backend.num_told == ROWS * settings["num_rollouts"]


@pytest.mark.slow
def test_rows_that_arrive_one_by_one_give_the_run_of_whole_calls_bit_for_bit(tmp_path):
    settings = {"normalize_scores": True, "max_unscored_fraction": 1.0}
    trainers, counted = [], []
    for score_early in (True, False):
        functions, calls = reward_functions()
        backend = Telling(TrunkModel(base_model(), lora()))
        keywords = {"backend": backend, "score_early": score_early, **settings}
        trainers.append(trained(tmp_path / str(score_early), functions, "one_step", **keywords))
        counted.append(calls)
    same_run(*trainers, besides=["mine/tokens"])
    early, whole = counted
    assert early[0].threads == {False} and sum(early[0].rows) == ROWS * ROLLOUTS
    assert whole[0].threads == {True} and whole[0].rows == [ROWS] * ROLLOUTS


def test_with_one_step_the_next_rollout_is_scored_during_the_update(tmp_path):
    next_is_scored, rows = threading.Event(), []

    @row_wise
    def reward(completion_ids, **kwargs):
        rows.extend(completion_ids)
        if len(rows) > ROWS:
            next_is_scored.set()
        return [float(len(ids)) for ids in completion_ids]

    class Update(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            assert next_is_scored.wait(LONG_S), "the next rollout was not scored when the update began"

    trained(tmp_path, reward, "one_step", callbacks=[Update()], num_rollouts=2)
    assert len(rows) == 2 * ROWS


@pytest.mark.slow
def test_an_evaluation_and_rows_that_arrive_do_not_call_a_function_at_once(tmp_path):
    running = threading.Lock()

    @row_wise
    def reward(completion_ids, **kwargs):
        assert running.acquire(blocking=False), "the function was called in two threads at once"
        time.sleep(0.02)
        running.release()
        return [float(len(ids)) for ids in completion_ids]

    settings = {"eval_dataset": prompts(3, bonus=[0, 1, 2]), "eval_strategy": "steps", "eval_steps": 1}
    trainer = trained(tmp_path, reward, max_staleness=2, **settings)
    assert len(logged(trainer, "eval_score/mean")) == ROLLOUTS * SLOTS


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_function_that_only_works_in_the_main_thread_gets_whole_rollouts(tmp_path, caplog):
    rows = []

    def score(completion_ids):
        rows.append(len(completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    @row_wise
    def needs_the_main_thread(completion_ids, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("signal only works in main thread")
        return score(completion_ids)

    def whole(completion_ids, **kwargs):
        return score(completion_ids)

    with caplog.at_level(logging.WARNING, logger="onetrunk"):
        trainer = trained(tmp_path / "marked", [needs_the_main_thread])
    assert rows == [ROWS] * ROLLOUTS
    (warning,) = [r.getMessage() for r in caplog.records if "early" in r.getMessage()]
    assert "'needs_the_main_thread' raised ValueError" in warning and "signal only works in main thread" in warning
    plain = trained(tmp_path / "plain", [whole])
    assert_same(trained_weights(trainer.model), trained_weights(plain.model))


def test_an_error_for_some_rows_ends_the_run_when_their_rollout_is_used(tmp_path):
    seen = []

    @row_wise
    def fails_later(completion_ids, **kwargs):
        seen.extend(completion_ids)
        if len(seen) > ROWS:
            raise ConnectionError("the service is gone")
        return [float(len(ids)) for ids in completion_ids]

    trainer = run(tmp_path, fails_later, "one_step")
    message = "reward function 'fails_later' raised ConnectionError: the service is gone .*test_early_scores.py"
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert trainer.state.global_step == SLOTS  # The rollout before it was used.


@pytest.mark.parametrize("result", [[1.0], ["good"] * ROWS])
def test_a_wrong_answer_is_reported_as_for_a_whole_rollout(tmp_path, result):
    @row_wise
    def wrong(prompts, **kwargs):
        return result

    with pytest.raises((TypeError, ValueError), match="reward function 'wrong' returned"):
        trained(tmp_path, wrong, "one_step")


# --- checkpoints ------------------------------------------------------------------------------------------------


class AllAhead(TrainerCallback):
    """Waits at a step until the rollouts ahead are sampled and scored, then saves and stops."""

    def __init__(self, step, is_done):
        self.stop, self.is_done = StopAt(step), is_done

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.stop.step:
            deadline = time.monotonic() + LONG_S
            while not self.is_done():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        self.stop.on_step_end(args, state, control, **kwargs)


@pytest.mark.slow
def test_scores_of_a_checkpoint_are_not_asked_again(tmp_path):
    settings = {"max_staleness": 2, "normalize_scores": True, "max_unscored_fraction": 1.0}
    functions, whole_calls = reward_functions()
    whole = trained(tmp_path / "whole", functions, **settings)
    functions, calls = reward_functions()
    # After step 3 rollout 1 is in use, and rollouts 2 and 3 are ahead of it.
    trainer = run(tmp_path / "cut", functions, **settings)
    trainer.add_callback(AllAhead(3, lambda: len(trainer._stream.ahead.early._scores) == 2 * ROWS))
    trainer.train()
    checkpoint = tmp_path / "cut" / "checkpoint-3"
    assert len(json.loads((checkpoint / SCORES_FILE.format(rank=0)).read_text())["rows"]) == 2 * ROWS
    functions, again = reward_functions()
    resumed = run(tmp_path / "cut", functions, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    same_run(resumed, whole, besides=["mine/tokens"])
    assert sum(calls[0].rows) == ROWS * ROLLOUTS and again[0].rows == again[1].rows == []
    assert again[2].rows == [ROWS] * 2  # It gets the whole rollouts.
    assert sorted(calls[0].texts) == sorted(whole_calls[0].texts)


def test_scores_of_another_reward_are_dropped_and_so_are_those_of_rows_that_are_sampled_again(tmp_path):
    functions, _ = reward_functions()
    trainer = trained(tmp_path, functions[:1], num_rollouts=1, max_unscored_fraction=1.0)
    early = trainer._stream.ahead.early
    key, other = (3, 1, 0), (3, 1, 1)
    row = [0.1, {"mine/tokens": 0.3}, {"mine": "text"}]
    state = {"basis": early.basis, "rows": [[list(k), {"with_bonus": row}] for k in (key, other)]}
    early.load({**state, "basis": {"reward_funcs": ["another"]}}, [key, other])
    assert early.state() is None
    early.load({**state, "rows": [[list(key), {"renamed": row}]]}, [key])
    assert early.state() is None
    early.load(state, [key])
    assert early.state() == {**state, "rows": state["rows"][:1]}


@pytest.mark.slow
def test_a_signal_while_waiting_for_scores_stops_the_run_which_resumes_exactly(tmp_path):
    gate, is_asked = threading.Event(), threading.Event()

    @row_wise
    def hangs(completion_ids, **kwargs):
        asked_rows.append(len(completion_ids))
        if sum(asked_rows) > ROWS:  # Of the second rollout.
            is_asked.set()
            assert gate.wait(LONG_S)
        return even_share(None, None, completion_ids)

    class Signal(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == SLOTS - 1:
                assert is_asked.wait(LONG_S)
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    asked_rows = []
    with pytest.raises(Stopped):
        trained(tmp_path / "cut", hangs, "one_step", callbacks=[Signal()])
    gate.set()
    resumed = run(tmp_path / "cut", row_share, "one_step", allow_config_change=True)
    resumed.train(resume_from_checkpoint=True)
    whole = trained(tmp_path / "whole", row_share, "one_step")
    assert_same(trained_weights(resumed.model), trained_weights(whole.model))


class CountingJudge(Judge):
    """A judge on a server, whose answers cost something: it counts its questions."""

    is_remote = True
    name = "counting"

    def __init__(self):
        self.identity = {"kind": "counting"}
        self.asked = []

    def _answer(self, items, principle, keep):
        for index, item in enumerate(items):
            self.asked.append((item.prompt, item.text, item.stopped))
            keep(index, Rating(len(item.text) % 7 / 7))


class Answers(dict):
    """A memory in place of the ledger."""

    def put(self, key, value):
        return self.setdefault(key, value)

    def replace(self, key, value):
        self[key] = value


@pytest.mark.slow
def test_a_judge_with_a_memory_is_asked_once_and_early(tmp_path):
    threads = set()

    class Watched(CountingJudge):
        def _answer(self, *args):
            threads.add(threading.current_thread() is threading.main_thread())
            super()._answer(*args)

    constitution = Constitution("length", (Principle("Which is longer?"),))
    judge, whole = Watched(), CountingJudge()
    trainer = trained(tmp_path / "early", JudgeReward(judge, constitution, memory=Answers()))
    assert threads == {False}
    other = trained(tmp_path / "whole", JudgeReward(whole, constitution, memory=Answers()), score_early=False)
    same_run(trainer, other)
    assert len(judge.asked) == len(set(judge.asked)) and sorted(judge.asked) == sorted(whole.asked)


@pytest.mark.parametrize(("is_remote", "memory"), [(True, None), (False, {})], ids=["no memory", "on our device"])
def test_a_judge_that_would_be_paid_twice_or_needs_the_device_gets_whole_rollouts(is_remote, memory):
    judge = CountingJudge()
    judge.is_remote = is_remote
    assert not JudgeReward(judge, Constitution("length", (Principle("Which is longer?"),)), memory=memory).is_row_wise


def test_a_remote_reward_is_row_wise():
    assert RemoteReward("http://127.0.0.1:9/rate").is_row_wise


def test_a_setting_that_is_no_switch_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="score_early is 'yes'; it must be true or false"):
        make_config(tmp_path, score_early="yes")
