"""Writes the HTML report of some runs as one self-contained page: no server, no network, no other file.

A section here computes its values, or None; the template of its name shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from fewbytes.base.errors import UserError, visible
from fewbytes.base.files import replacing
from fewbytes.report import choice, evaluation, leaks, left_out, notes, pictures, pieces
from fewbytes.report.charts import (
    DIRECTIONS,
    called,
    client_chart,
    heat_map,
    mb_axis,
    probe_trace,
    round_axis,
    round_trace,
    rounded_trace,
    score_axis,
    score_trace,
    together,
)
from fewbytes.report.document import document
from fewbytes.report.folder import Both, Direction, RunFolder, when
from fewbytes.report.pieces import Charts, Layout
from fewbytes.report.records import Partition, Probed
from fewbytes.report.table import (
    KINDS,
    OF_SERVER,
    badges,
    best_models,
    grouped_by,
    intervals,
    majority_rows,
    mixed,
    of_clients,
)
from fewbytes.running.rounding import MEASURED, rounded_rows

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
    "r2": "fraction of the variance explained; below 0, worse than predicting the mean",
    "perplexity": "exponential of the mean cross-entropy per token: lower is better",
}
MANY = 10  # with more runs, the title does not name them, and all can be shown or hidden at once
Line = tuple[RunFolder, str, str | None, int]
"""A line of a chart: run, metric, kind, and index of its colour."""
MOVED: dict[Direction | Both, str] = {"both": "both directions", "uplink": "uplink", "downlink": "downlink"}
"""What charts of scores count the bytes of, in words."""
_SPLITS: tuple[Literal["train"], Literal["test"]] = ("train", "test")
_PROBED: dict[Probed, tuple[str, Layout]] = {
    "information_x": ("Of the image, I(H;X)", {"title": "minus cross-entropy, nats a value"}),
    "information_y": ("Of the label, I(H;Y)", {"title": "nats"}),
    "linear_accuracy": ("Linear separability", score_axis("accuracy", True)),
}


@dataclass(frozen=True)
class Moved:
    """Bytes of a run in one direction: total, per client and round, as papers count them; None if unknown."""

    total: int
    each: float | None
    nominal: int | None


@dataclass(frozen=True)
class SummaryRow:
    """A run in the summary: scores as text, of the run's main kind unless stated."""

    label: str
    badges: list[str]
    kind: str | None
    final: str
    best: str
    best_when: str
    of_server: str  # final, of the server's model
    of_clients: str  # final, of the clients' own models
    further: list[str]  # final, by other metrics
    uplink: Moved
    downlink: Moved
    both: int  # bytes
    seconds: float


@dataclass(frozen=True)
class Highest:
    """The run with the best final score, that score and its kind; `by` states the metric of the comparison."""

    by: str
    label: str
    score: str
    kind: str | None
    higher: bool


@dataclass(frozen=True)
class Summary:
    """Scores and bytes of every run, the metrics, and the score of guessing the majority class, by kind."""

    metric: str
    further: list[str]
    rows: list[SummaryRow]
    majorities: list[tuple[str, dict[str, float | None]]]
    highest: Highest | None
    cheapest: SummaryRow
    best_models: list[str]
    apart: bool = False  # judged on different test data


@dataclass(frozen=True)
class Scores:
    """Every kind of score and every metric with its meaning, the charts' views, and whether one is over simulated
    seconds."""

    metric: str
    meanings: dict[str, str]
    of_metrics: dict[str, str]
    views: dict[str, str]
    timed: bool


@dataclass(frozen=True)
class Probes:
    """The probed model of each run, and the charts' titles by measurement."""

    models: list[tuple[str, str]]
    figures: dict[str, str]


@dataclass(frozen=True)
class SampleTotals:
    """The numbers of training and test samples of each client, as nodes report them; None if not reported. Very many
    clients: means of neighbours."""

    runs: str
    sizes: list[tuple[str, float | None, float | None]]


@dataclass(frozen=True)
class Labels:
    """The heat maps' views, one per dataset, their height in pixels, and totals for unknown labels."""

    views: dict[str, str]
    height: int
    totals: list[SampleTotals]


@dataclass(frozen=True)
class Versions:
    """The versions of every package, one for each group of runs with equal ones, and in words those that clients' nodes
    had besides."""

    names: list[str]
    packages: dict[str, list[str]]
    others: list[str]


def write_report(runs: Sequence[RunFolder], path: Path) -> Path:
    """Write the report of `runs` to `path` atomically, and return `path`.

    Raises `UserError` if there are no runs or `path` cannot be written.
    """
    if not runs:
        raise UserError("there are no runs to report")
    text = visible(_page(runs))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode(errors="replace"))  # untrusted text may have invalid characters
    except OSError as error:
        raise UserError(f"the report {path} cannot be written: {error.strerror}") from error
    return path


def _page(runs: Sequence[RunFolder]) -> str:
    charts = _traffic(runs) | _rounded(runs)
    by_site = evaluation.evaluation_of(runs)
    site_kinds, site_lines = evaluation.curves(runs, charts)
    return document(
        "report.html",
        charts,
        title=_title(runs),
        facts=_facts(runs),
        runs=runs,
        many=MANY,
        choice=choice.section(runs, charts),
        summary=_summary(runs),
        sites=evaluation.section(by_site, charts),
        site_kinds=site_kinds,
        site_lines=site_lines,
        sites_views={} if by_site is None else {metric: metric for metric in by_site["metrics"]},
        scores=_scores(runs, charts),
        confusions=_confusions(runs),
        intervals=intervals(runs),
        left_out=left_out.section(runs),
        notes=notes.noted(runs),
        probes=_probes(runs, charts),
        leaks=leaks.section(runs),
        inferred=leaks.inferred(runs),
        poisoned=leaks.poisoned(runs),
        pictures=pictures.section(runs, charts),
        labels=_labels(runs, charts),
        versions=_versions(runs),
    )


# ---- the sections, in the order of the page ----


def _title(runs: Sequence[RunFolder]) -> str:
    methods = _unique(run.label for run in runs)
    datasets = _unique(run.fact("dataset") for run in runs)
    return (_listed(methods) if len(methods) <= MANY else f"{len(methods)} methods") + (
        f" on {_listed(datasets)}" if datasets else ""
    )


def _facts(runs: Sequence[RunFolder]) -> list[str]:
    facts = [f"{len(runs)} runs"] if len(runs) > 1 else []
    for key, values in {
        "data set": [run.fact("dataset") for run in runs],
        "model": [run.fact("model") for run in runs],
        "clients": [run.clients for run in runs],
        "rounds": [sum(row["phase"] == "round" for row in run.rounds) for run in runs],
        "seed": [run.fact("seed") for run in runs],
    }.items():
        facts += [f"{key} {', '.join(_unique(values))}"] if _unique(values) else []
    return facts


def _summary(runs: Sequence[RunFolder]) -> Summary:
    further = _unique(metric for run in runs for metric in run.metrics[1:])
    rows = [_summary_row(run, further, mixed(runs)) for run in runs]
    cheapest = min(rows, key=lambda row: row.both)
    return Summary(
        _metric(runs), further, rows, majority_rows(runs), _highest(runs), cheapest, best_models(runs), mixed(runs)
    )


def _metric(runs: Sequence[RunFolder]) -> str:
    """The main metric of all runs."""
    metrics = _unique(run.metric for run in runs)
    return metrics[0] if len(metrics) == 1 else "score"


def _summary_row(run: RunFolder, further: Sequence[str], apart: bool) -> SummaryRow:
    """`apart`: other runs are judged on other test data, so that no column has the scores by which each is judged."""
    score = run.score(None if apart else run.kind)
    uplink, downlink = (
        Moved(run.total_bytes(direction), run.bytes_per_client_round(direction), run.nominal_bytes(direction))
        for direction in DIRECTIONS
    )
    return SummaryRow(
        label=run.label,
        badges=badges(run),
        kind=run.kind,
        final=run.written(score.final),
        best=run.written(score.best),
        best_when="" if score.best_row is None else when(score.best_row),
        of_server=run.written(run.score("global").final),
        of_clients=run.written(of_clients(run)),
        further=[run.written(run.score(None if apart else run.kind, metric).final, metric) for metric in further],
        uplink=uplink,
        downlink=downlink,
        both=run.total_bytes("both"),
        seconds=run.seconds,
    )


def _highest(runs: Sequence[RunFolder]) -> Highest | None:
    kinds = {run.label: run.kind for run in runs}
    by = ""
    if len(set(kinds.values())) > 1:
        shared = [k for k in ("personalised", "global") if all(run.score(k).final is not None for run in runs)]
        kinds |= dict.fromkeys(kinds, shared[0]) if shared else {}
        name = _metric(runs)
        if not shared and mixed(runs):
            return None
        by = f"By the {name} all runs have measured, " if shared else f"Each by its own kind of {name}, "
    if len({run.metric for run in runs}) > 1:
        return None
    finals = {run.label: final for run in runs if (final := run.score(kinds[run.label]).final) is not None}
    if not finals:
        return None
    best = (max if runs[0].higher() else min)(finals, key=lambda label: finals[label])
    return Highest(by, best, runs[0].written(finals[best]), kinds[best], runs[0].higher())


def _scores(runs: Sequence[RunFolder], charts: Charts) -> Scores | None:
    if not any(run.kinds() for run in runs):
        return None
    names, lines = _lines(runs)
    charts["scores-rounds"] = {
        view: (
            [score_trace(run, metric, kind, index, None) for run, metric, kind, index in drawn],
            {"xaxis": round_axis(runs), "yaxis": _axis(drawn), "hovermode": "closest"},
        )
        for view, drawn in lines.items()
    }
    for over, title in MOVED.items():
        charts[f"scores-{over}"] = {
            view: (
                [score_trace(run, metric, kind, index, over) for run, metric, kind, index in drawn],
                {"xaxis": mb_axis(f"{title} so far, MB", runs, over), "yaxis": _axis(drawn)},
            )
            for view, drawn in lines.items()
        }
    timed = {view: [line for line in drawn if line[0].timed] for view, drawn in lines.items()}
    if any(timed.values()):
        charts["scores-clock"] = {
            view: (
                [score_trace(run, metric, kind, index, "simulated_seconds") for run, metric, kind, index in drawn],
                {"xaxis": {"title": "simulated seconds", "rangemode": "tozero"}, "yaxis": _axis(drawn)},
            )
            for view, drawn in timed.items()
        }
    shown = [line for drawn in lines.values() for line in drawn]
    kinds = _unique(kind for _, _, kind, _ in shown)
    metrics = [metric for metric in _unique(metric for _, metric, _, _ in shown) if metric in METRICS]
    meanings = {kind: KINDS.get(kind, "as the method records it") for kind in kinds}
    of_metrics = {metric: METRICS[metric] for metric in metrics}
    return Scores(_metric(runs), meanings, of_metrics, names, any(timed.values()))


def _confusions(runs: Sequence[RunFolder]) -> list[tuple[str, list[str], list[tuple[str, list[int]]]]]:
    """Each run's confusion matrix, if it has one: its label, the classes, and a row for each true class."""
    found = []
    for run in runs:
        details = (run.result or {}).get("global_model", {})
        if counts := details.get("confusion"):
            names = [*details["classes"], *(f"class {c}" for c in range(len(details["classes"]), len(counts)))]
            found.append((run.label, names, list(zip(names, counts, strict=False))))
    return found


def _lines(runs: Sequence[RunFolder]) -> tuple[dict[str, str], dict[str, list[Line]]]:
    """The charts' views and their lines. One run: its kinds by metric and test data. Several: each run's main kind
    (unless these are on different test data), one kind that all have, and each further metric."""
    if len(runs) == 1:
        run = runs[0]
        metrics = run.metrics
        names, lines = dict[str, str](), dict[str, list[Line]]()
        for metric in metrics:
            kinds = list(enumerate(run.kinds(metric)))
            for place, where in PLACES.items():
                here = [(i, kind) for i, kind in kinds if (kind == OF_SERVER) == (place == "server")]
                if here:
                    view = metric if len(here) == len(kinds) else f"{metric} {place}"
                    names[view] = " ".join(([metric] if len(metrics) > 1 else []) + ([where] if view != metric else []))
                    lines[view] = [(run, metric, kind, i) for i, kind in here]
        return {view: name or "all" for view, name in names.items()}, lines
    shown = [kind for kind in ("personalised", "global") if any(kind in run.kinds() for run in runs)]
    further = _unique(metric for run in runs for metric in run.metrics[1:])
    apart = mixed(runs)
    names = {} if apart else {"own": "each method's own"}
    lines = {} if apart else {"own": [(run, run.metric, run.kind, i) for i, run in enumerate(runs) if run.kind]}
    names |= {name: name for name in shown}
    for kind in shown:
        lines[kind] = [(run, run.metric, kind, index) for index, run in enumerate(runs) if kind in run.kinds()]
    for metric in further:
        for only in shown if apart else [""]:
            drawn = [(run, metric, only or run.kind, i) for i, run in enumerate(runs)]
            view = f"{metric} {only}" if only else metric
            lines[view] = [line for line in drawn if line[2] in line[0].kinds(metric)]
            names[view] = view
    return names, lines


def _axis(drawn: Sequence[Line]) -> Layout:
    metrics = _unique(metric for _, metric, _, _ in drawn)
    name = metrics[0] if len(metrics) == 1 else "score"
    return score_axis(name, all(run.percent(metric) for run, metric, _, _ in drawn))


def _traffic(runs: Sequence[RunFolder]) -> Charts:
    """Only charts: the section has no other values."""
    charts: Charts = {}
    for direction in DIRECTIONS:
        traces = [round_trace(run, index, direction) for index, run in enumerate(runs)]
        layout = {"xaxis": round_axis(runs), "yaxis": mb_axis("MB a round", runs, direction)}
        charts[f"rounds-{direction}"] = {"all": (traces, layout)}
        if any(run.ledger is not None for run in runs):
            charts[f"clients-{direction}"] = {"all": client_chart(runs, direction)}
    return charts


def _rounded(runs: Sequence[RunFolder]) -> Charts:
    """Charts of the runs that round uploads or downloads, by direction."""
    charts: Charts = {}
    for way, measured in MEASURED.items():
        found = [(index, run) for index, run in enumerate(runs) if rounded_rows(run.rounds, way)]
        for name, what in zip(("bits", "error"), measured, strict=True) if found else ():
            traces = [rounded_trace(run, index, way, what) for index, run in found]
            layout = {"xaxis": round_axis(runs), "yaxis": {"title": what, "rangemode": "tozero"}}
            charts[f"rounded-{name}-{way}"] = {"all": (traces, layout)}
    return charts


def _probes(runs: Sequence[RunFolder], charts: Charts) -> Probes | None:
    found = [(index, run, run.probe) for index, run in enumerate(runs) if run.probe]
    if not found:
        return None
    names: dict[int, list[str]] = {}  # names of points, by the number of units before them
    for _, _, probe in found:
        for point in probe["points"]:
            names.setdefault(point["units"], []).append(pieces.plain(point["point"], 24))
    ticks = {"tickvals": sorted(names), "ticktext": [" or ".join(_unique(names[units])) for units in sorted(names)]}
    figures: dict[str, str] = {}
    for name, (title, axis) in _PROBED.items():
        if all(point[name] is None for _, _, probe in found for point in probe["points"]):
            continue
        lines = [probe_trace(run, probe, name, index) for index, run, probe in found]
        charts[f"probe-{name}"] = {"all": (lines, {"xaxis": {"title": "after unit"} | ticks, "yaxis": axis})}
        figures[name] = title
    return Probes([(run.label, probe["model"]) for _, run, probe in found], figures)


def _labels(runs: Sequence[RunFolder], charts: Charts) -> Labels | None:
    groups = grouped_by(runs, lambda run: run.partition)
    if not groups:
        return None
    names = {str(index): ", ".join(run.label for run in group) for index, (group, _) in enumerate(groups)}
    partitions = dict(zip(names, (partition for _, partition in groups), strict=True))
    if any(isinstance(row, list) for partition in partitions.values() for row in partition["train"]):
        charts["labels-train"] = {v: heat_map(p, "train") for v, p in partitions.items()}
        charts["labels-test"] = {v: heat_map(p, "test") for v, p in partitions.items()}
    height = max(min(160 + 16 * len(partition["train"]), 640) for partition in partitions.values())
    totals = [
        SampleTotals(names[view], _sizes(partition))
        for view, partition in partitions.items()
        if _lacks_labels(partition)
    ]
    return Labels(names, height, totals)


def _lacks_labels(partition: Partition) -> bool:
    """Whether some node does not report its labels."""
    return not all(isinstance(row, list) for row in partition["train"])


def _sizes(partition: Partition) -> list[tuple[str, float | None, float | None]]:
    """The name of each client, or group, with its numbers of training and test samples."""
    train, test = ([sum(row) if isinstance(row, list) else row for row in partition[split]] for split in _SPLITS)

    def mean(of: list[int | None], group: range) -> float | None:
        known = [samples for i in group if (samples := of[i]) is not None]
        return known[0] if len(known) == 1 else round(fmean(known), 1) if known else None

    named = partition.get("names", [])
    return [(called(group, named), mean(train, group), mean(test, group)) for group in together(len(train))]


def _versions(runs: Sequence[RunFolder]) -> Versions | None:
    groups = grouped_by(runs, lambda run: (run.result or {}).get("versions"))
    if not groups:
        return None
    names = [", ".join(run.label for run in group) if len(groups) > 1 else "version" for group, _ in groups]
    packages = _unique(package for _, found in groups for package in found)
    table = {package: [found.get(package, "—") for _, found in groups] for package in packages}
    return Versions(names, table, [words for run in runs for words in _other_versions(run, len(runs) > 1)])


def _other_versions(run: RunFolder, several: bool) -> list[str]:
    named = [] if run.partition is None else run.partition.get("names", [])
    lines = []
    for client, found in (run.result or {}).get("versions_at_clients", {}).items():
        site = f" ({pieces.cut(named[int(client)])})" if client.isdecimal() and int(client) < len(named) else ""
        what = ", ".join(f"{name} {of.get('node')} (server: {of.get('server')})" for name, of in found.items())
        lines.append(f"{f'{run.label}, ' if several else ''}client {client}{site}: {what}")
    return lines


# ---- words ----


def _unique(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
