"""Episodes of the local backend against turns that are sampled one by one, without a cache that is kept."""

from concurrent.futures import Future
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.ops.packing import make_pack
from onetrunk.rollouts import LocalBackend, decoding
from onetrunk.rollouts.decoding import SamplingCall
from onetrunk.rollouts.local import last_logits_only
from onetrunk.rollouts.turns import Continuation
from tests.models.branches import a_trunk
from tests.rollouts.scripted import Scripted, observation
from tests.rollouts.small import MANY_KEYS, PROMPTS, mixed_params, shapes_of, tiny

MANY = PROMPTS * 2
KEYS = MANY_KEYS[: len(MANY)]
# gemma3 and qwen2 have sliding windows in every second layer, or in the upper half; hybrid has convolutions.
FAMILIES = ["llama", "gpt2", "gemma3", "qwen2", "hybrid"]


def params_of(longest=40, **changes):
    return replace(mixed_params(temperature=1.3), max_completion_length=longest, **changes)


def played(model, prompts=MANY, keys=KEYS, params=None, answers=None, keeps=None, **options):
    backend = LocalBackend(model, **options)
    return backend.generate_turns(prompts, params or params_of(), keys, answers or Scripted(), keeps=keeps)


def naive(model, prompts=MANY, keys=KEYS, params=None, observation=observation):
    """Rows one by one: every turn is a call of `generate` with all ids so far. Ids, logprobs, turns, stopped."""
    params, rows = params or params_of(), []
    for row, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        ids, logprobs, turn_ids, turn, stopped = [], [], [], 0, False
        while True:
            most = min(params.max_completion_length - len(ids), params.max_turn_length or params.max_completion_length)
            left = replace(params, max_completion_length=most, max_turn_length=None)
            turn_key = (*key, turn) if turn else key
            one = LocalBackend(model).generate([prompt + ids], left, [turn_key])
            ids, logprobs = ids + one.completion_ids[0], [*logprobs, one.sampler_logprobs[0]]
            turn_ids, stopped = turn_ids + [turn] * len(one.completion_ids[0]), one.stopped[0]
            given_ids = observation(row, turn)
            if given_ids is None:
                break
            if len(given_ids) >= params.max_completion_length - len(ids):
                stopped = False
                break
            ids, logprobs = ids + given_ids, [*logprobs, torch.zeros(len(given_ids))]
            turn_ids, turn = turn_ids + [-1] * len(given_ids), turn + 1
        rows.append((ids, torch.cat(logprobs), turn_ids, stopped))
    return rows


@cache
def naive_of(family):
    return naive(tiny(family))


def assert_equals(rollout, rows):
    for row, (ids, logprobs, turn_ids, stopped) in enumerate(rows):
        assert rollout.completion_ids[row] == ids
        assert rollout.turn_ids[row] == turn_ids
        assert rollout.stopped[row] is stopped
        torch.testing.assert_close(rollout.sampler_logprobs[row], logprobs, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_episode_with_its_cache_kept_equals_turns_that_are_sampled_one_by_one(family):
    model, expected = tiny(family), naive_of(family)
    numbers = [max(turn_ids) + 1 for _, _, turn_ids, _ in expected]
    assert min(numbers) == 1 and max(numbers) >= 3
    shapes = shapes_of(model)
    for most in (None, 3, 1):
        assert_equals(played(model, max_rows=most), expected)
    # Nothing runs twice: after the prompts of 20 tokens at most come observations of 9, and the token before.
    widths = [columns for _, columns, _ in shapes]
    assert max(widths) <= 20 and widths.count(1) > 30


def way_of(model):
    call = SamplingCall(model, [[5]], params_of(), [(0,)], None, last_logits_only(model))
    with torch.no_grad():
        return Continuation.of(call)


def test_rows_go_on_as_their_layers_allow(monkeypatch):
    ways = {family: way_of(tiny(family)) for family in FAMILIES}
    padded, even = Continuation.PADDED, Continuation.EVEN
    assert ways == {"llama": padded, "gpt2": padded, "gemma3": even, "qwen2": even, "hybrid": even}
    half = tiny().bfloat16()
    assert way_of(half) is padded
    model, expected = tiny(), naive_of("llama")
    monkeypatch.setattr(decoding, "JOINABLE_LAYERS", ())
    assert way_of(model) is Continuation.ANEW
    for most in (None, 3):
        assert_equals(played(model, max_rows=most), expected)


def test_a_model_that_forgets_its_cache_when_several_tokens_come_is_found_out():
    model = tiny("hybrid")

    def forget(module, args, kwargs):
        # Its name since transformers 5.24, and before.
        cache = kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]
        layer = cache.layers[module.layer_idx]
        if args and args[0].shape[1] > 1 or kwargs.get("hidden_states", torch.zeros(1, 1)).shape[1] > 1:
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)

    model.model.layers[0].conv.register_forward_pre_hook(forget, with_kwargs=True)
    assert way_of(model) is Continuation.ANEW
    assert_equals(played(model, max_rows=3), naive_of("hybrid"))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_order_in_which_answers_come_changes_nothing(family):
    model, expected = tiny(family), naive_of(family)
    delays = (lambda row, turn: 0.01 * (len(MANY) - row), lambda row, turn: 0.05 * (row % 3 == 0))
    # The last: rows of which some have no place for their caches, and begin anew.
    for delay, most in ((delays[0], 4), (delays[1], 4), (lambda row, turn: 0.02, 2)):
        answers = Scripted(delay=delay)
        assert_equals(played(model, answers=answers, max_rows=most), expected)
        for row, (ids, _, turn_ids, _) in enumerate(expected):
            of_turns = [[token for token, t in zip(ids, turn_ids, strict=True) if t == turn] for turn in range(5)]
            assert [token_ids for token_ids, _ in answers.turns[row]] == [ids for ids in of_turns if ids]


@pytest.mark.parametrize(("family", "last"), [("mistral", True), ("gpt2", True), ("gpt2", False), ("llama", True)])
@pytest.mark.parametrize("is_late", [False, True])
def test_states_and_logprobs_of_an_episode_are_those_of_one_forward_of_the_trunk(family, last, is_late):
    trunk = a_trunk(family, base=tiny(family), adapter_layers="top-2")
    answers = Scripted(delay=(lambda row, turn: 0.01 * (row % 3)) if is_late else None)
    options = {"keeps": "all" if last else "all but last", "max_rows": 4}
    params = params_of(temperature=1.0)
    rollout = played(trunk, answers=answers, params=params, **options)
    assert_equals(rollout, naive(trunk, params=params))
    for row, (prompt, ids) in enumerate(zip(rollout.prompt_ids, rollout.completion_ids, strict=True)):
        pack = make_pack([prompt], [ids], 0, turn_ids=[rollout.turn_ids[row]])
        out = trunk(pack=pack, roles=("policy", "trunk"))
        end = len(prompt) + len(ids) - (0 if last else 1)
        torch.testing.assert_close(rollout.states[row, :end], out.states[:end], atol=5e-5, rtol=1e-5)
        assert not rollout.states[row, end:].any()
        torch.testing.assert_close(rollout.sampler_logprobs[row], out.logprobs[0], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "hybrid"])
def test_an_episode_of_one_turn_is_a_completion_bit_for_bit(family):
    model, params = tiny(family), params_of(16)
    for most in (None, 3):
        backend = LocalBackend(model, max_rows=most)
        plain = backend.generate(MANY, params, KEYS)
        rollout = backend.generate_turns(MANY, params, KEYS, Scripted(lambda row, turn: None))
        assert rollout.completion_ids == plain.completion_ids and rollout.stopped == plain.stopped
        assert all(map(torch.equal, rollout.sampler_logprobs, plain.sampler_logprobs))
        assert rollout.turn_ids == [[0] * len(ids) for ids in plain.completion_ids]
        assert plain.turn_ids is None


def test_an_observation_without_room_ends_the_episode_unstopped():
    model, params = tiny(), params_of(16)
    plain = LocalBackend(model).generate(MANY, params, KEYS)
    lengths = [len(ids) for ids in plain.completion_ids]
    assert any(plain.stopped) and not all(plain.stopped)
    # One token of room is left, which the next turn samples; or none.
    fits = played(model, params=params, answers=Scripted(lambda row, turn: [20] * max(15 - lengths[row], 0)))
    for row, length in enumerate(lengths):
        assert len(fits.completion_ids[row]) == 16
        assert fits.turn_ids[row] == [0] * length + [-1] * (15 - length) + [1] * (length < 16)
    full = played(model, params=params, answers=Scripted(lambda row, turn: [20] * (16 - lengths[row])))
    assert full.completion_ids == plain.completion_ids and not any(full.stopped)


def test_a_slow_answer_delays_no_other_row_and_polls_go_on():
    """Row 0 gets its first answer only once all others are over, and the sampler has polled three times since."""
    model, slow, numbers_done, polls = tiny(), Future(), [0], []
    answers = Scripted(lambda row, turn: [20, 21] if turn < 2 else None)

    class SlowAtFirst(Scripted):
        def begin(self, row, token_ids, stopped):
            answered = answers.begin(row, token_ids, stopped)
            return slow if row == 0 and len(answers.turns[0]) == 1 else answered

    def poll():
        polls.append(numbers_done[-1])
        if polls.count(len(MANY) - 1) == 3:
            slow.set_result([20, 21])

    rollout = played(model, answers=SlowAtFirst(), poll=poll, progress=lambda done, *rest: numbers_done.append(done))
    assert numbers_done[-1] == len(MANY) and polls.count(len(MANY) - 1) >= 3
    assert_equals(rollout, naive(model, observation=answers.observation))


def test_progress_counts_rows_that_are_over_and_all_their_tokens():
    seen = []
    rollout = played(tiny(), max_rows=3, progress=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (len(MANY), len(MANY), sum(map(len, rollout.completion_ids)))
    assert seen == sorted(seen) and len(seen) > 2


@settings(max_examples=15, deadline=None)
@given(data=st.data(), family=st.sampled_from(["llama", "gemma3", "hybrid"]), most=st.sampled_from([None, 1, 2, 4]))
def test_any_turns_and_observations_are_sampled_as_one_by_one(data, family, most):
    model = tiny(family)
    count = data.draw(st.integers(1, 6))
    lengths = st.lists(st.integers(0, 12), max_size=4)
    given_lengths = [data.draw(lengths) for _ in range(count)]

    def observation(row, turn):
        mine = given_lengths[row]
        return None if turn >= len(mine) else [15 + (7 * row + 3 * turn + i) % 40 for i in range(mine[turn])]

    params = params_of(data.draw(st.integers(1, 30)), max_turn_length=data.draw(st.sampled_from([None, 3])))
    delay = data.draw(st.sampled_from([None, lambda row, turn: 0.002 * (row % 3)]))
    rollout = played(model, MANY[:count], KEYS[:count], params, Scripted(observation, delay), max_rows=most)
    assert_equals(rollout, naive(model, MANY[:count], KEYS[:count], params, observation))
