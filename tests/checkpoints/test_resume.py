"""What a run may be resumed from, and where it goes on; that it goes on exactly shows test_exact_resume."""

import random
import shutil
import threading
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import safe_globals

from tests.checkpoints.crash_runs import SHAPE
from tests.checkpoints.killing import change_json
from tests.fakes import CannedBackend
from tests.ppo.support import BEST, StopAt, assert_same, logged, make_trainer, prompts, trained_weights


def run(folder, resume=None, **settings):
    trainer = make_trainer(folder, **{"dataset": prompts(6), **SHAPE, **settings})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@cache
def checkpoint(step):
    folder = mkdtemp()
    trainer = run(folder, callbacks=[StopAt(step)])
    assert trainer.state.global_step == step
    return Path(folder) / f"checkpoint-{step}"


def test_resuming_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint-"):
        run(tmp_path, resume=True)


def test_a_damaged_stream_state_is_refused(tmp_path):
    damaged = tmp_path / "checkpoint-6"
    shutil.copytree(checkpoint(6), damaged)
    change_json(damaged / "experience_stream.json", lambda content: content.pop("kl_controller"))
    with pytest.raises(RuntimeError, match="not of the expected form .*kl_controller"):
        run(tmp_path / "out", resume=str(damaged))


def test_other_prompts_than_those_of_the_checkpoint_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"prompts 6 rows, sha256 \w+ \(here 6 rows, sha256 "):
        run(tmp_path, resume=str(checkpoint(6)), dataset=prompts(7).select(range(1, 7)))


def test_half_a_rollout_of_two_processes_is_not_taken_for_a_whole_one(tmp_path):
    other = tmp_path / "checkpoint-6"
    shutil.copytree(checkpoint(6), other)
    change_json(other / "experience_stream.json", lambda content: content["settings"].update(num_processes=2))
    with pytest.raises(ValueError, match=r"experience_buffer_1.safetensors is missing"):
        run(tmp_path / "out", resume=str(other))


@pytest.mark.parametrize(
    ("step", "planned", "longer"), [(12, {"num_rollouts": 3}, "num_rollouts"), (6, {"max_steps": 5}, "max_steps")]
)
def test_a_run_at_its_planned_end_trains_no_step_and_says_so(tmp_path, caplog, step, planned, longer):
    trainer = run(tmp_path, resume=str(checkpoint(step)), **planned)
    assert trainer.state.global_step == step
    held = make_trainer(tmp_path)
    held.model.load_branches(checkpoint(step))
    assert_same(trained_weights(trainer.model), trained_weights(held.model))
    said = [r.getMessage() for r in caplog.records if "nothing is left to train" in r.getMessage()]
    assert len(said) == 1 and f"is at step {step} of" in said[0] and f"raise {longer} to continue" in said[0]


def test_a_run_whose_plan_is_raised_says_where_it_goes_on_and_trains_on(tmp_path, caplog, capsys):
    trainer = run(tmp_path, resume=str(checkpoint(12)), num_rollouts=4)
    assert f"resuming from {checkpoint(12)}: step 12 of 16" in capsys.readouterr().err
    assert trainer.state.global_step == 16 and "nothing is left" not in caplog.text


def test_a_second_training_starts_at_the_first_prompt_again(tmp_path):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(prompts)
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, reward=reward, num_rollouts=2)
    trainer.train()
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(seen) == 4 and seen[:2] == seen[2:] and seen[0] != seen[1]


def draw_elsewhere():
    """Draw from Python's generator in another thread, as the retries of an upload do."""
    thread = threading.Thread(target=random.random)
    thread.start()
    thread.join()


class DisturbedSampling(CannedBackend):
    """Another thread draws while rows are sampled."""

    def generate(self, *args):
        draw_elsewhere()
        return super().generate(*args)


class DisturbedSteps(TrainerCallback):
    """Another thread draws after every step, so before every checkpoint, and before an evaluation."""

    def on_step_end(self, args, state, control, **kwargs):
        draw_elsewhere()


def drawing(completions, **kwargs):
    return [random.random() for _ in completions]


def test_draws_of_another_thread_change_neither_the_run_nor_its_checkpoints(tmp_path):
    def finished(name, backend, callbacks):
        settings = {**SHAPE, "eval_dataset": prompts(3), "eval_strategy": "steps", "eval_steps": 3}
        settings |= {"reward": drawing, "save_strategy": "steps", "save_steps": 3}
        trainer = make_trainer(tmp_path / name, rollout_backend=backend, callbacks=callbacks, **settings)
        trainer.train()
        with safe_globals():
            states = [torch.load(path) for path in sorted((tmp_path / name).glob("checkpoint-*/rng_state.pth"))]
        final = trainer.evaluate()["eval_score/mean"]
        return [state["python"] for state in states], logged(trainer, "score/mean"), final, trainer

    states, scores, final, undisturbed = finished("undisturbed", CannedBackend(), [])
    others = finished("disturbed", DisturbedSampling(), [DisturbedSteps()])
    assert len(states) >= 2 and states[0] != states[1]
    assert others[:3] == (states, scores, final)
    assert_same(trained_weights(others[3].model), trained_weights(undisturbed.model))


SAVES = {"save_strategy": "steps", "save_steps": 2}


def folders_of(place):
    return sorted(path.name for path in place.glob("checkpoint-*"))


def test_changed_intervals_count_from_the_checkpoint_on(tmp_path):
    run(tmp_path, resume=str(checkpoint(6)), save_strategy="steps", save_steps=3)
    assert folders_of(tmp_path) == ["checkpoint-12", "checkpoint-9"]
    again = run(tmp_path / "again", resume=str(tmp_path / "checkpoint-9"), num_rollouts=4, logging_steps=4, **SAVES)
    assert folders_of(tmp_path / "again") == ["checkpoint-10", "checkpoint-12", "checkpoint-14", "checkpoint-16"]
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry][-2:] == [12, 16]


def test_checkpoints_of_another_course_are_set_aside_where_a_run_comes_from_elsewhere_or_begins_again(
    tmp_path, caplog
):
    trainer = run(tmp_path, save_total_limit=2, **SAVES)
    trainer.train()
    assert trainer.state.global_step == 12 and "checkpoint-12.aside0" in caplog.text
    caplog.clear()
    run(tmp_path, resume=str(checkpoint(6)), save_total_limit=2, **SAVES)
    assert {"checkpoint-10", "checkpoint-12"} <= set(folders_of(tmp_path))
    assert "begins at step 6; the checkpoints after it" in caplog.text


def test_a_resumed_run_evaluates_no_second_time_at_its_start(tmp_path):
    held = {"eval_dataset": prompts(2), "eval_strategy": "steps", "eval_steps": 100, "eval_on_start": True}
    first = run(tmp_path, callbacks=[StopAt(6)], **held)
    assert len(logged(first, "eval_score/mean")) == 1
    again = run(tmp_path / "again", resume=str(tmp_path / "checkpoint-6"), **held)
    # At the start of the first, and at the end.
    assert [entry["step"] for entry in again.state.log_history if "eval_score/mean" in entry] == [0, 12]


def test_the_best_checkpoint_counts_anew_if_the_metric_or_the_held_out_rows_change(tmp_path, caplog):
    best = {
        **BEST,
        "eval_steps": 2,
        "save_steps": 2,
        "eval_dataset": prompts(2),
        "metric_for_best_model": "score/mean",
    }
    run(tmp_path, callbacks=[StopAt(6)], **best)
    assert "held-out rows have changed" not in caplog.text
    changed = {**best, "metric_for_best_model": "completion/length", "greater_is_better": False}
    again = run(tmp_path, resume=str(tmp_path / "checkpoint-6"), **changed)
    assert "count from here on" in caplog.text and again.state.best_global_step > 6
    assert again.state.best_metric == min(logged(again, "eval_completion/length")[3:])
