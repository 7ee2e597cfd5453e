"""Reads image files as arrays of pixels without loss, and names the cache folder for decoded images."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fewbytes.base.errors import UserError
from fewbytes.data.formats import dicom
from fewbytes.data.formats.deep import deep_png, deep_tiff, further_channel
from fewbytes.data.formats.nifti import is_nifti, read_nifti

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")
MOST_PIXELS = 1 << 26
"""Maximum number of pixels, 8192 x 8192, checked in the header before decoding."""
BITS, SAMPLE_FORMAT, PHOTOMETRIC, SUBFILE, ORIENTATION = 258, 339, 262, 254, 274  # tags of TIFF and EXIF
CHANNELS, EXTRA = 277, 338  # of TIFF
SIGNED, WHITE_IS_ZERO = 2, 0  # of SAMPLE_FORMAT, of PHOTOMETRIC
SIDEWAYS = (5, 6, 7, 8)  # values of ORIENTATION that swap width and height
TURNS = {3: 2, 6: 3, 8: 1}  # quarter turns to the left that show an image upright, by its ORIENTATION
MIRRORED = {2: 1, 4: 3, 5: 8, 7: 6}  # mirrored values of ORIENTATION, with the value after mirroring back
_DEEP = {"PNG": deep_png, "TIFF": deep_tiff}
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

Item = bytes | Path | NDArray[np.uint8]  # an image not yet decoded, or its pixels (height, width, 3)
Pixels = NDArray[Any]
"""An image (height, width, 1 or 3), or a volume (slices, height, width, channels): uint8, or float32 if deeper than 8
bits. Whole numbers are divided by the maximum of their type, so that they mean the same at every site; floats are not.
"""


def place_of(item: Item | None, where: Path, index: int) -> str:
    """The name of an image in errors: its file, or its number in the file `where`."""
    return str(item) if isinstance(item, Path) else f"image {index} of {where}"


def wrong_image(item: Item | None, where: Path, index: int, what: str) -> UserError:
    """The error for an image. The server's version does not name the image."""
    return UserError(f"{place_of(item, where, index)} {what}", public=f"an image {what}")


def read_image(item: Item | None, where: Path, index: int, scale: dicom.Scale | None = None) -> Pixels:
    """An image as a viewer shows it: upright by its EXIF data, palettes as colours, transparency on white, DICOM on a
    `scale`. Raises UserError as `raw_image`, and for pixels that are not finite."""
    if isinstance(item, np.ndarray):
        return item
    if isinstance(item, Path) and (item.is_dir() or is_nifti(item) or item.suffix.lower() in dicom.SUFFIXES):
        try:
            return read_nifti(item) if is_nifti(item) else dicom.read_dicom(item, scale)
        except UserError as error:
            raise wrong_image(item, where, index, str(error)) from None
    raw = raw_image(item, where, index)
    if isinstance(raw, np.ndarray):
        pixels = raw
    elif raw.has_transparency_data:
        grey = raw.mode in ("L", "LA", "La")
        white = Image.new("RGBA", raw.size, (255, 255, 255, 255))
        white.alpha_composite(raw.convert("RGBA"))
        pixels = np.asarray(white.convert("L" if grey else "RGB"))
    else:
        pixels = np.asarray(raw if raw.mode in ("L", "RGB") else raw.convert("L" if raw.mode == "1" else "RGB"))
    if pixels.dtype != np.uint8 and not np.isfinite(pixels).all():
        raise wrong_image(item, where, index, "has pixels that are not finite (NaN or infinite): correct it")
    return pixels if pixels.ndim == 3 else pixels[..., None]


def raw_image(item: bytes | Path | None, where: Path, index: int) -> Image.Image | Pixels:
    """The image, decoded and upright, in its file's mode; as `Pixels` if it is deeper than 8 bits.

    Raises UserError, naming it, if it is too large, has several pages, or cannot be decoded.
    """
    if item is None:
        raise wrong_image(item, where, index, "is not in the file; only images stored as bytes can be read")
    try:
        return _upright(item.read_bytes() if isinstance(item, Path) else item)
    except UserError as error:
        raise wrong_image(item, where, index, str(error)) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # far above MOST_PIXELS
        raise wrong_image(item, where, index, _too_large("")) from None
    except (OSError, ValueError, SyntaxError) as error:
        what = f"is not a readable image ({', '.join(FORMATS)}); remove or replace it"
        raise wrong_image(item, where, index, what) from error


def _too_large(size: str) -> str:
    return f"{size}has more than {MOST_PIXELS:,} pixels, the most that are decoded: scale or cut it"


def _upright(data: bytes) -> Image.Image | Pixels:
    """The upright image. Raises UserError with what is wrong, without its name."""
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if not data.startswith(_TIFF):
            raise
        return _of_ones(deep_tiff(data))
    if image.width * image.height > MOST_PIXELS:
        raise UserError(_too_large(f"is {image.width:,} x {image.height:,} pixels large and "))
    if (pages := _pages(image)) > 1:
        raise UserError(f"has {pages} pages: give each image a file of its own")
    if image.format == "TIFF":
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        further_channel(tags.get(PHOTOMETRIC, 1), tags.get(CHANNELS, 1), tags.get(EXTRA, ()))
    deep, turn = _is_deep(image), image.getexif().get(ORIENTATION, 1)
    image.load()  # so that truncated images are refused here
    upright = ImageOps.exif_transpose(image)
    if not deep:
        return upright
    if image.mode[0] in "IF":
        return _of_ones(_on_white(_deep_grey(upright, getattr(image, "tag_v2", {})), image))
    colours = _on_white(_DEEP[str(image.format)](data), image)
    if turn in MIRRORED:
        colours, turn = colours[:, ::-1], MIRRORED[turn]
    return _of_ones(np.rot90(colours, TURNS.get(turn, 0)))


def _pages(image: Image.Image) -> int:
    """The number of pictures in a file, without smaller versions, which some cameras add."""
    if image.format not in ("GIF", "TIFF", "PNG", "WEBP") or (frames := getattr(image, "n_frames", 1)) == 1:
        return 1
    if image.format != "TIFF":
        return int(frames)
    pages = 0
    for number in range(frames):
        image.seek(number)
        pages += not image.tag_v2.get(SUBFILE, 0) & 1  # type: ignore[attr-defined]
    image.seek(0)
    return pages


def _is_deep(image: Image.Image) -> bool:
    """Whether pixels are other numbers than 0 to 255."""
    if image.mode[0] in "IF":
        return True
    if image.format == "TIFF":
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        return max(tags.get(BITS, (1,))) > 8 or any(kind != 1 for kind in tags.get(SAMPLE_FORMAT, (1,)))
    return any(";16" in str(tile.args) for tile in getattr(image, "tile", ()))


def _deep_grey(image: Image.Image, tags: Mapping[int, Any]) -> NDArray[Any]:
    """Pixels (height, width) in their file's type; Pillow has int32 or uint16. `tags`: a TIFF's."""
    values = np.asarray(image)
    if image.mode == "I" and tags:
        signed = tags.get(SAMPLE_FORMAT, (1,))[0] == SIGNED
        values = values.astype(np.int16) if tags[BITS] == (16,) else values if signed else values.view(np.uint32)
    elif image.mode == "I":
        values = values.astype(np.uint16)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO and values.dtype.kind == "u":
        values = np.iinfo(values.dtype).max - values
    return values


def _on_white(values: NDArray[Any], image: Image.Image) -> NDArray[Any]:
    """Pixels with a PNG's transparent colour replaced by white."""
    if (clear := image.info.get("transparency")) is None or values.dtype != np.uint16:
        return values
    is_clear = values == np.asarray(clear)
    return np.where(is_clear if values.ndim == 2 else is_clear.all(axis=2, keepdims=True), np.uint16(65535), values)


def _of_ones(deep: NDArray[Any]) -> Pixels:
    """Pixels of any type as float32 (height, width, 1 or 3), whole numbers divided by their type's maximum,
    transparency on white. Raises UserError for another number of channels."""
    values = deep[..., None] if deep.ndim == 2 else deep
    if values.ndim != 3 or values.shape[2] > 4:
        raise UserError(f"has pixels of shape {deep.shape}, neither grey nor colours: give one picture a file")
    ones = values.astype(np.float64)
    if values.dtype.kind in "iu":
        ones /= np.iinfo(values.dtype).max
    if values.shape[2] in (2, 4):
        ones, alpha = ones[..., :-1], ones[..., -1:]
        ones = ones * alpha + (1 - alpha)
    return np.ascontiguousarray(ones, dtype=np.float32)


def squared(pixels: Pixels, size: int, how: Image.Resampling = Image.Resampling.BILINEAR) -> Pixels:
    """An image (height, width, channels) with its shorter side scaled to `size` pixels and the longer one cropped to
    the middle."""
    if pixels.shape[:2] == (size, size):
        return pixels
    if pixels.dtype == np.uint8:
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        return np.asarray(ImageOps.fit(image, (size, size), how)).reshape(size, size, -1)
    bands = [Image.fromarray(np.ascontiguousarray(band)) for band in np.moveaxis(pixels, 2, 0)]
    return np.stack([np.asarray(ImageOps.fit(band, (size, size), how)) for band in bands], axis=2)


def in_bytes(pixels: Pixels) -> NDArray[np.uint8]:
    """Pixels as uint8 (height, width, 3): values 0..1 become 0..255, other floats are scaled from their minimum to
    their maximum."""
    if pixels.dtype != np.uint8:
        low, high = min(0.0, float(pixels.min())), max(1.0, float(pixels.max()))
        pixels = ((pixels - low) / (high - low) * 255).round().astype(np.uint8)
    return np.broadcast_to(pixels, (*pixels.shape[:2], 3))


def cache_folder() -> Path:
    """The folder for decoded images and downloads: FEWBYTES_CACHE, else in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("FEWBYTES_CACHE") or base / "fewbytes").expanduser()
