"""A trunk in pipeline stages gives what one process gives: outputs, gradients of the PPO loss, the base's identity."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from onetrunk.models.base_model import decoder_layers
from onetrunk.ops.packing import make_pack
from onetrunk.parallel.staged import _Packs, _StageModule, drop_frozen
from tests.models.branches import COMPLETIONS, PROMPTS, a_pack, a_trunk, loss_of, same
from tests.parallel import cast_on_read_worker, staged_worker
from tests.places import CPU, found_by_ranks, places
from tests.tiny import tiny_model

pytestmark = [pytest.mark.multi_process, pytest.mark.timeout(1800)]
CASES = tuple(staged_worker.cases())
# By processes and stages: four stages of one layer, and two pipelines of two stages.
OTHERS = {(4, 4): ("top-2",), (4, 2): ("llama",)}


def launch(processes, stages, cases, place):
    folder = Path(mkdtemp())
    return found_by_ranks(staged_worker.work, folder, processes, processes, stages, list(cases), place)


launched = cache(launch)


def two(case, place):
    """Return what each of two processes found; all cases share a launch."""
    return [rank[case] for rank in launched(2, 2, CASES, place)]


def is_right(found, case):
    # bfloat16 rounds to 8 bits, and pads to another shape; the rest is float32 sums in another order.
    bound = 2e-2 if case == "bfloat16" else 1e-6
    return all(found[name] <= bound for name in ("output", "trained output", "gradients", "bare"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_two_stages_have_the_outputs_and_gradients_of_one_process(case, place):
    for stage, found in enumerate(two(case, place)):
        assert found["stage"] == stage
        assert is_right(found, case), found
        # Every stage computes the loss once per pack in each of two steps.
        packs = 1 if case == "one pack" else 5
        assert found["seen"] == 2 * list(range(packs))
        assert found["schedules"] == 2 * ["ScheduleGPipe" if packs < 2 else "Schedule1F1B"]
        assert found["identity"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "stages", "case"), [(*key, case) for key, names in OTHERS.items() for case in names]
)
def test_four_processes_are_one_pipeline_or_two(processes, stages, case):
    ranks = [rank[case] for rank in launched(processes, stages, OTHERS[processes, stages], CPU)]
    assert [found["stage"] for found in ranks] == [rank % stages for rank in range(processes)]
    assert all(is_right(found, case) for found in ranks), ranks
    assert all(found["schedules"] == 2 * ["Schedule1F1B"] for found in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "uneven"])
def test_a_process_holds_the_weights_of_its_own_layers_and_computes_their_gradients(case):
    ranks = two(case, CPU)
    layers = [found["layers"] for found in ranks]
    assert layers == ([[0, 1], [1, 4]] if case == "uneven" else [[0, 2], [2, 4]])
    for found in ranks:
        # Beside the layers the first has the embedding and the last the head, each of the same size.
        layer = (found["whole bytes"] - 2 * found["embedding bytes"]) / 4
        expected = layer * (found["layers"][1] - found["layers"][0]) + found["embedding bytes"]
        # The norm is on both.
        assert found["local bytes"] == pytest.approx(expected, rel=0.02)
        assert found["stored bytes"] == pytest.approx(found["local bytes"], rel=0.02)
        numbers = {int(name.split(".layers.")[1].split(".")[0]) for name in found["names alone"] if ".layers." in name}
        assert numbers == {i for i in range(*found["layers"]) if case != "uneven" or i >= 2}
        assert not any("value_head" in name for name in found["names alone"])
    assert "pipelined training: the base is divided into stages of" in ranks[0]["line"]


@pytest.mark.slow
def test_a_process_needs_the_memory_of_its_own_layers(tmp_path):
    base = tiny_model("mistral", **cast_on_read_worker.SHAPE).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    for found in found_by_ranks(staged_worker.work_on_memory, tmp_path, 2, str(tmp_path / "base")):
        print(found)
        # Private bytes above those before, in shares of the base in float32: half of it stays. While it loads and
        # trains there are also one layer or the embedding, whole (1/12 each), activations, adapters and gradients.
        assert 0.45 < found["stage"]["end"] < 0.6
        assert found["stage"]["peak"] < 0.75
        assert found["whole"]["end"] > 0.95 and found["whole"]["peak"] > 1.0


def one_stage(trunk, pack, loss_of):
    """Return the module of a stage that is the first and the last."""
    stage = SimpleNamespace(model=trunk, layers=range(4), is_first=True, is_last=True, device=torch.device(CPU))
    return _StageModule(stage, _Packs(stage, [pack], ("policy",), 0.5), loss_of)


def test_a_loss_of_ones_own_continues_the_forward_of_the_stages_before():
    trunk, pack = a_trunk(), a_pack()
    expected = loss_of(trunk(pack=pack, temperature=0.5))
    module = one_stage(trunk, pack, lambda _, model: loss_of(model(pack=pack, states=None, temperature=0.5)))
    assert module(torch.zeros(1)) == expected
    assert same(module.outputs[0]["logprobs"], trunk(pack=pack, temperature=0.5).logprobs.detach())


@pytest.mark.parametrize(
    ("keywords", "differs"),
    [
        ({"roles": ("value",)}, "here roles differs"),
        ({"temperature": 1.0}, "here temperature differs"),
        ({"entropy_grad": True}, "here entropy_grad differs"),
        ({"pack": a_pack(rows=slice(2))}, "here pack differs"),
    ],
)
def test_a_loss_that_asks_for_another_forward_is_refused(keywords, differs):
    module = one_stage(a_trunk(), a_pack(), lambda _, model: loss_of(model(**keywords)))
    with pytest.raises(ValueError, match=f"compute_loss must call the model on the experience's pack.*{differs}"):
        module(torch.zeros(1))


def test_a_layer_of_another_stage_keeps_its_adapters_also_frozen_ones():
    """A frozen adapter is the reference of a continued policy, and every process can save it."""
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules="all-linear"))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layer = decoder_layers(model)[0]
    drop_frozen(layer)
    sizes = {name: parameter.numel() for name, parameter in layer.named_parameters()}
    adapters = {name for name in sizes if ".lora_" in name}
    assert adapters and {name for name, size in sizes.items() if size} == adapters


def test_every_stage_knows_the_shapes_of_all_outputs_also_with_values_at_the_ends_of_turns():
    trunk, roles = a_trunk(), ("policy", "value", "reference")
    trunk.values_turn_ends = True
    turns = [[0, 0, -1, -1, 1, 1], [0, 0], [0, -1, 1, -1, -1, 2, 2], [0]]
    pack = make_pack(PROMPTS, COMPLETIONS, 0, 0, turns)
    output = {name: tensor for name, tensor in trunk(pack=pack, roles=roles)._asdict().items() if tensor is not None}
    shapes = _Packs(SimpleNamespace(model=trunk, hidden_size=32), [pack], roles, 1.0).shapes(0)
    assert {name: tuple(shape) for name, shape in shapes.items()} == {n: tuple(t.shape) for n, t in output.items()}
    assert shapes["value_states"][0] == pack.completion_mask.sum() + 3
