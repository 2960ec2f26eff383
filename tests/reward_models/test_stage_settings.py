"""Settings of training in pipeline stages, and parts of a batch, whose losses add up to that of the batch."""

import pytest
import torch

from onetrunk.parallel.sharding import training_stages
from onetrunk.reward_models.distill import RewardDistillationConfig, RewardDistillationTrainer
from onetrunk.reward_models.training import PairCollator, RewardModelConfig, RewardModelTrainer, join_pipeline
from tests.parallel.test_sharding import FSDP, GROUPS

STAGED = {"pipeline_training": True}
ROWS = [[4, 5, 6, 7, 8, 9], [20, 21], [30], [17, 40, 41, 42], [7, 8, 9], [3, 4, 5, 6, 7]]


def config(tmp_path, kind=RewardModelConfig, **settings):
    return kind(output_dir=str(tmp_path), report_to=[], use_cpu=True, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_training": "yes"}, "pipeline_training is 'yes'; it must be true or false"),
        ({"pipeline_stages": 2}, "pipeline_stages is set and pipeline_training is not; set both"),
        ({**STAGED, "pipeline_stages": 1}, "pipeline_stages is 1; it must be a whole number of at least 2"),
        ({**STAGED, "pipeline_split": [2, 0]}, "pipeline_split is .2, 0.; it must be a list of whole numbers"),
        ({**STAGED, "pipeline_split": [2, 2], "pipeline_stages": 3}, "has 2 numbers and pipeline_stages is 3"),
        ({**STAGED, "fp16": True}, "pipeline_training is not supported with fp16, which scales gradients"),
    ],
)
def test_a_setting_that_does_not_fit_is_rejected_with_what_to_change(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


def test_a_launch_that_does_not_fit_is_rejected_before_a_model_loads(tmp_path, launch_env):
    args = config(tmp_path, pipeline_training=True, pipeline_split=[1, 3])
    assert args.pipeline_stages == 2
    with pytest.raises(ValueError, match="all weights of this model train; set use_peft: true"):
        join_pipeline(args, has_adapter=False)
    with pytest.raises(
        ValueError, match="forms pipelines of 2 processes and 1 run; .*onetrunk reward --num_processes 2"
    ):
        join_pipeline(args, has_adapter=True)
    for launch, how in ((FSDP, "shards them .fsdp_config."), ({**GROUPS, "WORLD_SIZE": "2"}, "tensor parallelism")):
        launch_env(**launch)
        with pytest.raises(ValueError, match=f"the launch .*{how}.*; launch with .*pipelined.yaml"):
            join_pipeline(args, has_adapter=True)
    launch_env()
    join_pipeline(config(tmp_path), has_adapter=False)
    assert training_stages() == 1


class Scorer:
    """Scores a row by its tokens; another padding changes nothing."""

    def __init__(self):
        self.weight = torch.linspace(-1, 1, 50, requires_grad=True)

    def __call__(self, input_ids, attention_mask):
        self.logits = ((self.weight[input_ids] * attention_mask).sum(1) / 3)[:, None]
        return self


def loss_and_gradient(trainer, batches):
    model = Scorer()
    loss = sum(trainer.compute_loss(model, batch) for batch in batches)
    loss.backward()
    return loss.detach(), model.weight.grad


def bare(kind, args, **attributes):
    """Return a trainer without a model, for its loss alone."""
    trainer = object.__new__(kind)
    vars(trainer).update(args=args, note_pairs=lambda *_: None, **attributes)
    return trainer


@pytest.mark.parametrize("number", [2, 3, 8])
def test_the_losses_of_parts_add_up_to_that_of_the_batch(tmp_path, number):
    args = config(tmp_path, center_rewards_coefficient=0.3, use_margin=True)
    collator = PairCollator(0, pad_to_multiple_of=4)
    features = [
        {"chosen_ids": c, "rejected_ids": r, "probability": p, "margin": 0.1 * p}
        for c, r, p in zip(ROWS[:3], ROWS[3:], (0.9, 0.3, 0.6), strict=True)
    ]
    trainer, batch = bare(RewardModelTrainer, args), collator(features)
    parts = collator.parts(batch, number)
    assert len(parts) == min(number, 3)
    assert all(part["input_ids"].shape[1] % 4 == 0 for part in parts)
    for found, expected in zip(loss_and_gradient(trainer, parts), loss_and_gradient(trainer, [batch]), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("number", [2, 3, 8])
def test_the_losses_of_parts_of_labelled_rows_add_up_to_that_of_the_batch(tmp_path, number):
    """Also with rows without a partner, pairs without a probability, and rows without a score."""
    args = config(tmp_path, RewardDistillationConfig, regression_weight=0.7, pairwise_weight=1.3)
    collator = PairCollator(0)
    names = ("chosen_ids", "rejected_ids", "chosen_score", "rejected_score", "probability")
    rows = [
        (ROWS[0], ROWS[1], 1.0, 0.2, 0.8),
        (ROWS[2], [], -1.0, None, None),
        (ROWS[3], ROWS[4], None, None, 0.3),
        (ROWS[5], ROWS[2], 0.5, 2.0, None),
    ]
    features = [dict(zip(names, row, strict=True)) for row in rows]
    scale = type("Scale", (), {"mean": 0.1, "std": 1.4})
    trainer, batch = bare(RewardDistillationTrainer, args, unit=1.4, scale=scale), collator(features)
    parts = collator.parts(batch, number)
    assert sum(len(part["input_ids"]) for part in parts) == len(batch["input_ids"]) and len(parts) <= number
    assert sum(len(part["first"]) for part in parts) == 2
    for found, expected in zip(loss_and_gradient(trainer, parts), loss_and_gradient(trainer, [batch]), strict=True):
        torch.testing.assert_close(found, expected)
