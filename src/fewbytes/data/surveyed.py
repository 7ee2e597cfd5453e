"""Samples as columns of plain figures, for a survey: a table's own columns; the size, depth and brightness of images;
the length of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.data.clients import Dataset, split_off_test
from fewbytes.data.coco import is_coco
from fewbytes.data.columns import FEW
from fewbytes.data.datasets import find, load_dataset
from fewbytes.data.formats.dicom import scale_of
from fewbytes.data.formats.label_lists import label_lists
from fewbytes.data.formats.yolo import yolo_places
from fewbytes.data.frames import Table
from fewbytes.data.identifiers import index_columns, names_rows
from fewbytes.data.images import Pixels, read_image, squared
from fewbytes.data.masks import holds_masks
from fewbytes.data.named import NamedTensors
from fewbytes.data.own import is_function
from fewbytes.data.schema import Schema
from fewbytes.data.sources import Read, source
from fewbytes.data.split import Items, Split
from fewbytes.data.table_files import read_columns, table_files
from fewbytes.data.tables import MOST, TARGETS, few
from fewbytes.data.text import documents_in, holds_text

ColumnKind = Literal["numbers", "dates", "categories", "texts", "identifiers", "unreadable"]
"""numbers; dates as days since 1970; categories; texts that hardly repeat; columns that number the rows; and columns
that cannot be read as they are."""
CLASS = "class"
"""The column with the classes of images, texts and arrays."""
DIGITS = 3
"""Numbers that are equal to this number of digits are near-duplicates."""
Lengths = Callable[[Sequence[str]], list[int]]
"""Texts' numbers of tokens, or of words."""


@dataclass(frozen=True)
class Column:
    """A column: `values` float64 (n,), NaN where one is missing; of categories the index in `texts`. `why`: why it is
    unreadable, without anything from the data."""

    kind: ColumnKind
    values: NDArray[np.float64]
    texts: tuple[str, ...] = ()
    why: str = ""

    def take(self, rows: NDArray[np.int64]) -> Column:
        """The same column of some rows."""
        return replace(self, values=self.values[rows])


@dataclass(frozen=True)
class SiteTerms:
    """What a site reports in a survey: `tell` as in a node's configuration, nothing of fewer than `min_count` samples,
    `salt`, the sites' common secret for finding duplicates (empty: it does not take part), and `folder`, that of
    its node's run folders."""

    tell: Literal["nothing", "sizes", "labels", "figures"] = "figures"
    min_count: int = 1
    salt: str = ""
    folder: str | None = None


@dataclass(frozen=True)
class Figures:
    """Samples as `columns` by name, all of `rows` rows. `target`: the column with the classes, or what else is learnt.
    `near`: a text for each sample that is equal for near-duplicates. `ignored`: columns that are left out."""

    columns: dict[str, Column]
    rows: int
    target: tuple[str, ...] = ()
    near: tuple[bytes, ...] = ()
    ignored: tuple[str, ...] = ()

    def take(self, rows: NDArray[np.int64]) -> Figures:
        """The same columns of some rows."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return Figures(columns, len(rows), self.target, tuple(self.near[i] for i in rows), self.ignored)


class Surveyed(Split):
    """Samples that are only described: `about` all rows of the data, of which this is a view, by the site's `terms`."""

    def __init__(
        self, about: Figures, labels: torch.Tensor, terms: SiteTerms, rows: NDArray[np.int64] | None = None
    ) -> None:
        super().__init__(torch.zeros(1, 1).expand(len(labels), 1), labels, rows)
        self.about, self.terms = about, terms

    def take(self, indices: Sequence[int] | NDArray[np.int64] | torch.Tensor) -> Surveyed:
        """As in `Split`."""
        return Surveyed(self.about, self.y, self.terms, super().take(indices).rows)


class OnTerms(Split):
    """Test samples, of which figures leave the site by its `terms`. `folder`: of its node's run folders; `place`: of
    the data, with the meaning of a table's columns (`schema`)."""

    def __init__(self, split: Split, terms: SiteTerms, place: str = "", schema: Schema | None = None) -> None:
        super().__init__(split.x, split.y, split.rows, split.transform, split.learnt)
        self.terms, self.folder = terms, None if terms.folder is None else Path(terms.folder)
        self.place, self.schema = place, schema


def terms_of(split: Split) -> SiteTerms:
    """The terms by which figures of samples leave their site."""
    return split.terms if isinstance(split, OnTerms) else SiteTerms()


@dataclass(frozen=True)
class Reading:
    """How data are read for a survey: as for a run, besides `lengths` of texts, in `unit`."""

    schema: Schema = field(default_factory=Schema)
    text: str | None = None
    lengths: Lengths = lambda texts: [len(text.split()) for text in texts]
    unit: str = "words"
    image_size: int | None = None


def read_surveyed(name: str, how: Reading, terms: SiteTerms) -> Dataset:
    """The data set called `name`, as `load_dataset` finds it, with `Surveyed` samples; labels only serve to split them.

    Missing values, images of different sizes and columns of any kind are not errors here. Raises UserError for data
    that cannot be read at all."""
    place = None if name == "digits" or is_function(name) or name.startswith("coco:") else find(name, files=True)
    if place is not None and (how.text is not None or not holds_text(name)):
        other = is_coco(place) or yolo_places(place) or holds_masks(place) or label_lists(place, how.schema)
        if not other and not (place / "train").is_dir() and (files := table_files(place)):
            tables = [read_columns(files[each], how.schema) for each in ("train", "test") if each in files]
            return _dataset(name, [_of_table(table, how) for table in tables], terms)
        if not other and (found := source(place)) is not None:
            files_of, read, _ = found
            return _dataset(name, _of_images([path for each in files_of.values() for path in each], read), terms)
    elif place is not None:
        return _dataset(name, [_of_documents(documents_in(place, how.schema), how)], terms)
    dataset = load_dataset(name, how.image_size, schema=how.schema)
    return _dataset(name, [_of_split(each, dataset.classes) for each in (dataset.train, dataset.test)], terms)


def _dataset(name: str, parts: Sequence[Figures], terms: SiteTerms) -> Dataset:
    """One or two parts, training and test, as a data set; a fixed fifth of one part is for testing, as in a run."""
    about = together(parts)
    column = about.columns.get(about.target[0]) if len(about.target) == 1 else None
    classes: tuple[str, ...] = ("all",)
    labels = np.zeros(about.rows, np.int64)
    if column is not None and column.kind == "categories":
        classes = (*column.texts, "none")
        labels = np.nan_to_num(column.values, nan=len(column.texts)).astype(np.int64)
    whole = Surveyed(about, torch.from_numpy(labels), terms)
    if len(parts) == 1:
        train, test = (
            whole.take(half.rows) for half in split_off_test(Split(whole.x, whole.y)) if half.rows is not None
        )
    else:
        train, test = (whole.take(rows) for rows in np.split(np.arange(about.rows), [parts[0].rows]))
    return Dataset(name, train, test, classes, groups=classes)


def together(parts: Sequence[Figures]) -> Figures:
    """The rows of several parts, one after another; columns that a part lacks are missing there."""
    if len(parts) == 1:
        return parts[0]
    columns = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        found = [part.columns.get(name) for part in parts]
        kinds = {column.kind: column for column in found if column is not None}
        if len(kinds) > 1:
            why = f"has {' and '.join(kinds)} in different files"
            columns[name] = Column("unreadable", np.full(sum(part.rows for part in parts), np.nan), why=why)
            continue
        (kind,), texts = kinds, tuple(dict.fromkeys(t for column in found if column for t in column.texts))
        number = {text: float(i) for i, text in enumerate(texts)}
        values = [
            np.full(part.rows, np.nan) if column is None else _numbered(column, number)
            for part, column in zip(parts, found, strict=True)
        ]
        columns[name] = Column(kind, np.concatenate(values), texts, kinds[kind].why)
    near = tuple(each for part in parts for each in part.near)
    ignored = tuple(name for part in parts for name in part.ignored)
    return Figures(columns, sum(part.rows for part in parts), parts[0].target, near, ignored)


def _numbered(column: Column, number: dict[str, float]) -> NDArray[np.float64]:
    """A column's values, its categories numbered as in `number`."""
    if column.kind != "categories":
        return column.values
    codes = np.array([*(number[text] for text in column.texts), np.nan])
    return codes[np.where(np.isnan(column.values), len(column.texts), column.values).astype(np.int64)]


# Tables ---------------------------------------------------------------------------------------------------------------


def _of_table(table: Table, how: Reading) -> Figures:
    """The columns of a table, without those that are left out."""
    schema = how.schema
    target = schema.target or tuple(name for name in TARGETS if name in table.names)[:1]
    index = index_columns(table)
    used = [n for n in schema.columns or table.names if n not in (*schema.leave_out, *index)]
    columns = {name: _column(table, name, target) for name in dict.fromkeys((*used, *target)) if name in table.names}
    if how.text is not None and how.text in table.names:
        texts = ["" if each is None else str(each) for each in table.column(how.text).to_pylist()]
        columns[f"{how.text} ({how.unit})"] = Column("numbers", np.array(how.lengths(texts), np.float64))
    described = {name: column for name, column in columns.items() if column.kind not in ("identifiers", "unreadable")}
    ignored = tuple(name for name in schema.leave_out if name in table.names)
    return Figures(columns, len(table), target, _near_rows(described, len(table)), ignored)


def _column(table: Table, name: str, target: Sequence[str]) -> Column:
    try:
        kind, missing = table.kind(name), table.missing(name)
        if name not in target and (table.schema.group == name or names_rows(table, name)):
            return Column("identifiers", np.where(missing, np.nan, 0.0))
        if kind == "texts" or (name in target and few(table, name)):
            codes, texts = table.categories(name)
            values = np.where(codes < 0, np.nan, codes)
            repeated = len(texts) <= MOST and len(texts) <= max(int((codes >= 0).sum()) / 2, FEW)
            return Column("categories", values, tuple(texts)) if repeated else Column("texts", np.minimum(values, 0))
        return Column("dates" if kind == "dates" else "numbers", table.numbers(name))
    except UserError as error:
        why = (error.public or "").removeprefix("a table's column ").removeprefix(f"{name!r} ")
        return Column("unreadable", np.full(len(table), np.nan), why=why or "cannot be read")


def _near_rows(columns: dict[str, Column], rows: int) -> tuple[bytes, ...]:
    """For each row a text that is equal for rows with the same categories, and numbers equal to DIGITS digits."""
    written: list[list[str]] = []
    for _, column in sorted(columns.items()):
        if column.kind == "categories":
            texts = [text.strip().casefold() for text in column.texts]
            written.append(["" if v != v else texts[int(v)] for v in column.values])
        elif column.kind in ("numbers", "dates"):
            written.append(["" if v != v else f"{v + 0.0:.{DIGITS}g}" for v in column.values])
    return tuple("\0".join(each).encode() for each in zip(*written, strict=True)) if written else (b"",) * rows


# Pictures and texts ---------------------------------------------------------------------------------------------------


def _of_images(paths: Sequence[Path], read: Read) -> list[Figures]:
    """The images of each split: size, channels, depth, brightness and contrast, in their files' own size."""
    scale, _ = scale_of(paths)
    encoded, classes = read()
    parts = []
    for each in encoded.values():
        images = (item for chunk in each.chunks for item in chunk)
        pixels = (read_image(item, each.where, i, scale) for i, item in enumerate(images))
        parts.append(_of_pixels(pixels, each.labels, classes))
    return parts


def _of_pixels(images: Iterable[Pixels], labels: NDArray[np.int64], classes: Sequence[str]) -> Figures:
    found, depths, near = [], [], []
    for pixels in images:
        ones = pixels.astype(np.float64) / (255 if pixels.dtype == np.uint8 else 1)
        found.append((pixels.shape[-2], pixels.shape[-3], pixels.shape[-1], ones.mean(), ones.std()))
        depths.append(pixels.dtype != np.uint8)
        near.append(_near_image(pixels))
    names = ("width", "height", "channels", "brightness", "contrast")
    values = np.array(found, np.float64).reshape(-1, len(names)).T
    columns = {f"image {name}": Column("numbers", of) for name, of in zip(names, values, strict=True)}
    depth = Column("categories", np.array(depths, np.float64), ("8 bits or fewer", "more than 8 bits"))
    columns |= {"image depth": depth, CLASS: Column("categories", labels.astype(np.float64), tuple(classes))}
    return Figures(columns, len(near), (CLASS,), tuple(near))


def _near_image(pixels: Pixels) -> bytes:
    """64 bits that are equal for images that differ little: whether each of 8 x 8 fields is brighter than the next."""
    flat = pixels if pixels.ndim == 3 else pixels[len(pixels) // 2]
    grey = squared(np.ascontiguousarray(flat[..., :1]), 9)[:8, :, 0].astype(np.float64)
    return np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes()


def _of_documents(documents: Sequence[tuple[str, str]], how: Reading) -> Figures:
    """The lengths of texts, and their groups as classes."""
    classes = tuple(sorted({group for group, _ in documents}))
    labels = np.array([classes.index(group) for group, _ in documents], np.float64)
    texts = [text for _, text in documents]
    columns = {f"text ({how.unit})": Column("numbers", np.array(how.lengths(texts), np.float64))}
    columns[CLASS] = Column("categories", labels, classes)
    near = tuple(" ".join(text.casefold().split()).encode() for text in texts)
    return Figures(columns, len(texts), (CLASS,), near)


def _of_split(split: Split, classes: Sequence[str]) -> Figures:
    """Samples in memory, or read one by one."""
    labels = split.labels.numpy()
    if isinstance(split.x, NamedTensors):
        return _with_class({}, split, labels, classes)
    if len(split.shape) in (3, 4) and (isinstance(split.x, Items) or "int64" not in str(split.x.dtype)):
        rows = np.arange(len(split.y)) if split.rows is None else split.rows
        images = (
            np.moveaxis(
                np.asarray(split.x[int(i) : int(i) + 1] if not isinstance(split.x, Items) else split.x[np.array([i])])[
                    0
                ],
                0,
                -1,
            )
            for i in rows
        )
        figures = _of_pixels(images, labels, classes)
        return (
            figures
            if split.learns == "classes"
            else _with_class(dict(list(figures.columns.items())[:-1]), split, labels, classes)
        )
    columns = {}
    if len(split.shape) == 1 and split.blank().is_floating_point():
        x = split.load()[0].double().numpy()
        columns = {f"feature {i}": Column("numbers", x[:, i]) for i in range(x.shape[1])}
    return _with_class(columns, split, labels, classes)


def _with_class(columns: dict[str, Column], split: Split, labels: NDArray[np.int64], classes: Sequence[str]) -> Figures:
    """The columns, and one or more of what is learnt."""
    learnt: dict[str, Column] = {}
    if split.learns == "classes":
        learnt = {CLASS: Column("categories", labels.astype(np.float64), tuple(classes))}
    elif split.learns == "labels":
        values = split.targets.double().numpy()
        learnt = {name: Column("categories", values[:, i], ("no", "yes")) for i, name in enumerate(classes)}
    elif split.learns == "numbers":
        values = split.targets.double().numpy().reshape(len(split), -1)
        learnt = {name: Column("numbers", values[:, i]) for i, name in enumerate(classes[: values.shape[1]])}
    described = columns | learnt
    return Figures(described, len(split), tuple(learnt), _near_rows(described, len(split)))
