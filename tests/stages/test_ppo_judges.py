"""Judges in `onetrunk ppo`: as a rating and as a monitor; on a tiny model."""

import pytest

from onetrunk import cli
from onetrunk.judges.constitution import Constitution, RubricJudge
from onetrunk.judges.hacking_monitor import HackingMonitor
from onetrunk.judges.judge import Principle
from tests.feedback.runs import answers_in
from tests.models.reward_adapters import saved_base
from tests.ppo.support import make_trainer, prompts
from tests.stages.small_runs import TRAIN, metrics, on_two_processes, write_rows
from tests.tiny import WORDS

CHECKS = """
def brief(completions, **kwargs):
    return [1 - min(len(text.split()), 8) / 8 for text in completions]

def long(completions, **kwargs):
    return [min(len(text.split()), 8) / 8 for text in completions]

def even(completion_ids, **kwargs):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""
CONSTITUTION = "name: {0}\nprinciples:\n  - text: Which reply is {0}?\n    tags: [{0}]\n"
PPO = "--model_name_or_path base --dataset_name rows.jsonl --eval_size 6 --max_completion_length 8".split()
PPO += "--num_rollouts 2 --rollout_batch_size 4 --num_ppo_epochs 2 --eval_strategy no".split() + TRAIN
JUDGE = ["--judge", "rubric", "--constitution", "long.yaml", "--rubric", '{"long": "checks.py:long"}']
MONITOR = ["--monitor_judge", "rubric", "--monitor_constitution", "brief.yaml"]
MONITOR += ["--monitor_rubric", '{"brief": "checks.py:brief"}']


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    saved_base(folder / "base", num_hidden_layers=2, initializer_range=0.1)
    write_rows(folder / "rows.jsonl", [{"prompt": f"{WORDS[i]} {WORDS[i + 1]}"} for i in range(20)])
    (folder / "checks.py").write_text(CHECKS)
    for name in ("long", "brief"):
        (folder / f"{name}.yaml").write_text(CONSTITUTION.format(name))
    return folder


def ppo(output, *options):
    return cli.main(["ppo", *PPO, "--output_dir", output, *options])


def test_a_judge_rates_and_another_watches(in_folder, capsys):
    assert ppo("rated", "--reward_funcs", "judge", "checks.py:even", *JUDGE, *MONITOR) == 0
    figures = metrics("rated")
    for side in ("reference", "policy"):
        assert {"score/judge", "score/even"} <= set(figures[side])
        assert 0 <= figures[side]["score/judge"] <= 1
    assert figures["monitor"]["judge"] == "rubric" and figures["monitor"]["left_out"] == 0
    assert figures["monitor"]["best"]["step"] in (0, 2, 4)
    assert "'judge/gap'" in capsys.readouterr().out


@pytest.mark.multi_process
@pytest.mark.slow
def test_of_two_processes_the_first_one_alone_asks_for_the_monitor(in_folder):
    options = ["--reward_funcs", "judge", *JUDGE, *MONITOR]
    assert ppo("one", *options) == 0
    on_two_processes("ppo", *PPO, "--output_dir", "two", *options)

    def ratings(rank):
        answers = answers_in(f"two/_kept/judged-{rank}.db").values()
        return sum("brief" in answer["details"]["scores"] for answer in answers)

    assert ratings(0) > 0 and ratings(1) == 0
    one, two = metrics("one"), metrics("two")
    assert two["num_processes"] == 2
    assert two["reference"] == pytest.approx(one["reference"], abs=1e-5)
    assert two["monitor"]["alarms"] == one["monitor"]["alarms"]
    assert two["monitor"]["best"]["judge_score"] == pytest.approx(one["monitor"]["best"]["judge_score"], abs=0.05)


def test_without_held_out_rows_the_monitor_looks_at_training_prompts(tmp_path):
    judge = RubricJudge({"long": lambda completions, **kwargs: [len(text) / 100 for text in completions]})
    constitution = Constitution("long", (Principle("Which is longer?", tags=("long",)),))
    trainer = make_trainer(tmp_path, dataset=prompts(12), num_rollouts=2, rollout_batch_size=4)
    monitor = HackingMonitor(judge, constitution, num_rows=6)
    monitor.attach(trainer)
    assert monitor.rows["prompt"] == prompts(12)["prompt"][:6]
    trainer.train()
    assert monitor.num_left_out == 0


RATED = ["--model_name_or_path", "no-model", "--reward_funcs", "judge"]


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--reward_funcs", "judge"], 2, "reward_funcs names judge, and judge is not set"),
        (["--reward_funcs", "judge", *JUDGE[:2]], 2, "judge is set and constitution is not"),
        (["--reward_funcs", "checks.py:even", *JUDGE], 2, "reward_funcs does not name judge"),
        (["--reward_funcs", "checks.py:even", *JUDGE[2:4]], 2, "constitution is set and judge is not"),
        (["--reward_funcs", "checks.py:even", "--monitor_every", "2"], 2, "set and monitor_judge is not"),
        (["--reward_funcs", "checks.py:even", *MONITOR[:2]], 2, "neither monitor_constitution nor constitution"),
        (["--reward_funcs", "judge", *JUDGE, *MONITOR[:2]], 2, "is what the reward is made of, and would see no gap"),
        (["--reward_funcs", "base", "--constitution", "long.yaml", "--monitor_judge", "reward:base"], 2, "see no gap"),
        ([*RATED, *JUDGE[:3], "absent.yaml", *JUDGE[4:]], 1, "the constitution absent.yaml does not exist"),
        ([*RATED, "--judge", "nowhere", "--constitution", "long.yaml"], 1, "nowhere"),
        ([*RATED, *JUDGE, *MONITOR[:4], "--monitor_rubric", '{"long": "checks.py:long"}'], 1, "no check for the"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence_before_anything_loads(in_folder, capsys, options, code, sentence):
    assert ppo("refused", *options) == code
    err = capsys.readouterr().err
    assert sentence in err and "no-model" not in err and "Traceback" not in err
    assert code == 1 or not (in_folder / "refused").exists()
