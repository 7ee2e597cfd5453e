"""Writes the HTML report of some runs as one self-contained page: no server, no network, no other file.

A section here computes its values, or None; the template of its name shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from fewbytes.base.errors import UserError, visible
from fewbytes.base.files import replacing
from fewbytes.report import (
    choice,
    choice_page,
    evaluation_page,
    leaks,
    left_out,
    notes,
    pictures,
    pieces,
    scores,
    summary,
    target,
)
from fewbytes.report.charts import (
    DIRECTIONS,
    bytes_axis,
    called,
    client_chart,
    heat_map,
    probe_trace,
    round_axis,
    round_trace,
    rounded_trace,
    score_axis,
    together,
    unique,
)
from fewbytes.report.differences import differences
from fewbytes.report.document import document
from fewbytes.report.evaluation import evaluation_of
from fewbytes.report.folder import RunFolder
from fewbytes.report.pieces import Charts, Layout
from fewbytes.report.records import Partition, Probed
from fewbytes.report.repeats import Repeated, repeated, seeds_of
from fewbytes.report.table import grouped_by, intervals
from fewbytes.report.times import Goal
from fewbytes.report.tuned import tuned
from fewbytes.running.rounding import MEASURED, rounded_rows

MANY = 10  # with more runs, the title does not name them, and all can be shown or hidden at once
_SPLITS: tuple[Literal["train"], Literal["test"]] = ("train", "test")
_PROBED: dict[Probed, tuple[str, Layout]] = {
    "information_x": ("Of the image, I(H;X)", {"title": "minus cross-entropy, nats a value"}),
    "information_y": ("Of the label, I(H;Y)", {"title": "nats"}),
    "linear_accuracy": ("Linear separability", score_axis("accuracy", True)),
}


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


def write_report(runs: Sequence[RunFolder], path: Path, goal: Goal | None = None) -> Path:
    """Write the report of `runs` to `path` atomically, and return `path`. `goal`: a link and a target to draw.

    Raises `UserError` if there are no runs or `path` cannot be written.
    """
    if not runs:
        raise UserError("there are no runs to report")
    text = visible(_page(runs, goal or Goal()))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode(errors="replace"))  # untrusted text may have invalid characters
    except OSError as error:
        raise UserError(f"the report {path} cannot be written: {error.strerror}") from error
    return path


def _page(runs: Sequence[RunFolder], goal: Goal) -> str:
    groups = _in_colours(repeated(runs))
    runs = [run for group in groups for run in group.runs]
    numbers = [number for number, group in enumerate(groups) for _ in group.runs]
    charts = _traffic(runs, numbers) | _rounded(runs, numbers)
    by_site = evaluation_of(runs)
    site_kinds, site_lines = evaluation_page.curves(runs, charts)
    return document(
        "report.html",
        charts,
        title=_title(groups),
        facts=_facts(runs),
        runs=runs,
        groups=groups,
        many=MANY,
        choice=choice_page.section(runs, charts),
        target=target.section(groups, goal, charts),
        summary=summary.section(groups),
        differences=differences(runs),
        tuned=tuned(runs),
        sites=evaluation_page.section(by_site, charts),
        site_kinds=site_kinds,
        site_lines=site_lines,
        sites_views={} if by_site is None else {metric: metric for metric in by_site["metrics"]},
        scores=scores.section(groups, goal, charts),
        confusions=_confusions(runs),
        intervals=[] if seeds_of(groups) else intervals(runs),
        left_out=left_out.section(runs),
        notes=notes.noted(runs),
        probes=_probes(runs, numbers, charts),
        leaks=leaks.section(runs),
        inferred=leaks.inferred(runs),
        poisoned=leaks.poisoned(runs),
        pictures=pictures.section(runs, charts),
        labels=_labels(runs, charts),
        versions=_versions(runs),
    )


def _in_colours(groups: list[Repeated]) -> list[Repeated]:
    """The methods in the order of their colours: if there are more methods than colours, those recommended come first,
    then those on a Pareto front."""
    if len(groups) <= len(pieces.COLOURS):
        return groups
    taken = [each.label for each in choice.choices([run for group in groups for run in group.runs])]
    best = choice.on_fronts(groups)
    return sorted(groups, key=lambda group: (group.label not in taken, group.label not in best))


# ---- the sections, in the order of the page ----


def _title(groups: Sequence[Repeated]) -> str:
    methods = [group.label for group in groups]
    datasets = unique(run.fact("dataset") for group in groups for run in group.runs)
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
        facts += [f"{key} {', '.join(unique(values))}"] if unique(values) else []
    return facts


def _confusions(runs: Sequence[RunFolder]) -> list[tuple[str, list[str], list[tuple[str, list[int]]]]]:
    """Each run's confusion matrix, if it has one: its label, the classes, and a row for each true class."""
    found = []
    for run in runs:
        details = (run.result or {}).get("global_model", {})
        if counts := details.get("confusion"):
            names = [*details["classes"], *(f"class {c}" for c in range(len(details["classes"]), len(counts)))]
            found.append((run.label, names, list(zip(names, counts, strict=False))))
    return found


def _traffic(runs: Sequence[RunFolder], numbers: Sequence[int]) -> Charts:
    """Only charts: the section has no other values."""
    charts: Charts = {}
    for direction in DIRECTIONS:
        unit = pieces.axis_unit(row[f"{direction}_bytes"] for run in runs for row in run.rounds)
        traces = [round_trace(run, number, direction, unit) for number, run in zip(numbers, runs, strict=True)]
        layout = {"xaxis": round_axis(runs), "yaxis": bytes_axis(f"{unit} a round", runs, direction)}
        charts[f"rounds-{direction}"] = {"all": (traces, layout)}
        if any(run.ledger is not None for run in runs):
            charts[f"clients-{direction}"] = {"all": client_chart(runs, direction, numbers)}
    return charts


def _rounded(runs: Sequence[RunFolder], numbers: Sequence[int]) -> Charts:
    """Charts of the runs that round uploads or downloads, by direction."""
    charts: Charts = {}
    for way, measured in MEASURED.items():
        found = [(number, run) for number, run in zip(numbers, runs, strict=True) if rounded_rows(run.rounds, way)]
        for name, what in zip(("bits", "error"), measured, strict=True) if found else ():
            traces = [rounded_trace(run, number, way, what) for number, run in found]
            layout = {"xaxis": round_axis(runs), "yaxis": {"title": what, "rangemode": "tozero"}}
            charts[f"rounded-{name}-{way}"] = {"all": (traces, layout)}
    return charts


def _probes(runs: Sequence[RunFolder], numbers: Sequence[int], charts: Charts) -> Probes | None:
    found = [(number, run, run.probe) for number, run in zip(numbers, runs, strict=True) if run.probe]
    if not found:
        return None
    names: dict[int, list[str]] = {}  # names of points, by the number of units before them
    for _, _, probe in found:
        for point in probe["points"]:
            names.setdefault(point["units"], []).append(pieces.plain(point["point"], 24))
    ticks = {"tickvals": sorted(names), "ticktext": [" or ".join(unique(names[units])) for units in sorted(names)]}
    figures: dict[str, str] = {}
    for name, (title, axis) in _PROBED.items():
        if all(point[name] is None for _, _, probe in found for point in probe["points"]):
            continue
        lines = [probe_trace(run, probe, name, number) for number, run, probe in found]
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
    packages = unique(package for _, found in groups for package in found)
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


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
