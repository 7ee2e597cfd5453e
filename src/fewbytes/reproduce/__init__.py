"""Reproductions of papers' tables, cell by cell, with the papers' figures beside: `fewbytes reproduce`."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fewbytes.base.errors import FewbytesError, UserError, one_line, suggestion
from fewbytes.base.files import replacing
from fewbytes.core.devices import check_device
from fewbytes.experiments.groups import Reproducing
from fewbytes.experiments.settings import make_method
from fewbytes.methods import method_class
from fewbytes.reproduce.found import find
from fewbytes.reproduce.grid import Cell, Scale, Table
from fewbytes.reproduce.overview import overview
from fewbytes.reproduce.reading import read_table
from fewbytes.reproduce.reproduction import Reproduction
from fewbytes.reproduce.running import data_of, folder_of, run_cells, unavailable

_FOLDER = Path(__file__).parent / "tables"
TABLES: dict[str, Path] = {
    f"{path.parent.name}/{path.stem}": path
    for path in sorted(
        _FOLDER.glob("*/*.toml"), key=lambda path: (path.parent, path.stem.partition("-")[0], len(path.stem), path.stem)
    )
}
"""The files of tables by name."""
NOT_HERE: dict[str, str] = msgspec.toml.decode((_FOLDER / "not-here.toml").read_bytes(), type=dict[str, str])
"""Tables and figures of papers that are not reproduced, with reasons."""

__all__ = [
    "NOT_HERE", "TABLES", "Reproduction", "Scale", "Table", "read_table", "reproduce", "reproduce_all", "scale_of",
]  # fmt: skip


def reproduce(
    name: str,
    scale: str = "small",
    out: Path = Path("runs/reproduce"),
    *,
    tell: Callable[[str], None] = lambda text: None,
    **what: Any,
) -> Reproduction:
    """Run the unfinished cells of a table in TABLES, or of some rows, columns and seeds, and write the table.

    `what`: fields of `fewbytes.experiments.groups.Reproducing`. Rows and columns are names or patterns: CIFAR-10*
    matches a prefix.

    `out`/<system>-<scale>/ holds the runs, and <table>.md, .json and .html with all runs so far, written after every
    run, even after an error: the same call resumes. `until`: pause each run after that round. `parameters`:
    METHOD.KEY for one method's fields, KEY for all that have it; such runs and their table have other names. Cells with
    unavailable data, and damaged runs that were not requested, are left out, and the table lists them. `workers` and
    `device` are those of every run; `tell` is called with lines of progress. Raises UserError for unknown names and
    damaged runs, and errors of `fewbytes.run`.
    """
    if name not in TABLES:
        raise UserError(f"unknown table {name!r}{suggestion(name, TABLES)}; there are {', '.join(TABLES)}")
    table = read_table(TABLES[name], scale_of(scale))
    how = Reproducing.of(what)
    if how.until is not None and how.until < 1:
        raise UserError(f"until is a round, 1 or later, not {how.until}")
    check_device(how.device)
    chosen_rows, chosen_columns = _chosen("row", how.rows, table.rows), _chosen("column", how.columns, table.columns)
    system, _, short = name.partition("/")
    folder = out / f"{system}-{scale}"
    _check_place(folder)
    numbers, given = _seeds(table.seeds if how.seeds is None else how.seeds), how.parameters
    cells = _with(table.cells, given)
    chosen = [cell for cell in cells if cell.row in chosen_rows and cell.column in chosen_columns]
    missing = unavailable(chosen)
    lacking = {why for cell in chosen for data in data_of(cell) if (why := missing.get(data))}
    chosen = [cell for cell in chosen if not missing.keys() & data_of(cell)]
    if not chosen:
        raise UserError("; ".join(sorted(lacking)) or "no cell of the table has these rows and columns")
    for why in sorted(lacking):
        tell(f"left out: {why}")
    tried = set[str]().union(*map(data_of, chosen))  # cells with other data only have earlier runs
    begun = {cell.run: [s for s in table.seeds if folder_of(cell, s, folder).exists()] for cell in cells}
    there = [cell for cell in cells if data_of(cell) <= tried or begun[cell.run]]
    table = dataclasses.replace(table, cells=[c for c in cells if c in there or not missing.keys() & data_of(c)])
    used = sorted({*numbers, *(s for cell in there for s in begun[cell.run])})
    deviation = "; ± is the standard deviation over seeds (n - 1)" if len(used) > 1 else ""
    notes = [
        *table.notes,
        f"Scale: {scale}; seed{'s' if len(used) > 1 else ''} {', '.join(map(str, used))}{deviation}.",
        *([f"Left out, as these are not available here: {', '.join(missing)}."] if missing else []),
        *([f"Given: {', '.join(f'{key}={value}' for key, value in given.items())}."] if given else []),
    ]
    suffix = "".join(f"-{key.replace('.', '-')}-{value}" for key, value in given.items())
    path = folder / f"{short}{re.sub('[^A-Za-z0-9-]', '_', suffix)}"

    def write() -> Reproduction:
        found, damaged = find(there, used, len(table.seeds), folder)
        left_out = [f"Left out: {why}." for why in damaged]
        reproduction = Reproduction(table, found, len(used), [*notes, *left_out], path, chosen_rows, chosen_columns)
        reproduction.write()
        return reproduction

    try:
        run_cells(chosen, numbers, folder, how, tell=tell, ended=write)
    finally:
        reproduction = write()
    for note in reproduction.notes[len(notes) :]:
        tell(note)
    return reproduction


def reproduce_all(
    scale: str = "small",
    out: Path = Path("runs/reproduce"),
    *,
    tell: Callable[[str], None] = lambda text: None,
    **what: Any,
) -> tuple[Path, list[str]]:
    """Run the unfinished cells of every table, and write `out`/<scale>.md after each: the papers' claims with verdicts,
    and all tables. Returns its path, and the errors of failed tables; the others still run.

    `what`: as in `reproduce`, without rows, columns and parameters, which belong to one table. Raises UserError for
    those.
    """
    how = Reproducing.of(what)
    if how.rows or how.columns or how.parameters:
        raise UserError("rows, columns and parameters belong to one table: name it, or leave them out")
    known, path = scale_of(scale), out / f"{scale}.md"
    written, failed = dict[str, Reproduction](), dict[str, FewbytesError]()
    for number, name in enumerate(TABLES, 1):
        tell(f"table {number} of {len(TABLES)}: {name}")
        try:
            written[name] = reproduce(name, scale, out, tell=tell, **what)
        except FewbytesError as error:
            failed[name] = error
            tell(f"left out: {name}: {one_line(error)}")
        not_written = {name: str(error).partition(":")[0] for name, error in failed.items()}
        out.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(overview(written, known, not_written | NOT_HERE).encode())
    return path, [f"{name}: {one_line(error)}" for name, error in failed.items()]


def scale_of(name: str) -> Scale:
    """The scale of that name. Raises UserError."""
    if name not in typing.get_args(Scale):
        raise UserError(f"scale is small or paper, not {name!r}")
    return typing.cast(Scale, name)


def _check_place(folder: Path) -> None:
    """Raises UserError if runs cannot be stored there."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"no runs can be stored in {folder}: {there} is not a folder, or not writable")


def _chosen(what: str, asked: Sequence[str] | None, there: Sequence[str]) -> Sequence[str]:
    for name in asked or ():
        if not fnmatch.filter(there, name):
            raise UserError(f"the table has no {what} {name!r}{suggestion(name, there)}; it has {', '.join(there)}")
    return [each for each in there if asked is None or any(fnmatch.fnmatchcase(each, name) for name in asked)]


def _seeds(asked: Sequence[str | int]) -> list[int]:
    if not all(str(seed).isdecimal() for seed in asked):
        raise UserError(f"seeds are numbers, like 1,2,3, not {', '.join(map(str, asked))}")
    return [int(seed) for seed in asked]


def _with(cells: Sequence[Cell], given: Mapping[str, str]) -> list[Cell]:
    """The cells with the given parameters; values that a cell has already change nothing. Raises UserError."""
    methods = {cell.settings["method"] for cell in cells}
    for key in given:
        name, dot, field = key.rpartition(".")
        if dot and name not in methods:
            raise UserError(f"--set {key}: the table has no method {name!r}{suggestion(name, methods)}")
        fields = {field for m in ([name] if dot else methods) for field in method_class(m).defaults()}
        if field not in fields:
            raise UserError(f"--set {key}: no method of the table has a parameter {field!r}{suggestion(field, fields)}")
    changed = []
    for cell in cells:
        method, own = cell.settings["method"], dict(cell.settings["parameters"])
        named = {key.removeprefix(f"{method}."): value for key, value in given.items()}
        fields = set(method_class(method).defaults())
        plain = make_method(method, own).parameters
        other = make_method(method, own | {k: v for k, v in named.items() if k in fields}).parameters
        own |= {k: other[k] for k in named.keys() & fields if other[k] != plain[k]}
        changed.append(dataclasses.replace(cell, settings={**cell.settings, "parameters": own}))
    return changed
