"""The verdict on runs of which it is known how they went, and its arithmetic by hand."""

import json
import math
import random
from statistics import NormalDist

import pytest

from onetrunk.report.runs import read_lines, read_run
from onetrunk.report.verdict import Change, quantile, verdict_of
from tests.report.made_runs import write_lines, write_pipeline, write_ppo_run

RESUME = "the same command with --resume auto continues it"


def made(folder, before=0.2, after=0.8, alarm=None, ended=None, finished=True, parts=(), kl=3.0, length=20):
    """Write a PPO run of 20 held-out prompts whose scores are `before` and `after`, give or take 0.1."""
    write_ppo_run(folder, finished)
    log = [{"step": step, "kl/ref": 3.0, **({f"alarm/{alarm}": 1.0} if alarm else {})} for step in range(1, 9)]
    log = [{**entry, "judge/score": 0.5 - entry["step"] / 20} for entry in log]
    events = [{"event": "alarm", "name": alarm, "text": alarm, "step": 6}] if alarm else []
    write_lines(folder / "_report" / "log.jsonl", [*log, *events])
    for side, mean, shift in (("before", before, 0), ("after", after, 1)):
        rows = [{"prompt": f"p{i}", "score": mean + (0.1, -0.1)[i % 2]} for i in range(20)]
        for name, change in dict(parts).items():
            rows = [row | {f"score/{name}": 0.5 + shift * change + 0.01 * (i % 2)} for i, row in enumerate(rows)]
        write_lines(folder / "_report" / f"completions-{side}.jsonl", rows)
    if finished:
        state = {"step": 8, "epoch": 1.0, "ended": ended and f"alarm {ended} at step 6", "files": []}
        (folder / "_finished.json").write_text(json.dumps(state))
        after = {"score/mean": after, "kl/ref": kl, "completion/length": length}
        (folder / "metrics.json").write_text(json.dumps({"policy": after}))
    return folder


@pytest.mark.parametrize(
    ("settings", "level", "finding", "advice"),
    [
        ({}, "good", "rose from 0.2 to 0.8", "onetrunk chat "),
        ({"kl": 40.0, "length": 30}, "mixed", "that is far from the reference", "raise beta"),
        ({"kl": 20.0, "length": 30}, "good", "at a KL of 20.0 nats", "onetrunk chat "),
        ({"kl": 2.7, "length": 1}, "good", "at a KL of 2.7 nats", "onetrunk chat "),
        ({"after": 0.2}, "mixed", "did not change beyond its noise, from 0.2 to 0.2", "read the samples"),
        ({"after": 0.05}, "bad", "fell from 0.2 to 0.05", "lower learning_rate"),
        ({"parts": {"on_task": -0.2, "polite": 0.1}}, "mixed", "on_task fell from 0.5", "if on_task matters"),
        ({"alarm": "monitor"}, "mixed", "does not see fell from 0.45 to 0.1", "read the largest gains"),
        ({"alarm": "kl"}, "mixed", "alarm kl", "raise beta or set kl_target"),
        ({"alarm": "length_explosion"}, "mixed", "alarm length_explosion", "set missing_eos_penalty"),
        ({"alarm": "length_collapse"}, "mixed", "alarm length_collapse", "lower length_penalty"),
        ({"alarm": "useless_values"}, "mixed", "alarm useless_values", "raise rollout_batch_size"),
        ({"alarm": "equal_scores", "after": 0.2}, "mixed", "alarm equal_scores", "score a few completions by hand"),
        ({"alarm": "cut_off", "after": 0.2}, "mixed", "alarm cut_off", "raise max_completion_length"),
        ({"alarm": "entropy", "ended": "entropy"}, "bad", "alarm entropy", "set entropy_coef"),
        ({"finished": False}, "mixed", "trained up to step 8; not running now", RESUME),
    ],
)
def test_the_verdict_says_what_happened_and_what_to_do(tmp_path, settings, level, finding, advice):
    verdict = verdict_of(read_run(made(tmp_path / "run", **settings)))
    assert verdict.level == level and any(finding in clause for clause in verdict.findings)
    assert verdict.advice.startswith(advice)


def test_the_interval_of_a_change_is_that_of_the_mean_difference_of_the_pairs():
    # Differences 1, 2, 3: mean 2, standard deviation 1, standard error 1 / sqrt(3).
    change = Change.of([0, 0, 0], [1, 2, 3])
    # Student's t with 2 degrees of freedom is t = z sqrt(2 / (1 - z^2)) where z = .95 = 2 P - 1.
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    assert (change.low, change.high) == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert change.sign == 0 and Change.of([0, 0, 0], [1, 1, 1.1]).sign == 1
    assert Change.of([0, 0], [1, -1]).sign == 0 and Change.of([1, 1], [0, 0]).sign == -1
    # The normal quantile of many, and no interval from one pair.
    assert quantile(10_000) == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-3)
    assert Change.of([0], [1]).sign == 0 and "may be noise" in str(Change.of([0], [1]))


@pytest.mark.parametrize("length", [2, 3, 5, 8, 20, 48, 100])
@pytest.mark.parametrize("noisy", [slice(None), slice(1, None)])
def test_noise_is_called_no_change_in_about_95_percent_of_series(length, noisy):
    draw = random.Random(length)
    runs = [[draw.gauss(0, 1) for _ in range(length)] for _ in range(600)]
    # The standard error of a share of 5% is 0.9% here. Short series are called no change more often.
    assert sum(Change.along(run, "rollouts", noisy).sign != 0 for run in runs) / len(runs) < 0.075


@pytest.mark.parametrize(("length", "rise"), [(12, 10.0), (20, 4.0), (48, 3.0), (100, 2.0)])
def test_a_rise_of_several_standard_errors_is_found_whatever_its_shape(length, rise):
    draw = random.Random(length)
    for shape in (lambda x: x, lambda x: 1 - math.exp(-5 * x), lambda x: float(x > 0.5)):
        runs = [[rise * shape(i / (length - 1)) + draw.gauss(0, 1) for i in range(length)] for _ in range(100)]
        assert sum(Change.along(run, "rollouts").sign == 1 for run in runs) / len(runs) > 0.8


def test_a_reward_that_is_almost_never_given_has_not_changed_by_one_rollout():
    assert Change.along([0.0] * 7 + [0.01], "rollouts").sign == 0
    assert Change.along([0.01] + [0.0] * 7, "rollouts").sign == 0
    assert Change.along([0.5] * 8, "rollouts").sign == 0


def rollouts_alone(folder, scores):
    write_lines(folder / "_report" / "log.jsonl", [{"step": i, "score/mean": s} for i, s in enumerate(scores, 1)])
    (folder / "_report" / "run.json").write_text(json.dumps({"verb": "ppo"}))
    (folder / "_finished.json").write_text(json.dumps({"step": len(scores), "epoch": 1.0, "ended": None, "files": []}))
    return verdict_of(read_run(folder))


def test_without_held_out_prompts_noise_is_no_verdict_and_the_page_says_what_is_missing(tmp_path):
    draw = random.Random(0)
    for i in range(4):
        noise = rollouts_alone(tmp_path / f"noise-{i}", [0.5 + draw.gauss(0, 0.04) for _ in range(20)])
        assert noise.level == "mixed" and "did not change beyond its noise" in noise.findings[0]
        assert noise.findings[1] == "no held-out prompts were scored before and after"
        assert noise.advice.startswith("hold out rows (eval_size or eval_dataset_name)")
    few = rollouts_alone(tmp_path / "few", [0.1, 0.9])
    assert few.level == "mixed" and "went from 0.1 to 0.9, which may be noise" in few.findings[0]
    risen = rollouts_alone(tmp_path / "risen", [0.2 + i / 50 + draw.gauss(0, 0.04) for i in range(20)])
    assert risen.level == "good" and "20 rollouts)" in risen.findings[0]
    fallen = rollouts_alone(tmp_path / "fallen", [0.9 - i / 50 + draw.gauss(0, 0.04) for i in range(20)])
    assert fallen.level == "bad"


def test_an_evaluation_that_lost_is_bad_and_so_is_its_pipeline_which_quotes_one_win_rate(tmp_path):
    chain = write_pipeline(tmp_path)
    path = tmp_path / "eval" / "metrics.json"
    rate = json.loads(path.read_text())["win_rate"] | {"discrete_win_rate_interval": [0.3, 0.45], "judge": "rubric"}
    path.write_text(json.dumps({"win_rate": rate | {"unjudged": 3}}))
    verdict = verdict_of(read_run(chain))
    assert verdict.level == "bad" and verdict.findings[0] == (
        "it wins 40.0% (30.0% to 45.0%) of the pairs against reference by the judge rubric"
    )
    assert "3 pairs have no verdict" in verdict.findings[1] and str(verdict).count("of the pairs") == 1


def test_scores_and_lengths_of_an_evaluation_begin_at_the_opponent(tmp_path):
    sides = {"reference": (0.1, 10), "opponent": (0.2, 20), "policy": (0.8, 30)}
    (tmp_path / "metrics.json").write_text(
        json.dumps({s: {"score/mean": m, "completion/length": n} for s, (m, n) in sides.items()})
    )
    write_lines(tmp_path / "samples-policy.jsonl", [{"prompt": "p", "completion": "c", "score": None}])
    found = " ".join(verdict_of(read_run(tmp_path)).findings)
    assert "from 0.2 to 0.8" in found and "20 tokens per completion before and 30 after" in found


HELD_OUT = {"accuracy": 0.88, "accuracy_interval": [0.85, 0.91]}
STUDENT = {"agreement": 0.97, "agreement_interval": [0.95, 0.98]}
COUNTS = {"pairs": 10, "labelled": 9}
MADE = {"pairs": 0, "labelled": 0, "completions": 7, "blank_completions": 0}
REVISED = {"about": {"mode": "revise"}, "counts": MADE}


@pytest.mark.parametrize(
    ("results", "level", "finding", "advice"),
    [
        ({"held_out": HELD_OUT}, "good", "orders 88.0% (85.0% to 91.0%) of the held-out pairs", "onetrunk distill"),
        ({"held_out": HELD_OUT | {"accuracy_interval": [0.49, 0.91]}}, "bad", "orders 88.0%", "read the pairs"),
        ({"held_out": HELD_OUT | {"length/score_correlation": -0.8}}, "mixed", "(correlation -0.80)", "balance"),
        ({"fidelity": STUDENT}, "good", "orders 97.0% (95.0% to 98.0%)", "onetrunk ppo --reward_funcs"),
        ({"fidelity": STUDENT | {"agreement": 0.8}}, "mixed", "orders 80.0%", "train longer"),
        ({"counts": COUNTS}, "good", "9 of 10 pairs are labelled", "onetrunk reward --dataset_name"),
        ({"counts": COUNTS | {"unjudged": 1}}, "mixed", "1 pairs have no verdict yet", "the same command asks"),
        ({"counts": COUNTS | {"labelled": 0}}, "bad", "0 of 10 pairs", "take another judge"),
        ({"held_out": {"accuracy": None, "accuracy_interval": [None, None]}}, "mixed", "too few", "hold out more"),
        ({"fidelity": {"agreement": 1.0, "agreement_interval": [None, None]}}, "mixed", "too few", "hold out more"),
        (REVISED, "good", "7 of 7 completions are revised", "read some, then onetrunk sft"),
        (REVISED | {"counts": MADE | {"blank_completions": 2}}, "mixed", "5 of 7 completions", "read some"),
        (
            REVISED | {"counts": MADE | {"cut_revisions": 3}},
            "mixed",
            "3 revisions are cut off",
            "raise max_completion_length",
        ),
    ],
)
def test_what_ppo_builds_on_has_a_verdict_too(tmp_path, results, level, finding, advice):
    (tmp_path / ("statistics.json" if "counts" in results else "metrics.json")).write_text(json.dumps(results))
    verdict = verdict_of(read_run(tmp_path))
    assert verdict.level == level and verdict.advice.startswith(advice)
    assert any(finding in clause for clause in verdict.findings)


def test_a_win_rate_of_one_prompt_has_no_interval_and_no_verdict_beyond_it(tmp_path):
    rate = {"discrete_win_rate": 1.0, "discrete_win_rate_interval": [None, None], "opponent": "o", "judge": "j"}
    (tmp_path / "metrics.json").write_text(json.dumps({"policy": {"kl/ref": 1.0}, "win_rate": rate}))
    write_lines(tmp_path / "samples-policy.jsonl", [{"prompt": "p", "completion": "c", "score": None}])
    verdict = verdict_of(read_run(tmp_path))
    assert verdict.level == "mixed" and "it wins 100.0% (0.0% to 100.0%)" in " ".join(verdict.findings)


def test_lines_of_a_record_end_at_line_feeds_alone(tmp_path):
    texts = ["one\u2028two", "a\u0085b", "c\u2029d"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"completion": text}, ensure_ascii=False) + "\n" for text in texts))
    assert [row["completion"] for row in read_lines(path)] == texts and len(read_lines(path, 2)) == 2


STEEP = [2.0, 0.8, 0.6, 0.55, 0.52, 0.5]


@pytest.mark.parametrize(
    ("losses", "held_out", "level"),
    [
        (STEEP, 0.6, "good"),
        (STEEP, 0.7, "mixed"),
        ([2.0, 2.2, 2.5, 2.7, 2.9, 3.0], 3.0, "bad"),
        ([2.0, 2.1, 1.9, 2.2, 2.0, 2.1], 2.1, "mixed"),
        ([2.0, 2.1], 2.1, "mixed"),
    ],
)
def test_fine_tuning_is_judged_by_its_losses(tmp_path, losses, held_out, level):
    log = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    write_lines(tmp_path / "_report" / "log.jsonl", log)
    (tmp_path / "_report" / "run.json").write_text(json.dumps({"verb": "sft"}))
    (tmp_path / "all_results.json").write_text(json.dumps({"eval_loss": held_out}))
    assert verdict_of(read_run(tmp_path)).level == level


def test_a_training_that_was_killed_before_its_first_log_is_not_done(tmp_path):
    write_lines(tmp_path / "_report" / "log.jsonl", [{"event": "begin", "step": 0, "time": 0.0}])
    (tmp_path / "_report" / "run.json").write_text(json.dumps({"verb": "sft"}))
    assert read_run(tmp_path).status.startswith("trained up to step 0; not running now")


def test_without_a_measurement_there_is_no_verdict(tmp_path):
    (tmp_path / "all_results.json").write_text(json.dumps({"loss": 1.0}))
    assert verdict_of(read_run(tmp_path)) is None
