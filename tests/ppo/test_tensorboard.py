"""What TensorBoard shows of a PPO run: the model before training, histograms, completions, alarms; and on resuming."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from onetrunk.ppo.monitoring.progress import COUNT, HELD_OUT
from tests.ppo.support import logged, make_trainer, prompts

SETTINGS = {
    "alarm_limits": {"entropy": 10.0, "cut_off": None},
    "report_to": "tensorboard",
    "lr_scheduler_type": "constant",
    "num_ppo_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}


def events_of(folder, depth="runs/*"):
    """Return the events of the one TensorBoard run at this depth of a folder."""
    (run,) = {path.parent for path in folder.glob(f"{depth}/events.out.tfevents.*")}
    events = EventAccumulator(str(run), size_guidance={"histograms": 0, "tensors": 0, "scalars": 0})
    events.Reload()
    return events


def scalars(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def text(events, tag):
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{tag}/text_summary")}


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Return the events and the trainer of a run with held-out prompts and an alarm."""
    folder = tmp_path_factory.mktemp("board")
    settings = {"eval_strategy": "steps", "eval_steps": 4, "alarm_patience": 2}
    trainer = make_trainer(folder, eval_dataset=prompts(3), num_rollouts=3, **settings, **SETTINGS)
    reference = trainer.evaluate_reference()
    trainer.train()
    return events_of(folder), trainer, reference, events_of(folder, f"runs/*/{HELD_OUT}")


def test_the_curves_of_held_out_prompts_begin_before_training(board):
    events, trainer, reference, held_out = board
    values = logged(trainer, "eval_score/mean")
    assert [step for step, _ in scalars(events, "eval/score/mean")] == [0, 4, 6]
    assert [value for _, value in scalars(events, "eval/score/mean")] == pytest.approx(values)
    assert values[0] == reference["score/mean"] and scalars(events, "eval/kl/ref")[0] == (0, 0.0)
    # The same in a run of its own, which has another colour, under the name that the rollouts' curve has.
    assert scalars(held_out, "train/score/mean") == scalars(events, "eval/score/mean")


def test_alarms_are_one_count_and_an_event_each(board):
    events, *_ = board
    assert [tag for tag in events.Tags()["scalars"] if "alarm" in tag] == [f"train/{COUNT}"]
    assert scalars(events, f"train/{COUNT}") == [(2, 0.0), (4, 1.0), (6, 1.0)]
    assert list(text(events, "alarm/entropy")) == [4]
    assert "What helps: set entropy_coef" in text(events, "alarm/entropy")[4]


def test_every_rollout_has_its_histograms_and_completions(board):
    events, trainer, *_ = board
    steps = {tag: [event.step for event in events.Histograms(tag)] for tag in events.Tags()["histograms"]}
    assert steps == {"rollout/score": [1, 3, 5], "rollout/length": [1, 3, 5]}
    # Four completions in each rollout.
    assert [event.histogram_value.num for event in events.Histograms("rollout/score")] == [4, 4, 4]
    lengths = [event.histogram_value.sum / 4 for event in events.Histograms("rollout/length")]
    assert lengths == pytest.approx(logged(trainer, "completion/length"))
    assert "**score " in text(events, "rollout/completions")[3] and list(text(events, "eval/completions")) == [4, 6]


@pytest.mark.slow
def test_a_resumed_run_continues_its_curves_in_the_same_tensorboard_run(tmp_path):
    make_trainer(tmp_path, num_rollouts=2, **SETTINGS).train()
    # From step 2: steps 3 and 4 are made again, and their first events are hidden.
    resumed = make_trainer(tmp_path, num_rollouts=3, **SETTINGS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    events = events_of(tmp_path)
    assert [step for step, _ in scalars(events, "train/policy/loss")] == [1, 2, 3, 4, 5, 6]
    assert [v for _, v in scalars(events, "train/policy/loss")] == pytest.approx(logged(resumed, "policy/loss"))
