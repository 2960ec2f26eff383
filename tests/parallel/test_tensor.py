"""A base divided by tensor parallelism gives what a whole one gives: outputs, gradients, samples, files."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from peft import get_peft_model

from onetrunk.parallel import sharding
from onetrunk.parallel.sharding import Layout, replicas_of_what_trains
from onetrunk.parallel.tensor import divide_frozen
from tests.models.branches import a_trunk, lora
from tests.parallel import tensor_worker
from tests.parallel.tensor_worker import CASES
from tests.places import found_by_ranks, places
from tests.tiny import tiny_model

FLOAT32 = [case for case in CASES if case not in ("float64", "bfloat16")]
pytestmark = pytest.mark.multi_process


def launch(folder, world_size, layout, cases, place):
    tensor_worker.prepare(folder)
    return found_by_ranks(tensor_worker.work, folder, world_size, world_size, layout, list(cases), place)


@cache
def launched(place):
    return launch(Path(mkdtemp()), 2, Layout(1, 1, tensor=2), CASES, place)


def two(case, place):
    """Return what each of two processes found in a case; all cases share a launch."""
    return [rank[case] for rank in launched(place)]


@pytest.fixture(scope="module", params=places(4))
def four(request, tmp_path_factory):
    # Four processes cannot divide two key-value heads: two groups of two.
    cases = ["float64", "adapter, top-2"]
    return launch(tmp_path_factory.mktemp("tp2dp2"), 4, Layout(1, 2, tensor=2), cases, request.param)


@pytest.mark.slow
@pytest.mark.parametrize("place", places(2))
def test_in_float64_a_divided_base_computes_what_a_whole_one_does(place):
    for found in two("float64", place):
        assert found["output"] < 1e-12
        # The value head and its gradient are float32.
        assert found["gradients"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", FLOAT32)
@pytest.mark.parametrize("place", places(2))
def test_outputs_and_gradients_are_those_of_a_whole_base(case, place):
    for found in two(case, place):
        # Sums in another order, relative to the largest entry of each tensor.
        assert found["output"] < 5e-5
        assert found["gradients"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("place", places(2))
def test_in_bfloat16_a_divided_base_is_as_close_to_float32_as_a_whole_one(place):
    for found in two("bfloat16", place):
        divided, whole = found["errors"]
        assert divided < 1.5 * whole


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_each_process_holds_its_share_of_every_matrix_and_all_that_trains(case, place):
    for found in two(case, place):
        assert found["is_divided"] and ["DTensor", True] not in found["kinds"]
        assert ["DTensor", False] in found["kinds"] and ["Parameter", True] in found["kinds"]
        assert found["local"] - found["whole_matrices"] == pytest.approx(found["matrices"] / 2, rel=0.02)
        # No view keeps a whole matrix in memory.
        assert found["stored"] == found["local"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_all_processes_of_a_group_sample_what_a_whole_base_samples(case, place):
    assert all(found["completions"] for found in two(case, place))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", places(2))
def test_saved_files_and_the_identity_of_the_base_are_those_of_a_whole_base(case, place):
    for found in two(case, place):
        assert found["saved"] and found["identity"]
        assert {"adapter_model.safetensors", "value_head.safetensors", "base_model.json"} <= set(found["files"])


@pytest.mark.slow
@pytest.mark.parametrize("place", places(2))
def test_no_forward_or_backward_gathers_a_matrix(place):
    """Two forwards with three roles."""
    assert not any(name.startswith("all_gather") for name in two("shared", place)[0]["collectives"])


@pytest.mark.slow
@pytest.mark.parametrize("place", places(2))
def test_projections_that_a_layer_splits_inside_are_gathered(place):
    assert two("gathered projections", place)[0]["collectives"]["all_gather_single"] > 0


@pytest.mark.slow
def test_two_groups_of_two_give_the_gradients_of_both_halves_of_the_rows(four):
    for rank in four:
        assert "over 2 processes, 2 copies" in rank["float64"]["line"]
        assert rank["float64"]["output"] < 1e-12 and rank["float64"]["gradients"] < 1e-6
        found = rank["adapter, top-2"]
        assert found["output"] < 5e-5 and found["gradients"] < 1e-4 and found["completions"]


# --- what is rejected ---


def divided(trunk, size=2):
    return divide_frozen(trunk, Layout(1, 1, tensor=size), torch.device("cpu"))


@pytest.mark.parametrize(
    ("build", "size", "message"),
    [
        (lambda: a_trunk("gpt2"), 2, "not supported for GPT2LMHeadModel: transformers has no plan.*fsdp2.yaml"),
        (lambda: a_trunk(config=lora(use_dora=True)), 2, "DoRA needs the norms of whole matrices"),
        (a_trunk, 4, "num_key_value_heads 2, which 4 processes cannot divide; set parallelism_config_tp_size"),
        (a_trunk, 3, "num_attention_heads 4, which 3 processes cannot divide"),
    ],
)
def test_a_model_that_cannot_be_divided_is_rejected_with_what_to_do(build, size, message):
    with pytest.raises(ValueError, match=message):
        divided(build(), size)


def test_a_model_whose_weights_all_train_is_rejected():
    with pytest.raises(ValueError, match="all weights of this model train; set use_peft: true"):
        divided(tiny_model("llama"))


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, {}, "divides lm_head, and it trains; train adapters only"),
        ({"trainable_token_indices": {"embed_tokens": [5]}}, {}, "divides model.embed_tokens, and it trains"),
        ({"lora_dropout": 0.1}, {}, r"not supported with dropout \(model.layers.0.*lora_dropout.default\)"),
        ({}, {"attention_dropout": 0.1}, r"not supported with dropout \(model.layers.0.self_attn.attention_dropout\)"),
    ],
)
def test_what_would_not_be_alike_on_the_processes_of_a_group_is_rejected(changes, settings, message):
    model = get_peft_model(tiny_model("llama", **settings), lora(task_type="CAUSAL_LM", **changes))
    with pytest.raises(ValueError, match=message):
        divided(model)


def test_accelerate_wraps_a_divided_base_in_ddp_where_it_would_reject_it():
    trunk = a_trunk()
    rejects = sharding.accelerate.accelerator.model_has_dtensor
    with replicas_of_what_trains(trunk):
        assert sharding.accelerate.accelerator.model_has_dtensor is rejects
    sharding.mark_divided(trunk.get_base_model())
    with replicas_of_what_trains(trunk):
        assert not sharding.accelerate.accelerator.model_has_dtensor(trunk)
    assert sharding.accelerate.accelerator.model_has_dtensor is rejects
