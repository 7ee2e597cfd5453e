"""Writes what some runs did as one HTML page that needs nothing else: no server, no network, no second file.

Every text that comes from a run is escaped where it enters the page (`_e`) or a chart (`plain`), the charts' numbers
travel as JSON without a single `<`, and the frame lets no script run but its own two.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.report import choice, leaks, left_out, notes, pictures, pieces
from fewbytes.report.document import document
from fewbytes.report.folder import Direction, Partition, Probe, Row, RunFolder, when
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.report.table import alike, badges, majority_rows, megabytes, percent, seconds

KINDS = {
    "global": "the server's model on the server's test set",
    "personalised": "mean over clients: each client's own model on its own test split, after local training and "
    "before the exchange",
    "micro": "all clients' own models together: correct predictions over samples, of all their test splits",
    "sparse": "mean over clients: the masked model a client uploaded, on its own test split",
    "combined": "mean over clients: the model a client received from the exchange, before training it",
    "cohort": "mean over the clients of a round: each one's own model after local training, on its own test split",
    "inherited": "a newcomer's model as it joins, before any training, on its own test split",
    "mAP": "COCO's average precision of the server's model on the server's test set: the mean over classes and over "
    "the overlaps (IoU), 0.50 to 0.95, that a box must have with a true one",
    "AP50": "the same at an overlap of 0.50",
    "AP75": "the same at an overlap of 0.75",
    "APM": "as mAP, of objects of 32² to 96² pixels of the original image",
    "APL": "as mAP, of objects of more than 96² pixels",
    "newcomers": "as personalised, of the clients that came later only",
}
MANY = 10  # runs: with more, their names are no title, and all can be shown or hidden at once
_DIRECTIONS: tuple[Direction, Direction] = ("uplink", "downlink")
_DASHES = ["solid", "dash", "dot", "dashdot"]
_BLANK = "<td></td>"


def write_report(runs: Sequence[RunFolder], path: Path) -> Path:
    """Write the report of `runs` to `path`, whole or not at all, and return `path`.

    Raises `UserError` where there are no runs or `path` cannot be written.
    """
    if not runs:
        raise UserError("there are no runs to report")
    text = _page(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode(errors="replace"))  # a stranger's words may hold half a character
    except OSError as error:
        raise UserError(f"the report {path} cannot be written: {error.strerror}") from error
    return path


def _page(runs: Sequence[RunFolder]) -> str:
    charts: Charts = {}
    body = "\n".join(
        [
            _header(runs),
            choice.section(runs, charts),
            _summary(runs),
            _key(runs) if len(runs) > 1 else "",
            _accuracy(runs, charts),
            _traffic(runs, charts),
            left_out.section(runs),
            notes.section(runs),
            _probes(runs, charts),
            leaks.section(runs),
            pictures.section(runs, charts),
            _labels(runs, charts),
            _configs(runs),
            _versions(runs),
        ]
    )
    return document(_title(runs), body, charts)


# ---- the sections, in the order of the page ----


def _title(runs: Sequence[RunFolder]) -> str:
    methods = _unique(run.label for run in runs)
    datasets = _unique(run.fact("dataset") for run in runs)
    return (_listed(methods) if len(methods) <= MANY else f"{len(methods)} methods") + (
        f" on {_listed(datasets)}" if datasets else ""
    )


def _header(runs: Sequence[RunFolder]) -> str:
    facts = [f"{len(runs)} runs" if len(runs) > 1 else ""]
    for key, values in {
        "data set": [run.fact("dataset") for run in runs],
        "model": [run.fact("model") for run in runs],
        "clients": [run.clients for run in runs],
        "rounds": [sum(row["phase"] == "round" for row in run.rounds) for run in runs],
        "seed": [run.fact("seed") for run in runs],
    }.items():
        facts.append(f"{key} {', '.join(_unique(values))}" if _unique(values) else "")
    return f"""<header>
<p class="eyebrow">fewbytes report</p>
<h1>{_e(_title(runs))}</h1>
<p class="facts">{" · ".join(_e(fact) for fact in facts if fact)}</p>
</header>"""


def _summary(runs: Sequence[RunFolder]) -> str:
    rows = []
    for index, run in enumerate(runs):
        score = run.score(run.kind)
        best = "" if score.best_row is None else f"<small>{when(score.best_row)}</small>"
        badge = "".join(f' <span class="badge">{_e(text)}</span>' for text in badges(run))
        cells = [
            f"<td>{_e(run.kind or '—')}</td>",
            f'<td class="strong">{percent(score.final)}</td>',
            f"<td>{percent(score.best)}{best}</td>",
            f"<td>{percent(run.score('global').final)}</td>",
            f"<td>{percent(run.score('personalised').final)}</td>",
        ]
        for direction in _DIRECTIONS:
            total, nominal = run.total_bytes(direction), run.nominal_bytes(direction)
            cells += [
                _bytes_cell(total, "strong"),
                _bytes_cell(run.bytes_per_client_round(direction)),
                _bytes_cell(nominal),
                f"<td>{total / nominal:.2f}</td>" if nominal else "<td>—</td>",
            ]
        cells.append(f"<td>{seconds(run.seconds)}</td>")
        dot = pieces.dot(index) if len(runs) > 1 else ""
        rows.append(f'<tr><th scope="row">{dot}{_e(run.label)}{badge}</th>{"".join(cells)}</tr>')
    for name, majority in majority_rows(runs):
        shown = "".join(f"<td>{percent(majority.get(kind))}</td>" for kind in ("global", "personalised"))
        rows.append(f'<tr class="baseline"><th scope="row">{_e(name)}</th>{_BLANK * 3}{shown}{_BLANK * 9}</tr>')
    traffic = "".join(
        f'<th scope="col">{name}</th>' for name in ("total", "a client<br>and round", "paper<br>count", "ratio")
    )
    return f"""<section>
<h2>Summary</h2>
<p>{_verdict(runs)}</p>
<div class="wide" role="region" aria-label="Summary table" tabindex="0">
<table>
<thead>
<tr><th scope="col" rowspan="2">method</th><th scope="colgroup" colspan="5">accuracy</th>
<th scope="colgroup" colspan="4">uplink, MB</th><th scope="colgroup" colspan="4">downlink, MB</th>
<th scope="col" rowspan="2">time,&nbsp;s</th></tr>
<tr><th scope="col">kind</th><th scope="col">final</th><th scope="col">best</th><th scope="col">global</th>
<th scope="col">personal-<br>ised</th>{traffic}{traffic}</tr>
</thead>
<tbody>
{"".join(rows)}
</tbody>
</table>
</div>
<p class="note">Final and best are of the kind the method is judged by; global and personalised are final.
Uplink is what clients send, downlink what they receive;
MB are 10⁶ bytes on the wire over the whole run. The paper count is what papers count for the same payloads,
4 bytes a value and 1 bit a mask entry; the ratio is wire to paper count. The majority class is what always guessing
the most frequent class would score.</p>
</section>"""


def _verdict(runs: Sequence[RunFolder]) -> str:
    if len(runs) == 1:
        run = runs[0]
        final = run.score(run.kind).final
        reached = "" if final is None else f"ends at {percent(final)} {_e(_score_words(run.kind))} and "
        up, down = (megabytes(run.total_bytes(direction)) for direction in _DIRECTIONS)
        return f"<b>{_e(run.label)}</b> {reached}moves {up} MB up and {down} MB down."
    cheapest = min(runs, key=lambda run: run.total_bytes("uplink"))
    cheap = f"<b>{_e(cheapest.label)}</b> sends the least, {megabytes(cheapest.total_bytes('uplink'))} MB uplink."
    kinds = {run.label: run.kind for run in runs}
    by = ""
    if len(set(kinds.values())) > 1:
        shared = [k for k in ("personalised", "global") if all(run.score(k).final is not None for run in runs)]
        kinds |= dict.fromkeys(kinds, shared[0]) if shared else {}
        by = "By the accuracy all runs have measured, " if shared else "Each by its own kind of accuracy, "
    finals = {run.label: final for run in runs if (final := run.score(kinds[run.label]).final) is not None}
    if not finals:
        return cheap
    best = max(finals, key=lambda label: finals[label])
    return f"{by}<b>{_e(best)}</b> ends highest, {percent(finals[best])} {_e(kinds[best])}. {cheap}"


def _score_words(kind: str | None) -> str:
    return "mAP" if kind == "mAP" else f"{kind} accuracy"


def _key(runs: Sequence[RunFolder]) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" value="{index}" checked>{pieces.dot(index)}{_e(run.label)}</label>'
        for index, run in enumerate(runs)
    )
    every = '<label><input type="checkbox" value="all" checked>all</label>' if len(runs) > MANY else ""
    return f'<div class="key" role="group" aria-label="Runs shown in the charts">{every}{boxes}</div>'


def _accuracy(runs: Sequence[RunFolder], charts: Charts) -> str:
    if not any(run.kinds for run in runs):
        return "<section><h2>Accuracy</h2><p>No accuracy has been measured yet.</p></section>"
    if len(runs) == 1:
        kinds = runs[0].kinds
        views = {"all": [(runs[0], kind, index) for index, kind in enumerate(kinds)]}
        picker = ""
        lead = f"Every kind of accuracy this run measured; it is judged by <b>{_e(runs[0].kind)}</b>."
        legend = [pieces.dot(index) for index in range(len(kinds))]
    else:
        shown = [kind for kind in ("personalised", "global") if any(kind in run.kinds for run in runs)]
        views = {"own": [(run, run.kind, index) for index, run in enumerate(runs) if run.kind]}
        views |= {kind: [(run, kind, index) for index, run in enumerate(runs) if kind in run.kinds] for kind in shown}
        picker = pieces.picker("kind", {"own": "each method's own", **{kind: kind for kind in shown}})
        lead = "Each method by the kind of accuracy its paper reports, or all by the same kind."
        kinds = _unique(kind for view in views.values() for _, kind, _ in view)
        legend = [""] * len(kinds)
    meanings = "".join(
        f"<div><dt>{dot}{_e(kind)}</dt><dd>{_e(KINDS.get(kind, 'as the method records it'))}</dd></div>"
        for dot, kind in zip(legend, kinds, strict=True)
    )
    charts["accuracy-rounds"] = {
        view: (
            [_accuracy_trace(run, kind, index, None) for run, kind, index in lines],
            {"xaxis": _round_axis(runs), "yaxis": _ACCURACY_AXIS, "hovermode": "closest"},
        )
        for view, lines in views.items()
    }
    for direction in _DIRECTIONS:
        charts[f"accuracy-{direction}"] = {
            view: (
                [_accuracy_trace(run, kind, index, direction) for run, kind, index in lines],
                {"xaxis": _mb_axis(f"{direction} so far, MB", runs, direction), "yaxis": _ACCURACY_AXIS},
            )
            for view, lines in views.items()
        }
    per_byte = "".join(
        pieces.chart(
            f"accuracy-{direction}", f"Over {direction}", f"Line chart of accuracy over cumulative {direction} MB"
        )
        for direction in _DIRECTIONS
    )
    return f"""<section>
<h2>Accuracy</h2>
<p>{lead}</p>
<dl>{meanings}</dl>
{picker}
{pieces.chart("accuracy-rounds", "Over rounds", "Line chart of accuracy over rounds", 380)}
<p>The same accuracy against what it cost: all megabytes sent up, or down, until the end of that round.</p>
<div class="pair">{per_byte}</div>
</section>"""


def _traffic(runs: Sequence[RunFolder], charts: Charts) -> str:
    rounds = clients = ""
    for direction in _DIRECTIONS:
        charts[f"rounds-{direction}"] = {
            "all": (
                [_round_trace(run, index, direction) for index, run in enumerate(runs)],
                {"xaxis": _round_axis(runs), "yaxis": _mb_axis("MB a round", runs, direction)},
            )
        }
        rounds += pieces.chart(
            f"rounds-{direction}", direction.capitalize(), f"Line chart of {direction} MB in each round"
        )
        if all(run.ledger is None for run in runs):
            continue
        charts[f"clients-{direction}"] = {"all": _client_chart(runs, direction)}
        clients += pieces.chart(
            f"clients-{direction}", direction.capitalize(), f"Chart of each client's {direction} MB over the run"
        )
    by_client = (
        "What each client moved over the whole run."
        if len(runs) == 1
        else "What each client moved over the whole run, a point a client; the box holds the middle half of them."
    )
    return f"""<section>
<h2>Bytes a round</h2>
<p>What all clients together sent and received in each round. Diamonds are exchanges outside the rounds: before
the first, after the last, with a client that joined.</p>
<div class="pair">{rounds}</div>
</section>""" + (
        f'\n<section>\n<h2>Bytes a client</h2>\n<p>{by_client}</p>\n<div class="pair">{clients}</div>\n</section>'
        if clients
        else ""
    )


def _probes(runs: Sequence[RunFolder], charts: Charts) -> str:
    found = [(index, run, run.probe) for index, run in enumerate(runs) if run.probe]
    if not found:
        return ""
    names: dict[int, list[str]] = {}  # of units, by how many a sample has passed there
    for _, _, probe in found:
        for point in probe["points"]:
            names.setdefault(point["units"], []).append(pieces.plain(point["point"], 24))
    ticks = {"tickvals": sorted(names), "ticktext": [" or ".join(_unique(names[units])) for units in sorted(names)]}
    figures = ""
    for name, (title, axis) in _PROBED.items():
        if all(point[name] is None for _, _, probe in found for point in probe["points"]):  # type: ignore[literal-required]
            continue
        lines = [_probe_trace(run, probe, name, index) for index, run, probe in found]
        charts[f"probe-{name}"] = {"all": (lines, {"xaxis": {"title": "after unit"} | ticks, "yaxis": axis})}
        figures += pieces.chart(f"probe-{name}", title, f"Line chart over depth: {title}")
    models = "; ".join(
        (f"{_e(run.label)}: " if len(runs) > 1 else "") + f"{_e(probe['model'])} model" for _, run, probe in found
    )
    return f"""<section>
<h2>Probes</h2>
<p>What the features hold at each depth, of the image and of the label, by networks trained on them alone with the
model frozen, and measured on the server's test set ({models}).</p>
<div class="pair">{figures}</div>
<p class="note">I(H;X) is, but for an unknown constant, what is shown: minus the mean binary cross-entropy of a decoder
that makes the image again; features that are no image have none. I(H;Y) is ln C minus the cross-entropy of an auxiliary
network that sees the features, for C classes. Both are proxies, in nats. Linear separability is the accuracy of one
linear layer.</p>
</section>"""


def _labels(runs: Sequence[RunFolder], charts: Charts) -> str:
    groups = alike(runs, lambda run: run.partition)
    if not groups:
        return ""
    names = {str(index): ", ".join(run.label for run in group) for index, (group, _) in enumerate(groups)}
    sizes = "".join(_sizes(names[str(index)], partition) for index, (_, partition) in enumerate(groups))
    if not any(isinstance(row, list) for _, partition in groups for row in partition["train"]):
        return f"<section>\n<h2>Samples</h2>\n{sizes}\n</section>"
    for split in ("train", "test"):
        charts[f"labels-{split}"] = {
            str(index): _heat_map(partition["classes"], partition["train" if split == "train" else "test"])
            for index, (_, partition) in enumerate(groups)
        }
    height = max(min(160 + 16 * len(partition["train"]), 640) for _, partition in groups)
    maps = "".join(
        pieces.chart(
            f"labels-{split}", f"{split.capitalize()} split", f"Heat map of clients by classes, {split} split", height
        )
        for split in ("train", "test")
    )
    return f"""<section>
<h2>Label distribution</h2>
<p>How many samples of each class every client holds; the stronger the colour, the more.</p>
{pieces.picker("partition", names)}
<div class="pair">{maps}</div>
{sizes}
</section>"""


def _sizes(name: str, partition: Partition) -> str:
    """How many samples each client has, where their nodes do not tell the labels of all."""
    if all(isinstance(row, list) for row in partition["train"]):
        return ""
    rows = ""
    for client, pair in enumerate(zip(partition["train"], partition["test"], strict=True)):
        numbers = [sum(held) if isinstance(held, list) else held for held in pair]
        cells = "".join(f"<td>{'—' if number is None else f'{number:,}'}</td>" for number in numbers)
        rows += f'<tr><th scope="row">{client}</th>{cells}</tr>'
    return f"""<details open><summary>{_e(name)}: what the clients' own nodes tell of their data</summary>
<div class="wide" role="region" aria-label="Samples of the clients of {_e(name)}" tabindex="0">
<table class="narrow"><thead><tr><th scope="col">client</th><th scope="col">training samples</th>
<th scope="col">test samples</th></tr></thead><tbody>{rows}</tbody></table>
</div></details>"""


def _configs(runs: Sequence[RunFolder]) -> str:
    configs = "".join(
        f"<details{' open' if len(runs) == 1 else ''}><summary>{_e(run.label)}</summary>"
        f'<pre tabindex="0">{_e(run.config)}</pre></details>'
        for run in runs
    )
    return f"""<section>
<h2>Configuration</h2>
<p>The exact <code>config.toml</code> of each run.</p>
{configs}
</section>"""


def _versions(runs: Sequence[RunFolder]) -> str:
    groups = alike(runs, lambda run: (run.result or {}).get("versions"))
    if not groups:
        return ""
    heads = rows = ""
    for group, _ in groups:
        name = ", ".join(run.label for run in group) if len(groups) > 1 else "version"
        heads += f'<th scope="col">{_e(name)}</th>'
    for package in _unique(name for _, found in groups for name in found):
        cells = "".join(f"<td>{_e(found.get(package, '—'))}</td>" for _, found in groups)
        rows += f'<tr><th scope="row">{_e(package)}</th>{cells}</tr>'
    return f"""<section>
<h2>Versions</h2>
<p>The software the runs were made with.</p>
<div class="wide" role="region" aria-label="Versions" tabindex="0">
<table class="narrow"><thead><tr><th scope="col">package</th>{heads}</tr></thead><tbody>{rows}</tbody></table>
</div>
</section>"""


# ---- pieces of HTML ----


def _bytes_cell(count: float | None, style: str = "") -> str:
    exact = "" if count is None else f' title="{count:,.0f} bytes"'
    return f'<td class="{style}"{exact}>{megabytes(count)}</td>'


# ---- pieces of charts ----


def _accuracy_trace(run: RunFolder, kind: str | None, index: int, direction: Direction | None) -> Trace:
    """One kind of accuracy over rounds, or over the megabytes so far of one direction."""
    so_far, position = 0, {}
    for row in run.rounds:
        so_far += row[f"{direction}_bytes"] if direction else 0
        position[id(row)] = so_far
    curve = run.curve(kind)
    rows = [row for row, _ in curve]
    return _line(index, rows) | {
        "x": [position[id(row)] / 1e6 if direction else row["round"] for row in rows],
        "y": [value for _, value in curve],
        "customdata": [
            [pieces.plain(run.label), pieces.plain(kind or ""), when(row), megabytes(position[id(row)])] for row in rows
        ],
        "hovertemplate": "%{customdata[0]}<br><b>%{y:.1%}</b> %{customdata[1]}<br>%{customdata[2]}"
        + (f"<br>%{{customdata[3]}} MB {direction}" if direction else "")
        + "<extra></extra>",
    }


def _probe_trace(run: RunFolder, probe: Probe, name: str, index: int) -> Trace:
    """One figure of a run's probes over depth."""
    values: list[Any] = [point[name] for point in probe["points"]]  # type: ignore[literal-required]
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


def _round_trace(run: RunFolder, index: int, direction: Direction) -> Trace:
    """Megabytes of each round; exchanges outside the rounds stand apart from the line."""
    rows: list[Row | None] = [row for row in run.rounds if row["phase"] == "round"]
    for row in run.rounds:
        rows += [None, row] if row["phase"] != "round" else []
    counts = [None if row is None else row[f"{direction}_bytes"] for row in rows]
    return _line(index, rows) | {
        "x": [None if row is None else row["round"] for row in rows],
        "y": [None if count is None else count / 1e6 for count in counts],
        "customdata": [
            [pieces.plain(run.label), "" if row is None else when(row), megabytes(count)]
            for row, count in zip(rows, counts, strict=True)
        ],
        "hovertemplate": "%{customdata[0]}<br><b>%{customdata[2]} MB</b> "
        + direction
        + "<br>%{customdata[1]}<extra></extra>",
    }


def _client_chart(runs: Sequence[RunFolder], direction: Direction) -> tuple[list[Trace], Layout]:
    """One run: a bar a client. Several: a box of clients a run."""
    traces: list[Trace] = []
    for index, run in enumerate(runs):
        if run.ledger is None:
            continue
        clients = run.bytes_by_client(direction)
        values, customdata = (
            [count / 1e6 for count in clients.values()],
            [[pieces.plain(run.label), client, megabytes(count)] for client, count in clients.items()],
        )
        trace: Trace = {
            "customdata": customdata,
            "hovertemplate": "%{customdata[0]}<br><b>%{customdata[2]} MB</b> "
            + direction
            + "<br>client %{customdata[1]}<extra></extra>",
            "marker": {"color": pieces.colour(index), "size": 5},
            "meta": index,
        }
        if len(runs) == 1:
            trace |= {"type": "bar", "x": list(clients), "y": values}
        else:
            trace |= {"type": "box", "orientation": "h", "x": values, "y": [index] * len(values)}
            trace |= {
                "hoveron": "points",
                "boxpoints": "all" if len(values) <= 200 else "outliers",
                "jitter": 0.5,
                "pointpos": 0,
                "line": {"width": 1.5},
            }
        traces.append(trace)
    if len(runs) == 1:
        return traces, {
            "xaxis": {"title": "client"},
            "yaxis": _mb_axis("MB", runs, direction),
            "bargap": 0.15 if len(runs[0].bytes_by_client(direction)) <= 100 else 0,
        }
    names = {"tickvals": list(range(len(runs))), "ticktext": [pieces.plain(run.label, 18) for run in runs]}
    return traces, {
        "xaxis": _mb_axis("MB", runs, direction),
        "yaxis": {"autorange": "reversed", "showgrid": False, "zeroline": False} | names,
    }


def _heat_map(classes: Sequence[str], counts: Sequence[list[int] | int | None]) -> tuple[list[Trace], Layout]:
    names: list[str] = []
    for name in classes:
        name = pieces.plain(name, 24)
        names.append(name if name not in names else f"{name} [{len(names)}]")
    trace = {
        "type": "heatmap",
        "x": names,
        "y": list(range(len(counts))),
        "z": [held if isinstance(held, list) else [None] * len(names) for held in counts],
        "zmin": 0,
        "xgap": 1 if len(names) <= 50 else 0,
        "ygap": 1 if len(counts) <= 50 else 0,
        "colorbar": {
            "thickness": 8,
            "outlinewidth": 0,
            "title": {"text": "samples", "side": "right", "font": {"size": 13}},
        },
        "hovertemplate": "client %{y}, class %{x}<br><b>%{z:,}</b> samples<extra></extra>",
    }
    return [trace], {
        "xaxis": {"title": "class", "type": "category", "showgrid": False},
        "yaxis": {"title": "client", "autorange": "reversed", "showgrid": False, "zeroline": False},
    }


_ACCURACY_AXIS = {"title": "accuracy", "tickformat": ".0%"}
_PROBED: dict[str, tuple[str, Layout]] = {
    "information_x": ("Of the image, I(H;X)", {"title": "minus cross-entropy, nats a value"}),
    "information_y": ("Of the label, I(H;Y)", {"title": "nats"}),
    "linear_accuracy": ("Linear separability", _ACCURACY_AXIS),
}


def _round_axis(runs: Sequence[RunFolder]) -> Layout:
    last = max((row["round"] for run in runs for row in run.rounds), default=0)
    return {"title": "round"} | ({"dtick": 1} if last <= 10 else {})


def _mb_axis(title: str, runs: Sequence[RunFolder], direction: Direction) -> Layout:
    """An axis of megabytes; logarithmic where some run moves twenty times what another does."""
    totals = [total for run in runs if (total := run.total_bytes(direction))]
    if totals and max(totals) >= 20 * min(totals):
        return {"title": f"{title} (log scale)", "type": "log", "dtick": 1, "exponentformat": "none"}
    return {"title": title, "rangemode": "tozero", "exponentformat": "none"}


def _line(index: int, rows: Sequence[Row | None]) -> Trace:
    outside = [row is not None and row["phase"] != "round" for row in rows]
    few = len(rows) <= 60
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "cliponaxis": False,
        "line": {
            "width": 2,
            "color": pieces.colour(index),
            "dash": _DASHES[index // len(pieces.COLOURS) % len(_DASHES)],
        },
        "marker": {
            "color": pieces.colour(index),
            "symbol": ["diamond" if out else "circle" for out in outside],
            "size": [9 if out else 5 if few else 0 for out in outside],
            "opacity": 1,
            "line": {"width": 0},
        },
        "meta": index,
    }


# ---- words ----


def _e(text: object) -> str:
    """Any text as HTML."""
    return html.escape(str(text))


def _unique(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
