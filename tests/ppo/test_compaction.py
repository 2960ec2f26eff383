"""Training on compacted contexts: credit over segments, a naive PPO over them, resuming, and the courier game."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.models.trunk import PackOutput
from onetrunk.ops.advantages import gae
from onetrunk.ops.packing import PackLimits, make_pack
from onetrunk.ppo.packs import cut, joined, rollout_packs
from onetrunk.types import Experience, Rollout
from tests.courier import Courier, Tables, courier_model, make_courier_trainer, objective, optimum
from tests.ppo.support import SGD, StopAt, assert_same, logged, prompts, trained_weights
from tests.ppo.test_episodes_in_training import COMPACTED, run, words_trainer

# --- segments end to end ------------------------------------------------------------------------------------------


@st.composite
def rollouts(draw):
    """Rollouts whose episodes are cut into segments; every token of a completion is different."""
    completions, turns, restarts, prompts = [], [], [], []
    for row in range(draw(st.integers(1, 4))):
        ids, marks, cuts, token = [], [], [], 100 * row + 10
        for segment in range(draw(st.integers(1, 4))):
            if segment:
                cuts.append(len(ids))
            # A new context, turns, and observations between them.
            parts = [(draw(st.integers(1, 3)), -1)] if segment else []
            parts += [(draw(st.integers(1, 3)), mark) for mark in (0, -1, 0)[: draw(st.sampled_from([1, 3]))]]
            for length, mark in parts:
                ids += range(token, token + length)
                marks += [mark] * length
                token += length
        completions.append(ids)
        turns.append(marks)
        restarts.append(cuts)
        prompts.append([row + 1] * draw(st.integers(1, 3)))
    logprobs = [torch.zeros(len(ids)) for ids in completions]
    return Rollout(prompts, completions, logprobs, [True] * len(prompts), turn_ids=turns, restarts=restarts)


def values_of(pack):
    """A value for every sampled token, from its id alone."""
    return (pack.completion_ids.double() * 0.37).sin() * pack.completion_mask


def last_tokens(pack):
    """The last sampled token of every row, which is its largest one."""
    return (pack.completion_ids * pack.completion_mask).max(1).values.double()


def output_of(pack):
    states = pack.completion_ids[pack.completion_mask][:, None].double()
    return PackOutput(values=values_of(pack), next_values=last_tokens(pack), value_states=states)


@settings(max_examples=60, deadline=None)
@given(rollout=rollouts(), rows=st.integers(1, 5), least=st.integers(0, 9))
def test_advantages_of_segments_end_to_end_are_those_of_the_uncut_row(rollout, rows, least):
    # Another process has `least` segments, and as many packs.
    agree = (lambda counts: [max(count, least) for count in counts]) if least else None
    minibatches = [range(0, len(rollout), 2), range(1, len(rollout), 2)][: min(2, len(rollout))]
    packs = rollout_packs(rollout, minibatches, PackLimits(rows), 0, torch.device("cpu"), agree)
    packs = [dataclasses.replace(item, output=output_of(item.pack)) for item in packs]
    experiences = []
    for item in joined(packs, rollout):
        columns = (rollout.prompt_ids, rollout.completion_ids, rollout.turn_ids)
        ids, completions, turns = ([column[row] for row in item.rows] for column in columns)
        whole = make_pack(ids, completions, 0, 0, turns)
        mask = whole.completion_mask
        assert torch.equal(item.output.values, values_of(whole))
        assert torch.equal(item.output.next_values, last_tokens(whole))
        assert torch.equal(item.output.value_states[:, 0], whole.completion_ids[mask].double())
        rewards = (whole.completion_ids.double() * 0.11).cos() * mask
        advantages, returns = gae(rewards, item.output.values, mask, 0.9, 0.8)
        experiences.append(Experience(item.pack, mask, advantages, item.output.values, advantages, returns))
    found = cut(experiences, packs)
    by_token = {
        int(t): float(a)
        for e in experiences
        for t, a in zip(e.pack.completion_ids[e.loss_mask], e.advantages[e.loss_mask], strict=True)
    }
    seen = {}
    for experience, item in zip(found, packs, strict=True):
        assert experience.pack is item.pack
        mask = experience.loss_mask
        assert (mask <= item.pack.completion_mask).all()
        for token, advantage in zip(item.pack.completion_ids[mask], experience.advantages[mask], strict=True):
            assert int(token) not in seen  # Every token trains once.
            seen[int(token)] = float(advantage)
    assert seen == by_token


# --- a run --------------------------------------------------------------------------------------------------------


def test_a_run_equals_a_naive_ppo_over_the_segments(tmp_path):
    own = {"gamma": 0.9, "lam": 0.8, "beta": 0.1, "whiten_advantages": False, "num_minibatches": 1}
    trainer = words_trainer(tmp_path, rollout_batch_size=4, num_ppo_epochs=1, **COMPACTED, **own)
    stream = trainer.get_train_dataloader()
    with torch.no_grad():  # An adapter and a head that say something.
        generator = torch.Generator().manual_seed(0)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name or "value_head" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    head = copy.deepcopy(trainer.model.value_head.state_dict())
    minibatch = next(iter(stream))["minibatch"]
    trainer.model.value_head.load_state_dict(head)  # It was fitted for the next rollout.
    scored = stream.last_scored
    rollout, model = scored.rollout, trainer.model.eval()
    assert sum(map(len, rollout.restarts)) >= 4
    expected = {}
    for row, ids in enumerate(rollout.completion_ids):
        marks, bounds = rollout.turn_ids[row], [0, *rollout.restarts[row], len(ids)]
        chain = []  # (place, logprob, value, reference) of every sampled token.
        for begin, end in zip(bounds, bounds[1:], strict=False):
            context = [] if begin else rollout.prompt_ids[row]
            for at in range(begin, end):
                if marks[at] >= 0:
                    given = [*context, *ids[begin:at]]
                    pack = make_pack([given], [[ids[at]]], 0)
                    with torch.no_grad():
                        output = model(pack=pack, roles=("policy", "value", "reference"))
                    numbers = (output.logprobs, output.values, output.ref_logprobs)
                    chain.append((at, *(x[0, 0].item() for x in numbers)))
        following, value = 0.0, 0.0
        for place, (at, logprob, own_value, reference) in reversed(list(enumerate(chain))):
            reward = -0.1 * (logprob - reference) + scored.scores.by_token[row][at].item()
            following = reward + 0.9 * value - own_value + 0.9 * 0.8 * following
            value = own_value
            expected[row, place] = (ids[at], logprob, own_value, following)
    found = sorted(
        (round(float(numbers[0])), *map(float, numbers[1:]))
        for e in minibatch.experiences
        for numbers in zip(
            *(x[e.loss_mask] for x in (e.pack.completion_ids, e.old_logprobs, e.old_values, e.advantages)), strict=True
        )
    )
    for ours, naive in zip(found, sorted(expected.values()), strict=True):
        assert ours == pytest.approx(naive, abs=2e-5)


def test_the_first_ratio_is_1_and_segments_are_counted_also_in_an_evaluation(tmp_path):
    trainer = run(tmp_path, num_rollouts=2, log_completions=True, eval_dataset=prompts(4), **COMPACTED)
    metrics = trainer.evaluate()
    assert metrics["eval_episode/compactions"] >= 1 and abs(metrics["eval_kl/ref"]) < 5
    first = next(entry for entry in trainer.state.log_history if "policy/ratio_max" in entry)
    assert first["policy/ratio_max"] == 1.0 and first["kl/approx"] == 0.0
    assert min(logged(trainer, "episode/compactions")) >= 1
    assert 1 <= logged(trainer, "episode/summary_tokens")[0] <= 3
    samples = (tmp_path / "completions/step-000001.jsonl").read_text()
    assert '"context": ' in samples


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"gae_unit": "turn", "ratio_unit": "turn"},
        pytest.param({"policy_objective": "dis"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_does_not_depend_on_how_segments_are_packed(tmp_path, own):
    own |= {"num_rollouts": 2, "rollout_batch_size": 8, **SGD, **COMPACTED}
    whole, divided = (run(tmp_path / str(rows), per_device_train_batch_size=rows, **own) for rows in (8, 2))
    assert_same(trained_weights(divided.model), trained_weights(whole.model), atol=1e-5, rtol=1e-4)
    names = ("policy/loss", "value/loss", "value/explained_variance", "value/variance_ratio", "kl/ref", "score/mean")
    for name in names:
        assert logged(divided, name) == pytest.approx(logged(whole, name), abs=1e-4), name


def last_two(messages):
    return [messages[0], *messages[-2:]]


def last_one(messages):
    return [messages[0], *messages[-1:]]


def test_a_rule_of_the_user_needs_no_summaries_and_another_one_is_noticed_when_a_run_is_resumed(tmp_path):
    first = run(tmp_path, compact=last_two, num_rollouts=2, callbacks=[StopAt(2)], **COMPACTED)
    assert logged(first, "episode/compactions")[0] > 0 and logged(first, "episode/summary_tokens")[0] == 0
    other = words_trainer(tmp_path, compact=last_one, num_rollouts=2, **COMPACTED)
    with pytest.raises(ValueError, match="compact"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# --- the courier game ---------------------------------------------------------------------------------------------


def test_the_objective_of_the_courier_game_by_playing_it(tmp_path):
    courier = Courier(compactions=2, num=2)
    trainer = make_courier_trainer(courier, 0, tmp_path, num_rollouts=1, rollout_batch_size=256, num_ppo_epochs=1)
    reference = Tables.of(courier_model(courier, 0), courier)
    assert reference.first.exp().sum((1, 2, 3)).tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    trainer.train()
    # The rollout is the reference's: no KL, and a score within 4 standard errors of the exact one.
    exact = objective(reference, reference, courier).item()
    assert logged(trainer, "score/mean")[0] == pytest.approx(exact, abs=4 * 0.5 / 256**0.5)
    assert logged(trainer, "episode/compactions") == [2.0] and logged(trainer, "episode/turns") == [6.0]


@pytest.mark.slow
def test_a_key_survives_two_compactions(tmp_path):
    courier = Courier(compactions=2)
    trainer = make_courier_trainer(courier, 0, tmp_path, num_rollouts=80, learning_rate=2e-3)
    trainer.train()
    reference = Tables.of(courier_model(courier, 0), courier)
    reached = objective(Tables.of(trainer.model, courier), reference, courier).item()
    assert reached >= 0.97 * optimum(reference, courier)
