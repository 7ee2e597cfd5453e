"""What the sections of the page are made of: charts, the choice among their views, colours, words of strangers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

Trace = dict[str, Any]  # of plotly
Layout = dict[str, Any]  # of plotly
Charts = dict[str, dict[str, tuple[list[Trace], Layout]]]  # chart id -> view -> what plotly draws

COLOURS = [
    "#3d7fd9",
    "#d97a26",
    "#2a9d74",
    "#cf4f6a",
    "#8a66c8",
    "#1699ad",
    "#a3763f",
    "#c45fa6",
    "#7d8f24",
    "#74839b",
]


def chart(name: str, title: str, description: str, height: int = 300) -> str:
    """The place of the chart `name` of `Charts`; `height` in pixels."""
    return f"""<figure><figcaption>{escape(title)}</figcaption>
<div class="chart" id="{name}" style="height:{height}px" role="img" aria-label="{escape(description)}"></div>
</figure>"""


def picker(name: str, options: dict[str, str]) -> str:
    """A choice among the views of the charts in the same article or section; nothing where there is but one."""
    if len(options) == 1:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="{name}" value="{escape(value)}"{"" if index else " checked"}>'
        f"<span>{escape(text)}</span></label>"
        for index, (value, text) in enumerate(options.items())
    )
    return f'<fieldset class="picker"><legend>Show</legend>{buttons}</fieldset>'


def dot(index: int) -> str:
    """A spot of the colour of a run, a class or a line."""
    return f'<i class="dot" style="background:{colour(index)}"></i>'


def colour(index: int) -> str:
    """The colours in turn."""
    return COLOURS[index % len(COLOURS)]


def plain(text: str, longest: int = 80) -> str:
    """Any text as plotly shows it, which reads a few tags and entities of its own; cut where it is too long."""
    return escape(cut(text, longest), quote=False)


def cut(text: str, longest: int = 60) -> str:
    """The text, or its beginning where it is too long."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def script_json(value: object) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def shown(*counts: tuple[int, int, str]) -> str:
    """A sentence on what is shown in part; nothing where all is."""
    parts = [f"{some:,} of {count:,} {noun}" for some, count, noun in counts if some < count]
    return f"Shown: {', '.join(parts)}; the rest is in the run's folder <code>gallery</code>." if parts else ""


def spread(values: Sequence[T], most: int) -> list[T]:
    """At most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]
