"""Columns that identify the rows of a table instead of describing them: an index, patient IDs."""

from __future__ import annotations

import re
import shlex
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fewbytes.data.frames import Table

INDEX = re.compile(r"Unnamed: \d+(\.\d+)*(_level_\d+)?|__index_level_\d+__|\s*")
"""pandas' names for the index of rows in files."""
LEAST = 20  # minimum number of rows for which different whole numbers are suspicious
REPEATED = 10  # maximum average number of rows per value of an identifier
WORDS = frozenset(
    (
        "id", "ids", "identifier", "mrn", "guid", "uid", "uuid", "pid", "patid", "patientid", "subjectid", "caseid",
        "sampleid", "recordid", "studyid", "userid", "customerid", "personid", "patient", "subject", "accession", "ssn",
    )
)  # fmt: skip
"""A column is named like an identifier if the last word of its name is one of these."""
PEOPLE = frozenset(("patient", "patients", "subject", "participant", "person"))
"""A column is named like an identifier of people, however many rows each has, if its name contains one of these:
learning from it means recognising people."""
NUMBERS = frozenset(
    (
        "idx", "index", "key", "matricule", "nbr", "no", "nr", "num", "sno",
        "number", "row", "rows", "rowid", "rownum", "rowname", "rownames",
        "serial", "nummer", "aktenzeichen",
    )
)  # fmt: skip
"""A column is named like a row number if its name is one of these, or R's or pandas's name for it."""
ROWS = re.compile(r"level_\d+|\w+(nummer|number)", re.IGNORECASE)


def index_columns(table: Table) -> list[str]:
    """The columns that are only an index of the rows, as written by pandas."""
    return [name for name in table.names if INDEX.fullmatch(name) or name in table.index]


def check_no_identifier(table: Table, features: list[str]) -> None:
    """Raises UserError for a feature that seems to identify rows: named so, with whole numbers or texts that are all
    different or repeat only a few times; or whole numbers that rise or fall with every row, or that are all those of a
    range."""
    if len(table) < LEAST:
        return
    for name in features:
        if why := names_rows(table, name):
            shown = shlex.quote(name)
            others = shlex.quote(",".join(features) if len(features) <= 3 else features[0] + ",…")
            own = _called(name) in ("identifiers", "people's numbers") and not table.schema.group
            kept = "" if not own else f", keep rows of one value together (--group {shown})"
            raise table.refused(
                name,
                f"seems to number the rows ({why})",
                f"leave it out (--leave-out {shown}){kept}, or list the columns to learn from, including it "
                f"(--columns {others})",
                "seems to number the rows: leave it out (--leave-out), or list the columns to learn from (--columns)",
            )


def names_rows(table: Table, name: str) -> str:
    """The reason why a column seems to identify rows, or nothing."""
    kind, called = table.kind(name), _called(name)
    if kind == "texts":
        if not called or table.stored(name) not in ("texts", "categories"):
            return ""
        texts = table.texts(name)
        return _identifying("texts", len(texts.values), texts.known, called)
    if kind != "numbers":
        return ""
    values = _whole_numbers(table, name)
    if len(values) < LEAST:
        return ""
    if (values[1:] > values[:-1]).all() or (values[1:] < values[:-1]).all():
        return "whole numbers that rise or fall with every row"
    consecutive = int(values.max()) - int(values.min()) + 1 == len(values)
    if consecutive and len(np.unique(values)) == len(values):
        return "each whole number of a range once"
    if called and values.dtype.kind == "f" and np.abs(values).max() > 2**53:
        return "whole numbers of more digits than can be distinguished"
    return _identifying("whole numbers", len(np.unique(values)), len(values), called) if called else ""


def _identifying(what: str, different: int, rows: int, called: str) -> str:
    """The reason why values of a column that is named like an identifier seem to identify rows, or nothing."""
    if different < LEAST:
        return ""
    if different == rows:
        return f"{what} that are all different, under a name such as {called} have"
    few = called == "people's numbers" or (called == "identifiers" and different * REPEATED >= rows)
    return f"{different} {what} in {rows} rows, under a name such as {called} have" if few else ""


def _whole_numbers(table: Table, name: str) -> NDArray[Any]:
    """The values of a column if they are whole numbers, else empty."""
    column = table.column(name)
    if pa.types.is_integer(column.type):  # exact, as float64 rounds integers above 2^53
        exact: NDArray[Any] = column.drop_null().to_numpy()
        return exact
    values = table.numbers(name)
    for part in (values[:LEAST], values):
        if ((part != np.floor(part)) & ~np.isnan(part)).any():
            return values[:0]
    return values[~np.isnan(values)]


def _called(name: str) -> str:
    """What the column's name suggests: "people's numbers", "identifiers", "numbers of rows", or nothing."""
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if PEOPLE.intersection(words) and (len(words) == 1 or words[-1] in WORDS | NUMBERS):
        return "people's numbers"
    for known, what in ((WORDS, "identifiers"), (NUMBERS, "numbers of rows")):
        if words and (words[-1] in known or "".join(words) in known or (known is WORDS and words[0] in ("id", "uid"))):
            return what
    return "numbers of rows" if ROWS.fullmatch(name) else ""
