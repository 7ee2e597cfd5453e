"""Text: folders of .txt files and columns of tables, cut into tokens, to learn the next one or a class."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.language import padding_token
from fewbytes.data.clients import Columns, Dataset, Values, split_off_test
from fewbytes.data.coco import is_coco
from fewbytes.data.columns import plain
from fewbytes.data.datasets import find, not_found
from fewbytes.data.folders import TEST_NAMES, check_inside, is_stray
from fewbytes.data.formats.delimited import check_encoding, encoding_of
from fewbytes.data.formats.label_lists import label_lists
from fewbytes.data.formats.yolo import yolo_places
from fewbytes.data.frames import run_with
from fewbytes.data.masks import holds_masks
from fewbytes.data.named import NamedTensors
from fewbytes.data.natural import column_values, one_column
from fewbytes.data.schema import Schema, no_column, refused
from fewbytes.data.settings import FOLDERS
from fewbytes.data.sources import source
from fewbytes.data.split import IGNORED_TOKEN, Split, Targets
from fewbytes.data.table_files import SUFFIXES, read_columns, table_suffix

AS_USUAL = Schema()
TEST_SHARE = 10  # one block out of this number is for testing
Documents = list[tuple[str, str]]  # a group's name, and one of its texts


def load_text(
    name: str,
    tokenizer: Any,
    length: int,
    column: str | None = None,
    label: str | None = None,
    only_test: bool = False,
    how: Schema = AS_USUAL,
    by: str | None = None,
) -> Dataset:
    """Read the texts called `name`: a .txt file, a folder of them, or a `column` of a table or of a folder of tables.

    Without `label` the next token is learnt (`next_tokens`). Otherwise the class in that column is learnt from
    `input_ids` and `attention_mask` (`token_ids`). Test texts are a table's `test…`, else a fixed fifth of each class;
    with `only_test` all are. `how`: the reading of files, and of rows without text or label, as for tables. `by`: a
    column whose value is a text's group if the next token is learnt. Raises UserError for unreadable data.
    """
    place = find(name, files=True)
    if place is None:
        raise not_found(name, "no such name is known")
    if column is None:
        if label is not None:
            raise UserError(f"{name}: target is a column of a table: give the one with the text (--text)")
        return next_tokens(name, documents_in(place, how), tokenizer, length, only_test)
    if column == label:
        raise UserError(f"{name}: column {label!r} is both the text and its class: change one (--text, --target)")
    train, test, notes, columns = read_text_table(place, column, label or by, how)
    if label is None:
        return replace(next_tokens(name, train + test, tokenizer, length, only_test, by), notes=notes)
    classes = tuple(sorted({kind for kind, _ in train + test}))
    number = {kind: i for i, kind in enumerate(classes)}
    splits = [
        Split(token_ids([text for _, text in texts], tokenizer, length), torch.tensor([number[k] for k, _ in texts]))
        for texts in ((train, test) if test else (train,))
    ]
    if only_test:
        return Dataset(name, splits[0].take([]), splits[-1], classes, notes=notes)
    trained, tested = splits if test else split_off_test(splits[0])
    return Dataset(name, trained, tested, classes, notes=notes, columns=columns)


def holds_text(name: str) -> bool:
    """Whether `name` is a text file, or a folder with text files, there or in its subfolders, and without images."""
    place = find(name, files=True)
    if place is None:
        return False
    below = (path for path in place.glob("*/*") if not is_stray(path.parent))
    texts = any(map(_is_text, chain((place,), place.glob("*"), below)))
    if not texts or place.is_file():
        return texts
    kinds = is_coco, yolo_places, holds_masks, label_lists, source
    return not any(holds(place) for holds in kinds)


def next_tokens(
    name: str,
    documents: Documents,
    tokenizer: Any,
    length: int,
    only_test: bool = False,
    by: str | None = FOLDERS,
) -> Dataset:
    """Documents as samples of `length` tokens, whose next tokens are learnt.

    Documents of a group follow each other, each with the end-of-text token if the tokenizer has one. The last sample of
    a group is padded, and nothing is learnt there. A group's last tenth is for testing (`only_test`: all of it).
    `groups`, by which samples are split, are those of the documents; `classes` are the tokens. `by`: the
    column, or FOLDERS, whose values the groups are; None: another thing's. Raises UserError if there is nothing to
    learn.
    """
    groups = sorted({group for group, _ in documents})
    blocks: list[tuple[NDArray[np.int64], NDArray[np.int64], int, int]] = []  # samples, targets, group, for training
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for number, group in enumerate(groups):
        texts = [text for of, text in documents if of == group]
        pieces = tokenizer(texts, add_special_tokens=False)["input_ids"]
        x, y = _blocks([token for piece in pieces for token in (*piece, *end)], length, padding_token(tokenizer))
        tested = len(x) if only_test else 0 if len(x) < 2 else max(1, round(len(x) / TEST_SHARE))
        blocks.append((x, y, number, len(x) - tested))
    x, y = (np.concatenate([each[part] for each in blocks]) for part in (0, 1))
    if not len(x):
        raise UserError(f"{name} has no text of two tokens")
    labels = torch.tensor([number for each in blocks for number in [each[2]] * len(each[0])])
    trains = np.array([row < each[3] for each in blocks for row in range(len(each[0]))])
    whole = Split(x, labels, learnt=Targets("tokens", torch.from_numpy(y)))
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    train, test = whole.take(np.flatnonzero(trains)), whole.take(np.flatnonzero(~trains))
    columns = one_column(name, by, np.array(groups)[labels.numpy()])
    return Dataset(name, train, test, tuple(map(str, tokens)), tuple(groups), columns=columns)


def token_ids(texts: Sequence[str], tokenizer: Any, length: int) -> NamedTensors:
    """Texts as `input_ids` and `attention_mask`, int64 (n, length): truncated at `length` tokens; shorter ones are
    padded, and the mask is 0 there."""
    ids_of_texts = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    ids = torch.full((len(ids_of_texts), length), padding_token(tokenizer))
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(ids_of_texts):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64), 1
    return NamedTensors({"input_ids": ids, "attention_mask": mask})


def documents_in(place: Path, how: Schema = AS_USUAL) -> Documents:
    """The .txt files of a folder, or the single file. A file's group is its subfolder of that folder, else its own
    name. Raises UserError for a file that is not in UTF-8, or not in the given encoding."""
    paths = [place] if place.is_file() else sorted(filter(_is_text, _files(place)))
    if place.is_dir():
        check_inside(place, paths)
    return [(_group(path, place), _read(path, how.encoding)) for path in paths]


def read_text_table(
    place: Path, column: str, label: str | None, how: Schema = AS_USUAL
) -> tuple[Documents, Documents, tuple[str, ...], Columns]:
    """(training texts, test texts, notes, their columns), texts with labels, from a table of any kind, or from a folder
    of tables (`train…` and `test…`; no test texts without such a file). Without `label` the file's name is the label of
    all.

    Raises UserError if there is no such file or column, and for missing values.
    """
    files = [place] if place.is_file() else sorted(path for path in place.iterdir() if _is_table(path))
    if place.is_dir():
        check_inside(place, files)
    tests = [path for path in files if place.is_dir() and path.stem.lower().startswith(TEST_NAMES)]
    trains = [path for path in files if path not in tests]
    if not trains or not all(map(_is_table, files)):
        what = f"holds no table with text ({', '.join(SUFFIXES)}, .json)"
        raise refused(str(place), what, "name a file or folder of such")
    read = {path: _texts(path, column, label, place.stem, how) for path in files}
    train, test = ([pair for path in paths for pair in read[path][0]] for paths in (trains, tests))

    def columns(column: str) -> tuple[Values, Values]:
        found = [np.concatenate([read[path][2](column) for path in paths]) for paths in (trains, tests) if paths]
        return found[0], found[-1]

    return train, test, tuple(note for _, note, _ in read.values()), columns


def _texts(
    path: Path, column: str, label: str | None, name: str, how: Schema
) -> tuple[Documents, str, Callable[[str], Values]]:
    """A file's texts with their labels, a note, and the values of its columns."""
    as_text = {each: () for each in (column, label) if each is not None}
    table = read_columns(path, msgspec.structs.replace(how, categories=as_text))
    for wanted, option in ((column, "--text"), *([(label, "--target, or --partition column:NAME")] if label else [])):
        if wanted not in table.names:
            raise no_column(str(path), wanted, [*table.names], f"name one that is there ({option})")
    cells = table.column(column)
    if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        what = f"the column {column} holds {cells.type}, not text"
        raise refused(f"{path}:", what, "name another (--text)", f"has no text in its column {column}")
    texts = cells.to_pylist()
    groups = table.column(label).to_pylist() if label else [name] * len(texts)
    marks = {"", *how.missing_marks}
    empty = {column: [text is None or not text.strip() for text in texts]}
    if label:
        empty[label] = [group is None or str(group).strip() in marks for group in groups]
    for wanted, rows in empty.items():
        if any(rows) and how.missing != "drop":
            what = f"has {sum(rows)} rows without a {wanted}"
            raise refused(str(path), what, f"fill them in, or {run_with('--missing drop')}")
    without = [any(row) for row in zip(*empty.values(), strict=True)]
    names = _class_names(table.data, label)
    kept = [(_label(group, names), text) for group, text, no in zip(groups, texts, without, strict=True) if not no]
    where = f"{path.name}: " if path.stem != name else ""  # notes follow the data set's name
    note = "; ".join((f"{where}{len(texts):,} rows", *table.notes, f"{sum(without):,} without text or label left out"))
    whole = ~np.array(without, dtype=bool)
    return kept, note, lambda column: column_values(table, column, whole)


def _class_names(table: pa.Table, label: str | None) -> list[str] | None:
    """The class names, if a table of the Hugging Face hub states them."""
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names: list[str] | None = metadata.get("info", {}).get("features", {}).get(label, {}).get("names")
    return names


def _label(value: Any, names: list[str] | None) -> str:
    """A label as text: the class's name, if classes have names."""
    if names and isinstance(value, int) and 0 <= value < len(names):
        return str(names[value])
    return plain(str(value).strip())


def _blocks(tokens: list[int], length: int, padding: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Samples and targets, int64 (n, length) each; targets are the samples shifted by one token."""
    known = max(0, len(tokens) - 1)
    n = -(-known // length)
    x, y = np.full(n * length, padding, np.int64), np.full(n * length, IGNORED_TOKEN, np.int64)
    x[:known], y[:known] = tokens[:-1], tokens[1:]
    return x.reshape(n, length), y.reshape(n, length)


def _group(path: Path, place: Path) -> str:
    above = path.relative_to(place).parts[:-1] if place.is_dir() else ()
    return above[0] if above else path.stem


def _is_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt" and not is_stray(path) and path.is_file()


def _files(folder: Path) -> list[Path]:
    """All files below a folder that are neither hidden nor stray, nor in such a folder."""
    return [path for path in folder.rglob("*") if not any(map(is_stray, (path, *path.relative_to(folder).parents)))]


def _is_table(path: Path) -> bool:
    return bool(table_suffix(path) or path.suffix.lower() == ".json") and not is_stray(path)


def _read(path: Path, encoding: str) -> str:
    """A file's text, without its byte order mark."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise refused(str(path), f"cannot be read: {error.strerror}", "", "cannot be read", "a text") from None
    check_encoding(path, encoding or "utf-8")
    encoding = encoding or encoding_of(content[:4])
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        what = f"is not text in {encoding.upper().removesuffix('-SIG')}"
        remedy = "name its encoding (--encoding), convert or remove it"
        raise refused(str(path), f"{what} (byte {error.start})", remedy, f"{what}: {remedy}", "a text") from None
