"""Bad input is refused by one sentence, before the model loads: the weights of the model here cannot be loaded."""

import shutil
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model

from onetrunk.ppo.trainer import PPOTrainer
from tests.ppo.support import BEST, base_model, even_share, logged, lora, make_trainer, prompts, trained
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


@cache
def saved_model():
    folder = Path(mkdtemp()) / "tiny-llama"
    base_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@cache
def unloadable_model():
    folder = Path(mkdtemp()) / "unloadable"
    shutil.copytree(saved_model(), folder)
    (folder / "model.safetensors").write_bytes(b"these are no weights")
    return str(folder)


def build(tmp_path, **arguments):
    return make_trainer(tmp_path / "out", **{"model": unloadable_model(), "tokenizer": None, **arguments})


def refused(tmp_path, sentence, error=ValueError, **kwargs):
    with pytest.raises(error) as raised:
        build(tmp_path, **kwargs)
    assert sentence in str(raised.value)


def no_kwargs(prompts, completions):
    return [0.0]


def needs_answer(completions, answer, **kwargs):
    return [0.0] * len(completions)


def of_texts(*texts):
    return Dataset.from_dict({"prompt": list(texts)})


def of_messages(role):
    return Dataset.from_dict({"prompt": [[{"role": role, "content": "the cat"}]]})


QUESTIONS = Dataset.from_dict({"question": ["a"]})
ANSWERS = {"dataset": prompts(4, answer=["a"] * 4), "eval_dataset": prompts(4)}
EVALUATED = {"eval_dataset": prompts(4), **BEST}
TWO_SETS = {**BEST, "eval_dataset": {"short": prompts(2), "long": prompts(4)}}
NOT_EVALUATED = "eval_loss policy/entropy clip_ratio/low_mean completions/clipped_ratio tools/call_frequency".split()
NOT_EVALUATED += ["score", "completion_length"]
TAKES_ALL = "value_pretraining_rollouts 1 takes all rollouts, so the policy would not train"
# Keywords of `build`, what the error says, and its type.
REFUSED = [
    ({"model": "/nowhere/model"}, "cannot be loaded: there is no such folder. Give a folder", RuntimeError),
    ({"model": "nobody/nothing"}, f"no folder nobody/nothing in {Path.cwd()}, and the Hub says:", RuntimeError),
    ({"model_init_kwargs": {"torch_dtype": "auto"}}, "model_init_kwargs has torch_dtype; it may have", ValueError),
    ({"dataset": of_texts("the cat", "")}, "row 1: prompt is empty or white space only", ValueError),
    ({"dataset": of_texts("the cat", None)}, "row 1: prompt is missing", ValueError),
    ({"dataset": of_texts("a dog " * 60), "max_completion_length": 20}, "together 140, and", ValueError),
    ({"dataset": QUESTIONS}, "no column 'prompt', only question", ValueError),
    ({"eval_dataset": QUESTIONS}, "no column 'prompt', only question", ValueError),
    ({"dataset": "rows.json"}, "the dataset is a str; pass a map-style", ValueError),
    ({"dataset": []}, "train_dataset holds no rows; give at least one", ValueError),
    ({"dataset": DatasetDict(train=prompts(), test=prompts())},
     "train_dataset has the splits train, test; pass one of them, such as rows", ValueError),
    ({"dataset": prompts().to_iterable_dataset(), "num_train_epochs": 1},
     "whose length is not known; set num_rollouts or max_steps, or use ShardedRows", ValueError),
    ({"dataset": of_messages("user")}, "conversations and the tokenizer has no chat template", ValueError),
    ({"dataset": of_messages("system"), "tokenizer": tiny_tokenizer(chat_template=CHAT_TEMPLATE)},
     "ends with a system message", ValueError),
    ({"num_rollouts": 1, "value_pretraining_rollouts": 1}, TAKES_ALL, ValueError),
    ({"num_train_epochs": 1, "rollout_batch_size": 8, "value_pretraining_rollouts": 1}, TAKES_ALL, ValueError),
    ({"max_prompt_length": 3}, "prompts are longer than max_prompt_length 3, and the longest, row 3, has", ValueError),
    ({"max_prompt_length": 1, "overlong_prompts": "drop"}, "all 8 prompts are longer", ValueError),
    # 5 tokens of prompt and 6 of completion.
    ({"microbatch_tokens": 10}, "a row of 11 tokens does not fit microbatch_tokens 10", ValueError),
    ({"stop_tokens": ["the cat"]}, "stop_tokens: 'the cat' is 2 tokens", ValueError),
    ({"stop_tokens": ["<|im_end|>"]}, "the tokenizer does not know '<|im_end|>' and reads it as", ValueError),
    ({"dataset": of_texts("the w120 cat"), "tokenizer": tiny_tokenizer(vocab_size=200)},
     "and the model knows 64 tokens; take the tokenizer that belongs", ValueError),
    ({"num_minibatches": 3}, "not divisible by 3 minibatches; set num_minibatches to 2 or 4", ValueError),
    ({"eval_strategy": "steps"}, "eval_strategy 'steps' needs eval_dataset", ValueError),
    ({"eval_dataset": {"good": prompts(2), "bad": of_texts("")}}, "row 0: prompt is empty", ValueError),
    ({"eval_dataset": {"../elsewhere": prompts(2)}}, "the name of an evaluation set is ", ValueError),
    ({"eval_dataset": {"two words": prompts(2)}}, "the name of an evaluation set is ", ValueError),
    ({"reward": []}, "no reward function was given", ValueError),
    ({"reward": no_kwargs}, "'no_kwargs' does not take completion_ids", TypeError),
    ({"reward": torch.nn.Linear(2, 1)}, "is a torch module (Linear); give a function that calls it", TypeError),
    ({"reward": needs_answer, **ANSWERS}, "'needs_answer' needs answer", TypeError),
    ({"reward": "no.such.module"}, "there is no module 'no'", ValueError),
    ({"reward": "nobody/nothing"}, "the reward model 'nobody/nothing' cannot be loaded", RuntimeError),
    ({"reward": [even_share] * 2, "trainer_class": partial(PPOTrainer, reward_processing_classes=tiny_tokenizer())},
     "1 reward_processing_classes for 2 reward functions", ValueError),
    ({"reward_weights": [1.0, 2.0]}, "2 reward weights for 1 reward functions", ValueError),
    (TWO_SETS, "is 'score/mean', and the evaluation sets are short, long: say which of them decides, for example"
     " short_score/mean", ValueError),
    *(({**EVALUATED, "metric_for_best_model": metric}, "which no evaluation gives; it gives score/mean", ValueError)
      for metric in NOT_EVALUATED),
    *(({**EVALUATED, "metric_for_best_model": metric}, "no reward function is named 'h'; there is even_share",
       ValueError) for metric in ("rewards/h/mean", "score/h")),
    ({"rollout_backend": "nowhere.py:Mine"}, "rollout backend 'nowhere.py:Mine'", ValueError),
    ({"rollout_backend": "json.decoder.Mine"}, "has no 'Mine'", ValueError),
    ({"rollout_backend": "json.dumps"}, "backend 'json.dumps': missing a required argument: 'obj'", ValueError),
    ({"rollout_backend": "json.decoder.NaN"}, "is a float; name a class or a function", ValueError),
    ({"rollout_backend": "collections.Counter"}, "is a Counter, which lacks generate", TypeError),
]  # fmt: skip


@pytest.mark.parametrize(("keywords", "sentence", "error"), REFUSED)
def test_bad_input_is_refused_by_one_sentence(tmp_path, keywords, sentence, error):
    refused(tmp_path, sentence, error, **keywords)


def test_a_model_given_by_path_loads_with_its_tokenizer_and_trains(tmp_path):
    trainer = build(tmp_path, model=saved_model(), model_init_kwargs={"dtype": "bfloat16"})
    trainer.train()
    assert logged(trainer, "score/mean")
    frozen = {p.dtype for n, p in trainer.model.named_parameters() if not p.requires_grad and "value_head" not in n}
    assert frozen == {torch.bfloat16}


def test_a_folder_without_a_model_and_a_file_are_no_models(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    refused(tmp_path, "holds neither config.json nor adapter_config.json. Give", RuntimeError, model=str(tmp_path))
    (tmp_path / "checkpoint-5" / "adapter_config.json").write_text("{}")
    refused(tmp_path, "but its folder checkpoint-5 does: name that", RuntimeError, model=str(tmp_path))
    (tmp_path / "file").write_text("")
    refused(tmp_path, "cannot be loaded: it is a file", RuntimeError, model=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("base", "error", "sentence"),
    [
        ("models/base", RuntimeError, f"there is no folder models/base in {Path.cwd()}, and the Hub says"),
        ("../missing", RuntimeError, f"'../missing' cannot be loaded: there is no such folder in {Path.cwd()}"),
        (None, ValueError, "does not say what its base model is; set base_model_name_or_path in its adapter_config"),
    ],
)
def test_an_adapter_whose_base_is_not_there_says_so(tmp_path, base, error, sentence):
    folder, model = str(tmp_path / "adapter"), get_peft_model(base_model(), lora())
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(folder)
    with pytest.raises(error) as raised:
        build(tmp_path, model=folder, peft_config=None)
    assert sentence in str(raised.value)
    assert folder in str(raised.value) and "adapter_config.json" in str(raised.value)


def test_a_tokenizer_without_padding_is_repaired(tmp_path):
    tokenizer = tiny_tokenizer(pad=False)
    assert tokenizer.pad_token is None
    assert trained(tmp_path, tokenizer=tokenizer).processing_class.pad_token == "<eos>"


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    refused(tmp_path, "out is a file; name a folder")


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (
            ["q_proj", "vproj"],
            "names 'vproj', and the model has no such module; its linear modules are q_proj, k_proj",
        ),
        (r".*\.quer", r"names '.*\\.quer'"),
        ("(((", "'(((' is not a regular expression"),
    ],
)
def test_every_lora_target_is_checked_against_the_model(tmp_path, targets, sentence):
    with pytest.raises(ValueError) as raised:
        make_trainer(tmp_path, peft_config=LoraConfig(r=2, target_modules=targets))
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_the_trainer_rejects_an_output_folder_that_holds_another_run(tmp_path):
    saves, weights = {"save_strategy": "steps", "save_steps": 1}, tmp_path / "checkpoint-1/adapter_model.safetensors"
    trained(tmp_path, **saves)
    first = weights.read_bytes()
    again = make_trainer(tmp_path, seed=4, **saves)
    with pytest.raises(ValueError, match=r"\(checkpoint-1\); resume it \(--resume auto, or train\(resume_from_check"):
        again.train()
    # Nothing was written, so the first run resumes.
    assert weights.read_bytes() == first
    resumed = make_trainer(tmp_path, num_rollouts=2, **saves)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    over = trained(tmp_path, seed=4, overwrite_output_dir=True, **saves)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert weights.read_bytes() != first
    # The same object may train on: the folder is its own.
    over.train()
