"""Tables as data sets: the numeric and categorical columns of files (`table_files`) and frames as samples.

Numeric columns are standardised. Categorical columns, which are text, become one indicator, 0 or 1, per category. The
`Schema` contains the means, deviations and categories. It is read from one table's training rows, and applies to all
others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypedDict, Unpack

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import LikelyMistake, UserError, listed, suggestion
from fewbytes.base.python_words import in_python
from fewbytes.data.clients import Dataset, Values, split_off_test
from fewbytes.data.columns import FEW, is_number
from fewbytes.data.frames import Table, as_arrow, run_with
from fewbytes.data.identifiers import check_no_identifier, index_columns
from fewbytes.data.natural import column_values
from fewbytes.data.schema import COLUMNS, DOUBT, NOT_SCALED, Schema, no_column, refused
from fewbytes.data.split import Split, Targets
from fewbytes.data.table_files import Files, read_columns
from fewbytes.data.table_notes import doubts, of_file, table_note

TARGETS = ("target", "label", "labels")
"""Default names of a table's target column."""
MOST = 1000  # maximum number of categories; with more, or more than FEW in over half of the rows, it names its rows


def read_table(name: str, files: Files, schema: Schema, only_test: bool = False) -> Dataset:
    """The data set in files, read by the schema if it is complete; else the schema is read from the training rows. Of a
    single table a fixed fifth is for testing, all of it if `only_test`.

    Raises UserError, with file, column and remedy, for invalid data.
    """
    tables = {split: read_columns(path, schema) for split, path in files.items()}
    return _dataset(name, tables.get("train"), tables.get("test"), schema, only_test)


class Reading(TypedDict, total=False):
    """How `table` reads columns.

    `schema`: another data set's, for the same features, or one that states how columns are read. `leave_out`: unused
    columns; `columns`: the only features. `missing`: rows with missing values are an error ("refuse"), are left out
    ("drop"), or get the column's mean, or no category ("mean"). `missing_marks`: marks of missing values besides empty
    ones. `categories`: columns of categories, whatever they look like. `limits`: how values like `<0.5` are read.
    `decimal`, `date_order`: the notation, if ambiguous. `group`: a column that is not a feature; none of its values is
    both in training and in test.
    """

    schema: Schema | None
    leave_out: Sequence[str]
    columns: Sequence[str]
    missing: Literal["refuse", "drop", "mean"]
    missing_marks: Sequence[str]
    categories: Sequence[str]
    limits: Literal["refuse", "half", "value", "missing"]
    decimal: Literal["found", "point", "comma"]
    date_order: Literal["found", "day-first", "month-first"]
    group: str


def table(frame: Any, target: str | Sequence[str] = (), test: Any = None, **how: Unpack[Reading]) -> Dataset:
    """A data set of a pandas frame, a pyarrow table, or columns by name.

    `target`: the column to learn, or several (default: a column named as in TARGETS). Text, and whole numbers of at
    most FEW values, are classes. Several columns of 0 and 1 are independent labels; all else is numbers, learnt in
    standard deviations from the mean. `test`: as `frame`; None: a fixed fifth of the samples. `how`: see
    `Reading`. Raises UserError, with column and remedy, for invalid data and unknown options; warns of columns that may
    be in other units than those of a given data set's schema.

    >>> from fewbytes.data import table
    >>> ages, ill = [20, 35, 50, 65, 80] * 4, ["no", "no", "no", "yes", "yes"] * 4
    >>> data = table({"age": ages, "ill": ill}, target="ill")
    >>> data.classes, data.learns, data.train.shape, len(data.test)
    (('no', 'yes'), 'classes', (1,), 4)
    """
    with in_python():
        read = _asked(target, how)
        mine = Table("the table", as_arrow(frame), read)
        own = None if test is None else Table("the test table", as_arrow(test), read)
        found = _dataset("table", mine, own, read)
    for note in found.notes if read.learns is not None else ():
        if f"{DOUBT} column" in note:
            warnings.warn(note, LikelyMistake, stacklevel=2)
    return found


def _asked(target: str | Sequence[str], how: Reading) -> Schema:
    """The schema that these options state, or the complete one among them. Raises UserError."""
    for name in how:
        if name not in Reading.__annotations__:
            raise UserError(f"a table has no option {name!r}{suggestion(name, Reading.__annotations__)}")
    given: dict[str, Any] = {**how, "target": (target,) if isinstance(target, str) else tuple(target)}
    schema = given.pop("schema", None) or Schema()
    if schema.learns is not None:
        return schema
    for name in ("leave_out", "columns", "missing_marks", "categories"):
        if name in given:
            given[name] = (given[name],) if isinstance(given[name], str) else tuple(given[name])
    if "categories" in given:
        given["categories"] = dict.fromkeys(given["categories"], ())
    changed = msgspec.structs.replace(schema, **{key: value for key, value in given.items() if value})
    try:
        return msgspec.convert(msgspec.to_builtins(changed), Schema)
    except msgspec.ValidationError as error:
        raise UserError(f"the table's options: {error}") from None


def empty_table(schema: Schema, classes: Sequence[str]) -> Dataset:
    """A table without rows, for a server without one. `classes`: the names of the classes, if these are learnt."""
    x, y = torch.zeros(0, len(schema.features)), torch.zeros(0, dtype=torch.int64)
    learnt = None
    if schema.learns in ("labels", "numbers"):
        alone = schema.learns == "numbers" and len(schema.target) == 1
        values = torch.zeros(0) if alone else torch.zeros(0, len(schema.target))
        learnt = Targets(schema.learns, values)
    nothing = Split(x, y, learnt=learnt)
    names = tuple(classes) if schema.learns == "classes" else schema.target
    return Dataset("no table", nothing, nothing, names, groups_of(schema), schema)


def _dataset(name: str, train: Table | None, test: Table | None, schema: Schema, only_test: bool = False) -> Dataset:
    tables = [each for each in (train, test) if each is not None]
    for each in tables:
        if not len(each):
            raise refused(each.where, "has no row", "add some")
    first, notes, halves = tables[0], [], None
    theirs = schema.learns is not None
    if not theirs:
        schema, left_out = _meaning(first, schema)
        empty = [name for name in left_out if first.data.column(first.names[name]).null_count == len(first)]
        for names, why in (([name for name in left_out if name not in empty], "number the rows"), (empty, "are empty")):
            notes += [f"left out {listed([*map(repr, names)], COLUMNS)}, which {why}"] if names else []
    for each in tables:
        each.schema = schema
        for column in schema.numbers:
            each.kind(column)  # all text columns of a file determine its decimal separator
    classes = schema.target
    if schema.learns == "classes":
        classes = tuple(in_order(text for each in tables for text in each.categories(schema.target[0])[1]))
    kept, counts = zip(*(_kept(each, schema) for each in tables), strict=True)
    for each, rows in zip(tables, kept, strict=True):
        if not rows.any():
            what = "has no row without a missing value"
            raise refused(each.where, what, "add some")
    targets = [_targets(each, schema, classes, rows) for each, rows in zip(tables, kept, strict=True)]
    if len(tables) == 1 and not only_test:
        groups = _grouped(first, schema, kept[0]) if schema.group else None
        halves = split_off_test(Split(torch.empty(len(targets[0][0]), 0), targets[0][0]), groups)
    if not theirs:
        trained = np.flatnonzero(kept[0])
        trained = trained if halves is None or not len(halves[0]) else trained[halves[0].rows]
        schema = _scaled_by(first, schema, trained)
    splits = [
        _split(each, schema, rows, labels, values)
        for each, rows, (labels, values) in zip(tables, kept, targets, strict=True)
    ]
    notes = [
        table_note(name, each, schema, rows, count, notes)
        for each, rows, count in zip(tables, kept, counts, strict=True)
    ]
    if theirs:
        notes += [f"{of_file(name, each)}{doubt}" for each in tables for doubt in doubts(each, schema)]
    if len(splits) == 2:
        mine, own = splits
        if schema.group:
            _check_apart(tables, schema, kept)
    elif halves is None:
        mine, own = splits[0].take([]), splits[0]
    else:
        mine, own = (splits[0].take(half.rows) for half in halves if half.rows is not None)

    def values(column: str) -> tuple[Values, Values]:
        found = [column_values(each, column, rows) for each, rows in zip(tables, kept, strict=True)]
        return found[0], found[-1]

    return Dataset(name, mine, own, classes, groups_of(schema), schema, tuple(notes), columns=values)


def _grouped(table: Table, schema: Schema, rows: NDArray[np.bool_]) -> list[str]:
    """The values of the group's column in these rows. Raises UserError for a missing one."""
    codes, texts = table.categories(schema.group)
    if (nothing := rows & (codes < 0)).any():
        raise table.lacking(schema.group, nothing, "fill it in: rows are grouped by it (--group)")
    return [texts[code] for code in codes[rows]]


def _check_apart(tables: Sequence[Table], schema: Schema, kept: Sequence[NDArray[np.bool_]]) -> None:
    """Raises UserError for values of the group's column that occur both in training and in test."""
    train, test = (set(_grouped(each, schema, rows)) for each, rows in zip(tables, kept, strict=True))
    if both := train & test:
        same = f"the same values of {schema.group!r}"
        raise UserError(
            f"{tables[1].where} and {tables[0].where} have {same} ({listed(sorted(both), COLUMNS)}): keep each in one",
            public=f"training and test have {same} ({len(both)} of them): keep each in one",
        )


# Meaning of columns ---------------------------------------------------------------------------------------------------


def _meaning(table: Table, asked: Schema) -> tuple[Schema, list[str]]:
    """The meaning of this table's columns and the kind of the target, without means and deviations; and the columns
    that only number its rows."""
    target = asked.target or tuple(name for name in TARGETS if name in table.names)[:1]
    if len(set(target)) < len(target):
        raise UserError(f"--target names a column twice ({listed(target)}): give each once")
    group = (asked.group,) if asked.group else ()
    named = {
        "--target": target,
        "--leave-out or --partition column": asked.leave_out,
        "--columns": asked.columns,
        "--group": group,
    }
    named["--categories"] = tuple(asked.categories)
    for option, names in named.items():
        for name in names:
            if name not in table.names:
                raise no_column(table.where, name, [*table.names], f"name one that is there ({option})")
    if not target:
        found = listed([*table.names], COLUMNS)
        raise UserError(
            f"{table.where} has the columns {found}: give the one to predict (--target COLUMN)",
            public="a table has no column called target or label: give the one to predict (--target COLUMN)",
        )
    if both := sorted({*asked.leave_out}.intersection((*target, *asked.columns))):
        raise UserError(f"column {both[0]!r} is both used and left out: drop one of the options (--leave-out)")
    if asked.group in target:
        raise UserError(f"column {asked.group!r} is the target, and cannot group rows: give another (--group)")
    indices = [name for name in index_columns(table) if name not in (*target, *asked.leave_out, *group)]
    without = {*target, *group} if asked.columns else {*target, *group, *asked.leave_out, *indices}
    features = [name for name in asked.columns or table.names if name not in without]
    if not features:
        what = f"has no column besides the target ({listed(target)})"
        raise refused(table.where, what, "add some")
    asked = table.schema = msgspec.structs.replace(asked, target=target)
    kinds = {name: table.kind(name) for name in (*features, *target)}
    for name in (*features, *target):
        if kinds[name] == "texts" and name not in asked.categories:
            _check_no_numbers(table, name)
    if not asked.columns:
        check_no_identifier(table, features)
    learns = _learns(table, target)
    numeric = [name for name in features if kinds[name] != "texts"]
    categories = {
        name: _categories(
            table,
            name,
            f"leave it out (--leave-out {name}), group them, or have them read as text (--text {name})",
        )
        for name in features
        if kinds[name] == "texts"
    }
    cuts: list[float] = []
    if learns == "numbers":
        numeric += target
        cuts = np.unique(np.nanquantile(table.numbers(target[0]), np.arange(1, 10) / 10)).tolist()
    numbers = dict.fromkeys(numeric, NOT_SCALED)
    dates = tuple(name for name in numeric if kinds[name] == "dates")
    schema = msgspec.structs.replace(
        asked, learns=learns, numbers=numbers, categories=categories, dates=dates, cuts=tuple(cuts)
    )
    return schema, [] if asked.columns else indices


def _scaled_by(table: Table, schema: Schema, rows: NDArray[np.int64]) -> Schema:
    """The schema with the means and deviations of these rows."""
    numbers = {name: _scale(table.numbers(name)[rows]) for name in schema.numbers}
    return msgspec.structs.replace(schema, numbers=numbers)


def _learns(table: Table, target: Sequence[str]) -> str:
    """The kind of these targets. Raises UserError for several columns of text."""
    text = [name for name in target if table.kind(name) == "texts"]
    if len(target) == 1:
        if text:
            _categories(table, target[0], "name another (--target), or group them into classes")
            return "classes"
        return "classes" if few(table, target[0]) else "numbers"
    if text:
        raise table.refused(text[0], "is text", "of several columns learnt at once all are numbers")
    marks = all(np.isin(values[~np.isnan(values)], (0, 1)).all() for values in map(table.numbers, target))
    return "labels" if marks else "numbers"


def few(table: Table, name: str) -> bool:
    """Whether numbers are whole, and have so few values that they are classes."""
    values = table.numbers(name)
    different = np.unique(values[~np.isnan(values)])
    if len(different) > FEW or (different != np.floor(different)).any():
        return False
    return len(table.categories(name)[1]) <= FEW  # exact, as float64 rounds integers above 2^53


def _categories(table: Table, name: str, remedy: str) -> tuple[str, ...]:
    """The texts of a column, in order. Raises UserError, with a remedy, for texts that hardly repeat."""
    codes, texts = table.categories(name)
    known = int((codes >= 0).sum())
    if len(texts) > MOST or (len(texts) > max(known / 2, FEW)):
        what = f"has {len(texts)} different texts in {known} rows, too many for categories (does it name the rows?)"
        raise table.refused(
            name, what, remedy, "has too many different texts for categories: leave it out (--leave-out), or group them"
        )
    return tuple(in_order(texts))


def _check_no_numbers(table: Table, name: str) -> None:
    """Raises UserError for a column of texts that seem to be unreadable numbers or dates."""
    texts = table.texts(name)
    if len(texts.values) > FEW and texts.seem:
        what = f"seems to hold {texts.seem}, like {texts.values[0].as_py()!r}"
        way = "dates like 2020-01-31" if texts.seem == "dates" else "the numbers alone"
        remedy = f"write {way}, say that it holds categories (--categories), or leave it out (--leave-out)"
        raise table.refused(name, what, remedy, f"seems to hold {texts.seem}: {remedy}")


def _scale(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation, 1 for equal values."""
    known = values[~np.isnan(values)]
    if not len(known):
        return 0.0, 1.0
    return float(known.mean()), float(known.std()) or 1.0


def groups_of(schema: Schema) -> tuple[str, ...] | None:
    """The labels by which samples are split, if they are not the classes: a sample's first label; or a number's tenth
    in the first table's rows."""
    if schema.learns == "classes":
        return None
    if schema.learns == "labels":
        return (*schema.target, "none")
    cuts = [f"{cut:.4g}" for cut in schema.cuts]
    if not cuts:
        return ("all",)
    return (f"below {cuts[0]}", *(f"{a} to {b}" for a, b in pairwise(cuts)), f"from {cuts[-1]}")


# Rows as samples ------------------------------------------------------------------------------------------------------


def _targets(
    table: Table, schema: Schema, classes: Sequence[str], kept: NDArray[np.bool_]
) -> tuple[torch.Tensor, NDArray[np.float64] | None]:
    """(labels by which samples are split, values (n, targets)) of these rows; values are None for classes."""
    if schema.learns == "classes":
        codes, texts = table.categories(schema.target[0])
        number = {name: i for i, name in enumerate(classes)}
        return torch.from_numpy(np.array([number[text] for text in texts], dtype=np.int64)[codes[kept]]), None
    values = np.stack([table.numbers(name)[kept] for name in schema.target], axis=1)
    if schema.learns == "labels":
        if not np.isin(values, (0, 1)).all():
            what = f"the labels {listed(schema.target)} are 0 or 1, and some here are not"
            raise refused(f"{table.where}:", what, "correct them", "has labels that are not 0 or 1")
        y = np.where(values.any(axis=1), values.argmax(axis=1), len(schema.target))
    else:
        y = np.searchsorted(schema.cuts, values[:, 0], side="right")
    return torch.from_numpy(y.astype(np.int64)), values


def _split(
    table: Table,
    schema: Schema,
    kept: NDArray[np.bool_],
    labels: torch.Tensor,
    values: NDArray[np.float64] | None,
) -> Split:
    """These rows of a table as samples float32 (n, features)."""
    x = torch.from_numpy(_samples(table, schema, kept))
    if values is None:
        return Split(x, labels)
    if schema.learns == "numbers":
        mean, deviation = np.array([schema.numbers[name] for name in schema.target]).T
        values = (values - mean) / deviation
        values = values[:, 0] if len(schema.target) == 1 else values
    learnt = Targets("labels" if schema.learns == "labels" else "numbers", torch.from_numpy(values.astype(np.float32)))
    return Split(x, labels, learnt=learnt)


def _samples(table: Table, schema: Schema, kept: NDArray[np.bool_]) -> NDArray[np.float32]:
    """These rows: numbers in standard deviations from their means, 0 if missing, and 0 or 1 for each category, all 0 if
    missing."""
    used = [name for name in schema.numbers if name not in schema.target]
    x = np.zeros((int(kept.sum()), len(used) + sum(map(len, schema.categories.values()))), dtype=np.float32)
    for place, name in enumerate(used):
        mean, deviation = schema.numbers[name]
        values = table.numbers(name)
        values = values if kept.all() else values[kept]
        scaled = (values - mean) / deviation
        scaled[np.isnan(scaled)] = 0
        x[:, place] = scaled
    place = len(used)
    for name, known in schema.categories.items():
        codes, texts = table.categories(name)
        number = {text: place + i for i, text in enumerate(known)}
        moved = np.array([*(number.get(text, -2) for text in texts), -1], dtype=np.int64)[codes]
        if (moved == -2).any() and schema.unknown == "refuse":
            lacks = f"is a category that the server's table lacks (it has {listed(known)})"
            remedy = "correct it, or add a row with it to the server's table"
            public = f"a value that is not a category of the server's table: {remedy}"
            raise table.wrong(name, moved == -2, lacks, remedy, public)
        moved = moved[kept]
        rows = np.flatnonzero(moved >= 0)
        x[rows, moved[rows]] = 1
        place += len(known)
    return x


def used_rows(table: Table, schema: Schema) -> NDArray[np.bool_]:
    """The rows of a table that are samples, by a complete schema; the others lack a value. Raises UserError."""
    return _kept(table, schema)[0]


def _kept(table: Table, schema: Schema) -> tuple[NDArray[np.bool_], dict[str, int]]:
    """(mask of the used rows, numbers of missing values by column). Raises UserError for a missing value if the schema
    refuses it."""
    kept, counts = np.ones(len(table), dtype=bool), dict[str, int]()
    for name in dict.fromkeys((*schema.numbers, *schema.categories, *schema.target)):
        missing = table.missing(name)
        if not missing.any():
            continue
        counts[name] = int(missing.sum())
        if missing.all() and (schema.missing != "mean" or name in schema.target):
            what = f"column {name!r} is empty, all {len(table)} rows lack a value"
            remedy = f"fill it in, leave it out at all sites (--leave-out {name!r}), or {run_with('--missing mean')}"
            named = f"column {name!r}" if schema.names(name) else "a column"
            remedy = "fill it in" if name in schema.target else remedy
            raise refused(f"{table.where}:", what, remedy, f"has {named} that is empty: {remedy}" if schema.names(name)
                          else "has a column that is empty, which its own log names")  # fmt: skip
        if schema.missing == "drop":
            kept &= ~missing
        elif schema.missing == "refuse" or name in schema.target:
            also = ", or --missing mean" if name not in schema.target else ""
            remedy = f"fill it in, or {run_with('--missing drop')}{also}"
            raise table.lacking(name, missing, remedy)
    return kept, counts


def in_order(values: Iterable[str]) -> list[str]:
    """The distinct texts in order: numbers by size, then other texts."""
    return sorted(set(values), key=lambda text: (0, float(text), text) if is_number(text) else (1, 0.0, text))
