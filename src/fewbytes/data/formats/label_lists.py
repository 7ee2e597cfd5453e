"""Folders of images with a table of their labels, as ISIC and CheXpert publish them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed, one_line
from fewbytes.data.clients import Dataset, split_off_test
from fewbytes.data.decoding import decoded
from fewbytes.data.folders import SUFFIXES, check_inside, is_stray
from fewbytes.data.sources import Encoded
from fewbytes.data.split import Split, Targets

CHUNK = 256
UNCERTAIN = -1.0  # CheXpert's mark
Uncertain = Literal["refuse", "zero", "one", "drop"]
TESTS = ("test", "valid", "validation", "val")


def label_lists(folder: Path, target: Sequence[str] = ()) -> dict[str, Path]:
    """The tables at the top of a folder of images that name those and their labels, by split; nothing if there are
    none, or it does not follow from them what is learnt."""
    tables = sorted(path for path in folder.glob("*") if path.suffix.lower() == ".csv" and not is_stray(path))
    if not tables or not (images := _by_name(folder)):
        return {}
    tests = [path for path in tables if path.stem.lower().startswith(TESTS)]
    trains = [path for path in tables if path not in tests]
    if len(trains) != 1:
        return {}
    table = _table(trains[0])
    column, _ = _naming(table, images)
    if not column:
        return {}
    others = [name for name in table.column_names if name != column]
    known = set(target) <= set(others) if target else len(others) == 1 or len(_marked(table, others)) > 1
    return {"train": trains[0], **({"test": tests[0]} if tests else {})} if known else {}


def read_label_lists(
    name: str, folder: Path, size: int | None, target: Sequence[str] = (), uncertain: Uncertain = "refuse"
) -> Dataset:
    """The data set in a folder of images, whose labels stand in tables beside them.

    One column names the images, by their path or name, with a suffix or without. `target`: the columns learnt; by
    default all others whose values are 0, 1, nothing or -1, or the only other one. One column of texts or whole numbers
    is of classes; several, of which each row has a single 1, are classes, too (ISIC); others are labels, of which any
    may hold, and nothing stands for 0 (CheXpert). Of labels that are `uncertain`, -1, is said whether they are 0, 1, or
    their rows left out. Raises UserError for a row whose image is not there.
    """
    lists = label_lists(folder)
    images = _by_name(folder)
    files, labels, notes = {}, {}, list[str]()
    meaning: _Meaning | None = None
    for split, path in lists.items():
        table = _table(path)
        column, found = _image_column(path, table, images)
        meaning = meaning or _Meaning.of(path, table, column, tuple(target))
        values, kept, left = meaning.values(path, table, uncertain)
        files[split] = [each for each, keep in zip(found, kept, strict=True) if keep]
        labels[split] = values[kept]
        notes.append(f"{path.name}: {int(kept.sum())} images by column {column!r}, {meaning.words()}{left}")
    assert meaning is not None
    check_inside(folder, [path for paths in files.values() for path in paths])
    numbers = {split: np.arange(len(paths), dtype=np.int64) for split, paths in files.items()}

    def read() -> tuple[dict[str, Encoded], tuple[str, ...]]:
        encoded = {}
        for split, paths in files.items():
            chunks = (paths[i : i + CHUNK] for i in range(0, len(paths), CHUNK))
            encoded[split] = Encoded(chunks, numbers[split], folder)
        return encoded, meaning.classes

    pictures = decoded(folder, files, read, size)
    splits = {split: meaning.split(x, labels[split]) for split, (x, _) in pictures.arrays.items()}
    train, test = splits["train"], splits.get("test")
    if test is None:
        train, test = split_off_test(train)
    groups = None if meaning.kind == "classes" else (*meaning.classes, "none")
    return Dataset(name, train, test, meaning.classes, groups, notes=(*pictures.notes, *notes), listed=True)


class _Meaning:
    """What columns of labels mean: `kind`, the names of `classes`, and whether a row has a single 1."""

    def __init__(self, columns: tuple[str, ...], one_hot: bool, classes: tuple[str, ...]) -> None:
        self.columns, self.one_hot, self.classes = columns, one_hot, classes
        self.kind: Literal["classes", "labels"] = "classes" if one_hot or len(columns) == 1 else "labels"

    @classmethod
    def of(cls, path: Path, table: pa.Table, image: str, target: tuple[str, ...]) -> _Meaning:
        """Read off the training table. Raises UserError if it cannot be known what is learnt."""
        others = [name for name in table.column_names if name != image]
        if missing := [name for name in target if name not in others]:
            raise UserError(f"{path} has no column {missing[0]!r}: it has {listed(others)} (--target)")
        columns = target or tuple(others if len(others) == 1 else _marked(table, others))
        if not columns:
            raise UserError(f"{path} has the columns {listed(others)}: say which is learnt (--target COLUMN)")
        if len(columns) == 1:
            values = {str(value) for value in _texts(table[columns[0]]) if value is not None}
            return cls(columns, False, tuple(sorted(values, key=_order)))
        held = np.stack([np.nan_to_num(_marks(path, table, name)) for name in columns], axis=1)
        return cls(columns, bool(((held == 1).sum(axis=1) == 1).all() and np.isin(held, (0, 1)).all()), columns)

    def words(self) -> str:
        """For people."""
        if self.kind == "labels":
            return f"{len(self.columns)} labels of which any may hold ({listed(self.columns, 5)})"
        return f"{len(self.classes)} classes ({listed(self.classes, 5)})"

    def values(self, path: Path, table: pa.Table, uncertain: Uncertain) -> tuple[NDArray[Any], NDArray[np.bool_], str]:
        """What rows have, (n,) class numbers or (n, labels) of 0 and 1; which rows count; what was left out."""
        kept = np.ones(len(table), dtype=bool)
        if len(self.columns) == 1:
            texts = _texts(table[self.columns[0]])
            if strange := sorted({text for text in texts if text is not None and text not in self.classes}):
                raise UserError(
                    f"{path} has classes that the training table has not: {listed(strange)}",
                    told="a table has classes that the training table has not",
                )
            kept = np.array([text is not None for text in texts])
            number = {text: i for i, text in enumerate(self.classes)}
            gone = f", {int((~kept).sum())} without a label left out" if not kept.all() else ""
            return np.array([number.get(str(text), 0) for text in texts]), kept, gone
        held = np.nan_to_num(np.stack([_marks(path, table, name) for name in self.columns], axis=1))
        doubt, gone = held == UNCERTAIN, ""
        if doubt.any():
            if uncertain == "refuse":
                count = int(doubt.any(axis=1).sum())
                raise UserError(
                    f"{path} has {count} rows with an uncertain label (-1): say what it stands for (--uncertain zero, "
                    "one or drop)",
                    told="labels are uncertain (-1): have the server run with --uncertain zero, one or drop",
                )
            held[doubt] = float(uncertain == "one")
            kept = ~doubt.any(axis=1) if uncertain == "drop" else kept
            gone = f", {int(doubt.sum())} uncertain labels taken as {uncertain}"
        return (held.argmax(axis=1) if self.one_hot else held), kept, gone

    def split(self, x: NDArray[Any], values: NDArray[Any]) -> Split:
        """Images with what is learnt of them."""
        if self.kind == "classes":
            return Split(x, torch.from_numpy(values.astype(np.int64)))
        first = np.where(values.any(axis=1), values.argmax(axis=1), values.shape[1])
        learnt = Targets("labels", torch.from_numpy(values.astype(np.float32)))
        return Split(x, torch.from_numpy(first.astype(np.int64)), learnt=learnt)


def _images(folder: Path) -> list[Path]:
    """The images below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and not is_stray(path))


def _by_name(folder: Path) -> dict[str, Path]:
    """The images below a folder by their path in it, and by their name, with suffix and without, unless two have it."""
    names: dict[str, list[Path]] = {}
    paths: dict[str, Path] = {}
    for path in _images(folder):
        paths[path.relative_to(folder).as_posix().lower()] = path
        for name in {path.name.lower(), path.stem.lower()}:
            names.setdefault(name, []).append(path)
    return {name: those[0] for name, those in names.items() if len(those) == 1} | paths


def _table(path: Path) -> pa.Table:
    try:
        return pyarrow.csv.read_csv(path, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as a table: {one_line(error)}", told="a table cannot be read") from None


def _image_column(path: Path, table: pa.Table, images: dict[str, Path]) -> tuple[str, list[Path]]:
    """The column that names images, and the image of each row. Raises UserError if none does, or one is missing."""
    column, found = _naming(table, images)
    if not column:
        raise UserError(
            f"{path} names no image that is in its folder: have a column with their names or paths",
            told="no column of a table names images that are there",
        )
    if None in found:
        row = found.index(None)
        raise UserError(
            f"{path}, row {row + 1}: there is no image, or more than one, {table[column][row].as_py()!r} below its "
            f"folder, and {found.count(None) - 1} more are missing: add them, or take their rows out",
            told=f"{found.count(None)} images that a table names are not there",
        )
    return column, [each for each in found if each is not None]


def _naming(table: pa.Table, images: dict[str, Path]) -> tuple[str, list[Path | None]]:
    """The column that names most images, and for each row its image, if it is there."""
    best, most = ("", list[Path | None]()), 0
    for name in table.column_names:
        if pa.types.is_string(table[name].type) or pa.types.is_large_string(table[name].type):
            found = [_found(str(value), images) for value in table[name].to_pylist()]
            if (count := len(found) - found.count(None)) > most:
                best, most = (name, found), count
    return best


def _marked(table: pa.Table, names: Sequence[str]) -> list[str]:
    """The columns whose values are all marks: 0, 1, nothing or uncertain."""
    return [name for name in names if _is_mark(table[name])]


def _found(value: str, images: dict[str, Path]) -> Path | None:
    """The image of that path, of the end of that path, or of that name."""
    key = value.strip().lower().replace("\\", "/")
    parts = key.split("/")
    ends = ("/".join(parts[i:]) for i in range(len(parts) - 1))
    return next((images[end] for end in ends if end in images), None) if len(parts) > 1 else images.get(key)


def _numbers(column: pa.ChunkedArray) -> NDArray[np.float64] | None:
    """A column as numbers, NaN for nothing; None for text and dates."""
    kind = column.type
    if not (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    ):
        return None
    return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)


def _is_mark(column: pa.ChunkedArray) -> bool:
    values = _numbers(column)
    return values is not None and bool(np.isin(values[~np.isnan(values)], (0, 1, UNCERTAIN)).all())


def _marks(path: Path, table: pa.Table, name: str) -> NDArray[np.float64]:
    values = _numbers(table[name])
    if values is None or not _is_mark(table[name]):
        raise UserError(
            f"{path}: column {name!r} is no label of 0 and 1: name others (--target)", told="a label is not 0 or 1"
        )
    return values


def _texts(column: pa.ChunkedArray) -> list[str | None]:
    """Values as text, whole numbers without a point."""
    values = _numbers(column)
    if values is None or pa.types.is_boolean(column.type):
        return [None if value is None else str(value) for value in column.to_pylist()]
    return [None if np.isnan(v) else str(int(v)) if v == np.floor(v) else str(v) for v in values]


def _order(text: str) -> tuple[int, float, str]:
    return (0, float(text), text) if text.lstrip("-").isdecimal() else (1, 0.0, text)
