"""Columns that name the rows of a table rather than tell of them: an index that was written, numbers of patients."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fewbytes.data.frames import Table

INDEX = re.compile(r"Unnamed: \d+(_level_\d+)?|__index_level_\d+__|\s*")
"""What pandas calls the index of rows in files."""
LEAST = 20  # rows, from which on whole numbers that are all different tell something
WORDS = frozenset(
    (
        "id", "ids", "identifier", "idx", "index", "key", "mrn", "no", "nr", "num", "number", "row", "rowid", "rownum",
        "guid", "uid", "uuid", "pid", "patid", "patientid", "subjectid", "caseid", "sampleid", "recordid", "studyid",
        "userid", "customerid", "personid", "serial", "patient", "subject", "accession", "nummer",
    )
)  # fmt: skip
"""A column is named like an identifier if the last word of its name is one of these."""


def index_columns(table: Table) -> list[str]:
    """The columns that are only an index of the rows, as pandas writes one."""
    return [name for name in table.names if INDEX.fullmatch(name) or name in table.index]


def check_no_identifier(table: Table, features: list[str]) -> None:
    """Raises UserError for a feature that seems to name the rows: one that is called so, of whole numbers or texts that
    are all different, or one of whole numbers that rise or fall with every row."""
    if len(table) < LEAST:
        return
    for name in features:
        if why := _names_rows(table, name):
            raise table.refused(
                name,
                f"seems to number the rows ({why})",
                f"leave it out (--leave-out {name}), or name the columns to learn from, and it among them (--columns "
                f"{','.join(features) if len(features) <= 3 else features[0] + ',…'})",
                "seems to number the rows: leave it out (--leave-out), or name the columns to learn from (--columns)",
            )


def _names_rows(table: Table, name: str) -> str:
    """Why a column seems to name the rows, or nothing."""
    kind = table.kind(name)
    if kind == "texts":
        texts = table.texts(name)
        every = LEAST <= texts.known == len(texts.values)
        return "texts that are all different, under a name like an identifier's" if every and _called_so(name) else ""
    if kind != "numbers":
        return ""
    values = _whole_numbers(table, name)
    if len(values) < LEAST:
        return ""
    if (values[1:] > values[:-1]).all() or (values[1:] < values[:-1]).all():
        return "whole numbers that rise or fall with every row"
    if _called_so(name) and len(np.unique(values)) == len(values):
        return "whole numbers that are all different, under a name like an identifier's"
    return ""


def _whole_numbers(table: Table, name: str) -> NDArray[Any]:
    """The values of a column, if they are whole numbers, else none."""
    column = table.column(name)
    if pa.types.is_integer(column.type):  # exactly, as float64 rounds those above 2^53
        exact: NDArray[Any] = column.drop_null().to_numpy()
        return exact
    values = table.numbers(name)
    for part in (values[:LEAST], values):
        if ((part != np.floor(part)) & ~np.isnan(part)).any():
            return values[:0]
    return values[~np.isnan(values)]


def _called_so(name: str) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return bool(words) and (words[-1] in WORDS or words[0] in ("id", "uid") or "".join(words) in WORDS)
