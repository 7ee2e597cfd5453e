"""The results of runs as a table for a paper: CSV, a row per method and score, or LaTeX, a row per method."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.base.units import megabytes
from fewbytes.report.charts import unique
from fewbytes.report.curves import kinds_drawn
from fewbytes.report.folder import Both, Direction
from fewbytes.report.repeats import Repeated, Spread, spread_of
from fewbytes.report.target import TargetRow, target_rows
from fewbytes.report.times import Goal, seconds_so_far

WAYS: tuple[tuple[str, Direction | Both], ...] = (("up", "uplink"), ("down", "downlink"), ("both", "both"))
SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip


def write_csv(groups: Sequence[Repeated], path: Path, goal: Goal) -> None:
    """Write the table as CSV, a row for each method, metric and kind of score. Raises UserError.

    Columns: `method`, `seeds`, `metric`, `kind`, and means with deviations (empty for one seed) over the seeds: the
    final score, MB up, down and both of the whole run, seconds of the run and, if a link is stated, over that link.
    With a target, MB and seconds until it is reached, and by how many seeds.
    """
    ways = {row.number: row for row in target_rows(groups, goal)} if goal.target is not None else {}
    names = ["final", "MB_up", "MB_down", "MB_both", "seconds", *(["link_seconds"] if goal.up else [])]
    names += ["target_MB", "target_seconds"] if ways else []
    head = ["method", "seeds", "metric", "kind", *(each for name in names for each in (name, f"{name}_deviation"))]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, *(["target_reached"] if ways else [])])
    for number, group in enumerate(groups):
        spreads = [
            *(spread_of(run.total_bytes(way) / 1e6 for run in group.done) for _, way in WAYS),
            spread_of(run.seconds for run in group.done),
            *([spread_of(seconds_so_far(run, goal)[-1] for run in group.runs if run.rounds)] if goal.up else []),
        ]
        row = ways.get(number)
        spreads += _to_target(row) if row is not None else []
        reached = [f"{len(row.reached)}/{len(row.runs)}"] if row is not None else []
        for metric in group.first.metrics:
            for kind in group.first.kinds(metric):
                values = [spread_of(group.finals(kind, metric).values()), *spreads]
                cells = [cell for spread in values for cell in _cells(spread)]
                writer.writerow([group.label, len(group.runs), metric, kind, *cells, *reached])
    _write(path, text.getvalue())


def _to_target(row: TargetRow) -> list[Spread | None]:
    moved = row.spread("both")
    if moved is not None:
        moved = Spread(moved.mean / 1e6, None if moved.deviation is None else moved.deviation / 1e6, moved.of)
    return [moved, row.spread("seconds")]


def _cells(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "", ""
    return f"{spread.mean:.6g}", "" if spread.deviation is None else f"{spread.deviation:.6g}"


def write_latex(groups: Sequence[Repeated], path: Path, goal: Goal) -> None:
    """Write the table as LaTeX with booktabs, a row per method: final scores by metric and kind, MB up, down and both,
    and with a target MB and seconds until it is reached; means ± standard deviations over the seeds. Raises
    UserError."""
    ways = {row.number: row for row in target_rows(groups, goal)} if goal.target is not None else {}
    scores = [
        (metric, kind)
        for metric in unique(metric for group in groups for metric in group.first.metrics)
        for kind in kinds_drawn(groups, metric)
    ]
    heads = ["method", *(_head(groups[0], *score) for score in scores), *(f"MB {name}" for name, _ in WAYS)]
    heads += ["MB to target", "s to target"] if ways else []
    lines = []
    for number, group in enumerate(groups):
        cells = [_latex(group.label), *(_score(group, metric, kind) for metric, kind in scores)]
        cells += [_megabytes(spread_of(run.total_bytes(way) for run in group.done)) for _, way in WAYS]
        if row := ways.get(number):
            cells += [_megabytes(row.spread("both")), _number(row.spread("seconds"), 1)]
        lines.append("  " + " & ".join(cells) + r" \\")
    counts = unique(len(group.runs) for group in groups)
    seeds = f" Means and standard deviations over {' or '.join(counts)} seeds." if counts != ["1"] else ""
    target = f" Target: {goal.target_words(groups[0].first)}; seconds over {goal.text}." if ways and goal.text else (
        f" Target: {goal.target_words(groups[0].first)}." if ways else ""
    )  # fmt: skip
    page = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{Final scores, and MB ($10^6$ bytes) of all clients over the whole run.{seeds}{_latex(target)}}}",
        r"  \label{tab:results}",
        rf"  \begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"  \toprule",
        "  " + " & ".join(map(_latex, heads)) + r" \\",
        r"  \midrule",
        *lines,
        r"  \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    _write(path, "\n".join(page) + "\n")


def _head(group: Repeated, metric: str, kind: str) -> str:
    return f"{metric}, {kind}{', %' if group.first.percent(metric) else ''}"


def _score(group: Repeated, metric: str, kind: str) -> str:
    spread = spread_of(group.finals(kind, metric).values())
    if spread is None or not group.first.percent(metric):
        return _number(spread, 3)
    wide = None if spread.deviation is None else 100 * spread.deviation
    return _number(Spread(100 * spread.mean, wide, spread.of), 1)


def _number(spread: Spread | None, decimals: int) -> str:
    if spread is None:
        return "--"
    wide = "" if spread.deviation is None else rf" \pm {spread.deviation:.{decimals}f}"
    return f"${spread.mean:.{decimals}f}{wide}$"


def _megabytes(spread: Spread | None) -> str:
    if spread is None:
        return "--"
    mean = megabytes(spread.mean)
    decimals = len(mean.partition(".")[2])
    wide = rf" \pm {spread.deviation / 1e6:,.{decimals}f}" if spread.deviation else ""
    return f"${mean}{wide}$".replace(",", "{,}")


def _latex(text: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in text)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode(errors="replace"))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
