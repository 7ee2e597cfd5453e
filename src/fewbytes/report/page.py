"""Writes the HTML report of some runs as one self-contained page: no server, no network, no other file.

A section here computes its values, or None; the template of its name shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Literal

from fewbytes.base.errors import UserError, visible
from fewbytes.base.files import replacing
from fewbytes.base.units import unit_of
from fewbytes.report import choice, evaluation_page, leaks, left_out, notes, pictures, pieces, scores, target
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
    together,
    unique,
)
from fewbytes.report.differences import differences
from fewbytes.report.document import document
from fewbytes.report.evaluation import evaluation_of
from fewbytes.report.folder import Direction, RunFolder, when
from fewbytes.report.pieces import Charts, Layout
from fewbytes.report.records import Partition, Probed
from fewbytes.report.repeats import Repeated, repeated, seeds_of
from fewbytes.report.table import (
    badges_of,
    best_models,
    grouped_by,
    intervals,
    majority_rows,
    mixed,
    of_clients,
)
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
class Moved:
    """Bytes of a run in one direction: total, per client and round, as papers count them; None if unknown. Of several
    seeds the means."""

    total: int
    each: float | None
    nominal: int | None


@dataclass(frozen=True)
class SummaryRow:
    """A method in the summary: scores as text, of the run's main kind unless stated; of several seeds, means and
    deviations."""

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

    @property
    def units(self) -> dict[str, str]:
        """The units of bytes: of totals, and of a client's in a round."""
        ways = [moved for row in self.rows for moved in (row.uplink, row.downlink)]
        totals = chain([row.both for row in self.rows], *((moved.total, moved.nominal) for moved in ways))
        return {"total": unit_of(totals), "each": unit_of(moved.each for moved in ways)}


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
        choice=choice.section(runs, charts),
        target=target.section(groups, goal, charts),
        summary=_summary(groups),
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


def _summary(groups: Sequence[Repeated]) -> Summary:
    runs = [run for group in groups for run in group.runs]
    apart = mixed(runs)
    more = unique(metric for run in runs for metric in run.metrics[1:])
    further = [(metric, kind) for metric in more for kind in (("global", "personalised") if apart else ("",))]
    rows = [_summary_row(group, groups, further) for group in groups]
    cheapest = min(rows, key=lambda row: row.both)
    best = [] if seeds_of(groups) else best_models(runs)
    heads = [f"{metric} {kind}".strip() for metric, kind in further]
    metric = scores.main_metric(groups)
    return Summary(metric, heads, rows, majority_rows(runs), _highest(groups), cheapest, best, apart)


def _summary_row(group: Repeated, groups: Sequence[Repeated], further: Sequence[tuple[str, str]]) -> SummaryRow:
    """`further`: metrics, each with a kind ("": the main one). Where runs are judged on different test data, no column
    has the scores by which each is judged."""
    run, done = group.first, group.done
    kind = None if mixed([each.first for each in groups]) else run.kind
    found = [each.score(kind) for each in done]
    uplink, downlink = (_moved(group, way) for way in DIRECTIONS)
    best_row = found[0].best_row if len(found) == 1 else None
    return SummaryRow(
        label=group.label,
        badges=badges_of(group, groups),
        kind=run.kind,
        final=group.written([score.final for score in found]),
        best=group.written([score.best for score in found]),
        best_when="" if best_row is None else when(best_row),
        of_server=group.written([each.score("global").final for each in done]),
        of_clients=group.written([of_clients(each) for each in done]),
        further=[
            group.written([each.score(of or kind, metric).final for each in done], metric) for metric, of in further
        ],
        uplink=uplink,
        downlink=downlink,
        both=round(group.mean(lambda each: each.total_bytes("both"))),
        seconds=group.mean(lambda each: each.seconds),
    )


def _moved(group: Repeated, direction: Direction) -> Moved:
    """Means over the runs; None if unknown for one of them."""
    runs = group.done or list(group.runs)
    each = [run.bytes_per_client_round(direction) for run in runs]
    nominal = [run.nominal_bytes(direction) for run in runs]
    return Moved(
        round(group.mean(lambda run: run.total_bytes(direction))),
        None if None in each else fmean(count or 0 for count in each),
        None if None in nominal else round(fmean(count or 0 for count in nominal)),
    )


def _highest(groups: Sequence[Repeated]) -> Highest | None:
    firsts = [group.first for group in groups]
    kinds = {group.label: group.first.kind for group in groups}
    by = ""
    if len(set(kinds.values())) > 1:
        shared = [k for k in ("personalised", "global") if all(run.score(k).final is not None for run in firsts)]
        kinds |= dict.fromkeys(kinds, shared[0]) if shared else {}
        name = scores.main_metric(groups)
        if not shared and mixed(firsts):
            return None
        by = f"By the {name} all runs have measured, " if shared else f"Each by its own kind of {name}, "
    if len({run.metric for run in firsts}) > 1:
        return None
    finals = {g.label: list(found.values()) for g in groups if (found := g.finals(kinds[g.label]))}
    if not finals:
        return None
    best = (max if firsts[0].higher() else min)(finals, key=lambda label: fmean(finals[label]))
    score = next(group for group in groups if group.label == best).written(finals[best])
    return Highest(by, best, score, kinds[best], firsts[0].higher())


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
        traces = [round_trace(run, number, direction) for number, run in zip(numbers, runs, strict=True)]
        layout = {"xaxis": round_axis(runs), "yaxis": mb_axis("MB a round", runs, direction)}
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
