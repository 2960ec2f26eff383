"""An adapter knows its base: in another precision it is the same one, another one of its shape is refused."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from onetrunk.judges.local import load_causal_judge
from onetrunk.models.build import attach_score_adapter, build_trunk
from onetrunk.models.loading import BASE_FILE, base_marks, check_base_marks, write_base_marks
from onetrunk.models.reward_model import load_adapter_scorer, read_score_adapter
from tests.models.reward_adapters import saved_base, saved_reward_adapter
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_in_another_precision_is_the_same_and_another_is_not(tmp_path, family, dtype):
    write_base_marks(tiny_model(family), tmp_path)
    check_base_marks(tiny_model(family).to(dtype), str(tmp_path))
    with pytest.raises(ValueError, match=r"has other weights \(\d+ of \d+ samples differ\)"):
        check_base_marks(tiny_model(family, seed=1), str(tmp_path))


def test_a_small_step_of_full_fine_tuning_is_another_base(tmp_path):
    base = tiny_model("llama")
    write_base_marks(base, tmp_path)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(1.01)
    with pytest.raises(ValueError, match="other weights"):
        check_base_marks(base, str(tmp_path))


def test_adapters_in_a_base_and_its_heads_do_not_count():
    plain = base_marks(tiny_model("llama"))
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    assert base_marks(get_peft_model(tiny_model("llama"), config).get_base_model()) == plain
    assert not any("lm_head" in name for name in plain["weights"]) and len(plain["weights"]) > 20


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
    assert json.loads((places / "policy" / BASE_FILE).read_text())["name"] == str(places / "base")
    build_trunk(str(places / "policy"))
    load_adapter_scorer(str(places / "reward"))
    sentence = f"was trained on .*base, and this base, .*{places.name}/other, has other weights"
    with pytest.raises(ValueError, match=sentence):
        build_trunk(str(places / "policy-moved"))
    with pytest.raises(ValueError, match="other weights"):
        load_adapter_scorer(str(places / "reward-moved"))
    with pytest.raises(ValueError, match="other weights"):
        load_causal_judge(str(places / "policy-moved"))
    trunk = build_trunk(str(places / "other"))
    with pytest.raises(ValueError, match="other weights"):
        attach_score_adapter(trunk, read_score_adapter(str(places / "reward")))


def test_an_adapter_that_remembers_no_base_is_taken_and_a_damaged_memory_is_said(places, tmp_path):
    shutil.copytree(places / "policy-moved", tmp_path / "adapter")
    (tmp_path / "adapter" / BASE_FILE).write_text("[")
    with pytest.raises(ValueError, match=f"{BASE_FILE} is damaged"):
        build_trunk(str(tmp_path / "adapter"))
    (tmp_path / "adapter" / BASE_FILE).unlink()
    build_trunk(str(tmp_path / "adapter"))
