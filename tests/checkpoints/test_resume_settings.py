"""What a resumed run may not change, and what it says of the rest: the base, the adapter's scale, the objective."""

import functools

import pytest
import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForSequenceClassification

from onetrunk.models.trunk import TrunkModel
from onetrunk.ppo.stream_state import reward_path
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.rewards.combine import resolve_reward
from tests.ppo.support import StopAt, base_model, even_share, lora, make_config, make_trainer, prompts
from tests.tiny import tiny_tokenizer

SHAPE = {"num_rollouts": 3, "num_ppo_epochs": 2, "num_minibatches": 2, "per_device_train_batch_size": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint between two rollouts; the base is the one that `base_model` makes."""
    folder = tmp_path_factory.mktemp("run")
    make_trainer(folder, dataset=prompts(6), callbacks=[StopAt(4)], **SHAPE).train()
    return folder / "checkpoint-4"


def resume(folder, checkpoint, **changed):
    trainer = make_trainer(folder, dataset=prompts(6), **{**SHAPE, **changed})
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def test_another_base_of_the_same_shape_is_refused_by_its_name(tmp_path, checkpoint):
    other = base_model(initializer_range=0.3)
    other.config.name_or_path = "someone/other"
    with pytest.raises(ValueError, match=r"written on the base model .* and this run uses someone/other \(llama, sha"):
        resume(tmp_path, checkpoint, model=other)


def test_the_same_base_under_another_name_is_taken(tmp_path, checkpoint):
    base_model().save_pretrained(tmp_path / "base")
    trainer = PPOTrainer(
        str(tmp_path / "base"), even_share, make_config(tmp_path / "out", **SHAPE), prompts(6), None, tiny_tokenizer(),
        peft_config=lora(),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert trainer.state.global_step == 12


def test_an_adapter_of_another_scale_is_refused(tmp_path, checkpoint):
    scaled = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"lora_alpha 8 \(here 16\)"):
        resume(tmp_path, checkpoint, model=TrunkModel(base_model(), scaled))


def odd_share(**columns):
    return [1 - share for share in even_share(**columns)]


def test_a_changed_objective_is_said_in_one_warning(tmp_path, checkpoint, caplog):
    changed = {"gamma": 0.9, "epsilon": 0.3, "value_steps": 50, "length_penalty": 0.1, "temperature": 0.7}
    changed |= {"reward": [odd_share, even_share], "reward_weights": [1.0, 2.0]}
    with pytest.raises(ValueError, match="gamma: 1.0 -> 0.9.*set allow_config_change to true to resume with"):
        resume(tmp_path, checkpoint, **changed)
    resume(tmp_path, checkpoint, allow_config_change=True, **changed)
    told = [r.getMessage() for r in caplog.records if "settings that have changed since" in r.getMessage()]
    assert len(told) == 1
    expected = ["gamma: 1.0 -> 0.9", "epsilon: 0.2 -> 0.3", "value_steps: 40 -> 50", "length_penalty: 0.0 -> 0.1"]
    expected += ["reward_weights: None -> [1.0, 2.0]", "temperature: 1.0 -> 0.7"]
    own = "tests.ppo.support.even_share"
    expected += [f"reward_funcs: ['{own}'] -> ['{__name__}.odd_share', '{own}']"]
    assert all(pair in told[0] for pair in expected), told[0]
    assert told[0].count(" -> ") == len(expected)


RULES = """
def kind(completion_ids, answer, **rest):
    return [float(len(ids)) - len(text) for ids, text in zip(completion_ids, answer)]
"""


def scored(folder, rules, answer="no", source="here", **changed):
    """Return a trainer whose reward is written in `rules.py` and reads the column `answer`."""
    folder.mkdir(exist_ok=True)
    (folder / "rules.py").write_text(rules)
    rows = prompts(6, answer=[answer] * 6, source=[source] * 6)
    reward = resolve_reward(f"{folder}/rules.py:kind")
    return make_trainer(folder / "out", dataset=rows, reward=reward, **{**SHAPE, **changed})


@pytest.mark.slow
def test_a_changed_reward_file_or_column_is_refused_unless_it_is_meant(tmp_path, caplog):
    scored(tmp_path / "one", RULES, callbacks=[StopAt(4)]).train()
    checkpoint = str(tmp_path / "one/out/checkpoint-4")
    digests = "kind, sha256 [0-9a-f]{16} -> kind, sha256 [0-9a-f]{16}"
    with pytest.raises(ValueError, match=f"changed since: reward_funcs.kind: {digests}; set them back, or set allow"):
        scored(tmp_path / "two", RULES + "# twice\n").train(checkpoint)
    rows = "6 rows, sha256 [0-9a-f]{16}"
    with pytest.raises(ValueError, match=f"changed since: reward_columns.answer: {rows} -> {rows}; set"):
        scored(tmp_path / "three", RULES, answer="yes").train(checkpoint)
    scored(tmp_path / "four", RULES + "# twice\n", answer="yes", allow_config_change=True).train(checkpoint)
    assert "reward_funcs.kind" in caplog.text and "reward_columns.answer" in caplog.text


@pytest.mark.slow
def test_another_reward_model_under_the_same_name_is_refused(tmp_path):
    def reward_model(seed):
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64,
            num_labels=1, pad_token_id=0,
        )  # fmt: skip
        LlamaForSequenceClassification(config).save_pretrained(tmp_path / "rm")
        tiny_tokenizer().save_pretrained(tmp_path / "rm")
        return str(tmp_path / "rm")

    rows = prompts(6)
    make_trainer(tmp_path / "out", dataset=rows, reward=reward_model(0), callbacks=[StopAt(4)], **SHAPE).train()
    checkpoint = str(tmp_path / "out/checkpoint-4")
    same = make_trainer(tmp_path / "same", dataset=rows, reward=reward_model(0), **SHAPE)
    same.train(checkpoint)
    other = make_trainer(tmp_path / "other", dataset=rows, reward=reward_model(1), **SHAPE)
    with pytest.raises(ValueError, match="changed since: reward_funcs.rm: llama, sha256 .* -> llama, sha256"):
        other.train(checkpoint)


def test_the_optimizer_s_own_settings_are_said_to_stay(tmp_path, checkpoint, caplog):
    with pytest.raises(ValueError, match=r"weight_decay stays 0.0 \(here 0.1\).* allow_config_change"):
        resume(tmp_path, checkpoint, weight_decay=0.1)
    resume(tmp_path, checkpoint, weight_decay=0.1, allow_config_change=True)
    assert "weight_decay stays 0.0 (here 0.1)" in caplog.text and "changed since" not in caplog.text


def test_resuming_elsewhere_and_for_longer_is_no_change(tmp_path, checkpoint, caplog):
    free = {"num_rollouts": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "report_to": ["none"]}
    resume(tmp_path / "elsewhere", checkpoint, run_name="again", microbatch_tokens=64, max_rollout_rows=2, **free)
    assert "changed since" not in caplog.text and "stays" not in caplog.text


def test_a_reward_function_is_known_by_where_it_comes_from(tmp_path):
    (tmp_path / "rubric.py").write_text("def kind(completions, **columns):\n    return [1.0]\n")
    assert reward_path(resolve_reward(f"{tmp_path}/rubric.py:kind")) == "rubric.py:kind"
    assert reward_path(functools.partial(even_share, x=1)) == "tests.ppo.support.even_share"

    names = {}
    exec("def made(**columns): ...", names)
    names["made"].__module__ = None
    assert reward_path(names["made"]) == "made"

    class Judge:
        name = "judge"

        def __call__(self, **columns): ...

    assert reward_path(Judge()).endswith("Judge judge")
