"""What a run tells: metrics, samples, held-out evaluation, TensorBoard; and the best checkpoint at the end."""

import json
import math
import re

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import TrainerState

from onetrunk.ppo.config import HOLD_OUT
from onetrunk.ppo.monitoring.alarms import RULES
from onetrunk.ppo.monitoring.metrics import MetricLog
from onetrunk.ppo.monitoring.progress import RolloutProgress
from tests.fakes import CannedBackend
from tests.ppo import support
from tests.ppo.support import BEST, differ, even_share, logged, make_trainer, prompts, trained, trained_weights

STEP = """loss grad_norm learning_rate policy/loss policy/clip_fraction kl/approx policy/entropy policy/ratio_max
time/update_s memory/peak_gib epoch step""".split()
ROLLOUT = """score/mean score/std score/even_share reward/unscored_fraction kl/ref kl/beta sampling/logprob_gap_mean
value/loss value/explained_variance value/variance_ratio
sampling/logprob_gap_max sampling/logprob_gap_k3 completion/length
completion/stopped_fraction completion/repeated_ngrams time/generate_s time/score_s
throughput/completion_tokens_per_s""".split()
ROLLOUT_END = [f"alarm/{name}" for name in RULES]


def test_every_step_logs_its_metrics_and_the_first_of_a_rollout_those_of_the_rollout(tmp_path):
    trainer = trained(tmp_path, num_rollouts=2, num_ppo_epochs=2)
    *steps, summary = trainer.state.log_history
    assert [set(s) for s in steps] == [set(STEP + ROLLOUT), set(STEP + ROLLOUT_END)] * 2
    assert all(math.isfinite(v) for s in steps for v in s.values())
    # 2 rollouts of 4 rows, each trained on twice.
    assert summary["train_samples_per_second"] == pytest.approx(16 / summary["train_runtime"], rel=1e-2)


def test_metrics_of_several_steps_are_averaged_into_one_log(tmp_path):
    each = trained(tmp_path / "each", num_rollouts=2, num_ppo_epochs=2)
    both = trained(tmp_path / "both", num_rollouts=2, num_ppo_epochs=2, logging_steps=4)
    for name in ("loss", "policy/loss", "value/loss", "kl/approx", "policy/entropy", "score/mean", "kl/ref"):
        assert logged(both, name) == [pytest.approx(sum(logged(each, name)) / len(logged(each, name)), abs=1e-6)]
    assert logged(both, "policy/ratio_max") == [max(logged(each, "policy/ratio_max"))]


def step_stats(log, kl, skipped):
    for value in kl:
        log.add_stats("policy", {"approx_kl": torch.tensor(value), "ratio_max": torch.tensor(1 + value)})
    log.end_step(skipped=skipped)


def test_a_skipped_step_counts_with_what_it_measured_unless_that_is_nothing_or_not_finite():
    log = MetricLog(Accelerator(cpu=True))
    step_stats(log, [0.25, 0.25], skipped=False)
    step_stats(log, [1.0, 0.5], skipped=True)
    step_stats(log, [], skipped=True)
    step_stats(log, [0.5, math.nan], skipped=True)
    figures = log.flush()
    # Two packs add up, the two measured steps are averaged.
    assert figures["kl/approx"] == (0.5 + 1.5) / 2
    assert figures["policy/ratio_max"] == 2.0
    assert figures["policy/skipped_steps"] == 3.0


def test_a_metric_that_a_rollout_or_a_call_does_not_have_leaves_the_mean_to_the_others():
    log = MetricLog(Accelerator(cpu=True))
    for value in (math.nan, 0.5, math.nan, 1.5):
        log.add_rollout({"score/rare": value, "score/rare_max": value, "score/never": math.nan})
        log.add_own("own/rare", value)
    metrics = log.flush()
    assert metrics["score/rare"] == metrics["own/rare"] == 1.0 and metrics["score/rare_max"] == 1.5
    assert math.isnan(metrics["score/never"])


def test_the_steps_after_the_last_interval_are_logged_at_the_end_and_not_again_after_a_resume(tmp_path):
    each = trained(tmp_path / "each", num_rollouts=3)
    settings = {"logging_steps": 10, "save_strategy": "steps", "save_steps": 3}
    rest = trained(tmp_path / "rest", num_rollouts=3, **settings)
    scores = logged(each, "score/mean")
    assert logged(rest, "score/mean") == [pytest.approx(sum(scores) / 3)]
    assert [entry["step"] for entry in rest.state.log_history if "loss" in entry] == [3]
    longer = make_trainer(tmp_path / "rest", num_rollouts=5, **settings)
    longer.train(resume_from_checkpoint=True)
    # The learning rate falls more slowly in the longer run: only how many rollouts a log has can be compared.
    assert [entry["step"] for entry in longer.state.log_history if "score/mean" in entry] == [3, 5]
    assert longer.metric_log.state_dict()["rollouts"] == {}
    silent = trained(tmp_path / "silent", logging_strategy="no")
    assert not logged(silent, "score/mean")


def test_the_loss_is_made_of_the_parts_that_are_logged(tmp_path):
    trainer = trained(tmp_path, num_ppo_epochs=2, entropy_coef=0.3, per_device_train_batch_size=1)
    parts = (logged(trainer, n) for n in ("loss", "policy/loss", "policy/entropy"))
    for loss, policy, entropy in zip(*parts, strict=True):
        assert loss == pytest.approx(policy - 0.3 * entropy, rel=1e-5)


def test_samples_are_written_and_shown(tmp_path, capsys):
    def picky(completion_ids, **kwargs):
        return [None, *(float(len(ids)) for ids in completion_ids[1:])]

    settings = {"num_rollouts": 2, "num_ppo_epochs": 2, "log_completions": True, "max_unscored_fraction": 0.5}
    trainer = trained(tmp_path, reward=picky, eval_dataset=prompts(3), eval_strategy="epoch", **settings)
    files = sorted((tmp_path / "completions").iterdir())
    assert [path.name for path in files] == ["eval-000004.jsonl", "step-000001.jsonl", "step-000003.jsonl"]
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert len(rows) == 4 and set(rows[0]) == {"prompt", "completion", "score", "score/picky", "stopped"}
    # No score is null: JSON has no NaN.
    assert rows[0]["score"] is None and "NaN" not in files[1].read_text()
    assert [r["score"] for r in rows[1:]] == [6.0] * 3
    assert logged(trainer, "score/picky")[0] == 6.0
    shown = capsys.readouterr().out
    assert "step-000001" in shown and "eval-000004" in shown and shown.count("completion") >= 3


@pytest.mark.slow
def test_evaluation_is_repeatable_and_leaves_training_alone(tmp_path):
    plain = trained(tmp_path / "plain", num_rollouts=3)
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    evaluated = trained(tmp_path / "eval", num_rollouts=3, eval_dataset=prompts(5), **settings)
    support.assert_same(trained_weights(evaluated.model), trained_weights(plain.model))
    assert len(logged(evaluated, "eval_score/mean")) == 4
    first, second = support.without_wall_clock([evaluated.evaluate() for _ in range(2)])
    assert first == second
    # Those of a rollout, without what belongs to an update.
    update = ("kl/beta", "value/", "time/", "throughput/")
    assert set(first) == {"epoch", *(f"eval_{name}" for name in ROLLOUT if not name.startswith(update))}
    assert logged(evaluated, "eval_kl/ref")[0] == 0.0 != first["eval_kl/ref"]


def test_evaluation_takes_other_prompts_and_several_sets_by_name(tmp_path):
    trainer = trained(tmp_path, eval_dataset={"short": prompts(2), "long": prompts(4)})
    metrics = trainer.evaluate()
    assert {"eval_short_score/mean", "eval_long_score/mean"} <= set(metrics)
    fresh = trainer.evaluate(prompts(2), metric_key_prefix="test")
    assert fresh["test_score/mean"] == metrics["eval_short_score/mean"]
    without = make_trainer(tmp_path / "none")
    for evaluate in (without.evaluate, without.evaluate_reference):
        with pytest.raises(ValueError, match="evaluation needs held-out prompts"):
            evaluate()


def test_the_final_evaluation_is_made_once_after_each_training(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=prompts(4), overwrite_output_dir=True)
    finals = []
    for _ in range(2):
        trainer.train()
        finals.append(trainer.final_evaluation())
        assert trainer.final_evaluation() == finals[-1]
    assert finals[0]["eval_kl/ref"] != finals[1]["eval_kl/ref"]


def shown(capsys):
    return capsys.readouterr().err.replace("\r", "\n")


def test_the_bar_says_what_is_being_sampled(tmp_path, capsys):
    # Rows of unequal length end one after the other, so that the bar has something to say.
    settings = {"max_completion_length": 40, "disable_tqdm": False, "eval_dataset": prompts(6)}
    trainer = make_trainer(tmp_path, num_rollouts=3, eval_strategy="steps", eval_steps=2, **settings)
    trainer.progress.has_bar = True
    trainer.evaluate_reference()
    before = shown(capsys)
    assert "before: 6 completions" in before
    trainer.train()
    during = shown(capsys)
    assert "rollout 2/3: generating 1/4 completions" in during and "rollout 3/3: updating" in during
    assert ": eval 1/6 completions" in during and ": eval 1/4" not in during
    assert "eval_score=" in during and "tokens/s=" in during


def test_where_there_is_no_terminal_each_rollout_is_one_line(tmp_path, capsys):
    settings = {"disable_tqdm": False, "num_ppo_epochs": 2, "eval_strategy": "steps", "eval_steps": 4}
    trainer = make_trainer(tmp_path, num_rollouts=3, eval_dataset=prompts(2), **settings)
    trainer.evaluate_reference()
    assert "before: 2 completions\n" in shown(capsys)
    trainer.train()
    lines = shown(capsys).splitlines()
    rollouts = [line for line in lines if line.startswith("rollout ")]
    assert [line.split(":")[0] for line in rollouts] == ["rollout 1/3", "rollout 2/3", "rollout 3/3"]
    pattern = r"rollout \d/3: score (\S+), kl \S+, length \S+, tokens/s \S+; 00:\d\d left"
    scores = [re.fullmatch(pattern, line).group(1) for line in rollouts]
    assert scores == [f"{value:.3g}" for value in logged(trainer, "score/mean")]
    assert [line.split(":")[0] for line in lines if line.startswith("evaluation")] == [
        f"evaluation at step {step}" for step in (0, 4, 6)
    ]
    # The first lines say what a run without held-out prompts lacks.
    assert HOLD_OUT not in trainer.progress.opening and HOLD_OUT in make_trainer(tmp_path).progress.opening


def test_the_time_left_counts_the_sampling_of_a_rollout_as_that_of_all_its_steps(tmp_path, capsys, monkeypatch):
    # A rollout takes 10 s before its first of 4 steps and 2 s for each; a line is written at the first step.
    args = support.make_config(tmp_path, num_rollouts=3, num_ppo_epochs=4)
    progress, clock = RolloutProgress(), iter([0.0, 12.0, 30.0, 48.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    state = TrainerState(max_steps=12, is_world_process_zero=True)
    progress.on_train_begin(args, state, None)
    for state.global_step in (1, 5, 9):
        progress.on_log(args, state, None, logs={"score/mean": 0.0})
    left = [line.rpartition("; ")[2] for line in shown(capsys).splitlines()]
    # 12 s for 4 steps, of which 11 are to come; then 18 s for each 4 steps.
    assert left == ["00:33 left", "00:31 left", "00:13 left"]


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path):
    eval_scores = iter([0.1, 0.9, 0.2])

    def reward(prompts, completions, completion_ids, **kwargs):
        # Held-out prompts come two at a time, and the second evaluation is the best one.
        if len(prompts) == 2:
            return [next(eval_scores)] * 2
        return even_share(prompts, completions, completion_ids)

    settings = {"num_rollouts": 3, "metric_for_best_model": "eval_score/mean", **BEST}
    trainer = trained(tmp_path, reward=reward, eval_dataset=prompts(2), **settings)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert trainer.state.best_metric == pytest.approx(0.9)
    best = trained_weights(trainer.model)
    for step, is_best in ((2, True), (3, False)):
        trainer.model.load_branches(tmp_path / f"checkpoint-{step}")
        assert (not differ(trained_weights(trainer.model), best)) == is_best


def test_of_several_evaluation_sets_one_decides_which_checkpoint_is_best(tmp_path):
    settings = {"metric_for_best_model": "long_score/mean", "greater_is_better": True, **BEST}
    trainer = trained(tmp_path, eval_dataset={"short": prompts(2), "long": prompts(4)}, **settings)
    assert trainer.state.best_metric == max(logged(trainer, "eval_long_score/mean"))


class Served(CannedBackend):
    """A backend with checks before and after the model is loaded, which keeps the longest row that it may get."""

    progress = poll = None

    def check(self):
        pass

    def check_policy(self, model, longest_row=0):
        self.longest_row = longest_row


def test_a_server_is_checked_for_the_longest_prompt_also_if_it_is_held_out(tmp_path):
    backend = Served()
    trainer = make_trainer(
        tmp_path, eval_dataset=Dataset.from_dict({"prompt": ["a b " * 10]}), rollout_backend=backend
    )
    (longest,) = map(len, trainer.eval_dataset["prompt_ids"])
    assert longest > max(map(len, trainer.train_dataset["prompt_ids"]))
    assert backend.longest_row == longest + trainer.args.max_completion_length


@pytest.mark.parametrize(("settings", "in_waves"), [({}, False), ({"policy_objective": "dis"}, True)])
def test_what_trains_from_the_sampler_s_logprobs_does_not_depend_on_when_tools_answer(tmp_path, settings, in_waves):
    trainer = make_trainer(tmp_path, capture_trunk_states=False, **settings)
    assert trainer.sampler.backend.in_waves == in_waves


def test_a_share_of_unscored_rows_at_its_limit_is_not_above_it(tmp_path):
    def seven_of_ten(completions, **columns):
        return [None if i < 3 else 1.0 for i in range(len(completions))]

    settings = {"dataset": prompts(10), "rollout_batch_size": 10, "max_unscored_fraction": 0.3}
    assert logged(trained(tmp_path, reward=seven_of_ten, **settings), "reward/unscored_fraction") == [0.3]


def test_the_evaluation_before_training_is_logged_once_and_takes_one_set(tmp_path):
    trainer = make_trainer(tmp_path / "one", eval_dataset=prompts(2), overwrite_output_dir=True, num_rollouts=1)
    trainer.evaluate_reference()
    for expected in (1, 0):
        trainer.train()
        before = [entry for entry in trainer.state.log_history if entry["step"] == 0 and "eval_kl/ref" in entry]
        assert len(before) == expected
    several = make_trainer(tmp_path / "two", eval_dataset={"a": prompts(2), "b": prompts(2)})
    with pytest.raises(ValueError, match="takes one set of held-out prompts, and eval_dataset has a, b"):
        several.evaluate_reference()
