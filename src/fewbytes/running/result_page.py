"""A result as a notebook shows it: a few figures, and the main score over megabytes as a small chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fewbytes.base.errors import visible
from fewbytes.base.units import size, written

WIDTH, HEIGHT, LEFT, BELOW = 380, 150, 52, 34
"""Pixels of the chart, and of its margins for numbers."""
Points = list[tuple[float, float]]


def score_text(summary: dict[str, Any], value: float | None) -> str:
    """A value of a run's main metric as text: 91.2%, 0.942, or a dash for None. `summary`: result.json."""
    of = summary.get("metrics", {}).get(summary["score"]["metric"], {})
    return written(value, bool(of.get("share")) and bool(of.get("percent", of.get("share"))))


def moved_text(summary: dict[str, Any]) -> str:
    """A run's bytes in each direction as text: 1.24 MB up, 14.4 kB down."""
    ways = {way: summary.get(f"{way}link_bytes") for way in ("up", "down")}
    return ", ".join(f"{'—' if count is None else size(count)} {way}" for way, count in ways.items())


def result_html(folder: Path, s: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The HTML of a result: its figures in a table, and a chart if it was scored in two rounds or more. `s`:
    result.json; `rows`: the lines of rounds.jsonl."""
    score = s["score"]
    title = f"{s.get('method')}, {s.get('rounds')} rounds" + (f", {s['status']}" if s.get("status") != "done" else "")
    kinds = {kind: of for kind, of in score.get("all", {}).items() if of}
    figures = [(f"{kind} {score['metric']}", f"{score_text(s, of['final'])} (best {score_text(s, of['best'])})")
            for kind, of in kinds.items()]  # fmt: skip
    figures += [
        ("bytes", moved_text(s)),
        ("time", f"{s.get('seconds', 0.0):.3g} s"),
        ("folder", str(folder)),
    ]
    cells = "".join(
        f'<tr><th style="text-align:left">{_text(name)}</th><td style="text-align:left">{_text(value)}</td></tr>'
        for name, value in figures
    )
    points = _points(s, rows)
    drawn = _chart(s, points) if len(points) > 1 else ""
    return f"<div><b>{_text(title)}</b><table>{cells}</table>{drawn}</div>"


def _points(summary: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Points:
    """The main score at the megabytes moved so far, in both directions."""
    metric, kind = summary["score"]["metric"], summary["score"]["kind"]
    moved, points = 0, []
    for row in rows:
        moved += row.get("uplink_bytes", 0) + row.get("downlink_bytes", 0)
        value = row.get("scores", {}).get(metric, {}).get(kind)
        if row.get("phase") != "join" and isinstance(value, int | float) and math.isfinite(value):
            points.append((moved / 1e6, float(value)))
    return points


def _chart(summary: dict[str, Any], points: Points) -> str:
    """A line in the text's colour, so that it shows on light and dark pages, with the ends of both axes as numbers."""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = (x - left) / (right - left) if right > left else 0.5
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{LEFT + across * (WIDTH - LEFT - 10):.1f},{10 + (1 - up) * (HEIGHT - BELOW - 16):.1f}"

    line, bottom = " ".join(place(*point) for point in points), HEIGHT - BELOW
    score = summary["score"]
    words = [
        (LEFT - 6, 14, "end", score_text(summary, high)),
        (LEFT - 6, bottom - 2, "end", score_text(summary, low)),
        (LEFT, bottom + 16, "start", f"{left:.3g}"),
        (WIDTH - 10, bottom + 16, "end", f"{right:.3g}"),
        ((LEFT + WIDTH) / 2, bottom + 16, "middle", f"{score['kind']} {score['metric']} over MB of both directions"),
    ]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{_text(text)}</text>' for x, y, anchor, text in words
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" fill="currentColor" '
        f'font-size="11" style="max-width:100%"><path d="M{LEFT} 6V{bottom}H{WIDTH}" fill="none" '
        f'stroke="currentColor" opacity=".35"/><polyline points="{line}" fill="none" stroke="#2d7fe0" '
        f'stroke-width="2"/>{texts}</svg>'
    )


def _text(text: str) -> str:
    return escape(visible(text))
