"""Shared by charts and sections: colours, marks, untrusted text, samples of large data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any, TypeVar

import numpy as np

from fewbytes.base.errors import visible

T = TypeVar("T")

Trace = dict[str, Any]  # of plotly
Layout = dict[str, Any]  # of plotly
Charts = dict[str, dict[str, tuple[list[Trace], Layout]]]  # chart id -> view -> traces and layout

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
SYMBOLS = ["circle", "square", "triangle-up", "diamond", "cross"]


def colour(index: int) -> str:
    """The colour of an index; colours repeat."""
    return COLOURS[index % len(COLOURS)]


def symbol(index: int) -> str:
    """A symbol that distinguishes runs of the same colour."""
    return SYMBOLS[index // len(COLOURS) % len(SYMBOLS)]


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
