"""Results by site as charts, the report's section and a page of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbytes.base.errors import listed, visible
from fewbytes.base.files import replacing
from fewbytes.base.units import written
from fewbytes.report import pieces
from fewbytes.report.charts import round_axis, score_axis
from fewbytes.report.document import document
from fewbytes.report.evaluation import COMPARED, PAGE, cell_at, figure_at, in_percent, main_metric
from fewbytes.report.evaluation_tables import MEAN, SiteRow, explained, group_rows, pools_groups, site_rows
from fewbytes.report.evaluation_words import verdicts
from fewbytes.report.folder import RunFolder
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.report.records import Evaluation, Figure, Gain

FEW_CLASSES = 12  # maximum number of classes of a confusion matrix on the page
FEW_MODELS = 10  # maximum number of models in charts, and beside each other in a table that has fewer sites


@dataclass(frozen=True)
class Section:
    """The results by site: sentences, columns, rows by metric, the models of the chart with the numbers of their
    colours, its height, and the same of the charts of differences. `turned`: the table has a row per model."""

    verdicts: list[str]
    explained: str
    columns: list[str]
    rows: dict[str, list[SiteRow]]
    drawn: list[tuple[int, str]]
    height: int
    compared: dict[str, list[tuple[int, str]]]
    intervals: bool
    outside: bool
    turned: bool


def section(evaluation: Evaluation | None, charts: Charts) -> Section | None:
    """The report's section by site, and its charts; None without an evaluation."""
    if evaluation is None:
        return None
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    drawn = _drawn(evaluation, names)
    charts["sites"] = {metric: _sites_chart(evaluation, metric, drawn) for metric in evaluation["metrics"]}
    compared: dict[str, list[tuple[int, str]]] = {}
    for name, left_out in (("gains", False), ("contributions", True)):
        kinds = {each["name"]: each["kind"] for each in evaluation["models"]}
        of = [g for g in evaluation["gains"] if (kinds[g["over"]] == "without") == left_out]
        if of := [gain for gain in of if gain["gain"]["value"] is not None]:
            key = "over" if left_out else "models"
            shown = list(dict.fromkeys(gain[key] for gain in of))  # type: ignore[literal-required]
            among = list(enumerate(each["name"] for each in evaluation["models"])) if left_out else drawn
            compared[name] = [(i, model) for i, model in among if model in shown]
            charts[name] = {"all": _gains_chart(evaluation, of, compared[name], key)}
    rows = {metric: site_rows(evaluation, metric) for metric in evaluation["metrics"]}
    height = 120 + len(evaluation["sites"]) * (18 + 12 * len(drawn))
    outside = any(not site["trained"] for site in evaluation["sites"])
    return Section(
        verdicts(evaluation),
        explained(evaluation),
        names,
        rows,
        drawn,
        min(height, 900),
        compared,
        bool(evaluation["level"]),
        outside,
        len(names) > max(FEW_MODELS, len(evaluation["sites"])),
    )


def _drawn(evaluation: Evaluation, names: Sequence[str]) -> list[tuple[int, str]]:
    """The models of the charts, with the numbers of their colours. Of many, those with the highest mean gains over
    training alone, and the latter."""
    if len(names) <= FEW_MODELS:
        return [(i, each["name"]) for i, each in enumerate(evaluation["models"]) if each["name"] in names]
    means = [gain for gain in evaluation["gains"] if gain["site"] is None and gain["over"] in names]
    gains = {gain["models"]: gain["gain"]["value"] or 0.0 for gain in means} | {
        gain["over"]: math.inf for gain in means
    }
    best = sorted(names, key=lambda name: -gains.get(name, -math.inf))[:FEW_MODELS]
    return [(place, name) for place, name in enumerate(name for name in names if name in best)]


def curves(runs: Sequence[RunFolder], charts: Charts) -> tuple[dict[str, str], list[tuple[int, str]]]:
    """The chart of one run's main metric at each site over rounds: its views, by kind, and its lines. Empty for several
    runs, and clients without names."""
    names = runs[0].partition.get("names", []) if len(runs) == 1 and runs[0].partition is not None else []
    if not names:
        return {}, []
    run, views = runs[0], dict[str, tuple[list[Trace], Layout]]()
    form = ".1%" if run.percent() else ".4~g"
    rows = [(row["round"], row["by_client"].get(run.metric, {})) for row in run.rounds if "by_client" in row]
    for kind in dict.fromkeys(kind for _, kinds in rows for kind in kinds):
        traces = []
        for index, name in enumerate(names):
            points = [(t, kinds[kind][str(index)]) for t, kinds in rows if str(index) in kinds.get(kind, {})]
            plain = pieces.plain(name)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": plain,
                    "line": {"color": pieces.colour(index), "dash": pieces.dash(index)},
                    "marker": {"color": pieces.colour(index), "symbol": pieces.symbol(index)},
                    "x": [t for t, _ in points],
                    "y": [value for _, value in points],
                    "hovertemplate": f"{plain}<br>round %{{x}}: <b>%{{y:{form}}}</b><extra></extra>",
                }
            )
        views[kind] = traces, {"xaxis": round_axis(runs), "yaxis": score_axis(run.metric, run.percent())}
    if views:
        charts["site-rounds"] = views
    return {kind: kind for kind in views}, list(enumerate(names)) if views else []


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """Write the page of an evaluation into a folder; returns its path."""
    charts: Charts = {}
    found = section(evaluation, charts)
    rows = [(cell["models"], cell["of"]) for cell in evaluation["cells"]]
    charts["matrix"] = {m: _matrix(evaluation, m, list(dict.fromkeys(rows))) for m in evaluation["metrics"]}
    calibrated = _calibrations(evaluation)
    if calibrated:
        charts["calibration"] = calibrated
    page = document(
        "evaluation.html",
        charts,
        title=f"{listed(evaluation['runs'], 3)} at {len(evaluation['sites'])} sites",
        facts=[
            f"{sum(site['samples'] or 0 for site in evaluation['sites']):,} test samples",
            f"metrics {', '.join(evaluation['metrics'])}",
        ],
        sites=found,
        site_kinds={},
        site_lines=[],
        views={metric: metric for metric in evaluation["metrics"]},
        matrix_height=140 + 26 * len(set(rows)),
        calibrated={name: name for name in calibrated},
        site_names=list(enumerate(site["name"] for site in evaluation["sites"])),
        by=evaluation["by"],
        groups=group_rows(evaluation),
        pooled_groups=pools_groups(evaluation),
        confusions=list(_confusions(evaluation)),
        classes=evaluation["classes"],
    )
    with replacing(folder / PAGE) as file:
        file.write(visible(page).encode(errors="replace"))
    return folder / PAGE


def _calibrations(evaluation: Evaluation) -> dict[str, tuple[list[Trace], Layout]]:
    """By models, the calibration curve at each site: the observed frequency by the predicted probability; a dotted line
    where both are equal."""
    views = {}
    share = {"tickformat": ".0%", "range": [-0.02, 1.02]}
    for each in evaluation["models"]:
        traces: list[Trace] = [
            {
                "type": "scatter", "mode": "lines", "x": [0, 1], "y": [0, 1], "hoverinfo": "skip",
                "line": {"color": "#74839b", "width": 1.5, "dash": "dot"},
            }
        ]  # fmt: skip
        for index, site in enumerate(evaluation["sites"]):
            cell, plain = cell_at(evaluation, each["name"], site["name"]), pieces.plain(site["name"])
            if cell is None or not (curve := cell.get("calibration")) or each["kind"] not in COMPARED:
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": plain,
                    "line": {"color": pieces.colour(index), "dash": pieces.dash(index)},
                    "marker": {"color": pieces.colour(index), "symbol": pieces.symbol(index)},
                    "x": [predicted for predicted, _, _ in curve],
                    "y": [observed for _, observed, _ in curve],
                    "customdata": [[count] for _, _, count in curve],
                    "hovertemplate": f"{plain}<br>predicted %{{x:.1%}}, observed <b>%{{y:.1%}}</b><br>"
                    "%{customdata[0]} samples<extra></extra>",
                }
            )
        if len(traces) > 1:
            axes = {"xaxis": {"title": "predicted probability"} | share, "yaxis": {"title": "observed"} | share}
            views[each["name"]] = traces, axes
    return views


def _confusions(evaluation: Evaluation) -> Iterator[tuple[str, str, list[list[int]]]]:
    """Confusion matrices: models, site, counts."""
    if not 1 < len(evaluation["classes"]) <= FEW_CLASSES:
        return
    for each in evaluation["models"]:
        for site in evaluation["sites"]:
            cell = cell_at(evaluation, each["name"], site["name"])
            if cell is not None and cell["confusion"] and each["kind"] in COMPARED:
                yield each["name"], site["name"], cell["confusion"]


def _sites_chart(evaluation: Evaluation, metric: str, drawn: Sequence[tuple[int, str]]) -> tuple[list[Trace], Layout]:
    """A mark per site and model, with its interval."""
    traces = []
    for place, (index, name) in enumerate(drawn):
        points = [
            (number, site["name"], figure)
            for number, site in enumerate(evaluation["sites"])
            if (figure := figure_at(evaluation, name, site["name"], metric)) is not None and figure["value"] is not None
        ]
        shift = (place - (len(drawn) - 1) / 2) * 0.7 / max(1, len(drawn))
        traces.append(
            _marks(
                name,
                index,
                [figure for _, _, figure in points],
                [number + shift for number, _, _ in points],
                [site for _, site, _ in points],
                in_percent(evaluation, metric),
            )
        )
    return traces, {
        "xaxis": score_axis(metric, in_percent(evaluation, metric)),
        "yaxis": _names_axis([site["name"] for site in evaluation["sites"]]),
        "hovermode": "closest",
    }


def _gains_chart(
    evaluation: Evaluation, gains: Sequence[Gain], drawn: Sequence[tuple[int, str]], key: str
) -> tuple[list[Trace], Layout]:
    """A mark per site and comparison: how much better, with its interval; 0 is a line. `drawn`: the models named by
    `key`, with their colours."""
    share = in_percent(evaluation, main_metric(evaluation))
    names = [*(site["name"] for site in evaluation["sites"]), MEAN]
    traces: list[Trace] = [
        {
            "type": "scatter", "mode": "lines", "x": [0, 0], "y": [-0.6, len(names) - 0.4], "hoverinfo": "skip",
            "line": {"color": "#74839b", "width": 1.5, "dash": "dot"},
        }
    ]  # fmt: skip
    for place, (index, name) in enumerate(drawn):
        mine = [gain for gain in gains if gain[key] == name]  # type: ignore[literal-required]
        shift = (place - (len(drawn) - 1) / 2) * 0.7 / len(drawn)
        sites = [gain["site"] or MEAN for gain in mine]
        figures, at = [gain["gain"] for gain in mine], [names.index(site) + shift for site in sites]
        traces.append(_marks(f"{mine[0]['models']}, compared with {mine[0]['over']}", index, figures, at, sites, share))
    axis = {"title": f"difference in {main_metric(evaluation)} (right is better)"}
    return traces, {
        "xaxis": axis | ({"tickformat": "+.3~p"} if share else {}),
        "yaxis": _names_axis(names),
        "hovermode": "closest",
    }


def _marks(
    name: str, index: int, figures: Sequence[Figure], y: Sequence[float], sites: Sequence[str], share: bool
) -> Trace:
    """Marks with intervals."""
    values = [figure["value"] or 0.0 for figure in figures]
    above, below = (
        [
            0.0 if figure[end] is None else abs((figure[end] or 0.0) - value)
            for figure, value in zip(figures, values, strict=True)
        ]
        for end in ("high", "low")
    )
    form = ".1%" if share else ".4~g"
    ends = [[value - low, value + high] for value, low, high in zip(values, below, above, strict=True)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": pieces.plain(name),
        "x": values,
        "y": list(y),
        "error_x": {
            "type": "data",
            "array": above,
            "arrayminus": below,
            "symmetric": False,
            "thickness": 1.5,
            "width": 3,
        },
        "customdata": [[pieces.plain(site), *pair] for site, pair in zip(sites, ends, strict=True)],
        "hovertemplate": f"{pieces.plain(name)}<br><b>%{{x:{form}}}</b> at %{{customdata[0]}}<br>"
        f"%{{customdata[1]:{form}}} to %{{customdata[2]:{form}}}<extra></extra>",
        "marker": {"color": pieces.colour(index), "symbol": pieces.symbol(index), "size": 9},
    }


def _names_axis(names: Sequence[str]) -> Layout:
    ticks: dict[str, Any] = {
        "tickvals": list(range(len(names))),
        "ticktext": [pieces.plain(name, 24) for name in names],
    }
    return {"autorange": "reversed", "showgrid": False, "zeroline": False, "title": "site"} | ticks


def _matrix(evaluation: Evaluation, metric: str, rows: Sequence[tuple[str, str | None]]) -> tuple[list[Trace], Layout]:
    """Models by sites, as a heat map with its figures."""
    found = {(c["models"], c["of"], c["site"]): c["scores"].get(metric) for c in evaluation["cells"]}
    names = [pieces.plain(site["name"], 24) for site in evaluation["sites"]]
    share = in_percent(evaluation, metric)
    figures = [[found.get((*row, site["name"])) for site in evaluation["sites"]] for row in rows]
    values = [[None if figure is None else figure["value"] for figure in line] for line in figures]
    trace: Trace = {
        "type": "heatmap",
        "x": names,
        "y": [pieces.plain(name if of is None else f"{name}: {of}", 48) for name, of in rows],
        "z": values,
        "text": [["" if value is None else written(value, share) for value in line] for line in values],
        "texttemplate": "%{text}",
        "xgap": 1,
        "ygap": 1,
        "showscale": False,
        "hovertemplate": "%{y}, at %{x}<br><b>%{text}</b><extra></extra>",
    }
    return [trace], {
        "xaxis": {"title": "test set of", "type": "category", "showgrid": False},
        "yaxis": {"title": "model", "type": "category", "autorange": "reversed", "showgrid": False, "zeroline": False},
    }
