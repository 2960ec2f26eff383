"""Long work outside a terminal: a line a minute, no frames, and nothing about short work."""

from onetrunk.utils import bars


def test_work_is_told_in_lines_and_only_if_it_is_long(capsys, monkeypatch):
    for seconds, expected in ((60, ""), (0, "prefs: 1 of 2 prompts, 00:00 left, rows=3\n")):
        monkeypatch.setattr(bars, "SECONDS", seconds)
        with bars.WorkBar(total=2, desc="prefs", unit="prompt") as bar:
            bar.set_postfix({"rows": 3}, refresh=False)
            bar.update(1)
        err = capsys.readouterr().err
        assert expected in err if expected else err == ""
        assert "%" not in err and "\r" not in err
