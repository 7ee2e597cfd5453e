"""Results by site as tables, for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from fewbytes.base.errors import listed
from fewbytes.base.units import written
from fewbytes.report.evaluation import COMPARED, figure_at, in_percent, main_metric
from fewbytes.report.evaluation_words import level
from fewbytes.report.records import Evaluation, Figure
from fewbytes.report.table import figures_table, whole

MEAN = "mean of the sites"


def evaluation_table(evaluation: Evaluation, metric: str | None = None) -> Table:
    """A metric (default: the main one) by site as a table for the terminal, with intervals, and the mean over sites.
    What its figures are is below the last metric's."""
    last = metric in (None, [*evaluation["metrics"]][-1])
    metric = metric or main_metric(evaluation)
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    words = explained(evaluation) if last else ""
    table = figures_table(words, [f"{metric} at"], ["samples", *names])
    for row in site_rows(evaluation, metric):
        cells = [" ".join(filter(None, (value, f"({ends})" if ends else ""))) for value, ends in row.cells]
        table.add_row(row.name, row.samples, *cells)
    return table


def explained(evaluation: Evaluation) -> str:
    """What the figures are."""
    outside = [site["name"] for site in evaluation["sites"] if not site["trained"]]
    more = f"; no training at {listed(outside)}" if outside else ""
    if not evaluation["level"]:
        return "on each site's own test samples, as the sites reported them last"
    return f"on each site's own test samples, with {level(evaluation)} bootstrap intervals{more}"


@dataclass(frozen=True)
class SiteRow:
    """A site of a table: its number of samples as text, and by column a figure and its interval as texts."""

    name: str
    samples: str
    cells: list[tuple[str, str]]


def site_rows(evaluation: Evaluation, metric: str) -> list[SiteRow]:
    """A row per site, and the mean over sites that all columns have; a column per origin of models."""
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    rows, means = [], {name: list[float | None]() for name in names}
    for site in evaluation["sites"]:
        figures = {name: figure_at(evaluation, name, site["name"], metric) for name in names}
        cells = [written_figure(evaluation, metric, figures[name]) for name in names]
        rows.append(SiteRow(site["name"] + ("" if site["trained"] else " *"), whole(site["samples"]), cells))
        if site["trained"]:
            for name, figure in figures.items():
                means[name].append(None if figure is None else figure["value"])
    trained = len(next(iter(means.values()), []))
    if trained > 1:
        share = in_percent(evaluation, metric)
        known = {name: [v for v in values if v is not None] for name, values in means.items()}
        cells = [
            (written(sum(values) / len(values), share) if len(values) == trained else "—", "")
            for values in known.values()
        ]
        rows.append(SiteRow(MEAN, "", cells))
    return rows


def group_rows(evaluation: Evaluation) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Subgroups over all sites, or at each if their data are elsewhere: name, number of samples, figures by column."""
    metric, rows, apart = main_metric(evaluation), [], not pools_groups(evaluation)
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    found = [each for each in evaluation["groups"] if apart or each["site"] is None]
    for group, site in dict.fromkeys((each["group"], each["site"]) for each in found):
        of = {each["models"]: each for each in found if (each["group"], each["site"]) == (group, site)}
        cells = [written_figure(evaluation, metric, of[name]["score"] if name in of else None) for name in names]
        name = f"{group} at {site}" if apart else group
        rows.append((name, f"{max(each['samples'] for each in of.values()):,}", cells))
    return rows


def pools_groups(evaluation: Evaluation) -> bool:
    """Whether subgroups are of all sites' samples together, which needs their data."""
    return any(each["site"] is None for each in evaluation["groups"])


def group_table(evaluation: Evaluation) -> Table | None:
    """Subgroups as a table for the terminal; None if there are none."""
    rows = group_rows(evaluation)
    if not rows:
        return None
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    whose = "all sites' test samples" if pools_groups(evaluation) else "each site's own test samples"
    caption = f"subgroups of {whose}, by {main_metric(evaluation)}"
    table = figures_table(caption, [str(evaluation["by"])], ["samples", *names])
    for name, samples, cells in rows:
        table.add_row(name, samples, *(f"{value} ({ends})" if ends else value for value, ends in cells))
    return table


def written_figure(evaluation: Evaluation, metric: str, figure: Figure | None) -> tuple[str, str]:
    """A figure and its interval as texts; empty where there is none."""
    if figure is None or figure["value"] is None:
        return "—" if figure is not None else "", ""
    share = in_percent(evaluation, metric)
    ends = (figure["low"], figure["high"])
    texts = [written(end, share).removesuffix("%") for end in ends]
    return written(figure["value"], share), "" if None in ends else " to ".join(texts)
