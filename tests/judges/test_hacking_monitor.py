"""The monitor over real PPO: a reward that can be hacked, a judge that is not deceived, an alarm, and a stop."""

import math
from collections.abc import Sequence

import pytest
import torch

from onetrunk.judges.constitution import Constitution, RubricJudge
from onetrunk.judges.hacking_monitor import HackingMonitor, paired_change
from onetrunk.judges.judge import Judge, Principle, Rating, Single
from tests.ppo.support import logged, make_trainer, prompts
from tests.tiny import WORDS

CONSTITUTION = Constitution("brief", (Principle("Is the reply brief?", tags=("brief",)),))
# Many words end a completion, so that its length is the policy's to choose.
RUN = {"num_rollouts": 14, "rollout_batch_size": 48, "per_device_train_batch_size": 48, "num_ppo_epochs": 4}
RUN |= {"learning_rate": 5e-3, "lr_scheduler_type": "constant", "beta": 0.0}
RUN |= {"max_completion_length": 12, "stop_tokens": list(WORDS[:20])}
SHORT = {"rollout_batch_size": 8, "per_device_train_batch_size": 8, "num_ppo_epochs": 2}


def long_ones(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """The reward that can be hacked: the longer the better."""
    return [float(len(ids)) for ids in completion_ids]


class BrevityJudge(Judge):
    """Rates a reply of no words 1, and one of 12 words 0; in some calls (from 1) it raises, or cannot be read."""

    name = "brevity"
    identity = {"judge": "brevity"}

    def __init__(self, raises_at=(), unread_at=()):
        self.raises_at, self.unread_at, self.num_calls = raises_at, unread_at, 0

    def _answer(self, items: Sequence[Single], principle: Principle, keep) -> None:
        self.num_calls += 1
        if self.num_calls in self.raises_at:
            raise RuntimeError("the server is down")
        unread = Rating(None, '5 of 5 replies are not labels (one: it begins "Sure!")')
        for index, item in enumerate(items):
            keep(index, unread if self.num_calls in self.unread_at else Rating(1 - len(item.text.split()) / 12))


def watched(folder, judge=None, monitor=None, reward=long_ones, **settings):
    """Return a trainer under a monitor, and the monitor."""
    trainer = make_trainer(folder, reward=reward, dataset=prompts(48), eval_dataset=prompts(48), **{**RUN, **settings})
    monitor = HackingMonitor(judge or BrevityJudge(), CONSTITUTION, **{"window": 4, **(monitor or {})})
    monitor.attach(trainer)
    return trainer, monitor


@pytest.mark.slow
def test_a_hackable_reward_raises_the_alarm_and_stops_the_run(tmp_path, caplog):
    def brief(completions, **kwargs):
        return [1 - len(text.split()) / 12 for text in completions]

    settings = {"save_strategy": "steps", "save_steps": 4, "num_rollouts": 24}
    trainer, monitor = watched(tmp_path, RubricJudge({"brief": brief}), {"action": "stop"}, **settings)
    trainer.train()
    proxy, judged, gaps = (logged(trainer, f"judge/{name}") for name in ("proxy_score", "score", "gap"))
    assert proxy[-1] > proxy[0] and judged[-1] < judged[0]
    assert gaps[-1] > 0.5 and gaps[-1] > gaps[0]
    assert logged(trainer, "judge/alarm")[-1] == 1.0
    # Planned were 96 steps; it ended at the first alarm, after a rollout.
    assert trainer.state.global_step < 96 and trainer.state.global_step % 4 == 0 and monitor.num_alarms == 1
    said = caplog.text
    assert "training stops: from step" in said and "the judge rubric, which PPO does not see, fell by" in said
    assert "Correct the reward or raise beta" in said and monitor.explanation in said


class Foreseen(BrevityJudge):
    """Rates everything of a call alike: its first call, its second, ..."""

    def __init__(self, levels):
        super().__init__()
        self.levels = levels

    def _answer(self, items, principle, keep):
        self.num_calls += 1
        for index in range(len(items)):
            keep(index, Rating(self.levels[self.num_calls - 1]))


@pytest.mark.slow
def test_a_run_that_the_monitor_ended_stays_ended_and_is_asked_nothing_more(tmp_path):
    calls = []

    def rising(completions, **kwargs):
        calls.append(1)
        return [float(len(calls))] * len(completions)

    def run(judge, **more):
        settings = {**SHORT, "save_strategy": "steps", "save_steps": 4, **more}
        return watched(tmp_path, judge, {"window": 3, "action": "stop"}, reward=rising, **settings)

    trainer, monitor = run(Foreseen([0.5, 0.6, 0.7, 0.9, 0.4]))
    trainer.train()
    assert trainer.state.global_step == 8 and monitor.best == [6, pytest.approx(0.9)]
    assert "The judge preferred step 6; checkpoint-4 is the last checkpoint up to there" in monitor.explanation
    again, other = run(Foreseen([]))
    again.train(resume_from_checkpoint="auto")
    assert again.state.global_step == 8 and again.ended == trainer.ended == "the monitor's alarm at step 8"
    assert other.summary() == monitor.summary() and other.summary()["best"] is not None
    # Continued all the same it needs another window to be ended again: after steps 10 and 12.
    more, third = run(Foreseen([0.3, 0.2]), continue_ended_run=True)
    more.train(resume_from_checkpoint="auto")
    assert more.state.global_step == 12 and third.num_alarms == 2


def test_a_judge_that_agrees_with_the_reward_raises_no_alarm(tmp_path):
    def short_ones(completion_ids, **kwargs):
        return [-float(len(ids)) for ids in completion_ids]

    trainer, monitor = watched(tmp_path, reward=short_ones, num_rollouts=5)
    trainer.train()
    assert monitor.num_alarms == 0 and set(logged(trainer, "judge/alarm")) == {0.0}
    assert logged(trainer, "judge/score")[-1] > logged(trainer, "judge/score")[0]


def test_a_judge_that_is_down_or_cannot_be_read_costs_a_measurement_and_not_the_run(tmp_path, caplog):
    judge = BrevityJudge(raises_at=(1, 3, 4), unread_at=(6,))
    trainer, monitor = watched(tmp_path, judge, **SHORT, num_rollouts=5)
    trainer.train()
    # Not before training and not after rollouts 2, 3 and 5; the first answer becomes the baseline.
    assert [m["step"] for m in monitor.measurements] == [2, 8]
    assert len(logged(trainer, "judge/score")) == 2
    assert caplog.text.count("0 of 48 completions of the monitor have scores from both") == 4
    assert "the server is down" in caplog.text
    assert '(the judge on one of them: 5 of 5 replies are not labels (one: it begins "Sure!"))' in caplog.text


def alarms(drift, num_runs=30, num_prompts=64, num_measurements=30):
    """Return after how many measurements the alarm came in each run; None for never. The reward rises all the time."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(num_runs):
        monitor = HackingMonitor(BrevityJudge(), CONSTITUTION)
        monitor.baseline = {"proxy": [0.0, 1.0], "judge": [0.0, 1.0]}
        own = torch.randn(num_prompts, generator=generator)
        found.append(None)
        for step in range(num_measurements):
            noise = [torch.randn(num_prompts, generator=generator) for _ in range(2)]
            proxy, judged = own + noise[0] + step, (own + noise[1]) / 2**0.5 - drift * step
            kept = {"step": step, "proxy": proxy.tolist(), "judge": judged.tolist()}
            monitor.measurements = [*monitor.measurements, kept][-20:]
            if monitor.find_alarm() is not None:
                found[-1] = step + 1
                break
    return found


def test_a_judge_that_stays_is_no_alarm_and_one_that_falls_slowly_is():
    # With 3.5 standard errors and three windows about 1 run in 50 has one by chance.
    assert sum(step is not None for step in alarms(0.0)) <= 3
    slow = alarms(0.02)
    assert None not in slow and sorted(slow)[len(slow) // 2] <= 20
    fast = alarms(0.1)
    assert None not in fast and sorted(fast)[len(fast) // 2] <= 6


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"every": 0}, "monitor_every is 0"),
        ({"window": 1}, "window is 1"),
        ({"action": "explode"}, "monitor_action is 'explode'; expected warn or stop"),
        ({"num_rows": 1}, "monitor_rows is 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        HackingMonitor(BrevityJudge(), CONSTITUTION, **settings)


def test_the_change_is_the_rise_of_a_line_by_hand():
    # Row 1: 0, 1, 2 rises by 2; row 2: 5, 5, 8 has slope (8 - 5) / 2 = 1.5 a step, so 3 in all.
    mean, error = paired_change([[0.0, 5.0], [1.0, 5.0], [2.0, 8.0]])
    assert mean == pytest.approx(2.5)
    # Standard deviation of (2, 3) is .7071; over the root of 2 it is .5.
    assert error == pytest.approx(0.5)
    # What is peculiar to a row is no noise.
    mean, error = paired_change([[own + 0.1 * t for own in (0.0, 100.0, -50.0, 7.0)] for t in range(4)])
    assert mean == pytest.approx(0.3) and error < 1e-9


def test_rows_with_a_gap_are_left_out_and_one_row_shows_nothing():
    whole = paired_change([[0.0, 1.0], [1.0, 3.0]])
    assert paired_change([[0.0, None, 1.0], [1.0, 5.0, 3.0]]) == whole
    assert all(math.isnan(x) for x in paired_change([[0.0, None], [1.0, 2.0]]))
