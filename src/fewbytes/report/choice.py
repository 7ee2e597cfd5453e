"""Which method to take: the Pareto front of accuracy over uplink bytes, a recommendation with its reason, a chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fewbytes.report import pieces
from fewbytes.report.folder import RunFolder
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.report.table import alike, megabytes, percent

CAVEAT = "Each is one run: another seed may change the order of those that lie close."
WITHIN = 0.01  # of the highest accuracy: what a recommendation may fall short by to send less
WORDS = {"personalised": "a model for each client", "global": "one model for all"}
"""The kinds of accuracy methods are chosen by, and what they are accuracies of. They do not compare with each other."""


class Point(NamedTuple):
    """What a run of that label cost and reached: bytes that all clients sent, final accuracy in 0..1. A client's own
    model costs nothing where clients received nothing: local training makes it, whatever is sent afterwards."""

    label: str
    uplink: int
    accuracy: float


class Choice(NamedTuple):
    """A recommendation for one kind of accuracy: the label of a run (None: take none), what to do, and why."""

    kind: str
    label: str | None
    advice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.advice}: {self.reason}."


def front(points: Iterable[Point]) -> list[Point]:
    """The points than which no other sends less and is as accurate, or is more accurate and sends no more; by bytes."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.uplink, -p.accuracy, p.label)):
        if not kept or point.accuracy > kept[-1].accuracy or point[1:] == kept[-1][1:]:
            kept.append(point)
    return kept


def recommended(points: Iterable[Point]) -> Point:
    """The point of least uplink within WITHIN of the highest accuracy: one of the front. One that costs something is
    more than WITHIN above those that cost nothing, if there are any."""
    points = front(points)
    least = points[-1].accuracy - WITHIN - 1e-9
    free = max((p.accuracy for p in points if not p.uplink), default=-math.inf)
    return next(p for p in points if p.accuracy >= least and (not p.uplink or p.accuracy > free + WITHIN + 1e-9))


def choices(runs: Sequence[RunFolder]) -> list[Choice]:
    """A recommendation for each kind of accuracy that at least two runs have; none if the runs' data differ."""
    return [_choice(kind, runs) for kind in _kinds(runs)]


def _choice(kind: str, runs: Sequence[RunFolder]) -> Choice:
    points = _points(kind, runs, over=False)
    over = len(_points(kind, runs, over=True))
    rest = f"; left out, being over the budget: {over}" if over else ""
    none = f"For {WORDS[kind]} take no method of these"
    if not points:
        return Choice(kind, None, none, "all exceed the budget")
    guessing, best = _guessing(kind, runs), front(points)[-1]
    if guessing is not None and best.accuracy <= guessing:
        return Choice(kind, None, none, f"none beats guessing the majority class, {percent(guessing)}{rest}")
    taken = recommended(points)
    if not taken.uplink:
        silent = [point for point in points if point.label in _silent(runs)]
        if not silent:
            alone = f"{kind} {percent(taken.accuracy)} in {taken.label}, whose clients receive nothing"
            return Choice(kind, None, none, f"none is a percentage point above local training, {alone}{rest}")
        taken = front(silent)[0]
    advice = f"For {WORDS[kind]} take {taken.label}, {kind} {percent(taken.accuracy)} {_cost(taken)}"
    if taken.accuracy < best.accuracy:
        reason = f"{best.label} is the most accurate, {percent(best.accuracy)} "
        reason += "by local training, too" if best.uplink == 0 else _cost(best)
    else:
        reason = "none is more accurate"
    cheaper = [point.accuracy for point in points if point.uplink < taken.uplink]
    if not cheaper:
        reason += ", and none sends less"
    elif max(cheaper) < best.accuracy - WITHIN - 1e-9:
        reason += ", and none that sends less comes within a percentage point"
    else:
        reason += ", and none that sends less comes within a percentage point and lies one above local training"
    return Choice(kind, taken.label, advice, f"{reason}{rest}")


def _silent(runs: Sequence[RunFolder]) -> set[str]:
    """The labels of runs in which no client sent anything."""
    return {run.label for run in runs if not run.total_bytes("uplink")}


def _cost(point: Point) -> str:
    return f"with {megabytes(point.uplink)} MB up" if point.uplink else "with nothing sent"


def _kinds(runs: Sequence[RunFolder]) -> list[str]:
    if len(alike(runs, lambda run: (run.fact("dataset"), run.partition))) > 1:
        return []
    return [kind for kind in WORDS if sum(len(_points(kind, runs, over)) for over in (False, True)) > 1]


def _points(kind: str, runs: Sequence[RunFolder], over: bool) -> list[Point]:
    """The finished runs that have this kind of accuracy, within their budget or over it."""
    done = [run for run in runs if run.status == "done" and run.over_budget == over]
    return [
        Point(run.label, run.total_bytes("uplink") if run.total_bytes("downlink") or kind == "global" else 0, final)
        for run in done
        if (final := run.score(kind).final) is not None
    ]


def _guessing(kind: str, runs: Sequence[RunFolder]) -> float | None:
    """What always guessing the majority class would score, where that is known of the runs' data."""
    found = ((run.result or {}).get("majority_class_accuracy", {}).get(kind) for run in runs)
    return next((value for value in found if value is not None), None)


# ---- the section of the page ----


@dataclass(frozen=True)
class Section:
    """The recommendations, the chart's views, whether there are budgets, and how many runs one ended."""

    choices: list[Choice]
    views: dict[str, str]
    caveat: str
    budgets: bool
    ended: int


def section(runs: Sequence[RunFolder], charts: Charts) -> Section | None:
    """What the page's section says, and its chart; nothing where there is nothing to choose between."""
    found = choices(runs)
    if not found:
        return None
    charts["choice"] = {choice.kind: _chart(choice, runs) for choice in found}
    ended = sum((run.result or {}).get("ended_by") == "budget" for run in runs)
    return Section(found, {choice.kind: WORDS[choice.kind] for choice in found}, CAVEAT, bool(_budgets(runs)), ended)


def _budgets(runs: Sequence[RunFolder]) -> list[int]:
    return sorted({run.budget for run in runs if run.budget is not None})


def _chart(choice: Choice, runs: Sequence[RunFolder]) -> tuple[list[Trace], Layout]:
    inside, over = (_points(choice.kind, runs, over) for over in (False, True))
    best, budgets, guessing = front(inside), _budgets(runs), _guessing(choice.kind, runs)
    sent = [uplink for uplink in [*(p.uplink for p in [*inside, *over]), *budgets] if uplink]
    axis, place = _axis(sent)
    left, right = place(0), place(max(sent, default=1_000_000))
    steps = [(place(p.uplink), p.accuracy) for p in best] + ([(right, best[-1].accuracy)] if best else [])
    lines = [_rule([x for x, _ in steps], [y for _, y in steps], "solid")]
    heights = [p.accuracy for p in [*inside, *over]] + ([] if guessing is None else [guessing])
    low, high = min(heights), max(heights)
    margin = max(0.02, 0.08 * (high - low))
    bottom, top = low - margin, high + margin
    if guessing is not None:
        lines.append(_rule([left, right], [guessing, guessing], "dot"))
    lines += [_rule([place(budget)] * 2, [bottom, top], "dot") for budget in budgets]
    index = {run.label: number for number, run in enumerate(runs)}
    marks = [
        _mark(index[point.label], point, choice, place(point.uplink), point in best, outside)
        for points, outside in ((inside, False), (over, True))
        for point in points
    ]
    return lines + marks, {
        "xaxis": axis,
        "yaxis": {"title": f"final {choice.kind} accuracy", "tickformat": ".0%", "range": [bottom, top]},
        "hovermode": "closest",
    }


def _axis(sent: Sequence[int]) -> tuple[Layout, Callable[[int], float]]:
    """The axis of uplink megabytes, logarithmic where that is wide, and where on it a number of bytes is; 0 has a
    place on either."""
    least, most = min(sent, default=1), max(sent, default=1_000_000)
    if most < 20 * least:
        return {"title": "uplink, MB", "range": [-0.1 * most / 1e6, 1.06 * most / 1e6]}, lambda count: count / 1e6
    decades = range(math.ceil(math.log10(least / 1e6)), math.floor(math.log10(most / 1e6)) + 1)
    zero = math.log10(least / 1e6) - 0.5
    ticks = {"tickvals": [10**zero, *(10.0**d for d in decades)], "ticktext": ["0", *(f"{10.0**d:g}" for d in decades)]}
    ends = {"range": [zero - 0.5, math.log10(most / 1e6) + 0.2]}
    axis = {"title": "uplink, MB (log scale)", "type": "log"} | ticks | ends
    return axis, lambda count: count / 1e6 if count else 10**zero


def _rule(x: list[float], y: list[float], dash: str) -> Trace:
    line = {"color": "#74839b", "width": 1.5, "dash": dash, "shape": "hv"}
    return {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"}


def _mark(index: int, point: Point, choice: Choice, x: float, named: bool, over: bool) -> Trace:
    """A run's mark; of those on the front the name stands above the line, where no other run is."""
    symbol = "star" if point.label == choice.label else pieces.symbol(index)
    return {
        "type": "scatter",
        "mode": "markers+text" if named else "markers",
        "x": [x],
        "y": [point.accuracy],
        "text": [pieces.plain(point.label, 24)],
        "textposition": "top left",
        "cliponaxis": False,
        "marker": {
            "color": pieces.colour(index),
            "symbol": f"{symbol}-open" if over else symbol,
            "size": 15 if point.label == choice.label else 9,
        },
        "customdata": [[pieces.plain(point.label), megabytes(point.uplink)]],
        "hovertemplate": "%{customdata[0]}<br><b>%{y:.1%}</b> "
        + f"{choice.kind}<br>%{{customdata[1]}} MB uplink{', over the budget' if over else ''}<extra></extra>",
        "meta": index,
    }
