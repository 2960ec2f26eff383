"""Switching roles, the reference, what trains and what never does; and adapters that the trunk can't carry."""

import functools
from dataclasses import fields, replace

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn

from onetrunk.models.adapters import adapter_parameters, copy_adapter, layer_index, role
from onetrunk.models.base_model import backbone, output_head
from onetrunk.models.build import build_trunk
from onetrunk.models.trunk import TrunkModel
from onetrunk.ops.logprobs import fused_token_logprobs
from tests.models import branches
from tests.models.branches import a_pack, an_sft_model, base_weights, logits, lora, loss_of, move, same, weights_of
from tests.tiny import hybrid, moe, tiny_model

BOTH = ("policy", "reference")


@pytest.mark.parametrize("family", branches.FEW)
def test_the_reference_of_a_new_adapter_is_the_base_model_bit_for_bit(family):
    base, pack = tiny_model(family), a_pack()
    trunk = branches.a_trunk(family)
    with trunk.as_role("reference"):
        assert same(logits(trunk), logits(base))
    assert not torch.allclose(logits(trunk), logits(base), atol=0.1)
    hidden = backbone(base)(input_ids=pack.input_ids, attention_mask=pack.attention_mask).last_hidden_state
    head, found = output_head(base), trunk(pack=pack, roles=("reference",)).ref_logprobs
    rows, columns = pack.completion_mask.nonzero(as_tuple=True)
    states = hidden[rows, pack.prompt_lengths[rows] - 1 + columns].detach()
    frozen = replace(head, weight=head.weight.detach())
    expected, _ = fused_token_logprobs(states, frozen, pack.completion_ids[rows, columns])
    assert same(found[rows, columns], expected) and not found.requires_grad


@pytest.mark.parametrize(("family", "precision"), [("llama", "float32"), ("gpt2", "autocast"), ("gemma2", "bfloat16")])
def test_a_new_adapter_has_no_divergence_at_all(family, precision):
    base = tiny_model(family).to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
    trunk = TrunkModel(base, lora(), adapter_layers="top-2").train()
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16, enabled=precision == "autocast")
    with autocast():
        output = trunk(pack=a_pack(), roles=BOTH)
    assert output.logprobs.requires_grad and same(output.logprobs.detach(), output.ref_logprobs)
    move(trunk)
    with autocast():  # anew, as a trainer does for every forward: within one block it keeps the weights it has cast
        moved = trunk(pack=a_pack(), roles=BOTH)
    assert same(moved.ref_logprobs, output.ref_logprobs) and not same(moved.logprobs, output.logprobs)


@pytest.mark.parametrize("adapter_layers", ["all", "top-1"])
def test_the_reference_of_a_continued_adapter_is_a_frozen_copy_of_it(adapter_layers):
    sft = an_sft_model()
    sft_logits, base_logits = logits(sft), logits(tiny_model("llama"))
    assert not torch.allclose(sft_logits, base_logits, atol=0.1)
    trunk = build_trunk(sft, adapter_layers=adapter_layers).train()
    start = trunk(pack=a_pack(), roles=BOTH)
    assert same(start.logprobs.detach(), start.ref_logprobs)
    for name in BOTH:
        with trunk.as_role(name):
            assert same(logits(trunk), sft_logits)
    move(trunk)
    moved = trunk(pack=a_pack(), roles=BOTH)
    assert same(moved.ref_logprobs, start.ref_logprobs) and not same(moved.logprobs, start.logprobs)
    with role(trunk, None):
        assert same(logits(trunk), base_logits)


@pytest.mark.parametrize(("adapter_layers", "continued"), [("all", False), ("top-2", True)])
def test_only_the_policy_trains_and_the_base_never_moves(adapter_layers, continued):
    model = an_sft_model() if continued else tiny_model("llama")
    config = None if continued else lora()
    trunk = build_trunk(model, config, adapter_layers=adapter_layers).train()
    trained = {name for name, p in trunk.named_parameters() if p.requires_grad}
    cut = 2 if adapter_layers == "top-2" else 0
    assert trained == {n for n in adapter_parameters(trunk, "default") if layer_index(n, "layers") >= cut}
    assert len(trained) == 14 * (4 - cut) and trunk.cut == cut
    before, start = base_weights(trunk), weights_of(trunk)
    optimizer = torch.optim.Adam(trunk.parameters(), lr=0.05)
    for _ in range(3):
        loss_of(trunk(pack=a_pack())).backward()
        optimizer.step()
    assert same(before, base_weights(trunk))
    assert {n for n, p in weights_of(trunk).items() if not same(p, start[n])} == trained


def test_adapters_and_the_head_are_float32_over_a_bfloat16_base():
    model = an_sft_model().to(torch.bfloat16)
    for trunk in (build_trunk(tiny_model("llama").to(torch.bfloat16), lora()), build_trunk(model)):
        assert {p.dtype for n, p in trunk.named_parameters() if "lora_" in n or "value_head" in n} == {torch.float32}
        assert {p.dtype for p in base_weights(trunk).values()} == {torch.bfloat16}


def test_roles_change_no_flag_inside_or_after_the_block():
    trunk = build_trunk(an_sft_model(), adapter_layers="top-2")
    before, found = [p.requires_grad for p in trunk.parameters()], set()
    move(trunk)
    for block in (trunk.as_role("policy"), trunk.as_role("reference"), role(trunk, None)):
        with block:
            assert [p.requires_grad for p in trunk.parameters()] == before
            found.add(logits(trunk).sum().item())
        assert [p.requires_grad for p in trunk.parameters()] == before
    assert len(found) == 3


def test_an_adapter_is_told_from_a_module_of_the_same_name():
    # RWKV's and BERT's attention has a module named "value".
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.value, self.reference_proj, self.default = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    config = LoraConfig(r=2, target_modules=["value", "reference_proj", "default"], init_lora_weights=False)
    model = get_peft_model(nn.Sequential(Block()), config)
    copy_adapter(model, "default", "value")
    copy_adapter(model, "default", "reference")
    for name in ("default", "value", "reference"):
        found = adapter_parameters(model, name)
        assert len(found) == 6 and all(key.endswith(f".{name}.weight") for key in found)
        assert same([*found.values()][0], [*adapter_parameters(model, "default").values()][0])
        assert {p.requires_grad for p in found.values()} == {name == "default"}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (AdaLoraConfig(total_step=9), r"of the kind ADALORA \(AdaLoraConfig\), and only LORA is supported"),
        (lora(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\].* trunk must stay frozen"),
        (lora(bias="all"), "bias='all' trains biases of the frozen trunk; set bias='none'"),
        (lora(target_modules=["q_proj", "lm_head"]), r"contains \['lm_head'\]"),
        (lora(target_modules=r".*(q_proj|lm_head)"), "output head carries an adapter"),
        (lora(target_modules=r".*(q_proj|embed_tokens)"), "matches the embedding"),
        (lora(init_lora_weights="pissa"), "init_lora_weights='pissa'.*set it to True or 'gaussian'"),
        (lora(target_parameters=["lm_head.weight"]), "names 'lm_head.weight', not a parameter of the decoder"),
        (lora(target_parameters=["experts.up"]), "names 'experts.up', not a parameter of the decoder layers"),
    ],
)
def test_adapters_that_the_trunk_cannot_carry_are_refused(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        TrunkModel(tiny_model("llama"), config)


# Fields of PEFT's LoraConfig with a value other than the default, by what the trunk does with them.
SUPPORTED = {
    "r": 2,
    "target_modules": ["q_proj"],
    "exclude_modules": ["k_proj"],
    "lora_alpha": 3,
    "lora_dropout": 0.5,
    "fan_in_fan_out": True,
    "use_rslora": True,
    "init_lora_weights": "gaussian",
    "layers_to_transform": [1],
    "layers_pattern": "layers",
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "use_dora": True,
    "lora_bias": True,
    "target_parameters": ["mlp.up_proj.weight"],
}
REJECTED = {
    "bias": "lora_only",
    "modules_to_save": ["norm"],
    "megatron_config": {"a": 1},
    "trainable_token_indices": [3],
    "velora_config": {"a": 1},
    "alora_invocation_tokens": [3],
    "use_qalora": True,
    "monteclora_config": {"a": 1},
    "layer_replication": [(0, 2)],
    "use_bdlora": {"a": 1},
    "arrow_config": {"a": 1},
    "kasa_config": {"a": 1},
}
# They act with a field or a value that is rejected, or are notes of PEFT's.
WITHOUT_EFFECT = set(
    "megatron_core loftq_config eva_config corda_config lora_ga_config qalora_group_size runtime_config"
    " ensure_weight_tying task_type peft_type auto_mapping peft_version base_model_name_or_path revision"
    " inference_mode".split()
)


def test_every_field_of_lora_config_is_supported_or_rejected():
    assert {f.name for f in fields(LoraConfig)} == SUPPORTED.keys() | REJECTED.keys() | WITHOUT_EFFECT


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_with_a_supported_field_the_first_ratio_is_1_and_adapters_off_are_the_base(name):
    settings = {name: SUPPORTED[name]}
    if name in ("layers_pattern", "layers_to_transform", "target_parameters"):
        settings |= {"target_modules": ["q_proj"], "layers_to_transform": [1]}
    trunk = TrunkModel(tiny_model("llama"), lora(**settings))
    output = trunk(pack=a_pack(), roles=BOTH)
    assert torch.allclose(output.logprobs, output.ref_logprobs, atol=1e-6)
    move(trunk)
    with trunk.as_role("reference"):
        assert same(logits(trunk), logits(tiny_model("llama")))
    assert not torch.allclose(logits(trunk), logits(tiny_model("llama")), atol=0.01)


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_a_rejected_field_is_named(name):
    config = lora()
    setattr(config, name, REJECTED[name])
    with pytest.raises(ValueError, match=f"peft_config.{name}"):
        TrunkModel(tiny_model("llama"), config)


@pytest.mark.parametrize("layers", ["all", "top-1"])
def test_adapters_on_experts_keep_the_base_train_and_load_again(tmp_path, layers):
    pack, config = a_pack(), LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    trunk = TrunkModel(moe(), config, adapter_layers=layers)
    assert trunk.cut == (1 if layers == "top-1" else 0)
    output, gradients = branches.step_gradients(trunk, pack, roles=("policy", "value", "reference"))
    assert same(output.logprobs, output.ref_logprobs) and len(gradients) >= 4 * (2 - trunk.cut)
    move(trunk)
    with trunk.as_role("reference"):
        assert same(logits(trunk), logits(moe()))
    trunk.save_pretrained(tmp_path)
    expected = logits(trunk)
    assert not torch.allclose(expected, logits(moe()), atol=0.01)
    assert torch.allclose(logits(PeftModel.from_pretrained(moe(), tmp_path).eval()), expected, atol=1e-6)
    again = TrunkModel(moe(), config, adapter_layers=layers)
    again.load_branches(tmp_path)
    assert same(logits(again), expected)


@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1"])
def test_all_linear_leaves_out_what_peft_rejects_in_hybrid_models(family):
    trunk = build_trunk(hybrid(family))
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapter_parameters(trunk, "default")}
    assert {"in_proj", "q_proj", "o_proj"} <= adapted and "out_proj" not in adapted
    output = trunk(pack=a_pack(), roles=BOTH)
    assert same(output.logprobs, output.ref_logprobs)
