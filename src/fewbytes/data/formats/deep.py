"""Pictures that Pillow reads with 8 bits per colour, or not at all: 16-bit colour PNG, and TIFF of any numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewbytes.base.errors import UserError
from fewbytes.base.extras import is_installed

COLOURS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3, 8: 3}
"""Channels of a TIFF's colours, by its tag PhotometricInterpretation: grey, RGB, a palette, CMYK, YCbCr, Lab."""
PREMULTIPLIED, TRANSPARENCY = 1, 2  # values of a TIFF's tag ExtraSamples for a further channel


def further_channel(photometric: int, channels: int, extra: Sequence[int]) -> int:
    """The kind of a TIFF's channel besides its colours, PREMULTIPLIED or TRANSPARENCY; 0 without any. Raises UserError
    for others, whose meaning is unknown."""
    beside = channels - COLOURS.get(photometric, 1)
    if beside <= 0 or (photometric == 1 and channels == 3):
        return 0
    if beside > 1 or tuple(extra) not in ((PREMULTIPLIED,), (TRANSPARENCY,)):
        raise UserError(
            f"has {channels} channels, of which nothing says that the last is transparency (TIFF's ExtraSamples): "
            "write grey or RGB alone"
        )
    return int(extra[0])


def deep_png(data: bytes) -> NDArray[Any]:
    """A PNG's pixels (height, width, channels), uint16. Raises UserError without imagecodecs, and for one that is
    damaged."""
    if not is_installed("imagecodecs"):
        raise UserError("has colours of 16 bits, which need imagecodecs: pip install 'fewbytes[pictures]'")
    import imagecodecs

    try:
        return np.asarray(imagecodecs.png_decode(data))
    except Exception as error:  # errors of the library
        raise UserError("is a PNG that cannot be read") from error


def deep_tiff(data: bytes) -> NDArray[Any]:
    """The pixels of a TIFF of one page, (height, width) or (height, width, channels), in the file's type; colours that
    are premultiplied by transparency, a last channel, become floats that are not.

    Raises UserError without tifffile, for several pages, for other colours than grey and RGB and other channels beside
    them than transparency, and for what it cannot read.
    """
    if not is_installed("tifffile"):
        raise UserError(
            "is a TIFF of more than 8 bits a colour, which needs tifffile: pip install 'fewbytes[pictures]'"
        )
    import tifffile

    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            pages = [page for page in file.pages if not getattr(page, "is_reduced", False)]
            if len(pages) != 1:
                raise UserError(f"has {len(pages)} pages: give each image a file of its own")
            page: Any = pages[0]
            kind, extra = int(page.photometric), tuple(map(int, page.extrasamples))
            beside = further_channel(kind, int(page.samplesperpixel), extra)
            if kind > 2:
                raise UserError("is in colours of more than 8 bits that are neither grey nor RGB: write it as RGB")
            pixels = np.asarray(page.asarray())
            planar = getattr(page, "planarconfig", 1) == 2
    except UserError:
        raise
    except Exception as error:  # the library raises many types
        raise UserError("is a TIFF that cannot be read") from error
    pixels = pixels.transpose(1, 2, 0) if planar and pixels.ndim == 3 else pixels
    if kind == 0 and not beside and pixels.dtype.kind == "u":  # white is 0
        pixels = np.iinfo(pixels.dtype).max - pixels
    return _divided(pixels) if beside == PREMULTIPLIED else pixels


def _divided(pixels: NDArray[Any]) -> NDArray[np.float64]:
    """Colours divided by their transparency, the last channel; all values in 0..1."""
    ones = pixels / (np.iinfo(pixels.dtype).max if pixels.dtype.kind in "iu" else 1.0)
    alpha = ones[..., -1:]
    return np.concatenate(
        [np.divide(ones[..., :-1], alpha, out=np.zeros_like(ones[..., :-1]), where=alpha > 0), alpha], -1
    )
