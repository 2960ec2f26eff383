"""Finite weights, the file to blame for an error, and how a base is recognised again."""

import contextlib
import json
import shutil
import socket
import threading
from functools import partial

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from onetrunk import cli
from onetrunk.judges.local import load_causal_judge
from onetrunk.models import loading
from onetrunk.models.base_model import load_base, verify_head
from onetrunk.models.build import attach_score_adapter, build_trunk
from onetrunk.models.loading import LoadError, base_fingerprint, check_base_marks, write_base_marks
from onetrunk.models.reward_model import load_adapter_scorer, load_scorer, read_score_adapter
from onetrunk.models.value_model import load_value_model
from onetrunk.ppo.setup import policy_tokenizer
from onetrunk.rewards import ProcessReward
from tests.models.branches import FEW, lora
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("load", [load_scorer, partial(ProcessReward, policy_tokenizer=tiny_tokenizer())])
def test_a_missing_name_without_a_network_is_asked_for_once(monkeypatch, load):
    asked = []

    def hang_up(listening):
        with contextlib.suppress(OSError):
            while True:
                asked.append(listening.accept()[0].close())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=hang_up, args=[listening], daemon=True).start()
        hub = f"http://127.0.0.1:{listening.getsockname()[1]}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(LoadError, match="there is no folder nofolder in .*, and the Hub cannot be reached"):
            load("nofolder")
    assert len(asked) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_stands(dtype, value):
    for place in (0, 500, 999):
        tensor = torch.linspace(-1, 1, 1000).to(dtype)
        assert loading.is_finite(tensor)
        tensor[place] = value
        assert not loading.is_finite(tensor)


def test_a_model_made_in_memory_with_nan_is_not_said_to_have_another_head():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[1, 2] = float("nan")
        model.model.norm.weight[0] = float("inf")
    expected = r"1 of 2048 values of model\.layers\.2\.mlp\.down_proj\.weight \(torch\.float32\), and 1 more tensors"
    with pytest.raises(RuntimeError, match=expected):
        verify_head(model)
    with pytest.raises(RuntimeError, match="'Linear' has weights that are NaN or infinite: 4 of 4 values of weight"):
        layer = nn.Linear(2, 2)
        loading.check_finite(layer.requires_grad_(False).apply(lambda m: m.weight.fill_(float("nan"))))


def test_weights_that_a_smaller_dtype_cannot_hold_are_named_with_it(tmp_path):
    tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_base(str(tmp_path)).model.norm.weight[0] == 1e6
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight \(torch\.float16\)\. .* load them in another dtype"):
        load_base(str(tmp_path), dtype="float16")


def test_a_damaged_file_is_blamed_before_the_one_that_was_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(LoadError, match=r"model\.safetensors cannot be used"), loading.reading("model", str(tmp_path)):
        raise OSError("somewhere in the folder")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match=rf"{tmp_path}' cannot be loaded: KeyError: 'layers'\. Give a folder that"):
        with loading.reading("model", str(tmp_path)):
            raise KeyError("layers")


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gpt2", torch.float16)])
def test_a_base_in_another_precision_is_the_same_and_one_that_was_tuned_a_little_is_not(tmp_path, family, dtype):
    base = tiny_model(family)
    write_base_marks(base, tmp_path)
    check_base_marks(tiny_model(family).to(dtype), str(tmp_path))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(1.01)
    for other in (base, tiny_model(family, seed=1)):
        with pytest.raises(ValueError, match=r"has other weights \(\d+ of \d+ samples differ\)"):
            check_base_marks(other, str(tmp_path))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A base, its policy adapter and its reward adapter; and another base under the adapters' config."""
    folder = tmp_path_factory.mktemp("places")
    base = saved_base(folder / "base", num_hidden_layers=2)
    saved_reward_adapter(folder / "reward", base, layers=[1])
    write_base_marks(AutoModelForCausalLM.from_pretrained(base), folder / "reward")
    build_trunk(str(base)).save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")
    other = folder / "other"
    shutil.copytree(base, other)
    tiny_model("llama", num_hidden_layers=2, seed=5).save_pretrained(other)
    for name in ("policy", "reward"):
        moved = folder / f"{name}-moved"
        shutil.copytree(folder / name, moved)
        config = json.loads((moved / "adapter_config.json").read_text())
        (moved / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(other)}))
    return folder


def test_every_way_in_refuses_an_adapter_on_another_base(places):
    assert json.loads((places / "policy" / loading.BASE_FILE).read_text())["name"] == str(places / "base")
    build_trunk(str(places / "policy"))
    load_adapter_scorer(str(places / "reward"))
    trunk, adapter = build_trunk(str(places / "other")), read_score_adapter(str(places / "reward"))
    sentence = f"was trained on .*base, and this base, .*{places.name}/other, has other weights"
    for load in (
        lambda: build_trunk(str(places / "policy-moved")),
        lambda: load_adapter_scorer(str(places / "reward-moved")),
        lambda: load_causal_judge(str(places / "policy-moved")),
        lambda: attach_score_adapter(trunk, adapter),
    ):
        with pytest.raises(ValueError, match=sentence):
            load()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the Hub with someone/base: at main, and at step3000 with other weights and a chat template."""
    repository = tmp_path / "hub/models--someone--base"
    (repository / "refs").mkdir(parents=True)
    for seed, revision in enumerate(("main", "step3000")):
        folder = saved_base(repository / "snapshots" / (f"{seed}" * 40), num_hidden_layers=2, seed=seed)
        (repository / "refs" / revision).write_text(folder.name)
    tiny_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    for module in (constants, loading):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_an_adapter_is_loaded_on_the_revision_of_its_base(hub, tmp_path, capsys):
    policy, reward = str(tmp_path / "policy"), str(tmp_path / "reward")
    trunk = build_trunk("someone/base", lora(), model_init_kwargs={"revision": "step3000"})
    trunk.save_pretrained(policy)
    saved_reward_adapter(reward, "someone/base", revision="step3000")
    trunks = (build_trunk(policy), load_value_model(policy).model)
    for model in (*(trunk.get_base_model() for trunk in trunks), load_adapter_scorer(reward)[0]):
        expected = trunk.get_base_model().get_input_embeddings().weight
        assert torch.equal(model.get_input_embeddings().weight, expected)
    trunks[0].save_pretrained(policy)
    for tokenizer in (policy_tokenizer(policy, None, {}), load_adapter_scorer(reward)[1]):
        assert tokenizer.chat_template
    assert cli.main(["serve", policy, "--print", "--device", "cpu"]) == 0
    assert cli.main(["export", policy, "--to", "vllm"]) == 0
    assert capsys.readouterr().out.count(" --revision step3000") == 2
    build_trunk("someone/base", model_init_kwargs={"revision": "main"}).save_pretrained(policy)
    assert loading.read_adapter_config(policy).revision is None


@pytest.mark.parametrize("family", FEW)
def test_a_base_that_was_saved_and_loaded_has_the_line_it_had(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert base_fingerprint(loaded) == base_fingerprint(model) != base_fingerprint(tiny_model(family, seed=1))
    assert base_fingerprint(loaded.to(torch.bfloat16)) != base_fingerprint(model)


def test_adapters_and_padding_change_nothing_and_the_config_does():
    line = base_fingerprint(tiny_model("llama"))
    for config in (lora(use_dora=True), lora(target_modules=["q_proj"])):
        adapted = get_peft_model(tiny_model("llama"), config)
        adapted.add_adapter("reference", lora())
        assert base_fingerprint(adapted.get_base_model()) == line
    padded = tiny_model("llama")
    padded.config.pad_token_id = 3
    assert base_fingerprint(padded) == line
    assert base_fingerprint(tiny_model("llama", rms_norm_eps=1e-3)) != line


def test_a_quantised_base_is_known_by_what_is_stored(tmp_path):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True)

    def loaded(seed):
        tiny_model("llama", seed=seed, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
        return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)

    first, again, other = map(loaded, (0, 0, 1))
    line = base_fingerprint(first)
    assert line == base_fingerprint(again) != base_fingerprint(other)
    again.train()(torch.tensor([[5, 6, 7]]))
    assert base_fingerprint(again) == line
