"""Plotly traces and layouts of runs: scores, bytes, probes and labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from fewbytes.base.units import UNITS, size
from fewbytes.report import pieces
from fewbytes.report.curves import Over, curve
from fewbytes.report.folder import Both, Direction, Row, RunFolder, when
from fewbytes.report.pieces import Layout, Trace
from fewbytes.report.records import Partition, Probe, Probed
from fewbytes.report.repeats import Repeated
from fewbytes.report.table import percent
from fewbytes.report.times import Goal
from fewbytes.running.rounding import rounded_rows

DIRECTIONS: tuple[Direction, Direction] = ("uplink", "downlink")
MOST_NAMED = 40  # maximum number of clients with a name on an axis
MOST_DRAWN = 200
"""Maximum number of clients that are drawn one by one."""
MARKS = 12  # maximum number of marks on a line; points between them are only in the hover text


def score_axis(metric: str, share: bool) -> Layout:
    """An axis of a metric."""
    return {"title": metric} | ({"tickformat": ".3~p"} if share else {})


def score_traces(
    group: Repeated, metric: str, kind: str | None, index: int, over: Over, goal: Goal, scale: int = 1
) -> list[Trace]:
    """One kind of a metric over rounds, cumulative bytes or seconds, `scale` of them a unit of the axis; of several
    seeds their mean, above a band of one standard deviation either way."""
    points, run = curve(group, metric, kind, over, goal), group.first
    rows = {row["round"]: row for row in run.rounds if row["phase"] != "join"}
    form = ".1%" if run.percent(metric) else ".4~g"
    moved = f"<br>%{{customdata[3]}} {'in both directions' if over == 'both' else over}"
    words = {"round": "", "seconds": "<br>%{x:,.4~g} s"}.get(over, moved)
    seeds = [f" ± {run.written(p.deviation, metric)} ({len(group.runs)} seeds)" if p.deviation else "" for p in points]
    line = _line(index, [rows.get(point.round) for point in points]) | {
        "x": [point.x / scale for point in points],
        "y": [point.value for point in points],
        "customdata": [
            [
                pieces.plain(group.label),
                pieces.plain(kind or ""),
                when(rows[point.round]) if point.round in rows else f"round {point.round}",
                size(point.x),
                text,
            ]
            for point, text in zip(points, seeds, strict=True)
        ],
        "hovertemplate": f"%{{customdata[0]}}<br><b>%{{y:{form}}}</b>%{{customdata[4]}} %{{customdata[1]}}"
        f"<br>%{{customdata[2]}}{words}<extra></extra>",
    }
    wide = [point for point in points if point.deviation is not None]
    if not wide:
        return [line]
    edge = [(point.x / scale, point.value + (point.deviation or 0.0)) for point in wide]
    edge += [(point.x / scale, point.value - (point.deviation or 0.0)) for point in reversed(wide)]
    band: Trace = {
        "type": "scatter", "mode": "lines", "x": [x for x, _ in edge], "y": [y for _, y in edge], "fill": "toself",
        "fillcolor": pieces.see_through(index), "line": {"width": 0}, "hoverinfo": "skip", "meta": index,
    }  # fmt: skip
    return [band, line | {"deviations": [point.deviation for point in points]}]


def probe_trace(run: RunFolder, probe: Probe, name: Probed, index: int) -> Trace:
    """One figure of a run's probes, by depth."""
    values = [point[name] for point in probe["points"]]
    words = f"%{{y:{'.1%' if name == 'linear_accuracy' else '.3f'}}}"
    return _line(index, [None] * len(values)) | {
        "x": [point["units"] for point in probe["points"]],
        "y": values,
        "customdata": [
            [
                pieces.plain(run.label),
                pieces.plain(probe["model"]),
                pieces.plain(point["point"]),
                percent(point["auxiliary_accuracy"]),
            ]
            for point in probe["points"]
        ],
        "hovertemplate": "%{customdata[0]}, %{customdata[1]} model<br><b>"
        + words
        + "</b> after %{customdata[2]}"
        + ("<br>auxiliary network right: %{customdata[3]}" if name == "information_y" else "")
        + "<extra></extra>",
    }


def round_trace(run: RunFolder, index: int, direction: Direction, unit: str) -> Trace:
    """Bytes of each round, in a unit; exchanges outside the rounds are single points."""
    rows: list[Row | None] = [row for row in run.rounds if row["phase"] == "round"]
    for row in run.rounds:
        rows += [None, row] if row["phase"] != "round" else []
    counts = [None if row is None else row[f"{direction}_bytes"] for row in rows]
    return _line(index, rows) | {
        "x": [None if row is None else row["round"] for row in rows],
        "y": [None if count is None else count / UNITS[unit] for count in counts],
        "customdata": [
            [pieces.plain(run.label), "" if row is None else when(row), "" if count is None else size(count)]
            for row, count in zip(rows, counts, strict=True)
        ],
        "hovertemplate": "%{customdata[0]}<br><b>%{customdata[2]}</b> "
        + direction
        + "<br>%{customdata[1]}<extra></extra>",
    }


def rounded_trace(run: RunFolder, index: int, way: Direction, name: str) -> Trace:
    """A measurement, by name, of rounding in one direction, over rounds."""
    rows = rounded_rows(run.rounds, way)
    return _line(index, rows) | {
        "x": [row["round"] for row in rows],
        "y": [row["measured"][name] for row in rows],
        "customdata": [[pieces.plain(run.label), when(row)] for row in rows],
        "hovertemplate": "%{customdata[0]}<br><b>%{y:.3~g}</b> " + name + "<br>%{customdata[1]}<extra></extra>",
    }


def together(clients: int) -> list[range]:
    """Groups of clients that are drawn as one, in order: one each, or neighbours if there are more than MOST_DRAWN."""
    each = -(-clients // MOST_DRAWN)
    return [range(start, min(start + each, clients)) for start in range(0, clients, each)] if clients else []


def called(clients: range, names: Sequence[str] = ()) -> str:
    """The name of a group of clients; `names`: of all clients, if they have any."""
    if len(clients) == 1:
        return pieces.cut(names[clients[0]]) if names else f"client {clients[0]}"
    return f"clients {clients[0]} to {clients[-1]} on average"


def client_chart(runs: Sequence[RunFolder], direction: Direction, numbers: Sequence[int]) -> tuple[list[Trace], Layout]:
    """One run: a bar per client. Several: a box of clients per run. Very many clients: means of neighbours. `numbers`:
    of the runs' colours."""
    traces: list[Trace] = []
    unit = pieces.axis_unit(count for run in runs for count in run.bytes_by_client(direction).values())
    for index, (run, number) in enumerate(zip(runs, numbers, strict=True)):
        if run.ledger is None:
            continue
        named = [] if run.partition is None else run.partition.get("names", [])
        sent = list(run.bytes_by_client(direction).values())
        clients = {
            group[0]: (pieces.plain(called(group, named)), fmean(sent[i] for i in group))
            for group in together(len(sent))
        }
        values, customdata = (
            [count / UNITS[unit] for _, count in clients.values()],
            [[pieces.plain(run.label), who, size(round(count))] for who, count in clients.values()],
        )
        trace: Trace = {
            "customdata": customdata,
            "hovertemplate": "%{customdata[0]}<br><b>%{customdata[2]}</b> "
            + direction
            + "<br>%{customdata[1]}<extra></extra>",
            "marker": {"color": pieces.colour(number), "size": 5},
            "meta": number,
        }
        if len(runs) == 1:
            trace |= {"type": "bar", "x": list(clients), "y": values}
        else:
            trace |= {"type": "box", "orientation": "h", "x": values, "y": [index] * len(values)}
            trace |= {
                "hoveron": "points",
                "boxpoints": "all",
                "jitter": 0.5,
                "pointpos": 0,
                "line": {"width": 1.5},
            }
        traces.append(trace)
    if len(runs) == 1:
        return traces, {
            "xaxis": {"title": "client"} | _ticks(runs[0].partition),
            "yaxis": bytes_axis(unit, runs, direction),
            "bargap": 0.15 if (runs[0].clients or 0) <= 100 else 0,
        }
    names = {"tickvals": list(range(len(runs))), "ticktext": [pieces.plain(run.label, 18) for run in runs]}
    return traces, {
        "xaxis": bytes_axis(unit, runs, direction),
        "yaxis": {"autorange": "reversed", "showgrid": False, "zeroline": False} | names,
    }


def _ticks(partition: Partition | None) -> Layout:
    """The names of clients along an axis, if they have some, and are few."""
    names = [] if partition is None else partition.get("names", [])
    if not 0 < len(names) <= MOST_NAMED:
        return {}
    return {"tickvals": list(range(len(names))), "ticktext": [pieces.plain(name, 18) for name in names]}


def heat_map(partition: Partition, split: Literal["train", "test"]) -> tuple[list[Trace], Layout]:
    """Samples of each class (across) at each client (down); blank if not known by class. Very many clients: means of
    neighbours."""
    classes, counts, called_by = partition["classes"], partition[split], partition.get("names", [])
    groups = together(len(counts))
    names: list[str] = []
    for name in classes:
        name = pieces.plain(name, 24)
        names.append(name if name not in names else f"{name} [{len(names)}]")
    rows = [class_means([counts[i] for i in group], len(names)) for group in groups]
    trace = {
        "type": "heatmap",
        "x": names,
        "y": [group[0] for group in groups],
        "z": rows,
        "customdata": [[pieces.plain(called(group, called_by))] * len(names) for group in groups],
        "zmin": 0,  # plotly takes it only with zmax
        "zmax": max((value for row in rows for value in row if value is not None), default=0) or 1,
        "xgap": 1 if len(names) <= 50 else 0,
        "ygap": 1 if len(counts) <= 50 else 0,
        "colorbar": {
            "thickness": 8,
            "outlinewidth": 0,
            "title": {"text": "samples", "side": "right", "font": {"size": 13}},
        },
        "hovertemplate": "%{customdata}, class %{x}<br><b>%{z:,}</b> samples<extra></extra>",
    }
    return [trace], {
        "xaxis": {"title": "class", "type": "category", "showgrid": False},
        "yaxis": {"title": "client", "range": [len(counts) - 0.5, -0.5], "showgrid": False, "zeroline": False}
        | {"tickformat": "d", "dtick": max(1, -(-len(counts) // 10))}
        | _ticks(partition),
    }


def class_means(counts: Sequence[list[int] | int | None], classes: int) -> Sequence[float | None]:
    """The mean number of samples per class, over clients whose samples are known by class."""
    known = [row for row in counts if isinstance(row, list)]
    if len(known) < 2:
        return known[0] if known else [None] * classes
    return [round(fmean(of), 2) for of in zip(*known, strict=True)]


def round_axis(runs: Sequence[RunFolder]) -> Layout:
    """An axis of rounds, with a tick per round up to ten rounds."""
    last = max((row["round"] for run in runs for row in run.rounds), default=0)
    return {"title": "round"} | ({"dtick": 1} if last <= 10 else {})


def bytes_axis(title: str, runs: Sequence[RunFolder], direction: Direction | Both) -> Layout:
    """An axis of bytes; logarithmic if one run moves at least twenty times as much as another."""
    totals = [total for run in runs if (total := run.total_bytes(direction))]
    if totals and max(totals) >= 20 * min(totals):
        return {"title": f"{title} (log scale)", "type": "log", "dtick": 1, "exponentformat": "none"}
    return {"title": title, "rangemode": "tozero", "exponentformat": "none"}


def unique(values: Iterable[object]) -> list[str]:
    """Values as text, each once, in order, without None."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _line(index: int, rows: Sequence[Row | None]) -> Trace:
    outside = [row is not None and row["phase"] != "round" for row in rows]
    step = -(-len(rows) // MARKS)
    marked = [place % step == 0 or place == len(rows) - 1 for place in range(len(rows))]
    symbol = pieces.symbol(index)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "cliponaxis": False,
        "line": {"width": 2, "color": pieces.colour(index), "dash": pieces.dash(index)},
        "marker": {
            "color": pieces.colour(index),
            "symbol": [f"{symbol}-open" if out else symbol for out in outside],
            "size": [10 if out else 7 if mark else 0 for out, mark in zip(outside, marked, strict=True)],
            "opacity": 1,
            "line": {"width": [2 if out else 0 for out in outside]},
        },
        "meta": index,
    }
