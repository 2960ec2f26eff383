"""Frozen layers run once per rollout: the same training to the bit, wherever the states stay."""

import pytest

from onetrunk.models.base_model import decoder_layers
from onetrunk.models.speedups.merged import can_merge
from onetrunk.ppo.trainer import PPOTrainer
from tests.fakes import CannedBackend
from tests.ppo.support import Recorder, assert_same, make_trainer, trained, trained_weights, without_wall_clock
from tests.tiny import tiny_model

TOP = {"adapter_layers": "top-1", "num_ppo_epochs": 3, "num_minibatches": 2, "num_rollouts": 2}
TOP |= {"capture_trunk_states": False}


def counted_layer(trainer: PPOTrainer, layer: int) -> list[int]:
    """Return a list that grows by the tokens of every forward of a decoder layer outside of sampling."""
    seen: list[int] = []

    def count(module, args, kwargs):
        if kwargs.get("past_key_values") is None:
            seen.append(args[0].shape[0] * args[0].shape[1])

    decoder_layers(trainer.model.get_base_model())[layer].register_forward_pre_hook(count, with_kwargs=True)
    return seen


def test_training_on_kept_states_is_training_without_them_to_the_bit(tmp_path):
    steps = {place: Recorder() for place in ("off", "cpu", "auto")}
    off, *runs = [trained(tmp_path / at, callbacks=[steps[at]], **TOP, trunk_cache=at) for at in steps]
    for place, kept in zip(("cpu", "auto"), runs, strict=True):
        for one, other in zip(steps[place].gradients, steps["off"].gradients, strict=True):
            assert_same(one, other)
        assert_same(trained_weights(kept.model), trained_weights(off.model))
        assert without_wall_clock(kept.state.log_history) == without_wall_clock(off.state.log_history)
    assert len(steps["off"].gradients) == 2 * 3 * 2


def test_the_lower_layers_run_once_a_rollout(tmp_path):
    tokens = {}
    for name, own in (("cpu", {}), ("off", {}), ("captured", {"trunk_cache": "auto", "capture_trunk_states": True})):
        settings = {**TOP, "trunk_cache": name, **own}
        trainer = make_trainer(tmp_path / name, check_memory=False, **settings)
        assert can_merge(trainer.model)  # The proof, made once, is a forward too.
        below, above = counted_layer(trainer, 0), counted_layer(trainer, 1)
        trainer.train()
        tokens[name] = (sum(below), sum(above))
    # Scoring runs the policy and the reference above the cut, an epoch the policy; below it one pass serves all.
    (below, above), (below_off, above_off) = tokens["cpu"], tokens["off"]
    assert above == above_off == 5 * below and below_off == 4 * below
    assert tokens["captured"] == (0, above)


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_a_place_without_anything_to_keep_is_refused(tmp_path, place):
    with pytest.raises(ValueError, match=f"trunk_cache '{place}' has nothing to keep: .* adapter_layers to top-k"):
        make_trainer(tmp_path, trunk_cache=place)


def test_the_plan_says_what_is_saved_and_what_it_costs(tmp_path):
    model = tiny_model("llama", num_hidden_layers=4)
    trainer = make_trainer(tmp_path, model=model, adapter_layers="top-1", max_completion_length=27)
    # 4 rows of the longest prompt (5 tokens and what the tokenizer adds) and 27 more, float32.
    longest = max(map(len, trainer.train_dataset["prompt_ids"]))
    num_bytes = 4 * (longest + 27) * model.config.hidden_size * 4
    assert f"{num_bytes / 2**20:,.1f} MiB of states in this machine's memory" in trainer.trunk_plan.report
    assert "the lower 3 of 4 layers" in trainer.trunk_plan.report
    assert "nothing to reuse" in make_trainer(tmp_path / "all").trunk_plan.report


@pytest.mark.parametrize(("family", "truncated"), [("gemma2", "bootstrap"), ("gpt2", "terminal")])
def test_states_captured_while_sampling_give_the_gradients_of_a_full_forward(tmp_path, family, truncated):
    recorders = Recorder(), Recorder()
    settings = {**TOP, "num_rollouts": 1, "truncated_completions": truncated, "max_rollout_rows": 3}
    for captures, recorder in zip((True, False), recorders, strict=True):
        settings["capture_trunk_states"] = captures
        trained(tmp_path / str(captures), model=family, callbacks=[recorder], **settings)
    # float32 rounds a token alone otherwise than within a row; Adam would turn that into steps of any size.
    assert_same(recorders[0].gradients[0], recorders[1].gradients[0], atol=1e-5, rtol=1e-5)


def test_float32_captures_by_itself_and_half_precision_does_not(tmp_path):
    top = {"adapter_layers": "top-1"}
    assert make_trainer(tmp_path, **top).sampler.keeps == "all but last"
    assert "computed while sampling" in make_trainer(tmp_path, **top).trunk_plan.report
    assert not make_trainer(tmp_path, bf16=True, **top).sampler.keeps
    assert not make_trainer(tmp_path, trunk_cache="off", **top).sampler.keeps
    assert make_trainer(tmp_path, truncated_completions="bootstrap", **top).sampler.keeps == "all"
    assert not make_trainer(tmp_path, rollout_backend=CannedBackend([[5, 1]]), **top).sampler.keeps
    assert not make_trainer(tmp_path).sampler.keeps
