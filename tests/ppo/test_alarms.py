"""Alarms in real runs that go wrong in a known way: raised once, explained, logged, and ending the run."""

import json
import logging
import math

import pytest
import torch
from transformers import TrainerControl, TrainerState

from onetrunk import PPOConfig
from onetrunk.checkpoints.folders import checkpoint_folders, checkpoint_problems
from onetrunk.ppo.monitoring.alarms import CHANCE_NATS, RULES, Alarms, find_breach
from onetrunk.types import Rollout
from tests.fakes import CannedBackend
from tests.ppo.support import logged, make_config, prompts, trained

LOGGER = "onetrunk.ppo.monitoring.alarms"
LONG, SHORT, CUT, REPEATS = [5, 6, 7, 8, 9, 1], [5, 1], [5, 6, 7, 8, 9, 10], [5, 5, 5, 5, 5, 1]
# Steps too small to change what the policy says. REPEATS has the windows 5555, 5555, 5551: a third occurred before.
# Completions that are given are not those of the policy, their logprobs are 0, and all of a rollout are the same.
LIMITS = {"repeated_ngrams": 0.3, "logprob_gap": None, "equal_scores": None, "cut_off": None}
STILL = {"learning_rate": 1e-6, "num_ppo_epochs": 2, "alarm_limits": LIMITS}


class Turning(CannedBackend):
    """Says `before`, and from rollout `at` on `after`."""

    def __init__(self, before, after, at=4):
        super().__init__()
        self.said = before, after, at

    def generate(self, prompt_ids, params, keys) -> Rollout:
        before, after, at = self.said
        self.completions = [after if keys[0][1] >= at else before]
        return super().generate(prompt_ids, params, keys)


def said(caplog):
    warnings = [r.getMessage() for r in caplog.records if r.name == LOGGER and r.levelno == logging.WARNING]
    return [text.removeprefix("[RANK 0] ") for text in warnings]


@pytest.mark.parametrize(
    ("name", "after"), [("length_collapse", SHORT), ("length_explosion", CUT), ("repeated_ngrams", REPEATS)]
)
def test_completions_that_turn_bad_raise_their_alarm_once_after_the_patience(tmp_path, caplog, name, after):
    settings = {**STILL, "num_rollouts": 9, "alarm_limits": {**LIMITS, "length_collapse": 0.5}}
    trainer = trained(tmp_path, rollout_backend=Turning(LONG, after), **settings)
    assert logged(trainer, f"alarm/{name}") == [0.0] * 6 + [1.0] * 3
    (sentence,) = said(caplog)
    rule = RULES[name]
    # Rollouts 4, 5 and 6 of two steps each: seen after step 14, in the weights of step 8 for the first time.
    assert sentence.startswith(f"alarm {name} at step 14: {rule.description} is ")
    for part in (f"(alarm_limits {name} ", "in 3 rollouts in a row, sampled from step 8 on", rule.cause, rule.change):
        assert part in sentence
    others = {other: logged(trainer, f"alarm/{other}") for other in RULES if other != name}
    assert {other: sum(values) for other, values in others.items() if any(values)} == {}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kl", {"alarm_limits": {"kl": 0.05}, "beta": 1e-6, "learning_rate": 3e-2}),
        ("skipped_steps", {"target_kl": 1e-9, "num_ppo_epochs": 8}),
        ("explained_variance", {"alarm_limits": {"explained_variance": 0.0}, "value_learning_rate": 0.3}),
    ],
)
def test_a_figure_of_the_update_beyond_its_limit_raises_its_alarm(tmp_path, caplog, name, settings):
    trainer = trained(tmp_path, num_rollouts=6, alarm_patience=2, **settings)
    assert 1.0 in logged(trainer, f"alarm/{name}")
    sentences = [sentence for sentence in said(caplog) if sentence.startswith(f"alarm {name} at step ")]
    assert sentences and "in 2 rollouts in a row" in sentences[0]


@pytest.mark.parametrize(
    ("name", "said_by_all"),
    [("equal_scores", LONG), ("cut_off", CUT), ("one_token", [1]), ("no_gradient", CUT), ("logprob_gap", LONG)],
)
def test_a_rollout_that_teaches_nothing_or_is_anothers_raises_its_alarm_after_the_patience(
    tmp_path, name, said_by_all
):
    limits = {other: None for other in RULES if other != name}
    backend = CannedBackend([said_by_all])
    masks = {"truncated_completions": "mask"} if name == "no_gradient" else {}
    trainer = trained(tmp_path, rollout_backend=backend, num_rollouts=4, **{**STILL, "alarm_limits": limits, **masks})
    assert logged(trainer, f"alarm/{name}") == [0.0] * 2 + [1.0] * 2


def watched(config, rollouts, begin=1, state=None):
    """Return the alarms after these metrics of rollouts from `begin` on, and in which rollout each was raised."""
    logs, metrics = [], iter(rollouts)
    alarms = Alarms(lambda: dict(next(metrics)), logs.append, lambda: True)
    alarms.on_train_begin(config, TrainerState(), TrainerControl())
    if state is not None:
        alarms.load_state_dict(json.loads(json.dumps(state)), config)
    raised = []
    for number in range(begin, begin + len(rollouts)):
        before = len(alarms.raised)
        step = TrainerState(global_step=number * config.steps_per_rollout)
        alarms.on_step_end(config, step, TrainerControl())
        raised += [(name, number) for name, _ in alarms.raised[before:]]
    return alarms, raised


def explained(values):
    return [{"value/explained_variance": value} for value in values]


DEAD = [0.0, *[-0.011, 0.009] * 20]
ONE_OUTLIER = [*DEAD[:5], -3.1, *DEAD[6:]]
# Half of the interval of 8 values of DEAD is 2.365 * 0.0107 / sqrt(8) = 0.009, around a mean of -0.001. The outlier of
# rollout 6 counts as -0.5: -0.063 + 2.365 * 0.176 / sqrt(8) = 0.084, until rollout 14, when it is out of the window.
USELESS = {
    "noise around -0.001": (DEAD, 64, 9),
    "noise in rollouts of half the size": (DEAD, 32, 17),
    "noise with an outlier": (ONE_OUTLIER, 64, 14),
    "a constant": ([0.0] * 10, 64, 4),
    "alive at 0.1": ([0.0, *[0.05, 0.15] * 20], 64, None),
}


@pytest.mark.parametrize("kind", USELESS)
def test_a_value_head_that_predicts_nothing_is_found_and_another_is_not(tmp_path, kind):
    values, num_rows, at = USELESS[kind]
    _, raised = watched(make_config(tmp_path, rollout_batch_size=num_rows), explained(values))
    assert [number for name, number in raised if name == "useless_values"] == ([] if at is None else [at])


def test_rollouts_that_say_nothing_of_the_values_are_left_out_and_a_resumed_run_continues_the_count(tmp_path):
    config = make_config(tmp_path, rollout_batch_size=64)
    equal = {"value/explained_variance": 0.0, "score/std": 0.0}
    rollouts = [*explained(DEAD[:4]), equal, *explained([math.nan, *DEAD[4:8]])]
    first, raised = watched(config, rollouts)
    assert raised == []
    _, raised = watched(config, explained([DEAD[8]]), begin=11, state=first.state_dict())
    assert raised == [("useless_values", 11)]


def test_a_smaller_patience_of_a_resumed_run_raises_what_has_lasted_as_long_and_nothing_twice(tmp_path):
    states, bad = {}, [{"kl/ref": 200.0}] * 4
    for patience in (4, 9):
        alarms, _ = watched(make_config(tmp_path, alarm_patience=patience), bad)
        states[patience] = alarms.state_dict()
    patient = make_config(tmp_path, alarm_patience=3)
    for patience, expected in ((4, []), (9, [("kl", 5)])):
        alarms, raised = watched(patient, bad[:2], begin=5, state=states[patience])
        assert raised == expected
    assert "in 5 rollouts in a row, sampled from step 0 on" in alarms.raised[0][1]


def test_no_sample_is_from_before_the_first_step(tmp_path):
    config = make_config(tmp_path, schedule="one_step", alarm_patience=1)
    alarms, _ = watched(config, [{"kl/ref": 200.0}])
    assert "the limit 100 " in alarms.explanation and "from step -" not in alarms.explanation


def test_a_negative_kl_within_chance_is_no_alarm():
    """With probability exp(-20) at most does chance give a sum below -20."""
    for num_rows in (4, 64, 4096):
        bound = -max(0.1, CHANCE_NATS / num_rows)
        for kl, is_alarm in ((bound * 0.99, False), (bound * 1.01, True), (0.0, False)):
            assert (find_breach("negative_kl", 0.1, {"kl/ref": kl}, {}, num_rows) is not None) == is_alarm


def test_the_chance_of_a_negative_sum_of_k1_is_bounded_as_the_rule_says():
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(6, generator=generator).log_softmax(0) for _ in range(2))
    draws = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    sums = (policy - reference)[draws].view(-1, 2).sum(1)
    assert min(sums) < -1
    for nats in (0.25, 0.5, 1.0, 2.0):
        assert (sums <= -nats).float().mean() <= math.exp(-nats)


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "good"), [({}, 4), ({"schedule": "one_step"}, 2)])
def test_the_good_checkpoint_is_from_before_the_first_bad_sample(tmp_path, schedule, good):
    for step in range(1, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
    config = PPOConfig(output_dir=str(tmp_path), num_ppo_epochs=1, num_minibatches=2, use_cpu=True, **schedule)
    alarms = Alarms(dict, lambda metrics: None, lambda: True)
    alarms.load_state_dict({"in_a_row": {"kl": 1}, "first_sums": {}, "num_first": 0}, config)
    # Rollout 3, which ends at step 8, is the first bad one. It was sampled at step 6, by one_step at step 4.
    assert [path.name for path in alarms.needed_checkpoints(8, config)] == [f"checkpoint-{good}"]


def test_a_stop_ends_the_run_with_a_checkpoint_and_names_the_last_good_one_which_is_not_deleted_before(
    tmp_path, caplog
):
    settings = {"num_rollouts": 12, "stop_on_alarm": ["repeated_ngrams"], **STILL}
    settings |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 4}
    trainer = trained(tmp_path, rollout_backend=Turning(LONG, REPEATS, at=3), **settings)
    # Rollouts 3 to 5, two steps each. The weights of step 6 sampled the first of them, those of step 4 the one before.
    assert trainer.state.global_step == 12 and trainer.ended == "alarm repeated_ngrams at step 12"
    (sentence,) = said(caplog)
    assert "The last checkpoint from before it is checkpoint-4: --resume " in sentence
    assert sentence.endswith("Training stops")
    first, *others = checkpoint_folders(tmp_path)
    assert first.name == "checkpoint-4" and checkpoint_problems(first) == []
    assert len(others) <= 3 and others[-1].name == "checkpoint-12"


def test_a_stop_leaves_a_checkpoint_also_where_only_the_best_is_saved(tmp_path):
    settings = {"num_rollouts": 12, "stop_on_alarm": ["repeated_ngrams"], **STILL, "save_strategy": "best"}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score/mean"}
    backend = Turning(LONG, REPEATS, at=3)
    trainer = trained(tmp_path, rollout_backend=backend, eval_dataset=prompts(2), **settings)
    assert trainer.ended == f"alarm repeated_ngrams at step {trainer.state.global_step}"
    assert checkpoint_folders(tmp_path)[-1].name == f"checkpoint-{trainer.state.global_step}"
