"""Loads data sets by name or folder; those of the Hugging Face hub are downloaded once.

Decoded images are memory-mapped from the cache folder, `$XDG_CACHE_HOME/fewbytes` (or `~/.cache/fewbytes`;
FEWBYTES_CACHE names another). Nothing is ever unpickled.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, listed, one_line, visible
from fewbytes.base.extras import is_installed
from fewbytes.base.named import check_fetched, elsewhere, places
from fewbytes.data.cifar import cifar_files
from fewbytes.data.clients import Dataset, split_off_test
from fewbytes.data.coco import SIZE, is_coco, read_coco
from fewbytes.data.decoding import decoded
from fewbytes.data.folders import TEST_NAMES, check_inside, holds_classes, holds_files, is_stray, subfolders
from fewbytes.data.formats.arrays import SUFFIXES as ARRAYS
from fewbytes.data.formats.arrays import is_arrays, read_arrays
from fewbytes.data.formats.label_lists import Uncertain, classes_by_folders, label_lists, read_label_lists
from fewbytes.data.formats.yolo import read_yolo, yolo_places
from fewbytes.data.images import cache_folder, squared
from fewbytes.data.masks import holds_masks, read_masks
from fewbytes.data.natural import image_columns
from fewbytes.data.own import is_function, own_data
from fewbytes.data.schema import Schema
from fewbytes.data.sources import Encoded, source
from fewbytes.data.split import Split
from fewbytes.data.table_files import check_kind, is_table, table_files, table_suffix
from fewbytes.data.tables import read_table

log = logging.getLogger(__name__)

HUB = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "svhn": "ufldl-stanford/svhn/cropped_digits",
    "tiny_imagenet": "zh-plus/tiny-imagenet",
    "flowers102": "nelorth/oxford-flowers",
}
"""Short names of data sets on the Hugging Face hub; `owner/name` (and `owner/name/configuration`) works for others."""

HOST = 'set the place of its client\'s data in its node.toml, under [config], as in client-data = "/data/patients.csv"'
"""The remedy on a node whose client's data are missing."""
ABSENT = f"there is no such data set on this node: {HOST}"
ASIDE = ("old", "older", "log", "logs", "backup", "backups", "bak", "archive", "tmp", "temp")
"""Lower-case names of folders beside clients' folders that are not clients."""
HUB_SECONDS = 5.0  # to test whether the hub answers


@dataclass(frozen=True)
class Splitting:
    """How a data set will be split. `apart`: a test split that is split off has no group of a folder in common with
    training. `check`: called with the labels of images, without samples, before they are decoded."""

    apart: bool = True
    check: Callable[[Dataset], object] | None = None


def load_dataset(
    name: str,
    image_size: int | None = None,
    only_test: bool = False,
    schema: Schema | None = None,
    uncertain: Uncertain = "refuse",
    splitting: Splitting = Splitting(),
) -> Dataset:
    """Load the data set called `name`.

    `digits` is scikit-learn's (1,797 float32 images (1, 8, 8) in 0..1, a fixed 80/20 split); `package.module:function`
    returns a data set (`own_data`). Otherwise `name` is a folder: a path, or a name under the folder FEWBYTES_DATA,
    with

    - `train-*.parquet`, at the top, in `data/` or in one subfolder per configuration
    - `<class>/<image>`, `<domain>/<class>/<image>` or `<class>/<group>/<image>`, possibly in folders called `train`,
      `test` or similar, see `labelled_images`
    - `train/images/<image>` and `train/masks/<image>.png`: a class for every pixel, see `read_masks`
    - CIFAR's own pickles, here or in one subfolder (`cifar-10-batches-py`, `cifar-100-python`); no code in them is run
    - `.npz` and `.h5` files, and folders of `.npy`: `read_arrays`
    - images anywhere below, and a table with their names and labels: `read_label_lists`
    - `train.csv` or another table (docs/command-line.md lists all kinds); `name` may also be the table's file itself

    Test samples are `test`, else `validation`, `valid` or `val`, else a fixed 20 % of each class. If there is no such
    folder, the data set is downloaded: a key of HUB, or `owner/name` on the Hugging Face hub.

    Images are uint8 (C, H, W), or float32 if deeper; grey if all are grey, else RGB. `image_size` scales the shorter
    side to this number of pixels and centre-crops the longer one; without it all images must have one size. A folder in
    COCO's format (`coco:<path>`, or any with `annotations/instances_*.json`) is read by `read_coco`, letter-boxed to
    `image_size` (default: SIZE). `schema` is the meaning of a table's columns, or only what is requested of them
    (`read_table`); `uncertain` the treatment of images' uncertain labels. With `only_test` a folder may lack training
    samples. `splitting`: how the data set will be split. Raises UserError if the data set is missing, has no labels or
    a link out of its folder, if images differ in size or cannot be decoded, or if a table does not fit the schema.

    >>> from fewbytes.data import load_dataset
    >>> digits = load_dataset("digits")
    >>> len(digits.train), len(digits.test), digits.train.shape, digits.classes[:3]
    (1438, 359, (1, 8, 8), ('0', '1', '2'))
    """
    if name == "digits":
        return _digits(image_size)
    if is_function(name):
        return own_data(name)
    if not name:
        raise not_found(name, "a name is needed")
    named_coco = name.startswith("coco:")
    folder = find(name.removeprefix("coco:"))
    if folder is None:
        if named_coco:
            raise UserError(f"data set {name!r} not found: there is no such folder")
        check_kind(name)
        folder = _download(name)
    if named_coco or is_coco(folder):
        return read_coco(name, folder, image_size or SIZE)
    if yolo_places(folder):
        return read_yolo(name, folder, image_size or SIZE)
    if holds_masks(folder):
        return read_masks(name, folder, image_size, only_test)
    asked = schema or Schema()
    lists = label_lists(folder, asked)
    if lists and (asked.target or not classes_by_folders(lists)):
        return read_label_lists(name, folder, image_size, asked, uncertain)
    if not lists and not (folder / "train").is_dir() and (files := table_files(folder, only_test)):
        if folder.is_dir():
            check_inside(folder, files.values())
        return read_table(name, files, asked, only_test)
    if is_arrays(folder):
        return read_arrays(name, folder, only_test)
    if folder.is_file():
        raise UserError(f"{folder} is not a table: it cannot be read as Parquet, or holds images: name its folder")
    images_in, untrained = source(folder, apart=splitting.apart), False
    if images_in is None and only_test:
        images_in, untrained = source(folder, TEST_NAMES), True
    if images_in is None:
        split = "test" if only_test else "train"
        layouts = (
            f"there is no {split}-*.parquet, no {split}/<class>/, <class>/ or <domain>/<class>/ folder with images and "
            "no batch of CIFAR"
        )
        remedy = "labels are a Parquet column or the class folders' names"
        raise UserError(
            f"{folder} has no labelled images: {layouts}; found {_contents(folder)}; {remedy}",
            public=f"there are no labelled images: {layouts}; {remedy}",
        )
    files_of, read, notes = images_in
    columns = image_columns(folder, splitting.apart)

    def checked() -> tuple[dict[str, Encoded], tuple[str, ...]]:
        encoded, classes = read()
        if splitting.check is not None:  # before images are decoded, which may take minutes
            splits = {split: _unread(each.labels) for split, each in encoded.items()}
            known = splits["train"], splits.get("test")
            mine, own = split_off_test(known[0]) if known[1] is None else (known[0], known[1])
            splitting.check(Dataset(name, mine, own, classes, columns=columns))
        return encoded, classes

    images = decoded(folder, files_of, checked, image_size)
    splits = {split: Split(x, torch.from_numpy(y)) for split, (x, y) in images.arrays.items()}
    train, test = splits["train"], splits.get("test")
    if untrained:
        train, test = train.take([]), train
    if test is None:
        train, test = split_off_test(train)
    if not notes:
        notes = (f"{len(train)} images of {len(images.classes)} classes for training, {len(test)} for testing",)
    if lists:
        notes += (f"{lists['train'].path.name} names these pictures, and is not used (--target COLUMN would use it)",)
    return Dataset(name, train, test, images.classes, notes=(*images.notes, *notes), columns=columns)


def _unread(labels: NDArray[np.int64]) -> Split:
    return Split(np.empty((len(labels), 0), np.uint8), torch.from_numpy(labels))


def client_folders(name: str) -> list[Path]:
    """The place of each client's data set, by name: the folders, else the tables, in the folder `name` (a path, or a
    name under FEWBYTES_DATA), or that folder itself if it is a data set. Raises UserError if there is none.
    """
    folder = find(name)
    if folder is None:
        if elsewhere():
            raise UserError(f"there is no folder or table {name!r} on this node: {HOST}", public=ABSENT)
        root = os.environ.get("FEWBYTES_DATA")
        under = f" here or under FEWBYTES_DATA={root}" if root else ""
        raise UserError(
            f"--client-data: there is no folder {name!r}{under}: give one with a folder or table per client"
        )
    if folder.is_file() or table_files(folder):
        return [folder]
    parquet = any(any(place.glob("train*.parquet")) for place in (folder, folder / "data"))
    if is_coco(folder) or parquet or holds_classes(folder) or cifar_files(folder) or is_arrays(folder):
        return [folder]
    if label_lists(folder):
        return [folder]
    places = [place for place in subfolders(folder) if place.is_symlink() or holds_files(place)]
    tables = [path for path in sorted(folder.iterdir()) if not is_stray(path) and (is_table(path) or is_arrays(path))]
    sites = [place for place in places if place.name.lower() not in ASIDE]
    places = sites if tables or len(sites) > 1 else places
    if places and tables:
        raise UserError(
            f"--client-data: {folder} has folders ({listed([place.name for place in places], 3)}) and tables "
            f"({listed([path.name for path in tables], 3)}): keep one or the other, each a client's",
            public="--client-data has folders and tables: keep one or the other, each a client's",
        )
    found = places or tables
    if not found:
        raise UserError(
            f"--client-data: {folder} holds no data: it has a folder for each client, with train/<class>/, or a table",
            public="--client-data holds no data: it has a folder for each client, with train/<class>/, or a table",
        )
    check_inside(folder, found)
    passed = [entry.name for entry in sorted(folder.iterdir(), key=lambda e: (is_stray(e), e)) if entry not in found]
    if passed:
        _log_once(f"{folder}: {len(found)} clients; skipped, as no client's data: {listed(passed, 5)}")
    return found


@cache
def _log_once(text: str) -> None:
    """Log a warning once."""
    log.warning("%s", visible(text))


def _digits(image_size: int | None) -> Dataset:
    """The test set of UCI's optical recognition of handwritten digits (Alpaydin and Kaynak, 1998; CC BY 4.0): images of
    8x8 pixels and 17 greys."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"]
    x = torch.tensor(images[:, None] / 16, dtype=torch.float32)
    if image_size:
        images = [squared(image[..., None], image_size)[None, ..., 0] for image in x[:, 0].numpy()]
        x = torch.from_numpy(np.stack(images))
    train, test = split_off_test(Split(x, torch.tensor(labels).long()))
    return Dataset("digits", train, test, tuple("0123456789"))


# Where a data set lies ------------------------------------------------------------------------------------------------


def find(name: str, files: bool = False) -> Path | None:
    """The folder `name` under FEWBYTES_DATA, else at that path; None if there is none. `files`: a file counts, too."""
    for folder in places(name):
        if folder.is_dir() or ((files or table_suffix(folder) or folder.suffix.lower() in ARRAYS) and folder.is_file()):
            return folder
    return None


def holds_table(name: str) -> bool:
    """Whether `name` is a table, or a folder of tables."""
    place = find(name)
    return place is not None and not (place / "train").is_dir() and bool(table_files(place) or table_files(place, True))


def _download(name: str) -> Path:
    """The folder of a data set of the hub, downloaded unless it was before. Raises UserError for every failure."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?", HUB.get(name, name))
    if not match:
        raise not_found(name, "no such name is known")
    repo, configuration = match.groups()
    folder = cache_folder() / "hub" / match[0].replace("/", "--")
    if folder.is_dir():
        return folder
    check_fetched(name)
    if not is_installed("huggingface_hub"):
        raise not_found(name, f"fetching {repo} needs huggingface_hub: pip install 'fewbytes[hub]'")
    import huggingface_hub as hub

    try:
        # One request with a time limit first: without a network the download itself may try for minutes.
        revision = hub.HfApi().dataset_info(repo, timeout=HUB_SECONDS).sha
        partial = folder.with_name(f"{folder.name}.part")
        hub.snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=f"{configuration}/*.parquet" if configuration else "*.parquet",
            local_dir=partial,
        )
        if not any(partial.rglob("*.parquet")):
            raise FileNotFoundError("it has no Parquet files")
        partial.rename(folder)
    except Exception as error:  # the hub's client fails in many ways: no network, offline mode, unknown name, full disk
        raise not_found(name, f"fetching {repo} from the hub failed ({one_line(error, 160)})") from error
    return folder


def not_found(name: str, why: str) -> UserError:
    """The error for a missing data set."""
    if elsewhere():
        return UserError(f"data set {name!r} not found: no such folder under FEWBYTES_DATA, and {why}", public=ABSENT)
    root = os.environ.get("FEWBYTES_DATA")
    known = {"digits", *HUB}
    if root:
        known |= {place.name for place in subfolders(Path(root).expanduser())}
    looked = (
        f"no such folder, nor one under FEWBYTES_DATA={root}" if root else "no such folder, FEWBYTES_DATA is not set"
    )
    close = [] if name in HUB else difflib.get_close_matches(name, sorted(known), n=3)
    return UserError(
        f"data set {name!r} not found: {looked}, and {why}"
        + (f"; did you mean {' or '.join(close)}" if close else "")
        + "; give a folder, set FEWBYTES_DATA to the folder that holds it, or use digits, which is built in"
    )


def _contents(folder: Path) -> str:
    if elsewhere():
        return "something else"
    dangling = " (a link to a missing file)"
    there = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    entries = sorted(entry.name + "/" * entry.is_dir() + dangling * (not entry.exists()) for entry in there)
    more = f" and {len(entries) - 8} more" if len(entries) > 8 else ""
    inside = folder / "train"
    if inside.is_dir():
        loose = [entry for entry in inside.iterdir() if entry.is_file()]
        more += f" ({len(loose)} files straight in train/)" if loose else ""
    return (", ".join(entries[:8]) or "nothing") + more
