"""The section of scores: every kind over rounds, over bytes and over seconds, with bands over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fewbytes.base.units import UNITS
from fewbytes.report import pieces
from fewbytes.report.charts import bytes_axis, round_axis, score_axis, score_traces, unique
from fewbytes.report.curves import Over
from fewbytes.report.folder import Both, Direction
from fewbytes.report.pieces import Charts, Layout
from fewbytes.report.repeats import Repeated
from fewbytes.report.table import KINDS, OF_SERVER, mixed
from fewbytes.report.target import timed
from fewbytes.report.times import Goal

PLACES = {"clients": "on clients' own test data", "server": "on the server's test data"}
"""Test data that never share a chart."""
METRICS = {
    "mAP": "COCO's average precision: averaged over classes and over thresholds, 0.50 to 0.95, of the overlap (IoU) "
    "with a true box",
    "AP50": "the same at an overlap of 0.50",
    "AP75": "the same at an overlap of 0.75",
    "APM": "as mAP, of objects of 32² to 96² pixels of the original image",
    "APL": "as mAP, of objects of more than 96² pixels",
    "auc": "area under the ROC curve, averaged over classes with positive and negative samples",
    "average-precision": "area under precision over recall, averaged over classes with positive and negative samples",
    "balanced-accuracy": "recall averaged over classes",
    "f1": "harmonic mean of precision and recall, averaged over classes",
    "iou": "intersection over union of predicted and true pixels, averaged over classes",
    "mae": "mean absolute error: lower is better",
    "mse": "mean squared error: lower is better",
    "rmse": "root mean squared error: lower is better",
    "r2": "fraction of the variance explained; below 0, worse than predicting the mean; clients with a single test "
    "sample have none",
    "perplexity": "exponential of the mean cross-entropy per token: lower is better",
}
MOVED: dict[Direction | Both, str] = {"both": "both directions", "uplink": "uplink", "downlink": "downlink"}
"""What charts of scores count the bytes of, in words."""
Line = tuple[Repeated, str, str | None, int]
"""A line of a chart: a method's runs, metric, kind, and number of its style."""


@dataclass(frozen=True)
class Section:
    """Every kind of score and every metric with its meaning, the charts' views, what the seconds are of the chart over
    seconds (empty: there is none), and whether lines are means over seeds."""

    metric: str
    meanings: dict[str, str]
    of_metrics: dict[str, str]
    views: dict[str, str]
    timed: str
    bands: bool


def section(groups: Sequence[Repeated], goal: Goal, charts: Charts) -> Section | None:
    """The report's section and its charts; None if nothing was scored."""
    runs = [run for group in groups for run in group.runs]
    if not any(run.kinds() for run in runs):
        return None
    names, lines = _lines(groups)

    def draw(name: str, over: Over, axis: Layout, of: dict[str, list[Line]], scale: int = 1) -> None:
        charts[name] = {
            view: (
                [trace for line in drawn for trace in score_traces(*line, over, goal, scale)],
                {"xaxis": axis, "yaxis": _axis(drawn), "hovermode": "closest"},
            )
            for view, drawn in of.items()
        }

    draw("scores-rounds", "round", round_axis(runs), lines)
    for over, title in MOVED.items():
        unit = pieces.axis_unit(run.total_bytes(over) for run in runs)
        draw(f"scores-{over}", over, bytes_axis(f"{title} so far, {unit}", runs, over), lines, UNITS[unit])
    known = {view: [line for line in drawn if goal.up or line[0].first.timed] for view, drawn in lines.items()}
    if any(known.values()):
        draw("scores-seconds", "seconds", {"title": "seconds so far", "rangemode": "tozero"}, known)
    shown = [line for drawn in lines.values() for line in drawn]
    kinds = unique(kind for _, _, kind, _ in shown)
    metrics = [metric for metric in unique(metric for _, metric, _, _ in shown) if metric in METRICS]
    meanings = {kind: KINDS.get(kind, "as the method records it") for kind in kinds}
    bands = any(len(group.runs) > 1 for group in groups)
    of_metrics = {metric: METRICS[metric] for metric in metrics}
    return Section(main_metric(groups), meanings, of_metrics, names, timed(groups, goal), bands)


def main_metric(groups: Sequence[Repeated]) -> str:
    """The main metric of all runs."""
    metrics = unique(run.metric for group in groups for run in group.runs)
    return metrics[0] if len(metrics) == 1 else "score"


def _lines(groups: Sequence[Repeated]) -> tuple[dict[str, str], dict[str, list[Line]]]:
    """The charts' views and their lines. One method: its kinds by metric and test data. Several: each one's main kind
    (unless these are on different test data), one kind that all have, and each further metric."""
    if len(groups) == 1:
        return _of_one(groups[0])
    firsts = [group.first for group in groups]
    shown = [kind for kind in ("personalised", "global") if any(kind in run.kinds() for run in firsts)]
    further = unique(metric for run in firsts for metric in run.metrics[1:])
    apart = mixed(firsts)
    names = {} if apart else {"own": "each method's own"}
    lines: dict[str, list[Line]] = {}
    if not apart:
        lines["own"] = [
            (each, each.first.metric, each.first.kind, i) for i, each in enumerate(groups) if each.first.kind
        ]
    names |= {name: name for name in shown}
    for kind in shown:
        lines[kind] = [
            (each, each.first.metric, kind, i) for i, each in enumerate(groups) if kind in each.first.kinds()
        ]
    for metric in further:
        for only in shown if apart else [""]:
            drawn = [(each, metric, only or each.first.kind, i) for i, each in enumerate(groups)]
            view = f"{metric} {only}" if only else metric
            lines[view] = [line for line in drawn if line[2] in line[0].first.kinds(metric)]
            names[view] = view
    return names, lines


def _of_one(group: Repeated) -> tuple[dict[str, str], dict[str, list[Line]]]:
    """As `_lines`; views of the test data by which the method is judged come first."""
    metrics, server = group.first.metrics, group.first.kind == OF_SERVER
    places = sorted(PLACES.items(), key=lambda each: (each[0] == "server") != server)
    names, lines = dict[str, str](), dict[str, list[Line]]()
    for metric in metrics:
        kinds = list(enumerate(sorted(group.first.kinds(metric), key=lambda kind: (kind == OF_SERVER) != server)))
        for place, where in places:
            here = [(i, kind) for i, kind in kinds if (kind == OF_SERVER) == (place == "server")]
            if here:
                view = metric if len(here) == len(kinds) else f"{metric} {place}"
                names[view] = " ".join(([metric] if len(metrics) > 1 else []) + ([where] if view != metric else []))
                lines[view] = [(group, metric, kind, i) for i, kind in here]
    return {view: name or "all" for view, name in names.items()}, lines


def _axis(drawn: Sequence[Line]) -> Layout:
    metrics = unique(metric for _, metric, _, _ in drawn)
    name = metrics[0] if len(metrics) == 1 else "score"
    return score_axis(name, all(group.first.percent(metric) for group, metric, _, _ in drawn))
