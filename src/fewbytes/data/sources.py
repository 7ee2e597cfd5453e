"""Lists a folder's labelled images without decoding them: Parquet files, class folders or CIFAR's own files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed
from fewbytes.base.parquet import read_parquet
from fewbytes.data.cifar import cifar_files, read_cifar
from fewbytes.data.folders import TEST_NAMES, Labelled, check_inside, labelled_images, subfolders
from fewbytes.data.frames import Table
from fewbytes.data.images import Item
from fewbytes.data.schema import Schema

LABEL_NAMES = ("label", "labels", "fine_label")
CHUNK = 256  # images per job of a decoding thread

Files = dict[str, list[Path]]  # a data set's files by their role
Notes = tuple[str, ...]


@dataclass(frozen=True)
class Encoded:
    """The encoded images of one split, in chunks, with their labels, and their place (for errors)."""

    chunks: Iterator[Sequence[Item | None]]
    labels: NDArray[np.int64]
    where: Path


Read = Callable[[], tuple[dict[str, Encoded], tuple[str, ...]]]  # by split, and the class names


def source(folder: Path, first: Sequence[str] = ("train",), apart: bool = True) -> tuple[Files, Read, Notes] | None:
    """The files of the data set in a folder, their reader and notes; None if it has no split named as one of `first`.
    `apart`: as in `labelled_images`. Raises UserError as `labelled_images` and `check_inside`."""
    found = _source(folder, first, apart)
    if found is not None:
        check_inside(folder, (path for paths in found[0].values() for path in paths))
    return found


def _source(folder: Path, first: Sequence[str], apart: bool) -> tuple[Files, Read, Notes] | None:
    if parquet := parquet_files(folder, first):
        return parquet, partial(_read_parquet, folder, parquet), ()
    if pictures := labelled_images(folder, "train" not in first, apart):
        by_class: Files = {}
        for split, found in pictures.splits.items():
            for path, name in found:
                by_class.setdefault(f"{split} {name}", []).append(path)
        return by_class, partial(_read_images, folder, pictures.splits), pictures.notes
    if cifar := cifar_files(folder):
        return cifar, partial(_read_cifar, cifar), ()
    return None


def parquet_files(folder: Path, first: Sequence[str] = ("train",)) -> Files:
    """The Parquet files of the first place that has a split named as one of `first`; empty if there is none."""

    def splits(place: Path) -> Files:
        found = {
            s: sorted({*place.glob(f"{s}-*.parquet"), *place.glob(f"{s}.parquet")}) for s in ("train", *TEST_NAMES)
        }
        train, test = (next((found[s] for s in names if found[s]), []) for names in (first, TEST_NAMES))
        return {"train": train, **({"test": test} if test and test != train else {})} if train else {}

    if files := splits(folder) or splits(folder / "data"):
        return files
    configurations = {place: files for place in subfolders(folder) if (files := splits(place))}
    if len(configurations) > 1:
        names = ", ".join(place.name for place in configurations)
        raise UserError(f"{folder} holds several configurations ({names}); name one of those folders")
    return next(iter(configurations.values()), {})


def _read_images(folder: Path, images: dict[str, Labelled]) -> tuple[dict[str, Encoded], tuple[str, ...]]:
    classes = tuple(sorted({name for _, name in images["train"]}))
    number = {name: i for i, name in enumerate(classes)}
    encoded = {}
    for split, found in images.items():
        if unknown := {name for _, name in found} - set(classes):
            first = found[0][0].relative_to(folder).parts[0]
            raise UserError(
                f"{folder / first} has classes that train/ lacks: {', '.join(sorted(unknown))}",
                public="a test split has classes that the training split lacks",
            )
        labels = np.array([number[name] for _, name in found], dtype=np.int64)
        encoded[split] = Encoded(chunks([path for path, _ in found]), labels, folder)
    return encoded, classes


def _read_cifar(files: Files) -> tuple[dict[str, Encoded], tuple[str, ...]]:
    splits, classes = read_cifar(files)
    return {split: Encoded(chunks(x), y, files[split][0].parent) for split, (x, y) in splits.items()}, classes


def chunks(items: Sequence[Item] | NDArray[np.uint8]) -> Iterator[Sequence[Item]]:
    """Images in chunks of at most CHUNK."""
    return (list(items[i : i + CHUNK]) for i in range(0, len(items), CHUNK))


def _read_parquet(folder: Path, files: Files) -> tuple[dict[str, Encoded], tuple[str, ...]]:
    try:
        schema = pq.read_schema(files["train"][0])
        image, label, classes = _columns(schema, files["train"][0])
        encoded, found = {}, {}
        for split, paths in files.items():
            column = pa.chunked_array([c for p in paths for c in read_parquet(p, [label]).column(0).chunks])
            table = Table(str(paths[0]), pa.table({label: column}), Schema(target=(label,), missing_marks=()))
            found[split] = table.categories(label)
            if missing := int((found[split][0] < 0).sum()):
                raise UserError(
                    f"{paths[0]} has {missing} samples without a label; remove them",
                    public=f"a Parquet file has {missing} samples without a label; remove them",
                )
        columns, named = _class_numbers(folder, found, schema.field(label).type)
        classes = named or classes
        for split, paths in files.items():
            encoded[split] = Encoded(_parquet_chunks(paths, image), columns[split], paths[0])
    except (pa.ArrowException, KeyError) as error:
        raise UserError(f"{folder} has a Parquet file that cannot be read: {' '.join(str(error).split())}") from error
    highest = max(int(e.labels.max(initial=-1)) for e in encoded.values())
    classes = classes or tuple(str(c) for c in range(highest + 1))
    for e in encoded.values():
        if len(e.labels) and not 0 <= e.labels.min() <= e.labels.max() < len(classes):
            raise UserError(f"{e.where} has labels outside 0..{len(classes) - 1} (from {e.labels.min()}); correct them")
    return encoded, classes


def _class_numbers(
    folder: Path, found: dict[str, tuple[NDArray[np.int64], list[str]]], kind: pa.DataType
) -> tuple[dict[str, NDArray[np.int64]], tuple[str, ...]]:
    """Labels by split as class numbers, and the class names; no names if labels are numbers, also as texts or floats.
    `found`: by split, which of several texts each label is. Raises UserError for invalid labels."""
    texts = sorted({text for _, several in found.values() for text in several})
    numbers = all(re.fullmatch(r"\d+" if _is_text(kind) else r"-?\d+", text) for text in texts)
    classes: tuple[str, ...] = ()
    if numbers:
        number = {text: int(text) for text in texts}
    elif pa.types.is_floating(kind):
        raise UserError(
            f"{folder} has labels that are not whole numbers: give numbers of classes, or their names",
            public="a Parquet file has labels that are not whole numbers: give numbers of classes, or their names",
        )
    else:  # the classes of the training samples, in order
        classes = tuple(sorted(set(found["train"][1])))
        number = {text: i for i, text in enumerate(classes)}
    if unknown := sorted(set(texts) - set(number)):
        raise UserError(
            f"{folder} has test labels that are missing in training: {listed(unknown)}",
            public=f"{len(unknown)} test labels of Parquet files are missing in training",
        )
    return {
        split: np.array([number[text] for text in several], dtype=np.int64)[codes]
        for split, (codes, several) in found.items()
    }, classes


def _columns(schema: pa.Schema, path: Path) -> tuple[str, str, tuple[str, ...]]:
    """Names of the image and the label column, and the class names if the schema has them."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    named = {k: v["names"] for k, v in features.items() if isinstance(v, dict) and v.get("_type") == "ClassLabel"}
    images = [field.name for field in schema if holds_images(field.type)]
    labels = [name for name in (*LABEL_NAMES, *named) if name in schema.names and _is_label(schema.field(name).type)]
    if not labels or not images:
        label = "a label column of numbers or text (label, labels, fine_label)"
        wanted = label if images else "an image column (image, img)"
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UserError(f"{path} has no {wanted.partition(' ')[2]}; found the columns {columns}")
    return min(images, key=lambda name: name not in ("image", "img")), labels[0], tuple(named.get(labels[0], ()))


def _is_label(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)) or _is_text(kind)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def holds_images(kind: pa.DataType) -> bool:
    """Whether a column of that type may hold images."""
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and holds_images(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _parquet_chunks(paths: Sequence[Path], column: str) -> Iterator[Sequence[Item | None]]:
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=CHUNK, columns=[column]):
                images = batch.column(0)
                yield (images.field("bytes") if pa.types.is_struct(images.type) else images).to_pylist()
