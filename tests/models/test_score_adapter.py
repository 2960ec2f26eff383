"""A reward adapter on the trunk scores as on a model of its own, from kept states if it may, and changes nothing."""

import json
from contextlib import contextmanager

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from onetrunk.models.adapters import REWARD, adapter_parameters, role
from onetrunk.models.base_model import decoder_layers
from onetrunk.models.build import attach_score_adapter
from onetrunk.models.loading import base_fingerprint
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.packing import make_pack
from tests.models.branches import ALL_ROLES, a_pack, a_trunk, counted, lora, move, same, step_gradients, weights_of
from tests.models.reward_adapters import a_reward_trunk, saved_base, saved_reward_adapter, scores_of_a_separate_model
from tests.tiny import FAMILIES, tiny_model

# For Granite and Cohere transformers has no sequence classification.
SCORERS = [family for family in FAMILIES if family not in ("granite", "cohere")]
WITH_REWARD = (*ALL_ROLES, "reward")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """base(family) and adapter(family, first layer) -> folders, each made once."""
    made = {}

    def place(family="llama", first=None, **settings):
        key = (family, first, *sorted(settings.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("place")
            if first is None:
                made[key] = saved_base(folder, family)
            else:
                layers = list(range(first, 4)) if first else None
                made[key] = saved_reward_adapter(folder, place(family), layers=layers, **settings)
        return made[key]

    return place


@torch.no_grad()
def scores(trunk, pack=None, **arguments):
    return trunk(pack=pack or a_pack(), roles=("reward",), **arguments).scores


@pytest.mark.sampled(6)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("family", SCORERS)
def test_scores_are_those_of_the_same_adapter_on_a_separate_model(family, first, places):
    base, folder = places(family), places(family, first)
    trunk = a_reward_trunk(family, base, folder, adapter_layers="top-2", value_head="adapter")
    expected = scores_of_a_separate_model(folder, base, a_pack())
    output = trunk.eval()(pack=a_pack(), roles=WITH_REWARD)
    assert trunk.reward_branch.from_states == (first == 2)
    # Rows in a pack and rows alone: float32 rounds otherwise.
    torch.testing.assert_close(output.scores, expected, atol=1e-5, rtol=1e-5)
    assert output.scores.dtype == torch.float32 and output.scores.std() > 1e-2
    without = a_trunk(family, adapter_layers="top-2", value_head="adapter").eval()(pack=a_pack(), roles=ALL_ROLES)
    assert same(output._replace(scores=None), without)


@pytest.mark.parametrize("first", [2, 3])
def test_scores_from_kept_states_are_those_of_a_whole_run_to_the_bit(first, places):
    trunk = a_reward_trunk("llama", places(), places("llama", first), adapter_layers="top-2")
    states = trunk(pack=a_pack(), roles=("trunk",)).states
    with counted(decoder_layers(trunk.get_base_model())) as counts:
        kept = scores(trunk, states=states)
    assert counts == [0, 0, 1, 1]
    assert same(kept, scores(trunk))
    cut, trunk.cut = trunk.cut, 0
    assert same(kept, scores(trunk)) and cut == 2


def test_an_adapter_below_the_cut_runs_whole_whatever_the_states(places):
    trunk = a_reward_trunk("llama", places(), places("llama", 1), adapter_layers="top-2")
    assert trunk.reward_branch.obstacle == "it changes layer 1 and the cut is at 2"
    states = trunk(pack=a_pack(), roles=("trunk",)).states
    with counted(decoder_layers(trunk.get_base_model())) as counts:
        given = scores(trunk, states=torch.zeros_like(states))
        alone = scores(trunk)
    assert counts == [2, 2, 2, 2] and same(given, alone)
    torch.testing.assert_close(given, scores_of_a_separate_model(places("llama", 1), places(), a_pack()))


def test_under_a_continued_policy_it_runs_whole_with_its_own_adapter_alone(places):
    model = get_peft_model(tiny_model("llama"), lora(task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    trunk = TrunkModel.from_adapter(model, adapter_layers="top-2")
    attach_score_adapter(trunk, read_score_adapter(str(places("llama", 2))))
    assert "the policy continues an adapter" in trunk.reward_branch.obstacle
    expected = scores_of_a_separate_model(places("llama", 2), places(), a_pack())
    together = trunk(pack=a_pack(), roles=WITH_REWARD).scores
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
    assert same(together, scores(trunk))


@pytest.mark.parametrize("pad_token_id", [0, 1, None])
def test_the_score_is_read_at_the_last_token_that_is_not_the_pad_token(pad_token_id, places):
    """Rows that end with 1: where it pads too, the model was trained to read the token before."""
    pack = make_pack([[4, 5, 6], [7, 8], [9, 1]], [[10, 11, 1], [12, 13], [1]], 0)
    trunk = a_reward_trunk("llama", places(), places("llama", 2), pad_token_id, adapter_layers="top-2")
    expected = scores_of_a_separate_model(places("llama", 2), places(), pack, pad_token_id)
    torch.testing.assert_close(scores(trunk, pack), expected, atol=1e-5, rtol=1e-5)
    assert trunk.reward_branch.last_tokens(pack).tolist() == {1: [4, 3, 0]}.get(pad_token_id, [5, 3, 2])


@contextmanager
def unchanged(trunk):
    """Flags and active adapters are after the block what they were before it."""

    def look():
        flags = {n: p.requires_grad for n, p in trunk.named_parameters()}
        active = [(layer.active_adapters, layer.disable_adapters) for layer in trunk.tuner_layers]
        return flags, active, trunk._role

    before = look()
    yield
    assert look() == before


@pytest.mark.parametrize("settings", [{}, {"adapter_layers": "top-2", "value_head": "adapter"}])
def test_attaching_and_scoring_leave_flags_branches_and_gradients_as_they_were(settings, places):
    plain, trunk = a_trunk(**settings), a_trunk(**settings)
    flags = {n: p.requires_grad for n, p in trunk.named_parameters()}
    attach_score_adapter(trunk, read_score_adapter(str(places("llama", 0))))
    now = {n.replace(".base_layer.", "."): p.requires_grad for n, p in trunk.named_parameters()}
    assert {n.replace(".base_layer.", "."): flag for n, flag in flags.items()}.items() <= now.items()
    assert not any(p.requires_grad for p in adapter_parameters(trunk, REWARD).values())
    assert not any(p.requires_grad for p in trunk.reward_branch.parameters())
    for adapter in (None, "default", REWARD):
        with role(trunk, adapter), unchanged(trunk):
            scores(trunk)
    with unchanged(trunk), pytest.raises(ZeroDivisionError), trunk.as_role("reward"):
        raise ZeroDivisionError
    assert same(weights_of(plain), weights_of(trunk))
    trunk.train()
    expected, expected_gradients = step_gradients(plain.train(), a_pack(), roles=ALL_ROLES)
    output, gradients = step_gradients(trunk, a_pack(), roles=WITH_REWARD)
    assert same(output._replace(scores=None), expected) and same(gradients, expected_gradients)
    assert not output.scores.requires_grad
    assert base_fingerprint(plain.get_base_model()) == base_fingerprint(trunk.get_base_model())


def test_a_saved_policy_holds_no_reward_adapter_and_loads_into_a_trunk_with_one(places, tmp_path):
    trunk = a_reward_trunk("llama", places(), places("llama", 2), value_head="adapter", adapter_layers="top-2")
    plain = a_trunk(value_head="adapter", adapter_layers="top-2")
    trunk.save_pretrained(tmp_path / "with")
    plain.save_pretrained(tmp_path / "without")
    files = [sorted(str(f.relative_to(d)) for f in d.rglob("*")) for d in (tmp_path / "with", tmp_path / "without")]
    assert files[0] == files[1] and not any("reward" in name for name in files[0])
    for name in (n for n in files[0] if n.endswith(".safetensors")):
        assert same(load_file(tmp_path / "with" / name), load_file(tmp_path / "without" / name))
    assert "score" not in json.loads((tmp_path / "with" / "adapter_config.json").read_text())["target_modules"]
    expected = scores(trunk)
    move(trunk, seed=9)
    trunk.load_branches(tmp_path / "without")
    assert same(trunk(pack=a_pack(), roles=WITH_REWARD)._replace(scores=None), plain(pack=a_pack(), roles=ALL_ROLES))
    assert same(scores(trunk), expected)


def edited(source, target, change):
    """Copy an adapter's folder, with the config and the tensors that `change` leaves of it."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    change(config, tensors)
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, target / "adapter_model.safetensors")
    return str(target)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c, t: c.update(task_type="CAUSAL_LM"), "has the task_type CAUSAL_LM, so no score head; give one"),
        (lambda c, t: t.pop("base_model.model.score.weight"), r"has no score head \(a tensor base_model.model.score"),
        (lambda c, t: c.update(bias="all"), "can't be a branch of the trunk: peft_config.bias='all'"),
        (
            lambda c, t: c.update(modules_to_save=["score", "norm"]),
            "can't be a branch of the trunk: .*modules_to_save",
        ),
        (lambda c, t: c.update(init_lora_weights="pissa"), "can't be a branch of the trunk: .*'pissa' starts"),
        (
            lambda c, t: t.update({"base_model.model.model.norm.weight": torch.ones(32)}),
            "has 1 tensors besides LoRA on the layers and its head, the first is base_model.model.model.norm",
        ),
        (lambda c, t: c.update(base_model_name_or_path="/nowhere"), "names its base model"),
    ],
)
def test_what_is_no_reward_adapter_for_a_trunk_is_refused_with_a_sentence(change, sentence, places, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        read_score_adapter(edited(places("llama", 2), tmp_path / "edited", change))


def test_other_kinds_of_adapters_and_several_labels_are_refused(places, tmp_path):
    two = saved_reward_adapter(tmp_path / "two", places(), num_labels=2)
    with pytest.raises(ValueError, match="has 2 labels; expected 1, a score"):
        read_score_adapter(str(two))
    # It is a LoraConfig by its class.
    model = AutoModelForSequenceClassification.from_pretrained(places(), num_labels=1)
    config = AdaLoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], total_step=9, tinit=1, tfinal=1, deltaT=1)
    get_peft_model(model, config).save_pretrained(tmp_path / "ada")
    with pytest.raises(ValueError, match=r"ada is of the kind ADALORA \(AdaLoraConfig\), and only LORA is supported"):
        read_score_adapter(str(tmp_path / "ada"))


def test_an_adapter_that_fits_another_trunk_is_refused(places, tmp_path):
    wide = saved_reward_adapter(tmp_path / "wide", saved_base(tmp_path / "base", hidden_size=64))
    with pytest.raises(ValueError, match="does not fit adapter 'reward' of this trunk"):
        attach_score_adapter(a_trunk(), read_score_adapter(str(wide)))
