"""Runs whose reward is an adapter on the policy's own trunk: scores, metrics, files, resuming, errors."""

import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from datasets import Dataset

from onetrunk.ops.packing import make_pack
from onetrunk.ppo.trainer import PPOTrainer
from tests.models.reward_adapters import saved_base, saved_reward_adapter, scores_of_a_separate_model
from tests.ppo.support import even_share, logged, lora, make_config, prompts
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer


@cache
def base() -> str:
    return str(saved_base(Path(mkdtemp()) / "base", num_hidden_layers=2))


@cache
def adapter(first: int = 1) -> str:
    """Return the folder of a reward adapter on the top layer (1) or both (0), with the policy's tokenizer."""
    layers = [1] if first else None
    return str(saved_reward_adapter(Path(mkdtemp()) / "judge", base(), layers=layers, tokenizer=tiny_tokenizer()))


def a_trainer(folder, reward=None, model=None, dataset=None, tokenizer=None, **settings):
    return PPOTrainer(
        base() if model is None else model,
        adapter() if reward is None else reward,
        make_config(folder, **settings),
        prompts(6) if dataset is None else dataset,
        prompts(5),
        tokenizer,
        peft_config=lora(),
    )


def expected_scores(scored, first=1):
    """Return the scores of a separate model for the rows that were scored."""
    pack = make_pack(list(scored.rollout.prompt_ids), list(scored.rollout.completion_ids), 0)
    return scores_of_a_separate_model(adapter(first), base(), pack)


def first_rollout(trainer):
    """Return the first rollout with its scores, in the rows' own order."""
    trainer.model.eval()
    stream = trainer.get_train_dataloader()
    stream.make_rollout()
    return stream.last_scored


@pytest.mark.parametrize(("first", "settings"), [(0, {}), (1, {"adapter_layers": "top-1"})])
def test_the_scores_of_a_rollout_are_those_of_a_separate_model(tmp_path, first, settings):
    trainer = a_trainer(tmp_path, adapter(first), rollout_batch_size=6, **settings)
    trunk = trainer.model
    assert trunk.reward_branch.from_states == (first == 1 and trunk.cut == 1)
    scored = first_rollout(trainer)
    # Packs of other widths round differently.
    torch.testing.assert_close(scored.scores.total, expected_scores(scored, first), atol=1e-5, rtol=1e-5)
    assert scored.scores.by_function.keys() == {"judge"} and scored.scores.total.std() > 1e-2


def test_a_score_that_is_not_finite_leaves_out_its_row_and_stops_no_run(tmp_path):
    trainer = a_trainer(tmp_path, [adapter(), even_share], max_unscored_fraction=1.0)
    with torch.no_grad():
        trainer.model.reward_branch.bias.fill_(math.inf)
    scored = first_rollout(trainer)
    assert scored.scores.total.isnan().all() and scored.scores.by_function["even_share"].isfinite().all()


@pytest.mark.slow
def test_a_run_learns_and_reports_the_score_by_name_in_training_and_evaluation(tmp_path):
    settings = {"num_rollouts": 24, "rollout_batch_size": 48, "num_ppo_epochs": 2, "num_minibatches": 2, "beta": 0.0}
    settings |= {"per_device_train_batch_size": 24, "adapter_layers": "top-1", "max_completion_length": 3}
    settings |= {"lr_scheduler_type": "constant"}
    trainer = a_trainer(tmp_path, **settings)
    trainer.train()
    scores = logged(trainer, "score/judge")
    assert scores == logged(trainer, "score/mean") and len(scores) == 24
    # Half a standard deviation of a completion's score.
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.35
    metrics = trainer.evaluate()
    assert metrics["eval_score/judge"] == metrics["eval_score/mean"] and "eval_kl/ref" in metrics
    before = trainer.evaluate_reference()
    assert before["score/judge"] < metrics["eval_score/judge"] and "kl/ref" not in before
    assert "starts from the states at the cut, layer 1" in trainer.trunk_plan.report
    assert trainer.trunk_plan.sampled == "all"


def test_conversations_are_read_as_the_policy_reads_them(tmp_path, caplog):
    tokenizer = tiny_tokenizer(chat_template=CHAT_TEMPLATE)
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"the {w}"}] for w in ("cat", "dog", "bird")]})
    settings = {"rollout_batch_size": 3, "per_device_train_batch_size": 3}
    trainer = a_trainer(tmp_path, dataset=rows, tokenizer=tokenizer, **settings)
    assert "has another chat template than the policy" in caplog.text
    scored = first_rollout(trainer)
    assert scored.rollout.prompt_ids[0][0] == tokenizer.convert_tokens_to_ids("<user>")
    torch.testing.assert_close(scored.scores.total, expected_scores(scored), atol=1e-5, rtol=1e-5)


def test_an_adapter_on_another_base_is_rejected_with_both_names(tmp_path):
    other = saved_base(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(ValueError, match=f"on the base model {base()}, and the policy's is {other}.* merge it into"):
        a_trainer(tmp_path / "out", model=str(other))


def test_a_tokenizer_with_other_tokens_is_rejected(tmp_path):
    folder = saved_reward_adapter(tmp_path / "judge", base(), tokenizer=tiny_tokenizer(vocab_size=60))
    with pytest.raises(
        ValueError,
        match=r"tokenizer of reward adapter .*judge is not the policy's \(only one of them has the token '!'",
    ):
        a_trainer(tmp_path / "out", str(folder))
