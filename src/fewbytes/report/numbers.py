"""Tables of the charts' numbers, for readers without scripts, or who want the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from typing import Any

from fewbytes.report.pieces import Layout, Trace, spread

MOST = 24  # maximum points of a line, evenly spaced, and columns of a heat map


@dataclass(frozen=True)
class Numbers:
    """A view of a chart as a table: heads, and rows of a name and cells."""

    view: str
    heads: list[str]
    rows: list[tuple[str, list[str]]]


def tables(views: Mapping[str, tuple[list[Trace], Layout]]) -> list[Numbers]:
    """One table per view, without lines that only guide the eye."""
    return [found for view, (traces, layout) in views.items() if (found := _table(view, traces, layout)).rows]


def _table(view: str, traces: list[Trace], layout: Layout) -> Numbers:
    across, up = (str(layout.get(axis, {}).get("title", name)) for axis, name in (("xaxis", "x"), ("yaxis", "y")))
    rows = [row for trace in traces if trace.get("hoverinfo") != "skip" for row in _rows(trace)]
    maps = any(trace["type"] == "heatmap" for trace in traces)
    return Numbers(view, [up, across] if maps else ["", f"{across}: {up}"], rows)


def _rows(trace: Trace) -> Iterator[tuple[str, list[str]]]:
    if trace["type"] == "heatmap":
        names = [unescape(str(name)) for name in trace.get("x", range(len(trace["z"][0]) if len(trace["z"]) else 0))]
        for name, values in zip(trace.get("y", range(len(trace["z"]))), trace["z"], strict=True):
            pairs = spread(list(zip(names, values, strict=True)), MOST)
            yield unescape(str(name)), [", ".join(f"{across}: {_text(value)}" for across, value in pairs)]
        return
    name = _name(trace)
    across, up = trace.get("x") or [], trace.get("y") or []
    if trace["type"] == "box":
        least, *_, most = sorted(across)
        yield name, [f"{_text(least)} to {_text(most)}, the middle {_text(sorted(across)[len(across) // 2])}"]
    elif len(across) and len(up):
        pairs = spread(list(zip(across, up, strict=True)), MOST)
        yield name, ["; ".join(f"{_text(x)}: {_text(y)}" for x, y in pairs)]


def _name(trace: Trace) -> str:
    """The name of a line; a run's label is the first entry of its points' data."""
    shown = next(iter(trace.get("customdata") or []), None)
    first = shown[0] if isinstance(shown, list | tuple) and shown else shown
    return unescape(str(trace.get("name") or first or next(iter(trace.get("text") or [""]), "")))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "—" if value is None else unescape(str(value))
