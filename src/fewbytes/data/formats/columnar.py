"""Arrow's files: Parquet, Feather and lines of JSON."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.json

from fewbytes.base.parquet import read_parquet as read_parquet_file
from fewbytes.base.unfolded import check_unfolded
from fewbytes.data.formats.packed import PACKED, unpacked
from fewbytes.data.schema import Schema, refused

MOST_BLOCK = (1 << 31) - 1


def read_parquet(path: Path, schema: Schema) -> tuple[pa.Table, tuple[str, ...], tuple[str, ...]]:
    """The columns. Raises UserError for a file that expands too much, and pyarrow's errors."""
    return read_parquet_file(path), (), ()


def read_feather(path: Path, schema: Schema) -> tuple[pa.Table, tuple[str, ...], tuple[str, ...]]:
    """The columns. Raises UserError for a file that expands too much, and pyarrow's errors."""
    with pa.memory_map(str(path)) as file:
        reader, batches, size = pa.ipc.open_file(file), [], 0
        for i in range(reader.num_record_batches):
            batches.append(reader.get_batch(i))
            size += batches[-1].nbytes
            check_unfolded(path, size)
        return pa.Table.from_batches(batches, reader.schema), (), ()


def read_json(path: Path, schema: Schema) -> tuple[pa.Table, tuple[str, ...], tuple[str, ...]]:
    """The columns of a file with one object per line. Raises UserError for anything else."""
    content = unpacked(path) if path.suffix.lower() in PACKED else path.read_bytes()
    content = content.removeprefix(b"\xef\xbb\xbf")
    options = pyarrow.json.ReadOptions(block_size=min(MOST_BLOCK, max(1 << 20, len(content))))
    try:
        return pyarrow.json.read_json(pa.BufferReader(content), options), (), ()
    except pa.ArrowException:  # its message may contain values
        what, remedy = "cannot be read as lines of JSON", "write an object a line, with the same keys"
        raise refused(str(path), what, remedy) from None
