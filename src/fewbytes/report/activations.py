"""Charts of the share of rounds in which each element of a layer was active (FedPURIN's Fig. 5, 6).

For each layer: ridges, with each row's (a client's, the server's) distribution of the shares over the elements, and a
heat map of the shares by element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from fewbytes.report import pieces
from fewbytes.report.pieces import Charts, Layout, Trace, cut, shown, spread

Values = np.ndarray[Any, np.dtype[np.float64]]
Rows = dict[str, Values]  # row name -> the shares of a layer's elements

_RIDGES, _ROWS = 21, 9  # shown at most, of each
_DETAILS = (16, 1280), (16, 640), (16, 320), (8, 160), (4, 160)  # maximum layers and columns; the first that fits
_GRID = np.linspace(0, 1, 101)
_BANDWIDTH = 0.02, 0.06  # minimum and maximum, of the smoothing kernel
_OVERLAP = 1.6  # peak height of a ridge, in distances between ridges


@dataclass(frozen=True)
class Shares:
    """The two charts of a name: layers by view, numbers of rows, of columns if they merge elements, and omissions."""

    name: str
    views: dict[str, str]
    ridges: int
    rows: int
    merged: int | None
    shown: list[str]


def parsed(data: bytes) -> dict[str, Rows]:
    """The shares by layer and row from a file of `fewbytes.core.gallery.Shares`. Raises ValueError for other files."""
    share = Annotated[float, msgspec.Meta(ge=0, le=1)]
    layers: dict[str, Rows] = {}
    for row, of_row in msgspec.json.decode(data, type=dict[str, dict[str, list[share]]]).items():
        for layer, values in of_row.items():
            layers.setdefault(layer, {})[row] = np.array(values)
    if not layers or any(len({len(values) for values in rows.values()} | {0}) != 2 for rows in layers.values()):
        raise ValueError("no shares, or rows of different lengths")
    return layers


def panel(name: str, layers: dict[str, Rows], budget: int) -> tuple[Shares, Charts] | None:
    """The content of the page, and two charts named after `name`: ridges and a heat map, with a view per layer.

    With as much detail as fits into the budget of bytes; None if nothing fits.
    """
    ridges = {layer: _ridges(_some(layers[layer], _RIDGES)) for layer in spread(list(layers), _DETAILS[0][0])}
    for most, columns in _DETAILS:
        chosen = spread(list(ridges), most)
        charts: Charts = {
            f"{name}-ridges": {str(i): ridges[layer] for i, layer in enumerate(chosen)},
            f"{name}-heat": {str(i): _heat(_some(layers[layer], _ROWS), columns) for i, layer in enumerate(chosen)},
        }
        if len(pieces.script_json(charts)) <= budget:
            break
    else:
        return None
    rows, longest = (max(count(found) for found in layers.values()) for count in (len, _elements))
    high, low = min(rows, _RIDGES), min(rows, _ROWS)
    parts = shown(
        (len(chosen), len(layers), "layers"), (high, rows, "rows as ridges"), (low, rows, "rows of the heat map")
    )
    views = {str(i): cut(layer) for i, layer in enumerate(chosen)}
    return Shares(name, views, high, low, columns if longest > columns else None, parts), charts


def _elements(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def _some(rows: Rows, most: int) -> Rows:
    return {row: rows[row] for row in spread(list(rows), most)}


def _ridges(rows: Rows) -> tuple[list[Trace], Layout]:
    """A closed outline per row, the first at the top, each overlapping the one above."""
    traces: list[Trace] = []
    for place, (row, values) in zip(range(len(rows) - 1, -1, -1), rows.items(), strict=True):
        heights = density(values)
        outline = np.concatenate([[0.0], _OVERLAP * heights / heights.max(), [0.0]]) + place
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "fill": "toself",
                "x": [0, *_GRID.round(2).tolist(), 1],
                "y": outline.round(3).tolist(),
                "line": {"width": 1.5, "color": _colour(row)},
                "fillcolor": f"{_colour(row)}99",
                "text": f"{pieces.plain(row, 24)}<br>mean <b>{values.mean():.1%}</b>",
                "hoveron": "fills",
                "hoverinfo": "text",
            }
        )
    names = [pieces.plain(row, 24) for row in rows]
    return traces, {
        "xaxis": {"title": "share of rounds", "tickformat": ".0%", "range": [-0.01, 1.01], "zeroline": False},
        "yaxis": {
            "tickvals": list(range(len(rows) - 1, -1, -1)),
            "ticktext": names,
            "range": [-0.15, len(rows) - 1 + _OVERLAP + 0.1],
            "zeroline": False,
        },
        "hovermode": "closest",
    }


def density(values: Values) -> Values:
    """The density of values in [0, 1] on a grid of 101 points: a Gaussian kernel, reflected at both ends.

    The kernel's deviation is half the smallest step between values, within bounds, as few rounds give few values.
    """
    places, counts = np.unique(values.round(3), return_counts=True)
    deviation = np.clip(np.diff(places).min(initial=1) / 2, *_BANDWIDTH)
    weights = counts / counts.sum() / (deviation * math.sqrt(2 * math.pi))
    images = (places, -places, 2 - places)
    kernels = sum(np.exp(-0.5 * ((_GRID[:, None] - image) / deviation) ** 2) for image in images)
    heights: Values = kernels @ weights
    return heights


def _heat(rows: Rows, columns: int) -> tuple[list[Trace], Layout]:
    step = math.ceil(_elements(rows) / columns)
    starts = np.arange(0, _elements(rows), step)
    widths = np.diff(np.append(starts, _elements(rows)))
    names = [pieces.plain(row, 24) for row in rows]
    trace: Trace = {
        "type": "heatmap",
        "x": starts.tolist(),
        "y": list(range(len(rows))),
        "z": [(np.add.reduceat(values, starts) / widths).round(3).tolist() for values in rows.values()],
        "zmin": 0,
        "zmax": 1,
        "ygap": 1,
        "colorbar": {
            "thickness": 8,
            "outlinewidth": 0,
            "tickformat": ".0%",
            "title": {"text": "share of rounds", "side": "right", "font": {"size": 13}},
        },
        "hovertemplate": "element %{x}<br><b>%{z:.1%}</b> of the rounds<extra></extra>",
    }
    return [trace], {
        "xaxis": {"title": "element", "showgrid": False, "zeroline": False},
        "yaxis": {
            "tickvals": list(range(len(rows))),
            "ticktext": names,
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
        },
    }


def _colour(row: str) -> str:
    return pieces.colour(row == "server")
