"""The report's section on choosing a method: the recommendations, and their chart of score over bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fewbytes.base.units import UNITS, moved, size
from fewbytes.report import pieces
from fewbytes.report.charts import DIRECTIONS, score_axis
from fewbytes.report.choice import (
    WORDS,
    Choice,
    Point,
    Words,
    caveats,
    choices,
    front,
    guessing,
    on_fronts,
    points_of,
)
from fewbytes.report.folder import RunFolder
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.report.repeats import Repeated, repeated


@dataclass(frozen=True)
class Section:
    """Recommendations, views of the chart, labels on the Pareto fronts (`best`), caveats of the recommendations, the
    metric, the `step` by which it must be better, whether runs have budgets, and how many runs `ended` by theirs."""

    choices: list[Choice]
    views: dict[str, str]
    best: list[str]
    caveats: list[str]
    metric: str
    step: str
    budgets: bool
    ended: int


def section(runs: Sequence[RunFolder], charts: Charts) -> Section | None:
    """The report's section and its chart; None if there is nothing to choose between."""
    found, groups = choices(runs), repeated(runs)
    if not found:
        return None
    charts["choice"] = {choice.kind: _chart(choice, groups) for choice in found}
    ended = sum((run.result or {}).get("ended_by") == "budget" for run in runs)
    budgets = any(run.budget is not None for run in runs)
    views = {choice.kind: WORDS[choice.kind] for choice in found}
    return Section(found, views, on_fronts(groups), caveats(runs), runs[0].metric, Words(runs[0]).step, budgets, ended)


def _chart(choice: Choice, groups: Sequence[Repeated]) -> tuple[list[Trace], Layout]:
    runs = [group.first for group in groups]
    inside, over = (points_of(choice.kind, groups, over) for over in (False, True))
    best, guess = front(inside), guessing(choice.kind, runs)
    guessed = None if guess is None else guess.score
    sent = [point.nbytes for point in [*inside, *over] if point.nbytes]
    axis, place = _axis(sent)
    left, right = place(0), place(max(sent, default=1_000_000))
    sign = 1 if runs[0].higher() else -1
    steps = [(place(p.nbytes), sign * p.score) for p in best] + ([(right, sign * best[-1].score)] if best else [])
    lines = [_rule([x for x, _ in steps], [y for _, y in steps], "solid")]
    heights = [sign * p.score for p in [*inside, *over]]
    low, high = min(heights), max(heights)
    margin = max(0.02 if runs[0].share() else 0.02 * abs(high), 0.08 * (high - low))
    if guessed is not None and guessed > low - (high - low) / 4:  # farther away it would compress the rest
        low = min(low, guessed)
    bottom, top = low - margin, high + margin
    if guessed is not None and guessed >= bottom:
        lines.append(_rule([left, right], [guessed, guessed], "dot"))
    index = {group.label: number for number, group in enumerate(groups)}
    names = _names([*best, *(point for point in [*inside, *over] if point not in best)])
    marks = [
        _mark(runs[index[point.label]], index[point.label], point, choice, place(point.nbytes))
        | _look(index[point.label], point, choice, names.get(point.label, ""), outside)
        | {"first": point in best}
        for points, outside in ((inside, False), (over, True))
        for point in points
    ]
    return lines + marks, {
        "xaxis": axis,
        "yaxis": score_axis(f"final {choice.kind} {runs[0].metric}", runs[0].percent()) | {"range": [bottom, top]},
        "hovermode": "closest",
    }


def _axis(sent: Sequence[int]) -> tuple[Layout, Callable[[int], float]]:
    """The axis of bytes of both directions (logarithmic for a wide range), and the position of a byte count on it;
    0 has a position on either."""
    least, most, unit = min(sent, default=1), max(sent, default=1_000_000), pieces.axis_unit(sent)
    scale = UNITS[unit]
    if most < 20 * least:
        return {
            "title": f"both directions, {unit}",
            "range": [-0.1 * most / scale, 1.06 * most / scale],
        }, lambda count: count / scale
    low, zero = math.floor(math.log10(least / scale)), math.log10(least / scale) - 0.5
    steps = [one * 10.0**d for d in range(low, math.floor(math.log10(most / scale)) + 1) for one in (1, 2, 5)]
    steps = [step for step in steps if least <= scale * step <= most]
    decades = [step for step in steps if f"{step:e}"[0] == "1"]
    steps = decades if len(decades) > 2 else steps
    ticks = {"tickvals": [10**zero, *steps], "ticktext": ["0", *(f"{step:g}" for step in steps)]}
    ends = {"range": [zero - 0.5, math.log10(most / scale) + 0.2]}
    axis = {"title": f"both directions, {unit} (log scale)", "type": "log"} | ticks | ends
    return axis, lambda count: count / scale if count else 10**zero


def _rule(x: list[float], y: list[float], dash: str) -> Trace:
    line = {"color": "#74839b", "width": 1.5, "dash": dash, "shape": "hv"}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}


def _mark(run: RunFolder, index: int, point: Point, choice: Choice, x: float) -> Trace:
    """A run's mark and its hover text."""
    over = ", over the budget" if run.over_budget else ""
    sent = moved(*map(run.total_bytes, DIRECTIONS)) if point.nbytes else size(0)  # own models by local training: none
    return {
        "type": "scatter",
        "x": [x],
        "y": [point.score if run.higher() else -point.score],
        "customdata": [[pieces.plain(point.label), sent]],
        "hovertemplate": f"%{{customdata[0]}}<br><b>%{{y:{'.1%' if run.percent() else '.4~g'}}}</b> "
        + f"{choice.kind}<br>%{{customdata[1]}}{over}<extra></extra>",
        "meta": index,
    }


def _names(points: Sequence[Point]) -> dict[str, str]:
    """Texts at marks, by the label of the first run at each position."""
    at: dict[tuple[float, float], list[str]] = {}
    for point in points:
        at.setdefault((point.nbytes, point.score), []).append(point.label)
    more = {labels[0]: f" and {len(labels) - 1} more" if len(labels) > 1 else "" for labels in at.values()}
    return {label: pieces.plain(label, 24) + rest for label, rest in more.items()}


def _look(index: int, point: Point, choice: Choice, name: str, over: bool) -> Trace:
    """The style of a mark. The page places the names, those of the Pareto front first, and drops those without room."""
    symbol = "star" if point.label == choice.label else pieces.symbol(index)
    return {
        "mode": "markers",
        "text": [name],
        "cliponaxis": False,
        "marker": {
            "color": pieces.colour(index),
            "symbol": f"{symbol}-open" if over else symbol,
            "size": 15 if point.label == choice.label else 9,
        },
    }
