"""Options of the rollout: which prompts, in which order, how often, and where completions end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onetrunk.ppo.rollout import PromptOrder
from onetrunk.utils.randomness import EVALUATION_STREAM
from tests.ppo.support import make_trainer, prompts, trained
from tests.tiny import tiny_tokenizer


class Seen:
    """A reward function that keeps what it is called with."""

    __name__ = "seen"

    def __init__(self):
        self.calls = []

    def __call__(self, completion_ids, **columns):
        self.calls.append({"completion_ids": completion_ids, **columns})
        return [float(len(set(ids))) for ids in completion_ids]


def test_every_prompt_is_sampled_num_generations_times_with_draws_of_its_own(tmp_path):
    seen = Seen()
    trained(tmp_path, reward=seen, num_generations=3, num_rollouts=2, per_device_train_batch_size=6)
    for call in seen.calls:
        groups = [call["prompts"][i : i + 3] for i in range(0, 12, 3)]
        assert all(len(set(group)) == 1 for group in groups) and len({g[0] for g in groups}) == 4
        assert all(len({tuple(ids) for ids in call["completion_ids"][i : i + 3]}) > 1 for i in range(0, 12, 3))


def test_a_stop_token_ends_a_completion_and_is_not_part_of_its_text(tmp_path):
    seen, plain = Seen(), Seen()
    word = tiny_tokenizer().decode([20])
    shape = {"rollout_batch_size": 16, "dataset": prompts(16), "max_completion_length": 24}
    trained(tmp_path / "a", reward=plain, **shape)
    trainer = trained(tmp_path / "b", reward=seen, stop_tokens=[word, tiny_tokenizer().decode([30])], **shape)
    assert trainer.sampler.params.stop_token_ids == (1, 20, 30)
    assert make_trainer(tmp_path / "c", stop_tokens=word).sampler.params.stop_token_ids == (1, 20)
    without, rows = plain.calls[0]["completion_ids"], seen.calls[0]["completion_ids"]
    stops = [next((i for i, t in enumerate(ids) if t in (20, 30)), None) for ids in without]
    assert any(i is not None and i < len(ids) - 1 for i, ids in zip(stops, without, strict=True))
    assert rows == [ids if i is None else ids[: i + 1] for i, ids in zip(stops, without, strict=True)]
    assert all(word not in text.split() for text in seen.calls[0]["completions"])


@given(
    num_prompts=st.integers(1, 40),
    share=st.integers(1, 6),
    num_generations=st.integers(1, 3),
    world=st.integers(1, 4),
    number=st.integers(0, 3),
    shuffle=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_pass_has_every_prompt_and_a_completion_does_not_depend_on_the_process_that_samples_it(
    num_prompts, share, num_generations, world, number, shuffle
):
    # Every process makes its own.
    order, *own_orders = (
        PromptOrder(num_prompts, share * world, num_generations, order_seed=5, seed=6, shuffle=shuffle)
        for _ in range(world + 1)
    )
    per_pass = order.rollouts_per_pass
    assert (per_pass - 1) * share * world < num_prompts <= per_pass * share * world
    seen = set()
    for iteration in range(number * per_pass, (number + 1) * per_pass):
        alone, keys = order.rows(iteration, range(share * world * num_generations))
        # The same rows with the same keys, whichever process asks for them.
        parts = [own.rows(iteration, range(rank, len(keys), world)) for rank, own in enumerate(own_orders)]
        assert all((rows, own) == (alone[r::world], keys[r::world]) for r, (rows, own) in enumerate(parts))
        assert len(set(keys)) == len(keys) == share * world * num_generations
        assert all(key[:2] == (6, iteration) != (6, EVALUATION_STREAM) for key in keys)
        seen |= set(alone)
    assert seen == set(range(num_prompts))
