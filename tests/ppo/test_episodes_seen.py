"""What is seen of episodes: metrics against what the environment counted, alarms, transcripts, report, card."""

import functools
import json
import re
import threading
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from onetrunk.ppo.monitoring.metrics import episode_metrics, rollout_metrics
from onetrunk.ppo.rollout import PromptBatch, ScoredRollout
from onetrunk.ppo.trainer import PPOTrainer
from onetrunk.report.record import RunRecord
from onetrunk.report.report import write_report
from onetrunk.rewards.reward import Scores
from onetrunk.rollouts.episodes.rows import EpisodeCounts, EpisodeOutcome
from onetrunk.types import Rollout
from tests.ppo.support import logged, make_trainer, prompts
from tests.ppo.test_tensorboard import events_of, text
from tests.tiny import WORDS

MAX_TURNS = 3


class Breaking:
    """Answers the first turn, and breaks at every later one."""

    lock = threading.Lock()
    num_episodes = num_calls = num_errors = 0

    def reset(self, *, seed, options):
        with self.lock:
            Breaking.num_episodes += 1
        self.turns = 0
        return "", {}

    def step(self, action):
        self.turns += 1
        with self.lock:
            Breaking.num_calls += 1
            Breaking.num_errors += self.turns > 1
        if self.turns > 1:
            raise RuntimeError("cat cat")
        return "cat dog", 0.25, False, False, {}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Return a trainer after two rollouts and an evaluation, and the metrics by what the environment counted."""
    folder, make = tmp_path_factory.mktemp("seen"), functools.partial(PPOTrainer, environment_factory=Breaking)
    trainer = make_trainer(
        folder, reward=None, eval_dataset=prompts(3), trainer_class=make, num_rollouts=2, max_turns=MAX_TURNS,
        max_completion_length=60, stop_tokens=list(WORDS[:30]), alarm_patience=2, log_completions=True,
        report_to="tensorboard", check_memory=False, gae_unit="turn",
    )  # fmt: skip
    trainer.add_callback(RunRecord(trainer, "ppo"))
    trainer.evaluate_reference()
    Breaking.num_episodes = Breaking.num_calls = Breaking.num_errors = 0
    trainer.train()
    counted = {"episode/tool_calls": Breaking.num_calls / Breaking.num_episodes}
    counted["episode/tool_errors"] = Breaking.num_errors / Breaking.num_calls
    trainer.final_evaluation()
    trainer.save_model()
    return folder, trainer, counted


def samples(folder, name):
    return list(map(json.loads, (folder / f"completions/{name}.jsonl").read_text().splitlines()))


def test_metrics_are_what_the_environment_counted(seen):
    _, trainer, counted = seen
    # Rollouts have equally many episodes, and nearly equally many calls.
    for name, value in counted.items():
        found = logged(trainer, name)
        assert len(found) == 2 and sum(found) / 2 == pytest.approx(value, rel=0.01), name
    assert logged(trainer, "episode/turns") == logged(trainer, "episode/tool_calls")
    assert logged(trainer, "episode/failed") == [0.0, 0.0]
    assert all(tokens >= 2 for tokens in logged(trainer, "episode/observation_tokens"))
    assert all(seconds >= 0 for name in ("time/tools_s", "time/answer_s") for seconds in logged(trainer, name))
    at_end = logged(trainer, "eval_episode/turns")
    assert all(1 <= turns <= MAX_TURNS for turns in at_end) and not logged(trainer, "eval_time/tools_s")


def test_calls_that_fail_and_episodes_without_end_raise_their_alarms(seen):
    _, trainer, _ = seen
    explanations = dict(trainer.alarms.raised)
    assert "tools and their docstrings" in explanations["tool_errors"]
    assert "raise max_turns, or" in explanations["turn_limit"]


def test_samples_have_transcripts_with_the_reward_and_the_value_of_each_turn(seen):
    folder, _, _ = seen
    for name in ("step-000002", "eval-000002"):
        for row in samples(folder, name):
            turns = [entry for entry in row["transcript"] if "turn" in entry]
            assert [entry["turn"] for entry in turns] == list(range(len(turns)))
            assert row["transcript"][0]["turn"] == 0 and row["transcript"][1] == {"observation": "cat dog"}
            assert [entry["reward"] for entry in turns] == [0.25] + [0.0] * (len(turns) - 1)
            assert sum(entry["reward"] for entry in turns) == row["score"] and all("value" in e for e in turns)
    assert any(entry["value"] for entry in turns)
    row = samples(folder, "step-000002")[0]
    whole = "".join(entry.get("text", entry.get("observation")) for entry in row["transcript"])
    # A completion leaves out its last stop token.
    assert whole.replace(" ", "").startswith(row["completion"].replace(" ", ""))


def test_tensorboard_report_and_card_show_them(seen):
    folder, _, _ = seen
    line = r"\[turn 0, reward 0.25, value -?[\d.e-]+\]"
    board = events_of(folder)
    shown = [text(board, tag)[2] for tag in ("rollout/completions", "eval/completions")]
    for page in (*shown, write_report([folder]).read_text()):
        assert re.search(line, page) and "[observation] cat dog" in page
    card = (folder / "README.md").read_text()
    assert "| environments | Breaking |\n" in card and "| max_turns | 3 |\n" in card and "| tools |" not in card


def test_metrics_of_three_episodes_by_hand():
    counts = [EpisodeCounts(1, 0, 2, 1, 3, 1, 10, 4.0, 0.5), EpisodeCounts(1, 0, 4, 0, 3, 3, 20, 2.0, 0.5, 3)]
    counts.append(EpisodeCounts(1, 1, 0, 0, 0, 0, 0, 0.0, 0.5))
    episodes = [EpisodeOutcome("", None, None, count, "broke" if i == 2 else None) for i, count in enumerate(counts)]
    # The first ended at max_turns, the second at the length limit; the third failed.
    rollout = Rollout([[5]] * 3, [[6]] * 3, [torch.zeros(1)] * 3, [True, False, False], episodes=episodes)
    batch, scores = PromptBatch([""] * 3, [[5]] * 3, {}, [(0,)] * 3), Scores(torch.zeros(3), {})
    scored, accelerator = ScoredRollout(batch, rollout, [""] * 3, scores), Accelerator(cpu=True)
    found = episode_metrics(scored, accelerator)
    third = dict.fromkeys(["episode/turn_limit", "episode/length_limit", "episode/failed"], 1 / 3)
    calls = {"episode/tool_calls": 2, "episode/tool_errors": 4 / 6, "episode/observation_tokens": 10}
    times = {"time/tools_s": 1.5, "time/answer_s": 1.0}
    assert found == pytest.approx({"episode/turns": 2, "episode/turns_cut": 1, **third, **calls, **times})
    # A row that another process counts too.
    part = episode_metrics(scored, accelerator, torch.tensor([False, True, False]))
    assert part["episode/turns"] == 4 and part["episode/tool_errors"] == 1
    assert episode_metrics(replace(scored, rollout=replace(rollout, episodes=None)), accelerator) == {}


def test_an_episode_without_a_score_has_no_part_in_the_rewards_of_turns():
    rollout = Rollout([[5]] * 2, [[6, 7]] * 2, [torch.zeros(2)] * 2, [True] * 2, turn_ids=[[0, 1]] * 2)
    dense = [torch.tensor([2.0, 1.0]), torch.zeros(2)]
    batch, scores = PromptBatch([""] * 2, [[5]] * 2, {}, [(0,)] * 2), Scores(torch.tensor([3.0, torch.nan]), {}, dense)
    metrics = rollout_metrics(ScoredRollout(batch, rollout, [""] * 2, scores), [], Accelerator(cpu=True))
    assert (metrics["reward/turn_0"], metrics["reward/turn_1"]) == (2.0, 1.0)
