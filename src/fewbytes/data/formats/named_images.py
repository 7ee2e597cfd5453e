"""Finds the images that a table's column names: by their path, its end, or their name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from fewbytes.data.columns import is_number, plain
from fewbytes.data.folders import SUFFIXES, is_stray
from fewbytes.data.formats import dicom, nifti
from fewbytes.data.frames import Table

Images = Mapping[str, Path]
"""Images by each of their names."""


def naming_column(table: Table, images: Images) -> tuple[str, list[Path | None]]:
    """The column that names most images, and each row's image if it exists. In a column of whole numbers, which may
    mean anything, most must be names."""
    best, most = ("", list[Path | None]()), 0
    for name, place in table.names.items():
        with suppress(pa.ArrowException):  # for values that are not texts
            texts = [plain(t) if "." in t and is_number(t) else t for t in as_texts(table.data.column(place))]
            found = [_found(text, images) for text in texts]
            count, different = len({*found} - {None}), {*texts}
            if all(text.isdecimal() for text in different) and 2 * count < len(different):
                continue
            if count > most:
                best, most = (name, found), count
    return best


def as_texts(column: pa.ChunkedArray) -> list[str]:
    """A column's values as text, empty if missing. Raises pyarrow.ArrowException for other types."""
    return [text or "" for text in column.cast(pa.large_string()).to_pylist()]


def _found(value: str, images: Images) -> Path | None:
    """The image with that path, path's end, or name."""
    key = value.strip().lower().replace("\\", "/")
    parts = key.split("/")
    ends = ("/".join(parts[i:]) for i in range(len(parts) - 1))
    return next((images[end] for end in ends if end in images), None) if len(parts) > 1 else images.get(key)


def images_by_name(folder: Path) -> dict[str, Path]:
    """The images below a folder by their path in it, and by their name, with suffix and without, if it is unique."""
    names: dict[str, list[Path]] = {}
    paths: dict[str, Path] = {}
    suffixes = sorted((*SUFFIXES, *dicom.SUFFIXES, *nifti.SUFFIXES), key=len, reverse=True)
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        whole = inside.as_posix().lower()
        suffix = next((each for each in suffixes if whole.endswith(each)), None)
        if suffix is None or is_stray(path) or any(map(is_stray, inside.parents[:-1])):
            continue
        paths |= {whole: path, whole.removesuffix(suffix): path}
        for name in {path.name.lower(), path.name.lower().removesuffix(suffix)}:
            names.setdefault(name, []).append(path)
    return {name: those[0] for name, those in names.items() if len(those) == 1} | paths
