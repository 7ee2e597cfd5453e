"""The report of a Flower app whose messages are encoded: the bytes that its `bytes.jsonl` counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError, visible
from fewbytes.base.files import replacing
from fewbytes.base.units import UNITS, size, unit_of
from fewbytes.report import pieces
from fewbytes.report.document import document
from fewbytes.report.pieces import Charts, Layout, Trace

NAME = "bytes.jsonl"
WAYS = {"up": "uplink", "down": "downlink"}


@dataclass(frozen=True)
class AppBytes:
    """The bytes of an app's messages: what they took encoded and would have taken plain, by direction ("up", "down")
    and round, and how many nodes replied."""

    rounds: list[str]
    sent: dict[str, list[int]]
    plain: dict[str, list[int]]
    nodes: int

    def totals(self) -> dict[str, tuple[int, int]]:
        """Encoded and plain bytes of each direction, and of both together."""
        each = {name: (sum(self.sent[way]), sum(self.plain[way])) for way, name in WAYS.items()}
        return each | {"total": (sum(n for n, _ in each.values()), sum(n for _, n in each.values()))}


def read_app_bytes(folder: Path) -> AppBytes:
    """What a folder's `bytes.jsonl` counts. Raises UserError for a line that is not one of its, with its number."""
    rounds: dict[str, int] = {}
    sent: dict[str, list[int]] = {way: [] for way in WAYS}
    plain: dict[str, list[int]] = {way: [] for way in WAYS}
    nodes = set()
    for number, line in enumerate((folder / NAME).read_text("utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            way, nbytes, uncoded, when, node = row["way"], row["bytes"], row["plain"], row["round"], row["node"]
            ours = way in WAYS and all(type(n) is int and 0 <= n < 1 << 62 for n in (nbytes, uncoded))
        except (ValueError, KeyError, TypeError):
            ours = False
        if not ours or not isinstance(when, str) or not isinstance(node, str):
            raise UserError(f"{folder / NAME}, line {number}: it does not say the bytes of a message")
        at = rounds.setdefault(when, len(rounds))
        for kept in (*sent.values(), *plain.values()):
            kept.extend([0] * (at + 1 - len(kept)))
        sent[way][at] += nbytes
        plain[way][at] += uncoded
        nodes.add(node)
    if not rounds:
        raise UserError(f"{folder / NAME} counts no message yet")
    return AppBytes([each or "—" for each in rounds], sent, plain, len(nodes))


def write_app_report(folder: Path) -> Path:
    """Write `report.html` of an app's bytes into its folder, and return its path."""
    counted = read_app_bytes(folder)
    charts: Charts = {f"app-{way}": {"": _chart(counted, way)} for way in WAYS}
    text = document(
        "app_bytes.html",
        charts,
        title=f"Flower app in {folder.resolve().name}",
        facts=[f"rounds {len(counted.rounds)}", f"nodes {counted.nodes}"],
        totals=counted.totals(),
        unit=unit_of(chain(*counted.totals().values())),
        ways=WAYS,
    )
    with replacing(folder / "report.html") as file:
        file.write(visible(text).encode(errors="replace"))
    return folder / "report.html"


def _chart(counted: AppBytes, way: str) -> tuple[list[Trace], Layout]:
    unit = pieces.axis_unit([*counted.plain[way], *counted.sent[way]])
    traces: list[Trace] = [
        _bars(counted.rounds, counted.plain[way], unit, "plain", 9),
        _bars(counted.rounds, counted.sent[way], unit, "encoded", 0),
    ]
    return traces, {"xaxis": {"title": "round", "type": "category"}, "yaxis": {"title": unit}, "barmode": "group"}


def _bars(rounds: Sequence[str], nbytes: Sequence[int], unit: str, name: str, colour: int) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": [pieces.plain(each) for each in rounds],
        "y": [n / UNITS[unit] for n in nbytes],
        "customdata": [size(n) for n in nbytes],
        "marker": {"color": pieces.colour(colour)},
        "hovertemplate": f"{name}<br>round %{{x}}<br><b>%{{customdata}}</b><extra></extra>",
    }
