"""One storage for the weights of a trunk and of an engine that keeps some of its matrices together."""

import copy

import pytest
import torch
from torch import nn

from onetrunk.models.build import build_trunk
from onetrunk.rollouts.colocate import share_base
from tests.ppo.support import base_model, lora

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class FusedEngine(nn.Module):
    """Holds a model's weights as vLLM does: fused, padded to more tokens, and with `base_layer` in adapted names."""

    packed_modules_mapping = PACKED

    def __init__(self, model):
        super().__init__()
        weights = dict(copy.deepcopy(model).named_parameters())
        self.weights = {}
        for name, weight in list(weights.items()):
            *path, module, leaf = name.split(".")
            for whole, parts in PACKED.items():
                if module == parts[0]:
                    fused = torch.cat([weights.pop(".".join([*path, part, leaf])).data for part in parts])
                    self.weights[".".join([*path, whole, "base_layer", leaf])] = nn.Parameter(fused, False)
            if name in weights:
                padding = torch.zeros(7 * ("embed" in name), *weight.shape[1:])
                self.weights[name] = nn.Parameter(torch.cat([weight.data, padding]), False)

    def named_parameters(self):
        yield from self.weights.items()
        yield "model.layers.0.self_attn.qkv_proj.lora_a_stacked", torch.zeros(2, 2)

    def holds(self, tensor):
        spans = ((w.data_ptr(), w.data_ptr() + w.nbytes) for w in self.weights.values())
        return any(first <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= last for first, last in spans)


def base_weights(trunk):
    return {name: p for name, p in trunk.get_base_model().named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_becomes_a_view_of_the_engine_and_nothing_else_changes(family, tied):
    model = base_model(family, tie_word_embeddings=tied)
    engine, trunk = FusedEngine(model), build_trunk(model, lora())
    ids = torch.tensor([[3, 5, 7, 9]])
    before, num_bytes = trunk(input_ids=ids).logits, sum(w.nbytes for w in base_weights(trunk).values())
    assert share_base(trunk, engine) == (num_bytes, 0)
    assert all(engine.holds(weight) for weight in base_weights(trunk).values())
    assert not any(engine.holds(p) for p in trunk.parameters() if p.requires_grad)
    assert trunk(input_ids=ids).logits.equal(before)


def test_weights_in_another_layout_dtype_or_of_other_numbers_stay_two_copies():
    model = base_model()
    engine, trunk = FusedEngine(model), build_trunk(model, lora())
    layer = "model.layers.1.{}.base_layer.weight"
    engine.weights[layer.format("self_attn.qkv_proj")].data[-1, -1] += 1  # a number of v_proj
    gate_up = engine.weights[layer.format("mlp.gate_up_proj")]
    gate_up.data = gate_up.data.bfloat16()
    engine.weights["model.layers.1.mlp.down_proj.weight"].data = torch.empty(0)
    shared, num_apart = share_base(trunk, engine)
    lost = {name.split(".")[-3]: w for name, w in base_weights(trunk).items() if not engine.holds(w)}
    assert lost.keys() == {"v_proj", "gate_proj", "up_proj", "down_proj"}
    assert num_apart == sum(weight.nbytes for weight in lost.values())
    assert shared + num_apart == sum(weight.nbytes for weight in base_weights(trunk).values())
