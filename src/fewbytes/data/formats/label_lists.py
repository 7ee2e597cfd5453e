"""Folders of images with a table of their labels, as ISIC and CheXpert publish them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed
from fewbytes.data.clients import Dataset, Values, split_off_test
from fewbytes.data.columns import FEW, is_number
from fewbytes.data.decoding import decoded
from fewbytes.data.folders import TEST_NAMES, check_inside, is_stray, splits_among
from fewbytes.data.formats.named_images import Images, as_texts, images_by_name, naming_column
from fewbytes.data.frames import Table
from fewbytes.data.identifiers import index_columns
from fewbytes.data.natural import column_values
from fewbytes.data.schema import Schema, no_column, refused
from fewbytes.data.sources import Encoded, chunks
from fewbytes.data.split import Split, Targets
from fewbytes.data.table_files import is_table, read_columns

UNCERTAIN = -1.0  # CheXpert's mark
MARKS = {"0": 0.0, "false": 0.0, "1": 1.0, "true": 1.0, "-1": UNCERTAIN}
PATIENT = re.compile(r"(?:patient|subject|person|case)[ _-]?\d+", re.IGNORECASE)
"""The pattern of names of folders with the pictures of one patient."""
Uncertain = Literal["refuse", "zero", "one", "drop"]


@dataclass(frozen=True)
class LabelList:
    """A table whose column `naming` names images: `found` is each row's image, if it exists. `learnt`: the columns with
    labels; none if the table does not determine them."""

    path: Path
    table: Table
    naming: str
    found: list[Path | None]
    learnt: tuple[str, ...]


def label_lists(folder: Path, schema: Schema | None = None) -> dict[str, LabelList]:
    """The tables at the top of a folder that name images below it, by split: `train` and possibly `test`; empty without
    any. Raises UserError if they are ambiguous, and as `read_columns`."""
    how = msgspec.structs.replace(schema or Schema(), learns=None, numbers={}, categories={})
    paths = [path for path in sorted(folder.glob("*")) if not is_stray(path) and is_table(path)]
    if not paths or not (images := images_by_name(folder)):
        return {}
    lists = [each for path in paths if (each := _label_list(path, how, images))]
    lists = [each for each in lists if each.learnt] or lists
    tests = [each for each in lists if _words(each.path) & {*TEST_NAMES, "testing"}]
    trains = [each for each in lists if each not in tests and "submission" not in _words(each.path)]
    trains = [each for each in trains if _words(each.path) & {"train", "training"}] or trains
    if len(trains) > 1 and trains[0].learnt:
        names = listed([each.path.name for each in trains])
        raise UserError(
            f"{folder} has several tables that name its images ({names}): keep one, or call one train and one test",
            public="several tables name the images: keep one, or call one train and one test",
        )
    tests = [each for each in tests if trains and each.learnt == trains[0].learnt]
    return {"train": trains[0], **({"test": tests[0]} if tests else {})} if trains else {}


def classes_by_folders(lists: Mapping[str, LabelList]) -> bool:
    """Whether the images' folders are their classes although tables name the images: a column of each table repeats the
    folders' names. Raises UserError if no column does, but folders may still be the classes, or if the target is
    ambiguous."""
    first = lists["train"]
    folders = _folders(first)
    if first.learnt and len({*folders}) < 2:
        return False
    if all(map(_names_folders, lists.values())):
        return True
    raise _unclear(first, folders)


def _names_folders(each: LabelList) -> bool:
    """Whether a column has, for each image, the name of a folder that contains it."""
    folders = _folders(each)
    for place in each.table.names.values():
        with suppress(pa.ArrowException):  # for values that are not texts
            texts = [text.strip().casefold() for text in as_texts(each.table.data.column(place))]
            rows = zip(texts, folders, each.found, strict=True)
            if all(text in parts for text, parts, path in rows if path):
                return True
    return False


def _folders(each: LabelList) -> list[tuple[str, ...]]:
    """The folders of each row's image, in lower case, except `images`, names of splits, and patients' folders."""
    within = [path.relative_to(each.path.parent).parts[:-1] if path else () for path in each.found]
    among = _splits_by_level(within)
    return [
        ()
        if any(map(PATIENT.fullmatch, parts))
        else tuple(n.casefold() for k, n in enumerate(parts) if n not in among[k] and n.lower() != "images")
        for parts in within
    ]


def _splits_by_level(within: Sequence[tuple[str, ...]]) -> list[dict[str, tuple[str, str]]]:
    """By level of folders, the names that mean splits."""
    deepest = max(map(len, within), default=0)
    return [splits_among({parts[k] for parts in within if len(parts) > k}) for k in range(deepest)]


def _published(folder: Path, found: Sequence[Path], kept: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    """The used rows for training and for testing, by the outermost folders of their images that name splits; empty
    unless both occur."""
    within = [path.relative_to(folder).parts[:-1] if keep else () for path, keep in zip(found, kept, strict=True)]
    among = _splits_by_level(within)
    splits = np.array([next((among[k][n][0] for k, n in enumerate(each) if n in among[k]), "") for each in within])
    test = next((name for name in (*TEST_NAMES, "eval") if name in splits), "")
    return {"train": splits == "train", "test": splits == test} if test and "train" in splits else {}


def _unclear(each: LabelList, folders: Sequence[tuple[str, ...]]) -> UserError:
    """The error for a table that names images if its target is ambiguous."""
    others = [name for name in each.table.names if name != each.naming]
    remedy = "say which is learnt (--target COLUMN)"
    if any(folders):
        remedy += ", or, if the folders that images lie in are the classes, keep the table elsewhere"
    return UserError(
        f"{each.path} names images by column {each.naming!r}, and has the columns {listed(others)}: {remedy}",
        public=f"a table names images, and what is learnt does not follow from it: {remedy}",
    )


def read_label_lists(
    name: str, folder: Path, size: int | None, schema: Schema | None = None, uncertain: Uncertain = "refuse"
) -> Dataset:
    """Read the data set in a folder of images with their labels in tables.

    One column names the images, by path or name, with a suffix or without. The columns to learn are the schema's
    target; by default all others whose values are 0, 1, -1 or empty, or the only other one. One column of texts or
    whole numbers has classes. Several columns with a single 1 per row are classes, too (ISIC). Others are independent
    labels, where empty means 0 (CheXpert), as in a single column among them. If there is one table, images in folders
    called train and test, or similar, are for training and for testing. `uncertain` labels, -1, become 0 or 1, or their
    rows are dropped. If a test split is split off, no value of the schema's group, and no patient with a folder, is in
    both splits. Raises UserError for a row without its image, and for numbers that are not classes.
    """
    how = schema or Schema()
    lists = label_lists(folder, how)
    if not lists:
        raise UserError(f"{folder} has no table that names its images")
    if not (first := lists["train"]).learnt:
        others = [each for each in first.table.names if each != first.naming]
        if missing := [each for each in how.target if each not in others]:
            raise no_column(str(first.path), missing[0], others, "name one that is there (--target)")
        raise _unclear(first, _folders(first))
    meaning = _Meaning.of(lists["train"], how)
    files, labels, groups, used, notes = {}, {}, {}, {}, list[str]()
    for split, each in lists.items():
        found = _all_found(each)
        values, kept, done = meaning.values(each.table, uncertain)
        if not kept.any():
            raise refused(str(each.path), "has no row with a label", "add some")
        published = _published(folder, found, kept) if len(lists) == 1 else {}
        for part, rows in (published or {split: kept}).items():
            files[part] = [path for path, keep in zip(found, rows, strict=True) if keep]
            labels[part], groups[part] = values[rows], _groups(each, how, files[part], rows)
            used[part] = (each.table, rows)
        count = sum(len(files[part]) for part in published or (split,))
        parts = [f"{each.path.name}: {count} images by column {each.naming!r}", *each.table.notes]
        if published:
            passed = int(kept.sum()) - count
            done.append(f"{len(files['train'])} for training and {len(files['test'])} for testing by their folders")
            done += [f"skipped: {passed} in other folders"] if passed else []
        notes.append("; ".join([*parts, meaning.words(), *done]))
    check_inside(folder, [path for paths in files.values() for path in paths])
    numbers = {split: np.arange(len(paths), dtype=np.int64) for split, paths in files.items()}

    def read() -> tuple[dict[str, Encoded], tuple[str, ...]]:
        encoded = {split: Encoded(chunks(paths), numbers[split], folder) for split, paths in files.items()}
        return encoded, meaning.classes

    pictures = decoded(folder, files, read, size)
    splits = {split: meaning.split(x, labels[split]) for split, (x, _) in pictures.arrays.items()}
    train, test = splits["train"], splits.get("test")
    if test is None:
        train, test, done = _split_off(train, groups["train"], how)
        notes += done
    elif how.group and (both := {*groups["train"]} & {*groups["test"]}):
        raise UserError(
            f"{folder}: images for training and for testing have the same values of {how.group!r} "
            f"({listed(sorted(both), 5)}): keep each in one",
            public=f"training and test have {len(both)} values of {how.group!r} in common: keep each in one",
        )
    named = None if meaning.kind != "labels" else (*meaning.classes, "none")

    def columns(column: str) -> tuple[Values, Values]:
        found = {part: column_values(table, column, rows) for part, (table, rows) in used.items()}
        return found["train"], found.get("test", found["train"])

    found_so = (*pictures.notes, *notes)
    return Dataset(name, train, test, meaning.classes, named, notes=found_so, listed=True, columns=columns)


# What is learnt -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Meaning:
    """The meaning of label columns: one "column" of classes; one "mark", 0 or 1, where empty means 0 if there are other
    marks; "one-hot" columns, one per class; or independent "labels"."""

    columns: tuple[str, ...]
    kind: Literal["column", "mark", "one-hot", "labels"]
    classes: tuple[str, ...]
    among: bool = True

    @classmethod
    def of(cls, each: LabelList, schema: Schema) -> _Meaning:
        """The meaning of the training table's columns. Raises UserError for values that are not labels."""
        table, columns = each.table, each.learnt
        if len(columns) > 1:
            every = _all_marks(table, columns)
            one_hot = bool((np.isin(every, (0, 1)).all(axis=1) & (every.sum(axis=1) == 1)).all())
            return cls(columns, "one-hot" if one_hot else "labels", columns)
        marks = _marks(table, columns[0])
        among = len(_marked(table, _others(table, each.naming, schema))) > 1
        if marks is not None and (among or (marks == UNCERTAIN).any()):
            return cls(columns, "mark", ("0", "1"), among)
        return cls(columns, "column", _classes(table, columns[0]))

    def words(self) -> str:
        """For people."""
        if self.kind == "labels":
            return f"{len(self.columns)} independent labels ({listed(self.columns, 5)})"
        return f"{len(self.classes)} classes ({listed(self.classes, 5)})"

    def values(self, table: Table, uncertain: Uncertain) -> tuple[NDArray[Any], NDArray[np.bool_], list[str]]:
        """The rows' values, (n,) class numbers or (n, labels) of 0 and 1; a mask of the used rows; and notes."""
        if self.kind == "column":
            return self._class_numbers(table)
        marks = _all_marks(table, self.columns)
        empty, doubt = np.isnan(marks), marks == UNCERTAIN
        notes = [f"{int(empty.sum())} empty labels taken as 0"] if empty.any() and self.among else []
        if doubt.any() and uncertain == "refuse":
            remedy = "say what it stands for (--uncertain zero, one or drop)"
            what = f"has {int(doubt.any(axis=1).sum())} rows with an uncertain label (-1)"
            public = "has labels that are uncertain (-1): have the server run with --uncertain zero, one or drop"
            raise refused(table.where, what, remedy, public)
        kept = np.ones(len(table), dtype=bool)
        if doubt.any():
            notes.append(f"{int(doubt.sum())} uncertain labels taken as {uncertain}")
            kept = ~doubt.any(axis=1) if uncertain == "drop" else kept
        if empty.any() and not self.among:
            notes.append(_left_out(empty[:, 0]))
            kept &= ~empty[:, 0]
        marks = np.where(doubt, float(uncertain == "one"), np.nan_to_num(marks))
        if self.kind == "one-hot" and (marks.sum(axis=1) != 1).any():
            what = f"has {int((marks.sum(axis=1) != 1).sum())} rows without a single 1 in the columns of classes"
            raise refused(table.where, what, "give each row one class", "has rows of no class, or of several")
        value = {"one-hot": marks.argmax(axis=1), "mark": marks[:, 0], "labels": marks}[self.kind]
        return value, kept, notes

    def _class_numbers(self, table: Table) -> tuple[NDArray[Any], NDArray[np.bool_], list[str]]:
        codes, texts = table.categories(self.columns[0])
        if unknown := sorted({*texts} - {*self.classes}):
            what = f"has classes that the training table lacks: {listed(unknown)}"
            raise refused(table.where, what, "", "has classes that the training table lacks")
        number = {text: i for i, text in enumerate(self.classes)}
        empty = codes < 0
        values = np.array([*(number[text] for text in texts), 0])[codes]
        return values, ~empty, [_left_out(empty)] if empty.any() else []

    def split(self, x: NDArray[Any], values: NDArray[Any]) -> Split:
        """Images with their targets."""
        if self.kind != "labels":
            return Split(x, torch.from_numpy(values.astype(np.int64)))
        first = np.where(values.any(axis=1), values.argmax(axis=1), values.shape[1])
        learnt = Targets("labels", torch.from_numpy(values.astype(np.float32)))
        return Split(x, torch.from_numpy(first.astype(np.int64)), learnt=learnt)


def _left_out(rows: NDArray[np.bool_]) -> str:
    return f"{int(rows.sum())} rows without a label left out"


def _classes(table: Table, name: str) -> tuple[str, ...]:
    """The classes of a column, in order. Raises UserError for measured numbers, and for names of rows."""
    codes, texts = table.categories(name)
    if table.kind(name) == "numbers" and (table.numbers(name) % 1 > 0).any():
        what = "has numbers that are not whole, and images with a table of labels need classes"
        raise table.refused(name, what, "put them into classes, or give arrays (.npz), whose labels may be numbers")
    if len(texts) > max(int((codes >= 0).sum()) / 2, FEW):
        what = f"has {len(texts)} different values in {len(table)} rows, too many for classes"
        raise table.refused(name, what, "name another (--target)", "has too many different values for classes")
    return tuple(sorted(texts, key=lambda text: (0, float(text), text) if is_number(text) else (1, 0.0, text)))


def _marks(table: Table, name: str) -> NDArray[np.float64] | None:
    """A column of marks as 0, 1 and UNCERTAIN, NaN for nothing; None if it has other values."""
    if pa.types.is_null(table.data.column(table.names[name]).type):
        return np.full(len(table), np.nan)
    with suppress(UserError):  # which has values that are none
        codes, texts = table.categories(name)
        if MARKS.keys() >= {*texts}:
            return np.array([*(MARKS[text] for text in texts), np.nan])[codes]
    return None


def _all_marks(table: Table, names: Sequence[str]) -> NDArray[np.float64]:
    """Columns of marks, (n, columns). Raises UserError for another column."""
    columns = []
    for name in names:
        table.column(name)  # is there
        if (marks := _marks(table, name)) is None:
            raise table.refused(name, "is not a label 0 or 1", "name others (--target)")
        columns.append(marks)
    return np.stack(columns, axis=1)


def _marked(table: Table, names: Sequence[str]) -> list[str]:
    """The columns with marks only: 0, 1, empty or uncertain."""
    return [name for name in names if _marks(table, name) is not None]


def _others(table: Table, naming: str, schema: Schema) -> list[str]:
    """The columns that may be targets."""
    return [name for name in table.names if name not in (naming, schema.group, *index_columns(table))]


# Groups of images -----------------------------------------------------------------------------------------------------


def _groups(each: LabelList, schema: Schema, paths: Sequence[Path], kept: NDArray[np.bool_]) -> list[str]:
    """Each used image's group: the value of the schema's column, or the patient in its path; empty without both."""
    if schema.group:
        if schema.group not in each.table.names:
            raise no_column(each.table.where, schema.group, [*each.table.names], "name one that is there (--group)")
        codes, texts = each.table.categories(schema.group)
        if (nothing := kept & (codes < 0)).any():
            remedy = "fill it in, as rows are grouped by it (--group)"
            raise each.table.lacking(schema.group, nothing, remedy)
        return [texts[code] for code in codes[kept]]
    patients = [next((part for part in path.parts if PATIENT.fullmatch(part)), "") for path in paths]
    return patients if "" not in patients else []


def _split_off(whole: Split, groups: list[str], schema: Schema) -> tuple[Split, Split, list[str]]:
    """(training, test, notes) from all samples."""
    if groups and (schema.group or len({*groups}) > 1):
        train, test = split_off_test(whole, groups)
        if len(test):
            by = f"values of {schema.group!r}" if schema.group else "patients (folders)"
            return train, test, [f"{len({*groups})} {by}, each in training or in test"]
        if schema.group:
            what = f"column {schema.group!r} has one value for each class, and none can be in training and in test"
            raise UserError(f"{what}: give a table for testing, or another (--group)")
    return *split_off_test(whole), []


# Tables and images ----------------------------------------------------------------------------------------------------


def _label_list(path: Path, schema: Schema, images: Images) -> LabelList | None:
    """The table as a list of images, if it names images and has columns to learn."""
    table = read_columns(path, schema)
    if any(pa.types.is_integer(field.type) for field in table.data.schema):  # names of images may begin with zeros
        table = read_columns(path, msgspec.structs.replace(schema, categories=dict.fromkeys(table.names, ())))
        table.schema = schema
    naming, found = naming_column(table, images)
    others = _others(table, naming, schema)
    if not naming or not others:
        return None
    learnt = schema.target if {*schema.target} <= {*others} else ()
    if not schema.target:
        marked = _marked(table, others)
        learnt = tuple(others if len(others) == 1 else marked if len(marked) > 1 else ())
    return LabelList(path, table, naming, found, learnt)


def _all_found(each: LabelList) -> list[Path]:
    """The image of each row. Raises UserError if one is missing."""
    if None in each.found:
        row = each.found.index(None)
        missing = each.table.column(each.naming)[row].as_py()
        raise UserError(
            f"{each.path}, row {row + 1}: there is no unique image {missing!r} below its folder, and "
            f"{each.found.count(None) - 1} more are missing: add them, or remove their rows",
            public=f"{each.found.count(None)} images that a table names are missing",
        )
    return [path for path in each.found if path is not None]


def _words(path: Path) -> set[str]:
    """The words of a file's name."""
    return {*re.findall(r"[a-z]+", path.name.lower())}
