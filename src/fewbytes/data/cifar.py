"""CIFAR-10 and CIFAR-100 in the files of their authors and torchvision: Python 2's pickles, read without running code.

Source: cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.pickles import read_arrays
from fewbytes.data.folders import subfolders

SHAPE = 3, 32, 32


class _Layout(NamedTuple):
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str  # the key of the labels of a file of images
    names: str  # the key of the classes' names in the file `meta`


LAYOUTS = (
    _Layout(tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta", "labels", "label_names"),
    _Layout(("train",), "test", "meta", "fine_labels", "fine_label_names"),
)


def cifar_files(folder: Path) -> dict[str, list[Path]]:
    """The files "train", "test" and "meta" in a folder or in one subfolder; empty if there are none.

    Raises UserError for a missing file, or several data sets.
    """
    found = [
        (place, layout)
        for place in (folder, *subfolders(folder))
        for layout in LAYOUTS
        if (place / layout.meta).is_file() and (place / layout.train[0]).is_file()
    ]
    if not found:
        return {}
    if len(found) > 1:
        names = ", ".join(place.name for place, _ in found)
        raise UserError(f"{folder} holds several data sets ({names}); name one of those folders")
    ((place, layout),) = found
    for name in (*layout.train, layout.test):
        if not (place / name).is_file():
            raise UserError(f"{place} holds CIFAR without its file {name}: put it there")
    return {
        "train": [place / name for name in layout.train],
        "test": [place / layout.test],
        "meta": [place / layout.meta],
    }


def read_cifar(
    files: dict[str, list[Path]],
) -> tuple[dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]], tuple[str, ...]]:
    """Read `cifar_files`: per split images, uint8 (n, 32, 32, 3), and labels, int64 (n,); and the class names.

    Raises UserError for a file that is damaged, has other contents or would run code.
    """
    (meta,) = files["meta"]
    layout = next(each for each in LAYOUTS if each.meta == meta.name)
    names = _content(meta).get(layout.names)
    if not isinstance(names, list) or not names or not all(isinstance(name, str | bytes) for name in names):
        raise UserError(f"{meta} has no {layout.names!r}, the names of the classes")
    classes = tuple(name.decode("latin-1") if isinstance(name, bytes) else name for name in names)
    splits = {}
    for split in ("train", "test"):
        parts = [_batch(path, layout.labels, len(classes)) for path in files[split]]
        splits[split] = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return splits, classes


def _batch(path: Path, key: str, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _content(path)
    x, labels = content.get("data"), content.get(key)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != np.prod(SHAPE):
        raise UserError(f"{path} has no 'data', images of 32 x 32 pixels")
    if not isinstance(labels, list) or len(labels) != len(x):
        raise UserError(f"{path} has no {key!r} of its {len(x)} images")
    if not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise UserError(f"{path} has {key} outside 0..{classes - 1}")
    return x.reshape(-1, *SHAPE).transpose(0, 2, 3, 1), np.array(labels, dtype=np.int64)


def _content(path: Path) -> dict[str, Any]:
    content = read_arrays(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no dictionary, as CIFAR's files do")
    return {key.decode("latin-1") if isinstance(key, bytes) else str(key): value for key, value in content.items()}
