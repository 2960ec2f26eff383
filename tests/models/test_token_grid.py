"""Rows in one sequence and narrow blocks: the numbers of padded rows, and proofs that find models that mix rows."""

import functools
import threading

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_attention
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from onetrunk.models.base_model import backbone, decoder_layers, load_base
from onetrunk.models.build import attach_score_adapter
from onetrunk.models.reward_model import read_score_adapter
from onetrunk.models.speedups.merged import can_merge
from onetrunk.models.speedups.token_grid import TokenGrid, known_masks, narrow_blocks, packing_obstacle
from onetrunk.ops.packing import make_pack
from onetrunk.rollouts import LocalBackend, SamplingParams
from onetrunk.types import to_device
from tests.models.branches import ALL_ROLES, COMPLETIONS, FEW, PROMPTS, a_pack, a_trunk, lora, same, step_gradients
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.rollouts.small import KEYS, assert_same, tiny
from tests.rollouts.small import PROMPTS as SAMPLED
from tests.tiny import tiny_model

# Relative norm of a difference: sums in another order. Float32 weights are drawn wide, which enlarges the rounding.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
NUM_TOKENS = sum(map(len, PROMPTS + COMPLETIONS))


def difference(found, expected):
    """Return the norm of the difference of two sets of tensors, relative to that of the second."""
    assert found.keys() == expected.keys() and expected
    squares = [((found[n] - t).double().square().sum(), t.double().square().sum()) for n, t in expected.items()]
    return (sum(a for a, _ in squares) / sum(b for _, b in squares)).sqrt().item()


def step(trunk, padding_free):
    """Return outputs by name, and gradients, of a step with padding or without."""
    trunk.train()
    if padding_free:
        trunk.use_padding_free()
    shapes = []
    backbone(trunk).register_forward_pre_hook(
        lambda _module, _args, given: shapes.append(list(given["input_ids"].shape)), with_kwargs=True
    )
    output, gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert all(shape == [1, NUM_TOKENS] for shape in shapes) == padding_free
    return {n: t.detach() for n, t in output._asdict().items() if t is not None}, gradients


def check(build, dtype=torch.float32):
    padded, padded_gradients = step(build(), padding_free=False)
    packed, packed_gradients = step(build(), padding_free=True)
    for name, expected in padded.items():
        assert packed[name].shape == expected.shape and packed[name].dtype == expected.dtype
        assert difference({name: packed[name]}, {name: expected}) <= TOLERANCE[dtype], name
    assert difference(packed_gradients, padded_gradients) <= TOLERANCE[dtype]
    assert {"logprobs", "entropy", "values", "next_values", "ref_logprobs"} <= set(padded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FEW)
def test_rows_in_one_sequence_give_the_outputs_and_gradients_of_padded_rows(family, dtype):
    check(functools.partial(a_trunk, family, dtype=dtype), dtype)


@pytest.mark.parametrize(
    "settings", [{"adapter_layers": "top-2"}, {"adapter_layers": "top-3"}, {"config": lora(use_dora=True)}]
)
def test_cuts_and_variants_of_lora_do_not_see_the_difference(settings):
    check(functools.partial(a_trunk, "gemma3", dtype=torch.float64, **settings), torch.float64)


def test_kept_states_give_the_bits_of_a_whole_forward():
    trunk = a_trunk("llama", adapter_layers="top-2").train()
    trunk.use_padding_free()
    whole, whole_gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    states = trunk(pack=a_pack(), roles=("trunk",)).states
    assert list(states.shape) == [NUM_TOKENS, 32] and same(states, whole.states)
    kept, gradients = step_gradients(trunk, a_pack(), roles=ALL_ROLES, states=states)
    assert same(kept, whole) and same(gradients, whole_gradients)


def test_a_reward_adapter_scores_the_same(tmp_path):
    base = saved_base(tmp_path / "base")
    adapter = read_score_adapter(str(saved_reward_adapter(tmp_path / "reward", base, layers=[2, 3])))
    scores = []
    for padding_free in (False, True):
        trunk = a_trunk(base=load_base(base), adapter_layers="top-2").eval()
        attach_score_adapter(trunk, adapter)
        assert trunk.reward_branch.from_states
        if padding_free:
            trunk.use_padding_free()
        scores.append(trunk(pack=a_pack(), roles=("policy", "reward")).scores)
    assert scores[0].std() > 0
    torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FEW)
def test_in_bfloat16_the_policy_scores_itself_with_a_ratio_of_exactly_one(family):
    trunk = a_trunk(family, dtype=torch.bfloat16)
    trunk.use_padding_free()
    with torch.no_grad():
        old = trunk.eval()(pack=a_pack(), roles=("policy", "value", "reference"))
    new = trunk.train()(pack=a_pack())
    assert same(new.logprobs.detach(), old.logprobs) and same(new.values.detach(), old.values)


# --- the grid -------------------------------------------------------------------------------------------------------


def test_the_grid_by_hand():
    # Two rows of 2 + 1 and 1 + 4 tokens; padding is 9.
    pack = make_pack([[1, 2], [3]], [[4], [5, 6, 7, 8]], pad_id=9)
    padded, packed = TokenGrid.padded(pack), TokenGrid.in_one_sequence(pack, is_flash=True)
    assert padded.input_ids.tolist() == [[1, 2, 4, 9, 9], [3, 5, 6, 7, 8]] and padded.arguments == {}
    assert padded.first.tolist() == [0, 5] and padded.real.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    assert packed.input_ids.tolist() == [[1, 2, 4, 3, 5, 6, 7, 8]]
    assert packed.first.tolist() == [0, 3] and packed.real is None
    # Read from the last prompt token on: tokens 2 and 4 of the first row, all of the second.
    assert padded.read.tolist() == [1, 2, 5, 6, 7, 8, 9] and packed.read.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert padded.num_tokens == packed.num_tokens == 8
    arguments = {k: v.tolist() if torch.is_tensor(v) else v for k, v in packed.arguments.items()}
    assert arguments == {
        "position_ids": [[0, 1, 2, 0, 1, 2, 3, 4]],
        "cu_seq_lens_q": [0, 3, 8],
        "cu_seq_lens_k": [0, 3, 8],
        "max_length_q": 5,
        "max_length_k": 5,
    }
    assert packed.arguments["cu_seq_lens_q"].dtype == torch.int32
    assert set(TokenGrid.in_one_sequence(pack, is_flash=False).arguments) == {"position_ids"}


# --- flash attention ------------------------------------------------------------------------------------------------


class VarlenReference:
    """flash_attn_varlen_func in plain torch: it computes each sequence alone, and notes the borders that it got."""

    def __init__(self):
        self.borders = []

    def __call__(self, q, k, v, cu_seqlens_q, cu_seqlens_k, **kwargs):
        assert torch.equal(cu_seqlens_q, cu_seqlens_k) and kwargs["causal"]
        self.borders.append(cu_seqlens_q.tolist())
        lengths = cu_seqlens_q.diff()
        assert kwargs["max_seqlen_q"] == kwargs["max_seqlen_k"] >= lengths.max()
        rows = [part.split(lengths.tolist()) for part in (q, k, v)]
        return torch.cat([self.attend(*row, **kwargs) for row in zip(*rows, strict=True)])

    @staticmethod
    def attend(q, k, v, softmax_scale=None, window_size=(-1, -1), softcap=None, **kwargs):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        logits = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        ages = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = (ages >= 0) & (ages <= (window_size[0] if window_size[0] >= 0 else q.shape[1]))
        return (F.softmax(logits.masked_fill(~seen, -torch.inf), -1) @ v).transpose(0, 1)


def unequal_lengths_only(*args, **kwargs):
    raise AssertionError("rows in one sequence must take the kernel for sequences of various lengths")


@pytest.fixture
def varlen(monkeypatch):
    """Let transformers' own code for flash attention run on the CPU, with a plain kernel."""
    kernel = VarlenReference()
    names = "dropout_p window_size deterministic softcap s_aux learnable_sink block_table page_table cache_seqlens"
    supported = dict.fromkeys((*names.split(), "max_seqlen_q", "max_seqlen_k"), True)
    arguments = functools.partial(flash_attention._process_flash_attention_kwargs, supports_mapping=supported)
    functions = (unequal_lengths_only, kernel, None, None, None)
    monkeypatch.setattr(flash_attention, "lazy_import_flash_attention", lambda *_: (functions, (arguments, None)))
    return kernel


@pytest.mark.parametrize("family", FEW)
def test_flash_attention_gets_the_borders_of_the_rows_in_every_layer(family, varlen):
    padded, padded_gradients = step(a_trunk(family, dtype=torch.float64), padding_free=False)
    trunk = a_trunk(family, dtype=torch.float64)
    trunk.get_base_model().config._attn_implementation = "flash_attention_2"
    packed, gradients = step(trunk, padding_free=True)
    # Rows of 16, 5, 8 and 6 tokens; after the three forwards of the proof, four layers for policy and reference.
    assert varlen.borders[12:] == [[0, 16, 21, 29, 35]] * 8
    assert varlen.borders[:12] == [[0, 11]] * 4 + [[0, 13, 16, 27]] * 8
    # With soft-capping padded rows run eager attention, whose softmax is in float32.
    tolerance = 1e-5 if family == "gemma2" else 1e-12
    assert difference(packed, padded) <= tolerance and difference(gradients, padded_gradients) <= tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_flash_attention_on_a_gpu_gives_what_sdpa_gives_for_padded_rows(family, tmp_path):
    pytest.importorskip("flash_attn")
    tiny_model(family, hidden_size=64, head_dim=16, intermediate_size=128).save_pretrained(tmp_path)
    results = []
    for attention, padding_free in (("sdpa", False), ("flash_attention_2", True)):
        base = load_base(tmp_path, dtype="bfloat16", attn_implementation=attention)
        trunk = a_trunk(base=base, dtype=torch.bfloat16).to("cuda")
        if padding_free:
            trunk.use_padding_free()
        pack = to_device(make_pack(PROMPTS, COMPLETIONS, 0), "cuda")
        results.append(trunk(pack=pack, roles=("policy",)).logprobs)
    # bfloat16 has 8 bits, and the weights are drawn wide.
    assert (results[0] - results[1]).abs().mean() < 0.05


# --- models in which rows do not stay apart -------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
LAYERS = {"num_key_value_heads": 2, "intermediate_size": 64, **SMALL}
# Decoders that look at no positions (ALiBi, gpt-oss in transformers 5.23), or carry a state from token to token.
MIXING = {
    "mpt": {"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, **SMALL},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **LAYERS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, **LAYERS},
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_in_which_a_row_sees_others_is_found_out(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MIXING[name])).to(torch.bfloat16).eval()
    obstacle = packing_obstacle(model)
    assert obstacle.startswith("a row sees the rows before it in the sequence (its states change by ")
    assert ("its layers of the type conv pass a state" in obstacle) == (name == "lfm2")


def test_a_model_whose_positions_do_not_restart_is_found_out():
    model = tiny_model("gpt2")
    embedding = model.transformer.wpe
    embedding.register_forward_pre_hook(lambda _module, args: torch.arange(args[0].shape[1])[None])
    assert "so its positions do not count from 0" in packing_obstacle(model)


def block_tokens(trunk, number):
    """Return a list that grows with the tokens of each forward of one layer's feed-forward block."""
    tokens, layer = [], decoder_layers(trunk.get_base_model())[number]
    # Behind the hook that narrows.
    layer.mlp.register_forward_pre_hook(lambda _module, args: tokens.append(args[0].shape[:-1].numel()))
    return tokens


@pytest.mark.parametrize(("family", "layers"), [("llama", "top-2"), ("gemma2", "all"), ("gpt2", "all")])
def test_the_uppermost_block_runs_where_it_is_read_and_no_block_on_padding(family, layers):
    """That outputs and gradients are those of the plain model, test_trunk.py shows."""
    trunk = a_trunk(family, adapter_layers=layers).train()
    lowest, uppermost = block_tokens(trunk, 0), block_tokens(trunk, -1)
    step_gradients(trunk, a_pack(), roles=ALL_ROLES)
    assert set(uppermost) == {sum(len(c) + 1 for c in COMPLETIONS)} and set(lowest) == {NUM_TOKENS}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prefill_runs_the_prompts_alone_and_samples_the_same(family):
    trunk = a_trunk(family, base=tiny(family))
    params = SamplingParams(max_completion_length=8, stop_token_ids=tuple(range(8, 14)))
    can_merge(trunk)  # Its proof, made once, is a forward too.
    lowest, uppermost = block_tokens(trunk, 0), block_tokens(trunk, -1)
    rollout = LocalBackend(trunk).generate(SAMPLED, params, KEYS)
    assert lowest[0] == sum(map(len, SAMPLED)) and uppermost[0] == len(SAMPLED)
    trunk.narrow.detach()
    assert_same(rollout, LocalBackend(trunk).generate(SAMPLED, params, KEYS))


class Mixing(nn.Module):
    """A block that looks at its neighbours."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        return self.block(hidden) + hidden.roll(1, dims=1)


def test_a_block_that_mixes_positions_is_found_out_and_runs_everywhere():
    model = tiny_model("llama")
    whole = model(a_pack().input_ids).logits
    assert narrow_blocks(model).handles
    layer = decoder_layers(model)[1]
    layer.mlp = Mixing(layer.mlp)
    assert not narrow_blocks(model).handles
    assert not torch.equal(model(a_pack().input_ids).logits, whole)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_masks_that_are_known_are_those_that_transformers_finds(family):
    ids, ones = torch.arange(5, 29).view(2, 12), torch.ones(2, 12).long()
    model = functools.partial(tiny_model(family), input_ids=ids, use_cache=False)
    padded = ones.clone()
    padded[1, :4] = 0
    packed = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    cases = (
        ("is_packed", True, {"position_ids": packed}),
        ("is_packed", False, {}),
        ("is_padded", True, {"attention_mask": padded}),
        ("is_padded", False, {"attention_mask": ones}),
    )
    for name, is_so, inputs in cases:
        expected = model(**inputs).logits
        with known_masks(**{name: is_so}):
            assert model(**inputs).logits.equal(expected)
        if inputs:  # What is said is not looked at.
            with known_masks(**{name: False}):
                assert model(**inputs).logits.equal(expected) != is_so


def mask_functions():
    return masking_utils.find_packed_sequence_indices, masking_utils._ignore_causal_mask_sdpa


def test_the_functions_of_transformers_are_replaced_inside_blocks_only_nested_ones_and_those_of_other_threads_too():
    originals, inside, may_leave = mask_functions(), threading.Event(), threading.Event()

    def work():
        with known_masks(is_padded=False):
            inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=work)
    with pytest.raises(KeyError), known_masks(is_packed=False):
        with known_masks(is_padded=False):
            assert mask_functions() != originals
        assert mask_functions() != originals
        thread.start()
        assert inside.wait(60)
        raise KeyError
    # The other thread's block goes on; what it says does not hold here.
    assert mask_functions() != originals
    assert masking_utils.find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1]])) is not None
    may_leave.set()
    thread.join()
    assert mask_functions() == originals
