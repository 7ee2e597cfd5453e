"""Results by site: a run's models on every site's test set, in sentences, tables, charts and a page of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from fewbytes.base.errors import UserError, listed, visible
from fewbytes.base.files import replacing
from fewbytes.base.units import written
from fewbytes.report import pieces
from fewbytes.report.charts import round_axis, score_axis
from fewbytes.report.document import document
from fewbytes.report.folder import RunFolder
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.report.records import Cell, Evaluation, Figure, Gain, Models
from fewbytes.report.table import figures_table, whole

FILE, PAGE = "evaluation.json", "evaluation.html"
COMPARED = ("shared", "own", "alone", "pooled")
"""The kinds of models with a column in the table of sites."""
FEW_CLASSES = 12  # maximum number of classes of a confusion matrix on the page
MEAN = "mean of the sites"


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in a folder; None if there is none. Raises UserError for a damaged file."""
    file = folder / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Evaluation) if file.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged ({' '.join(str(error).split())}): run fewbytes evaluate again") from None


def place_of(runs: Sequence[RunFolder]) -> Path:
    """The folder of the runs' evaluation: that of one run, or the one that holds several."""
    return runs[0].path if len(runs) == 1 else Path(os.path.commonpath([os.path.realpath(run.path) for run in runs]))


def evaluation_of(runs: Sequence[RunFolder]) -> Evaluation | None:
    """The evaluation of these runs; None if there is none, or only one of other runs."""
    found = read_evaluation(place_of(runs))
    if found is not None and sorted(found["runs"]) == sorted(name_of(run) for run in runs):
        return found
    return _reported(runs[0]) if len(runs) == 1 else None


def _reported(run: RunFolder) -> Evaluation | None:
    """The last score that each client of a run has reported, by kind, without intervals; None if clients have no names,
    or none has reported."""
    names = [] if run.partition is None else run.partition.get("names", [])
    rows = [row["by_client"] for row in run.rounds if row["phase"] != "join" and "by_client" in row]
    cells: dict[tuple[str, str], Cell] = {}
    for metric, kind, client, value in (
        (metric, kind, client, value)
        for row in rows
        for metric, kinds in row.items()
        for kind, clients in kinds.items()
        for client, value in clients.items()
        if client.isdecimal() and int(client) < len(names) and metric in run.metrics
    ):
        site = names[int(client)]
        cell = cells.setdefault((kind, site), Cell(models=kind, of=site, site=site, scores={}, confusion=None))
        cell["scores"][metric] = Figure(value=value, low=None, high=None)
    if not cells or run.partition is None:
        return None
    tested = [sum(of) if isinstance(of, list) else of for of in run.partition["test"]]
    kinds = list(dict.fromkeys(kind for kind, _ in cells))
    return Evaluation(
        runs=[],
        metrics={
            metric: {"higher": run.higher(metric), "share": run.share(metric), "percent": run.percent(metric)}
            for metric in run.metrics
        },
        level=0.0,
        sites=[
            {"name": name, "samples": samples, "trained": True} for name, samples in zip(names, tested, strict=True)
        ],
        models=[Models(name=kind, kind="own", run=run.label) for kind in kinds],
        cells=list(cells.values()),
        gains=[],
        by=None,
        groups=[],
        classes=run.partition["classes"],
    )


def name_of(run: RunFolder) -> str:
    """The name of a run's folder."""
    return run.path.resolve().name


# Words ----------------------------------------------------------------------------------------------------------------


def verdicts(evaluation: Evaluation) -> list[str]:
    """Sentences on whether federating helps, by the sites' test sets: of the shared model and of sites' own models that
    gain most over training alone, and on the contribution of each site that was left out."""
    kinds = {each["name"]: each["kind"] for each in evaluation["models"]}
    means = [gain for gain in evaluation["gains"] if gain["site"] is None and gain["gain"]["value"] is not None]
    sentences = []
    for kind in ("shared", "own"):
        of_kind = [g for g in means if kinds[g["models"]] == kind and kinds[g["over"]] == "alone"]
        if of_kind:
            best = max(of_kind, key=lambda gain: gain["gain"]["value"] or 0.0)
            sentences.append(_verdict(evaluation, best, len(of_kind)))
    if not sentences and evaluation["runs"] and any(site["trained"] for site in evaluation["sites"]):
        sentences.append(
            "Whether federating helps is not known: no model here was trained alone (evaluate --alone trains them; a "
            "comparison needs the method separate)."
        )
    for gain in means:
        if kinds[gain["over"]] == "without":
            sentences.append(_contribution(evaluation, gain))
    return sentences


def _verdict(evaluation: Evaluation, gain: Gain, among: int) -> str:
    kinds = {each["name"]: each["kind"] for each in evaluation["models"]}
    shared = kinds[gain["models"]] == "shared"
    whose, colon, _ = gain["models"].partition(": ")
    whose = f"{whose}'s" if colon else "the" if shared else "the sites'"
    model = f"{whose} {'shared model is' if shared else 'own models are'}"
    sites = [
        each for each in evaluation["gains"]
        if each["site"] is not None and (each["models"], each["over"]) == (gain["models"], gain["over"])
    ]  # fmt: skip
    without = [str(each["site"]) for each in sites if each["gain"]["value"] is None]
    sites = [each for each in sites if each["gain"]["value"] is not None]
    better = [str(each["site"]) for each in sites if _sign(each["gain"]) > 0]
    worse = [str(each["site"]) for each in sites if _sign(each["gain"]) < 0]
    head = {1: "Federating helps", -1: "Federating does harm", 0: "It is open whether federating helps"}
    most = f" (the best of {among} methods, which flatters it)" if among > 1 else ""
    at = [f"better at {listed(better)}"] if better else []
    at += [f"worse at {listed(worse)}"] if worse else []
    rest = len(sites) - len(better) - len(worse)
    at += [f"not distinguishable at {rest} of {len(sites)}"] if rest else []
    at += [f"no figure at {listed(without)}"] if without else []
    return (
        f"{head[_sign(gain['gain'])]}: by {_main(evaluation)}, {model} {_gap(evaluation, gain['gain'])} "
        f"{'better' if (gain['gain']['value'] or 0) >= 0 else 'worse'} than training alone in the mean over "
        f"{len(sites)} sites' test sets{most}; by site: {'; '.join(at)}."
    )


def _contribution(evaluation: Evaluation, mean: Gain) -> str:
    """What a site that was left out contributes: in the mean over sites, and at the site itself."""
    left = mean["over"].removeprefix("without ")
    own = [g for g in evaluation["gains"] if g["over"] == mean["over"] and g["site"] == left]
    sites = sum(g["over"] == mean["over"] for g in evaluation["gains"]) - 1
    places = [(mean, f"in the mean over {sites} sites"), *((gain, f"at {left} itself") for gain in own)]
    parts = [
        f"not different {where}"
        if not gain["gain"]["value"] and gain["gain"]["low"] == gain["gain"]["high"]
        else f"{_gap(evaluation, gain['gain'])} {'better' if (gain['gain']['value'] or 0.0) >= 0 else 'worse'} {where}"
        + ("" if _sign(gain["gain"]) else ", which may be chance")
        for gain, where in places
    ]
    return f"Contribution of {left}: with it, the shared model's {_main(evaluation)} is {'; '.join(parts)}."


def _sign(gain: Figure) -> int:
    """1 for a gain above chance, -1 for a loss, 0 if the interval includes 0 or is not known."""
    if gain["low"] is None or gain["high"] is None:
        return 0
    return 1 if gain["low"] > 0 else -1 if gain["high"] < 0 else 0


def _gap(evaluation: Evaluation, gain: Figure) -> str:
    """The size of a difference with its interval, in words: the ends keep their sign relative to it."""
    share, turn = _in_percent(evaluation, _main(evaluation)), -1 if (gain["value"] or 0) < 0 else 1

    def number(value: float) -> str:
        return f"{100 * value:.1f}" if share else f"{value:.3g}"

    unit = " percentage points" if share else ""
    text = f"{number(turn * (gain['value'] or 0.0))}{unit}"
    if gain["low"] is None or gain["high"] is None:
        return text
    ends = sorted((turn * gain["low"], turn * gain["high"]))
    return f"{text} ({_level(evaluation)} interval {number(ends[0])} to {number(ends[1])})"


def _level(evaluation: Evaluation) -> str:
    return f"{100 * evaluation['level']:g} %"


def _in_percent(evaluation: Evaluation, metric: str) -> bool:
    """Whether a metric is shown in per cent."""
    traits = evaluation["metrics"][metric]
    return traits["share"] and traits["percent"]


def _main(evaluation: Evaluation) -> str:
    return next(iter(evaluation["metrics"]))


def _written(evaluation: Evaluation, metric: str, figure: Figure | None) -> tuple[str, str]:
    """A figure and its interval as texts; empty where there is none."""
    if figure is None or figure["value"] is None:
        return "—" if figure is not None else "", ""
    share = _in_percent(evaluation, metric)
    ends = (figure["low"], figure["high"])
    texts = [written(end, share).removesuffix("%") for end in ends]
    return written(figure["value"], share), "" if None in ends else " to ".join(texts)


# Tables ---------------------------------------------------------------------------------------------------------------


def evaluation_table(evaluation: Evaluation) -> Table:
    """The main metric by site as a table for the terminal, with intervals, and the mean over sites."""
    metric = _main(evaluation)
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    table = figures_table(_explained(evaluation), [f"{metric} at"], ["samples", *names])
    for row in site_rows(evaluation, metric):
        cells = [" ".join(filter(None, (value, f"({ends})" if ends else ""))) for value, ends in row.cells]
        table.add_row(row.name, row.samples, *cells)
    return table


def _explained(evaluation: Evaluation) -> str:
    """What the figures are."""
    outside = [site["name"] for site in evaluation["sites"] if not site["trained"]]
    more = f"; no training at {listed(outside)}" if outside else ""
    if not evaluation["level"]:
        return "on each site's own test samples, as the sites reported them last"
    return f"on each site's own test samples, with {_level(evaluation)} bootstrap intervals{more}"


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
        figures = {name: _at(evaluation, name, site["name"], metric) for name in names}
        cells = [_written(evaluation, metric, figures[name]) for name in names]
        rows.append(SiteRow(site["name"] + ("" if site["trained"] else " *"), whole(site["samples"]), cells))
        if site["trained"]:
            for name, figure in figures.items():
                means[name].append(None if figure is None else figure["value"])
    trained = len(next(iter(means.values()), []))
    if trained > 1:
        share = _in_percent(evaluation, metric)
        known = {name: [v for v in values if v is not None] for name, values in means.items()}
        cells = [
            (written(sum(values) / len(values), share) if len(values) == trained else "—", "")
            for values in known.values()
        ]
        rows.append(SiteRow(MEAN, "", cells))
    return rows


def _at(evaluation: Evaluation, models: str, site: str, metric: str) -> Figure | None:
    """The figure of a site's own or the shared model at the site."""
    cell = _cell(evaluation, models, site)
    return None if cell is None else cell["scores"].get(metric)


def _cell(evaluation: Evaluation, models: str, site: str) -> Cell | None:
    cells = (c for c in evaluation["cells"] if c["models"] == models and c["site"] == site and c["of"] in (None, site))
    return next(cells, None)


def group_rows(evaluation: Evaluation) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Subgroups over all sites: name, number of samples, figures by column."""
    metric, rows = _main(evaluation), []
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    found = [each for each in evaluation["groups"] if each["site"] is None]
    for group in dict.fromkeys(each["group"] for each in found):
        of = {each["models"]: each for each in found if each["group"] == group}
        cells = [_written(evaluation, metric, of[name]["score"] if name in of else None) for name in names]
        rows.append((group, f"{max(each['samples'] for each in of.values()):,}", cells))
    return rows


def group_table(evaluation: Evaluation) -> Table | None:
    """Subgroups as a table for the terminal; None if there are none."""
    rows = group_rows(evaluation)
    if not rows:
        return None
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    caption = f"subgroups of all sites' test samples, by {_main(evaluation)}"
    table = figures_table(caption, [str(evaluation["by"])], ["samples", *names])
    for name, samples, cells in rows:
        table.add_row(name, samples, *(f"{value} ({ends})" if ends else value for value, ends in cells))
    return table


# The page -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """The results by site: sentences, columns, rows by metric, the models of the chart with the numbers of their
    colours, its height, and the same of the charts of differences."""

    verdicts: list[str]
    explained: str
    columns: list[str]
    rows: dict[str, list[SiteRow]]
    drawn: list[tuple[int, str]]
    height: int
    compared: dict[str, list[tuple[int, str]]]
    intervals: bool
    outside: bool


def section(evaluation: Evaluation | None, charts: Charts) -> Section | None:
    """The report's section by site, and its charts; None without an evaluation."""
    if evaluation is None:
        return None
    names = [each["name"] for each in evaluation["models"] if each["kind"] in COMPARED]
    drawn = [(i, each["name"]) for i, each in enumerate(evaluation["models"]) if each["name"] in names]
    charts["sites"] = {metric: _sites_chart(evaluation, metric, drawn) for metric in evaluation["metrics"]}
    compared: dict[str, list[tuple[int, str]]] = {}
    for name, left_out in (("gains", False), ("contributions", True)):
        kinds = {each["name"]: each["kind"] for each in evaluation["models"]}
        of = [g for g in evaluation["gains"] if (kinds[g["over"]] == "without") == left_out]
        if of := [gain for gain in of if gain["gain"]["value"] is not None]:
            key = "over" if left_out else "models"
            shown = list(dict.fromkeys(gain[key] for gain in of))  # type: ignore[literal-required]
            compared[name] = [(i, each["name"]) for i, each in enumerate(evaluation["models"]) if each["name"] in shown]
            charts[name] = {"all": _gains_chart(evaluation, of, compared[name], key)}
    rows = {metric: site_rows(evaluation, metric) for metric in evaluation["metrics"]}
    height = 120 + len(evaluation["sites"]) * (18 + 12 * len(drawn))
    outside = any(not site["trained"] for site in evaluation["sites"])
    return Section(
        verdicts(evaluation),
        _explained(evaluation),
        names,
        rows,
        drawn,
        min(height, 900),
        compared,
        bool(evaluation["level"]),
        outside,
    )


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
        by=evaluation["by"],
        groups=group_rows(evaluation),
        confusions=list(_confusions(evaluation)),
        classes=evaluation["classes"],
    )
    with replacing(folder / PAGE) as file:
        file.write(visible(page).encode(errors="replace"))
    return folder / PAGE


def _confusions(evaluation: Evaluation) -> Iterator[tuple[str, str, list[list[int]]]]:
    """Confusion matrices: models, site, counts."""
    if not 1 < len(evaluation["classes"]) <= FEW_CLASSES:
        return
    for each in evaluation["models"]:
        for site in evaluation["sites"]:
            cell = _cell(evaluation, each["name"], site["name"])
            if cell is not None and cell["confusion"] and each["kind"] in COMPARED:
                yield each["name"], site["name"], cell["confusion"]


def _sites_chart(evaluation: Evaluation, metric: str, drawn: Sequence[tuple[int, str]]) -> tuple[list[Trace], Layout]:
    """A mark per site and model, with its interval."""
    traces = []
    for place, (index, name) in enumerate(drawn):
        points = [
            (number, site["name"], figure)
            for number, site in enumerate(evaluation["sites"])
            if (figure := _at(evaluation, name, site["name"], metric)) is not None and figure["value"] is not None
        ]
        shift = (place - (len(drawn) - 1) / 2) * 0.7 / max(1, len(drawn))
        traces.append(
            _marks(
                name,
                index,
                [figure for _, _, figure in points],
                [number + shift for number, _, _ in points],
                [site for _, site, _ in points],
                _in_percent(evaluation, metric),
            )
        )
    return traces, {
        "xaxis": score_axis(metric, _in_percent(evaluation, metric)),
        "yaxis": _names_axis([site["name"] for site in evaluation["sites"]]),
        "hovermode": "closest",
    }


def _gains_chart(
    evaluation: Evaluation, gains: Sequence[Gain], drawn: Sequence[tuple[int, str]], key: str
) -> tuple[list[Trace], Layout]:
    """A mark per site and comparison: how much better, with its interval; 0 is a line. `drawn`: the models named by
    `key`, with their colours."""
    share = _in_percent(evaluation, _main(evaluation))
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
    axis = {"title": f"difference in {_main(evaluation)} (right is better)"}
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
    share = _in_percent(evaluation, metric)
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
