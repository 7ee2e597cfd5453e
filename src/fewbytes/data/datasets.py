"""Data sets by name or folder: the Hugging Face Parquet layout, image folders and CIFAR's own files, decoded once and
kept as arrays.

Decoded images lie under the cache folder, `$XDG_CACHE_HOME/fewbytes` (or `~/.cache/fewbytes`; FEWBYTES_CACHE names
another), and are memory-mapped from there. Nothing is ever unpickled.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data.cifar import cifar_files, read_cifar
from fewbytes.data.coco import SIZE, is_coco, read_coco
from fewbytes.data.folders import TEST_NAMES, Labelled, holds_classes, labelled_images, subfolders, test_images
from fewbytes.data.images import Item, cache_folder, open_image, place_of, squared
from fewbytes.data.split import Dataset, Split

log = logging.getLogger(__name__)

HUB = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
}
"""Short names of data sets on the Hugging Face hub; `owner/name` (and `owner/name/configuration`) works for others."""

LABEL_NAMES = ("label", "labels", "fine_label")
CHUNK = 256  # images handed to a decoding thread at a time
HUB_SECONDS = 5.0  # to learn whether the hub answers at all

Files = dict[str, list[Path]]  # of a data set, by what they are to it


def load_dataset(name: str, image_size: int | None = None, only_test: bool = False) -> Dataset:
    """The data set called `name`.

    `digits` is scikit-learn's (1,797 float32 images (1, 8, 8) in 0..1, a fixed 80/20 split). Otherwise a folder: a
    path, or a name under the folder that FEWBYTES_DATA names, with

    - `train-*.parquet`, at the top, in `data/` or in one subfolder per configuration
    - `train/<class>/<image>`, or `train/<class>/images/<image>` as Tiny-ImageNet
    - `<class>/<image>`, or `<domain>/<class>/<image>`: all domains are read as one data set
    - CIFAR's own pickles, here or in one subfolder (`cifar-10-batches-py`, `cifar-100-python`); no code in them is run

    Test samples are `test`, else `validation`, `valid` or `val`, else a fixed 20 % of each class. Otherwise it is
    downloaded: the keys of HUB, or `owner/name` on the Hugging Face hub.

    Images are uint8 (C, H, W), grey if the first one is, else RGB. With `image_size` the shorter side is scaled to so
    many pixels and the middle of the longer one taken; without it all must be of one size. A folder in COCO's format
    (`coco:<path>`, or any with `annotations/instances_*.json`) is read as `read_coco` does, letter-boxed to
    `image_size` (SIZE unless given). With `only_test` a folder may have no training samples. Raises UserError if there
    is no such data set, it has no labels, its images differ in size, or one cannot be decoded.
    """
    if name == "digits":
        return _digits(image_size)
    if not name:
        raise _not_found(name, "a name is needed")
    named_coco = name.startswith("coco:")
    folder = _find(name.removeprefix("coco:"))
    if folder is None:
        if named_coco:
            raise UserError(f"data set {name!r} not found: there is no such folder")
        folder = _download(name)
    if named_coco or is_coco(folder):
        return read_coco(name, folder, image_size or SIZE)
    source, untrained = _source(folder), False
    if source is None and only_test:
        source, untrained = _source(folder, TEST_NAMES), True
    if source is None:
        split = "test" if only_test else "train"
        raise UserError(
            f"{folder} has no labelled images: there is no {split}-*.parquet, no {split}/<class>/, <class>/ or "
            f"<domain>/<class>/ folder with images and no batch of CIFAR; found {_contents(folder)}; "
            "labels are a Parquet column or the class folders' names"
        )
    files, read = source
    kept = cache_folder() / _key(folder, files, image_size)
    decoded = _from_cache(kept)
    if decoded is None:
        decoded = _decode(*read(), image_size)
        if _to_cache(kept, decoded):
            decoded = _from_cache(kept) or decoded
    splits = {split: Split(x, torch.from_numpy(y)) for split, (x, y) in decoded.arrays.items()}
    train, test = splits["train"], splits.get("test")
    if untrained:
        train, test = train.take([]), train
    if test is None:
        train, test = _split_off_test(train)
    return Dataset(name, train, test, decoded.classes)


def client_folders(name: str) -> list[Path]:
    """Where each client's data set lies, in the order of names: the folders in the folder called `name` (a path, or one
    under FEWBYTES_DATA), or that folder itself if it is a data set. Raises UserError if there is no such folder."""
    folder = _find(name)
    if folder is None:
        root = os.environ.get("FEWBYTES_DATA")
        under = f" here or under FEWBYTES_DATA={root}" if root else ""
        raise UserError(
            f"client_data: there is no folder {name!r}{under}: give one that holds a folder for each client"
        )
    places = subfolders(folder)
    parquet = any(any(place.glob("train*.parquet")) for place in (folder, folder / "data"))
    if is_coco(folder) or parquet or (folder / "train").is_dir() or holds_classes(folder) or cifar_files(folder):
        return [folder]
    if not places:
        raise UserError(f"client_data: {folder} is empty: it holds a folder for each client, each with train/<class>/")
    return places


def _digits(image_size: int | None) -> Dataset:
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    data = load_digits()
    x = torch.tensor(data.images[:, None] / 16, dtype=torch.float32)
    if image_size:
        images = [np.asarray(squared(Image.fromarray(image), image_size)) for image in x[:, 0].numpy()]
        x = torch.from_numpy(np.stack(images)[:, None])
    whole = Split(x, torch.tensor(data.target).long())
    train, test = _split_off_test(whole)
    return Dataset("digits", train, test, tuple(str(c) for c in data.target_names))


def _split_off_test(whole: Split) -> tuple[Split, Split]:
    """A fixed fifth of every class for testing, the rest for training."""
    rng = np.random.RandomState(0)
    labels = whole.labels.numpy()
    in_test = np.zeros(len(labels), dtype=bool)
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        in_test[members[: round(len(members) / 5)]] = True
    return whole.take(np.flatnonzero(~in_test)), whole.take(np.flatnonzero(in_test))


# Where a data set lies ------------------------------------------------------------------------------------------------


def _find(name: str) -> Path | None:
    root = os.environ.get("FEWBYTES_DATA")
    for folder in ([Path(root).expanduser() / name] if root else []) + [Path(name).expanduser()]:
        if folder.is_dir():
            return folder
    return None


def _download(name: str) -> Path:
    """The folder of a data set of the hub, fetched unless it was before. Every failure ends in one UserError."""
    match = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)(?:/(\w[\w.-]*))?", HUB.get(name, name))
    if not match:
        raise _not_found(name, "no such name is known")
    repo, configuration = match.groups()
    folder = cache_folder() / "hub" / match[0].replace("/", "--")
    if folder.is_dir():
        return folder
    try:
        import huggingface_hub as hub

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
    except ImportError as error:
        raise _not_found(name, f"huggingface_hub, which fetches {repo}, is not installed") from error
    except Exception as error:  # the hub's client fails in many ways: no network, offline mode, no such name, disk full
        reason = " ".join(str(error).split())[:160]
        raise _not_found(name, f"fetching {repo} from the hub failed ({type(error).__name__}: {reason})") from error
    return folder


def _not_found(name: str, why: str) -> UserError:
    root = os.environ.get("FEWBYTES_DATA")
    known = {"digits", *HUB}
    if root:
        known |= {place.name for place in subfolders(Path(root).expanduser())}
    looked = (
        f"no such folder, nor one under FEWBYTES_DATA={root}" if root else "no such folder, FEWBYTES_DATA is not set"
    )
    close = difflib.get_close_matches(name, sorted(known - {name}), n=3)
    return UserError(
        f"data set {name!r} not found: {looked}, and {why}"
        + (f"; did you mean {' or '.join(close)}" if close else "")
        + "; give a folder, set FEWBYTES_DATA to the folder that holds it, or use digits, which is built in"
    )


def _contents(folder: Path) -> str:
    entries = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir() if not entry.name.startswith("."))
    more = f" and {len(entries) - 8} more" if len(entries) > 8 else ""
    inside = folder / "train"
    if inside.is_dir():
        loose = [entry for entry in inside.iterdir() if entry.is_file()]
        more += f" ({len(loose)} files straight in train/)" if loose else ""
    return (", ".join(entries[:8]) or "nothing") + more


# Reading files --------------------------------------------------------------------------------------------------------


def _source(
    folder: Path, first: Sequence[str] = ("train",)
) -> tuple[Files, Callable[[], tuple[dict[str, _Encoded], tuple[str, ...]]]] | None:
    """The files of the data set in a folder, and what reads them; None if it has no split called as one of `first`."""
    if parquet := _parquet_files(folder, first):
        return parquet, partial(_read_parquet, folder, parquet)
    if images := labelled_images(folder) if "train" in first else {"train": test_images(folder)}:
        by_class: Files = {}
        for split, found in images.items():
            for path, name in found:
                by_class.setdefault(f"{split} {name}", []).append(path)
        return (by_class, partial(_read_images, folder, images)) if by_class else None
    if cifar := cifar_files(folder):
        return cifar, partial(_read_cifar, cifar)
    return None


@dataclass(frozen=True)
class _Encoded:
    """The images of one split before decoding, in chunks, their labels, and where they lie (for errors)."""

    chunks: Iterator[Sequence[Item | None]]
    labels: NDArray[np.int64]
    where: Path


@dataclass(frozen=True)
class _Decoded:
    """Per split its images, uint8 (n, C, H, W), and labels, int64 (n,); the names of the classes."""

    arrays: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
    classes: tuple[str, ...]


def _parquet_files(folder: Path, first: Sequence[str] = ("train",)) -> Files:
    """The Parquet files of the first place that has a split called as one of `first`; nothing if none has."""

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


def _read_images(folder: Path, images: dict[str, Labelled]) -> tuple[dict[str, _Encoded], tuple[str, ...]]:
    classes = tuple(sorted({name for _, name in images["train"]}))
    number = {name: i for i, name in enumerate(classes)}
    encoded = {}
    for split, found in images.items():
        if unknown := {name for _, name in found} - set(classes):
            first = found[0][0].relative_to(folder).parts[0]
            raise UserError(f"{folder / first} has classes that train/ has not: {', '.join(sorted(unknown))}")
        labels = np.array([number[name] for _, name in found], dtype=np.int64)
        encoded[split] = _Encoded(_chunks([path for path, _ in found]), labels, folder)
    return encoded, classes


def _read_cifar(files: Files) -> tuple[dict[str, _Encoded], tuple[str, ...]]:
    splits, classes = read_cifar(files)
    return {split: _Encoded(_chunks(x), y, files[split][0].parent) for split, (x, y) in splits.items()}, classes


def _chunks(items: Sequence[Item] | NDArray[np.uint8]) -> Iterator[Sequence[Item]]:
    return (list(items[i : i + CHUNK]) for i in range(0, len(items), CHUNK))


def _read_parquet(folder: Path, files: Files) -> tuple[dict[str, _Encoded], tuple[str, ...]]:
    try:
        schema = pq.read_schema(files["train"][0])
        image, label, classes = _columns(schema, files["train"][0])
        encoded = {}
        for split, paths in files.items():
            column = pa.chunked_array([c for p in paths for c in pq.read_table(p, columns=[label]).column(0).chunks])
            if column.null_count:
                raise UserError(f"{paths[0]} has {column.null_count} samples without a label; remove them")
            labels = column.to_numpy().astype(np.int64)
            encoded[split] = _Encoded(_parquet_chunks(paths, image), labels, paths[0])
    except (pa.ArrowException, KeyError) as error:
        raise UserError(f"{folder} has a Parquet file that cannot be read: {' '.join(str(error).split())}") from error
    highest = max(int(e.labels.max(initial=-1)) for e in encoded.values())
    classes = classes or tuple(str(c) for c in range(highest + 1))
    for e in encoded.values():
        if len(e.labels) and not 0 <= e.labels.min() <= e.labels.max() < len(classes):
            raise UserError(f"{e.where} has labels outside 0..{len(classes) - 1} (from {e.labels.min()}); correct them")
    return encoded, classes


def _columns(schema: pa.Schema, path: Path) -> tuple[str, str, tuple[str, ...]]:
    """Names of the image and the label column, and the names of the classes, if the schema has them."""
    metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = metadata.get("info", {}).get("features", {})
    named = {k: v["names"] for k, v in features.items() if isinstance(v, dict) and v.get("_type") == "ClassLabel"}
    images = [field.name for field in schema if _holds_images(field.type)]
    labels = [name for name in (*LABEL_NAMES, *named) if name in schema.names and _is_label(schema.field(name).type)]
    if not labels or not images:
        wanted = "an integer label column (label, labels, fine_label)" if images else "an image column (image, img)"
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise UserError(f"{path} has no {wanted.partition(' ')[2]}; found the columns {columns}")
    return min(images, key=lambda name: name not in ("image", "img")), labels[0], tuple(named.get(labels[0], ()))


def _is_label(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind))


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_images(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _parquet_chunks(paths: Sequence[Path], column: str) -> Iterator[Sequence[Item | None]]:
    for path in paths:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=CHUNK, columns=[column]):
                images = batch.column(0)
                yield (images.field("bytes") if pa.types.is_struct(images.type) else images).to_pylist()


# Decoding -------------------------------------------------------------------------------------------------------------


def _decode(encoded: dict[str, _Encoded], classes: tuple[str, ...], image_size: int | None) -> _Decoded:
    arrays = {}
    like: Image.Image | None = None
    for split, source in encoded.items():  # train comes first, and its first image says what all shall look like
        if not len(source.labels):
            raise UserError(f"{source.where} has no samples")
        first = next(source.chunks)
        like = like or open_image(first[0], source.where, 0)
        height, width = (image_size, image_size) if image_size else (like.height, like.width)
        x = np.empty((len(source.labels), 1 if like.mode in ("1", "L") else 3, height, width), np.uint8)
        # Decoding small images hardly leaves the interpreter's lock: there, threads cost more than they bring.
        with ThreadPoolExecutor(os.cpu_count() if like.height * like.width >= 64 * 64 else 1) as pool:
            start = 0
            pending = []
            for chunk in itertools.chain([first], source.chunks):
                pending.append(pool.submit(_decode_into, x, start, chunk, source.where, image_size))
                start += len(chunk)
            try:
                for done in pending:
                    done.result()
            except UserError:
                pool.shutdown(cancel_futures=True)  # what is wrong is raised at once, not after all others are decoded
                raise
        arrays[split] = (x, source.labels)
    return _Decoded(arrays, classes)


def _decode_into(
    x: NDArray[np.uint8], start: int, items: Sequence[Item | None], where: Path, image_size: int | None
) -> None:
    _, channels, height, width = x.shape
    mode = "L" if channels == 1 else "RGB"
    for i, item in enumerate(items, start):
        image = open_image(item, where, i)
        if image.mode != mode:
            image = image.convert(mode)
        if image_size:
            image = squared(image, image_size)
        if image.size != (width, height):
            raise UserError(
                f"{place_of(item, where, i)} is {image.width} x {image.height} pixels large, the first image "
                f"{width} x {height}: give image_size (--image-size), the pixels a side that all are to have"
            )
        x[i] = np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


# The cache ------------------------------------------------------------------------------------------------------------


def _key(folder: Path, files: Files, image_size: int | None) -> str:
    """Changes whenever a file of the data set does (as its name, size and time tell), or the size asked for."""
    digest = hashlib.sha256(f"2 {image_size} {folder.absolute()}".encode())  # 2: of this way of decoding
    for split, paths in files.items():
        for path in paths:
            about = path.stat()
            digest.update(f"\n{split} {path.relative_to(folder)} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _from_cache(kept: Path) -> _Decoded | None:
    if not kept.is_dir():
        return None
    try:
        classes = tuple(json.loads((kept / "classes.json").read_text("utf-8")))
        arrays = {}
        for path in kept.glob("*-x.npy"):
            split = path.name.removesuffix("-x.npy")
            x = np.load(path, mmap_mode="r", allow_pickle=False)
            arrays[split] = (x, np.load(kept / f"{split}-y.npy", allow_pickle=False))
        arrays["train"]
        return _Decoded(arrays, classes)
    except (OSError, ValueError, KeyError):  # damaged: decode again
        shutil.rmtree(kept, ignore_errors=True)
        return None


def _to_cache(kept: Path, decoded: _Decoded) -> bool:
    """Written beside and renamed, so that a reader never sees half of it; False if that was not possible."""
    temporary = None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=kept.parent))
        for split, (x, y) in decoded.arrays.items():
            np.save(temporary / f"{split}-x.npy", x, allow_pickle=False)
            np.save(temporary / f"{split}-y.npy", y, allow_pickle=False)
        (temporary / "classes.json").write_text(json.dumps(decoded.classes), "utf-8")
        temporary.rename(kept)
        return True
    except OSError as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        if not kept.is_dir():  # else another process was faster, with the same content
            log.warning("decoded images cannot be kept in %s (%s); they are decoded at every start", kept.parent, error)
        return kept.is_dir()
