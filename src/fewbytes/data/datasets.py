"""Data sets by name or folder: the Hugging Face Parquet layout and image folders, decoded once and kept as arrays.

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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image

from fewbytes.data.coco import SIZE, is_coco, read_coco
from fewbytes.data.images import Item, cache_folder, open_image
from fewbytes.data.split import Dataset, Split
from fewbytes.errors import UserError

log = logging.getLogger(__name__)

HUB = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
}
"""Short names of data sets on the Hugging Face hub; `owner/name` (and `owner/name/configuration`) works for others."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
TEST_NAMES = ("test", "validation", "val")
LABEL_NAMES = ("label", "labels", "fine_label")
CHUNK = 256  # images handed to a decoding thread at a time
HUB_SECONDS = 5.0  # to learn whether the hub answers at all

Files = dict[str, list[Path]]  # "train" and perhaps "test": Parquet files or images


def load_dataset(name: str, image_size: int = SIZE, only_test: bool = False) -> Dataset:
    """The data set called `name`.

    `digits` is scikit-learn's (1,797 float32 images (1, 8, 8) in 0..1, a fixed 80/20 split). Otherwise a folder: a
    path, or a name under the folder that FEWBYTES_DATA names, with `train-*.parquet` (at the top, in `data/` or in one
    subfolder per configuration) or `train/<class>/<image>`. Test samples are `test`, else `validation` or `val`, else
    a fixed 20 % of each class. Otherwise it is downloaded: the keys of HUB, or `owner/name` on the Hugging Face hub.

    Images are uint8 (C, H, W), all of the first one's size, and grey if it is, else RGB. A folder in COCO's format
    (`coco:<path>`, or any with `annotations/instances_*.json`) is read as `read_coco` does, letter-boxed to
    `image_size`. With `only_test` a folder may have no training samples. Raises UserError if there is no such data set,
    it has no labels, or an image cannot be decoded.
    """
    if name == "digits":
        return _digits()
    if not name:
        raise _not_found(name, "a name is needed")
    named_coco = name.startswith("coco:")
    folder = _find(name.removeprefix("coco:"))
    if folder is None:
        if named_coco:
            raise UserError(f"data set {name!r} not found: there is no such folder")
        folder = _download(name)
    if named_coco or is_coco(folder):
        return read_coco(name, folder, image_size)
    files, read, untrained = _parquet_files(folder), _read_parquet, False
    if not files:
        files, read = _image_files(folder), _read_folder
    if not files and only_test:
        files, read, untrained = _parquet_files(folder, TEST_NAMES), _read_parquet, True
        if not files:
            files, read = _image_files(folder, TEST_NAMES), _read_folder
    if not files:
        split = "test" if only_test else "train"
        raise UserError(
            f"{folder} has no labelled images: there is no {split}-*.parquet and no {split}/<class>/ folder with "
            f"images; found {_contents(folder)}; labels are a Parquet column or the class folders' names"
        )
    kept = cache_folder() / _key(folder, files)
    decoded = _from_cache(kept)
    if decoded is None:
        decoded = _decode(*read(folder, files))
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
    places = _subfolders(folder)
    parquet = any(any(place.glob("train*.parquet")) for place in (folder, folder / "data"))
    if is_coco(folder) or parquet or (folder / "train").is_dir():
        return [folder]
    if not places:
        raise UserError(f"client_data: {folder} is empty: it holds a folder for each client, each with train/<class>/")
    return places


def _digits() -> Dataset:
    from sklearn.datasets import load_digits  # slow to import, and only needed here

    data = load_digits()
    whole = Split(torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target).long())
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
        known |= {place.name for place in _subfolders(Path(root).expanduser())}
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
    configurations = {place: files for place in _subfolders(folder) if (files := splits(place))}
    if len(configurations) > 1:
        names = ", ".join(place.name for place in configurations)
        raise UserError(f"{folder} holds several configurations ({names}); name one of those folders")
    return next(iter(configurations.values()), {})


def _image_files(folder: Path, first: Sequence[str] = ("train",)) -> Files:
    def images(split: str) -> list[Path]:
        inside = (path for place in _subfolders(folder / split) for path in sorted(place.iterdir()))
        return [path for path in inside if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]

    train, test = (next((found for split in names if (found := images(split))), []) for names in (first, TEST_NAMES))
    return {"train": train, **({"test": test} if test and test != train else {})} if train else {}


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_folder(folder: Path, files: Files) -> tuple[dict[str, _Encoded], tuple[str, ...]]:
    classes = tuple(sorted({path.parent.name for path in files["train"]}))
    number = {name: i for i, name in enumerate(classes)}
    encoded = {}
    for split, paths in files.items():
        if unknown := {path.parent.name for path in paths} - set(classes):
            raise UserError(f"{paths[0].parent.parent} has classes that train/ has not: {', '.join(sorted(unknown))}")
        labels = np.array([number[path.parent.name] for path in paths], dtype=np.int64)
        encoded[split] = _Encoded(iter([paths[i : i + CHUNK] for i in range(0, len(paths), CHUNK)]), labels, folder)
    return encoded, classes


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
    """Names of the image and the label column, and the names of the classes, if the schema tells."""
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


def _decode(encoded: dict[str, _Encoded], classes: tuple[str, ...]) -> _Decoded:
    arrays = {}
    like: Image.Image | None = None
    for split, source in encoded.items():  # train comes first, and its first image says what all shall look like
        if not len(source.labels):
            raise UserError(f"{source.where} has no samples")
        first = next(source.chunks)
        like = like or open_image(first[0], source.where, 0)
        x = np.empty((len(source.labels), 1 if like.mode in ("1", "L") else 3, like.height, like.width), np.uint8)
        # Decoding small images hardly leaves the interpreter's lock: there, threads cost more than they bring.
        with ThreadPoolExecutor(os.cpu_count() if like.height * like.width >= 64 * 64 else 1) as pool:
            start = 0
            pending = []
            for chunk in itertools.chain([first], source.chunks):
                pending.append(pool.submit(_decode_into, x, start, chunk, source.where))
                start += len(chunk)
            for done in pending:
                done.result()
        arrays[split] = (x, source.labels)
    return _Decoded(arrays, classes)


def _decode_into(x: NDArray[np.uint8], start: int, items: Sequence[Item | None], where: Path) -> None:
    _, channels, height, width = x.shape
    mode = "L" if channels == 1 else "RGB"
    for i, item in enumerate(items, start):
        image = open_image(item, where, i)
        if image.mode != mode:
            image = image.convert(mode)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        x[i] = np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


# The cache ------------------------------------------------------------------------------------------------------------


def _key(folder: Path, files: Files) -> str:
    """Changes whenever a file of the data set does (as its name, size and time tell)."""
    digest = hashlib.sha256(f"1 {folder.absolute()}".encode())  # 1: of this layout of the cache
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
