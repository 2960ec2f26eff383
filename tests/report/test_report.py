"""Reports of runs that are finished, running, killed, compared, or a pipeline; what a run says stays text."""

import json
import re
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from onetrunk import cli
from onetrunk.parallel.heartbeat import Heartbeat
from onetrunk.report.blocks import MARKDOWN, PAGE, Block, Figure, rendered
from onetrunk.report.plots import PLOTS, draw, drawn
from onetrunk.report.report import facts_of, write_report, write_report_of
from onetrunk.report.runs import read_run
from onetrunk.utils.beats import Beat, heartbeat_file
from tests.report.made_runs import ALARM, ppo_log, write_lines, write_pipeline, write_ppo_run, write_preferences


def svgs(page):
    return dict(re.findall(r'(?s)<svg[^>]*data-plot="([^"]+)"[^>]*>(.*?)</svg>', page))


class Elements(HTMLParser):
    """Collects the elements of a page and all ids and addresses in it."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.addresses = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href"):
                self.addresses.append(value)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_report([write_ppo_run(tmp_path_factory.mktemp("runs") / "good")])


@pytest.fixture(scope="module")
def page(written):
    return written.read_text()


def test_the_page_has_every_plot_that_the_log_has_metrics_for(page):
    expected = "score kl score_against_kl components length entropy clip_fraction explained_variance judge judge_gap"
    assert set(svgs(page)) == set(f"{expected} time throughput memory".split())


def test_the_page_loads_nothing_and_no_name_in_it_occurs_twice(page):
    found = Elements(page)
    assert "script" not in found.tags and "link" in found.tags  # The icon, which is empty.
    # A reader may go on to the samples.
    assert {a for a in found.addresses if not a.startswith(("#", "data:"))} == {"completions-after.jsonl"}
    assert len(found.ids) == len(set(found.ids)) > 100
    named = {address[1:] for address in found.addresses if address.startswith("#")}
    assert named <= set(found.ids)
    for text in re.findall(r"(?s)<svg.*?</svg>", page):
        ElementTree.fromstring(text)


def test_no_field_of_a_block_becomes_part_of_a_page():
    hostile = "<b>|![x](https://host/p.png)"
    figure = Figure(hostile, "plot.png", Markup("<svg></svg>"), hostile)
    inner = Block(hostile, hostile, [hostile], [[hostile]], {hostile: 'a"b'}, [(hostile, hostile)], [figure])
    sample = (hostile, [(hostile, hostile)])
    blocks = [inner, Block(hostile, samples=[sample], blocks=[inner], is_folded=True)]
    page, text = (rendered(name, hostile, blocks) for name in (PAGE, MARKDOWN))
    found = Elements(page)
    assert "b" not in found.tags and "img" not in found.tags and 'a"b' in found.addresses
    outside = re.sub(r"(?s)```text\n.*?```", "", text)
    assert "<b>" not in outside and "![x](" not in outside and outside.count("![") == 2
    assert text.count(hostile) == 2  # The prompt and the completion, each in its fence.


def test_the_facts_of_a_run_worked_out_by_hand(page):
    # 80 seconds on 2 GPUs are 0.0444 GPU-hours.
    for name, value in {"hours": "0.02", "GPU-hours": "0.04", "peak memory, GiB": "1.50"}.items():
        assert f"<td>{name}</td><td>{value}</td>" in page
    assert "<td>score/mean</td><td>0.1</td><td>0.9</td><td>+0.8</td>" in page
    assert ALARM in page and "kl, step 6" in page
    settings = page[page.index("differ from the defaults") : page.index("All settings")]
    assert "<td>beta</td><td>0.1</td>" in settings and "gamma" not in settings
    assert "8 rows, sha256 abc" in page and "<td>torch</td><td>2.13</td>" in page


@pytest.mark.parametrize(("peak", "text"), [(10.0, "10.00"), (0.004, "0.00"), (0.0, None)])
def test_the_peak_memory_is_shown_where_it_was_measured(tmp_path, peak, text):
    folder = write_ppo_run(tmp_path / "run")
    lines = [{**entry, "memory/peak_gib": peak} for entry in ppo_log()]
    write_lines(folder / "_report" / "log.jsonl", lines)
    rows = {name: values for name, *values in facts_of([read_run(folder)]).rows}
    assert rows.get("peak memory, GiB") == (None if text is None else [text])


def test_the_verdict_stands_before_the_samples(page):
    assert page.index('class="verdict mixed"') < page.index("The same prompts before and after")


def test_samples_are_the_largest_gains_the_largest_losses_and_random_ones(page):
    gains = page[page.index("The largest gains") : page.index("The largest losses")]
    losses = page[page.index("The largest losses") : page.index("Settings that differ")]
    # The score of prompt i rises by i - 3.
    assert re.findall(r"<pre>(prompt \d+)", gains) == [f"prompt {i}" for i in (19, 18, 17, 16)]
    assert re.findall(r"<pre>(prompt \d+)", losses) == [f"prompt {i}" for i in (0, 1, 2)]
    assert page.count('<div class="sample">') == 4 + 4 + 3


def test_the_markdown_shows_the_pngs_next_to_it(written):
    text = written.with_name("report.md").read_text()
    names = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert len(names) == 13 and all((written.parent / name).read_bytes().startswith(b"\x89PNG") for name in names)
    # A fence that is longer than the one in the completion.
    assert "````text\n</pre><script>alert(1)</script> ``` | <b>\n````" in text


@pytest.mark.slow
def test_a_run_that_was_stopped_says_so_while_its_process_still_lives_and_not_after_it_was_resumed(tmp_path):
    folder = write_ppo_run(tmp_path / "stopped", finished=False)
    log = folder / "_report" / "log.jsonl"
    with log.open("a") as file:
        file.write('{"event": "stop", "signal": "SIGTERM", "step": 8, "time": 81.0}\n')
    with Heartbeat.of(folder, 0).running(1):
        text = write_report([folder]).read_text()
        assert "stopped at step 8 (SIGTERM); --resume auto continues it" in text
        with log.open("a") as file:
            file.write('{"event": "begin", "step": 8, "time": 90.0}\n')
        assert read_run(folder).status.startswith("running, in phase")


def test_a_run_whose_process_is_gone_is_not_running_though_its_last_sign_is_new(tmp_path):
    folder = write_ppo_run(tmp_path / "run", finished=False)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    beat = Beat(0, socket.gethostname(), process.pid, time.time(), "train", step=7)
    heartbeat_file(folder, 0).write_text(json.dumps(asdict(beat)))
    assert read_run(folder).status == "running, in phase train at step 7"
    process.communicate(b"\n")
    assert read_run(folder).status.startswith("trained up to step 8; not running now")


def test_a_run_from_python_is_finished_with_its_result_and_has_no_metrics_of_an_earlier_end(tmp_path):
    folder = write_ppo_run(tmp_path / "run")
    (folder / "_finished.json").unlink()  # As where it is continued.
    assert read_run(folder).results == {} and read_run(folder).status.startswith("trained up to step 8")
    (folder / "manifest.json").write_text("{}")
    for event, status in (("end", "finished at step 8"), ("begin", "trained up to step 8; not running")):
        with (folder / "_report" / "log.jsonl").open("a") as file:
            file.write(f'{{"event": "{event}", "step": 8, "time": 90.0}}\n{{"step": 8, "eval_x": 1}}\n')
        assert read_run(folder).status.startswith(status) and "policy" in read_run(folder).results


def test_a_run_without_a_record_is_read_from_its_last_checkpoint(tmp_path):
    for step in (2, 8):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": ppo_log(step)}))
    run = read_run(tmp_path)
    assert run.series("score/mean") == ([1, 3, 5, 7], [0.1, 0.3, 0.5, 0.7])
    assert run.hours() is not None and "score" in svgs(write_report([tmp_path]).read_text())


@pytest.mark.slow
def test_runs_side_by_side_share_their_plots(tmp_path):
    folders = [write_ppo_run(tmp_path / name, shift=shift) for name, shift in (("one", 0.0), ("two", 1.0))]
    text = write_report(folders, tmp_path / "both").read_text()
    assert "one: training rollouts" in svgs(text)["score"] and "two: held-out prompts" in svgs(text)["score"]
    assert "<td>eval_score/mean</td><td>0.9</td><td>1.9</td>" in text
    assert "Alarms of one" in text and "Alarms of two" in text
    # Without another place next to the runs, whose own pages stay.
    assert write_report(folders) == tmp_path / "_report" / "report.html"
    assert not (folders[0] / "_report" / "report.html").exists()
    other = write_ppo_run(tmp_path / "elsewhere" / "one")
    with pytest.raises(ValueError, match="two of the runs are named one"):
        write_report([folders[0], other], tmp_path / "same")


def test_a_pipeline_is_a_chain_with_what_every_stage_reached(tmp_path):
    chain = write_pipeline(tmp_path)
    (tmp_path / "ppo/_report/report.html").write_text("a page")
    text = write_report([chain]).read_text()
    assert "<td>the score of held-out prompts rose from 1 to 7.5 " in text
    # The verdict and the table mention one win rate.
    assert text.count("t wins 40.0% (25.0% to 55.0%) of the pairs against reference") == text.count("40.0%") == 2
    assert 'href="../../ppo/_report/report.html"' in text and ALARM in text
    # And back.
    assert 'href="../../chain/_report/report.html"' in write_report([tmp_path / "ppo"]).read_text()
    assert "failed" in text and "1.2 minutes" in text  # 72 seconds.


def test_alarms_come_the_worst_first(tmp_path):
    folder = write_ppo_run(tmp_path / "run")
    events = [{"event": "alarm", "name": n, "text": n, "step": s} for n, s in (("kl", 2), ("entropy", 4), ("x", 1))]
    log = [{"step": s, "alarm/kl": 1.0, "alarm/entropy": float(s > 4)} for s in (2, 4, 6, 8)]
    write_lines(folder / "_report" / "log.jsonl", [*log, *events])
    assert [alarm.name for alarm in read_run(folder).alarms()] == ["kl", "entropy", "x"]
    (folder / "_finished.json").write_text(json.dumps({"step": 8, "ended": "alarm x at step 1", "files": []}))
    assert [alarm.name for alarm in read_run(folder).alarms()] == ["x", "kl", "entropy"]


def test_the_command_says_where_the_page_is_and_what_is_wrong_with_its_arguments(tmp_path, capsys):
    folder = write_preferences(tmp_path / "run")
    assert cli.main(["report", str(folder), "--output_dir", str(tmp_path / "out")]) == 0
    assert f"report: wrote {tmp_path}/out/report.html" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "absent")]) == 2
    assert "absent does not exist" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path)]) == 1
    assert "holds no run: there is no _report/log.jsonl" in capsys.readouterr().err


def test_without_matplotlib_the_page_says_so_and_has_the_rest(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = write_report([write_ppo_run(tmp_path / "run")]).read_text()
    assert "No plots: matplotlib cannot be imported; pip install matplotlib." in text and ALARM in text


def test_a_damaged_file_is_named_and_does_not_fail_a_run_that_has_ended(tmp_path, capsys, caplog):
    folder = write_ppo_run(tmp_path / "run")
    (folder / "metrics.json").write_text("{")
    assert cli.main(["report", str(folder)]) == 1
    assert str(folder / "metrics.json") in capsys.readouterr().err
    assert write_report_of(folder) is None and str(folder / "metrics.json") in caplog.text


def test_a_name_with_two_dollar_signs_is_drawn_as_it_is(tmp_path):
    runs = [read_run(write_ppo_run(tmp_path / name)) for name in ("$\\frac{x$", "two")]
    png, svg = drawn(lambda: draw(PLOTS[0], runs), "score", "Score")
    assert png.startswith(b"\x89PNG") and "$\\frac{x$: training rollouts" in svg


def test_a_folder_named_like_a_script_is_a_relative_address(tmp_path):
    chain, name = write_pipeline(tmp_path), "javascript:alert(1)"
    (tmp_path / "ppo").rename(tmp_path / name)
    record = chain / "pipeline.json"
    record.write_text(record.read_text().replace(f"{tmp_path}/ppo", f"{tmp_path}/{name}"))
    (tmp_path / name / "_report" / "report.html").write_text("a page")
    addresses = Elements(write_report([chain], tmp_path).read_text()).addresses
    assert "javascript%3Aalert%281%29/_report/report.html" in addresses
    assert not [address for address in addresses if address.startswith("javascript:")]


def test_the_page_of_preference_rows_has_pairs_and_a_histogram_of_the_labels(tmp_path):
    text = write_report([write_preferences(tmp_path)]).read_text()
    sure, unsure = text.index("The judge is sure"), text.index("The judge is not sure")
    assert sure < text.index("<pre>c9</pre>") < unsure < text.index("<pre>c5</pre>") and "chosen, 90%" in text
    assert [*svgs(text)] == ["labels"] and "0.95-1.00" in svgs(text)["labels"]


def test_the_plots_have_no_background_of_their_own(page):
    # The first path of a plot is its figure, the second its axes; both are left to the page.
    plots = svgs(page)
    assert plots
    for plot in plots.values():
        assert re.search(r'id="[^"]*patch_2"[^>]*>\s*<path[^>]*style="fill: none', plot)
