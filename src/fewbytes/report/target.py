"""Bytes and seconds until runs reach a target score: a table for the terminal, a section and charts for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fewbytes.base.units import megabytes
from fewbytes.report import pieces
from fewbytes.report.pieces import Charts, Layout, Trace
from fewbytes.report.repeats import Repeated, Spread, spread_of
from fewbytes.report.table import figures_table
from fewbytes.report.times import Goal, Reached, own_links, reached

RULE = (
    "Seconds are those of training as measured, where clients share one machine's cores, and of the slowest client's "
    "link in each round"
)
Cost = Literal["both", "seconds"]


class TargetRow(NamedTuple):
    """A method's way to the target: its number among the methods, the kind of score, when each of its runs reached it
    (None: never), and the best score of all."""

    number: int
    label: str
    kind: str
    runs: list[Reached | None]
    best: str

    @property
    def reached(self) -> list[Reached]:
        """The runs that reached it."""
        return [each for each in self.runs if each is not None]

    def spread(self, name: Literal["round", "up", "down", "both", "seconds"]) -> Spread | None:
        """Mean and deviation, over the runs that reached it, of rounds, bytes or seconds."""
        values = [each.up + each.down if name == "both" else getattr(each, name) for each in self.reached]
        return spread_of(value for value in values if value is not None)

    def cells(self) -> list[str]:
        """Rounds, MB up, down and both, and seconds as text; for a method that never reached it, its best score."""
        if not self.reached:
            return ["—", "—", "—", "—", "—", f"not reached (best {self.best})" if self.best else "not measured"]
        ways = [_text(self.spread(name)) for name in ("up", "down", "both")]
        took, rounds = self.spread("seconds"), self.spread("round")
        form = ".1f" if took is None or took.mean < 100 else ",.0f"
        count = f"{len(self.reached)} of {len(self.runs)} runs" if len(self.reached) < len(self.runs) else ""
        return [
            _plain(rounds, ".4g" if rounds is None or rounds.deviation is None else ".1f"),
            *ways,
            _plain(took, form),
            count,
        ]


HEADS = ["round", "MB up", "MB down", "MB both", "seconds", ""]
LEAST = ("MB down", "MB up", "round", "kind")
"""Columns that a narrow terminal drops, in this order."""


def target_rows(groups: Sequence[Repeated], goal: Goal) -> list[TargetRow]:
    """A row per method; those that reach the target with the fewest bytes first."""
    rows = []
    for number, group in enumerate(groups):
        kind, metric = goal.wanted(group.first)
        scores = [best for run in group.done if (best := run.score(kind, metric).best) is not None]
        best = (max if group.first.higher(metric) else min)(scores, default=None)
        runs = [reached(run, goal) for run in group.done or group.runs]
        rows.append(
            TargetRow(number, group.label, kind or "—", runs, "" if best is None else group.first.written(best, metric))
        )
    return sorted(rows, key=lambda row: (not row.reached, (row.spread("both") or Spread(0.0, None, 0)).mean))


def target_table(groups: Sequence[Repeated], goal: Goal, width: int = 100) -> Table:
    """The way to the target as a table for the terminal; if `width` is too small, columns are dropped."""
    rows = target_rows(groups, goal)
    for gone in (LEAST[:count] for count in range(len(LEAST) + 1)):
        table = _table(groups, goal, rows, gone)
        table.caption, caption = None, table.caption
        if Console(width=1000).measure(table).maximum <= width:
            break
    table.caption = caption
    return table


def _table(groups: Sequence[Repeated], goal: Goal, rows: Sequence[TargetRow], dropped: Sequence[str]) -> Table:
    gone = {*dropped} | (set() if any(row.spread("seconds") for row in rows) else {"seconds"})
    gone |= set() if any(row.cells()[-1] for row in rows) else {""}
    kinds = [] if "kind" in gone else ["kind"]
    table = figures_table(explained(groups, goal), ["method", *kinds], [head for head in HEADS if head not in gone])
    for row in rows:
        cells = [cell for head, cell in zip(HEADS, row.cells(), strict=True) if head not in gone]
        table.add_row(Text(row.label), *([row.kind] if kinds else []), *map(Text, cells))
    return table


def explained(groups: Sequence[Repeated], goal: Goal) -> str:
    """What the figures are."""
    target = goal.target_words(groups[0].first)
    first = (
        f"Until {target}, on test data, at the end of the first scored round with it; MB are of all clients together."
    )
    if any(len(group.runs) > 1 for group in groups):
        first += " Mean ± standard deviation over the seeds that reach it."
    return f"{first} {timed(groups, goal)}".strip()


def timed(groups: Sequence[Repeated], goal: Goal) -> str:
    """What seconds are, in a sentence; empty without a link."""
    runs = [run for group in groups for run in group.runs]
    kept = sorted({group.label for group in groups if own_links(group.first)})
    text = "" if goal.up is None or len(kept) == len(groups) else f"{RULE}, {goal.text}."
    if kept:
        text += f" By their own simulated clock: {', '.join(kept)}."
    elif not text and any(run.timed for run in runs):
        text = "Seconds are those of the simulated clock."
    return text.strip()


def _text(spread: Spread | None) -> str:
    """Bytes as megabytes."""
    if spread is None:
        return "—"
    return megabytes(spread.mean) + ("" if spread.deviation is None else f" ± {megabytes(spread.deviation)}")


def _plain(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "—"
    return format(spread.mean, form) + ("" if spread.deviation is None else f" ± {format(spread.deviation, form)}")


# ---- the section of the page ----


@dataclass(frozen=True)
class Section:
    """The way to the target: what it is, rows, heads, whether seconds are known, and the charts' height."""

    explained: str
    target: str
    rows: list[TargetRow]
    heads: list[str]
    seconds: bool
    height: int


def section(groups: Sequence[Repeated], goal: Goal, charts: Charts) -> Section | None:
    """The report's section and its charts; None without a target."""
    if goal.target is None:
        return None
    rows = target_rows(groups, goal)
    found = [row for row in rows if row.reached]
    timed = any(row.spread("seconds") for row in rows)
    names: tuple[Cost, ...] = ("both", "seconds") if timed else ("both",)
    for name in names if found else ():
        title = {"both": "both directions, MB", "seconds": "seconds"}[name]
        charts[f"target-{name}"] = {"all": _chart(found, name, title)}
    words = goal.target_words(groups[0].first)
    return Section(explained(groups, goal), words, rows, HEADS, timed, 90 + 26 * len(found))


def _chart(rows: Sequence[TargetRow], name: Cost, title: str) -> tuple[list[Trace], Layout]:
    """A bar per method, with its deviation."""
    found = [(row, spread) for row in rows if (spread := row.spread(name)) is not None]
    scale, unit = (1e6, "MB") if name == "both" else (1.0, "s")
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": pieces.plain(row.label),
            "x": [spread.mean / scale],
            "y": [place],
            "error_x": {"type": "data", "array": [(spread.deviation or 0.0) / scale], "visible": spread.of > 1},
            "marker": {"color": pieces.colour(row.number)},
            "customdata": [[pieces.plain(row.label), _text(spread) if name == "both" else _plain(spread, ".4g")]],
            "hovertemplate": "%{customdata[0]}<br><b>%{customdata[1]}</b> " + unit + "<extra></extra>",
            "meta": row.number,
        }
        for place, (row, spread) in enumerate(found)
    ]
    ticks = {"tickvals": list(range(len(found))), "ticktext": [pieces.plain(row.label, 24) for row, _ in found]}
    return traces, {
        "xaxis": {"title": title, "rangemode": "tozero", "exponentformat": "none"},
        "yaxis": {"autorange": "reversed", "showgrid": False, "zeroline": False, "title": ""} | ticks,
        "bargap": 0.35,
    }
