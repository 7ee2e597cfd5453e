"""Images decoded once and kept as arrays under the cache folder, from where they are memory-mapped."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.data.images import Item, cache_folder, open_image, place_of, squared
from fewbytes.data.sources import Encoded, Files, Read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """Per split its images, uint8 (n, C, H, W), and labels, int64 (n,); the names of the classes."""

    arrays: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
    classes: tuple[str, ...]


def decoded(folder: Path, files: Files, read: Read, image_size: int | None) -> Decoded:
    """The images of a folder's files as `read` gives them, from the cache if they were decoded before."""
    kept = cache_folder() / _key(folder, files, image_size)
    found = _from_cache(kept)
    if found is None:
        found = _decode(*read(), image_size)
        if _to_cache(kept, found):
            found = _from_cache(kept) or found
    return found


def _decode(encoded: dict[str, Encoded], classes: tuple[str, ...], image_size: int | None) -> Decoded:
    arrays = {}
    like: Image.Image | None = None
    for split, source in encoded.items():  # train comes first, and its first image says what all shall look like
        if not len(source.labels):
            raise UserError(f"{source.where} has no samples")
        first = next(source.chunks)
        like = like or open_image(first[0], source.where, 0)
        height, width = (image_size, image_size) if image_size else (like.height, like.width)
        shape = (len(source.labels), 1 if like.mode in ("1", "L") else 3, height, width)
        try:
            x = np.empty(shape, np.uint8)
        except MemoryError:
            raise UserError(
                f"{source.where}: {shape[0]:,} images of {width} x {height} pixels take {math.prod(shape) / 1e9:,.0f} "
                "GB, which this machine has not: give a smaller image_size (--image-size)"
            ) from None
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
    return Decoded(arrays, classes)


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


def _key(folder: Path, files: Files, image_size: int | None) -> str:
    """Changes whenever a file of the data set does (as its name, size and time tell), or the size asked for."""
    digest = hashlib.sha256(f"2 {image_size} {folder.absolute()}".encode())  # 2: of this way of decoding
    for split, paths in files.items():
        for path in paths:
            about = path.stat()
            digest.update(f"\n{split} {path.relative_to(folder)} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _from_cache(kept: Path) -> Decoded | None:
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
        return Decoded(arrays, classes)
    except (OSError, ValueError, KeyError):  # damaged: decode again
        shutil.rmtree(kept, ignore_errors=True)
        return None


def _to_cache(kept: Path, decoded: Decoded) -> bool:
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
