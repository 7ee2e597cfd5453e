"""Image files: how one is opened, and where decoded ones are kept."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fewbytes.base.errors import UserError

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")
MOST_PIXELS = 1 << 26
"""An image may have so many, 8192 x 8192: as its first bytes say, before the others are decoded."""

Item = bytes | Path | NDArray[np.uint8]  # an image not yet decoded, or its pixels (height, width, 3)


def place_of(item: Item | None, where: Path, index: int) -> str:
    """What errors call the image: its file, or its number in the file `where`."""
    return str(item) if isinstance(item, Path) else f"image {index} of {where}"


def open_image(item: Item | None, where: Path, index: int) -> Image.Image:
    """The image, decoded. Raises UserError, naming it, if it cannot be."""
    place = place_of(item, where, index)
    if item is None:
        raise UserError(f"{place} is not in the file; only images stored as bytes can be read")
    if isinstance(item, np.ndarray):
        return Image.fromarray(item)
    try:
        with item.open("rb") if isinstance(item, Path) else io.BytesIO(item) as file:
            image = Image.open(file, formats=FORMATS)
            if image.width * image.height <= MOST_PIXELS:
                image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # far more than MOST_PIXELS
        raise _too_large(place) from None
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{place} is not a readable image ({', '.join(FORMATS)}); remove or replace it") from error
    if image.width * image.height > MOST_PIXELS:
        raise _too_large(f"{place} is {image.width:,} x {image.height:,} pixels large and")
    return image


def _too_large(place: str) -> UserError:
    return UserError(f"{place} has more than {MOST_PIXELS:,} pixels, the most that are decoded: scale or cut it")


def squared(image: Image.Image, size: int) -> Image.Image:
    """The image with its shorter side scaled to `size` pixels (bilinear), and of the longer one the middle."""
    return image if image.size == (size, size) else ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)


def cache_folder() -> Path:
    """Where decoded images and fetched data sets are kept: FEWBYTES_CACHE, else in the user's own cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("FEWBYTES_CACHE") or base / "fewbytes").expanduser()
