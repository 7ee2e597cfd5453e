"""The page of a survey, survey.html: findings, sites side by side, values by site, drift."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fewbytes.base.errors import suggestion
from fewbytes.base.files import write_text
from fewbytes.methods.survey.figures import MEASURED, ColumnFigures, merged
from fewbytes.report import pieces
from fewbytes.report.document import document
from fewbytes.report.pieces import Layout, Trace
from fewbytes.report.survey_file import SurveyFile, write_survey_file
from fewbytes.report.survey_findings import LARGE, SEEN

PAGE = "survey.html"
DRAWN = 40
"""Maximum number of columns with a chart: those that differ most."""
BARS = 14
"""About how many bars a histogram has."""
NAMED = 6
"""Maximum number of categories that a cell of the table names."""
KINDS = {
    "units": "Units that may differ",
    "unreadable": "Columns that cannot be read",
    "columns": "Columns that differ",
    "classes": "Classes that are missing",
    "categories": "Categories that differ",
    "missing": "Missing values",
    "drift": "Drift",
}
"""The headings of findings by kind."""
TELLS = {
    "figures": "figures of every column",
    "labels": "numbers of samples by class",
    "sizes": "its number of samples",
    "nothing": "nothing",
}
"""What a site tells, in words."""


class Cell(NamedTuple):
    """A cell of a table: its text, and further lines."""

    text: str
    more: tuple[str, ...] = ()


def write_survey(folder: Path, names: Sequence[str] = ()) -> Path:
    """Write survey.json and the page of a survey's run folder; the page's path. `names`: of the sites, by client."""
    whole, path = write_survey_file(folder, names), folder / PAGE
    write_text(path, page(whole))
    return path


def page(whole: SurveyFile) -> str:
    """The HTML page of a survey."""
    reported = {site.name: site.columns for site in whole.sites if site.columns}
    groups = {f"{len(each.sites)} sites together": each.columns for each in whole.hidden}
    views = _views(whole, reported)
    found = {
        title: [each.text for each in whole.findings if each.kind == kind]
        for kind, title in KINDS.items()
        if any(each.kind == kind for each in whole.findings)
    }
    units = {each.column for each in whole.findings if each.kind == "units"}
    steady = [column for column, by in whole.drift.items() if max(map(abs, by.values())) < SEEN]
    drifting = {column: by for column, by in whole.drift.items() if column not in (*units, *steady)}
    return document(
        "survey.html",
        {"values": views} if views else {},
        title="What the sites have",
        facts=facts_of(whole),
        found=found,
        heads=["column", *reported, *groups, "all together"],
        rows=[
            (
                name,
                [
                    *(_cell(each.get(name)) for each in (*reported.values(), *groups.values())),
                    _pooled_cell(whole, name),
                ],
            )
            for name in dict.fromkeys((*whole.pooled, *(name for each in reported.values() for name in each)))
        ],
        views={name: pieces.cut(name, 40) for name in views},
        legend=dict(enumerate(reported)),
        sites=[*reported],
        drift=[
            (name, [(f"{by[site]:+.2f}", abs(by[site]) >= LARGE) if site in by else ("", False) for site in reported])
            for name, by in sorted(drifting.items(), key=lambda each: -max(map(abs, each[1].values())))
        ],
        steady=len(steady),
        common=[(*each.sites, _count(each.samples, whole.min_count)) for each in whole.common],
        least=whole.min_count,
        exact=not whole.dp,
        telling=[
            (
                site.name,
                TELLS.get(site.tells, site.tells),
                _count(site.samples, whole.min_count) if site.samples else "not reported",
                f"{site.uplink_bytes:,}",
                f"{site.downlink_bytes:,}",
            )
            for site in whole.sites
        ],
        notes=[*notes_of(whole)],
    )


def facts_of(whole: SurveyFile) -> list[str]:
    """How much was surveyed, in a few words each."""
    known = sum(site.samples or 0 for site in whole.sites)
    hidden = sum(each.samples or 0 for each in whole.hidden if each.tells == "nothing")
    facts = [
        f"{known + hidden:,} samples",
        f"{len(whole.sites)} sites",
        f"{whole.uplink_bytes:,} bytes up, {whole.downlink_bytes:,} down",
    ]
    return [*facts, f"no figure of fewer than {whole.min_count} samples", *([whole.dp] if whole.dp else [])]


def notes_of(whole: SurveyFile) -> Iterator[str]:
    """Sentences on what the figures leave out."""
    for each in whole.hidden:
        yield (
            f"{', '.join(each.sites)} report {TELLS[each.tells]} alone: they are counted in one sum, which hides each "
            "of them, and in the column “all together”."
        )
    enough = any((site.samples or 0) >= whole.min_count for site in whole.sites)
    if not enough and not whole.hidden and not whole.left_out:
        yield f"No site has {whole.min_count} samples, so there are no figures: survey with a smaller --min-count."
    if whole.left_out:
        yield (
            f"{', '.join(whole.left_out)} report no figures, and are part of no figure here: a sum hides a site only "
            "among three or more with the same `tell`; if they tell nothing, it needs a table's columns, too (--like)."
        )
    if whole.small:
        yield f"{', '.join(whole.small)} have too few samples (min-count), and are part of no figure here."
    for name in whole.unknown:
        guess = suggestion(name, whole.pooled)
        yield f"No site has a column {name!r}{guess}: correct --target, --columns or --leave-out, and survey again."
    if whole.absent:
        yield f"{', '.join(whole.absent)} did not answer."


def _count(count: int | None, least: int) -> str:
    return f"fewer than {least}" if count is None else f"{count:,}"


def _cell(figures: ColumnFigures | None) -> Cell | None:
    """A column at a site: mean and deviation, or categories; then quartiles and missing values."""
    if figures is None:
        return None
    missing = "some missing" if figures.missing is None else f"{figures.missing:,} missing" if figures.missing else ""
    if figures.kind in MEASURED and figures.mean is not None:
        low, middle, high = (figures.quantile(share) for share in (0.25, 0.5, 0.75))
        quartiles = f"median {_written(middle)} ({_written(low)} to {_written(high)})" if figures.edges else ""
        text = f"{_written(figures.mean)} ± {_written(figures.deviation)}"
        return Cell(text, tuple(filter(None, (quartiles, missing))))
    if figures.kind == "categories" and figures.categories:
        total = sum(figures.categories.values()) + (figures.other or 0)
        largest = sorted(figures.categories.items(), key=lambda each: -each[1])
        shares = [f"{pieces.cut(name, 24)} {100 * count / total:.0f} %" for name, count in largest[:NAMED]]
        rest = len(largest) - NAMED
        more = [f"{rest} more"] if rest > 0 else []
        return Cell(", ".join(shares + more), tuple(filter(None, (f"{total:,} samples", missing))))
    words = {"texts": "texts", "identifiers": "numbers the rows", "unreadable": figures.why or "unreadable"}
    return Cell(words.get(figures.kind, "too few values"), tuple(filter(None, (missing,))))


def _pooled_cell(whole: SurveyFile, name: str) -> Cell | None:
    """A column over all sites, unless its units seem to differ."""
    if any(each.kind == "units" and each.column == name for each in whole.findings):
        return Cell("units differ")
    return _cell(whole.pooled.get(name))


def _written(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# Charts ---------------------------------------------------------------------------------------------------------------


def _views(
    whole: SurveyFile, reported: Mapping[str, Mapping[str, ColumnFigures]]
) -> dict[str, tuple[list[Trace], Layout]]:
    """A chart for each column with something to draw, those that differ most first."""
    urgent = {each.column for each in whole.findings}
    order = sorted(
        dict.fromkeys(name for each in reported.values() for name in each),
        key=lambda name: (name not in urgent, -max(map(abs, whole.drift.get(name, {"": 0.0}).values()))),
    )
    found: dict[str, tuple[list[Trace], Layout]] = {}
    for name in order:
        of = {site: columns[name] for site, columns in reported.items() if name in columns}
        if (traces := [*_traces(of, [*reported])]) and len(found) < DRAWN:
            numbers = any(trace["type"] == "scatter" for trace in traces)
            across: dict[str, Any] = {"title": pieces.plain(name)} | ({} if numbers else {"type": "category"})
            up = {"title": "share of the values per unit" if numbers else "share of the samples", "rangemode": "tozero"}
            found[name] = traces, {"xaxis": across, "yaxis": up | ({} if numbers else {"tickformat": ".0%"})}
    return found


def _traces(of: Mapping[str, ColumnFigures], sites: Sequence[str]) -> Iterator[Trace]:
    for site, figures in of.items():
        colour = pieces.colour(sites.index(site))
        if figures.kind in MEASURED and len(figures.edges) > 2:
            total = sum(figures.counts)
            edges, counts = merged(figures.edges, figures.counts, total // BARS)
            heights = [n / total / (high - low) for low, high, n in zip(edges, edges[1:], counts[1:], strict=False)]
            yield {
                "type": "scatter", "mode": "lines", "name": pieces.plain(site),
                "x": edges, "y": [*heights, *heights[-1:]],
                "line": {"color": colour, "width": 2, "shape": "hv"},
                "hovertemplate": f"{pieces.plain(site)}<br>%{{x:.4~g}}<extra></extra>",
            }  # fmt: skip
        elif figures.kind == "categories" and figures.categories:
            total = sum(figures.categories.values()) + (figures.other or 0)
            largest = sorted(figures.categories.items(), key=lambda each: -each[1])[:30]
            yield {
                "type": "bar", "name": pieces.plain(site), "marker": {"color": colour},
                "x": [pieces.plain(name, 30) for name, _ in largest], "y": [count / total for _, count in largest],
                "hovertemplate": f"{pieces.plain(site)}<br>%{{x}}: %{{y:.1%}}<extra></extra>",
            }  # fmt: skip
