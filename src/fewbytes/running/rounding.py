"""What a run that rounds what travels may be of, and what it says of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.rate import Way
from fewbytes.core.method import Method
from fewbytes.engines.handlers import DOWN_BITS, DOWN_ERROR, UP_BITS, UP_ERROR
from fewbytes.running.settings import ROUNDING, Settings

MEASURED: dict[Way, dict[str, str]] = {
    "uplink": {UP_BITS: "uplink_bits_per_value", UP_ERROR: "uplink_rounding_error"},
    "downlink": {DOWN_BITS: "downlink_bits_per_value", DOWN_ERROR: "downlink_rounding_error"},
}
"""What rounding measures, and what result.json calls the means."""


def check_rounding(method: Method, settings: Settings) -> None:
    """Raises UserError for settings that round what travels, and a method of which nothing is that can be."""
    for way, keys in ROUNDING.items():
        named = " and ".join(key for key in keys if key in settings.rounding)
        if named and (why := unrounded(method, way)):
            raise UserError(f"{method.method_name}: {why}: leave out {named}")


def unrounded(method: Method, way: Way) -> str:
    """Why nothing is rounded that travels that way; empty if something is."""
    if way == "downlink" and method.promises.streams:
        return "clients train for several rounds on what they were sent, which is not rounded"
    if method.roundable(way):
        return ""
    who = "its clients send" if way == "uplink" else "its server sends"
    return f"{who} no dense or masked values to round"


def rounded_rows(rows: Sequence[dict[str, Any]], way: Way) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl in which something was rounded that way."""
    names = MEASURED[way]
    return [row for row in rows if all(math.isfinite(row.get("measured", {}).get(name, math.nan)) for name in names)]


def rounded(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The bits a value and the rounding error of a run's lines of rounds.jsonl, means over those that have them, as
    result.json says it; nothing where nothing was rounded."""
    means: dict[str, float] = {}
    for way, names in MEASURED.items():
        if found := [row["measured"] for row in rounded_rows(rows, way)]:
            means |= {key: fmean(measured[name] for measured in found) for name, key in names.items()}
    return means
