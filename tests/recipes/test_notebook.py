"""recipes/notebook.ipynb: committed without outputs; in a real kernel it learns and shows one progress bar."""

import re
from pathlib import Path

import pytest

from tests.stages.recipes import ROOT

NOTEBOOK = ROOT / "recipes" / "notebook.ipynb"
FRAME = r"rollout \d+/\d+: "


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Return the code cells after a run in an empty folder."""
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed; `make setup` installs it")
    from nbclient import NotebookClient

    notebook, folder = nbformat.read(NOTEBOOK, 4), tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "src"))
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell_with(cells, text):
    """Return the outputs of the one cell that has a text in its source."""
    (cell,) = (cell for cell in cells if text in cell.source)
    return cell.outputs


def shown(outputs, mime="text/plain"):
    """Return the data of one type that a cell displays."""
    return [output.data[mime] for output in outputs if mime in output.get("data", {})]


def printed(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_the_notebook_is_committed_without_outputs():
    text = Path(NOTEBOOK).read_text(encoding="utf-8")
    assert len(re.findall(r'"outputs": \[\]', text)) == text.count('"cell_type": "code"') > 5
    assert '"execution_count": null' in text and not re.search(r'"execution_count": \d', text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_training_has_one_display_in_a_notebook_and_its_bar_leaves_one_frame(executed):
    outputs = cell_with(executed, "trainer.train()")
    (frame,) = shown(outputs)
    assert re.match(rf"{FRAME}over: 100%.*score=1\.\d+, kl=", frame) and "█" in frame
    assert not re.search(FRAME, printed(outputs))
    assert printed(outputs).count("%|") <= 2, "loading the weights shows two frames"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_learns_plots_chats_and_tells_the_values_of_replies(executed):
    (table,) = shown(cell_with(executed, "table = "))
    scores = {row.split()[0]: list(map(float, row.split()[1:])) for row in table.splitlines()[1:]}
    for name in ("score/polite", "score/as_asked"):
        before, after = scores[name]
        assert before + 0.15 < after, name
    assert [len(shown(cell_with(executed, plot), "image/png")) for plot in ("axes", "plt.legend")] == [1, 1]
    chat = printed(cell_with(executed, "talk.answer"))
    assert chat.count("[policy] ") == chat.count("[before] ") == 3 and chat.count("(value ") == 6
