"""Curves of scores over rounds, bytes or seconds: of a run, or the mean over a method's seeds with its deviation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from fewbytes.report.folder import RunFolder
from fewbytes.report.repeats import Repeated, spread_of
from fewbytes.report.times import Goal, seconds_so_far

Over = Literal["round", "both", "uplink", "downlink", "seconds"]
"""What a score is drawn over: rounds, bytes so far (both directions together, or one), seconds so far."""


class Point(NamedTuple):
    """A score after a round, at `x`: rounds, bytes or seconds; means over the seeds that have it, and their standard
    deviation (None: one run)."""

    round: int
    x: float
    value: float
    deviation: float | None


def curve(group: Repeated, metric: str, kind: str | None, over: Over, goal: Goal) -> list[Point]:
    """A method's scores of one kind of a metric over something. A round counts as far as every seed got that reached
    it: an early end of one seed does not bend the mean's `x`."""
    found: dict[int, list[tuple[float, float]]] = {}
    for run in group.done or group.runs:
        for t, x, value in _points(run, metric, kind, over, goal):
            found.setdefault(t, []).append((x, value))
    points = []
    for t, pairs in sorted(found.items()):
        values = spread_of(value for _, value in pairs)
        assert values is not None
        points.append(Point(t, fmean(x for x, _ in pairs), values.mean, values.deviation))
    return points


def _points(run: RunFolder, metric: str, kind: str | None, over: Over, goal: Goal) -> list[tuple[int, float, float]]:
    scores = {id(row): value for row, value in run.curve(kind, metric)}
    ways = ("uplink", "downlink") if over == "both" else (over,)
    so_far, ends, points = 0, seconds_so_far(run, goal) if over == "seconds" else [], []
    for place, row in enumerate(run.rounds):
        if over in ("both", "uplink", "downlink"):
            so_far += sum(row[f"{way}_bytes"] for way in ways)
        if id(row) in scores:
            x = ends[place] if over == "seconds" else row["round"] if over == "round" else so_far
            points.append((row["round"], float(x), scores[id(row)]))
    return points


def kinds_drawn(groups: Sequence[Repeated], metric: str) -> list[str]:
    """The kinds of a metric that are drawn: global, personalised, and methods' own kinds if they have neither."""
    have = [group.first.kinds(metric) for group in groups]
    own = [
        str(g.first.kind) for g, kinds in zip(groups, have, strict=True) if not {"global", "personalised"} & {*kinds}
    ]
    return [kind for kind in dict.fromkeys(["global", "personalised", *own]) if any(kind in kinds for kinds in have)]
