"""Image files: how one is opened, and where decoded ones are kept."""

from __future__ import annotations

import io
import os
from pathlib import Path

from PIL import Image

from fewbytes.errors import UserError

FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF")

Item = bytes | Path  # an image not yet decoded


def open_image(item: Item | None, where: Path, index: int) -> Image.Image:
    place = str(item) if isinstance(item, Path) else f"image {index} of {where}"
    if item is None:
        raise UserError(f"{place} is not in the file; only images stored as bytes can be read")
    try:
        image = Image.open(item if isinstance(item, Path) else io.BytesIO(item), formats=FORMATS)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{place} is not a readable image ({', '.join(FORMATS)}); remove or replace it") from error
    return image


def cache_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("FEWBYTES_CACHE") or base / "fewbytes").expanduser()
