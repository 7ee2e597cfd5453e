"""Sheets of Excel and OpenDocument, by python-calamine (`pip install 'fewbytes[tables]'`)."""

from __future__ import annotations

import datetime as dt
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from fewbytes.base.errors import suggestion
from fewbytes.base.extras import is_installed
from fewbytes.base.unfolded import check_unfolded
from fewbytes.data.schema import Schema, refused


def read(path: Path, schema: Schema) -> tuple[pa.Table, tuple[str, ...], tuple[str, ...]]:
    """The columns of the sheet that the schema names, or of the first; the first row has the names. Raises UserError
    without the extra, for a file that is not a sheet, and for a missing sheet."""
    if not is_installed("python_calamine"):
        what, remedy = "is read by python-calamine", "pip install 'fewbytes[tables]'"
        raise refused(str(path), what, remedy)
    import python_calamine

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_unfolded(path, sum(each.file_size for each in archive.infolist()))
    try:
        book = python_calamine.CalamineWorkbook.from_path(path)
        names = book.sheet_names
        if schema.sheet and schema.sheet not in names:
            what = f"has no sheet {schema.sheet!r}"
            shown = f"{what}{suggestion(schema.sheet, names)}; it has {', '.join(names)}"
            raise refused(str(path), shown, "name one that is there (--sheet)", f"{what} (--sheet)")
        name = schema.sheet or names[0]
        rows = book.get_sheet_by_name(name).to_python()
    except (python_calamine.CalamineError, IndexError, OSError):
        what = "cannot be read as a sheet"
        raise refused(str(path), what, "save it again as .xlsx") from None
    if not rows:
        raise refused(
            str(path), f"has nothing in its sheet {name!r}", "name another (--sheet)", "has an empty sheet (--sheet)"
        )
    header = [str(cell).strip() if cell != "" else "" for cell in rows[0]]
    used = [i for i, column in enumerate(header) if column or any(row[i] != "" for row in rows[1:])]
    columns = [_column([row[i] for row in rows[1:]]) for i in used]
    notes = (f"sheet {name!r} of {len(names)}",) if len(names) > 1 else ()
    return pa.Table.from_arrays(columns, [header[i] for i in used]), notes, ()


def _column(cells: list[Any]) -> pa.Array:
    """Cells as numbers, booleans or times if all are, else as text; empty ones are missing."""
    values = [None if cell == "" else cell for cell in cells]
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds <= {dt.date, dt.datetime}:
        moments = [value if value is None or isinstance(value, dt.datetime) else _midnight(value) for value in values]
        return pa.array(moments, pa.timestamp("us"))
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _midnight(day: dt.date) -> dt.datetime:
    return dt.datetime(day.year, day.month, day.day)


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
