"""Natural partitions: samples with the same value of a column, or from the same folder, are one client's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed
from fewbytes.base.parquet import read_parquet
from fewbytes.data.clients import Columns, Values
from fewbytes.data.columns import is_number
from fewbytes.data.folders import labelled_images
from fewbytes.data.frames import Table
from fewbytes.data.schema import no_column
from fewbytes.data.settings import FOLDERS
from fewbytes.data.sources import parquet_files

Indices = NDArray[np.int64]


def by_value(train: Values, test: Values, what: str) -> tuple[tuple[str, ...], list[Indices], list[Indices]]:
    """(clients' names in order, indices of each one's training samples, of its test samples).

    Test samples of a value without training samples belong to no client. Raises UserError for a missing value, and if
    more than half of the training samples have a value of their own. `what`: the column, for errors."""
    if missing := int((train == "").sum() + (test == "").sum()):
        raise UserError(f"{what} is missing in {missing} samples: fill it in, or leave these samples out")
    names = sorted(set(train.tolist()), key=lambda text: (0, float(text), text) if is_number(text) else (1, 0.0, text))
    if len(names) > max(1, len(train) / 2):
        raise UserError(
            f"{what} has {len(names)} values in {len(train)} training samples, too many for clients: name another"
        )
    mine, own = ([np.flatnonzero(values == name) for name in names] for values in (train, test))
    return tuple(names), mine, own


def column_values(table: Table, column: str, kept: NDArray[np.bool_]) -> Values:
    """A table's column as texts, of the `kept` rows. Raises UserError if there is no such column."""
    if column == FOLDERS:
        raise UserError(f"{table.where} is a table, without folders: use column:NAME as partition")
    if column not in table.names:
        raise no_column(table.where, column, [*table.names], "name one that is there (--partition column:NAME)")
    codes, texts = table.categories(column)
    return np.array([*texts, ""])[codes[kept]]


def image_columns(folder: Path, apart: bool) -> Columns:
    """The columns of a folder of images: of its Parquet files; or FOLDERS, of class folders, read as `apart` says."""

    def values(column: str) -> tuple[Values, Values]:
        if files := parquet_files(folder):
            found = {split: _of_files(paths, column) for split, paths in files.items()}
        elif column == FOLDERS and (pictures := labelled_images(folder, apart=apart)) is not None and pictures.folders:
            found = {split: np.array(names) for split, names in pictures.folders.items()}
        else:
            raise UserError(
                f"{folder} has no folders above or below those of classes: partition folders needs "
                "<domain>/<class>/<image> or <class>/<group>/<image>"
                if column == FOLDERS
                else f"{folder} is not a table, so it has no column {column!r}: use another partition"
            )
        return found["train"], found.get("test", found["train"])

    return values


def one_column(name: str, only: str | None, of_samples: Values) -> Columns:
    """Only this column, or FOLDERS, of a dataset whose samples have these values; None: a table's file names."""

    def values(column: str) -> tuple[Values, Values]:
        if column == only:
            return of_samples, of_samples
        raise UserError(
            f"{name} is not a table, so it has no column {column!r}: use another partition"
            if only == FOLDERS
            else f"{name} is a table, without folders: use column:NAME as partition"
        )

    return values


def _of_files(paths: list[Path], column: str) -> Values:
    where = str(paths[0])
    if column == FOLDERS:
        raise UserError(f"{where} is a Parquet file, without folders: use column:NAME as partition")
    if column not in (names := pq.read_schema(paths[0]).names):
        raise no_column(where, column, names, "name one that is there (--partition column:NAME)")
    texts = [text for path in paths for text in read_parquet(path, [column]).column(0).to_pylist()]
    return np.array(["" if text is None else str(text) for text in texts])


def described(column: str) -> str:
    """A column in errors and notes."""
    return "the folder's name" if column == FOLDERS else f"column {column!r}"


def words(names: tuple[str, ...], column: str, left: int) -> str:
    """A line about such a partition; `left`: the number of test samples that belong to no client."""
    more = f"; {left} test samples with other values are the server's alone" if left else ""
    return f"{len(names)} clients, by {described(column)}: {listed(names, 5)}{more}"
