"""Rows with observations in trunk and rollout: packs against single rows, gaps as context, turns as actions."""

from dataclasses import replace

import pytest
import torch

from onetrunk.ops.advantages import token_rewards
from onetrunk.ops.losses import ppo_loss
from onetrunk.ops.masking import turn_starts
from onetrunk.ops.packing import make_pack
from onetrunk.types import Experience, LossCoefficients
from tests.fakes import CannedBackend
from tests.models.branches import PROMPTS, a_trunk, gradients
from tests.ops.test_turn_advantages import turn_gae_reference
from tests.ppo.support import assert_same, make_trainer

COMPLETIONS = [[14, 15, 16, 17, 18, 1], [23, 1], [31, 32, 33, 34, 35, 36, 37], [44, 45, 46]]
TURNS = [[0, 0, -1, -1, 1, 1], [0, 0], [0, -1, 1, -1, -1, 2, 2], [0, -1, -1]]
# Gradients of up to 100 in float32, summed in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def an_experience(pack, output):
    """Return an experience of a pack whose numbers depend on each row's own tokens alone."""
    mask, ids = pack.completion_mask, pack.completion_ids.float()
    states = None if output.states is None else output.states.detach()
    return Experience(
        pack, mask, (output.logprobs + 0.1 * ids.sin()).detach(), output.values.detach() + 0.1, ids.cos(), ids.sin(),
        output.ref_logprobs.detach(), weights=1 + 0.5 * ids.cos(), states=states,
    )  # fmt: skip


def step(trunk, rows, unit, has_states):
    """Return the loss of the packs of some rows each, and its gradient."""
    trunk.zero_grad(set_to_none=True)
    packs = [
        make_pack(*([x[i] for i in part] for x in (PROMPTS, COMPLETIONS)), 0, 0, [TURNS[i] for i in part])
        for part in rows
    ]
    total, coefficients = 0.0, LossCoefficients(0.2, 0.3, 1.5, 0.05, 0.7, "k2", unit)
    num_tokens = sum(t >= 0 for turns in TURNS for t in turns)
    for pack in packs:
        with torch.no_grad():
            output = trunk(pack=pack, roles=("policy", "value", "reference", *(("trunk",) if has_states else ())))
        experience = an_experience(pack, output)
        output = trunk(pack=pack, roles=("policy",), states=experience.states, entropy_grad=True)
        loss, _ = ppo_loss(experience, output, coefficients, num_tokens)
        loss.backward()
        total += loss.item()
    return total, gradients(trunk)


@pytest.mark.parametrize("is_free", [False, True], ids=["padded", "padding_free"])
@pytest.mark.parametrize("has_states", [False, True], ids=["whole", "states"])
@pytest.mark.parametrize("unit", ["token", "turn"])
def test_loss_and_gradients_of_a_pack_of_episodes_are_those_of_single_rows(unit, has_states, is_free):
    trunk = a_trunk("llama", adapter_layers="top-2")
    alone, expected = step(trunk, [[0], [1], [2], [3]], unit, False)
    if is_free:
        trunk.use_padding_free()
    for rows in ([[0, 1, 2, 3]], [[2, 0], [3, 1]]):
        loss, found = step(trunk, rows, unit, has_states)
        assert loss == pytest.approx(alone, abs=1e-5)
        assert_same(found, expected, **CLOSE)


def test_an_observation_is_context_and_the_value_after_a_row_that_of_its_last_sampled_token():
    trunk = a_trunk("llama").eval()
    with torch.no_grad():
        found, plain = (trunk(pack=make_pack(PROMPTS, COMPLETIONS, 0, 0, turns)) for turns in (TURNS, None))
        cut = trunk(pack=make_pack(PROMPTS[3:], [COMPLETIONS[3][:1]], 0))
        other = trunk(pack=make_pack(PROMPTS[:1], [[14, 15, 50, 51, 18, 1]], 0, 0, TURNS[:1]))
    mask = make_pack(PROMPTS, COMPLETIONS, 0, 0, TURNS).completion_mask
    for name in ("logprobs", "values", "entropy"):
        ours, whole = getattr(found, name), getattr(plain, name)
        torch.testing.assert_close(ours[mask], whole[mask], rtol=1e-5, atol=1e-5)
        assert ours[~mask].eq(0).all()
    torch.testing.assert_close(found.next_values[3], cut.next_values[0], rtol=1e-5, atol=1e-5)
    # Turn 1 reads the observation, turn 0 does not.
    is_equal = (other.logprobs[0] - found.logprobs[0, :6]).abs() < 5e-5
    assert is_equal.tolist()[:2] == [True, True] and not is_equal[4:6].any()
    assert len(found.value_states) == mask.sum()


class Episodes(CannedBackend):
    """Rows of up to 9 tokens drawn from their keys, of which 2, 5 and 6 are observations."""

    def generate(self, prompt_ids, params, keys):
        rows = super().generate(prompt_ids, params, keys)
        turns = [0, 0, -1, 1, 1, -1, -1, 2, 2]
        return replace(rows, turn_ids=[turns[: len(ids)] for ids in rows.completion_ids])


def stream_of(folder, **settings):
    shape = {"max_completion_length": 9, "rollout_batch_size": 8, "check_memory": False}
    return make_trainer(folder, rollout_backend=Episodes(), **shape, **settings).get_train_dataloader()


def test_with_turns_as_actions_only_values_at_their_starts_train_and_lambda_counts_turns(tmp_path):
    own = {"length_adaptive_lam": 1.0, "lam_value": 0.5, "gamma": 0.9, "beta": 0.0, "whiten_advantages": False}
    stream = stream_of(tmp_path, gae_unit="turn", **own)
    minibatch = next(iter(stream))["minibatch"]
    scores = stream.last_scored.scores.total
    for e in minibatch.experiences:
        mask, starts = e.pack.completion_mask, turn_starts(e.pack.completion_mask, e.pack.turns)
        ids = [row[: row.index(0)] if 0 in row else row for row in e.pack.completion_ids.tolist()]
        rows = [list(stream.last_scored.rollout.completion_ids).index(row) for row in ids]
        inputs = (token_rewards(scores[rows], e.old_logprobs, None, mask, 0.0), e.old_values, mask, 0.9)
        # alpha 1: lam = 1 - 1 / turns.
        advantages, _ = turn_gae_reference(*inputs, 1 - 1 / starts.sum(1), turn_ids=e.pack.turns)
        _, returns = turn_gae_reference(*inputs, 0.5, turn_ids=e.pack.turns)
        torch.testing.assert_close((e.advantages, e.returns), (advantages, returns))
        assert e.value_mask.equal(starts)
        assert e.value_tokens.equal(starts) and starts.sum() < mask.sum()


def test_the_ends_of_turns_train_if_a_cut_is_bootstrapped_with_the_value_there(tmp_path):
    stream, num_ends = stream_of(tmp_path, truncated_completions="bootstrap"), 0
    for e in (e for minibatch in stream for e in minibatch["minibatch"].experiences):
        assert e.value_tokens.equal(e.pack.completion_mask | e.pack.turn_ends)
        # Nothing is earned between the end of a turn and the start of the next.
        rows = e.pack.turn_ends[:, 2:3].any(1)
        if rows.any():
            num_ends += int(rows.sum())
            assert e.returns[rows, 2].equal(e.returns[rows, 3])
    assert num_ends
