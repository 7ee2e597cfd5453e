"""Pictures from the runs' methods: images by class and round, points by round, shares of rounds.

A gallery is untrusted, so no file enters the page unchanged: pixels are re-encoded, numbers checked, texts cut.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec
import numpy as np
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.core.gallery import LIMIT, ROWS, kept
from fewbytes.report import activations, pieces
from fewbytes.report.folder import RunFolder
from fewbytes.report.pieces import Charts, Layout, Trace, cut, shown, spread

T = TypeVar("T")
Files = list[tuple[int, Path]]  # files of one name, by round
Pixels = np.ndarray[Any, np.dtype[np.uint8]]

_BYTES = 2_000_000  # maximum, all pictures of a page together
_ROUNDS, _CLASSES, _IMAGES, _NAMES, _PANELS, _SERIES = 12, 200, 4, 20, 6, 6  # maximum of each that is shown
_HIGH = 64  # minimum height of a row of images, in pixels
_ELEMENT = 74  # bytes of an image's element on the page, besides its data and text
_LEGENDS = {"detections.png": "White: the true boxes. In colour: what was found, with class and confidence."}
_FILE_BYTES = 1 << 26  # a larger file is not read
_GREY = "#8b95a1"  # of points without a class, drawn as open symbols
_SYMBOLS = {
    "circle": "●○", "diamond": "◆◇", "square": "■□", "triangle-up": "▲△", "star": "★☆", "triangle-down": "▼▽",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """Images of a row, side by side: PNG in base64, alternative text, size on the page in pixels."""

    data: str
    words: str
    width: int
    height: int


@dataclass(frozen=True)
class Images:
    """A table: a column per round (`heads`), a row per class with its images; omissions, bytes on the page."""

    heads: list[str]
    rows: list[tuple[str, list[Cell | None]]]
    legend: str
    shown: list[str]
    size: int


@dataclass(frozen=True)
class Points:
    """The charts of a name: a view per round, a chart per panel, the series' marks, the classes' colours.

    `repeats`: there are more classes than colours; `shown`: omissions.
    """

    name: str
    views: dict[str, str]
    panels: list[str]
    series: list[tuple[str, str]]
    classes: list[tuple[int, str]]
    repeats: bool
    shown: list[str]


@dataclass(frozen=True)
class Article:
    """One exhibit of a method."""

    title: str
    kind: Literal["images", "points", "shares"]
    shown: Images | Points | activations.Shares


@dataclass(frozen=True)
class Gallery:
    """One run's exhibits; `whose` names the run if there are several, `damaged` the files left out."""

    whose: str
    articles: list[Article]
    damaged: list[str]


class Series(TypedDict):
    """Points in two dimensions, with their classes, if any."""

    x: list[float]
    y: list[float]
    classes: list[Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]] | None


Map = dict[str, dict[str, Series]]  # by panel and series


def section(runs: Sequence[RunFolder], charts: Charts) -> list[Gallery]:
    """The page's content for every run with a gallery. Raises UserError if one cannot be read."""
    galleries = [_files(run) for run in runs]
    jobs = [(kind, index, name) for index, (named, _) in enumerate(galleries) for name, kind in named]
    left, articles = _BYTES, {}
    charts_first = sorted(jobs, key=lambda job: job[0] == "png")  # images get the bytes that charts do not need
    for done, job in enumerate(charts_first):
        kind, index, name = job
        named, damaged = galleries[index]
        budget = max(0, left // (len(jobs) - done))
        title = name.replace("-", " ").capitalize()
        if kind == "png":
            if images := _images(runs[index], named[name, kind], budget, damaged):
                articles[job] = Article(title, "images", images)
                left -= images.size
        elif kind == "shares.json":
            if shares := _shares(f"{name}-{index}", named[name, kind][-1], budget, damaged):
                articles[job] = Article(title, "shares", shares[0])
                left -= _add(shares[1], charts)
        elif points := _points(runs[index], f"{name}-{index}", named[name, kind], budget, damaged):
            articles[job] = Article(title, "points", points[0])
            left -= _add(points[1], charts)
    whole = [
        Gallery(
            f"{run.label}: " if len(runs) > 1 else "",
            [articles[job] for job in jobs if job[1] == index and job in articles],
            damaged,
        )
        for index, (run, (_, damaged)) in enumerate(zip(runs, galleries, strict=True))
    ]
    return [gallery for gallery in whole if gallery.articles or gallery.damaged]


def _add(own: Charts, charts: Charts) -> int:
    """Add charts to the others; returns their bytes on the page."""
    charts.update(own)
    return len(pieces.script_json(own))


def _files(run: RunFolder) -> tuple[dict[tuple[str, str], Files], list[str]]:
    """The files of a run's gallery by name and kind, and the names of unknown files."""
    named: dict[tuple[str, str], Files] = defaultdict(list)
    try:
        files = kept(run.path)
        known = {path.name for *_, path in files}
        unknown = sorted(path.name for path in (run.path / "gallery").glob("[!.]*") if path.name not in known)
    except OSError as error:
        raise UserError(f"{run.path / 'gallery'} cannot be read: {error.strerror}") from error
    for t, name, kind, path in files:
        named[name, kind].append((t, path))
    unknown += [path.name for files in list(named.values())[_NAMES:] for _, path in files]
    return dict(list(named.items())[:_NAMES]), unknown


def _read(files: Files, parse: Callable[[bytes], T], damaged: list[str]) -> dict[int, T]:
    """Parse some of the files, by round; adds the names of unreadable ones to `damaged`."""
    found = {}
    for t, path in spread(files, _ROUNDS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                if path.stat().st_size > _FILE_BYTES:
                    raise ValueError("too large")
                found[t] = parse(path.read_bytes())
        except Exception:  # an untrusted file may fail a decoder in any way
            damaged.append(path.name)
    return found


# ---- images ----


def _rows(data: bytes) -> dict[str, Pixels]:
    """The rows of a sheet of images by label, each (height, images, width, channels)."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        text = str(image.info[ROWS])
        counts = msgspec.json.decode(text, type=dict[str, Annotated[int, msgspec.Meta(ge=1)]])
        width, height = image.width // max(counts.values()), image.height // len(counts)
        if image.mode not in ("L", "RGB") or not 1 <= min(width, height) <= max(width, height) <= LIMIT:
            raise ValueError("not a sheet of images")
        pixels = np.asarray(image)[: height * len(counts), : width * max(counts.values())]
    rows = pixels.reshape(len(counts), height, max(counts.values()), width, -1)
    return {label: row[:, :count].copy() for (label, count), row in zip(counts.items(), rows, strict=True)}


def _images(run: RunFolder, files: Files, budget: int, damaged: list[str]) -> Images | None:
    """A table of images: a row per class, a column per round, as many as fit into the budget of bytes."""
    rounds = _read(files, _rows, damaged)
    labels = list(dict.fromkeys(label for rows in rounds.values() for label in rows))
    many = max((row.shape[1] for rows in rounds.values() for row in rows.values()), default=0)
    cells: dict[tuple[int, str], Cell | None] = {}
    for most in (_IMAGES, 1):
        times, lines = list(rounds), spread(labels, _CLASSES)
        for t, label in itertools.product(times, lines):
            cells[t, label] = _cell(rounds[t].get(label), most, f"{label}, {_when(run, t)}")
        if _size(cells, times, lines) <= budget:
            break
    while _size(cells, times, lines) > budget:
        if len(times) > max(2, len(lines)):
            times = spread(list(rounds), len(times) - 1)
        else:
            lines = spread(labels, len(lines) - 1)
    if not times or not lines:
        damaged += [path.name for _, path in files if path.name not in damaged]
        return None
    return Images(
        [_when(run, t) for t in times],
        [(cut(label), [cells[t, label] for t in times]) for label in lines],
        _LEGENDS.get(files[0][1].name.split("-", 1)[1], ""),
        shown(
            (len(times), len(files), "rounds"),
            (len(lines), len(labels), "rows"),
            (min(most, many), many, "images of a row"),
        ),
        _size(cells, times, lines),
    )


def _size(cells: Mapping[tuple[int, str], Cell | None], times: Sequence[int], lines: Sequence[str]) -> int:
    """Approximate bytes of some of the images on the page."""
    images = (cells[where] for where in itertools.product(times, lines))
    return sum(_ELEMENT + len(image.data) + len(image.words) for image in images if image)


def _cell(row: Pixels | None, most: int, words: str) -> Cell | None:
    """The first images of a row, side by side."""
    if row is None:
        return None
    row = row[:, :most]
    height, count, width, channels = row.shape
    pixels = row.reshape(height, count * width, channels)
    file = io.BytesIO()
    Image.fromarray(pixels if channels == 3 else pixels[:, :, 0]).save(file, "PNG")
    zoom = math.ceil(_HIGH / height)
    return Cell(base64.b64encode(file.getvalue()).decode(), cut(words), zoom * count * width, zoom * height)


# ---- points ----


def _map(data: bytes) -> Map:
    found = msgspec.json.decode(data, type=Map)
    for series in (series for panel in found.values() for series in panel.values()):
        x, y, classes = series["x"], series["y"], series["classes"]
        if not len(x) == len(y) == len(x if classes is None else classes):
            raise ValueError("points without coordinates or classes")
        if not np.isfinite([*x, *y]).all():
            raise ValueError("points that are not finite")
    return found


def _points(run: RunFolder, name: str, files: Files, budget: int, damaged: list[str]) -> tuple[Points, Charts] | None:
    """A chart per panel, with a view per round and as many points as fit into the budget of bytes."""
    rounds = _read(files, _map, damaged)
    titles = list(dict.fromkeys(title for found in rounds.values() for title in found))
    panels = [panel for found in rounds.values() for panel in found.values()]
    named = {series: points for panel in panels for series, points in panel.items()}
    classes = run.partition["classes"] if run.partition else []
    charts: Charts = {}
    many = most = max((len(points["x"]) for panel in panels for points in panel.values()), default=0)
    while most:
        charts = {
            f"{name}-{index}": {
                str(t): (_scatter(found.get(title, {}), list(named)[:_SERIES], classes, most), _LAYOUT)
                for t, found in rounds.items()
            }
            for index, title in enumerate(titles[:_PANELS])
        }
        if len(pieces.script_json(charts)) <= budget:
            break
        most //= 2
    if not most:
        damaged += [path.name for _, path in files if path.name not in damaged]
        return None
    found = sorted({c for panel in panels for points in panel.values() for c in points["classes"] or []})
    points = Points(
        name,
        {str(t): _when(run, t) for t in rounds},
        [cut(title) for title in titles[:_PANELS]],
        [
            (symbol[series["classes"] is None], cut(title))
            for (title, series), symbol in zip(named.items(), _SYMBOLS.values(), strict=False)
        ],
        [(c, cut(_class(c, classes))) for c in found[: len(pieces.COLOURS)]],
        len(found) > len(pieces.COLOURS),
        shown(
            (len(rounds), len(files), "rounds"),
            (most, many, "points of a series"),
            (min(len(titles), _PANELS), len(titles), "panels"),
            (min(len(named), _SERIES), len(named), "series"),
        ),
    )
    return points, charts


def _scatter(panel: dict[str, Series], names: Sequence[str], classes: Sequence[str], most: int) -> list[Trace]:
    """The series of a panel; those without classes are drawn below the others."""
    traces: list[Trace] = []
    for name, symbol in zip(names, _SYMBOLS, strict=False):
        if name not in panel:
            continue
        x, y = (spread(panel[name][axis], most) for axis in ("x", "y"))
        own = panel[name]["classes"]
        marker: Trace = {"symbol": f"{symbol}-open", "size": 6, "color": _GREY, "opacity": 0.5}
        words: Trace = {"hovertemplate": "%{fullData.name}<extra></extra>"}
        if own is not None:
            own = spread(own, most)
            marker |= {"symbol": symbol, "size": 9, "color": [pieces.colour(c) for c in own], "opacity": 0.9}
            words = {
                "text": [pieces.plain(_class(c, classes), 24) for c in own],
                "hovertemplate": "<b>%{text}</b><br>%{fullData.name}<extra></extra>",
            }
        place: Trace = {"type": "scatter", "mode": "markers", "name": pieces.plain(name), "x": x, "y": y}
        traces.append(place | {"marker": marker} | words)
    return sorted(traces, key=lambda trace: "text" in trace)


_LAYOUT: Layout = {
    "xaxis": {"title": "first component", "zeroline": False},
    "yaxis": {"title": "second component", "zeroline": False, "scaleanchor": "x"},
    "hovermode": "closest",
}


# ---- shares ----


def _shares(
    name: str, last: tuple[int, Path], budget: int, damaged: list[str]
) -> tuple[activations.Shares, Charts] | None:
    """The charts of a name's last file."""
    found = _read([last], activations.parsed, damaged)
    panel = activations.panel(f"{name}-shares", found[last[0]], budget) if found else None
    if found and not panel:
        damaged.append(last[1].name)
    return panel


# ---- words ----


def _class(number: int, classes: Sequence[str]) -> str:
    return classes[number] if 0 <= number < len(classes) else f"class {number}"


def _when(run: RunFolder, t: int) -> str:
    """The round of a picture in words; pictures of a run's final step have the number of its last round plus one."""
    last = max((row["round"] for row in run.rounds if row["phase"] == "round"), default=0)
    return "at the end" if run.status == "done" and t == last + 1 else f"round {t}"
