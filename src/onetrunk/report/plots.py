"""The plots of a report. Each is drawn once, and saved as SVG inside the page and as PNG next to it.

In the SVG, axes and text have the colour of the page's text (`currentColor`), so one drawing suits a light and a dark
page. Names in it begin with the plot's own name, because all plots share one page.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from onetrunk.report.blocks import Block, Figure
from onetrunk.report.runs import Run
from onetrunk.utils.files import atomic_write_bytes
from onetrunk.utils.redaction import address_of
from onetrunk.verbs import VERBS

if TYPE_CHECKING:
    from matplotlib import figure as mpl

# Name of the PNG file, title, note, and what draws it.
Drawing = tuple[str, str, str, Callable[[], "mpl.Figure"]]

# Inches; a page at phone width shows a plot at about half of it.
SIZE = (6.0, 3.6)
# Replaced by currentColor; nothing else in a plot has this colour.
INK = "#1f2329"
GRID = "#8a8f98"
# Readable on white and on a dark page.
COLORS = ("#2f81f7", "#e3742b", "#2da44e", "#a371f7", "#d6336c", "#b08800", "#1b9aaa", "#8a6d5b")
ALARM = "#d1242f"
STYLES = ("-", "--", ":", "-.")
# More points than this are drawn without marks.
FEW_POINTS = 40


@dataclass(frozen=True)
class Plot:
    """A plot of metrics over optimizer steps, or of one metric against another."""

    name: str
    title: str
    ylabel: str
    # Label by metric.
    curves: Mapping[str, str]
    note: str = ""
    against: str | None = None
    zero: bool = False
    # What a run trains that has it (`Verb.trains`); "": anything.
    trains: str = ""


HELD_OUT = "held-out prompts"
TRAINING = "training rollouts"


def both(metric: str) -> dict[str, str]:
    return {metric: TRAINING, f"eval_{metric}": HELD_OUT}


# In the order of the page. A plot without data is left out.
PLOTS = (
    Plot("score", "Score", "mean score", both("score/mean"),
         "Raw scores of completions. The first held-out point, at step 0, is the model before training.",
         trains="policy"),
    Plot("pair_accuracy", "Pairs in the right order", "share",
         {"pairs/accuracy": "training pairs", "eval_pairs/accuracy": "held-out pairs"},
         "0.5 is chance. Training pairs far above held-out ones: it overfits.", trains="scores"),
    Plot("pair_lead", "Lead of the better completion", "score", {"pairs/lead": "training pairs"},
         "How much higher the better completion scores. It grows with confidence, right or wrong.", trains="scores"),
    Plot("pair_score", "Mean score of both completions", "score", {"score/mean": "training pairs"},
         "Only differences are trained, so this level means nothing; score_scale.json has it.", trains="scores"),
    Plot("kl", "KL to the reference", "nats per completion", both("kl/ref"),
         "How far the policy has moved from where it started.", zero=True),
    Plot("score_against_kl", "Score against KL", "mean score", both("score/mean"),
         "What each nat of KL buys. A score that falls as the KL grows means that the reward is being hacked.",
         against="kl/ref"),
    Plot("length", "Completion length", "tokens", both("completion/length"),
         "A sudden change means that the reward pays for length, or for saying nothing.", zero=True),
    Plot("stopped", "Completions that end by themselves", "share", both("completion/stopped_fraction")),
    Plot("entropy", "Entropy of the policy", "nats per token", {"policy/entropy": "policy"},
         "Falls slowly; near 0 the policy has one answer to every prompt.", zero=True),
    Plot("clip_fraction", "Tokens whose gradient is clipped", "share", {"policy/clip_fraction": "policy"}),
    Plot("explained_variance", "Explained variance of the value head", "share",
         {"value/explained_variance": "value head"}, "Of observed returns: 1 is perfect, 0 a constant."),
    Plot("judge", "Monitor: reward and judge", "score",
         {"judge/proxy_score": "reward", "judge/score": "judge that PPO does not see"}),
    Plot("judge_gap", "Judge gap", "standard deviations", {"judge/gap": "reward minus judge"},
         "Both have the unit of a score before training. A gap that grows is reward hacking."),
    Plot("time", "Seconds per phase", "seconds between logs",
         {"time/generate_s": "generate", "time/score_s": "score", "time/update_s": "update",
          "time/judge_s": "monitor"}, zero=True),
    Plot("throughput", "Throughput", "completion tokens per second",
         {"throughput/completion_tokens_per_s": "all phases"}, zero=True),
    Plot("memory", "Peak memory", "GiB", {"memory/peak_gib": "first process"}, zero=True),
    Plot("loss", "Loss", "loss", {"loss": "training", "eval_loss": "held-out rows"}),
    Plot("accuracy", "Accuracy", "share",
         {"accuracy": "training", "eval_accuracy": "held-out rows", "mean_token_accuracy": "training, tokens",
          "eval_mean_token_accuracy": "held-out rows, tokens"}),
    Plot("learning_rate", "Learning rate", "learning rate", {"learning_rate": "optimizer"}, zero=True),
    Plot("grad_norm", "Norm of the gradient", "norm before clipping", {"grad_norm": "gradient"}, zero=True),
)  # fmt: skip


def plots_of(runs: Sequence[Run]) -> list[Plot]:
    """Return the plots for which at least one of some runs has data."""
    plots = list(PLOTS)
    scores = [name for run in runs for entry in run.log for name in entry if name.startswith("score/")]
    components = {name: name.removeprefix("score/") for name in scores if name not in ("score/mean", "score/std")}
    if len(components) > 1:
        plots.insert(3, Plot("components", "Reward components", "mean score", components))

    def has_data(plot: Plot) -> bool:
        # A run without a record is that of a PPOTrainer.
        trained = [VERBS[run.verb].trains if run.verb in VERBS else "policy" for run in runs]
        fitting = [run for run, what in zip(runs, trained, strict=True) if plot.trains in ("", what)]
        return any(_points(run, plot, metric)[0] for run in fitting for metric in plot.curves)

    return [plot for plot in plots if has_data(plot)]


def draw(plot: Plot, runs: Sequence[Run]) -> mpl.Figure:
    """Return a plot of one run, or of several in one colour each."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=SIZE)
    # A fixed place: finding one takes half of the time of a plot.
    axes = figure.add_axes((0.12, 0.14, 0.86, 0.82))
    is_alone = len(runs) == 1
    for index, run in enumerate(runs):
        for position, (metric, name) in enumerate(plot.curves.items()):
            xs, ys = _points(run, plot, metric)
            label = name if is_alone else f"{run.name}: {name}" if len(plot.curves) > 1 else run.name
            color = COLORS[(position if is_alone else index) % len(COLORS)]
            style = "-" if is_alone else STYLES[position % len(STYLES)]
            if plot.against and not metric.startswith("eval_"):
                style = "none"  # Rollouts are noisy in both directions: a line would be a tangle.
            marker = "o" if metric.startswith("eval_") or len(xs) <= FEW_POINTS or style == "none" else None
            if xs:
                axes.plot(
                    xs, ys, linestyle=style, color=color, marker=marker, markersize=3.5, linewidth=1.6, label=label
                )
    if plot.against is None:
        for alarm in (alarm for run in runs for alarm in run.alarms()):
            axes.axvline(alarm.step, color=ALARM, linestyle=":", linewidth=1.2)
            place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "ha": "right", "va": "top"}
            axes.annotate(alarm.name, (alarm.step, 1), color=ALARM, fontsize=7.5, **place)
        axes.set_xlim(left=0)
    if plot.zero:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_xlabel("KL to the reference, nats per completion" if plot.against else "optimizer step")
    axes.set_ylabel(plot.ylabel)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False, labelcolor=INK)
    return figure


def draw_bins(bins: Mapping[str, int]) -> mpl.Figure:
    """Return a histogram; `bins` are the number of rows by the label of the bin."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=SIZE)
    axes = figure.add_axes((0.12, 0.2, 0.86, 0.76))
    axes.bar(list(bins), list(bins.values()), color=COLORS[0])
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel("rows")
    return figure


def figures_block(title: str, target: Path, drawings: Iterable[Drawing], pictures: Sequence[Path] = ()) -> Block:
    """Return drawings, each of which is also written as a PNG file, and pictures that a stage has drawn.

    Without matplotlib the block says so instead.
    """
    figures = []
    try:
        for name, caption, note, draw_it in drawings:
            png, svg = drawn(draw_it, name, caption)
            atomic_write_bytes(target / f"{name}.png", png)
            figures.append(Figure(caption, f"{name}.png", svg, note))
    except ImportError:
        return Block(text="No plots: matplotlib cannot be imported; pip install matplotlib.")
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        element = Markup('<img alt="{}" src="data:image/png;base64,{}">').format(path.stem, data)
        figures.append(Figure(path.stem, address_of(path, target), element))
    return Block(title, figures=figures)


def drawn(draw_it: Callable[[], mpl.Figure], name: str, title: str) -> tuple[bytes, Markup]:
    """Return what a function draws as a PNG file on white, and as an SVG element for the inside of a page."""
    import matplotlib

    inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    settings = dict.fromkeys(inked, INK) | {"axes.grid": True, "grid.color": GRID, "grid.alpha": 0.25}
    settings |= {"axes.facecolor": "none", "axes.formatter.limits": (-3, 4)}
    settings |= {"grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9.5}
    # A name with two dollar signs would be read as mathematics.
    settings |= {"text.parse_math": False}
    # Text stays text, which a reader can search and select. With a salt the names in the file do not change.
    settings |= {"svg.fonttype": "none", "svg.hashsalt": "onetrunk"}
    png, svg = io.BytesIO(), io.StringIO()
    with matplotlib.rc_context(settings):
        figure = draw_it()
        figure.savefig(png, format="png", dpi=110, facecolor="white")
        figure.savefig(svg, format="svg", facecolor="none")
    text = svg.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    # All plots share the page: names are unique.
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{name}-", text)
    text = re.sub(r' (?:width|height)="[^"]*"', "", text, count=2)  # The page decides the size.
    named = Markup('<svg role="img" aria-label="{}" data-plot="{}"').format(title, name)
    return png.getvalue(), Markup(text.replace("<svg", named, 1))


def _points(run: Run, plot: Plot, metric: str) -> tuple[list[float], list[float]]:
    xs, ys = run.series(metric)
    if plot.against is None:
        return xs, ys
    prefix = "eval_" if metric.startswith("eval_") else ""
    steps, values = run.series(prefix + plot.against)
    distance = dict(zip(steps, values, strict=True))
    both = [(distance[x], y) for x, y in zip(xs, ys, strict=True) if x in distance]
    return [x for x, _ in both], [y for _, y in both]
