"""Delimited text: CSV and similar files, also compressed; encoding and separator are detected."""

from __future__ import annotations

import codecs
import csv
import io
import mmap
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from fewbytes.data.columns import Texts
from fewbytes.data.formats.packed import PACKED, unpacked
from fewbytes.data.schema import SEPARATORS, Schema, refused

HEAD, SAMPLED = 1 << 18, 20  # bytes, and rows, used to detect the separator
BLOCK, MOST_BLOCK = 1 << 23, (1 << 31) - 1
SOME = 100_000  # rows used to detect the decimal separator
MOST_FLOAT = 2.0**53
SHOWN = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins like that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
FIRST_LINE = re.compile(r"\ufeff?sep=(.)\r?\n", re.IGNORECASE)
"""Excel's declaration of the separator, above the line of names."""


def read(path: Path, schema: Schema, usual: str = "") -> tuple[pa.Table, tuple[str, ...], tuple[str, ...]]:
    """(columns, notes, the unambiguous decimal separator). `usual`: the usual separator of such files, used if it
    occurs in their first line. Raises UserError for a file that is no such table."""
    content = unpacked(path) if path.suffix.lower() in PACKED else None
    with path.open("rb") as file:
        head = file.read(HEAD) if content is None else content[:HEAD]
    if not head:
        raise refused(str(path), "is empty", "give it a line of columns' names, and a row for each sample")
    encoding = schema.encoding or encoding_of(head)
    check_encoding(path, encoding)
    notes = [] if encoding in ("utf-8", "utf-8-sig") else [f"text in {encoding}"]
    table, options = _in_some_encoding(path, content, head, encoding, schema, usual)
    separator = options.separator
    if options.encoding not in ("utf-8", "utf-8-sig") and not notes:
        notes = [f"text in {options.encoding}, as it is not UTF-8"]
    notes += [f"columns separated by {SHOWN.get(separator, repr(separator))}"] if separator != "," else []
    decimal = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    commas = bool(decimal) and _has_commas(table, schema)
    if again := decimal if commas else _too_long(table, schema):
        table = _read(path, content, _Options(options.encoding, separator, schema, options.skipped, again))
    return table, tuple(notes), ("point",) if decimal and not commas else ()


def check_encoding(path: Path, encoding: str) -> None:
    """Raises UserError for an unknown encoding."""
    try:
        codecs.lookup(encoding)
    except LookupError:
        what = f"cannot be read in {encoding!r}, which is no encoding"
        raise refused(str(path), what, "give one like utf-8, windows-1252 or utf-16 (--encoding)") from None


def encoding_of(head: bytes) -> str:
    """The encoding suggested by the first bytes."""
    for mark, name in BOMS:
        if head.startswith(mark):
            return name
    if len(head) > 3 and head[1:4:2] == b"\0\0":
        return "utf-16-le"
    return "utf-16-be" if len(head) > 3 and head[0:3:2] == b"\0\0" else "utf-8"


def _in_some_encoding(
    path: Path, content: bytes | None, head: bytes, encoding: str, schema: Schema, usual: str
) -> tuple[pa.Table, _Options]:
    """(columns, how they were read): Windows' Western encoding if it is not UTF-8 and no encoding is given."""
    tried = [encoding] if schema.encoding or encoding != "utf-8" else ["utf-8", "windows-1252", "latin-1"]
    for each in tried:
        text = head.decode(each, "replace")
        declared = FIRST_LINE.match(text)
        usual = usual if usual in text.partition("\n")[0] else ""
        found = schema.separator or (declared[1] if declared else "") or usual or _separator(text)
        options = _Options(each, found, schema, 1 if declared else 0)
        with suppress(UnicodeDecodeError):
            try:
                table = _read(path, content, options)
                names = table.column_names  # decodes them
                binary = any(pa.types.is_binary(field.type) for field in table.schema)
                if names and not binary:
                    return table, options
            except pa.ArrowException as error:
                if "UTF8" not in str(error) and "codec" not in str(error):
                    _refuse(path, content, options, text.startswith("#"))
    what = f"is not text in {tried[0]}"
    raise refused(str(path), what, "name its encoding (--encoding)")


class _Options:
    """pyarrow's options for reading a file whose first lines are skipped."""

    def __init__(
        self, encoding: str, separator: str, schema: Schema, skipped: int, more: list[str] | None = None
    ) -> None:
        self.encoding, self.separator, self.skipped = encoding, separator, skipped
        texts = [*schema.categories, *(schema.target if schema.learns == "classes" else ()), *(more or ())]
        self.convert = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()),
            null_values=["", *schema.missing_marks],
        )

    def reading(self, **more: Any) -> pyarrow.csv.ReadOptions:
        return pyarrow.csv.ReadOptions(
            encoding=self.encoding.replace("utf-8-sig", "utf8"), skip_rows=self.skipped, **more
        )


def _read(path: Path, content: bytes | None, options: _Options) -> pa.Table:
    """Read the columns; raises pyarrow's errors."""
    size = path.stat().st_size if content is None else len(content)
    for block in dict.fromkeys((BLOCK, min(MOST_BLOCK, max(BLOCK, 4 * size)))):
        read = options.reading(block_size=block)
        parse = pyarrow.csv.ParseOptions(delimiter=options.separator, newlines_in_values=_has_quotes(path, content))
        source: Any = path if content is None else pa.BufferReader(content)
        try:
            return pyarrow.csv.read_csv(source, read, parse, options.convert)
        except pa.ArrowInvalid as error:
            if "straddl" not in str(error):
                raise
    raise pa.ArrowInvalid("a row is longer than can be read")


def _has_quotes(path: Path, content: bytes | None) -> bool:
    """Whether values may contain line breaks, which makes reading slower."""
    if content is not None:
        return b'"' in content
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        return whole.find(b'"') >= 0


def _separator(head: str) -> str:
    """The separator of a text's columns, by its first rows: the one that gives all rows the same number of columns, and
    the most, or else gives the first row the most."""
    lines = head.splitlines()[: 1 if head.count("\n") < 2 else None]
    best, most = ",", (False, 1)
    for mark in SEPARATORS:
        rows = []
        with suppress(csv.Error):
            reader = csv.reader(io.StringIO("\n".join(lines), newline=""), delimiter=mark)
            rows = [row for row in islice(reader, SAMPLED) if row]
        if 2 < len(rows) < SAMPLED and len(head) >= HEAD // 4:
            rows.pop()  # it may be truncated
        if rows and len(rows[0]) > 1:
            found = (len({len(row) for row in rows}) == 1, len(rows[0]))
            best, most = (mark, found) if found > most else (best, most)
    return best


def _has_commas(table: pa.Table, schema: Schema) -> bool:
    """Whether a column has numbers with an unambiguous decimal comma."""
    for field, column in zip(table.schema, table.columns, strict=True):
        if pa.types.is_string(field.type):
            texts = Texts.of(column.slice(0, SOME), schema)
            if texts.written == "numbers" and texts.surely == {"comma"}:
                return True
    return False


def _too_long(table: pa.Table, schema: Schema) -> list[str]:
    """The columns of targets and of groups with numbers too large for float64 to distinguish."""
    names = [name for name in (*schema.target, schema.group) if table.column_names.count(name) == 1]
    floats = [name for name in names if pa.types.is_floating(table.schema.field(name).type)]
    return [name for name in floats if (pc.max(pc.abs(table.column(name))).as_py() or 0) > MOST_FLOAT]


def _refuse(path: Path, content: bytes | None, options: _Options, remark: bool) -> NoReturn:
    """Raise the error for text that is not a table; its first line may be a `remark`. pyarrow's messages contain whole
    rows, so they are not shown."""
    wrong: list[Any] = []
    with suppress(pa.ArrowException, OSError, UnicodeDecodeError):  # again, in one thread, which counts rows

        def keep(row: Any) -> str:
            wrong.append(row)
            return "error"

        parse = pyarrow.csv.ParseOptions(
            delimiter=options.separator, invalid_row_handler=keep, newlines_in_values=_has_quotes(path, content)
        )
        read = options.reading(use_threads=False)
        pyarrow.csv.read_csv(path if content is None else pa.BufferReader(content), read, parse)
    if not wrong:
        what, remedy = "cannot be read as CSV", "write it as text, a row a line, columns separated by commas"
        raise refused(str(path), what, remedy)
    row, wanted, found = wrong[0].number - 1, wrong[0].expected_columns, wrong[0].actual_columns
    remedy = 'put texts with commas in quotes, "so, or so"'
    if remark:
        remedy = "remove what stands before the line of names"
    elif wanted == 1 or found == 1 or any(mark in wrong[0].text for mark in SEPARATORS if mark != options.separator):
        remedy = "name what separates its columns (--separator), and put texts that hold it in quotes"
    what = f"row {row} of the data has {found} values, the line of names has {wanted}"
    raise refused(f"{path}:", what, remedy, f"has a row with more or fewer values than the line of names: {remedy}")
