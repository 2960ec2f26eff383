"""The report in headless Chromium: no console error, every plot is shown, and nothing is wider than a phone."""

import html
import json
import re
import shutil
import subprocess

import pytest

from onetrunk.report.report import write_report
from tests.report.made_runs import write_pipeline, write_ppo_run

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
PHONE = 390
# Runs in the page after it has loaded; a copy of the page without the policy that forbids scripts.
PROBE = """<pre id="probe"></pre><script>addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("svg[data-plot]")].map(
    (svg) => [svg.dataset.plot, svg.getBoundingClientRect().width, svg.getBoundingClientRect().height]);
  document.getElementById("probe").textContent = JSON.stringify({
    boxes, page: document.documentElement.scrollWidth, window: innerWidth});
});</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium; apt-get install chromium-headless-shell"),
]


def browse(page, *options):
    """Return the page after loading, and what the browser wrote to its console."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent}/profile", "--virtual-time-budget=2000", "--dump-dom", *options]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(page, *options):
    """Return what the probe measured in a copy of the page."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", PROBE + "</body>")
    copy = page.with_name("probe.html")
    copy.write_text(text)
    shown, _ = browse(copy, *options)
    return json.loads(html.unescape(re.search(r'(?s)<pre id="probe">(.*?)</pre>', shown).group(1)))


@pytest.mark.parametrize("name", ["run", "pipeline", "both"])
def test_every_plot_is_shown_fits_a_phone_and_writes_nothing_to_the_console(tmp_path, name):
    chain, other = write_pipeline(tmp_path), write_ppo_run(tmp_path / "other", shift=1.0)
    folders = {"run": [tmp_path / "ppo"], "pipeline": [chain], "both": [tmp_path / "ppo", other]}
    page = write_report(folders[name], tmp_path / "out")
    shown, console = browse(page)
    assert console == [] and "</body>" in shown
    expected = re.findall(r'data-plot="([^"]+)"', page.read_text())
    measured = probed(page, f"--window-size={PHONE},800")
    assert [box[0] for box in measured["boxes"]] == expected
    for _, width, height in measured["boxes"]:
        assert 200 < width <= measured["window"] and height > 100
    assert measured["page"] <= measured["window"]
