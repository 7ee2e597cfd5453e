"""Arrays as data sets: `.npz`, `.h5` and folders of `.npy`, by the names people give to samples and labels."""

from __future__ import annotations

import importlib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed, one_line
from fewbytes.base.extras import is_installed
from fewbytes.base.unfolded import check_unfolded
from fewbytes.data.clients import Dataset, split_off_test
from fewbytes.data.columns import FEW
from fewbytes.data.folders import check_inside
from fewbytes.data.split import Kind, Split, Targets

SUFFIXES = (".npz", ".npy", ".h5", ".hdf5")
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "val": "val", "valid": "val",
          "validation": "val", "dev": "val"}  # fmt: skip
SAMPLES = ("images", "image", "x", "data", "samples", "signals", "features", "imgs")
LABELS = ("labels", "label", "y", "targets", "target")
PICTURES = (np.uint8, np.uint16, np.uint32)
"""Types of pixels: arrays of these with two axes or more for a sample are pictures or volumes."""
CHUNK = 1000  # samples looked through at a time
_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")

Arrays = Mapping[str, Callable[[], NDArray[Any]]]  # by name, each read when it is asked for


def is_arrays(place: Path) -> bool:
    """Whether a place is a file of arrays, or a folder of `.npy` with samples and labels."""
    if place.is_file():
        return place.suffix.lower() in (".npz", ".h5", ".hdf5")
    return place.is_dir() and bool(_parts([path.stem for path in place.glob("*.npy")]).get("train"))


def read_arrays(name: str, place: Path, only_test: bool = False) -> Dataset:
    """Read the data set in a file or folder of arrays.

    Samples are named as in SAMPLES and labels as in LABELS, alone, with a split's name before or after (`train_images`,
    `x_test`), or in HDF5 groups named by split; MedMNIST's and Keras's files are such. Samples of PICTURES with two or
    three axes are pictures (height, width) or (height, width, channels), with three equal axes volumes; uint16 and
    uint32 are divided by their type's maximum, as for images. All other numbers become float32 unchanged. Labels (n,)
    or (n, 1) of whole numbers, or of floats that are at most FEW whole ones, are classes; (n, k) of 0 and 1 are labels;
    other floats are numbers. Without test samples, validation samples, else a fifth of each class, are for testing.
    Raises UserError.
    """
    with _opened(place) as arrays:
        parts = _parts(arrays)
        if not parts.get("train") and not (only_test and parts):
            found = f"the arrays {listed(list(arrays))}" if arrays else "no arrays"
            raise UserError(
                f"{place} has {found}: call samples {listed(SAMPLES)}, and labels {listed(LABELS)}, with train_ and "
                "test_ before where there are splits",
                public="its arrays are not called as samples and labels are",
            )
        splits = _splits(place, arrays, parts)
        used = {name for names in parts.values() for name in names}
        left = [name for name in arrays if name not in used]
    test, train = splits.get("test") or splits.get("val"), splits.get("train")
    if "test" in splits and "val" in splits:
        left += parts["val"]
    if only_test or train is None:
        whole = test or train
        assert whole is not None
        train, test = whole.take([]), whole
    elif test is None:
        train, test = split_off_test(train)
    found = f"arrays of shape {train.shape}, {np.asarray(train.x).dtype}: {len(train)} samples for training"
    note = f"{found}, {len(test)} for testing" + (f"; skipped: {listed(left)}" if left else "")
    classes, groups = _classes(train, test)
    return Dataset(name, train, test, classes, groups, notes=(note,))


def _parts(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """By split the names of its samples and of its labels, if both exist."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        words = [word.lower() for word in _NAME.findall(name)]
        split = next((SPLITS[word] for word in words if word in SPLITS), "train")
        rest = [word for word in words if word not in SPLITS]
        for role, known in (("samples", SAMPLES), ("labels", LABELS)):
            if len(rest) == 1 and rest[0] in known:
                found.setdefault(split, {})[role] = name
    return {split: (each["samples"], each["labels"]) for split, each in found.items() if len(each) == 2}


def _splits(place: Path, arrays: Arrays, parts: Mapping[str, tuple[str, str]]) -> dict[str, Split]:
    read = {split: (arrays[samples](), arrays[labels]()) for split, (samples, labels) in parts.items()}
    for split, (x, y) in read.items():
        samples, labels = parts[split]
        if len(x) != len(y):
            raise UserError(
                f"{place}: {samples} has {len(x)} samples and {labels} {len(y)}: give one label a sample",
                public=f"an array has {len(x)} samples and its labels are {len(y)}",
            )
        if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
            text = f"{place}: {samples} is {x.dtype}, {labels} {y.dtype}: give numbers"
            raise UserError(text, public="arrays are not numbers")
        for name, array in ((samples, x), (labels, y)):
            if not all(np.isfinite(array[i : i + CHUNK]).all() for i in range(0, len(array), CHUNK)):
                what = "has values that are not finite (NaN or infinite): correct them, or leave those samples out"
                raise UserError(f"{place}: {name} {what}", public=f"an array {what}")
    labels_of = {split: y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y for split, (_, y) in read.items()}
    whole = np.unique(np.concatenate([y.ravel() for y in labels_of.values()]))
    if len(whole) <= FEW and not (whole % 1).any() and all(y.ndim == 1 for y in labels_of.values()):
        labels_of = {split: y.astype(np.int64) for split, y in labels_of.items()}
    return {split: Split(_samples(x), *_targets(labels_of[split])) for split, (x, _) in read.items()}


def _samples(x: NDArray[Any]) -> NDArray[Any]:
    """Samples with channels first: pictures (n, C, H, W), volumes (n, 1, D, H, W)."""
    if x.dtype.kind == "b" and x.ndim > 2:
        x = x.astype(np.uint8) * 255
    pictures = x.ndim > 2 and x.dtype in PICTURES
    if x.dtype != np.uint8 or not pictures:
        most = np.iinfo(x.dtype).max if pictures else 1
        x = x.astype(np.float32, copy=False) if most == 1 else (x / most).astype(np.float32)
    if x.ndim == 3 and pictures:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return np.moveaxis(x, 3, 1)
    if x.ndim == 4 and x.shape[1] not in (1, 3, 4):
        return x[:, None]
    return x


def _targets(y: NDArray[Any]) -> tuple[torch.Tensor, None, None, Targets | None]:
    zeros = torch.zeros(len(y), dtype=torch.int64)
    if y.ndim == 1 and y.dtype.kind in "biu":
        if y.size and int(y.min()) < 0:
            raise UserError(
                f"label {y.min()} is negative; labels count the classes from 0", public="a label is negative"
            )
        return torch.from_numpy(y.astype(np.int64)), None, None, None
    values = torch.from_numpy(y.astype(np.float32))
    kind: Kind = "labels" if y.ndim == 2 and bool(np.isin(y, (0, 1)).all()) else "numbers"
    if kind == "labels":
        first = np.where(y.any(axis=1), y.argmax(axis=1), y.shape[1])
        return torch.from_numpy(first.astype(np.int64)), None, None, Targets(kind, values)
    return zeros, None, None, Targets(kind, values)


def _classes(train: Split, test: Split) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    if train.learns == "classes":
        highest = max((int(split.labels.max()) for split in (train, test) if len(split)), default=0)
        return tuple(map(str, range(highest + 1))), None
    wide = train.targets.shape[1] if train.targets.dim() > 1 else 1
    names = tuple(map(str, range(wide)))
    return names, (*names, "none") if train.learns == "labels" else ("all",)


@contextmanager
def _opened(place: Path) -> Iterator[Arrays]:
    """The arrays of a place by name. Raises UserError for damaged files, files that expand too much, data in another
    file, and data that need unpickling."""
    kind = "a folder of .npy" if place.is_dir() else f"a {place.suffix.lower()} file"
    try:
        if place.is_dir():
            paths = {path.stem: path for path in sorted(place.glob("*.npy"))}
            check_inside(place, paths.values())
            yield {name: partial(np.load, path, mmap_mode="r", allow_pickle=False) for name, path in paths.items()}
        elif place.suffix.lower() == ".npz":
            with zipfile.ZipFile(place) as archive:
                check_unfolded(place, sum(member.file_size for member in archive.infolist()))
            with np.load(place, allow_pickle=False) as file:
                yield {name: partial(file.__getitem__, name) for name in file.files}
        else:
            yield from _hdf5(place)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, KeyError) as error:
        raise UserError(f"{place} cannot be read: {one_line(error)}", public=f"{kind} cannot be read") from None


def _hdf5(place: Path) -> Iterator[Arrays]:
    """The datasets of an HDF5 file and its groups, without links to other files and data stored in them."""
    if not is_installed("h5py"):
        raise UserError(f"{place}: reading HDF5 needs h5py: pip install 'fewbytes[arrays]'", public="HDF5 needs h5py")
    h5py: Any = importlib.import_module("h5py")

    with h5py.File(place, "r") as file:
        found: list[tuple[str, Any]] = []
        file.visititems(lambda name, each: found.append((name, each)))  # does not follow links to other files
        datasets = {name: each for name, each in found if isinstance(each, h5py.Dataset)}
        datasets = {name: each for name, each in datasets.items() if not each.is_virtual and not each.external}
        check_unfolded(place, sum(each.nbytes for each in datasets.values()))
        yield {name: lambda each=each: np.asarray(each[()]) for name, each in datasets.items()}  # type: ignore[misc]
