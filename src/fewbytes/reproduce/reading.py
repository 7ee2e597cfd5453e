"""Reads a table's file, tables/<system>/<table>.toml: rows, columns, and rules for the cells' runs and figures.

To add a table, start from a copy of such a file. `rows` and `columns` are names without commas, as they are selected by
comma-separated lists. A rule applies to cells whose row and column match its `rows` and `columns` (patterns such as
"CIFAR-10 *"), whose method is one of its `methods`, at its `scale`; a missing condition matches all. It sets a run's
settings, as in config.toml, with the method's in `parameters`, and the cell's `figure`: a kind of `figures`, named by
`show`, with its fields. Later rules override earlier ones; `parameters` and `figure` are merged, but a `figure` with
`show` replaces earlier ones. `like` names a table in the same folder whose rules come first. `[[printed]]` holds the
paper's figures, a line per row, in the order of the columns at the paper's scale. `[[claims]]` are the paper's claims
(`grid.Claim`). `unit` and `seeds` may differ by scale; rows, columns and notes of only one scale are
`{ paper = "…" }`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from fewbytes.base.errors import UserError, suggestion
from fewbytes.experiments.groups import KEYS
from fewbytes.methods import method_class
from fewbytes.reproduce.figures import make_figure
from fewbytes.reproduce.grid import Cell, Claim, Printed, Scale, Table, printed

T = TypeVar("T")
NEEDED = ("method", "dataset", "model")  # settings of every cell


class ByScale(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    """A value that differs by scale."""

    small: T
    paper: T


class Lines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The paper's figures, row by row, for the matching columns."""

    rows: dict[str, str]
    columns: tuple[str, ...] = ("*",)
    scale: Scale | None = None


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a table's file."""

    title: str
    unit: str | ByScale[str]
    seeds: list[int] | ByScale[list[int]]
    rows: list[str | dict[Scale, str]]
    columns: list[str | dict[Scale, str]]
    rules: list[dict[str, Any]]
    notes: list[str | dict[Scale, str]] = []
    printed: list[Lines] = []
    claims: list[Claim] = []
    like: str | None = None


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings and figure for the matching cells."""

    settings: dict[str, Any]
    rows: tuple[str, ...] = ("*",)
    columns: tuple[str, ...] = ("*",)
    methods: tuple[str, ...] | None = None
    scale: Scale | None = None
    parameters: dict[str, Any] = {}
    figure: dict[str, Any] = {}


def read_table(path: Path, scale: Scale) -> Table:
    """The table of a file at a scale. Raises UserError, in one line, for an invalid file."""
    with _naming(path):
        file = _read(path)
        rules = _rules(file)
        rows, columns = _either(file.rows), _either(file.columns)
        for number, rule in enumerate(rules, 1):
            _check_names(f"rule {number}", rule.rows, rows)
            _check_names(f"rule {number}", rule.columns, columns)
        for claim in file.claims:
            _check_names("claims", (*claim.above, *claim.below), rows)
            _check_names("claims", claim.columns, columns)
        if file.like is not None:
            rules = [*_first_rules(path.with_stem(file.like)), *rules]
        theirs = _printed(file, scale)
        cells = [
            _cell(rules, row, column, scale, theirs.get((row, column)))
            for row in _here(file.rows, scale)
            for column in _here(file.columns, scale)
        ]
        seeds: list[int] = _of(file.seeds, scale)
        claims = [claim for claim in file.claims if claim.scale in (None, scale)]
        return Table(file.title, _of(file.unit, scale), cells, _here(file.notes, scale), seeds, claims)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Convert errors to a UserError of one line that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"the table {path} cannot be read: {error.strerror}") from None
    except (UserError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"the table {path}: {' '.join(str(error).split())}") from None


def _read(path: Path) -> File:
    return msgspec.toml.decode(path.read_bytes(), type=File)


def _first_rules(path: Path) -> list[Rule]:
    """The rules of the table that `like` names."""
    with _naming(path):
        file = _read(path)
        if file.like is not None:
            raise UserError(f"it is itself like {file.like}: name that table")
        return _rules(file)


def _rules(file: File) -> list[Rule]:
    own = [name for name in Rule.__struct_fields__ if name != "settings"]
    rules = []
    for number, fields in enumerate(file.rules, 1):
        settings = {key: value for key, value in fields.items() if key not in own}
        for key in settings:
            if key not in KEYS:
                raise UserError(f"rule {number}: unknown key {key!r}{suggestion(key, [*own, *KEYS])}")
        try:
            about = {key: value for key, value in fields.items() if key in own}
            rule = msgspec.convert({**about, "settings": settings}, Rule)
        except msgspec.ValidationError as error:
            raise UserError(f"rule {number}: {error}") from None
        for method in (*(rule.methods or ()), *([str(settings["method"])] if "method" in settings else [])):
            try:
                method_class(method)
            except UserError as error:
                raise UserError(f"rule {number}: {error}") from None
        rules.append(rule)
    return rules


def _cell(rules: Sequence[Rule], row: str, column: str, scale: Scale, theirs: Printed | None) -> Cell:
    fitting = [
        rule for rule in rules if rule.scale in (None, scale) and _fits(row, rule.rows) and _fits(column, rule.columns)
    ]
    methods = [rule.settings["method"] for rule in fitting if rule.methods is None and "method" in rule.settings]
    settings: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    figure: dict[str, Any] = {}
    for rule in fitting:
        if rule.methods is None or (methods and methods[-1] in rule.methods):
            settings |= rule.settings
            parameters |= rule.parameters
            figure = rule.figure if "show" in rule.figure else figure | rule.figure
    for key in NEEDED:
        if key not in settings:
            raise UserError(f"no rule sets the {key} of {row}, {column}")
    try:
        return Cell(row, column, {**settings, "parameters": parameters}, make_figure(figure), theirs)
    except msgspec.ValidationError as error:
        raise UserError(f"the figure of {row}, {column}: {error}") from None


def _printed(file: File, scale: Scale) -> dict[tuple[str, str], Printed | None]:
    """The paper's figures by row and column."""
    found = {}
    for lines in file.printed:
        columns = [column for column in _here(file.columns, "paper") if _fits(column, lines.columns)]
        _check_names("printed", lines.columns, columns)
        _check_names("printed", lines.rows, _either(file.rows))
        for row, text in lines.rows.items():
            try:
                figures = printed(text)
            except ValueError as error:
                raise UserError(f"printed, {row}: {error}") from None
            if len(figures) != len(columns):
                raise UserError(f"printed, {row}: {len(figures)} figures for {len(columns)} columns")
            if lines.scale in (None, scale):
                found.update({(row, column): figure for column, figure in zip(columns, figures, strict=True)})
    return found


def _check_names(where: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"{where}: no row or column is {pattern!r}{suggestion(pattern, names)}")


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _of(value: T | ByScale[T], scale: Scale) -> T:
    return (value.small if scale == "small" else value.paper) if isinstance(value, ByScale) else value


def _either(texts: Sequence[str | dict[Scale, str]]) -> list[str]:
    """The texts of both scales."""
    return [*_here(texts, "small"), *_here(texts, "paper")]


def _here(texts: Iterable[str | dict[Scale, str]], scale: Scale) -> list[str]:
    """The texts of one scale."""
    each = (text if isinstance(text, str) else text.get(scale) for text in texts)
    return [text for text in each if text is not None]
