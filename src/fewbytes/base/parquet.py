"""Refuse Parquet files that would be far larger in memory than on disk, before they fill it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fewbytes.base.unfolded import check_unfolded


def check_parquet(path: Path) -> None:
    """Raises UserError for a file whose metadata, read before its data, give too large a size in memory: by rows and
    columns, 8 bytes a value, or by the bytes of its parts. Raises pyarrow's errors for other files."""
    about = pq.read_metadata(path)
    parts = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
    check_unfolded(path, max(8 * about.num_rows * about.num_columns, parts), f"{about.num_rows:,} rows, ")


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A file's columns, or all. Raises UserError as `check_parquet` does, and for repeated texts, stored once, that
    become too large; else pyarrow's errors."""
    check_parquet(path)
    schema = pq.read_schema(path)
    words = [field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    table = pq.read_table(path, columns=None if columns is None else [*columns], read_dictionary=words)
    for i, name in enumerate(table.column_names):
        column = table.column(i)
        if pa.types.is_dictionary(column.type) and not pa.types.is_primitive(column.type.value_type):
            lengths = (pc.binary_length(part.dictionary).take(part.indices) for part in column.chunks)
            check_unfolded(path, sum(pc.sum(each).as_py() or 0 for each in lengths), f"in its column {name!r}, ")
        if name in words:
            table = table.set_column(i, schema.field(name), column.cast(schema.field(name).type))
    return table
