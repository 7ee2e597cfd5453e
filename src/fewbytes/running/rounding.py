"""Checks of rounding settings, and the rounding figures of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.rate import ALL, Rate, Way
from fewbytes.core.method import Method
from fewbytes.core.uplink import Uplink
from fewbytes.engines.handlers import DOWN_BITS, DOWN_ERROR, UP_BITS, UP_ERROR
from fewbytes.running.settings import ROUNDING, Settings

MEASURED: dict[Way, dict[str, str]] = {
    "uplink": {UP_BITS: "uplink_bits_per_value", UP_ERROR: "uplink_rounding_error"},
    "downlink": {DOWN_BITS: "downlink_bits_per_value", DOWN_ERROR: "downlink_rounding_error"},
}
"""The measurements of rounding, and the names of their means in result.json."""
OVER = 1.5  # times the bits asked for that a message may take without a note


def check_rounding(method: Method, settings: Settings) -> None:
    """Raises UserError for rounding settings with a method that sends nothing to round."""
    if settings.bits is not None and (why := unrounded(method, "uplink")) and unrounded(method, "downlink"):
        raise UserError(f"{method.method_name}: {why}: leave out bits")
    for way, keys in ROUNDING.items():
        named = " and ".join(key for key in keys if key in settings.rounding)
        exact = way == "downlink" and not settings.downlink()
        if named and not exact and (why := unrounded(method, way)):
            raise UserError(f"{method.method_name}: {why}: leave out {named}")


def rates(method: Method, settings: Settings) -> tuple[Uplink, Rate]:
    """How finely uploads and downloads of a method are rounded."""
    return settings.uplink(), ALL if unrounded(method, "downlink") else settings.downlink()


def rounding_notes(method: Method, settings: Settings) -> dict[str, str]:
    """What a run rounds that its settings do not name, or does not round though they do; as in `Network.note`."""
    if settings.by_uplink and not unrounded(method, "downlink"):
        bits = settings.downlink().bits
        rate = f"{bits:g} {'bit' if bits == 1 else 'bits'} per value"
        return {"downloads are rounded, too": f"to {rate}; downlink_bits=32 leaves them exact"}
    ways: tuple[Way, ...] = ("uplink", "downlink") if settings.bits is not None else ()
    return {f"the {way} is not rounded": why for way in ways if (why := unrounded(method, way))}


def asked(settings: Settings) -> dict[Way, float]:
    """Bits per value that settings ask for, by direction; none where they ask for steps, or let links decide."""
    found: dict[Way, float] = {"uplink": settings.uplink().fixed.bits, "downlink": settings.downlink().bits}
    return {way: bits for way, bits in found.items() if bits}


def overshot(bits: Mapping[Way, float], measured: Mapping[str, float]) -> dict[str, str]:
    """A note for each direction that took more than OVER times the `bits` asked for, as in `Network.note`. `measured`:
    of a line of rounds.jsonl."""
    names: dict[Way, str] = {"uplink": UP_BITS, "downlink": DOWN_BITS}
    return {
        f"the {way} took more bits than asked for, as headers and values that are not rounded count, too": (
            f"{measured[names[way]]:.2f} per value, not {count:g}"
        )
        for way, count in bits.items()
        if measured.get(names[way], 0.0) > OVER * count
    }


def unrounded(method: Method, way: Way) -> str:
    """Why nothing is rounded in that direction; empty if something is."""
    if way == "downlink" and method.promises.streams:
        return "clients train several rounds on one download, so downloads are not rounded"
    if method.roundable(way):
        return ""
    who = "its clients send" if way == "uplink" else "its server sends"
    return f"{who} no dense or masked values to round"


def rounded_rows(rows: Sequence[dict[str, Any]], way: Way) -> list[dict[str, Any]]:
    """The lines of rounds.jsonl with rounding in that direction."""
    names = MEASURED[way]
    return [row for row in rows if all(math.isfinite(row.get("measured", {}).get(name, math.nan)) for name in names)]


def rounded(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Means of the bits per value and the rounding error over lines of rounds.jsonl that have them, with their names in
    result.json; empty if nothing was rounded."""
    means: dict[str, float] = {}
    for way, names in MEASURED.items():
        if found := [row["measured"] for row in rounded_rows(rows, way)]:
            means |= {key: fmean(measured[name] for measured in found) for name, key in names.items()}
    return means
