"""Files of tables: which are, where a data set has them, and their columns as they stand there."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.parquet import read_parquet
from fewbytes.data.folders import TEST_NAMES
from fewbytes.data.schema import MARKS, Schema
from fewbytes.data.sources import holds_images

SUFFIXES = (".csv", ".parquet")
Files = dict[str, Path]  # of a data set, by split: train, test


def is_table(path: Path) -> bool:
    """Whether a file is a table: CSV, or Parquet without images."""
    if path.suffix not in SUFFIXES or not path.is_file():
        return False
    try:
        return path.suffix == ".csv" or not any(holds_images(field.type) for field in pq.read_schema(path))
    except (pa.ArrowException, OSError):
        return False


def table_files(place: Path, only_test: bool = False) -> Files:
    """The tables of a data set: a file, or a folder's `train` and `test` ones; nothing if there are none."""
    if place.is_file():
        return {"train": place} if is_table(place) else {}

    def first(*names: str) -> Path | None:
        return next((p for n in names for s in SUFFIXES if is_table(p := place / f"{n}{s}")), None)

    files = {split: p for split, p in (("train", first("train")), ("test", first(*TEST_NAMES))) if p is not None}
    return files if "train" in files or only_test else {}


def read_columns(path: Path, schema: Schema) -> pa.Table:
    """The columns of a file, those of categories and classes as text. Raises UserError for what is no table."""
    try:
        if path.suffix == ".parquet":
            return read_parquet(path)
        texts = [*schema.categories, *(schema.target if schema.learns == "classes" else ())]
        how = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()), strings_can_be_null=True)
        return pyarrow.csv.read_csv(path, convert_options=how)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    """What to raise for a file that is no table. The words of who reads CSV hold whole rows, which are not shown."""
    if path.suffix != ".csv" or isinstance(error, OSError):
        return UserError(f"{path} cannot be read as a table: {one_line(error)}")
    if not path.stat().st_size:
        return UserError(f"{path} is empty: give it a line of columns' names, and a row for each sample")
    wrong: list[Any] = []
    with suppress(pa.ArrowException, OSError):  # again, by one thread, which knows the numbers of rows

        def keep(row: Any) -> str:
            wrong.append(row)
            return "error"

        options = pyarrow.csv.ParseOptions(invalid_row_handler=keep)
        pyarrow.csv.read_csv(path, pyarrow.csv.ReadOptions(use_threads=False), options)
    if not wrong:
        return UserError(f"{path} cannot be read as CSV: write it as text, a row a line, columns separated by commas")
    row, wanted, found = wrong[0].number - 1, wrong[0].expected_columns, wrong[0].actual_columns
    remedy = 'put texts with commas in quotes, "so, or so"'
    if wanted == 1 or found == 1 or any(mark in wrong[0].text for mark in MARKS):
        remedy = "separate columns by commas, and write decimals with a point"
    return UserError(f"{path}: row {row} of the data has {found} values, the line of names has {wanted}: {remedy}")
