"""Files of a run's gallery: images, points or shares that a method shows of a round, as small PNG or JSON files."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from torch import Tensor
from torch.nn import functional as F

from fewbytes.base.errors import MethodError
from fewbytes.base.files import replacing

Series = Mapping[str, tuple[Tensor, Tensor | None]]
"""Points (n, d) and their classes (n,), None without classes, by the name of their series."""

LARGEST = 128  # default limit in pixels a side; larger images are scaled down
LIMIT = 512  # maximum of that limit
ROWS = "fewbytes"  # text key in a sheet's PNG file that lists its rows

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_FILE = re.compile(rf"(\d{{1,9}})-({_NAME.pattern})\.(png|shares\.json|json)")


def check_name(name: str) -> None:
    """Raises MethodError for a name that is not safe in every file system."""
    if not _NAME.fullmatch(name):
        raise MethodError(f"pictures are named by 1 to 64 of a-z, 0-9 and -, not starting with -, got {name!r}")


@dataclass(frozen=True)
class Images:
    """Images (n, 1 or 3, height, width), uint8, and a label for each; the report arranges them by label and round.

    `largest`: maximum pixels a side; larger images are scaled down, at most `LIMIT`.
    """

    images: Tensor
    labels: Sequence[str]
    largest: int = LARGEST
    ending: ClassVar[str] = "png"

    def drawn(self) -> bytes:
        """A PNG file with a row for each label, in order of first appearance; empty without images.

        Its text `ROWS` is JSON: the number of images in each label's row, from the left; the rest of a row is black.
        """
        images, labels = self.images, self.labels
        if not len(images):
            return b""
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not images.numel():
            raise MethodError(
                f"images to show are uint8 (n, 1 or 3, height, width), got {images.dtype} {tuple(images.shape)}"
            )
        if len(labels) != len(images):
            raise MethodError(f"{len(images)} images to show need as many labels, got {len(labels)}")
        rows: dict[str, list[Image.Image]] = {}
        for pixels, label in zip(images.permute(0, 2, 3, 1).cpu().numpy(), labels, strict=True):
            image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
            image.thumbnail((self.largest, self.largest))
            rows.setdefault(str(label), []).append(image)
        width, height = image.size
        whole = Image.new(image.mode, (width * max(map(len, rows.values())), height * len(rows)))
        for y, row in enumerate(rows.values()):
            for x, image in enumerate(row):
                whole.paste(image, (x * width, y * height))
        text = PngImagePlugin.PngInfo()
        text.add_itxt(ROWS, json.dumps({label: len(row) for label, row in rows.items()}))
        file = io.BytesIO()
        whole.save(file, "PNG", optimize=True, pnginfo=text)
        return file.getvalue()


@dataclass(frozen=True)
class Points:
    """Points of many dimensions in panels: by title a mapping from series to points (n, d) and their classes (n,),
    integers, or None. A panel shows all its points by their first two principal components; d may differ by panel.
    """

    panels: Mapping[str, Series]
    ending: ClassVar[str] = "json"

    def drawn(self) -> bytes:
        """A JSON file: panel, series, then `x`, `y` and `classes` (or null); leaves out non-finite points."""
        return json.dumps({title: _panel(title, points) for title, points in self.panels.items()}).encode()


@dataclass(frozen=True)
class Shares:
    """For each element of some layers, the share of rounds in which it was active.

    `rows`: the compared ones (clients, the server), each a mapping from layer to values in [0, 1], with the same shapes
    in all rows. The report draws the last round's.
    """

    rows: Mapping[str, Mapping[str, Tensor]]
    ending: ClassVar[str] = "shares.json"

    def drawn(self) -> bytes:
        """A JSON file to four digits: row, layer, then its elements. Raises MethodError for values outside [0, 1]."""
        rounded = {
            row: {layer: _shares(row, layer, values) for layer, values in layers.items()}
            for row, layers in self.rows.items()
        }
        return json.dumps(rounded, separators=(",", ":")).encode()


def _panel(title: str, points: Series) -> dict[str, dict[str, list[float] | list[int] | None]]:
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for series, (values, classes) in points.items():
        if values.dim() != 2 or (classes is not None and classes.shape != values.shape[:1]):
            raise MethodError(f"{series!r} of the panel {title!r} to show must be points (n, d) and classes (n,)")
        values = values.detach().cpu().double()
        usable = (values.abs() < 1e100).all(1)  # squares must be finite, too
        found[series] = (values[usable], None if classes is None else classes.cpu()[usable].long())
    if len({values.shape[1] for values, _ in found.values()}) > 1:
        raise MethodError(f"all points of the panel {title!r} to show must have as many dimensions")
    if not found:
        return {}
    flat = _two_dimensional(torch.cat([values for values, _ in found.values()]))
    parts = np.split(flat, np.cumsum([len(values) for values, _ in found.values()])[:-1])
    return {
        series: {
            "x": part[:, 0].tolist(),
            "y": part[:, 1].tolist(),
            "classes": None if classes is None else classes.tolist(),
        }
        for (series, (_, classes)), part in zip(found.items(), parts, strict=True)
    }


def _two_dimensional(points: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Points (n, d) along their two principal axes (n, 2), to four digits of the largest; each axis's largest component
    is positive."""
    centred = F.pad(points - points.mean(0), (0, max(0, 2 - points.shape[1]))).numpy()
    if len(centred) < 2 or np.abs(centred).max() < 1e-100:
        return np.zeros((len(centred), 2))
    axes = np.linalg.svd(centred.astype(np.float64), full_matrices=False)[2][:2]
    axes *= np.sign(axes[np.arange(2), np.abs(axes).argmax(1)])[:, None]
    flat: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = centred @ axes.T
    return flat.round(3 - math.floor(math.log10(np.abs(flat).max()))) + 0.0  # no -0.0


def _shares(row: str, layer: str, values: Tensor) -> list[float]:
    if not ((values >= 0) & (values <= 1)).all():
        raise MethodError(f"shares to show lie in [0, 1], those of {layer!r} in the row {row!r} do not")
    shares: list[float] = values.detach().cpu().double().flatten().numpy().round(4).tolist()
    return shares


def keep(folder: Path, t: int, shown: Mapping[str, bytes]) -> None:
    """Write a round's items to the gallery of a run folder."""
    for name, data in shown.items():
        (folder / "gallery").mkdir(exist_ok=True)
        with replacing(folder / "gallery" / f"{t}-{name}", sync=True) as file:
            file.write(data)


def kept(folder: Path) -> list[tuple[int, str, str, Path]]:
    """The files in a run folder's gallery: (round, name, kind as in its suffix, path), in the order of rounds."""
    paths = (folder / "gallery").iterdir() if (folder / "gallery").is_dir() else ()
    found = [(match, path) for path in paths if (match := _FILE.fullmatch(path.name)) and path.is_file()]
    return sorted((int(match[1]), match[2], match[3], path) for match, path in found)


def forget_after(folder: Path, t: int) -> None:
    """Remove files of rounds after t."""
    for number, _, _, path in kept(folder):
        if number > t:
            path.unlink()
