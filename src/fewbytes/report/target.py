"""Bytes and seconds until runs reach a target score: a table for the terminal, a section and charts for the page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fewbytes.base.units import UNITS, in_unit, unit_of
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
WAYS: tuple[Literal["up"], Literal["down"], Literal["both"]] = ("up", "down", "both")
HEADS = ("round", *WAYS, "seconds", "")
LEAST = ("down", "up", "round", "kind")
"""Columns that a narrow terminal drops, in this order."""


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

    def cells(self, unit: str) -> list[str]:
        """Rounds, bytes up, down and both in a unit, and seconds as text; for a method that never reached it, its best
        score."""
        if not self.reached:
            return ["—", "—", "—", "—", "—", f"not reached (best {self.best})" if self.best else "not measured"]
        ways = [_text(self.spread(name), unit) for name in WAYS]
        took, rounds = self.spread("seconds"), self.spread("round")
        form = ".1f" if took is None or took.mean < 100 else ",.0f"
        count = f"{len(self.reached)} of {len(self.runs)} runs" if len(self.reached) < len(self.runs) else ""
        return [
            _plain(rounds, ".4g" if rounds is None or rounds.deviation is None else ".1f"),
            *ways,
            _plain(took, form),
            count,
        ]


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
    unit = _unit(rows)
    gone |= set() if any(row.cells(unit)[-1] for row in rows) else {""}
    kinds = [] if "kind" in gone else ["kind"]
    table = figures_table(explained(groups, goal), ["method", *kinds], _heads(unit, gone))
    for row in rows:
        cells = [cell for name, cell in zip(HEADS, row.cells(unit), strict=True) if name not in gone]
        table.add_row(Text(row.label), *([row.kind] if kinds else []), *map(Text, cells))
    return table


def explained(groups: Sequence[Repeated], goal: Goal) -> str:
    """What the figures are."""
    target = goal.target_words(groups[0].first)
    first = f"Until {target}, on test data, at the end of the first scored round with it; bytes are of all clients."
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


def _unit(rows: Sequence[TargetRow]) -> str:
    """One unit for the bytes of all rows."""
    return unit_of(spread.mean for row in rows for way in WAYS if (spread := row.spread(way)))


def _heads(unit: str, gone: Collection[str] = ()) -> list[str]:
    """The heads of the columns that are not `gone`."""
    return [f"{unit} {name}" if name in WAYS else name for name in HEADS if name not in gone]


def _text(spread: Spread | None, unit: str) -> str:
    """Bytes in a unit."""
    if spread is None:
        return "—"
    return in_unit(spread.mean, unit) + ("" if spread.deviation is None else f" ± {in_unit(spread.deviation, unit)}")


def _in_words(spread: Spread, name: Cost) -> str:
    """Bytes or seconds with their unit."""
    unit = unit_of([spread.mean])
    return f"{_text(spread, unit)} {unit}" if name == "both" else f"{_plain(spread, '.4g')} s"


def _plain(spread: Spread | None, form: str) -> str:
    if spread is None:
        return "—"
    return format(spread.mean, form) + ("" if spread.deviation is None else f" ± {format(spread.deviation, form)}")


# ---- the section of the page ----


@dataclass(frozen=True)
class Section:
    """The way to the target: what it is, rows, heads, the unit of bytes, and the charts' height."""

    explained: str
    target: str
    rows: list[TargetRow]
    heads: list[str]
    unit: str
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
        charts[f"target-{name}"] = {"all": _chart(found, name)}
    words, unit = goal.target_words(groups[0].first), _unit(rows)
    return Section(explained(groups, goal), words, rows, _heads(unit), unit, 90 + 26 * len(found))


def _chart(rows: Sequence[TargetRow], name: Cost) -> tuple[list[Trace], Layout]:
    """A bar per method, with its deviation."""
    found = [(row, spread) for row in rows if (spread := row.spread(name)) is not None]
    title, scale = "seconds", 1
    if name == "both":
        unit = pieces.axis_unit(spread.mean for _, spread in found)
        title, scale = f"both directions, {unit}", UNITS[unit]
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": pieces.plain(row.label),
            "x": [spread.mean / scale],
            "y": [place],
            "error_x": {"type": "data", "array": [(spread.deviation or 0.0) / scale], "visible": spread.of > 1},
            "marker": {"color": pieces.colour(row.number)},
            "customdata": [[pieces.plain(row.label), _in_words(spread, name)]],
            "hovertemplate": "%{customdata[0]}<br><b>%{customdata[1]}</b><extra></extra>",
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
