"""Shared by charts and sections: colours, marks, units, untrusted text, samples of large data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeVar

import numpy as np

from fewbytes.base.errors import visible

T = TypeVar("T")

Trace = dict[str, Any]  # of plotly
Layout = dict[str, Any]  # of plotly
Charts = dict[str, dict[str, tuple[list[Trace], Layout]]]  # chart id -> view -> traces and layout

COLOURS = ["#005ad2", "#d23c00", "#009678", "#963c87", "#c39600", "#00a5ff", "#e169c3"]
"""Colours that remain distinct without red or green receptors, and show on light and dark pages; an eighth
would not. Lines also have a dash, marks a symbol of their own; further ones are grey."""
GREY = "#7d8794"
DASHES = {
    "solid": "", "dash": "9 5", "dot": "2 3", "dashdot": "9 3 2 3", "longdash": "14 4", "8px,3px,2px,3px,2px,3px":
    "8 3 2 3 2 3", "12px,3px,3px,3px": "12 3 3 3", "4px,4px": "4 4",
}  # fmt: skip
"""Dashes of lines, of plotly, and in SVG."""
SYMBOLS = {
    "circle": "M17 1.5a4.5 4.5 0 1 1 0 9a4.5 4.5 0 1 1 0-9z",
    "square": "M13 2h8v8h-8z",
    "diamond": "M17 0l5.5 6l-5.5 6l-5.5-6z",
    "triangle-up": "M17 1l5.5 9h-11z",
    "cross": "M15.5 1h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z",
    "triangle-down": "M17 11l5.5-9h-11z",
    "x": "M12.5 3.5l2-2l2.5 2.5l2.5-2.5l2 2l-2.5 2.5l2.5 2.5l-2 2l-2.5-2.5l-2.5 2.5l-2-2l2.5-2.5z",
    "pentagon": "M17 .5l5.5 4l-2 6.5h-7l-2-6.5z",
}
"""Symbols of marks, of plotly, and as SVG paths around (17, 6)."""


def colour(index: int) -> str:
    """The colour of an index: grey from the number of COLOURS on."""
    return COLOURS[index] if index < len(COLOURS) else GREY


def symbol(index: int) -> str:
    """The symbol of an index; they repeat."""
    return list(SYMBOLS)[index % len(SYMBOLS)]


def mark(index: int) -> str:
    """The SVG path of an index's symbol."""
    return SYMBOLS[symbol(index)]


def dash(index: int) -> str:
    """The dash of an index's line; they repeat."""
    return list(DASHES)[index % len(DASHES)]


def dashes(index: int) -> str:
    """The dashes of an index's line, in SVG."""
    return DASHES[dash(index)]


def see_through(index: int) -> str:
    """The colour of an index's band."""
    red, green, blue = (int(colour(index)[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def axis_unit(counts: Iterable[float]) -> str:
    """The unit of an axis of these bytes: kB if all are below 0.1 MB, else MB."""
    return "kB" if 0 < max(counts, default=0) < 10**5 else "MB"


def plain(text: str, longest: int = 80) -> str:
    """Text escaped for plotly, which interprets some tags and entities; cut to `longest` characters."""
    return escape(cut(visible(text), longest), quote=False)


def cut(text: str, longest: int = 60) -> str:
    """The text, or its beginning and "…" if it has more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def script_json(value: object) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shown(*counts: tuple[int, int, str]) -> list[str]:
    """Texts on what is shown only in part, from (shown, total, noun)."""
    return [f"{some:,} of {count:,} {noun}" for some, count, noun in counts if some < count]


def spread(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of the values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]
