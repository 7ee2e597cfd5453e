"""Files of tables: their names, their place in a data set, and their columns as stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fewbytes.base.named import places
from fewbytes.data.folders import TEST_NAMES, is_stray
from fewbytes.data.formats import columnar, delimited, sheets
from fewbytes.data.formats.packed import PACKED
from fewbytes.data.frames import Table
from fewbytes.data.schema import Schema, refused
from fewbytes.data.sources import holds_images

Reader = Callable[[Path, Schema], tuple[pa.Table, tuple[str, ...], tuple[str, ...]]]
"""Returns columns, notes on the reading, and the unambiguous decimal separators."""
PACKABLE: dict[str, Reader] = {
    ".csv": delimited.read,
    ".tsv": functools.partial(delimited.read, usual="\t"),
    ".jsonl": columnar.read_json,
    ".ndjson": columnar.read_json,
}
READERS: dict[str, Reader] = {
    ".csv": delimited.read,
    ".parquet": columnar.read_parquet,
    **PACKABLE,
    ".feather": columnar.read_feather,
    ".xlsx": sheets.read,
    ".xls": sheets.read,
    ".ods": sheets.read,
    **{f"{kind}{packed}": read for kind, read in PACKABLE.items() for packed in PACKED},
}
"""The reader of a file by its suffix, in any case."""
SUFFIXES = tuple(READERS)
Files = dict[str, Path]  # of a data set, by split: train, test


def table_suffix(path: Path) -> str:
    """The lower-case suffix of a table; empty for other files."""
    name = path.name.lower()
    endings = [suffix for suffix in SUFFIXES if name.endswith(suffix)]
    return "" if is_stray(path) else max(endings, key=len, default="")


def is_table(path: Path) -> bool:
    """Whether a file is a table, for Parquet one without images."""
    if not (suffix := table_suffix(path)) or not path.is_file():
        return False
    try:
        return suffix != ".parquet" or not any(holds_images(field.type) for field in pq.read_schema(path))
    except (pa.ArrowException, OSError):
        return False


def table_files(place: Path, only_test: bool = False) -> Files:
    """The tables of a data set: a file, or a folder's `train` and `test` tables; empty if there are none."""
    if place.is_file():
        return {"train": place} if is_table(place) else {}
    there = {path.name.lower(): path for path in sorted(place.iterdir(), reverse=True)} if place.is_dir() else {}

    def first(*names: str) -> Path | None:
        found = (there.get(f"{name}{suffix}") for name in names for suffix in SUFFIXES)
        return next((path for path in found if path is not None and is_table(path)), None)

    files = {split: p for split, p in (("train", first("train")), ("test", first(*TEST_NAMES))) if p is not None}
    return files if "train" in files or only_test else {}


def read_columns(path: Path, schema: Schema) -> Table:
    """Read a file's columns; .json files are lines of JSON, too. Raises UserError for a file that is not a table."""
    suffix = table_suffix(path)
    try:
        data, notes, decimals = READERS.get(suffix, columnar.read_json)(path, schema)
    except (pa.ArrowException, OSError) as error:
        kind = suffix.removeprefix(".")
        why = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        what = f"cannot be read as {kind}{why}"
        raise refused(str(path), what, "write it again") from None
    return Table(str(path), data, schema, notes, decimals)


def check_kind(name: str) -> None:
    """Raises UserError for an existing file whose name does not end as a table's."""
    for place in places(name):
        if place.is_file():
            what = f"cannot be read as a table: its name ends in {place.suffix or 'nothing'!r}"
            known = ", ".join(suffix for suffix in SUFFIXES if suffix.count(".") == 1)
            raise refused(str(place), what, f"give one of {known}", f"is not a file that can be read ({known})")
