"""Figures for papers, by matplotlib: scores over rounds, bytes and seconds, with bands over seeds, as SVG and PDF."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fewbytes.base.errors import UserError
from fewbytes.base.extras import needs
from fewbytes.base.files import replacing
from fewbytes.report import pieces
from fewbytes.report.charts import unique
from fewbytes.report.curves import Over, curve, kinds_drawn
from fewbytes.report.repeats import Repeated, spread_of
from fewbytes.report.target import Cost, target_rows
from fewbytes.report.times import Goal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (4.6, 3.1)  # inches
LINES: tuple[Any, ...] = ("-", (0, (5, 3)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (8, 2.5)), (0, (5, 2, 1, 2, 1, 2)),
                          (0, (7, 2, 2, 2)), (0, (2.5, 2.5)))  # fmt: skip
MARKS = ("o", "s", "D", "^", "P", "v", "X", "p")
"""Dashes and marks, as those of the report's charts."""
AXES: dict[Over, str] = {"round": "round", "both": "MB of both directions", "seconds": "seconds"}


class Drawn(NamedTuple):
    """A figure, and the name of its file without an ending."""

    name: str
    figure: Figure


def write_svg(groups: Sequence[Repeated], folder: Path, goal: Goal) -> list[Path]:
    """Write every figure as an SVG file into a folder. Raises UserError if matplotlib is missing."""
    with _styled():
        paths = []
        for name, figure in _figures(groups, goal):
            written = io.BytesIO()
            figure.savefig(written, format="svg", metadata={"Date": None})
            paths.append(_write(folder / f"{name}.svg", written.getvalue()))
        return paths


def write_pdf(groups: Sequence[Repeated], path: Path, goal: Goal) -> Path:
    """Write all figures into one PDF file, a page each. Raises UserError if matplotlib is missing."""
    with _styled():
        from matplotlib.backends.backend_pdf import PdfPages

        written = io.BytesIO()
        with PdfPages(written, metadata={"CreationDate": None}) as pages:
            for _, figure in _figures(groups, goal):
                pages.savefig(figure)
        return _write(path, written.getvalue())


@contextmanager
def _styled() -> Iterator[None]:
    """The style of figures, which changes nothing elsewhere in the process."""
    needs("figures as SVG or PDF", "results", "matplotlib")
    import matplotlib as mpl

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "fewbytes", "pdf.fonttype": 42, "font.size": 9, "legend.fontsize": 8,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e1e5ea",
        "axes.axisbelow": True, "text.parse_math": False,
    }  # fmt: skip
    with mpl.rc_context(style):
        yield


def _figures(groups: Sequence[Repeated], goal: Goal) -> Iterator[Drawn]:
    """Every figure that the runs have the numbers for."""
    timed = goal.up is not None or any(group.first.timed for group in groups)
    for metric in unique(metric for group in groups for metric in group.first.metrics):
        for kind in kinds_drawn(groups, metric):
            name = f"{metric}-{kind}"
            for over in AXES:
                if over != "seconds" or timed:
                    yield Drawn(_file(f"{name}-over-{_WORDS[over]}"), _lines(groups, metric, kind, over, goal))
            yield Drawn(_file(f"{name}-final"), _finals(groups, metric, kind))
    if goal.target is not None:
        costs: tuple[Cost, ...] = ("both", "seconds") if timed else ("both",)
        for cost in costs:
            yield Drawn(f"target-{'mb' if cost == 'both' else cost}", _bars(groups, cost, goal))


_WORDS: dict[Over, str] = {"round": "rounds", "both": "mb", "seconds": "seconds"}


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)


def _axes() -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    return figure, figure.add_subplot()


def _percent(groups: Sequence[Repeated], metric: str) -> float:
    """The factor from a metric to what is drawn: 100 where it is shown in per cent."""
    return 100.0 if groups[0].first.percent(metric) else 1.0


def _name(groups: Sequence[Repeated], metric: str, kind: str) -> str:
    return f"{kind} {metric}" + (", %" if groups[0].first.percent(metric) else "")


def _lines(groups: Sequence[Repeated], metric: str, kind: str, over: Over, goal: Goal) -> Figure:
    figure, axes = _axes()
    scale, unit = _percent(groups, metric), 1e6 if over == "both" else 1.0
    for number, group in enumerate(groups):
        points = curve(group, metric, kind, over, goal)
        if not points or (over == "seconds" and goal.up is None and not group.first.timed):
            continue
        x = [point.x / unit for point in points]
        axes.plot(
            x, [scale * point.value for point in points], color=pieces.colour(number), linewidth=1.4,
            linestyle=LINES[number % len(LINES)], marker=MARKS[number % len(MARKS)], markersize=4,
            markevery=max(1, len(points) // 10), label=group.label,
        )  # fmt: skip
        wide = [
            (each.x / unit, scale * each.value, scale * each.deviation) for each in points if each.deviation is not None
        ]
        if wide:
            axes.fill_between(
                [at for at, _, _ in wide], [value - off for _, value, off in wide],
                [value + off for _, value, off in wide], color=pieces.colour(number), alpha=0.16, linewidth=0,
            )  # fmt: skip
    link = f", {goal.text}" if over == "seconds" and goal.text else ""
    axes.set(xlabel=AXES[over] + link, ylabel=_name(groups, metric, kind))
    if over == "round":
        axes.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axes)
    return figure


def _finals(groups: Sequence[Repeated], metric: str, kind: str) -> Figure:
    """Final scores over MB, with standard deviations as bars."""
    figure, axes = _axes()
    scale = _percent(groups, metric)
    for number, group in enumerate(groups):
        score, moved = (
            spread_of(group.finals(kind, metric).values()),
            spread_of(run.total_bytes("both") / 1e6 for run in group.runs),
        )
        if score is not None and moved is not None:
            axes.errorbar(
                moved.mean, scale * score.mean, xerr=moved.deviation, yerr=scale * (score.deviation or 0.0) or None,
                fmt=MARKS[number % len(MARKS)], color=pieces.colour(number), markersize=6, label=group.label,
            )  # fmt: skip
    axes.set(xlabel="MB of both directions", ylabel=f"final {_name(groups, metric, kind)}")
    _legend(figure, axes)
    return figure


def _bars(groups: Sequence[Repeated], cost: Cost, goal: Goal) -> Figure:
    """MB or seconds until the target, by method."""
    figure, axes = _axes()
    unit = 1e6 if cost == "both" else 1.0
    rows = [(row, spread) for row in target_rows(groups, goal) if (spread := row.spread(cost)) is not None]
    for place, (row, spread) in enumerate(rows):
        off = None if spread.deviation is None else spread.deviation / unit
        axes.barh(place, spread.mean / unit, xerr=off, color=pieces.colour(row.number), height=0.65)
    axes.set_yticks(range(len(rows)), [row.label for row, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    words = "MB of both directions" if cost == "both" else "seconds" + (f", {goal.text}" if goal.text else "")
    axes.set(xlabel=f"{words} to {goal.target_words(groups[0].first)}")
    return figure


def _legend(figure: Figure, axes: Any) -> None:
    names = axes.get_legend_handles_labels()[1]
    if len(names) > 1:
        figure.legend(loc="outside right upper", frameon=False, handlelength=2.6)


def _write(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return path
