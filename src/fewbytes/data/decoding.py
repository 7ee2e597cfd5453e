"""Decodes images once into arrays in the cache folder, which are memory-mapped."""

from __future__ import annotations

import dataclasses
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.data.formats.dicom import Scale, scale_of
from fewbytes.data.formats.nifti import is_nifti
from fewbytes.data.images import Item, Pixels, cache_folder, place_of, read_image, squared, wrong_image
from fewbytes.data.sources import Encoded, Files, Read

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """Per split images (n, C, H, W), uint8 or, if deeper, float32, and labels, int64 (n,); class names and notes."""

    arrays: dict[str, tuple[NDArray[Any], NDArray[np.int64]]]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """The format of all images of a data set: the number of channels, and whether any has more than 8 bits."""

    channels: int = 1
    deep: bool = False

    @property
    def kind(self) -> type[np.generic]:
        """The type of the pixels."""
        return np.float32 if self.deep else np.uint8

    def holding(self, pixels: Pixels) -> Form:
        """The smallest format that also fits this image."""
        return Form(max(self.channels, pixels.shape[-1]), self.deep or pixels.dtype != np.uint8)


class _Wider(Exception):
    """An image does not fit the format of those before it."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form


def decoded(folder: Path, files: Files, read: Read, image_size: int | None) -> Decoded:
    """The images from `read`, loaded from the cache if they were decoded before.

    All are grey if each is, else of three channels; all are uint8 unless one is deeper. DICOM files share one scale
    (`scale_of`).
    """
    kept = cache_folder() / _key(folder, files, image_size)
    found = _from_cache(kept)
    if found is None:
        found = _decode(folder, files, read, image_size)
        if _to_cache(kept, found):
            found = _from_cache(kept) or found
    return found


def _decode(folder: Path, files: Files, read: Read, image_size: int | None) -> Decoded:
    form: Form | None = None
    paths = [path for each in files.values() for path in each]
    try:
        scale, dicom_note = scale_of(paths)
    except UserError as error:
        raise UserError(f"{folder}: {error}", public=error.public) from None
    while True:
        try:
            found = _decoded(*read(), image_size, form, scale)
            return dataclasses.replace(found, notes=_notes(found, paths, dicom_note))
        except _Wider as wider:  # read again, at most twice
            form = wider.form


def _decoded(
    encoded: dict[str, Encoded],
    classes: tuple[str, ...],
    image_size: int | None,
    form: Form | None,
    scale: Scale | None,
) -> Decoded:
    arrays = {}
    like: Pixels | None = None
    for split, source in encoded.items():  # train comes first; its first image sets the size of all
        if not len(source.labels):
            raise UserError(f"{source.where} has no samples")
        first = next(source.chunks)
        like = read_image(first[0], source.where, 0, scale) if like is None else like
        form = form or Form().holding(like)
        size = (image_size, image_size) if image_size else like.shape[:-1]
        shape = (len(source.labels), form.channels, *size)
        try:
            x = np.empty(shape, form.kind)
        except MemoryError:
            raise UserError(
                f"{source.where}: {shape[0]:,} images of {in_words(size)} pixels take "
                f"{math.prod(shape) * np.dtype(form.kind).itemsize / 1e9:,.0f} GB, more than this machine has: set a "
                "smaller image_size (--image-size)"
            ) from None
        # Decoding small images hardly releases the interpreter's lock: threads would cost more than they gain.
        with ThreadPoolExecutor(os.cpu_count() if math.prod(size) >= 64 * 64 else 1) as pool:
            start = 0
            pending = []
            for chunk in itertools.chain([first], source.chunks):
                pending.append(pool.submit(_decode_into, x, start, chunk, source.where, image_size, form, scale))
                start += len(chunk)
            assert start == len(source.labels), "there is an image for each label"
            try:
                for done in pending:
                    done.result()
            except (UserError, _Wider):
                pool.shutdown(cancel_futures=True)  # errors are raised at once, not after all others are decoded
                raise
        arrays[split] = (x, source.labels)
    return Decoded(arrays, classes)


def _notes(found: Decoded, paths: Sequence[Path], dicom: str) -> tuple[str, ...]:
    """A note on the pixel values of images deeper than 8 bits. `dicom`: the note on DICOM files."""
    arrays = [x for x, _ in found.arrays.values()]
    if all(x.dtype == np.uint8 for x in arrays):
        return ()
    notes = [dicom] if dicom else []
    notes += ["NIfTI: as the files' slope and intercept say"] if any(map(is_nifti, paths)) else []
    if not notes:
        notes = ["whole numbers are parts of the highest of their type, floats as they are"]
    low, high = min(x.min() for x in arrays), max(x.max() for x in arrays)
    return (f"pixels are floats from {low:.3g} to {high:.3g}; {'; '.join(notes)}",)


def _decode_into(
    x: NDArray[Any],
    start: int,
    items: Sequence[Item | None],
    where: Path,
    image_size: int | None,
    form: Form,
    scale: Scale | None,
) -> None:
    for i, item in enumerate(items, start):
        pixels = read_image(item, where, i, scale)
        if (wider := form.holding(pixels)) != form:
            raise _Wider(wider)
        if form.deep and pixels.dtype == np.uint8:
            pixels = (pixels / 255).astype(np.float32)
        if image_size:
            if pixels.ndim != 3:
                raise wrong_image(item, where, i, "is a volume, and --image-size is of pictures: leave it out")
            pixels = squared(pixels, image_size)
        if pixels.shape[:-1] != x.shape[2:]:
            remedy = "set image_size (--image-size), the pixels per side for all images"
            remedy = remedy if pixels.ndim == 3 else "bring volumes to one size"
            raise UserError(
                f"{place_of(item, where, i)} is {in_words(pixels.shape[:-1])} pixels large, the first image "
                f"{in_words(x.shape[2:])}: {remedy}",
                public=f"images differ in size: {remedy}",
            )
        x[i] = np.moveaxis(pixels, -1, 0)


def in_words(size: Sequence[int]) -> str:
    """A size (height, width) or (slices, height, width) as text, width first."""
    return " x ".join(str(side) for side in reversed(size))


def _key(folder: Path, files: Files, image_size: int | None) -> str:
    """A key that changes with any file's name, size or time, and with `image_size`."""
    digest = hashlib.sha256(f"4 {image_size} {folder.absolute()}".encode())  # 4: the version of the decoding
    for split, paths in files.items():
        for path in paths:
            for each in sorted(path.iterdir()) if path.is_dir() else [path]:
                about = each.stat()
                digest.update(f"\n{split} {each.relative_to(folder)} {about.st_size} {about.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _from_cache(kept: Path) -> Decoded | None:
    if not kept.is_dir():
        return None
    try:
        about = json.loads((kept / "about.json").read_text("utf-8"))
        arrays = {}
        for path in kept.glob("*-x.npy"):
            split = path.name.removesuffix("-x.npy")
            x = np.load(path, mmap_mode="r", allow_pickle=False)
            arrays[split] = (x, np.load(kept / f"{split}-y.npy", allow_pickle=False))
        arrays["train"]
        return Decoded(arrays, tuple(about["classes"]), tuple(about["notes"]))
    except (OSError, ValueError, KeyError, TypeError):  # damaged: decode again
        shutil.rmtree(kept, ignore_errors=True)
        return None


def _to_cache(kept: Path, decoded: Decoded) -> bool:
    """Write under another name, then rename, so that readers never see an incomplete folder; False on failure."""
    temporary = None
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=kept.parent))
        for split, (x, y) in decoded.arrays.items():
            np.save(temporary / f"{split}-x.npy", x, allow_pickle=False)
            np.save(temporary / f"{split}-y.npy", y, allow_pickle=False)
        about = {"classes": decoded.classes, "notes": decoded.notes}
        (temporary / "about.json").write_text(json.dumps(about), "utf-8")
        temporary.rename(kept)
        return True
    except OSError as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        if not kept.is_dir():  # else another process finished first, with the same content
            log.warning("decoded images cannot be kept in %s (%s); they are decoded at every start", kept.parent, error)
        return kept.is_dir()
